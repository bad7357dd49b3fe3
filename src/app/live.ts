/** The dashboard's stream and the fold behind it, from the config. */
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config/config.ts";
import { Fold } from "../observe/dashboard/fold.ts";
import { Live } from "../observe/dashboard/live.ts";
import { LoopDelay } from "../observe/dashboard/loop-delay.ts";
import type { Engine } from "../engine/engine.ts";
import type { Routes } from "../gateway/server.ts";
import { type Events, listening } from "../observe/events.ts";
import type { Sight } from "../observe/sight.ts";
import type { Tally } from "../observe/tally.ts";
import { version } from "./version.ts";

export interface LiveParts {
  readonly config: Config;
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly sight: Sight;
  readonly tally: Tally;
  readonly engine: Pick<Engine, "watch">;
  apiUrl(): string;
}

export function openLive(parts: LiveParts): { routes: Routes; close(): void } {
  const { config, role, clock, sight, engine } = parts;
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
  // The next one listens for itself.
  const { events, end } = listening(parts.events);
  const fold = new Fold({ models, tiers, role, targetUtilization }, { ...parts, events, delay });
  const unwatch = fleet ? engine.watch({ settled: (record) => fold.ended(record) }) : () => {};
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
      unwatch();
      end();
      fold.stop();
    },
  };
}
