/**
 * Batch time by size, and the knee: the size from which larger batches stop paying off.
 *
 * `ServiceEstimate` fits one line through all sizes for the policy; this keeps sizes apart, in steps of 1, 2, 3, 4, 6,
 * 8, 12 … (powers of two and the halves between). Each step has a mean size and a mean time (weight 0.05; the first
 * weigh 1/count); a time is clipped to twice its step's mean. A step's weight halves every five minutes without a
 * batch; below three batches it is ignored.
 *
 * Through the steps goes  S(n) = c + b · max(0, n − k).  For each k at a step or between two, c and b ≥ 0 are the least
 * squares of the error relative to the time, weighted by steps; the k with the least error wins. A straight line is k
 * at the smallest size.
 *
 * The knee is the smallest n with 90 % of the best throughput n / S(n) up to the largest size seen, rounded up to a
 * step. It is reported only with three known steps that span a factor of four and if it lies below the largest:
 * otherwise throughput grew with every size seen.
 */

/** Share of the best throughput that the knee must reach. */
export const WORTH = 0.9;
const WEIGHT = 0.05;
const CLIP = 2;
const ENOUGH_TO_CLIP = 8; // below this many batches of a step nothing is clipped
const HALF_LIFE_MS = 300_000;
const LEAST_EVIDENCE = 3;
const LEAST_STEPS = 3;
const LEAST_SPREAD = 4;
const BEYOND = 1.5; // `maxBatchSize` is worth a hint when larger than the knee by this factor
const FLAT = 1.1; // a batch takes "the time of one" up to this factor
const NEARLY_FULL = 0.75; // fill from which batches count as full

export interface CurvePoint {
  readonly size: number;
  readonly ms: number;
  readonly batches: number;
}

/** A batch of `size` takes `ms`, which gives a worker this many tasks per second. */
export interface Throughput {
  readonly size: number;
  readonly ms: number;
  readonly perSecond: number;
}

export interface Knee extends Throughput {
  readonly full: Throughput;
}

export interface CurveReading {
  /** Sorted by size. */
  readonly points: readonly CurvePoint[];
  readonly knee: Knee | undefined;
  /** Advice for `maxBatchSize`; "" if none. */
  readonly hint: string;
}

interface Step {
  size: number;
  ms: number;
  weight: number; // decays with time
  batches: number; // ever seen
  at: number;
}

interface Hinge {
  readonly flatMs: number;
  readonly perTaskMs: number;
  readonly bendAt: number;
}

export class CurveEstimate {
  readonly #steps = new Map<number, Step>();

  learn(size: number, ms: number, now: number): void {
    const floor = stepBelow(size);
    const step = this.#steps.get(floor);
    if (step === undefined) {
      this.#steps.set(floor, { size, ms, weight: 1, batches: 1, at: now });
      return;
    }
    const sample = step.weight >= ENOUGH_TO_CLIP ? Math.min(ms, CLIP * step.ms) : ms;
    step.weight = Math.min(1 / WEIGHT, weightAt(step, now) + 1);
    step.size += (size - step.size) / step.weight;
    step.ms += (sample - step.ms) / step.weight;
    step.batches++;
    step.at = now;
  }

