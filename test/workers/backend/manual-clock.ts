/** A clock that moves only when a test says so. */
import type { Alarm, Clock } from "../../../src/app/clock.ts";

export class ManualClock implements Clock {
  #now: number;
  #waiting: { readonly time: number; readonly ring: () => void }[] = [];

  constructor(start = 1_000_000) {
    this.#now = start;
  }

  now(): number {
    return this.#now;
  }

  wall(): number {
    return this.now();
  }

  at(time: number, ring: () => void): Alarm {
    const alarm = { time, ring };
    this.#waiting.push(alarm);
    return { cancel: () => void (this.#waiting = this.#waiting.filter((other) => other !== alarm)) };
  }

  /** How long until the next alarm rings; Infinity when none is set. */
  get nextMs(): number {
    return Math.min(Infinity, ...this.#waiting.map(({ time }) => time)) - this.#now;
  }

  /** Rings what is due within the next `ms`, in order of time. */
  advance(ms: number): void {
    const until = this.#now + ms;
    for (;;) {
      const [next] = this.#waiting.filter(({ time }) => time <= until).sort((a, b) => a.time - b.time);
      if (next === undefined) break;
      this.#waiting = this.#waiting.filter((other) => other !== next);
      this.#now = Math.max(this.#now, next.time);
      next.ring();
    }
    this.#now = until;
  }
}
