/** The dashboard for Grafana: that it is whole, and asks only for what Ferry tells. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { join } from "node:path";
import { before, describe, test } from "node:test";
import { stringify } from "yaml";
import { Folder, ROOT } from "../e2e/harness.ts";
import { Events } from "../../src/observe/events.ts";
import { openMetrics } from "../../src/observe/metrics.ts";
import { namesOf, PROCESSES, sightOf, TIERS } from "../observe/stage.ts";
import { promtool } from "./promtool.ts";

interface Panel {
  readonly id: number;
  readonly type: string;
  readonly title?: string;
  readonly description?: string;
  readonly gridPos: { readonly x: number; readonly y: number; readonly w: number; readonly h: number };
  readonly datasource?: { readonly uid: string };
  readonly fieldConfig?: { readonly defaults: { readonly unit?: string } };
  readonly targets?: readonly { readonly expr: string; readonly datasource: { readonly uid: string } }[];
}

interface Variable {
  readonly name: string;
  readonly definition?: string;
}

const dashboard = JSON.parse(readFileSync(join(ROOT, "deploy/grafana/ferry.json"), "utf8")) as {
  readonly panels: readonly Panel[];
  readonly templating: { readonly list: readonly Variable[] };
};
/** Counters of others who look on. */
const MORE = [
  "ferry_request_log_rows_total",
  "ferry_request_log_dropped_total",
  "ferry_spans_dropped_total",
].map((name) => ({ name, help: name, read: () => 0 }));
const panels = dashboard.panels.filter(({ type }) => type !== "row");
const expressions = panels.flatMap(({ targets = [] }) => targets.map(({ expr }) => expr));
const asked = dashboard.templating.list.flatMap(({ definition }) => definition ?? []);

describe("deploy/grafana/ferry.json", () => {
  let names: ReadonlySet<string>;

  before(async () => {
    const models = [{ name: "embed", maxBatchSize: 64, caches: true }];
    const parts = { models: () => models, tiers: TIERS, version: "1", sight: sightOf(models), more: MORE };
    const metrics = openMetrics({ ...parts, processes: PROCESSES, events: new Events() });
    names = new Set(namesOf((await metrics.expose()).text));
  });

  test("has its rows and variables", () => {
    const rows = dashboard.panels.filter(({ type }) => type === "row").map(({ title }) => title);
    assert.deepEqual(rows, [
      "Verdict",
      "Latency",
      "Batches",
      "Workers",
      "Admission",
      "Reliability",
      "Cache and collapse",
      "Process",
    ]);
    const variables = dashboard.templating.list.map(({ name }) => name);
    assert.deepEqual(variables, ["datasource", "model", "tier", "instance"]);
  });

  test("every panel has a title, a unit, a description, a question and a place of its own", () => {
    const taken = new Set<string>();
    for (const { id, title = "", description, fieldConfig, targets, gridPos, datasource } of panels) {
      assert.ok(title.length > 2, `panel ${id}`);
      assert.ok((description ?? "").length > 20, title);
      assert.ok((fieldConfig?.defaults.unit ?? "").length > 0, title);
      assert.ok((targets ?? []).length > 0, title);
      assert.equal(datasource?.uid, "${datasource}", title);
      assert.ok(gridPos.x + gridPos.w <= 24, title);
      for (let x = gridPos.x; x < gridPos.x + gridPos.w; x++) {
        for (let y = gridPos.y; y < gridPos.y + gridPos.h; y++) {
          assert.ok(!taken.has(`${x},${y}`), `${title} lies over another`);
          taken.add(`${x},${y}`);
        }
      }
    }
    assert.equal(new Set(dashboard.panels.map(({ id }) => id)).size, dashboard.panels.length);
  });

  test("asks only for metrics that are there", () => {
    const found = [...expressions, ...asked].flatMap((text) => [
      ...text.matchAll(/\b(?:ferry|nodejs|process)_\w+/g),
    ]);
    assert.ok(found.length > 50);
    for (const [name] of found) {
      const family = name.replace(/_(bucket|sum|count)$/, "");
      assert.ok(names.has(name) || names.has(family), `nothing is called ${name}`);
    }
  });

  test("shows every metric of Ferry", () => {
    const text = expressions.join("\n");
    for (const name of names) if (name.startsWith("ferry_")) assert.ok(text.includes(name), name);
  });

  test("what it asks is PromQL, by Prometheus's own parser", async () => {
    await using folder = await Folder.make();
    const rules = expressions.map((expr, at) => ({
      record: `panel:question_${at}`,
      expr: expr
        .replaceAll("$__rate_interval", "1m")
        .replaceAll("$__range", "1h")
        .replaceAll(/\$(model|tier|instance)\b/g, ".*"),
    }));
    for (const { expr } of rules) assert.doesNotMatch(expr, /\$/);
    await folder.write("panels.yaml", stringify({ groups: [{ name: "panels", rules }] }));
    const { status, text } = promtool(["check", "rules", "panels.yaml"], folder.path);
    assert.equal(status, 0, text);
    assert.match(text, new RegExp(`${expressions.length} rules found`));
  });
});
