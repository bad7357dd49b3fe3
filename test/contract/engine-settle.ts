/** What `settle` promises: every verdict, twice, in parts, and from leases that are no longer held. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import {
  dead,
  done,
  failed,
  type Holds,
  idsOf,
  type Judgement,
  LEASE_MS,
  QUEUE_MS,
  retry,
  type Stage,
  TOTAL_MS,
} from "./engine-stage.ts";

export function settleContract(holds: Holds): void {
  describe("settle", () => {
    ends(holds);
    retries(holds);
    unsent(holds);
    overdue(holds);
    twice(holds);
    goodNews(holds);
    badNews(holds);
  });
}

const again: Judgement = (id) => retry(id, 0);

function ends(holds: Holds): void {
  holds("done: the output as it came, the time, the end announced", async (stage) => {
    const { id, lease } = await stage.run({ input: '"secret"', parameters: "" });
    await stage.tick(30);
    const output = '{"n":12345678901234567890,"f":1.0}';
    assert.equal(await stage.settle(lease, { id, kind: "done", output }), "taken");
    const record = await stage.engine.outcome(id, "ann");
    assert.deepEqual(record?.outcome, { ok: true, output });
    assert.deepEqual([record?.state, record?.attempt, record?.settledAt], ["done", 1, stage.now]);
    assert.deepEqual(
      stage.settled.map((each) => [each.id, each.state]),
      [[id, "done"]],
    );
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("failed: the code and the message, and no dead letter", async (stage) => {
    const id = await stage.ended(failed);
    const outcome = { ok: false, code: "INPUT_REJECTED", message: "no" } as const;
    assert.deepEqual(await stage.look(id), { id, state: "failed", attempt: 1, outcome });
    await stage.hasCounts([0, 0, 1, 0]);
  });

  holds("dead: failed for its owner, and a dead letter for the operator", async (stage) => {
    const id = await stage.ended(dead);
    const outcome = { ok: false, code: "INFERENCE_FAILED", message: "gave up" } as const;
    assert.deepEqual(await stage.look(id), { id, state: "failed", attempt: 1, outcome });
    await stage.hasCounts([0, 0, 1, 1]);
  });

  holds("the input of a finished task is no longer there", async (stage) => {
    for (const verdict of [done, failed, dead]) {
      const id = await stage.ended(verdict, { input: '"secret"' });
      assert.equal((await stage.engine.outcome(id))?.task.input, "");
    }
  });

  holds("nor are its parameters, however it ended", async (stage) => {
    const parameters = '{"secret":1}';
    const sharing = { joinKey: "same", cacheKey: "same", cacheTtlMs: 10_000 };
    const ids = [await stage.ended(done, { parameters, content: "same" }, sharing)];
    const cached = await stage.put({ parameters, content: "same" }, sharing);
    assert(cached.kind === "done" && cached.cached);
    const cancelled = await stage.queue({ parameters });
    await stage.engine.cancel(cancelled, "ann");
    ids.push(cached.id, cancelled, await stage.queue({ parameters }));
    await stage.pass(QUEUE_MS);
    for (const id of ids) {
      const record = await stage.engine.outcome(id);
      assert.ok(record?.outcome !== undefined);
      assert.equal(record.task.parameters, "");
    }
  });

  holds("an id that nobody knows is gone", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, done(id));
    await stage.engine.cancel(id, "ann");
    for (const verdict of [done, failed, dead, again])
      assert.equal(await stage.settle(lease, verdict(id)), "gone");
    assert.deepEqual(await stage.engine.settle(lease, [done("nobody")]), ["gone"]);
    assert.equal(stage.settled.length, 1);
  });
}

function retries(holds: Holds): void {
  holds("retry: not final, back in the queue at its time, the attempt counted", async (stage) => {
    const { id, lease } = await stage.run();
    assert.equal(await stage.settle(lease, retry(id, stage.now + 200)), "taken");
    assert.deepEqual(await stage.look(id), { id, state: "queued", attempt: 1, outcome: undefined });
    await stage.hasCounts([1, 0, 0, 0]);
    assert.equal(stage.arrivals.length, 1);
    await stage.pass(200);
    assert.equal(stage.arrivals.length, 2);
    const next = await stage.claim();
    assert.deepEqual([idsOf(next), next.tasks[0]?.attempt], [[id], 2]);
    assert.equal(stage.settled.length, 0);
  });

  holds("a retry for now, or for a time long gone, is in the queue at once", async (stage) => {
    for (const at of [stage.now, stage.now - 1000, 0]) {
      const { id, lease } = await stage.run();
      await stage.settle(lease, retry(id, at));
      assert.deepEqual(idsOf(await stage.claim()), [id]);
    }
  });

  holds("spared: the attempt does not count", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now));
    const second = await stage.claim();
    assert.equal(second.tasks[0]?.attempt, 2);
    await stage.settle(second, retry(id, stage.now, { spared: true }));
    assert.equal((await stage.look(id))?.attempt, 1);
    assert.equal((await stage.claim()).tasks[0]?.attempt, 2);
  });

  holds("a retry gives a task its full time in the queue again, but no later deadline", async (stage) => {
    const id = await stage.queue();
    await stage.pass(QUEUE_MS - 1);
    await stage.settle(await stage.claim(), retry(id, stage.now));
    await stage.pass(QUEUE_MS - 1);
    assert.equal(await stage.state(id), "queued");
    await stage.settle(await stage.claim(), retry(id, stage.now));
    await stage.pass(2);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
    assert.equal(
      (await stage.engine.outcome(id))?.settledAt,
      (await stage.engine.outcome(id))!.task.deadlineAt,
    );
  });

  holds("a retry after the deadline ends at the deadline", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now + 2 * TOTAL_MS));
    await stage.pass(TOTAL_MS - 1);
    assert.equal(await stage.state(id), "queued");
    await stage.pass(1);
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
    await stage.hasCounts([0, 0, 1, 0]);
  });
}

function unsent(holds: Holds): void {
  holds("unsent: back in the queue, and nobody is told that it is tried again", async (stage) => {
    const told: string[] = [];
    stage.events.on("task.retried", (task) => told.push(task.id));
    const ids = [await stage.queue(), await stage.queue()];
    const lease = await stage.claim();
    assert.deepEqual(new Set(idsOf(lease)), new Set(ids));
    const [sent, unsent] = idsOf(lease) as [string, string];
    assert.equal(
      await stage.settle(lease, retry(unsent, stage.now, { spared: true, unsent: true })),
      "taken",
    );
    assert.equal((await stage.look(unsent))?.state, "queued");
    const again = await stage.claim();
    assert.deepEqual([idsOf(again), again.tasks[0]?.attempt], [[unsent], 1]);
    assert.equal(await stage.settle(lease, done(sent)), "taken");
    assert.equal(await stage.settle(again, done(unsent)), "taken");
    assert.deepEqual(told, []);
  });
}

function overdue(holds: Holds): void {
  const late = (id: string) => retry(id, 0, { overdue: true, spared: true });

  holds("overdue: back in the queue while its batch still runs; the first answer wins", async (stage) => {
    const { id, lease } = await stage.run();
    assert.equal(await stage.settle(lease, late(id)), "taken");
    const second = await stage.claim();
    assert.deepEqual(idsOf(second), [id]);
    assert.equal(await stage.settle(lease, done(id)), "taken");
    assert.equal(await stage.settle(second, done(id)), "late");
    assert.equal(stage.settled.length, 1);
  });

  holds("overdue is taken once in a task's life, from whichever lease", async (stage) => {
    const { id, lease } = await stage.run();
    assert.equal(await stage.settle(lease, late(id)), "taken");
    const second = await stage.claim();
    assert.equal(await stage.settle(second, late(id)), "late");
    assert.equal(await stage.state(id), "running");
    assert.equal(await stage.settle(second, retry(id, stage.now)), "taken");
    assert.equal(await stage.settle(await stage.claim(), late(id)), "late");
  });

  holds("a replay is a new life", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, late(id));
    await stage.settle(await stage.claim(), dead(id));
    await stage.engine.deadLetters.replay(id);
    assert.equal(await stage.settle(await stage.claim(), late(id)), "taken");
  });
}

function twice(holds: Holds): void {
  for (const [name, verdict] of Object.entries({ done, failed, dead })) {
    holds(`${name} said twice changes nothing`, async (stage) => {
      const { id, lease } = await stage.run();
      assert.deepEqual(await stage.engine.settle(lease, [verdict(id), verdict(id)]), ["taken", "late"]);
      const before = [await stage.look(id), await stage.counts()];
      for (const other of [done, failed, dead, again])
        assert.equal(await stage.settle(lease, other(id)), "late");
      assert.deepEqual([await stage.look(id), await stage.counts()], before);
      assert.equal(stage.settled.length, 1);
    });
  }

  holds("retry said twice puts it back once", async (stage) => {
    const { id, lease } = await stage.run();
    assert.deepEqual(await stage.engine.settle(lease, [again(id), again(id)]), ["taken", "late"]);
    assert.equal(await stage.settle(lease, again(id)), "late");
    await stage.hasCounts([1, 0, 0, 0]);
    assert.deepEqual(idsOf(await stage.claim()), [id]);
  });

  holds("a lease may be settled in parts", async (stage) => {
    const [a, b, c, d] = (await stage.queueMany(4)) as [string, string, string, string];
    const lease = await stage.claim();
    assert.deepEqual(await stage.engine.settle(lease, [done(c), failed(a)]), ["taken", "taken"]);
    await stage.hasCounts([0, 2, 2, 0]);
    assert.equal(await stage.state(b), "running");
    assert.deepEqual(await stage.engine.settle(lease, [dead(d), again(b), done(c)]), [
      "taken",
      "taken",
      "late",
    ]);
    await stage.hasCounts([1, 0, 3, 1]);
    assert.deepEqual(new Set(stage.settled.map(({ id }) => id)), new Set([a, c, d]));
  });
}

/** A task whose first lease ran out and that is somewhere else now. */
async function movedOn(stage: Stage, where: "queue" | "retry" | "lease") {
  const { id, lease: old } = await stage.run();
  await stage.pass(LEASE_MS);
  if (where === "queue") return { id, old, holder: undefined };
  const holder = await stage.claim();
  if (where === "retry") await stage.settle(holder, retry(id, stage.now + 500));
  return { id, old, holder };
}