  read(maxBatchSize: number, now: number): CurveReading {
    const known = [...this.#steps.values()].filter((step) => weightAt(step, now) >= LEAST_EVIDENCE);
    const steps = known.sort((one, other) => one.size - other.size);
    const points = steps.map(({ size, ms, batches }) => ({ size: Math.round(size), ms, batches }));
    const none = { points, knee: undefined, hint: "" };
    const [first, last] = [steps[0], steps.at(-1)];
    if (first === undefined || last === undefined || steps.length < LEAST_STEPS) return none;
    if (last.size < LEAST_SPREAD * first.size) return none;
    const hinge = fitHinge(steps.map((step) => ({ ...step, weight: weightAt(step, now) / step.ms ** 2 })));
    const largest = Math.round(last.size);
    const knee = kneeOf(hinge, largest);
    if (knee >= largest) return { ...none, hint: whereItIsFlat(hinge, first.size, largest, maxBatchSize) };
    const found = { ...throughput(hinge, knee), full: throughput(hinge, maxBatchSize) };
    return { points, knee: found, hint: whereItIsBeyond(found) };
  }
}

function weightAt({ weight, at }: Step, now: number): number {
  return weight * 0.5 ** ((now - at) / HALF_LIFE_MS);
}

/** The largest of 1, 2, 3, 4, 6, 8, 12 … not above `size`. */
export function stepBelow(size: number): number {
  const power = 2 ** Math.floor(Math.log2(size));
  return power > 1 && size >= 1.5 * power ? 1.5 * power : power;
}

/** The smallest of them not below `size`. */
export function stepAbove(size: number): number {
  const below = stepBelow(size);
  if (below >= size) return below;
  const power = 2 ** Math.floor(Math.log2(below));
  return below > power || power === 1 ? 2 * power : 1.5 * power;
}

function msFor({ flatMs, perTaskMs, bendAt }: Hinge, size: number): number {
  return flatMs + perTaskMs * Math.max(0, size - bendAt);
}

function throughput(hinge: Hinge, size: number): Throughput {
  const ms = msFor(hinge, size);
  return { size, ms, perSecond: (1000 * size) / ms };
}

function kneeOf(hinge: Hinge, largest: number): number {
  // n / S(n) rises up to the bend and is monotonic from there: its best is at the bend or at the end.
  const bend = Math.max(1, Math.min(largest, Math.floor(hinge.bendAt)));
  const best = Math.max(throughput(hinge, bend).perSecond, throughput(hinge, largest).perSecond);
  let size = 1;
  while (size < largest && throughput(hinge, size).perSecond < WORTH * best) size++;
  return Math.min(largest, stepAbove(size));
}

/** At least two steps, sorted; `weight` applies to the error relative to the time. */
function fitHinge(steps: readonly Step[]): Hinge {
  const sizes = steps.slice(0, -1).map(({ size }) => size);
  const between = sizes.slice(1).map((size, at) => (size + sizes[at]!) / 2);
  let best: Hinge | undefined;
  let least = Infinity;
  // Of two bends that fit equally well take the later one: a longer flat part claims less.
  for (const bendAt of [...sizes, ...between].sort((one, other) => other - one)) {
    const hinge = fitFrom(steps, bendAt);
    const error = steps.reduce(
      (sum, { size, ms, weight }) => sum + weight * (msFor(hinge, size) - ms) ** 2,
      0,
    );
    if (best !== undefined && error >= least * (1 - 1e-9)) continue;
    best = hinge;
    least = error;
  }
  return best!;
}

function fitFrom(steps: readonly Step[], bendAt: number): Hinge {
  let [weights, meanX, meanMs] = [0, 0, 0];
  for (const { size, ms, weight } of steps) {
    weights += weight;
    meanX += weight * Math.max(0, size - bendAt);
    meanMs += weight * ms;
  }
  meanX /= weights;
  meanMs /= weights;
  let [covariance, variance] = [0, 0];
  for (const { size, ms, weight } of steps) {
    const x = Math.max(0, size - bendAt) - meanX;
    covariance += weight * x * (ms - meanMs);
    variance += weight * x * x;
  }
  const perTaskMs = variance > 0 ? Math.max(0, covariance / variance) : 0;
  // A batch of one never takes 0 ms.
  return { flatMs: Math.max(0.01, meanMs - perTaskMs * meanX), perTaskMs, bendAt };
}

/** What a batch beyond the knee gains and costs; also for `ferry plan --measure`. */
export function whatItBuys(knee: Throughput, full: Throughput): string {
  const gain = Math.round(100 * (full.perSecond / knee.perSecond - 1));
  const buys = gain > 0 ? `buy ${gain} % more throughput` : "buy no throughput";
  return `batches of ${full.size} ${buys} and take ${duration(full.ms - knee.ms)} longer`;
}

function whereItIsBeyond(knee: Knee): string {
  const { size, full } = knee;
  if (full.size < BEYOND * size) return "";
  if (size === 1)
    return "a batch takes longer in proportion to its size from the first task on: batching buys nothing here";
  return `maxBatchSize ${full.size} lies beyond the knee at ${size}: ${whatItBuys(knee, full)}; set maxBatchSize: ${size}`;
}

function whereItIsFlat(hinge: Hinge, smallest: number, largest: number, maxBatchSize: number): string {
  if (largest < NEARLY_FULL * maxBatchSize) return "";
  if (msFor(hinge, largest) > FLAT * msFor(hinge, smallest)) return "";
  const times = smallest < 1.5 ? "one" : String(Math.round(smallest));
  return (
    `batches of ${largest} still take the time of ${times}: ` +
    `a larger maxBatchSize may pay, if the worker takes it; try maxBatchSize: ${2 * maxBatchSize}`
  );
}

function duration(ms: number): string {
  return `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;
}
