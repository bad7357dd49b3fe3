/**
 * A run as one object: printed by `--json`, stored by `--save`, read by `--compare`.
 *
 * Times are milliseconds, shares 0 to 1; null: not measured. `mean` is split into:
 *
 *   queue     from the replies: x-ferry-queue-ms
 *   worker    from the server's metrics: mean call time
 *   gateway   the rest: Ferry, the network, and this client
 *
 * Without metrics, the replies still give the server's total: `inside` is that less the queue (worker and Ferry),
 * `outside` the rest.
 *
 * The client was the bottleneck when it used more than `BUSY` of a core, sent more than `LATE` of its requests late, or
 * its event loop's p99 lateness exceeded `LOOP_MS`.
 */
import { Random } from "../../core/random.ts";
import type { Account, KindAccount } from "./account.ts";
import type { ClientState } from "./driver.ts";
import type { ServerSide } from "./exposition.ts";
import { Histogram, type HistogramState } from "./histogram.ts";
import { type Slo, type SloResult, judge } from "./slo.ts";

const FORMAT = "ferry bench 1";
const BUSY = 0.9;
const LATE = 0.01;
const LOOP_MS = 20;

export interface ResultCounts {
  readonly offered: number;
  readonly served: number;
  readonly refused: number;
  readonly failed: number;
  readonly lost: number;
  readonly unsent: number;
  /** In flight when the run was interrupted. */
  readonly pending: number;
}

export interface Latency {
  readonly p50: number | null;
  readonly p90: number | null;
  readonly p95: number | null;
  readonly p99: number | null;
  readonly "p99.9": number | null;
  readonly max: number | null;
  readonly mean: number | null;
}

interface Tier extends ResultCounts {
  readonly name: string;
  readonly latencyMs: Latency;
}

export interface Result {
  readonly format: typeof FORMAT;
  readonly startedAt: string;
  readonly environment: Readonly<Record<string, string | number>>;
  /** As given, without keys and tokens. */
  readonly command: string;
  readonly target: { readonly url: string; readonly model: string | null };
  readonly load: {
    readonly kind: "open" | "closed";
    /** Requests per second, or callers. */
    readonly rate: number | null;
    readonly callers: number | null;
    readonly arrivals: string | null;
    readonly seconds: number;
    readonly warmupSeconds: number;
    readonly timeoutMs: number;
    readonly connections: number;
  };
  readonly interrupted: boolean;
  readonly counts: ResultCounts;
  readonly crossed: number;
  /** Whether outputs showed whose they were. */
  readonly verified: boolean;
  readonly cached: number;
  readonly uniqueInputs: boolean;
  readonly offeredPerSecond: number;
  readonly servedPerSecond: number;
  readonly codes: Readonly<Record<string, number>>;
  readonly latencyMs: Latency;
  readonly refusedP99Ms: number | null;
  readonly intervals: Sureness;
  readonly mean: Readonly<Record<"queue" | "worker" | "gateway" | "inside" | "outside", number | null>>;
  /** Mean tasks per batch, from the replies. */
  readonly fill: number | null;
  readonly server: ServerSide | null;
  readonly serverMissing: string | null;
  readonly tiers: readonly Tier[];
  readonly client: {
    readonly cpuShare: number;
    readonly lateShare: number;
    readonly lagP99Ms: number | null;
    readonly loopP99Ms: number | null;
    readonly connections: number;
    readonly waited: number;
    readonly bottleneck: readonly string[];
  };
  readonly slos: readonly SloResult[];
  readonly histogram: HistogramState;
}

export interface Finished {
  readonly account: Account;
  readonly client: ClientState;
  readonly seconds: number;
  readonly interrupted: boolean;
  readonly server: ServerSide | undefined;
  readonly serverMissing: string | undefined;
  readonly slos: readonly Slo[];
  readonly about: Pick<Result, "startedAt" | "environment" | "command" | "target" | "uniqueInputs"> & {
    readonly load: Omit<Result["load"], "seconds">;
  };
}

export function resultOf(run: Finished): Result {
  const { account, client, seconds, server, about } = run;
  const { latency } = account;
  const servedPerSecond = account.served / seconds;
  const judged = {
    offered: account.offered,
    refused: account.refused,
    errors: account.errors,
    servedPerSecond,
    meanMs: latency.meanMs,
    percentileMs: (p: number) => latency.percentileMs(p),
  };
  return {
    format: FORMAT,
    ...about,
    load: { ...about.load, seconds },
    interrupted: run.interrupted,
    counts: countsOf(account),
    crossed: account.crossed,
    verified: account.echoes,
    cached: account.cached,
    offeredPerSecond: account.offered / seconds,
    servedPerSecond,
    codes: Object.fromEntries([...account.codes].sort(([a], [b]) => (a < b ? -1 : 1))),
    latencyMs: latencyOf(latency),
    refusedP99Ms: known(account.refusedLatency.percentileMs(99)),
    intervals: sureness(latency, account.blocks),
    mean: splitOf(account, server),
    fill: known(account.meanFill),
    server: server ?? null,
    serverMissing: run.serverMissing ?? null,
    tiers: account.kinds.length > 1 ? account.kinds.map(tierOf) : [],
    client: clientOf(client, account),
    slos: run.slos.map((slo) => judge(slo, judged)),
    histogram: latency.state(),
  };
}

function countsOf(of: ResultCounts | KindAccount): ResultCounts {
  const { offered, served, refused, failed, lost, unsent } = of;
  const pending = offered - served - refused - failed - lost - unsent;
  return { offered, served, refused, failed, lost, unsent, pending };
}

