/** The public API in front of one worker that the tests hold and release: SPEC section 2. */
import assert from "node:assert/strict";
import { after, before, beforeEach, describe, test } from "node:test";
import { isDeepStrictEqual } from "node:util";
import { Answer, assertError, eventually, Ferry, type Body } from "./harness.ts";
import { echo, Gate, stubModel, StubWorker } from "./stub-worker.ts";

let stub: StubWorker;
let ferry: Ferry;
let count = 0;

/** An input that no other test has sent. */
const fresh = (): string => `input ${++count}`;

before(async () => {
  stub = await StubWorker.listen();
  ferry = await Ferry.start({ models: [stubModel([stub])] });
});
after(async () => {
  await ferry?.[Symbol.asyncDispose]();
  await stub?.[Symbol.asyncDispose]();
});
beforeEach(() => {
  stub.behave = echo;
  stub.calls.length = 0;
});

describe("POST /v1/inference", () => {
  test("200: the documented fields and headers, and nothing else", async () => {
    const input = fresh();
    const answer = await ferry.post({ input });
    assert.equal(answer.status, 200);
    assert.match(answer.header("content-type"), /^application\/json\b/);
    const body = answer.json;
    assert.deepEqual(Object.keys(body).sort(), ["metadata", "output", "request_id", "status", "task_id"]);
    assert.equal(body.status, "SUCCESS");
    assert.deepEqual(body.output, { of: input });
    assert.ok(body.task_id!.length >= 16);
    assert.equal(body.request_id, body.task_id);
    assert.equal(answer.header("x-ferry-batch-size"), "1");
    assert.ok(answer.header("x-ferry-batch-id").length > 0);
    assert.ok(Number(answer.header("x-ferry-queue-ms")) >= 0);
  });

  test("metadata says model, times, batch size and whether it was cached", async () => {
    const { metadata = {} } = (await ferry.post({ input: fresh(), model: "stub", client_id: "c-1" })).json;
    assert.equal(metadata["model"], "stub");
    assert.equal(metadata["batch_size"], 1);
    assert.equal(metadata["cached"], false);
    assert.ok((metadata["latency_ms"] as number) >= (metadata["queue_ms"] as number));
    assert.ok((metadata["queue_ms"] as number) >= 0);
  });

  test("x-ferry-explain adds, in words, why the batch left", async () => {
    const explained = (await ferry.post({ input: fresh() }, { "x-ferry-explain": "1" })).json;
    const plain = (await ferry.post({ input: fresh() })).json;
    const words = (body: Body) =>
      Object.values(body.metadata!).filter(
        (value) => typeof value === "string" && value.split(" ").length > 3,
      );
    assert.equal(words(explained).length, 1);
    assert.equal(words(plain).length, 0);
  });

  test("a repeated input is answered from the cache, another one is not", async () => {
    const input = fresh();
    const first = await ferry.post({ input });
    const second = await ferry.post({ input });
    assert.equal(first.json.metadata!["cached"], false);
    assert.equal(second.json.metadata!["cached"], true);
    assert.deepEqual(second.json.output, { of: input });
    assert.equal(second.json.request_id, second.json.task_id);
    const found = await ferry.get(`/v1/result/${second.json.task_id}`);
    assert.equal(found.json.metadata?.["cached"], true);
    assert.equal(found.json.status, "SUCCESS", "the id of a cached answer can be polled too");
    assert.equal((await ferry.post({ input: fresh() })).json.metadata!["cached"], false);
    assert.equal(stub.calls.length, 2);
  });

  test("identical inputs in flight run once and every caller gets the answer", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const blocker = ferry.post({ input: fresh() });
    await stub.call(1);
    const input = fresh();
    const callers = Array.from({ length: 20 }, () => ferry.post({ input }));
    await ferry.healthy((health) => health.queue_depth === 1);
    gate.open();
    for (const answer of await Promise.all(callers)) assert.deepEqual(answer.json.output, { of: input });
    await blocker;
    assert.equal(stub.inputs.filter((seen) => seen === input).length, 1);
  });

  test("a batch takes every task that is queued, up to maxBatchSize", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const blocker = ferry.post({ input: fresh() });
    await stub.call(1);
    const inputs = Array.from({ length: 100 }, fresh);
    const answers = inputs.map((input) => ferry.post({ input }));
    await ferry.healthy((health) => health.queue_depth === 100);
    gate.open();
    const done = await Promise.all(answers);
    done.forEach((answer, i) => assert.deepEqual(answer.json.output, { of: inputs[i] }));
    await blocker;
    assert.deepEqual(
      stub.calls.map((call) => call.inputs.length),
      [1, 64, 36],
    );
    assert.equal(done[0]!.header("x-ferry-batch-size"), "64");
    assert.equal(stub.mostAtOnce, 1, "one batch at a time per worker");
  });

  test("parameters reach the worker and are never mixed in one batch", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const blocker = ferry.post({ input: fresh() });
    await stub.call(1);
    const input = fresh();
    const kinds = [undefined, {}, { t: 0.5 }, { t: 0.7 }, { t: 0.5, k: [1, "two"] }];
    const answers = kinds.flatMap((parameters) =>
      Array.from({ length: 5 }, (_, i) => ferry.post({ input: `${input} ${i}`, parameters })),
    );
    await ferry.healthy((health) => health.queue_depth === 20); // {} is no parameters: joined.
    gate.open();
    for (const answer of await Promise.all(answers)) assert.equal(answer.status, 200, answer.text);
    await blocker;
    const seen = stub.calls.slice(1).map((call) => ({ parameters: call.parameters, n: call.inputs.length }));
    assert.equal(seen.length, 4, JSON.stringify(seen));
    for (const wanted of [undefined, ...kinds.slice(2)]) {
      const call = seen.find((call) => isDeepStrictEqual(call.parameters, wanted));
      assert.equal(call?.n, 5, `parameters ${JSON.stringify(wanted)} in ${JSON.stringify(seen)}`);
    }
  });

  test("parameters belong to the cache key", async () => {
    const input = fresh();
    const cached = async (parameters: unknown) =>
      (await ferry.post({ input, parameters })).json.metadata!["cached"];
    assert.deepEqual(
      [await cached({ t: 1 }), await cached({ t: 2 }), await cached({ t: 1 }), await cached({})],
      [false, false, true, false],
    );
  });
});

