/** What is in Redis and for how long, and what a server that is full, slow or forgetful makes of it. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { setImmediate } from "node:timers/promises";
import { Refusal } from "../../src/core/errors.ts";
import { checkFormat } from "../../src/engine/redis/format.ts";
import { GRACE_MS, RedisKeys } from "../../src/engine/redis/keys.ts";
import { RedisError, type RedisNodes, StoreAway } from "../../src/engine/redis/client/nodes.ts";
import {
  dead,
  done,
  failed,
  idsOf,
  LETTER_TTL_MS,
  MODEL,
  PLAIN,
  QUEUE_MS,
  RESULT_TTL_MS,
  retry,
  Stage,
  TOTAL_MS,
} from "../contract/engine-stage.ts";
import { startProxy } from "./redis-client/proxy.ts";
import { type Server, slotOf, startServer, until } from "./redis-client/servers.ts";
import { ASLEEP, makeEngine, openNodes } from "./redis-engines.ts";

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

function stageOf(more: Parameters<typeof makeEngine>[2] = {}, limits: Partial<typeof PLAIN> = {}) {
  const made = makeEngine(nodes, { ...PLAIN, ...limits }, { shards: 1, ...more });
  const { engine, clock, events } = made;
  const stage = new Stage({ engine, clock, events, refresh: () => engine.refresh(), approximate: true });
  return { ...made, stage };
}

/** Every key under a prefix without it, with its time to live; -1 is for ever. */
async function keysOf(prefix: string, on = server): Promise<Map<string, number>> {
  const keys = (await on.ask("KEYS", `${prefix}:*`)) as string[];
  const found = new Map<string, number>();
  for (const key of keys.map(String))
    found.set(key.slice(key.indexOf("}:") + 2), Number(await on.ask("PTTL", key)));
  return found;
}

/** The server's clock goes on while a test runs. */
const SLACK_MS = 20_000;

/** One per model and zone, per batcher, per store: what may be there for ever, whatever passed through. */
const FIXED = /^(q:|depth$|format$)/;

describe("sixteen shards", () => {
  const { tags } = new RedisKeys("", 16);

  test("their slots lie in the middle of sixteen equal parts", () => {
    tags.forEach((tag, shard) => {
      const middle = (shard + 0.5) * (16_384 / 16);
      assert.ok(Math.abs(slotOf(tag) - middle) < 512, `${tag} is in slot ${slotOf(tag)}, not near ${middle}`);
    });
  });

  for (const primaries of [1, 2, 3, 4, 8, 16]) {
    test(`they spread evenly over ${primaries} primaries`, () => {
      const counts = Array.from({ length: primaries }, () => 0);
      for (const tag of tags) counts[Math.floor((slotOf(tag) * primaries) / 16_384)]!++;
      assert.ok(Math.max(...counts) - Math.min(...counts) <= 1, counts.join("/"));
    });
  }
});

