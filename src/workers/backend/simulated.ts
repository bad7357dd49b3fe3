/**
 * Simulated GPU for demos, capacity plans and tests. Output = input. Uses only the given clock, so on a virtual clock a
 * day takes seconds.
 *
 *   service time = (baseMs + n * perItemMs + n * l * perTokenMs) * max(0.3, 1 + jitter * N(0,1)), times slowFactor if
 *                  slow; l: estimated tokens of the longest input, to which a model pads the others
 *
 * Each worker draws faults from its own seeded generator: one draw per batch decides between error (`failed`), hang (no
 * reply until aborted) and short (one output missing, so `unusable`); a second whether it is slow. All but a hang show
 * after the service time.
 *
 * A second batch waits until the first has ended. `handoverMs` is the time from the call until the worker has the batch
 * (process, pipe, encoding). `kill(name)` is a power cut: the running batch fails with blame `batch`; the one behind
 * it, and later ones until it is up again, with `nobody`.
 */
import assert from "node:assert/strict";
import type { Alarm, Clock } from "../../app/clock.ts";
import { Random } from "../../core/random.ts";
import type { Json } from "../../core/task.ts";
import { estimateTokens } from "../../core/weight.ts";
import type { Backend, Batch, Reply, Worker } from "./backend.ts";
import { firstNumbers, freeNumber } from "./child-workers.ts";
import { failed, match, rejected } from "./replies.ts";

export interface SimulatedOptions {
  readonly workers: number;
  /** Worker numbers at the start; default: from 1. */
  readonly numbers?: readonly number[] | undefined;
  readonly baseMs: number;
  readonly perItemMs: number;
  /** 0 by default. */
  readonly perTokenMs?: number;
  /** For plans and benchmarks: the time of a batch without scatter, instead of the three values above. */
  readonly batchMs?: ((rows: number, longest: number, total: number) => number) | undefined;
  /** Faults, for tests and plans; none by default. */
  readonly jitter?: number;
  readonly errorRate?: number;
  readonly hangRate?: number;
  readonly shortRate?: number;
  readonly slowRate?: number;
  /** 10 by default. */
  readonly slowFactor?: number;
  /** The same seed gives the same faults; 1 by default. */
  readonly seed?: number;
  /** 0 by default. */
  readonly handoverMs?: number;
  /** For tests: an input that makes its whole batch `rejected`. */
  readonly reject?: (input: Json) => boolean;
  /** For tests: an input that kills the worker, which comes back at once. */
  readonly crash?: (input: Json) => boolean;
}

/** How long a dead worker takes to fail a batch: a refused connection is not instant. */
const REFUSED_AFTER_MS = 1;
const FASTEST = 0.3;
/** A running batch and one behind it. */
const MAX_HELD = 2;

type Fault = "none" | "error" | "hang" | "short" | "down";

interface Held {
  readonly batch: Batch;
  readonly begun: (() => void) | undefined;
  arrived: boolean;
  alarm: Alarm | undefined;
  finish(reply: Reply): void;
}

export class SimulatedBackend implements Backend {
  readonly #options: SimulatedOptions;
  readonly #clock: Clock;
  readonly #workers: SimulatedWorker[] = [];

  constructor(options: SimulatedOptions, clock: Clock) {
    this.#options = options;
    this.#clock = clock;
    for (const number of options.numbers ?? firstNumbers(options.workers)) this.#add(number);
  }

  get workers(): readonly SimulatedWorker[] {
    return this.#workers;
  }

