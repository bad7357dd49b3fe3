/**
 * Those who look at Ferry while it is measured, in a process of their own: a collector of traces, a dashboard and
 * a Prometheus, as far as Ferry can tell.
 *
 *   node bench/watchers.ts PORT
 *
 * The collector listens on PORT, takes whatever is posted there and counts it. A line `watch URL` on stdin makes one
 * dashboard read URL/internal/live and one scraper read URL/metrics every second, until `rest`. A line `write URL N`
 * writes N rows of the request log a second to the PostgreSQL at URL instead, as a Ferry would. Each `rest` is
 * answered by a line of JSON on stderr with what was seen since the start; a status of 404 means that this Ferry
 * has no such thing. Prints the same `ready` line as Ferry.
 */
import { randomBytes, randomUUID } from "node:crypto";
import { createServer } from "node:http";
import { createInterface } from "node:readline";
import { setTimeout as pause } from "node:timers/promises";
import { SystemClock } from "../src/app/clock.ts";
import type { AnsweredRequest } from "../src/observe/events.ts";
import { PostgresLink } from "../src/observe/postgres-link.ts";
import { bundleOf, insertRows, migrate } from "../src/observe/request-log-schema.ts";
import { RequestRow } from "../src/observe/request-log.ts";

/** What was seen since the start. */
export interface Sightings {
  /** Posts to the collector, and their bytes. */
  posts: number;
  traceBytes: number;
  /** Status of the last answer; 0: never asked. */
  liveStatus: number;
  liveBytes: number;
  metricsStatus: number;
  scrapes: number;
  scrapeBytes: number;
}

const scrapeEveryMs = 1000;

function listen(port: number): void {
  const seen: Sightings = {
    posts: 0,
    traceBytes: 0,
    liveStatus: 0,
    liveBytes: 0,
    metricsStatus: 0,
    scrapes: 0,
    scrapeBytes: 0,
  };
  createServer((request, response) => {
    seen.posts++;
    request.on("data", (chunk: Buffer) => (seen.traceBytes += chunk.length));
    request.on("end", () => response.writeHead(200, { "content-type": "application/x-protobuf" }).end());
  }).listen(port, "127.0.0.1", () => process.stderr.write(`${JSON.stringify({ msg: "ready" })}\n`));

  let watching: AbortController | undefined;
  createInterface({ input: process.stdin }).on("line", (line) => {
    const [word, url = "", perSecond = "0"] = line.split(" ");
    watching?.abort();
    watching = undefined;
    if (word === "watch") {
      watching = new AbortController();
      void view(url, seen, watching.signal);
      void scrape(url, seen, watching.signal);
    } else if (word === "write") {
      watching = new AbortController();
      void write(url, Number(perSecond), watching.signal);
    } else process.stderr.write(`${JSON.stringify({ msg: "seen", ...seen })}\n`);
  });
}

const rowsAtOnce = 1000;

/** The rows of somebody else's requests, at their pace. */
async function write(url: string, perSecond: number, signal: AbortSignal): Promise<void> {
  const link = new PostgresLink(url, 10_000, new SystemClock());
  await migrate(link);
  const rows = Array.from({ length: rowsAtOnce }, (_, at) => new RequestRow(at + 1, someRequest(at)));
  const startedAt = performance.now();
  for (let written = 0; !signal.aborted; written += rowsAtOnce) {
    const dueMs = (1000 * written) / perSecond - (performance.now() - startedAt);
    if (dueMs > 0) await pause(dueMs);
    await insertRows(link, { instance: randomUUID(), columns: bundleOf("insertRows", rows) });
  }
  link.destroy();
}

/** As it is told of when it is over. */
export function someRequest(at: number): AnsweredRequest {
  const now = Date.now();
  const worker = `gpu-${at % 64}`;
  const batch = { id: randomUUID(), size: 4, reason: "idle", worker, startedAt: now + 1, why: "" } as const;
  return {
    id: randomBytes(18).toString("hex").toUpperCase(),
    method: "POST",
    route: "/v1/inference",
    model: "bench",
    tier: "enterprise",
    tenant: "anonymous",
    status: 200,
    code: "",
    startedAt: now,
    latencyMs: 12.345,
    work: "own",
    ending: { queuedAt: now + 0.1, attempt: 1, settledAt: now + 3, batch },
    trace: undefined,
  };
}

async function view(url: string, seen: Sightings, signal: AbortSignal): Promise<void> {
  try {
    const response = await fetch(`${url}/internal/live`, { signal });
    seen.liveStatus = response.status;
    if (!response.ok) return await response.body?.cancel();
    for await (const chunk of response.body ?? []) seen.liveBytes += chunk.length;
  } catch {
    // Told to rest, or Ferry is gone: the bytes say whether anything was seen.
  }
}

async function scrape(url: string, seen: Sightings, signal: AbortSignal): Promise<void> {
  try {
    for (;;) {
      const response = await fetch(`${url}/metrics`, { signal });
      seen.metricsStatus = response.status;
      const text = await response.text();
      if (response.ok) {
        seen.scrapes++;
        seen.scrapeBytes += text.length;
      }
      await pause(scrapeEveryMs, undefined, { signal });
    }
  } catch {
    // As above.
  }
}

if (import.meta.main) listen(Number(process.argv[2]));
