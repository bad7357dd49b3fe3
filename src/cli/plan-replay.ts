/** `ferry plan --replay FILE`: recorded arrivals (at most a million, or `--duration`) against other settings. */
import { count, plural } from "./terminal/banner.ts";
import type { Limits, PolicyName } from "../core/policy.ts";
import { Random } from "../core/random.ts";
import { type Candidate, type Frontier, grid, replay, replayOnce } from "./plan/frontier.ts";
import { type Goal, meetsGoal, quantileOf, TARGET_LOAD } from "./plan/planner.ts";
import { capacityOf, dependsOnLength, formatService, type ServiceTime } from "./plan/fit.ts";
import { type LengthMix, recordedLengths } from "./plan/lengths.ts";
import { spreadWholeMs, type Trace, TraceReader } from "./plan/trace-file.ts";
import { type Figures, type TrialFleet, withCapacity } from "./plan/trial.ts";
import { paint, printable, wantsColor } from "./terminal/terminal.ts";
import { type Call, type Console, Failure, UsageError } from "./command.ts";
import {
  HOW_LONG,
  Progress,
  type Settings,
  fleetOf,
  readGoal,
  readLines,
  readTime,
  readWorkers,
} from "./plan-find.ts";
import { figuresJson, percent, formatShare, table, whole } from "./plan-text.ts";

const MOST_REQUESTS = 1_000_000;
const WARM_MS = 2000;
const WARM_SHARE = 0.1;
const BUSIEST_MS = 1000;
const ALL_POLICIES: readonly PolicyName[] = ["latency", "adaptive", "eco"];
/** Without a goal the fastest is marked. */
const NO_GOAL: Goal = { name: "p99", share: 0.99, ms: 0 };

export async function replayFile(call: Call, console: Console, settings: Settings): Promise<number> {
  const { service, limits, seed, config } = settings;
  if (service === undefined) {
    throw new UsageError("what does a batch take? Say --service 100ms, or find out with --measure URL");
  }
  const goal = readGoal(call);
  const trace = await readTrace(call.text("replay")!, call, settings);
  const lengths = settings.lengths ?? lengthsOf(trace);
  if (lengths === undefined && dependsOnLength(service)) throw new UsageError(HOW_LONG);
  const spread = { ...trace, instants: spreadWholeMs(trace.instants, new Random(seed)) };
  const fleet = await withCapacity(fleetOf(call, { ...settings, lengths }, service), lengths, seed);
  const workers = readWorkers(call) ?? workersOf(call, settings, spread, fleet);
  const options = {
    fleet,
    // --lengths goes over what the lines say.
    trace: settings.lengths === undefined ? spread : { ...spread, lengths: spread.lengths.map(() => 0) },
    lengths,
    workers,
    seed,
    warmMs: Math.min(WARM_MS, WARM_SHARE * lastOf(trace)),
  };
  const policies = call.text("policy") === undefined ? ALL_POLICIES : [limits.policy];
  const progress = new Progress(console);
  const tell = (tried: Limits, runs: number, all: number): void =>
    progress.tell(`run ${runs + 1} of ${all}: ${nameOf(tried)}, ${count(trace.instants.length)} requests`);
  try {
    const frontier = await replay(grid(limits, policies), { ...options, goal: goal ?? NO_GOAL, tell });
    const now = call.text("config") === undefined ? undefined : await replayOnce(limits, options);
    progress.end();
    const asked = { limits, service, goal, workers, now };
    const colors = paint(wantsColor({ ...console, isTTY: console.outIsTTY, noColor: call.is("no-color") }));
    if (call.is("json")) console.out(`${JSON.stringify(frontierJson(trace, frontier, asked))}\n`);
    else {
      console.err(readText(trace));
      const name = call.text("config") === undefined ? "my-model" : settings.model.name;
      console.out(`${frontierText(trace, frontier, asked, colors)}\n`);
      console.out(`${colors.dim("# paste into ferry.yaml")}\n${yamlFor(name, frontier.best.limits)}`);
    }
    if (config.models.length > 1)
      console.err("  every line counted for one model; split the file by model\n");
    return 0;
  } finally {
    progress.end();
  }
}

async function readTrace(path: string, call: Call, { config }: Settings): Promise<Trace> {
  const reader = new TraceReader(MOST_REQUESTS);
  await readLines("replay", path, (line) => reader.line(line));
  const order = config.tiers.map(({ name }) => name);
  const trace = until(reader.end(order), readTime(call, "duration") ?? Infinity);
  if (trace.instants.length >= 2 && lastOf(trace) > 0) return trace;
  const seen = trace.unreadable === 0 ? "" : `; ${readText(trace).trim()}`;
  throw new Failure(
    `--replay ${printable(path)} holds ${plural(trace.instants.length, "arrival")}, too few to replay; ` +
      `it needs one JSON a line with arrived_at or another instant${seen}`,
  );
}

function until(trace: Trace, durationMs: number): Trace {
  const end = trace.instants.findIndex((at) => at > durationMs);
  if (end < 0) return trace;
  const { instants, tiers, lengths } = trace;
  return {
    ...trace,
    instants: instants.slice(0, end),
    tiers: tiers.slice(0, end),
    lengths: lengths.slice(0, end),
    cut: true,
  };
}

/** Undefined where no line says how long its input was. */
function lengthsOf({ lengths }: Trace): LengthMix | undefined {
  const known = lengths.filter((length) => length > 0);
  return known.length === 0 ? undefined : recordedLengths("as recorded", known);
}

