/** Report of `ferry bench`: goals first, latencies in ms, served and refused never mixed, missing rows explained. */
import { type ComparisonRow, compare, differences } from "./bench/compare.ts";
import { LATE_MS } from "./bench/driver.ts";
import type { ServerSide } from "./bench/exposition.ts";
import type { ResultCounts, Latency, Result } from "./bench/results.ts";
import type { SloResult } from "./bench/slo.ts";
import { type Paint, printable } from "./terminal/terminal.ts";

const REASONS = ["full", "idle", "wait", "deadline"];
/** Characters of a 100 % bar. */
const BAR = 14;
const LEFT = 12;
/** CPU share below which lateness is not the client's own work. */
const SHARED = 0.6;

export function renderResult(result: Result, colors: Paint): string {
  const { dim } = colors;
  const lines = [
    dim(headline(result)),
    ...goalLines(result.slos, colors),
    countLine(result, colors),
    ...latencyLines(result),
    ...tierLines(result),
    ...serverLines(result),
    row("by code", codes(result)),
    dim(row("client", clientText(result))),
    ...notesOf(result).map(({ text, isBad }) => `  ${isBad ? colors.red("!") : colors.yellow("!")} ${text}`),
  ];
  return `${lines.join("\n")}\n`;
}

export function formatNumber(value: number, decimals = 0): string {
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}

export function formatMs(value: number | null): string {
  if (value === null) return "–";
  return formatNumber(value, value < 1 ? 2 : value < 10_000 ? 1 : 0);
}

function percent(share: number): string {
  const value = share * 100;
  return `${formatNumber(value, value > 0 && value < 10 ? 1 : 0)} %`;
}

function row(name: string, text: string): string {
  return `  ${name.padEnd(LEFT)}${text}`;
}

function bar(share: number): string {
  if (!(share > 0)) return "";
  const eighths = Math.max(1, Math.round(share * BAR * 8));
  return "█".repeat(eighths >> 3) + ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths & 7]!;
}

function headline(result: Result): string {
  const { load, target, interrupted } = result;
  const what =
    load.kind === "open"
      ? `open loop, ${formatNumber(load.rate ?? 0)} req/s (${load.arrivals}), latency from the intended start`
      : `closed loop, ${formatNumber(load.callers ?? 0)} callers, latency from the send`;
  const time = `${seconds(load.seconds)}${interrupted ? ", interrupted" : ""} after ${seconds(load.warmupSeconds)} of warm-up`;
  return `  ${printable(target.url)}   ${what}, ${time}`;
}

function seconds(value: number): string {
  return `${formatNumber(value, value < 10 && value % 1 !== 0 ? 1 : 0)} s`;
}

function goalText(slo: SloResult): string {
  const decimals = slo.unit === "ms" || slo.unit === "%" ? 1 : 0;
  const unit = slo.unit === "" ? "" : ` ${slo.unit}`;
  const value = slo.measured === null ? "not measured" : `${formatNumber(slo.measured, decimals)}${unit}`;
  if (slo.met && slo.measured === 0 && slo.limit === 0) return `${slo.name} 0`;
  const sign = slo.name === "rate" ? (slo.met ? "≥" : "<") : slo.met ? "≤" : ">";
  return `${slo.name} ${value} ${slo.measured === null ? "for" : sign} ${formatNumber(slo.limit, slo.limit % 1 === 0 ? 0 : 2)}${unit}`;
}

function goalLines(slos: readonly SloResult[], { green, red, bold }: Paint): string[] {
  if (slos.length === 0) return [];
  const cells = slos.map((slo) => `${slo.met ? green("✓") : bold(red("✗"))} ${goalText(slo)}`);
  return [`  ${cells.join("    ")}`];
}

function countLine(
  { counts, crossed, cached, offeredPerSecond, servedPerSecond }: Result,
  { red }: Paint,
): string {
  const bad = (name: string, count: number): string => {
    const text = `${name} ${formatNumber(count)}`;
    return count > 0 ? red(text) : text;
  };
  const cells = [
    `offered ${formatNumber(counts.offered)}`,
    `served ${formatNumber(counts.served)}`,
    `refused ${formatNumber(counts.refused)}`,
    bad("failed", counts.failed),
    bad("lost", counts.lost),
    ...(counts.unsent > 0 ? [bad("not sent", counts.unsent)] : []),
    ...(counts.pending > 0 ? [`on their way ${formatNumber(counts.pending)}`] : []),
    ...(crossed > 0 ? [bad("crossed", crossed)] : []),
    ...(cached > 0 ? [`from the cache ${formatNumber(cached)}`] : []),
  ];
  return `  ${cells.join("  ")}      ${formatNumber(offeredPerSecond)}/s offered, ${formatNumber(servedPerSecond)}/s served`;
}

