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
import { type Due, Heap } from "../core/heap.ts";
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

/** The next multiple of `everyMs`: what is done periodically is done in one turn, and wakes the process once. */
export function nextBeat(now: number, everyMs: number): number {
  return (Math.floor(now / everyMs) + 1) * everyMs;
}

const GRAIN_MS = 1;
/** Of Node's timers; a longer wait continues. */
const LONGEST_MS = 2 ** 31 - 1;

function machineMs(): number {
  return Number(process.hrtime.bigint()) / 1e6;
}

/**
 * One Node timer for all alarms, armed for the first. Most alarms are cancelled, and most of those were never the first:
 * such a one costs two steps in a heap, where a separate timer cost Node a list and a place in its queue.
 */
export class SystemClock implements Clock {
  readonly #origin: number;
  readonly #alarms = new Heap<SystemAlarm>();
  readonly #rang = (): void => this.#ring();
  #timer: NodeJS.Timeout | undefined;
  /** What the timer is armed for; its alarm may be cancelled since. */
  #timerAt = Infinity;
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
    const alarm = new SystemAlarm(this, ring);
    this.#alarms.set(alarm, time);
    if (time < this.#timerAt) this.#arm(time);
    if (withinMs < GRAIN_MS) {
      this.#fine ??= new FineTimer(() => this.now());
      alarm.fine = this.#fine.add(time, alarm);
    }
    return alarm;
  }

  /** For an alarm that has rung or is cancelled. */
  remove(alarm: SystemAlarm): void {
    this.#alarms.remove(alarm);
    // A timer keeps the process alive.
    if (this.#alarms.first === undefined) this.#disarm();
  }

  async rest(): Promise<void> {
    await this.#fine?.rest();
  }

  #arm(time: number): void {
    clearTimeout(this.#timer);
    this.#timerAt = time;
    const afterMs = Math.min(Math.max(0, Math.ceil(time - this.now())), LONGEST_MS);
    this.#timer = setTimeout(this.#rang, afterMs);
  }

  #disarm(): void {
    clearTimeout(this.#timer);
    this.#timer = undefined;
    this.#timerAt = Infinity;
  }

  #ring(): void {
    this.#disarm();
    const now = this.now();
    const due: SystemAlarm[] = [];
    for (
      let { first } = this.#alarms;
      first !== undefined && first.dueAt <= now;
      first = this.#alarms.first
    ) {
      this.#alarms.remove(first);
      due.push(first);
    }
    if (this.#alarms.first !== undefined) this.#arm(this.#alarms.firstAt);
    // Alarms that these set are for a later turn, however soon they are due.
    for (const alarm of due) alarm.rings();
  }
}

/** Drops its callback once fired or cancelled: whole batches were promoted to the old generation with it. */
class SystemAlarm implements Alarm, Due {
  readonly #clock: SystemClock;
  #ring: (() => void) | undefined;
  fine: Alarm | undefined;
  dueAt = Infinity;
  place = -1;

  constructor(clock: SystemClock, ring: () => void) {
    this.#clock = clock;
    this.#ring = ring;
  }

  cancel(): void {
    this.#ring = undefined;
    this.#clock.remove(this);
    this.fine?.cancel();
    this.fine = undefined;
  }

  rings(): void {
    const ring = this.#ring;
    this.cancel();
    ring?.();
  }
}
