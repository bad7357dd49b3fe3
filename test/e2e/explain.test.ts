/** Why an answer took the way it took: headers and words, for every way in which an answer comes about. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { type Answer, Ferry } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const EXPLAIN = { "x-ferry-explain": "1" };
const LEFT = "batch of 1 of 64 left after \\d+ ms: a worker was free and waiting longer would not have paid";

const why = ({ json }: Answer): string => String(json.metadata!["why"]);

/** What says which batch it was, and how long it took until that left. */
function batchOf(answer: Answer): string {
  assert.equal(answer.header("x-ferry-batch-size"), String(answer.json.metadata!["batch_size"]));
  assert.equal(answer.header("x-ferry-queue-ms"), String(answer.json.metadata!["queue_ms"]));
  assert.match(answer.header("x-ferry-batch-id"), /^[0-9a-f]{8}-[0-9a-f-]{27}$/);
  return answer.header("x-ferry-batch-id");
}

test("held, polled, joined and cached answers name the batch, and say how they came to it", async () => {
  const gate = new Gate();
  await using stub = await StubWorker.listen(gate.hold);
  await using ferry = await Ferry.start({ models: [stubModel([stub])] });
  const first = ferry.post({ input: "same" }, EXPLAIN);
  await stub.call(1);
  const second = ferry.post({ input: "same" }, EXPLAIN);
  await ferry.healthy(({ totals }) => (totals as Record<string, number>)["joined"] === 1);
  gate.open();
  const [held, joined] = [await first, await second];
  const cached = await ferry.post({ input: "same" }, EXPLAIN);
  assert.match(why(held), new RegExp(`^${LEFT}$`));
  assert.match(why(joined), new RegExp(`^the same input was on its way or done already; ${LEFT}$`));
  assert.match(why(cached), new RegExp(`^answered from the cache; ${LEFT}$`));
  assert.equal(new Set([held, joined, cached].map(batchOf)).size, 1);

  const id = await ferry.accept({ input: "another" });
  await ferry.result(id);
  const polled = await ferry.get(`/v1/result/${id}`, EXPLAIN);
  assert.match(why(polled), new RegExp(`^${LEFT}$`));
  assert.notEqual(batchOf(polled), batchOf(held));
  const plain = await ferry.get(`/v1/result/${id}`);
  assert.equal(plain.json.metadata!["why"], undefined);
  assert.equal(batchOf(plain), batchOf(polled));
});

test("a retried answer says which attempt it was; a full batch and a failure have their words too", async () => {
  await using stub = await StubWorker.listen((call) => {
    if (call.inputs.includes("dead") || stub.calls.length === 1) call.reply(500, "no");
    else call.echo();
  });
  const model = stubModel([stub], { maxBatchSize: 1, retry: { max: 1, baseMs: 1, maxMs: 2 } });
  await using ferry = await Ferry.start({ models: [model] });
  const retried = await ferry.post({ input: "again" }, EXPLAIN);
  assert.match(why(retried), /^attempt 2: a full batch of 1 left after \d+ ms$/);
  const failed = await ferry.post({ input: "dead" }, EXPLAIN);
  assert.equal(failed.status, 502, failed.text);
  assert.equal(failed.header("x-ferry-batch-size"), "1");
  assert.match(failed.header("x-ferry-batch-id"), /^[0-9a-f-]{36}$/);
});
