/** What `put` promises tasks that may share: work in flight, outcomes, and Idempotency-Keys. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import type { PutReply } from "../../src/engine/engine.ts";
import {
  dead,
  done,
  failed,
  type Holds,
  idsOf,
  LEASE_MS,
  QUEUE_MS,
  RESULT_TTL_MS,
  retry,
  type Stage,
  TOTAL_MS,
} from "./engine-stage.ts";

export function sharingContract(holds: Holds): void {
  describe("put joins work in flight", () => {
    joins(holds);
    patience(holds);
    tiers(holds);
  });
  describe("put reuses outcomes", () => {
    cache(holds);
    cacheLimits(holds);
  });
  describe("put keeps Idempotency-Keys", () => {
    keys(holds);
    keyFailures(holds);
    keysAndJoins(holds);
  });
}

const SAME = { joinKey: "same ann" };

function joins(holds: Holds): void {
  holds("the same work queued, running or waiting for a retry is joined and runs once", async (stage) => {
    const id = await stage.queue({}, SAME);
    const joined = { kind: "joined", id };
    assert.deepEqual(await stage.put({}, SAME), joined);
    const lease = await stage.claim();
    assert.deepEqual(idsOf(lease), [id]);
    assert.deepEqual(await stage.put({}, SAME), joined);
    await stage.settle(lease, retry(id, stage.now + 500));
    assert.deepEqual(await stage.put({}, SAME), joined);
    await stage.pass(500);
    assert.deepEqual(idsOf(await stage.claim()), [id]);
    await stage.hasCounts([0, 1, 0, 0]);
  });

  holds("a joined task leaves no record of its own", async (stage) => {
    await stage.queue({}, SAME);
    const task = stage.task();
    await stage.engine.put(task, SAME);
    assert.equal(await stage.engine.outcome(task.id), undefined);
    assert.equal(stage.arrivals.length, 1);
  });

  holds("without a key, or with another tenant's, work is not joined", async (stage) => {
    await stage.queue({}, SAME);
    await stage.queue({});
    await stage.queue({}, { joinKey: "other ann" });
    await stage.queue({ tenant: "bob" }, { joinKey: "same bob" });
    await stage.hasCounts([4, 0, 0, 0]);
  });

  holds("what has ended is not joined, however it ended", async (stage) => {
    for (const verdict of [done, failed, dead]) await stage.ended(verdict, {}, SAME);
    const cancelled = await stage.queue({}, SAME);
    await stage.engine.cancel(cancelled, "ann");
    await stage.queue({}, SAME);
    await stage.pass(TOTAL_MS);
    await stage.queue({}, SAME);
  });

  holds("an answer from the cache does not end the work that is in flight", async (stage) => {
    const shared = { cacheKey: "cache", cacheTtlMs: 1000 };
    const { id } = await stage.run({}, { ...SAME, ...shared });
    await stage.ended(done, { tenant: "bob" }, { joinKey: "same bob", ...shared });
    assert.equal((await stage.put({}, { ...SAME, ...shared })).kind, "done");
    await stage.pass(LEASE_MS);
    assert.deepEqual(await stage.put({}, SAME), { kind: "joined", id });
  });
}

function patience(holds: Holds): void {
  holds("whoever joins a running task brings its own deadline", async (stage) => {
    const { id, lease } = await stage.run({}, SAME);
    await stage.engine.extend(lease, 10 * TOTAL_MS);
    await stage.pass(3000);
    await stage.put({}, SAME);
    await stage.pass(TOTAL_MS - 1);
    assert.equal(await stage.state(id), "running");
    await stage.pass(1);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
  });

  holds("whoever joins a queued task brings its own time in the queue", async (stage) => {
    const id = await stage.queue({}, SAME);
    await stage.pass(QUEUE_MS - 1);
    await stage.put({}, SAME);
    await stage.pass(QUEUE_MS - 1);
    assert.equal(await stage.state(id), "queued");
    await stage.pass(1);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
  });

  holds("a task that a claim meets too late and that is joined meanwhile is ended or runs", async (stage) => {
    for (let round = 0; round < 10; round++) {
      const sharing = { joinKey: `same ${round}` };
      await stage.queueMany(2);
      await stage.queue({}, sharing);
      await stage.tick(QUEUE_MS);
      const [claimed, reply] = await Promise.all([stage.claim(), stage.put({}, sharing)]);
      assert(reply.kind === "joined" || reply.kind === "queued");
      await stage.reap();
      const lease = claimed.tasks.length > 0 ? claimed : await stage.claim();
      assert.deepEqual(idsOf(lease), [reply.id]);
      assert.equal(await stage.settle(lease, done(reply.id)), "taken");
    }
  });

  holds("whoever is in a hurry shortens nobody's deadline", async (stage) => {
    const id = await stage.queue({}, SAME);
    await stage.put({ deadlineAt: stage.now + 10 }, SAME);
    await stage.pass(QUEUE_MS - 1);
    assert.equal(await stage.state(id), "queued");
  });

  holds("joining a task that waits for its retry leaves it its time in the queue", async (stage) => {
    const { id, lease } = await stage.run({ deadlineAt: stage.now + 10 * TOTAL_MS }, SAME);
    const at = stage.now + QUEUE_MS + 1000;
    await stage.settle(lease, retry(id, at));
    await stage.put({}, SAME);
    await stage.pass(at - stage.now);
    assert.equal(await stage.state(id), "queued");
    await stage.pass(QUEUE_MS - 1);
    assert.equal(await stage.state(id), "queued");
  });

  holds("a deadline that a join moved is kept also while a retry waits", async (stage) => {
    const { id, lease } = await stage.run({}, SAME);
    await stage.settle(lease, retry(id, stage.now + 10 * TOTAL_MS));
    await stage.pass(1000);
    await stage.put({}, SAME);
    await stage.pass(TOTAL_MS - 1);
    assert.equal(await stage.state(id), "queued");
    await stage.pass(1);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
  });
}

function tiers(holds: Holds): void {
  holds("the better tier wins", async (stage) => {
    const [middle] = await stage.queueMany(1, { tier: 1 });
    const id = await stage.queue({ tier: 2 }, SAME);
    await stage.put({ tier: 0 }, SAME);
    assert.deepEqual(stage.engine.stats().depth.get("embed"), [1, 1, 0]);
    assert.deepEqual(idsOf(await stage.claim(1)), [id]);
    assert.deepEqual(idsOf(await stage.claim(1)), [middle]);
  });

  holds("a worse tier changes nothing", async (stage) => {
    const id = await stage.queue({ tier: 0 }, SAME);
    await stage.put({ tier: 2 }, SAME);
    assert.deepEqual(stage.engine.stats().depth.get("embed"), [1, 0, 0]);
    assert.deepEqual(idsOf(await stage.claim()), [id]);
  });

  holds("the better tier holds for a task that comes back from a lease", async (stage) => {
    const { id, lease } = await stage.run({ tier: 2 }, SAME);
    await stage.put({ tier: 0 }, SAME);
    await stage.settle(lease, retry(id, stage.now));
    assert.deepEqual(stage.engine.stats().depth.get("embed"), [1, 0, 0]);
  });
}

const CACHED = { cacheKey: "cache", cacheTtlMs: 5000 };

function cache(holds: Holds): void {
  holds("a success is reused: own id, own record, own owner, same output, no run", async (stage) => {
    await stage.ended(done, {}, CACHED);
    const [first, second] = [stage.task({ tenant: "bob" }), stage.task({ tenant: "bob" })];
    for (const task of [first, second]) {
      const reply = await stage.engine.put(task, CACHED);
      assert(reply.kind === "done");
      assert.deepEqual([reply.id, reply.cached], [task.id, true]);
      assert.deepEqual(reply.record.outcome, { ok: true, output: '"out"' });
      assert.equal(reply.record.settledAt, stage.now);
      assert.equal((await stage.look(task.id, "bob"))?.state, "done");
      assert.equal(await stage.engine.outcome(task.id, "ann"), undefined);
    }
    await stage.hasCounts([0, 0, 3, 0]);
    assert.equal(stage.settled.length, 3);
    assert.equal(stage.arrivals.length, 1);
  });

  holds("forgetting one answer leaves the others", async (stage) => {
    const id = await stage.ended(done, {}, CACHED);
    const hit = stage.task();
    await stage.engine.put(hit, CACHED);
    assert.equal(await stage.engine.cancel(id, "ann"), "forgotten");
    assert.equal(await stage.state(hit.id), "done");
    assert.equal((await stage.put({}, CACHED)).kind, "done");
  });

  holds("a success that comes too late for its own task does not hide another's", async (stage) => {
    const first = await stage.run({}, CACHED);
    const late = await stage.run({ tenant: "bob" }, CACHED);
    assert.equal(await stage.settle(first.lease, done(first.id)), "taken");
    assert.equal(await stage.settle(late.lease, dead(late.id)), "taken");
    assert.equal(await stage.settle(late.lease, done(late.id)), "late");
    assert.equal((await stage.put({}, CACHED)).kind, "done");
  });

  holds("a good outcome from an expired lease is reused too", async (stage) => {
    const { id, lease } = await stage.run({}, CACHED);
    await stage.pass(LEASE_MS);
    assert.equal(await stage.settle(lease, done(id)), "taken");
    assert.equal((await stage.put({}, CACHED)).kind, "done");
  });
}

function cacheLimits(holds: Holds): void {
  holds("within its time to live, and not after", async (stage) => {
    await stage.ended(done, {}, CACHED);
    await stage.pass(4999);
    assert.equal((await stage.put({}, CACHED)).kind, "done");
    await stage.tick(1);
    assert.equal((await stage.put({}, CACHED)).kind, "queued");
  });

  holds("the time to live counts from the run: being asked for does not keep it fresh", async (stage) => {
    await stage.ended(done, {}, CACHED);
    for (let n = 0; n < 4; n++) {
      await stage.pass(1000);
      assert.equal((await stage.put({}, CACHED)).kind, "done");
    }
    await stage.pass(1000);
    assert.equal((await stage.put({}, CACHED)).kind, "queued");
  });

  holds("the cache may outlive the record that filled it", async (stage) => {
    const long = { cacheKey: "cache", cacheTtlMs: 3 * RESULT_TTL_MS };
    const id = await stage.ended(done, {}, long);
    await stage.pass(RESULT_TTL_MS);
    assert.equal(await stage.engine.outcome(id), undefined);
    assert.equal((await stage.put({}, long)).kind, "done");
  });

  holds("never for a failure", async (stage) => {
    for (const verdict of [failed, dead]) await stage.ended(verdict, {}, CACHED);
    const cancelled = await stage.queue({}, CACHED);
    await stage.engine.cancel(cancelled, "ann");
    assert.equal((await stage.put({}, CACHED)).kind, "queued");
    await stage.pass(TOTAL_MS);
    assert.equal((await stage.put({}, CACHED)).kind, "queued");
  });

  holds("never without the key, nor under another", async (stage) => {
    await stage.ended(done, {}, CACHED);
    assert.equal((await stage.put()).kind, "queued");
    assert.equal((await stage.put({}, { ...CACHED, cacheKey: "other" })).kind, "queued");
  });

  holds("a success without a time to live is not kept", async (stage) => {
    await stage.ended(done, {}, { cacheKey: "cache" });
    assert.equal((await stage.put({}, { cacheKey: "cache" })).kind, "queued");
  });
}

const KEY = { key: "key ann", fingerprint: "body" };
const KEYED = { idempotency: KEY };

/** Comes with the key once more; resolves with what happened and to which task. */
async function again(stage: Stage): Promise<[kind: string, id: string]> {
  const reply = await stage.put({}, KEYED);
  assert(reply.kind !== "full");
  return [reply.kind, reply.id];
}

