/** What `claim` and `extend` promise: who rides in a batch, in which order, and who holds it. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import type { Lease } from "../../src/engine/engine.ts";
import {
  done,
  failed,
  type Holds,
  idsOf,
  LEASE_MS,
  OTHER_MODEL,
  QUEUE_MS,
  retry,
  type Stage,
  TOTAL_MS,
} from "./engine-stage.ts";

export function claimContract(holds: Holds): void {
  describe("claim", () => {
    batches(holds);
    notes(holds);
    expired(holds);
    order(holds);
    tiers(holds);
    suspects(holds);
  });
  describe("extend", () => {
    extending(holds);
  });
}

function batches(holds: Holds): void {
  holds("takes the oldest first, and at most `max`", async (stage) => {
    const ids = await stage.queueMany(5);
    assert.deepEqual(idsOf(await stage.claim(2)), ids.slice(0, 2));
    await stage.hasCounts([3, 2, 0, 0]);
    assert.deepEqual(idsOf(await stage.claim(64)), ids.slice(2));
    await stage.hasCounts([0, 5, 0, 0]);
  });

  holds("an empty lease means that nothing was there", async (stage) => {
    const lease = await stage.claim();
    assert.deepEqual([lease.tasks.length, lease.batch.size], [0, 0]);
    assert.deepEqual(await stage.engine.extend(lease, LEASE_MS), []);
    assert.deepEqual(await stage.engine.settle(lease, []), []);
    assert.deepEqual((await stage.claim(64, { model: "nobody's" })).tasks, []);
  });

  holds("takes only tasks of this model with exactly these parameters", async (stage) => {
    const plain = await stage.queue();
    const hot = await stage.queue({ parameters: '{"t":1}' });
    const cold = await stage.queue({ parameters: '{"t":0}' });
    const other = await stage.queue({ parameters: '{"t":1}', model: OTHER_MODEL });
    assert.deepEqual(idsOf(await stage.claim(64, { parameters: '{"t":1}' })), [hot]);
    assert.deepEqual(idsOf(await stage.claim(64)), [plain]);
    assert.deepEqual(idsOf(await stage.claim(64, { parameters: '{"t":0}' })), [cold]);
    assert.deepEqual(idsOf(await stage.claim(64, { parameters: '{"t":1}', model: OTHER_MODEL })), [other]);
  });

  holds("hands out the task as it came, with its attempt and its arrival", async (stage) => {
    const task = stage.task({ input: '{"a":[1.0,2e3]}', tier: 2 });
    await stage.engine.put(task);
    const queuedAt = stage.now;
    await stage.tick(10);
    const { tasks } = await stage.claim();
    assert.deepEqual(tasks, [{ task, attempt: 1, queuedAt, length: 0 }]);
    assert.deepEqual(await stage.look(task.id), {
      id: task.id,
      state: "running",
      attempt: 1,
      outcome: undefined,
    });
  });
}

function notes(holds: Holds): void {
  holds("each claim counts as an attempt", async (stage) => {
    const id = await stage.queue();
    for (let attempt = 1; attempt <= 4; attempt++) {
      const lease = await stage.claim();
      assert.deepEqual(
        lease.tasks.map((each) => each.attempt),
        [attempt],
      );
      assert.equal((await stage.look(id))?.attempt, attempt);
      await stage.settle(lease, retry(id, stage.now));
    }
  });

  holds(
    "the batch is noted with the size that it has, on the lease and on every record in it",
    async (stage) => {
      const ids = await stage.queueMany(3);
      const note = {
        id: "b1",
        reason: "wait",
        worker: "gpu-7",
        startedAt: stage.now,
        why: "it was time",
      } as const;
      const lease = await stage.claim(64, { batch: note });
      assert.deepEqual(lease.batch, { ...note, size: 3 });
      for (const id of ids) assert.deepEqual((await stage.engine.outcome(id))?.batch, { ...note, size: 3 });
      await stage.settle(lease, done(ids[0]!));
      assert.deepEqual((await stage.engine.outcome(ids[0]!))?.batch, { ...note, size: 3 });
    },
  );

  holds("no two leases share a token, not even for the same batch id", async (stage) => {
    await stage.queueMany(2);
    const [first, second] = [await stage.claim(1), await stage.claim(1)];
    assert.notEqual(first.token, second.token);
  });
}

function expired(holds: Holds): void {
  holds("tasks that waited too long are settled, not claimed", async (stage) => {
    const id = await stage.queue();
    const hurried = await stage.queue({ deadlineAt: stage.now + 100 });
    await stage.tick(100);
    const young = await stage.queue();
    await stage.tick(QUEUE_MS - 100);
    assert.deepEqual(idsOf(await stage.claim()), [young]);
    for (const late of [id, hurried]) assert.equal(await stage.code(late), "DEADLINE_EXCEEDED");
    assert.deepEqual(stage.settled.map((each) => each.id).sort(), [id, hurried].sort());
    await stage.hasCounts([0, 1, 2, 0]);
    await stage.reap();
    assert.equal(stage.settled.length, 2);
  });

  holds("they do not hide those behind them", async (stage) => {
    await stage.queueMany(3);
    await stage.tick(1);
    const [young] = await stage.queueMany(3);
    await stage.tick(QUEUE_MS - 1);
    const lease = await stage.claim(3);
    assert.ok(lease.tasks.length > 0, "an empty lease means that nothing was there");
    assert.equal(idsOf(lease)[0], young);
    assert.equal(lease.batch.size, lease.tasks.length);
  });
}

function order(holds: Holds): void {
  holds("what comes back goes ahead of what was never tried", async (stage) => {
    const ids = await stage.queueMany(3);
    const lease = await stage.claim(2);
    await stage.engine.settle(
      lease,
      idsOf(lease).map((id) => retry(id, stage.now)),
    );
    assert.deepEqual(new Set(idsOf(await stage.claim(2))), new Set(ids.slice(0, 2)));
    await stage.pass(LEASE_MS);
    assert.deepEqual(new Set(idsOf(await stage.claim(2))), new Set(ids.slice(0, 2)));
    assert.deepEqual(idsOf(await stage.claim(2)), ids.slice(2));
  });

  holds("what waits for its retry is not there before its time", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now + 300));
    assert.equal(await stage.state(id), "queued");
    assert.deepEqual(idsOf(await stage.claim()), []);
    await stage.pass(299);
    assert.deepEqual(idsOf(await stage.claim()), []);
    const fresh = await stage.queue();
    await stage.pass(1);
    assert.deepEqual(idsOf(await stage.claim(1)), [id]);
    assert.deepEqual(idsOf(await stage.claim(1)), [fresh]);
  });
}

/** Keeps `depth` tasks of the first tier queued and claims `rounds` batches; counts tasks by tier. */
async function flooded(stage: Stage, rounds: number, max: number, depth: number): Promise<number[]> {
  const taken = [0, 0, 0];
  for (let round = 0; round < rounds; round++) {
    const first = stage.engine.stats().depth.get("embed")?.[0] ?? 0;
    await stage.queueMany(depth - first, { tier: 0 });
    const lease = await stage.claim(max);
    assert.equal(lease.tasks.length, max);
    for (const { task } of lease.tasks) taken[task.tier]!++;
    await stage.engine.settle(lease, idsOf(lease).map(done));
  }
  return taken;
}

