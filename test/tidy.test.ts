/** The house rules, checked on the source itself. What each rule is for stands in CONTRIBUTING.md. */
import assert from "node:assert/strict";
import { globSync, readFileSync } from "node:fs";
import { basename, dirname, join, relative } from "node:path";
import { describe, test } from "node:test";
import { errors } from "../src/core/errors.ts";

const root = join(import.meta.dirname, "..");
const read = (file: string): string => readFileSync(join(root, file), "utf8");
const list = (pattern: string): string[] => globSync(pattern, { cwd: root }).sort();
const sources = list("src/**/*.ts");
const everything = [
  ...sources,
  ...list("test/**/*.ts"),
  ...list("bench/**/*.ts"),
  ...list("scripts/**/*.ts"),
  ...list("src/dashboard/page/*.js"),
];

/** Folder → what its files may import from other folders; "type:" for types only. */
const MAY_IMPORT: Record<string, readonly string[]> = {
  "src/core": [],
  "src/protocol": ["src/core"],
  "src/clock.ts": ["src/clock"],
  "src/clock": ["src/core"],
  "src/certificates.ts": ["src/clock.ts", "src/telemetry/events.ts"],
  "src/telemetry": ["src/core", "src/clock.ts", "type:src/gateway/server.ts"],
  "src/dashboard": [
    "src/core",
    "src/clock.ts",
    "src/telemetry",
    "type:src/gateway/server.ts",
    "type:src/gateway/exchange.ts",
  ],
  "src/engine": ["src/core", "src/clock.ts", "src/telemetry/events.ts", "src/redis"],
  "src/redis": ["src/core", "src/clock.ts", "src/telemetry/events.ts"],
  "src/backend": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "src/certificates.ts",
    "src/protocol",
  ],
  "src/dispatch": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "type:src/engine/engine.ts",
    "type:src/backend/backend.ts",
  ],
  "src/fleet": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "type:src/redis/nodes.ts",
    "type:src/dispatch/workers.ts",
    "type:src/dispatch/dispatcher.ts",
    "type:src/engine/redis/reader.ts",
  ],
  "src/result": ["src/core", "src/clock.ts", "src/telemetry/events.ts", "type:src/engine/engine.ts"],
  "src/admission": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "type:src/engine/engine.ts",
    "type:src/redis/nodes.ts",
  ],
  "src/gateway": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "src/admission",
    "src/result",
    "src/protocol",
    "src/engine/ids.ts",
    "type:src/engine/engine.ts",
    "type:src/certificates.ts",
    "type:src/telemetry/request-log.ts",
    "type:src/telemetry/troubles.ts",
  ],
  "src/config": ["src/core", "src/protocol", "src/terminal/terminal.ts"],
  "src/terminal": ["src/config"],
  "src/roster": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "src/config",
    "src/fleet",
    "type:src/backend/backend.ts",
    "type:src/dispatch/dispatcher.ts",
    "type:src/dispatch/workers.ts",
    "type:src/gateway/worker-routes.ts",
  ],
  "src/scaling": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "src/config",
    "type:src/backend/backend.ts",
    "type:src/dispatch/dispatcher.ts",
    "type:src/dispatch/workers.ts",
  ],
  "src/processes": ["src/clock.ts", "src/config", "src/terminal", "src/changes/reload.ts"],
  "src/demo": ["src/core", "src/clock.ts", "type:src/backend/simulated.ts", "type:src/dispatch/workers.ts"],
  "src/bench": ["src/core", "src/clock.ts"],
  "src/chart": [],
  "src/plan": [
    "src/core",
    "src/clock.ts",
    "src/telemetry/events.ts",
    "src/admission/gate.ts",
    "src/dispatch",
    "src/engine/memory.ts",
    "src/backend/simulated.ts",
    "type:src/engine/engine.ts",
    "type:src/backend/backend.ts",
  ],
};

/** Package → who may import it; "type:" for types only. What looks on stays out of what is looked at. */
const MAY_IMPORT_PACKAGE: Record<string, readonly string[]> = {
  "@opentelemetry": [
    "src/telemetry/otlp.ts",
    "type:src/telemetry/sender.ts",
    "type:src/telemetry/span.ts",
    "type:src/telemetry/traces.ts",
  ],
  jose: ["src/admission"],
  pino: ["src/telemetry/log.ts"],
  postgres: ["src/telemetry/postgres-link.ts"],
  "prom-client": ["src/telemetry/metrics.ts"],
  undici: ["src/backend", "src/commands", "src/demo/load.ts"],
  yaml: ["src/config/load.ts", "src/config/read.ts"],
};

/** A request passes through these. Of telemetry they know the list of events, and else its types at most. */
const PATH_ROOMS = [
  "src/core",
  "src/engine",
  "src/dispatch",
  "src/gateway",
  "src/admission",
  "src/result",
  "src/backend",
  "src/fleet",
  "src/redis",
];

interface Import {
  readonly from: string;
  readonly typeOnly: boolean;
}

