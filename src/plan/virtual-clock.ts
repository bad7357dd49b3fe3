/**
 * Time that passes only when nothing is left to do.
 *
 * Alarms stand in a heap; `run` rings them in order and lets every promise that an alarm moved come to
 * rest before the next one, so that hours of a system take seconds and the same seed gives the same run.
 */
import type { Alarm, Clock } from "../clock.ts";
import { type Due, Heap } from "../core/heap.ts";

/** Alarms of one instant ring in the order in which they were set: a tick apart that no rule can see. */
const TICK_MS = 1e-9;

class VirtualAlarm implements Alarm, Due {
  readonly ring: () => void;
  readonly #alarms: Heap<VirtualAlarm>;
  dueAt = Infinity;
  place = -1;

  constructor(alarms: Heap<VirtualAlarm>, ring: () => void) {
    this.#alarms = alarms;
    this.ring = ring;
  }

  cancel(): void {
    this.#alarms.remove(this);
  }
}

export class VirtualClock implements Clock {
  readonly #alarms = new Heap<VirtualAlarm>();
  /** How far somebody has set the machine's clock, in ms. */
  setMs = 0;
  #now: number;
  #order = 0;

  constructor(startAt = 1_000_000) {
    this.#now = startAt;
  }

  now(): number {
    return this.#now;
  }

  wall(): number {
    return this.#now + this.setMs;
  }

  at(time: number, ring: () => void): Alarm {
    const alarm = new VirtualAlarm(this.#alarms, ring);
    this.#order = (this.#order + 1) % 1000;
    this.#alarms.set(alarm, Math.max(time, this.#now) + this.#order * TICK_MS);
    return alarm;
  }

  /** Rings everything up to `until`, and stands there. Returns how many alarms rang. */
  async run(until: number): Promise<number> {
    let rung = 0;
    await settled();
    while (this.#alarms.firstAt <= until) {
      const alarm = this.#alarms.first!;
      this.#alarms.remove(alarm);
      this.#now = Math.max(this.#now, alarm.dueAt);
      alarm.ring();
      rung++;
      await settled();
    }
    this.#now = Math.max(this.#now, until);
    return rung;
  }
}

/** Every microtask that is due has run. */
function settled(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}
