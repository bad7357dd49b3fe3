/**
 * Which requests of this process wait for which task.
 *
 * A request registers (`expect`) before its task is put into the engine, so that no outcome can arrive between the two.
 * The engine's notification wakes every waiter of that id, once; at its own time limit a waiter wakes without a record.
 */
import type { Alarm, Clock } from "../app/clock.ts";
import { type Due, Heap } from "../core/heap.ts";
import { Table } from "../core/table.ts";
import type { Engine, RecordView } from "../engine/engine.ts";

/** Takes the finished record, or undefined when the time was up. */
export type Woken = (record: RecordView | undefined) => void;

export class Waiter implements Due {
  /** The task it waits for; changes when the task joins another. */
  id: string;
  /** A long poll: the task is not this request's own. */
  readonly polls: boolean;
  /** The next waiter for the same task; written and read by `Waiters`. */
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

  /** Its wait is over, which `tell` says. False: it was over already. */
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
  readonly #engine: Engine;
  readonly #unwatch: () => void;
  /** The first waiter of each task. Bounded by the connections that the server holds. */
  readonly #byTask: Table<Waiter>;
  readonly #timeouts = new Heap<Waiter>();
  /** Woken, and told so in a microtask. */
  #woken: Waiter[] = [];
  #alarm: Alarm | undefined;
  #alarmAt = Infinity;

  /** `seed`: of the table of ids, some of which clients choose. */
  constructor(engine: Engine, clock: Clock, seed = 0) {
    this.#byTask = new Table(seed);
    this.#clock = clock;
    this.#engine = engine;
    this.#unwatch = engine.watch({ settled: (record) => this.#settled(record) });
  }

  /** Tasks that are waited for. */
  get size(): number {
    return this.#byTask.size;
  }

  expect(id: string, polls = false): Waiter {
    const waiter = new Waiter(id, polls);
    this.#add(waiter);
    return waiter;
  }

  /** The task joined another: waits for that one, which may have ended meanwhile. */
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

  /** The finished record, or undefined at `until`. */
  wait(waiter: Waiter, until: number): Promise<RecordView | undefined> {
    return new Promise((resolve) => this.call(waiter, until, resolve));
  }

  /** As `wait`, without a promise. `woken` must not throw: others are told after it. */
  call(waiter: Waiter, until: number, woken: Woken): void {
    if (!waiter.woken) {
      this.#timeouts.set(waiter, until);
      if (until < this.#alarmAt) this.#arm(until);
    }
    waiter.onWoken(woken);
  }

  /** Whether a long poll waits for this task. */
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

  /** A whole batch at once, after the engine has settled all of it: answering takes longer than settling. */
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
