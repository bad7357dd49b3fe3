/** What only the Redis engine promises: what is in Redis and for how long, leases, the net, a full server. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { setImmediate } from "node:timers/promises";
import { Refusal } from "../../src/core/errors.ts";
import { checkFormat } from "../../src/engine/redis-format.ts";
import { RedisKeys } from "../../src/engine/redis-keys.ts";
import { RedisError, type RedisNodes, StoreAway } from "../../src/redis/nodes.ts";
import { dead, done, idsOf, MODEL, PLAIN, retry, Stage, TOTAL_MS } from "../contract/engine-stage.ts";
import { startProxy } from "../redis/proxy.ts";
import { type Server, slotOf, startServer } from "../redis/servers.ts";
import { makeEngine, openNodes } from "./redis-engines.ts";

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

function stageOf(more: Parameters<typeof makeEngine>[2] = {}) {
  const made = makeEngine(nodes, PLAIN, { shards: 1, ...more });
  const { engine, clock, events } = made;
  const stage = new Stage({ engine, clock, events, refresh: () => engine.refresh(), approximate: true });
  return { ...made, stage };
}

/** Every key under a prefix, with its time to live; -1 is for ever. */
async function keysOf(prefix: string): Promise<Map<string, number>> {
  const keys = (await server.ask("KEYS", `${prefix}*`)) as string[];
  const found = new Map<string, number>();
  for (const key of keys.map(String))
    found.set(key.slice(key.indexOf("}:") + 2), Number(await server.ask("PTTL", key)));
  return found;
}

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
  test("nothing of a task that is not final may expire; nothing of one that is may stay", async () => {
    const { stage, engine, name } = stageOf();
    const sharing = { joinKey: "content\nann", cacheKey: "content\nann", cacheTtlMs: 1000 };
    const { id, lease } = await stage.run(
      {},
      { ...sharing, idempotency: { key: "key\nann", fingerprint: "content" } },
    );
    const alive = await keysOf(`${name}:`);
    for (const [key, ttl] of alive) {
      const mayExpire = /^(x|k|f|p|lb):/.test(key);
      assert.equal(ttl > 0, mayExpire, `${key} has a time to live of ${ttl}`);
    }
    assert.ok(alive.has(`b:${id}`));
    await stage.settle(lease, done(id));
    const left = await keysOf(`${name}:`);
    assert.ok(!left.has(`b:${id}`), "its input is gone");
    for (const [key, ttl] of left) {
      const stays = /^(n|qs|q:.*)$/.test(key);
      assert.equal(ttl < 0, stays, `${key} has a time to live of ${ttl}`);
    }
    await engine.close();
  });

  test("a task that joined, or was refused, leaves no input behind", async () => {
    const { stage, engine, name } = stageOf();
    await stage.queue({}, { joinKey: "same" });
    await stage.put({}, { joinKey: "same" });
    const bodies = [...(await keysOf(`${name}:`)).keys()].filter((key) => key.startsWith("b:"));
    assert.equal(bodies.length, 1);
    await engine.close();
  });
});

describe("leases", () => {
  test("a live process renews them until the time that it asked for", async () => {
    const { stage, engine, clock } = stageOf({ leaseMs: 300 });
    const id = await stage.queue();
    await stage.claim(64, { leaseMs: 1500 });
    for (let at = 0; at < 1400; at += 100) {
      await clock.run(stage.now + 100);
      await engine.refresh();
      await stage.reap();
      assert.equal(await stage.state(id), "running", `after ${at + 100} ms`);
    }
    await stage.pass(500);
    assert.equal(await stage.state(id), "queued");
    await engine.close();
  });

  test("what a process holds when it stops is back in its queue at once, and untried", async () => {
    const { stage, engine, keys } = stageOf({ leaseMs: 300 });
    const ids = await stage.queueMany(3);
    const lease = await stage.claim(64, { leaseMs: 5000 });
    await stage.settle(lease, done(ids[0]!));
    await engine.close();
    const prefix = keys.bases[0]!.slice(0, keys.bases[0]!.indexOf("{"));
    const next = stageOf({ prefix });
    await next.engine.refresh();
    const again = await next.stage.claim();
    assert.deepEqual(new Set(idsOf(again)), new Set(ids.slice(1)));
    assert.deepEqual(
      again.tasks.map(({ attempt }) => attempt),
      [1, 1],
    );
    await next.engine.close();
  });
});

