/**
 * Time, as a value that is handed in.
 *
 * Every instant in Ferry is one kind of number: milliseconds that read like Unix time but never
 * jump, because they are the process's start on the wall clock plus a monotonic count since then.
 * This file and what makes its fine alarms (`fine-timer.ts`, `app/clock/thread.ts`) are all that touches real time;
 * `cli/plan/virtual-clock.ts` is the other implementation.
 *
 * Node's timers have a grain of a millisecond: a wait of 0.3 ms takes 1.1, and because they reckon from when the turn
 * of the event loop began, one may ring almost a millisecond early. So whoever is rung early waits on, and whoever
 * cannot spare a millisecond says so: see `Clock.at`.
 */
import { FineTimer } from "./clock/fine-timer.ts";

/** A timer that can be called off; calling it off twice, or after it fired, does nothing. */
export interface Alarm {
  cancel(): void;
}

export interface Clock {
  /** Milliseconds since 1970, monotonic, with a fraction. */
  now(): number;
  /**
   * What the machine's clock says, which jumps when somebody sets it: for instants that others wrote down, such as
   * a token's end. `now` stands still while a machine sleeps, and keeps what was wrong with the clock at the start.
   */
  wall(): number;
  /**
   * Runs `ring` once, at `time` or as soon after it as the process can, never before. `withinMs` says how much later
   * is still in time: a millisecond costs nothing worth counting, less than that costs a thread for as long as
   * the process uses it, and about 0.1 ms of CPU time for each alarm.
   */
  at(time: number, ring: () => void, withinMs?: number): Alarm;
  /** Ends the thread, if there is one, so that the process can end; the next fine alarm starts another. */
  rest?(): Promise<void>;
}

/** What a timer of Node's is good for. */
const GRAIN_MS = 1;

export class SystemClock implements Clock {
  readonly #origin = performance.timeOrigin;
  #fine: FineTimer | undefined;

  now(): number {
    return this.#origin + performance.now();
  }

  wall(): number {
    return Date.now();
  }

  at(time: number, ring: () => void, withinMs = GRAIN_MS): Alarm {
    const alarm = new SystemAlarm(this, time, ring);
    if (withinMs < GRAIN_MS) this.#hurry(alarm, time);
    return alarm;
  }

  async rest(): Promise<void> {
    await this.#fine?.rest();
  }

  #hurry(alarm: SystemAlarm, time: number): void {
    this.#fine ??= new FineTimer(() => this.now());
    alarm.fine = this.#fine.add(time, alarm);
  }
}

/**
 * Lets go of what it would ring for as soon as it has rung or is called off. Node's timers hang on to each other for
 * longer than that, and with them everything that their functions know: whole batches grew old in this way.
 */
class SystemAlarm implements Alarm {
  readonly #clock: SystemClock;
  readonly #time: number;
  #timer: NodeJS.Timeout;
  #ring: (() => void) | undefined;
  /** Rings before the timer does. */
  fine: Alarm | undefined;

  constructor(clock: SystemClock, time: number, ring: () => void) {
    this.#clock = clock;
    this.#time = time;
    this.#ring = ring;
    this.#timer = this.#set();
  }

  cancel(): void {
    this.#ring = undefined;
    clearTimeout(this.#timer);
    this.fine?.cancel();
    this.fine = undefined;
  }

  /** It is time. */
  rings(): void {
    const ring = this.#ring;
    this.cancel();
    ring?.();
  }

  #set(): NodeJS.Timeout {
    const afterMs = Math.max(0, Math.ceil(this.#time - this.#clock.now()));
    return setTimeout(() => this.#rang(), afterMs);
  }

  #rang(): void {
    if (this.#clock.now() < this.#time) this.#timer = this.#set();
    else this.rings();
  }
}
