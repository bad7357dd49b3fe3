/**
 * Output of `ferry plan`: tables, an arrow at the answer, and the assumptions below. Latencies in ms. "fill": mean
 * tasks per batch. Cost per million = workers × price per hour ÷ requests per hour × 1,000,000.
 */
import { CPU_US, neededProcesses, TARGET_SHARE, type NeededProcesses } from "../app/processes/fitting.ts";
import { count, plural } from "./terminal/banner.ts";
import {
  type PlanRequest,
  type Goal,
  type Plan,
  type PlanRow,
  TARGET_LOAD,
  quantileOf,
} from "./plan/planner.ts";
import { formatService, type ServiceTime } from "./plan/fit.ts";
import type { Figures, TrialLatency } from "./plan/trial.ts";
import type { InOrder } from "./plan-find.ts";
import { type Paint, printable } from "./terminal/terminal.ts";

export function table(rows: readonly (readonly string[])[], left: ReadonlySet<number> = new Set()): string[] {
  const widths: number[] = [];
  for (const row of rows) {
    row.forEach((cell, column) => (widths[column] = Math.max(widths[column] ?? 0, cell.length)));
  }
  return rows.map((row) =>
    row
      .map((cell, column) =>
        left.has(column) ? cell.padEnd(widths[column]!) : cell.padStart(widths[column]!),
      )
      .join("   ")
      .trimEnd(),
  );
}

export function planText(
  plan: Plan,
  inOrder: InOrder,
  ask: PlanRequest,
  cost: number | undefined,
  colors: Paint,
): string {
  const { rows, recommended, knee } = plan;
  const head = ["  workers", "load", "p50", "p95", "p99", "fill", "refused"];
  if (cost !== undefined) head.push("per million");
  const cells = rows.map((row) => [
    `${row === recommended ? "➜" : " "} ${row.workers}`,
    percent(row.load),
    whole(row.p50),
    whole(row.p95),
    whole(row.p99),
    row.fill.toFixed(0),
    formatShare(row.refused + row.late),
    ...(cost === undefined ? [] : [perMillion(row.workers, ask.perSecond, cost)]),
    ifOneDies(row, ask.goal),
    row === recommended ? why(plan) : row === knee ? "the knee: fewest that meet the goal" : "",
  ]);
  const last = head.length;
  const lines = table([[...head, "if one dies", ""], ...cells], new Set([last, last + 1]));
  const [title, ...body] = lines;
  return [
    colors.bold(title!),
    ...body.map((line, index) => (rows[index] === recommended ? colors.green(line) : line)),
    "",
    ...tierLines(recommended, ask),
    policyLine(plan),
    ...(inOrder === undefined ? [] : [groupingLine(plan, inOrder, ask.goal)]),
    boundLine(plan, ask.goal),
    processesLine(processesFor(ask)),
    "",
    ...assumed(ask).map((line) => colors.dim(line)),
    "",
  ].join("\n");
}

function why({ recommended, knee }: Plan): string {
  if (knee === undefined) return "as asked";
  const reason = `fewest with load ≤ ${TARGET_LOAD.toFixed(2)} that meet the goal also without one`;
  return knee.workers === recommended.workers ? `${reason}; fewer miss it` : reason;
}

/** The goal's quantile and the load with one worker fewer, or the share refused. */
function ifOneDies({ oneFewer }: PlanRow, goal: Goal): string {
  if (oneFewer === undefined) return "nobody is served";
  const unserved = oneFewer.refused + oneFewer.late;
  if (unserved > 0.001) return `sheds ${formatShare(unserved)}`;
  return `${goal.name} ${whole(quantileOf(oneFewer, goal))}, load ${percent(oneFewer.load)}`;
}

