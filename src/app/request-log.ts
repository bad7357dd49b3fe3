/**
 * Opens what remembers requests: the log in memory, in PostgreSQL where one is set, the troubles of tasks, and the
 * batches of the last minute; and draws them as a trace.
 */
import { randomUUID } from "node:crypto";
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config/config.ts";
import { Refusal } from "../core/errors.ts";
import type { Engine } from "../engine/engine.ts";
import type { Routes } from "../gateway/server.ts";
import type { History } from "../gateway/story.ts";
import type { Events } from "../observe/events.ts";
import { RecentBatches } from "../observe/recent-batches.ts";
import type { PostgresLog } from "../observe/request-log-postgres.ts";
import { RequestLog } from "../observe/request-log.ts";
import type { Sender } from "../observe/sender.ts";
import type { Counter } from "../observe/sight.ts";
import { Troubles } from "../observe/troubles.ts";

export interface RequestLogParts {
  readonly config: Config;
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly engine: Engine;
  /** Writes to PostgreSQL; not closed here. */
  readonly sender: Sender;
  random(): number;
}

export interface OpenedRequestLog {
  readonly history: History;
  /** For whoever holds the admin token. */
  readonly routes: Routes;
  /** For whoever shows metrics; none without PostgreSQL. */
  readonly counters: readonly Counter[];
  close(): Promise<void>;
}

/** A task ends by its deadline; the rest is for the news to arrive. */
const NEWS_MS = 10_000;
/** Requests of one task that its story names. */
const TOLD = 100;
/** Of a trace: what is drawn unless somebody asks for more, and the most that is kept. */
const TRACE_SECONDS = 10;
const MAX_TRACE_SECONDS = 60;

export async function openRequestLog(parts: RequestLogParts): Promise<OpenedRequestLog> {
  const { config, clock, events, engine } = parts;
  const postgres = await openPostgres(parts);
  const log = new RequestLog(events, clock, {
    recent: parts.role === "batcher" ? 0 : config.requestLog.recent,
    lookAfterMs: NEWS_MS + Math.max(...config.models.map(({ timeouts }) => timeouts.totalMs)),
    lookUp: (id) => engine.outcome(id),
    sink: postgres,
  });
  const unwatch = engine.watch({ settled: (record) => log.settled(record) });
  const troubles = new Troubles(events, clock);
  return {
    history: {
      recent: () => log.rows(),
      requests: (id) => log.find(id, TOLD),
      older: async (id) => postgres?.find(id, TOLD),
      troubles: (id) => troubles.of(id),
    },
    routes: traceRoutes(parts, log),
    counters: postgres?.counters ?? [],
    close: async () => {
      await postgres?.close();
      unwatch();
      log.close();
    },
  };
}

/** A batcher takes no requests. */
async function openPostgres(parts: RequestLogParts): Promise<PostgresLog | undefined> {
  const { url, ...settings } = parts.config.requestLog;
  if (url === undefined || parts.role === "batcher") return undefined;
  const { PostgresLog } = await import("../observe/request-log-postgres.ts");
  return new PostgresLog({ ...settings, url, instance: randomUUID() }, parts);
}

function traceRoutes({ config, clock, events, engine }: RequestLogParts, log: RequestLog): Routes {
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
