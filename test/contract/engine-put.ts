/** What `put` promises a task that shares nothing: its place, its id, and the bounds. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import { done, type Holds, idsOf, LEASE_MS, OTHER_MODEL, retry, TOTAL_MS } from "./engine-stage.ts";

export function putContract(holds: Holds): void {
  describe("put", () => {
    places(holds);
    bounds(holds);
    exceptions(holds);
  });
}

function places(holds: Holds): void {
  holds("a new task is in its queue under its own id, and was never tried", async (stage) => {
    const task = stage.task({ input: '{"n":12345678901234567890}', parameters: '{"a":1}', tier: 1 });
    assert.deepEqual(await stage.engine.put(task), { kind: "queued", id: task.id });
    const record = await stage.engine.outcome(task.id, task.tenant);
    assert.deepEqual(record?.task, task);
    assert.equal(record?.queuedAt, stage.now);
    assert.equal(record?.settledAt, undefined);
    assert.equal(record?.batch, undefined);
    assert.deepEqual(await stage.look(task.id), {
      id: task.id,
      state: "queued",
      attempt: 0,
      outcome: undefined,
    });
    await stage.hasCounts([1, 0, 0, 0]);
  });

  holds("a task goes to the queue of its own model", async (stage) => {
    await stage.queue({ model: OTHER_MODEL });
    assert.deepEqual(idsOf(await stage.claim()), []);
    assert.equal((await stage.claim(64, { model: OTHER_MODEL })).tasks.length, 1);
  });

  holds("what is put together is there together", async (stage) => {
    const tasks = [stage.task(), stage.task(), stage.task()];
    await stage.engine.together(() => Promise.all(tasks.map(async (task) => stage.engine.put(task))));
    await stage.hasCounts([3, 0, 0, 0]);
    assert.deepEqual(idsOf(await stage.claim()).sort(), tasks.map(({ id }) => id).sort());
  });

  holds("the same id twice is queued once", async (stage) => {
    const task = stage.task();
    const replies = await Promise.all([stage.engine.put(task), stage.engine.put(task)]);
    assert.deepEqual(replies.map(({ kind }) => kind).sort(), ["joined", "queued"]);
    await stage.hasCounts([1, 0, 0, 0]);
    assert.deepEqual(idsOf(await stage.claim()), [task.id]);
    assert.deepEqual(await stage.engine.put(task), { kind: "joined", id: task.id });
    await stage.hasCounts([0, 1, 0, 0]);
  });

  holds("the same id after its end is answered with its outcome", async (stage) => {
    const task = stage.task();
    await stage.engine.put(task);
    await stage.engine.settle(await stage.claim(), [done(task.id)]);
    const reply = await stage.engine.put(task);
    assert(reply.kind === "done");
    assert.deepEqual([reply.id, reply.cached, reply.record.outcome?.ok], [task.id, false, true]);
    await stage.hasCounts([0, 0, 1, 0]);
  });
}

function bounds(holds: Holds): void {
  holds(
    "full by number: nothing is written, and there is room again when one leaves",
    async (stage) => {
      await stage.queueMany(2);
      const task = stage.task();
      const idempotency = { key: "key ann", fingerprint: "f" };
      const sharing = { joinKey: "same ann", idempotency };
      const reply = await stage.engine.put(task, sharing);
      assert(reply.kind === "full");
      assert.notEqual(reply.message, "");
      assert.equal(await stage.engine.outcome(task.id), undefined);
      await stage.hasCounts([2, 0, 0, 0]);
      assert.equal(stage.arrivals.length, 2);
      await stage.claim(1);
      // Neither key was taken by the task that was refused, with whatever body it came.
      assert.equal(
        (await stage.put({}, { ...sharing, idempotency: { ...idempotency, fingerprint: "g" } })).kind,
        "queued",
      );
    },
    { maxQueued: 2 },
  );

  holds(
    "full by bytes: inputs count, and there is room again when one leaves",
    async (stage) => {
      await stage.queue({ input: '"4444"' });
      await stage.queue({ input: "1234" });
      assert.equal((await stage.put({ input: "1" })).kind, "full");
      await stage.hasCounts([2, 0, 0, 0]);
      await stage.claim(1);
      assert.equal((await stage.put({ input: "1234567" })).kind, "full");
      await stage.queue({ input: "123456" });
    },
    { maxQueuedBytes: 10 },
  );

  holds(
    "says of a task that an empty queue has no room for either",
    async (stage) => {
      await stage.queue({ input: "1234567" });
      for (const [input, never] of [
        ["1234", false],
        ["12345678901", true],
      ] as const) {
        const reply = await stage.put({ input });
        assert(reply.kind === "full", reply.kind);
        assert.equal(reply.never, never);
      }
    },
    { maxQueuedBytes: 10 },
  );

  holds(
    "what ends or is cancelled in the queue makes room",
    async (stage) => {
      const id = await stage.queue();
      assert.equal((await stage.put()).kind, "full");
      await stage.engine.cancel(id, "ann");
      await stage.queue();
      assert.equal((await stage.put()).kind, "full");
      await stage.pass(TOTAL_MS);
      await stage.queue();
    },
    { maxQueued: 1 },
  );
}

function exceptions(holds: Holds): void {
  holds(
    "what was accepted is never refused: retries and put-backs find room",
    async (stage) => {
      const retried = await stage.run();
      const expired = await stage.run();
      await stage.queue();
      assert.equal((await stage.put()).kind, "full");
      assert.equal(await stage.settle(retried.lease, retry(retried.id, stage.now)), "taken");
      await stage.pass(LEASE_MS);
      for (const id of [retried.id, expired.id]) assert.equal(await stage.state(id), "queued");
      assert.equal((await stage.counts())[0], 3);
      assert.equal((await stage.put()).kind, "full");
      await stage.claim(2);
      assert.equal((await stage.put()).kind, "full");
      await stage.claim(1);
      await stage.queue();
    },
    { maxQueued: 1 },
  );

  holds(
    "a full queue still answers what needs no place in it",
    async (stage) => {
      const sharing = { joinKey: "same ann", cacheKey: "cache", cacheTtlMs: 1000 };
      await stage.ended(done, {}, sharing);
      const id = await stage.queue({}, { joinKey: "other ann" });
      assert.equal((await stage.put()).kind, "full");
      assert.equal((await stage.put({}, sharing)).kind, "done");
      assert.deepEqual(await stage.put({}, { joinKey: "other ann" }), { kind: "joined", id });
    },
    { maxQueued: 1 },
  );
}
