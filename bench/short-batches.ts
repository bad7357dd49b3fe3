/**
 * What fine alarms are worth where a batch takes 5 ms: the dispatcher with them, in turns with plain timers.
 *
 *   node bench/short-batches.ts [TURNS]      every turn of both, and their medians; 2 × 4 turns in about a minute
 *
 * Two simulated workers of 5 ms, batches of up to 64, independent arrivals of 1,500 requests/s over HTTP from another
 * process, nothing pinned. The workers' own alarms are fine in both, so that a batch takes 5 ms and not 6; only what the
 * dispatcher waits for differs. CPU is that of the server's process, its threads included. A turn that others
 * disturbed shows in the last column: no turn is left out.
 */
import { type Alarm, type Clock, SystemClock } from "../src/app/clock.ts";
import { parseConfig } from "../src/app/config/load.ts";
import { startFerry } from "../src/app/ferry.ts";
import { measure } from "./generator.ts";
import { Child, killChildren } from "./process.ts";
import { freePorts, host } from "./server.ts";

const ways = ["plain", "fine"] as const;
type Way = (typeof ways)[number];

const workers = 2;
const workerMs = 5;
const perSecond = 1500;
const warmMs = 2000;
const measureMs = 4000;
/** What is waited for longer than this is no worker's alarm. */
const shortMs = 10;

/** Whoever says how late he may be rung is the dispatcher; of the others only workers wait for so short a time. */
function clockOf(way: Way): Clock {
  const clock = new SystemClock();
  const at = (time: number, ring: () => void, withinMs?: number): Alarm => {
    if (withinMs !== undefined) return clock.at(time, ring, way === "fine" ? withinMs : undefined);
    return clock.at(time, ring, time - clock.now() < shortMs ? 0.1 : undefined);
  };
  return { now: () => clock.now(), wall: () => clock.wall(), at, rest: () => clock.rest() };
}

async function serve(way: Way, port: number, adminPort: number): Promise<void> {
  const { config } = parseConfig(
    `
listen: ${host}:${port}
admin: { listen: "${host}:${adminPort}" }
models:
  - name: bench
    backend: { kind: simulated, workers: ${workers}, baseMs: ${workerMs} }
    maxBatchSize: 64
telemetry: { logLevel: silent }
`,
    "short-batches.yaml",
    {},
  );
  const ferry = await startFerry(config!, clockOf(way));
  process.stderr.write("up\n");
  process.once("SIGTERM", () => void ferry.stop());
}

interface Turn {
  readonly p50: number;
  readonly p90: number;
  readonly p99: number;
  readonly meanBatch: number;
  readonly idle: number;
  readonly cpu: number;
  readonly errors: number;
  readonly others: number;
}

interface Busy {
  readonly atMs: number;
  readonly busyMs: number;
  readonly batches: number;
  readonly tasks: number;
}

async function busy(adminPort: number): Promise<Busy> {
  const response = await fetch(`http://${host}:${adminPort}/internal/workers`);
  const { workers: rows } = (await response.json()) as {
    workers: readonly { busy_ms: number; batches: number; tasks: number }[];
  };
  const sum = (pick: (row: (typeof rows)[number]) => number): number =>
    rows.reduce((all, row) => all + pick(row), 0);
  return {
    atMs: performance.now(),
    busyMs: sum((row) => row.busy_ms),
    batches: sum((row) => row.batches),
    tasks: sum((row) => row.tasks),
  };
}

async function turn(way: Way): Promise<Turn> {
  const [port, adminPort] = await freePorts(2);
  const args = ["serve", way, String(port), String(adminPort)];
  await using server = new Child(import.meta.filename, args);
  await server.line((line) => line === "up", 20_000);
  const seen: Busy[] = [];
  const look = async (): Promise<void> => void seen.push(await busy(adminPort!));
  const target = { host, port: port!, path: "/v1/inference" };
  const sockets = { connections: 64, maxConnections: 2000 };
  const load = {
    kind: "open",
    rate: perSecond,
    warmRate: perSecond,
    arrivals: "poisson",
    ...sockets,
  } as const;
  const spec = { target, bodyBytes: 256, verify: true, warmMs, measureMs, drainMs: 2000, load };
  const run = await measure(spec, { serverPid: server.pid, onStart: look, onStop: look });
  const [before, after] = [seen[0]!, seen[1]!];
  return {
    p50: run.latency.percentileMs(50),
    p90: run.latency.percentileMs(90),
    p99: run.latency.percentileMs(99),
    meanBatch: (after.tasks - before.tasks) / (after.batches - before.batches),
    idle: 1 - (after.busyMs - before.busyMs) / ((after.atMs - before.atMs) * workers),
    cpu: run.serverCpuShare,
    errors: run.errors,
    others: run.otherCores,
  };
}

function row(name: string, { p50, p90, p99, meanBatch, idle, cpu, errors, others }: Turn): string {
  const times = [p50, p90, p99].map((ms) => `${ms.toFixed(2)} ms`);
  const shares = [idle, cpu].map((share) => `${(100 * share).toFixed(0)} %`);
  const rest = [String(errors), `${(100 * others).toFixed(0)} %`];
  return `| ${[name, ...times, meanBatch.toFixed(1), ...shares, ...rest].join(" | ")} |\n`;
}

function middle(turns: readonly Turn[]): Turn {
  const of = (name: keyof Turn): number => {
    const sorted = turns.map((each) => each[name]).sort((one, other) => one - other);
    return (sorted[(sorted.length - 1) >> 1]! + sorted[sorted.length >> 1]!) / 2;
  };
  const names: (keyof Turn)[] = ["p50", "p90", "p99", "meanBatch", "idle", "cpu", "errors", "others"];
  return Object.fromEntries(names.map((name) => [name, of(name)])) as unknown as Turn;
}

async function compare(turns: number): Promise<void> {
  const all: Record<Way, Turn[]> = { plain: [], fine: [] };
  const head = [
    "timers",
    "p50",
    "p90",
    "p99",
    "mean batch",
    "workers idle",
    "server CPU",
    "errors",
    "others used",
  ];
  process.stdout.write(`| ${head.join(" | ")} |\n|${"---|".repeat(head.length)}\n`);
  for (let at = 0; at < turns; at++) {
    // Who goes first changes, so that a drift of the machine meets both alike.
    for (const way of at % 2 === 0 ? ways : ways.toReversed()) {
      const done = await turn(way);
      all[way].push(done);
      process.stdout.write(row(`${way}, turn ${at + 1}`, done));
    }
  }
  for (const way of ways) process.stdout.write(row(`${way}, median of ${turns}`, middle(all[way])));
}

const [word, way, port, adminPort] = process.argv.slice(2);
process.on("exit", killChildren);
if (word === "serve") await serve(way as Way, Number(port), Number(adminPort));
else await compare(Number(word ?? 4));
