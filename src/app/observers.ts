/** Opens the observers (metrics, traces, request log, dashboard): event listeners, never on a request's path. */
import { randomUUID } from "node:crypto";
import { isDeepStrictEqual } from "node:util";
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config/config.ts";
import { Refusal } from "../core/errors.ts";
import { assetRoutes } from "../observe/dashboard/assets.ts";
import { Fold } from "../observe/dashboard/fold.ts";
import { Live, MAX_VIEWERS } from "../observe/dashboard/live.ts";
import type { Engine } from "../engine/engine.ts";
import type { Exchange } from "../gateway/exchange.ts";
import type { Routes } from "../gateway/server.ts";
import type { History } from "../gateway/story.ts";
import { type Events, listening } from "../observe/events.ts";
import { openMetrics } from "../observe/metrics.ts";
import { LoopDelay, ProcessSampler, type ProcessSamples } from "../observe/processes.ts";
import { RecentBatches, Troubles } from "../observe/recent.ts";
import type { PostgresLog } from "../observe/request-log-postgres.ts";
import { RequestLog } from "../observe/request-log.ts";
import { Sender } from "../observe/sender.ts";
import type { Counter, Sight } from "../observe/sight.ts";
import type { Tally } from "../observe/tally.ts";
import { openTraces } from "../observe/traces.ts";
import type { Tracing } from "../observe/tracing.ts";
import { version } from "./version.ts";

/** How long after a task's deadline the request log looks up a missing outcome. */
const NEWS_MS = 10_000;
/** Requests listed per task in its history. */
const MAX_STORY_REQUESTS = 100;
/** Default and maximum of `/internal/trace`. */
const TRACE_SECONDS = 10;
const MAX_TRACE_SECONDS = 60;

export interface ObserverParts {
  /** The config in force whenever a property is read. */
  readonly config: Config;
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly sight: Sight;
  /** The name of this process in `processes`. */
  readonly process: string;
  readonly processes: ProcessSamples;
  readonly tally: Tally;
  readonly engine: Engine;
  random(): number;
  readonly tracing: Tracing | undefined;
  apiUrl(): string;
}

interface Observer {
  readonly guarded?: Routes;
  /** Without a token: the dashboard's shell, which holds no data. */
  readonly open?: Routes;
  readonly counters?: readonly Counter[];
  close?(): Promise<void> | void;
}

export interface Observers {
  readonly guarded: Routes;
  readonly open: Routes;
  readonly history: History;
  /** Called last, so that every event is written. */
  close(): Promise<void>;
}

