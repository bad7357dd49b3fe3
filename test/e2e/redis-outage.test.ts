/** One Redis that dies, hangs, is full, forgets its scripts, cuts its clients: 503 at once, nothing lost. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { startProxy } from "../engine/redis-client/proxy.ts";
import { startServer, type Server } from "../engine/redis-client/servers.ts";
import { Load, runTwice, type Ledger } from "./fleet-load.ts";
import { alert, Fleet, fleetConfig, patient, type Part } from "./fleet.ts";
import { assertError, eventually, SOON_MS, type Answer } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

/** What a refusal may take while Redis does not answer: one command's time (1 s), and what a busy machine adds. */
const FAST_MS = 15_000;

interface Stage extends AsyncDisposable {
  readonly redis: Server;
  readonly worker: StubWorker;
  readonly fleet: Fleet;
}

/** Two gateways and a batcher in front of one worker that needs 10 ms. */
async function stage(engine: Readonly<Record<string, unknown>> = {}, redis?: Server): Promise<Stage> {
  await using started = new AsyncDisposableStack();
  redis ??= started.use(await startServer());
  const worker = started.use(await StubWorker.listen((call) => void setTimeout(() => call.echo(), 10)));
  const model = stubModel([worker], { timeouts: patient });
  const config = fleetConfig({ url: redis.url, ...engine }, [model]);
  const fleet = started.use(await Fleet.start({ gateways: 2, batchers: 1 }, config));
  const parts = started.move();
  return { redis, worker, fleet, [Symbol.asyncDispose]: () => parts.disposeAsync() };
}

/** New work at this gateway, three ways at once: each refused with 503, soon. Returns the messages. */
async function assertRefusesFast(door: Part, name: string): Promise<string[]> {
  const asks = [
    () => door.post({ input: `${name} held` }),
    () => door.post({ input: `${name} polled` }, { prefer: "respond-async" }),
    () => door.post({ input: `${name} keyed` }, { "idempotency-key": name }),
  ];
  return Promise.all(
    asks.map(async (ask) => {
      const startedAt = performance.now();
      const answer = await ask();
      const tookMs = performance.now() - startedAt;
      const { message } = assertError(answer, 503, "SERVICE_OVERLOADED");
      assert.ok(tookMs < FAST_MS, `refused after ${tookMs.toFixed(0)} ms: ${answer.text}`);
      assert.ok(Number(answer.header("retry-after")) >= 1, JSON.stringify(answer.headers));
      return message!;
    }),
  );
}

/** Both gateways take work again, without a restart. */
async function assertRecovers(fleet: Fleet): Promise<void> {
  const startedAt = performance.now();
  for (const [at, door] of fleet.doors.entries()) {
    let answer = await door.post({ input: `recovered ${at}` });
    while (answer.status === 503 && performance.now() - startedAt < SOON_MS) {
      await pause(50);
      answer = await door.post({ input: `recovered ${at}` });
    }
    assert.equal(answer.status, 200, `after ${SOON_MS} ms still: ${answer.text}`);
  }
}

/** How long a caller at most was without its answer, beside the refusals. */
function longestMs(ledger: Ledger): number {
  return Math.max(...[...ledger.rows.values()].map(({ sentAt, endedAt }) => endedAt! - sentAt));
}

describe("Redis is away", () => {
  let on: Stage;
  before(async () => void (on = await stage(alert)));
  after(() => on[Symbol.asyncDispose]());

  test("killed and restarted: 503 at once meanwhile, then every accepted task is answered", async (t) => {
    await using load = new Load(() => on.fleet.doors, { name: t.name });
    await load.more(200);
    await on.redis.kill();
    for (let round = 0; round < 3; round++)
      for (const door of on.fleet.doors) await assertRefusesFast(door, `killed ${round}`);
    await on.redis.restart();
    await assertRecovers(on.fleet);
    await load.more(200);
    (await load.stop()).assertWhole();
  });

  test("hung for three seconds: the same", async (t) => {
    await using load = new Load(() => on.fleet.doors, { name: t.name });
    await load.more(200);
    on.redis.pause();
    const pausedAt = performance.now();
    for (let round = 0; performance.now() - pausedAt < 3000; round++)
      await Promise.all(on.fleet.doors.map((door) => assertRefusesFast(door, `hung ${round}`)));
    on.redis.resume();
    await assertRecovers(on.fleet);
    await load.more(200);
    (await load.stop()).assertWhole();
  });

  test("read-only, as a primary is that was demoted: 503, then as before", async (t) => {
    await using load = new Load(() => on.fleet.doors, { name: t.name });
    await load.more(100);
    await on.redis.cli("REPLICAOF", "127.0.0.1", "1");
    await pause(300);
    for (const door of on.fleet.doors) await assertRefusesFast(door, "read-only");
    await on.redis.cli("REPLICAOF", "NO", "ONE");
    await assertRecovers(on.fleet);
    await load.more(100);
    (await load.stop()).assertWhole();
  });

  test("the admin listener says so, and its health is not ok", async () => {
    const [door] = on.fleet.doors;
    await on.redis.kill();
    for (const path of ["/internal/dead-letters", "/internal/requests/nobody"])
      assertError(await door!.admin(path), 503, "SERVICE_OVERLOADED");
    const unwell = async (): Promise<boolean> => (await door!.health()).status !== "ok";
    await eventually(unwell);
    assert.equal((await door!.admin("/healthz")).status, 200);
    await on.redis.restart();
  });

  test("a gateway that starts while Redis is away says so in one line, and ends", async () => {
    await using redis = await startServer();
    await redis.kill();
    const worker = { name: "sim", backend: { kind: "simulated", workers: 1 } };
    const startedAt = performance.now();
    const start = Fleet.start(
      { gateways: 1, batchers: 0 },
      fleetConfig({ url: redis.url, ...alert }, [worker]),
    );
    await assert.rejects(start);
    assert.ok(performance.now() - startedAt < SOON_MS / 2);
  });
});

