/**
 * Runs one case: starts its Redis, batchers and gateways, loads every gateway, and reads what each process used.
 *
 * Each gateway has load generators of its own (load.ts), all started together. CPU is read from /proc between the moment
 * at which the last generator began to measure and that at which the first one stopped, so that every process is
 * under the full load in it; latencies are the generators' histograms added up.
 *
 * Open loops have a closed one before them: it cannot overload processes whose code is not optimised yet. Thin traffic has
 * not: it would fill the batcher's estimates with another load.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { join } from "node:path";
import { Histogram } from "../../src/cli/bench/histogram.ts";
import { measure, type Measured } from "../generator.ts";
import type { LoadSpec } from "../load.ts";
import { childPids, cpuMs, machineCpuMs } from "../process.ts";
import { RedisCluster, RedisServer } from "../redis.ts";
import type { Environment } from "../report.ts";
import { FerryServer, type FerrySetup } from "../server.ts";
import { CALLERS, type ScaleCase } from "./cases.ts";

/** Kinds of process whose CPU is told apart. */
export type Kind = "gateway" | "core" | "batcher" | "redis" | "idle" | "generator";

/** One run of one case: a line of the file of results. */
export interface ScaleResult {
  readonly case: string;
  readonly at: string;
  readonly machine: Pick<Environment, "cpu" | "cores" | "memoryGb" | "kernel" | "node" | "commit">;
  /** Version of the server; null without Redis. */
  readonly redis: string | null;
  /** How long was measured. */
  readonly seconds: number;
  /** Answers with status 200 per second. */
  readonly rate: number;
  readonly sent: number;
  readonly statuses: Readonly<Record<string, number>>;
  /** Other statuses than 200 and all of the following. */
  readonly errors: number;
  readonly crossed: number;
  readonly broken: number;
  readonly unanswered: number;
  readonly unsent: number;
  /** Sent more than 5 ms after the intended instant. */
  readonly late: number;
  readonly latencyMs: {
    readonly p50: number;
    readonly p99: number;
    readonly p999: number;
    readonly max: number;
  };
  readonly meanBatch: number;
  /** Cores that each process used. */
  readonly cpu: Readonly<Record<Kind, readonly number[]>>;
  /** Cores that were used, and taken by the hypervisor, beyond those. */
  readonly otherCores: number;
}

export interface MeasureOptions {
  readonly dir: string;
  readonly machine: ScaleResult["machine"];
  /** Load generators for each gateway. */
  readonly generators: number;
  /** Instead of the case's own. */
  readonly seconds: number | undefined;
  readonly warmSeconds: number | undefined;
}

const MAX_FILES = 20_000;
/** Callers of the closed loop before an open one, for each gateway: workers of 200 ms keep most of them waiting. */
const WARM_CALLERS = 1024;
/** At most this many requests per second in all are thin traffic. */
const THIN_RATE = 500;
/** Between the closed loop and the measurement, at 60 % of the rate: the measurement begins without a backlog. */
const SETTLE_MS = 2000;
const DRAIN_MS = 6000;
/** A few seconds of 100,000/s are more than Redis's file may hold by default before it is rewritten. */
const REDIS_SETTINGS = ["auto-aof-rewrite-min-size 32gb"];

interface ScaleFleet extends AsyncDisposable {
  readonly redis: readonly RedisServer[];
  readonly batchers: readonly FerryServer[];
  readonly gateways: readonly FerryServer[];
  readonly idle: readonly FerryServer[];
  /** Whose CPU is read. */
  readonly pids: Readonly<Record<Exclude<Kind, "generator">, readonly number[]>>;
}

interface Reading {
  readonly atMs: number;
  /** CPU of each process so far. */
  readonly cpuMs: ReadonlyMap<number, number>;
  readonly machineMs: number;
  readonly tasks: number;
  readonly batches: number;
}

export async function measureCase(scaleCase: ScaleCase, options: MeasureOptions): Promise<ScaleResult> {
  const dir = mkdtempSync(join(options.dir, `${scaleCase.name}-`));
  try {
    await using fleet = await startFleet(scaleCase, dir);
    const at = new Date().toISOString();
    const version = fleet.redis[0] && /redis_version:(\S+)/.exec(await fleet.redis[0].info("server"))?.[1];
    const warmUp = await warm(scaleCase, fleet, options);
    const { runs, before, after } = await load(scaleCase, fleet, options);
    return {
      case: scaleCase.name,
      at,
      machine: options.machine,
      redis: version ?? null,
      ...answersOf(runs, warmUp),
      meanBatch: (after.tasks - before.tasks) / (after.batches - before.batches),
      ...cpuOf(fleet, runs, before, after),
    };
  } finally {
    // Redis's files: gigabytes.
    rmSync(dir, { recursive: true, force: true, maxRetries: 3 });
  }
}

