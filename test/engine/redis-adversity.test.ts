/**
 * What any engine on Redis promises when servers and networks misbehave.
 *
 * Only the engine's verbs, real servers and a TCP proxy are used; no test here knows a key or a script, so
 * another engine on Redis can be held to the same promises.
 */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import type { Lease } from "../../src/engine/engine.ts";
import type { RedisNodes } from "../../src/redis/nodes.ts";
import { dead, done, idsOf, LEASE_MS, PLAIN, retry, Stage } from "../contract/engine-stage.ts";
import { type Cluster, type Server, slotOf, startCluster, startServer } from "../redis/servers.ts";
import { makeEngine, openNodes } from "./redis-engines.ts";

type More = NonNullable<Parameters<typeof makeEngine>[2]>;

function stageOn(nodes: RedisNodes, more: More = {}, limits: Partial<typeof PLAIN> = {}) {
  const made = makeEngine(nodes, { ...PLAIN, ...limits }, { shards: 1, ...more });
  const { engine, clock, events } = made;
  const stage = new Stage({ engine, clock, events, refresh: () => engine.refresh(), approximate: true });
  return { ...made, stage };
}

describe("a slot that moves to another node", () => {
  let cluster: Cluster;
  let nodes: RedisNodes;

  before(async () => {
    cluster = await startCluster();
    nodes = await openNodes({ nodes: cluster.nodes });
  });

  after(async () => {
    await nodes.close();
    await cluster[Symbol.asyncDispose]();
  });

  /** Moves the slots that hold keys with this prefix, back and forth; `eachStep` runs with a slot in two halves. */
  async function moveAll(prefix: string, eachStep: () => Promise<void>): Promise<void> {
    const found = await Promise.all(
      (await cluster.primaries()).map((server) => server.ask("KEYS", `${prefix}*`)),
    );
    const slots = new Set((found.flat() as string[]).map((key) => slotOf(key)));
    for (const slot of slots) {
      const from = await cluster.primaryOf(slot);
      const to = (await cluster.primaries()).find((server) => server !== from)!;
      await cluster.moveSlot(slot, to, eachStep);
    }
  }

  /** Every kind of place a task can be in, so that every kind of key is there. */
  async function furnish(stage: Stage): Promise<void> {
    await stage.ended(dead);
    const { id, lease } = await stage.run();
    await stage.settle(lease, retry(id, stage.now + 100_000));
  }

  test("a claim takes a task wholly or not at all: every accepted task can still be run", async () => {
    const { stage, engine, name } = stageOn(nodes, { putWithinMs: 100 });
    await furnish(stage);
    const ids = await stage.queueMany(20);
    const taken: string[] = [];
    await moveAll(`${name}:`, async () => {
      await engine.refresh().catch(() => {});
      const lease = await stage.claim(2).catch(() => undefined);
      if (lease !== undefined) taken.push(...idsOf(lease));
    });
    await engine.refresh();
    taken.push(...idsOf(await stage.claim(64)));
    // A claim whose reply was lost gives its tasks back when its lease runs out.
    await stage.pass(LEASE_MS);
    await engine.refresh();
    const again = idsOf(await stage.claim(64));
    assert.deepEqual(new Set([...taken, ...again]), new Set(ids));
    await engine.close();
  });

  test("whatever verb is used meanwhile: each task is in one place, and ends once", async () => {
    const { stage, engine, name } = stageOn(nodes, { putWithinMs: 100 });
    await furnish(stage);
    const ids = new Set(await stage.queueMany(12));
    const cancelled = new Set<string>();
    const held: Lease[] = [await stage.claim(3), await stage.claim(3)];
    const settled = new Set<string>();
    await moveAll(`${name}:`, async () => {
      await engine.refresh().catch(() => {});
      const verbs = [
        async () => {
          const task = stage.task();
          const reply = await engine.put(task);
          if (reply.kind === "queued") ids.add(task.id);
        },
        async () => void held.push(await stage.claim(2)),
        async () => {
          const victim = [...ids].find((id) => !cancelled.has(id) && !settled.has(id))!;
          if ((await engine.cancel(victim, "ann")) === "cancelled") cancelled.add(victim);
        },
        async () => void (await engine.reap(stage.now)),
      ];
      await Promise.allSettled(verbs.map((verb) => verb()));
    });
    for (const lease of held) {
      const verdicts = idsOf(lease).map(done);
      const replies = await engine.settle(lease, verdicts);
      replies.forEach((reply, at) => reply === "taken" && settled.add(verdicts[at]!.id));
    }
    await stage.pass(LEASE_MS);
    await engine.refresh();
    const rest = await stage.claim(64);
    for (const reply of await engine.settle(rest, idsOf(rest).map(done))) assert.equal(reply, "taken");
    for (const id of idsOf(rest)) settled.add(id);
    for (const id of ids) {
      const code = await stage.code(id);
      // A cancel whose reply was refused may have been carried out; nothing else may end a task.
      assert.ok(code === "" || code === "CANCELLED", `${id} ended with ${code ?? "nothing"}`);
      if (cancelled.has(id)) assert.equal(code, "CANCELLED");
      if (settled.has(id)) assert.equal(code, "");
    }
    await stage.hasCounts([1, 0, 0, 1]);
    await engine.close();
  });
});

describe("one server", () => {
  let server: Server;
  let nodes: RedisNodes;

  before(async () => {
    server = await startServer();
    nodes = await openNodes({ url: server.url });
  });

  after(async () => {
    await nodes.close();
    await server.stop();
  });

  test("the largest batch that can be configured is claimed, kept and settled as a whole", async () => {
    const SIZE = 10_000;
    const { stage, engine } = stageOn(nodes, {}, { maxQueued: SIZE });
    const ids = Array.from({ length: SIZE }, () => stage.task());
    await Promise.all(ids.map((task) => engine.put(task)));
    const lease = await stage.claim(SIZE);
    assert.equal(lease.tasks.length, SIZE);
    assert.deepEqual(await engine.extend(lease, LEASE_MS), []);
    const replies = await engine.settle(lease, idsOf(lease).map(done));
    assert.deepEqual(new Set(replies), new Set(["taken"]));
    await stage.hasCounts([0, 0, 0, 0]);
    await engine.close();
  });
});
