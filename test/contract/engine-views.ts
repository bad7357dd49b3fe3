/** What `queues`, `stats` and `watch` promise: exact numbers after every step, and every end told once. */
import assert from "node:assert/strict";
import { describe } from "node:test";
import {
  dead,
  done,
  type Holds,
  idsOf,
  LEASE_MS,
  MODEL,
  OTHER_MODEL,
  QUEUE_MS,
  retry,
  TOTAL_MS,
} from "./engine-stage.ts";

export function viewsContract(holds: Holds): void {
  describe("queues", () => {
    queues(holds);
    heads(holds);
    queuesInOrder(holds);
  });
  describe("stats", () => {
    stats(holds);
  });
  describe("watch", () => {
    settledNotes(holds);
    queuedNotes(holds);
  });
}

function queues(holds: Holds): void {
  holds("one per parameters, and none that is empty", async (stage) => {
    assert.deepEqual(stage.queues(), []);
    assert.deepEqual([...stage.engine.queues("nobody's")], []);
    const at = stage.now;
    const view = { depth: 1, oldestAt: at, earliestDeadlineAt: at + TOTAL_MS, fresh: 1 };
    await stage.queue({ tier: 0 });
    await stage.tick(10);
    await stage.queue({ tier: 2 });
    await stage.queue({ parameters: "hot" });
    assert.deepEqual(stage.queues(), [
      { parameters: "", ...view, depth: 2, fresh: 2 },
      { parameters: "hot", ...view, oldestAt: at + 10, earliestDeadlineAt: at + 10 + TOTAL_MS },
    ]);
    assert.deepEqual(stage.queues(OTHER_MODEL), []);
    await stage.claim();
    assert.deepEqual(
      stage.queues().map(({ parameters }) => parameters),
      ["hot"],
    );
  });

  holds("depth, age and deadline follow every move", async (stage) => {
    const at = stage.now;
    const first = await stage.queue({ tier: 2 });
    await stage.tick(10);
    const second = await stage.queue({ tier: 0 });
    await stage.tick(10);
    await stage.queue({ tier: 0 });
    const now = () => stage.queues().map(({ depth, oldestAt, fresh }) => [depth, oldestAt - at, fresh]);
    assert.deepEqual(now(), [[3, 0, 3]]);
    await stage.engine.cancel(first, "ann");
    assert.deepEqual(now(), [[2, 10, 2]]);
    assert.deepEqual(stage.queues()[0]?.earliestDeadlineAt, at + 10 + TOTAL_MS);
    const lease = await stage.claim(1);
    assert.deepEqual(idsOf(lease), [second]);
    assert.deepEqual(now(), [[1, 20, 1]]);
    await stage.settle(lease, retry(second, stage.now + 100));
    assert.deepEqual(now(), [[1, 20, 1]]);
    await stage.pass(100);
    assert.equal(stage.queues()[0]?.depth, 2);
    await stage.pass(TOTAL_MS);
    assert.deepEqual(now(), []);
  });
}

function heads(holds: Holds): void {
  holds("the first task says how large its batch may be", async (stage) => {
    const head = () => [...stage.engine.queues(MODEL)].map(({ headMaxBatchSize }) => headMaxBatchSize);
    const { id, lease } = await stage.run();
    await stage.queue();
    assert.deepEqual(head(), [Infinity]);
    await stage.settle(lease, retry(id, stage.now, { maxBatchSize: 3 }));
    assert.deepEqual(head(), [3]);
    await stage.claim(1);
    assert.deepEqual(head(), [Infinity]);
  });

  holds("fresh counts those that were never tried", async (stage) => {
    await stage.queueMany(2);
    const lease = await stage.claim();
    await stage.queueMany(3);
    await stage.engine.settle(
      lease,
      idsOf(lease).map((id) => retry(id, stage.now)),
    );
    assert.deepEqual([stage.queues()[0]?.depth, stage.queues()[0]?.fresh], [5, 3]);
    await stage.claim(2);
    assert.deepEqual([stage.queues()[0]?.depth, stage.queues()[0]?.fresh], [3, 3]);
  });

  holds("tasks that come back keep the age of their arrival, in whatever order they come", async (stage) => {
    const at = stage.now;
    const ids: string[] = [];
    for (let n = 0; n < 3; n++) {
      ids.push(await stage.queue());
      await stage.tick(10);
    }
    const lease = await stage.claim();
    await stage.engine.settle(
      lease,
      ids.map((id) => retry(id, stage.now)),
    );
    assert.equal(stage.queues()[0]?.oldestAt, at);
    assert.equal((await stage.engine.outcome(ids[2]!))?.queuedAt, at + 20);
    await stage.claim();
    await stage.pass(LEASE_MS);
    assert.equal(stage.queues()[0]?.oldestAt, at);
    assert.equal(stage.queues()[0]?.earliestDeadlineAt, at + TOTAL_MS);
  });
}

