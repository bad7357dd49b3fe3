/**
 * How sure a figure is: an interval in which it would lie in 95 of 100 such runs.
 *
 * Latencies near in time are alike (a queue that is long now is long a moment later), so that samples are not
 * independent, and rules for independent ones promise too much. Therefore blocks: the run is cut into up to
 * twenty stretches of a second or more. As many are drawn from them, with repetition, put together, and the figure is
 * taken of that; `DRAWS` times. The interval holds the middle 95 % of what came out (a block bootstrap). A
 * stall that fell into one block of twenty shows as what it is: now and then there is none, or two.
 *
 * With fewer than `MIN_BLOCKS` blocks that have samples the order statistics of independent samples are used
 * instead: of n the ranks n p ± 1.96 √(n p (1-p)). They are an understatement; `method` says which it was.
 */
import { Random } from "../../core/random.ts";
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
/** Of the histogram, relative. */
const ERROR = 1 / 256;
/** 20 histograms each: some 100 ms in all. */
const DRAWS = 400;
/** The same run has the same intervals. */
const SEED = 1;

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
  if (full.length >= MIN_BLOCKS) return { method: "blocks", blocks: full.length, of: fromBlocks(full) };
  const names = whole.count === 0 ? [] : Object.entries(PERCENTILES);
  const of = Object.fromEntries(names.map(([name, p]) => [name, widened(name, fromRanks(whole, p))]));
  return { method: "order statistics", blocks: full.length, of };
}

function fromBlocks(blocks: readonly Histogram[]): Record<string, Interval> {
  const random = new Random(SEED);
  const names = [...Object.keys(PERCENTILES), "mean"];
  const drawn = names.map((): number[] => []);
  for (let draw = 0; draw < DRAWS; draw++) {
    const some = new Histogram();
    for (let i = 0; i < blocks.length; i++) some.merge(blocks[Math.floor(random.next() * blocks.length)]!);
    names.forEach((name, at) => {
      const p = PERCENTILES[name];
      drawn[at]!.push(p === undefined ? some.meanMs : some.percentileMs(p));
    });
  }
  return Object.fromEntries(names.map((name, at) => [name, widened(name, middle(drawn[at]!))]));
}

/** The middle 95 %. */
function middle(values: readonly number[]): Interval {
  const sorted = values.toSorted((a, b) => a - b);
  const at = (share: number): number => sorted[Math.round(share * (sorted.length - 1))]!;
  return { low: at(0.025), high: at(0.975) };
}

/** A percentile is no surer than the bucket that it was counted in. */
function widened(name: string, { low, high }: Interval): Interval {
  return name === "mean" ? { low, high } : { low: low * (1 - ERROR), high: high * (1 + ERROR) };
}

function fromRanks(whole: Histogram, p: number): Interval {
  const n = whole.count;
  const half = 1.96 * Math.sqrt(n * (p / 100) * (1 - p / 100));
  const at = (rank: number): number => whole.percentileMs(Math.min(100, Math.max(0, (100 * rank) / n)));
  return { low: at((n * p) / 100 - half), high: at((n * p) / 100 + half + 1) };
}