function keys(holds: Holds): void {
  holds("the key joins its task in flight, wherever that is", async (stage) => {
    const id = await stage.queue({}, KEYED);
    assert.deepEqual(await again(stage), ["joined", id]);
    const lease = await stage.claim();
    assert.deepEqual(await again(stage), ["joined", id]);
    await stage.settle(lease, retry(id, stage.now + 1000));
    assert.deepEqual(await again(stage), ["joined", id]);
    await stage.hasCounts([1, 0, 0, 0]);
  });

  holds("whoever comes back with the key brings its own deadline", async (stage) => {
    const { id, lease } = await stage.run({}, KEYED);
    await stage.engine.extend(lease, 10 * TOTAL_MS);
    await stage.pass(TOTAL_MS - 1);
    assert.deepEqual(await again(stage), ["joined", id]);
    await stage.pass(TOTAL_MS - 1);
    assert.equal(await stage.settle(lease, done(id)), "taken");
  });

  holds("a success is given again, not run again, for as long as the record lives", async (stage) => {
    const id = await stage.ended(done, {}, KEYED);
    await stage.pass(RESULT_TTL_MS - 1);
    const reply = await stage.put({}, KEYED);
    assert(reply.kind === "done");
    assert.deepEqual([reply.id, reply.cached, reply.record.outcome?.ok], [id, false, true]);
    await stage.pass(1);
    assert.equal((await again(stage))[0], "queued");
  });

  holds("the key with another body is a conflict, in flight and after", async (stage) => {
    const other = { idempotency: { ...KEY, fingerprint: "other body" } };
    const { id, lease } = await stage.run({}, KEYED);
    assert.deepEqual(await stage.put({}, other), { kind: "conflict", id });
    await stage.settle(lease, done(id));
    assert.deepEqual(await stage.put({}, other), { kind: "conflict", id });
    await stage.hasCounts([0, 0, 1, 0]);
    assert.deepEqual(await again(stage), ["done", id]);
  });

  holds("two bodies under one key at once: one is accepted, the other is a conflict", async (stage) => {
    const bodies = ["one", "two", "three", "four"];
    for (let round = 0; round < 5; round++) {
      const key = `key ${round}`;
      const comes = (body: string) =>
        stage.put({ content: body }, { idempotency: { key, fingerprint: body } });
      const replies = await Promise.all(bodies.map(comes));
      const winner = replies.findIndex(({ kind }) => kind === "queued");
      const { kind, id } = replies[winner] as PutReply & { id: string };
      assert.equal(kind, "queued");
      const others = replies.filter((_, at) => at !== winner);
      for (const other of others) assert.deepEqual(other, { kind: "conflict", id });
      assert.deepEqual(await comes(bodies[winner]!), { kind: "joined", id });
    }
    assert.equal((await stage.counts())[0], 5);
  });

  holds("the same key of another tenant is another key", async (stage) => {
    await stage.queue({}, KEYED);
    await stage.queue({ tenant: "bob" }, { idempotency: { key: "key bob", fingerprint: "body" } });
  });
}

