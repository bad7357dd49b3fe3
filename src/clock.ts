/**
 * Time, as a value that is handed in.
 *
 * Every instant in Ferry is one kind of number: milliseconds that read like Unix time but never
 * jump, because they are the process's start on the wall clock plus a monotonic count since then.
 * This is the only file that touches real time; `plan/virtual-clock.ts` is the other implementation.
 */

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
  /** Runs `ring` once, at `time` or as soon after it as the process can. */
  at(time: number, ring: () => void): Alarm;
}

export class SystemClock implements Clock {
  readonly #origin = performance.timeOrigin;

  now(): number {
    return this.#origin + performance.now();
  }

  wall(): number {
    return Date.now();
  }

  at(time: number, ring: () => void): Alarm {
    // Node fires up to a millisecond early (it truncates); rounding up keeps `now() >= time` true.
    return new SystemAlarm(ring, Math.max(0, Math.ceil(time - this.now())));
  }
}

/**
 * Lets go of what it would ring for as soon as it has rung or is called off. Node's timers hang on to each other for
 * longer than that, and with them everything that their functions know: whole batches grew old in this way.
 */
class SystemAlarm implements Alarm {
  readonly #timer: NodeJS.Timeout;
  #ring: (() => void) | undefined;

  constructor(ring: () => void, afterMs: number) {
    this.#ring = ring;
    this.#timer = setTimeout(() => this.#rings(), afterMs);
  }

  cancel(): void {
    this.#ring = undefined;
    clearTimeout(this.#timer);
  }

  #rings(): void {
    const ring = this.#ring;
    this.#ring = undefined;
    ring?.();
  }
}
