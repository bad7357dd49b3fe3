/** `ferry bench` as tables: a run as Markdown, for a pull request, and two runs side by side. */
import { compare, differences, type Row } from "./bench/compare.ts";
import type { Result } from "./bench/results.ts";
import { type Paint, printable } from "./terminal/terminal.ts";
import { codes, goalText, headline, ms, notesOf, number, percent, splitText } from "./bench-report.ts";

export function renderMarkdown(result: Result): string {
  const { counts, latencyMs, server, client } = result;
  const rows: [string, string][] = result.slos.map((slo) => [slo.met ? "✓ goal" : "✗ goal", goalText(slo)]);
  rows.push(
    [
      "served",
      `${number(counts.served)} of ${number(counts.offered)} offered, ${number(result.servedPerSecond)}/s`,
    ],
    [
      "refused, failed, lost",
      [counts.refused, counts.failed, counts.lost].map((count) => number(count)).join(", "),
    ],
    ["latency p50, p90, p95", `${ms(latencyMs.p50)}, ${ms(latencyMs.p90)}, ${ms(latencyMs.p95)} ms`],
    ["latency p99, p99.9, max", `${ms(latencyMs.p99)}, ${ms(latencyMs["p99.9"])}, ${ms(latencyMs.max)} ms`],
    ["mean", `${splitText(latencyMs, result.mean)} ms`],
  );
  if (server !== null && server.batches > 0) {
    const fill = `${number(server.tasks / server.batches, 1)} of ${server.maxBatchSize}`;
    rows.push(
      ["batches", `${number(server.batches)}, filled ${fill}`],
      [
        "GPU time",
        `filled seats ${percent(server.filled)}, empty ${percent(server.empty)}, idle ${percent(server.idle)}`,
      ],
    );
  }
  rows.push(
    ["by code", codes(result)],
    ["client", `CPU ${percent(client.cpuShare)} of a core, late ${percent(client.lateShare)}`],
  );
  const machine = Object.entries(result.environment).map(([name, value]) => `${name} ${value}`);
  const lines = [
    `\`${printable(result.command)}\``,
    "",
    `${headline(result).trim()}; ${result.startedAt}; ${printable(machine.join(", "))}`,
    "",
    "| | |",
    "|---|---|",
    ...rows.map(([name, value]) => `| ${name} | ${cell(value)} |`),
    ...notesOf(result).flatMap(({ text }) => ["", `> ${text}`]),
  ];
  return `${lines.join("\n")}\n`;
}

function cell(text: string): string {
  return printable(text).replaceAll("|", "\\|");
}

export interface Saved {
  readonly name: string;
  readonly result: Result;
}

export function renderComparison(a: Saved, b: Saved, colors: Paint, markdown: boolean): string {
  const rows = compare(a.result, b.result).filter((row) => row.a !== null || row.b !== null);
  const cells = rows.map((row) => [
    row.unit === "" ? row.name : `${row.name} ${row.unit}`,
    value(row, row.a),
    value(row, row.b),
    change(row),
    row.verdict === "unknown" || row.verdict === "same" ? "" : row.verdict,
  ]);
  const head = ["", printable(a.name), printable(b.name), "change", ""];
  const methods = [a, b].map(({ result }) => result.intervals);
  const { method, blocks } = methods.find((each) => each.method !== "blocks") ?? methods[0]!;
  const how =
    method === "blocks"
      ? `drawn again and again from ${blocks} blocks of each run`
      : "from order statistics, which take requests for independent: the runs are too short for more";
  const notes = [
    `within noise: the 95 % intervals overlap (${how})`,
    ...differences(a.result, b.result).map((line) => `the runs differ in ${printable(line)}`),
    ...[a, b]
      .filter(({ result }) => result.client.bottleneck.length > 0)
      .map(({ name }) => `${printable(name)}: the client was the bottleneck`),
  ];
  if (markdown) {
    const table = [head, head.map(() => "---"), ...cells].map((line) => `| ${line.map(cell).join(" | ")} |`);
    return `${[...table, ...notes.flatMap((note) => ["", `> ${note}`])].join("\n")}\n`;
  }
  const widths = head.map((_, at) => Math.max(...[head, ...cells].map((line) => line[at]!.length)));
  const lines = [head, ...cells].map((line, index) => {
    const text = line.map((cell, at) =>
      at === 0 || at === 4 ? cell.padEnd(widths[at]!) : cell.padStart(widths[at]!),
    );
    return `  ${paintRow(text.join("  ").trimEnd(), rows[index - 1], colors)}`;
  });
  return `${[...lines, ...notes.map((note) => colors.dim(`  ${note}`))].join("\n")}\n`;
}

function paintRow(text: string, row: Row | undefined, { green, red }: Paint): string {
  if (row?.verdict === "better") return green(text);
  return row?.verdict === "worse" ? red(text) : text;
}

function value({ unit }: Row, figure: number | null): string {
  if (figure === null) return "–";
  if (unit === "ms") return ms(figure);
  return number(figure, unit === "req/s" ? 0 : unit === "%" ? 2 : 1);
}

function change({ a, b, change }: Row): string {
  if (a === null || b === null || a === b) return "";
  const arrow = b > a ? "▲" : "▼";
  return change === null ? arrow : `${arrow} ${number(Math.abs(change) * 100, 1)} %`;
}