describe("the net under the net", () => {
  test("what was delivered and is held by nobody comes back", async () => {
    const { stage, engine, keys } = stageOf();
    const id = await stage.queue();
    const stream = `${keys.bases[0]!}q:${MODEL}:::0:n`;
    // A claim that broke off after it had read.
    await server.ask("XREADGROUP", "GROUP", "g", "c", "COUNT", "10", "STREAMS", stream, ">");
    assert.deepEqual(idsOf(await stage.claim()), []);
    await engine.tend();
    assert.deepEqual(idsOf(await stage.claim()), [id]);
    await engine.close();
  });

  test("copies that nobody owns are dropped, and empty streams with them", async () => {
    const { stage, engine, keys, name } = stageOf();
    const id = await stage.queue();
    const stream = `${keys.bases[0]!}q:${MODEL}:::0:n`;
    await server.ask("XADD", stream, "*", "i", id);
    await server.ask("XADD", stream, "*", "i", "nobody");
    const lease = await stage.claim(1);
    assert.deepEqual(idsOf(lease), [id]);
    await stage.settle(lease, done(id));
    await engine.refresh();
    assert.deepEqual(idsOf(await stage.claim()), []);
    await engine.tend();
    assert.ok(![...(await keysOf(`${name}:`)).keys()].some((key) => key.startsWith("q")));
    assert.deepEqual(idsOf(await stage.claim()), []);
    const next = await stage.queue();
    assert.deepEqual(idsOf(await stage.claim()), [next]);
    await engine.close();
  });
});

describe("a full server", () => {
  test("refuses new work, and finishes what it has", async () => {
    await using full = await startServer();
    const own = await openNodes({ url: full.url });
    const { engine, clock, events } = makeEngine(own, PLAIN, { shards: 1 });
    const stage = new Stage({ engine, clock, events, approximate: true });
    const ids = await stage.queueMany(3);
    const lease = await stage.claim();
    await full.cli("CONFIG", "SET", "maxmemory", "1mb");
    await assert.rejects(stage.put(), (error) => {
      assert.ok(error instanceof Refusal);
      assert.equal(error.status, 503);
      assert.match(error.message, /nothing was accepted/);
      return true;
    });
    const verdicts = [done(ids[0]!), retry(ids[1]!, 0), done(ids[2]!)];
    assert.deepEqual(await engine.settle(lease, verdicts), ["taken", "taken", "taken"]);
    assert.equal(await stage.state(ids[0]!), "done");
    assert.deepEqual(idsOf(await stage.claim()), [ids[1]]);
    await stage.pass(TOTAL_MS);
    assert.equal(await stage.code(ids[1]!), "DEADLINE_EXCEEDED");
    await full.cli("CONFIG", "SET", "maxmemory", "0");
    await stage.queue();
    await engine.close();
    await own.close();
  });
});

test("without its input there is no task: a server at its limit may refuse the one and take the other", async () => {
  const { stage, engine, name, keys } = stageOf();
  const run = nodes.runDurably.bind(nodes);
  nodes.runDurably = (shard, { script, keys: named, args }, withinMs) =>
    run(shard, { script, keys: named, args }, withinMs);
  try {
    await assert.rejects(stage.put({}, { joinKey: "content" }), Refusal);
  } finally {
    nodes.runDurably = run;
  }
  assert.deepEqual([...(await keysOf(`${name}:`)).keys()], []);
  const id = await stage.queue({}, { joinKey: "content" });
  assert.deepEqual(idsOf(await stage.claim()), [id]);
  assert.equal(await server.ask("EXISTS", `${keys.bases[0]!}b:${id}`), 1);
  await engine.close();
});