function latencyOf(latency: Histogram): Latency {
  const at = (name: string): number | null => known(latency.percentileMs(PERCENTILES[name]!));
  return {
    p50: at("p50"),
    p90: at("p90"),
    p95: at("p95"),
    p99: at("p99"),
    "p99.9": at("p99.9"),
    max: known(latency.maxMs),
    mean: known(latency.meanMs),
  };
}

function tierOf(kind: KindAccount): Tier {
  return { name: kind.label, ...countsOf(kind), latencyMs: latencyOf(kind.latency) };
}

function splitOf(account: Account, server: ServerSide | undefined): Result["mean"] {
  const { meanMs } = account.latency;
  const queue = account.queueSumMs / account.batched;
  const worker = server?.workerMs ?? NaN;
  const inside = account.serverSumMs / account.timed - queue;
  return {
    queue: known(queue),
    worker: known(worker),
    gateway: known(Math.max(0, meanMs - queue - worker)),
    inside: known(inside),
    outside: known(Math.max(0, meanMs - queue - inside)),
  };
}

function clientOf(client: ClientState, account: Account): Result["client"] {
  const lateShare = account.offered === 0 ? 0 : client.late / account.offered;
  const loopP99Ms = known(client.loop.percentileMs(99));
  const bottleneck: string[] = [];
  if (client.cpuShare > BUSY) bottleneck.push(`it used ${(client.cpuShare * 100).toFixed(0)} % of a core`);
  if (lateShare > LATE) bottleneck.push(`it sent ${(lateShare * 100).toFixed(1)} % of the requests late`);
  if ((loopP99Ms ?? 0) > LOOP_MS)
    bottleneck.push(`its event loop was ${loopP99Ms!.toFixed(0)} ms late (p99)`);
  return {
    cpuShare: client.cpuShare,
    lateShare,
    lagP99Ms: known(client.lag.percentileMs(99)),
    loopP99Ms,
    connections: client.connections,
    waited: client.waited,
    bottleneck,
  };
}

/** JSON has no NaN. */
function known(value: number): number | null {
  return Number.isFinite(value) ? value : null;
}

/** A saved run; undefined when the text is not one. Checks only what `--compare` needs. */
export function parseResult(text: string): Result | undefined {
  try {
    const value = JSON.parse(text) as Partial<Result> | null;
    if (value === null || value.format !== FORMAT) return undefined;
    const parts = [
      value.counts,
      value.latencyMs,
      value.intervals?.of,
      value.client,
      value.load,
      value.target,
    ];
    return parts.every((part) => typeof part === "object" && part !== null) ? (value as Result) : undefined;
  } catch {
    return undefined;
  }
}

/**
 * 95 % confidence intervals. Latencies near in time are correlated, so rules for independent samples promise too much.
 * Block bootstrap: the run is cut into up to twenty blocks of a second or more; as many are drawn with repetition,
 * merged, and the figure computed, `DRAWS` times. The interval is the middle 95 %. With fewer than `MIN_BLOCKS`
 * non-empty blocks, order statistics of independent samples are used: ranks n p ± 1.96 √(n p (1-p)). That is too
 * narrow; `method` says which was used.
 */

export interface Interval {
  readonly low: number;
  readonly high: number;
}

interface Sureness {
  readonly method: "blocks" | "order statistics";
  readonly blocks: number;
  readonly of: Readonly<Record<string, Interval>>;
}

const MIN_BLOCKS = 5;
/** Relative error of the histogram. */
const ERROR = 1 / 256;
/** 20 histograms each: some 100 ms in all. */
const DRAWS = 400;
/** Fixed: the same run has the same intervals. */
const SEED = 1;

const PERCENTILES: Readonly<Record<string, number>> = {
  p50: 50,
  p90: 90,
  p95: 95,
  p99: 99,
  "p99.9": 99.9,
};

export function sureness(whole: Histogram, blocks: readonly Histogram[]): Sureness {
  const full = blocks.filter(({ count }) => count > 0);
  if (full.length >= MIN_BLOCKS) return { method: "blocks", blocks: full.length, of: fromBlocks(full) };
  const names = whole.count === 0 ? [] : Object.entries(PERCENTILES);
  const of = Object.fromEntries(names.map(([name, p]) => [name, widened(name, fromRanks(whole, p))]));
  return { method: "order statistics", blocks: full.length, of };
}

function fromBlocks(blocks: readonly Histogram[]): Record<string, Interval> {
  const random = new Random(SEED);
  const names = [...Object.keys(PERCENTILES), "mean"];
  const drawn = names.map((): number[] => []);
  for (let draw = 0; draw < DRAWS; draw++) {
    const some = new Histogram();
    for (let i = 0; i < blocks.length; i++) some.merge(blocks[Math.floor(random.next() * blocks.length)]!);
    names.forEach((name, at) => {
      const p = PERCENTILES[name];
      drawn[at]!.push(p === undefined ? some.meanMs : some.percentileMs(p));
    });
  }
  return Object.fromEntries(names.map((name, at) => [name, widened(name, middle(drawn[at]!))]));
}

function middle(values: readonly number[]): Interval {
  const sorted = values.toSorted((a, b) => a - b);
  const at = (share: number): number => sorted[Math.round(share * (sorted.length - 1))]!;
  return { low: at(0.025), high: at(0.975) };
}

/** A percentile is no more precise than its bucket. */
function widened(name: string, { low, high }: Interval): Interval {
  return name === "mean" ? { low, high } : { low: low * (1 - ERROR), high: high * (1 + ERROR) };
}

function fromRanks(whole: Histogram, p: number): Interval {
  const n = whole.count;
  const half = 1.96 * Math.sqrt(n * (p / 100) * (1 - p / 100));
  const at = (rank: number): number => whole.percentileMs(Math.min(100, Math.max(0, (100 * rank) / n)));
  return { low: at((n * p) / 100 - half), high: at((n * p) / 100 + half + 1) };
}