  grow(): Promise<SimulatedWorker> {
    return Promise.resolve(this.#add(freeNumber("gpu", this.#workers)));
  }

  retire(worker: Worker): Promise<void> {
    const at = this.#workers.findIndex((each) => each === worker);
    if (at >= 0) this.#workers.splice(at, 1)[0]!.kill("stopped", "nobody");
    return Promise.resolve();
  }

  #add(number: number): SimulatedWorker {
    const random = new Random((this.#options.seed ?? 1) + number - 1);
    const worker = new SimulatedWorker(`gpu-${number}`, this.#options, this.#clock, random);
    this.#workers.push(worker);
    return worker;
  }

  start(): Promise<void> {
    for (const worker of this.workers) worker.revive();
    return Promise.resolve();
  }

  stop(): Promise<void> {
    for (const worker of this.workers) worker.kill("stopped", "nobody");
    return Promise.resolve();
  }

  kill(name: string, forMs = Infinity): void {
    this.#worker(name).kill("killed", "batch", forMs);
  }

  revive(name: string): void {
    this.#worker(name).revive();
  }

  #worker(name: string): SimulatedWorker {
    const worker = this.workers.find((worker) => worker.name === name);
    if (worker === undefined) throw new Error(`no simulated worker is called ${name}`);
    return worker;
  }
}

class SimulatedWorker implements Worker {
  readonly name: string;
  readonly #options: SimulatedOptions;
  readonly #clock: Clock;
  readonly #random: Random;
  /** Why and until when it is down; undefined if it never was. */
  #outage: { readonly why: string; readonly until: number } | undefined;
  readonly queues = true;
  readonly #line: Held[] = [];
  #running: Held | undefined;

  constructor(name: string, options: SimulatedOptions, clock: Clock, random: Random) {
    this.name = name;
    this.#options = options;
    this.#clock = clock;
    this.#random = random;
  }

  run(batch: Batch, signal: AbortSignal, begun?: () => void): Promise<Reply> {
    if (signal.aborted) return Promise.resolve(failed("aborted", "nobody"));
    assert(this.#line.length < MAX_HELD, "a worker gets two batches at a time at most");
    return new Promise((resolve) => {
      const abort = (): void => this.#abort(held);
      const held: Held = {
        batch,
        begun,
        arrived: false,
        alarm: undefined,
        finish: (reply) => {
          held.alarm?.cancel();
          signal.removeEventListener("abort", abort);
          this.#line.splice(this.#line.indexOf(held), 1);
          resolve(reply);
          if (this.#running !== held) return;
          this.#running = undefined;
          this.#next();
        },
      };
      this.#line.push(held);
      signal.addEventListener("abort", abort);
      const arrive = (): void => {
        held.arrived = true;
        this.#next();
      };
      const { handoverMs = 0 } = this.#options;
      if (handoverMs === 0) arrive();
      else held.alarm = this.#clock.at(this.#clock.now() + handoverMs, arrive);
    });
  }

  /** Starts the next batch if it has arrived and nothing runs. */
  #next(): void {
    const next = this.#line[0];
    if (this.#running !== undefined || next?.arrived !== true) return;
    this.#running = next;
    const fault = this.downFor === 0 ? this.#drawFault() : "down";
    if (fault !== "down") next.begun?.();
    if (fault === "hang") return;
    const { batch } = next;
    const afterMs = fault === "down" ? REFUSED_AFTER_MS : this.#drawServiceMs(batch);
    next.alarm = this.#clock.at(this.#clock.now() + afterMs, () => {
      const reply = this.#reply(batch, fault);
      if (reply.kind === "failed" && reply.blame === "batch") this.#drop(reply.message);
      next.finish(reply);
    });
  }

  /** Ends both batches, as killing a process would. */
  #abort(held: Held): void {
    this.#drop("worker was interrupted", held);
    const running = this.#running;
    if (running !== held) held.finish(failed("aborted", "nobody"));
    running?.finish(failed(running === held ? "aborted" : "worker was interrupted", "batch"));
  }

  /** Fails batches not begun, except `but`. */
  #drop(why: string, but?: Held): void {
    const held = this.#line.filter((each) => each !== this.#running && each !== but);
    for (const each of held) each.finish(failed(why, "nobody"));
  }

  probe(): Promise<boolean> {
    return Promise.resolve(this.downFor === 0);
  }

  /** Milliseconds until it is up; 0 while it is. */
  get downFor(): number {
    return this.#outage === undefined ? 0 : Math.max(0, this.#outage.until - this.#clock.now());
  }

  /** Down until `revive`, or for `forMs`. */
  kill(why: string, blame: "batch" | "nobody", forMs = Infinity): void {
    this.#outage = { why, until: this.#clock.now() + forMs };
    this.#drop(`worker was ${why}`);
    this.#running?.finish(failed(`worker was ${why}`, blame));
  }

  revive(): void {
    this.#outage = undefined;
  }

  #drawFault(): Fault {
    const { errorRate = 0, hangRate = 0, shortRate = 0 } = this.#options;
    const draw = this.#random.next();
    if (draw < errorRate) return "error";
    if (draw < errorRate + hangRate) return "hang";
    if (draw < errorRate + hangRate + shortRate) return "short";
    return "none";
  }

  #drawServiceMs({ tasks }: Batch): number {
    const { jitter = 0, slowRate = 0, slowFactor = 10 } = this.#options;
    const slow = this.#random.next() < slowRate ? slowFactor : 1;
    const noise = jitter === 0 ? 1 : Math.max(FASTEST, 1 + jitter * this.#random.gaussian());
    return this.#batchMs(tasks) * noise * slow;
  }

  #batchMs(tasks: Batch["tasks"]): number {
    const { baseMs, perItemMs, perTokenMs = 0, batchMs } = this.#options;
    const rows = tasks.length;
    if (perTokenMs === 0 && batchMs === undefined) return baseMs + rows * perItemMs;
    let [longest, total] = [0, 0];
    for (const { input } of tasks) {
      const tokens = estimateTokens(input);
      longest = Math.max(longest, tokens);
      total += tokens;
    }
    return batchMs?.(rows, longest, total) ?? baseMs + rows * (perItemMs + longest * perTokenMs);
  }

  #reply(batch: Batch, fault: Fault): Reply {
    if (fault === "down") return failed(`worker was ${this.#outage?.why ?? "killed"}`, "nobody");
    if (fault === "error") return failed("simulated failure", "worker");
    const { reject, crash } = this.#options;
    if (crash !== undefined && batch.tasks.some((task) => crash(task.input))) {
      return failed("simulated crash", "batch");
    }
    if (reject !== undefined && batch.tasks.some((task) => reject(task.input))) {
      return rejected("simulated rejection");
    }
    const outputs = batch.tasks.map((task) => task.input);
    if (fault === "short") outputs.pop();
    return match(batch, outputs);
  }
}
