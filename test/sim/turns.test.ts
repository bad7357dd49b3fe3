/**
 * One tenant of twenty at ten times its share, on virtual time: the real engine and dispatcher with simulated
 * workers. The others must hardly notice: their p99 at most 1.2 times as long, and no deadline missed.
 *
 * Measured with eight workers: 132 ms without the flood, 150 ms with it (1.14 times); 547 ms in order of
 * arrival. What is left is that no worker is ever idle for them.
 */
import assert from "node:assert/strict";
import { test } from "node:test";
import "../fixtures/unhooked.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";
import { poisson } from "../../src/cli/plan/workload.ts";

const TENANTS = 20;
const LOAD = 0.7;
const BATCH = 64;
const SERVICE_MS = 100;
const DURATION_MS = 20_000;
/** The queue that a flood builds; after that the figures are steady. */
const WARM_UP_MS = 5000;
const NO_FAULTS = { errorRate: 0, hangRate: 0, shortRate: 0, slowRate: 0, slowFactor: 1 };

interface Run {
  /** Of all tenants but the first. */
  readonly p99Ms: number;
  readonly failed: number;
  /** Tasks of the first tenant that were served. */
  readonly flood: number;
}

/** `times` is how many times its share the first tenant sends. */
async function run(workers: number, times: number): Promise<Run> {
  const simulation = new Simulation({
    seed: 1,
    timeouts: { queueMs: 2000, totalMs: 4000 },
    rules: {
      name: "m",
      limits: { policy: "adaptive", maxBatchSize: BATCH, maxWaitMs: 50 },
      workerMs: 3000,
      retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
    },
    backend: { ...NO_FAULTS, workers, baseMs: SERVICE_MS, perItemMs: 0, jitter: 0.1 },
  });
  const tookMs: number[] = [];
  let [failed, flood] = [0, 0];
  simulation.engine.watch({
    settled: ({ task, outcome, settledAt }) => {
      if (task.createdAt < simulation.startedAt + WARM_UP_MS) return;
      const ok = outcome?.ok === true;
      if (task.tenant === "t0") flood += ok ? 1 : 0;
      else if (ok) tookMs.push(settledAt! - task.createdAt);
      else failed++;
    },
  });
  const perMs = (LOAD * workers * BATCH) / SERVICE_MS / TENANTS;
  for (let tenant = 0; tenant < TENANTS; tenant++) {
    const rate = tenant === 0 ? times * perMs : perMs;
    const arrivals = poisson(rate, DURATION_MS, tenant + 1);
    simulation.schedule(arrivals, () => void simulation.put({ tenant: `t${tenant}` }));
  }
  await simulation.run(DURATION_MS + SERVICE_MS * 100);
  simulation.stop();
  tookMs.sort((one, other) => one - other);
  return { p99Ms: tookMs[Math.floor(0.99 * tookMs.length)]!, failed, flood };
}

for (const workers of [1, 2, 8]) {
  test(`${workers} workers, one tenant of ${TENANTS} at ten times its share: hardly noticed`, async (t) => {
    const [calm, flooded, drowned] = [await run(workers, 1), await run(workers, 10), await run(workers, 30)];
    t.diagnostic(
      `p99 of the others ${calm.p99Ms.toFixed(0)} ms; with ten times ${flooded.p99Ms.toFixed(0)} ms, ` +
        `with thirty ${drowned.p99Ms.toFixed(0)} ms`,
    );
    for (const { failed, p99Ms } of [flooded, drowned]) {
      assert.equal(failed, 0);
      assert.ok(p99Ms <= 1.2 * calm.p99Ms, `${p99Ms} ms, and ${calm.p99Ms} ms without the flood`);
    }
    // Whoever floods gets what the others leave: a third of the whole.
    assert.ok(flooded.flood > 6 * calm.flood && drowned.flood > 6 * calm.flood);
  });
}
