/** From a request to a plan: the search with its progress, and the chart. */
import { createReadStream, existsSync, writeFileSync } from "node:fs";
import { createInterface } from "node:readline";
import type { Config, ModelConfig, SimulatedBackendConfig } from "../app/config/config.ts";
import { demoConfig } from "../app/config/load.ts";
import { didYouMean } from "../app/config/spelling.ts";
import { rulesOf } from "../app/rules.ts";
import type { Limits, PolicyName } from "../core/policy.ts";
import { THRESHOLD_DEPTHS } from "../core/shed.ts";
import { fleetChart } from "./chart.ts";
import { type Call, type Console, Failure, type Flag, UsageError } from "./command.ts";
import { chooseConfig } from "./config-file.ts";
import { planText } from "./plan-text.ts";
import { type PlanRequest, type Goal, type Plan, Planner, TARGET_LOAD } from "./plan/planner.ts";
import { type ServiceTime, capacityOf, dependsOnLength, parseService, serviceMs } from "./plan/fit.ts";
import { type LengthMix, parseLengths, recordedLengths } from "./plan/lengths.ts";
import { lengthsIn } from "./plan/trace-file.ts";
import { type Figures, type TrialFleet, withCapacity } from "./plan/trial.ts";
import { count } from "./terminal/banner.ts";
import { paint, printable, wantsColor } from "./terminal/terminal.ts";

export const HOW_LONG =
  "how long are the inputs? A batch's time depends on it; say --lengths mixed, 50%:6-16,50%:100-200, or a file";

/** Undefined without a rate or a goal. */
export async function readAsk(
  call: Call,
  settings: Settings,
  service: ServiceTime,
): Promise<PlanRequest | undefined> {
  const [perSecond, goal] = [readRate(call), readGoal(call)];
  if (perSecond === undefined || goal === undefined) return undefined;
  const { tiers, seed, limits, lengths } = settings;
  if (lengths === undefined && dependsOnLength(service)) throw new UsageError(HOW_LONG);
  const [burst, durationMs] = [readBurst(call), readTime(call, "duration")];
  if (limits.maxBatchSize === 1) {
    const workers = Math.ceil(perSecond / 1000 / (TARGET_LOAD * capacityOf(service, 1)));
    throw new Failure(
      `with --batch 1 there is nothing to batch: one call for each of ${count(perSecond)} requests a second ` +
        `needs ${count(workers)} workers at ${TARGET_LOAD} load; a model that takes at least 2 inputs is needed`,
    );
  }
  return {
    perSecond,
    goal,
    fleet: await withCapacity(fleetOf(call, settings, service), lengths, seed),
    tiers,
    lengths,
    seed,
    ...(burst !== undefined && { burst }),
    ...(durationMs !== undefined && { durationMs }),
  };
}

export async function findPlan(
  call: Call,
  console: Console,
  ask: PlanRequest,
): Promise<Plan & { text: string; inOrder: InOrder }> {
  const progress = new Progress(console);
  const planner = new Planner(ask, (workers, runs) => {
    progress.tell(`run ${runs + 1}: ${workers} workers, ${count(requestsOf(planner))} requests`);
  });
  const given = readWorkers(call);
  try {
    const found = await planner.plan(given);
    const inOrder = await planInOrder(ask, given, progress);
    const svg = call.text("svg");
    if (svg !== undefined) write(svg, await draw(planner, found));
    const colors = paint(wantsColor({ ...console, isTTY: console.outIsTTY, noColor: call.is("no-color") }));
    return { ...found, inOrder, text: planText(found, inOrder, ask, readCost(call), colors) };
  } finally {
    progress.end();
  }
}

/** The same without grouping by length. Undefined where there is none; null where no number of workers meets the goal. */
export type InOrder = Figures | null | undefined;

async function planInOrder(
  ask: PlanRequest,
  given: number | undefined,
  progress: Progress,
): Promise<InOrder> {
  const { lengths, seed, fleet } = ask;
  if (lengths === undefined || fleet.lengths === "off" || (fleet.service.perCellMs ?? 0) === 0) {
    return undefined;
  }
  const inOrder = await withCapacity({ ...fleet, lengths: "off" }, lengths, seed);
  const planner = new Planner({ ...ask, fleet: inOrder }, (workers, runs) => {
    progress.tell(`in order of arrival, run ${runs + 1}: ${workers} workers`);
  });
  return (await planner.only(given)) ?? null;
}

function requestsOf({ perMs, durationMs }: Planner): number {
  return Math.round((perMs * durationMs) / 1000) * 1000;
}

const CHART_POINTS = 12;

