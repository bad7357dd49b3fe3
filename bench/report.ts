/** The final table, and the facts about the machine without which its figures mean nothing. */
import { spawnSync } from "node:child_process";
import { availableParallelism, cpus, loadavg, totalmem } from "node:os";
import type { Cores } from "./process.ts";
import { isMet, type Figure, type Report, type Unit } from "./scenario.ts";

export interface Environment {
  readonly time: string;
  readonly cpu: string;
  readonly cores: number;
  readonly memoryGb: number;
  readonly node: string;
  readonly kernel: string;
  readonly commit: string;
  /** One-minute load average before the first scenario. */
  readonly load: number;
  readonly pinned: Cores | null;
  readonly quick: boolean;
}

export interface Section {
  readonly scenario: string;
  readonly report: Report;
}

export function environment(pinned: Cores | undefined, quick: boolean): Environment {
  return {
    time: new Date().toISOString(),
    cpu: cpus()[0]?.model.trim() ?? "unknown CPU",
    cores: availableParallelism(),
    memoryGb: Math.round(totalmem() / 2 ** 30),
    node: process.version,
    kernel: output("uname", ["-sr"]),
    commit: commit(),
    load: loadavg()[0]!,
    pinned: pinned ?? null,
    quick,
  };
}

function commit(): string {
  const id = output("git", ["rev-parse", "--short", "HEAD"]) || "unknown";
  return output("git", ["status", "--porcelain"]) === "" ? id : `${id} with changes`;
}

function output(command: string, args: readonly string[]): string {
  const { status, stdout } = spawnSync(command, args, { encoding: "utf8", cwd: import.meta.dirname });
  return status === 0 ? stdout.trim() : "";
}

export function render(env: Environment, sections: readonly Section[]): string {
  const rows = sections.flatMap(({ scenario, report }) =>
    report.figures.map((figure, i) => [
      i === 0 ? scenario : "",
      figure.name,
      format(figure.value, figure.unit),
      figure.goal === undefined ? "" : `${signs[figure.goal.is]} ${format(figure.goal.value, figure.unit)}`,
      mark(figure),
    ]),
  );
  const header = ["scenario", "figure", "measured", "goal", ""];
  const notes = sections.flatMap(({ scenario, report }) =>
    report.notes.map((note) => `  ${scenario}: ${note}`),
  );
  return [
    ...describe(env),
    "",
    ...table([header, ...rows]),
    ...(notes.length > 0 ? ["", ...notes] : []),
    "",
  ].join("\n");
}

export const signs = { "<": "<", "<=": "≤", ">=": "≥" } as const;

function describe(env: Environment): string[] {
  const pinned =
    env.pinned === null
      ? "not pinned"
      : `server on core ${env.pinned.server}, generator on core ${env.pinned.generator}`;
  return [
    `Ferry bench  ${env.time}  commit ${env.commit}${env.quick ? "  QUICK: not to be quoted" : ""}`,
    `${env.cpu}, ${env.cores} cores, ${env.memoryGb} GB, ${env.kernel}, Node ${env.node}, ` +
      `load average ${env.load.toFixed(2)}, ${pinned}`,
  ];
}

function mark(figure: Figure): string {
  if (figure.goal === undefined) return "";
  return isMet(figure) ? "✓" : "✗";
}

/** The first two columns are text and stand left, the next two numbers and stand right. */
function table(rows: readonly (readonly string[])[]): string[] {
  const widths = rows[0]!.map((_, column) => Math.max(...rows.map((row) => row[column]!.length)));
  return rows.map((row) =>
    row
      .map((cell, column) => (column < 2 ? cell.padEnd(widths[column]!) : cell.padStart(widths[column]!)))
      .join("  ")
      .trimEnd(),
  );
}

export function format(value: number, unit: Unit): string {
  if (!Number.isFinite(value)) return "not measured";
  const decimals = {
    s: 2,
    ms: 1,
    µs: 1,
    "%": 1,
    "req/s": 0,
    KB: value < 1000 ? 1 : 0,
    ratio: 2,
    count: value % 1 ? 1 : 0,
  };
  const digits = { minimumFractionDigits: decimals[unit], maximumFractionDigits: decimals[unit] };
  const text = value.toLocaleString("en-US", digits);
  return unit === "ratio" || unit === "count" ? text : `${text} ${unit}`;
}
