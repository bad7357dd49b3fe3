/**
 * Who does whose work: tasks in flight by content, outcomes by content, tasks by Idempotency-Key.
 *
 * A key is never answered with another body's outcome. A failure that time may heal is not held against
 * a key: the next request with it runs again, and the key then points there.
 */
import { errors } from "../../core/errors.ts";
import { Table } from "../../core/table.ts";
import type { Sharing } from "../engine.ts";
import type { Packed } from "./packed.ts";
import type { TaskRecord } from "./record.ts";

export class SharedWork {
  readonly #packed: Packed;
  /** Bounded by the records that exist: each entry goes with its record. */
  readonly #inFlight: Table<TaskRecord>;
  readonly #keys = new Map<string, { readonly record: TaskRecord; readonly fingerprint: string }>();

  constructor(packed: Packed, seed: number) {
    this.#inFlight = new Table(seed);
    this.#packed = packed;
  }

  /** The record that this Idempotency-Key stands for, or "conflict" when it came with another body. */
  keyed({ idempotency }: Sharing): { record: TaskRecord; conflict: boolean } | undefined {
    const used = idempotency && this.#keys.get(idempotency.key);
    if (used === undefined) return undefined;
    const conflict = used.fingerprint !== idempotency!.fingerprint;
    return conflict || !mayRunAgain(used.record) ? { record: used.record, conflict } : undefined;
  }

  cached({ cacheKey }: Sharing, now: number): TaskRecord | undefined {
    return cacheKey === undefined ? undefined : this.#packed.cached(cacheKey, now);
  }

  inFlight({ joinKey }: Sharing): TaskRecord | undefined {
    return joinKey === undefined ? undefined : this.#inFlight.get(joinKey);
  }

  /** `record` will answer for whoever comes with the same content or key. */
  started(record: TaskRecord): void {
    const { joinKey } = record.sharing;
    if (joinKey !== undefined) this.#inFlight.set(joinKey, record);
    this.bindKey(record, record.sharing);
  }

  bindKey(record: TaskRecord, { idempotency }: Sharing): void {
    if (idempotency === undefined) return;
    this.#keys.set(idempotency.key, { record, fingerprint: idempotency.fingerprint });
    record.keys = [...record.keys, idempotency];
  }

  finished(record: TaskRecord): void {
    const { joinKey } = record.sharing;
    if (joinKey !== undefined && this.#inFlight.get(joinKey) === record) this.#inFlight.delete(joinKey);
  }

  forgotten(record: TaskRecord): void {
    for (const { key } of record.keys) if (this.#keys.get(key)?.record === record) this.#keys.delete(key);
  }
}

function mayRunAgain({ outcome }: TaskRecord): boolean {
  return outcome?.ok === false && errors[outcome.code].retryable;
}

/** An answer from the cache is neither work in flight nor a reason to keep the cached one for longer. */
export function keyOnly({ idempotency }: Sharing): Sharing {
  return idempotency === undefined ? {} : { idempotency };
}
