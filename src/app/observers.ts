/**
 * Those who look on: metrics, traces, the request log, the dashboard. Each listens to events and, where it
 * must, looks at the process through its `Sight`; none stands in a request's path.
 */
import { randomUUID } from "node:crypto";
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config/config.ts";
import { assetRoutes } from "../observe/dashboard/assets.ts";
import type { Engine } from "../engine/engine.ts";
import type { Exchange } from "../gateway/exchange.ts";
import type { Routes } from "../gateway/server.ts";
import type { History } from "../gateway/story.ts";
import { openRequestLog } from "./request-log.ts";
import { openLive } from "./live.ts";
import type { Events } from "../observe/events.ts";
import { openMetrics } from "../observe/metrics.ts";
import { Sender } from "../observe/sender.ts";
import type { Counter, Sight } from "../observe/sight.ts";
import type { Tally } from "../observe/tally.ts";
import { openTraces } from "../observe/traces.ts";
import type { Tracing } from "../observe/tracing.ts";
import { version } from "./version.ts";

export interface ObserverParts {
  readonly config: Config;
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly sight: Sight;
  readonly tally: Tally;
  readonly engine: Engine;
  /** Numbers in [0, 1). */
  random(): number;
  /** Left out: nobody is traced. */
  readonly tracing: Tracing | undefined;
  /** Where clients connect; "" in a batcher, and until it is known. */
  apiUrl(): string;
}

export interface Observers {
  /** For whoever holds the admin token. */
  readonly guarded: Routes;
  /** For anybody who reaches the admin listener: the shell of the dashboard, which holds no data. */
  readonly open: Routes;
  /** What is remembered of requests. */
  readonly history: History;
  /** The config has other models, or other rules for them. */
  retune(): void;
  /** Told last, when everything else has stopped: what they hold is written down. */
  close(): Promise<void>;
}

/** One of them: what it offers to those who ask, what it counts, how it ends. */
interface Observer {
  readonly routes?: Routes;
  readonly open?: Routes;
  readonly counters?: readonly Counter[];
  retune?(): void;
  close?(): Promise<void> | void;
}

export async function openObservers(parts: ObserverParts): Promise<Observers> {
  const { telemetry } = parts.config;
  // Its thread starts when there is something to send.
  const sender = new Sender(parts.events);
  const requests = await openRequestLog({ ...parts, sender });
  const all: Observer[] = [requests];
  if (parts.tracing !== undefined) all.push(traces(parts, parts.tracing, sender));
  if (telemetry.dashboard) all.push(dashboard(parts), { open: assetRoutes() });
  // Last: the others have counters for it.
  const counters = all.flatMap((each) => each.counters ?? []);
  if (telemetry.metrics) all.push(metrics(parts, counters));
  return {
    guarded: Object.assign({}, ...all.map(({ routes }) => routes)) as Routes,
    open: Object.assign({}, ...all.map(({ open }) => open)) as Routes,
    history: requests.history,
    retune: () => all.forEach((each) => each.retune?.()),
    close: async () => {
      await Promise.all(all.map(async (each) => each.close?.()));
      await sender.close();
    },
  };
}

function traces({ config, role, sight, ...rest }: ObserverParts, tracing: Tracing, sender: Sender): Observer {
  const models = () =>
    config.models.map(({ name, backend }) => {
      return { name, kind: backend.kind, ...(backend.kind === "http" && { protocol: backend.protocol }) };
    });
  const instance = sight.process().id || randomUUID();
  const about = { models, apart: role === "batcher", version: version(), instance, zone: config.zone };
  const opened = openTraces(tracing, { ...rest, ...about, sender });
  return { counters: [opened.dropped], close: () => opened.close() };
}

function metrics({ config, events, sight }: ObserverParts, more: readonly Counter[]): Observer {
  const models = () =>
    config.models.map(({ name, maxBatchSize, cache }) => ({
      name,
      maxBatchSize,
      caches: cache.scope !== "off",
    }));
  const tiers = config.tiers.map(({ name }) => name);
  const opened = openMetrics({ models: models(), tiers, version: version(), events, sight, more });
  return { routes: opened.routes, retune: () => opened.retune(models()) };
}

/** What it shows is laid out by the models: with others it begins anew, and those who watch connect again. */
function dashboard(parts: ObserverParts): Observer {
  let live = openLive(parts);
  const routes: Routes = Object.fromEntries(
    Object.entries(live.routes).map(([path, methods]) => [
      path,
      Object.fromEntries(
        Object.keys(methods).map((method) => [
          method,
          (exchange: Exchange, id: string) => live.routes[path]![method]!(exchange, id),
        ]),
      ),
    ]),
  );
  return {
    routes,
    retune: () => {
      live.close();
      live = openLive(parts);
    },
    close: () => live.close(),
  };
}
