/** The smaller rules: estimates, fairness, retries, rate windows, the heap. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { RateEstimate, ServiceEstimate } from "../../src/core/estimate.ts";
import { floorOf, seatTiers } from "../../src/core/fair.ts";
import { Heap } from "../../src/core/heap.ts";
import { Random } from "../../src/core/random.ts";
import { retryAt, RetryBudget, smallerBatch } from "../../src/core/retry.ts";
import { WINDOW_MS, Windows } from "../../src/core/window.ts";

describe("service estimate", () => {
  test("learns a constant from the first batch and a line from a few", () => {
    const estimate = new ServiceEstimate();
    estimate.learn(1, 100);
    assert.equal(estimate.msFor(64), 100);
    const line = new ServiceEstimate();
    const random = new Random(1);
    for (let i = 0; i < 200; i++) {
      const size = 1 + Math.floor(random.next() * 64);
      line.learn(size, 36 + size);
    }
    assert.ok(Math.abs(line.msFor(64) - 100) < 1 && Math.abs(line.msFor(1) - 37) < 1);
    assert.ok(Math.abs(line.perTaskMs - 1) < 0.02);
  });

  test("whatever it is told, it stays sane: positive, finite, never falling with size", () => {
    const samples = fc.array(
      fc.tuple(fc.integer({ min: 1, max: 128 }), fc.double({ min: 0.01, max: 1e5, noNaN: true })),
    );
    fc.assert(
      fc.property(samples, (list) => {
        const estimate = new ServiceEstimate();
        for (const [size, ms] of list) estimate.learn(size, ms);
        assert.ok(estimate.msFor(1) > 0 && Number.isFinite(estimate.msFor(128)));
        assert.ok(estimate.msFor(128) >= estimate.msFor(1) && estimate.baseMs > -1e-6);
      }),
    );
  });

  test("one straggler moves it little", () => {
    const estimate = new ServiceEstimate();
    for (let i = 0; i < 50; i++) estimate.learn(64, 100);
    estimate.learn(64, 30_000);
    assert.ok(estimate.msFor(64) < 120);
  });
});

test("the arrival rate follows arrivals and decays without them", () => {
  const rate = new RateEstimate();
  for (let at = 0; at < 5000; at += 2) rate.count(at);
  assert.ok(Math.abs(rate.perMs(5000) - 0.5) < 0.02);
  assert.ok(rate.perMs(6000) < 0.08);
});

describe("seating of tiers", () => {
  const depths = fc.array(fc.nat(300), { minLength: 1, maxLength: 4 });

  test("seats are filled as far as tasks reach, and nobody gets more than it has", () => {
    fc.assert(
      fc.property(depths, fc.integer({ min: 1, max: 128 }), (queued, seats) => {
        const taken = seatTiers(
          seats,
          queued,
          queued.map(() => 0),
        );
        const sum = (list: readonly number[]): number => list.reduce((total, each) => total + each, 0);
        assert.equal(sum(taken), Math.min(seats, sum(queued)));
        taken.forEach((count, tier) => assert.ok(count >= 0 && count <= queued[tier]!));
      }),
    );
  });

  test("without a backlog the order is strict; with one the lower tiers get their floor over time", () => {
    assert.deepEqual(seatTiers(64, [10, 10, 10], [0, 0, 0]), [10, 10, 10]);
    const credits = [0, 0, 0];
    const total = [0, 0, 0];
    for (let batch = 0; batch < 100; batch++) {
      seatTiers(64, [1000, 1000, 1000], credits).forEach((count, tier) => (total[tier]! += count));
    }
    assert.ok(Math.abs(total[1]! / 6400 - floorOf(1, 3)) < 0.005);
    assert.ok(Math.abs(total[2]! / 6400 - floorOf(2, 3)) < 0.005);
  });
});

describe("retries", () => {
  const limits = { max: 3, baseMs: 50, maxMs: 1000 };

  test("full jitter under an exponential ceiling, and an end", () => {
    assert.equal(retryAt(1, limits, 100, 0), 100);
    assert.equal(retryAt(1, limits, 100, 1), 150);
    assert.equal(retryAt(3, limits, 100, 1), 300);
    assert.equal(retryAt(3, { ...limits, maxMs: 60 }, 100, 1), 160);
    assert.equal(retryAt(4, limits, 100, 1), undefined);
  });

  test("extra calls are at most the share of first calls, beside the reserve and one a second", () => {
    const budget = new RetryBudget(() => 0.1);
    let extra = 0;
    for (let call = 0; call < 1000; call++) {
      budget.first();
      if (budget.extra(1)) extra++;
    }
    assert.ok(extra <= 110 && extra >= 100);
    const quiet = new RetryBudget(() => 0.1);
    while (quiet.extra(1));
    assert.ok(Math.abs(quiet.waitMs() - 1000) < 1);
    assert.equal(quiet.extra(1002), true);
  });

  test("three smaller batches after 64 leave each task alone", () => {
    assert.equal(smallerBatch(smallerBatch(smallerBatch(64))), 1);
    assert.equal(smallerBatch(1), 1);
  });
});

test("a rate window refuses the unit after its last, exactly, until it closes", () => {
  const windows = new Windows(2);
  for (let i = 0; i < 1000; i++) assert.equal(windows.spend("a", 1000, 5).allowed, true);
  assert.deepEqual(windows.spend("a", 1000, 5), { allowed: false, left: 0, resetMs: WINDOW_MS });
  assert.equal(windows.spend("b", 1000, 6).allowed, true);
  assert.equal(windows.spend("a", 1000, 5 + WINDOW_MS).allowed, true);
});

test("a heap gives what is due soonest, whatever was put in, moved and taken out", () => {
  const moves = fc.array(
    fc.tuple(fc.nat(20), fc.option(fc.integer({ min: -1000, max: 1000 }), { nil: undefined })),
  );
  fc.assert(
    fc.property(moves, (list) => {
      const heap = new Heap();
      const values = Array.from({ length: 21 }, () => ({ dueAt: 0, place: -1 }));
      const model = new Map<number, number>();
      for (const [at, dueAt] of list) {
        if (dueAt === undefined) heap.remove(values[at]!);
        else heap.set(values[at]!, dueAt);
        if (dueAt === undefined) model.delete(at);
        else model.set(at, dueAt);
        assert.equal(heap.size, model.size);
        assert.equal(heap.firstAt, Math.min(...model.values()));
      }
      const out: number[] = [];
      for (let first = heap.first; first !== undefined; first = heap.first) {
        out.push(first.dueAt);
        heap.remove(first);
      }
      assert.deepEqual(
        out,
        [...model.values()].sort((a, b) => a - b),
      );
    }),
  );
});
