/**
 * The contract of a scenario: it starts what it needs, measures, and answers with figures.
 *
 * A figure with a goal is judged; one without is there to explain the others. A figure that could not
 * be measured is NaN, and NaN meets no goal. `notes` say what a reader must know to trust the figures.
 */
import type { Measured } from "./generator.ts";
import type { Tick } from "./load.ts";
import type { Cores } from "./process.ts";

export interface Scenario {
  readonly name: string;
  /** One line: what is measured, under what load. */
  readonly summary: string;
  run(bench: Bench): Promise<Report>;
}

export interface Bench {
  /** A temporary folder, removed at the end. */
  readonly dir: string;
  /** A fifth of the time and of the connections: to see that it works, not to quote. */
  readonly quick: boolean;
  /** Left undefined where pinning is not possible. */
  readonly cores: Cores | undefined;
  progress(text: string): void;
}

export interface Report {
  readonly figures: readonly Figure[];
  readonly notes: readonly string[];
}

export type Unit = "s" | "ms" | "µs" | "%" | "req/s" | "KB" | "ratio" | "count";

export interface Goal {
  readonly is: "<" | "<=" | ">=";
  readonly value: number;
}

export interface Figure {
  readonly name: string;
  readonly value: number;
  readonly unit: Unit;
  readonly goal?: Goal;
}

export function figure(name: string, value: number, unit: Unit, is?: Goal["is"], goal?: number): Figure {
  return is === undefined || goal === undefined
    ? { name, value, unit }
    : { name, value, unit, goal: { is, value: goal } };
}

export function isMet({ value, goal }: Figure): boolean {
  if (goal === undefined) return true;
  if (goal.is === "<") return value < goal.value;
  return goal.is === "<=" ? value <= goal.value : value >= goal.value;
}

/** Seconds of a measurement, in milliseconds, shortened for a quick run but never below one second. */
export function durationMs(bench: Bench, seconds: number): number {
  return bench.quick ? Math.max(1000, seconds * 200) : seconds * 1000;
}

/** Above this the generator may have been what was measured. */
const busyGenerator = 0.9;
/** Above this many cores, what else ran on the machine shows in the figures. */
const busyMachine = 0.1;

/** What the state of the generator says about the figures. */
export function loadNotes(run: Measured, what = "the generator"): string[] {
  const notes: string[] = [];
  if (run.cpuShare > busyGenerator) {
    notes.push(`${what} used ${percent(run.cpuShare)} of a core: it may be the bottleneck, not the server`);
  }
  if (run.otherCores > busyMachine) {
    notes.push(
      `${what} shared the machine: others used ${percent(run.otherCores)} of a core; measure again in quiet`,
    );
  }
  if (run.late > run.sent / 1000) {
    notes.push(`${what} sent ${percent(run.late / run.sent)} late, at most ${run.lag.maxMs.toFixed(0)} ms`);
  }
  if (run.errors > 0) {
    const statuses = Object.entries(run.statuses).map(([status, count]) => `${status}: ${count}`);
    notes.push(
      `${what} saw ${statuses.join(", ") || "no answers"}; ` +
        `crossed ${run.crossed}, broken ${run.broken}, unanswered ${run.unanswered}, unsent ${run.unsent}`,
    );
  }
  return notes;
}

export function tickText(tick: Tick, seconds: number): string {
  if (tick.event === "start") return "measuring";
  if (tick.seconds === 0) return "warming up";
  const rate = Math.round(tick.answered / tick.seconds).toLocaleString("en-US");
  const p99 = tick.p99Ms === null ? "" : `, p99 ${tick.p99Ms.toFixed(1)} ms`;
  const time = `${tick.seconds.toFixed(0)} s of ${seconds.toFixed(0)} s`;
  return `${time}, ${rate} req/s${p99}, errors ${tick.errors}`;
}

function percent(share: number): string {
  return `${(share * 100).toFixed(share < 0.1 ? 1 : 0)} %`;
}
