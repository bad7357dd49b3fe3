/**
 * Successful outcomes by content, for a while: bounded in bytes, oldest out first.
 *
 * An outcome is shared with the record that produced it until that record is forgotten. The time to
 * live is the model's, so entries expire when they are read, and the oldest are swept in passing.
 */
import { Fifo } from "../core/fifo.ts";
import type { BatchNote, Outcome } from "../core/task.ts";

export interface Cached {
  readonly key: string;
  readonly outcome: Outcome & { readonly ok: true };
  readonly batch: BatchNote | undefined;
  readonly expiresAt: number;
}

/** What one costs beside its texts: the entry, its key, its places in the map and the row. */
const CACHED_BYTES = 400;

export class OutcomeCache {
  readonly #maxBytes: number;
  readonly #kept = new Map<string, Cached>();
  /** In order of entry; those that were replaced or read too late are no longer in `#kept`. */
  readonly #order = new Fifo<Cached>();
  #bytes = 0;

  constructor(maxBytes: number) {
    this.#maxBytes = maxBytes;
  }

  get(key: string, now: number): Cached | undefined {
    const cached = this.#kept.get(key);
    if (cached === undefined || cached.expiresAt > now) return cached;
    this.#kept.delete(key);
    return undefined;
  }

  set(cached: Cached): void {
    this.#kept.set(cached.key, cached);
    this.#order.push(cached);
    this.#bytes += bytesOf(cached);
    while (this.#bytes > this.#maxBytes) this.#dropOldest();
  }

  /** Drops expired outcomes from the old end and returns when the oldest of the rest expires. */
  sweep(now: number): number {
    let oldest = this.#order.first;
    for (; oldest !== undefined && oldest.expiresAt <= now; oldest = this.#order.first) this.#dropOldest();
    return oldest?.expiresAt ?? Infinity;
  }

  #dropOldest(): void {
    const oldest = this.#order.shift()!;
    this.#bytes -= bytesOf(oldest);
    if (this.#kept.get(oldest.key) === oldest) this.#kept.delete(oldest.key);
  }
}

function bytesOf({ key, outcome }: Cached): number {
  return CACHED_BYTES + key.length + outcome.output.length;
}
