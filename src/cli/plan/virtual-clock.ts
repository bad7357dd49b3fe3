/**
 * Time that passes only when nothing is left to do.
 *
 * Alarms stand in a heap; `run` rings them in order and lets every promise that an alarm moved come to
 * rest before the next one, so that hours of a system take seconds and the same seed gives the same run.
 */
import { setImmediate } from "node:timers";
import type { Alarm, Clock } from "../../app/clock.ts";
import { type Due, Heap } from "../../core/heap.ts";

/** Alarms of one instant ring in the order in which they were set: a tick apart that no rule can see. */
const TICK_MS = 1e-9;
/** So often the event loop gets its turn: a signal to stop must be heard in the longest run. */
const RINGS_A_TURN = 256;

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

/** Arrivals that need no alarm each: most of them wake nobody. */
export interface VirtualStream {
  /** When the next one is due; Infinity when there are no more. */
  readonly nextAt: number;
  /** It is due now. Says whether a promise was left to come to rest before time goes on. */
  arrive(): boolean;
}

export class VirtualClock implements Clock {
  readonly #alarms = new Heap<VirtualAlarm>();
  #stream: VirtualStream | undefined;
  #unsettled = false;
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

  /** Takes arrivals from `stream` from now on; they come before alarms of the same instant. */
  follow(stream: VirtualStream): void {
    this.#stream = stream;
  }

  /** Rings everything up to `until`, and stands there. Returns how many alarms rang. */
  async run(until: number): Promise<number> {
    let rung = 0;
    await loopTurned();
    for (;;) {
      this.#takeArrivals(until);
      if (this.#unsettled) {
        this.#unsettled = false;
        await settled();
        continue;
      }
      if (this.#alarms.firstAt > until) break;
      const alarm = this.#alarms.first!;
      this.#alarms.remove(alarm);
      this.#now = Math.max(this.#now, alarm.dueAt);
      alarm.ring();
      rung++;
      await (rung % RINGS_A_TURN === 0 ? loopTurned() : settled());
    }
    this.#now = Math.max(this.#now, until);
    return rung;
  }

  /** Those before the next alarm, up to the first that moved something. */
  #takeArrivals(until: number): void {
    const stream = this.#stream;
    if (stream === undefined) return;
    while (stream.nextAt <= until && stream.nextAt <= this.#alarms.firstAt) {
      this.#now = Math.max(this.#now, stream.nextAt);
      this.#unsettled = stream.arrive();
      if (this.#unsettled) return;
    }
  }
}

/**
 * Every microtask that is due has run, whatever it led to. To be asked from within one: Node turns to what
 * `process.nextTick` was given only when none is left. A quarter of what a turn of the event loop costs.
 */
function settled(): Promise<void> {
  return new Promise((resolve) => process.nextTick(resolve));
}

/** The same, and whatever came from outside was heard. */
function loopTurned(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}
