/** From the config to the rules of each part. Pure: a reload calls them with the next config. */
import { RETRY_BUDGET } from "../core/retry.ts";
import type { AdmissionRules } from "../gateway/admission/admission.ts";
import { MAX_WORKER_LOAD, type ModelRules } from "../dispatch/model-rules.ts";
import { LONGEST_EJECTION } from "../workers/health.ts";
import type { VaultRules } from "../workers/backend/vault.ts";
import type { Config, ModelConfig } from "./config/config.ts";
import { hasAddresses } from "./config/worker-addresses.ts";

/** What a model's dispatcher goes by. */
export function rulesOf(model: ModelConfig): ModelRules {
  const { name, policy, pipeline, maxBatchSize, maxWaitMs, maxBatchTokens, maxBatchBytes } = model;
  const { timeouts } = model;
  const retry = { ...model.retry, budget: RETRY_BUDGET };
  const health = { ...model.health, maxEjectMs: LONGEST_EJECTION * model.health.ejectMs };
  const limits = { policy, maxBatchSize, maxWaitMs };
  const budgets = { maxBatchTokens, maxBatchBytes, maxWorkerLoad: MAX_WORKER_LOAD };
  const { workerMs } = timeouts;
  // A thread of ours: a crash in native code of the user's function is a crash of Ferry.
  const inProcess = model.backend.kind === "module";
  return { name, limits, pipeline, ...budgets, workerMs, inProcess, retry, health };
}

export function ofFleet({ backend }: ModelConfig, member: string): { shared: boolean } | { suffix: string } {
  return hasAddresses(backend) ? { shared: true } : { suffix: `@${member.slice(0, 5)}` };
}

export function admissionRules({ tiers, limits, models }: Config): AdmissionRules {
  const { perUserPerMinute } = limits;
  const onlyModel = models.length === 1 ? models[0]!.name : undefined;
  return { tiers, onlyModel, ...(perUserPerMinute !== undefined && { perUserPerMinute }) };
}

/** A credential is kept for as long as a task of its model may live; as many of them as tasks can wait. */
export function vaultRules({ models, limits }: Config, name: string): VaultRules {
  const model = models.find((each) => each.name === name);
  const ttlMs = model === undefined ? 0 : model.timeouts.totalMs + model.timeouts.workerMs;
  return { ttlMs, max: limits.maxQueued };
}

/** The config in force whenever a property of it is read. */
export function liveConfig(current: () => Config): Config {
  return new Proxy({} as Config, { get: (_, key) => Reflect.get(current(), key) as unknown });
}
