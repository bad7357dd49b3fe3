/**
 * Every record by id, from creation to the end of its time to live: who shares it and, once final, where it is kept.
 * That is outside the heap (`packed.ts`), except for records referenced by an Idempotency-Key or a dead letter.
 *
 * Kept results are bounded in bytes for all tenants together (`results.maxBytes`). Above it the tenant that holds the
 * most loses its oldest fetched result; a tenant within its share (the bound divided by the tenants that hold any)
 * loses none. What was promised and not fetched is never dropped before its time: instead a tenant gets no further
 * promises beyond its share of them (`core/share.ts`).
 */
import type { Clock } from "../../app/clock.ts";
import { errors } from "../../core/errors.ts";
import { type Due, Heap } from "../../core/heap.ts";
import { hasShare } from "../../core/share.ts";
import { Table } from "../../core/table.ts";
import type { Outcome } from "../../core/task.ts";
import type { EngineLimits, PutReply, Sharing } from "../engine.ts";
import { Packed, type Slab } from "./packed.ts";
import { ID_RANDOM_END, RecordList, type TaskRecord } from "./record.ts";
import type { RecordKeeper } from "./saved.ts";

/** Told to clients while the journal cannot be written; operators find the cause in the log. */
export const UNWRITABLE = "tasks cannot be stored now";

/** A holding's position in one of the orders. */
class Rank implements Due {
  readonly of: Holding;
  dueAt = Infinity;
  place = -1;

  constructor(of: Holding) {
    this.of = of;
  }
}

export class Holding {
  readonly tenant: string;
  bytes = 0; // of all its results, cached ones included
  awaitedBytes = 0;
  oldest: Slab | undefined; // packed results in linked slabs, oldest first; written by `packed.ts`
  newest: Slab | undefined;
  start = 0; // start of the oldest record in the oldest slab
  awaitedFrom: { slab: Slab; start: number } | undefined; // no record before this place is awaited
  readonly awaited = new RecordList(); // results kept as records, in order; written by `Records`
  readonly delivered = new RecordList();
  readonly bySize = new Rank(this); // by bytes, while some of them can be dropped
  readonly byAge = new Rank(this); // by the time at which its first result is to be forgotten; never late

  constructor(tenant: string) {
    this.tenant = tenant;
  }
}

export class Holdings {
  readonly #byTenant: Table<Holding>;
  readonly #bySize = new Heap<Rank>();
  readonly #byAge = new Heap<Rank>();
  #awaiting = 0; // tenants with unfetched results
  bytes = 0;
  awaitedBytes = 0;

  constructor(seed: number) {
    this.#byTenant = new Table(seed);
  }

  get size(): number {
    return this.#byTenant.size;
  }

  all(): Holding[] {
    return this.#byTenant.unordered();
  }

  find(tenant: string): Holding | undefined {
    return this.#byTenant.get(tenant);
  }

  of(tenant: string): Holding {
    let holding = this.#byTenant.get(tenant);
    if (holding === undefined) this.#byTenant.set(tenant, (holding = new Holding(tenant)));
    return holding;
  }

  /** Adds to its bytes and its unfetched bytes; negative to subtract. */
  charge(holding: Holding, bytes: number, awaitedBytes: number): void {
    this.bytes += bytes;
    holding.bytes += bytes;
    if (awaitedBytes !== 0) {
      const awaiting = holding.awaitedBytes > 0 ? 1 : 0;
      this.awaitedBytes += awaitedBytes;
      holding.awaitedBytes += awaitedBytes;
      this.#awaiting += (holding.awaitedBytes > 0 ? 1 : 0) - awaiting;
    }
    if (holding.bytes > holding.awaitedBytes) this.#bySize.set(holding.bySize, -holding.bytes);
    else this.#bySize.remove(holding.bySize);
    if (holding.bytes > 0) return;
    this.#byAge.remove(holding.byAge);
    this.#byTenant.delete(holding.tenant);
  }

