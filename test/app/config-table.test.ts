/** The table of settings, its documents, and properties that hold for every setting. */
import assert from "node:assert/strict";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, describe, test } from "node:test";
import { isDeepStrictEqual } from "node:util";
import fc from "fast-check";
import { stringify } from "yaml";
import { generateDocs, staleDocs } from "../../scripts/generate-docs.ts";
import { formatProblems, parseConfig, type Loaded } from "../../src/app/config/load.ts";
import { settingRows } from "../../src/app/config/config.ts";
import { editDistance, nearest } from "../../src/app/config/spelling.ts";

const folder = mkdtempSync(join(tmpdir(), "ferry-config-"));
after(() => rmSync(folder, { recursive: true }));
writeFileSync(join(folder, "model.py"), "def batchstring(inputs): return inputs\n");

function parse(text: string, env: NodeJS.ProcessEnv = {}): Loaded {
  return parseConfig(text, join(folder, "ferry.yaml"), env);
}
function valid(text: string, env?: NodeJS.ProcessEnv) {
  const loaded = parse(text, env);
  assert.equal(formatProblems(loaded.problems ?? []), "");
  return loaded.config!;
}

describe("the table", () => {
  test("example file and page are generated from it", () => {
    assert.deepEqual(staleDocs(), [], "run node scripts/generate-docs.ts");
  });

  test("the example file is valid, without a warning, and equals the defaults", () => {
    const loaded = parse(readFileSync(new URL("../../ferry.example.yaml", import.meta.url), "utf8"));
    assert.equal(formatProblems([...(loaded.problems ?? []), ...loaded.warnings]), "");
    assert.deepEqual(loaded.config, valid("models: [{ name: embed, backend: { kind: simulated } }]\n"));
  });

  test("the page's examples are valid and every setting is on it", () => {
    const page = generateDocs().find(({ path }) => path === "docs/configuration.md")!.text;
    const blocks = [...page.matchAll(/```yaml\n(.*?)```/gs)].map((match) => match[1]!);
    assert.equal(blocks.length, 4);
    for (const block of blocks) valid(block, { FERRY_ADMIN_TOKEN: "token", REDIS_PASSWORD: "password" });
    for (const row of settingRows) assert.ok(page.includes(`| \`${row.path}\` `), row.path);
  });

  test("a name ends in its unit, and every setting says what it is for", () => {
    const endings: { readonly [unit: string]: RegExp } = {
      ms: /Ms$/,
      bytes: /Bytes$/,
      "per minute": /PerMinute$/,
    };
    for (const { path, leaf, doc } of settingRows) {
      const ending = endings[leaf.unit];
      if (ending !== undefined) assert.match(path, ending);
      else assert.doesNotMatch(path, /(?:Ms|Bytes|PerMinute)$/);
      assert.match(doc, /^.{5,}[.…]$/, path);
    }
  });

  test("every default is one that could be written", () => {
    for (const { path, leaf } of settingRows) {
      if (leaf.defaultText === "") continue;
      const given = leaf.kind === "integer" || leaf.kind === "number" || leaf.kind === "boolean";
      const value = given ? (JSON.parse(leaf.defaultText) as number) : leaf.defaultText;
      assert.deepEqual(leaf.read({ value, expanded: false, folder }), { value: leaf.fallback }, path);
    }
  });

  test("a number out of bounds is refused, at the bounds it is accepted", () => {
    for (const { path, leaf } of settingRows) {
      const bounds = /^([\d.,]+) to ([\d.,]+)$/.exec(leaf.bounds);
      if (bounds === null) continue;
      const [min, max] = [bounds[1]!, bounds[2]!].map((text) => Number(text.replaceAll(",", "")));
      const read = (value: number) => "value" in leaf.read({ value, expanded: false, folder });
      assert.deepEqual(
        [read(min! - 1), read(min!), read(max!), read(max! + 1)],
        [false, true, true, false],
        path,
      );
    }
  });
});

