/** A Cluster of three primaries with a replica each, under load: primaries die, slots move, nothing is lost. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { slotOf, startCluster, type Cluster } from "../engine/redis-client/servers.ts";
import { Load, type Ledger } from "./fleet-load.ts";
import { alert, Fleet, fleetConfig, patient } from "./fleet.ts";
import { eventually } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

/** Beyond the longest outage; a caller that is held for longer would be held for ever. */
const EXCHANGE_MS = 45_000;
/** What a machine that is busy may add to a time. */
const SLACK_MS = 10_000;

describe("3 + 3", () => {
  let cluster: Cluster;
  let worker: StubWorker;
  let fleet: Fleet;

  before(async () => {
    cluster = await startCluster();
    worker = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 20));
    const nodes = cluster.nodes.map(({ host, port }) => `${host}:${port}`);
    const config = fleetConfig({ nodes, ...alert }, [stubModel([worker], { timeouts: patient })]);
    fleet = await Fleet.start({ gateways: 2, batchers: 2 }, config);
  });

  after(async () => {
    await fleet?.[Symbol.asyncDispose]();
    await worker?.[Symbol.asyncDispose]();
    await cluster?.[Symbol.asyncDispose]();
  });

  /** From the death to the last refusal that it explains. */
  function refusedMs(ledger: Ledger, since: number): number {
    return Math.max(0, ...ledger.refusals.map(({ at, ms }) => at + ms - since));
  }

  /** No caller was left to wait in vain, and no gateway believes that it lost a task. */
  async function assertAllHeard(ledger: Ledger): Promise<void> {
    const vain = ledger.refusals.filter(({ status }) => status !== 503);
    assert.deepEqual(vain, [], "answered within the time of an exchange");
    for (const door of fleet.doors) {
      const said = door.lines.filter(({ msg }) => msg === "task lost");
      assert.deepEqual(said, []);
      assert.equal((await door.health()).totals.lost, 0);
    }
  }

  test("slots move while they are used: nothing is lost, and a refusal is soon said", async () => {
    await using load = new Load(() => fleet.doors, { exchangeMs: EXCHANGE_MS });
    // A few more answers, or a moment: in the end every caller may wait for the slot that is in two halves.
    const step = (): Promise<void> => load.more(2, 50).catch(() => {});
    await load.more(100);
    for (const tag of ["f0h", "f712", "ff0"]) {
      const slot = slotOf(tag);
      const from = await cluster.primaryOf(slot);
      const to = (await cluster.primaries()).find((server) => server !== from)!;
      await cluster.moveSlot(slot, to, step);
      await load.more(50);
      await cluster.moveSlot(slot, from, step);
      await load.more(50);
    }
    const ledger = await load.stop();
    ledger.assertWhole();
    await assertAllHeard(ledger);
    // While the keys of a shard are in two halves, Redis itself refuses scripts that need both.
    const slow = ledger.refusals.filter(({ ms }) => ms > 1500 + SLACK_MS);
    assert.deepEqual(slow, []);
  });

  test("a primary dies while its replica lags: refused until it is replaced, nothing is lost", async () => {
    await using load = new Load(() => fleet.doors, { callers: 48, exchangeMs: EXCHANGE_MS });
    await load.more(200);
    const primary = await cluster.primaryOf(slotOf("f0h"));
    const replica = await cluster.replicaOf(primary);
    replica.pause();
    await pause(600);
    const killedAt = performance.now();
    await primary.kill();
    replica.resume();
    const replaced = async (): Promise<boolean> => (await cluster.primaryOf(slotOf("f0h"))) === replica;
    await eventually(replaced);
    const replacedMs = performance.now() - killedAt;
    await load.more(300);
    await primary.restart();
    await load.more(100);
    const ledger = await load.stop();
    ledger.assertWhole();
    await assertAllHeard(ledger);
    const outageMs = refusedMs(ledger, killedAt);
    assert.ok(
      outageMs <= replacedMs + 1500 + SLACK_MS,
      `refused until ${outageMs.toFixed(0)} ms after the primary's death, replaced after ${replacedMs.toFixed(0)} ms`,
    );
    await cluster.until(() => cluster.isWell(), "the cluster is well");
  });

  test("a primary that hangs is replaced like a dead one, and is a replica when it wakes", async () => {
    await using load = new Load(() => fleet.doors, { callers: 48, exchangeMs: EXCHANGE_MS });
    await load.more(200);
    const slot = slotOf("f813");
    const primary = await cluster.primaryOf(slot);
    const pausedAt = performance.now();
    primary.pause();
    await eventually(async () => (await cluster.primaryOf(slot)) !== primary);
    const replacedMs = performance.now() - pausedAt;
    await load.more(200);
    primary.resume();
    await load.more(200);
    const ledger = await load.stop();
    ledger.assertWhole();
    await assertAllHeard(ledger);
    const outageMs = refusedMs(ledger, pausedAt);
    assert.ok(
      outageMs <= replacedMs + 1500 + SLACK_MS,
      `refused until ${outageMs.toFixed(0)} ms after the primary hung`,
    );
  });
});