async function startFleet(scaleCase: ScaleCase, dir: string): Promise<ScaleFleet> {
  await using started = new AsyncDisposableStack();
  const { gateways, batchers, idleGateways = 0 } = scaleCase;
  const settings = { limits: { maxQueued: 100_000 } };
  if (scaleCase.redis === 0) {
    const setup = { dir, maxFiles: MAX_FILES, settings, models: modelsOf(scaleCase, scaleCase.workers) };
    const { processes } = scaleCase;
    const server = started.use(await FerryServer.start({ ...setup, ...(processes && { processes }) }));
    return fleetOf({ redis: [], batchers: [], gateways: [server], idle: [] }, started.move(), processes);
  }
  const redis = await startRedis(scaleCase.redis, dir, started);
  const engine =
    redis.length === 1
      ? { kind: "redis", url: redis[0]!.url }
      : { kind: "redis", nodes: redis.map(({ port }) => `127.0.0.1:${port}`) };
  const start = (role: "gateway" | "batcher", workers: number): Promise<FerryServer> => {
    const models = modelsOf(scaleCase, workers);
    const setup = { dir, maxFiles: MAX_FILES, models, settings: { ...settings, engine } };
    return FerryServer.start({ ...setup, role });
  };
  // Batchers first: the gateways' first requests find their workers.
  const behind = await startAll(batchers, started, (i) =>
    start("batcher", Math.floor(scaleCase.workers / batchers) + (i < scaleCase.workers % batchers ? 1 : 0)),
  );
  const all = await startAll(gateways + idleGateways, started, () => start("gateway", 1));
  const parts = {
    redis,
    batchers: behind,
    gateways: all.slice(0, gateways),
    idle: all.slice(gateways),
  };
  return fleetOf(parts, started.move());
}

async function startRedis(
  count: 1 | 3,
  dir: string,
  started: AsyncDisposableStack,
): Promise<readonly RedisServer[]> {
  if (count === 1) return [started.use(await RedisServer.start(dir, REDIS_SETTINGS))];
  return started.use(await RedisCluster.start(dir, count, REDIS_SETTINGS)).servers;
}

/** Starts `count` servers side by side; those that started end with `stack` even when another one failed. */
async function startAll(
  count: number,
  stack: AsyncDisposableStack,
  start: (i: number) => Promise<FerryServer>,
): Promise<FerryServer[]> {
  const servers: FerryServer[] = [];
  // All at once: one after the other would add up their shutdown.
  stack.defer(async () => {
    await Promise.all(servers.map((server) => server[Symbol.asyncDispose]()));
  });
  return await allOf(
    Array.from({ length: count }, async (_, i) => {
      const server = await start(i);
      servers.push(server);
      return server;
    }),
  );
}

/** Like Promise.all, but when one fails it waits for the others, too: none goes on while the next case runs. */
async function allOf<T>(promises: readonly Promise<T>[]): Promise<T[]> {
  await Promise.allSettled(promises);
  return await Promise.all(promises);
}

function fleetOf(
  parts: Omit<ScaleFleet, "pids" | keyof AsyncDisposable>,
  stack: AsyncDisposableStack,
  processes?: number,
): ScaleFleet {
  const of = (servers: readonly { readonly pid: number }[]): number[] => servers.map(({ pid }) => pid);
  const pids = {
    gateway: of(parts.gateways),
    core: [] as number[],
    batcher: of(parts.batchers),
    redis: of(parts.redis),
    idle: of(parts.idle),
  };
  if (processes !== undefined) {
    // The parent starts the core first.
    const [core, ...gateways] = childPids(parts.gateways[0]!.pid).toSorted((a, b) => a - b);
    Object.assign(pids, { gateway: gateways, core: [core!] });
  }
  return { ...parts, pids, [Symbol.asyncDispose]: () => stack.disposeAsync() };
}

function modelsOf({ baseMs, policy }: ScaleCase, workers: number): FerrySetup["models"] {
  return [{ name: "bench", workers, baseMs, maxBatchSize: 64, ...(policy && { policy }) }];
}

/** Answers that came in the warm-up do not count, but faults do. */
async function warm(
  { rate, warmSeconds }: ScaleCase,
  fleet: ScaleFleet,
  options: MeasureOptions,
): Promise<readonly Measured[]> {
  if (rate === undefined || rate <= THIN_RATE) return [];
  const times = { warmMs: 0, measureMs: (options.warmSeconds ?? warmSeconds) * 1000, drainMs: DRAIN_MS };
  const load = { kind: "closed", callers: WARM_CALLERS } as const;
  return await allOf(
    fleet.gateways.map((gateway) => measure({ ...requestsTo(gateway), ...times, load }, optionsFor(gateway))),
  );
}