function tiers(holds: Holds): void {
  holds("the better tier goes first, whoever came first", async (stage) => {
    const free = await stage.queueMany(2, { tier: 2 });
    const paid = await stage.queueMany(2, { tier: 1 });
    const enterprise = await stage.queueMany(2, { tier: 0 });
    assert.deepEqual(new Set(idsOf(await stage.claim(2))), new Set(enterprise));
    assert.deepEqual(new Set(idsOf(await stage.claim(2))), new Set(paid));
    assert.deepEqual(new Set(idsOf(await stage.claim(2))), new Set(free));
  });

  holds("tiers share a batch that has room", async (stage) => {
    for (const tier of [2, 1, 0]) await stage.queueMany(2, { tier });
    assert.equal((await stage.claim(6)).tasks.length, 6);
  });

  holds("a flood of the first tier leaves the others a small share of every batch", async (stage) => {
    await stage.queueMany(40, { tier: 1 });
    await stage.queueMany(40, { tier: 2 });
    const [enterprise, paid, free] = await flooded(stage, 20, 10, 30);
    assert.ok(free! >= 8 && free! <= 12, `${free} of 200 for the last tier, 5 %`);
    assert.ok(paid! >= 16 && paid! <= 24, `${paid} of 200 for the middle tier, 10 %`);
    assert.equal(enterprise, 200 - free! - paid!);
  });

  holds("also when batches hold a single task", async (stage) => {
    await stage.queueMany(5, { tier: 2 });
    const [, , free] = await flooded(stage, 60, 1, 4);
    assert.ok(free === 2 || free === 3, `${free} of 60`);
  });

  holds("the first tier has no such share: it is first", async (stage) => {
    await stage.queueMany(30, { tier: 2 });
    const [enterprise] = await stage.queueMany(1, { tier: 0 });
    assert.ok(idsOf(await stage.claim(2)).includes(enterprise!));
  });
}

