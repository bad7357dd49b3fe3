/** What `cancel`, `outcome` and `delivered` promise: who may see or end a task, and when it is dropped. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import {
  dead,
  done,
  failed,
  type Holds,
  idsOf,
  LEASE_MS,
  RESULT_TTL_MS,
  retry,
  type Stage,
} from "./engine-stage.ts";

export function cancelContract(holds: Holds): void {
  describe("cancel", () => {
    replies(holds);
    kept(holds);
    owners(holds);
  });
  describe("cancel, abandoned", () => {
    abandoned(holds);
    abandonedShared(holds);
  });
  describe("outcome", () => {
    outcomes(holds);
  });
  describe("delivered", () => {
    delivered(holds);
  });
}

const SAME = { joinKey: "same ann" };
const KEYED = { idempotency: { key: "key ann", fingerprint: "body" } };

function replies(holds: Holds): void {
  holds("a queued task is cancelled: failed with CANCELLED, announced, not run", async (stage) => {
    const id = await stage.queue();
    assert.equal(await stage.engine.cancel(id, "ann"), "cancelled");
    assert.equal(await stage.code(id), "CANCELLED");
    assert.deepEqual(
      stage.settled.map((each) => each.id),
      [id],
    );
    assert.deepEqual(idsOf(await stage.claim()), []);
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("so is one that waits for a retry", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now + 100));
    assert.equal(await stage.engine.cancel(id, "ann"), "cancelled");
    await stage.pass(100);
    assert.deepEqual(idsOf(await stage.claim()), []);
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("also when it carries a key: its owner has said so", async (stage) => {
    const id = await stage.queue({}, KEYED);
    assert.equal(await stage.engine.cancel(id, "ann"), "cancelled");
  });

  holds("also when its key was sent twice: that is one caller", async (stage) => {
    const id = await stage.queue({}, { ...SAME, ...KEYED });
    const again = await stage.engine.put(stage.task(), { ...SAME, ...KEYED });
    assert.deepEqual(again, { kind: "joined", id });
    assert.equal(await stage.engine.cancel(id, "ann"), "cancelled");
  });

  holds("a finished task is forgotten, whatever its end", async (stage) => {
    for (const verdict of [done, failed, dead]) {
      const id = await stage.ended(verdict);
      assert.equal(await stage.engine.cancel(id, "ann"), "forgotten");
      assert.equal(await stage.engine.outcome(id, "ann"), undefined);
      assert.equal(await stage.engine.outcome(id), undefined);
      assert.equal(await stage.engine.cancel(id, "ann"), "unknown");
    }
    assert.equal((await stage.counts())[2], 0);
    assert.equal(stage.settled.length, 3);
  });

  holds("cancelled and then cancelled again is forgotten", async (stage) => {
    const id = await stage.queue();
    assert.equal(await stage.engine.cancel(id, "ann"), "cancelled");
    assert.equal(await stage.engine.cancel(id, "ann"), "forgotten");
  });

  holds("an id that nobody knows is unknown", async (stage) => {
    assert.equal(await stage.engine.cancel("nobody", "ann"), "unknown");
  });
}

function kept(holds: Holds): void {
  holds("a running task is kept", async (stage) => {
    const { id, lease } = await stage.run();
    assert.equal(await stage.engine.cancel(id, "ann"), "kept");
    assert.equal(await stage.settle(lease, done(id)), "taken");
  });

  holds("a task that another caller joined is kept, however often it is cancelled", async (stage) => {
    const id = await stage.queue({}, SAME);
    await stage.put({}, SAME);
    for (let n = 0; n < 3; n++) assert.equal(await stage.engine.cancel(id, "ann"), "kept");
    assert.deepEqual(idsOf(await stage.claim()), [id]);
  });
}

function owners(holds: Holds): void {
  holds(
    "to anybody but its owner a task is unknown, in every state, and nothing happens to it",
    async (stage) => {
      const queued = await stage.queue({ parameters: "queued" });
      const { id: running, lease } = await stage.run();
      const finished = await stage.ended(done, { parameters: "finished" });
      const letter = await stage.ended(dead, { parameters: "letter" });
      const before = await stage.counts();
      for (const id of [queued, running, finished, letter]) {
        for (const gone of [false, true]) assert.equal(await stage.engine.cancel(id, "bob", gone), "unknown");
        assert.equal(await stage.engine.outcome(id, "bob"), undefined);
        assert.notEqual(await stage.engine.outcome(id, "ann"), undefined);
      }
      assert.deepEqual(await stage.counts(), before);
      assert.equal(await stage.settle(lease, done(running)), "taken");
    },
  );
}

/** Dropped: it will not run, and its owner finds nothing or that it was cancelled. */
async function assertDropped(stage: Stage, id: string): Promise<void> {
  assert.ok([undefined, "CANCELLED"].includes(await stage.code(id)));
  assert.notEqual(await stage.state(id), "queued");
  assert.deepEqual(idsOf(await stage.claim()), []);
  assert.equal((await stage.counts())[0], 0);
}

