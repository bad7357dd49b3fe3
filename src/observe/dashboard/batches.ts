/**
 * Recent batches of one model, and the worker time they used.
 *
 * `began` and `ended` follow this process's batches. A gateway runs none: `seen` derives other processes' batches from
 * the ends of tasks that came through here, so a batch whose tasks all came through other gateways, or all failed, is
 * missed.
 *
 * A running batch is accounted up to the end of each second (`account`), so a hanging one shows as busy. Worker time =
 * `filled` (occupied places; of a padded model, useful cells) + `empty` (the other places; padding). At most `maxRows` are kept; at most a quarter as many changed ones are listed
 * per frame, the rest counted.
 */
import type { BatchShape } from "../../core/cost.ts";
import { type BatchNote, DISPATCH_REASONS } from "../../core/task.ts";
import type { BatchedTask, EventFields } from "../events.ts";
import { type BatchRow, FILL_STEPS } from "./frames.ts";
import { COLUMN, type SlotRing } from "./slots.ts";
import type { WorkerBook } from "./workers.ts";

const SHOWN_MS = 60_000;
/** The longest span that lanes draw; older rows dropped from a frame do not count as missing. */
const DRAWN_MS = 6000;
/** The columns are in the order of `DISPATCH_REASONS`. */
const FIRST_REASON = COLUMN.full;

/** Overwritten in place: a new one per batch would survive two collections, only to die in the old generation. */
class Row {
  id = "";
  worker = "";
  startedAt = 0;
  endedAt = 0;
  size = 0;
  reason = 0;
  oldestWaitMs = 0;
  calls = 0;
  attempt = 1;
  /** Tasks by tier; empty for a batch of another process. */
  readonly tiers: number[] = [];
  shape: BatchShape | undefined;
  why = "";
  countedTo = 0;
  listed = false;

  onWire(): BatchRow {
    const { id, worker, startedAt, endedAt, size, reason, oldestWaitMs, calls, attempt, tiers } = this;
    const { shape, why } = this;
    return [
      id,
      worker,
      Math.round(startedAt),
      Math.round(endedAt),
      size,
      reason,
      Math.round(oldestWaitMs),
      calls,
      attempt,
      tiers.join("/"),
      shape === undefined ? "" : `${shape.longest}/${shape.total}/${shape.inOrder}`,
      why,
    ];
  }
}

type Ending = Pick<EventFields["batch.settled"], "batchId" | "calls" | "busyMs" | "shape" | "savedMs">;

export interface Shown {
  readonly rows: BatchRow[];
  readonly leftOut: number;
}

export class BatchBook {
  readonly #maxBatchSize: number;
  readonly #tiers: number;
  readonly #maxRows: number;
  readonly #slots: SlotRing;
  readonly #workers: WorkerBook;
  /** A ring; `#next` is the next index. */
  readonly #rows: Row[] = [];
  #next = 0;
  /** Running ones, and ended ones too where `seen` must recognise them. */
  readonly #byId = new Map<string, Row>();
  readonly #derives: boolean;
  /** Useful share of the cells of the last measured batch, used for the running ones; undefined: not padded. */
  #useful: number | undefined;
  #changed: Row[] = [];
  #changedMore = 0;

  /** `derives`: whether `seen` is called. */
  constructor(
    maxBatchSize: number,
    tiers: number,
    maxRows: number,
    slots: SlotRing,
    workers: WorkerBook,
    derives: boolean,
  ) {
    this.#derives = derives;
    this.#maxBatchSize = maxBatchSize;
    this.#tiers = tiers;
    this.#maxRows = maxRows;
    this.#slots = slots;
    this.#workers = workers;
  }

