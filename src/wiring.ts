/** Small things between the config and the parts that `ferry.ts` puts together. */
import type { Prospects } from "./admission/gate.ts";
import { hasAddresses } from "./banner.ts";
import type { Config, ModelConfig } from "./config.ts";
import { Sampler } from "./core/trace.ts";
import type { Dispatcher } from "./dispatch/dispatcher.ts";
import type { Tracing } from "./telemetry/tracing.ts";

/** How the workers of a process are that has no others beside it. */
export function alone(dispatcher: Dispatcher): Prospects {
  return {
    horizon: (now) => dispatcher.horizon(now),
    hasRoom: (waiting, now) => dispatcher.hasRoom(waiting, now),
    othersPerMs: () => 0,
  };
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
