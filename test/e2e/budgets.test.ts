/** Batches by tokens: in one process, and with tasks in Redis, whose inputs are fetched only after the claim. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { estimateTokens } from "../../src/core/weight.ts";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, type Part, patient } from "./fleet.ts";
import { eventually, Ferry } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const MOST = 100;
const EXPLAIN = { "x-ferry-explain": "1" };
/** Of 1 to 60 tokens, and one that is over the budget alone. */
const texts = Array.from({ length: 60 }, (_, at) => `${at} `.padEnd(at === 30 ? 1000 : 4 * (1 + at), "x"));

/** All of them at once, while the worker is busy; and what must hold of the calls and the answers. */
async function crowd(door: Part | Ferry, stub: StubWorker, gate: Gate): Promise<void> {
  const first = door.post({ input: "first" }, EXPLAIN);
  await stub.call(1);
  const answers = texts.map((input) => door.post({ input }, EXPLAIN));
  await eventually(async () => (await door.health()).queue_depth === texts.length);
  gate.open();
  await first;
  let fullByWeight = 0;
  for (const [at, pending] of answers.entries()) {
    const answer = await pending;
    assert.equal(answer.status, 200, answer.text);
    assert.deepEqual(answer.json.output, { of: texts[at] });
    const call = stub.calls.find(({ inputs }) => inputs.includes(texts[at]))!;
    assert.equal(answer.header("x-ferry-batch-size"), String(call.inputs.length));
    if (/tasks? fills? maxBatchTokens$/.test(String(answer.json.metadata!["why"]))) fullByWeight++;
  }
  for (const { inputs } of stub.calls) {
    const tokens = inputs.reduce<number>((sum, each) => sum + estimateTokens(JSON.stringify(each)), 0);
    assert.ok(tokens <= MOST || inputs.length === 1, `${inputs.length} inputs of ${tokens} tokens`);
  }
  assert.equal(stub.inputs.length, 1 + texts.length, "each was sent once");
  assert.ok(fullByWeight > texts.length / 2, `${fullByWeight} answers name the budget`);
}

describe("maxBatchTokens", () => {
  const changes = { maxBatchTokens: MOST, timeouts: patient, retry: { max: 0 } };

  test("in one process", async () => {
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [stubModel([stub], changes)] });
    await crowd(ferry, stub, gate);
  });

  test("on Redis", async () => {
    await using redis = await startServer();
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    const config = fleetConfig({ url: redis.url }, [stubModel([stub], changes)]);
    await using fleet = await Fleet.start({ gateways: 1, batchers: 1 }, config);
    await crowd(fleet.gateways[0]!, stub, gate);
  });
});
