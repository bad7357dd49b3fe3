/**
 * A worker as the batchers of a fleet share it: at the other end of a wire, one model, one batch at a time. What a process
 * hands over early waits until that process's batch before it has ended.
 *
 * It answers each input with what it was asked, parameters included, so that whoever gets it can tell whose it is. It
 * also lies (too few outputs, or too many), is slow, hangs, fails, asks for patience, refuses poison, dies of a
 * killer, and is killed. Outputs have no ids: a worker that mixes them up cannot be found out by anybody.
 *
 * At its door it checks what dispatch promises: a batch that is neither empty nor too large or too heavy, each task once, one batch
 * of a process at a time, or two where `pipeline` allows it, and in a fleet only from the process that holds its lease.
 */
import assert from "node:assert/strict";
import type { Batch, Reply, Worker } from "../../src/workers/backend/backend.ts";
import { estimateTokens, inputBytes } from "../../src/core/weight.ts";
import { failed, match, rejected } from "../../src/workers/backend/replies.ts";
import { leaseNames } from "../../src/workers/fleet/orders.ts";
import type { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import type { Host } from "./host.ts";
import type { Ledger } from "./ledger.ts";
import { type Dice, type GpuFaults, MODEL, type Plan } from "./plan.ts";

const WIRE_MS = 0.3;
const FASTEST = 0.3;
const CALM: GpuFaults = { error: 0, hang: 0, short: 0, long: 0, busy: 0, slow: 0, slowFactor: 1 };

/** What a worker says to these inputs. */
export function answerTo(input: string, parameters: string): string {
  return `{"echo":${input},"p":${parameters === "" ? "null" : parameters}}`;
}

interface Running {
  readonly host: Host;
  readonly batch: Batch;
  readonly begun: (() => void) | undefined;
  /** Not merely held. */
  began: boolean;
  end(reply: Reply): void;
}

export class Gpu {
  readonly name: string;
  readonly address: string;
  readonly lease: string;
  readonly #takes: number;
  readonly #plan: Plan;
  readonly #time: VirtualClock;
  readonly #dice: Dice;
  readonly #ledger: Ledger;
  readonly #holder: ((lease: string) => string | undefined) | undefined;
  readonly #running = new Set<Running>();
  #faults: GpuFaults;
  #downUntil = -Infinity;

  /** `holder` says who leases it; left out where nobody does. */
  constructor(
    at: number,
    plan: Plan,
    time: VirtualClock,
    dice: Dice,
    ledger: Ledger,
    holder?: (lease: string) => string | undefined,
  ) {
    this.name = `gpu-${at + 1}`;
    this.address = `http://${this.name}/run`;
    this.lease = leaseNames(MODEL, [this.address])[0]!;
    this.#takes = plan.takes[at]!;
    this.#plan = plan;
    this.#time = time;
    this.#dice = dice;
    this.#ledger = ledger;
    this.#holder = holder;
    this.#faults = plan.gpu;
  }

  get down(): boolean {
    return this.#time.now() < this.#downUntil;
  }

  get idle(): boolean {
    return this.#running.size === 0;
  }

  /** A power cut, for so long. */
  kill(forMs: number): void {
    this.#downUntil = this.#time.now() + forMs;
    const held = [...this.#running];
    this.#running.clear();
    for (const running of held) running.end(this.#lost(running, "worker was killed"));
  }

  heal(): void {
    this.#faults = CALM;
    this.#downUntil = -Infinity;
  }

  /** As one process sees it. */
  asWorker(host: Host): Worker {
    return {
      name: this.name,
      address: this.address,
      ...(this.#takes < Infinity && { maxBatchSize: this.#takes }),
      ...(this.#plan.probes && {
        probe: () =>
          new Promise<boolean>((resolve) => {
            host.deliver(WIRE_MS, () => resolve(!this.down));
          }),
      }),
      queues: this.#plan.queues,
      run: (batch, signal, begun) => this.#call(host, batch, signal, this.#plan.queues ? begun : undefined),
    };
  }

  /** One that queues by contract says so of what it never began. */
  #lost({ began }: Running, message: string): Reply {
    return failed(message, began || !this.#plan.queues ? "batch" : "nobody");
  }

  #call(host: Host, batch: Batch, signal: AbortSignal, begun?: () => void): Promise<Reply> {
    if (signal.aborted) return Promise.resolve(failed("aborted", "nobody"));
    const { promise, resolve } = Promise.withResolvers<Reply>();
    let over = false;
    const finish = (reply: Reply): void => {
      over = true;
      signal.removeEventListener("abort", abort);
      this.#leave(running);
      resolve(reply);
    };
    const running: Running = {
      host,
      batch,
      began: false,
      begun: begun && (() => host.deliver(WIRE_MS, () => over || begun())),
      end: (reply) => {
        this.#leave(running);
        host.deliver(WIRE_MS, () => over || finish(reply));
      },
    };
    // The connection is destroyed, and with it whatever would have come back.
    const abort = (): void => finish(this.#lost(running, "aborted"));
    signal.addEventListener("abort", abort);
    this.#time.at(this.#time.now() + WIRE_MS, () => {
      if (over || !host.alive) return;
      if (this.down) return running.end(failed("connection refused", "nobody"));
      this.#take(running);
    });
    return promise;
  }

  #take(running: Running): void {
    this.#check(running);
    const { batch, host } = running;
    this.#ledger.sent(this.name, host.name, batch);
    this.#running.add(running);
    host.onDeath.add(() => this.#running.delete(running));
    if (this.#of(host).length === 1) return this.#begin(running);
    this.#ledger.count("batch handed over early");
  }

  #of(host: Host): Running[] {
    return [...this.#running].filter((running) => running.host === host);
  }

  /** It is done with this one, and begins with the next of the same process. */
  #leave(running: Running): void {
    if (!this.#running.delete(running)) return;
    const [next] = this.#of(running.host);
    if (next !== undefined && !next.began) this.#begin(next);
  }

  #begin(running: Running): void {
    const { batch } = running;
    running.began = true;
    running.begun?.();
    const fault = this.#draw();
    if (fault !== "well") this.#ledger.count(`worker ${fault}`);
    if (fault === "hang") return;
    const afterMs = fault === "busy" ? 0 : this.#serviceMs(batch);
    this.#time.at(this.#time.now() + afterMs, () => {
      if (!this.#running.has(running)) return;
      const reply = this.#reply(batch, fault);
      if (reply.kind === "failed" && reply.blame === "batch") {
        for (const held of this.#of(running.host))
          if (held !== running) held.end(this.#lost(held, reply.message));
      }
      running.end(reply);
    });
  }

  #check({ host, batch }: Running): void {
    const { tasks } = batch;
    const { limits, maxBatchTokens = Infinity, maxBatchBytes = Infinity } = this.#plan.rules;
    const most = Math.min(limits.maxBatchSize, this.#takes);
    assert.ok(tasks.length >= 1 && tasks.length <= most, `a batch of ${tasks.length} to ${this.name}`);
    const weigh = (weight: (input: string) => number): number =>
      tasks.reduce((sum, { input }) => sum + weight(input), 0);
    const light = weigh(estimateTokens) <= maxBatchTokens && weigh(inputBytes) <= maxBatchBytes;
    assert.ok(light || tasks.length === 1, `a batch of ${tasks.length} to ${this.name} is over its budget`);
    const ids = new Set(tasks.map(({ id }) => id));
    assert.equal(ids.size, tasks.length, `${this.name} got a task twice in one batch`);
    const { pipeline } = this.#plan.rules;
    const mayHold = pipeline === 2 || (pipeline === "auto" && this.#plan.queues) ? 2 : 1;
    const count = this.#of(host).length + 1;
    assert.ok(count <= mayHold, `${this.name} got ${count} batches at once from ${host.name}`);
    if (this.#holder === undefined) return;
    const holder = this.#holder(this.lease);
    const who = `${host.name} started a batch on ${this.name}, which ${holder ?? "nobody"} holds`;
    if (holder !== host.name) this.#ledger.trespassed(who, holder === undefined);
    const others = this.#running.size > this.#of(host).length;
    if (others) this.#ledger.count("worker shared with one who lost it");
  }

  #draw(): "well" | "error" | "hang" | "short" | "long" | "busy" {
    const { error, hang, short, long, busy } = this.#faults;
    let roll = this.#dice.share();
    if ((roll -= error) < 0) return "error";
    if ((roll -= hang) < 0) return "hang";
    if ((roll -= short) < 0) return "short";
    if ((roll -= long) < 0) return "long";
    return roll - busy < 0 ? "busy" : "well";
  }

  #serviceMs({ tasks }: Batch): number {
    const { baseMs, perTaskMs, jitter } = this.#plan;
    const slow = this.#dice.chance(this.#faults.slow);
    if (slow) this.#ledger.count("worker slow");
    const noise = jitter === 0 ? 1 : Math.max(FASTEST, 1 + jitter * this.#dice.gaussian());
    return (
      (baseMs + tasks.length * perTaskMs + this.#tokensMs(tasks)) *
      noise *
      (slow ? this.#faults.slowFactor : 1)
    );
  }

  #tokensMs(tasks: Batch["tasks"]): number {
    const { shape } = this.#plan;
    if (shape === undefined || shape.kind === "rows") return 0;
    const lengths = tasks.map(({ input }) => estimateTokens(input));
    const total = lengths.reduce((sum, length) => sum + length, 0);
    return shape.perTokenMs * (shape.kind === "packed" ? total : tasks.length * Math.max(...lengths));
  }

  #reply({ tasks, parameters }: Batch, fault: string): Reply {
    const batch = { id: "", tasks, parameters };
    if (fault === "error") return failed("the worker failed", "worker");
    if (fault === "busy") return { kind: "busy", message: "later", retryAfterMs: 20 + this.#dice.upTo(200) };
    if (tasks.some(({ input }) => input.includes("killer"))) {
      this.#ledger.count("worker killed by an input");
      return failed("the worker died", "batch");
    }
    if (tasks.some(({ input }) => input.includes("poison"))) return rejected("poison");
    const outputs = tasks.map(({ input }) => answerTo(input, parameters));
    if (fault === "short") outputs.splice(this.#dice.upTo(outputs.length), 1);
    if (fault === "long") outputs.push(outputs[0]!);
    return match(batch, outputs);
  }
}
