import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { PaddingRatio, RecentRate } from "../../src/observe/tally.ts";

/** What it must be: all that is remembered, and looked through each time. */
function naive(startedAt: number, instants: readonly number[], now: number): number {
  const second = Math.floor(now / 1000);
  const counted = instants.filter((at) => at < second * 1000 && at >= (second - 10) * 1000).length;
  return Math.round((10 * counted) / Math.min(10, Math.max(1, (now - startedAt) / 1000))) / 10;
}

test("a rate is that of the last ten whole seconds, however long nothing happened", () => {
  const steps = fc.array(fc.tuple(fc.boolean(), fc.integer({ min: 0, max: 15_000 })), { maxLength: 60 });
  fc.assert(
    fc.property(fc.integer({ min: 0, max: 10_000 }), steps, (startedAt, moves) => {
      const rate = new RecentRate(startedAt);
      const instants: number[] = [];
      let now = startedAt;
      for (const [counts, ms] of moves) {
        now += counts ? ms % 700 : ms;
        if (counts) {
          rate.count(now);
          instants.push(now);
        } else assert.equal(rate.perSecond(now), naive(startedAt, instants, now));
      }
    }),
  );
});

test("an instant that lies a little back counts in the second that runs", () => {
  const rate = new RecentRate(0);
  rate.count(1000);
  rate.count(999.999);
  assert.equal(rate.perSecond(2000), 1);
});

test("a padding ratio is that of the last minute or so, and unknown once nothing was measured for five", () => {
  const ratio = new PaddingRatio();
  assert.equal(ratio.read(0), undefined);
  ratio.add({ rows: 4, longest: 100, total: 100, inOrder: 100 }, 0);
  assert.equal(ratio.read(0), 4);
  ratio.add({ rows: 10, longest: 10, total: 100, inOrder: 100 }, 0);
  assert.equal(ratio.read(0), 2.5);
  // After a minute both count 1/e, after three 1/20 of a new one.
  const kept = Math.exp(-1);
  ratio.add({ rows: 1, longest: 100, total: 100, inOrder: 100 }, 60_000);
  const [computed, useful] = [500 * kept + 100, 200 * kept + 100];
  assert.ok(Math.abs(ratio.read(60_000)! - computed / useful) < 1e-9);
  assert.ok(Math.abs(ratio.read(359_999)! - computed / useful) < 1e-9);
  assert.equal(ratio.read(360_000), undefined);
});