/** With more sizes than the table: a curve needs them. */
async function draw(planner: Planner, { recommended, knee }: Plan): Promise<string> {
  const chosen = recommended.workers;
  const first = Math.max(1, (knee?.workers ?? chosen) - 1);
  const last = Math.max(first + 4, Math.ceil(1.4 * chosen));
  const step = Math.max(1, Math.ceil((last - first) / CHART_POINTS));
  const sizes = new Set([chosen, ...(knee === undefined ? [] : [knee.workers])]);
  for (let workers = first; workers <= last; workers += step) sizes.add(workers);
  const points = [];
  for (const workers of [...sizes].sort((one, other) => one - other)) points.push(await planner.run(workers));
  const { perSecond, goal, fleet } = planner.ask;
  const title = `${count(perSecond)} requests/s, batches of up to ${fleet.limits.maxBatchSize}, policy ${fleet.limits.policy}`;
  return fleetChart({ title, points, goal, recommended: chosen, knee: knee?.workers });
}

function write(path: string, text: string): void {
  try {
    writeFileSync(path, text);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    throw new Failure(`${printable(path)} cannot be written (${code ?? "unknown reason"})`);
  }
}

/** One line, overwritten on a terminal; elsewhere only the first. */
export class Progress {
  readonly #console: Console;
  #told = false;

  constructor(console: Console) {
    this.#console = console;
  }

