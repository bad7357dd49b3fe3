/**
 * Successful records by content, for a while: bounded in bytes, oldest out first.
 *
 * A record stays here after its owner's result was forgotten. The time to live is the model's, so a
 * record expires when it is asked for, and the oldest are swept in passing.
 */
import { Fifo } from "../core/fifo.ts";
import { Table } from "../core/table.ts";
import type { TaskRecord } from "./record.ts";

export class OutcomeCache {
  readonly #maxBytes: number;
  readonly #kept: Table<TaskRecord>;
  /** In order of entry; those that were replaced or asked for too late are no longer in `#kept`. */
  readonly #order = new Fifo<TaskRecord>();
  #bytes = 0;

  constructor(maxBytes: number, seed: number) {
    this.#kept = new Table(seed);
    this.#maxBytes = maxBytes;
  }

  get(key: string, now: number): TaskRecord | undefined {
    const record = this.#kept.get(key);
    if (record === undefined || expiresAt(record) > now) return record;
    this.#kept.delete(key);
    return undefined;
  }

  add(key: string, record: TaskRecord): void {
    this.#kept.set(key, record);
    this.#order.push(record);
    this.#bytes += record.bytes;
    while (this.#bytes > this.#maxBytes) this.#dropOldest();
  }

  /** Drops expired outcomes from the old end and returns when the oldest of the rest expires. */
  sweep(now: number): number {
    let oldest = this.#order.first;
    for (; oldest !== undefined && expiresAt(oldest) <= now; oldest = this.#order.first) this.#dropOldest();
    return oldest === undefined ? Infinity : expiresAt(oldest);
  }

  #dropOldest(): void {
    const oldest = this.#order.shift()!;
    const key = oldest.sharing.cacheKey!;
    this.#bytes -= oldest.bytes;
    if (this.#kept.get(key) === oldest) this.#kept.delete(key);
  }
}

function expiresAt({ settledAt, sharing }: TaskRecord): number {
  return settledAt! + sharing.cacheTtlMs!;
}
