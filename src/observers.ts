/**
 * Those who look on: metrics, traces, the request log, the dashboard. Each listens to events and, where it
 * must, looks at the process through its `Sight`; none stands in a request's path.
 */
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config.ts";
import { assetRoutes } from "./dashboard/assets.ts";
import { Fold } from "./dashboard/fold.ts";
import { Live } from "./dashboard/live.ts";
import { LoopDelay } from "./dashboard/loop-delay.ts";
import type { Engine } from "./engine/engine.ts";
import type { Routes } from "./gateway/server.ts";
import type { Events } from "./telemetry/events.ts";
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
  const live = parts.config.telemetry.dashboard ? openLive(parts) : undefined;
  const open = parts.config.telemetry.dashboard ? assetRoutes() : {};
  return { guarded: { ...live?.routes }, open, close: async () => live?.close() };
}

/** The dashboard's stream, and the fold behind it. */
function openLive(parts: ObserverParts): { routes: Routes; close(): void } {
  const { config, role, clock, sight } = parts;
  const models = config.models.map(({ name, maxBatchSize, maxWaitMs, policy }) => ({
    name,
    maxBatchSize,
    maxWaitMs,
    policy,
  }));
  const tiers = config.tiers.map(({ name }) => name);
  const fleet = config.engine.kind === "redis";
  const { targetUtilization } = config.admission;
  const delay = new LoopDelay(clock);
  const fold = new Fold({ models, tiers, role, fleet, targetUtilization }, { ...parts, delay });
  const about = {
    version: version(),
    startedAt: Math.round(sight.process().startedAt),
    role,
    engine: config.engine.kind,
    demo: config.models.some(({ backend }) => backend.kind === "simulated"),
    tiers,
    models,
  };
  const rules = { maxViewers: config.telemetry.maxViewers, stuckMs: config.limits.requestTimeoutMs };
  const live = new Live(rules, fold, about, () => parts.apiUrl(), clock);
  return {
    routes: live.routes(),
    close: () => {
      live.close();
      fold.stop();
    },
  };
}
