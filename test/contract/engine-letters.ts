/** What `deadLetters` and `close` promise: kept for a person, replayed under the same id, bounded. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import { type ErrorCode, Refusal } from "../../src/core/errors.ts";
import {
  dead,
  done,
  failed,
  type Holds,
  idsOf,
  LEASE_MS,
  LETTER_TTL_MS,
  QUEUE_MS,
  RESULT_TTL_MS,
  retry,
  type Stage,
  TOTAL_MS,
} from "./engine-stage.ts";

export function lettersContract(holds: Holds): void {
  describe("deadLetters", () => {
    letters(holds);
    replays(holds);
    replaysAgain(holds);
    purges(holds);
    letterBounds(holds);
  });
  describe("close", () => {
    closing(holds);
  });
}

function letters(holds: Holds): void {
  holds("a dead letter keeps the task with its input, its attempts, why and when", async (stage) => {
    const task = stage.task({ input: '{"a":1.0}', parameters: '{"t":1}', tier: 2, tenant: "bob" });
    await stage.engine.put(task);
    const parameters = '{"t":1}';
    const first = await stage.claim(64, { parameters });
    await stage.settle(first, retry(task.id, stage.now));
    await stage.tick(50);
    await stage.settle(await stage.claim(64, { parameters }), dead(task.id));
    const letter = await stage.engine.deadLetters.get(task.id);
    assert.deepEqual(letter, {
      task,
      attempts: 2,
      code: "INFERENCE_FAILED",
      message: "why",
      diedAt: stage.now,
    });
    assert.deepEqual(await stage.engine.deadLetters.list(), [letter]);
  });

  holds("nothing but `dead` makes one", async (stage) => {
    await stage.ended(done);
    await stage.ended(failed);
    const cancelled = await stage.queue();
    await stage.engine.cancel(cancelled, "ann");
    await stage.queue();
    await stage.pass(QUEUE_MS);
    assert.deepEqual(await stage.engine.deadLetters.list(), []);
    assert.equal(await stage.engine.deadLetters.get("nobody"), undefined);
  });

  holds("it outlives its record, and the owner's forgetting", async (stage) => {
    const old = await stage.ended(dead);
    await stage.pass(RESULT_TTL_MS);
    const forgotten = await stage.ended(dead);
    await stage.engine.cancel(forgotten, "ann");
    for (const id of [old, forgotten]) {
      assert.equal(await stage.engine.outcome(id), undefined);
      assert.equal((await stage.engine.deadLetters.get(id))?.task.id, id);
    }
    await stage.hasCounts([0, 0, 0, 2]);
  });
}

function replays(holds: Holds): void {
  holds(
    "a replay keeps the id, starts with fresh attempts and fresh time, and leaves the list",
    async (stage) => {
      const id = await stage.ended(dead, { input: '"precious"', tier: 1, tenant: "bob" });
      await stage.pass(TOTAL_MS);
      assert.equal(await stage.engine.deadLetters.replay(id), true);
      assert.deepEqual(await stage.look(id, "bob"), { id, state: "queued", attempt: 0, outcome: undefined });
      assert.deepEqual(await stage.engine.deadLetters.list(), []);
      assert.equal(await stage.engine.deadLetters.get(id), undefined);
      assert.equal((await stage.engine.outcome(id))?.queuedAt, stage.now);
      await stage.pass(QUEUE_MS - 1);
      const [claimed] = (await stage.claim()).tasks;
      assert.deepEqual(
        [claimed?.task.id, claimed?.task.input, claimed?.task.tier, claimed?.task.tenant, claimed?.attempt],
        [id, '"precious"', 1, "bob", 1],
      );
    },
  );

  holds("a replayed task becomes a success, announced again", async (stage) => {
    const id = await stage.ended(dead);
    await stage.engine.deadLetters.replay(id);
    assert.equal(await stage.settle(await stage.claim(), done(id)), "taken");
    assert.equal(await stage.state(id), "done");
    await stage.hasCounts([0, 0, 1, 0]);
    assert.deepEqual(
      stage.settled.map(({ state }) => state),
      ["failed", "done"],
    );
  });

  holds("or returns to the list", async (stage) => {
    const id = await stage.ended(dead);
    await stage.engine.deadLetters.replay(id);
    await stage.pass(100);
    assert.equal(await stage.settle(await stage.claim(), dead(id)), "taken");
    await stage.hasCounts([0, 0, 1, 1]);
    const letter = await stage.engine.deadLetters.get(id);
    assert.deepEqual([letter?.attempts, letter?.diedAt, letter?.task.input], [1, stage.now, '"in"']);
  });

  const failures: Record<string, [ErrorCode, (stage: Stage, id: string) => Promise<unknown>]> = {
    "waits too long in the queue": ["DEADLINE_EXCEEDED", (stage) => stage.pass(QUEUE_MS)],
    "is met too late by a claim": [
      "DEADLINE_EXCEEDED",
      async (stage) => {
        await stage.tick(QUEUE_MS);
        assert.deepEqual(idsOf(await stage.claim()), []);
      },
    ],
    "has no answer before its total timeout": [
      "DEADLINE_EXCEEDED",
      async (stage) => {
        await stage.claim(64, { leaseMs: TOTAL_MS + 1 });
        await stage.pass(TOTAL_MS);
      },
    ],
    "waits for its retry past its total timeout": [
      "DEADLINE_EXCEEDED",
      async (stage, id) => {
        await stage.settle(await stage.claim(), retry(id, stage.now + TOTAL_MS + 1));
        await stage.pass(TOTAL_MS);
      },
    ],
    "is rejected": [
      "INPUT_REJECTED",
      async (stage, id) => assert.equal(await stage.settle(await stage.claim(), failed(id)), "taken"),
    ],
    "is cancelled by its owner": [
      "CANCELLED",
      async (stage, id) => assert.equal(await stage.engine.cancel(id, "ann"), "cancelled"),
    ],
  };
  for (const [how, [code, fail]] of Object.entries(failures)) {
    holds(`a replayed task that ${how} returns to the list with that reason`, async (stage) => {
      const id = await stage.ended(dead, { input: '"precious"' });
      assert.equal(await stage.engine.deadLetters.replay(id), true);
      await fail(stage, id);
      assert.equal(await stage.code(id), code);
      const letter = await stage.engine.deadLetters.get(id);
      assert.deepEqual([letter?.code, letter?.diedAt, letter?.task.input], [code, stage.now, '"precious"']);
      const outcome = (await stage.engine.outcome(id))?.outcome;
      assert.equal(outcome?.ok === false && outcome.message, letter?.message);
      await stage.hasCounts([0, 0, 1, 1]);
      // As often as it takes.
      assert.equal(await stage.engine.deadLetters.replay(id), true);
      await stage.settle(await stage.claim(), done(id));
      await stage.hasCounts([0, 0, 1, 0]);
    });
  }

  holds("many replays onto a slow worker: each is a success or a dead letter", async (stage) => {
    const ids: string[] = [];
    for (let n = 0; n < 60; n++) ids.push(await stage.ended(dead));
    for (const id of ids) assert.equal(await stage.engine.deadLetters.replay(id), true);
    const lease = await stage.claim(20);
    await stage.engine.settle(lease, idsOf(lease).map(done));
    await stage.pass(QUEUE_MS);
    const left = (await stage.engine.deadLetters.list()).map(({ task }) => task.id);
    assert.deepEqual(new Set([...idsOf(lease), ...left]), new Set(ids));
    assert.deepEqual([lease.tasks.length, left.length], [20, 40]);
  });

  holds("a replayed task is one over a restart, where the engine keeps anything", async (stage) => {
    const id = await stage.ended(dead);
    await stage.engine.deadLetters.replay(id);
    const next = await stage.reopen();
    if (next === undefined) return;
    await next.pass(QUEUE_MS);
    const before = await next.engine.deadLetters.get(id);
    const last = await next.reopen();
    const after = await last?.engine.deadLetters.get(id);
    await last?.engine.close();
    assert.deepEqual([before?.code, after?.code], ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"]);
  });

  holds(
    "while the queue is full a replay is refused, with when to come back, and the letter stays",
    async (stage) => {
      const id = await stage.ended(dead);
      await stage.queue();
      const full = (error: unknown): boolean =>
        error instanceof Refusal && error.status === 503 && error.retryAfterMs !== undefined;
      await assert.rejects(stage.engine.deadLetters.replay(id), full);
      await stage.hasCounts([1, 0, 1, 1]);
      assert.equal(await stage.code(id), "INFERENCE_FAILED");
      await stage.claim();
      assert.equal(await stage.engine.deadLetters.replay(id), true);
    },
    { maxQueued: 1 },
  );

  holds(
    "also when it is full by bytes",
    async (stage) => {
      const id = await stage.ended(dead, { input: "1".repeat(70_000) });
      await stage.queue({ input: "1".repeat(40_000) });
      await assert.rejects(stage.engine.deadLetters.replay(id), Refusal);
      await stage.hasCounts([1, 0, 1, 1]);
      await stage.claim();
      assert.equal(await stage.engine.deadLetters.replay(id), true);
    },
    { maxQueuedBytes: 100_000 },
  );

  holds(
    "and by bytes its parameters count, too",
    async (stage) => {
      const parameters = `{"a":"${"1".repeat(70_000)}"}`;
      const id = await stage.ended(dead, { parameters });
      await stage.queue({ input: "1".repeat(40_000) });
      await assert.rejects(stage.engine.deadLetters.replay(id), Refusal);
      await stage.claim();
      assert.equal(await stage.engine.deadLetters.replay(id), true);
      assert.equal((await stage.put({ input: "1".repeat(40_000) })).kind, "full");
      assert.deepEqual(idsOf(await stage.claim(1, { parameters })), [id]);
      await stage.queue({ input: "1".repeat(40_000) });
    },
    { maxQueuedBytes: 100_000 },
  );
}

function replaysAgain(holds: Holds): void {
  holds("replayed twice at once, it is queued once", async (stage) => {
    const id = await stage.ended(dead);
    const { replay } = { replay: (which: string) => stage.engine.deadLetters.replay(which) };
    const replies = await Promise.all([replay(id), replay(id), replay(id)]);
    assert.deepEqual(replies.sort(), [false, false, true]);
    await stage.hasCounts([1, 0, 0, 0]);
    assert.deepEqual(idsOf(await stage.claim()), [id]);
    assert.equal(await replay(id), false);
  });

  holds("what is not dead cannot be replayed", async (stage) => {
    const { id } = await stage.run();
    const failing = await stage.ended(failed, { parameters: "other" });
    for (const each of [id, failing, "nobody"])
      assert.equal(await stage.engine.deadLetters.replay(each), false);
    assert.equal(await stage.state(failing), "failed");
  });

  holds("a letter whose record is forgotten can be replayed; its owner finds it again", async (stage) => {
    const id = await stage.ended(dead);
    await stage.pass(RESULT_TTL_MS);
    assert.equal(await stage.engine.deadLetters.replay(id), true);
    await stage.settle(await stage.claim(), done(id));
    assert.equal((await stage.look(id, "ann"))?.state, "done");
    assert.equal(await stage.look(id, "bob"), undefined);
  });

  holds("a good outcome from the life before wins in the life after", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.pass(LEASE_MS);
    await stage.settle(await stage.claim(), dead(id));
    await stage.engine.deadLetters.replay(id);
    assert.equal(await stage.settle(lease, done(id)), "taken");
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("a replayed task can be joined again", async (stage) => {
    const id = await stage.ended(dead, {}, { joinKey: "same ann" });
    await stage.engine.deadLetters.replay(id);
    assert.deepEqual(await stage.put({}, { joinKey: "same ann" }), { kind: "joined", id });
  });
}

function purges(holds: Holds): void {
  holds("a purged letter is gone, once; its record stays for its owner", async (stage) => {
    const [id, other] = [await stage.ended(dead), await stage.ended(dead)];
    assert.equal(await stage.engine.deadLetters.purge(id), true);
    assert.equal(await stage.engine.deadLetters.purge(id), false);
    assert.equal(await stage.engine.deadLetters.purge("nobody"), false);
    assert.equal(await stage.engine.deadLetters.replay(id), false);
    assert.deepEqual(
      (await stage.engine.deadLetters.list()).map(({ task }) => task.id),
      [other],
    );
    assert.equal(await stage.code(id), "INFERENCE_FAILED");
  });
}

function letterBounds(holds: Holds): void {
  holds(
    "when there are too many, the oldest goes and an operator is told",
    async (stage) => {
      let notices = 0;
      stage.events.on("notice", () => notices++);
      const ids: string[] = [];
      for (let letter = 0; letter < 3; letter++) {
        assert.equal(notices, 0);
        ids.push(await stage.ended(dead));
        // Of those that died in the same millisecond it is not said which is the oldest.
        await stage.pass(1);
      }
      const kept = (await stage.engine.deadLetters.list()).map(({ task }) => task.id);
      assert.deepEqual(new Set(kept), new Set(ids.slice(1)));
      assert.ok(notices > 0);
      assert.equal(await stage.code(ids[0]!), "INFERENCE_FAILED");
      assert.equal(await stage.engine.deadLetters.replay(ids[0]!), false);
    },
    { deadLetters: { max: 2, ttlMs: LETTER_TTL_MS } },
  );

  holds(
    "the bounds leave a letter alone that is being replayed",
    async (stage) => {
      const id = await stage.ended(dead);
      await stage.engine.deadLetters.replay(id);
      const { tasks } = await stage.claim(1);
      assert.equal(tasks[0]?.task.id, id);
      for (let letter = 0; letter < 3; letter++) {
        await stage.pass(1);
        await stage.ended(dead);
      }
      await stage.pass(TOTAL_MS);
      const kept = await stage.engine.deadLetters.list();
      assert.deepEqual([kept.length, kept.at(-1)?.task.id], [2, id]);
    },
    { deadLetters: { max: 2, ttlMs: LETTER_TTL_MS } },
  );

  holds("after its time to live it is gone", async (stage) => {
    const id = await stage.ended(dead);
    await stage.pass(1000);
    const other = await stage.ended(dead);
    await stage.pass(LETTER_TTL_MS - 1001);
    assert.equal((await stage.engine.deadLetters.list()).length, 2);
    await stage.pass(1);
    assert.equal(await stage.engine.deadLetters.get(id), undefined);
    assert.equal(await stage.engine.deadLetters.replay(id), false);
    await stage.pass(1000);
    assert.equal(await stage.engine.deadLetters.get(other), undefined);
    await stage.hasCounts([0, 0, 0, 0]);
  });
}

function closing(holds: Holds): void {
  holds("closing twice, also at once, is closing once", async (stage) => {
    await stage.queue();
    await Promise.all([stage.engine.close(), stage.engine.close()]);
    await stage.engine.close();
  });

  holds("what was accepted is there after a restart, where the engine keeps anything", async (stage) => {
    const queued = await stage.queue();
    const finished = await stage.ended(done, { parameters: "other" });
    const next = await stage.reopen();
    if (next === undefined) return;
    assert.equal(await next.state(queued), "queued");
    assert.equal(await next.state(finished), "done");
    assert.equal(await next.look(queued, "bob"), undefined);
    assert.deepEqual(idsOf(await next.claim()), [queued]);
    await next.engine.close();
  });
}
