/** The trials of bench/gpu: each starts what it needs, loads it from other processes, and ends it. */
import { mkdtempSync, writeFileSync } from "node:fs";
import { availableParallelism } from "node:os";
import { basename, join } from "node:path";
import { setTimeout } from "node:timers/promises";
import type { LoadKind } from "../../src/cli/bench/driver.ts";
import { Histogram, type HistogramState } from "../../src/cli/bench/histogram.ts";
import { Child, childPids, commandOf, cpuMs, descendants } from "../process.ts";
import { freePorts, host, ready } from "../server.ts";
import { Card } from "./card.ts";
import type { GpuLoad, GpuLoaded } from "./load.ts";
import type { Peer, PeerSettings } from "./peers.ts";
import { lengthsOf, type Shape } from "./requests.ts";

export interface Place {
  readonly dir: string;
  readonly python: string;
  readonly quick: boolean;
  /** Of Ferry. */
  readonly processes: number;
  tell(text: string): void;
}

export interface Model {
  readonly model: "embed" | "generate" | "mixed";
  /** Of each input, or the name of a mix of lengths. */
  readonly tokens: number | string;
  readonly env: Readonly<Record<string, string>>;
  readonly sizes: readonly number[];
  /** The longest that an input waits for others while a worker is free. */
  readonly waitMs: number;
}

export interface Curve {
  readonly torch: string;
  readonly device: string;
  readonly alone_ms: number;
  readonly curve: readonly { readonly size: number; readonly ms: number; readonly per_second: number }[];
}

/** What the card can do with inputs of different length (mixed.py). */
export interface Bound {
  readonly torch: string;
  readonly device: string;
  readonly recorded_s: number;
  /** Between an input's vector alone and in a batch; null without a model. */
  readonly difference: number | null;
  readonly sorted: Paced;
  /** By the number of inputs in a batch. */
  readonly in_order: readonly (Paced & { readonly size: number })[];
  /** Mean length. */
  readonly tokens: number;
}

interface Paced {
  readonly per_second: number;
  readonly ms: number;
  readonly padding: number;
  /** Share of the time in which the GPU had a batch; null without a GPU. */
  readonly busy: number | null;
}

/** `cores`: used on average. */
export interface ProcessLoad {
  readonly role: string;
  readonly pid: number;
  readonly cores: number;
}

export interface Run {
  readonly rate: number;
  readonly latency: Histogram;
  /** By class of length, in an open loop of a mix. */
  readonly classes: ReadonlyMap<string, Histogram>;
  /** NaN where no answer carried the sums of any request. */
  readonly crossed: number;
  readonly errors: number;
  /** Mean tasks in a batch; NaN where there are none. */
  readonly fill: number;
  readonly card: ReturnType<Card["read"]>;
  /** ferry_padding_ratio at the end; NaN where there is none. */
  readonly paddingRatio: number;
  /** The server and everything it has started. */
  readonly processes: readonly ProcessLoad[];
  readonly notes: readonly string[];
}

export interface Work {
  readonly load: LoadKind;
  readonly seconds: number;
  readonly shape?: Shape;
  readonly warmMs?: number;
}

export const BATCH = 64;

const here = import.meta.dirname;
const FILES = { embed: "models.py", generate: "models.py", mixed: "mixed.py" } as const;
const GENERATORS = availableParallelism() >= 8 ? 4 : 2;
/** Under the first load, and under each one after it. */
const WARM_MS = [4000, 2000] as const;
const START_MS = 180_000;
const ASK_MS = 500;
/** For a server to end what it has started. */
const GRACE_MS = 3000;
const BUSY_GENERATOR = 0.8;
/** More requests that left some milliseconds after they were due show in a p99. */
const LATE_SHARE = 0.002;

export async function offline({ model, sizes, env }: Model, place: Place): Promise<Curve> {
  place.tell("what the card can do");
  const seconds = place.quick ? 0.5 : 2;
  const args = [join(here, "offline.py"), model, String(seconds), ...sizes.map(String)];
  await using child = new Child("-u", args, { program: place.python, env });
  const text = await child.output(START_MS + 30_000);
  return JSON.parse(text.trim().split("\n").at(-1)!) as Curve;
}

