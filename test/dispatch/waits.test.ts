/** How exact a dispatcher's waits have to be, by what its batches take and how often they start. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { HandoverEstimate } from "../../src/core/estimate.ts";
import { Outlook } from "../../src/dispatch/outlook.ts";
import { Seats } from "../../src/dispatch/seats.ts";
import { simulate } from "./simulated.ts";

function mayBeLateMs(workers: number, batchMs: number): number | undefined {
  const { dispatcher } = simulate({ backend: { workers } });
  for (let batch = 0; batch < 20; batch++) dispatcher.workers.service.learn(1, batchMs);
  const seats = new Seats({ maxBatchSize: 64 });
  return new Outlook(dispatcher.workers, { seats, handover: new HandoverEstimate() }, 1, 3000).mayBeLateMs;
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
