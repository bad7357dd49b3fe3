/**
 * `telemetry`: what it costs to be seen, as throughput of the whole path.
 *
 * The path of `embedded` (2 KB body, 64 workers of 1 ms, 256 callers in a closed loop) on four servers on one core,
 * in turns:
 *
 *   nothing      no metrics, no dashboard, no request kept
 *   metrics      /metrics is kept
 *   default      metrics, the dashboard's seconds, the latest 10,000 requests
 *   everything   the same, and somebody looks: a dashboard that is open, /metrics read every second, one request in
 *                a hundred traced to a collector (OTLP), a row for each request in PostgreSQL
 *
 * Collector, dashboard, scraper (watchers.ts) and PostgreSQL run on the generator's core: they would be other
 * machines. They look only while their own server is measured. What of it this Ferry does not have is told in a note.
 *
 * The ratio is that of the medians of each server's turns.
 */
import { join } from "node:path";
import { measure, type Measured } from "../generator.ts";
import { PostgresServer } from "../postgres.ts";
import { Child } from "../process.ts";
import { FerryServer, freePorts, host, ready, type FerrySetup } from "../server.ts";
import {
  durationMs,
  figure,
  loadNotes,
  median,
  type Bench,
  type Figure,
  type Report,
  type Scenario,
} from "../scenario.ts";
import type { Sightings } from "../watchers.ts";

const callers = 256;
const goal = 0.9;
const sample = 0.01;
const seenTimeoutMs = 5000;

export const telemetry: Scenario = {
  name: "telemetry",
  summary: "the path of embedded with nobody looking, with metrics, by default, with everything on, in turns",
  run,
};

const names = ["nothing", "metrics", "default", "everything"] as const;
type Name = (typeof names)[number];

interface Side {
  readonly name: Name;
  readonly server: FerryServer;
  readonly runs: Measured[];
}

async function run(bench: Bench): Promise<Report> {
  const core = bench.cores?.generator;
  await using postgres = await PostgresServer.start(bench.dir, { core });
  await using watchers = await Watchers.start(core);
  await using started = new AsyncDisposableStack();
  const settings = settingsOf(postgres.url, watchers.collectorUrl);
  const sides: Side[] = [];
  for (const name of names) {
    const setup: FerrySetup = {
      dir: bench.dir,
      core: bench.cores?.server,
      models: [{ name: "bench", workers: 64, baseMs: 1 }],
      settings: settings[name],
    };
    sides.push({ name, server: started.use(await FerryServer.start(setup)), runs: [] });
  }
  const behind = { postgres: postgres.pid, watchers: watchers.pid };
  const slice = async (side: Side, seconds: number): Promise<Measured> => {
    if (side.name === "everything") watchers.watch(side.server.adminUrl);
    try {
      return await load(bench, side.server, seconds, behind);
    } finally {
      if (side.name === "everything") await watchers.rest();
    }
  };
  // Before the first turn that counts, as in `embedded`.
  for (const side of sides) await slice(side, 10);
  const turns = bench.quick ? 2 : 6;
  for (let turn = 1; turn <= turns; turn++) {
    for (const side of sides) {
      bench.progress(`turn ${turn} of ${turns}: ${side.name}`);
      side.runs.push(await slice(side, 4));
    }
    sides.reverse(); // whoever comes first in a turn does not always do so
  }
  // Ends the servers first: what they still hold for PostgreSQL is written then.
  const seen = await watchers.rest();
  const { totals } = await sides.find(({ name }) => name === "everything")!.server.health();
  await started.disposeAsync();
  return report(sides, seen, { rows: postgres.rows(), requests: totals.requests });
}

function settingsOf(postgresUrl: string, otlpUrl: string): Record<Name, Record<string, unknown>> {
  const unseen = { metrics: false, dashboard: false };
  return {
    nothing: { telemetry: unseen, requestLog: { recent: 0 } },
    metrics: { telemetry: { ...unseen, metrics: true }, requestLog: { recent: 0 } },
    default: {},
    everything: { telemetry: { otlpUrl, sample }, requestLog: { url: postgresUrl } },
  };
}

