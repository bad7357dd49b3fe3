/**
 * Those who look on: metrics, traces, the request log, the dashboard. Each listens to events and, where it
 * must, looks at the process through its `Sight`; none stands in a request's path.
 */
import { randomUUID } from "node:crypto";
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config.ts";
import type { Engine } from "./engine/engine.ts";
import type { Routes } from "./gateway/server.ts";
import type { Events } from "./telemetry/events.ts";
import type { Sight } from "./telemetry/sight.ts";
import type { Tally } from "./telemetry/tally.ts";
import { openTraces, type TracesParts } from "./telemetry/traces.ts";
import type { Tracing } from "./telemetry/tracing.ts";
import { version } from "./version.ts";

export interface ObserverParts {
  readonly config: Config;
  readonly role: Role;
  readonly clock: Clock;
  readonly events: Events;
  readonly sight: Sight;
  readonly tally: Tally;
  readonly engine: Engine;
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
  /** Told last, when everything else has stopped: what they hold is written down. */
  close(): Promise<void>;
}

export async function openObservers(parts: ObserverParts): Promise<Observers> {
  const traces = parts.tracing && openTraces(parts.tracing, tracesParts(parts));
  return {
    guarded: {},
    open: {},
    close: async () => {
      await traces?.close();
    },
  };
}

function tracesParts({ config, role, sight, ...rest }: ObserverParts): TracesParts {
  const models = config.models.map(({ name, backend }) => {
    return { name, kind: backend.kind, ...(backend.kind === "http" && { protocol: backend.protocol }) };
  });
  const instance = sight.process().id || randomUUID();
  return { ...rest, models, apart: role === "batcher", version: version(), instance, zone: config.zone };
}
