import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { Histogram } from "../../../src/cli/bench/histogram.ts";

const percents = [0, 1, 25, 50, 90, 99, 99.9, 100];

/** The definition, on the samples themselves. */
function exactMs(samples: readonly number[], p: number): number {
  const sorted = samples.toSorted((a, b) => a - b);
  return sorted[Math.max(1, Math.ceil((p / 100) * sorted.length)) - 1]!;
}

function filled(samples: readonly number[]): Histogram {
  const histogram = new Histogram();
  for (const ms of samples) histogram.record(ms);
  return histogram;
}

const latencies = fc.array(fc.double({ min: 0, max: 4e6, noNaN: true }), { minLength: 1, maxLength: 200 });

void test("an empty histogram has no figures", () => {
  const histogram = new Histogram();
  assert.equal(histogram.count, 0);
  for (const p of percents) assert.ok(Number.isNaN(histogram.percentileMs(p)));
  assert.ok(Number.isNaN(histogram.meanMs) && Number.isNaN(histogram.minMs) && Number.isNaN(histogram.maxMs));
});

void test("a percentile is within 1 % of the exact one, for any samples", () => {
  fc.assert(
    fc.property(latencies, (samples) => {
      const histogram = filled(samples);
      for (const p of percents) {
        const exact = exactMs(samples, p);
        // One microsecond of slack: that is the resolution below 256 µs.
        assert.ok(Math.abs(histogram.percentileMs(p) - exact) <= exact * 0.01 + 0.001, `p${p} of ${exact}`);
      }
    }),
  );
});

void test("the error stays under 0.4 % plus rounding at every scale", () => {
  for (let ms = 0.3; ms < 4e6; ms *= 1.0137) {
    // Two other samples keep min and max away, which would make the answer exact.
    const histogram = filled([ms / 2, ms, ms, ms * 1.05]);
    const error = Math.abs(histogram.percentileMs(50) - ms);
    assert.ok(error <= ms / 256 + 0.0005, `${ms} ms is off by ${error}`);
  }
});

void test("count, mean, min and max are exact", () => {
  const histogram = filled([3, 1, 2.5]);
  assert.equal(histogram.count, 3);
  assert.equal(histogram.meanMs, 6.5 / 3);
  assert.equal(histogram.minMs, 1);
  assert.equal(histogram.maxMs, 3);
  assert.equal(histogram.percentileMs(100), 3);
});

void test("merging equals recording everything in one", () => {
  fc.assert(
    fc.property(latencies, latencies, (a, b) => {
      const merged = filled(a);
      merged.merge(filled(b));
      const whole = filled([...a, ...b]);
      assert.equal(merged.count, whole.count);
      for (const p of percents) assert.equal(merged.percentileMs(p), whole.percentileMs(p));
    }),
  );
});

void test("merging with an empty one changes nothing", () => {
  const histogram = filled([1, 2]);
  histogram.merge(new Histogram());
  assert.equal(histogram.count, 2);
  assert.equal(histogram.minMs, 1);
  assert.equal(histogram.maxMs, 2);
});

void test("the state survives JSON", () => {
  for (const samples of [[], [0], [0.4, 100, 100.2, 5000]]) {
    const histogram = filled(samples);
    const copy = Histogram.from(JSON.parse(JSON.stringify(histogram.state())));
    assert.equal(copy.count, histogram.count);
    for (const p of percents) assert.equal(copy.percentileMs(p), histogram.percentileMs(p));
    assert.equal(copy.meanMs, histogram.meanMs);
  }
});

void test("a state with an unknown bucket is refused", () => {
  const state = { buckets: [[-1, 1] as const], sumMs: 1, minMs: 1, maxMs: 1 };
  assert.throws(() => Histogram.from(state), /no bucket -1/);
});

void test("negative and absurdly large values stay in range", () => {
  const histogram = filled([-5, 1e12, 1]);
  assert.equal(histogram.minMs, 0);
  assert.ok(Math.abs(histogram.percentileMs(50) - 1) < 0.01);
  assert.equal(histogram.maxMs, 1e12);
});

void test("samples above a value are counted, those in its own bucket not", () => {
  const histogram = new Histogram();
  for (const ms of [1, 2, 3999, 4000, 4100, 9000]) histogram.record(ms);
  assert.equal(histogram.countAbove(4000), 2);
  assert.equal(histogram.countAbove(0), 6);
  assert.equal(histogram.countAbove(1e9), 0);
});
