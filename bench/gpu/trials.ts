/** The trials of bench/gpu: each starts what it needs, loads it from other processes, and ends it. */
import { mkdtempSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { setTimeout } from "node:timers/promises";
import type { LoadKind } from "../../src/cli/bench/driver.ts";
import { Histogram } from "../../src/cli/bench/histogram.ts";
import { Child, childPids, cpuMs } from "../process.ts";
import { freePorts, host, ready } from "../server.ts";
import { Card } from "./card.ts";
import type { GpuLoad, GpuLoaded } from "./load.ts";
import type { Shape } from "./requests.ts";

export interface Place {
  readonly dir: string;
  readonly python: string;
  readonly quick: boolean;
  tell(text: string): void;
}

export interface Model {
  readonly model: "embed" | "generate";
  readonly tokens: number;
  readonly env: Readonly<Record<string, string>>;
  readonly sizes: readonly number[];
  /** Python processes behind Ferry, all on the same GPU; left out: one. */
  readonly workers?: number;
}

export interface Curve {
  readonly torch: string;
  readonly device: string;
  readonly alone_ms: number;
  readonly curve: readonly { readonly size: number; readonly ms: number; readonly per_second: number }[];
}

export interface Run {
  readonly rate: number;
  readonly latency: Histogram;
  readonly crossed: number;
  readonly errors: number;
  /** Mean tasks in a batch; NaN where there are none. */
  readonly fill: number;
  readonly card: ReturnType<Card["read"]>;
  /** Cores used. */
  readonly serverCpu: number;
  readonly workerCpu: number;
  readonly notes: readonly string[];
}

export interface Work {
  readonly load: LoadKind;
  readonly seconds: number;
  readonly shape?: Shape;
}

const here = import.meta.dirname;
const GENERATORS = 2;
const WARM_MS = 4000;
const START_MS = 180_000;
const BUSY_GENERATOR = 0.8;

export async function offline({ model, sizes, env }: Model, place: Place): Promise<Curve> {
  place.tell("what the card can do");
  const seconds = place.quick ? 0.5 : 2;
  const args = [join(here, "offline.py"), model, String(seconds), ...sizes.map(String)];
  await using child = new Child("-u", args, { program: place.python, env });
  const text = await child.output(START_MS + 30_000);
  return JSON.parse(text.trim().split("\n").at(-1)!) as Curve;
}

/** Something that answers, under one load after the other. */
export class Server implements AsyncDisposable {
  readonly #child: Child;
  readonly #model: Model;
  readonly #place: Place;
  readonly #port: number;
  readonly #busyFile: string;
  /** The Python processes behind Ferry; none for a server that is Python itself. */
  readonly #workers: readonly number[];

  private constructor(child: Child, model: Model, place: Place, port: number, busyFile: string) {
    this.#child = child;
    this.#model = model;
    this.#place = place;
    this.#port = port;
    this.#busyFile = busyFile;
    this.#workers = childPids(child.pid);
  }

  static async plain(model: Model, place: Place): Promise<Server> {
    const [port] = await freePorts(1);
    const args = [join(here, "plain_server.py"), model.model, String(port)];
    const child = new Child("-u", args, { program: place.python, env: model.env });
    await ready(child, START_MS);
    return new Server(child, model, place, port!, "");
  }

  /** `settings`: of the model in ferry.yaml. */
  static async ferry(model: Model, place: Place, settings: object = {}): Promise<Server> {
    const [port] = await freePorts(1);
    const folder = mkdtempSync(join(place.dir, "ferry-"));
    const file = join(folder, "ferry.yaml");
    const busyFile = join(folder, "busy");
    // JSON is YAML.
    writeFileSync(file, JSON.stringify(configuration(model, port!, place.python, settings)));
    // Two on one GPU would both count the time that it gives to either.
    const counted = model.workers === undefined ? { GPU_BUSY_FILE: busyFile } : {};
    const env = { ...model.env, ...counted, GPU_BENCH_MODEL: model.model };
    const child = new Child(join(here, "../../src/cli.ts"), ["serve", "-c", file], { maxFiles: 16_384, env });
    await ready(child, START_MS);
    return new Server(child, model, place, port!, busyFile);
  }

  async under(what: string, { load, seconds, shape = "native" }: Work): Promise<Run> {
    this.#place.tell(what);
    using card = new Card(this.#busyFile);
    const { model, tokens } = this.#model;
    const measureMs = this.#place.quick ? 2000 : seconds * 1000;
    const path = shape === "native" ? "/v1/inference" : "/v1/embeddings";
    const common = { host, port: this.#port, path, shape, model, tokens, warmMs: WARM_MS, measureMs };
    const generators = Array.from({ length: GENERATORS }, (_, at) => {
      const spec: GpuLoad = { ...common, process: at, load: shareOf(load) };
      return new Child(join(here, "load.ts"), [JSON.stringify(spec)], { maxFiles: 16_384 });
    });
    await Promise.all(generators.map((each) => each.line((line) => line === "measuring", WARM_MS + 30_000)));
    card.start();
    const [from, startedAt] = [this.#cpu(), performance.now()];
    await setTimeout(measureMs);
    const [to, ms, used] = [this.#cpu(), performance.now() - startedAt, card.read()];
    const texts = await Promise.all(generators.map((each) => each.output(60_000)));
    const loaded = texts.map((text) => JSON.parse(text) as GpuLoaded);
    return {
      ...totals(loaded, measureMs),
      card: used,
      serverCpu: (to.server - from.server) / ms,
      workerCpu: (to.worker - from.worker) / ms,
      notes: notesOn(what, loaded),
    };
  }

  #cpu(): { readonly server: number; readonly worker: number } {
    const worker = this.#workers.reduce((sum, pid) => sum + cpuMs(pid), 0);
    return { server: cpuMs(this.#child.pid), worker };
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.#child[Symbol.asyncDispose]();
  }
}

function totals(
  loaded: readonly GpuLoaded[],
  measureMs: number,
): Pick<Run, "rate" | "latency" | "crossed" | "errors" | "fill"> {
  const sum = (pick: (one: GpuLoaded) => number): number => loaded.reduce((all, one) => all + pick(one), 0);
  const latency = new Histogram();
  for (const one of loaded) latency.merge(Histogram.from(one.latency));
  return {
    rate: sum(({ served }) => served) / (measureMs / 1000),
    latency,
    crossed: sum(({ crossed }) => crossed),
    errors: sum(({ errors, refused }) => errors + refused),
    fill: sum(({ batched }) => batched) / sum(({ batches }) => batches),
  };
}

function configuration(
  { model, workers = 1 }: Model,
  port: number,
  python: string,
  settings: object,
): unknown {
  const backend = {
    kind: "python",
    function: `${join(here, "models.py")}:${model}`,
    workers,
    python,
    startTimeoutMs: START_MS,
  };
  const own = {
    name: model,
    backend,
    maxBatchSize: 64,
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
function shareOf(load: LoadKind): LoadKind {
  if (load.kind === "open") return { ...load, rate: load.rate / GENERATORS };
  return { ...load, callers: Math.max(1, Math.round(load.callers / GENERATORS)) };
}

function notesOn(what: string, loaded: readonly GpuLoaded[]): string[] {
  const notes: string[] = [];
  const busiest = Math.max(...loaded.map(({ cpuShare }) => cpuShare));
  if (busiest > BUSY_GENERATOR)
    notes.push(`${what}: a generator used ${(100 * busiest).toFixed(0)} % of a core`);
  if (!loaded.every(({ checked }) => checked)) notes.push(`${what}: no answer carried its request's sums`);
  if (loaded.some(({ errors, refused }) => errors + refused > 0)) {
    notes.push(`${what}: ${loaded.map(({ codes }) => JSON.stringify(codes)).join(" ")}`);
  }
  return notes;
}
