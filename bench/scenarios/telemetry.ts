/**
 * `telemetry`: what it costs to be seen, as throughput of the whole path.
 *
 * The path of `embedded` (2 KB body, 64 workers of 1 ms, 256 callers in a closed loop) on four servers on one core,
 * in turns, each started anew for every round (how well V8 compiles one process differs by more than what is
 * measured here):
 *
 *   nothing      no metrics, no dashboard, no request kept
 *   metrics      /metrics is kept
 *   default      metrics, the dashboard's seconds, the latest 10,000 requests
 *   everything   the same, and somebody looks: a dashboard that is open, /metrics read every second, one request in
 *                a hundred traced to a collector (OTLP), a row for each request in PostgreSQL
 *
 * Collector, dashboard, scraper (watchers.ts) and PostgreSQL run on the generator's core: they would be other
 * machines. Dashboard and scraper look only while their own server is measured. PostgreSQL shares its caches with the
 * core beside it, and at work slows whatever runs there: so it always works, and in the turns of the other servers
 * writes as many rows a second for somebody else. What of it this Ferry does not have is told in a note.
 *
 * The ratio is that of the medians of each server's turns.
 */
import { median } from "../../src/core/median.ts";
import { join } from "node:path";
import { measure, type Measured } from "../generator.ts";
import { PostgresServer } from "../postgres.ts";
import { Child } from "../process.ts";
import { FerryServer, freePorts, host, ready, type FerrySetup } from "../server.ts";
import {
  durationMs,
  figure,
  loadNotes,
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
  readonly runs: Measured[];
}

/** What stands around the servers. */
interface Around {
  readonly bench: Bench;
  readonly postgres: PostgresServer;
  readonly watchers: Watchers;
  /** What the server with everything on wrote last. */
  rowsPerSecond: number;
  /** Rows that came while it was measured. */
  rowsSeen: number;
}

async function run(bench: Bench): Promise<Report> {
  const core = bench.cores?.generator;
  await using postgres = await PostgresServer.start(bench.dir, { core });
  await using watchers = await Watchers.start(core);
  const around: Around = { bench, postgres, watchers, rowsPerSecond: 15_000, rowsSeen: 0 };
  const sides = names.map((name): Side => ({ name, runs: [] }));
  const rounds = bench.quick ? 1 : 4;
  for (let round = 1; round <= rounds; round++) {
    await using servers = new AsyncDisposableStack();
    const opened: (readonly [Side, FerryServer])[] = [];
    for (const side of sides) opened.push([side, servers.use(await start(side.name, around))]);
    bench.progress(`round ${round} of ${rounds}: warming up`);
    // Before the first turn that counts, as in `embedded`; and first the one whose pace the others need.
    for (const [side, server] of opened.toReversed()) await slice(side, server, 10, around);
    for (let turn = 1; turn <= 2; turn++) {
      for (const [side, server] of opened) {
        bench.progress(`round ${round} of ${rounds}, turn ${turn}: ${side.name}`);
        side.runs.push(await slice(side, server, 4, around));
      }
      opened.reverse(); // whoever comes first in a turn does not always do so
    }
  }
  return report(sides, await watchers.rest(), around.rowsSeen);
}

function start(name: Name, { bench, postgres, watchers }: Around): Promise<FerryServer> {
  const setup: FerrySetup = {
    dir: bench.dir,
    core: bench.cores?.server,
    models: [{ name: "bench", workers: 64, baseMs: 1 }],
    settings: settingsOf(postgres.url, watchers.collectorUrl)[name],
  };
  return FerryServer.start(setup);
}

async function slice(side: Side, server: FerryServer, seconds: number, around: Around): Promise<Measured> {
  const { bench, postgres, watchers } = around;
  const all = side.name === "everything";
  if (all) watchers.watch(server.adminUrl);
  else watchers.write(postgres.url, around.rowsPerSecond);
  const rowsBefore = postgres.rows();
  try {
    const run = await load(bench, server, seconds, { postgres: postgres.pid, watchers: watchers.pid });
    if (all) {
      around.rowsPerSecond = Math.round(run.rate);
      around.rowsSeen += postgres.rows() - rowsBefore;
    }
    return run;
  } finally {
    await watchers.rest();
  }
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

  /** Rows of somebody else's requests, until it rests. */
  write(postgresUrl: string, perSecond: number): void {
    this.#child.write(`write ${postgresUrl} ${perSecond}\n`);
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

function report(sides: readonly Side[], seen: Sightings, rows: number): Report {
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
      figure("rows in PostgreSQL while everything was on", rows, "count"),
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
