/**
 * Every record by id, from its first moment to the end of its time to live: what is written down of it,
 * who shares it, and, once it is final, where it is kept. That is outside of the heap (`packed.ts`); on the shelf
 * stand only those to which something else points: an Idempotency-Key or a dead letter.
 */
import type { Clock } from "../../app/clock.ts";
import { Table } from "../../core/table.ts";
import type { Outcome } from "../../core/task.ts";
import type { EngineLimits, PutReply } from "../engine.ts";
import { Holdings } from "./holdings.ts";
import { Packed } from "./packed.ts";
import { ID_RANDOM_END, type TaskRecord } from "./record.ts";
import type { RecordKeeper } from "./saved.ts";
import { SharedWork } from "./sharing.ts";
import { Shelf } from "./shelf.ts";

/** What clients are told while the journal cannot be written; operators find the cause in the log. */
export const UNWRITABLE = "tasks cannot be stored now";

export class Records {
  readonly shared: SharedWork;
  readonly #limits: () => EngineLimits;
  #ttlMs: number;
  readonly #clock: Clock;
  readonly #keeper: RecordKeeper | undefined;
  readonly #holdings: Holdings;
  readonly #shelf: Shelf;
  readonly #packed: Packed;
  /** Bounded by the queue and the shelf. */
  readonly #byId: Table<TaskRecord>;

