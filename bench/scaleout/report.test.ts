import assert from "node:assert/strict";
import { test } from "node:test";
import { scaleoutChart } from "./chart.ts";
import type { ScaleResult } from "./measure.ts";
import { markdown, parseResults } from "./report.ts";

const plain: ScaleResult = {
  case: "redis-1x3",
  at: "2026-01-05T10:00:00.000Z",
  machine: { cpu: "A <fast> CPU", cores: 16, memoryGb: 64, kernel: "Linux", node: "v26", commit: "abc1234" },
  redis: "7.0.15",
  seconds: 5,
  rate: 10_000,
  sent: 50_000,
  statuses: { "200": 50_000 },
  errors: 0,
  crossed: 0,
  broken: 0,
  unanswered: 0,
  unsent: 0,
  late: 0,
  latencyMs: { p50: 20, p99: 40, p999: 50, max: 60 },
  meanBatch: 32,
  cpu: { gateway: [0.75], core: [], batcher: [0.2, 0.2, 0.1], redis: [0.2], idle: [], generator: [0.25] },
  otherCores: 0,
};

/** `run` orders them in time; files hold one line each. */
function file(...results: readonly (Partial<ScaleResult> & { readonly run?: number })[]): string {
  return results
    .map(
      ({ run = 1, ...rest }) =>
        `${JSON.stringify({ ...plain, at: `2026-01-05T10:0${run}:00.000Z`, ...rest })}\n`,
    )
    .join("");
}

function rowOf(text: string, first: string): string[] {
  const line = text.split("\n").find((row) => row.startsWith(`| ${first} `));
  assert.ok(line !== undefined, `no row ${first} in\n${text}`);
  return line.split(" | ").map((cell) => cell.replaceAll(/^\| | \|$/g, ""));
}

void test("a row has CPU per task by kind, and the median and range of several files", () => {
  const text = markdown(
    parseResults([file({ rate: 10_000 }, { rate: 12_000, run: 3 }), file({ rate: 11_000, run: 2 })]),
  );
  const row = rowOf(text, "`redis-1x3`");
  assert.deepEqual(row.slice(1, 8), [
    "1, 3, 1",
    "closed loop",
    "3",
    "11,000 (10,000–12,000)",
    "20.0 ms",
    "40.0 ms",
    "0",
  ]);
  assert.deepEqual(row.slice(8, 11), ["68.2 µs (62.5–75.0)", "–", "45.5 µs (41.7–50.0)"]);
  assert.match(text, /Redis 7\.0\.15; commit abc1234/);
});

void test("efficiency is paired run by run", () => {
  const text = markdown(
    parseResults([
      file(
        { rate: 10_000, run: 1 },
        { case: "redis-2x3", rate: 19_000, run: 1 },
        { rate: 20_000, run: 2 },
        { case: "redis-2x3", rate: 37_000, run: 2 },
        { case: "redis-2x3", rate: 99_000, run: 3 },
      ),
    ]),
  );
  const row = rowOf(text, "throughput of 2 gateways ÷ (2 × one), one Redis");
  assert.deepEqual(row.slice(1), ["0.94 (0.93–0.95)", "≥ 0.90", "✓"]);
});

void test("a full generator, errors and a short measurement are remarked", () => {
  const text = markdown(
    parseResults([
      file({
        seconds: 1,
        errors: 5,
        crossed: 1,
        statuses: { "200": 10, "503": 4 },
        cpu: { ...plain.cpu, generator: [0.3, 0.86] },
      }),
    ]),
  );
  const remarks = rowOf(text, "`redis-1x3`").at(-1)!;
  assert.match(remarks, /measured for 1.0 s only.*a generator was full.*503: 4; crossed: 1/);
});

void test("the chart has a point for each number of gateways and a line for each store", () => {
  const text = file(
    { rate: 10_000 },
    { rate: 14_000, run: 2 },
    { case: "redis-8x3", rate: 60_000 },
    { case: "cluster-8x3", rate: 50_000 },
    { case: "memory", rate: 17_000, redis: null },
  );
  const svg = scaleoutChart(parseResults([text]));
  assert.equal(svg.match(/<circle/g)?.length, 2);
  assert.equal(svg.match(/<polyline/g)?.length, 2);
  // 0 to 60,000 over 366 points in height: 12,000 lies a fifth up.
  assert.match(svg, /class="line redis" points="170\.0,376\.8 758\.0,84\.0"/);
  assert.match(svg, /60,000\/s/);
  assert.match(svg, /memory engine/);
  assert.match(svg, /A &lt;fast&gt; CPU/);
});