describe("how long a caller waits", () => {
  test("Prefer: respond-async is 202 with Location, and the result is there to poll", async () => {
    const input = fresh();
    const answer = await ferry.post({ input }, { prefer: "respond-async" });
    assertAccepted(answer);
    assert.equal(answer.header("preference-applied"), "respond-async");
    const result = await ferry.get(`${answer.header("location")}?wait=5`);
    assert.equal(result.status, 200);
    assert.equal(result.json.status, "SUCCESS");
    assert.equal(result.json.task_id, answer.json.task_id);
    assert.deepEqual(result.json.output, { of: input });
    assert.equal(result.json.metadata!["model"], "stub");
  });

  test("Prefer: wait=1 is 200 when the worker is faster, 202 after 1 s when it is not", async () => {
    const quick = await ferry.post({ input: fresh() }, { prefer: "wait=1" });
    assert.equal(quick.status, 200);
    const gate = new Gate();
    stub.behave = gate.hold;
    const start = performance.now();
    const slow = await ferry.post({ input: fresh() }, { prefer: "wait=1" });
    const waited = performance.now() - start;
    assertAccepted(slow);
    assert.ok(waited >= 980 && waited < 20_000, `${waited} ms`);
    gate.open();
    assert.equal((await ferry.result(slow.json.task_id!)).status, "SUCCESS");
  });

  test("Prefer: wait=0 and a preference among others", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    assertAccepted(await ferry.post({ input: fresh() }, { prefer: "wait=0" }));
    assertAccepted(await ferry.post({ input: fresh() }, { prefer: "handling=lenient, Respond-Async; x=1" }));
    gate.open();
  });

  test("the id of a held request can be polled meanwhile", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const id = await ferry.accept({ input: fresh() });
    await stub.call(1);
    const pending = await ferry.get(`/v1/result/${id}`);
    assert.equal(pending.status, 200);
    assert.deepEqual(pending.json, { task_id: id, status: "PENDING" });
    gate.open();
    assert.equal((await ferry.result(id)).status, "SUCCESS");
  });
});