function tierLines(recommended: PlanRow, { tiers }: PlanRequest): string[] {
  if (tiers.length === 1) return [];
  const row = (name: string, part: number, { p50, p99, refused, late }: TrialLatency): string[] => [
    `  ${name}`,
    percent(part),
    whole(p50),
    whole(p99),
    formatShare(refused + late),
  ];
  const fewer = recommended.oneFewer?.tiers;
  const rows = tiers.map(({ name, share: part }, tier) => {
    const dead = fewer?.[tier];
    return [
      ...row(name, part, recommended.tiers[tier]!),
      dead === undefined ? "" : `p99 ${whole(dead.p99)}, refused ${formatShare(dead.refused + dead.late)}`,
    ];
  });
  const head = [`  tiers at ${recommended.workers}`, "of all", "p50", "p99", "refused", "if one dies"];
  return [...table([head, ...rows], new Set([0, 5])), ""];
}

function policyLine({ policies, recommended }: Plan): string {
  const each = policies.map(
    ({ policy, figures }) =>
      `${policy} p99 ${whole(figures.p99)}, ${figures.batchesPerThousand.toFixed(1)} batches per 1,000`,
  );
  return `  policy at ${recommended.workers}: ${each.join(" · ")}`;
}

/** What grouping by length saves: workers, or latency where their number was given. */
function groupingLine({ recommended, knee }: Plan, inOrder: Figures | null, goal: Goal): string {
  const padding = (figures: Figures): string =>
    `${figures.padding.toFixed(1)} cells computed for a useful one`;
  const each = (figures: Figures): string => {
    if (knee !== undefined) return `${plural(figures.workers, "worker")} (${padding(figures)})`;
    const unserved = figures.refused + figures.late;
    const shed = unserved > 0.001 ? `, refused ${formatShare(unserved)}` : "";
    return `${goal.name} ${whole(quantileOf(figures, goal))}${shed} (${padding(figures)})`;
  };
  const without = inOrder === null ? "no number of workers meets the goal" : each(inOrder);
  return `  grouped by length: ${each(recommended)}; in order of arrival: ${without}`;
}

function boundLine({ boundMs, recommended }: Plan, goal: Goal): string {
  return boundMs === Infinity
    ? `  bound for any policy: ${plural(recommended.workers, "worker")} cannot keep up, whatever the policy`
    : `  bound for any policy: ${goal.name} ≥ ${whole(boundMs)}`;
}

/** For the crowds, where there are some. */
function processesFor({ perSecond, burst = 1 }: PlanRequest): NeededProcesses {
  return neededProcesses(perSecond * burst);
}

function processesLine({ machines, processes, cores, share, coreShare }: NeededProcesses): string {
  if (coreShare === undefined) {
    return `  one Ferry process is enough: ${percent(share)} of a core, ${cpu(CPU_US.single)}`;
  }
  const where = machines === 1 ? `${cores} cores` : `each of ${machines} machines with ${cores} cores`;
  return (
    `  ferry serve --processes ${processes} on ${where}: each gateway process ${percent(share)} of a core, ` +
    `the core process ${percent(coreShare)}; ${cpu(`${CPU_US.gateway} and ${CPU_US.core}`)}`
  );
}

function cpu(us: number | string): string {
  return `at ${us} µs of CPU per request of 2 KB, memory engine`;
}

function assumed({ fleet, burst, tiers, lengths }: PlanRequest): string[] {
  const { service, jitter, timeouts, limits, overheadMs, admission } = fleet;
  const arrivals =
    burst === undefined
      ? "Poisson arrivals (--burst 2.5)"
      : `crowds of ${burst} times the mean rate, calm between`;
  const scatter = jitter === 0 ? "no scatter (--jitter 0.15)" : `scatter ${jitter}`;
  return [
    `  assumes ${arrivals}; ${formatService(service)} a batch (--service 36+1n, --measure URL), ${scatter};`,
    ...(lengths === undefined
      ? []
      : [`  inputs of up to ${plural(lengths.longest, "token")} (--lengths ${printable(lengths.name)});`]),
    `  HTTP and network are not simulated (${overheadMs === 0 ? "--overhead 2ms adds them" : `${overheadMs} ms are added`});`,
    `  policy ${limits.policy}, batches of up to ${limits.maxBatchSize}, maxWaitMs ${limits.maxWaitMs}, ` +
      `queueMs ${timeouts.queueMs}, totalMs ${timeouts.totalMs}, admission ${admission.mode}, ` +
      `${plural(tiers.length, "tier")} (-c ferry.yaml takes yours)`,
  ];
}

