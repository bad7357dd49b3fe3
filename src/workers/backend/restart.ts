/**
 * A worker whose child may die: one child (a process or a thread) after another under one name.
 *
 *   starting ──► ready ──► gone ──► wait ──► starting …        stop() leads out from everywhere
 *
 * The wait is 100 ms and doubles with each death to 30 s; a batch that was answered resets it. An abort
 * kills the child, because code in the middle of a batch cannot be interrupted, and starts the next one
 * without a wait: its end was our doing. While no child is ready, `run` says so at once instead of
 * holding the batch, so that another worker can have it; `probe` resolves when the next child is ready.
 *
 * A child may be handed a second batch while it runs one. It says when it begins with one; when it dies, only the first,
 * and what it has begun with, are to blame. An abort of either ends both.
 *
 * Every child gets its own pipes and is forgotten when it ends, so nothing that it still says can reach a
 * later batch.
 */
import assert from "node:assert/strict";
import type { Alarm, Clock } from "../../app/clock.ts";
import type { Events } from "../../observe/events.ts";
import type { Batch, Reply, Worker } from "./backend.ts";
import { failed } from "./match.ts";

/** Who wants to know what becomes of a batch. */
export interface Ear {
  /** The child's code is about to see it; called once at most. */
  begun(): void;
  /** Called once, or never if the child ends first. */
  answer(reply: Reply): void;
}

/** One life of a worker. */
export interface Child {
  /** Resolves when it can take a batch; rejects with a one-line Error when it never will. */
  readonly ready: Promise<void>;
  /** Resolves once it has ended, with how in words ("was killed by SIGSEGV"). Never rejects. */
  readonly gone: Promise<string>;
  /** What its own code said as it died; known once it is gone. May quote an input, so it is never logged. */
  readonly lastWords?: string | undefined;
  /** Hands it a batch, perhaps while it has one: it runs them one after the other and answers in their order. */
  run(batch: Batch, ear: Ear): void;
  /** Asks it to end after what it is doing. */
  close(): void;
  /** Ends it now. */
  kill(): void;
}

/** Where a worker lives. */
export interface Surroundings {
  /** The model's name, for events. */
  readonly model: string;
  readonly clock: Clock;
  readonly events: Events;
}

export const FIRST_WAIT_MS = 100;
export const MAX_WAIT_MS = 30_000;
/** How long `stop` waits for a child to end by itself. */
export const CLOSE_MS = 1_000;

/** One that it runs, and one that is there when that is done. */
const MAX_HELD = 2;

/** A batch in the child's hands. */
interface Held {
  /** The child's code has seen it. */
  begun: boolean;
  readonly finish: (reply: Reply) => void;
}

export class RestartingWorker implements Worker {
  readonly name: string;
  readonly queues = true;
  readonly #spawn: () => Child;
  readonly #startTimeoutMs: number;
  readonly #around: Surroundings;
  /** The child that can take a batch; undefined while there is none. */
  #ready: Child | undefined;
  /** The child that lives, ready or not. */
  #child: Child | undefined;
  /** What is in the child's hands, in the order in which it came there. */
  readonly #held: Held[] = [];
  /** Those that wait in `probe`; bounded by the dispatcher, which asks once at a time. */
  readonly #probes = new Set<(well: boolean) => void>();
  #waitMs = FIRST_WAIT_MS;
  #nextStartAt = 0;
  #endWait: (() => void) | undefined;
  /** The child was killed by an abort, so the next one need not wait. */
  #aborted = false;
  #stopped = false;
  #life: Promise<void> | undefined;

  constructor(name: string, spawn: () => Child, startTimeoutMs: number, around: Surroundings) {
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

  run(batch: Batch, signal: AbortSignal, begun?: () => void): Promise<Reply> {
    if (signal.aborted) return Promise.resolve(failed("aborted", "nobody"));
    const child = this.#ready;
    if (child === undefined) return Promise.resolve(failed(this.#whyNot(), "nobody"));
    assert(this.#held.length < MAX_HELD, "a worker runs one batch and holds one more at most");
    return new Promise((resolve) => {
      const abort = (): void => this.#abort(child, held);
      const held: Held = {
        begun: false,
        finish: (reply) => {
          // A child that was killed may still have had an answer on its way.
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
        begun: () => {
          if (held.begun || !this.#held.includes(held)) return;
          held.begun = true;
          begun?.();
        },
        answer: held.finish,
      });
    });
  }

  /** Code in the middle of a batch cannot be interrupted, so the child ends, and the other batch in its hands too. */
  #abort(child: Child, aborted: Held): void {
    this.#ready = undefined;
    this.#aborted = true;
    child.kill();
    const other = `${this.name} was ended because its other batch was aborted`;
    for (const [held, blame] of this.#blames())
      held.finish(failed(held === aborted ? "aborted" : other, blame));
  }

  /**
   * All that is in the child's hands, and who is to blame for its end. What it never began with cannot have killed it,
   * unless nothing was before it: a child may die of reading its inputs, and whoever is never blamed is tried for ever.
   */
  #blames(): (readonly [Held, "batch" | "nobody"])[] {
    return this.#held.map((held, at) => [held, at === 0 || held.begun ? "batch" : "nobody"]);
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
    return leftMs > 0
      ? `${this.name} is restarting, next try in ${leftMs} ms`
      : `${this.name} is restarting, it is not ready yet`;
  }

  /** One child after another. Ends when stopped, or when the first child never gets ready. */
  async #live(started: () => void, neverStarted: (error: Error) => void): Promise<void> {
    for (let first = true; ; first = false) {
      const child = this.#born();
      this.#child = child;
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
      for (const [held, blame] of this.#blames()) held.finish(this.#death(child, how, blame));
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

  /** Starting one can fail on the spot (no memory, no file descriptors); that is a death like any other. */
  #born(): Child {
    try {
      return this.#spawn();
    } catch (error) {
      const nothing = (): void => {};
      return {
        ready: Promise.reject(error),
        gone: Promise.resolve("could not be started"),
        run: nothing,
        close: nothing,
        kill: nothing,
      };
    }
  }

  /** Waits until the child is ready and says what went wrong if it will not be. */
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
