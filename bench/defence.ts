/**
 * What one gateway process does with twice the load that it can handle.
 *
 *   node bench/defence.ts [--factor 2] [--seconds 10] [--connections 1024] [--runs 3] [--tiers]
 *
 * Each run starts `ferry serve` with 64 simulated workers of 1 ms, so that the process itself is what is full, and sends
 * 2 KB bodies: first in a closed loop of 256 callers, which finds its best throughput; then in an open loop (Poisson) at
 * `factor` times that, whatever the server does. A new connection is opened whenever all are busy. With `--tiers` the
 * requests are of three tiers in equal parts.
 *
 *   served       answers with 200 within the 4 s of the model's total timeout, counted from when the request should have
 *                left; as a share of the best throughput
 *   refused      answers with 503, and how long they took, counted in the same way
 *   overflows    connections that the kernel dropped because the accept queue was full (ListenOverflows)
 *
 * The server runs on one core and the generator on another where `taskset` exists (BENCH_PIN=no: on all).
 * FERRY_CLI=/other/checkout/src/cli.ts measures that checkout. The last line has the medians.
 */
import { median } from "../src/core/median.ts";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import type { CallerKind } from "../src/cli/bench/arrivals.ts";
import { authSettings, inTime, kindWithKey, poolLimits, tierNames, timeouts } from "./admission.ts";
import { measure, type Measured } from "./generator.ts";
import type { LoadSpec } from "./load.ts";
import { killChildren, pickCores } from "./process.ts";
import { loadNotes } from "./scenario.ts";
import { FerryServer } from "./server.ts";
import type { Account } from "./tally.ts";

const { values } = parseArgs({
  options: {
    factor: { type: "string", default: "2" },
    seconds: { type: "string", default: "10" },
    connections: { type: "string", default: "1024" },
    runs: { type: "string", default: "3" },
    tiers: { type: "boolean", default: false },
  },
});
const factor = Number(values.factor);
const seconds = Number(values.seconds);
const maxFiles = 20_000;
const cores = pickCores();
const dir = mkdtempSync(join(tmpdir(), "ferry-defence-"));

const figures = [
  "best req/s",
  "offered req/s",
  "served req/s",
  "served of best",
  "served p50 ms",
  "served p99 ms",
  "refused req/s",
  "refused p50 ms",
  "refused p99 ms",
  "refused max ms",
  "broken",
  "unanswered",
  "overflows",
  "connections",
  "server CPU",
  "generator CPU",
] as const;
type Row = Record<(typeof figures)[number], number>;

async function run(): Promise<Row> {
  const keys = values.tiers ? tierNames.map((tier) => ({ user: `user-${tier}`, tier })) : [];
  await using server = await FerryServer.start({
    dir,
    core: cores?.server,
    maxFiles,
    models: [{ name: "bench", workers: 64, baseMs: 1, timeouts }],
    settings: values.tiers ? authSettings() : { limits: poolLimits },
    keys,
  });
  const kinds = server.keys.map((key, at) => kindWithKey(tierNames[at]!, 1, key));
  const options = { core: cores?.generator, maxFiles, serverPid: server.pid };
  const common = { target: server.target, bodyBytes: 2048, verify: true, ...(kinds.length > 0 && { kinds }) };
  // The first one only warms up: it takes some ten seconds until all code is optimised.
  await measure({ ...common, ...closed(10_000) }, options);
  const best = await measure({ ...common, ...closed(5000) }, options);
  const before = overflows();
  const rate = best.rate * factor;
  const load = await measure({ ...common, ...open(rate) }, options);
  note(best, "closed loop");
  note(load, "open loop");
  for (const each of kinds) showKind(load, each);
  const account = load.tally.account(["all"]);
  const { ok, refused } = account.latencies;
  const served = inTime(account) / load.seconds;
  return {
    "best req/s": best.rate,
    "offered req/s": load.sent / load.seconds,
    "served req/s": served,
    "served of best": served / best.rate,
    "served p50 ms": ok.percentileMs(50),
    "served p99 ms": ok.percentileMs(99),
    "refused req/s": refusedOf(account) / load.seconds,
    "refused p50 ms": refused.percentileMs(50),
    "refused p99 ms": refused.percentileMs(99),
    "refused max ms": refused.maxMs,
    broken: load.broken,
    unanswered: load.unanswered + load.unsent,
    overflows: overflows() - before,
    connections: load.connections,
    "server CPU": load.serverCpuShare,
    "generator CPU": load.cpuShare,
  };
}

function closed(measureMs: number): Omit<LoadSpec, "target" | "bodyBytes" | "verify"> {
  return { warmMs: 1500, measureMs, drainMs: 2000, load: { kind: "closed", callers: 256 } };
}

function open(rate: number): Omit<LoadSpec, "target" | "bodyBytes" | "verify"> {
  const connections = Number(values.connections);
  return {
    warmMs: 2000,
    measureMs: seconds * 1000,
    drainMs: 6000,
    sliceMs: 250,
    load: { kind: "open", rate, arrivals: "poisson", warmRate: rate / 10, connections },
  };
}

function refusedOf({ statuses }: Account): number {
  return (statuses[429] ?? 0) + (statuses[503] ?? 0);
}

function showKind(load: Measured, { label }: CallerKind): void {
  const account = load.tally.account(["all"], (each) => each === label);
  const share = (count: number): string => `${((count / account.sent) * 100).toFixed(1)} %`;
  const p99 = account.latencies.ok.percentileMs(99).toFixed(0);
  process.stderr.write(
    `  ${label}: served in time ${share(inTime(account))}, p99 ${p99} ms, refused ${share(refusedOf(account))}\n`,
  );
}

/** What a reader must know to trust the figures; refusals are no errors here. */
function note(run: Measured, what: string): void {
  for (const line of loadNotes({ ...run, errors: 0 }, `the generator (${what})`)) {
    process.stderr.write(`  ${line}\n`);
  }
}

function overflows(): number {
  const [names, counts] = readFileSync("/proc/net/netstat", "utf8")
    .split("\n")
    .filter((line) => line.startsWith("TcpExt:"))
    .map((line) => line.split(" "));
  return Number(counts?.[names?.indexOf("ListenOverflows") ?? -1] ?? NaN);
}

function show(name: string, row: Row): void {
  const cells = figures.map((figure) => {
    const value = row[figure];
    const digits = figure === "served of best" || figure.endsWith("CPU") ? 2 : value < 100 ? 1 : 0;
    return `${figure} ${Number.isInteger(value) ? value : value.toFixed(digits)}`;
  });
  process.stdout.write(`${name}: ${cells.join(", ")}\n`);
}

process.on("exit", killChildren);
try {
  const rows: Row[] = [];
  for (let at = 1; at <= Number(values.runs); at++) {
    rows.push(await run());
    show(`run ${at}`, rows.at(-1)!);
  }
  const medians = figures.map((figure) => [figure, median(rows.map((row) => row[figure]))]);
  show("median", Object.fromEntries(medians) as Row);
} finally {
  rmSync(dir, { recursive: true });
}
