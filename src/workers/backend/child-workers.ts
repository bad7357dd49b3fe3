/**
 * Workers started by this process, each a child (process or thread) that is replaced under the same name when it dies.
 *
 *   starting ──► ready ──► gone ──► wait ──► starting …        stop() leads out from everywhere
 *
 * The wait is 100 ms and doubles with each death up to 30 s; an answered batch resets it. An abort kills the child,
 * because code inside a batch cannot be interrupted; the next starts without a wait. While no child is ready, `run`
 * fails at once, so that another worker can take the batch; `probe` resolves when the next child is ready.
 *
 * A child may hold a second batch while it runs one, and reports when it begins one. When it dies, only the first batch
 * and those begun are to blame. Aborting either ends both. Every child has its own pipes and is dropped when it ends,
 * so late output cannot reach a later batch.
 */
import assert from "node:assert/strict";
import type { Readable } from "node:stream";
import { StringDecoder } from "node:string_decoder";
import type { Alarm, Clock } from "../../app/clock.ts";
import type { Events } from "../../observe/events.ts";
import type { Backend, Batch, Reply, Worker } from "./backend.ts";
import { failed } from "./replies.ts";

export interface BatchListener {
  /** The child's code began with it so long ago; called at most once. */
  begun(agoMs?: number): void;
  /** Called once, or never if the child ends first. */
  answer(reply: Reply): void;
}

export interface Child {
  /** Resolves when it can take a batch; rejects with a one-line Error when it never will. */
  readonly ready: Promise<void>;
  /** Resolves once it has ended, with how ("was killed by SIGSEGV"). Never rejects. */
  readonly gone: Promise<string>;
  /** Message of the error that ended it; set once it is gone. May quote an input, so it is never logged. */
  readonly lastWords?: string | undefined;
  /** Hands it a batch, perhaps a second one: it runs and answers them in order. */
  run(batch: Batch, listener: BatchListener): void;
  /** Asks it to exit after its current work. */
  close(): void;
  kill(): void;
}

export interface ChildAround {
  readonly model: string;
  readonly clock: Clock;
  readonly events: Events;
}

interface ChildKind {
  /** Prefix of worker names: `python-1`, … */
  readonly kind: string;
  readonly numbers: readonly number[];
  readonly startTimeoutMs: number;
  spawn(name: string, number: number): Child;
}

const FIRST_WAIT_MS = 100;
const MAX_WAIT_MS = 30_000;
/** How long `stop` waits for a child to exit. */
const CLOSE_MS = 1_000;
/** A running batch and one behind it. */
const MAX_HELD = 2;

export class ChildBackend implements Backend {
  readonly #kind: ChildKind;
  readonly #around: ChildAround;
  readonly #workers: ChildWorker[] = [];
  /** Includes starting and stopping workers: their names are taken. */
  readonly #named = new Set<ChildWorker>();
  #stopped = false;

  constructor(kind: ChildKind, around: ChildAround) {
    this.#kind = kind;
    this.#around = around;
    for (const number of kind.numbers) this.#workers.push(this.#make(number));
  }

  get workers(): readonly ChildWorker[] {
    return this.#workers;
  }