function load(
  bench: Bench,
  server: FerryServer,
  seconds: number,
  behind: Readonly<Record<string, number>>,
): Promise<Measured> {
  return measure(
    {
      target: server.target,
      bodyBytes: 2048,
      verify: true,
      warmMs: 1000,
      measureMs: durationMs(bench, seconds),
      drainMs: 2000,
      load: { kind: "closed", callers },
    },
    { core: bench.cores?.generator, serverPid: server.pid, behind },
  );
}

/** Since the start of the server that writes them. */
interface Logged {
  readonly rows: number;
  readonly requests: number;
}

/** The process of watchers.ts. */
class Watchers implements AsyncDisposable {
  readonly pid: number;
  readonly collectorUrl: string;
  readonly #child: Child;

  private constructor(child: Child, port: number) {
    this.#child = child;
    this.pid = child.pid;
    this.collectorUrl = `http://${host}:${port}`;
  }

  static async start(core: number | undefined): Promise<Watchers> {
    const [port] = await freePorts(1);
    const child = new Child(join(import.meta.dirname, "../watchers.ts"), [String(port)], { core });
    await ready(child);
    return new Watchers(child, port!);
  }

  watch(adminUrl: string): void {
    this.#child.write(`watch ${adminUrl}\n`);
  }

  async rest(): Promise<Sightings> {
    const answer = this.#child.line((line) => line.includes('"msg":"seen"'), seenTimeoutMs);
    this.#child.write("rest\n");
    return JSON.parse(await answer) as Sightings;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#child[Symbol.asyncDispose]();
  }
}

function report(sides: readonly Side[], seen: Sightings, { rows, requests }: Logged): Report {
  const runsOf = (name: Name): readonly Measured[] => sides.find((side) => side.name === name)!.runs;
  const rate = (name: Name): number => median(runsOf(name).map((run) => run.rate));
  // Less moved by what else runs on the machine than throughput is.
  const micros = (name: Name): number =>
    median(runsOf(name).map((run) => (run.serverCpuShare / run.rate) * 1e6));
  const ratio = (name: Name): Figure => {
    const value = rate(name) / rate("nothing");
    return figure(`${name}, throughput to nothing`, value, "ratio", ">=", goal);
  };
  const all = sides.flatMap(({ runs }) => runs);
  const errorCount = all.reduce((sum, run) => sum + run.errors, 0);
  return {
    figures: [
      ...names.slice(1).map(ratio),
      ...names.map((name) => figure(`${name}, throughput, median`, rate(name), "req/s")),
      ...names.map((name) => figure(`${name}, CPU per request`, micros(name), "µs")),
      figure("ferry CPU, median", median(all.map((run) => run.serverCpuShare)) * 100, "%"),
      figure("the generator's core, highest", Math.max(...all.map(otherCore)) * 100, "%"),
      figure("everything, requests since its start", requests, "count"),
      figure("rows in PostgreSQL", rows, "count"),
      figure("posts to the collector", seen.posts, "count"),
      figure("scrapes", seen.scrapes, "count"),
      figure("to the dashboard", seen.liveBytes / 1024, "KB"),
      figure("errors", errorCount, "count", "<=", 0),
    ],
    notes: [
      ...missing(seen, rows),
      ...sides.flatMap(({ name, runs }) =>
        runs.flatMap((run, i) => loadNotes(run, `the generator, ${name}, turn ${i + 1},`)),
      ),
    ],
  };
}

/** Of everything that shares the generator's core; above 90 % it may be what was measured. */
function otherCore({ cpuShare, behindCpuShares, childrenCpuShare }: Measured): number {
  return Object.values(behindCpuShares).reduce((sum, share) => sum + share, cpuShare + childrenCpuShare);
}

function missing(seen: Sightings, rows: number): string[] {
  const notes: string[] = [];
  if (seen.liveBytes === 0) notes.push(`nobody watched: /internal/live answered ${seen.liveStatus}`);
  if (seen.scrapes === 0) notes.push(`nobody scraped: /metrics answered ${seen.metricsStatus}`);
  if (seen.posts === 0) notes.push("no trace came to the collector: this Ferry sends none");
  if (rows === 0) notes.push("no row came to PostgreSQL: this Ferry writes none");
  return notes;
}
