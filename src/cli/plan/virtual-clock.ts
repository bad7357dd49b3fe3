/**
 * Virtual time. Alarms are in a heap; `run` fires them in order and lets all promises settle before the next, so hours
 * take seconds and the same seed gives the same run.
 */
import { setImmediate } from "node:timers";
import type { Alarm, Clock } from "../../app/clock.ts";
import { type Due, Heap } from "../../core/heap.ts";

/** Keeps alarms of one instant in the order they were set; too small for any rule to see. */
const TICK_MS = 1e-9;
/** Alarms per event-loop turn: signals must be handled during long runs. */
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

/** Arrivals without an alarm each: most of them wake nothing. */
export interface VirtualStream {
  /** Infinity when there are no more. */
  readonly nextAt: number;
  /** Returns whether promises must settle before time goes on. */
  arrive(): boolean;
}

export class VirtualClock implements Clock {
  readonly #alarms = new Heap<VirtualAlarm>();
  #stream: VirtualStream | undefined;
  #unsettled = false;
  /** Simulated adjustment of the wall clock, ms. */
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

  /** Arrivals come before alarms of the same instant. */
  follow(stream: VirtualStream): void {
    this.#stream = stream;
  }

  /** Fires everything up to `until` and stops there. Returns the number of alarms fired. */
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

  /** Arrivals before the next alarm, up to the first with promises to settle. */
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
 * Resolves when the microtask queue is empty. Call it from a microtask: Node runs `process.nextTick` callbacks only
 * when none is left. A quarter of the cost of an event-loop turn.
 */
function settled(): Promise<void> {
  return new Promise((resolve) => process.nextTick(resolve));
}

/** As `settled`, and I/O events were handled. */
function loopTurned(): Promise<void> {
  return new Promise((resolve) => setImmediate(resolve));
}
