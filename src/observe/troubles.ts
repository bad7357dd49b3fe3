/**
 * What went wrong with tasks on their way: the latest failed attempts, for the story of a request.
 *
 * Only tasks that had trouble are here, so that the ring reaches back far. In a fleet it is the batcher that ran a
 * task which hears of it. Messages are those of the log: our own words, without an input.
 */
import type { Clock } from "../app/clock.ts";
import type { Events } from "./events.ts";

export interface Trouble {
  readonly id: string;
  readonly at: number;
  /** First is 1; an attempt that cost nothing (the worker could not be reached) has the number before it. */
  readonly attempt: number;
  /** "" where it is not known. */
  readonly batchId: string;
  readonly worker: string;
  readonly message: string;
  /** When it is tried again; 0: never, it is a dead letter. */
  readonly retryAt: number;
}

const KEPT = 10_000;

export class Troubles {
  readonly #ring: Trouble[] = [];
  #next = 0;

  constructor(events: Events, clock: Clock) {
    events.on("task.retried", ({ id, attempt, at, message, batchId, worker }) =>
      this.#add({ id, at: clock.now(), attempt, batchId, worker, message, retryAt: at }),
    );
    events.on("task.dead", ({ id, message }) =>
      this.#add({ id, at: clock.now(), attempt: 0, batchId: "", worker: "", message, retryAt: 0 }),
    );
  }

  /** Of one task, oldest first. */
  of(id: string): Trouble[] {
    const [older, newer] = [this.#ring.slice(this.#next), this.#ring.slice(0, this.#next)];
    return [...older, ...newer].filter((trouble) => trouble.id === id);
  }

  #add(trouble: Trouble): void {
    if (this.#ring.length < KEPT) return void this.#ring.push(trouble);
    this.#ring[this.#next] = trouble;
    this.#next = (this.#next + 1) % KEPT;
  }
}
