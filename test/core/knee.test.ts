/** The learned curve: known curves with noise must give their knee, and curves without one must not. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { CurveEstimate, type CurveReading, stepAbove, stepBelow, WORTH } from "../../src/core/knee.ts";
import { Random } from "../../src/core/random.ts";

type Curve = (size: number) => number;

/** Batches of all sizes up to `most`, some of them full; times scatter by `noise`. */
function learned(curve: Curve, most: number, noise: number, seed: number, batches = 3000): CurveEstimate {
  const estimate = new CurveEstimate();
  teach(estimate, curve, most, noise, new Random(seed), batches, 0);
  return estimate;
}

function teach(
  estimate: CurveEstimate,
  curve: Curve,
  most: number,
  noise: number,
  random: Random,
  batches: number,
  now: number,
): void {
  for (let at = 0; at < batches; at++) {
    const size = Math.min(most, Math.floor(2 ** (random.next() * Math.log2(1.5 * most))));
    estimate.learn(size, curve(size) * Math.max(0.2, 1 + noise * random.gaussian()), now);
  }
}

function steps(most: number): number[] {
  const all: number[] = [];
  for (let size = 1; size <= most; size++) if (stepBelow(size) === size) all.push(size);
  return all;
}

/** By the definition, on the true curve. */
function trueKnee(curve: Curve, most: number): number {
  const sizes = Array.from({ length: most }, (_, at) => at + 1);
  const best = Math.max(...sizes.map((size) => size / curve(size)));
  return sizes.find((size) => size / curve(size) >= WORTH * best)!;
}

/** How many steps lie between two sizes. */
function stepsApart(one: number, other: number): number {
  const all = steps(4096);
  return Math.abs(all.indexOf(stepAbove(one)) - all.indexOf(stepAbove(other)));
}

test("steps are 1, 2, 3, 4, 6, 8, 12 …, and every size lies between two", () => {
  assert.deepEqual(steps(64), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]);
  for (let size = 1; size < 2000; size++) {
    const [below, above] = [stepBelow(size), stepAbove(size)];
    assert.ok(below <= size && size <= above && above <= 2 * below, `${size}: ${below} to ${above}`);
    assert.equal(stepBelow(above), above);
  }
});

describe("flat, then in proportion", () => {
  test("the knee is found to a step, for any time, bend and scatter up to 10 %", () => {
    const shapes = fc.record({
      flatMs: fc.double({ min: 1, max: 500, noNaN: true }),
      bend: fc.integer({ min: 6, max: 64 }),
      noise: fc.double({ min: 0, max: 0.1, noNaN: true }),
      seed: fc.integer({ min: 1, max: 1_000_000 }),
    });
    fc.assert(
      fc.property(shapes, ({ flatMs, bend, noise, seed }) => {
        const most = 8 * bend;
        const curve = (size: number): number => (flatMs * Math.max(bend, size)) / bend;
        const { knee, hint } = learned(curve, most, noise, seed).read(most, 0);
        assert.ok(knee !== undefined, "no knee");
        const wanted = trueKnee(curve, most);
        assert.ok(stepsApart(knee.size, wanted) <= 1, `${knee.size} instead of ${wanted}`);
        assert.ok(Math.abs(knee.ms / curve(knee.size) - 1) < 0.25, `${knee.ms} ms`);
        assert.match(hint, new RegExp(`^maxBatchSize ${most} lies beyond the knee at ${knee.size}: `));
        assert.match(hint, new RegExp(`set maxBatchSize: ${knee.size}$`));
      }),
      { numRuns: 60 },
    );
  });

  test("measured on one H200, bert-base with 512 tokens: beyond 24 to 32 nothing is bought", () => {
    const times: [size: number, ms: number][] = [
      [1, 5],
      [8, 4.9],
      [32, 7.3],
      [64, 15],
      [128, 29.3],
    ];
    const { knee, hint, points } = read(times, 128);
    assert.ok(knee !== undefined && knee.size >= 24 && knee.size <= 32, String(knee?.size));
    assert.match(hint, /^maxBatchSize 128 lies beyond the knee/);
    assert.deepEqual(
      points.map(({ size, batches }) => [size, batches]),
      times.map(([size]) => [size, 10]),
    );
    // At the knee itself there is nothing to say.
    assert.equal(read(times, knee.size).hint, "");
  });
});

