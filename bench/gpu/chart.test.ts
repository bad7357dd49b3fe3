import assert from "node:assert/strict";
import { test } from "node:test";
import type { Environment, Section } from "../report.ts";
import { figure } from "../scenario.ts";
import { throughputChart } from "./chart.ts";

const env: Environment = {
  time: "2026-01-05T10:00:00.000Z",
  cpu: "a CPU",
  cores: 2,
  memoryGb: 24,
  node: "v26",
  kernel: "Linux",
  commit: "abc1234",
  load: 0.1,
  pinned: null,
  quick: false,
};

function section(scenario: string, rates: Readonly<Record<string, number>>, notes: string[] = []): Section {
  const figures = Object.entries(rates).map(([name, rate]) => figure(name, rate, "req/s"));
  return { scenario, report: { figures, notes } };
}

const CARD = "card, full batches of 64";
const graphs = section(
  "graphs",
  {
    [CARD]: 16_000,
    "Ferry, saturated": 12_000,
    "plain server, one call each": 400,
    "Mosec, saturated": 20_000,
    "something else": 7,
  },
  ["A <GPU> & more"],
);
const steady = section("steady", { [CARD]: 141, "Ferry, saturated": 144 });

/** Its tags, opened and closed in order; throws where that is not so. */
function tags(svg: string): string[] {
  const open: string[] = [];
  const seen: string[] = [];
  for (const [, close, name, empty] of svg.matchAll(/<(\/?)([a-z]+)(?:\s[^<>]*?)?(\/?)>/g)) {
    if (close === "/") assert.equal(open.pop(), name);
    else {
      seen.push(name!);
      if (empty !== "/") open.push(name!);
    }
  }
  assert.deepEqual(open, []);
  return seen;
}

const widths = (svg: string, kind: string): number[] =>
  [...svg.matchAll(new RegExp(`<rect class="${kind}" [^>]*width="([\\d.]+)"`, "g"))].map(([, width]) =>
    Number(width),
  );

void test("is well-formed, holds no number that is none, and fits into its frame", () => {
  const svg = throughputChart(env, [graphs, steady]);
  assert.equal(tags(svg).filter((name) => name === "rect").length, 1 + 4 + 2);
  assert.doesNotMatch(svg, /NaN|Infinity|undefined|null/);
  const [, width, height] = /viewBox="0 0 (\d+) (\d+)"/.exec(svg)!;
  for (const [, x, y] of svg.matchAll(/<(?:rect|text)[^>]* x="([\d.]+)" y="([\d.]+)"/g)) {
    assert.ok(Number(x) < Number(width) && Number(y) < Number(height));
  }
});

void test("bars are as long as what they stand for, the card's own pace being the full width", () => {
  const svg = throughputChart(env, [graphs, steady]);
  const [card, other] = widths(svg, "card");
  assert.equal(card, other);
  const [ferry, second] = widths(svg, "ferry");
  assert.ok(Math.abs(ferry! / card! - 0.75) < 0.001);
  assert.ok(Math.abs(widths(svg, "peer")[0]! / card! - 1.05) < 0.001, "what is far more is cut off");
  assert.ok(Math.abs(second! / card! - 144 / 141) < 0.001);
  assert.ok(Math.abs(widths(svg, "plain")[0]! / card! - 0.025) < 0.001);
});

void test("says what each is, in words that XML can hold", () => {
  const svg = throughputChart(env, [graphs, steady]);
  for (const words of [">graphs<", ">steady<", ">Ferry<", ">Mosec<", "(0.75)", "(0.03)", "(1.25)"]) {
    assert.ok(svg.includes(words), words);
  }
  assert.match(svg, /bench\/gpu, 2026-01-05; A &lt;GPU> &amp; more/);
  assert.doesNotMatch(svg, /something else|OpenAI/, "what is no way, or was not measured, is left out");
});

void test("a run of which the card's own pace is not known is left out", () => {
  const svg = throughputChart(env, [section("broken", { "Ferry, saturated": 10 }), steady]);
  assert.doesNotMatch(svg, /NaN|>broken</);
  assert.equal(widths(svg, "ferry").length, 1);
});

void test("of inputs that differ in length: sorted ones are the full width", () => {
  const mixed = section("mixed", {
    "card, sorted, full batches of 64": 19_000,
    "card, in order of arrival, batches of 64": 4000,
    "Ferry, lengths: auto, saturated": 15_200,
    "Ferry, lengths: off, saturated": 3800,
  });
  const svg = throughputChart(env, [mixed, steady]);
  const [sorted, card] = widths(svg, "card");
  assert.equal(sorted, card);
  const [auto, off] = widths(svg, "ferry");
  assert.ok(Math.abs(auto! / sorted! - 0.8) < 0.001 && Math.abs(off! / sorted! - 0.2) < 0.001);
  assert.ok(svg.includes(">Ferry, grouped by length<") && svg.includes(">Ferry, in order of arrival<"));
});