export function costPerMillion(workers: number, perSecond: number, cost: number): number {
  return (workers * cost * 1_000_000) / (perSecond * 3600);
}

function perMillion(workers: number, perSecond: number, cost: number): string {
  return costPerMillion(workers, perSecond, cost).toFixed(2);
}

export function planJson(plan: Plan, inOrder: InOrder, ask: PlanRequest, cost: number | undefined): object {
  const row = (each: PlanRow): object => ({
    ...figuresJson(each),
    meets_slo: each.meets,
    if_one_dies:
      each.oneFewer === undefined ? null : { ...figuresJson(each.oneFewer), meets_slo: each.oneFewer.meets },
    ...(cost !== undefined && { cost_per_million: costPerMillion(each.workers, ask.perSecond, cost) }),
  });
  const { fleet, goal, tiers, lengths } = ask;
  return {
    asked: {
      rate: ask.perSecond,
      slo: { quantile: goal.name, ms: goal.ms },
      service: { ...serviceJson(fleet.service), jitter: fleet.jitter },
      lengths: lengths?.name ?? null,
      ...fleet.limits,
      timeouts: fleet.timeouts,
      burst: ask.burst ?? null,
      seed: ask.seed,
    },
    workers: plan.recommended.workers,
    knee: plan.knee?.workers ?? null,
    bound_ms: plan.boundMs === Infinity ? null : plan.boundMs,
    ...(inOrder !== undefined && {
      in_order_of_arrival: inOrder && figuresJson(inOrder),
    }),
    serve: serveJson(processesFor(ask)),
    rows: plan.rows.map(row),
    policies: plan.policies.map(({ policy, figures }) => ({ policy, ...figuresJson(figures) })),
    tiers: tiers.map(({ name, share: part }, tier) => ({
      name,
      share: part,
      ...latencyJson(plan.recommended.tiers[tier]!),
    })),
  };
}

function serveJson({ machines, processes, cores, share, coreShare }: NeededProcesses): object {
  return {
    machines,
    processes,
    cores,
    share,
    core_share: coreShare ?? null,
    target_share: TARGET_SHARE,
    cpu_us: CPU_US,
  };
}

function latencyJson({ p50, p95, p99, p999, meanMs, refused, late }: TrialLatency): object {
  return { p50_ms: p50, p95_ms: p95, p99_ms: p99, p999_ms: p999, mean_ms: meanMs, refused, late };
}

export function serviceJson({ baseMs, perTaskMs, perCellMs = 0, perTokenMs = 0 }: ServiceTime): object {
  return {
    base_ms: baseMs,
    per_task_ms: perTaskMs,
    ...(perCellMs > 0 && { per_cell_ms: perCellMs }),
    ...(perTokenMs > 0 && { per_token_ms: perTokenMs }),
  };
}

export function figuresJson(figures: Figures): object {
  const { workers, load, fill, batchesPerThousand, padding } = figures;
  return { workers, load, ...latencyJson(figures), fill, batches_per_thousand: batchesPerThousand, padding };
}

export function percent(value: number): string {
  return `${(100 * value).toFixed(0)} %`;
}

/** One or two decimals for small shares. */
export function formatShare(value: number): string {
  if (value === 0) return "0";
  return value < 0.0995 ? `${(100 * value).toFixed(value < 0.001 ? 2 : 1)} %` : percent(value);
}

export function whole(ms: number): string {
  if (Number.isNaN(ms)) return "–";
  return ms < 10 ? ms.toFixed(1) : count(Math.round(ms));
}
