/** Latest batches and failed attempts of this process, for traces (`perfetto.ts`) and request histories. */
import type { Clock } from "../app/clock.ts";
import type { BatchShape } from "../core/cost.ts";
import type { BatchNote } from "../core/task.ts";
import type { Events } from "./events.ts";

/** A minute at 400 batches a second. */
const KEPT_BATCHES = 24_000;
const KEPT_TROUBLES = 10_000;

/** Overwrites its oldest value. */
class Ring<Value> {
  readonly #size: number;
  readonly #values: Value[] = [];
  #next = 0;

  constructor(size: number) {
    this.#size = size;
  }

  /** The value that the next `add` replaces, once the ring is full. */
  get oldest(): Value | undefined {
    return this.#values[this.#next];
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
  /** Highest attempt among its tasks; above 1: contains retries. */
  readonly attempt: number;
  /** When it was sent to its worker; the note's instant is the claim. */
  readonly startedAt: number;
  /** Tasks still waiting, by tier. */
  readonly waiting: readonly number[];
  /** When its worker was free again; 0 while running. */
  readonly endedAt: number;
  /** Worker calls; 0 while running. */
  readonly calls: number;
  readonly overdue: boolean;
  /** Only of measured batches that have ended. */
  readonly shape: BatchShape | undefined;
}

class BatchEntry implements RecentBatch {
  model = "";
  note: BatchNote;
  maxBatchSize = 0;
  oldestWaitMs = 0;
  attempt = 1;
  startedAt = 0;
  readonly waiting: number[] = [];
  endedAt = 0;
  calls = 0;
  overdue = false;
  shape: BatchShape | undefined;

  constructor(note: BatchNote) {
    this.note = note;
  }
}

/**
 * Batches run by this process. Entries are overwritten in place: new ones would each survive two collections, only to
 * die in the old generation.
 */
export class RecentBatches {
  readonly #ring = new Ring<BatchEntry>(KEPT_BATCHES);
  readonly #running = new Map<string, BatchEntry>();

  /** `waiting`: waiting tasks of a model by tier; called once per batch. */
  constructor(events: Events, clock: Clock, waiting: (model: string) => readonly number[]) {
    events.on("batch.started", ({ model, batch, maxBatchSize, oldestWaitMs, tasks }) => {
      const entry = this.#next(batch);
      entry.model = model;
      entry.maxBatchSize = maxBatchSize;
      entry.oldestWaitMs = oldestWaitMs;
      entry.attempt = 1;
      for (const task of tasks) if (task.attempt > entry.attempt) entry.attempt = task.attempt;
      entry.startedAt = clock.now();
      const depths = waiting(model);
      entry.waiting.length = depths.length;
      for (let tier = 0; tier < depths.length; tier++) entry.waiting[tier] = depths[tier]!;
      entry.endedAt = 0;
      entry.calls = 0;
      entry.overdue = false;
      entry.shape = undefined;
    });
    events.on("batch.overdue", ({ batchId }) => {
      const entry = this.#running.get(batchId);
      if (entry !== undefined) entry.overdue = true;
    });
    events.on("batch.settled", ({ batchId, calls, busyMs, shape }) => {
      const entry = this.#running.get(batchId);
      if (entry === undefined) return;
      this.#running.delete(batchId);
      entry.endedAt = entry.startedAt + busyMs;
      entry.calls = calls;
      entry.shape = shape;
    });
  }

  /** Copies of the batches that ran at some time since `from`, by start. */
  since(from: number): RecentBatch[] {
    return this.#ring
      .inOrder()
      .filter(({ endedAt }) => endedAt === 0 || endedAt >= from)
      .map((entry) => Object.assign({}, entry, { waiting: entry.waiting.slice() }));
  }

  #next(note: BatchNote): BatchEntry {
    const entry = this.#ring.oldest ?? new BatchEntry(note);
    if (entry.endedAt === 0) this.#running.delete(entry.note.id);
    entry.note = note;
    this.#running.set(note.id, entry);
    this.#ring.add(entry);
    return entry;
  }
}

/** A failed attempt. Messages are our own, without inputs, as in the log. */
export interface Trouble {
  readonly id: string;
  readonly at: number;
  /** From 1; a free attempt (worker unreachable) has the number of the one before. */
  readonly attempt: number;
  /** "" when unknown. */
  readonly batchId: string;
  readonly worker: string;
  readonly message: string;
  /** When it is retried; 0: never, it is a dead letter. */
  readonly retryAt: number;
}

/**
 * Only tasks with failures, so the ring reaches far back. In a fleet only the batcher that ran a task has its failures.
 */
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

  of(id: string): Trouble[] {
    return this.#ring.inOrder().filter((trouble) => trouble.id === id);
  }
}
