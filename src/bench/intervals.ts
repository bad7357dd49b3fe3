/**
 * How sure a figure is: an interval in which it would lie in 95 of 100 such runs.
 *
 * Latencies near in time are alike (a queue that is long now is long a moment later), so that samples are not
 * independent, and rules for independent ones promise too much. Therefore blocks: the run is cut into up to
 * twenty stretches of a second or more, the figure is taken in each, and their scatter says how far the whole
 * is off: whole ± t × s / √k, with s the standard deviation of the k figures and t Student's for k - 1.
 *
 * With fewer than `MIN_BLOCKS` blocks that have samples the order statistics of independent samples are used
 * instead: of n the ranks n p ± 1.96 √(n p (1-p)). They are an understatement; `method` says which it was.
 */
import { Histogram } from "./histogram.ts";

export interface Interval {
  readonly low: number;
  readonly high: number;
}

export interface Sureness {
  readonly method: "blocks" | "order statistics";
  readonly blocks: number;
  readonly of: Readonly<Record<string, Interval>>;
}

export const MIN_BLOCKS = 5;
/** Student's t, two-sided 95 %, for 4 to 19 degrees of freedom. */
const T = [
  2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.16, 2.145, 2.131, 2.12, 2.11, 2.101, 2.093,
];

/** By name: "p99" → 99. */
export const PERCENTILES: Readonly<Record<string, number>> = {
  p50: 50,
  p90: 90,
  p95: 95,
  p99: 99,
  "p99.9": 99.9,
};

export function sureness(whole: Histogram, blocks: readonly Histogram[]): Sureness {
  const full = blocks.filter(({ count }) => count > 0);
  const method = full.length >= MIN_BLOCKS ? "blocks" : "order statistics";
  const of: Record<string, Interval> = {};
  if (whole.count > 0) {
    for (const [name, p] of Object.entries(PERCENTILES)) {
      of[name] =
        method === "blocks"
          ? fromBlocks(
              whole.percentileMs(p),
              full.map((block) => block.percentileMs(p)),
            )
          : fromRanks(whole, p);
    }
    // Of few blocks the scatter of the mean is not known: the histogram has no squares.
    if (method === "blocks")
      of["mean"] = fromBlocks(
        whole.meanMs,
        full.map((block) => block.meanMs),
      );
  }
  return { method, blocks: full.length, of };
}

export function fromBlocks(whole: number, figures: readonly number[]): Interval {
  const k = figures.length;
  const mean = figures.reduce((sum, figure) => sum + figure, 0) / k;
  const variance = figures.reduce((sum, figure) => sum + (figure - mean) ** 2, 0) / (k - 1);
  const half = T[Math.min(k - MIN_BLOCKS, T.length - 1)]! * Math.sqrt(variance / k);
  return { low: Math.max(0, whole - half), high: whole + half };
}

function fromRanks(whole: Histogram, p: number): Interval {
  const n = whole.count;
  const half = 1.96 * Math.sqrt(n * (p / 100) * (1 - p / 100));
  const at = (rank: number): number => whole.percentileMs(Math.min(100, Math.max(0, (100 * rank) / n)));
  return { low: at((n * p) / 100 - half), high: at((n * p) / 100 + half + 1) };
}