  began(batch: BatchNote, oldestWaitMs: number, tasks: readonly BatchedTask[], now: number): void {
    const row = this.#add(batch, tasks.length, now, oldestWaitMs);
    for (let tier = 0; tier < this.#tiers; tier++) row.tiers[tier] = 0;
    for (const { task, attempt } of tasks) {
      if (task.tier < this.#tiers) row.tiers[task.tier]!++;
      if (attempt > row.attempt) row.attempt = attempt;
    }
  }

  ended({ batchId: id, calls, busyMs, shape, savedMs }: Ending): void {
    if (shape !== undefined) this.#measured(shape, busyMs, savedMs);
    const row = this.#byId.get(id);
    if (row === undefined || row.endedAt !== 0) return;
    if (!this.#derives) this.#byId.delete(id);
    row.endedAt = row.startedAt + busyMs;
    row.calls = calls;
    row.shape = shape;
    // It may have ended just before the second did, after being counted to the end of it: this subtracts the excess.
    this.#spend(row, row.endedAt);
    // Where time follows cells, a worker that gets longer inputs is not slow.
    const work = savedMs === undefined ? row.size : shape!.rows * shape!.longest;
    this.#workers.took(row.worker, busyMs, work, row.endedAt);
    this.#list(row);
  }

  #measured(
    { rows, longest, total, inOrder }: BatchShape,
    busyMs: number,
    savedMs: number | undefined,
  ): void {
    const { now } = this.#slots;
    now[COLUMN.paddedCells]! += rows * longest;
    now[COLUMN.inOrderCells]! += rows * inOrder;
    now[COLUMN.usefulCells]! += total;
    this.#useful = savedMs === undefined ? undefined : total / (rows * longest);
    if (savedMs === undefined) return;
    now[COLUMN.groupedMs]! += busyMs;
    now[COLUMN.savedMs]! += savedMs;
  }

  /** A batch of another process, from the end of one of its tasks. */
  seen(batch: BatchNote, queuedAt: number, attempt: number, settledAt: number): void {
    const waitMs = batch.startedAt - queuedAt;
    const known = this.#byId.get(batch.id);
    if (known !== undefined) {
      if (waitMs > known.oldestWaitMs && known.tiers.length === 0) known.oldestWaitMs = waitMs;
      return;
    }
    const row = this.#add(batch, batch.size, batch.startedAt, Math.max(0, waitMs));
    row.tiers.length = 0;
    row.attempt = attempt;
    row.calls = 1;
    row.endedAt = Math.max(batch.startedAt, settledAt);
    this.#spend(row, row.endedAt);
    this.#workers.took(row.worker, row.endedAt - row.startedAt, row.size, row.endedAt);
  }

  /** Accounts running batches up to `now`, the end of a second. */
  account(now: number): void {
    // A batch that began after the end of the second is counted with the next.
    for (const row of this.#rows) if (row.endedAt === 0 && row.countedTo < now) this.#spend(row, now);
  }

  /** Changes since the last call. */
  takeChanged(): Shown {
    const shown = { rows: this.#changed.map((row) => row.onWire()), leftOut: this.#changedMore };
    this.forgetChanged();
    return shown;
  }

  forgetChanged(): void {
    for (const row of this.#changed) row.listed = false;
    this.#changed = [];
    this.#changedMore = 0;
  }

  /** The last minute, oldest first, at most the newest `most`. `leftOut` counts only batches that would be drawn. */
  lately(now: number, most: number): Shown {
    const found: Row[] = [];
    for (const row of this.#rows) {
      if (row.endedAt === 0 || row.endedAt > now - SHOWN_MS) found.push(row);
    }
    found.sort((a, b) => a.startedAt - b.startedAt);
    const rows = found.slice(-most).map((row) => row.onWire());
    const others = found.slice(0, found.length - rows.length);
    const missed = others.filter(({ endedAt }) => endedAt === 0 || endedAt > now - DRAWN_MS);
    return { rows, leftOut: missed.length };
  }

  #add(batch: BatchNote, size: number, startedAt: number, oldestWaitMs: number): Row {
    const row = (this.#rows[this.#next] ??= new Row());
    this.#next = (this.#next + 1) % this.#maxRows;
    this.#byId.delete(row.id);
    row.id = batch.id;
    row.worker = batch.worker;
    row.size = size;
    row.reason = Math.max(0, DISPATCH_REASONS.indexOf(batch.reason));
    row.startedAt = startedAt;
    row.countedTo = startedAt;
    row.oldestWaitMs = oldestWaitMs;
    row.endedAt = 0;
    row.calls = 0;
    row.attempt = 1;
    row.shape = undefined;
    row.why = batch.why;
    this.#byId.set(row.id, row);
    const { now, fillNow } = this.#slots;
    now[COLUMN.batches]! += 1;
    now[COLUMN.tasks]! += row.size;
    now[FIRST_REASON + row.reason]! += 1;
    const step = Math.ceil((row.size * FILL_STEPS) / this.#maxBatchSize) - 1;
    fillNow[Math.min(FILL_STEPS - 1, Math.max(0, step))]! += 1;
    this.#list(row);
    return row;
  }

  #spend(row: Row, until: number): void {
    const ms = until - row.countedTo;
    const places = Math.min(1, row.size / this.#maxBatchSize);
    const filled = ms * (this.#useful ?? places);
    this.#slots.now[COLUMN.filledMs]! += filled;
    this.#slots.now[COLUMN.emptyMs]! += ms - filled;
    this.#workers.spent(row.worker, ms, ms * places);
    row.countedTo = until;
  }

  #list(row: Row): void {
    if (row.listed) return;
    if (this.#changed.length >= this.#maxRows / 4) {
      this.#changedMore++;
      return;
    }
    row.listed = true;
    this.#changed.push(row);
  }
}
