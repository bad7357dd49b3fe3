/** What a model's dispatcher goes by. */
import type { Limits } from "../core/policy.ts";
import type { RetryLimits } from "../core/retry.ts";
import type { HealthLimits } from "./health.ts";

export interface ModelRules {
  readonly name: string;
  readonly limits: Limits;
  /** The most that the inputs of one batch weigh, unless it is one task (`core/weight.ts`); left out: no budget. */
  readonly maxBatchTokens?: number | undefined;
  readonly maxBatchBytes?: number | undefined;
  readonly workerMs: number;
  readonly retry: RetryLimits & { readonly budget: number };
  readonly health: HealthLimits;
  /** A worker that says it is fuller than this is no capacity; left out: none is too full. */
  readonly maxWorkerLoad?: number;
}