function goodNews(holds: Holds): void {
  for (const where of ["queue", "retry", "lease"] as const) {
    holds(`the first good outcome wins, also from an expired lease (now in a ${where})`, async (stage) => {
      const { id, old, holder } = await movedOn(stage, where);
      assert.equal(await stage.settle(old, done(id)), "taken");
      assert.equal(await stage.state(id), "done");
      await stage.hasCounts([0, 0, 1, 0]);
      if (holder !== undefined) {
        assert.deepEqual(await stage.engine.extend(holder, LEASE_MS), [id]);
        for (const verdict of [done, failed, dead, again])
          assert.equal(await stage.settle(holder, verdict(id)), "late");
      }
      await stage.pass(TOTAL_MS);
      assert.deepEqual(idsOf(await stage.claim()), []);
      assert.deepEqual(
        stage.settled.map(({ state }) => state),
        ["done"],
      );
    });
  }

  holds("the record names the batch that decided it, not a later one", async (stage) => {
    const id = await stage.queue();
    const note = { reason: "idle", worker: "gpu", startedAt: stage.now, why: "" } as const;
    const first = await stage.claim(64, { batch: { ...note, id: "first" } });
    await stage.pass(LEASE_MS);
    await stage.claim(64, { batch: { ...note, id: "second" } });
    assert.equal((await stage.engine.outcome(id))?.batch?.id, "second");
    await stage.settle(first, done(id));
    assert.equal((await stage.engine.outcome(id))?.batch?.id, "first");
  });

  holds("a good outcome after the end is late: what is final stays", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.engine.extend(lease, 10 * TOTAL_MS);
    await stage.pass(TOTAL_MS);
    assert.equal(await stage.settle(lease, done(id)), "late");
    assert.equal(await stage.code(id), "DEADLINE_EXCEEDED");
  });
}

function badNews(holds: Holds): void {
  for (const where of ["queue", "retry", "lease"] as const) {
    holds(
      `bad news from a lease that no longer holds the task is late (now in a ${where})`,
      async (stage) => {
        const { id, old } = await movedOn(stage, where);
        const before = [await stage.look(id), await stage.counts()];
        for (const verdict of [failed, dead, again])
          assert.equal(await stage.settle(old, verdict(id)), "late");
        assert.deepEqual([await stage.look(id), await stage.counts()], before);
      },
    );
  }

  holds("bad news from a lease of the life before a replay is late", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.settle(lease, dead(id));
    await stage.engine.deadLetters.replay(id);
    for (const verdict of [failed, dead, again]) assert.equal(await stage.settle(lease, verdict(id)), "late");
    assert.equal(await stage.state(id), "queued");
    await stage.claim();
    for (const verdict of [failed, dead, again]) assert.equal(await stage.settle(lease, verdict(id)), "late");
    assert.equal(await stage.state(id), "running");
  });

  holds("bad news past the lease's time still counts while nobody has taken the task", async (stage) => {
    const { id, lease } = await stage.run();
    await stage.tick(LEASE_MS + 1);
    assert.equal(await stage.settle(lease, failed(id)), "taken");
  });
}
