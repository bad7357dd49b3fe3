/**
 * How long this process kept everybody waiting: an alarm every 20 ms, and how late it rang.
 *
 * `monitorEventLoopDelay` of Node measures the same, but leaves out what follows a reset, and would have to be
 * reset each second. Here a stall counts however it lies; it may read up to 20 ms short.
 */
import type { Alarm, Clock } from "../../app/clock.ts";

const EVERY_MS = 20;

export class LoopDelay {
  readonly #clock: Clock;
  #alarm: Alarm;
  #dueAt: number;
  #worstMs = 0;

  constructor(clock: Clock) {
    this.#clock = clock;
    this.#dueAt = clock.now() + EVERY_MS;
    this.#alarm = clock.at(this.#dueAt, () => this.#rang());
  }

  /** The worst since this was last asked; what is late now counts already. */
  take(): number {
    const worst = Math.max(this.#worstMs, this.#clock.now() - this.#dueAt);
    this.#worstMs = 0;
    return worst;
  }

  stop(): void {
    this.#alarm.cancel();
  }

  #rang(): void {
    const now = this.#clock.now();
    this.#worstMs = Math.max(this.#worstMs, now - this.#dueAt);
    this.#dueAt = now + EVERY_MS;
    this.#alarm = this.#clock.at(this.#dueAt, () => this.#rang());
  }
}
