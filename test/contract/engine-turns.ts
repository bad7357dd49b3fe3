/**
 * What an engine promises to tenants that share a tier: turns, so that whoever floods it delays nobody else.
 *
 * Where the engine is `approximate` a tenant must first be found out: what it has queued by then is served in
 * the order of arrival, and the stories leave room for that.
 */
import assert from "node:assert/strict";
import { describe } from "node:test";
import { done, type Holds, idsOf, LEASE_MS, MODEL, retry, type Stage } from "./engine-stage.ts";

export function turnsContract(holds: Holds): void {
  describe("tenants in turn", () => {
    floods(holds);
    order(holds);
  });
  describe("turn and waiting", () => {
    views(holds);
  });
}

/** How many of each tenant a claim took. */
async function take(stage: Stage, max: number): Promise<Record<string, number>> {
  const lease = await stage.claim(max);
  await stage.engine.settle(lease, idsOf(lease).map(done));
  const taken: Record<string, number> = {};
  for (const { task } of lease.tasks) taken[task.tenant] = (taken[task.tenant] ?? 0) + 1;
  return taken;
}

function floods(holds: Holds): void {
  holds("one that floods the tier does not delay the others, and gets what they leave", async (stage) => {
    await stage.queue({ tenant: "bob" });
    await stage.queueMany(60, { tenant: "ann" });
    await stage.queueMany(3, { tenant: "bob" });
    await stage.queueMany(3, { tenant: "cid" });
    // Redis: what ann has in the common streams, and two of hers for each two of the others.
    const taken = await take(stage, stage.approximate ? 24 : 10);
    assert.deepEqual([taken["bob"], taken["cid"]], [4, 3]);
    assert.deepEqual(await take(stage, 20), { ann: 20 });
  });

  holds("round after round, at ten times its share, the others are served as they come", async (stage) => {
    const others = Array.from({ length: 19 }, (_, at) => `tenant-${at}`);
    const served: Record<string, number> = {};
    const rounds = 20;
    for (let round = 0; round < rounds; round++) {
      await Promise.all([
        ...others.map((tenant) => stage.queue({ tenant })),
        ...Array.from({ length: 10 }, () => stage.queue({ tenant: "ann" })),
      ]);
      await stage.tick(20);
      for (const [tenant, count] of Object.entries(await take(stage, 20))) {
        served[tenant] = (served[tenant] ?? 0) + count;
      }
      // One round's worth, and on Redis what ann had in before she was found out.
      const late = others.map((tenant) => round + 1 - (served[tenant] ?? 0));
      assert.ok(Math.max(...late) <= (stage.approximate ? 2 : 1), `round ${round}: ${late.join(" ")}`);
    }
    // The twentieth part of all seats is hers; what she got before she was found out is on top.
    const least = rounds - 2;
    assert.ok(served["ann"]! >= least && served["ann"]! <= rounds + 20, `${served["ann"]} of ${20 * rounds}`);
  });

  holds("two that flood share what is there", async (stage) => {
    await stage.queueMany(2, { tenant: "cid" });
    for (let n = 0; n < 40; n++) {
      await stage.queue({ tenant: "ann" });
      await stage.queue({ tenant: "bob" });
      if (n % 2 === 0) await stage.queue({ tenant: "bob" });
    }
    const sum = { ann: 0, bob: 0 };
    for (let batch = 0; batch < 8; batch++) {
      const { ann = 0, bob = 0 } = await take(stage, 8);
      sum.ann += ann;
      sum.bob += bob;
    }
    assert.ok(Math.abs(sum.ann - sum.bob) <= (stage.approximate ? 16 : 2), JSON.stringify(sum));
  });

  holds("a flood in one tier changes nothing in another", async (stage) => {
    await stage.queue({ tenant: "bob", tier: 1 });
    await stage.queueMany(30, { tenant: "ann", tier: 1 });
    await stage.queueMany(3, { tenant: "bob", tier: 0 });
    assert.deepEqual(await take(stage, 3), { bob: 3 });
  });
}

