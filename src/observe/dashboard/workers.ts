/**
 * Recent activity of each worker of a model. Shares are over the last ten whole seconds. A worker is compared with
 * itself: the medians of its last 90 ten-second windows with work (15 minutes) give its usual time, the median of its
 * last `RECENT` batches the current one. Slow: twice the usual time and at least `SLOW_BY_MS` more, over at least
 * `ENOUGH` batches; larger batches than usual are allowed proportionally more time. A worker not seen for a minute is
 * forgotten.
 */
import { median } from "../../core/median.ts";
import type { WorkerSight } from "../sight.ts";
import type { WorkerRow } from "./frames.ts";
import { rounded } from "./slots.ts";

export const RECENT_SECONDS = 10;
/** One extra: the running second. */
const RING = RECENT_SECONDS + 1;
const RECENT = 16;
const ENOUGH = 5;
const WINDOW_MS = 10_000;
const WINDOWS = 90;
const SLOW_FACTOR = 2;
const SLOW_BY_MS = 20;
/** Older batches say nothing about now. */
const STALE_MS = 30_000;
const FORGET_SECONDS = 60;

class Worker {
  readonly busyMs = new Float64Array(RING);
  readonly filledMs = new Float64Array(RING);
  /** Milliseconds and tasks of the last batches, in rings. */
  readonly recent: number[] = [];
  readonly recentSizes: number[] = [];
  recentNext = 0;
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

  /** Batch size relative to usual, at least 1. */
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
  /** Complete seconds available, up to ten. */
  #seconds = 0;

  constructor(second: number) {
    this.#second = second;
  }

  /** Adds batch time; negative to correct an earlier excess. */
  spent(name: string, ms: number, filledMs: number): void {
    const worker = this.#worker(name);
    const at = this.#second % RING;
    worker.busyMs[at]! += ms;
    worker.filledMs[at]! += filledMs;
  }

  took(name: string, ms: number, size: number, now: number): void {
    this.#worker(name).took(ms, size, now);
  }

  /** Ends the second. `sights`: the current workers. Returns workers that went down or came back. */
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

  /** From the worker's event: exact, unlike the look once a second. */
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

  /** The worker furthest behind its own usual time, if any is slow. */
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

/** Replaces the oldest value; returns the next index. */
function ringPut(ring: number[], size: number, at: number, value: number): number {
  ring[at] = value;
  return (at + 1) % size;
}
