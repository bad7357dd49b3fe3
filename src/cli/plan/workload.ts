/** Seeded arrivals, in milliseconds from the start. */
import { Random } from "../../core/random.ts";

/** The next instant on each call; Infinity after the last. */
export type NextArrival = () => number;

/** Exponential gaps with mean `1 / perMs`. */
export function poisson(perMs: number, durationMs: number, seed: number): number[] {
  const next = poissonArrivals(perMs, durationMs, seed);
  const arrivals: number[] = [];
  for (let at = next(); at !== Infinity; at = next()) arrivals.push(at);
  return arrivals;
}

/** The same one by one, for runs too long to keep in memory. */
export function poissonArrivals(perMs: number, durationMs: number, seed: number): NextArrival {
  const random = new Random(seed);
  let at = 0;
  return () => {
    at += random.exponential(1 / perMs);
    return at < durationMs ? at : Infinity;
  };
}

const SLOW_START = 4;

/** The first of these arrivals, a quarter as dense until `untilMs`; all others are later by as much as that takes. */
export function slowStart(next: NextArrival, untilMs: number): NextArrival {
  const laterMs = slowStartMs(untilMs);
  return () => {
    const at = next();
    return at < untilMs / SLOW_START ? SLOW_START * at : at + laterMs;
  };
}

export function slowStartMs(untilMs: number): number {
  return untilMs - untilMs / SLOW_START;
}

/** Mean duration of calm phases, and their rate relative to the mean. */
const CALM_MS = 3000;
const CALM = 0.5;

/**
 * Bursty arrivals: a Markov-modulated Poisson process that alternates between half the mean rate and `peak` times the
 * mean. Calm lasts 3 s on average, bursts as long as keeps the mean: with a peak of 2.5, one second.
 */
export function burstArrivals(perMs: number, peak: number, durationMs: number, seed: number): NextArrival {
  const random = new Random(seed);
  const crowdMs = (CALM_MS * (1 - CALM)) / (peak - 1);
  let at = 0;
  let crowded = false;
  let until = random.exponential(CALM_MS);
  return () => {
    for (;;) {
      const next = at + random.exponential(1 / (perMs * (crowded ? peak : CALM)));
      if (next < until) {
        at = next;
        return at < durationMs ? at : Infinity;
      }
      // Exponential gaps are memoryless: the rest of this one may be drawn again.
      at = until;
      if (at >= durationMs) return Infinity;
      crowded = !crowded;
      until = at + random.exponential(crowded ? crowdMs : CALM_MS);
    }
  };
}

export function replayed(instants: ArrayLike<number>): NextArrival {
  let index = 0;
  return () => (index < instants.length ? instants[index++]! : Infinity);
}
