/** The house rules, checked on the source itself. What each rule is for stands in CONTRIBUTING.md. */
import assert from "node:assert/strict";
import { globSync, readFileSync } from "node:fs";
import { basename, dirname, join, relative } from "node:path";
import { describe, test } from "node:test";
import { errors } from "../../src/core/errors.ts";

const root = join(import.meta.dirname, "../..");
const read = (file: string): string => readFileSync(join(root, file), "utf8");
const list = (pattern: string): string[] => globSync(pattern, { cwd: root }).sort();
const sources = list("src/**/*.ts");
const everything = [
  ...sources,
  ...list("test/**/*.ts"),
  ...list("bench/**/*.ts"),
  ...list("scripts/**/*.ts"),
  ...list("src/observe/dashboard/page/*.js"),
];

/**
 * Room → what its files may import from other rooms; "type:" for types only. A file belongs to the innermost room that is
 * listed. Rooms that are not listed (`src/app`, `src/cli`) know every part.
 */
const MAY_IMPORT: Record<string, readonly string[]> = {
  "src/core": [],
  "src/app/clock": ["src/core"],
  "src/gateway": [
    "src/core",
    "src/app/clock",
    "src/observe/events.ts",
    "src/gateway/admission",
    "src/gateway/protocol",
    "src/engine/ids.ts",
    "type:src/engine/engine.ts",
    "type:src/observe/request-log.ts",
    "type:src/observe/recent.ts",
  ],
  "src/gateway/protocol": ["src/core"],
  "src/gateway/admission": [
    "src/core",
    "src/app/clock",
    "src/observe/events.ts",
    "type:src/engine/engine.ts",
    "type:src/engine/redis/client",
  ],
  "src/engine": ["src/core", "src/app/clock", "src/observe/events.ts"],
  "src/dispatch": [
    "src/core",
    "src/app/clock",
    "src/observe/events.ts",
    "src/workers",
    "type:src/engine/engine.ts",
    "type:src/workers/backend",
  ],
  "src/workers": [
    "src/core",
    "src/app/clock",
    "src/app/config",
    "src/observe/events.ts",
    "src/workers/backend",
    "type:src/dispatch",
    "type:src/engine/engine.ts",
    "type:src/engine/redis",
    "type:src/gateway/admin.ts",
  ],
  "src/workers/backend": [
    "src/core",
    "src/app/clock",
    "src/observe/events.ts",
    "src/gateway/certificates.ts",
    "src/gateway/protocol",
  ],
  "src/observe": ["src/core", "src/app/clock", "type:src/gateway"],
  "src/app/config": ["src/core", "src/gateway/protocol", "src/cli/terminal/terminal.ts"],
};

/** Package → who may import it; "type:" for types only. What looks on stays out of what is looked at. */
const MAY_IMPORT_PACKAGE: Record<string, readonly string[]> = {
  "@opentelemetry": [
    "src/observe/otlp.ts",
    "type:src/observe/sender.ts",
    "type:src/observe/span-buffer.ts",
    "type:src/observe/traces.ts",
  ],
  jose: ["src/gateway/admission"],
  pino: ["src/observe/log.ts"],
  postgres: ["src/observe/postgres-link.ts"],
  "prom-client": ["src/observe/metrics.ts"],
  undici: ["src/workers/backend", "src/cli"],
  yaml: ["src/app/config/load.ts", "src/app/config/read.ts"],
};

/** A request passes through these. Of `observe/` they know the list of events, and types at most. */
const PATH_ROOMS = [
  "src/core",
  "src/gateway",
  "src/engine",
  "src/dispatch",
  "src/workers",
  "src/workers/backend",
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

const ROOMS = Object.keys(MAY_IMPORT).sort((one, other) => other.length - one.length);

function isIn(file: string, room: string): boolean {
  return file === room || file === `${room}.ts` || file.startsWith(`${room}/`);
}

function room(file: string): string {
  return ROOMS.find((name) => isIn(file, name)) ?? dirname(file);
}

describe("imports", () => {
  for (const file of sources) {
    const allowed = MAY_IMPORT[room(file)];
    if (allowed === undefined) continue;
    test(`${file} imports only what its room may`, () => {
      for (const { from, typeOnly } of importsOf(file)) {
        const may = allowed.some((name) =>
          name.startsWith("type:") ? typeOnly && isIn(from, name.slice(5)) : isIn(from, name),
        );
        assert.ok(room(from) === room(file) || may, `${file} may not import ${from}`);
      }
    });
  }

  test("a package is imported only where it may be", () => {
    for (const file of sources) {
      for (const { from, typeOnly } of packagesOf(file)) {
        const allowed = MAY_IMPORT_PACKAGE[from] ?? [];
        const may = allowed.some((name) =>
          name.startsWith("type:") ? typeOnly && isIn(file, name.slice(5)) : isIn(file, name),
        );
        assert.ok(may, `${file} may not import ${from}`);
      }
    }
  });

  test("what a request passes through imports nothing that looks on", () => {
    for (const path of PATH_ROOMS) {
      const allowed = MAY_IMPORT[path]!;
      const seen = allowed.filter((name) => name.startsWith("src/observe"));
      assert.ok(
        seen.every((name) => name === "src/observe/events.ts"),
        `${path}: ${seen.join(", ")}`,
      );
    }
  });

  test("nobody imports the files that know every part", () => {
    const tops = new Set(["src/app/ferry.ts", "src/cli.ts"]);
    for (const file of sources) {
      for (const { from } of importsOf(file))
        assert.ok(!tops.has(from) || file === "src/cli/serve.ts", `${file} → ${from}`);
    }
  });

  test("every source file is used", () => {
    const used = new Set(everything.flatMap((file) => importsOf(file).map(({ from }) => from)));
    const started = new Set([
      "src/cli.ts",
      "src/app/ferry.ts",
      "src/app/clock/thread.ts",
      "src/engine/memory/journal-writer.ts",
      "src/observe/sender-thread.ts",
      "src/workers/backend/module-worker.ts",
    ]);
    for (const file of sources) assert.ok(used.has(file) || started.has(file), `${file} is not imported`);
  });
});

test("an exported name has one meaning", () => {
  const exported = /^export (?:abstract |async )*(?:function\*?|class|const|let|type|interface) (\w+)/gm;
  const declared = new Map<string, string>();
  for (const file of sources) {
    for (const name of new Set(Array.from(read(file).matchAll(exported), ([, word]) => word!))) {
      assert.equal(declared.get(name), undefined, `${name} is exported by ${file} too; rename one of them`);
      declared.set(name, file);
    }
  }
});

/** Pattern → where it may stand, and what to use instead. */
const BANNED: [pattern: RegExp, allowed: readonly string[], instead: string][] = [
  [
    /\bDate\.now\(|(?<!\.)\bset(Timeout|Interval)\(|\bperformance\.(now|timeOrigin)/,
    ["src/app/clock.ts"],
    "the Clock",
  ],
  [/\bMath\.random\b/, ["src/app/ferry.ts"], "a random number that is handed in"],
  [
    /\bconsole\.(log|error|warn|info)\(/,
    ["src/workers/backend/module-worker.ts"],
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
