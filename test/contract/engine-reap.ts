/** What `reap` and `spend` promise: what time demands, at the instant at which it does. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import {
  dead,
  done,
  failed,
  type Holds,
  idsOf,
  LEASE_MS,
  LETTER_TTL_MS,
  MODEL,
  QUEUE_MS,
  RESULT_TTL_MS,
  retry,
  type Stage,
  TOTAL_MS,
} from "./engine-stage.ts";

export function reapContract(holds: Holds): void {
  describe("reap", () => {
    timeouts(holds);
    leases(holds);
    lostLeases(holds);
    forgetting(holds);
    instants(holds);
    hints(holds);
  });
  describe("spend", () => {
    spending(holds);
  });
}

async function settledAt(stage: Stage, id: string): Promise<number | undefined> {
  return (await stage.engine.outcome(id))?.settledAt;
}

function timeouts(holds: Holds): void {
  holds("what waited in the queue for too long fails, at that instant", async (stage) => {
    const startedAt = stage.now;
    const id = await stage.queue();
    await stage.pass(QUEUE_MS - 1);
    assert.equal(await stage.state(id), "queued");
    await stage.pass(100);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
    assert.equal(await settledAt(stage, id), startedAt + QUEUE_MS);
    assert.deepEqual(
      stage.settled.map((each) => each.id),
      [id],
    );
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("a deadline before that counts first", async (stage) => {
    const deadlineAt = stage.now + 700;
    const id = await stage.queue({ deadlineAt });
    await stage.pass(QUEUE_MS);
    assert.equal(await settledAt(stage, id), deadlineAt);
  });

  holds("the total timeout ends a running task too, and its lease loses it", async (stage) => {
    const startedAt = stage.now;
    const { id, lease } = await stage.run();
    await stage.engine.extend(lease, 10 * TOTAL_MS);
    await stage.pass(TOTAL_MS - 1);
    assert.equal(await stage.state(id), "running");
    await stage.pass(100);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
    assert.equal(await settledAt(stage, id), startedAt + TOTAL_MS);
    assert.deepEqual(await stage.engine.extend(lease, LEASE_MS), [id]);
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("a running task has no age in the queue", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.engine.extend(lease, 10 * TOTAL_MS);
    await stage.pass(QUEUE_MS + 1);
    assert.equal(await stage.state(id), "running");
  });
}

function leases(holds: Holds): void {
  holds("an expired lease gives its tasks back, ahead of what was never tried", async (stage) => {
    const { id } = await stage.run();
    const fresh = await stage.queue();
    await stage.pass(LEASE_MS - 1);
    assert.equal(await stage.state(id), "running");
    await stage.pass(1);
    assert.deepEqual(await stage.look(id), { id, state: "queued", attempt: 1, outcome: undefined });
    await stage.hasCounts([2, 0, 0, 0]);
    const next = await stage.claim(1);
    assert.deepEqual([idsOf(next), next.tasks[0]?.attempt], [[id], 2]);
    assert.deepEqual(idsOf(await stage.claim(1)), [fresh]);
    assert.equal(stage.settled.length, 0);
  });

  holds("of a lease settled in part only the rest comes back", async (stage) => {
    const ids = await stage.queueMany(3);
    const lease = await stage.claim();
    await stage.engine.settle(lease, [done(ids[0]!), failed(ids[1]!)]);
    await stage.pass(LEASE_MS);
    assert.deepEqual(idsOf(await stage.claim()), [ids[2]]);
  });

  holds("a reap that comes late does everything that fell due meanwhile", async (stage) => {
    const { id: expired } = await stage.run();
    const waiting = await stage.run();
    await stage.settle(waiting.lease, retry(waiting.id, stage.now + 500));
    const old = await stage.ended(done);
    const { id: late } = await stage.run({ deadlineAt: stage.now + 100 });
    await stage.tick(LEASE_MS + 500);
    await stage.reap();
    assert.equal(await stage.state(expired), "queued");
    assert.equal(await stage.code(late), "DEADLINE_EXCEEDED");
    assert.deepEqual(new Set(idsOf(await stage.claim())), new Set([expired, waiting.id]));
    await stage.tick(RESULT_TTL_MS);
    await stage.reap();
    assert.equal(await stage.engine.outcome(old), undefined);
  });

  holds("a lease that expires again and again still ends at the deadline", async (stage) => {
    const startedAt = stage.now;
    const { id } = await stage.run();
    for (let n = 0; n < 3; n++) {
      await stage.pass(LEASE_MS);
      assert.deepEqual(idsOf(await stage.claim()), [id]);
    }
    await stage.pass(LEASE_MS);
    assert.equal(await settledAt(stage, id), startedAt + TOTAL_MS);
  });
}

/** Time enough for many leases. */
const PATIENT = { models: new Map([["embed", { queueMs: 60_000, totalMs: 60_000 }]]) };

