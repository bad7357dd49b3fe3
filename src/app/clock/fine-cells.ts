/** Shared cells of a `FineTimer` and its thread: see `app/clock/thread.ts`. */

export const DUE = 0;
export const RINGS = 1;
export const CELLS = 2;

export const NOTHING = 0;
export const OVER = 1;
const FIRST_INSTANT = 2;

/** Monotonic clock shared by all threads: microseconds, modulo 2³². */
export function micros(plusMs = 0): number {
  const [seconds, nanos] = process.hrtime();
  const instant = Math.ceil(seconds * 1e6 + nanos / 1e3 + plusMs * 1e3) | 0;
  return instant === NOTHING || instant === OVER ? FIRST_INSTANT : instant;
}
