import assert from "node:assert/strict";
import { test } from "node:test";
import { getHeapStatistics } from "node:v8";
import { HeapRest } from "../../src/app/heap.ts";
import { ManualClock } from "../workers/backend/manual-clock.ts";

const MB = 2 ** 20;

test("memory is given back after ten seconds without work, and again only when the heap has grown", () => {
  const clock = new ManualClock();
  let [work, bytes, collections] = [0, 100 * MB, 0];
  const collect = (): void => {
    collections++;
    bytes = 50 * MB;
  };
  const rest = new HeapRest(clock, () => work, { bytes: () => bytes, collect });
  const after = (ms: number): number => {
    clock.advance(ms);
    return collections;
  };
  for (; work < 5; work++) assert.equal(after(10_000), 0);
  assert.equal(after(20_000), 1);
  bytes = 60 * MB;
  assert.equal(after(60_000), 1);
  bytes = 200 * MB;
  work++;
  assert.equal(after(10_000), 1);
  assert.equal(after(10_000), 2);
  rest.stop();
  assert.equal(clock.nextMs, Infinity);
});

test("a collection at rest shrinks V8's heap", () => {
  const clock = new ManualClock();
  const rest = new HeapRest(clock, () => 0);
  const kept = Array.from({ length: 500_000 }, (_, at) => ({ at }));
  const before = getHeapStatistics().total_heap_size;
  kept.length = 0;
  clock.advance(20_000);
  rest.stop();
  assert.ok(getHeapStatistics().total_heap_size < before - 8 * MB);
});