function abandoned(holds: Holds): void {
  holds("a queued task that nobody else waits for is dropped", async (stage) => {
    const id = await stage.queue({}, SAME);
    assert.equal(await stage.engine.cancel(id, "ann", true), "cancelled");
    await assertDropped(stage, id);
    assert.equal((await stage.put({}, SAME)).kind, "queued");
  });

  holds("so is one that waits for a retry", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now + 100));
    assert.equal(await stage.engine.cancel(id, "ann", true), "cancelled");
    await assertDropped(stage, id);
  });

  holds("a running one is kept, and its answer too", async (stage) => {
    const { id, lease } = await stage.run();
    assert.equal(await stage.engine.cancel(id, "ann", true), "kept");
    assert.equal(await stage.settle(lease, done(id)), "taken");
    assert.equal(await stage.state(id), "done");
  });

  holds("a finished one is not forgotten: it may still be polled", async (stage) => {
    for (const verdict of [done, failed, dead]) {
      const id = await stage.ended(verdict);
      assert.notEqual(await stage.engine.cancel(id, "ann", true), "forgotten");
      assert.equal((await stage.look(id))?.state, verdict === done ? "done" : "failed");
    }
  });
}

function abandonedShared(holds: Holds): void {
  holds("one that carries a key is kept: its caller may come back", async (stage) => {
    const id = await stage.queue({}, KEYED);
    assert.equal(await stage.engine.cancel(id, "ann", true), "kept");
    assert.deepEqual(await stage.put({}, KEYED), { kind: "joined", id });
    assert.deepEqual(idsOf(await stage.claim()), [id]);
  });

  holds("also when the key came with a caller who joined", async (stage) => {
    const id = await stage.queue({}, SAME);
    await stage.put({}, { ...SAME, ...KEYED });
    for (let n = 0; n < 3; n++) assert.equal(await stage.engine.cancel(id, "ann", true), "kept");
  });

  holds("one that others joined is kept until the last of them has left", async (stage) => {
    const id = await stage.queue({}, SAME);
    await stage.put({}, SAME);
    await stage.put({}, SAME);
    assert.equal(await stage.engine.cancel(id, "ann", true), "kept");
    assert.equal(await stage.engine.cancel(id, "ann", true), "kept");
    assert.equal(await stage.engine.cancel(id, "ann", true), "cancelled");
    await assertDropped(stage, id);
  });

  holds("leaving while it runs counts as leaving", async (stage) => {
    const { id, lease } = await stage.run({}, SAME);
    await stage.put({}, SAME);
    assert.equal(await stage.engine.cancel(id, "ann", true), "kept");
    await stage.settle(lease, retry(id, stage.now));
    assert.equal(await stage.engine.cancel(id, "ann", true), "cancelled");
    await assertDropped(stage, id);
  });
}

function outcomes(holds: Holds): void {
  holds("the owner and the operator see the record, nobody else does", async (stage) => {
    const id = await stage.queue({ tenant: "bob" });
    assert.equal((await stage.look(id, "bob"))?.state, "queued");
    assert.equal((await stage.look(id))?.state, "queued");
    assert.equal(await stage.look(id, "ann"), undefined);
    assert.equal(await stage.look(id, ""), undefined);
  });

  holds("an id that nobody knows is undefined, for the operator too", async (stage) => {
    assert.equal(await stage.engine.outcome("nobody", "ann"), undefined);
    assert.equal(await stage.engine.outcome("nobody"), undefined);
  });

  holds("reading changes nothing", async (stage) => {
    const id = await stage.ended(done);
    for (let n = 0; n < 3; n++) assert.equal((await stage.look(id, "ann"))?.state, "done");
    await stage.hasCounts([0, 0, 1, 0]);
  });
}

const EVICT = { results: { ttlMs: RESULT_TTL_MS, evictAfterRead: true, maxBytes: 1_000_000 } };

function delivered(holds: Holds): void {
  holds("the outcome stays for its time to live", async (stage) => {
    const id = await stage.ended(done);
    stage.engine.delivered(id);
    stage.engine.delivered(id);
    stage.engine.delivered("nobody");
    await stage.pass(RESULT_TTL_MS - 1);
    assert.equal(await stage.state(id), "done");
  });

  holds(
    "with evictAfterRead it is forgotten",
    async (stage) => {
      for (const verdict of [done, failed]) {
        const id = await stage.ended(verdict);
        assert.notEqual(await stage.engine.outcome(id), undefined);
        stage.engine.delivered(id);
        assert.equal(await stage.engine.outcome(id), undefined);
        stage.engine.delivered(id);
      }
      await stage.hasCounts([0, 0, 0, 0]);
    },
    EVICT,
  );

  holds(
    "with evictAfterRead, what others joined or may come back for with a key stays for them",
    async (stage) => {
      const { id: joined, lease } = await stage.run({}, SAME);
      await stage.put({}, SAME);
      await stage.settle(lease, done(joined));
      const keyed = await stage.ended(done, {}, KEYED);
      for (const id of [joined, keyed]) {
        stage.engine.delivered(id);
        assert.equal(await stage.state(id), "done");
      }
      assert.equal((await stage.put({}, KEYED)).kind, "done");
      await stage.pass(RESULT_TTL_MS);
      await stage.hasCounts([0, 0, 0, 0]);
    },
    EVICT,
  );

  holds(
    "with evictAfterRead a dead letter outlives its record",
    async (stage) => {
      const id = await stage.ended(dead);
      stage.engine.delivered(id);
      await stage.hasCounts([0, 0, 0, 1]);
      assert.equal(await stage.engine.deadLetters.replay(id), true);
      assert.equal(await stage.state(id), "queued");
    },
    EVICT,
  );

  holds(
    "what has no outcome yet cannot have been delivered",
    async (stage) => {
      const { id, lease } = await stage.run();
      stage.engine.delivered(id);
      await stage.pass(LEASE_MS);
      stage.engine.delivered(id);
      assert.equal(await stage.settle(lease, done(id)), "taken");
      assert.equal(await stage.state(id), "done");
    },
    EVICT,
  );
}
