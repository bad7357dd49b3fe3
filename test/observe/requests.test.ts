/** What those who look on are told of a request: an in-process Ferry, real HTTP, every way a request can end. */
import assert from "node:assert/strict";
import { once } from "node:events";
import { connect } from "node:net";
import { after, before, describe, test } from "node:test";
import { SystemClock } from "../../src/app/clock.ts";
import { parseConfig } from "../../src/app/config/load.ts";
import { type Ferry, startFerry } from "../../src/app/ferry.ts";
import type { AnsweredRequest, EventFields } from "../../src/observe/events.ts";

const CONFIG = `
listen: 127.0.0.1:0
admin: { listen: "127.0.0.1:0" }
models:
  - name: quick
    backend: { kind: simulated, workers: 2, baseMs: 5 }
  - name: slow
    backend: { kind: simulated, workers: 1, baseMs: 60000 }
    timeouts: { workerMs: 60000, totalMs: 61000 }
telemetry: { logLevel: silent, otlpUrl: "http://127.0.0.1:9", sample: 0 }
`;

/** Copied at once: the event is the exchange itself, which lives on. */
function copy(request: AnsweredRequest): AnsweredRequest {
  const { id, method, route, model, tier, tenant, status, code, startedAt, latencyMs } = request;
  const { work, ending, trace } = request;
  return {
    id,
    method,
    route,
    model,
    tier,
    tenant,
    status,
    code,
    startedAt,
    latencyMs,
    work,
    ending,
    trace,
  };
}

describe("a request that is over", () => {
  let ferry: Ferry;
  before(async () => {
    const loaded = parseConfig(CONFIG, "ferry.yaml", {});
    assert.ok(loaded.config, JSON.stringify(loaded.problems));
    ferry = await startFerry(loaded.config, new SystemClock());
  });
  after(() => ferry.stop());

  /** Sends one, and waits for the event of its end. */
  async function ended(path: string, init: RequestInit): Promise<AnsweredRequest> {
    const next = new Promise<AnsweredRequest>((resolve) => {
      const off = ferry.events.on("request.answered", (request) => {
        off();
        resolve(copy(request));
      });
    });
    const response = await fetch(ferry.apiUrl + path, init);
    await response.text();
    return next;
  }
  const post = (body: object, headers: Record<string, string> = {}): RequestInit => ({
    method: "POST",
    body: JSON.stringify(body),
    headers: { "content-type": "application/json", ...headers },
  });
  const infer = (body: object, headers?: Record<string, string>) =>
    ended("/v1/inference", post(body, headers));

  test("served: its record, and where its time went", async () => {
    const batch = ferry.events.next("batch.started");
    const request = await infer({ model: "quick", input: "a" });
    const { id, ending } = request;
    assert.match(id, /^[0-9A-Z]{36}$/);
    assert.deepEqual(
      [request.method, request.route, request.model, request.tier, request.tenant],
      ["POST", "/v1/inference", "quick", "enterprise", "anonymous"],
    );
    assert.deepEqual([request.status, request.code, request.work], [200, "", "own"]);
    assert.ok(ending?.batch !== undefined && ending.settledAt !== undefined);
    assert.ok(ending.queuedAt <= ending.batch.startedAt && ending.batch.startedAt <= ending.settledAt);
    assert.ok(request.latencyMs >= ending.settledAt - ending.queuedAt);
    const { tasks, maxBatchSize } = await batch;
    assert.deepEqual(
      tasks.map(({ task, attempt }) => [task.id, attempt]),
      [[id, 1]],
    );
    assert.equal(maxBatchSize, 64);
  });

  test("answered from the cache", async () => {
    await infer({ model: "quick", input: "b" });
    const request = await infer({ model: "quick", input: "b" });
    assert.equal(request.work, "cached");
    assert.ok(request.ending?.batch !== undefined);
  });

  test("202: no ending yet", async () => {
    const request = await infer({ model: "quick", input: "c" }, { prefer: "respond-async" });
    assert.deepEqual([request.status, request.ending], [202, undefined]);
    const poll = await ended(`/v1/result/${request.id}?wait=5`, {});
    assert.deepEqual([poll.route, poll.method, poll.model], ["/v1/result/{id}", "GET", ""]);
  });

  test("refused: the code and the id that the client was told", async () => {
    const request = await infer({ model: "nobody", input: "d" });
    assert.deepEqual([request.status, request.code, request.model], [400, "INVALID_REQUEST", ""]);
    assert.match(request.id, /^[0-9A-Z]{36}$/);
    const nowhere = await ended("/nowhere", {});
    assert.deepEqual([nowhere.route, nowhere.status], ["", 404]);
  });

  test("the client left: 499", async () => {
    const next = ferry.events.next("request.answered");
    const queued = ferry.events.next("task.queued");
    const { port, hostname } = new URL(ferry.apiUrl);
    const socket = connect(Number(port), hostname);
    await once(socket, "connect");
    const body = '{"model":"slow","input":"e"}';
    socket.write(
      `POST /v1/inference HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: ${body.length}\r\n\r\n${body}`,
    );
    const { id } = await queued;
    socket.destroy();
    const request = await next;
    assert.deepEqual([request.status, request.model, request.id], [499, "slow", id]);
  });

  test("questions about health are nobody's requests, and neither are an operator's", async () => {
    const seen: string[] = [];
    const off = ferry.events.on("request.answered", ({ route }) => seen.push(route));
    for (const url of [
      `${ferry.apiUrl}/healthz`,
      `${ferry.apiUrl}/readyz`,
      `${ferry.adminUrl}/internal/health`,
    ]) {
      assert.equal((await fetch(url)).status, 200);
    }
    await infer({ model: "quick", input: "f" });
    off();
    assert.deepEqual(seen, ["/v1/inference"]);
  });

  test("a caller's trace goes to the task, one that is not sampled does not", async () => {
    const traceId = "0af7651916cd43dd8448eb211c80319c";
    const started = new Promise<EventFields["batch.started"]>((resolve) => {
      const off = ferry.events.on("batch.started", (fields) => {
        off();
        resolve(fields);
      });
    });
    const request = await infer(
      { model: "quick", input: "g" },
      { traceparent: `00-${traceId}-b7ad6b7169203331-01`, tracestate: "a=1" },
    );
    assert.equal(request.trace?.traceId, traceId);
    assert.equal(request.trace.parentId, "b7ad6b7169203331");
    assert.equal(request.trace.state, "a=1");
    const { tasks } = await started;
    assert.equal(tasks[0]?.task.trace, `00-${traceId}-${request.trace.spanId}-01`);
    const silent = await infer(
      { model: "quick", input: "h" },
      { traceparent: `00-${traceId}-b7ad6b7169203331-00` },
    );
    assert.equal(silent.trace, undefined);
  });
});
