import assert from "node:assert/strict";
import { test } from "node:test";
import "../fixtures/unhooked.ts";
import {
  batchesPerThousand,
  capacityPerMs,
  frontier,
  latencyBound,
  meanWait,
  p99Bound,
  smallestMeanBatch,
} from "../../src/cli/plan/bounds.ts";

const constant = { workers: 8, maxBatchSize: 64, baseMs: 100, perTaskMs: 0 };
const affine = { workers: 8, maxBatchSize: 64, baseMs: 36, perTaskMs: 1 };
const near = (value: number, expected: number): void =>
  assert.ok(Math.abs(value - expected) < 0.05, `${value}, not ${expected}`);

test("constant service: p99 is S and 0.99 S/k at any load", () => {
  near(capacityPerMs(constant), 5.12);
  for (const load of [0.1, 0.5, 1]) near(p99Bound(constant, load * 5.12), 112.4);
  for (const [workers, ms] of [
    [1, 199],
    [2, 149.5],
    [4, 124.75],
    [32, 103.1],
  ] as const)
    near(p99Bound({ ...constant, workers }, 0.5), ms);
});

test("service that grows with the batch: the busier the longer, up to S(B) and a gap", () => {
  near(p99Bound(affine, 0.7 * 5.12), 73.29);
  near(smallestMeanBatch(affine, 5.12), 64);
  near(p99Bound(affine, 5.12), 100 + (0.99 * 64) / 5.12);
});

test("nobody waits for company that is not needed, and beyond the capacity there is no bound", () => {
  assert.equal(smallestMeanBatch(constant, 0.01), 1);
  assert.equal(latencyBound(0.5, affine, 0.01), 37);
  assert.equal(p99Bound(constant, 5.13), Infinity);
});

test("the frontier is the bound for the smallest batches, and further out for larger ones", () => {
  near(frontier(0.99, constant, 2.56, 1), p99Bound(constant, 2.56));
  near(frontier(0.99, constant, 2.56, 64), 100 + (0.99 * 64) / 2.56);
});

test("a batch of n costs n(n − 1)/2λ of waiting; at least 1000/B are needed for 1,000", () => {
  assert.equal(meanWait(2, [1, 1, 1]), 0);
  assert.equal(meanWait(2, [5]), 1);
  assert.equal(batchesPerThousand(constant), 15.625);
});
