/** A trace through two processes: the gateway makes the request's span, the batcher all the others. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, patient } from "./fleet.ts";
import { OtlpCollector } from "./otlp-collector.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

test("links hold across gateway, Redis and batcher", async () => {
  await using redis = await startServer();
  await using collector = await OtlpCollector.listen();
  await using stub = await StubWorker.listen();
  const model = stubModel([stub], { timeouts: patient, cache: { scope: "off" }, collapse: false });
  const telemetry = { otlpUrl: collector.url, sample: 0 };
  const config = fleetConfig({ url: redis.url }, [model], { telemetry });
  await using fleet = await Fleet.start({ gateways: 1, batchers: 1 }, config);
  const door = fleet.gateways[0]!;
  const answer = await door.post({ input: 1 }, { traceparent: CALLER });
  assert.equal(answer.status, 200, answer.text);
  assert.equal((await door.post({ input: 2 })).status, 200);
  const id = await door.accept({ input: 3 }, { traceparent: CALLER });
  assert.equal((await door.result(id)).status, "SUCCESS");

  const requests = await collector.seen("POST /v1/inference", 2);
  const queues = await collector.seen("queue stub", 2);
  const batches = await collector.seen("process stub", 2);
  const calls = await collector.seen("POST", 2);
  const held = requests.find(({ attributes }) => attributes["http.response.status_code"] === 200)!;
  const async = requests.find(({ attributes }) => attributes["http.response.status_code"] === 202)!;
  assert.ok(held && async);
  for (const [request, taskId] of [
    [held, answer.json.task_id],
    [async, id],
  ] as const) {
    const queue = queues.find(({ attributes }) => attributes["messaging.message.id"] === taskId)!;
    assert.deepEqual([queue.traceId, queue.parentId], [CALLER.slice(3, 35), request.spanId]);
    const batch = batches.find(({ links }) => links[0]!.spanId === queue.spanId)!;
    assert.equal(batch.links.length, 1);
    const call = calls.find(({ traceId }) => traceId === batch.traceId)!;
    assert.equal(call.parentId, batch.spanId);
    const told = `00-${call.traceId}-${call.spanId}-01`;
    assert.ok(stub.calls.some(({ headers }) => headers["traceparent"] === told));
    assert.notEqual(batch.resource["service.instance.id"], request.resource["service.instance.id"]);
    if (request === held) {
      assert.deepEqual(
        request.links.map(({ traceId, spanId }) => [traceId, spanId]),
        [[batch.traceId, batch.spanId]],
      );
    }
  }
});
