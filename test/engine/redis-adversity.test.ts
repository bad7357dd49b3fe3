/**
 * What any engine on Redis promises when servers and networks misbehave.
 *
 * Only the engine's verbs, real servers and a TCP proxy are used; no test here knows a key or a script, so
 * another engine on Redis can be held to the same promises.
 */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Refusal } from "../../src/core/errors.ts";
import type { Lease, PutReply } from "../../src/engine/engine.ts";
import type { RedisNodes } from "../../src/engine/redis/client/nodes.ts";
import {
  dead,
  done,
  failed,
  idsOf,
  LEASE_MS,
  MODEL,
  PLAIN,
  QUEUE_MS,
  retry,
  Stage,
} from "../contract/engine-stage.ts";
import { type Proxy, startProxy } from "./redis-client/proxy.ts";
import {
  type Cluster,
  type Server,
  slotOf,
  startCluster,
  startServer,
  until,
} from "./redis-client/servers.ts";
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

  async function keysOf(prefix: string, server: Server): Promise<string[]> {
    return (await server.ask("KEYS", `${prefix}*`)) as string[];
  }

  /** How many keys with this prefix have no time to live. */
  async function lasting(prefix: string): Promise<number> {
    let count = 0;
    for (const server of await cluster.primaries()) {
      for (const key of await keysOf(prefix, server)) if ((await server.ask("PTTL", key)) === -1) count++;
    }
    return count;
  }

  /** Moves the slots that hold keys with this prefix; `eachStep` runs with a slot in two halves. */
  async function moveAll(prefix: string, eachStep: () => Promise<void>): Promise<void> {
    const primaries = await cluster.primaries();
    const found = await Promise.all(primaries.map((server) => keysOf(prefix, server)));
    const slots = new Set(found.flat().map((key) => slotOf(key)));
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

  test("a put that is refused meanwhile leaves nothing that lasts", async () => {
    const { stage, engine, name } = stageOn(nodes, { putWithinMs: 100 });
    await stage.queueMany(20);
    const before = await lasting(`${name}:`);
    let refused = 0;
    await moveAll(`${name}:`, async () => {
      await assert.rejects(stage.put(), Refusal);
      refused++;
    });
    assert.ok(refused > 0);
    assert.equal(await lasting(`${name}:`), before);
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

describe("a reply that is lost", () => {
  let server: Server;
  let proxy: Proxy;
  let nodes: RedisNodes;

  before(async () => {
    server = await startServer();
    proxy = await startProxy(server.port);
    nodes = await openNodes({ url: proxy.url });
  });

  after(async () => {
    await nodes.close();
    await proxy.close();
    await server.stop();
  });

  /** Does `work` while the reply to its first script, or to another command, is lost with the connection. */
  async function losing<Result>(work: () => Promise<Result>, command = "EVALSHA"): Promise<Result> {
    const { cuts } = proxy;
    proxy.cutOnly = command;
    proxy.cutRequests = 1;
    const result = await work();
    assert.equal(proxy.cuts, cuts + 1, "a reply was lost");
    return result;
  }

  test("a put is queued once, runs once and counts once, whether it was read before it was sent again or not", async () => {
    const { engine, stage } = stageOn(nodes);
    const plain = new Stage({ engine, clock: stage.clock, events: stage.events, approximate: true });
    for (const sharing of [{}, { joinKey: "same" }, { idempotency: { key: "key", fingerprint: "f" } }]) {
      const id = await losing(() => plain.queue({}, sharing), "EXEC");
      await engine.refresh();
      const lease = await stage.claim();
      assert.deepEqual(idsOf(lease), [id]);
      assert.equal(await stage.settle(lease, done(id)), "taken");
      assert.deepEqual(idsOf(await stage.claim()), []);
      await stage.hasCounts([0, 0, 0, 0]);
      assert.equal(stage.settled.filter((each) => each.id === id).length, 1);
    }
    await engine.close();
  });

  test("a read: what was delivered and did not arrive is read again", async () => {
    const { engine, stage } = stageOn(nodes);
    const plain = new Stage({ engine, clock: stage.clock, events: stage.events, approximate: true });
    await plain.queue();
    await engine.refresh();
    const id = await plain.queue();
    await losing(() => engine.refresh().catch(() => {}), "XREADGROUP");
    await until(() => nodes.up(0));
    await engine.refresh();
    assert.equal((await stage.claim()).tasks.length, 1, "it is pending, and nobody has it");
    await engine.takeOver();
    assert.deepEqual(idsOf(await stage.claim()), [id]);
    await engine.close();
  });

  for (const [verb, verdict, code] of [
    ["HSETNX", done, ""],
    ["EVALSHA", failed, "INPUT_REJECTED"],
    ["EVALSHA", dead, "INFERENCE_FAILED"],
  ] as const) {
    test(`a settlement (${verdict("x").kind}) is taken once, and told once`, async () => {
      const { stage, engine } = stageOn(nodes);
      await stage.ended(verdict);
      const { id, lease } = await stage.run();
      assert.equal(await losing(() => stage.settle(lease, verdict(id)), verb), "taken");
      assert.equal(await stage.code(id), code);
      assert.equal(stage.settled.filter((each) => each.id === id).length, 1);
      assert.deepEqual(idsOf(await stage.claim()), []);
      assert.deepEqual((await stage.counts()).slice(0, 2), [0, 0]);
      await engine.close();
    });
  }

  test("a replay is done once", async () => {
    const { stage, engine } = stageOn(nodes);
    const other = await stage.ended(dead);
    await engine.deadLetters.replay(other);
    await stage.settle(await stage.claim(), done(other));
    const id = await stage.ended(dead);
    assert.equal(await losing(() => engine.deadLetters.replay(id)), true);
    await engine.refresh();
    assert.deepEqual(idsOf(await stage.claim()), [id]);
    assert.deepEqual(idsOf(await stage.claim()), []);
    await engine.close();
  });

  test("cancel says what it did, its caller hears of the end, and the record is there", async () => {
    const { stage, engine } = stageOn(nodes);
    // A server that does not know a script yet loses the reply that says so, and nothing was done.
    await engine.cancel(await stage.queue(), "ann");
    const id = await stage.queue();
    assert.equal(await losing(() => engine.cancel(id, "ann")), "cancelled");
    assert.equal(stage.settled.filter((each) => each.id === id).length, 1);
    assert.equal(await stage.code(id), "CANCELLED");
    assert.equal(await losing(() => engine.cancel(id, "ann")), "forgotten");
    assert.equal(await engine.cancel(id, "ann"), "unknown");
    await engine.close();
  });

  test("a join counts once: when both callers hang up, the task is dropped", async () => {
    const { stage, engine } = stageOn(nodes);
    const id = await stage.queue({}, { joinKey: "same" });
    assert.deepEqual(await losing(() => stage.put({}, { joinKey: "same" })), { kind: "joined", id });
    assert.equal(await engine.cancel(id, "ann", true), "kept");
    assert.equal(await engine.cancel(id, "ann", true), "cancelled");
    await engine.close();
  });
});

describe("one server", () => {
  let server: Server;
  let nodes: RedisNodes;
  const opened: RedisNodes[] = [];

  before(async () => {
    server = await startServer();
    nodes = await openNodes({ url: server.url });
  });

  after(async () => {
    for (const each of [nodes, ...opened]) await each.close();
    await server.stop();
  });

  test("one Idempotency-Key with two bodies through two gateways: one wins, and its retry joins", async () => {
    const [one, two] = await Promise.all([spreadOn(), spreadOn()]);
    for (let round = 0; round < 20; round++) {
      const key = `key ${round}`;
      const comes = ({ stage }: typeof one, body: string): Promise<PutReply> =>
        stage.put({ content: body }, { idempotency: { key, fingerprint: body } });
      const bodies = [`one ${round}`, `two ${round}`] as const;
      const replies = await Promise.all([comes(one, bodies[0]), comes(two, bodies[1])]);
      const winner = replies[0].kind === "queued" ? 0 : 1;
      const { id } = replies[winner] as PutReply & { kind: "queued" };
      assert.equal(replies[winner].kind, "queued");
      assert.deepEqual(replies[1 - winner], { kind: "conflict", id });
      for (const gateway of [one, two]) {
        assert.deepEqual(await comes(gateway, bodies[winner]), { kind: "joined", id });
        assert.deepEqual(await comes(gateway, bodies[1 - winner]!), { kind: "conflict", id });
      }
    }
    await Promise.all([one.engine.close(), two.engine.close()]);
  });

  /** Gateways of the same fleet, each on connections of its own. */
  async function spreadOn() {
    const own = await openNodes({ url: server.url });
    opened.push(own);
    const made = makeEngine(own, PLAIN, { prefix: "fleet:" });
    return { ...made, stage: new Stage({ ...made, approximate: true }) };
  }

  test("a server that lost its data: the next task is seen with the next look, and runs", async () => {
    await using flushed = await startServer();
    const own = await openNodes({ url: flushed.url });
    opened.push(own);
    const { stage, engine } = stageOn(own);
    for (let round = 0; round < 5; round++) await stage.ended(done);
    await flushed.cli("FLUSHALL");
    const id = await stage.queue();
    await engine.refresh();
    assert.deepEqual(idsOf(await stage.claim()), [id]);
    await stage.queueMany(3);
    await flushed.cli("FLUSHALL");
    assert.equal((await stage.counts())[0], 0);
    await engine.close();
  });

  test("tasks that expire together do not hold up the server, however large they are", async () => {
    await using large = await startServer({ appendonly: "no" });
    const own = await openNodes({ url: large.url });
    opened.push(own);
    const { stage, engine } = stageOn(own, {}, { maxQueuedBytes: Infinity });
    const input = JSON.stringify("x".repeat(1024 * 1024));
    await stage.queueMany(150, { input });
    // CPU time, not time: other processes may be in the server's way.
    const cpuMs = async (): Promise<number> => {
      const said = (await large.cli("INFO", "cpu")).matchAll(/_main_thread:([\d.]+)/g);
      return [...said].reduce((sum, [, seconds]) => sum + 1000 * Number(seconds), 0);
    };
    const before = await cpuMs();
    await stage.pass(QUEUE_MS);
    const took = (await cpuMs()) - before;
    assert.deepEqual(await stage.counts(), [0, 0, 0, 0]);
    assert.equal(stage.settled.length, 150);
    assert.ok(took < 100, `${took} ms of CPU`);
    await engine.close();
  });

  test("very many kinds of parameters cost the server a bounded number of commands a second", async () => {
    const KINDS = 1000;
    await using busy = await startServer({ appendonly: "no" });
    const own = await openNodes({ url: busy.url });
    opened.push(own);
    const made = makeEngine(own, { ...PLAIN, maxQueued: 10 * KINDS });
    const { engine, clock } = made;
    const stage = new Stage({ ...made, approximate: true });
    await engine.open();
    await Promise.all(Array.from({ length: KINDS }, (_, kind) => stage.put({ parameters: `{"p":${kind}}` })));
    await engine.refresh();
    assert.equal([...engine.queues(MODEL)].length, KINDS);
    await busy.cli("CONFIG", "RESETSTAT");
    const SECONDS = 5;
    for (let second = 0; second < SECONDS; second++) {
      await clock.run(clock.now() + 1000);
      // On the same connection: what was sent before has been answered then.
      await stage.state("nobody-0");
    }
    const calls = [...(await busy.cli("INFO", "commandstats")).matchAll(/calls=(\d+)/g)];
    const sum = calls.reduce((total, [, count]) => total + Number(count), 0);
    assert.ok(sum / SECONDS < KINDS / 10, `${sum / SECONDS} commands a second`);
    await engine.close();
  });

  test("the largest batch that can be configured is claimed, kept and settled as a whole", async () => {
    const SIZE = 10_000;
    const { stage, engine } = stageOn(nodes, {}, { maxQueued: SIZE });
    const ids = Array.from({ length: SIZE }, () => stage.task());
    await Promise.all(ids.map((task) => engine.put(task)));
    await engine.refresh();
    const lease = await stage.claim(SIZE);
    assert.equal(lease.tasks.length, SIZE);
    assert.deepEqual(await engine.extend(lease, LEASE_MS), []);
    const replies = await engine.settle(lease, idsOf(lease).map(done));
    assert.deepEqual(new Set(replies), new Set(["taken"]));
    await stage.hasCounts([0, 0, 0, 0]);
    await engine.close();
  });
});