describe("what is left in Redis", () => {
  const sharing = (content: string) => ({
    joinKey: `join ${content}`,
    cacheKey: `cache ${content}`,
    cacheTtlMs: 1000,
    idempotency: { key: `key ${content}`, fingerprint: content },
  });

  /** Nothing of any task is there but keys that expire by themselves. */
  async function nothingLasts(name: string, letters = 0): Promise<void> {
    await until(async () => {
      const left = await keysOf(name);
      return ![...left.keys()].some((key) => key.startsWith("run:"));
    }, "nothing runs");
    for (const [key, ttl] of await keysOf(name)) {
      const stays = FIXED.test(key) || (letters > 0 && /^dz?$/.test(key));
      assert.equal(ttl === -1, stays, `${key} has a time to live of ${ttl}`);
      if (!key.startsWith("q:")) continue;
      const stream = `${name}:{f0h}:${key}`;
      // Entries are acknowledged a moment after their outcomes are there.
      await until(async () => (await server.ask("XLEN", stream)) === 0, `${key} is empty`);
    }
  }

  test("nothing of a task that has not ended may expire before its deadline and the time its result is kept", async () => {
    const { stage, engine, name } = stageOf();
    const longest = stage.now + 100 * TOTAL_MS;
    await stage.queue({}, sharing("alone"));
    await Promise.all([
      stage.put({ deadlineAt: longest }),
      stage.put({}),
      stage.put({}, sharing("together")),
    ]);
    // Of the same bundle; the one with the key goes in by itself, before or after.
    await Promise.all([
      stage.put({ deadlineAt: longest }, sharing("late in")),
      stage.put({ deadlineAt: stage.now + 1 }),
    ]);
    await Promise.all([
      stage.put({ deadlineAt: stage.now + 1 }, sharing("late out")),
      stage.put({ deadlineAt: longest }),
    ]);
    const { id, lease } = await stage.run({}, sharing("retried"));
    await stage.settle(lease, retry(id, 0));
    await stage.put({ deadlineAt: longest }, { joinKey: sharing("retried").joinKey });
    const lives = [...(await keysOf(name))].filter(([key]) => !FIXED.test(key) && !key.startsWith("run:"));
    assert.deepEqual(
      new Set(lives.map(([key]) => key.split(":")[0])),
      new Set(["r", "x", "k"]),
      lives.map(([key]) => key).join(),
    );
    for (const [key, ttl] of lives) {
      const least = key.startsWith("x:") ? 1000 : RESULT_TTL_MS;
      assert.ok(ttl >= least + GRACE_MS - SLACK_MS, `${key} lives for ${ttl} ms`);
    }
    const long = lives.filter(([, ttl]) => ttl >= longest - stage.now + RESULT_TTL_MS + GRACE_MS - SLACK_MS);
    const bundles = long.filter(([key]) => key.startsWith("r:"));
    assert.equal(bundles.length, 4, "those of tasks with the late deadline, and of the one that was joined");
    await engine.close();
  });

  test("nothing of one that has ended stays for ever, whichever way it ended", async () => {
    const { stage, engine, name } = stageOf();
    await stage.ended(done, {}, sharing("done"));
    await stage.ended(failed, {}, sharing("failed"));
    assert.equal(await engine.cancel(await stage.queue(), "ann"), "cancelled");
    const gone = await stage.ended(done);
    assert.equal(await engine.cancel(gone, "ann"), "forgotten");
    await stage.put({}, sharing("done"));
    await stage.ended(done, { parameters: '{"large":1}' });
    await stage.queueMany(3);
    await stage.pass(QUEUE_MS);
    await nothingLasts(name);
    await stage.ended(dead);
    await nothingLasts(name, 1);
    await stage.tick(LETTER_TTL_MS);
    await engine.refresh();
    await nothingLasts(name);
    await engine.close();
  });

  test("a task that joined leaves nothing of its own behind", async () => {
    const { stage, engine, name } = stageOf();
    await stage.queue({}, { joinKey: "same" });
    const before = [...(await keysOf(name)).keys()];
    await stage.put({}, { joinKey: "same" });
    assert.deepEqual([...(await keysOf(name)).keys()], before);
    await engine.close();
  });

  test("an entry that is read after its records have expired leaves nothing that lasts", async () => {
    const [gateway, judgements] = [stageOf(), [done, failed, dead, (id: string) => retry(id, 0)]];
    const { name, keys } = gateway;
    const plain = new Stage({ ...gateway, approximate: true });
    for (const judge of judgements) {
      const id = await plain.queue();
      await server.ask("DEL", keys.bundle(id));
      await gateway.engine.refresh();
      const lease = await gateway.stage.claim();
      assert.deepEqual(idsOf(lease), [id]);
      await gateway.stage.settle(lease, judge(id));
      if (judge === judgements.at(-1)) await gateway.stage.pass(TOTAL_MS);
    }
    await nothingLasts(name, 1);
    await gateway.engine.close();
  });

  test("what a gateway and a batcher have closed on leaves only what must be done", async () => {
    const { stage, engine, name } = stageOf();
    await engine.serve(ASLEEP);
    await stage.queueMany(2);
    await stage.claim(1);
    await engine.close();
    const left = await keysOf(name);
    assert.deepEqual(
      [...left.keys()].filter((key) => /^(alive|run):/.test(key)),
      [],
    );
  });
});

