/** What two configs differ in, as people are told. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { diffConfigs } from "../../src/app/config/diff.ts";
import { parseConfig } from "../../src/app/config/load.ts";
import type { Config } from "../../src/app/config/config.ts";

function configOf(text: string): Config {
  const { config, problems } = parseConfig(text, "ferry.yaml", {});
  assert.deepEqual(problems, undefined);
  return config;
}

const embed = (more = ""): string =>
  `{ name: embed, backend: { kind: http, workers: [http://a:9000/infer, http://b:9000/infer] }${more} }`;
const other = "{ name: other, backend: { kind: simulated, workers: 2 } }";
const base = (models = embed(), more = ""): Config => configOf(`models: [${models}]\n${more}`);

function changes(before: Config, after: Config): readonly string[] {
  const { changed, needRestart } = diffConfigs(before, after);
  assert.deepEqual(needRestart, []);
  return changed;
}

describe("what can change", () => {
  test("the same is no change", () => assert.deepEqual(changes(base(), base()), []));

  test("a model's rules, each by its path", () => {
    const after = base(embed(", maxBatchSize: 32, policy: eco, retry: { max: 1 }, deny: [bad]"));
    assert.deepEqual(changes(base(), after).toSorted(), [
      "models[embed].deny +bad",
      "models[embed].maxBatchSize 64 → 32",
      "models[embed].policy adaptive → eco",
      "models[embed].retry.max 3 → 1",
    ]);
  });

  test("models that come and go, whatever their order", () => {
    assert.deepEqual(changes(base(), base(`${other}, ${embed()}`)), [
      "models[other] added (simulated, 2 workers)",
    ]);
    assert.deepEqual(changes(base(`${other}, ${embed()}`), base()), ["models[other] removed"]);
  });

  test("workers by address", () => {
    const after = base(embed().replace("http://b:9000/infer", "http://c:9000/infer"));
    assert.deepEqual(changes(base(), after), [
      "models[embed].backend.workers +http://c:9000/infer −http://b:9000/infer",
    ]);
  });

  test("workers by number, and another kind of backend as one change", () => {
    assert.deepEqual(changes(base(other), base(other.replace("2", "5"))), [
      "models[other].backend.workers 2 → 5",
    ]);
    const grpc = "{ name: other, backend: { kind: grpc, workers: [grpc://a:1] } }";
    assert.deepEqual(changes(base(other), base(grpc)), ["models[other].backend simulated → grpc"]);
  });

  test("limits, rates, bounds, the log level", () => {
    const after = base(
      embed(),
      `limits: { maxQueued: 9, perUserPerMinute: 5 }
tiers: { enterprise: { ratePerMinute: 7 }, paid: {}, free: {} }
admission: { mode: "off" }
results: { ttlMs: 5000 }
telemetry: { logLevel: warn }
`,
    );
    const before = base(embed(), "tiers: { enterprise: {}, paid: {}, free: {} }\n");
    assert.deepEqual(changes(before, after).toSorted(), [
      "admission.mode predictive → off",
      "limits.maxQueued 10000 → 9",
      "limits.perUserPerMinute none → 5",
      "results.ttlMs 600000 → 5000",
      "telemetry.logLevel info → warn",
      "tiers[enterprise].ratePerMinute none → 7",
    ]);
  });
});

describe("what needs a restart", () => {
  for (const [text, told] of [
    ["listen: 127.0.0.1:9", /^listen\.port 8080 → 9$/],
    ["admin: { listen: 127.0.0.1:9 }", /^admin\.listen\.port 8081 → 9$/],
    ["engine: { kind: redis, url: redis://u:pass@h:1 }", /^engine memory → redis$/],
    ["zone: a", /^zone .*→ a$/],
    ["tiers: { only: {} }", /^tiers enterprise, paid, free → only$/],
    ["grpc: { listen: 127.0.0.1:9 }", /^grpc\.listen none → 127\.0\.0\.1:9$/],
    ["limits: { maxConnections: 9 }", /^limits\.maxConnections \d+ → 9$/],
    ["telemetry: { metrics: false }", /^telemetry\.metrics true → false$/],
  ] as const) {
    test(text, () => {
      const { needRestart } = diffConfigs(base(), base(embed(), text));
      assert.equal(needRestart.length, 1, String(needRestart));
      assert.match(needRestart[0]!, told);
    });
  }
});

describe("secrets", () => {
  const secret = "s3cr3t-value-that-is-long-enough-for-everybody";
  const after = base(
    `{ name: embed, backend: { kind: http, authorization: "Bearer ${secret}", workers: ["http://a:9000/infer?key=${secret}"] },
      scaling: { webhook: "https://hooks.example/${secret}" } }`,
    `auth: { mode: required, keysFile: keys.json, secret: ${secret} }
admin: { token: ${secret} }
requestLog: { url: "postgres://u:${secret}@h/d" }
telemetry: { otlpUrl: "http://h:4318/${secret}" }
`,
  );

  test("never show, neither as what was nor as what will be", () => {
    for (const diff of [diffConfigs(base(), after), diffConfigs(after, base())]) {
      const text = [...diff.changed, ...diff.needRestart].join("\n");
      assert.doesNotMatch(text, new RegExp(secret));
      assert.match(text, /models\[embed\]\.backend\.authorization changed/);
      assert.match(text, /admin\.token changed/);
    }
  });
});
