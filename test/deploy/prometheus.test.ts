/** The rules, their alerts and the scrape config of deploy/prometheus, as Prometheus itself reads them. */
import assert from "node:assert/strict";
import { cp, readFile } from "node:fs/promises";
import { join } from "node:path";
import { describe, test } from "node:test";
import { parse } from "yaml";
import { Folder, ROOT } from "../e2e/harness.ts";
import { Events } from "../../src/observe/events.ts";
import { openMetrics } from "../../src/observe/metrics.ts";
import { answered, called, PROCESSES, sightOf, started, TIERS } from "../observe/stage.ts";
import { promtool } from "./promtool.ts";

const PLACE = join(ROOT, "deploy/prometheus");

interface Rule {
  readonly alert?: string;
  readonly record?: string;
  readonly expr: string;
  readonly labels?: { readonly severity?: string };
  readonly annotations?: { readonly summary?: string; readonly description?: string };
}

async function rules(): Promise<Rule[]> {
  const file = parse(await readFile(join(PLACE, "ferry.rules.yaml"), "utf8")) as {
    groups: { rules: Rule[] }[];
  };
  return file.groups.flatMap((group) => group.rules);
}

describe("deploy/prometheus", () => {
  test("promtool check rules", () => {
    const { status, text } = promtool(["check", "rules", "--lint-fatal", "ferry.rules.yaml"], PLACE);
    assert.equal(status, 0, text);
  });

  test("promtool test rules", () => {
    const { status, text } = promtool(["test", "rules", "ferry.rules.test.yaml"], PLACE);
    assert.equal(status, 0, text);
  });

  test("promtool check config, with the token where the config says", async () => {
    await using folder = await Folder.make();
    await cp(PLACE, folder.path, { recursive: true });
    await folder.write("ferry-admin-token", "a-token");
    const { status, text } = promtool(["check", "config", "prometheus.yaml"], folder.path);
    assert.equal(status, 0, text);
    assert.match(text, /2\d rules found/);
  });

  test("every alert says what happened and what to do, and whether it may wake somebody", async () => {
    for (const { alert, labels, annotations } of await rules()) {
      if (alert === undefined) continue;
      assert.match(alert, /^Ferry[A-Z]/);
      assert.match(labels?.severity ?? "", /^(page|ticket)$/, alert);
      assert.ok((annotations?.summary ?? "").length > 20, alert);
      assert.ok((annotations?.description ?? "").length > 60, alert);
    }
  });

  test("every alert is tested", async () => {
    const tests = await readFile(join(PLACE, "ferry.rules.test.yaml"), "utf8");
    for (const { alert } of await rules()) {
      if (alert === undefined) continue;
      const fires =
        tests.includes(`alertname="${alert}"`) || tests.includes(`alertname: ${alert}\n        exp_`);
      assert.ok(fires, `no test lets ${alert} fire`);
    }
  });

  test("promtool check metrics finds nothing wrong with ours", async () => {
    const events = new Events();
    const models = [{ name: "embed", maxBatchSize: 64, caches: true }];
    const sight = sightOf(models);
    const metrics = openMetrics({
      models: () => models,
      tiers: TIERS,
      version: "1",
      events,
      sight,
      processes: PROCESSES,
      more: [],
    });
    events.emit("batch.started", started("embed", [1, 2, 3], [0, 1, 2]));
    events.emit("batch.answered", called("embed", 100));
    events.emit("request.answered", answered());
    const { text } = promtool(["check", "metrics"], ROOT, (await metrics.expose()).text);
    // Some names of prom-client's own are not as they should be.
    const ours = text.split("\n").filter((line) => line !== "" && !line.startsWith("nodejs_"));
    assert.deepEqual(ours, []);
  });
});