function lastOf({ instants }: Trace): number {
  return instants.at(-1) ?? 0;
}

/** From the config, or what the busiest second needs. */
function workersOf(call: Call, { model, limits }: Settings, trace: Trace, fleet: TrialFleet): number {
  if (call.text("config") !== undefined) {
    const { workers } = model.backend;
    return typeof workers === "number" ? workers : workers.length;
  }
  let [most, from] = [0, 0];
  trace.instants.forEach((at, index) => {
    while (trace.instants[from]! < at - BUSIEST_MS) from++;
    most = Math.max(most, index - from + 1);
  });
  const perMs = most / Math.min(BUSIEST_MS, lastOf(trace));
  const { service, workerPerMs = capacityOf(service, limits.maxBatchSize) } = fleet;
  return Math.max(1, Math.ceil(perMs / (TARGET_LOAD * workerPerMs)));
}

interface Asked {
  readonly limits: Limits;
  readonly service: ServiceTime;
  readonly goal: Goal | undefined;
  readonly workers: number;
  readonly now: Figures | undefined;
}

function readText(trace: Trace): string {
  const { lines, instants, unreadable, unreadableAt, seatless, turnedAway, cut } = trace;
  const left = [
    unreadable > 0 && `${count(unreadable)} unreadable, the first in line ${count(unreadableAt)}`,
    seatless > 0 && `${count(seatless)} joined or cached, which need no seat`,
    turnedAway > 0 && `${count(turnedAway)} wrong requests, which never waited`,
    cut && "later ones left out",
  ].filter((part) => part !== false);
  const rest = left.length === 0 ? "" : `; ${left.join("; ")}`;
  return `  ${plural(lines, "line")}, ${count(instants.length)} arrivals${rest}\n`;
}

function frontierText(
  trace: Trace,
  { worthIt, best, tried }: Frontier,
  { limits, service, goal, workers, now }: Asked,
  colors: ReturnType<typeof paint>,
): string {
  const seconds = lastOf(trace) / 1000;
  const name = goal?.name ?? NO_GOAL.name;
  const cells = (
    { maxBatchSize, maxWaitMs, policy }: Limits,
    figures: Figures,
    mark: string,
    note: string,
  ) => [
    `${mark} ${policy}`,
    String(maxBatchSize),
    String(maxWaitMs),
    whole(figures.p50),
    whole(quantileOf(figures, goal ?? NO_GOAL)),
    figures.batchesPerThousand.toFixed(1),
    figures.fill.toFixed(0),
    formatShare(figures.refused + figures.late),
    note,
  ];
  const note = (one: Candidate): string => {
    if (one !== best) return "";
    if (goal === undefined) return "the fastest";
    return one.meets ? "fewest batches that meet the goal" : "nothing meets the goal; this comes nearest";
  };
  const rows = worthIt.map((one) => cells(one.limits, one.figures, one === best ? "➜" : " ", note(one)));
  if (now !== undefined) {
    const met = goal !== undefined && meetsGoal(now, goal) ? ", meets the goal" : "";
    rows.push(cells(limits, now, " ", `now, as the config has it${met}`));
  }
  const head = [
    "  policy",
    "maxBatchSize",
    "maxWaitMs",
    "p50",
    name,
    "batches per 1,000",
    "fill",
    "refused",
    "",
  ];
  const [title, ...body] = table([head, ...rows], new Set([0, 8]));
  return [
    colors.bold(title!),
    ...body.map((line, index) => (worthIt[index] === best ? colors.green(line) : line)),
    "",
    `  ${count(trace.instants.length)} requests in ${seconds.toFixed(seconds < 10 ? 1 : 0)} s on ` +
      `${plural(workers, "worker")} (load ${percent(best.figures.load)}), ${formatService(service)} a batch`,
    `  ${tried} settings tried; those that another beats in both ${name} and batches are not shown`,
    "",
  ].join("\n");
}

function frontierJson(
  trace: Trace,
  { worthIt, best, tried }: Frontier,
  { goal, workers, limits, now }: Asked,
): object {
  const one = (settings: Limits, figures: Figures, meets: boolean): object => ({
    ...settings,
    ...figuresJson(figures),
    meets_slo: meets,
  });
  return {
    trace: {
      lines: trace.lines,
      arrivals: trace.instants.length,
      seconds: lastOf(trace) / 1000,
      unreadable: trace.unreadable,
      seatless: trace.seatless,
      turned_away: trace.turnedAway,
    },
    workers,
    slo: goal === undefined ? null : { quantile: goal.name, ms: goal.ms },
    tried,
    best: one(best.limits, best.figures, best.meets),
    frontier: worthIt.map((each) => one(each.limits, each.figures, each.meets)),
    ...(now && { now: one(limits, now, goal !== undefined && meetsGoal(now, goal)) }),
  };
}

function nameOf({ policy, maxBatchSize, maxWaitMs }: Limits): string {
  return `${policy}, ${maxBatchSize} or ${maxWaitMs} ms`;
}

function yamlFor(name: string, { policy, maxBatchSize, maxWaitMs }: Limits): string {
  return [
    "models:",
    `  - name: ${name}`,
    `    maxBatchSize: ${maxBatchSize}`,
    `    maxWaitMs: ${maxWaitMs}`,
    `    policy: ${policy}`,
    "",
  ].join("\n");
}
