/**
 * The batches of the last minute that this process ran, in a ring: what `perfetto.ts` draws.
 *
 * Cost: one object a batch, and its place among those that run.
 */
import type { Clock } from "../app/clock.ts";
import type { BatchNote } from "../core/task.ts";
import type { Events } from "./events.ts";

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

/** A minute at 400 batches a second. */
const KEPT = 24_000;

export class RecentBatches {
  readonly #ring: RecentBatch[] = [];
  readonly #running = new Map<string, RecentBatch>();
  #next = 0;

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
      this.#add(row);
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
    const inOrder = [...this.#ring.slice(this.#next), ...this.#ring.slice(0, this.#next)];
    return inOrder.filter(({ endedAt }) => endedAt === 0 || endedAt >= from);
  }

  #add(row: RecentBatch): void {
    if (this.#ring.length < KEPT) return void this.#ring.push(row);
    this.#ring[this.#next] = row;
    this.#next = (this.#next + 1) % KEPT;
  }
}