  tell(what: string): void {
    if (this.#console.errIsTTY) this.#console.err(`\r\u001b[K  ${what}`);
    else if (!this.#told) this.#console.err(`  ${what} …\n`);
    this.#told = true;
  }

  end(): void {
    if (this.#told && this.#console.errIsTTY) this.#console.err("\r\u001b[K");
  }
}

/**
 * Settings of `ferry plan`: flags override the config file (-c), which overrides Ferry's defaults. Times are `150ms`,
 * `1.5s`, `2m`, `1h`; a bare number is milliseconds.
 */

const text = (value: string, doc: string, short?: string): Flag => ({
  type: "string",
  value,
  doc,
  ...(short !== undefined && { short }),
});

export const planFlags: { readonly [name: string]: Flag } = {
  rate: text("N", "requests per second that come"),
  slo: text("p99=TIME", "the goal: p50, p95, p99 or p99.9 of latency, such as p99=150ms"),
  service: text(
    "TIME",
    "what a batch takes: 100ms for any size, 36+1n for 36 ms and 1 ms for each task in it; n: tasks, l: tokens of the longest, t: of all: 0.5+0.005n+0.00046nl (padded), 5+0.02t (packed)",
  ),
  lengths: text(
    "MIX",
    "how long inputs are, in tokens: mixed, chat, 50%:6-16,40%:40-120,10%:200-512, or a file with one JSON a line that has tokens, length, input_tokens or the input; default all alike",
  ),
  batch: text("N", "maxBatchSize; default 64"),
  workers: text("N", "what so many workers do, instead of how many are needed"),
  policy: text("NAME", "adaptive (default), latency, eco or fixed"),
  "max-wait": text("TIME", "maxWaitMs; default 50ms"),
  burst: text("X", "crowds of X times the mean rate (2.5 is plenty), half of it in between; default none"),
  tiers: text("LIST", "who comes, best tier first, in percent: enterprise=10,paid=30,free=60"),
  jitter: text("SHARE", "scatter of the service time, 0 to 1; default 0"),
  cost: text("PRICE/h", "what a worker costs, such as 2.50/h: adds the cost per million requests"),
  "queue-ms": text("MS", "timeouts.queueMs; default 2000"),
  "total-ms": text("MS", "timeouts.totalMs; default 4000, more where a batch takes long"),
  overhead: text("TIME", "added to every latency for HTTP and network, which are not simulated; default 0ms"),
  measure: text("URL", "time batches of 1 to --batch on this worker (protocol batch) instead of --service"),
  input: text("JSON", 'what --measure puts into every seat; default "hello"'),
  rounds: text("N", "batches of each size that --measure times; default 7"),
  timeout: text("TIME", "what --measure gives one batch; default 30s"),
  learned: text(
    "FILE",
    "what GET /internal/workers of a running Ferry said: its own times instead of --service",
  ),
  replay: text("FILE", "recorded requests, one JSON a line: the best maxBatchSize and maxWaitMs for them"),
  duration: text(
    "TIME",
    "simulated time of each run; default 100,000 requests, 10s at least, an hour at most",
  ),
  seed: text("N", "another draw of the same arrivals; default 1"),
  config: text("FILE", "take the model's settings from this config file", "c"),
  model: text("NAME", "which of its models; default the first one"),
  svg: text("FILE", "write a chart of latency against workers"),
  json: { type: "boolean", doc: "one JSON object on stdout" },
};

export interface Settings {
  readonly config: Config;
  readonly model: ModelConfig;
  readonly limits: Limits;
  readonly service: ServiceTime | undefined;
  readonly tiers: readonly { readonly name: string; readonly share: number }[];
  readonly lengths: LengthMix | undefined;
  readonly seed: number;
}

const POLICIES: readonly PolicyName[] = ["adaptive", "latency", "eco", "fixed"];
const SHARES = new Map([
  ["p50", 0.5],
  ["p95", 0.95],
  ["p99", 0.99],
  ["p99.9", 0.999],
]);
const MAX_BATCH = 100_000;
const MAX_WORKERS = 10_000;

/** Undefined when the config file cannot be used; the reason was printed. */
export async function readSettings(call: Call, console: Console): Promise<Settings | undefined> {
  const named = call.text("config") !== undefined;
  const chosen = named ? chooseConfig(call, console, "nothing was planned") : undefined;
  if (named && chosen === undefined) return undefined;
  const config = chosen?.config ?? demoConfig();
  // Without -c, --learned may have models of other names.
  const elsewhere = !named && call.text("learned") !== undefined;
  const model = chooseModel(config, elsewhere ? undefined : call.text("model"));
  const { backend } = model;
  const written = call.text("service");
  const service = written === undefined ? undefined : parseService(written);
  if (written !== undefined && service === undefined) {
    throw new UsageError(
      `--service ${printable(written)} is no time; write 100ms, 0.1s, 36+1n or 0.5+0.005n+0.00046nl`,
    );
  }
  const simulated = named && backend.kind === "simulated" ? backend : undefined;
  return {
    config,
    model,
    limits: {
      policy: readPolicy(call) ?? model.policy,
      maxBatchSize: readCount(call, "batch", MAX_BATCH) ?? model.maxBatchSize,
      maxWaitMs: readTime(call, "max-wait") ?? model.maxWaitMs,
    },
    service: service ?? (simulated && serviceOf(simulated)),
    tiers: readTiers(call.text("tiers")),
    lengths: await readLengths(call.text("lengths")),
    seed: readNumber(call, "seed", 0, Number.MAX_SAFE_INTEGER) ?? 1,
  };
}

function serviceOf({ baseMs, perItemMs, perTokenMs }: SimulatedBackendConfig): ServiceTime {
  return { baseMs, perTaskMs: perItemMs, perCellMs: perTokenMs };
}

const MOST_LENGTHS = 1_000_000;

async function readLengths(written: string | undefined): Promise<LengthMix | undefined> {
  const mix = written === undefined ? undefined : parseLengths(written);
  if (written === undefined || mix !== undefined) return mix;
  if (!existsSync(written)) {
    throw new UsageError(
      `--lengths ${printable(written)} is neither mixed, chat, a list such as 50%:6-16,50%:100-200, nor a file`,
    );
  }
  const lengths: number[] = [];
  await readLines("lengths", written, (line) => {
    if (lengths.length < MOST_LENGTHS) lengths.push(...lengthsIn(line));
  });
  if (lengths.length > 0) return recordedLengths(written, Uint32Array.from(lengths));
  throw new Failure(
    `--lengths ${printable(written)} holds no length; it needs one JSON a line with tokens, length, ` +
      `input_tokens or input`,
  );
}

export async function readLines(flag: string, path: string, take: (line: string) => void): Promise<void> {
  const input = createReadStream(path, "utf8");
  try {
    for await (const line of createInterface({ input, crlfDelay: Infinity })) take(line);
  } catch (error) {
    const { code } = error as NodeJS.ErrnoException;
    const why =
      code === "ENOENT" ? "there is no such file" : `it cannot be read (${code ?? "unknown reason"})`;
    throw new Failure(`--${flag} ${printable(path)}: ${why}`);
  }
}

function chooseModel({ models }: Config, name: string | undefined): ModelConfig {
  if (name === undefined) return models[0]!;
  const names = models.map((each) => each.name);
  const found = models.find((each) => each.name === name);
  if (found !== undefined) return found;
  throw new Failure(`the config has no model ${printable(name)}${didYouMean(name, names)}`);
}

/** A fleet of such workers; Ferry's default timeouts, longer where a batch takes long. */
export function fleetOf(call: Call, settings: Settings, service: ServiceTime): TrialFleet {
  const { config, model, limits, lengths } = settings;
  const fullMs = serviceMs(service, limits.maxBatchSize, lengths?.longest);
  const { timeouts } = model;
  const given = call.text("config") !== undefined;
  const queueMs = readNumber(call, "queue-ms", 1, 3_600_000) ?? timeouts.queueMs;
  const workerMs = given ? timeouts.workerMs : Math.max(timeouts.workerMs, Math.ceil(3 * fullMs));
  const least = given ? timeouts.totalMs : Math.max(timeouts.totalMs, queueMs + Math.ceil(2 * fullMs));
  return {
    limits,
    service,
    jitter: readNumber(call, "jitter", 0, 1) ?? 0,
    timeouts: { queueMs, workerMs, totalMs: readNumber(call, "total-ms", 1, 3_600_000) ?? least },
    admission: { ...config.admission, ...THRESHOLD_DEPTHS },
    maxQueued: config.limits.maxQueued,
    overheadMs: readTime(call, "overhead") ?? 0,
    lengths: rulesOf(model).lengths ?? "off",
  };
}

export function readGoal(call: Call): Goal | undefined {
  const written = call.text("slo");
  if (written === undefined) return undefined;
  const [name = "", time = ""] = written.split("=");
  const share = SHARES.get(name);
  const ms = parseTime(time);
  if (share === undefined || ms === undefined || ms <= 0) {
    throw new UsageError(`--slo ${printable(written)} is no goal; write p99=150ms (p50, p95, p99 or p99.9)`);
  }
  return { name, share, ms };
}

function readRate(call: Call): number | undefined {
  const rate = readNumber(call, "rate", 0, 10_000_000);
  if (rate === 0) throw new Failure("--rate 0 needs no workers; say how many requests come per second");
  return rate;
}

export function readWorkers(call: Call): number | undefined {
  return readCount(call, "workers", MAX_WORKERS);
}

function readBurst(call: Call): number | undefined {
  const burst = readNumber(call, "burst", 1, 100);
  return burst === undefined || burst === 1 ? undefined : burst;
}

export function readCost(call: Call): number | undefined {
  const written = call.text("cost");
  if (written === undefined) return undefined;
  const match = /^[$€£]?(\d+(?:\.\d+)?)(?:\/(h|d))?$/.exec(written);
  if (match === null) throw new UsageError(`--cost ${printable(written)} is no price; write 2.50/h`);
  return Number(match[1]) / (match[2] === "d" ? 24 : 1);
}

/** `enterprise=10,paid=30,free=60`; the shares need not add up to 100. */
function readTiers(written: string | undefined): Settings["tiers"] {
  if (written === undefined) return [{ name: "all", share: 1 }];
  const parts = written.split(",").map((part) => /^\s*([\w-]{1,64})=(\d+(?:\.\d+)?)%?\s*$/.exec(part));
  const tiers = parts.map((part) => ({ name: part?.[1] ?? "", share: Number(part?.[2] ?? NaN) }));
  const sum = tiers.reduce((total, { share }) => total + share, 0);
  if (!(sum > 0) || new Set(tiers.map(({ name }) => name)).size < tiers.length) {
    throw new UsageError(`--tiers ${printable(written)} is no list; write enterprise=10,paid=30,free=60`);
  }
  return tiers.map(({ name, share }) => ({ name, share: share / sum }));
}

function readPolicy(call: Call): PolicyName | undefined {
  const written = call.text("policy");
  if (written === undefined) return undefined;
  const policy = POLICIES.find((name) => name === written);
  if (policy === undefined)
    throw new UsageError(`unknown policy ${printable(written)}${didYouMean(written, POLICIES)}`);
  return policy;
}

/** In ms; a bare number is ms. */
export function readTime(call: Call, flag: string): number | undefined {
  const written = call.text(flag);
  if (written === undefined) return undefined;
  const ms = parseTime(written);
  if (ms === undefined)
    throw new UsageError(`--${flag} ${printable(written)} is no time; write 150ms, 30s or 5m`);
  return ms;
}

function parseTime(written: string): number | undefined {
  const match = /^(\d{1,12}(?:\.\d+)?)(ms|s|m|h)?$/.exec(written);
  if (match === null) return undefined;
  const unit = { ms: 1, s: 1000, m: 60_000, h: 3_600_000 }[match[2] ?? "ms"]!;
  return Number(match[1]) * unit;
}

export function readCount(call: Call, flag: string, most: number): number | undefined {
  const value = readNumber(call, flag, 1, most);
  if (value !== undefined && value % 1 !== 0) throw new UsageError(`--${flag} must be a whole number`);
  return value;
}

function readNumber(call: Call, flag: string, least: number, most: number): number | undefined {
  const written = call.text(flag);
  if (written === undefined) return undefined;
  const value = /^\d+(\.\d+)?$/.test(written) ? Number(written) : NaN;
  if (value >= least && value <= most) return value;
  throw new UsageError(
    `--${flag} ${printable(written)} must be a number from ${least} to ${most.toLocaleString("en")}`,
  );
}