function lostLeases(holds: Holds): void {
  const longLived = (stage: Stage) => ({ deadlineAt: stage.now + 60_000 });

  holds(
    "a task whose leases run out rides alone from the second time on",
    async (stage) => {
      const ids = new Set(await stage.queueMany(3, longLived(stage)));
      for (const together of [3, 3]) {
        assert.equal((await stage.claim()).tasks.length, together);
        await stage.pass(LEASE_MS);
      }
      const alone: string[] = [];
      for (let lease = await stage.claim(); lease.tasks.length > 0; lease = await stage.claim()) {
        assert.equal(lease.tasks.length, 1);
        alone.push(...idsOf(lease));
      }
      assert.deepEqual(new Set(alone), ids);
    },
    PATIENT,
  );

  holds(
    "and is a dead letter when its fourth attempt ends like that",
    async (stage) => {
      const told: unknown[] = [];
      stage.events.on("task.retried", (task) => told.push([task.id, task.model, task.attempt]));
      stage.events.on("task.dead", (task) => told.push([task.id, task.model, task.code]));
      const id = await stage.queue(longLived(stage));
      for (let attempt = 1; attempt <= 4; attempt++) {
        assert.equal((await stage.claim()).tasks[0]?.attempt, attempt);
        await stage.pass(LEASE_MS);
      }
      const retries = [1, 2, 3].map((attempt) => [id, MODEL, attempt]);
      assert.deepEqual(told, [...retries, [id, MODEL, "INFERENCE_FAILED"]]);
      assert.equal(await stage.code(id), "INFERENCE_FAILED");
      const letter = await stage.engine.deadLetters.get(id);
      assert.deepEqual([letter?.attempts, letter?.task.input], [4, '"in"']);
      assert.equal(await stage.engine.deadLetters.replay(id), true);
      assert.equal((await stage.claim()).tasks[0]?.attempt, 1);
    },
    PATIENT,
  );
}

function forgetting(holds: Holds): void {
  holds("a record is forgotten a time to live after its end, not before", async (stage) => {
    const early = await stage.ended(done);
    await stage.pass(500);
    const late = await stage.ended(failed);
    await stage.pass(RESULT_TTL_MS - 501);
    assert.equal(await stage.state(early), "done");
    await stage.pass(1);
    assert.equal(await stage.engine.outcome(early, "ann"), undefined);
    assert.equal(await stage.engine.cancel(early, "ann"), "unknown");
    assert.equal(await stage.state(late), "failed");
    await stage.pass(500);
    await stage.hasCounts([0, 0, 0, 0]);
  });

  holds("also when it was delivered, in whatever order", async (stage) => {
    const early = await stage.ended(done);
    await stage.pass(500);
    const late = await stage.ended(done);
    stage.engine.delivered(late);
    stage.engine.delivered(early);
    await stage.pass(RESULT_TTL_MS - 500);
    assert.equal(await stage.engine.outcome(early, "ann"), undefined);
    assert.equal(await stage.state(late), "done");
    await stage.pass(500);
    await stage.hasCounts([0, 0, 0, 0]);
  });

  holds("what is not finished is never forgotten", async (stage) => {
    const deadlineAt = stage.now + 10 * RESULT_TTL_MS;
    const { id, lease } = await stage.run({ deadlineAt });
    await stage.engine.extend(lease, 10 * RESULT_TTL_MS);
    await stage.pass(5 * RESULT_TTL_MS);
    assert.equal(await stage.state(id), "running");
    assert.equal(await stage.settle(lease, done(id)), "taken");
  });
}

function instants(holds: Holds): void {
  holds(
    "names the next thing to do: the end of a task's time in the queue, then of its record",
    async (stage) => {
      const startedAt = stage.now;
      await stage.queue();
      assert.equal(await stage.reap(), startedAt + QUEUE_MS);
      await stage.pass(QUEUE_MS);
      const next = await stage.reap();
      // A store that forgets by itself need not be told when to.
      if (!stage.approximate) assert.equal(next, startedAt + QUEUE_MS + RESULT_TTL_MS);
    },
  );

  holds("the soonest of several", async (stage) => {
    await stage.queue();
    await stage.tick(100);
    await stage.queue();
    const hurried = await stage.queue({ deadlineAt: stage.now + 50 });
    assert.equal(await stage.reap(), stage.now + 50);
    await stage.pass(50);
    assert.equal(await stage.code(hurried), "DEADLINE_EXCEEDED");
  });

  holds("nothing is due later than it said", async (stage) => {
    const { id } = await stage.run();
    assert.ok((await stage.reap()) <= stage.now + LEASE_MS);
    await stage.pass(LEASE_MS);
    assert.equal(await stage.state(id), "queued");
    await stage.settle(await stage.claim(), retry(id, stage.now + 100));
    assert.ok((await stage.reap()) <= stage.now + 100);
  });
}

