/**
 * The whole system under seeded fault schedules. `npm run simulate` runs more of them, or one alone; what is
 * played stands in plan.ts, what must hold in ledger.ts and callers.ts.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import { usually } from "../fixtures/long.ts";
import "../fixtures/unhooked.ts";
import { replayCommand, Totals } from "./totals.ts";
import { play } from "./world.ts";

const SEEDS = usually(200, 1000);
/** The rarest turns come once in some 500 seeds: so many may be missing. In thousands of seeds none may. */
const MISSING = usually(3, 0);

test(`${SEEDS} seeds: none lost, none crossed, none settled twice, nobody waits for ever`, async (t) => {
  const totals = new Totals();
  for (let seed = 1; seed <= SEEDS; seed++) {
    totals.add(await play(seed));
    const [failed] = totals.failed;
    if (failed !== undefined) assert.fail(`${failed.message}; replay: ${replayCommand(failed.seed)}`);
  }
  const missing = totals.missing();
  t.diagnostic(`${totals.seeds} seeds, ${totals.tasks} tasks, never: ${missing.join(", ")}`);
  assert.ok(missing.length <= MISSING, `faults and rare turns that never happened: ${missing.join(", ")}`);
});

test("a seed plays the same way each time", async () => {
  for (let seed = 1; seed <= 12; seed++) {
    const [one, other] = [[] as string[], [] as string[]];
    await play(seed, one);
    await play(seed, other);
    assert.ok(one.length > 20);
    assert.deepEqual(one, other, `seed ${seed}`);
  }
});