/** Claims until nothing is left, checking that suspects never ride in a larger batch than they may. */
async function drained(stage: Stage, limits: ReadonlyMap<string, number>): Promise<Lease[]> {
  const leases: Lease[] = [];
  for (let lease = await stage.claim(10); lease.tasks.length > 0; lease = await stage.claim(10)) {
    for (const id of idsOf(lease)) assert.ok(lease.tasks.length <= (limits.get(id) ?? 10));
    leases.push(lease);
  }
  assert.equal((await stage.counts())[0], 0);
  return leases;
}

function suspects(holds: Holds): void {
  holds("a suspicious task never rides in a larger batch than it may, and all get out", async (stage) => {
    await stage.queueMany(4);
    const lease = await stage.claim();
    const limits = new Map(idsOf(lease).map((id, at) => [id, 1 + at]));
    await stage.engine.settle(
      lease,
      [...limits].map(([id, maxBatchSize]) => retry(id, stage.now, { maxBatchSize })),
    );
    await stage.queueMany(12);
    await stage.queueMany(12, { tier: 1 });
    const leases = await drained(stage, limits);
    assert.equal(leases.flatMap(idsOf).length, 28);
  });

  holds("the smallest batch size that was ever said holds", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now, { maxBatchSize: 2 }));
    await stage.settle(await stage.claim(), retry(id, stage.now, { maxBatchSize: 5 }));
    await stage.settle(await stage.claim(), retry(id, stage.now));
    await stage.queueMany(8);
    await drained(stage, new Map([[id, 2]]));
  });

  holds("a suspicious task holds up nobody: its tier still gets its share of a flood", async (stage) => {
    const { id, lease } = await stage.run({ tier: 2 });
    await stage.settle(lease, retry(id, stage.now, { maxBatchSize: 1 }));
    const [fresh] = await stage.queueMany(1, { tier: 2 });
    let rounds = 0;
    while ((await stage.state(id)) === "queued" || (await stage.state(fresh!)) === "queued") {
      await stage.queueMany(20, { tier: 0 });
      const lease = await stage.claim(20);
      if (idsOf(lease).includes(id)) assert.equal(lease.tasks.length, 1);
      assert.ok(++rounds < 10, "its tier starves");
    }
  });
}

function extending(holds: Holds): void {
  holds("the lease is held for another `leaseMs` from now", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.pass(LEASE_MS - 1);
    assert.deepEqual(await stage.engine.extend(lease, LEASE_MS), []);
    await stage.pass(LEASE_MS - 1);
    assert.equal(await stage.state(id), "running");
    await stage.pass(1);
    assert.equal(await stage.state(id), "queued");
  });

  holds("names the ids that the lease no longer holds", async (stage) => {
    const ids = await stage.queueMany(4);
    const lease = await stage.claim();
    const [decided, failing, retried, held] = ids as [string, string, string, string];
    await stage.engine.settle(lease, [done(decided), failed(failing), retry(retried, stage.now)]);
    assert.deepEqual(
      new Set(await stage.engine.extend(lease, LEASE_MS)),
      new Set([decided, failing, retried]),
    );
    const next = await stage.claim();
    assert.deepEqual(idsOf(next), [retried]);
    await stage.engine.extend(next, 10 * LEASE_MS);
    await stage.pass(LEASE_MS);
    assert.deepEqual(new Set(await stage.engine.extend(lease, LEASE_MS)), new Set(ids));
    assert.equal(await stage.state(held), "queued");
    assert.deepEqual(await stage.engine.extend(next, LEASE_MS), []);
  });

  holds("a record that is forgotten is no longer held", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, done(id));
    await stage.engine.cancel(id, "ann");
    assert.deepEqual(await stage.engine.extend(lease, LEASE_MS), [id]);
  });

  holds("a late extension counts while nobody else has taken the task", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.tick(LEASE_MS + 1);
    assert.deepEqual(await stage.engine.extend(lease, LEASE_MS), []);
    await stage.reap();
    assert.equal(await stage.state(id), "running");
  });

  holds("does not move the deadline", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.engine.extend(lease, 10 * TOTAL_MS);
    await stage.pass(TOTAL_MS);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
    assert.deepEqual(await stage.engine.extend(lease, LEASE_MS), [id]);
  });
}