const IMPORT = /^(?:import|export)\s+(type\s)?[^;]*?from\s+"(\.[^"]+)";|\bimport\("(\.[^"]+)"\)/gms;

function importsOf(file: string): Import[] {
  return [...read(file).matchAll(IMPORT)].map((found) => ({
    from: relative(root, join(root, dirname(file), (found[2] ?? found[3])!)),
    typeOnly: found[1] !== undefined,
  }));
}

const PACKAGE_IMPORT =
  /^(?:import|export)\s+(type\s)?(?:[^;"]*?from\s+)?"([@\w][^":]*)";|\bimport\("([@\w][^":]*)"\)/gms;

/** Without the part behind a scope or a slash. */
function packagesOf(file: string): Import[] {
  return [...read(file).matchAll(PACKAGE_IMPORT)].map((found) => ({
    from: (found[2] ?? found[3])!.split("/")[0]!,
    typeOnly: found[1] !== undefined,
  }));
}

function room(file: string): string {
  return dirname(file) === "src" ? file : dirname(file);
}

describe("imports", () => {
  for (const file of sources) {
    const allowed = MAY_IMPORT[room(file)];
    if (allowed === undefined) continue;
    test(`${file} imports only what its room may`, () => {
      for (const { from, typeOnly } of importsOf(file)) {
        const may = (name: string): boolean =>
          allowed.includes(name) || (typeOnly && allowed.includes(`type:${name}`));
        assert.ok(
          room(from) === room(file) || may(from) || may(room(from)),
          `${file} may not import ${from}`,
        );
      }
    });
  }

  test("a package is imported only where it may be", () => {
    for (const file of sources) {
      for (const { from, typeOnly } of packagesOf(file)) {
        const allowed = MAY_IMPORT_PACKAGE[from] ?? [];
        const may = (name: string): boolean =>
          allowed.includes(name) || (typeOnly && allowed.includes(`type:${name}`));
        assert.ok(may(file) || may(room(file)), `${file} may not import ${from}`);
      }
    }
  });

  test("what a request passes through imports nothing that looks on", () => {
    for (const path of PATH_ROOMS) {
      const allowed = MAY_IMPORT[path]!;
      const seen = allowed.filter((name) => /^src\/(telemetry|dashboard|observers)/.test(name));
      assert.ok(
        seen.every((name) => name === "src/telemetry/events.ts"),
        `${path}: ${seen.join(", ")}`,
      );
    }
  });

  test("nobody imports the files that know every part", () => {
    const tops = new Set(["src/ferry.ts", "src/cli.ts"]);
    for (const file of sources) {
      for (const { from } of importsOf(file))
        assert.ok(!tops.has(from) || file === "src/commands/serve.ts", `${file} → ${from}`);
    }
  });

  test("every source file is used", () => {
    const used = new Set(everything.flatMap((file) => importsOf(file).map(({ from }) => from)));
    const started = new Set([
      "src/cli.ts",
      "src/ferry.ts",
      "src/clock/thread.ts",
      "src/engine/journal-writer.ts",
      "src/telemetry/sender-thread.ts",
      "src/backend/module-worker.ts",
    ]);
    for (const file of sources) assert.ok(used.has(file) || started.has(file), `${file} is not imported`);
  });
});

/** Pattern → where it may stand, and what to use instead. */
const BANNED: [pattern: RegExp, allowed: readonly string[], instead: string][] = [
  [
    /\bDate\.now\(|(?<!\.)\bset(Timeout|Interval)\(|\bperformance\.(now|timeOrigin)/,
    ["src/clock.ts"],
    "the Clock",
  ],
  [/\bMath\.random\b/, ["src/ferry.ts"], "a random number that is handed in"],
  [
    /\bconsole\.(log|error|warn|info)\(/,
    ["src/backend/module-worker.ts"],
    "events, or the command's console",
  ],
  [/\bas any\b|: any\b|@ts-ignore|@ts-expect-error/, [], "a type"],
  [/\b(TODO|FIXME|XXX)\b/, [], "the work itself"],
  [/\bunref\(\)/, [], "stopping it"],
];

describe("banned in src", () => {
  for (const [pattern, allowed, instead] of BANNED) {
    test(`${pattern.source} (use ${instead})`, () => {
      for (const file of sources) {
        if (allowed.includes(file)) continue;
        const at = read(file)
          .split("\n")
          .findIndex((line) => pattern.test(line) && !/^\s*(\*|\/\/|\/\*\*)/.test(line));
        assert.equal(at, -1, `${file}:${at + 1}`);
      }
    });
  }
});

test("tests do not sleep outside e2e", () => {
  for (const file of list("test/**/*.ts")) {
    if (file.startsWith("test/e2e/") || basename(file) === "tidy.test.ts") continue;
    assert.doesNotMatch(read(file), /(?<!\.)\bsetTimeout\(|setTimeout as/, file);
  }
});

test("no test is skipped or alone", () => {
  for (const file of list("test/**/*.test.ts")) {
    if (basename(file) === "tidy.test.ts") continue;
    assert.doesNotMatch(read(file), /\.(skip|only|todo)\(|skip: true|only: true/, file);
  }
});

describe("docs", () => {
  test("docs/errors.md lists every code with its status, and no other", () => {
    const rows = [...read("docs/errors.md").matchAll(/^\| (\d{3}) \| `([A-Z_]+)` \|/gm)].map((row) => [
      row[2],
      Number(row[1]),
    ]);
    const table = Object.entries(errors).map(([code, { status }]) => [code, status]);
    assert.deepEqual(new Map(rows as [string, number][]), new Map(table as [string, number][]));
  });

  test("no machine path stands in the tree", () => {
    for (const file of [
      ...list("*.md"),
      ...list("docs/*.md"),
      ...list("examples/*/*"),
      ...everything,
      "package.json",
      "package-lock.json",
    ]) {
      assert.doesNotMatch(read(file), /\/work\/|\/root\//, file);
    }
  });
});