  constructor(limits: () => EngineLimits, clock: Clock, keeper: RecordKeeper | undefined, seed: number) {
    this.#limits = limits;
    const ttlMs = (): number => limits().results.ttlMs;
    this.#ttlMs = ttlMs();
    this.#clock = clock;
    this.#keeper = keeper;
    this.#byId = new Table(seed, ID_RANDOM_END);
    this.#holdings = new Holdings(seed);
    this.#packed = new Packed(this.#holdings, ttlMs, seed, {
      forgotten: keeper && ((id) => keeper.forget(id)),
      rescue: (record) => this.#rescue(record),
    });
    this.shared = new SharedWork(this.#packed, seed);
    this.#shelf = new Shelf(this.#holdings, ttlMs, (record) => this.#drop(record));
  }

  /** Finished ones that are kept. */
  get kept(): number {
    return this.#shelf.size + this.#packed.size;
  }

  /** Why nothing new can be kept for this tenant: the disk refuses writes or is behind, or the tenant fetches too little. */
  full(tenant: string): (PutReply & { readonly kind: "full" }) | undefined {
    const { maxQueuedBytes, results } = this.#limits();
    if (this.#keeper?.trouble !== undefined) return { kind: "full", message: UNWRITABLE };
    const behind = (this.#keeper?.pendingBytes ?? 0) > maxQueuedBytes;
    if (behind) {
      return {
        kind: "full",
        message: `the journal is behind its disk (limits.maxQueuedBytes ${maxQueuedBytes})`,
      };
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

  /** One that is packed is read anew each time: changing it changes nothing. */
  get(id: string): TaskRecord | undefined {
    return this.#open(id) ?? this.#packed.get(id);
  }

  /** As `get`, but not past its time to live: a sweep may come later than that. */
  find(id: string): TaskRecord | undefined {
    const record = this.get(id);
    return record?.final === true && this.outlived(record, this.#clock.now()) ? undefined : record;
  }

  outlived({ settledAt }: TaskRecord, now: number): boolean {
    return settledAt !== undefined && settledAt + this.#limits().results.ttlMs <= now;
  }

  /** A new record. */
  open(record: TaskRecord): void {
    this.adopt(record);
    this.#keeper?.save(record);
  }

  /** One that is on disk already. */
  adopt(record: TaskRecord): void {
    this.#keep(record);
    this.shared.started(record);
  }

  /** It is final. Only dead letters keep their input and parameters, and they have their own copy. */
  shelve(record: TaskRecord, outcome: Outcome, settledAt: number): void {
    record.state = outcome.ok ? "done" : "failed";
    record.outcome = outcome;
    record.settledAt = settledAt;
    this.shared.finished(record);
    if (record.keys.length > 0 || record.dead !== undefined) {
      record.task = { ...record.task, input: "", parameters: "", content: "" };
      this.#shelf.add(record);
      this.#packed.add(record, true);
    } else {
      this.#byId.delete(record.task.id);
      this.#packed.add(record);
    }
    this.#trim();
  }

  /** It is final, or elsewhere from now on, and nothing is kept of it here. */
  release(record: TaskRecord, outcome?: Outcome, settledAt?: number): void {
    if (outcome !== undefined) {
      record.state = outcome.ok ? "done" : "failed";
      record.outcome = outcome;
      record.settledAt = settledAt!;
    }
    this.shared.finished(record);
    this.#byId.delete(record.task.id);
  }

  /**
   * Who has fetched what was found on disk is not written down. So it counts as promised as far as that leaves its
   * tenant room for further promises, and as fetched beyond that.
   */
  countFound(record: TaskRecord): void {
    record.delivered = !this.#holdings.mayPromise(record.task.tenant, this.#limits().results.maxBytes, 2);
  }

  /** A caller of a final record left without it; after the last one it is no longer promised. */
  abandoned(id: string): void {
    if (this.#packed.abandon(id)) return;
    const record = this.#open(id);
    if (record === undefined || record.keys.length > 0) return;
    if (record.joins > 0) record.joins--;
    else this.#shelf.deliver(record);
  }

  /** Its caller has got it. */
  delivered(id: string): void {
    const { evictAfterRead } = this.#limits().results;
    if (this.#packed.deliver(id, evictAfterRead)) return;
    const record = this.#open(id);
    if (record === undefined || record.delivered) return;
    if (!record.final) {
      // Its caller was told that its time is over, a moment before `reap` says so.
      record.delivered = record.joins === 0 && record.keys.length === 0;
      return;
    }
    const unshared = record.joins === 0 && record.keys.length === 0;
    if (evictAfterRead && unshared) this.forget(record);
    else this.#shelf.deliver(record);
  }

  /** A final record that nobody wants any more. */
  forget(record: TaskRecord): void {
    if (this.#packed.forget(record.task.id)) return this.#keeper?.forget(record.task.id);
    this.#shelf.remove(record);
    this.#drop(record);
  }

  /** Promised to somebody, and older than all that fits in beside it. */
  #rescue(record: TaskRecord): void {
    this.#keep(record);
    this.#shelf.add(record);
  }

  /** Its dead letter is gone; the record itself may still be polled. */
  letterGone(id: string): void {
    const record = this.#open(id);
    if (record === undefined) return this.#keeper?.forget(id);
    record.dead = undefined;
    this.#keeper?.update(record);
  }

  /** Drops what is past its time and returns when the next will be. */
  sweep(now: number): number {
    const { ttlMs } = this.#limits().results;
    if (ttlMs !== this.#ttlMs) {
      // A reload changed it, and their time may be over sooner.
      this.#ttlMs = ttlMs;
      for (const holding of this.#holdings.all()) this.#holdings.dueAt(holding, -Infinity);
    }
    this.#trim();
    for (;;) {
      const due = this.#holdings.firstDue;
      if (due === undefined || due.at > now) return due?.at ?? Infinity;
      const { holding } = due;
      const next = Math.min(this.#shelf.sweep(holding, now), this.#packed.sweep(holding, now));
      this.#holdings.lookedAt(holding, next);
    }
  }

  /** Makes room: each step drops a result, or moves an unfetched one out of its slab. */
  #trim(): void {
    for (;;) {
      const holding = this.#holdings.toTrim(this.#limits().results.maxBytes);
      if (holding === undefined) return;
      if (!this.#packed.dropOldest(holding)) this.#shelf.dropOldest(holding);
    }
  }

  /** One that is not packed. */
  #open(id: string): TaskRecord | undefined {
    return this.#byId.get(id);
  }

  #keep(record: TaskRecord): void {
    const { id } = record.task;
    this.#byId.set(id, record);
  }

  #drop(record: TaskRecord): void {
    const { id } = record.task;
    if (this.#open(id) === record) this.#byId.delete(id);
    this.shared.forgotten(record);
    if (record.dead !== undefined) this.#keeper?.keepLetter(record);
    else this.#keeper?.forget(id);
  }
}
