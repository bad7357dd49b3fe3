/** How often something happened a second, over the last ten whole seconds. Whoever counts knows the time. */

const SECONDS = 10;
const SECOND_MS = 1000;

export class RecentRate {
  /** Counts by second, in a ring; the one that runs lies at `#at` and ends at `#endsAt`. */
  readonly #perSecond = new Array<number>(SECONDS + 1).fill(0);
  readonly #startedAt: number;
  #endsAt: number;
  #at = 0;

  constructor(now: number) {
    this.#startedAt = now;
    this.#endsAt = (Math.floor(now / SECOND_MS) + 1) * SECOND_MS;
  }

  count(now: number): void {
    if (now >= this.#endsAt) this.#turn(now);
    this.#perSecond[this.#at]!++;
  }

  /** Over whole seconds that have passed, so that the number does not sag at each new one. */
  perSecond(now: number): number {
    if (now >= this.#endsAt) this.#turn(now);
    const seconds = Math.min(SECONDS, Math.max(1, (now - this.#startedAt) / SECOND_MS));
    const sum = this.#perSecond.reduce((total, count, at) => (at === this.#at ? total : total + count), 0);
    return Math.round((10 * sum) / seconds) / 10;
  }

  #turn(now: number): void {
    const second = Math.floor(now / SECOND_MS);
    const passed = second + 1 - this.#endsAt / SECOND_MS;
    for (let step = Math.min(passed, this.#perSecond.length); step > 0; step--) {
      this.#at = (this.#at + 1) % this.#perSecond.length;
      this.#perSecond[this.#at] = 0;
    }
    this.#endsAt = (second + 1) * SECOND_MS;
  }
}
