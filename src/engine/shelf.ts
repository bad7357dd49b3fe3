/**
 * Finished records that are kept as they are, until their time to live has passed.
 *
 * Two rows, each in the order in which records were put there: outcomes that nobody has received yet,
 * and outcomes that were delivered. When the shelf is over its size the oldest delivered ones go early;
 * an outcome that was promised and not yet fetched is never thrown away before its time, so the engine
 * stops accepting tasks while those alone fill the shelf.
 */
import { RecordList, type TaskRecord } from "./record.ts";

export class Shelf {
  ttlMs: number;
  maxBytes: number;
  readonly #forget: (record: TaskRecord) => void;
  readonly #awaited = new RecordList();
  readonly #delivered = new RecordList();
  bytes = 0;
  awaitedBytes = 0;

  constructor(ttlMs: number, maxBytes: number, forget: (record: TaskRecord) => void) {
    this.ttlMs = ttlMs;
    this.maxBytes = maxBytes;
    this.#forget = forget;
  }

  get size(): number {
    return this.#awaited.size + this.#delivered.size;
  }

  add(record: TaskRecord): void {
    (record.delivered ? this.#delivered : this.#awaited).pushBack(record);
    this.bytes += record.bytes;
    if (!record.delivered) this.awaitedBytes += record.bytes;
    this.#makeRoom();
  }

  deliver(record: TaskRecord): void {
    if (record.delivered) return;
    record.delivered = true;
    this.awaitedBytes -= record.bytes;
    record.list!.remove(record);
    this.#delivered.pushBack(record);
    this.#makeRoom();
  }

  remove(record: TaskRecord): void {
    record.list!.remove(record);
    this.bytes -= record.bytes;
    if (!record.delivered) this.awaitedBytes -= record.bytes;
  }

  /** Drops what is past its time and returns when the next one will be. */
  sweep(now: number): number {
    let next = Infinity;
    for (const row of [this.#awaited, this.#delivered]) {
      while (row.first !== undefined && row.first.settledAt! + this.ttlMs <= now) this.#drop(row.first);
      if (row.first !== undefined) next = Math.min(next, row.first.settledAt! + this.ttlMs);
    }
    return next;
  }

  #makeRoom(): void {
    while (this.bytes > this.maxBytes && this.#delivered.first !== undefined)
      this.#drop(this.#delivered.first);
  }

  #drop(record: TaskRecord): void {
    this.remove(record);
    this.#forget(record);
  }
}