export async function openObservers(parts: ObserverParts): Promise<Observers> {
  const { telemetry } = parts.config;
  // Its thread starts with the first item to send.
  const sender = new Sender(parts.events);
  const { history, ...requests } = await openRequestLog(parts, sender);
  const all: Observer[] = [requests];
  if (parts.tracing !== undefined) all.push(traces(parts, parts.tracing, sender));
  if (telemetry.dashboard) all.push(dashboard(parts), { open: assetRoutes() });
  // Last: it exports the counters of the others.
  if (telemetry.metrics)
    all.push(
      metrics(
        parts,
        all.flatMap(({ counters = [] }) => counters),
      ),
    );
  return {
    guarded: Object.assign({}, ...all.map(({ guarded }) => guarded)) as Routes,
    open: Object.assign({}, ...all.map(({ open }) => open)) as Routes,
    history,
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

function metrics(
  { config, clock, events, sight, process, processes }: ObserverParts,
  more: readonly Counter[],
): Observer {
  const models = () =>
    config.models.map(({ name, maxBatchSize, cache }) => ({
      name,
      maxBatchSize,
      caches: cache.scope !== "off",
    }));
  const tiers = config.tiers.map(({ name }) => name);
  const opened = openMetrics({ models, tiers, version: version(), events, sight, processes, more });
  const sampler = new ProcessSampler(process, events, clock, (sample) => processes.put(sample));
  return { guarded: opened.routes, close: () => sampler.stop() };
}

/** The layout depends on the models: a reload that changes them resets the fold, and viewers reconnect. */
function dashboard(parts: ObserverParts): Observer {
  let live = openLive(parts);
  let { models } = parts.config;
  parts.events.on("reloaded", () => {
    if (isDeepStrictEqual(models, parts.config.models)) return;
    ({ models } = parts.config);
    live.close();
    live = openLive(parts);
  });
  const delegate = (path: string, method: string) => (exchange: Exchange, id: string) =>
    live.routes[path]![method]!(exchange, id);
  const guarded: Routes = Object.fromEntries(
    Object.entries(live.routes).map(([path, methods]) => [
      path,
      Object.fromEntries(Object.keys(methods).map((method) => [method, delegate(path, method)])),
    ]),
  );
  return { guarded, close: () => live.close() };
}

function openLive(parts: ObserverParts): { routes: Routes; close(): void } {
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
  const { events, end } = listening(parts.events);
  const fold = new Fold({ models, tiers, role, targetUtilization, fleet }, { ...parts, events, delay });
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
  const rules = { maxViewers: MAX_VIEWERS, stuckMs: config.limits.requestTimeoutMs };
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

async function openRequestLog(
  parts: ObserverParts,
  sender: Sender,
): Promise<Observer & { history: History }> {
  const { config, clock, events, engine } = parts;
  const postgres = await openPostgres(parts, sender);
  const log = new RequestLog(events, clock, {
    recent: parts.role === "batcher" ? 0 : config.requestLog.recent,
    lookAfterMs: NEWS_MS + Math.max(...config.models.map(({ timeouts }) => timeouts.totalMs)),
    lookUp: (id) => engine.outcome(id),
    sink: postgres,
    // In Redis that would be a command for each: there the later look does.
    reportedLate: parts.process === "core" && config.engine.kind === "memory",
  });
  const unwatch = engine.watch({ settled: (record) => log.settled(record) });
  const troubles = new Troubles(events, clock);
  return {
    history: {
      recent: () => log.rows(),
      requests: (id) => log.find(id, MAX_STORY_REQUESTS),
      older: async (id) => postgres?.find(id, MAX_STORY_REQUESTS),
      troubles: (id) => troubles.of(id),
    },
    guarded: traceRoutes(parts, log),
    counters: postgres?.counters ?? [],
    close: async () => {
      await postgres?.close();
      unwatch();
      log.close();
    },
  };
}

async function openPostgres(parts: ObserverParts, sender: Sender): Promise<PostgresLog | undefined> {
  const { url, ...settings } = parts.config.requestLog;
  if (url === undefined || parts.role === "batcher") return undefined;
  const { PostgresLog } = await import("../observe/request-log-postgres.ts");
  return new PostgresLog({ ...settings, url, instance: randomUUID() }, { ...parts, sender });
}

function traceRoutes({ config, clock, events, engine }: ObserverParts, log: RequestLog): Routes {
  const batches = new RecentBatches(events, clock, (model) => engine.waiting(model));
  const tiers = config.tiers.map(({ name }) => name);
  return {
    "/internal/trace": {
      GET: async (exchange) => {
        const { traceText } = await import("../observe/perfetto.ts");
        const seconds = traceSeconds(new URLSearchParams(exchange.query).get("seconds"));
        const models = config.models.map(({ name }) => name);
        const to = clock.now();
        const from = to - 1000 * seconds;
        const scene = { from, to, models, tiers, batches: batches.since(from), requests: log.rows() };
        const name = `attachment; filename="ferry-trace.json"`;
        exchange.send(200, await traceText(scene), ["content-disposition", name]);
      },
    },
  };
}

function traceSeconds(written: string | null): number {
  if (written === null) return TRACE_SECONDS;
  const seconds = /^\d{1,2}$/.test(written) ? Number(written) : 0;
  if (seconds >= 1 && seconds <= MAX_TRACE_SECONDS) return seconds;
  throw new Refusal("INVALID_REQUEST", `"seconds" must be a number from 1 to ${MAX_TRACE_SECONDS}`);
}
