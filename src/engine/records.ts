/**
 * Every record by id, from its first moment to the end of its time to live: what is written down of it,
 * who shares it, and, once it is final, its place on the shelf.
 */
import type { Clock } from "../clock.ts";
import { Ledger } from "../core/ledger.ts";
import type { Outcome } from "../core/task.ts";
import type { EngineLimits } from "./engine.ts";
import type { TaskRecord } from "./record.ts";
import type { RecordKeeper } from "./saved.ts";
import { SharedWork } from "./sharing.ts";
import { Shelf } from "./shelf.ts";

export class Records {
  readonly shared: SharedWork;
  readonly #limits: EngineLimits["results"];
  readonly #clock: Clock;
  readonly #keeper: RecordKeeper | undefined;
  readonly #shelf: Shelf;
  /** Bounded by the queue and the shelf. */
  readonly #byId = new Ledger<TaskRecord>();

  constructor(limits: EngineLimits["results"], clock: Clock, keeper: RecordKeeper | undefined) {
    this.#limits = limits;
    this.#clock = clock;
    this.#keeper = keeper;
    this.shared = new SharedWork(limits.maxBytes);
    this.#shelf = new Shelf(limits.ttlMs, limits.maxBytes, (record) => this.#drop(record));
  }

  /** Finished ones that are kept. */
  get kept(): number {
    return this.#shelf.size;
  }

  /** Why nothing new can be kept: the disk is behind, or outcomes that nobody has fetched fill the shelf. */
  full({ maxQueuedBytes }: EngineLimits): string | undefined {
    const behind = (this.#keeper?.pendingBytes ?? 0) > maxQueuedBytes;
    if (behind) return `the journal is behind its disk (limits.maxQueuedBytes ${maxQueuedBytes})`;
    return this.#shelf.full ? "too many results wait to be fetched (results.maxBytes)" : undefined;
  }

  get(id: string): TaskRecord | undefined {
    return this.#byId.get(id);
  }

  /** As `get`, but not past its time to live: a sweep may come later than that. */
  find(id: string): TaskRecord | undefined {
    const record = this.#byId.get(id);
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
    this.#byId.set(record.task.id, record);
    this.shared.started(record);
  }

  /** It is final. Only dead letters keep their input, and they have their own copy. */
  shelve(record: TaskRecord, outcome: Outcome, settledAt: number): void {
    record.state = outcome.ok ? "done" : "failed";
    record.outcome = outcome;
    record.settledAt = settledAt;
    record.task = { ...record.task, input: "", content: "" };
    this.shared.finished(record);
    this.#shelf.add(record);
  }

  delivered(record: TaskRecord): void {
    if (!record.final || record.delivered) return;
    const unshared = record.joins === 0 && record.keys.length === 0;
    if (this.#limits.evictAfterRead && unshared) this.forget(record);
    else this.#shelf.deliver(record);
  }

  /** A final record that nobody wants any more. */
  forget(record: TaskRecord): void {
    this.#shelf.remove(record);
    this.#drop(record);
  }

  /** Its dead letter is gone; the record itself may still be polled. */
  letterGone(id: string): void {
    const record = this.#byId.get(id);
    if (record === undefined) return this.#keeper?.forget(id);
    record.dead = undefined;
    this.#keeper?.update(record);
  }

  /** Drops what is past its time and returns when the next will be. */
  sweep(now: number): number {
    return Math.min(this.#shelf.sweep(now), this.shared.sweep(now));
  }

  #drop(record: TaskRecord): void {
    const { id } = record.task;
    if (this.#byId.get(id) === record) this.#byId.delete(id);
    this.shared.forgotten(record);
    if (record.dead !== undefined) this.#keeper?.keepLetter(record);
    else this.#keeper?.forget(id);
  }
}
