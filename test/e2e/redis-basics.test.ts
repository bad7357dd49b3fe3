/** Gateways and batchers on one Redis: whatever a client may do, it may do at any gateway. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { startServer, type Server } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, patient } from "./fleet.ts";
import { assertError, eventually } from "./harness.ts";
import { echo, Gate, stubModel, StubWorker } from "./stub-worker.ts";

/** So rarely that whoever waits is woken, and not found by the sweep. */

describe("two gateways, one batcher, one Redis", () => {
  let redis: Server;
  let stub: StubWorker;
  let fleet: Fleet;

  before(async () => {
    redis = await startServer();
    stub = await StubWorker.listen();
    const model = stubModel([stub], { timeouts: patient, retry: { max: 0 } });
    const engine = { url: redis.url };
    fleet = await Fleet.start({ gateways: 2, batchers: 1 }, fleetConfig(engine, [model]));
  });

  after(async () => {
    await fleet?.[Symbol.asyncDispose]();
    await stub?.[Symbol.asyncDispose]();
    await redis?.[Symbol.asyncDispose]();
  });

  const doors = () => [fleet.gateways[0]!, fleet.gateways[1]!] as const;
  const runs = (input: string): number => stub.inputs.filter((each) => each === input).length;

  test("a held request is answered", async () => {
    const [a, b] = doors();
    for (const [at, door] of [a, b].entries()) {
      const answer = await door.post({ input: `held ${at}` });
      assert.equal(answer.status, 200, answer.text);
      assert.deepEqual(answer.json.output, { of: `held ${at}` });
    }
  });

  test("what one gateway accepted is polled at the other", async () => {
    const [a, b] = doors();
    const id = await a.accept({ input: "polled elsewhere" });
    assert.deepEqual((await b.result(id)).output, { of: "polled elsewhere" });
    assert.deepEqual((await a.result(id)).output, { of: "polled elsewhere" });
  });

  test("a long poll at the other gateway is woken", async () => {
    const [a, b] = doors();
    for (let i = 0; i < 20; i++) {
      const gate = new Gate();
      stub.behave = gate.hold;
      const calls = stub.calls.length;
      const id = await a.accept({ input: `woken ${i}` });
      await stub.call(calls + 1);
      const polled = b.get(`/v1/result/${id}?wait=25`);
      // Nothing announces that a poll waits; a request behind it on the same gateway has passed it by then.
      await b.get("/healthz");
      await b.get(`/v1/result/${id}`);
      gate.open();
      assert.deepEqual((await polled).json.output, { of: `woken ${i}` });
    }
    stub.behave = echo;
  });

  test("DELETE at the other gateway: cancelled while queued, forgotten when done", async () => {
    const [a, b] = doors();
    const gate = new Gate();
    stub.behave = gate.hold;
    const calls = stub.calls.length;
    const blocker = await a.accept({ input: "blocker" });
    await stub.call(calls + 1);
    const id = await a.accept({ input: "to be cancelled" });
    assertError(await b.delete(`/v1/result/${blocker}`), 409, "NOT_CANCELLABLE");
    assert.equal((await b.delete(`/v1/result/${id}`)).status, 200);
    assert.equal((await a.result(id)).error, "CANCELLED");
    stub.behave = echo;
    gate.open();
    assert.deepEqual((await a.result(blocker)).output, { of: "blocker" });
    assert.equal((await b.delete(`/v1/result/${blocker}`)).status, 204);
    assertError(await a.get(`/v1/result/${blocker}`), 404, "NOT_FOUND");
    assert.equal(runs("to be cancelled"), 0);
  });

  test("a held caller at one gateway hears that another gateway cancelled its task", async () => {
    const [a, b] = doors();
    const gate = new Gate();
    stub.behave = gate.hold;
    const calls = stub.calls.length;
    const blocker = await a.accept({ input: "blocker of a held one" });
    await stub.call(calls + 1);
    const key = { "idempotency-key": "cancelled elsewhere" };
    const id = await a.accept({ input: "held and cancelled" }, key);
    const held = a.get(`/v1/result/${id}?wait=25`);
    await a.get("/healthz");
    assert.equal((await b.delete(`/v1/result/${id}`)).status, 200);
    assert.equal((await held).json.error, "CANCELLED");
    stub.behave = echo;
    gate.open();
    await a.result(blocker);
  });

  test("fifty posts with one Idempotency-Key at two gateways run once", async () => {
    const headers = { "idempotency-key": "fifty" };
    const posts = Array.from({ length: 50 }, (_, i) => doors()[i % 2]!.post({ input: "fifty" }, headers));
    const answers = await Promise.all(posts);
    for (const answer of answers) assert.equal(answer.status, 200, answer.text);
    assert.equal(new Set(answers.map((answer) => answer.json.task_id)).size, 1);
    for (const answer of answers) assert.deepEqual(answer.json.output, { of: "fifty" });
    assert.equal(runs("fifty"), 1);
  });

  test("the same key with another body is a conflict at the other gateway", async () => {
    const [a, b] = doors();
    const headers = { "idempotency-key": "one body" };
    const first = await a.post({ input: "one body" }, headers);
    assert.equal(first.status, 200, first.text);
    assertError(await b.post({ input: "another body" }, headers), 422, "IDEMPOTENCY_CONFLICT");
    const again = await b.post({ input: "one body" }, headers);
    assert.equal(again.json.task_id, first.json.task_id);
    assert.equal(runs("one body"), 1);
    assert.equal(runs("another body"), 0);
  });

  test("an outcome is reused at the other gateway", async () => {
    const [a, b] = doors();
    const first = await a.post({ input: { cached: [1, 2] } });
    assert.equal(first.json.metadata?.["cached"], false, first.text);
    const second = await b.post({ input: { cached: [1, 2] } });
    assert.equal(second.status, 200, second.text);
    assert.equal(second.json.metadata?.["cached"], true, second.text);
    assert.deepEqual(second.json.output, first.json.output);
    assert.notEqual(second.json.task_id, first.json.task_id);
  });

  test("identical inputs in flight at two gateways run once", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const calls = stub.calls.length;
    const posts = Array.from({ length: 20 }, (_, i) => doors()[i % 2]!.post({ input: "collapsed" }));
    await stub.call(calls + 1);
    gate.open();
    stub.behave = echo;
    for (const answer of await Promise.all(posts)) {
      assert.equal(answer.status, 200, answer.text);
      assert.deepEqual(answer.json.output, { of: "collapsed" });
    }
    assert.equal(runs("collapsed"), 1);
  });

  test("dead letters are listed, replayed and purged from any process", async () => {
    const [a, b] = doors();
    const [batcher] = fleet.batchers;
    stub.behave = (call) => call.reply(500, "{}");
    const ids = [await a.accept({ input: "dead 1" }), await b.accept({ input: "dead 2" })];
    for (const id of ids) assert.equal((await a.result(id)).error, "INFERENCE_FAILED");
    stub.behave = echo;
    for (const part of [a, b, batcher!]) {
      const listed = await part.admin("/internal/dead-letters");
      for (const id of ids) assert.ok(listed.text.includes(id), `${part.role}: ${listed.text}`);
    }
    const shown = await batcher!.admin(`/internal/dead-letters/${ids[0]}`);
    assert.match(shown.text, /"input":"dead 1"/);
    const replayed = await b.admin(`/internal/dead-letters/${ids[0]}/replay`, "POST");
    assert.equal(replayed.status, 202, replayed.text);
    await eventually(async () => (await a.result(ids[0]!)).status === "SUCCESS");
    assert.deepEqual((await b.result(ids[0]!)).output, { of: "dead 1" });
    assert.equal((await batcher!.admin(`/internal/dead-letters/${ids[1]}`, "DELETE")).status, 204);
    for (const part of [a, b, batcher!]) {
      const listed = await part.admin("/internal/dead-letters");
      for (const id of ids) assert.ok(!listed.text.includes(id), `${part.role}: ${listed.text}`);
    }
    assertError(await a.admin(`/internal/dead-letters/${ids[1]}/replay`, "POST"), 404, "NOT_FOUND");
  });
});

