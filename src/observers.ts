/**
 * Those who look on: metrics, traces, the request log, the dashboard. Each listens to events and, where it
 * must, looks at the process through its `Sight`; none stands in a request's path.
 */
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config.ts";
import type { Engine } from "./engine/engine.ts";
import type { Routes } from "./gateway/server.ts";
import { openLive } from "./live.ts";
import type { Events } from "./telemetry/events.ts";
import { type Metrics, type MoreCounter, openMetrics } from "./telemetry/metrics.ts";
import type { Sight } from "./telemetry/sight.ts";
import type { Tally } from "./telemetry/tally.ts";
import { version } from "./version.ts";

export interface ObserverParts {
  readonly config: Config;
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly sight: Sight;
  readonly tally: Tally;
  readonly engine: Engine;
  /** Where clients connect; "" in a batcher, and until it is known. */
  apiUrl(): string;
}

export interface Observers {
  /** For whoever holds the admin token. */
  readonly guarded: Routes;
  /** For anybody who reaches the admin listener: the shell of the dashboard, which holds no data. */
  readonly open: Routes;
  /** Told last, when everything else has stopped: what they hold is written down. */
  close(): Promise<void>;
}

export async function openObservers(parts: ObserverParts): Promise<Observers> {
  const metrics = await metricsOf(parts, []);
  const live = parts.config.telemetry.dashboard ? openLive(parts) : undefined;
  return { guarded: { ...metrics?.routes, ...live?.routes }, open: {}, close: async () => live?.close() };
}

/** `more` are the counters that others keep. */
async function metricsOf(
  { config, events, sight }: ObserverParts,
  more: readonly MoreCounter[],
): Promise<Metrics | undefined> {
  if (!config.telemetry.metrics) return undefined;
  const models = config.models.map(({ name, maxBatchSize, cache }) => ({
    name,
    maxBatchSize,
    caches: cache.scope !== "off",
  }));
  const tiers = config.tiers.map(({ name }) => name);
  return openMetrics({ models, tiers, version: version(), events, sight, more });
}
