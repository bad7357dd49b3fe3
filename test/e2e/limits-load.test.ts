/** Bounds on connections, queued tasks and rates. Refusals are quick and say when to return. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Answer, assertError, Ferry, SOON_MS } from "./harness.ts";
import { RawClient } from "./raw-client.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const PING = "GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n";

/** Whole seconds of at least one, in both ways of saying it. */
function assertRetryAfter(answer: Answer, body: { readonly retry_after_ms?: number }): void {
  assert.match(answer.header("retry-after"), /^[1-9]\d*$/);
  assert.ok(body.retry_after_ms! > 0, answer.text);
  assert.ok(Number(answer.header("retry-after")) * 1000 >= body.retry_after_ms! - 1000);
}

test("beyond maxConnections: 503 with Retry-After; a place that is left is free again", async () => {
  const backend = { kind: "simulated", baseMs: 1 };
  await using ferry = await Ferry.start({ models: [{ name: "m", backend }], limits: { maxConnections: 5 } });
  const clients: RawClient[] = [];
  try {
    for (let i = 0; i < 5; i++) {
      const client = await RawClient.connect(ferry.url);
      clients.push(client);
      client.send(PING);
      assert.equal((await client.answer()).status, 200);
    }
    await using extra = await RawClient.connect(ferry.url);
    extra.send(PING);
    const refused = await extra.answer();
    assertError(refused, 503, "SERVICE_OVERLOADED");
    assert.match(refused.headers["retry-after"] ?? "", /^[1-9]\d*$/);
    await extra.closed();
    clients[0]!.send(PING);
    assert.equal((await clients[0]!.answer()).status, 200, "those inside are served");
    await clients.pop()![Symbol.asyncDispose]();
    assert.equal((await ferry.admin("/internal/health")).status, 200, "operators have their own door");
    await using next = await connectInside(ferry);
    assert.ok(next);
  } finally {
    await Promise.all(clients.map((client) => client[Symbol.asyncDispose]()));
  }
});

/** Connects until it is let in: a place is free once the server has seen the other end go. */
async function connectInside(ferry: Ferry): Promise<RawClient> {
  const deadline = performance.now() + SOON_MS;
  for (;;) {
    const client = await RawClient.connect(ferry.url);
    client.send(PING);
    const { status } = await client.answer();
    if (status === 200) return client;
    await client[Symbol.asyncDispose]();
    assert.ok(performance.now() < deadline, "the place was never free again");
  }
}

describe("queue full", () => {
  const limits = { maxQueued: 6 };
  const model = { maxBatchSize: 1, maxWaitMs: 0 };

  test("503 with Retry-After at once; those inside are answered, and then there is room", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [stubModel([stub], model)], limits });
    const running = ferry.accept({ input: "running" });
    await stub.call(1);
    const ids = [await running];
    for (let i = 0; i < 6; i++) ids.push(await ferry.accept({ input: `queued ${i}` }));
    for (const headers of [{}, { prefer: "respond-async" }, { prefer: "wait=5" }]) {
      const start = performance.now();
      const refused = await ferry.post({ input: "one too many" }, headers);
      assert.ok(performance.now() - start < 15_000, "refused at the door, not in the queue");
      assertRetryAfter(refused, assertError(refused, 503, "SERVICE_OVERLOADED"));
    }
    assert.equal(
      (await ferry.post({ input: "queued 3" }, { prefer: "wait=0" })).status,
      202,
      "a join needs no room",
    );
    gate.open();
    for (const id of ids) assert.equal((await ferry.result(id)).status, "SUCCESS");
    assert.deepEqual(await ferry.infer("room again"), { of: "room again" });
    assert.ok(!stub.inputs.includes("one too many"), "what was refused never runs");
    assert.equal((await ferry.health()).totals.shed >= 3, true);
  });
});

describe("rates", () => {
  const models = [{ name: "m", backend: { kind: "simulated", baseMs: 0 } }];

  /** Posts until the first refusal; it and how many went through. */
  async function untilRefused(ferry: Ferry, most: number): Promise<{ passed: Answer[]; refused: Answer }> {
    const passed: Answer[] = [];
    for (let i = 0; i < most; i++) {
      const answer = await ferry.post({ input: `r ${i}` });
      if (answer.status !== 200) return { passed, refused: answer };
      passed.push(answer);
    }
    assert.fail(`none of ${most} requests was refused`);
  }

  function assertRateLimited(passed: readonly Answer[], refused: Answer, limit: number): void {
    assertRetryAfter(refused, assertError(refused, 429, "RATE_LIMITED"));
    assert.ok(passed.length >= 1 && passed.length <= limit + 2, `${passed.length} passed`);
    for (const answer of [passed[0]!, refused]) {
      const names = Object.keys(answer.headers).filter((name) => name.startsWith("ratelimit-"));
      assert.ok(names.length > 0, `no RateLimit-* headers on ${answer.status}`);
    }
  }

  test("per tier: 429 with Retry-After and RateLimit headers", async () => {
    const tiers = { free: { ratePerMinute: 10 } };
    await using ferry = await Ferry.start({ models, tiers });
    const { passed, refused } = await untilRefused(ferry, 40);
    assertRateLimited(passed, refused, 10);
    assert.equal((await ferry.get("/healthz")).status, 200, "health is no request");
  });

  test("per user: 429 with Retry-After and RateLimit headers", async () => {
    await using ferry = await Ferry.start({ models, limits: { perUserPerMinute: 10 } });
    const { passed, refused } = await untilRefused(ferry, 40);
    assertRateLimited(passed, refused, 10);
    const again = await ferry.post({ input: "r 0" }, { "x-forwarded-for": "10.0.0.1" });
    assertError(again, 429, "RATE_LIMITED");
  });

  test("/api/inference says what is left, too", async () => {
    await using ferry = await Ferry.start({ models, limits: { perUserPerMinute: 10 } });
    const answer = await ferry.post({ input: "a" }, {}, "/api/inference");
    assert.equal(answer.header("ratelimit-remaining"), "9");
  });

  test("without a rate in the config there is none", async () => {
    // A machine that is busy may well refuse some for lack of capacity, which is another matter.
    await using ferry = await Ferry.start({ models, admission: { mode: "off" } });
    const answers = await Promise.all(
      Array.from({ length: 1500 }, (_, i) => ferry.post({ input: `free ${i}` })),
    );
    assert.ok(answers.every(({ status }) => status !== 429));
  });
});
