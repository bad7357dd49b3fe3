/**
 * What comes while calls are on their way goes together in the next one: the busier the server, the larger the bundles.
 *
 * The first of a tick sets out when the turn of the event loop ends, or `tickMs` after the last one did: a call costs the same
 * for one task as for ten. A full load sets out at once. Nothing sets out while two calls are on their way: the
 * server has one to do while the reply to the other is read. A group is what may travel together.
 */
import type { Clock } from "../../app/clock.ts";

const MAX_TOGETHER = 128;
const ON_THEIR_WAY = 2;
/** While a call is on its way the next one waits for so many, or so long: a busy server gets larger bundles. */
const ENOUGH = 16;
const MOST_TICKS = 3;

export class Gathering<Value> {
  readonly #send: (values: readonly Value[]) => Promise<void>;
  readonly #clock: Clock;
  readonly #tickMs: number;
  /** When the last call of each group set out. */
  readonly #leftAt = new Map<number, number>();
  /** By group; none that is empty. */
  readonly #gathered = new Map<number, Value[]>();
  /** Calls on their way, by group; none that is 0. */
  readonly #calls = new Map<number, number>();

  /** `send` never rejects. */
  constructor(send: (values: readonly Value[]) => Promise<void>, clock: Clock, tickMs: number) {
    this.#send = send;
    this.#clock = clock;
    this.#tickMs = tickMs;
  }

  add(group: number, value: Value): void {
    const gathered = this.#gathered.get(group);
    if (gathered === undefined) {
      this.#gathered.set(group, [value]);
      this.#flushInTime(group);
      return;
    }
    const count = gathered.push(value);
    if (count >= MAX_TOGETHER || (count === ENOUGH && this.#calls.has(group))) this.#flush(group);
  }

  /** The one of a group that has been waiting longest. */
  first(group: number): Value | undefined {
    return this.#gathered.get(group)?.[0];
  }

  /** When this turn of the event loop ends, or the tick. */
  #flushInTime(group: number): void {
    const leavesAt = (this.#leftAt.get(group) ?? -Infinity) + this.#tickMs;
    const flush = (): void => {
      this.#flush(group);
      // Too few, and a call is on its way: when it arrives, when there are enough, or now.
      if (this.#gathered.has(group))
        this.#clock.at(leavesAt + (MOST_TICKS - 1) * this.#tickMs, () => this.#flush(group));
    };
    if (this.#clock.now() < leavesAt) this.#clock.at(leavesAt, flush);
    else setImmediate(flush);
  }

  /** Sends all that gathered, unless the server has enough to do. */
  #flush(group: number): void {
    const gathered = this.#gathered.get(group);
    const calls = this.#onTheirWay(group);
    if (gathered === undefined || calls >= ON_THEIR_WAY) return;
    const sinceMs = this.#clock.now() - (this.#leftAt.get(group) ?? -Infinity);
    if (sinceMs < this.#tickMs && gathered.length < MAX_TOGETHER) return;
    if (calls > 0 && gathered.length < ENOUGH && sinceMs < MOST_TICKS * this.#tickMs) return;
    this.#gathered.delete(group);
    this.#leftAt.set(group, this.#clock.now());
    for (let at = 0; at < gathered.length; at += MAX_TOGETHER) {
      this.#calls.set(group, this.#onTheirWay(group) + 1);
      void this.#send(gathered.slice(at, at + MAX_TOGETHER)).then(() => this.#arrived(group));
    }
  }

  #arrived(group: number): void {
    const left = this.#onTheirWay(group) - 1;
    if (left === 0) this.#calls.delete(group);
    else this.#calls.set(group, left);
    if (this.#gathered.has(group)) this.#flushInTime(group);
  }

  #onTheirWay(group: number): number {
    return this.#calls.get(group) ?? 0;
  }
}
