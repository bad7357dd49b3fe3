/**
 * Injected time.
 *
 * Instants are milliseconds that read like Unix time but never jump: the wall clock at process start plus a monotonic
 * count. Only this file, `fine-timer.ts` and `app/clock/thread.ts` touch real time; `cli/plan/virtual-clock.ts` is the
 * other implementation.
 *
 * Node's timers have a resolution of 1 ms: a wait of 0.3 ms takes 1.1, and since they count from the start of the event
 * loop turn they may fire almost 1 ms early; then the wait continues. For finer timers see `Clock.at`.
 */
import { FineTimer } from "./clock/fine-timer.ts";

export interface Alarm {
  cancel(): void;
}

export interface Clock {
  /** Unix milliseconds, monotonic, with a fraction. */
  now(): number;
  /**
   * The wall clock, which may jump: for instants from elsewhere, such as a token's expiry. `now` stops while the
   * machine is suspended, and keeps the wall clock's error at the start.
   */
  wall(): number;
  /**
   * Runs `ring` once, at `time` or as soon after as possible, never before. `withinMs`: acceptable lateness; below 1 ms
   * it costs a thread while in use, and about 0.1 ms of CPU per alarm.
   */
  at(time: number, ring: () => void, withinMs?: number): Alarm;
  /** Ends the thread, if any, so that the process can exit; the next fine alarm starts another. */
  rest?(): Promise<void>;
}

const GRAIN_MS = 1;

function machineMs(): number {
  return Number(process.hrtime.bigint()) / 1e6;
}

export class SystemClock implements Clock {
  readonly #origin: number;
  #fine: FineTimer | undefined;

  /** `epoch`: of another process's clock on this machine, with which this one then agrees. */
  constructor(epoch?: number) {
    this.#origin = epoch === undefined ? performance.timeOrigin : epoch + machineMs() - performance.now();
  }

  /** Unix time when the machine's monotonic clock, which all its processes share, was 0. */
  get epoch(): number {
    return this.now() - machineMs();
  }

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
 * Drops its callback once fired or cancelled. Node's timers keep each other alive for longer, and with them whole
 * batches were promoted to the old generation.
 */
class SystemAlarm implements Alarm {
  readonly #clock: SystemClock;
  readonly #time: number;
  #timer: NodeJS.Timeout;
  #ring: (() => void) | undefined;
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
