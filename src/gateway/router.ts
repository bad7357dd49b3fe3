/**
 * Who in this process waits for which task.
 *
 * A caller says that it will wait (`expect`) before it puts the task into the engine, so that an outcome
 * can never arrive between the two. The engine's word that a task is settled wakes everybody who waits
 * for that id, once. How long a caller waits is its own affair: at `until` it wakes empty-handed.
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
  /** It only looks: the task is not its own request. */
  readonly polls: boolean;
  /** The next one that waits for the same task; written and read by the router. */
  next: Waiter | undefined;
  dueAt = Infinity;
  place = -1;
  #woken = false;
  #record: RecordView | undefined;
  #call: Woken | undefined;

  constructor(id: string, polls: boolean) {
    this.id = id;
    this.polls = polls;
  }

  get woken(): boolean {
    return this.#woken;
  }

  /** Its wait is over; it is told so by `tell`. False: that was known already. */
  settle(record: RecordView | undefined): boolean {
    if (this.#woken) return false;
    this.#woken = true;
    this.#record = record;
    return true;
  }

  tell(): void {
    this.#call?.(this.#record);
  }

  wake(record: RecordView | undefined): void {
    if (this.settle(record)) this.tell();
  }

  /** Calls `woken` when the wait is over: at once, if it is. */
  onWoken(woken: Woken): void {
    this.#call = woken;
    if (this.#woken) this.tell();
  }
}

export class Router {
  readonly #clock: Clock;
  readonly #engine: Engine;
  readonly #unwatch: () => void;
  /** The first of those who wait for each task. Bounded by the connections that the server holds. */
  readonly #waiting: Table<Waiter>;
  readonly #timeouts = new Heap<Waiter>();
  /** Their wait is over, and they are told so in a moment. */
  #woken: Waiter[] = [];
  #alarm: Alarm | undefined;
  #alarmAt = Infinity;

  /** `seed`: of the table of ids, some of which strangers choose. */
  constructor(engine: Engine, clock: Clock, seed = 0) {
    this.#waiting = new Table(seed);
    this.#clock = clock;
    this.#engine = engine;
    this.#unwatch = engine.watch({ settled: (record) => this.#settled(record) });
  }

  get waiting(): number {
    return this.#waiting.size;
  }

  /** Listens for `id`, before anything is said about it. */
  expect(id: string, polls = false): Waiter {
    const waiter = new Waiter(id, polls);
    this.#add(waiter);
    return waiter;
  }

  /** The task joined another: listen for that one, which may have ended meanwhile. */
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

  /** As `wait`, without a promise for every request. `woken` must not throw: others are told after it. */
  call(waiter: Waiter, until: number, woken: Woken): void {
    if (!waiter.woken) this.#limit(waiter, until);
    waiter.onWoken(woken);
  }

  /** Somebody looks at this task who has not asked for it with a request of its own. */
  polled(id: string): boolean {
    for (let each = this.#waiting.get(id); each !== undefined; each = each.next) if (each.polls) return true;
    return false;
  }

  /** Stops listening. Returns whether nobody else here waits for that task. */
  release(waiter: Waiter): boolean {
    this.#timeouts.remove(waiter);
    const first = this.#waiting.get(waiter.id);
    if (first === undefined) return true;
    if (first === waiter) {
      if (waiter.next === undefined) return this.#waiting.delete(waiter.id);
      this.#waiting.set(waiter.id, waiter.next);
      return false;
    }
    for (let each = first; each.next !== undefined; each = each.next) {
      if (each.next === waiter) each.next = waiter.next;
      if (each.next === undefined) break;
    }
    return false;
  }

  /** Wakes everybody empty-handed; what they wait for stays in the engine. */
  releaseAll(): void {
    for (const first of this.#waiting.values()) this.#wakeAll(first, undefined);
    this.#waiting.clear();
  }

  close(): void {
    this.#unwatch();
    this.releaseAll();
    this.#alarm?.cancel();
  }

  #add(waiter: Waiter): void {
    waiter.next = this.#waiting.get(waiter.id);
    this.#waiting.set(waiter.id, waiter);
  }

  #settled(record: RecordView): void {
    const { id } = record.task;
    const first = this.#waiting.get(id);
    if (first === undefined) return;
    this.#waiting.delete(id);
    this.#wakeAll(first, record);
  }

  #wakeAll(first: Waiter, record: RecordView | undefined): void {
    for (let each: Waiter | undefined = first; each !== undefined; each = each.next) {
      this.#timeouts.remove(each);
      if (each.settle(record) && this.#woken.push(each) === 1) void Promise.resolve().then(this.#tellAll);
    }
  }

  /**
   * A whole batch in one go, and only when the engine has settled all of it: what answers do takes longer than
   * settling, and must not happen in the middle of it.
   */
  readonly #tellAll = (): void => {
    const woken = this.#woken;
    this.#woken = [];
    for (const waiter of woken) waiter.tell();
  };

  #limit(waiter: Waiter, until: number): void {
    this.#timeouts.set(waiter, until);
    if (until < this.#alarmAt) this.#arm(until);
  }

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
    this.#arm(this.#timeouts.firstAt);
  }
}
