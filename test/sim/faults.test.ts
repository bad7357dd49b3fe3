/**
 * The whole system under a thousand fault schedules. `npm run simulate` runs more of them, or one alone; what is
 * played stands in plan.ts, what must hold in ledger.ts and callers.ts.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import { replayCommand, Totals } from "./totals.ts";
import { play } from "./world.ts";

const SEEDS = 500;
/** The rarest turn of events comes once in some 500 seeds, so it may be missing from the first ones: then more are played. */
const MOST_SEEDS = 8000;

test(`${SEEDS} seeds: none lost, none crossed, none settled twice, nobody waits for ever`, async (t) => {
  const totals = new Totals();
  for (let seed = 1; seed <= SEEDS || (totals.missing().length > 0 && seed <= MOST_SEEDS); seed++) {
    totals.add(await play(seed));
    const [failed] = totals.failed;
    if (failed !== undefined) assert.fail(`${failed.message}; replay: ${replayCommand(failed.seed)}`);
  }
  assert.deepEqual(totals.missing(), [], "every fault must happen, and every rare turn of events");
  t.diagnostic(`${totals.seeds} seeds, ${totals.tasks} tasks`);
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