describe("properties", () => {
  test("any text: never a crash, always a config or a problem", () => {
    const pieces = fc.constantFrom(
      ":",
      "-",
      "{",
      "}",
      "[",
      "]",
      "&a",
      "*a",
      "${A}",
      "\n",
      "  ",
      '"',
      "'",
      "|",
      "models",
    );
    const texts = fc.oneof(
      fc.string({ unit: "binary", maxLength: 200 }),
      fc
        .array(fc.oneof(pieces, fc.string({ maxLength: 5 })), { maxLength: 60 })
        .map((parts) => parts.join("")),
    );
    fc.assert(
      fc.property(texts, (text) => {
        const loaded = parse(text, { A: "x" });
        assert.ok(loaded.config !== undefined || loaded.problems.length > 0);
        for (const line of formatProblems(loaded.problems ?? []).split("\n")) {
          assert.doesNotMatch(line, /[\u0000-\u001f\u007f]/);
        }
      }),
      { numRuns: 500 },
    );
  });

  const whole = {
    listen: "127.0.0.1:8080",
    admin: { listen: "127.0.0.1:8081", token: "token" },
    engine: { kind: "memory", dataDir: "./data" },
    zone: "a",
    api: { defaultMode: "sync" },
    models: [
      {
        name: "a",
        backend: { kind: "http", protocol: "batch", workers: ["http://g:1/x"], maxReplyBytes: 2048 },
        maxBatchSize: 64,
        maxWaitMs: 50,
        policy: "eco",
        timeouts: { queueMs: 2000, workerMs: 3000, totalMs: 4000 },
        retry: { max: 3, baseMs: 50, maxMs: 1000 },
        cache: { ttlMs: 1000, scope: "tenant" },
        collapse: true,
        deny: ["(?i)secret"],
        health: { failures: 3, ejectMs: 1000, barMs: 10_000, askMs: 1000 },
      },
      { name: "b", backend: { kind: "simulated", workers: 2, baseMs: 1 } },
      {
        name: "c",
        backend: { kind: "python", function: "model.py:batchstring", python: "python3", workers: 1 },
      },
    ],
    tiers: { gold: { ratePerMinute: 10 }, rest: {} },
    auth: { mode: "none", anonymousTier: "rest" },
    limits: { maxBodyBytes: 1000, maxQueued: 100, perUserPerMinute: 5, drainMs: 15_000 },
    admission: { mode: "off", targetUtilization: 0.7 },
    results: { ttlMs: 600_000, evictAfterRead: false },
    telemetry: { logLevel: "info" },
  };
  /** Every place in `whole`, as keys from the root. */
  const places = (function walk(value: unknown, at: readonly string[]): (readonly string[])[] {
    if (typeof value !== "object" || value === null) return [at];
    return [at, ...Object.entries(value).flatMap(([key, child]) => walk(child, [...at, key]))];
  })(whole, []).filter((place) => place.length > 0);

  function mutated(
    place: readonly string[],
    change: (parent: Record<string, unknown>, key: string) => void,
  ): unknown {
    const copy = structuredClone(whole) as unknown;
    const parent = place.slice(0, -1).reduce((at, key) => (at as Record<string, unknown>)[key], copy);
    change(parent as Record<string, unknown>, place.at(-1)!);
    return copy;
  }

  test("the whole config is valid", () => {
    valid(stringify(whole));
  });

  test("any value in any place: a config, or problems with a path", () => {
    fc.assert(
      fc.property(fc.constantFrom(...places), fc.jsonValue({ maxDepth: 2 }), (place, value) => {
        const text = stringify(mutated(place, (parent, key) => (parent[key] = value)));
        // A variable is looked for in the text, where it may begin in a name and end in a value: that is no setting.
        fc.pre(!text.includes("${"));
        const loaded = parse(text);
        for (const { path, message } of loaded.problems ?? []) {
          assert.notEqual(path, "");
          assert.match(message, /^[^\n]+$/);
        }
      }),
      { numRuns: 1000 },
    );
  });

  test("a misspelt name is a problem at that name", () => {
    fc.assert(
      fc.property(fc.constantFrom(...places), fc.stringMatching(/^[A-Za-z]{1,3}$/), (place, extra) => {
        if (place[0] === "tiers" && place.length === 2) return;
        if (/^\d+$/.test(place.at(-1)!)) return;
        const wrong = `${place.at(-1)}${extra}`;
        // `max` and `Ms` make `maxMs`, which there is.
        if (places.some((other) => isDeepStrictEqual(other, [...place.slice(0, -1), wrong]))) return;
        const copy = mutated(place, (parent, key) => {
          parent[wrong] = parent[key];
          delete parent[key];
        });
        const found = (parse(stringify(copy)).problems ?? []).filter(
          ({ path, message }) => path.endsWith(wrong) && message.startsWith("unknown setting"),
        );
        assert.equal(found.length, 1);
      }),
      { numRuns: 500 },
    );
  });

  test("distance is a metric, and a slip of one letter is found", () => {
    const words = fc.stringMatching(/^[a-z]{0,8}$/);
    fc.assert(
      fc.property(words, words, (a, b) => {
        assert.equal(editDistance(a, b), editDistance(b, a));
        assert.equal(editDistance(a, b) === 0, a === b);
        assert.ok(editDistance(a, b) <= Math.max(a.length, b.length));
      }),
    );
    assert.equal(nearest("maxBtachSize", ["maxWaitMs", "maxBatchSize"]), "maxBatchSize");
    assert.equal(nearest("maxWait", ["maxWaitMs", "maxBatchSize"]), "maxWaitMs");
    assert.equal(nearest("x", ["y", "z"]), undefined);
    assert.equal(nearest("banana", ["serve", "check"]), undefined);
  });
});
