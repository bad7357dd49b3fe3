/** The rules of each part from the config. Pure: a reload calls them with the next config. */
import { RETRY_BUDGET } from "../core/retry.ts";
import type { AdmissionRules } from "../gateway/admission/admission.ts";
import { MAX_WORKER_LOAD, type ModelRules } from "../dispatch/model-rules.ts";
import { LONGEST_EJECTION } from "../workers/health.ts";
import type { VaultRules } from "../workers/backend/vault.ts";
import type { Config, ModelConfig } from "./config/config.ts";
import { hasAddresses } from "./config/worker-addresses.ts";

export function rulesOf(model: ModelConfig): ModelRules {
  const { name, policy, pipeline, maxBatchSize, maxWaitMs, maxBatchTokens, maxBatchBytes } = model;
  const [lengths = "auto"] = model.lengths;
  const { timeouts } = model;
  const retry = { ...model.retry, budget: RETRY_BUDGET };
  const health = { ...model.health, maxEjectMs: LONGEST_EJECTION * model.health.ejectMs };
  const limits = { policy, maxBatchSize, maxWaitMs };
  const budgets = { maxBatchTokens, maxBatchBytes, maxWorkerLoad: MAX_WORKER_LOAD };
  const { workerMs, queueMs } = timeouts;
  // Runs in a thread: a native crash of the user's function crashes Ferry.
  const inProcess = model.backend.kind === "module";
  const shape = { lengths: typeof lengths === "number" ? (model.lengths as number[]) : lengths };
  return { name, limits, pipeline, ...shape, ...budgets, queueMs, workerMs, inProcess, retry, health };
}

export function ofFleet({ backend }: ModelConfig, member: string): { shared: boolean } | { suffix: string } {
  return hasAddresses(backend) ? { shared: true } : { suffix: `@${member.slice(0, 5)}` };
}

export function admissionRules({ tiers, limits, models }: Config): AdmissionRules {
  const { perUserPerMinute } = limits;
  const onlyModel = models.length === 1 ? models[0]!.name : undefined;
  return { tiers, onlyModel, ...(perUserPerMinute !== undefined && { perUserPerMinute }) };
}

/** Kept as long as a task of its model may live; as many as tasks can wait. */
export function vaultRules({ models, limits }: Config, name: string): VaultRules {
  const model = models.find((each) => each.name === name);
  const ttlMs = model === undefined ? 0 : model.timeouts.totalMs + model.timeouts.workerMs;
  return { ttlMs, max: limits.maxQueued };
}

/** The config in force whenever a property is read. */
export function liveConfig(current: () => Config): Config {
  return new Proxy({} as Config, { get: (_, key) => Reflect.get(current(), key) as unknown });
}