/** Reaps, acts, and resolves with the instant by which the engine then wants to be reaped. */
async function dueAfter(stage: Stage, act: () => Promise<unknown>): Promise<number> {
  await stage.reap();
  await act();
  return stage.dueAt - stage.now;
}

function hints(holds: Holds): void {
  holds("says so when something falls due sooner than it said last", async (stage) => {
    assert.ok((await dueAfter(stage, () => stage.queue())) <= QUEUE_MS);
    assert.ok((await dueAfter(stage, () => stage.queue({ deadlineAt: stage.now + 10 }))) <= 10);
    let lease = await stage.claim(0 + 1);
    assert.ok((await dueAfter(stage, async () => (lease = await stage.claim(1, { leaseMs: 5 })))) <= 5);
    const id = idsOf(lease)[0]!;
    assert.ok((await dueAfter(stage, () => stage.settle(lease, retry(id, stage.now + 3)))) <= 3);
  });

  holds(
    "also for the end of a record",
    async (stage) => {
      // Redis forgets by itself what is past its time.
      if (stage.approximate) return;
      const { id, lease } = await stage.run();
      await stage.engine.extend(lease, TOTAL_MS);
      assert.ok((await dueAfter(stage, () => stage.settle(lease, done(id)))) <= 300);
      await stage.pass(300);
      assert.equal(await stage.engine.outcome(id), undefined);
    },
    { results: { ttlMs: 300, evictAfterRead: false, maxBytes: 1_000_000 } },
  );

  holds("also for an answer from the cache", async (stage) => {
    // Redis forgets by itself what is past its time.
    if (stage.approximate) return;
    const cached = { cacheKey: "cache", cacheTtlMs: 10 * RESULT_TTL_MS };
    await stage.ended(done, {}, cached);
    await stage.pass(2 * RESULT_TTL_MS);
    assert.ok((await dueAfter(stage, () => stage.put({}, cached))) <= RESULT_TTL_MS);
  });

  holds(
    "also for a dead letter",
    async (stage) => {
      // Redis forgets by itself what is past its time.
      if (stage.approximate) return;
      const { id, lease } = await stage.run();
      await stage.engine.extend(lease, TOTAL_MS);
      assert.ok((await dueAfter(stage, () => stage.settle(lease, dead(id)))) <= 200);
      await stage.pass(200);
      assert.equal((await stage.counts())[3], 0);
    },
    { deadLetters: { max: 10, ttlMs: 200 } },
  );

  holds("a process that reaps when it is told to has nothing left in the end", async (stage) => {
    await stage.queueMany(3);
    await stage.claim(1);
    await stage.ended(dead, { parameters: "other" });
    await stage.pass(TOTAL_MS + RESULT_TTL_MS);
    await stage.hasCounts([0, 0, 0, 1]);
    await stage.pass(LETTER_TTL_MS);
    await stage.hasCounts([0, 0, 0, 0]);
    assert.equal(stage.settled.length, 4);
  });
}

function spending(holds: Holds): void {
  const MINUTE_MS = 60_000;

  holds("exactly the limit is allowed in a minute, and says what is left", async (stage) => {
    for (let left = 4; left >= 0; left--) {
      const spent = await stage.engine.spend("ann", 5);
      assert.deepEqual([spent.allowed, spent.left], [true, left]);
      assert.ok(spent.resetMs > 0 && spent.resetMs <= MINUTE_MS);
    }
    for (let n = 0; n < 3; n++) {
      const { allowed, left } = await stage.engine.spend("ann", 5);
      assert.deepEqual([allowed, left], [false, 0]);
    }
  });

  holds("one is free again when it says so, and not before", async (stage) => {
    for (let n = 0; n < 5; n++) await stage.engine.spend("ann", 5);
    await stage.tick(20_000);
    const { allowed, resetMs } = await stage.engine.spend("ann", 5);
    assert.equal(allowed, false);
    await stage.tick(resetMs - 1);
    assert.equal((await stage.engine.spend("ann", 5)).allowed, false);
    await stage.tick(1);
    assert.equal((await stage.engine.spend("ann", 5)).allowed, true);
  });

  holds("a refusal costs nothing", async (stage) => {
    for (let n = 0; n < 50; n++) await stage.engine.spend("ann", 5);
    await stage.tick(MINUTE_MS);
    let allowed = 0;
    for (let n = 0; n < 50; n++) if ((await stage.engine.spend("ann", 5)).allowed) allowed++;
    assert.equal(allowed, 5);
  });

  holds("keys have nothing to do with each other", async (stage) => {
    assert.equal((await stage.engine.spend("ann", 1)).allowed, true);
    assert.equal((await stage.engine.spend("bob", 1)).allowed, true);
    assert.equal((await stage.engine.spend("ann", 1)).allowed, false);
  });

  holds("many at once get exactly the limit", async (stage) => {
    const spent = await Promise.all(Array.from({ length: 40 }, () => stage.engine.spend("ann", 25)));
    assert.equal(spent.filter(({ allowed }) => allowed).length, 25);
  });
}
