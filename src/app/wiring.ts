/** Small things between the config and the parts that `ferry.ts` puts together. */
import { hasAddresses } from "./config/worker-addresses.ts";
import type { Prospects } from "../gateway/admission/gate.ts";
import type { Config, ModelConfig } from "./config/config.ts";
import { Sampler } from "../core/trace.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import type { Fleet } from "../workers/fleet/fleet.ts";
import { FleetOutlook } from "../workers/fleet/outlook.ts";
import type { ModelRules } from "../dispatch/model-rules.ts";
import type { Tracing } from "../observe/tracing.ts";

/** How a model's workers are: those of this process, or of the whole fleet. */
export function outlook(
  model: string,
  dispatcher: Dispatcher | undefined,
  fleet: Fleet | undefined,
): Prospects {
  return fleet === undefined ? alone(dispatcher!) : new FleetOutlook(fleet, model);
}

/** How the workers of a process are that has no others beside it. */
function alone(dispatcher: Dispatcher): Prospects {
  return {
    horizon: (now) => dispatcher.horizon(now),
    hasRoom: (waiting, now) => dispatcher.hasRoom(waiting, now),
    othersPerMs: () => 0,
  };
}

/** What a model's dispatcher goes by. */
export function rulesOf(model: ModelConfig, maxWorkerLoad: number): ModelRules {
  const { name, policy, pipeline, maxBatchSize, maxWaitMs, maxBatchTokens, maxBatchBytes } = model;
  const { timeouts, retry, health } = model;
  const limits = { policy, maxBatchSize, maxWaitMs };
  const budgets = { maxBatchTokens, maxBatchBytes, maxWorkerLoad };
  const { workerMs } = timeouts;
  // A thread of ours: a crash in native code of the user's function is a crash of Ferry.
  const inProcess = model.backend.kind === "module";
  return { name, limits, pipeline, ...budgets, workerMs, inProcess, retry, health };
}

export function ofFleet({ backend }: ModelConfig, member: string): { shared: boolean } | { suffix: string } {
  return hasAddresses(backend) ? { shared: true } : { suffix: `@${member.slice(0, 5)}` };
}

export function perUser(perUserPerMinute: number | undefined): { perUserPerMinute?: number } {
  return perUserPerMinute === undefined ? {} : { perUserPerMinute };
}

export function samplerFor({ share, followsCaller }: Tracing, random: () => number): Sampler {
  return new Sampler(share, random, followsCaller);
}

/** The config as it is whenever somebody looks at it. */
export function liveConfig(current: () => Config): Config {
  return new Proxy({} as Config, { get: (_, key) => Reflect.get(current(), key) as unknown });
}