function order(holds: Holds): void {
  holds("a tenant's own tasks keep their order, and what comes back goes first", async (stage) => {
    const ids = await stage.queueMany(4, { tenant: "ann" });
    await stage.queueMany(4, { tenant: "bob" });
    const lease = await stage.claim(stage.approximate ? 6 : 4);
    const hers = idsOf(lease).filter((id) => ids.includes(id));
    assert.deepEqual(hers, ids.slice(0, hers.length));
    await stage.settle(lease, retry(hers[0]!, stage.now));
    assert.equal(idsOf(await stage.claim(1))[0], hers[0]);
  });

  holds(
    "of a flood nothing is lost, whether it is settled, retried, cancelled or left behind",
    async (stage) => {
      await stage.queue({ tenant: "bob" });
      const ids = await stage.queueMany(40, { tenant: "ann" });
      await stage.queue({ tenant: "bob" });
      const last = ids.at(-1)!;
      assert.equal(await stage.engine.cancel(last, "ann"), "cancelled");
      const lost = await stage.claim(20);
      assert.equal(lost.tasks.length, 20);
      await stage.pass(LEASE_MS);
      const seen = new Set<string>();
      for (let lease = await stage.claim(16); lease.tasks.length > 0; lease = await stage.claim(16)) {
        const [first, ...others] = idsOf(lease);
        for (const id of others) seen.add(id);
        const again = lease.tasks[0]!.attempt < 3;
        if (!again) seen.add(first!);
        await stage.engine.settle(lease, [
          again ? retry(first!, stage.now, { maxBatchSize: 1 }) : done(first!),
          ...others.map(done),
        ]);
      }
      assert.equal(seen.size, 41);
      await stage.hasCounts([0, 0, 42, 0]);
    },
  );
}

function views(holds: Holds): void {
  holds("waiting counts what is queued by tier, and what is on its way in", async (stage) => {
    const waiting = (): number[] => [...stage.engine.waiting(MODEL)];
    assert.deepEqual(waiting(), [0, 0, 0]);
    const puts = [0, 0, 2].map((tier) => stage.queue({ tier }));
    if (!stage.takesInLater) assert.deepEqual(waiting(), [2, 0, 1]);
    await Promise.all(puts);
    assert.deepEqual(waiting(), [2, 0, 1]);
    const lease = await stage.claim(2);
    assert.deepEqual(waiting(), [0, 0, 1]);
    await stage.settle(lease, retry(idsOf(lease)[0]!, stage.now));
    assert.deepEqual(waiting(), [1, 0, 1]);
    assert.deepEqual([...stage.engine.waiting("nobody's")], []);
  });

  holds("what joins or is refused is not waited for", async (stage) => {
    const sharing = { joinKey: "k" };
    await stage.queue({ content: "c" }, sharing);
    await stage.put({ content: "c" }, sharing);
    await stage.put({ content: "d" }, { joinKey: "d", only: true });
    assert.deepEqual([...stage.engine.waiting(MODEL)], [1, 0, 0]);
  });

  holds("alone, everything of its own tier is before a tenant", async (stage) => {
    assert.equal(stage.engine.turn(MODEL, 0, "ann"), 0);
    await stage.queueMany(30);
    await stage.queueMany(5, { tier: 1 });
    assert.equal(stage.engine.turn(MODEL, 0, "ann"), 30);
    assert.equal(stage.engine.turn(MODEL, 2, "ann"), 0);
    assert.equal(stage.engine.turn("nobody's", 0, "ann"), 0);
  });

  holds("of a flood a tenant has its own turns before it, the others one each", async (stage) => {
    await stage.queue({ tenant: "bob" });
    await stage.queueMany(100, { tenant: "ann" });
    const turn = (tenant: string): number => stage.engine.turn(MODEL, 0, tenant);
    assert.equal(turn("ann"), 101);
    // In memory one of each, for the one that is queued and for the next; on Redis the common streams.
    assert.ok(turn("bob") <= (stage.approximate ? 30 : 4), String(turn("bob")));
    assert.ok(turn("cid") <= (stage.approximate ? 30 : 2), String(turn("cid")));
    await stage.claim(64);
    await stage.claim(64);
    assert.equal(turn("bob"), 0);
  });
}