async function load(
  scaleCase: ScaleCase,
  fleet: ScaleFleet,
  { generators, ...options }: MeasureOptions,
): Promise<{ runs: Measured[]; before: Reading; after: Reading }> {
  const warmMs = (options.warmSeconds ?? scaleCase.warmSeconds) * 1000;
  const measureMs = (options.seconds ?? scaleCase.seconds) * 1000;
  const length = generators * (scaleCase.processes ?? 1);
  const targets = fleet.gateways.flatMap((gateway) => Array.from({ length }, () => gateway));
  let measuring = 0;
  let before: Reading | undefined;
  let after: Reading | undefined;
  const hooks = {
    onStart: async (): Promise<void> => {
      if (++measuring === targets.length) before = await read(fleet);
    },
    onStop: async (): Promise<void> => {
      if (measuring-- === targets.length) after = await read(fleet);
    },
  };
  const runs = await allOf(
    targets.map((gateway) => {
      const spec: LoadSpec = {
        ...requestsTo(gateway),
        measureMs,
        drainMs: DRAIN_MS,
        ...loadOf(scaleCase, targets.length, generators, warmMs),
      };
      return measure(spec, { ...optionsFor(gateway), ...hooks });
    }),
  );
  if (before === undefined || after === undefined) {
    throw new Error(`${targets.length} generators never measured together: make --seconds longer`);
  }
  return { runs, before, after };
}

function loadOf(
  { rate }: ScaleCase,
  generators: number,
  perGateway: number,
  warmMs: number,
): Pick<LoadSpec, "load" | "warmMs"> {
  if (rate === undefined) {
    return { warmMs, load: { kind: "closed", callers: Math.ceil(CALLERS / perGateway) } };
  }
  const own = rate / generators;
  const isThin = rate <= THIN_RATE;
  return {
    warmMs: isThin ? warmMs : SETTLE_MS,
    load: {
      kind: "open",
      rate: own,
      arrivals: "poisson",
      warmRate: isThin ? own : own * 0.6,
      // About as many as are in use: others would only idle until the gateway closes them.
      connections: isThin ? 0 : Math.ceil(own * 0.25),
    },
  };
}

function requestsTo({ target }: FerryServer): Pick<LoadSpec, "target" | "bodyBytes" | "verify"> {
  return { target, bodyBytes: 2048, verify: true };
}

function optionsFor({ pid }: FerryServer): { readonly serverPid: number; readonly maxFiles: number } {
  return { serverPid: pid, maxFiles: MAX_FILES };
}

async function read(fleet: ScaleFleet): Promise<Reading> {
  const { usedMs, stolenMs } = machineCpuMs();
  const pids = Object.values(fleet.pids).flat();
  const reading = {
    atMs: performance.now(),
    cpuMs: new Map(pids.map((pid) => [pid, cpuMs(pid)])),
    machineMs: usedMs + stolenMs,
  };
  // Every batcher may know the workers of all: then each batch is counted as often as there are batchers, and each task.
  const dispatchers = fleet.batchers.length > 0 ? fleet.batchers : fleet.gateways;
  const counters = await Promise.all(dispatchers.map((server) => server.counters()));
  return {
    ...reading,
    tasks: counters.reduce((sum, { tasks }) => sum + tasks, 0),
    batches: counters.reduce((sum, { batches }) => sum + batches, 0),
  };
}

type Answers = Omit<ScaleResult, "case" | "at" | "machine" | "redis" | "meanBatch" | "cpu" | "otherCores">;

function answersOf(runs: readonly Measured[], warmUp: readonly Measured[]): Answers {
  const latency = new Histogram();
  const statuses: Record<string, number> = {};
  for (const run of runs) {
    latency.merge(run.latency);
    for (const [status, count] of Object.entries(run.statuses)) {
      statuses[status] = (statuses[status] ?? 0) + count;
    }
  }
  const sum = (of: readonly Measured[], pick: (run: Measured) => number): number =>
    of.reduce((total, run) => total + pick(run), 0);
  const warmUpCrossed = sum(warmUp, (run) => run.crossed);
  return {
    seconds: Math.min(...runs.map(({ seconds }) => seconds)),
    rate: sum(runs, (run) => run.rate),
    sent: sum(runs, (run) => run.sent),
    statuses,
    errors: sum(runs, (run) => run.errors) + warmUpCrossed,
    crossed: sum(runs, (run) => run.crossed) + warmUpCrossed,
    broken: sum(runs, (run) => run.broken),
    unanswered: sum(runs, (run) => run.unanswered),
    unsent: sum(runs, (run) => run.unsent),
    late: sum(runs, (run) => run.late),
    latencyMs: {
      p50: latency.percentileMs(50),
      p99: latency.percentileMs(99),
      p999: latency.percentileMs(99.9),
      max: latency.maxMs,
    },
  };
}

function cpuOf(
  fleet: ScaleFleet,
  runs: readonly Measured[],
  before: Reading,
  after: Reading,
): Pick<ScaleResult, "cpu" | "otherCores"> {
  const ms = after.atMs - before.atMs;
  const cores = (pid: number): number => (after.cpuMs.get(pid)! - before.cpuMs.get(pid)!) / ms;
  const { pids } = fleet;
  const cpu = {
    gateway: pids.gateway.map(cores),
    core: pids.core.map(cores),
    batcher: pids.batcher.map(cores),
    redis: pids.redis.map(cores),
    idle: pids.idle.map(cores),
    generator: runs.map(({ cpuShare }) => cpuShare),
  };
  const known = Object.values(cpu)
    .flat()
    .reduce((sum, share) => sum + share, 0);
  return { cpu, otherCores: Math.max(0, (after.machineMs - before.machineMs) / ms - known) };
}
