/** Spans from events, and their way to the collector on virtual time. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { resourceFromAttributes } from "@opentelemetry/resources";
import type { BatchShape } from "../../src/core/cost.ts";
import type { BatchNote } from "../../src/core/task.ts";
import { batchSpan, callSpan, queueSpan, traceparent } from "../../src/core/trace.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events, type AnsweredRequest, type EventFields } from "../../src/observe/events.ts";
import { readableSpan } from "../../src/observe/otlp.ts";
import { SpanBuffer, type Delivery, type SpanFacts } from "../../src/observe/span-buffer.ts";
import { SpanMaker, type TracedModel } from "../../src/observe/traces.ts";

const BATCH = "11111111-2222-4333-8444-555566667777";
const REQUEST = { traceId: "0af7651916cd43dd8448eb211c80319c", spanId: "b7ad6b7169203331" };
const note: BatchNote = {
  id: BATCH,
  size: 1,
  reason: "idle",
  worker: "gpu-1:9000",
  startedAt: 1050,
  why: "it could",
};

function stage(models: readonly TracedModel[] = [{ name: "m", kind: "http", protocol: "batch" }]) {
  const clock = new VirtualClock(2000);
  const events = new Events();
  const spans: ReturnType<typeof readableSpan>[] = [];
  let dropped = 0;
  const origin = { resource: resourceFromAttributes({}), scope: { name: "ferry" } };
  const add = (facts: SpanFacts): void => void spans.push(readableSpan(facts, origin));
  const buffer = { add, drop: () => void dropped++ };
  const parts = { clock, events, models: () => models, apart: false, apiUrl: () => "https://ferry.example" };
  new SpanMaker(parts, buffer).listen(events);
  const started = (tasks: EventFields["batch.started"]["tasks"], batch = note): void =>
    events.emit("batch.started", { model: "m", batch, maxBatchSize: 4, oldestWaitMs: 1, tasks });
  const answered = (call: number, kind = "answered", batchId = BATCH): void =>
    events.emit("batch.answered", {
      model: "m",
      batchId,
      worker: "gpu-1:9000",
      size: 1,
      kind,
      call,
      startedAt: 1051,
      serviceMs: 10,
    });
  const settled = (batchId = BATCH, shape?: BatchShape): void =>
    events.emit("batch.settled", {
      model: "m",
      batchId,
      worker: "gpu-1:9000",
      size: 1,
      reason: "idle",
      calls: 1,
      busyMs: 1,
      shape,
    });
  return { clock, events, spans, started, answered, settled, dropped: () => dropped };
}

function task(id: string, trace?: string, attempt = 1) {
  const empty = { input: "1", parameters: "", content: "", tenant: "t", tier: 0, model: "m" };
  return { task: { id, ...empty, createdAt: 1000, deadlineAt: 9000, trace }, attempt, queuedAt: 1000 };
}

const request: AnsweredRequest = {
  id: "T1",
  method: "POST",
  route: "/v1/inference",
  path: "/v1/inference",
  model: "m",
  tier: "paid",
  tenant: "SECRET",
  status: 200,
  code: "",
  startedAt: 1000.25,
  latencyMs: 100.5,
  work: "own",
  ending: { queuedAt: 1001, attempt: 1, batch: note },
  trace: { ...REQUEST, parentId: "", state: "" },
};

describe("spans from events", () => {
  test("who is not traced leaves nothing behind", () => {
    const { events, spans, started, answered, settled } = stage();
    events.emit("request.answered", { ...request, trace: undefined });
    started([task("a"), task("b", "garbage")]);
    answered(1);
    settled();
    assert.deepEqual(spans, []);
  });

  test("only the traced tasks of a batch are linked; ids are where everybody looks for them", () => {
    const { spans, started, answered, settled } = stage();
    started([task("a"), task("b", traceparent(REQUEST)), task("c")]);
    answered(1, "rejected");
    answered(2);
    settled(BATCH, { rows: 3, longest: 90, total: 120, inOrder: 400 });
    const [queue, first, second, batch] = spans;
    assert.equal(spans.length, 4);
    assert.partialDeepStrictEqual(queue!.spanContext(), queueSpan(REQUEST, batchSpan(BATCH)));
    assert.equal(queue!.parentSpanContext?.spanId, REQUEST.spanId);
    assert.partialDeepStrictEqual(first!.spanContext(), callSpan(BATCH, 1));
    assert.partialDeepStrictEqual(second!.spanContext(), callSpan(BATCH, 2));
    assert.deepEqual([first!.status.code, second!.status.code, batch!.status.code], [2, 0, 0]);
    assert.equal(second!.attributes["http.request.resend_count"], 1);
    assert.partialDeepStrictEqual(batch!.spanContext(), batchSpan(BATCH));
    assert.equal(batch!.parentSpanContext, undefined);
    assert.deepEqual(
      batch!.links.map(({ context, attributes }) => [context.spanId, attributes?.["messaging.message.id"]]),
      [[queueSpan(REQUEST, batchSpan(BATCH)).spanId, "b"]],
    );
    assert.deepEqual(batch!.startTime, [1, 50_000_000]);
    assert.deepEqual(batch!.endTime, [2, 0]);
    assert.equal(batch!.attributes["ferry.batch.longest_tokens"], 90);
    assert.equal(batch!.attributes["ferry.batch.total_tokens"], 120);
  });

  test("times are exact to the microsecond, and no span ends before it began", () => {
    const { events, spans } = stage();
    events.emit("request.answered", request);
    events.emit("request.answered", { ...request, startedAt: 1_700_000_000_999.9998, latencyMs: -1 });
    assert.deepEqual(spans[0]!.startTime, [1, 250_000]);
    assert.deepEqual(spans[0]!.endTime, [1, 100_750_000]);
    assert.deepEqual(spans[1]!.startTime, [1_700_000_001, 0]);
    assert.deepEqual(spans[1]!.duration, [0, 0]);
  });

  test("a request names its batch and where it came in, and never its tenant", () => {
    const { events, spans } = stage();
    events.emit("request.answered", request);
    const { attributes, links, name } = spans[0]!;
    assert.equal(name, "POST /v1/inference");
    assert.deepEqual(attributes, {
      "http.request.method": "POST",
      "http.response.status_code": 200,
      "http.route": "/v1/inference",
      "url.path": "/v1/inference",
      "url.scheme": "https",
      "server.address": "ferry.example",
      "ferry.model": "m",
      "ferry.tier": "paid",
      "ferry.task.id": "T1",
      "ferry.attempt": 1,
      "ferry.batch.id": BATCH,
      "ferry.batch.trace_id": batchSpan(BATCH).traceId,
    });
    assert.partialDeepStrictEqual(links[0]!.context, batchSpan(BATCH));
  });

  test("methods and paths of strangers stay outside", () => {
    const { events, spans } = stage();
    const strange = {
      ...request,
      method: "SECRET",
      route: "",
      path: "/SECRET",
      model: "",
      ending: undefined,
    };
    events.emit("request.answered", { ...strange, status: 404, code: "NOT_FOUND" });
    const { name, attributes, status } = spans[0]!;
    assert.deepEqual([name, attributes["http.request.method"], status.code], ["HTTP", "_OTHER", 0]);
    assert.doesNotMatch(JSON.stringify(attributes), /SECRET/);
  });

  test("a second wait begins where the first try gave the task back", () => {
    const { clock, events, spans, started, answered, settled } = stage();
    const other = "99999999-2222-4333-8444-555566667777";
    started([task("a", traceparent(REQUEST))]);
    answered(1, "failed");
    const retried = { id: "a", model: "m", attempt: 1, at: clock.now(), message: "", worker: "" };
    events.emit("task.retried", { ...retried, batchId: BATCH });
    events.emit("task.retried", { ...retried, id: "b", batchId: BATCH });
    settled();
    started([task("a", traceparent(REQUEST), 2)], { ...note, id: other, startedAt: 2500 });
    const [first, , failed, second] = spans;
    assert.deepEqual(
      [first!.startTime, second!.startTime],
      [
        [1, 0],
        [2, 0],
      ],
    );
    assert.equal(second!.attributes["ferry.attempt"], 2);
    assert.deepEqual([failed!.status.code, failed!.attributes["error.type"]], [2, "failed"]);
  });

  test("batches that never end are pushed out, and counted", () => {
    const { started, settled, spans, dropped } = stage();
    const id = (at: number): string => `${String(at).padStart(8, "0")}-2222-4333-8444-555566667777`;
    for (let at = 0; at < 10_002; at++) started([task("a", traceparent(REQUEST))], { ...note, id: id(at) });
    assert.equal(dropped(), 2);
    const before = spans.length;
    for (const at of [0, 1, 2]) settled(id(at));
    assert.equal(spans.length, before + 1);
  });

  test("calls are named by what the worker speaks", () => {
    for (const [model, name, operation] of [
      [{ name: "m", kind: "http", protocol: "batch" }, "POST", undefined],
      [{ name: "m", kind: "http", protocol: "openai-embeddings" }, "embeddings m", "embeddings"],
      [{ name: "m", kind: "python" }, "call m", undefined],
    ] as const) {
      const { spans, started, answered } = stage([model]);
      started([task("a", traceparent(REQUEST))]);
      answered(1);
      assert.equal(spans[1]!.name, name);
      assert.equal(spans[1]!.attributes["gen_ai.operation.name"], operation);
      assert.equal(spans[1]!.attributes["server.port"], model.kind === "http" ? 9000 : undefined);
    }
  });
});

describe("the way to the collector", () => {
  const span = (links = 0): SpanFacts => ({
    name: "s",
    kind: 0,
    place: REQUEST,
    startedAt: 0,
    endedAt: 1,
    attributes: {},
    links: Array.from({ length: links }, () => ({ context: { ...REQUEST, traceFlags: 1 } })),
  });

  function way(deliver: (spans: readonly SpanFacts[]) => Promise<Delivery>, maxSpans = 1000) {
    const clock = new VirtualClock();
    const events = new Events();
    const said: string[] = [];
    events.on("notice", ({ message }) => said.push(message));
    const bundles: number[] = [];
    let loads = 0;
    const load = async () => {
      loads++;
      return {
        deliver: (spans: readonly SpanFacts[]) => {
          bundles.push(spans.length);
          return deliver(spans);
        },
        close: async () => {},
      };
    };
    const buffer = new SpanBuffer({ maxSpans, closeMs: 2000, place: "c:4318" }, load, clock, events);
    const add = (count: number): void => {
      for (let at = 0; at < count; at++) buffer.add(span());
    };
    const pass = (ms: number): Promise<number> => clock.run(clock.now() + ms);
    return { clock, buffer, bundles, said, add, pass, loads: () => loads };
  }
  const taken = async (): Promise<Delivery> => ({ kind: "taken", why: "" });

  test("spans gather for a second, a full bundle leaves at once; nothing is loaded before", async () => {
    const { add, pass, bundles, loads } = way(taken);
    add(3);
    await pass(999);
    assert.deepEqual([bundles, loads()], [[], 0]);
    await pass(2);
    assert.deepEqual([bundles, loads()], [[3], 1]);
    add(300);
    await pass(1);
    assert.deepEqual(bundles, [3, 256]);
    await pass(1000);
    assert.deepEqual([bundles, loads()], [[3, 256, 44], 1]);
  });

  test("a bundle is small when its spans have many links", async () => {
    const { buffer, pass, bundles } = way(taken);
    for (let at = 0; at < 5; at++) buffer.add(span(1000));
    buffer.add(span(10_000));
    await pass(10_000);
    assert.deepEqual(bundles, [2, 2, 1, 1]);
  });

  test("a collector that is away gets the same later; more than fit are dropped, and it is said twice", async () => {
    let away = true;
    const { add, pass, bundles, buffer, said } = way(
      async () => (away ? { kind: "away", why: "ECONNREFUSED" } : { kind: "taken", why: "" }),
      700,
    );
    add(900);
    await pass(60_000);
    assert.equal(buffer.dropped, 200);
    assert.ok(bundles.length >= 10 && bundles.length <= 14, `${bundles.length} tries in a minute`);
    assert.equal(said.length, 1);
    assert.match(said[0]!, /c:4318 cannot be reached \(ECONNREFUSED\): at most 700 spans wait/);
    away = false;
    await pass(10_000);
    assert.deepEqual(bundles.slice(-3), [256, 256, 188]);
    assert.equal(said.length, 2);
    assert.match(said[1]!, /takes spans again; 200 spans were dropped so far/);
  });

  test("those on the wire count too", async () => {
    const answer = Promise.withResolvers<Delivery>();
    const { add, pass, buffer } = way(() => answer.promise, 600);
    add(600);
    await pass(1);
    add(1);
    assert.equal(buffer.dropped, 1);
    answer.resolve({ kind: "taken", why: "" });
    await pass(1);
    add(100);
    assert.equal(buffer.dropped, 1);
  });

  test("what is refused, or cannot be sent at all, is gone and counted", async () => {
    for (const deliver of [
      async (): Promise<Delivery> => ({ kind: "refused", why: "400 Bad Request" }),
      async (): Promise<Delivery> => Promise.reject(new Error("400 Bad Request")),
    ]) {
      const { add, pass, buffer, bundles, said } = way(deliver);
      add(3);
      await pass(60_000);
      assert.deepEqual([bundles, buffer.dropped, said.length], [[3], 3, 1]);
      assert.match(said[0]!, /refuses spans \(400 Bad Request\)/);
    }
  });

  test("what waits leaves with the process, and what cannot is counted", async () => {
    const good = way(taken);
    good.add(700);
    await good.buffer.close();
    assert.deepEqual([good.bundles, good.buffer.dropped], [[256, 256, 188], 0]);
    good.add(1);
    assert.equal(good.buffer.dropped, 1);

    const away = way(async () => ({ kind: "away", why: "gone" }));
    away.add(700);
    await away.buffer.close();
    assert.deepEqual([away.bundles, away.buffer.dropped], [[256], 700]);

    const silent = way(() => new Promise(() => {}));
    silent.add(700);
    const closed = silent.buffer.close();
    await silent.pass(2001);
    await closed;
    assert.equal(silent.buffer.dropped, 700);
  });
});
