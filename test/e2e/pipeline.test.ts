/** `pipeline: 2` in front of a server behind HTTP: it has its next batch before it answers the one it runs. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, type Part, patient } from "./fleet.ts";
import { eventually, Ferry } from "./harness.ts";
import { echo, Gate, hang, stubModel, StubWorker } from "./stub-worker.ts";

const EXPLAIN = { "x-ferry-explain": "1" };

interface Row {
  readonly pipeline: number;
  readonly ahead: string | null;
}

async function rows(door: Part | Ferry): Promise<Row[]> {
  return (JSON.parse((await door.admin("/internal/workers")).text) as { workers: Row[] }).workers;
}

/** What the worker needs for its first batch: from it Ferry knows when the second is late. */
const USUAL_MS = 4000;

/** One that waits at the worker, eight behind it, and eight that no worker may have yet. */
async function crowd(door: Part | Ferry, stub: StubWorker, gate: Gate): Promise<void> {
  // Nothing is handed over behind a batch that is late, and before the first one is known that is soon the case.
  stub.behave = (call) => void setTimeout(() => call.echo(), USUAL_MS);
  assert.equal((await door.post({ input: "usual" })).status, 200);
  stub.behave = gate.hold;
  const first = door.post({ input: "first" }, EXPLAIN);
  await stub.call(2);
  const inputs = Array.from({ length: 16 }, (_, at) => `input ${at}`);
  const answers = inputs.map((input) => door.post({ input }, EXPLAIN));
  await stub.call(3);
  await eventually(async () => (await rows(door)).some(({ ahead }) => ahead !== null));
  assert.deepEqual(
    (await rows(door)).map(({ pipeline }) => pipeline),
    [2],
  );
  await eventually(async () => (await door.health()).queue_depth === 8);
  gate.open();
  assert.match(String((await first).json.metadata!["why"]), / left after /);
  for (const [at, pending] of answers.entries()) {
    const answer = await pending;
    assert.equal(answer.status, 200, answer.text);
    assert.deepEqual(answer.json.output, { of: inputs[at] });
    assert.match(String(answer.json.metadata!["why"]), /^a full batch of 8 (handed over early|left) after/);
  }
  assert.equal(stub.mostAtOnce, 2);
  assert.equal(stub.inputs.length, 18, "each was sent once");
  await eventually(async () => (await rows(door)).every(({ ahead }) => ahead === null));
}

describe("pipeline: 2", () => {
  const changes = { pipeline: 2, maxBatchSize: 8, timeouts: patient, retry: { max: 0 } };

  test("in one process", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [stubModel([stub], changes)] });
    await crowd(ferry, stub, gate);
  });

  test("on Redis, with a worker that batchers share", async () => {
    await using redis = await startServer();
    const gate = new Gate();
    await using stub = await StubWorker.listen();
    const config = fleetConfig({ url: redis.url }, [stubModel([stub], changes)]);
    await using fleet = await Fleet.start({ gateways: 1, batchers: 1 }, config);
    await crowd(fleet.gateways[0]!, stub, gate);
  });

  test("a batch that times out takes none of the time of the one behind it", async () => {
    let calls = 0;
    await using stub = await StubWorker.listen((call) => (++calls === 1 ? hang(call) : echo(call)));
    const timeouts = { queueMs: 30_000, workerMs: 6000, totalMs: 40_000 };
    const model = stubModel([stub], { ...changes, timeouts, retry: { max: 0 } });
    await using ferry = await Ferry.start({ models: [model] });
    const first = ferry.post({ input: "first" });
    await stub.call(1);
    const answers = Array.from({ length: 8 }, (_, at) => ferry.post({ input: at }));
    for (const answer of await Promise.all(answers)) assert.equal(answer.status, 200, answer.text);
    assert.equal((await first).status, 502);
  });
});