describe("Redis is full", () => {
  test("new work is refused with the reason, what was accepted ends, and it recovers", async () => {
    await using on = await stage();
    const [a, b] = on.fleet.doors;
    const ids: string[] = [];
    for (let i = 0; i < 20; i++) ids.push(await a!.accept({ input: `before ${i} ${"x".repeat(5000)}` }));
    const used = Number(/used_memory:(\d+)/.exec(await on.redis.cli("INFO", "memory"))![1]);
    await on.redis.cli("CONFIG", "SET", "maxmemory", String(used + 2 * 2 ** 20));
    let refusal: Answer | undefined;
    const big = "y".repeat(100_000);
    for (let i = 0; i < 200 && refusal === undefined; i++) {
      const answer = await b!.post({ input: `filling ${i} ${big}` }, { prefer: "respond-async" });
      if (answer.status === 202) ids.push(answer.json.task_id!);
      else refusal = answer;
    }
    assert.match(assertError(refusal!, 503, "SERVICE_OVERLOADED").message!, /memory/i);
    const fullAt = performance.now();
    for (const id of ids) assert.equal((await b!.result(id)).status, "SUCCESS");
    const endedMs = performance.now() - fullAt;
    assert.ok(endedMs < 30_000, `the last one ended ${endedMs.toFixed(0)} ms after Redis was full`);
    assert.deepEqual(runTwice(on.worker.inputs), [], "no answer of a worker was thrown away");
    await on.redis.cli("CONFIG", "SET", "maxmemory", "0");
    await assertRecovers(on.fleet);
  });
});

describe("under load, nobody notices", () => {
  let on: Stage;
  before(async () => void (on = await stage()));
  after(() => on[Symbol.asyncDispose]());

  /** Runs `act` every few milliseconds for a while under load. */
  async function disturb(name: string, act: () => Promise<unknown>, times: number): Promise<Ledger> {
    await using load = new Load(() => on.fleet.doors, { name });
    await load.more(100);
    for (let i = 0; i < times; i++) {
      await act();
      await load.more(10);
    }
    await load.more(100);
    // Not returned as it is: the load would be closed under its last callers.
    return await load.stop();
  }

  test("SCRIPT FLUSH", async (t) => {
    const ledger = await disturb(t.name, () => on.redis.cli("SCRIPT", "FLUSH"), 20);
    ledger.assertWhole();
    assert.deepEqual(ledger.refusals, []);
    assert.deepEqual(runTwice(on.worker.inputs), []);
  });

  test("CLIENT KILL TYPE pubsub: answers are at most a sweep late", async (t) => {
    const ledger = await disturb(t.name, () => on.redis.cli("CLIENT", "KILL", "TYPE", "pubsub"), 15);
    ledger.assertWhole();
    assert.deepEqual(ledger.refusals, []);
    // Not the end of the callers' patience.
    assert.ok(longestMs(ledger) < patient.totalMs / 2, `${longestMs(ledger).toFixed(0)} ms`);
  });

  test("CLIENT KILL TYPE normal: nothing is lost, and nothing runs twice but by a lost lease", async (t) => {
    const ledger = await disturb(t.name, () => on.redis.cli("CLIENT", "KILL", "TYPE", "normal"), 15);
    ledger.assertWhole();
    const slow = ledger.refusals.filter(({ ms }) => ms > FAST_MS);
    assert.deepEqual(slow, []);
  });
});

describe("a reply of Redis is lost", () => {
  test("to a put: sent again with the same key, the task runs once", async () => {
    await using redis = await startServer();
    await using proxy = await startProxy(redis.port);
    await using on = await stage({ url: proxy.url }, redis);
    for (let i = 0; i < 20; i++) {
      const input = `reply lost ${i}.`;
      proxy.cutOnly = input;
      proxy.cutRequests = 1 + (i % 2);
      const headers = { "idempotency-key": input };
      const door = on.fleet.doors[i % 2]!;
      let answer = await door.post({ input }, headers);
      const ids = new Set([answer.json.task_id]);
      while (answer.status === 503) {
        answer = await on.fleet.doors[(i + 1) % 2]!.post({ input }, headers);
        ids.add(answer.json.task_id);
      }
      assert.equal(answer.status, 200, answer.text);
      assert.deepEqual(answer.json.output, { of: input });
    }
    assert.ok(proxy.cuts >= 20, `${proxy.cuts} cuts`);
    proxy.cutRequests = 0;
    await eventually(() => on.worker.inputs.length >= 20);
    assert.deepEqual(runTwice(on.worker.inputs), []);
  });

  test("anywhere, under load: nothing is lost", async () => {
    await using redis = await startServer();
    await using proxy = await startProxy(redis.port);
    await using on = await stage({ url: proxy.url }, redis);
    await using load = new Load(() => on.fleet.doors);
    await load.more(50);
    for (let i = 0; i < 12; i++) {
      proxy.cutRequests = 1;
      await load.more(20);
    }
    proxy.cutRequests = 0;
    await load.more(50);
    (await load.stop()).assertWhole();
  });
});