test("a task that was taken in, its reply lost and its second attempt refused, keeps its input", async () => {
  const { stage, engine } = stageOf();
  const run = nodes.runDurably.bind(nodes);
  nodes.runDurably = async (...call) => {
    await run(...call);
    throw new RedisError("OOM command not allowed when used memory > 'maxmemory'.");
  };
  const task = stage.task();
  try {
    await assert.rejects(engine.put(task), Refusal);
  } finally {
    nodes.runDurably = run;
  }
  await engine.refresh();
  const lease = await stage.claim();
  assert.deepEqual(idsOf(lease), [task.id]);
  assert.equal(lease.tasks[0]?.task.input, task.input);
  await engine.close();
});

test("a process does not join others whose data it cannot read, and says what to do", async () => {
  const { keys, engine } = stageOf();
  await checkFormat(nodes, keys);
  await checkFormat(nodes, keys);
  await server.ask("SET", `${keys.bases[0]!}format`, "2");
  const why = /data of format 2 .* reads format 1: start the version that wrote it/;
  await assert.rejects(checkFormat(nodes, keys), why);
  await assert.rejects(engine.open(), why);
  await engine.close();
});

test("a letter is purged in one act: a caller that is cut off leaves no half of it", async () => {
  const { stage, engine, name } = stageOf();
  const [run, command] = [nodes.run.bind(nodes), nodes.command.bind(nodes)];
  const id = await stage.ended(dead);
  // The first call gets through, none after it.
  let calls = 0;
  const once =
    <Args extends unknown[], Reply>(call: (...args: Args) => Promise<Reply>) =>
    (...args: Args): Promise<Reply> =>
      ++calls === 1 ? call(...args) : Promise.reject(new StoreAway("cut off", true));
  nodes.run = once(run);
  nodes.command = once(command);
  try {
    await engine.deadLetters.purge(id).catch(() => {});
  } finally {
    Object.assign(nodes, { run, command });
  }
  assert.deepEqual(await engine.deadLetters.list(), []);
  const left = [...(await keysOf(`${name}:`)).keys()].filter((key) => key.startsWith("d"));
  assert.deepEqual(left, []);
  await engine.close();
});

test("scripts that were flushed are loaded again, and nobody notices", async () => {
  const { stage, engine } = stageOf();
  for (let round = 0; round < 3; round++) {
    await server.cli("SCRIPT", "FLUSH");
    const id = await stage.queue();
    await server.cli("SCRIPT", "FLUSH");
    const lease = await stage.claim();
    await server.cli("SCRIPT", "FLUSH");
    assert.equal(await stage.settle(lease, done(id)), "taken");
    assert.equal(await stage.state(id), "done");
  }
  await engine.close();
});

test("while tasks wait too long to get in, more are refused, and those that wait get in", async () => {
  await using proxy = await startProxy(server.port);
  const slow = await openNodes({ url: proxy.url });
  const made = makeEngine(slow, PLAIN, { shards: 1, putWithinMs: 1000 });
  const { engine, clock } = made;
  const put = (input: string) => engine.put(new Stage({ ...made, approximate: true }).task({ input }));
  proxy.blackhole = true;
  const first = put('"on its way"');
  await setImmediate();
  const second = put('"gathers"');
  await clock.run(clock.now() + 251);
  const third = await put('"too much"');
  assert.deepEqual(third, { kind: "full", message: "Redis takes tasks in more slowly than they come" });
  proxy.blackhole = false;
  assert.deepEqual([(await first).kind, (await second).kind], ["queued", "queued"]);
  assert.equal((await put('"room again"')).kind, "queued");
  await engine.close();
  await slow.close();
});
