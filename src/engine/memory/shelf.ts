/**
 * Finished records that are kept as they are, until their time to live has passed.
 *
 * Each tenant has two rows, each in the order in which records were put there: outcomes that were not received
 * yet, and outcomes that were delivered. The oldest delivered ones may go early (`holdings.ts`).
 */
import type { Holding, Holdings } from "./holdings.ts";
import type { RecordList, TaskRecord } from "./record.ts";

export class Shelf {
  readonly #holdings: Holdings;
  readonly #ttlMs: () => number;
  readonly #forget: (record: TaskRecord) => void;
  size = 0;

  constructor(holdings: Holdings, ttlMs: () => number, forget: (record: TaskRecord) => void) {
    this.#holdings = holdings;
    this.#ttlMs = ttlMs;
    this.#forget = forget;
  }

  add(record: TaskRecord): void {
    const holding = this.#holdings.of(record.task.tenant);
    this.#holdings.charge(holding, record.bytes, record.delivered ? 0 : record.bytes);
    const row = record.delivered ? holding.delivered : holding.awaited;
    row.pushBack(record);
    this.size++;
    if (row.size === 1) this.#holdings.dueAt(holding, this.#until(record));
  }

  deliver(record: TaskRecord): void {
    if (record.delivered) return;
    const holding = this.#holdings.of(record.task.tenant);
    record.delivered = true;
    record.list!.remove(record);
    holding.delivered.pushBack(record);
    this.#holdings.charge(holding, 0, -record.bytes);
  }

  remove(record: TaskRecord): void {
    record.list!.remove(record);
    this.size--;
    const holding = this.#holdings.of(record.task.tenant);
    this.#holdings.charge(holding, -record.bytes, record.delivered ? 0 : -record.bytes);
  }

  /** Lets the tenant's oldest go that was delivered. */
  dropOldest({ delivered }: Holding): void {
    if (delivered.first !== undefined) this.#drop(delivered.first);
  }

  /** Drops what is past its time and returns when the next one will be. */
  sweep({ awaited, delivered }: Holding, now: number): number {
    return Math.min(this.#sweepRow(awaited, now), this.#sweepRow(delivered, now));
  }

  #sweepRow(row: RecordList, now: number): number {
    while (row.first !== undefined && this.#until(row.first) <= now) this.#drop(row.first);
    return row.first === undefined ? Infinity : this.#until(row.first);
  }

  #until({ settledAt }: TaskRecord): number {
    return settledAt! + this.#ttlMs();
  }

  #drop(record: TaskRecord): void {
    this.remove(record);
    this.#forget(record);
  }
}
