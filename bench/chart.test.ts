import assert from "node:assert/strict";
import { test } from "node:test";
import { chart } from "./chart.ts";
import type { Environment, Section } from "./report.ts";
import { figure } from "./scenario.ts";

const env: Environment = {
  time: "2026-01-05T10:00:00.000Z",
  cpu: "A <fast> CPU & more",
  cores: 2,
  memoryGb: 24,
  node: "v26",
  kernel: "Linux",
  commit: "abc1234",
  load: 0.1,
  pinned: null,
  quick: false,
};

function section(...figures: Section["report"]["figures"]): Section {
  return { scenario: "embedded", report: { figures, notes: [] } };
}

void test("one bar for each figure with a goal, and the line is the goal", () => {
  const svg = chart(env, [
    section(
      figure("throughput of the floor's", 0.4, "ratio", ">=", 0.5),
      figure("p99", 250, "ms", "<", 500),
      figure("just so", 3, "count"),
      figure("errors", 0, "count", "<=", 0),
    ),
  ]);
  assert.equal(svg.match(/<polygon/g)?.length, 2);
  assert.match(svg, /class="missed" points="440,98 568,98 /);
  assert.match(svg, /class="met" points="440,122 520,122 /);
  assert.match(svg, /✗ 0\.40, goal ≥ 0\.50/);
  assert.match(svg, /✓ 250\.0 ms, goal &lt; 500\.0 ms/);
  assert.match(svg, /none, 1 figures whose goal is 0/);
  assert.match(svg, /A &lt;fast&gt; CPU &amp; more/);
});

void test("what was not measured has no bar, and errors are named", () => {
  const svg = chart(env, [
    section(figure("p99", NaN, "ms", "<", 500), figure("errors", 3, "count", "<=", 0)),
  ]);
  assert.doesNotMatch(svg, /<polygon/);
  assert.match(svg, /✗ not measured/);
  assert.match(svg, /✗ the goal was 0: embedded: errors 3/);
});
