/**
 * Thousands of requests of the drop-in protocols, with arrays of any size, clients that leave and workers that fail in
 * every way: nobody gets another's answer. `npm run simulate -- --dropin --requests 1000000` plays more.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import "../fixtures/unhooked.ts";
import { usually } from "../fixtures/long.ts";
import { uncovered } from "./dropin-table.ts";
import { dropInReplay, DropInTotals } from "./dropin-totals.ts";
import { playDropIn, REQUESTS_A_SEED } from "./dropin-world.ts";

const REQUESTS = usually(8000, 20_000);

test(`${REQUESTS} drop-in requests: 0 crossed, all answered, nothing left behind`, async (t) => {
  const totals = new DropInTotals();
  for (let seed = 1; seed <= REQUESTS / REQUESTS_A_SEED; seed++) {
    totals.add(await playDropIn(seed));
    const [failed] = totals.failed;
    if (failed !== undefined) assert.fail(`${failed.message}; replay: ${dropInReplay(failed.seed)}`);
  }
  assert.deepEqual(totals.missing(), [], "every mishap must happen");
  t.diagnostic(`${totals.inputs} inputs, ${totals.counts.get("answer 200")} requests answered`);
});

test("every protocol that Ferry speaks is played", () => {
  assert.deepEqual(uncovered, []);
});

test("a seed plays the same way each time", async () => {
  const [one, other] = [await playDropIn(3), await playDropIn(3)];
  assert.deepEqual([...one.counts], [...other.counts]);
});