function queuesInOrder(holds: Holds): void {
  const names = (views: readonly { parameters: string }[]): string[] => views.map((view) => view.parameters);

  holds("the longest-waiting first, also when it is not the one that was there first", async (stage) => {
    await stage.queue({ parameters: "a" });
    await stage.tick(10);
    await stage.queue({ parameters: "b" });
    await stage.tick(10);
    await stage.queue({ parameters: "a" });
    assert.deepEqual(names(stage.queues()), ["a", "b"]);
    await stage.claim(1, { parameters: "a" });
    assert.deepEqual(names(stage.queues()), ["b", "a"]);
  });

  holds("the best tier before all others, for as long as it has a task there", async (stage) => {
    await stage.queue({ parameters: "a", tier: 2 });
    await stage.tick(10);
    await stage.queue({ parameters: "b", tier: 1 });
    await stage.tick(10);
    await stage.queue({ parameters: "c", tier: 1 });
    await stage.tick(10);
    assert.deepEqual(names(stage.queues()), ["b", "c", "a"]);
    const best = await stage.queue({ parameters: "a", tier: 0 });
    assert.deepEqual(names(stage.queues()), ["a", "b", "c"]);
    await stage.engine.cancel(best, "ann");
    assert.deepEqual(names(stage.queues()), ["b", "c", "a"]);
    assert.deepEqual(
      [...stage.engine.queues(MODEL)].map(({ tier }) => tier),
      [1, 1, 2],
    );
  });

  holds("also after one came back, or left from the front", async (stage) => {
    const { id, lease } = await stage.run({ parameters: "a" });
    await stage.tick(10);
    const front = await stage.queue({ parameters: "b" });
    await stage.tick(10);
    await stage.queue({ parameters: "c" });
    await stage.tick(10);
    await stage.queue({ parameters: "b" });
    await stage.settle(lease, retry(id, stage.now));
    assert.deepEqual(names(stage.queues()), ["a", "b", "c"]);
    await stage.engine.cancel(front, "ann");
    assert.deepEqual(names(stage.queues()), ["a", "c", "b"]);
  });

  holds("a task that moved to a better tier is as old as it was", async (stage) => {
    const at = stage.now;
    await stage.queue({ tier: 0 });
    await stage.tick(10);
    await stage.queue({ tier: 1 }, { joinKey: "same" });
    await stage.tick(10);
    await stage.put({ tier: 0 }, { joinKey: "same" });
    assert.deepEqual(
      stage.queues().map(({ depth, oldestAt }) => [depth, oldestAt]),
      [[2, at]],
    );
  });
}

