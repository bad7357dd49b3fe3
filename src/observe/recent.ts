/** The latest batches and failed attempts of this process, for traces (`perfetto.ts`) and the story of a request. */
import type { Clock } from "../app/clock.ts";
import type { BatchNote } from "../core/task.ts";
import type { Events } from "./events.ts";

/** A minute at 400 batches a second. */
const KEPT_BATCHES = 24_000;
const KEPT_TROUBLES = 10_000;

/** The last `size` values. */
class Ring<Value> {
  readonly #size: number;
  readonly #values: Value[] = [];
  #next = 0;

  constructor(size: number) {
    this.#size = size;
  }

  add(value: Value): void {
    this.#values[this.#next] = value;
    this.#next = (this.#next + 1) % this.#size;
  }

  /** Oldest first. */
  inOrder(): Value[] {
    if (this.#values.length < this.#size) return [...this.#values];
    return [...this.#values.slice(this.#next), ...this.#values.slice(0, this.#next)];
  }
}

export interface RecentBatch {
  readonly model: string;
  readonly note: BatchNote;
  readonly maxBatchSize: number;
  readonly oldestWaitMs: number;
  /** Highest attempt among its tasks; more than 1: it holds tasks that were tried before. */
  readonly attempt: number;
  /** When it went to its worker; the note's instant is that of its claim. */
  readonly startedAt: number;
  /** Tasks that were left waiting, by tier. */
  readonly waiting: readonly number[];
  /** When its worker was free again; 0 while it runs. */
  endedAt: number;
  /** Calls to the worker; 0 while it runs. */
  calls: number;
  overdue: boolean;
}

/** The batches that this process ran. Cost: one object a batch, and its place among those that run. */
export class RecentBatches {
  readonly #ring = new Ring<RecentBatch>(KEPT_BATCHES);
  readonly #running = new Map<string, RecentBatch>();

  /** `waiting`: how many tasks of a model wait now, by tier; asked once for each batch. */
  constructor(events: Events, clock: Clock, waiting: (model: string) => readonly number[]) {
    events.on("batch.started", ({ model, batch, maxBatchSize, oldestWaitMs, tasks }) => {
      let attempt = 1;
      for (const task of tasks) if (task.attempt > attempt) attempt = task.attempt;
      const row = {
        model,
        note: batch,
        maxBatchSize,
        oldestWaitMs,
        attempt,
        startedAt: clock.now(),
        waiting: waiting(model).slice(),
        endedAt: 0,
        calls: 0,
        overdue: false,
      };
      this.#running.set(batch.id, row);
      this.#ring.add(row);
    });
    events.on("batch.overdue", ({ batchId }) => {
      const row = this.#running.get(batchId);
      if (row !== undefined) row.overdue = true;
    });
    events.on("batch.settled", ({ batchId, calls, busyMs }) => {
      const row = this.#running.get(batchId);
      if (row === undefined) return;
      this.#running.delete(batchId);
      row.endedAt = row.startedAt + busyMs;
      row.calls = calls;
    });
  }

  /** Those that ran at some time since `from`, in the order in which they began. */
  since(from: number): RecentBatch[] {
    return this.#ring.inOrder().filter(({ endedAt }) => endedAt === 0 || endedAt >= from);
  }
}

/** A failed attempt of a task. Messages are those of the log: our own words, without an input. */
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

/** Only tasks that had trouble, so that the ring reaches back far. In a fleet the batcher that ran a task hears of it. */
export class Troubles {
  readonly #ring = new Ring<Trouble>(KEPT_TROUBLES);

  constructor(events: Events, clock: Clock) {
    events.on("task.retried", ({ id, attempt, at, message, batchId, worker }) =>
      this.#ring.add({ id, at: clock.now(), attempt, batchId, worker, message, retryAt: at }),
    );
    events.on("task.dead", ({ id, message }) =>
      this.#ring.add({ id, at: clock.now(), attempt: 0, batchId: "", worker: "", message, retryAt: 0 }),
    );
  }

  /** Of one task, oldest first. */
  of(id: string): Trouble[] {
    return this.#ring.inOrder().filter((trouble) => trouble.id === id);
  }
}