/** Of the lengths that the load has, sorted, in full batches; and as they come. */
export async function bound({ model, tokens, env }: Model, place: Place): Promise<Bound> {
  place.tell("what the card can do with inputs sorted by length");
  const seconds = place.quick ? 0.5 : 2;
  const lengths = Array.from({ length: GENERATORS }, (_, at) => lengthsOf(tokens, at)).flat();
  const file = join(place.dir, "lengths.json");
  writeFileSync(file, JSON.stringify(lengths));
  const args = [join(here, FILES[model]), String(seconds), file];
  const busyFile = { GPU_BUSY_FILE: join(place.dir, "busy") };
  await using child = new Child("-u", args, { program: place.python, env: { ...env, ...busyFile } });
  const text = await child.output(START_MS + 60_000);
  return JSON.parse(text.trim().split("\n").at(-1)!) as Bound;
}

type RoleOf = (pid: number, command: readonly string[]) => string;

/** Something that answers, under one load after the other. */
export class Server implements AsyncDisposable {
  readonly #child: Child;
  readonly #model: Model;
  readonly #place: Place;
  readonly #target: { readonly port: number; readonly path: string };
  readonly #busyFile: string;
  readonly #adminUrl: string | undefined;
  readonly #roles: ReadonlyMap<number, string>;
  #loads = 0;

  private constructor(
    child: Child,
    model: Model,
    place: Place,
    target: { readonly port: number; readonly path: string },
    busyFile: string,
    roleOf: RoleOf,
    adminUrl?: string,
  ) {
    this.#child = child;
    this.#model = model;
    this.#place = place;
    this.#target = target;
    this.#busyFile = busyFile;
    this.#adminUrl = adminUrl;
    const pids = [child.pid, ...descendants(child.pid)];
    this.#roles = new Map(pids.map((pid) => [pid, roleOf(pid, commandOf(pid))]));
  }

  static async plain(model: Model, place: Place): Promise<Server> {
    const [port] = await freePorts(1);
    const args = [join(here, "plain_server.py"), model.model, String(port)];
    const child = new Child("-u", args, { program: place.python, env: model.env });
    await ready(child, START_MS);
    return new Server(child, model, place, { port: port!, path: "/" }, "", () => "Python");
  }

  /** `settings`: further ones of the model. */
  static async ferry(model: Model, place: Place, settings: object = {}): Promise<Server> {
    const [port] = await freePorts(1);
    const folder = mkdtempSync(join(place.dir, "ferry-"));
    const file = join(folder, "ferry.yaml");
    const busyFile = join(folder, "busy");
    // JSON is YAML.
    writeFileSync(file, JSON.stringify(configuration(model, port!, place.python, settings)));
    const env = { ...model.env, GPU_BUSY_FILE: busyFile, GPU_BENCH_MODEL: model.model };
    const several = place.processes === 1 ? [] : ["--processes", String(place.processes)];
    const args = ["serve", "-c", file, ...several];
    const child = new Child(join(here, "../../src/cli.ts"), args, { maxFiles: 16_384, env });
    const { admin } = await ready(child, START_MS);
    const target = { port: port!, path: "/v1/inference" };
    const role: RoleOf = (pid, command) => ferryRole(child, pid, command);
    return new Server(child, model, place, target, busyFile, role, admin);
  }

  /** Rejects where the peer does not answer in time. */
  static async peer(peer: Peer, settings: PeerSettings, model: Model, place: Place): Promise<Server> {
    const [port] = await freePorts(1);
    const args = [join(here, peer.file), String(port), JSON.stringify(settings)];
    const child = new Child("-u", args, { program: place.python, env: model.env, maxFiles: 16_384 });
    const target = { port: port!, path: peer.path };
    const asking = new AbortController();
    try {
      await Promise.race([answers(target, model, asking.signal), child.line(() => false, START_MS)]);
    } catch (error) {
      asking.abort();
      await endTree(child);
      throw error;
    }
    const role = (_: number, [program = ""]: readonly string[]): string =>
      basename(program).startsWith("python") ? "Python" : basename(program);
    return new Server(child, model, place, target, "", role);
  }

