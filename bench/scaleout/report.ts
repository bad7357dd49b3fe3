/**
 * The results of bench/scaleout.ts as Markdown: what each case did, and the figures that have a goal.
 *
 * A case that ran several times shows its median and, in brackets, its smallest and largest value. Ratios of two cases are
 * taken between their first runs, their second ones and so on, which ran within minutes of each other; then the median
 * is that of the ratios.
 */
import { median } from "../../src/core/median.ts";
import { format, signs } from "../report.ts";
import { figure, isMet, type Goal, type Unit } from "../scenario.ts";
import { cases, GATEWAY_COUNTS, type ScaleCase } from "./cases.ts";
import type { Kind, ScaleResult } from "./measure.ts";

/** By name of the case, each in the order in which they ran. */
export type Results = ReadonlyMap<string, readonly ScaleResult[]>;

/** Above this share of a core the generator may have been what was measured. */
const BUSY_GENERATOR = 0.85;
/** Cores used by other processes that show in the figures. */
const BUSY_MACHINE = 0.3;

export function parseResults(texts: readonly string[]): Results {
  const results = texts
    .flatMap((text) => text.split("\n"))
    .filter((line) => line !== "")
    .map((line) => JSON.parse(line) as ScaleResult)
    .toSorted((a, b) => a.at.localeCompare(b.at));
  return Map.groupBy(results, (result) => result.case);
}

export function markdown(results: Results): string {
  return [...head(results), "", ...table(results), "", ...goalTable(results), ""].join("\n");
}

/** Distinct machines and versions; normally one line. */
export function head(results: Results): string[] {
  const lines = [...results.values()].flat().map(({ machine, redis, at }) => {
    const { cpu, cores, memoryGb, kernel, node, commit } = machine;
    const server = redis === null ? "" : `, Redis ${redis}`;
    return `${cpu}, ${cores} cores, ${memoryGb} GB, ${kernel}, Node ${node}${server}; commit ${commit}, ${at.slice(0, 10)}`;
  });
  // Cases without Redis do not know its version.
  return [...new Set(lines)].filter((line, _, all) => all.length === 1 || line.includes(", Redis "));
}

const COLUMNS = [
  "case",
  "gateways, batchers, Redis",
  "load",
  "runs",
  "req/s",
  "p50",
  "p99",
  "errors",
  "CPU per task: gateway",
  "core",
  "batcher",
  "Redis",
  "generator",
  "busiest gateway",
  "core",
  "busiest Redis",
  "busiest generator",
  "mean batch",
  "remarks",
];

function table(results: Results): string[] {
  const rows = cases.flatMap((one) => {
    const runs = results.get(one.name);
    return runs === undefined ? [] : [rowOf(one, runs)];
  });
  return [COLUMNS, COLUMNS.map(() => "---"), ...rows].map(line);
}

function rowOf(one: ScaleCase, runs: readonly ScaleResult[]): string[] {
  const cell = (unit: Unit, pick: (run: ScaleResult) => number): string => spread(runs.map(pick), unit);
  const alone = one.processes === undefined ? "one process" : `${one.processes} and a core`;
  const processes = one.redis === 0 ? alone : fleetText(one);
  return [
    `\`${one.name}\``,
    processes,
    one.rate === undefined ? "closed loop" : `${one.rate.toLocaleString("en-US")}/s Poisson`,
    String(runs.length),
    cell("count", ({ rate }) => Math.round(rate)),
    cell("ms", ({ latencyMs }) => latencyMs.p50),
    cell("ms", ({ latencyMs }) => latencyMs.p99),
    cell("count", ({ errors }) => errors),
    cell("µs", (run) => perTaskMicros(run, "gateway")),
    cell("µs", (run) => perTaskMicros(run, "core")),
    cell("µs", (run) => perTaskMicros(run, "batcher")),
    cell("µs", (run) => perTaskMicros(run, "redis")),
    cell("µs", (run) => perTaskMicros(run, "generator")),
    cell("%", (run) => busiest(run, "gateway") * 100),
    cell("%", (run) => busiest(run, "core") * 100),
    cell("%", (run) => busiest(run, "redis") * 100),
    cell("%", (run) => busiest(run, "generator") * 100),
    cell("count", ({ meanBatch }) => Math.round(meanBatch * 10) / 10),
    [...new Set(runs.flatMap((run) => remarks(one, run)))].join("; "),
  ];
}

