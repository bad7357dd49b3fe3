/**
 * Opens what remembers requests: the log in memory, in PostgreSQL where one is set, and the troubles of tasks.
 */
import { randomUUID } from "node:crypto";
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config.ts";
import type { Engine } from "./engine/engine.ts";
import type { History } from "./gateway/story.ts";
import type { Events } from "./telemetry/events.ts";
import type { Counter, PostgresLog } from "./telemetry/request-log-postgres.ts";
import { RequestLog } from "./telemetry/request-log.ts";
import { Troubles } from "./telemetry/troubles.ts";

export interface RequestLogParts {
  readonly config: Config;
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly engine: Engine;
  random(): number;
}

export interface OpenedRequestLog {
  readonly log: RequestLog;
  readonly history: History;
  /** For whoever shows metrics; none without PostgreSQL. */
  readonly counters: readonly Counter[];
  close(): Promise<void>;
}

/** A task ends by its deadline; the rest is for the news to arrive. */
const NEWS_MS = 10_000;
/** Requests of one task that its story names. */
const TOLD = 100;

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
    log,
    history: {
      recent: () => log.rows(),
      requests: (id) => log.find(id, TOLD),
      older: async (id) => postgres?.find(id, TOLD),
      troubles: (id) => troubles.of(id),
    },
    counters: postgres?.counters ?? [],
    close: async () => {
      await postgres?.close();
      unwatch();
      log.close();
    },
  };
}

/** Its client is loaded only where it is used; a batcher takes no requests. */
async function openPostgres(parts: RequestLogParts): Promise<PostgresLog | undefined> {
  const { url, ...settings } = parts.config.requestLog;
  if (url === undefined || parts.role === "batcher") return undefined;
  const { PostgresLog } = await import("./telemetry/request-log-postgres.ts");
  return new PostgresLog({ ...settings, url, instance: randomUUID() }, parts);
}
