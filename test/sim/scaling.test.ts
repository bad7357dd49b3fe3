/** The autoscaler on virtual time: it follows, does not thrash, and costs less than a fleet for the worst hour. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { COLD_START_MS, PACE, play, RULES, steady, step, turns } from "./scaling-lab.ts";

describe("a step", () => {
  for (const times of [2, 5]) {
    test(`traffic × ${times}, and back: enough workers a start after it, one turn, fewer misses than without`, async () => {
      const traffic = step(0.6 * 4 * PACE, times);
      const [scaled, fixed] = await Promise.all([
        play({ traffic, workers: 4, rules: RULES }),
        play({ traffic, workers: 4 }),
      ]);
      const enough = scaled.wanted.find(({ workers }) => workers * PACE >= traffic.most);
      assert.ok(enough !== undefined);
      assert.ok(enough.atMs < 1_800_000 + 2 * COLD_START_MS, `after ${(enough.atMs - 1_800_000) / 1000} s`);
      assert.equal(turns(scaled.wanted, 4), 1);
      const share = scaled.missed / scaled.requests;
      assert.ok(share < (times === 2 ? 0.03 : 0.06), `${(100 * share).toFixed(2)} % missed`);
      assert.ok(scaled.missed < fixed.missed / 3, `${scaled.missed} against ${fixed.missed}`);
    });
  }
});

test("half of the fleet lost: replaced within a start, the wanted number stays", async () => {
  const traffic = steady(0.6 * 8 * PACE, 1);
  const course = await play({ traffic, workers: 8, rules: RULES, loss: { atMs: 1_800_000, workers: 4 } });
  assert.equal(course.least, 4);
  assert.ok(turns(course.wanted, 8) <= 1);
  const share = course.missed / course.requests;
  assert.ok(share < 0.03, `${(100 * share).toFixed(2)} % missed`);
});

test("steady traffic at any load: the number settles and stays", async () => {
  for (const load of [0.3, 0.5, 0.65]) {
    const { wanted, missed, requests } = await play({
      traffic: steady(load * 6 * PACE, 4),
      workers: 6,
      rules: RULES,
    });
    assert.ok(turns(wanted, 6) === 0, `load ${load}: ${JSON.stringify(wanted)}`);
    assert.ok(missed / requests < 0.01, `load ${load}: ${missed} of ${requests} missed`);
  }
});
