/** The settings of the Redis engine: what is filled in, what is refused, and that no password is ever shown. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { stringify } from "yaml";
import { generateDocs } from "../../scripts/generate-docs.ts";
import { formatProblems, parseConfig } from "../../src/app/config/load.ts";
import type { RedisEngineConfig } from "../../src/app/config/config.ts";

const models = "models: [{ name: embed, backend: { kind: simulated } }]\n";

function engineOf(settings: string, env: NodeJS.ProcessEnv = {}): RedisEngineConfig {
  const loaded = parseConfig(`engine: { kind: redis, ${settings} }\n${models}`, "ferry.yaml", env);
  assert.equal(formatProblems([...(loaded.problems ?? []), ...loaded.warnings]), "");
  const { engine } = loaded.config!;
  assert.ok(engine.kind === "redis");
  return engine;
}
/** `path: message` of the one problem. */
function mistake(settings: string, env: NodeJS.ProcessEnv = {}): string {
  const { problems = [] } = parseConfig(`engine: { kind: redis, ${settings} }\n${models}`, "ferry.yaml", env);
  const found = problems.map(({ path, message }) => `${path}: ${message}`);
  assert.equal(found.length, 1, `${settings}\n${found.join("\n")}`);
  return found[0]!;
}

const defaults = {
  kind: "redis",
  nodes: [],
  tls: false,
  durability: "auto",
  keyPrefix: "ferry:",
  commandTimeoutMs: 1000,
  waitTimeoutMs: 200,
  leaseMs: 2000,
  aliveMs: 2000,
  zoneSpillMs: 100,
};

describe("a valid engine", () => {
  test("a url is enough", () => {
    assert.deepEqual(engineOf("url: redis://127.0.0.1:6379"), { ...defaults, url: "redis://127.0.0.1:6379" });
    const urls = [
      "redis://r",
      "rediss://r:6380/0",
      "redis://:p%40ss@[::1]:7000/15",
      "redis://ferry:hunter2@r.example:6379/",
      "REDIS://r",
    ];
    for (const url of urls) assert.equal(engineOf(`url: "${url}"`).url, url);
    assert.equal(engineOf("url: ${URL}", { URL: "redis://u:p%23@r" }).url, "redis://u:p%23@r");
    assert.equal(engineOf("url: rediss://r, tls: true").tls, true);
  });

  test("or nodes, with who to be there", () => {
    const { nodes, username, password, tls, url } = engineOf(
      'nodes: [redis-1:6379, "[::1]:7000"], username: ferry, password: ${PW}, tls: true, durability: replica',
      { PW: "hunter2" },
    );
    assert.deepEqual(nodes, [
      { host: "redis-1", port: 6379 },
      { host: "::1", port: 7000 },
    ]);
    assert.deepEqual([username, password, tls, url], ["ferry", "hunter2", true, undefined]);
  });

  test("the example's block, with its comment signs removed, is one", () => {
    const example = generateDocs().find(({ path }) => path === "ferry.example.yaml")!.text;
    const block = /^# engine:\n(?:# {3}.*\n)+/m.exec(example)![0].replaceAll(/^# /gm, "");
    const { config, problems = [] } = parseConfig(
      `${block.replace(/^( +)# url:/m, "$1url:")}${models}`,
      "x",
      {},
    );
    assert.equal(formatProblems(problems), "");
    assert.deepEqual(config!.engine, { ...defaults, url: "redis://127.0.0.1:6379" });
  });

  test("the bounds between times are the bounds", () => {
    engineOf("url: redis://r, waitTimeoutMs: 1000");
    engineOf("url: redis://r, leaseMs: 200, commandTimeoutMs: 100, waitTimeoutMs: 100");
  });
});