function stats(holds: Holds): void {
  holds("exact after every step of a life", async (stage) => {
    await stage.hasCounts([0, 0, 0, 0]);
    const [a, b, c] = (await stage.queueMany(3)) as [string, string, string];
    await stage.hasCounts([3, 0, 0, 0]);
    const lease = await stage.claim(2);
    await stage.hasCounts([1, 2, 0, 0]);
    await stage.settle(lease, retry(a, stage.now + 100));
    await stage.hasCounts([2, 1, 0, 0]);
    await stage.settle(lease, dead(b));
    await stage.hasCounts([2, 0, 1, 1]);
    await stage.pass(100);
    await stage.hasCounts([2, 0, 1, 1]);
    const next = await stage.claim(1);
    await stage.hasCounts([1, 1, 1, 1]);
    await stage.settle(next, done(a));
    await stage.engine.cancel(c, "ann");
    await stage.hasCounts([0, 0, 3, 1]);
    await stage.engine.deadLetters.replay(b);
    await stage.hasCounts([1, 0, 2, 0]);
    await stage.engine.cancel(a, "ann");
    await stage.hasCounts([1, 0, 1, 0]);
  });

  holds("depth by model, then tier", async (stage) => {
    const depth = (model: string) => stage.engine.stats().depth.get(model) ?? [];
    const total = (model: string) => depth(model).reduce((sum, each) => sum + each, 0);
    await stage.queueMany(1, { tier: 0 });
    await stage.queueMany(2, { tier: 1, parameters: "hot" });
    await stage.queueMany(3, { tier: 1 });
    await stage.queueMany(4, { tier: 2, model: OTHER_MODEL });
    assert.deepEqual(depth(MODEL), [1, 5, 0]);
    assert.deepEqual(depth(OTHER_MODEL), [0, 0, 4]);
    await stage.claim(64);
    assert.deepEqual(depth(MODEL), [0, 2, 0]);
    await stage.pass(LEASE_MS);
    assert.deepEqual(depth(MODEL), [1, 5, 0]);
    await stage.pass(TOTAL_MS);
    assert.equal(total(MODEL) + total(OTHER_MODEL), 0);
  });
}

function settledNotes(holds: Holds): void {
  holds("every end is told once, to everybody who watches, with the outcome in it", async (stage) => {
    const heard: string[] = [];
    const stop = stage.engine.watch({ settled: ({ task, state }) => void heard.push(`${task.id} ${state}`) });
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now));
    await stage.pass(1);
    assert.deepEqual(heard, []);
    const next = await stage.claim();
    await stage.settle(next, done(id));
    await stage.settle(lease, done(id));
    await stage.pass(TOTAL_MS);
    assert.deepEqual(heard, [`${id} done`]);
    assert.deepEqual(
      stage.settled.map(({ outcome }) => outcome?.ok),
      [true],
    );
    stop();
    stop();
    await stage.ended(done);
    assert.equal(heard.length, 1);
    assert.equal(stage.settled.length, 2);
  });

  holds("by the time it is told, the record says so", async (stage) => {
    const found: Promise<unknown>[] = [];
    stage.engine.watch({
      settled: ({ task }) => void found.push(stage.engine.outcome(task.id).then((record) => record?.state)),
    });
    await stage.ended(done);
    await stage.queue();
    await stage.pass(QUEUE_MS);
    assert.deepEqual(await Promise.all(found), ["done", "failed"]);
  });
}

function queuedNotes(holds: Holds): void {
  holds(
    "every arrival in a queue is told with the depth: new, retried, put back, replayed",
    async (stage) => {
      const told = () => stage.arrivals.splice(0);
      const first = await stage.queue({ tier: 0 });
      await stage.queue({ tier: 2 });
      await stage.queue({ parameters: "hot", model: OTHER_MODEL });
      assert.deepEqual(told(), [
        [MODEL, "", 1],
        [MODEL, "", 2],
        [OTHER_MODEL, "hot", 1],
      ]);
      const lease = await stage.claim(1);
      assert.deepEqual(idsOf(lease), [first]);
      await stage.settle(lease, retry(first, stage.now));
      assert.deepEqual(told(), [[MODEL, "", 2]]);
      await stage.settle(await stage.claim(1), retry(first, stage.now + 10));
      assert.deepEqual(told(), []);
      await stage.pass(10);
      assert.deepEqual(told(), [[MODEL, "", 2]]);
      await stage.claim(1);
      await stage.pass(LEASE_MS);
      assert.deepEqual(told(), [[MODEL, "", 2]]);
      await stage.settle(await stage.claim(1), dead(first));
      await stage.engine.deadLetters.replay(first);
      assert.deepEqual(told(), [[MODEL, "", 2]]);
    },
  );

  holds("what joins, is answered or is refused enters no queue", async (stage) => {
    const sharing = { joinKey: "same", cacheKey: "cache", cacheTtlMs: 1000 };
    const { id, lease } = await stage.run({}, sharing);
    await stage.put({}, sharing);
    await stage.settle(lease, done(id));
    await stage.put({}, sharing);
    assert.deepEqual(stage.arrivals, [[MODEL, "", 1]]);
  });
}
