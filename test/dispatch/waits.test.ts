/** How exact a dispatcher's waits have to be, by what its batches take and how often they start. */
import { unmeasured } from "../../src/core/cost.ts";
import assert from "node:assert/strict";
import { test } from "node:test";
import { BatchCapacity } from "../../src/dispatch/capacity.ts";
import { Forecaster } from "../../src/dispatch/forecaster.ts";
import { simulate } from "./simulated.ts";

function mayBeLateMs(workers: number, batchMs: number): number | undefined {
  const { dispatcher, rules } = simulate({ backend: { workers } });
  for (let batch = 0; batch < 20; batch++) dispatcher.workers.service.learn(unmeasured(1), batchMs);
  const capacity = new BatchCapacity(() => rules);
  return new Forecaster(() => rules, dispatcher.workers, capacity, dispatcher.lengths).mayBeLateMs;
}

test("a fiftieth of a batch, where one can wait for it", () => {
  assert.equal(mayBeLateMs(1, 5), 0.1);
  assert.equal(mayBeLateMs(8, 5), 0.1);
  assert.equal(mayBeLateMs(4, 100), 2);
});

test("a plain timer where batches start more often than each half a millisecond", () => {
  assert.equal(mayBeLateMs(11, 5), undefined);
  assert.equal(mayBeLateMs(64, 1), undefined);
});