const NAMES = ["p50", "p90", "p95", "p99", "p99.9", "max"] as const;

function latencyLines({ latencyMs, mean, counts, refusedP99Ms }: Result): string[] {
  const lines: string[] = [];
  if (counts.served > 0) {
    lines.push(row("latency ms", NAMES.map((name) => `${name} ${formatMs(latencyMs[name])}`).join("  ")));
    lines.push(row("mean ms", splitText(latencyMs, mean)));
  }
  if (counts.refused > 0 && refusedP99Ms !== null)
    lines.push(row("refusals", `told within ${formatMs(refusedP99Ms)} ms (p99)`));
  return lines;
}

/** "115.7 = queue 15.4 + worker 100.0 + gateway and network 0.3" */
function splitText(latencyMs: Latency, mean: Result["mean"]): string {
  const all = formatMs(latencyMs.mean);
  if (mean.queue === null) return all;
  if (mean.worker !== null && mean.gateway !== null)
    return `${all} = queue ${formatMs(mean.queue)} + worker ${formatMs(mean.worker)} + gateway and network ${formatMs(mean.gateway)}`;
  if (mean.inside === null) return `${all}, of which queue ${formatMs(mean.queue)}`;
  return `${all} = queue ${formatMs(mean.queue)} + worker and gateway ${formatMs(mean.inside)} + network ${formatMs(mean.outside)}`;
}

function tierLines({ tiers }: Result): string[] {
  if (tiers.length === 0) return [];
  const cells = (counts: ResultCounts): string[] =>
    [counts.offered, counts.served, counts.refused, counts.failed, counts.lost].map((value) =>
      formatNumber(value),
    );
  const rows = [
    ["", "offered", "served", "refused", "failed", "lost", "p50 ms", "p99 ms"],
    ...tiers.map((tier) => [
      tier.name,
      ...cells(tier),
      formatMs(tier.latencyMs.p50),
      formatMs(tier.latencyMs.p99),
    ]),
  ];
  const widths = rows[0]!.map((_, at) => Math.max(...rows.map((cells) => cells[at]!.length)));
  return rows.map((cells, line) =>
    row(
      line === 0 ? "tiers" : "",
      cells.map((cell, at) => (at === 0 ? cell.padEnd(widths[at]!) : cell.padStart(widths[at]!))).join("  "),
    ),
  );
}

function serverLines({ server, serverMissing, fill }: Result): string[] {
  if (server === null) {
    const known =
      fill === null ? "not known" : `fill ${formatNumber(fill, 1)}, as the answers tell; more is not known`;
    return [row("batches", `${known}: ${printable(serverMissing ?? "")}`)];
  }
  if (server.batches === 0) return [row("batches", "none in that time")];
  return [row("batches", batchText(server)), row("fill", fillText(server)), row("GPU time", gpuText(server))];
}

function batchText({ batches, tasks, seconds: time, maxBatchSize, reasons }: ServerSide): string {
  const names = [...new Set([...REASONS, ...Object.keys(reasons)])];
  const why = names.map((name) => {
    const share = (reasons[name] ?? 0) / batches;
    return `${name} ${bar(share)} ${percent(share)}`.replace("  ", " ");
  });
  return `${formatNumber(batches)}, ${formatNumber(batches / time, 1)}/s, fill ${formatNumber(tasks / batches, 1)}/${maxBatchSize}   ${why.join("  ")}`;
}

function fillText({ sizes, batches }: ServerSide): string {
  const cells = sizes.map(({ from, to, batches: some }) => {
    const share = some / batches;
    return `${from === to ? from : `${from}-${to}`} ${bar(share)} ${percent(share)}`.replace("  ", " ");
  });
  return cells.join("   ");
}

function gpuText({ filled, empty, idle, workers, workerMs }: ServerSide): string {
  if (!Number.isFinite(filled)) return "this process runs no workers; name its batchers with --admin";
  const call = Number.isFinite(workerMs) ? `, ${formatMs(workerMs)} ms a call` : "";
  return `filled seats ${percent(filled)}   empty seats ${percent(empty)}   idle ${percent(idle)}   (${workers} workers${call})`;
}

export function codes({ codes: all }: Result): string {
  return (
    Object.entries(all)
      .map(([code, count]) => `${printable(code)} ${formatNumber(count)}`)
      .join("  ") || "none"
  );
}

