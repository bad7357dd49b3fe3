/** Traces as a collector receives them: the tree, the links both ways, and what happens while it is away. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { eventually, Ferry, freePort } from "./harness.ts";
import { KIND, OtlpCollector, type SeenSpan } from "./otlp-collector.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
const TRACE = CALLER.slice(3, 35);
const CALLERS_SPAN = CALLER.slice(36, 52);
const UNSAMPLED = `${CALLER.slice(0, -2)}00`;
const REQUEST = "POST /v1/inference";

const telemetry = (collector: OtlpCollector, sample = 0) => ({
  otlpUrl: collector.url,
  sample,
});
const fresh = { cache: { scope: "off" }, collapse: false };

function place({ traceId, spanId }: { traceId: string; spanId: string }): string {
  return `${traceId}-${spanId}`;
}

function assertWithin(inner: SeenSpan, outer: SeenSpan): void {
  const slack = 2;
  assert.ok(inner.startMs >= outer.startMs - slack && inner.endMs <= outer.endMs + slack, inner.name);
}

describe("one process", () => {
  test("request → queue, batch → call, links both ways, and the worker knows its call", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({
      models: [stubModel([stub], fresh)],
      telemetry: telemetry(collector),
      zone: "z1",
    });
    const headers = { traceparent: CALLER, tracestate: "vendor=abc,other=1" };
    const answer = await ferry.post({ input: "CANARY", client_id: "SECRET" }, headers);
    assert.equal(answer.status, 200, answer.text);
    const [request] = await collector.seen(REQUEST);
    const [queue] = await collector.seen("queue stub");
    const [batch] = await collector.seen("process stub");
    const [call] = await collector.seen("POST");
    assert.ok(request && queue && batch && call);
    const id = answer.json.task_id!;
    const batchId = answer.header("x-ferry-batch-id");

    assert.partialDeepStrictEqual(request, {
      traceId: TRACE,
      parentId: CALLERS_SPAN,
      state: "vendor=abc,other=1",
      kind: KIND.server,
      status: 0,
      scope: "ferry",
      attributes: {
        "http.request.method": "POST",
        "http.route": "/v1/inference",
        "http.response.status_code": 200,
        "url.path": "/v1/inference",
        "url.scheme": "http",
        "server.address": "127.0.0.1",
        "ferry.tier": "enterprise",
        "ferry.task.id": id,
        "ferry.batch.id": batchId,
        "ferry.batch.trace_id": batch.traceId,
      },
      resource: { "service.name": "ferry", "cloud.availability_zone": "z1" },
    });
    assert.match(request.schemaUrl, /^https:\/\/opentelemetry\.io\/schemas\//);
    assert.deepEqual(request.links.map(place), [place(batch)]);

    assert.deepEqual([queue.traceId, queue.parentId, queue.kind], [TRACE, request.spanId, KIND.internal]);
    assert.partialDeepStrictEqual(queue.attributes, {
      "messaging.system": "ferry",
      "messaging.destination.name": "stub",
      "messaging.message.id": id,
      "ferry.attempt": 1,
    });
    assertWithin(queue, request);

    assert.equal(batch.traceId, batchId.replaceAll("-", ""));
    assert.deepEqual([batch.parentId, batch.kind, batch.status], ["", KIND.consumer, 0]);
    assert.deepEqual(batch.links.map(place), [place(queue)]);
    assert.deepEqual(batch.links[0]!.attributes, { "messaging.message.id": id });
    assert.partialDeepStrictEqual(batch.attributes, {
      "messaging.operation.name": "process",
      "messaging.operation.type": "process",
      "messaging.batch.message_count": 1,
      "ferry.batch.reason": "idle",
      "ferry.batch.fill": 1 / 64,
      "ferry.attempt": 1,
    });

    assert.deepEqual([call.traceId, call.parentId, call.kind], [batch.traceId, batch.spanId, KIND.client]);
    assert.partialDeepStrictEqual(call.attributes, {
      "http.request.method": "POST",
      "server.address": "127.0.0.1",
      "server.port": Number(new URL(stub.url).port),
      "gen_ai.request.model": "stub",
    });
    assertWithin(call, batch);
    assert.equal(stub.calls[0]!.headers["traceparent"], `00-${call.traceId}-${call.spanId}-01`);
    assert.doesNotMatch(JSON.stringify(collector.spans), /CANARY|SECRET|anonymous/);
  });

  test("joined and cached requests link to the batch whose work answered them", async () => {
    await using collector = await OtlpCollector.listen();
    const gate = Promise.withResolvers<void>();
    await using stub = await StubWorker.listen(async (call) => {
      await gate.promise;
      call.echo();
    });
    await using ferry = await Ferry.start({
      models: [stubModel([stub])],
      telemetry: telemetry(collector, 1),
    });
    const first = ferry.post({ input: "same" });
    await stub.call(1);
    const second = ferry.post({ input: "same" });
    await ferry.healthy((health) => (health.totals as Record<string, number>)["joined"] === 1);
    gate.resolve();
    assert.deepEqual([(await first).status, (await second).status], [200, 200]);
    assert.equal((await ferry.post({ input: "same" })).json.metadata!["cached"], true);
    const requests = await collector.seen(REQUEST, 3);
    const [batch] = await collector.seen("process stub");
    for (const { links } of requests) assert.deepEqual(links.map(place), [place(batch!)]);
    assert.equal(batch!.links.length, 1);
    const flags = requests.map(({ attributes }) => [
      attributes["ferry.collapsed"] ?? false,
      attributes["ferry.cached"] ?? false,
    ]);
    assert.deepEqual(flags.map(String).sort(), ["false,false", "false,true", "true,false"]);
    assert.equal(new Set(requests.map(({ traceId }) => traceId)).size, 3);
  });

  test("a retry waits and rides a second time", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen((call) => {
      if (stub.calls.length === 1) call.reply(500, "no");
      else call.echo();
    });
    await using ferry = await Ferry.start({
      models: [stubModel([stub], { ...fresh, retry: { max: 3, baseMs: 1, maxMs: 5 } })],
      telemetry: telemetry(collector, 1),
    });
    assert.equal((await ferry.post({ input: 1 })).status, 200);
    const [request] = await collector.seen(REQUEST);
    const queues = await collector.seen("queue stub", 2);
    const batches = await collector.seen("process stub", 2);
    const calls = await collector.seen("POST", 2);
    assert.deepEqual(
      queues.map(({ parentId, attributes }) => [parentId, attributes["ferry.attempt"]]),
      [1, 2].map((attempt) => [request!.spanId, attempt]),
    );
    assert.notEqual(queues[0]!.spanId, queues[1]!.spanId);
    assert.ok(queues[1]!.startMs >= calls[0]!.endMs - 2, "the second wait begins where the first try ended");
    for (const [at, batch] of batches.entries())
      assert.deepEqual(batch.links.map(place), [place(queues[at]!)]);
    assert.deepEqual(
      batches.map(({ status, attributes }) => [status, attributes["error.type"]]),
      [
        [2, "failed"],
        [0, undefined],
      ],
    );
    assert.deepEqual(request!.links.map(place), [place(batches[1]!)]);
  });

  test("4xx is the caller's mistake, 5xx is ours", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen((call) => call.reply(500, "no"));
    await using ferry = await Ferry.start({
      models: [stubModel([stub], { ...fresh, retry: { max: 0, baseMs: 1, maxMs: 1 } })],
      telemetry: telemetry(collector, 1),
    });
    assert.equal((await ferry.post({ input: 1, extra: 2 })).status, 400);
    assert.equal((await ferry.post({ input: 1 })).status, 502);
    assert.equal((await ferry.get("/nothing/CANARY")).status, 404);
    const spans = await collector.seen(REQUEST, 2);
    assert.deepEqual(
      spans.map(({ status, attributes }) => [status, attributes["error.type"]]),
      [
        [0, "INVALID_REQUEST"],
        [2, "INFERENCE_FAILED"],
      ],
    );
    const [nowhere] = await collector.seen("GET");
    assert.deepEqual([nowhere!.status, nowhere!.attributes["http.response.status_code"]], [0, 404]);
    assert.doesNotMatch(JSON.stringify(nowhere), /CANARY/);
  });

  test("a batch of more than 128 links to every one of its tasks", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen();
    const tasks = 300;
    const timeouts = { queueMs: 20_000, workerMs: 10_000, totalMs: 30_000 };
    await using ferry = await Ferry.start({
      models: [
        stubModel([stub], { ...fresh, maxBatchSize: tasks, maxWaitMs: 5000, policy: "fixed", timeouts }),
      ],
      telemetry: telemetry(collector, 1),
      limits: { maxConnections: 1000 },
    });
    await Promise.all(Array.from({ length: tasks }, (_, input) => ferry.post({ input })));
    const queues = await collector.seen("queue stub", tasks);
    await collector.seen(REQUEST, tasks);
    const links = (): number =>
      collector.named("process stub").reduce((sum, each) => sum + each.links.length, 0);
    await eventually(() => links() >= tasks);
    const batches = collector.named("process stub");
    const linked = batches.flatMap(({ links }) => links.map(place));
    assert.deepEqual(linked.sort(), queues.map(place).sort());
    assert.ok(Math.max(...batches.map(({ links }) => links.length)) > 128);
    assert.ok(batches.every(({ droppedLinks }) => droppedLinks === 0));
  });
});

describe("who is traced", () => {
  test("sample 0: whom the caller traces, and nobody else", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({
      models: [stubModel([stub], fresh)],
      telemetry: telemetry(collector),
    });
    const untraced = [{}, { traceparent: UNSAMPLED }, { traceparent: CALLER.toUpperCase() }];
    for (const headers of untraced) assert.equal((await ferry.post({ input: 1 }, headers)).status, 200);
    assert.equal((await ferry.post({ input: 2 }, { traceparent: CALLER })).status, 200);
    await ferry.stop();
    assert.equal(collector.named(REQUEST).length, 1, "what waited left with the process");
    assert.equal(collector.named("process stub").length, 1);
    assert.deepEqual(
      stub.calls.map(({ headers }) => headers["traceparent"] !== undefined),
      [false, false, false, true],
    );
  });

  test("sample 1: everybody but whom the caller does not trace", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({
      models: [stubModel([stub], fresh)],
      telemetry: telemetry(collector, 1),
    });
    for (const headers of [{}, { traceparent: UNSAMPLED }, { traceparent: "garbage" }])
      assert.equal((await ferry.post({ input: 1 }, headers)).status, 200);
    await ferry.stop();
    const spans = collector.named(REQUEST);
    assert.deepEqual(
      spans.map(({ parentId }) => parentId),
      ["", ""],
    );
  });
});

test("OTEL_* variables go over the file", async () => {
  await using collector = await OtlpCollector.listen();
  await using stub = await StubWorker.listen();
  const variables = {
    OTEL_EXPORTER_OTLP_ENDPOINT: collector.url,
    OTEL_EXPORTER_OTLP_HEADERS: "x-collector-key=abc",
    OTEL_EXPORTER_OTLP_PROTOCOL: "grpc",
    OTEL_RESOURCE_ATTRIBUTES: "deployment.environment.name=test",
    OTEL_SERVICE_NAME: "gpu-front",
    OTEL_TRACES_SAMPLER: "always_on",
  };
  Object.assign(process.env, variables);
  try {
    const otlpUrl = `http://127.0.0.1:${await freePort()}`;
    const models = [stubModel([stub], fresh)];
    await using ferry = await Ferry.start({ models, telemetry: { otlpUrl, sample: 0 } });
    assert.equal((await ferry.post({ input: 1 }, { traceparent: UNSAMPLED })).status, 200);
    await ferry.line(({ msg }) => /OTEL_EXPORTER_OTLP_PROTOCOL: only http\/protobuf/.test(String(msg)));
    const [request] = await collector.seen(REQUEST);
    assert.equal(request!.parentId, CALLERS_SPAN);
    assert.partialDeepStrictEqual(request!.resource, {
      "service.name": "gpu-front",
      "deployment.environment.name": "test",
    });
    assert.equal(collector.headers[0]!["x-collector-key"], "abc");
    assert.doesNotMatch(ferry.stderr(), /abc/);
  } finally {
    for (const name of Object.keys(variables)) delete process.env[name];
  }
});

describe("a collector that is away", () => {
  const variables = { OTEL_EXPORTER_OTLP_TIMEOUT: "1000", OTEL_BSP_MAX_QUEUE_SIZE: "512" };
  before(() => void Object.assign(process.env, variables));
  after(() => Object.keys(variables).forEach((name) => delete process.env[name]));

  test("costs no request, is said once, and gets what waited when it is back", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen();
    await collector.close();
    await using ferry = await Ferry.start({
      models: [stubModel([stub], fresh)],
      telemetry: telemetry(collector, 1),
    });
    const more = 40;
    for (let round = 0; round < more; round++) {
      const answers = await Promise.all(Array.from({ length: 16 }, () => ferry.post({ input: round })));
      for (const { status } of answers) assert.equal(status, 200);
    }
    await ferry.line(({ msg }) => /cannot be reached \(.*ECONNREFUSED/.test(String(msg)));
    await collector.open();
    const again = await ferry.line(({ msg }) => /takes spans again/.test(String(msg)));
    assert.match(String(again.msg), /[1-9]\d* spans were dropped so far/);
    await eventually(() => collector.spans.length >= 500);
    const said = ferry.lines.filter(({ msg }) => String(msg).includes("collector of traces"));
    assert.equal(said.length, 2);
  });

  test("holds up the end of the process no longer than the time limit of an export", async () => {
    await using stub = await StubWorker.listen();
    const otlpUrl = `http://127.0.0.1:${await freePort()}`;
    await using ferry = await Ferry.start({
      models: [stubModel([stub], fresh)],
      telemetry: { otlpUrl, sample: 1 },
    });
    assert.equal((await ferry.post({ input: 1 })).status, 200);
    const start = performance.now();
    assert.deepEqual(await ferry.stop(), { code: 0, signal: null });
    assert.ok(performance.now() - start < 30_000);
  });

  test("one that refuses them is told of once, and nothing piles up", async () => {
    await using collector = await OtlpCollector.listen();
    await using stub = await StubWorker.listen();
    collector.status = 400;
    await using ferry = await Ferry.start({
      models: [stubModel([stub], fresh)],
      telemetry: telemetry(collector, 1),
    });
    assert.equal((await ferry.post({ input: 1 })).status, 200);
    await ferry.line(({ msg }) => /refuses spans \(400 Bad Request\)/.test(String(msg)));
  });
});
