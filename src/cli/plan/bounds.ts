/**
 * What no batcher can do better: lower bounds on latency and on the number of batches, for Poisson arrivals.
 *
 * k workers run one batch of at most B tasks at a time, and a batch of n takes S(n) = a + b·n ms. Tasks come at
 * λ per ms. C = k·B / S(B) is what the workers can do at most.
 *
 *   smallest mean batch   m = max(1, λa / (k − λb)). With smaller ones the workers could not keep up: λ/m
 *                         batches per ms take a + b·m each, and there are k workers. Beyond C there is none.
 *   latency at a quantile  ≥ a + b·m + q·m/λ.  Batches of m leave m/λ apart at best, and whoever comes between
 *                         two starts waits for the second; evenly spaced starts make the tail of that wait
 *                         shortest (Jensen). With constant S this is S·(1 + q/k).
 *   least latency         a + b·m + q·(m − 1)/λ: whoever opens a batch of m waits for m − 1 others. The same in
 *                         dense traffic, and still true where arrivals are sparse: what can be promised at most.
 *   frontier              the same at a given mean batch: fewer, larger batches cost less and wait longer. No
 *                         policy that sends batches of that mean is faster.
 *   mean wait             = (E[n²]/E[n] − 1) / 2λ for every policy that empties the queue when it sends a
 *                         batch and cannot see the future. While j wait, the next comes after 1/λ, so batches
 *                         of n cost n(n−1)/2λ ms of waiting. Not a bound but an identity: what is lost against
 *                         the frontier is the variance of n, and nothing else.
 *   batches               ≥ 1000/B per 1,000 tasks.
 *
 * The tail is that of dense traffic, several tasks between two starts (λS/k ≥ 3); sparser traffic can beat it by
 * some percent. Where S grows with n the bound leaves out that n is random, so that part of the gap to it
 * cannot be closed.
 *
 * Milliseconds, and tasks per millisecond. Pure.
 */

export interface BoundedFleet {
  readonly workers: number;
  readonly maxBatchSize: number;
  /** a: what a batch costs before its first task. */
  readonly baseMs: number;
  /** b: what one more task costs. */
  readonly perTaskMs: number;
}

/** C: tasks per ms when every worker runs full batches one after the other. */
export function capacityPerMs({ workers, maxBatchSize, baseMs, perTaskMs }: BoundedFleet): number {
  return (workers * maxBatchSize) / (baseMs + perTaskMs * maxBatchSize);
}

/** The smallest mean batch with which the workers keep up; Infinity where not even full ones do. */
export function smallestMeanBatch(fleet: BoundedFleet, perMs: number): number {
  if (perMs > capacityPerMs(fleet)) return Infinity;
  // At most B here, so the workers have time to spare beside what the tasks themselves need.
  return Math.max(1, (perMs * fleet.baseMs) / (fleet.workers - perMs * fleet.perTaskMs));
}

/** No policy has a shorter latency at this quantile (0.99: p99). */
export function latencyBound(quantile: number, fleet: BoundedFleet, perMs: number): number {
  return latencyAt(quantile, fleet, perMs, smallestMeanBatch(fleet, perMs));
}

/** As `latencyBound`, but never too high, however sparse the arrivals. Infinity where the workers cannot keep up. */
export function leastLatency(quantile: number, fleet: BoundedFleet, perMs: number): number {
  const least = smallestMeanBatch(fleet, perMs);
  if (least === Infinity) return Infinity;
  return fleet.baseMs + fleet.perTaskMs * least + (quantile * (least - 1)) / perMs;
}

export function p99Bound(fleet: BoundedFleet, perMs: number): number {
  return latencyBound(0.99, fleet, perMs);
}

/** No policy whose batches have this mean has a shorter latency at this quantile. */
export function frontier(quantile: number, fleet: BoundedFleet, perMs: number, meanBatch: number): number {
  return latencyAt(quantile, fleet, perMs, Math.max(meanBatch, smallestMeanBatch(fleet, perMs)));
}

/** The mean wait that follows from the sizes of the batches. */
export function meanWait(perMs: number, sizes: readonly number[]): number {
  let [tasks, squares] = [0, 0];
  for (const size of sizes) {
    tasks += size;
    squares += size * size;
  }
  return (squares / tasks - 1) / (2 * perMs);
}

/** No policy needs fewer batches for 1,000 tasks. */
export function batchesPerThousand({ maxBatchSize }: BoundedFleet): number {
  return 1000 / maxBatchSize;
}

function latencyAt(
  quantile: number,
  { baseMs, perTaskMs }: BoundedFleet,
  perMs: number,
  meanBatch: number,
): number {
  // Alone in its batch nobody waits for company.
  if (meanBatch <= 1) return baseMs + perTaskMs;
  if (meanBatch === Infinity) return Infinity;
  return baseMs + perTaskMs * meanBatch + (quantile * meanBatch) / perMs;
}
