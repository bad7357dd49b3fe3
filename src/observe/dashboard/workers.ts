/**
 * What each worker of a model did of late.
 *
 * Shares are over the last ten whole seconds. A worker's own pace is judged over time: the medians of its
 * batches in the last 90 windows of ten seconds (15 minutes in which it worked) tell what is usual, and the
 * median of its last `RECENT` batches what is now. It is slow when it needs twice its usual time and at least
 * `SLOW_BY_MS` more, over at least `ENOUGH` batches. Where its batches are larger than usual, that may take up to as
 * many times longer as they are larger and is no reason to call it slow. A worker that nobody has seen for a minute is forgotten.
 */
import { median } from "../../core/median.ts";
import type { WorkerSight } from "../sight.ts";
import type { WorkerRow } from "./frames.ts";
import { rounded } from "./slots.ts";

export const RECENT_SECONDS = 10;
/** One more than are read: the second that runs. */
const RING = RECENT_SECONDS + 1;
const RECENT = 16;
const ENOUGH = 5;
const WINDOW_MS = 10_000;
const WINDOWS = 90;
const SLOW_FACTOR = 2;
const SLOW_BY_MS = 20;
/** What it did longer ago says nothing of now. */
const STALE_MS = 30_000;
const FORGET_SECONDS = 60;

class Worker {
  readonly busyMs = new Float64Array(RING);
  readonly filledMs = new Float64Array(RING);
  /** Milliseconds and tasks of its last batches, in rings. */
  readonly recent: number[] = [];
  readonly recentSizes: number[] = [];
  recentNext = 0;
  /** Of the window that runs. */
  window: number[] = [];
  windowSizes: number[] = [];
  windowEndsAt = 0;
  /** Medians of windows, in rings. */
  readonly medians: number[] = [];
  readonly medianSizes: number[] = [];
  mediansNext = 0;
  lastAt = -Infinity;
  downSince = 0;
  seenIn: number;

  constructor(second: number) {
    this.seenIn = second;
  }

  took(ms: number, size: number, now: number): void {
    this.lastAt = now;
    ringPut(this.recentSizes, RECENT, this.recentNext, size);
    this.recentNext = ringPut(this.recent, RECENT, this.recentNext, ms);
    if (now >= this.windowEndsAt) {
      if (this.window.length > 0) {
        ringPut(this.medianSizes, WINDOWS, this.mediansNext, median(this.windowSizes));
        this.mediansNext = ringPut(this.medians, WINDOWS, this.mediansNext, median(this.window));
      }
      this.window = [];
      this.windowSizes = [];
      this.windowEndsAt = now + WINDOW_MS;
    }
    if (this.window.length >= RECENT) return;
    this.window.push(ms);
    this.windowSizes.push(size);
  }

  /** How many times larger its batches are than usual; 1 where they are not. */
  get larger(): number {
    return Math.max(1, median(this.recentSizes) / median(this.medianSizes));
  }
}

export interface SlowWorker {
  readonly name: string;
  readonly nowMs: number;
  readonly usualMs: number;
}

export class WorkerBook {
  readonly #workers = new Map<string, Worker>();
  #second: number;
  /** Whole seconds that can be read, up to ten. */
  #seconds = 0;

  constructor(second: number) {
    this.#second = second;
  }

  /** Its time went by with a batch; less than nothing when too much was counted before. */
  spent(name: string, ms: number, filledMs: number): void {
    const worker = this.#worker(name);
    const at = this.#second % RING;
    worker.busyMs[at]! += ms;
    worker.filledMs[at]! += filledMs;
  }

  took(name: string, ms: number, size: number, now: number): void {
    this.#worker(name).took(ms, size, now);
  }

  /** A second is over. `sights`: who there is now. Those that went down or came back meanwhile. */
  close(sights: readonly WorkerSight[], now: number): WorkerSight[] {
    const changed: WorkerSight[] = [];
    this.#second++;
    this.#seconds = Math.min(RECENT_SECONDS, this.#seconds + 1);
    const at = this.#second % RING;
    for (const sight of sights) {
      const worker = this.#worker(sight.name);
      worker.seenIn = this.#second;
      const down = sight.state === "down";
      if (down === worker.downSince > 0) continue;
      worker.downSince = down ? now : 0;
      changed.push(sight);
    }
    for (const [name, worker] of this.#workers) {
      worker.busyMs[at] = 0;
      worker.filledMs[at] = 0;
      if (this.#second - worker.seenIn > FORGET_SECONDS) this.#workers.delete(name);
    }
    return changed;
  }

  /** It said so itself: exact, where looking once a second is not. */
  wentDown(name: string, now: number): void {
    const worker = this.#worker(name);
    if (worker.downSince === 0) worker.downSince = now;
  }

  row(sight: WorkerSight, now: number): WorkerRow {
    const { name, state, inFlight, ratio, down, zone } = sight;
    const worker = this.#worker(name);
    const why = down?.why ?? "";
    const sinceMs = worker.downSince === 0 ? 0 : Math.round(now - worker.downSince);
    return {
      name,
      state,
      busy: this.#share(worker.busyMs),
      filled: this.#share(worker.filledMs),
      inFlight,
      ratio: rounded(ratio),
      batchMs: rounded(median(worker.recent)),
      ...(state === "down" && { down: { why, sinceMs, retryInMs: Math.round(down?.retryInMs ?? 0) } }),
      zone,
    };
  }

  /** The one that fell behind its own pace most, if any did. */
  slowest(names: readonly string[], now: number): SlowWorker | undefined {
    let worst: SlowWorker | undefined;
    for (const name of names) {
      const worker = this.#workers.get(name);
      if (worker === undefined || worker.medians.length === 0 || worker.recent.length < ENOUGH) continue;
      if (worker.lastAt < now - STALE_MS) continue;
      const usualMs = median(worker.medians);
      const nowMs = median(worker.recent);
      if (nowMs < SLOW_FACTOR * worker.larger * usualMs || nowMs < usualMs + SLOW_BY_MS) continue;
      if (worst === undefined || nowMs / usualMs > worst.nowMs / worst.usualMs) {
        worst = { name, nowMs, usualMs };
      }
    }
    return worst;
  }

  #share(ms: Float64Array): number {
    if (this.#seconds === 0) return 0;
    let sum = 0;
    for (let back = 1; back <= this.#seconds; back++) sum += ms[(this.#second - back) % RING]!;
    return rounded(Math.min(1, Math.max(0, sum / (1000 * this.#seconds))));
  }

  #worker(name: string): Worker {
    let worker = this.#workers.get(name);
    if (worker === undefined) this.#workers.set(name, (worker = new Worker(this.#second)));
    return worker;
  }
}

/** Puts it into the place of the oldest; the next place. */
function ringPut(ring: number[], size: number, at: number, value: number): number {
  ring[at] = value;
  return (at + 1) % size;
}
