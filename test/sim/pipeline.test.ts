/**
 * What batches that are handed over early gain and cost, with the figures that docs/tuning.md shows:
 * `node --test test/sim/pipeline.test.ts`
 */
import assert from "node:assert/strict";
import { describe, type TestContext, test } from "node:test";
import "../fixtures/unhooked.ts";
import { usually } from "../fixtures/long.ts";
import { type Figures, loaded, saturated } from "./pipeline-lab.ts";

const SHORT = { baseMs: 5, handoverMs: 1.5, seed: 1 } as const;

describe("batches of 5 ms and a hand-over of 1.5 ms", () => {
  for (const workers of usually([4], [1, 4])) {
    test(`${workers} workers: the throughput at saturation`, async (t) => {
      const [one, two, auto] = await Promise.all(
        ([1, 2, "auto"] as const).map((pipeline) => saturated({ ...SHORT, workers, pipeline }, 2000)),
      );
      t.diagnostic(
        `of the workers' own: ${share(one!)} with 1, ${share(two!)} with 2, ${share(auto!)} with auto`,
      );
      assert.ok(one! < 0.78);
      assert.ok(two! > 0.99);
      assert.ok(auto! > 0.985);
    });

    test(`${workers} workers: nobody is answered later for it, at any load`, async (t) => {
      for (const load of usually([0.5], [0.3, 0.5, 0.7])) {
        const one = await loaded({ ...SHORT, workers, pipeline: 1 }, load, 2000);
        const auto = await loaded({ ...SHORT, workers, pipeline: "auto" }, load, 2000);
        say(t, load, one, auto);
        assert.ok(auto.meanMs <= 1.02 * one.meanMs, `mean ${auto.meanMs} ms`);
        assert.ok(auto.p99 <= 1.02 * one.p99, `p99 ${auto.p99} ms`);
        // Batches leave without waiting for the gap, in which others would have joined them.
        assert.ok(auto.fill >= 0.7 * one.fill);
      }
    });
  }
});

describe("batches of 100 ms", () => {
  test("auto leaves them alone", async () => {
    const figures = await loaded(
      { workers: 2, baseMs: 100, handoverMs: 1.5, pipeline: "auto", seed: 1 },
      0.9,
    );
    assert.equal(figures.early, 0);
  });

  test("with 2 the figures stay what they were", async (t) => {
    const fleet = { workers: 2, baseMs: 100, handoverMs: 1.5, seed: 1 } as const;
    for (const load of usually([0.7], [0.3, 0.7, 0.9])) {
      const one = await loaded({ ...fleet, pipeline: 1 }, load);
      const two = await loaded({ ...fleet, pipeline: 2 }, load);
      say(t, load, one, two);
      assert.ok(two.meanMs <= 1.02 * one.meanMs && two.p99 <= 1.02 * one.p99);
    }
  });
});

function say(t: TestContext, load: number, before: Figures, after: Figures): void {
  const line = (from: number, to: number): string => `${from.toFixed(1)} → ${to.toFixed(1)} ms`;
  t.diagnostic(
    `${share(load)} load: mean ${line(before.meanMs, after.meanMs)}, p99 ${line(before.p99, after.p99)}, ` +
      `batches ${share(before.fill)} → ${share(after.fill)} full, ${share(after.early)} of them early`,
  );
}

function share(value: number): string {
  return `${Math.round(1000 * value) / 10} %`;
}
