/** Seeded arrivals, in milliseconds from the start. */
import { Random } from "../core/random.ts";

/** Independent callers: exponential gaps around `1 / perMs`. */
export function poisson(perMs: number, durationMs: number, seed: number): number[] {
  const random = new Random(seed);
  const arrivals: number[] = [];
  for (let at = random.exponential(1 / perMs); at < durationMs; at += random.exponential(1 / perMs))
    arrivals.push(at);
  return arrivals;
}
