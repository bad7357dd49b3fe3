/** Seeded arrivals, in milliseconds from the start. */
import { Random } from "../../core/random.ts";

/** The next instant each time it is asked; Infinity behind the last. */
export type NextArrival = () => number;

/** Independent callers: exponential gaps around `1 / perMs`. */
export function poisson(perMs: number, durationMs: number, seed: number): number[] {
  const next = poissonArrivals(perMs, durationMs, seed);
  const arrivals: number[] = [];
  for (let at = next(); at !== Infinity; at = next()) arrivals.push(at);
  return arrivals;
}

/** The same one by one, for runs too long to be kept. */
export function poissonArrivals(perMs: number, durationMs: number, seed: number): NextArrival {
  const random = new Random(seed);
  let at = 0;
  return () => {
    at += random.exponential(1 / perMs);
    return at < durationMs ? at : Infinity;
  };
}

/** How long calm and crowd last on average; how much of the mean comes in the calm. */
const CALM_MS = 3000;
const CALM = 0.5;

/**
 * Callers that come in crowds: Poisson arrivals whose rate changes between half the mean and `peak` times the
 * mean (a Markov-modulated Poisson process). Calm lasts 3 s on average, a crowd as long as makes the mean what
 * it is: with a peak of 2.5, one second.
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
      // Exponential gaps have no memory: what is left of this one may be drawn anew.
      at = until;
      if (at >= durationMs) return Infinity;
      crowded = !crowded;
      until = at + random.exponential(crowded ? crowdMs : CALM_MS);
    }
  };
}

/** Recorded ones. */
export function replayed(instants: ArrayLike<number>): NextArrival {
  let index = 0;
  return () => (index < instants.length ? instants[index++]! : Infinity);
}
