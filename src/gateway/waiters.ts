/**
 * Requests of this process waiting for tasks. A request registers (`expect`) before its task is put into the engine, so
 * that no outcome can arrive in between. The engine's notification wakes every waiter of that id once; at its deadline
 * a waiter wakes without a record.
 */
import type { Alarm, Clock } from "../app/clock.ts";
import { type Due, Heap } from "../core/heap.ts";
import { Table } from "../core/table.ts";
import type { RecordView, TaskStore } from "../engine/engine.ts";

export type Woken = (record: RecordView | undefined) => void;

export class Waiter implements Due {
  /** The awaited task; changes when the task joins another. */
  id: string;
  /** A long poll for another request's task. */
  readonly polls: boolean;
  /** Next waiter for the same task; used by `Waiters` only. */
  next: Waiter | undefined;
  dueAt = Infinity;
  place = -1;
  woken = false;
  record: RecordView | undefined;
  #call: Woken | undefined;

  constructor(id: string, polls: boolean) {
    this.id = id;
    this.polls = polls;
  }

  /** Ends the wait; `tell` reports it. False: it had already ended. */
  settle(record: RecordView | undefined): boolean {
    if (this.woken) return false;
    this.woken = true;
    this.record = record;
    return true;
  }

  tell(): void {
    const call = this.#call;
    this.#call = undefined;
    call?.(this.record);
  }

  wake(record: RecordView | undefined): void {
    if (this.settle(record)) this.tell();
  }

  onWoken(call: Woken): void {
    this.#call = call;
    if (this.woken) this.tell();
  }
}

export class Waiters {
  readonly #clock: Clock;
  readonly #engine: TaskStore;
  readonly #unwatch: () => void;
  /** First waiter of each task. Bounded by the server's connections. */
  readonly #byTask: Table<Waiter>;
  readonly #timeouts = new Heap<Waiter>();
  #woken: Waiter[] = [];
  #alarm: Alarm | undefined;
  #alarmAt = Infinity;

  /** `seed` of the hash table: clients choose some ids. */
  constructor(engine: TaskStore, clock: Clock, seed = 0) {
    this.#byTask = new Table(seed);
    this.#clock = clock;
    this.#engine = engine;
    this.#unwatch = engine.watch({ settled: (record) => this.#settled(record) });
  }

  get size(): number {
    return this.#byTask.size;
  }

  expect(id: string, polls = false): Waiter {
    const waiter = new Waiter(id, polls);
    this.#add(waiter);
    return waiter;
  }

  /** The task joined another: waits for that one, which may have finished meanwhile. */
  async follow(waiter: Waiter, id: string): Promise<void> {
    this.release(waiter);
    waiter.id = id;
    this.#add(waiter);
    try {
      const record = await this.#engine.outcome(id);
      if (record?.outcome !== undefined) this.#settled(record);
    } catch (error) {
      this.release(waiter);
      throw error;
    }
  }

  wait(waiter: Waiter, until: number): Promise<RecordView | undefined> {
    return new Promise((resolve) => this.call(waiter, until, resolve));
  }

  /** As `wait`, with a callback, which must not throw: others are called after it. */
  call(waiter: Waiter, until: number, woken: Woken): void {
    if (!waiter.woken) {
      this.#timeouts.set(waiter, until);
      if (until < this.#alarmAt) this.#arm(until);
    }
    waiter.onWoken(woken);
  }

  polled(id: string): boolean {
    for (let each = this.#byTask.get(id); each !== undefined; each = each.next) if (each.polls) return true;
    return false;
  }

  /** Stops waiting. Returns whether no other request waits for that task. */
  release(waiter: Waiter): boolean {
    this.#timeouts.remove(waiter);
    const first = this.#byTask.get(waiter.id);
    if (first === undefined) return true;
    if (first === waiter) {
      if (waiter.next === undefined) return this.#byTask.delete(waiter.id);
      this.#byTask.set(waiter.id, waiter.next);
      return false;
    }
    for (let each = first; each.next !== undefined; each = each.next) {
      if (each.next === waiter) each.next = waiter.next;
      if (each.next === undefined) break;
    }
    return false;
  }

  /** Wakes all without a record; the tasks stay in the engine. */
  releaseAll(): void {
    for (const first of this.#byTask.values()) this.#wakeAll(first, undefined);
    this.#byTask.clear();
  }

  close(): void {
    this.#unwatch();
    this.releaseAll();
    this.#alarm?.cancel();
  }

  #add(waiter: Waiter): void {
    waiter.next = this.#byTask.get(waiter.id);
    this.#byTask.set(waiter.id, waiter);
  }

  #settled(record: RecordView): void {
    const first = this.#byTask.get(record.task.id);
    if (first === undefined) return;
    this.#byTask.delete(record.task.id);
    this.#wakeAll(first, record);
  }

  #wakeAll(first: Waiter, record: RecordView | undefined): void {
    for (let each: Waiter | undefined = first; each !== undefined; each = each.next) {
      this.#timeouts.remove(each);
      if (each.settle(record) && this.#woken.push(each) === 1) queueMicrotask(this.#tellAll);
    }
  }

  /** After the engine has settled the whole batch: responding takes longer than settling. */
  readonly #tellAll = (): void => {
    const woken = this.#woken;
    this.#woken = [];
    for (const waiter of woken) waiter.tell();
  };

  #arm(at: number): void {
    this.#alarm?.cancel();
    this.#alarmAt = at;
    this.#alarm = at === Infinity ? undefined : this.#clock.at(at, () => this.#ring());
  }

  #ring(): void {
    const now = this.#clock.now();
    for (
      let first = this.#timeouts.first;
      first !== undefined && first.dueAt <= now;
      first = this.#timeouts.first
    ) {
      this.release(first);
      first.wake(undefined);
    }
    this.#arm(this.#timeouts.first?.dueAt ?? Infinity);
  }
}