describe("a batcher's lease", () => {
  test("is renewed for as long as it lives, also on a full server", async () => {
    await using full = await startServer();
    const own = await openNodes({ url: full.url });
    const { engine, clock, keys, name } = makeEngine(own, PLAIN, { shards: 1, leaseMs: 600_000 });
    await engine.serve(ASLEEP);
    const key = `${keys.bases[0]!}alive:${name}`;
    const left = async (): Promise<number> => Number(await full.ask("PTTL", key));
    assert.ok((await left()) > 300_000);
    for (const maxmemory of ["0", "1mb"]) {
      await full.cli("CONFIG", "SET", "maxmemory", maxmemory);
      for (const change of [
        ["PEXPIRE", key, "60000"],
        ["DEL", key],
      ] as const) {
        await full.ask(...change);
        await until(async () => {
          await clock.run(clock.now() + 100_000);
          return (await left()) > 300_000;
        }, "it is renewed");
      }
    }
    await engine.close();
    assert.equal(await full.ask("EXISTS", key), 0);
    await own.close();
  });

  test("when it ran out meanwhile: what another batcher has taken over is given up, the rest is kept", async () => {
    const prefix = "lapsed:";
    const models = new Map([[MODEL, { queueMs: 1e9, totalMs: 1e9 }]]);
    const gateway = stageOf({ prefix }, { models });
    const { clock } = gateway;
    const late = stageOf({ prefix, leaseMs: 900_000, clock }, { models });
    const other = stageOf({ prefix, clock }, { models });
    const plain = new Stage({ ...gateway, approximate: true });
    await late.engine.serve(ASLEEP);
    const deadlineAt = plain.now + 1e9;
    const taken = await plain.queue({ deadlineAt });
    await late.engine.refresh();
    await server.ask("DEL", `${late.keys.bases[0]!}alive:${late.name}`);
    await other.engine.takeOver();
    const kept = await plain.queue({ deadlineAt });
    await late.engine.refresh();
    assert.equal(late.engine.queues(MODEL)[Symbol.iterator]().next().value?.depth, 2);
    await until(async () => {
      await clock.run(clock.now() + 100_000);
      return [...late.engine.queues(MODEL)][0]?.depth === 1;
    }, "it gave one up");
    assert.deepEqual(idsOf(await late.stage.claim()), [kept]);
    assert.deepEqual(idsOf(await other.stage.claim()), [taken]);
    for (const each of [gateway, late, other]) await each.engine.close();
  });
});

describe("a full server", () => {
  test("refuses new work and keeps nothing of it, and finishes what it has", async () => {
    await using full = await startServer();
    const own = await openNodes({ url: full.url });
    const { engine, clock, events, name } = makeEngine(own, PLAIN, { shards: 1 });
    const stage = new Stage({ engine, clock, events, refresh: () => engine.refresh(), approximate: true });
    const ids = await stage.queueMany(5);
    const lease = await stage.claim();
    const before = [...(await keysOf(name, full)).keys()].toSorted();
    await full.cli("CONFIG", "SET", "maxmemory", "1mb");
    for (const sharing of [{}, { joinKey: "same" }, { idempotency: { key: "k", fingerprint: "f" } }]) {
      await assert.rejects(stage.put({}, sharing), (error) => {
        assert.ok(error instanceof Refusal);
        assert.equal(error.status, 503);
        assert.match(error.message, /nothing was accepted/);
        return true;
      });
    }
    assert.deepEqual([...(await keysOf(name, full)).keys()].toSorted(), before);
    const verdicts = [done(ids[0]!), retry(ids[1]!, 0), failed(ids[2]!), dead(ids[3]!), done(ids[4]!)];
    assert.deepEqual(await engine.settle(lease, verdicts), Array(5).fill("taken"));
    const codes = await Promise.all(ids.map((id) => stage.code(id)));
    assert.deepEqual(codes, ["", undefined, "INPUT_REJECTED", "INFERENCE_FAILED", ""]);
    assert.deepEqual(idsOf(await stage.claim()), [ids[1]]);
    await stage.pass(TOTAL_MS);
    assert.equal(await stage.code(ids[1]!), "DEADLINE_EXCEEDED");
    const stream = [...(await keysOf(name, full)).keys()].find((key) => key.startsWith("q:"))!;
    await until(async () => (await full.ask("XLEN", `${name}:{f0h}:${stream}`)) === 0, "inputs are freed");
    await full.cli("CONFIG", "SET", "maxmemory", "0");
    await stage.queue();
    await stage.hasCounts([1, 0, 0, 1]);
    await engine.close();
    await own.close();
  });

  test("a task that was taken in, its reply lost and its second attempt refused, is run all the same", async () => {
    const { stage, engine } = stageOf();
    const transact = nodes.transact.bind(nodes);
    nodes.transact = async (...call) => {
      await transact(...call);
      throw new RedisError("OOM command not allowed when used memory > 'maxmemory'.");
    };
    const task = stage.task();
    try {
      await assert.rejects(engine.put(task), Refusal);
    } finally {
      nodes.transact = transact;
    }
    await engine.refresh();
    const lease = await stage.claim();
    assert.deepEqual(idsOf(lease), [task.id]);
    assert.equal(lease.tasks[0]?.task.input, task.input);
    await engine.close();
  });
});

