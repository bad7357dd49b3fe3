/** What is refused when more comes than the workers can serve, as a client sees it. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig } from "./fleet.ts";
import { type Answer, eventually, Ferry, type Health } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

interface ModelHealth {
  readonly name: string;
  readonly capacity_per_second: number;
  readonly nominal_capacity_per_second: number;
  readonly queued_by_tier: readonly number[];
}

const modelOf = (health: Health): ModelHealth => (health as unknown as { models: ModelHealth[] }).models[0]!;

/** One worker that takes 8 in 400 ms; eight seconds from arrival to answer, beside which a machine's pauses are short. */
const slow = {
  name: "m",
  backend: { kind: "simulated", workers: 1, baseMs: 400 },
  maxBatchSize: 8,
  maxWaitMs: 5,
  timeouts: { queueMs: 8000, workerMs: 6000, totalMs: 8000 },
};

/** Teaches Ferry how long a batch takes. */
async function warmUp(ferry: Ferry): Promise<void> {
  for (let round = 0; round < 5; round++) await ferry.infer(`warm ${round}`);
}

/** Sends them all at once. */
function crowd(ferry: Ferry, count: number, of = "crowd"): Promise<Answer[]> {
  return Promise.all(Array.from({ length: count }, (_, at) => ferry.post({ input: `${of} ${at}` })));
}

function assertComeAgain(answer: Answer): void {
  const { retry_after_ms: ms = NaN } = answer.json;
  const seconds = Number(answer.header("retry-after"));
  assert.ok(Number.isInteger(ms) && ms >= 50 && ms <= 30_000, answer.text);
  assert.equal(answer.header("retry-after-ms"), String(ms));
  assert.ok(Number.isInteger(seconds) && seconds * 1000 >= ms && seconds <= 30, `${seconds} s for ${ms} ms`);
}

describe("predictive", () => {
  test("a crowd: what is let in is answered in time, the rest is told at once when to come again", async () => {
    await using ferry = await Ferry.start({ models: [slow] });
    await warmUp(ferry);
    const start = performance.now();
    const answers = await crowd(ferry, 500);
    const seconds = (performance.now() - start) / 1000;
    const served = answers.filter(({ status }) => status === 200);
    const refused = answers.filter(({ status }) => status !== 200 && status !== 504);
    // 20 a second until the last is answered, after eight seconds or, on a machine that is busy, later; test/sim has the
    // rule to the task.
    const late = answers.length - served.length - refused.length;
    assert.ok(
      served.length + late <= 40 + 20 * seconds,
      `${served.length + late} let in within ${seconds} s`,
    );
    // Whoever is late: the machine stood still, or far too many were let in.
    assert.ok(served.length >= 40 && late < served.length, `${late} late beside ${served.length} served`);
    for (const answer of refused) {
      assert.equal(answer.status, 503, answer.text);
      assert.equal(answer.json.error, "SERVICE_OVERLOADED");
      assertComeAgain(answer);
    }
    const slots = refused.map(({ json }) => json.retry_after_ms!);
    assert.ok(new Set(slots).size > slots.length / 2, "each has a slot of its own");
    assert.deepEqual(await ferry.infer("after"), "after");
  });

  test("an answer that is there, or on its way, needs no capacity", async () => {
    await using ferry = await Ferry.start({ models: [slow] });
    await warmUp(ferry);
    const known = await ferry.post({ input: "warm 0" });
    assert.equal(known.json.metadata?.["cached"], true);
    const full = crowd(ferry, 400);
    const [cached, joined] = await Promise.all([
      ferry.post({ input: "warm 0" }),
      ferry.post({ input: "crowd 0" }),
    ]);
    assert.equal(cached.status, 200, cached.text);
    assert.equal(joined.status, 200, joined.text);
    assert.ok((await full).some(({ status }) => status === 503));
  });

  test("an idle worker takes what comes, whatever was learned before", async () => {
    // Half of the batches take thirty times as long as the others: no estimate fits.
    let calls = 0;
    await using stub = await StubWorker.listen(
      (call) => void setTimeout(() => call.echo(), calls++ % 2 === 0 ? 10 : 300),
    );
    const timeouts = { queueMs: 500, workerMs: 400, totalMs: 500 };
    await using ferry = await Ferry.start({ models: [stubModel([stub], { maxWaitMs: 5, timeouts })] });
    for (let round = 0; round < 30; round++) {
      const { status, text } = await ferry.post({ input: `one ${round}` });
      assert.ok(status === 200 || status === 504, text);
      // 504: the machine stood still for so long, and its worker may not be idle yet.
      if (status === 504) await eventually(async () => (await ferry.health()).running === 0);
    }
  });
});

test("off: everything is queued, and what is late is 504", async () => {
  await using ferry = await Ferry.start({ models: [slow], admission: { mode: "off" } });
  await warmUp(ferry);
  const statuses = new Set((await crowd(ferry, 250)).map(({ status }) => status));
  assert.deepEqual(statuses, new Set([200, 504]));
});

test("thresholds: the only tier is the first, and is never refused for its load", async () => {
  await using ferry = await Ferry.start({ models: [slow], admission: { mode: "thresholds" } });
  await warmUp(ferry);
  const statuses = new Set((await crowd(ferry, 200)).map(({ status }) => status));
  assert.ok(!statuses.has(503) && !statuses.has(429), [...statuses].join());
});

describe("in a fleet", () => {
  test("every gateway knows capacity and depth, and sheds by them", async () => {
    await using redis = await startServer();
    // 4 workers of 8 in 800 ms: 40 a second; eight seconds from arrival to answer.
    const model = { ...slow, backend: { kind: "simulated", workers: 4, baseMs: 800 } };
    await using fleet = await Fleet.start(
      { gateways: 2, batchers: 1 },
      fleetConfig({ url: redis.url }, [model]),
    );
    const [one, other] = fleet.gateways;
    for (let round = 0; round < 12; round++) await one!.post({ input: `warm ${round}` });
    for (const gateway of [one!, other!]) {
      await eventually(async () => {
        const { capacity_per_second: perSecond } = modelOf(await gateway.health());
        return perSecond > 25 && perSecond < 50;
      });
    }
    const start = performance.now();
    const flood = Array.from({ length: 600 }, (_, at) => one!.post({ input: `flood ${at}` }));
    await eventually(
      async () => modelOf(await other!.health()).queued_by_tier.reduce((sum, each) => sum + each, 0) > 8,
    );
    const statuses = (await Promise.all(flood)).map(({ status }) => status);
    const seconds = (performance.now() - start) / 1000;
    const served = statuses.filter((status) => status === 200).length;
    const shed = statuses.filter((status) => status === 503).length;
    // 40 a second until the last is answered, after eight seconds or, on a machine that is busy, later.
    const late = statuses.length - served - shed;
    const most = 80 + 40 * seconds;
    assert.ok(served >= 100 && served + late <= most, `${served} served, ${late} late in ${seconds} s`);
    assert.ok(shed > 0, `${shed} shed`);
    assert.ok(late < served, `${late} late beside ${served} served`);
  });
});