describe("a mistake", () => {
  const mistakes: readonly (readonly [string, RegExp])[] = [
    [
      "url: redis://r, nodes: [r:1]",
      /^engine\.nodes: url says where Redis is, and nodes says it again; keep one/,
    ],
    ["nodes: []", /^engine\.nodes: is empty; add at least one, for example redis-1:6379$/],
    ["nodes: [r:1, r:2, R:1]", /^engine\.nodes\[2\]: the same server as engine\.nodes\[0\]; keep one$/],
    ["nodes: [r:0]", /^engine\.nodes\[0\]: "r:0" is not host:port; write one like redis-1:6379/],
    ["nodes: [r]", /^engine\.nodes\[0\]: "r" is not host:port/],
    ["nodes: redis://r", /^engine\.nodes: a single value stands where a list belongs/],
    [
      "url: redis://r, password: x",
      /^engine\.password: is for nodes; with a url write it there: redis:\/\/USER/,
    ],
    ["url: redis://r, username: x", /^engine\.username: is for nodes; with a url write it there/],
    ["url: redis://r, tls: true", /^engine\.tls: is true, and the url says otherwise: rediss:\/\/ is TLS/],
    ["url: rediss://r, tls: false", /^engine\.tls: is false, and the url says otherwise/],
    ["nodes: [r:1], username: x", /^engine\.username: needs engine\.password beside it; add one, or remove/],
    [
      "nodes: [r:1], password: ${PW}",
      /^engine\.password: \$\{PW\} is not set; export it, or remove the line$/,
    ],
    [
      "url: redis://r, keyPrefix: 'a{b}:'",
      /^engine\.keyPrefix: .* may hold only 1 to 64 visible ASCII .* except \{ \}$/,
    ],
    ["url: redis://r, keyPrefix: 'a b'", /^engine\.keyPrefix: "a b" may hold only 1 to 64 visible/],
    ["url: redis://r, keyPrefix: ''", /^engine\.keyPrefix: "" is empty/],
    [`url: redis://r, keyPrefix: ${"x".repeat(65)}`, /^engine\.keyPrefix: .* is too long; write 1 to 64/],
    ["url: redis://r, durability: disk", /^engine\.durability: "disk" is not one of auto, replica, local/],
    ["url: redis://r, waitTimeoutMs: 0", /^engine\.waitTimeoutMs: 0 is too small; write 1 to 60,000$/],
    [
      "url: redis://r, waitTimeoutMs: 1001",
      /^engine\.waitTimeoutMs: waitTimeoutMs 1001 > commandTimeoutMs 1000: the connection would be closed/,
    ],
    [
      "url: redis://r, commandTimeoutMs: 1001",
      /^engine\.commandTimeoutMs: leaseMs 2000 < 2 × commandTimeoutMs 1001: .*; set leaseMs ≥ 2002 or lower/,
    ],
    [
      "url: redis://r, leaseMs: 1999",
      /^engine\.leaseMs: leaseMs 1999 < 2 × commandTimeoutMs 1000: one renewal/,
    ],
    ["url: redis://r, leaseMs: 2s", /^engine\.leaseMs: "2s" is not a number; write 2000 \(ms\)$/],
  ];
  for (const [settings, expected] of mistakes) {
    test(settings.slice(0, 80), () => assert.match(mistake(settings), expected));
  }

  test("in a url is said without the url", () => {
    const urls: readonly (readonly [string, RegExp])[] = [
      ["http://u:hunter2@r", /must begin with redis:\/\/ or rediss:\/\//],
      ["u:hunter2@r:6379", /must begin with redis:\/\//],
      ["redis://u:hunter2@", /names no server/],
      ["redis://u:hunter2#@r", /names no server; write .*, with %XX for special characters in the password/],
      ["redis://u:hunter2@r:0", /names no server/],
      ["redis://u:hunter2@r:70000", /names no server/],
      ["redis://u:hunter2@r/?timeout=5", /has options after \? or #/],
      ["redis://u:hunter2@r/hunter2", /has a path that is no database number/],
      ["redis://u:hunter2%@r", /holds a % in its user or password that begins no %XX; write %25/],
      ["redis://hunter2@r", /names a user without a password/],
      ["redis://u:hunter2 x@r", /is not a URL of at most 2048 visible ASCII characters/],
      [`redis://u:hunter2@${"r".repeat(2048)}`, /is not a URL of at most 2048/],
    ];
    for (const [url, expected] of urls) {
      const said = mistake(`url: "${url}"`);
      assert.match(said, /^engine\.url: the value /, url);
      assert.match(said, expected);
      assert.ok(!said.includes("hunter2"), said);
    }
    assert.match(mistake("url: 5"), /^engine\.url: the value is not a URL/);
    assert.ok(!mistake('nodes: [r:1], password: "hunter2 hunter2"').includes("hunter2"));
  });

  test("any value of any setting: an engine, or problems that name a setting of it", () => {
    const names = fc.constantFrom("url", "username", "password", ...Object.keys(defaults));
    const values = fc.oneof(fc.jsonValue({ maxDepth: 2 }), fc.webUrl(), fc.integer({ min: 0, max: 3000 }));
    fc.assert(
      fc.property(fc.array(fc.tuple(names, values), { maxLength: 4 }), (pairs) => {
        const engine = { kind: "redis", url: "redis://r", ...Object.fromEntries(pairs) };
        const loaded = parseConfig(`${stringify({ engine })}${models}`, "ferry.yaml", {});
        for (const { path, message } of loaded.problems ?? []) {
          assert.match(path, /^engine\b/);
          assert.match(message, /^[^\n]+$/);
        }
        const made = loaded.config?.engine;
        if (made?.kind === "redis") assert.equal(made.url === undefined, made.nodes.length > 0);
      }),
      { numRuns: 500 },
    );
  });
});