test("a process does not join others whose data it cannot read, and says what to do", async () => {
  const { keys, engine } = stageOf();
  await checkFormat(nodes, keys);
  await checkFormat(nodes, keys);
  await server.ask("SET", `${keys.bases[0]!}format`, "1");
  const why =
    /data of format 1 .* reads format 2: start the version that wrote it, or set another engine.keyPrefix/;
  await assert.rejects(checkFormat(nodes, keys), why);
  await assert.rejects(engine.open(), why);
  await engine.close();
});

test("a letter is purged in one act: a caller that is cut off leaves no half of it", async () => {
  const { stage, engine, name } = stageOf();
  const [run, command] = [nodes.run.bind(nodes), nodes.command.bind(nodes)];
  const pipeline = nodes.pipeline.bind(nodes);
  const id = await stage.ended(dead);
  // The first call gets through, none after it.
  let calls = 0;
  const once =
    <Args extends unknown[], Reply>(call: (...args: Args) => Promise<Reply>) =>
    (...args: Args): Promise<Reply> =>
      ++calls === 1 ? call(...args) : Promise.reject(new StoreAway("cut off", true));
  Object.assign(nodes, { run: once(run), command: once(command), pipeline: once(pipeline) });
  try {
    await engine.deadLetters.purge(id).catch(() => {});
  } finally {
    Object.assign(nodes, { run, command, pipeline });
  }
  assert.deepEqual(await engine.deadLetters.list(), []);
  const left = [...(await keysOf(name)).keys()].filter((key) => key.startsWith("d") && key !== "depth");
  assert.deepEqual(left, []);
  await engine.close();
});

test("scripts that were flushed are loaded again, and nobody notices", async () => {
  const { stage, engine } = stageOf();
  for (const verdict of [done, failed, dead]) {
    await server.cli("SCRIPT", "FLUSH");
    const id = await stage.queue({}, { idempotency: { key: "key", fingerprint: verdict("x").kind } });
    await server.cli("SCRIPT", "FLUSH");
    const lease = await stage.claim();
    await server.cli("SCRIPT", "FLUSH");
    assert.equal(await stage.settle(lease, verdict(id)), "taken");
    await server.cli("SCRIPT", "FLUSH");
    assert.equal(await engine.cancel(id, "ann"), "forgotten");
  }
  await engine.close();
});

test("while tasks wait too long to get in, more are refused, and those that wait get in", async () => {
  await using proxy = await startProxy(server.port);
  const slow = await openNodes({ url: proxy.url });
  const made = makeEngine(slow, PLAIN, { shards: 1, putWithinMs: 1000 });
  const { engine, clock } = made;
  const stage = new Stage({ ...made, approximate: true });
  proxy.blackhole = true;
  // As many calls as may be on their way, then one that has to wait.
  const first = stage.put();
  await setImmediate();
  const second = stage.put();
  await setImmediate();
  const third = stage.put();
  await clock.run(clock.now() + 251);
  const refused = await stage.put();
  assert.deepEqual(refused, { kind: "full", message: "Redis takes tasks in more slowly than they come" });
  proxy.blackhole = false;
  for (const put of [first, second, third]) assert.equal((await put).kind, "queued");
  assert.equal((await stage.put()).kind, "queued");
  await engine.close();
  await slow.close();
});

test("a task that Redis no longer knows is said to be lost: after three looks apart, and once", async () => {
  const { stage, engine, clock, events, keys } = stageOf({ shards: 16, sweepMs: 1000 });
  const lost: string[] = [];
  events.on("task.lost", ({ id }) => lost.push(id));
  await engine.open();
  const plain = new Stage({ engine, clock, events, approximate: true });
  const [id, other] = [await plain.queue({ deadlineAt: stage.now + 1e6 }), await plain.queue()];
  await server.ask("DEL", keys.bundle(id));
  // Looks that are on their way together count once.
  for (let n = 0; n < 6; n++) await server.cli("CLIENT", "KILL", "TYPE", "pubsub");
  const looks = async (): Promise<number> => {
    const stats = await server.cli("INFO", "commandstats");
    return Number(/cmdstat_hmget:calls=(\d+)/.exec(stats)?.[1] ?? 0);
  };
  const pass = async (): Promise<void> => {
    const before = await looks();
    await clock.run(clock.now() + 1001);
    await until(async () => (await looks()) > before, "it looked");
    await stage.state(other);
  };
  await pass();
  await pass();
  assert.deepEqual(lost, []);
  await until(async () => {
    await pass();
    return lost.length > 0;
  }, "it is told");
  await pass();
  await pass();
  assert.deepEqual(lost, [id]);
  await engine.close();
});
