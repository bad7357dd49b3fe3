/**
 * Every record by id, from its first moment to the end of its time to live: what is written down of it,
 * who shares it, and, once it is final, where it is kept. That is outside of the heap (`packed.ts`); on the shelf
 * stand only those to which something else points: an Idempotency-Key or a dead letter.
 */
import type { Clock } from "../clock.ts";
import { Table } from "../core/table.ts";
import type { Outcome } from "../core/task.ts";
import type { EngineLimits } from "./engine.ts";
import { Packed } from "./packed.ts";
import { ID_RANDOM_END, type TaskRecord } from "./record.ts";
import type { RecordKeeper } from "./saved.ts";
import { SharedWork } from "./sharing.ts";
import { Shelf } from "./shelf.ts";

/** What clients are told while the journal cannot be written; operators find the cause in the log. */
export const UNWRITABLE = "tasks cannot be stored now";

export class Records {
  readonly shared: SharedWork;
  #limits: EngineLimits["results"];
  readonly #clock: Clock;
  readonly #keeper: RecordKeeper | undefined;
  readonly #shelf: Shelf;
  readonly #packed: Packed;
  /** Bounded by the queue and the shelf. */
  readonly #byId: Table<TaskRecord>;

  constructor(limits: EngineLimits["results"], clock: Clock, keeper: RecordKeeper | undefined, seed: number) {
    this.#limits = limits;
    this.#clock = clock;
    this.#keeper = keeper;
    this.#byId = new Table(seed, ID_RANDOM_END);
    this.#packed = new Packed(limits.ttlMs, seed, {
      room: () => this.#limits.maxBytes - this.#shelf.bytes,
      forgotten: keeper && ((id) => keeper.forget(id)),
      rescue: (record) => this.#rescue(record),
    });
    this.shared = new SharedWork(this.#packed, seed);
    this.#shelf = new Shelf(limits.ttlMs, limits.maxBytes, (record) => this.#drop(record));
  }

  retune(limits: EngineLimits["results"]): void {
    this.#limits = limits;
    this.#packed.ttlMs = this.#shelf.ttlMs = limits.ttlMs;
    this.#shelf.maxBytes = limits.maxBytes;
    this.#packed.trim();
  }

  /** Finished ones that are kept. */
  get kept(): number {
    return this.#shelf.size + this.#packed.size;
  }

  /** Why nothing new can be kept: the disk is behind, or outcomes that nobody has fetched fill the shelf. */
  full({ maxQueuedBytes }: EngineLimits): string | undefined {
    if (this.#keeper?.trouble !== undefined) return UNWRITABLE;
    const behind = (this.#keeper?.pendingBytes ?? 0) > maxQueuedBytes;
    if (behind) return `the journal is behind its disk (limits.maxQueuedBytes ${maxQueuedBytes})`;
    const full = this.#shelf.awaitedBytes + this.#packed.awaitedBytes > this.#limits.maxBytes;
    return full ? "too many results wait to be fetched (results.maxBytes)" : undefined;
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
    return settledAt !== undefined && settledAt + this.#limits.ttlMs <= now;
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

  /** It is final. Only dead letters keep their input, and they have their own copy. */
  shelve(record: TaskRecord, outcome: Outcome, settledAt: number): void {
    record.state = outcome.ok ? "done" : "failed";
    record.outcome = outcome;
    record.settledAt = settledAt;
    this.shared.finished(record);
    if (record.keys.length > 0 || record.dead !== undefined) {
      record.task = { ...record.task, input: "", content: "" };
      this.#shelf.add(record);
      this.#packed.add(record, true);
    } else {
      this.#byId.delete(record.task.id, this.#packed.ids.of(record.task.id));
      this.#packed.add(record);
    }
    this.#packed.trim();
  }

  /** Its caller has got it. */
  delivered(id: string): void {
    const { evictAfterRead } = this.#limits;
    if (this.#packed.deliver(id, evictAfterRead)) return;
    const record = this.#open(id);
    if (record === undefined || !record.final || record.delivered) return;
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
    return Math.min(this.#shelf.sweep(now), this.#packed.sweep(now));
  }

  /** One that is not packed. */
  #open(id: string): TaskRecord | undefined {
    return this.#byId.get(id, this.#packed.ids.of(id));
  }

  #keep(record: TaskRecord): void {
    const { id } = record.task;
    this.#byId.set(id, record, this.#packed.ids.of(id));
  }

  #drop(record: TaskRecord): void {
    const { id } = record.task;
    if (this.#open(id) === record) this.#byId.delete(id);
    this.shared.forgotten(record);
    if (record.dead !== undefined) this.#keeper?.keepLetter(record);
    else this.#keeper?.forget(id);
  }
}