  /** Starts all at once; when one fails, stops the others and rejects with its error. */
  async start(): Promise<void> {
    try {
      await Promise.all(this.#workers.map((worker) => worker.start()));
    } catch (error) {
      await this.stop();
      throw error;
    }
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    await Promise.all([...this.#named].map((worker) => worker.stop()));
  }

  async grow(): Promise<ChildWorker> {
    if (this.#stopped) throw new Error(`no ${this.#kind.kind} worker can be added: the model is stopped`);
    const worker = this.#make(freeNumber(this.#kind.kind, [...this.#named]));
    try {
      await worker.start();
    } catch (error) {
      this.#named.delete(worker);
      throw error;
    }
    this.#workers.push(worker);
    return worker;
  }

  async retire(worker: Worker): Promise<void> {
    const at = this.#workers.findIndex((each) => each === worker);
    if (at < 0) return;
    const [retired] = this.#workers.splice(at, 1);
    await retired!.stop();
    this.#named.delete(retired!);
  }

  #make(number: number): ChildWorker {
    const { kind, startTimeoutMs } = this.#kind;
    const name = `${kind}-${number}`;
    const spawn = (): Child => this.#kind.spawn(name, number);
    const worker = new ChildWorker(name, spawn, startTimeoutMs, this.#around);
    this.#named.add(worker);
    return worker;
  }
}

/** The lowest unused number; numbers of stopped workers are reused. */
export function freeNumber(kind: string, workers: readonly { readonly name: string }[]): number {
  const taken = new Set(workers.map(({ name }) => name));
  for (let number = 1; ; number++) if (!taken.has(`${kind}-${number}`)) return number;
}

export function firstNumbers(count: number): number[] {
  return Array.from({ length: count }, (_, at) => at + 1);
}

interface Held {
  begun: boolean;
  readonly finish: (reply: Reply) => void;
}

export class ChildWorker implements Worker {
  readonly name: string;
  readonly queues = true;
  readonly #spawn: () => Child;
  readonly #startTimeoutMs: number;
  readonly #around: ChildAround;
  /** Can take a batch. */
  #ready: Child | undefined;
  /** The live child, ready or not. */
  #child: Child | undefined;
  /** In handover order. */
  readonly #held: Held[] = [];
  /** Pending `probe` calls; the dispatcher makes one at a time. */
  readonly #probes = new Set<(well: boolean) => void>();
  #waitMs = FIRST_WAIT_MS;
  #nextStartAt = 0;
  #endWait: (() => void) | undefined;
  /** Killed by an abort: the next child starts without a wait. */
  #aborted = false;
  #stopped = false;
  #life: Promise<void> | undefined;

  constructor(name: string, spawn: () => Child, startTimeoutMs: number, around: ChildAround) {
    this.name = name;
    this.#spawn = spawn;
    this.#startTimeoutMs = startTimeoutMs;
    this.#around = around;
  }

  /** Resolves when the first child is ready; rejects, with no child left, when it will not be. */
  start(): Promise<void> {
    assert(this.#life === undefined, "a worker starts once");
    const { promise, resolve, reject } = Promise.withResolvers<void>();
    this.#life = this.#live(resolve, reject);
    return promise;
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    this.#ready = undefined;
    this.#endWait?.();
    const { clock } = this.#around;
    const child = this.#child;
    child?.close();
    const alarm = clock.at(clock.now() + CLOSE_MS, () => child?.kill());
    await this.#life;
    alarm.cancel();
    for (const probe of this.#probes) probe(false);
  }

  run(batch: Batch, signal: AbortSignal, begun?: (agoMs?: number) => void): Promise<Reply> {
    if (signal.aborted) return Promise.resolve(failed("aborted", "nobody"));
    const child = this.#ready;
    if (child === undefined) return Promise.resolve(failed(this.#whyNot(), "nobody"));
    assert(this.#held.length < MAX_HELD, "a worker runs one batch and holds one more at most");
    return new Promise((resolve) => {
      const abort = (): void => this.#abort(child, held);
      const held: Held = {
        begun: false,
        finish: (reply) => {
          // A killed child may still have had a reply on its way.
          const at = this.#held.indexOf(held);
          if (at < 0) return;
          this.#held.splice(at, 1);
          signal.removeEventListener("abort", abort);
          if (reply.kind === "answered") this.#waitMs = FIRST_WAIT_MS;
          resolve(reply);
        },
      };
      this.#held.push(held);
      signal.addEventListener("abort", abort);
      child.run(batch, {
        begun: (agoMs) => {
          if (held.begun || !this.#held.includes(held)) return;
          held.begun = true;
          begun?.(agoMs);
        },
        answer: held.finish,
      });
    });
  }

  /** Ends the child, and with it the other batch that it has. */
  #abort(child: Child, aborted: Held): void {
    this.#ready = undefined;
    this.#aborted = true;
    child.kill();
    const other = `${this.name} was ended because its other batch was aborted`;
    this.#finishHeld((held, blame) => failed(held === aborted ? "aborted" : other, blame));
  }

  /**
   * A batch never begun cannot have killed the child, unless it was first in line: a child may die of reading its
   * inputs, and a batch that is never blamed would be retried forever.
   */
  #finishHeld(reply: (held: Held, blame: "batch" | "nobody") => Reply): void {
    const blames = this.#held.map((held, at) => (at === 0 || held.begun ? "batch" : "nobody"));
    for (const [at, held] of [...this.#held].entries()) held.finish(reply(held, blames[at]!));
  }

  /** True as soon as a child is ready; false when `signal` aborts or the worker stops first. */
  probe(signal: AbortSignal): Promise<boolean> {
    if (this.#ready !== undefined) return Promise.resolve(true);
    if (this.#stopped || signal.aborted) return Promise.resolve(false);
    return new Promise((resolve) => {
      const abort = (): void => settle(false);
      const settle = (well: boolean): void => {
        this.#probes.delete(settle);
        signal.removeEventListener("abort", abort);
        resolve(well);
      };
      this.#probes.add(settle);
      signal.addEventListener("abort", abort);
    });
  }

  #whyNot(): string {
    if (this.#stopped) return `${this.name} was stopped`;
    const leftMs = Math.ceil(this.#nextStartAt - this.#around.clock.now());
    const when = leftMs > 0 ? `next try in ${leftMs} ms` : "it is not ready yet";
    return `${this.name} is restarting, ${when}`;
  }

  /** One child after another. Ends when stopped, or when the first child never gets ready. */
  async #live(started: () => void, neverStarted: (error: Error) => void): Promise<void> {
    for (let first = true; ; first = false) {
      const child = (this.#child = this.#start());
      const flaw = await this.#load(child);
      if (flaw === undefined && !this.#stopped) {
        this.#ready = child;
        if (first) started();
        else this.#notice("info", "is ready again");
        for (const probe of this.#probes) probe(true);
      } else child.kill();
      const how = await child.gone;
      this.#ready = undefined;
      this.#child = undefined;
      this.#finishHeld((_, blame) => this.#death(child, how, blame));
      if (this.#stopped || (first && flaw !== undefined)) {
        neverStarted(flaw ?? new Error(`${this.name} was stopped`));
        return;
      }
      await this.#wait(flaw === undefined ? how : `cannot start: ${flaw.message}`);
      if (this.#stopped) return;
    }
  }

  #death({ lastWords }: Child, how: string, blame: "batch" | "nobody"): Reply {
    if (this.#stopped) return failed(`${this.name} was stopped`, "nobody");
    const brief = `${this.name} ${how}`;
    return lastWords === undefined ? failed(brief, blame) : failed(`${brief}: ${lastWords}`, blame, brief);
  }

  /** Starting can throw (memory, file descriptors); treated as a death. */
  #start(): Child {
    try {
      return this.#spawn();
    } catch (error) {
      const nothing = (): void => {};
      const gone = Promise.resolve("could not be started");
      return { ready: Promise.reject(error), gone, run: nothing, close: nothing, kill: nothing };
    }
  }

  /** Undefined once the child is ready, else why it will not be. */
  async #load(child: Child): Promise<Error | undefined> {
    const { clock } = this.#around;
    let alarm: Alarm | undefined;
    const late = new Promise<Error>((resolve) => {
      alarm = clock.at(clock.now() + this.#startTimeoutMs, () => {
        const within = `${this.#startTimeoutMs} ms`;
        resolve(new Error(`${this.name} was not ready within ${within}; raise backend.startTimeoutMs`));
      });
    });
    const loaded = child.ready.then(
      () => undefined,
      (error: Error) => error,
    );
    const flaw = await Promise.race([loaded, late]);
    alarm?.cancel();
    return flaw;
  }

  async #wait(how: string): Promise<void> {
    if (this.#aborted) {
      this.#aborted = false;
      this.#notice("warn", "was ended because its batch was aborted; restarting");
      return;
    }
    const { clock } = this.#around;
    const waitMs = this.#waitMs;
    this.#waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
    this.#nextStartAt = clock.now() + waitMs;
    const { promise, resolve } = Promise.withResolvers<void>();
    this.#endWait = resolve;
    const alarm = clock.at(this.#nextStartAt, resolve);
    this.#notice("warn", `${how}; restarting in ${waitMs} ms`);
    await promise;
    alarm.cancel();
    this.#endWait = undefined;
  }

  #notice(level: "info" | "warn", what: string): void {
    const { model, events } = this.#around;
    events.emit("notice", { level, message: `${model}: ${this.name} ${what}` });
  }
}

/** Longer lines are split. */
export const MAX_LINE_CHARS = 8_192;

/** Publishes printed lines as `worker.printed`. Reads to the end, so that the worker never blocks on a full pipe. */
export function printLines(
  stream: Readable,
  name: "stdout" | "stderr",
  worker: string,
  { model, events }: ChildAround,
): void {
  const decoder = new StringDecoder("utf8");
  let rest = "";
  const print = (line: string): void =>
    events.emit("worker.printed", { model, worker, stream: name, line: line.replace(/\r$/, "") });
  const cut = (line: string): string => {
    for (; line.length > MAX_LINE_CHARS; line = line.slice(MAX_LINE_CHARS))
      print(line.slice(0, MAX_LINE_CHARS));
    return line;
  };
  stream.on("data", (chunk: Buffer) => {
    const lines = (rest + decoder.write(chunk)).split("\n");
    const last = lines.pop()!;
    for (const line of lines) print(cut(line));
    rest = cut(last);
  });
  stream.on("end", () => {
    rest += decoder.end();
    if (rest !== "") print(rest);
  });
  // A broken pipe means that the worker is gone, which is noticed elsewhere.
  stream.on("error", () => {});
}