function keyFailures(holds: Holds): void {
  holds("a failure that time may heal runs again, and the key then stands for that", async (stage) => {
    const id = await stage.ended(dead, {}, KEYED);
    const [kind, next] = await again(stage);
    assert.equal(kind, "queued");
    assert.notEqual(next, id);
    assert.deepEqual(await again(stage), ["joined", next]);
    await stage.engine.settle(await stage.claim(), [done(next)]);
    assert.deepEqual(await again(stage), ["done", next]);
    assert.equal(await stage.code(id), "INFERENCE_FAILED");
  });

  holds("a deadline that passed is such a failure", async (stage) => {
    await stage.queue({}, KEYED);
    await stage.pass(QUEUE_MS);
    assert.equal((await again(stage))[0], "queued");
  });

  holds("a failure that time cannot heal is given again", async (stage) => {
    const id = await stage.ended(failed, {}, KEYED);
    const reply = await stage.put({}, KEYED);
    assert(reply.kind === "done");
    assert.deepEqual(
      [reply.id, reply.record.outcome],
      [id, { ok: false, code: "INPUT_REJECTED", message: "no" }],
    );
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("a replay does not take the key from the task that ran meanwhile", async (stage) => {
    const letter = await stage.ended(dead, {}, KEYED);
    const id = await stage.ended(done, {}, KEYED);
    assert.equal(await stage.engine.deadLetters.replay(letter), true);
    assert.deepEqual(await again(stage), ["done", id]);
  });
}

function keysAndJoins(holds: Holds): void {
  holds("a key whose task joined another stands for that one", async (stage) => {
    const { id, lease } = await stage.run({}, SAME);
    assert.deepEqual(await stage.put({}, { ...SAME, ...KEYED }), { kind: "joined", id });
    await stage.settle(lease, done(id));
    assert.deepEqual(await again(stage), ["done", id]);
    assert.equal((await stage.put({}, { idempotency: { ...KEY, fingerprint: "other" } })).kind, "conflict");
  });

  holds("a key whose task was answered from the cache stands for that answer", async (stage) => {
    await stage.ended(done, {}, CACHED);
    const hit = await stage.put({}, { ...CACHED, ...KEYED });
    assert(hit.kind === "done");
    assert.deepEqual(await again(stage), ["done", hit.id]);
  });

  holds("forgetting the record frees its key", async (stage) => {
    const id = await stage.ended(done, {}, KEYED);
    await stage.engine.cancel(id, "ann");
    assert.equal((await again(stage))[0], "queued");
  });

  holds("also for another body", async (stage) => {
    const id = await stage.ended(done, {}, KEYED);
    await stage.engine.cancel(id, "ann");
    await stage.queue({}, { idempotency: { ...KEY, fingerprint: "other" } });
  });

  holds(
    "a key whose task was refused is free for another body",
    async (stage) => {
      await stage.queue();
      assert.equal((await stage.put({}, KEYED)).kind, "full");
      await stage.claim();
      await stage.queue({}, { idempotency: { ...KEY, fingerprint: "other" } });
    },
    { maxQueued: 1 },
  );
}
