/**
 * Lower bounds on latency and number of batches for any batching policy, with Poisson arrivals. Pure.
 *
 * k workers each run one batch of at most B tasks; a batch of n takes S(n) = a + b·n ms. Arrivals: λ tasks per ms.
 * Capacity C = k·B / S(B).
 *
 *   smallest mean batch   m = max(1, λa / (k − λb)). Smaller ones cannot keep up: λ/m batches per ms take a + b·m
 *                         each on k workers. None beyond C.
 *   latency at a quantile  ≥ a + b·m + q·m/λ.  Batches of m start m/λ apart at best, and a task that arrives between
 *                         two starts waits for the second; even spacing minimises the tail (Jensen). With constant S
 *                         this is S·(1 + q/k).
 *   least latency         a + b·m + q·(m − 1)/λ: the first task of a batch of m waits for m − 1 others. The same in
 *                         dense traffic, and still valid for sparse arrivals: the most that can be promised.
 *   frontier              the same at a given mean batch: fewer, larger batches cost less and wait longer.
 *   mean wait             = (E[n²]/E[n] − 1) / 2λ for every policy that empties the queue when it sends a batch and
 *                         cannot see the future. While j wait, the next comes after 1/λ, so batches of n cost
 *                         n(n−1)/2λ ms of waiting. An identity, not a bound: the loss against the frontier is
 *                         exactly the variance of n.
 *   batches               ≥ 1000/B per 1,000 tasks.
 *
 * The tail bound assumes dense traffic (λS/k ≥ 3); sparser traffic can beat it by some percent. Where S grows with n
 * the bound ignores that n is random, so part of the gap cannot be closed.
 */

export interface BoundedFleet {
  readonly workers: number;
  readonly maxBatchSize: number;
  /** a: fixed cost of a batch. */
  readonly baseMs: number;
  /** b: cost per task. */
  readonly perTaskMs: number;
}

/** C: tasks per ms when every worker runs full batches back to back. */
export function capacityPerMs({ workers, maxBatchSize, baseMs, perTaskMs }: BoundedFleet): number {
  return (workers * maxBatchSize) / (baseMs + perTaskMs * maxBatchSize);
}

/** m; Infinity where not even full batches keep up. */
export function smallestMeanBatch(fleet: BoundedFleet, perMs: number): number {
  if (perMs > capacityPerMs(fleet)) return Infinity;
  // At most B here, so the denominator is positive.
  return Math.max(1, (perMs * fleet.baseMs) / (fleet.workers - perMs * fleet.perTaskMs));
}

/** Lower bound at this quantile (0.99: p99), for dense traffic. */
export function latencyBound(quantile: number, fleet: BoundedFleet, perMs: number): number {
  return latencyAt(quantile, fleet, perMs, smallestMeanBatch(fleet, perMs));
}

/**
 * As `latencyBound`, but valid for sparse arrivals. Infinity where the workers cannot keep up. `fastest`: the line of the
 * shortest inputs, where the fleet's is that of the mean: the workers keep up by the mean, a batch may be faster.
 */
export function leastLatency(
  quantile: number,
  fleet: BoundedFleet,
  perMs: number,
  fastest: Pick<BoundedFleet, "baseMs" | "perTaskMs"> = fleet,
): number {
  const least = smallestMeanBatch(fleet, perMs);
  if (least === Infinity) return Infinity;
  return fastest.baseMs + fastest.perTaskMs * least + (quantile * (least - 1)) / perMs;
}

export function p99Bound(fleet: BoundedFleet, perMs: number): number {
  return latencyBound(0.99, fleet, perMs);
}

/** Lower bound at this quantile for policies with this mean batch. */
export function frontier(quantile: number, fleet: BoundedFleet, perMs: number, meanBatch: number): number {
  return latencyAt(quantile, fleet, perMs, Math.max(meanBatch, smallestMeanBatch(fleet, perMs)));
}

export function meanWait(perMs: number, sizes: readonly number[]): number {
  let [tasks, squares] = [0, 0];
  for (const size of sizes) {
    tasks += size;
    squares += size * size;
  }
  return (squares / tasks - 1) / (2 * perMs);
}

export function batchesPerThousand({ maxBatchSize }: BoundedFleet): number {
  return 1000 / maxBatchSize;
}

function latencyAt(
  quantile: number,
  { baseMs, perTaskMs }: BoundedFleet,
  perMs: number,
  meanBatch: number,
): number {
  // Alone in its batch a task does not wait for others.
  if (meanBatch <= 1) return baseMs + perTaskMs;
  if (meanBatch === Infinity) return Infinity;
  return baseMs + perTaskMs * meanBatch + (quantile * meanBatch) / perMs;
}
