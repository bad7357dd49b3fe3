/** Rules and dependencies of a model's dispatcher. */
import type { Clock } from "../app/clock.ts";
import type { Limits } from "../core/policy.ts";
import type { RetryLimits } from "../core/retry.ts";
import type { Engine } from "../engine/engine.ts";
import type { Events } from "../observe/events.ts";
import type { HealthLimits } from "../workers/health.ts";
import type { PipelineMode } from "./pipeline.ts";

/** Used share of its queue or memory from which a worker no longer counts as capacity. */
export const MAX_WORKER_LOAD = 0.9;

export interface ModelRules {
  readonly name: string;
  readonly limits: Limits;
  /** Bound on the weight of a batch of more than one task (`core/weight.ts`). Default: none. */
  readonly maxBatchTokens?: number | undefined;
  readonly maxBatchBytes?: number | undefined;
  /** Whether batches hold inputs of similar length; a list: the lengths that the model pads to. Default: `off`. */
  readonly lengths?: "auto" | "off" | readonly number[];
  /** The longest that a task waits in its queue. Default: no limit. */
  readonly queueMs?: number;
  readonly workerMs: number;
  /** The workers run in this process and can crash it. Default: false. */
  readonly inProcess?: boolean;
  /** Default: `auto`. */
  readonly pipeline?: PipelineMode;
  readonly retry: RetryLimits & { readonly budget: number };
  readonly health: HealthLimits;
  /** A worker that reports a higher load does not count as capacity. Default: 1. */
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
  /** Appended to worker names where other processes have workers of the same name. */
  readonly suffix?: string;
}