describe("GET /v1/result", () => {
  test("?wait= and Prefer: wait are answered when the task ends, not when the wait does", async () => {
    for (const ask of ["query", "header"]) {
      const gate = new Gate();
      stub.behave = gate.hold;
      const id = await ferry.accept({ input: fresh() });
      const start = performance.now();
      const path = `/v1/result/${id}`;
      const poll = ask === "query" ? ferry.get(`${path}?wait=25`) : ferry.get(path, { prefer: "wait=25" });
      await ferry.healthy((health) => health.running === 1);
      gate.open();
      assert.equal((await poll).json.status, "SUCCESS");
      assert.ok(performance.now() - start < 20_000, ask);
    }
  });

  test("?wait=1 gives up after 1 s with PENDING", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const id = await ferry.accept({ input: fresh() });
    const start = performance.now();
    const answer = await ferry.get(`/v1/result/${id}?wait=1`);
    const waited = performance.now() - start;
    assert.deepEqual(answer.json, { task_id: id, status: "PENDING" });
    assert.ok(waited >= 980 && waited < 20_000, `${waited} ms`);
    gate.open();
  });

  test("FAILED carries the fields of an error", async () => {
    stub.behave = (call) => call.reply(400, '{"error":"no"}');
    const id = await ferry.accept({ input: fresh() });
    const result = await ferry.result(id);
    assert.equal(result.status, "FAILED");
    assert.equal(result.error, "INPUT_REJECTED");
    assert.equal(result.task_id, id);
    assert.ok(result.message!.length > 0);
    assert.equal(result.output, undefined);
  });

  test("404 is the same bytes for every id that is not there", async () => {
    const known = await ferry.accept({ input: fresh() });
    const other = known.slice(0, -1) + (known.endsWith("0") ? "1" : "0");
    const ids = [
      other,
      "x",
      "..%2f..%2fetc%2fpasswd",
      "%00",
      "%ff",
      "a".repeat(3000),
      "__proto__",
      known + "x",
    ];
    const seen = new Set<string>();
    for (const id of [...ids, `${other}?wait=20`]) {
      const answer = await ferry.get(`/v1/result/${id}`);
      assertError(answer, 404, "NOT_FOUND");
      const headers = Object.entries(answer.headers).filter(([name]) => name !== "date");
      seen.add(JSON.stringify(headers) + answer.text.replace(answer.json.request_id!, ""));
    }
    assert.equal(seen.size, 1, [...seen].join("\n"));
    assertError(await ferry.delete(`/v1/result/${other}`), 404, "NOT_FOUND");
    assert.equal((await ferry.result(known)).status, "SUCCESS");
  });
});

describe("DELETE /v1/result", () => {
  test("queued is cancelled, running is 409, finished is forgotten", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const running = await ferry.accept({ input: fresh() });
    await stub.call(1);
    const input = fresh();
    const queued = await ferry.accept({ input });
    assertError(await ferry.delete(`/v1/result/${running}`), 409, "NOT_CANCELLABLE");
    assert.equal((await ferry.delete(`/v1/result/${queued}`)).status, 200);
    const cancelled = await ferry.result(queued);
    assert.equal(cancelled.status, "FAILED");
    assert.equal(cancelled.error, "CANCELLED");
    gate.open();
    assert.equal((await ferry.result(running)).status, "SUCCESS");
    const forgotten = await ferry.delete(`/v1/result/${running}`);
    assert.equal(forgotten.status, 204);
    assert.equal(forgotten.text, "");
    assertError(await ferry.get(`/v1/result/${running}`), 404, "NOT_FOUND");
    assertError(await ferry.delete(`/v1/result/${running}`), 404, "NOT_FOUND");
    await ferry.infer(fresh());
    assert.ok(!stub.inputs.includes(input), "a cancelled task never reaches a worker");
  });

  test("a long poll hears of the cancellation at once", async () => {
    const gate = new Gate();
    stub.behave = gate.hold;
    const blocker = ferry.post({ input: fresh() });
    await stub.call(1);
    const queued = await ferry.accept({ input: fresh() });
    const poll = ferry.get(`/v1/result/${queued}?wait=20`);
    const start = performance.now();
    assert.equal((await ferry.delete(`/v1/result/${queued}`)).status, 200);
    assert.equal((await poll).json.error, "CANCELLED");
    assert.ok(performance.now() - start < 15_000);
    gate.open();
    await blocker;
  });
});