describe("bounds that all gateways share", () => {
  test("the rate of a tenant is exact over two gateways", async () => {
    await using redis = await startServer();
    const model = { name: "sim", backend: { kind: "simulated", workers: 1, baseMs: 1 }, timeouts: patient };
    const limits = { perUserPerMinute: 100 };
    await using fleet = await Fleet.start(
      { gateways: 2, batchers: 1 },
      fleetConfig({ url: redis.url }, [model], { limits }),
    );
    const posts = Array.from({ length: 160 }, (_, i) => fleet.gateways[i % 2]!.post({ input: `rate ${i}` }));
    const answers = await Promise.all(posts);
    const allowed = answers.filter(({ status }) => status === 200);
    const refused = answers.filter(({ status }) => status !== 200);
    for (const answer of refused) assertError(answer, 429, "RATE_LIMITED");
    assert.ok(Number(refused[0]!.header("retry-after")) >= 1);
    // The window may turn while the posts are on their way: then both windows are full at most.
    assert.ok(allowed.length >= 100, `${allowed.length} allowed`);
    const windows = new Set(refused.map((answer) => answer.header("ratelimit-policy")));
    assert.equal(allowed.length, 100, `${allowed.length} allowed; policies ${[...windows].join(" ")}`);
  });

  test("maxQueued holds for the tasks of all gateways together", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen();
    const gate = new Gate();
    stub.behave = gate.hold;
    const model = stubModel([stub], { timeouts: patient, maxBatchSize: 1 });
    await using fleet = await Fleet.start(
      { gateways: 2, batchers: 1 },
      fleetConfig({ url: redis.url }, [model], {
        limits: { maxQueued: 48 },
        admission: { mode: "off" },
      }),
    );
    const [a, b] = fleet.gateways;
    await a!.accept({ input: "the one that runs" });
    await stub.call(1);
    const headers = { prefer: "respond-async" };
    const posts = Array.from({ length: 160 }, (_, i) =>
      [a, b][i % 2]!.post({ input: `queued ${i}` }, headers),
    );
    const answers = await Promise.all(posts);
    const ids = answers.filter(({ status }) => status === 202).map(({ json }) => json.task_id!);
    for (const answer of answers.filter(({ status }) => status !== 202))
      assert.match(assertError(answer, 503, "SERVICE_OVERLOADED").message!, /limits\.maxQueued 48/);
    assert.equal(ids.length, 48);
    stub.behave = echo;
    gate.open();
    for (const id of ids) assert.equal((await b!.result(id)).status, "SUCCESS");
  });
});