function read(times: readonly (readonly [size: number, ms: number])[], most: number): CurveReading {
  const estimate = new CurveEstimate();
  for (let at = 0; at < 10; at++) for (const [size, ms] of times) estimate.learn(size, ms, 0);
  return estimate.read(most, 0);
}

describe("where there is no knee", () => {
  test("a flat curve up to full batches: larger ones may pay", () => {
    const { knee, hint } = learned(() => 5, 64, 0.05, 3).read(64, 0);
    assert.equal(knee, undefined);
    assert.match(hint, /^batches of \d+ still take the time of one: .* try maxBatchSize: 128$/);
  });

  test("a flat curve, and batches that were never nearly full: nothing to say", () => {
    const { knee, hint } = learned(() => 5, 24, 0.05, 3).read(64, 0);
    assert.deepEqual([knee, hint], [undefined, ""]);
  });

  test("still rising in throughput at the end: no knee, no hint", () => {
    const { knee, hint } = learned((size) => 100 + size, 64, 0.02, 4).read(64, 0);
    assert.deepEqual([knee, hint], [undefined, ""]);
  });

  test("in proportion from the first task on: batching buys nothing", () => {
    const { knee, hint } = learned((size) => 3 * size, 64, 0.02, 5).read(64, 0);
    assert.ok(knee !== undefined && knee.size <= 2, String(knee?.size));
    assert.match(hint, /batching buys nothing here$|beyond the knee at 2/);
  });

  test("one size, or sizes that lie close together, say nothing", () => {
    for (const times of [
      [[64, 5]],
      [
        [24, 5],
        [32, 6],
        [48, 9],
        [64, 12],
      ],
    ] as const) {
      const { knee, hint } = read(times, 64);
      assert.deepEqual([knee, hint], [undefined, ""]);
    }
  });

  test("nothing seen", () => {
    assert.deepEqual(new CurveEstimate().read(64, 0), { points: [], knee: undefined, hint: "" });
  });
});

describe("time", () => {
  const bentAt = (bend: number, flatMs: number) => (size: number) => (flatMs * Math.max(bend, size)) / bend;

  test("the curve follows a worker that changes", () => {
    const random = new Random(9);
    const estimate = new CurveEstimate();
    teach(estimate, bentAt(64, 5), 128, 0.03, random, 2000, 0);
    const before = estimate.read(128, 0).knee?.size;
    teach(estimate, bentAt(16, 20), 128, 0.03, random, 2000, 60_000);
    const after = estimate.read(128, 60_000).knee?.size;
    assert.ok(before !== undefined && stepsApart(before, 58) <= 1, `${before}`);
    assert.ok(after !== undefined && stepsApart(after, 15) <= 1, `${after}`);
  });

  test("what was not seen for a quarter of an hour is forgotten", () => {
    const estimate = learned(bentAt(16, 5), 128, 0.03, 6);
    assert.ok(estimate.read(128, 300_000).knee !== undefined);
    for (let at = 0; at < 50; at++) estimate.learn(128, 40, 900_000);
    const { knee, points } = estimate.read(128, 900_000);
    assert.equal(knee, undefined);
    assert.deepEqual(
      points.map(({ size }) => size),
      [128],
    );
  });

  test("one batch that hung moves nothing", () => {
    const estimate = learned(bentAt(16, 5), 128, 0, 7);
    const before = estimate.read(128, 0).knee!;
    estimate.learn(16, 60_000, 0);
    const after = estimate.read(128, 0).knee!;
    assert.ok(stepsApart(before.size, after.size) <= 1, `${before.size} → ${after.size}`);
  });
});