function fleetText({ gateways, batchers, redis, idleGateways = 0 }: ScaleCase): string {
  const idle = idleGateways === 0 ? "" : ` + ${idleGateways} idle`;
  return `${gateways}${idle}, ${batchers}, ${redis === 1 ? "1" : `Cluster of ${redis}`}`;
}

/** CPU of all processes of a kind for one answered request. NaN without such processes. */
export function perTaskMicros({ cpu, rate }: ScaleResult, kind: Kind): number {
  if (!cpu[kind]?.length) return NaN;
  return (cpu[kind].reduce((sum, cores) => sum + cores, 0) * 1e6) / rate;
}

function busiest({ cpu }: ScaleResult, kind: Kind): number {
  return !cpu[kind]?.length ? NaN : Math.max(...cpu[kind]);
}

function remarks({ seconds }: ScaleCase, run: ScaleResult): string[] {
  const found: string[] = [];
  if (run.seconds < seconds * 0.9)
    found.push(`measured for ${run.seconds.toFixed(1)} s only: not to be quoted`);
  if (busiest(run, "generator") > BUSY_GENERATOR) found.push("**a generator was full**: use --generators 2");
  if (run.otherCores > BUSY_MACHINE) {
    found.push(`${run.otherCores.toFixed(1)} cores used by other processes`);
  }
  if (run.late > run.sent / 1000) found.push(`${((100 * run.late) / run.sent).toFixed(1)} % sent late`);
  if (run.errors > 0) {
    const statuses = Object.entries(run.statuses).filter(([status]) => status !== "200");
    const counts = [
      ...statuses,
      ...(["crossed", "broken", "unanswered", "unsent"] as const).map((name) => [name, run[name]] as const),
    ];
    found.push(...counts.filter(([, count]) => count > 0).map(([name, count]) => `${name}: ${count}`));
  }
  return found;
}

interface ScaleGoal {
  readonly name: string;
  readonly unit: Unit;
  readonly is: Goal["is"];
  readonly goal: number;
  /** Names of the cases it reads; `value` gets one run of each. */
  readonly of: readonly string[];
  readonly value: (...runs: readonly ScaleResult[]) => number;
}

const rateOf = ({ rate }: ScaleResult): number => rate;
const p99Of = ({ latencyMs }: ScaleResult): number => latencyMs.p99;
const errorsOf = ({ errors }: ScaleResult): number => errors;

const goals: readonly ScaleGoal[] = [
  {
    name: "throughput of 6 gateway processes and a core, without Redis",
    unit: "req/s",
    is: ">=",
    goal: 60_000,
    of: ["cores-6"],
    value: rateOf,
  },
  {
    name: "CPU of the core process per task, 6 gateway processes",
    unit: "µs",
    is: "<=",
    goal: 15,
    of: ["cores-6"],
    value: (run) => perTaskMicros(run, "core"),
  },
  ...underLoad("cores-50k", "50,000/s, 6 gateway processes and a core", 400),
  {
    name: "Redis CPU per task, 1 gateway and 1 batcher, saturated",
    unit: "µs",
    is: "<=",
    goal: 20,
    of: ["redis-1x1"],
    value: (run) => perTaskMicros(run, "redis"),
  },
  {
    name: "throughput of one Redis server with 8 gateways and 3 batchers",
    unit: "req/s",
    is: ">=",
    goal: 45_000,
    of: ["redis-8x3"],
    value: rateOf,
  },
  {
    name: "throughput of 8 gateways and 3 batchers, one Redis or a Cluster of 3, the better one",
    unit: "req/s",
    is: ">=",
    goal: 60_000,
    of: ["redis-8x3", "cluster-8x3"],
    value: (...runs) => Math.max(...runs.map(rateOf)),
  },
  ...efficiencies("redis", "one Redis"),
  ...efficiencies("cluster", "Cluster of 3"),
  gatewayCpu("redis-1x1", "1 gateway", 75),
  gatewayCpu("redis-6x3", "6 gateways, one Redis", 85),
  gatewayCpu("cluster-6x3", "6 gateways, Cluster of 3", 85),
  ...underLoad("10k", "10,000/s, 2 gateways and 1 batcher", 300),
  ...underLoad("40k", "40,000/s, 8 gateways and 3 batchers", 400),
  ...underLoad("40k-cluster", "40,000/s, the same on a Cluster of 3", 400),
  thinShare("thin", "adaptive"),
  thinShare("thin-fixed", "fixed"),
  {
    name: "CPU of an idle gateway in a fleet that serves 2,000/s",
    unit: "%",
    is: "<=",
    goal: 2,
    of: ["idle"],
    value: (run) => busiest(run, "idle") * 100,
  },
  ...underLoad("two-10k", "2 cores: 10,000/s for 30 s", 500),
  {
    name: "2 cores: throughput through Redis ÷ memory engine",
    unit: "ratio",
    is: ">=",
    goal: 0.65,
    of: ["two-redis", "two-memory"],
    value: (fleet, memory) => fleet.rate / memory.rate,
  },
];

