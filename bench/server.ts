/**
 * The servers under load: Ferry with a generated configuration, and the floor it is measured against.
 *
 * Ferry runs as its users run it, `ferry serve -c ferry.yaml` in a process of its own, on two free
 * ports of 127.0.0.1; with a `role` it is a part of a fleet (redis.ts). It counts as up when it prints
 * its `ready` line on stderr. Its batches, tasks and busy time are read from the admin listener, so what
 * is reported is what its operator would see.
 */
import { mkdtempSync, writeFileSync } from "node:fs";
import { createServer } from "node:net";
import { join } from "node:path";
import type { Target } from "../src/cli/bench/connection.ts";
import { Child, type ChildOptions } from "./process.ts";

export const host = "127.0.0.1";
const readyTimeoutMs = 20_000;
/** FERRY_CLI measures another checkout with this one's benchmark. */
const cli = process.env["FERRY_CLI"] ?? join(import.meta.dirname, "../src/cli.ts");

interface Timeouts {
  readonly queueMs: number;
  readonly workerMs: number;
  readonly totalMs: number;
}

export interface SimulatedModel {
  readonly name: string;
  readonly workers: number;
  readonly baseMs: number;
  readonly perItemMs?: number;
  readonly perTokenMs?: number;
  readonly maxBatchSize?: number;
  readonly maxWaitMs?: number;
  readonly lengths?: "auto" | "off";
  readonly policy?: "adaptive" | "latency" | "eco" | "fixed";
  readonly timeouts?: Timeouts;
}

/** Workers that are processes of the benchmark (worker.ts, embeddings.ts). */
export interface HttpModel {
  readonly name: string;
  readonly urls: readonly string[];
  /** Left out: `batch`. */
  readonly protocol?: string;
  readonly maxBatchSize?: number;
  readonly timeouts?: Timeouts;
}

export interface FerrySetup extends Omit<ChildOptions, "program"> {
  /** Where the configuration is written. */
  readonly dir: string;
  readonly models: readonly (SimulatedModel | HttpModel)[];
  /** Left out: one process that does all. */
  readonly role?: "gateway" | "batcher";
  /** Left out: one, without a parent. Each has an admin listener; what is read here is the first one's. */
  readonly processes?: number;
  /** Further settings, as in ferry.yaml. */
  readonly settings?: Readonly<Record<string, unknown>>;
  /** API keys to make before the start; the settings must have a place for them. */
  readonly keys?: readonly { readonly user: string; readonly tier: string }[];
}

/** Lifetime counters, summed over all workers; only differences of two readings mean something. */
export interface Counters {
  readonly atMs: number;
  readonly workers: number;
  readonly batches: number;
  readonly tasks: number;
  readonly busyMs: number;
}

/** What happened between two readings. */
export interface Work {
  readonly batches: number;
  readonly meanBatch: number;
  /** 0 to 1: busy time over the time there was. */
  readonly busyShare: number;
  readonly meanBusyMs: number;
}

export class FerryServer implements AsyncDisposable {
  readonly pid: number;
  /** A batcher does not listen there. */
  readonly target: Target;
  /** From spawn to the ready line. */
  readonly readyMs: number;
  /** In the order of the setup's. */
  readonly keys: readonly string[];
  readonly adminUrl: string;
  readonly #child: Child;

  private constructor(
    child: Child,
    port: number,
    adminUrl: string,
    readyMs: number,
    keys: readonly string[],
  ) {
    this.#child = child;
    this.pid = child.pid;
    this.target = { host, port, path: "/v1/inference" };
    this.adminUrl = adminUrl;
    this.readyMs = readyMs;
    this.keys = keys;
  }

  static async start(setup: FerrySetup): Promise<FerryServer> {
    const [port] = await freePorts(1);
    const file = join(mkdtempSync(join(setup.dir, "ferry-")), "ferry.yaml");
    // JSON is YAML.
    writeFileSync(file, JSON.stringify(configuration(setup, port!), null, 2));
    const keys: string[] = [];
    for (const key of setup.keys ?? []) keys.push(await createKey(file, key));
    const spawnedAt = performance.now();
    const role = setup.role === undefined ? [] : ["--role", setup.role];
    const several = setup.processes === undefined ? [] : ["--processes", String(setup.processes)];
    const child = new Child(cli, ["serve", "-c", file, ...role, ...several], setup);
    const { admin } = await ready(child);
    return new FerryServer(child, port!, admin!, performance.now() - spawnedAt, keys);
  }