  /** Whose oldest result to drop; undefined: all fit, or no tenant beyond its share has one that may be dropped. */
  toTrim(maxBytes: number): Holding | undefined {
    if (this.bytes <= maxBytes) return undefined;
    const most = this.#bySize.first?.of;
    return most !== undefined && most.bytes > maxBytes / this.size ? most : undefined;
  }

  /** Whether this tenant may be promised one more result; `weight`: as if it held that many times as much. */
  mayPromise(tenant: string, maxBytes: number, weight = 1): boolean {
    if (this.awaitedBytes === 0) return true;
    const own = this.find(tenant)?.awaitedBytes ?? 0;
    return hasShare(weight * own, this.awaitedBytes, maxBytes, this.#awaiting);
  }

  /** Its first result is to be forgotten at `at` or later. */
  dueAt(holding: Holding, at: number): void {
    if (at < holding.byAge.dueAt || holding.byAge.place < 0) this.#byAge.set(holding.byAge, at);
  }

  /** Visits each due holding; `look` returns when it is due again. Returns when the next one is. */
  sweep(now: number, look: (holding: Holding) => number): number {
    for (;;) {
      const { first, firstAt } = this.#byAge;
      if (first === undefined || firstAt > now) return firstAt;
      const next = look(first.of);
      if (next === Infinity) this.#byAge.remove(first);
      else this.#byAge.set(first, next);
    }
  }
}

export class Records {
  readonly #limits: () => EngineLimits;
  readonly #clock: Clock;
  readonly #keeper: RecordKeeper | undefined;
  readonly #holdings: Holdings;
  readonly #packed: Packed;
  readonly #byId: Table<TaskRecord>; // records that are not packed; bounded by the queue and the kept results
  /** Tasks in flight by content, and tasks by Idempotency-Key: each entry is removed with its record. */
  readonly #inFlight: Table<TaskRecord>;
  readonly #keys = new Map<string, { readonly record: TaskRecord; readonly fingerprint: string }>();
  #shelved = 0; // final records that are not packed
  #ttlMs: number; // the value by which the holdings are ranked