function clientText({ client, load, verified, uniqueInputs }: Result): string {
  const late =
    load.kind === "open" ? `, late sends ${percent(client.lateShare)} (by more than ${LATE_MS} ms)` : "";
  const checked = verified
    ? "each answer had its own input"
    : uniqueInputs
      ? "outputs do not show whose they are"
      : "answers not checked";
  return `CPU ${percent(client.cpuShare)} of a core${late}, ${formatNumber(client.connections)} connections; ${checked}`;
}

function notesOf(result: Result): { readonly text: string; readonly isBad: boolean }[] {
  const { client, counts, load, uniqueInputs, cached, crossed, codes: all } = result;
  const notes: { text: string; isBad: boolean }[] = [];
  const add = (text: string, isBad = false): void => void notes.push({ text, isBad });
  if (crossed > 0)
    add(`${formatNumber(crossed)} answers carried another request's output: this must never happen`, true);
  if (client.bottleneck.length > 0) add(bottleneckText(result), true);
  if (counts.unsent > 0)
    add(
      `${formatNumber(counts.unsent)} requests were not sent: too many were on their way (--outstanding, --timeout)`,
      true,
    );
  if (client.waited > counts.offered / 1000 && client.connections >= load.connections)
    add(
      `${formatNumber(client.waited)} requests waited for one of the ${formatNumber(load.connections)} connections, which ` +
        "their latency includes; raise --connections if your callers would have more",
    );
  if (cached > 0 && uniqueInputs)
    add(`${formatNumber(cached)} answers came from the cache, though inputs were unique`);
  else if (cached > 0 || !uniqueInputs)
    add("inputs repeated: the cache, or a request in flight, may have answered");
  if ((all["202"] ?? 0) > 0) add("202: the latency is that of being accepted, not of the outcome");
  if (counts.served > 0 && counts.served < 1000)
    add(`${formatNumber(counts.served)} answers are few for a p99.9; measure longer`);
  return notes;
}

/** A client with low CPU use that was late anyway had to wait for a core. */
function bottleneckText({ client, load }: Result): string {
  const why = client.bottleneck.join(", ");
  const whose = "These figures are the client's, not the server's";
  if (client.cpuShare < SHARED)
    return (
      `the client was the bottleneck: ${why}, though it used ${percent(client.cpuShare)} of a core: other processes ` +
      `took this machine. ${whose}; measure in quiet, or from another machine`
    );
  const how = load.kind === "open" ? "lower --rate" : "use fewer callers";
  return (
    `the client was the bottleneck: ${why}. ${whose}; ${how}, give it a core of its own, or run several ` +
    "on other machines"
  );
}

/** `ferry bench` as tables: one run as Markdown, for a pull request, and two runs side by side. */

export function renderMarkdown(result: Result): string {
  const { counts, latencyMs, server, client } = result;
  const rows: [string, string][] = result.slos.map((slo) => [slo.met ? "✓ goal" : "✗ goal", goalText(slo)]);
  rows.push(
    [
      "served",
      `${formatNumber(counts.served)} of ${formatNumber(counts.offered)} offered, ${formatNumber(result.servedPerSecond)}/s`,
    ],
    [
      "refused, failed, lost",
      [counts.refused, counts.failed, counts.lost].map((count) => formatNumber(count)).join(", "),
    ],
    [
      "latency p50, p90, p95",
      `${formatMs(latencyMs.p50)}, ${formatMs(latencyMs.p90)}, ${formatMs(latencyMs.p95)} ms`,
    ],
    [
      "latency p99, p99.9, max",
      `${formatMs(latencyMs.p99)}, ${formatMs(latencyMs["p99.9"])}, ${formatMs(latencyMs.max)} ms`,
    ],
    ["mean", `${splitText(latencyMs, result.mean)} ms`],
  );
  if (server !== null && server.batches > 0) {
    const fill = `${formatNumber(server.tasks / server.batches, 1)} of ${server.maxBatchSize}`;
    rows.push(
      ["batches", `${formatNumber(server.batches)}, filled ${fill}`],
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

function paintRow(text: string, row: ComparisonRow | undefined, { green, red }: Paint): string {
  if (row?.verdict === "better") return green(text);
  return row?.verdict === "worse" ? red(text) : text;
}

function value({ unit }: ComparisonRow, figure: number | null): string {
  if (figure === null) return "–";
  if (unit === "ms") return formatMs(figure);
  return formatNumber(figure, unit === "req/s" ? 0 : unit === "%" ? 2 : 1);
}

function change({ a, b, change }: ComparisonRow): string {
  if (a === null || b === null || a === b) return "";
  const arrow = b > a ? "▲" : "▼";
  return change === null ? arrow : `${arrow} ${formatNumber(Math.abs(change) * 100, 1)} %`;
}