function efficiencies(store: string, text: string): ScaleGoal[] {
  const wanted = { 2: 0.9, 4: 0.85, 8: 0.8 };
  return Object.entries(wanted).map(([n, goal]) => ({
    name: `throughput of ${n} gateways ÷ (${n} × one), ${text}`,
    unit: "ratio",
    is: ">=",
    goal,
    of: [`${store}-${n}x3`, `${store}-1x3`],
    value: (many, one) => many.rate / (Number(n) * one.rate),
  }));
}

function gatewayCpu(of: string, text: string, goal: number): ScaleGoal {
  const value: ScaleGoal["value"] = (run) => perTaskMicros(run, "gateway");
  return { name: `gateway CPU per task, ${text}`, unit: "µs", is: "<=", goal, of: [of], value };
}

function underLoad(of: string, text: string, goal: number): ScaleGoal[] {
  return [
    { name: `p99, ${text}`, unit: "ms", is: "<", goal, of: [of], value: p99Of },
    { name: `errors, ${text}`, unit: "count", is: "<=", goal: 0, of: [of], value: errorsOf },
  ];
}

function thinShare(of: string, policy: string): ScaleGoal {
  return {
    name: `mean batch at 200/s over 6 gateways ÷ memory engine, policy ${policy}`,
    unit: "ratio",
    is: ">=",
    goal: 0.95,
    of: [of, `${of}-memory`],
    value: (fleet, memory) => fleet.meanBatch / memory.meanBatch,
  };
}

function goalTable(results: Results): string[] {
  const rows = goals.flatMap(({ name, unit, is, goal, of, value }) => {
    const runs = of.map((one) => results.get(one) ?? []);
    const count = Math.min(...runs.map(({ length }) => length));
    if (count === 0) return [];
    const values = Array.from({ length: count }, (_, i) => value(...runs.map((list) => list[i]!)));
    const met = isMet(figure(name, median(values), unit, is, goal));
    return [[name, spread(values, unit), `${signs[is]} ${format(goal, unit)}`, met ? "✓" : "✗"]];
  });
  return [["figure", "measured", "goal", ""], ["---", "---", "---", "---"], ...rows].map(line);
}

/** `12 ms (11 ms to 14 ms)`; one value alone has no range. */
function spread(values: readonly number[], unit: Unit): string {
  if (values.some(Number.isNaN)) return "–";
  const middle = format(median(values), unit);
  const ends = [Math.min(...values), Math.max(...values)].map((value) => format(value, unit));
  const bare = ends.map((text) => text.replace(/ .*/, ""));
  return ends[0] === ends[1] ? middle : `${middle} (${bare.join("–")})`;
}

function line(cells: readonly string[]): string {
  return `| ${cells.join(" | ")} |`;
}

/** One line of the chart: throughput by number of gateways. */
export interface Series {
  readonly name: string;
  readonly points: readonly {
    readonly gateways: number;
    readonly median: number;
    readonly min: number;
    readonly max: number;
  }[];
}

export function seriesOf(results: Results, store: "redis" | "cluster", name: string): Series {
  const points = GATEWAY_COUNTS.flatMap((gateways) => {
    const rates = (results.get(`${store}-${gateways}x3`) ?? []).map(rateOf);
    if (rates.length === 0) return [];
    return [{ gateways, median: median(rates), min: Math.min(...rates), max: Math.max(...rates) }];
  });
  return { name, points };
}
