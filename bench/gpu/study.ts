/** What the studies of bench/gpu have in common. */
import type { OpenLoad } from "../../src/cli/bench/arrivals.ts";
import { type Figure, figure } from "../scenario.ts";
import type { Shape } from "./requests.ts";
import { coresOf, type Run, type Server } from "./trials.ts";

export const LOAD = 0.7;

export interface Loads {
  /** In the closed loops. */
  readonly callers: number;
  readonly seconds: { readonly closed: number; readonly open: number };
}

/** What a study adds to as it goes on. */
export interface Findings {
  readonly figures: Figure[];
  readonly notes: string[];
  save(): void;
}

export interface Phases {
  readonly saturated: Run[];
  readonly loaded: Run[];
}

export interface Options {
  readonly runs: number;
  /** Versions by package; undefined: without peers. */
  readonly peers: ReadonlyMap<string, string> | undefined;
}

/** Saturated, then at a share of that. */
export async function round(
  server: Server,
  name: string,
  { callers, seconds }: Loads,
  { saturated, loaded }: Phases,
  { shape = "native", ...arrivals }: { readonly shape?: Shape } & Partial<OpenLoad> = {},
): Promise<void> {
  const closed = { kind: "closed", callers } as const;
  const most = await server.under(`${name}, saturated`, { load: closed, seconds: seconds.closed, shape });
  saturated.push(most);
  const open = { kind: "open", arrivals: "poisson", ...arrivals, rate: LOAD * most.rate } as const;
  loaded.push(
    await server.under(`${name} at ${LOAD * 100} % of that`, { load: open, seconds: seconds.open, shape }),
  );
}

/** Without a GPU, and of several processes on one, there is nothing to hold to `least`, %. */
export function shared(runs: readonly Run[], least?: number, most?: number): Figure[] {
  const measured = !Number.isNaN(busy(runs[0]!));
  const roles = [...new Set(runs[0]!.processes.map(({ role }) => role))].filter((role) => role !== "parent");
  return [
    ...(measured ? [over("  GPU had a batch", runs, busy, "%", ">=", least)] : []),
    over("  GPU ran kernels (nvidia-smi)", runs, kernels, "%"),
    over("  p50", runs, ({ latency }) => latency.percentileMs(50), "ms"),
    over("  p99", runs, ({ latency }) => latency.percentileMs(99), "ms", "<=", most),
    ...(Number.isNaN(runs[0]!.fill) ? [] : [over("  mean batch", runs, ({ fill }) => fill, "count")]),
    over("  CPU, all processes", runs, (run) => 100 * coresOf(run), "%"),
    ...roles.map((role) => over(`  CPU, ${role}`, runs, (run) => 100 * coresOf(run, role), "%")),
  ];
}

export const busy = ({ card }: Run): number => 100 * card.batches;
export const kernels = ({ card }: Run): number => 100 * card.kernels;

export function eachProcess({ processes }: Run): string {
  return processes.map(({ role, cores }) => `${role} ${(100 * cores).toFixed(0)}`).join(", ");
}

/** The median of the runs. */
export function over<T>(
  name: string,
  runs: readonly T[],
  of: (run: T) => number,
  ...[unit, is, goal]: [Figure["unit"], ">=" | "<=", number | undefined] | [Figure["unit"]]
): Figure {
  const values = runs.map(of).sort((a, b) => a - b);
  const middle = (values[(values.length - 1) >> 1]! + values[values.length >> 1]!) / 2;
  return figure(name, middle, unit, is, goal);
}

/** All of them, for the notes. */
export function spread<T>(runs: readonly T[], of: (run: T) => number, digits: number): string {
  return runs.map((run) => (Number.isNaN(of(run)) ? "–" : of(run).toFixed(digits))).join(", ");
}

export const CROSSED = "answers crossed";

/** What no run may have. */
export function flawless(runs: readonly Run[]): Figure[] {
  const sum = (name: "crossed" | "errors"): number => runs.reduce((total, run) => total + run[name], 0);
  return [
    figure(CROSSED, sum("crossed"), "count", "<=", 0),
    figure("errors", sum("errors"), "count", "<=", 0),
  ];
}
