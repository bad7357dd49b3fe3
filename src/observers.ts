/**
 * Those who look on: metrics, traces, the request log, the dashboard. Each listens to events and, where it
 * must, looks at the process through its `Sight`; none stands in a request's path.
 */
import type { Clock } from "./clock.ts";
import type { Config, Role } from "./config.ts";
import type { Engine } from "./engine/engine.ts";
import type { Routes } from "./gateway/server.ts";
import type { History } from "./gateway/story.ts";
import { openRequestLog } from "./request-log.ts";
import type { Events } from "./telemetry/events.ts";
import type { Sight } from "./telemetry/sight.ts";
import type { Tally } from "./telemetry/tally.ts";

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
  /** Told last, when everything else has stopped: what they hold is written down. */
  close(): Promise<void>;
}

export async function openObservers(parts: ObserverParts): Promise<Observers> {
  const requests = await openRequestLog(parts);
  return {
    guarded: requests.routes,
    open: {},
    history: requests.history,
    close: () => requests.close(),
  };
}