  async under(what: string, { load, seconds, shape = "native", ...work }: Work): Promise<Run> {
    using card = new Card(this.#busyFile);
    const { model, tokens } = this.#model;
    const measureMs = this.#place.quick ? 2000 : seconds * 1000;
    const usualWarmMs = WARM_MS[this.#loads++ === 0 ? 0 : 1];
    const warmMs = work.warmMs ?? usualWarmMs;
    const path = shape === "native" ? this.#target.path : "/v1/embeddings";
    const common = { host, port: this.#target.port, path, shape, model, tokens, warmMs, measureMs };
    const generators = Array.from({ length: GENERATORS }, (_, at) => {
      const spec: GpuLoad = { ...common, process: at, load: shareOf(load, at) };
      return new Child(join(here, "load.ts"), [JSON.stringify(spec)], { maxFiles: 16_384 });
    });
    await Promise.all(generators.map((each) => each.line((line) => line === "measuring", warmMs + 30_000)));
    card.start();
    const [from, startedAt] = [this.#cpuMs(), performance.now()];
    await setTimeout(measureMs);
    const [to, ms, used] = [this.#cpuMs(), performance.now() - startedAt, card.read()];
    const paddingRatio = await this.#paddingRatio();
    const texts = await Promise.all(generators.map((each) => each.output(60_000)));
    const loaded = texts.map((text) => JSON.parse(text) as GpuLoaded);
    const run: Run = {
      ...totals(loaded, measureMs),
      card: used,
      paddingRatio,
      processes: [...this.#roles].map(([pid, role]) => ({
        role,
        pid,
        cores: (to.get(pid)! - from.get(pid)!) / ms,
      })),
      notes: notesOn(what, loaded),
    };
    this.#place.tell(`${what}: ${inOneLine(run)}`);
    return run;
  }

  async #paddingRatio(): Promise<number> {
    if (this.#adminUrl === undefined) return NaN;
    const response = await fetch(`${this.#adminUrl}/metrics`, { signal: AbortSignal.timeout(5000) });
    const found = /^ferry_padding_ratio(?:\{[^}]*\})? (\S+)/m.exec(await response.text());
    return Number(found?.[1] ?? NaN);
  }

  #cpuMs(): ReadonlyMap<number, number> {
    return new Map(Array.from(this.#roles.keys(), (pid) => [pid, cpuMsOrNone(pid)]));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await endTree(this.#child);
  }
}

/** LitServe leaves processes behind, which also keep its output open. */
async function endTree(child: Child): Promise<void> {
  const others = descendants(child.pid);
  const ended = child[Symbol.asyncDispose]();
  await Promise.race([ended, setTimeout(GRACE_MS)]);
  for (const pid of others) {
    try {
      process.kill(pid, "SIGKILL");
    } catch {
      // It has ended.
    }
  }
  await ended;
}

/** Of `ferry serve --processes`: its commands are alike, but only one has the workers. */
function ferryRole(child: Child, pid: number, command: readonly string[]): string {
  if (isWorker(command)) return "Python";
  if (childPids(pid).some((other) => isWorker(commandOf(other)))) return "core";
  return pid === child.pid ? "parent" : "gateway";
}

function isWorker(command: readonly string[]): boolean {
  return command.some((word) => word.endsWith("ferry_worker.py"));
}

function cpuMsOrNone(pid: number): number {
  try {
    return cpuMs(pid);
  } catch {
    return NaN; // it has ended
  }
}

/** Resolves when a request is answered with 200. */
async function answers(
  { port, path }: { port: number; path: string },
  { tokens }: Model,
  given: AbortSignal,
): Promise<void> {
  const [length] = lengthsOf(tokens, 0);
  const body = JSON.stringify({ input: Array(length).fill(10_000) });
  while (!given.aborted) {
    try {
      const signal = AbortSignal.timeout(10_000);
      const headers = { "content-type": "application/json" };
      const response = await fetch(`http://${host}:${port}${path}`, {
        method: "POST",
        headers,
        body,
        signal,
      });
      await response.text();
      if (response.ok) return;
    } catch {
      // It does not listen yet.
    }
    await setTimeout(ASK_MS);
  }
}

/** Cores used by all processes of that role, or by all. */
export function coresOf({ processes }: Run, role?: string): number {
  return processes
    .filter((each) => (role === undefined || each.role === role) && !Number.isNaN(each.cores))
    .reduce((sum, { cores }) => sum + cores, 0);
}

function inOneLine(run: Run): string {
  const percent = (share: number): string => (Number.isNaN(share) ? "–" : `${(100 * share).toFixed(1)} %`);
  const [p50, p99] = [50, 99].map((rank) => run.latency.percentileMs(rank).toFixed(1));
  const processes = run.processes
    .filter(({ cores }) => cores >= 0.005)
    .map(({ role, cores }) => `${role} ${(100 * cores).toFixed(0)}`)
    .join(", ");
  return (
    `${Math.round(run.rate)} req/s, p50 ${p50} p99 ${p99} ms, card had a batch ${percent(run.card.batches)}, ran kernels ` +
    `${percent(run.card.kernels)}, mean batch ${Number.isNaN(run.fill) ? "–" : run.fill.toFixed(1)}, ` +
    `${run.errors} errors, ${run.crossed} crossed, CPU % of a core: ${processes}`
  );
}

function totals(
  loaded: readonly GpuLoaded[],
  measureMs: number,
): Pick<Run, "rate" | "latency" | "classes" | "crossed" | "errors" | "fill"> {
  const sum = (pick: (one: GpuLoaded) => number): number => loaded.reduce((all, one) => all + pick(one), 0);
  const merged = (states: readonly HistogramState[]): Histogram => {
    const histogram = new Histogram();
    for (const state of states) histogram.merge(Histogram.from(state));
    return histogram;
  };
  const labels = Object.keys(loaded[0]!.classes);
  return {
    rate: sum(({ served }) => served) / (measureMs / 1000),
    latency: merged(loaded.map(({ latency }) => latency)),
    classes: new Map(
      labels.map((label) => [label, merged(loaded.flatMap(({ classes }) => classes[label] ?? []))]),
    ),
    crossed: sum(({ checked, crossed }) => (checked ? crossed : NaN)),
    errors: sum(({ errors, refused }) => errors + refused),
    fill: sum(({ batched }) => batched) / sum(({ batches }) => batches),
  };
}

function configuration({ model, waitMs }: Model, port: number, python: string, settings: object): unknown {
  const backend = {
    kind: "python",
    function: `${join(here, FILES[model])}:${model}`,
    inputs: "int32",
    workers: 1,
    python,
    startTimeoutMs: START_MS,
  };
  const own = {
    name: model,
    backend,
    maxBatchSize: BATCH,
    maxWaitMs: waitMs,
    // No input comes twice: there is nothing to reuse.
    cache: { scope: "off" },
    collapse: false,
    ...(model === "embed" && { protocols: ["openai-embeddings"] }),
    timeouts: { queueMs: 20_000, workerMs: 5000, totalMs: 25_000 },
    ...settings,
  };
  return { listen: `${host}:${port}`, admin: { listen: `${host}:0` }, models: [own] };
}

/** What one of the processes has of it. */
function shareOf(load: LoadKind, at: number): LoadKind {
  if (load.kind === "open") {
    const seed = load.seed === undefined ? {} : { seed: load.seed + at };
    return { ...load, rate: load.rate / GENERATORS, ...seed };
  }
  return { ...load, callers: Math.max(1, Math.round(load.callers / GENERATORS)) };
}

function notesOn(what: string, loaded: readonly GpuLoaded[]): string[] {
  const notes: string[] = [];
  const busiest = Math.max(...loaded.map(({ cpuShare }) => cpuShare));
  if (busiest > BUSY_GENERATOR)
    notes.push(`${what}: a generator used ${(100 * busiest).toFixed(0)} % of a core`);
  const [sent, late] = loaded.reduce(([all, some], one) => [all + one.served, some + one.late], [0, 0]);
  if (late > LATE_SHARE * sent) notes.push(`${what}: ${late} of ${sent} requests were sent late`);
  if (!loaded.every(({ checked }) => checked)) notes.push(`${what}: no answer carried its request's sums`);
  if (loaded.some(({ errors, refused }) => errors + refused > 0)) {
    notes.push(`${what}: ${loaded.map(({ codes }) => JSON.stringify(codes)).join(" ")}`);
  }
  return notes;
}
