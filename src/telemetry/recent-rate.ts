/** How often something happened a second, over the last ten whole seconds. */
import type { Clock } from "../clock.ts";

const SECONDS = 10;

export class RecentRate {
  readonly #clock: Clock;
  /** Counts by second, in a ring; `#second` is the newest. */
  readonly #perSecond = new Array<number>(SECONDS + 1).fill(0);
  readonly #startedAt: number;
  #second: number;

  constructor(clock: Clock) {
    this.#clock = clock;
    this.#startedAt = clock.now();
    this.#second = Math.floor(this.#startedAt / 1000);
  }

  count(): void {
    this.#turn();
    this.#perSecond[this.#second % this.#perSecond.length]!++;
  }

  /** Over whole seconds that have passed, so that the number does not sag at each new one. */
  perSecond(): number {
    this.#turn();
    const seconds = Math.min(SECONDS, Math.max(1, (this.#clock.now() - this.#startedAt) / 1000));
    const newest = this.#second % this.#perSecond.length;
    const sum = this.#perSecond.reduce((total, count, at) => (at === newest ? total : total + count), 0);
    return Math.round((10 * sum) / seconds) / 10;
  }

  #turn(): void {
    const second = Math.floor(this.#clock.now() / 1000);
    const steps = Math.min(second - this.#second, this.#perSecond.length);
    for (let step = 1; step <= steps; step++)
      this.#perSecond[(second - steps + step) % this.#perSecond.length] = 0;
    this.#second = second;
  }
}