describe("the rest of the public listener", () => {
  test("/api/inference is a string in, its output out", async () => {
    const input = fresh();
    const answer = await ferry.post({ input }, {}, "/api/inference");
    assert.equal(answer.status, 200, answer.text);
    assert.deepEqual(Object.keys(answer.json).sort(), ["latency_ms", "output", "request_id"]);
    assert.deepEqual(answer.json.output, { of: input });
    assert.ok(answer.json.latency_ms! > 0);
    assertError(await ferry.post({ input: 5 }, {}, "/api/inference"), 400, "INVALID_REQUEST");
    assertError(await ferry.post({}, {}, "/api/inference"), 400, "INVALID_REQUEST");
  });

  test("/healthz and /readyz on both listeners", async () => {
    for (const path of ["/healthz", "/readyz"]) {
      assert.equal((await ferry.get(path)).status, 200);
      assert.equal((await ferry.admin(path)).status, 200);
    }
  });

  test("nothing of the admin listener is public", async () => {
    const paths = [
      "/metrics",
      "/internal/health",
      "/internal/workers",
      "/internal/dead-letters",
      "/internal/live",
    ];
    for (const path of [...paths, "/nothing", "/v1/inference/", "//v1/inference"]) {
      assertError(await ferry.get(path), 404, "NOT_FOUND");
    }
  });

  test("/internal/workers says what batches of each size take, and what that follows", async () => {
    interface Known {
      readonly name: string;
      readonly max_batch_size: number;
      readonly curve: readonly { readonly size: number; readonly ms: number; readonly batches: number }[];
      readonly knee: object | null;
      readonly hint: string | null;
      readonly cost: Readonly<Record<string, unknown>>;
    }
    const models = async (): Promise<Known[]> =>
      (JSON.parse((await ferry.admin("/internal/workers")).text) as { models: Known[] }).models;
    // Of a size that is known three batches came back.
    await eventually(async () => {
      await ferry.post({ input: fresh() });
      return (await models())[0]!.curve.some(({ size }) => size === 1);
    });
    const [known] = await models();
    assert.deepEqual(Object.keys(known!), ["name", "max_batch_size", "curve", "knee", "hint", "cost"]);
    for (const { size, ms, batches } of known!.curve) {
      assert.ok(size >= 1 && size <= known!.max_batch_size && ms > 0 && batches >= 3);
    }
    const { kind, grouped, padding_ratio, ...times } = known!.cost;
    assert.deepEqual(Object.keys(times), ["base_ms", "per_row_ms", "per_token_ms"]);
    for (const ms of Object.values(times)) assert.ok(Number(ms) >= 0);
    assert.equal(grouped, kind === "padded");
    assert.ok(Number(padding_ratio) >= 1);
  });

  test("/internal/health has the documented fields", async () => {
    const health = await ferry.health();
    assert.equal(health.status, "ok");
    assert.ok(health.gpu_utilization >= 0 && health.gpu_utilization <= 1);
    assert.equal(health.queue_depth, 0);
    assert.ok(health.requests_per_second >= 0);
    await eventually(async () => (await ferry.health()).totals.lost === 0);
  });
});

function assertAccepted(answer: Answer): void {
  assert.equal(answer.status, 202, answer.text);
  const { task_id, ...rest } = answer.json;
  assert.deepEqual(rest, { request_id: task_id, status: "PENDING" });
  assert.equal(answer.header("location"), `/v1/result/${task_id}`);
  assert.match(answer.header("preference-applied"), /respond-async|wait=/);
}
