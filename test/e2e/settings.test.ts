/** Settings that change what callers see: how long results stay, how long polls wait, when batches leave. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { assertError, eventually, Ferry } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

describe("results", () => {
  test("an outcome is gone after results.ttlMs: 404 as for an unknown id", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])], results: { ttlMs: 5000 } });
    const { task_id: id } = (await ferry.post({ input: "short-lived" })).json;
    assert.equal((await ferry.get(`/v1/result/${id}`)).json.status, "SUCCESS");
    await eventually(async () => (await ferry.get(`/v1/result/${id}`)).status === 404);
    const expired = await ferry.get(`/v1/result/${id}`);
    const unknown = await ferry.get("/v1/result/unknown");
    assertError(expired, 404, "NOT_FOUND");
    const bytes = (text: string): string => text.replace(/"request_id":"[^"]+"/, "");
    assert.equal(bytes(expired.text), bytes(unknown.text));
  });

  test("evictAfterRead forgets an outcome once it was read", async () => {
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub])], results: { evictAfterRead: true } });
    const id = await ferry.accept({ input: "read once" });
    assert.equal((await ferry.result(id)).status, "SUCCESS");
    await eventually(async () => (await ferry.get(`/v1/result/${id}`)).status === 404);
  });
});

describe("waiting", () => {
  test("odd waits are never an internal error", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [stubModel([stub])] });
    const id = await ferry.accept({ input: "held" });
    for (const wait of ["", "abc", "-1", "NaN", "0x10", "1&wait=2", "%00", "0.1"]) {
      const answer = await ferry.get(`/v1/result/${id}?wait=${wait}`);
      assert.ok([200, 400].includes(answer.status), `?wait=${wait}: ${answer.text}`);
      if (answer.status === 400) assertError(answer, 400, "INVALID_REQUEST");
    }
    for (const prefer of [
      "wait",
      "wait=",
      "wait=abc",
      "wait=-1",
      "wait=1e99, wait=0",
      ",,;=",
      "x".repeat(4000),
    ]) {
      const answer = await ferry.get(`/v1/result/${id}`, { prefer });
      assert.equal(answer.status, 200, `Prefer: ${prefer.slice(0, 20)}: ${answer.text}`);
    }
    gate.open();
    assert.equal((await ferry.result(id)).status, "SUCCESS");
  });
});

describe("cache and collapse", () => {
  test("off: every request is a run of its own", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    const model = stubModel([stub], { cache: { scope: "off" }, collapse: false });
    await using ferry = await Ferry.start({ models: [model] });
    const first = ferry.post({ input: "same" });
    await stub.call(1);
    const others = [ferry.post({ input: "same" }), ferry.post({ input: "same" })];
    await ferry.healthy((health) => health.queue_depth === 2);
    gate.open();
    const answers = await Promise.all([first, ...others]);
    answers.push(await ferry.post({ input: "same" }));
    for (const answer of answers) assert.deepEqual(answer.json.output, { of: "same" });
    assert.ok(answers.every((answer) => answer.json.metadata!["cached"] === false));
    assert.equal(new Set(answers.map((answer) => answer.json.task_id)).size, 4);
    assert.equal(stub.inputs.length, 4);
  });
});

describe("when a batch leaves, under any policy", () => {
  const MAX_WAIT_MS = 300;
  /** So long that batches that are full and wait all the same are told from a busy machine. */
  const LONG_WAIT_MS = 4000;
  const policies = ["adaptive", "latency", "eco", "fixed"] as const;
  const stubs = new Map<string, StubWorker>();
  let ferry: Ferry;

  before(async () => {
    const models = [];
    for (const policy of policies) {
      const stub = await StubWorker.listen();
      stubs.set(policy, stub);
      const other = await StubWorker.listen();
      stubs.set(`${policy}, long`, other);
      const rules = { policy, maxBatchSize: 8 };
      models.push(stubModel([stub], { name: policy, maxWaitMs: MAX_WAIT_MS, ...rules }));
      models.push(stubModel([other], { name: `${policy}-long`, maxWaitMs: LONG_WAIT_MS, ...rules }));
    }
    ferry = await Ferry.start({ models });
  });
  after(async () => {
    await ferry?.[Symbol.asyncDispose]();
    for (const stub of stubs.values()) await stub[Symbol.asyncDispose]();
  });

  for (const policy of policies) {
    test(`${policy}: no request waits longer than maxWaitMs while a worker is free`, async () => {
      const waits: number[] = [];
      for (let i = 0; i < 6; i++) {
        const answer = await ferry.post({ input: `alone ${i}`, model: policy });
        waits.push(Number(answer.header("x-ferry-queue-ms")));
      }
      // The machine may stand still now and then, and not each time; test/sim has the rule to the millisecond.
      const queued = Math.min(...waits);
      assert.ok(queued <= MAX_WAIT_MS + 60, `it waited ${queued} ms`);
      if (policy === "fixed") assert.ok(queued >= MAX_WAIT_MS - 20, `fixed waits its time: ${queued} ms`);
      if (policy === "latency") assert.ok(queued < 60, `latency does not wait: ${queued} ms`);
    });

    test(`${policy}: a full batch does not wait, and none exceeds maxBatchSize`, async () => {
      const stub = stubs.get(`${policy}, long`)!;
      const gate = new Gate();
      stub.behave = gate.hold;
      stub.calls.length = 0;
      const inputs = Array.from({ length: 41 }, (_, i) => `many ${i}`);
      const answers = inputs.map((input) => ferry.post({ input, model: `${policy}-long` }));
      await stub.call(1);
      await ferry.healthy((health) => health.queue_depth + health.running === 41);
      const start = performance.now();
      gate.open();
      (await Promise.all(answers)).forEach((answer, i) =>
        assert.deepEqual(answer.json.output, { of: inputs[i] }, answer.text),
      );
      // Five batches are still to come; the last is not full.
      assert.ok(performance.now() - start < 4 * LONG_WAIT_MS);
      for (const call of stub.calls) assert.ok(call.inputs.length <= 8, `${call.inputs.length} in a batch`);
      assert.equal(stub.inputs.length, 41);
    });
  }
});