  async counters(): Promise<Counters> {
    const { workers } = (await this.#get("/internal/workers")) as { workers: WorkerRow[] };
    const sum = (pick: (row: WorkerRow) => number): number => workers.reduce((n, row) => n + pick(row), 0);
    return {
      atMs: performance.now(),
      workers: workers.length,
      batches: sum((row) => row.batches),
      tasks: sum((row) => row.tasks),
      busyMs: sum((row) => row.busy_ms),
    };
  }

  async health(): Promise<Health> {
    return (await this.#get("/internal/health")) as Health;
  }

  /** When a task came to its end, in whole milliseconds since 1970, rounded down. */
  async settledAt(id: string): Promise<number> {
    const { settled_at } = (await this.#get(`/internal/requests/${id}`)) as { settled_at?: string };
    return settled_at === undefined ? NaN : Date.parse(settled_at);
  }

  /** How late the event loop was since this was last asked, p99; its timer of 10 ms is part of it. */
  async loopDelayMs(): Promise<number> {
    const response = await fetch(`${this.adminUrl}/metrics`, { signal: AbortSignal.timeout(5000) });
    const found = /^nodejs_eventloop_lag_p99_seconds(?:\{[^}]*\})? (\S+)/m.exec(await response.text());
    return Number(found?.[1] ?? NaN) * 1000;
  }

  async #get(path: string): Promise<unknown> {
    const response = await fetch(this.adminUrl + path, { signal: AbortSignal.timeout(5000) });
    if (!response.ok) throw new Error(`GET ${path} answered ${response.status}: ${await response.text()}`);
    return await response.json();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#child[Symbol.asyncDispose]();
  }
}

export interface Health {
  readonly status: string;
  readonly gpu_utilization: number;
  readonly queue_depth: number;
  readonly requests_per_second: number;
  readonly totals: { readonly requests: number };
}

interface WorkerRow {
  readonly batches: number;
  readonly tasks: number;
  readonly busy_ms: number;
}

export function workBetween(before: Counters, after: Counters): Work {
  const batches = after.batches - before.batches;
  const busyMs = after.busyMs - before.busyMs;
  return {
    batches,
    meanBatch: (after.tasks - before.tasks) / batches,
    busyShare: busyMs / ((after.atMs - before.atMs) * after.workers),
    meanBusyMs: busyMs / batches,
  };
}

export class FloorServer implements AsyncDisposable {
  readonly pid: number;
  readonly target: Target;
  readonly #child: Child;

  private constructor(child: Child, port: number) {
    this.#child = child;
    this.pid = child.pid;
    this.target = { host, port, path: "/v1/inference" };
  }

  static async start(options: ChildOptions): Promise<FloorServer> {
    const [port] = await freePorts(1);
    const child = new Child(join(import.meta.dirname, "floor.ts"), [String(port)], options);
    await ready(child);
    return new FloorServer(child, port!);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#child[Symbol.asyncDispose]();
  }
}

/** Waits for the line that Ferry, the floor and the workers print when they are up. */
export async function ready(child: Child, timeoutMs = readyTimeoutMs): Promise<{ readonly admin?: string }> {
  try {
    const isReady = (line: string): boolean => line.startsWith("{") && line.includes('"msg":"ready"');
    return JSON.parse(await child.line(isReady, timeoutMs)) as { admin?: string };
  } catch (error) {
    await child[Symbol.asyncDispose]();
    throw error;
  }
}

/** As an operator does it. */
async function createKey(
  file: string,
  { user, tier }: { readonly user: string; readonly tier: string },
): Promise<string> {
  const child = new Child(cli, ["keys", "create", "--user", user, "--tier", tier, "-c", file]);
  return (await child.output(readyTimeoutMs)).trim();
}

function configuration(setup: FerrySetup, port: number): unknown {
  const models = setup.models.map((model) => ({ maxBatchSize: 64, policy: "adaptive", ...modelOf(model) }));
  return { listen: `${host}:${port}`, admin: { listen: `${host}:0` }, models, ...setup.settings };
}

function modelOf(model: SimulatedModel | HttpModel): object {
  if ("urls" in model) {
    const { urls, protocol = "batch", ...rest } = model;
    return { backend: { kind: "http", protocol, workers: urls }, ...rest };
  }
  const { workers, baseMs, perItemMs = 0, perTokenMs, ...rest } = model;
  return { backend: { kind: "simulated", workers, baseMs, perItemMs, perTokenMs }, ...rest };
}

/**
 * Below the ports that the system gives to outgoing connections (32768 on): a fleet that starts opens hundreds of those, and
 * one of them could take a port between its being found free here and its being listened on.
 */
const PORTS = { first: 10_000, last: 19_999 } as const;
let lastPort = PORTS.first + Math.floor(Math.random() * (PORTS.last - PORTS.first));

/** Free when this returns, and not given out again by this process for a long time. */
export async function freePorts(count: number): Promise<number[]> {
  const ports: number[] = [];
  while (ports.length < count) {
    lastPort = lastPort === PORTS.last ? PORTS.first : lastPort + 1;
    const port = lastPort;
    if (await isFree(port)) ports.push(port);
  }
  return ports;
}

function isFree(port: number): Promise<boolean> {
  const server = createServer();
  return new Promise((resolve) => {
    server.once("error", () => resolve(false));
    server.listen(port, host, () => server.close(() => resolve(true)));
  });
}
