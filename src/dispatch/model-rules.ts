/** What a model's dispatcher goes by, and what it works with. */
import type { Clock } from "../app/clock.ts";
import type { Limits } from "../core/policy.ts";
import type { RetryLimits } from "../core/retry.ts";
import type { Engine } from "../engine/engine.ts";
import type { Events } from "../observe/events.ts";
import type { HealthLimits } from "../workers/health.ts";
import type { PipelineMode } from "./pipeline.ts";

/** Share of its queue or memory that a worker may report as used before it stops counting as capacity. */
export const MAX_WORKER_LOAD = 0.9;

export interface ModelRules {
  readonly name: string;
  readonly limits: Limits;
  /** The most that the inputs of one batch weigh, unless it is one task (`core/weight.ts`). Default: no budget. */
  readonly maxBatchTokens?: number | undefined;
  readonly maxBatchBytes?: number | undefined;
  readonly workerMs: number;
  /** The workers are part of this process and can take it down. Default: false. */
  readonly inProcess?: boolean;
  /** Whether a worker gets its next batch while it runs one. Default: `auto`. */
  readonly pipeline?: PipelineMode;
  readonly retry: RetryLimits & { readonly budget: number };
  readonly health: HealthLimits;
  /** A worker that says it is fuller than this is no capacity. Default: 1. */
  readonly maxWorkerLoad?: number;
}

export interface DispatcherParts {
  readonly engine: Engine;
  readonly clock: Clock;
  readonly events: Events;
  readonly random: () => number;
  readonly newBatchId: () => string;
  /** Other processes list these workers too; none is used before src/workers/fleet says that we hold it. */
  readonly shared?: boolean;
  /** Behind the name of each worker: where other processes have some that are called the same. */
  readonly suffix?: string;
}
