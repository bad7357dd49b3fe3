/** What `ferry check` says of `scaling`: who could apply it, its bounds, a hook that is not there. */
import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, test } from "node:test";
import { parseConfig } from "../../src/app/config/load.ts";

const folder = mkdtempSync(join(tmpdir(), "ferry-config-"));
after(() => rmSync(folder, { recursive: true }));
writeFileSync(join(folder, "scale.sh"), "#!/bin/sh\n", { mode: 0o755 });
writeFileSync(join(folder, "plain.sh"), "#!/bin/sh\n", { mode: 0o644 });

const SIMULATED = "{ kind: simulated, workers: 40 }";
const HTTP = "{ kind: http, workers: [http://gpu-1:9000/infer, http://gpu-2:9000/infer] }";

/** Problems and warnings of a model with these. */
function said(scaling: string, backend = SIMULATED, more = ""): { problems: string[]; warnings: string[] } {
  const text = `${more}models: [{ name: m, backend: ${backend}, scaling: ${scaling} }]\n`;
  const { problems = [], warnings } = parseConfig(text, join(folder, "ferry.yaml"), {});
  const lines = (list: typeof warnings): string[] =>
    list
      .filter(({ path }) => path.includes("scaling"))
      .map(({ path, message }) => `${path}: ${message.replaceAll(`${folder}/`, "")}`);
  return { problems: lines(problems), warnings: lines(warnings) };
}

test("fewer at most than at least is a mistake", () => {
  assert.deepEqual(said("{ min: 5, max: 3 }").problems, [
    "models[0].scaling.min: min 5 > max 3; raise max or lower min",
  ]);
  assert.match(said("{ max: 0 }").problems[0]!, /^models\[0\]\.scaling\.max: 0 is too small/);
});

test("apply is for workers that this process can start, and for one process", () => {
  assert.match(
    said("{ apply: true }", HTTP).problems[0]!,
    /^models\[0\]\.scaling\.apply: .*use webhook or command/,
  );
  const redis = "engine: { kind: redis, url: redis://127.0.0.1:6379 }\n";
  assert.match(said("{ apply: true }", SIMULATED, redis).problems[0]!, /every process would start workers/);
  assert.deepEqual(said("{ apply: true, max: 40 }"), { problems: [], warnings: [] });
});

test("more workers than max is a warning where somebody would take them away", () => {
  const warning = (count: number, max: number): string[] => [
    `models[0].scaling.max: max ${max} < the ${count} of backend.workers: ` +
      `${count - max} of them would be taken away; raise max`,
  ];
  assert.deepEqual(said("{ apply: true }").warnings, warning(40, 32));
  assert.deepEqual(said("{ max: 1, webhook: http://x/y }", HTTP).warnings, warning(2, 1));
  assert.deepEqual(said("{ max: 1 }", HTTP).warnings, [], "nobody follows it: nothing goes");
});

test("a command that cannot be run is a warning; one on PATH is not looked for", () => {
  const missing = "models[0].scaling.command: cannot be run: NAME is not there, or not executable (chmod +x)";
  for (const name of ["none.sh", "plain.sh"]) {
    assert.deepEqual(said(`{ max: 40, command: ./${name} }`).warnings, [missing.replace("NAME", name)]);
  }
  assert.deepEqual(said("{ max: 40, command: ./scale.sh }").warnings, []);
  assert.deepEqual(said("{ max: 40, command: scale-gpus }").warnings, []);
});
