/**
 * Batches of 5 ms on workers that now and then pause for longer than several of them take: a collection, a copy that
 * waits for the GPU, a neighbour. Virtual time; at 70 % load everybody can be served within a few hundred milliseconds.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import "../fixtures/unhooked.ts";
import { Random } from "../../src/core/random.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";
import { poisson } from "../../src/cli/plan/workload.ts";

const BATCH_MS = 5;
const MAX_BATCH_SIZE = 64;
const WARM_UP_MS = 1000;
const RUN_MS = 8000;

interface Trial {
  readonly workers: number;
  readonly totalMs: number;
  /** A pause is between these. */
  readonly pauseMs: readonly [number, number];
  /** From when on the workers answer no more. */
  readonly deadFrom?: number;
}

interface Figures {
  readonly came: number;
  readonly refused: number;
  readonly late: number;
  readonly p99: number;
  readonly suspected: number;
}

async function run({ workers, totalMs, pauseMs, deadFrom = Infinity }: Trial): Promise<Figures> {
  const dice = new Random(78);
  const pausesAt = new Map<string, number>();
  const [shortest, longest] = pauseMs;
  const simulation: Simulation = new Simulation({
    seed: 1,
    timeouts: { queueMs: totalMs, totalMs },
    rules: {
      name: "m",
      limits: { policy: "adaptive", maxBatchSize: MAX_BATCH_SIZE, maxWaitMs: 50 },
      workerMs: 3000,
      retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
    },
    backend: {
      workers,
      baseMs: BATCH_MS,
      perItemMs: 0,
      jitter: 0.03,
      errorRate: 0,
      hangRate: 0,
      shortRate: 0,
      slowRate: 0,
      slowFactor: 1,
    },
    admission: {
      mode: "predictive",
      tiers: 1,
      targetUtilization: 1,
      lastTierDepth: 100,
      firstTierDepth: 500,
    },
    engine: { results: { ttlMs: 1, evictAfterRead: false, maxBytes: Infinity } },
    wrap: (worker) => ({
      name: worker.name,
      run: async (batch, signal) => {
        const { clock } = simulation;
        const at = clock.now() - simulation.startedAt;
        const reply = await worker.run(batch, signal);
        const pausing = at > (pausesAt.get(worker.name) ?? WARM_UP_MS);
        if (pausing) pausesAt.set(worker.name, at + 500 + 1000 * dice.next());
        const ms = at > deadFrom ? 1e6 : pausing ? shortest + (longest - shortest) * dice.next() : 0;
        if (ms > 0) await new Promise<void>((resolve) => clock.at(clock.now() + ms, resolve));
        return reply;
      },
    }),
  });
  let [came, refused, late, suspected] = [0, 0, 0, 0];
  const latencies: number[] = [];
  simulation.events.on("worker.changed", ({ state }) => (suspected += state === "down" ? 1 : 0));
  simulation.engine.watch({
    settled: ({ task, outcome, settledAt }) => {
      if (outcome?.ok === true) latencies.push(settledAt! - task.createdAt);
      else late++;
    },
  });
  const perMs = (0.7 * workers * MAX_BATCH_SIZE) / BATCH_MS;
  simulation.schedule(poisson(perMs, RUN_MS, 7920), () => {
    came++;
    if (!("id" in simulation.knock(0))) refused++;
  });
  await simulation.run(RUN_MS + totalMs + 1000);
  simulation.stop();
  latencies.sort((one, other) => one - other);
  return { came, refused, late, suspected, p99: latencies[Math.ceil(0.99 * latencies.length) - 1]! };
}

describe("a model's only worker pauses for 60 to 150 ms, ten times of what a batch takes and more", () => {
  for (const totalMs of [300, 1000]) {
    test(`whoever has ${totalMs} ms is served in time, and nobody is refused`, async (t) => {
      const { came, refused, late, p99, suspected } = await run({ workers: 1, totalMs, pauseMs: [60, 150] });
      t.diagnostic(`${came} came, ${suspected} times suspected, p99 ${p99.toFixed(0)} ms`);
      assert.ok(suspected >= 5, `${suspected} times suspected`);
      assert.deepEqual([refused, late], [0, 0]);
    });
  }

  test("whoever has hardly more than such a pause takes is seldom refused", async () => {
    const { came, refused, late } = await run({ workers: 1, totalMs: 200, pauseMs: [60, 150] });
    assert.equal(late, 0);
    assert.ok(refused <= 0.01 * came, `${refused} of ${came}`);
  });

  test("one that never answers again: from some time on callers are told at once", async () => {
    const dead = await run({ workers: 1, totalMs: 1000, pauseMs: [0, 0], deadFrom: RUN_MS - 3000 });
    const after = (3000 / RUN_MS) * dead.came;
    assert.ok(dead.refused >= 0.5 * after, `${dead.refused} refused, ${dead.late} late of ${after}`);
  });
});

test("of two workers one pauses: nobody is refused, and its batch is done by the other", async (t) => {
  const { refused, late, p99 } = await run({ workers: 2, totalMs: 1000, pauseMs: [60, 150] });
  t.diagnostic(`p99 ${p99.toFixed(0)} ms`);
  assert.deepEqual([refused, late], [0, 0]);
  assert.ok(p99 <= 150, `${p99} ms`);
});