  constructor(limits: () => EngineLimits, clock: Clock, keeper: RecordKeeper | undefined, seed: number) {
    this.#limits = limits;
    this.#clock = clock;
    this.#keeper = keeper;
    this.#byId = new Table(seed, ID_RANDOM_END);
    this.#inFlight = new Table(seed);
    this.#holdings = new Holdings(seed);
    const ttlMs = (): number => limits().results.ttlMs;
    this.#ttlMs = ttlMs();
    this.#packed = new Packed(this.#holdings, ttlMs, seed, {
      forgotten: keeper && ((id) => keeper.forget(id)),
      rescue: (record) => {
        this.#byId.set(record.task.id, record);
        this.#shelve(record);
      },
    });
  }

  get kept(): number {
    return this.#shelved + this.#packed.size;
  }

  /** Nothing new can be kept: the disk refuses writes or is behind, or the tenant fetches too little. */
  full(tenant: string): (PutReply & { readonly kind: "full" }) | undefined {
    const { maxQueuedBytes, results } = this.#limits();
    if (this.#keeper?.journal.trouble !== undefined) return { kind: "full", message: UNWRITABLE };
    if ((this.#keeper?.journal.pendingBytes ?? 0) > maxQueuedBytes) {
      const message = `the journal is behind its disk (limits.maxQueuedBytes ${maxQueuedBytes})`;
      return { kind: "full", message };
    }
    const { maxBytes, ttlMs } = results;
    if (this.#holdings.mayPromise(tenant, maxBytes)) return undefined;
    const holding = this.#holdings.find(tenant)!;
    const oldestAt = Math.min(
      holding.awaited.first?.settledAt ?? Infinity,
      this.#packed.oldestAwaitedAt(holding),
    );
    const message =
      `${holding.awaitedBytes} bytes of your results wait to be fetched, which is your share of results.maxBytes ` +
      `${maxBytes}; fetch or delete some of them`;
    return { kind: "full", message, own: true, retryInMs: oldestAt + ttlMs - this.#clock.now() };
  }

  /** A packed record is decoded each time: changing it has no effect. */
  get(id: string): TaskRecord | undefined {
    return this.#byId.get(id) ?? this.#packed.get(id);
  }

  /** As `get`, but not past its time to live: a sweep may be late. */
  find(id: string): TaskRecord | undefined {
    const record = this.get(id);
    return record?.final === true && this.#outlived(record) ? undefined : record;
  }

  #outlived({ settledAt }: TaskRecord): boolean {
    return settledAt !== undefined && settledAt + this.#limits().results.ttlMs <= this.#clock.now();
  }

  open(record: TaskRecord): void {
    this.adopt(record);
    this.#keeper?.save(record);
  }

  /** A record already on disk. From here on it answers others with the same content or key. */
  adopt(record: TaskRecord): void {
    this.#byId.set(record.task.id, record);
    const { joinKey } = record.sharing;
    if (joinKey !== undefined) this.#inFlight.set(joinKey, record);
    this.bindKey(record, record.sharing);
  }

  bindKey(record: TaskRecord, { idempotency }: Sharing): void {
    if (idempotency === undefined) return;
    this.#keys.set(idempotency.key, { record, fingerprint: idempotency.fingerprint });
    record.keys = [...record.keys, idempotency];
  }

  /** The key's record, and whether its body differs. A retryable failure frees the key for the next request. */
  keyed({ idempotency }: Sharing): { record: TaskRecord; conflict: boolean } | undefined {
    const used = idempotency && this.#keys.get(idempotency.key);
    if (used === undefined || this.#outlived(used.record)) return undefined;
    const { outcome } = used.record;
    const conflict = used.fingerprint !== idempotency!.fingerprint;
    const runsAgain = outcome?.ok === false && errors[outcome.code].retryable;
    return conflict || !runsAgain ? { record: used.record, conflict } : undefined;
  }

  cached({ cacheKey }: Sharing, now: number): TaskRecord | undefined {
    return cacheKey === undefined ? undefined : this.#packed.cached(cacheKey, now);
  }

  inFlight({ joinKey }: Sharing): TaskRecord | undefined {
    return joinKey === undefined ? undefined : this.#inFlight.get(joinKey);
  }

  /** Drops input and parameters: dead letters have a separate copy. */
  finish(record: TaskRecord, outcome: Outcome, settledAt: number): void {
    this.release(record, outcome, settledAt);
    if (record.keys.length > 0 || record.dead !== undefined) {
      record.task = { ...record.task, input: "", parameters: "", content: "" };
      this.#byId.set(record.task.id, record);
      this.#shelve(record);
      this.#packed.add(record, true);
    } else this.#packed.add(record);
    this.#trim();
  }

  /** It is final, or elsewhere from now on, and nothing is kept of it here. */
  release(record: TaskRecord, outcome?: Outcome, settledAt?: number): void {
    if (outcome !== undefined) {
      record.state = outcome.ok ? "done" : "failed";
      record.outcome = outcome;
      record.settledAt = settledAt!;
    }
    const { joinKey } = record.sharing;
    if (joinKey !== undefined && this.#inFlight.get(joinKey) === record) this.#inFlight.delete(joinKey);
    this.#byId.delete(record.task.id);
  }

  /**
   * Whether it was fetched is not stored: it counts as promised while its tenant has room for promises, else as
   * fetched.
   */
  countFound(record: TaskRecord): void {
    record.delivered = !this.#holdings.mayPromise(record.task.tenant, this.#limits().results.maxBytes, 2);
  }

  /** A caller of a final record left without it; after the last one it is no longer promised. */
  abandoned(id: string): void {
    if (this.#packed.abandon(id)) return;
    const record = this.#byId.get(id);
    if (record === undefined || record.keys.length > 0) return;
    if (record.joins > 0) record.joins--;
    else this.#deliver(record);
  }

  delivered(id: string): void {
    const { evictAfterRead } = this.#limits().results;
    if (this.#packed.deliver(id, evictAfterRead)) return;
    const record = this.#byId.get(id);
    if (record === undefined || record.delivered) return;
    const unshared = record.joins === 0 && record.keys.length === 0;
    // Not final: its caller was told of the timeout just before `reap` settles it.
    if (!record.final) record.delivered = unshared;
    else if (evictAfterRead && unshared) this.forget(record);
    else this.#deliver(record);
  }

  forget(record: TaskRecord): void {
    if (this.#packed.forget(record.task.id)) this.#keeper?.forget(record.task.id);
    else this.#drop(record);
  }

  /** Its dead letter is gone; the record itself may still be polled. */
  letterGone(id: string): void {
    const record = this.#byId.get(id);
    if (record === undefined) return this.#keeper?.forget(id);
    record.dead = undefined;
    this.#keeper?.update(record);
  }

  sweep(now: number): number {
    const { ttlMs } = this.#limits().results;
    if (ttlMs !== this.#ttlMs) {
      // A reload changed it, and records may expire sooner.
      this.#ttlMs = ttlMs;
      for (const holding of this.#holdings.all()) this.#holdings.dueAt(holding, -Infinity);
    }
    this.#trim();
    const row = (list: RecordList): number => {
      while (list.first !== undefined && list.first.settledAt! + ttlMs <= now) this.#drop(list.first);
      return list.first === undefined ? Infinity : list.first.settledAt! + ttlMs;
    };
    return this.#holdings.sweep(now, (holding) =>
      Math.min(row(holding.awaited), row(holding.delivered), this.#packed.sweep(holding, now)),
    );
  }

  /** Each step drops a result, or moves an unfetched one out of its slab. */
  #trim(): void {
    for (;;) {
      const holding = this.#holdings.toTrim(this.#limits().results.maxBytes);
      if (holding === undefined) return;
      if (!this.#packed.dropOldest(holding) && holding.delivered.first !== undefined)
        this.#drop(holding.delivered.first);
    }
  }

  /** Keeps a final record as an object, among its tenant's. */
  #shelve(record: TaskRecord): void {
    const holding = this.#holdings.of(record.task.tenant);
    this.#holdings.charge(holding, record.bytes, record.delivered ? 0 : record.bytes);
    const list = record.delivered ? holding.delivered : holding.awaited;
    list.pushBack(record);
    this.#shelved++;
    if (list.size === 1) this.#holdings.dueAt(holding, record.settledAt! + this.#limits().results.ttlMs);
  }

  #deliver(record: TaskRecord): void {
    if (record.delivered) return;
    const holding = this.#holdings.of(record.task.tenant);
    record.delivered = true;
    record.list!.remove(record);
    holding.delivered.pushBack(record);
    this.#holdings.charge(holding, 0, -record.bytes);
  }

  #drop(record: TaskRecord): void {
    const { id, tenant } = record.task;
    record.list!.remove(record);
    this.#shelved--;
    const holding = this.#holdings.of(tenant);
    this.#holdings.charge(holding, -record.bytes, record.delivered ? 0 : -record.bytes);
    if (this.#byId.get(id) === record) this.#byId.delete(id);
    for (const { key } of record.keys) if (this.#keys.get(key)?.record === record) this.#keys.delete(key);
    if (record.dead !== undefined) this.#keeper?.keepLetter(record);
    else this.#keeper?.forget(id);
  }
}

/** An answer from the cache is neither work in flight nor a reason to keep the cached one longer. */
export function keyOnly({ idempotency }: Sharing): Sharing {
  return idempotency === undefined ? {} : { idempotency };
}
