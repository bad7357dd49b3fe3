/**
 * Batches calls: what arrives while calls are in flight goes together in the next one, so a busier server gets larger
 * bundles. The first of a tick leaves at the end of the event loop turn, or `tickMs` after the last call; a full load
 * leaves at once. At most two calls are in flight: the server works on one while the reply to the other is read. Values
 * of one group may travel together.
 */
import type { Clock } from "../../app/clock.ts";

const MAX_TOGETHER = 128;
const ON_THEIR_WAY = 2;
const ENOUGH = 16; // while a call is in flight the next waits for this many, or MOST_TICKS
const MOST_TICKS = 3;

export class Gathering<Value> {
  readonly #send: (values: readonly Value[]) => Promise<void>;
  readonly #clock: Clock;
  readonly #tickMs: number;
  readonly #leftAt = new Map<number, number>(); // when the last call of each group left
  readonly #gathered = new Map<number, Value[]>(); // by group; never empty
  readonly #calls = new Map<number, number>(); // calls in flight by group; never 0

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

  first(group: number): Value | undefined {
    return this.#gathered.get(group)?.[0];
  }

  /** At the end of this event loop turn, or of the tick. */
  #flushInTime(group: number): void {
    const leavesAt = (this.#leftAt.get(group) ?? -Infinity) + this.#tickMs;
    const flush = (): void => {
      this.#flush(group);
      // With too few and a call in flight: when its reply comes, when there are enough, or now.
      if (this.#gathered.has(group))
        this.#clock.at(leavesAt + (MOST_TICKS - 1) * this.#tickMs, () => this.#flush(group));
    };
    if (this.#clock.now() < leavesAt) this.#clock.at(leavesAt, flush);
    else setImmediate(flush);
  }

  /** Sends all that gathered, unless two calls are in flight. */
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
