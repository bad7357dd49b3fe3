/**
 * Rate limits by the minute: a window opens with the first unit spent and closes 60 s later.
 *
 * The 1,001st unit of a window with 1,000 is refused, exactly; a new window starts full.
 */

import { Fifo } from "./fifo.ts";

export const WINDOW_MS = 60_000;

export interface Spent {
  readonly allowed: boolean;
  readonly left: number;
  /** Until the window closes. */
  readonly resetMs: number;
}

export class Window {
  #closesAt = -Infinity;
  #used = 0;

  spend(limit: number, now: number): Spent {
    if (now >= this.#closesAt) {
      this.#closesAt = now + WINDOW_MS;
      this.#used = 0;
    }
    const allowed = this.#used < limit;
    if (allowed) this.#used++;
    return { allowed, left: Math.max(0, limit - this.#used), resetMs: this.#closesAt - now };
  }

  /** What whoever keeps this window elsewhere says of it. */
  heard(used: number, closesAt: number): void {
    this.#used = used;
    this.#closesAt = closesAt;
  }

  closed(now: number): boolean {
    return now >= this.#closesAt;
  }
}

/** Windows by key, at most `max` of them: the oldest makes room. */
export class Windows {
  readonly #max: number;
  readonly #windows = new Map<string, Window>();
  /** In the order in which they were opened; those that closed and were replaced still stand here. */
  readonly #order = new Fifo<{ readonly key: string; readonly window: Window }>();

  constructor(max: number) {
    this.#max = max;
  }

  spend(key: string, limit: number, now: number): Spent {
    const window = this.#windows.get(key);
    const open = window !== undefined && !window.closed(now);
    return (open ? window : this.#open(key)).spend(limit, now);
  }

  /** Goes on from what is kept elsewhere, if that can no longer be asked. */
  heard(key: string, used: number, closesAt: number): void {
    (this.#windows.get(key) ?? this.#open(key)).heard(used, closesAt);
  }

  #open(key: string): Window {
    const window = new Window();
    this.#windows.set(key, window);
    this.#order.push({ key, window });
    while (this.#order.size > this.#max) this.#dropOldest();
    return window;
  }

  #dropOldest(): void {
    const { key, window } = this.#order.shift()!;
    if (this.#windows.get(key) === window) this.#windows.delete(key);
  }
}
