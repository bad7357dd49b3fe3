/** A simulated Ferry with settings that a test changes as it needs. */
import type { Worker } from "../../src/workers/backend/backend.ts";
import type { SimulatedOptions } from "../../src/workers/backend/simulated.ts";
import type { PipelineMode } from "../../src/dispatch/pipeline.ts";
import type { Limits } from "../../src/core/policy.ts";
import type { RecordView } from "../../src/engine/engine.ts";
import { Simulation, type SimulationOptions } from "../../src/cli/plan/simulation.ts";

export interface Changes {
  readonly name?: string;
  readonly backend?: Partial<SimulatedOptions>;
  readonly limits?: Partial<Limits>;
  readonly maxBatchTokens?: number;
  readonly maxBatchBytes?: number;
  readonly seed?: number;
  readonly workerMs?: number;
  readonly pipeline?: PipelineMode;
  readonly queueMs?: number;
  readonly totalMs?: number;
  readonly retries?: number;
  readonly failures?: number;
  readonly maxWorkerLoad?: number;
  readonly tiers?: number;
  readonly admission?: SimulationOptions["admission"];
  readonly wrap?: (worker: Worker) => Worker;
}

export function simulate(changes: Changes = {}): Simulation {
  const noFaults = { jitter: 0, errorRate: 0, hangRate: 0, shortRate: 0, slowRate: 0, slowFactor: 1 };
  return new Simulation({
    seed: changes.seed ?? 1,
    timeouts: { queueMs: changes.queueMs ?? 2000, totalMs: changes.totalMs ?? 4000 },
    rules: {
      name: changes.name ?? "m",
      limits: { policy: "adaptive", maxBatchSize: 64, maxWaitMs: 50, ...changes.limits },
      maxBatchTokens: changes.maxBatchTokens,
      maxBatchBytes: changes.maxBatchBytes,
      workerMs: changes.workerMs ?? 3000,
      ...(changes.pipeline !== undefined && { pipeline: changes.pipeline }),
      maxWorkerLoad: changes.maxWorkerLoad ?? 1,
      retry: { max: changes.retries ?? 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: changes.failures ?? 3, ejectMs: 1000, maxEjectMs: 30_000 },
    },
    backend: { workers: 1, baseMs: 100, perItemMs: 0, ...noFaults, ...changes.backend },
    ...(changes.wrap && { wrap: changes.wrap }),
    ...(changes.admission && { admission: changes.admission }),
    engine: { tiers: changes.tiers ?? 1 },
  });
}

/** Every record that ends, by id. */
export function endings(simulation: Simulation): Map<string, RecordView> {
  const ended = new Map<string, RecordView>();
  simulation.engine.watch({ settled: (record) => ended.set(record.task.id, record) });
  return ended;
}

/** How each task ended: "ok" or its error code. */
export function codes(ended: Map<string, RecordView>): string[] {
  return [...ended.values()].map(({ outcome }) => (outcome?.ok === true ? "ok" : (outcome?.code ?? "")));
}
