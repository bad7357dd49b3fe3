/**
 * Fixed-window rate limits: a window opens with the first unit spent and closes 60 s later. The limit is exact; a new
 * window starts full.
 */
import { Fifo } from "./fifo.ts";

export const WINDOW_MS = 60_000;

export interface Spent {
  readonly allowed: boolean;
  readonly left: number;
  readonly resetMs: number;
}

interface Window {
  readonly key: string;
  used: number;
  closesAt: number;
}

/** At most `max` keys; the oldest is evicted. */
export class Windows {
  readonly #max: number;
  readonly #windows = new Map<string, Window>();
  readonly #order = new Fifo<Window>(); // in opening order, including windows that closed and were replaced

  constructor(max: number) {
    this.#max = max;
  }

  spend(key: string, limit: number, now: number): Spent {
    let window = this.#windows.get(key);
    if (window === undefined || now >= window.closesAt) window = this.#open(key, now + WINDOW_MS);
    const allowed = window.used < limit;
    if (allowed) window.used++;
    return { allowed, left: Math.max(0, limit - window.used), resetMs: window.closesAt - now };
  }

  /** Continues from a count kept elsewhere when that can no longer be reached. */
  heard(key: string, used: number, closesAt: number): void {
    const window = this.#windows.get(key) ?? this.#open(key, closesAt);
    window.used = used;
    window.closesAt = closesAt;
  }

  #open(key: string, closesAt: number): Window {
    const window = { key, used: 0, closesAt };
    this.#windows.set(key, window);
    this.#order.push(window);
    while (this.#order.size > this.#max) {
      const oldest = this.#order.shift()!;
      if (this.#windows.get(oldest.key) === oldest) this.#windows.delete(oldest.key);
    }
    return window;
  }
}
