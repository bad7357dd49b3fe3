/**
 * Fleets of short batches and a hand-over that takes its time, on virtual time: what early batches gain and what they cost.
 */
import type { PipelineMode } from "../../src/dispatch/pipeline.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";
import { poisson } from "../../src/cli/plan/workload.ts";

export interface Fleet {
  readonly workers: number;
  readonly baseMs: number;
  readonly handoverMs: number;
  readonly pipeline: PipelineMode;
  readonly jitter?: number;
  readonly seed: number;
}

const MAX_BATCH_SIZE = 64;
const WARM_UP_MS = 1000;
const DEADLINE_MS = 5000;

export function open({ workers, baseMs, handoverMs, pipeline, jitter = 0.03, seed }: Fleet): Simulation {
  return new Simulation({
    seed,
    timeouts: { queueMs: DEADLINE_MS, totalMs: DEADLINE_MS },
    rules: {
      name: "m",
      limits: { policy: "adaptive", maxBatchSize: MAX_BATCH_SIZE, maxWaitMs: 50 },
      pipeline,
      workerMs: DEADLINE_MS,
      retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
    },
    backend: {
      workers,
      baseMs,
      perItemMs: 0,
      handoverMs,
      jitter,
      errorRate: 0,
      hangRate: 0,
      shortRate: 0,
      slowRate: 0,
      slowFactor: 1,
    },
    engine: { results: { ttlMs: 1, evictAfterRead: false, maxBytes: Infinity } },
  });
}

/** Tasks per ms over what the workers can do without a pause, with callers enough that some always wait. */
export async function saturated(fleet: Fleet, ms = 4000): Promise<number> {
  const simulation = open(fleet);
  const from = simulation.startedAt + WARM_UP_MS;
  let done = 0;
  simulation.engine.watch({
    settled: ({ settledAt }) => {
      if (settledAt! >= from) done++;
      simulation.put();
    },
  });
  for (let i = 0; i < 4 * MAX_BATCH_SIZE * fleet.workers; i++) simulation.put();
  await simulation.run(WARM_UP_MS + ms);
  simulation.stop();
  return done / ms / ((fleet.workers * MAX_BATCH_SIZE) / fleet.baseMs);
}

export interface Figures {
  readonly meanMs: number;
  readonly p50: number;
  readonly p99: number;
  /** Until the worker began. */
  readonly waitMs: number;
  readonly fill: number;
  /** Share of the batches that were handed over early. */
  readonly early: number;
}

/** Poisson arrivals at a share of what the workers can do without a pause. */
export async function loaded(fleet: Fleet, load: number, ms = 4000): Promise<Figures> {
  const simulation = open(fleet);
  const perMs = (load * fleet.workers * MAX_BATCH_SIZE) / fleet.baseMs;
  const from = simulation.startedAt + WARM_UP_MS;
  const latencies: number[] = [];
  let [waitMs, tasks, batches, early] = [0, 0, 0, 0];
  simulation.engine.watch({
    settled: ({ task, settledAt, batch }) => {
      if (task.createdAt < from) return;
      latencies.push(settledAt! - task.createdAt);
      waitMs += batch!.startedAt - task.createdAt;
    },
  });
  simulation.events.on("batch.started", ({ batch }) => {
    if (batch.startedAt < from) return;
    batches++;
    tasks += batch.size;
    if (batch.why.includes("handed over early")) early++;
  });
  const durationMs = WARM_UP_MS + ms;
  simulation.schedule(poisson(perMs, durationMs, fleet.seed + 7919), () => void simulation.put());
  await simulation.run(durationMs + DEADLINE_MS);
  simulation.stop();
  latencies.sort((one, other) => one - other);
  const quantile = (share: number): number => latencies[Math.ceil(share * latencies.length) - 1]!;
  return {
    meanMs: latencies.reduce((sum, each) => sum + each, 0) / latencies.length,
    p50: quantile(0.5),
    p99: quantile(0.99),
    waitMs: waitMs / latencies.length,
    fill: tasks / batches / MAX_BATCH_SIZE,
    early: early / batches,
  };
}
