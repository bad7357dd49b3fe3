import assert from "node:assert/strict";
import { beforeEach, describe, test } from "node:test";
import { ProcessLoad } from "../../../src/gateway/admission/process-load.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";

const TIERS = 2;
/** Of one turn of the event loop. */
const PER_TURN = 16;

describe("the load of a process", () => {
  let clock: VirtualClock;
  let load: ProcessLoad;
  let ends: (() => void)[];
  let begun: number;

  beforeEach(() => {
    clock = new VirtualClock();
    ends = [];
    begun = 0;
    load = new ProcessLoad(TIERS, clock, (run) => void ends.push(run));
  });

  /** A request that was let in. */
  async function come(): Promise<void> {
    await load.turn();
    begun++;
  }

  /** The event loop has read every socket; `ms` after the last time. */
  async function endTurn(ms: number): Promise<void> {
    await clock.run(clock.now() + ms);
    for (const end of ends.splice(0)) end();
    await Promise.resolve();
    await Promise.resolve();
  }

  test("begins a few requests at once, and the others in order, a few in each turn", async () => {
    const order: number[] = [];
    const all = Array.from({ length: 40 }, async (_, at) => {
      await load.turn();
      order.push(at);
    });
    await Promise.resolve();
    assert.equal(order.length, PER_TURN);
    await endTurn(1);
    assert.equal(order.length, 2 * PER_TURN);
    await endTurn(1);
    await Promise.all(all);
    assert.deepEqual(order, [...Array(40).keys()]);
    await endTurn(1);
    assert.equal(ends.length, 0, "an idle process waits for no turn");
  });

  test("nobody overtakes those that wait", async () => {
    for (let at = 0; at < 2 * PER_TURN + 1; at++) void come();
    await endTurn(1);
    assert.equal(begun, 2 * PER_TURN);
    const later = load.turn();
    assert.notEqual(later, undefined, "one still waits");
    await endTurn(1);
    await later;
    assert.equal(begun, 2 * PER_TURN + 1);
  });

  test("refuses the last tier first, then all, and none once it has caught up", async () => {
    for (let at = 0; at < 25_000; at++) void come();
    assert.equal(load.refusing, false, "what a request takes is not known yet");
    await endTurn(1.6);
    await endTurn(1.6);
    assert.equal(load.refuses(0), "turn", "2.5 s");
    while (load.refuses(0) !== undefined) await endTurn(1.6);
    assert.equal(load.refuses(1), "turn");
    while (load.refusing) await endTurn(1.6);
    assert.ok(begun < 25_000, "some still wait");
  });

  test("keeps the wait short once requests have waited for long without a break", async () => {
    for (let at = 0; at < 5000; at++) void come();
    const startedAt = clock.now();
    while (load.refuses(0) === undefined) {
      for (let at = 0; at < PER_TURN; at++) void come();
      await endTurn(1.6);
    }
    assert.ok(clock.now() - startedAt >= 3000);
    while (load.refusing) await endTurn(1.6);
    assert.ok(begun > 5000);
  });

  test("a burst is served", async () => {
    for (let at = 0; at < 1200; at++) void come();
    for (let turn = 0; turn < 1200 / PER_TURN; turn++) {
      await endTurn(1.6);
      assert.equal(load.refusing, false);
    }
    assert.equal(begun, 1200);
  });

  test("begins one for every four that it refuses", async () => {
    for (let at = 0; at < 200; at++) void come();
    await endTurn(1);
    for (let at = 0; at < 400; at++) load.refused();
    const before = begun;
    await endTurn(1);
    assert.equal(begun - before, 100);
    await endTurn(1);
    assert.equal(begun - before, 100 + PER_TURN);
  });

  test("lets one in for every four that it refuses in a turn, however long that is", async () => {
    const all = 30_000;
    for (let at = 0; at < all; at++) void come();
    while (load.refuses(0) === undefined) await endTurn(1.6);
    const waited = all - begun;
    for (let at = 0; at < 4 * waited; at++) load.refused();
    assert.equal(load.refuses(0), "turn");
    load.refused();
    assert.equal(load.refuses(0), undefined);
    void come();
    assert.equal(load.refuses(0), "turn");
    await endTurn(1000);
    assert.equal(begun, all + 1, "all of them are begun with the end of the turn");
  });

  test("refuses while the engine stores nothing, in the order of tiers, and no longer", async () => {
    load.puts.began(clock.now());
    await clock.run(clock.now() + 500);
    assert.equal(load.refuses(1), undefined);
    await clock.run(clock.now() + 1);
    assert.equal(load.refuses(1), "put");
    assert.equal(load.refuses(0), undefined);
    await clock.run(clock.now() + 500);
    assert.equal(load.refuses(0), "put");
    load.puts.ended(clock.now() - 1001);
    assert.equal(load.refusing, false);
  });
});
