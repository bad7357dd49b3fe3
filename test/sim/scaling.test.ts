/** The autoscaler on virtual time: it follows, does not thrash, and costs less than a fleet for the worst hour. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import "../fixtures/unhooked.ts";
import { usually } from "../fixtures/long.ts";
import { COLD_START_MS, HOUR_MS, PACE, play, RULES, steady, step, turns } from "./scaling-lab.ts";

describe("a step", () => {
  for (const times of usually([2], [2, 5])) {
    test(`traffic × ${times} for half an hour: enough workers a start after it, not many too many, one turn`, async () => {
      const traffic = step(0.6 * 4 * PACE, times, 0.5);
      const { wanted, missed, requests } = await play({ traffic, workers: 4, rules: RULES });
      const enough = wanted.find(({ workers }) => workers * PACE >= traffic.most);
      assert.ok(enough !== undefined);
      assert.ok(enough.atMs < HOUR_MS / 4 + COLD_START_MS, JSON.stringify(wanted));
      const most = Math.max(...wanted.map(({ workers }) => workers));
      assert.ok(most <= 1.4 * Math.ceil(traffic.most / (0.7 * PACE)), `${most} workers`);
      assert.ok(turns(wanted, 4) <= 1, JSON.stringify(wanted));
      const share = missed / requests;
      assert.ok(share < 0.03, `${(100 * share).toFixed(2)} % missed`);
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
  for (const load of usually([0.65], [0.3, 0.65])) {
    const { wanted, missed, requests } = await play({
      traffic: steady(load * 6 * PACE, 1.5),
      workers: 6,
      rules: RULES,
    });
    assert.ok(turns(wanted, 6) === 0, `load ${load}: ${JSON.stringify(wanted)}`);
    assert.ok(missed / requests < 0.01, `load ${load}: ${missed} of ${requests} missed`);
  }
});
