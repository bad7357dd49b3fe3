/**
 * One test for each thing that Ferry is for, with a real process: what `npm run test:quick` has of the e2e tests. The other
 * files of this folder have the details.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import { Ferry, Folder, reloadConfig } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const simulated = { name: "m", backend: { kind: "simulated", workers: 1, baseMs: 20 }, maxBatchSize: 16 };

test("single requests are answered from batches, each with its own output, and counted", async () => {
  await using worker = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 20));
  await using ferry = await Ferry.start({ models: [stubModel([worker])] });
  const inputs = Array.from({ length: 30 }, (_, at) => `input ${at}`);
  const outputs = await Promise.all(inputs.map((input) => ferry.infer(input)));
  assert.deepEqual(
    outputs,
    inputs.map((of) => ({ of })),
  );
  assert.ok(worker.calls.length < inputs.length, `${worker.calls.length} calls`);
  const { text } = await ferry.admin("/metrics");
  assert.match(text, /^ferry_requests_total\{.*code="200".*\} 30$/m);
});

test("a task that nobody waits for is accepted, and its result can be asked for", async () => {
  await using ferry = await Ferry.start({ models: [simulated] });
  const id = await ferry.accept({ input: "later" });
  assert.equal((await ferry.result(id)).status, "SUCCESS");
  assert.equal((await ferry.get("/v1/result/unknown")).status, 404);
});

test("a worker that fails is retried, and what no worker can do is an error with a code", async () => {
  let calls = 0;
  await using worker = await StubWorker.listen((call) => {
    if (call.inputs.includes("bad")) call.reply(400, '{"error":"no"}');
    else if (++calls === 1) call.reply(500, "{}");
    else call.echo();
  });
  await using ferry = await Ferry.start({ models: [stubModel([worker], { retry: { baseMs: 5 } })] });
  assert.deepEqual(await ferry.infer("good"), { of: "good" });
  const bad = await ferry.post({ input: "bad" });
  assert.deepEqual([bad.status, bad.json.error], [422, "INPUT_REJECTED"]);
});

test("what was accepted survives kill -9", async () => {
  await using folder = await Folder.make();
  const config = { models: [{ ...simulated, maxWaitMs: 50 }], engine: { kind: "memory", dataDir: "./data" } };
  let id: string;
  {
    await using ferry = await Ferry.start(config, folder);
    id = await ferry.accept({ input: "kept" });
    await ferry.kill();
  }
  await using ferry = await Ferry.start(config, folder);
  assert.equal((await ferry.result(id)).status, "SUCCESS");
});

test("a reload brings another model; SIGTERM answers who waits, and ends with 0", async () => {
  await using ferry = await Ferry.start({ models: [simulated] });
  await reloadConfig(ferry, { models: [simulated, { ...simulated, name: "n", maxWaitMs: 300 }] });
  const waiting = ferry.post({ input: "x", model: "n" });
  await ferry.healthy(({ queue_depth, running }) => queue_depth + running > 0);
  const { code } = await ferry.stop();
  assert.equal((await waiting).status, 200);
  assert.equal(code, 0);
});
