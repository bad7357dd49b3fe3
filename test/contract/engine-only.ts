/** What `put` promises a task for which there is no room: it may share what is there, and leaves nothing. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import type { Sharing } from "../../src/engine/engine.ts";
import { done, type Holds, idsOf, MODEL } from "./engine-stage.ts";

const SHARED: Sharing = { joinKey: "content ann", cacheKey: "content", cacheTtlMs: 10_000 };
const ONLY: Sharing = { ...SHARED, only: true };
const KEY = { key: "key ann", fingerprint: "content" };

export function onlyContract(holds: Holds): void {
  describe("put that may only share", () => {
    shares(holds);
    keys(holds);
  });
}

function shares(holds: Holds): void {
  holds("is never queued, and nothing is written", async (stage) => {
    for (const sharing of [{ only: true }, ONLY]) {
      const task = stage.task();
      assert.equal((await stage.engine.put(task, sharing)).kind, "full");
      assert.equal(await stage.engine.outcome(task.id), undefined);
    }
    await stage.hasCounts([0, 0, 0, 0]);
    assert.deepEqual([...stage.engine.waiting(MODEL)], [0, 0, 0]);
    assert.deepEqual(idsOf(await stage.claim()), []);
    assert.deepEqual(stage.arrivals, []);
  });

  holds("joins work in flight, queued or running", async (stage) => {
    const id = await stage.queue({}, SHARED);
    assert.deepEqual(await stage.put({}, ONLY), { kind: "joined", id });
    const lease = await stage.claim();
    assert.deepEqual(await stage.put({}, ONLY), { kind: "joined", id });
    assert.equal(lease.tasks[0]?.task.input, '"in"');
    assert.equal((await stage.put({ tenant: "bob" }, { joinKey: "content bob", only: true })).kind, "full");
  });

  holds(
    "is answered from the cache, under an id of its own, however full the queue is",
    async (stage) => {
      const first = await stage.ended(done, {}, SHARED);
      await stage.queueMany(2);
      assert.equal((await stage.put()).kind, "full");
      const reply = await stage.put({}, ONLY);
      assert(reply.kind === "done");
      assert.equal(reply.cached, true);
      assert.notEqual(reply.id, first);
      assert.deepEqual((await stage.engine.outcome(reply.id, "ann"))?.outcome, { ok: true, output: '"out"' });
    },
    { maxQueued: 2 },
  );

  holds("with the id of a task that is there it changes nothing in it", async (stage) => {
    const task = stage.task();
    await stage.engine.put(task, SHARED);
    assert.deepEqual(await stage.engine.put({ ...task, input: '"other"' }, ONLY), {
      kind: "joined",
      id: task.id,
    });
    assert.equal((await stage.claim()).tasks[0]?.task.input, '"in"');
  });
}

function keys(holds: Holds): void {
  const other = { idempotency: { ...KEY, fingerprint: "other" } };

  holds("a key that stood for nothing stands for nothing afterwards", async (stage) => {
    assert.equal((await stage.put({}, { ...ONLY, idempotency: KEY })).kind, "full");
    assert.equal((await stage.put({}, { only: true, idempotency: KEY })).kind, "full");
    await stage.queue({}, other);
  });

  holds("a key that stands for a task answers with it, or says that the body is another", async (stage) => {
    const id = await stage.queue({}, { idempotency: KEY });
    assert.deepEqual(await stage.put({}, { only: true, idempotency: KEY }), { kind: "joined", id });
    assert.deepEqual(await stage.put({}, { only: true, ...other }), { kind: "conflict", id });
    const lease = await stage.claim();
    await stage.settle(lease, done(id));
    const reply = await stage.put({}, { only: true, idempotency: KEY });
    assert.deepEqual([reply.kind, reply.kind === "done" && reply.id], ["done", id]);
    assert.equal((await stage.put({}, { only: true, ...other })).kind, "conflict");
  });

  holds("a key that came with work to share belongs to it from then on", async (stage) => {
    const id = await stage.queue({}, SHARED);
    assert.deepEqual(await stage.put({}, { ...ONLY, idempotency: KEY }), { kind: "joined", id });
    assert.deepEqual(await stage.put({}, other), { kind: "conflict", id });
    assert.equal(await stage.engine.cancel(id, "ann", true), "kept");
  });
}
