/** Inputs of different length under load: whatever goes wrong, no task is overtaken for longer than is stated. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { usually } from "../fixtures/long.ts";
import "../fixtures/unhooked.ts";
import { inputOf, parseLengths } from "../../src/cli/plan/lengths.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";
import { poisson } from "../../src/cli/plan/workload.ts";
import { Random } from "../../src/core/random.ts";
import { playLengths } from "./lengths-lab.ts";

const SEEDS = usually(60, 2000);

test(`${SEEDS} seeds: nothing lost, nothing crossed, no task overtaken beyond its bound`, async (t) => {
  let [tasks, composed, overtaken, longest] = [0, 0, 0, 0];
  for (let seed = 1; seed <= SEEDS; seed++) {
    const run = await playLengths(seed);
    assert.deepEqual(run.failures, []);
    tasks += run.tasks;
    composed += run.composed;
    overtaken += run.overtaken;
    longest = Math.max(longest, run.longest);
  }
  t.diagnostic(
    `${tasks} tasks, ${composed} batches composed, ${overtaken} overtaken, at most ${longest} of the bound`,
  );
  assert.ok(composed > 20 * SEEDS && overtaken > 20 * SEEDS, `${composed} composed, ${overtaken} overtaken`);
  // Some come near it, or nothing would be shown.
  assert.ok(longest > 0.3 && longest <= 1.001, `${longest}`);
});

const MIX = [0.1, 0.3, 0.6] as const;
const TOTAL_MS = 2000;
const RUN_MS = 20_000;
/** Until what batches cost is known. */
const WARM_MS = 5000;
const PER_MS = 1.25; // what one worker does with batches of similar length, about; a third of it in order of arrival

/** Of tasks let in after the warm-up: how many, by tier, and how many were not answered in time. */
async function overloaded(load: number, tenants: number): Promise<{ admitted: number[]; late: number }> {
  const simulation = new Simulation({
    seed: 1,
    timeouts: { queueMs: TOTAL_MS, totalMs: TOTAL_MS },
    rules: {
      name: "m",
      limits: { policy: "adaptive", maxBatchSize: 64, maxWaitMs: 50 },
      lengths: "auto",
      queueMs: TOTAL_MS,
      workerMs: 3000,
      retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
    },
    backend: {
      workers: 1,
      baseMs: 0,
      perItemMs: 0,
      batchMs: (rows, longest) => 8 + 0.05 * rows + 0.0047 * rows * longest,
      jitter: 0.05,
    },
    admission: {
      mode: "predictive",
      tiers: MIX.length,
      targetUtilization: 0.7,
      lastTierDepth: 100,
      firstTierDepth: 500,
    },
  });
  const countedFrom = simulation.startedAt + WARM_MS;
  const admitted = MIX.map(() => 0);
  let late = 0;
  simulation.engine.watch({
    settled: ({ task: { createdAt, tier, deadlineAt }, outcome, settledAt }) => {
      if (createdAt < countedFrom) return;
      admitted[tier]!++;
      if (outcome?.ok !== true || settledAt! > deadlineAt) late++;
    },
  });
  const random = new Random(5);
  const mix = parseLengths("mixed")!;
  simulation.schedule(poisson(load * PER_MS, RUN_MS, 3), () => {
    const draw = random.next();
    const tier = draw < MIX[0] ? 0 : draw < MIX[0] + MIX[1] ? 1 : 2;
    simulation.knock(tier, `t${Math.floor(random.next() * tenants)}`, inputOf(mix.draw(random)));
  });
  await simulation.run(RUN_MS + TOTAL_MS);
  simulation.stop();
  return { admitted, late };
}

for (const load of [1.5, 2]) {
  test(`${load} times the capacity, three tiers: what is let in is in time, and batches stay alike`, async (t) => {
    for (const tenants of [1, 4]) {
      const { admitted, late } = await overloaded(load, tenants);
      const sum = admitted.reduce((all, each) => all + each, 0);
      const perMs = sum / (RUN_MS - WARM_MS);
      t.diagnostic(
        `${tenants} tenants: ${admitted.join(" ")} admitted, ${perMs.toFixed(2)} per ms, ${late} late`,
      );
      assert.ok(late <= 0.001 * sum, `${late} of ${sum} late`);
      assert.ok(perMs >= 0.9 * PER_MS, `${perMs} per ms`);
      assert.ok(admitted[0]! >= 0.95 * MIX[0] * load * PER_MS * (RUN_MS - WARM_MS), admitted.join(" "));
    }
  });
}
