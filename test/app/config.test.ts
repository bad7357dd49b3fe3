/** Config files: what is accepted, what is reported, and that nothing crashes or leaks. */
import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, describe, test } from "node:test";
import {
  demoConfig,
  formatProblems,
  loadConfig,
  parseConfig,
  type Loaded,
} from "../../src/app/config/load.ts";
import type { Config } from "../../src/app/config/config.ts";
import { padOf } from "../../src/app/dropins.ts";
import type { Pad } from "../../src/gateway/protocol/oip-pad.ts";

const folder = mkdtempSync(join(tmpdir(), "ferry-config-"));
after(() => rmSync(folder, { recursive: true }));
writeFileSync(join(folder, "model.py"), "def batchstring(inputs): return inputs\n");
writeFileSync(join(folder, "model.ts"), "export default (inputs: string[]) => inputs;\n");

const file = join(folder, "ferry.yaml");
const models = "models: [{ name: embed, backend: { kind: http, workers: [http://gpu-1:9000/infer] } }]\n";
/** A file with one model, to which settings of that model can be added. */
const withModel = (more: string) =>
  `models:\n  - name: embed\n    backend: { kind: http, workers: [http://gpu-1:9000/infer] }\n${more}`;

function parse(text: string, env: NodeJS.ProcessEnv = {}): Loaded {
  return parseConfig(text, file, env);
}
function valid(text: string, env?: NodeJS.ProcessEnv): Config {
  const loaded = parse(text, env);
  assert.equal(formatProblems(loaded.problems ?? []), "");
  return loaded.config!;
}
/** `path: message` of each problem. */
function problems(text: string, env?: NodeJS.ProcessEnv): string[] {
  const loaded = parse(text, env);
  assert.ok(loaded.problems !== undefined, `expected problems in:\n${text}`);
  return loaded.problems.map(({ path, message }) => `${path}: ${message}`);
}
function onlyProblem(text: string, env?: NodeJS.ProcessEnv): string {
  const found = problems(text, env);
  assert.equal(found.length, 1, found.join("\n"));
  return found[0]!;
}

describe("a valid file", () => {
  test("one model is enough; the rest has defaults", () => {
    const config = valid(models);
    assert.deepEqual(config.listen, { host: "127.0.0.1", port: 8080 });
    assert.deepEqual(config.admin, { listen: { host: "127.0.0.1", port: 8081 }, tls: false });
    assert.equal(config.tls, undefined);
    assert.deepEqual(config.engine, { kind: "memory" });
    assert.deepEqual(config.auth, { mode: "none", allowedHosts: [] });
    assert.equal(config.admission.mode, "predictive");
    assert.deepEqual(
      config.tiers.map((tier) => tier.name),
      ["enterprise", "paid", "free"],
    );
    assert.equal(config.limits.perUserPerMinute, undefined);
    assert.equal(config.tiers[0]?.ratePerMinute, undefined);
    const model = config.models[0]!;
    assert.deepEqual(model.timeouts, { queueMs: 2000, workerMs: 3000, totalMs: 4000 });
    assert.deepEqual([model.maxBatchSize, model.maxWaitMs, model.policy], [64, 50, "adaptive"]);
    assert.deepEqual(model.backend, {
      kind: "http",
      protocol: "batch",
      workers: ["http://gpu-1:9000/infer"],
      dnsMs: 5000,
      dnsServers: [],
      maxReplyBytes: 67_108_864,
      forwardAuthorization: false,
      tls: {},
    });
  });

  test("with auth.mode required everybody has a limit, unless the file gives another", () => {
    const config = valid(
      `auth: { mode: required, keysFile: k }\ntiers: { paid: {}, gold: {}, free: { ratePerMinute: 7 } }\n${models}`,
    );
    assert.equal(config.limits.perUserPerMinute, 1000);
    assert.deepEqual(
      config.tiers.map(({ ratePerMinute }) => ratePerMinute),
      [6000, undefined, 7],
    );
    const other = valid(`auth: { mode: required, keysFile: k }\nlimits: { perUserPerMinute: 5 }\n${models}`);
    assert.equal(other.limits.perUserPerMinute, 5);
  });

  test("the example of the specification is accepted as it stands", () => {
    const loaded = parse(specExample, { FERRY_ADMIN_TOKEN: "secret-token" });
    assert.equal(formatProblems(loaded.problems ?? []), "");
    assert.equal(loaded.config?.admin.token, "secret-token");
    assert.equal(loaded.config?.limits.perUserPerMinute, 1000);
    assert.deepEqual(loaded.warnings, []);
    assert.equal(loaded.config?.telemetry.otlpUrl, "http://127.0.0.1:4318/");
  });

  test("how rows are padded, with defaults and in full", () => {
    const model = "name: a, backend: { kind: grpc, workers: [grpc://g:1] }";
    const padOfModel = (more: string): Pad | undefined =>
      padOf(valid(`models: [{ ${model}${more} }]\n`).models[0]!);
    const nothing = { inputs: undefined, outputs: undefined, lengthsInput: undefined, classes: undefined };
    assert.equal(padOfModel(""), undefined);
    assert.deepEqual(padOfModel(", pad: {}"), { ...nothing, axis: 1, value: 0 });
    assert.deepEqual(padOfModel(", lengths: off, pad: { outputs: auto }"), { ...nothing, axis: 1, value: 0 });
    const full = "pad: { axis: 2, value: 1.5, inputs: [x], outputs: [y, z], lengthsInput: n }";
    assert.deepEqual(padOfModel(`, lengths: [8, 16], ${full}`), {
      axis: 2,
      value: 1.5,
      inputs: ["x"],
      outputs: ["y", "z"],
      lengthsInput: "n",
      classes: [8, 16],
    });
    assert.deepEqual(padOfModel(", pad: { outputs: none }")!.outputs, []);
  });

  test("paths start from the config file's folder", () => {
    const config = valid(`engine: { dataDir: data }
models:
  - { name: a, backend: { kind: python, function: model.py:batchstring, workers: 2, python: .venv/bin/python } }
  - { name: b, backend: { kind: module, function: ./model.ts } }
  - { name: c, backend: { kind: python, function: "model.py:batchstring" } }
`);
    assert.deepEqual(config.engine, { kind: "memory", dataDir: join(folder, "data") });
    const [a, b, c] = config.models.map((model) => model.backend);
    assert.ok(a?.kind === "python" && b?.kind === "module" && c?.kind === "python");
    assert.equal(a.function, `${join(folder, "model.py")}:batchstring`);
    assert.equal(a.python, join(folder, ".venv/bin/python"));
    assert.equal(b.function, join(folder, "model.ts"));
    assert.equal(c.python, "python3");
  });

  test("tiers keep their order", () => {
    const config = valid(`${models}tiers: { zeta: {}, alpha: {}, mid: { ratePerMinute: 10 } }\n`);
    assert.deepEqual(config.tiers, [{ name: "zeta" }, { name: "alpha" }, { name: "mid", ratePerMinute: 10 }]);
  });

  test("anchors and aliases work, an empty group means its defaults", () => {
    const config = valid(`
models:
  - name: a
    backend: &gpu { kind: simulated, workers: 2 }
    timeouts:
    cache: &keep { ttlMs: 5 }
  - { name: b, backend: *gpu, cache: *keep }
`);
    assert.deepEqual(config.models[0]?.backend, config.models[1]?.backend);
    assert.equal(config.models[1]?.cache.ttlMs, 5);
    assert.equal(config.models[0]?.timeouts.totalMs, 4000);
  });

  test("IPv6, any host and a free port are addresses", () => {
    const config = valid(`listen: "[::1]:0"\nadmin: { listen: localhost:0 }\n${models}`);
    assert.deepEqual(config.listen, { host: "::1", port: 0 });
    assert.deepEqual(config.admin.listen, { host: "localhost", port: 0 });
  });

  test("the demo is a simulated GPU on the default ports", () => {
    const config = demoConfig();
    assert.equal(config.telemetry.logLevel, "silent");
    assert.equal(demoConfig("info").telemetry.logLevel, "info");
    const [model] = config.models;
    assert.ok(model?.backend.kind === "simulated");
    assert.deepEqual([model.name, model.maxBatchSize], ["demo", 64]);
    assert.deepEqual([model.backend.workers, model.backend.baseMs, model.backend.perItemMs], [4, 100, 0]);
    assert.deepEqual([config.listen.port, config.admin.listen.port], [8080, 8081]);
  });
});

describe("${NAME}", () => {
  test("expands in block, flow and quoted values, with defaults, and reads numbers", () => {
    const config = valid(
      `listen: \${HOST}:\${PORT:-9000}
admin: { token: \${TOKEN}, listen: "\${ADMIN:-127.0.0.1:0}" }
zone: \${ZONE:-a{b,c[d}
models: [{ name: '\${NAME}', collapse: \${COLLAPSE}, maxBatchSize: \${SIZE}, backend: { kind: simulated } }]
`,
      { HOST: "127.0.0.1", TOKEN: "12345", NAME: "embed", COLLAPSE: "false", SIZE: "32", ZONE: "" },
    );
    assert.deepEqual(config.listen, { host: "127.0.0.1", port: 9000 });
    assert.equal(config.admin.token, "12345");
    assert.equal(config.zone, "a{b,c[d");
    assert.deepEqual([config.models[0]?.name, config.models[0]?.collapse], ["embed", false]);
    assert.equal(config.models[0]?.maxBatchSize, 32);
  });

  test("a value is text, never YAML, and $${ is a plain ${", () => {
    assert.equal(valid(`zone: \${ZONE}\n${models}`, { ZONE: "{a:1}#x" }).zone, "{a:1}#x");
    assert.equal(valid(`zone: $\${ZONE}\n${models}`).zone, "${ZONE}");
  });

  test("one that is not set is a problem that says what to do", () => {
    const text = `admin: { token: \${FERRY_ADMIN_TOKEN} }\n${models}`;
    assert.equal(
      onlyProblem(text),
      "admin.token: ${FERRY_ADMIN_TOKEN} is not set; export it, or remove the line (loopback admin needs no token)",
    );
    assert.match(onlyProblem(text, { FERRY_ADMIN_TOKN: "x" }), /did you mean FERRY_ADMIN_TOKN\?/);
    assert.match(onlyProblem(`zone: \${1x}\n${models}`), /^zone: .*write \$\{NAME\}/);
    assert.match(onlyProblem(`zone: "\${OPEN"\n${models}`), /^zone: .*write \$\{NAME\}/);
  });

  test("its place in the file is still true", () => {
    const loaded = parse(`admin: { token: \${LONG_NAME}, listen: nowhere }\n${models}`, { LONG_NAME: "x" });
    const [problem] = loaded.problems ?? [];
    assert.deepEqual([problem?.line, problem?.column, problem?.path], [1, 39, "admin.listen"]);
  });
});

describe("mistakes", () => {
  test("are all reported at once, in order, one line each", () => {
    const text = `listen: 127.0.0.1:8080
admin: { listen: 127.0.0.1:8081, token: \${FERRY_ADMIN_TOKEN} }
models:
  - name: embed
    maxBatchsize: 64
    backend: { kind: http, workers: [http://gpu-1:9000/infer] }
    timeouts: { queueMs: 2000, workerMs: 3000, totalMs: 3000 }
`;
    const shown = formatProblems(parseConfig(text, "ferry.yaml", {}).problems ?? []);
    assert.equal(
      shown,
      `ferry.yaml:2:41  admin.token                 \${FERRY_ADMIN_TOKEN} is not set; export it, or remove the line (loopback admin needs no token)
ferry.yaml:5:5   models[0].maxBatchsize      unknown setting; did you mean maxBatchSize?
ferry.yaml:7:57  models[0].timeouts.totalMs  totalMs 3000 < workerMs 3000 + maxWaitMs 50: nothing could be answered in time; set totalMs ≥ 3050 or lower workerMs
`,
    );
  });

  test("warnings do not stop the start", () => {
    const warned = (text: string) => {
      const loaded = parse(text);
      assert.equal(formatProblems(loaded.problems ?? []), "");
      return loaded.warnings.map(({ path, message }) => `${path}: ${message}`);
    };
    assert.deepEqual(warned(models), []);
    assert.match(
      warned(`limits: { drainMs: 4000 }\n${models}`)[0]!,
      /^limits\.drainMs: drainMs 4000 ≤ totalMs 4000/,
    );
    assert.match(
      warned(`limits: { maxQueued: 8 }\n${models}`)[0]!,
      /^limits\.maxQueued: .* no batch can ever be full/,
    );
    for (const name of ["maxBatchTokens", "maxBatchBytes"]) {
      const model = `models: [{ name: a, backend: { kind: simulated }, ${name}:`;
      assert.deepEqual(warned(`${model} 63 }]\n`), [
        `models[0].${name}: ${name} 63 < maxBatchSize 64, and each task counts as 1 or more: ` +
          `no batch can ever hold 64; raise ${name}, or lower maxBatchSize`,
      ]);
      assert.deepEqual(warned(`${model} 64 }]\n`), []);
    }
    assert.match(
      warned("models: [{ name: a, backend: { kind: simulated, baseMs: 3000 } }]\n")[0]!,
      /^models\[0\]\.backend\.baseMs: a full batch takes 3000 ms/,
    );
    assert.match(
      warned("models: [{ name: a, backend: { kind: simulated, perTokenMs: 50 } }]\n")[0]!,
      /^models\[0\]\.backend\.perTokenMs: a full batch takes at least 3300 ms/,
    );
    const drop = (protocol: string, url: string) =>
      warned(`models: [{ name: a, backend: { kind: http, protocol: ${protocol}, workers: ['${url}'] } }]\n`);
    for (const [protocol, url, whole] of [
      ["openai-embeddings", "http://g:1/v1", "http://g:1/v1/embeddings"],
      ["openai-completions", "http://g:1", "http://g:1/v1/completions"],
      ["kserve-v1", "http://g:1/v1/models/m", "http://g:1/v1/models/m:predict"],
      ["oip-v2", "http://g:1", "http://g:1/v2/models/m/infer"],
    ] as const) {
      const why = "batches go to this very URL; write all of it: ";
      const example = whole.replace(/models\/m\b/, "models/NAME");
      assert.deepEqual(drop(protocol, url), [`models[0].backend.workers[0]: ${why}${example}`]);
      assert.deepEqual(drop(protocol, whole), []);
    }
    assert.deepEqual(drop("tei", "http://g:1"), []);
    assert.deepEqual(warned(`admission: { mode: off }\n${models}`), []);
    assert.deepEqual(warned(`admission: { mode: predictive }\n${models}`), []);
    const tokens = "auth: { mode: required, jwt: { jwksUrl: http://id.example/j, issuer: i, audience: a } }";
    assert.match(warned(`${tokens}\n${models}`)[0]!, /^auth\.jwt\.jwksUrl: is not https:/);
    assert.match(warned(`auth: { keysFile: k }\n${models}`)[0]!, /^auth\.mode: is none: keys and tokens/);
    const redis = "engine: { kind: redis, url: redis://r }";
    assert.match(
      warned(`auth: { mode: required }\n${redis}\n${models}`)[0]!,
      /^auth\.mode: a dump of Redis would hold/,
    );
    assert.deepEqual(warned(withModel("    cache: { ttlMs: 3600000 }\n")), []);
  });

  test("a secret never appears, whatever is wrong with it", () => {
    const secret = "hunter2";
    const wrong = [
      `admin: { token: "hunter2 with blanks" }\n${models}`,
      `admin: hunter2\n${models}`,
      `admin: { tokn: hunter2 }\n${models}`,
      `admin: { token: [hunter2] }\n${models}`,
      `admin: { token: hunter2, token: hunter2 }\n${models}`,
      `requestLog: "postgres://u:hunter2@db/x"\n${models}`,
      `listen: \${SECRET}\n${models}`,
      withModel("    policy: ${SECRET}\n"),
      withModel("    maxBatchSize: ${SECRET}\n"),
      "models: [{ name: a, backend: { kind: http, workers: [http://u:hunter2@gpu/] } }]\n",
      "models: [{ name: a, backend: { kind: http, workers: ['http://u:hunter2@gpu bad'] } }]\n",
      "models: [{ name: a, backend: { kind: http, workers: ['ftp://gpu/?key=hunter2'] } }]\n",
      "models: [{ name: a, backend: { kind: http, workers: http://u:hunter2@gpu/ } }]\n",
      `admin:\n  token: "hunter2\n${models}`,
      `admin:\n\ttoken: hunter2\n${models}`,
      `admin: token: hunter2\n${models}`,
      `admin: { token: @hunter2 }\n${models}`,
      `admin: { token: [hunter2 }\n${models}`,
      `admin: { token: !hunter2 x }\n${models}`,
      `admin: { token: "hunter2\\q" }\n${models}`,
    ];
    for (const text of wrong) {
      const found = problems(text, { SECRET: secret }).join("\n");
      assert.ok(!found.includes(secret), `${text}\n${found}`);
    }
  });
});

describe("files and syntax", () => {
  const broken: readonly (readonly [string, string, RegExp])[] = [
    ["nothing", "", /is empty; it needs at least one model/],
    ["only a comment", "# ferry\n", /is empty/],
    ["null", "~\n", /is empty/],
    ["a list", "- a\n", /is not a map of settings/],
    ["a word", "hello\n", /is not a map of settings/],
    ["a tab", "admin:\n\tlisten: x\n", /a tab is used to indent/],
    ["two on one line", "admin: listen: x\n", /two `name: value` on one line/],
    ["an open bracket", "models: [\n", /a bracket is not closed/],
    ["an open quote", 'zone: "a\n', /a character is missing/],
    ["two documents", "zone: a\n---\nzone: b\n", /a second document begins/],
    ["a tag", "zone: !x a\n", /are tags, which are not used/],
    ["deep nesting", "[".repeat(20_000), /nested too deeply|bracket/],
    [
      "many aliases",
      `a: &a [1]\nb: [${Array(101).fill("*a").join(", ")}]\n`,
      /holds 101 aliases; 100 is the most/,
    ],
  ];
  for (const [name, text, expected] of broken) {
    test(name, () => {
      const found = problems(text);
      assert.ok(found.length <= 5);
      assert.match(found[0]!, expected);
    });
  }

  test("a billion laughs cost nothing", () => {
    const rounds = Array.from(
      { length: 9 },
      (_, i) => `l${i + 1}: &l${i + 1} [${Array(9).fill(`*l${i}`).join(",")}]`,
    );
    assert.ok(problems(`l0: &l0 [lol]\n${rounds.join("\n")}\nmodels: *l9\n`).length > 0);
    assert.ok(problems("models: &m [*m, *m]\n").length > 0);
  });

  test("a flood of problems is cut off when shown", () => {
    const text = Array.from({ length: 500 }, (_, i) => `unknown${i}: 1`).join("\n");
    const lines = formatProblems(parse(`${text}\n${models}`).problems ?? [])
      .trim()
      .split("\n");
    assert.equal(lines.length, 51);
    assert.equal(lines.at(-1), "… and 450 more");
  });

  test("a file that cannot be used is one clear line", () => {
    const write = (name: string, data: string | Buffer) => {
      writeFileSync(join(folder, name), data);
      return join(folder, name);
    };
    const cases: readonly (readonly [string, RegExp])[] = [
      [join(folder, "gone.yaml"), /there is no such file/],
      [join(folder, "model.py", "x.yaml"), /there is no such file/],
      [folder, /is a folder; name the file in it/],
      [write("latin.yaml", Buffer.from([0x7a, 0x3a, 0x20, 0xe9, 0x0a])), /is not UTF-8 text/],
      [write("utf16.yaml", Buffer.from("\ufeffzone: a", "utf16le")), /is not UTF-8 text/],
      [write("nul.yaml", "zone: \0\n"), /holds NUL bytes/],
      [write("huge.yaml", "#".repeat(2 ** 20 + 1)), /is larger than 1 MiB/],
    ];
    for (const [path, expected] of cases) {
      const { problems = [] } = loadConfig(path, {});
      assert.equal(problems.length, 1);
      assert.match(formatProblems(problems), expected);
    }
    assert.ok(loadConfig(write("bom.yaml", `\ufeff${models}`), {}).config !== undefined);
    assert.ok(loadConfig(write("crlf.yaml", models.replaceAll("\n", "\r\n")), {}).config !== undefined);
  });
});

const specExample = `
listen: 127.0.0.1:8080
admin: { listen: 127.0.0.1:8081, token: \${FERRY_ADMIN_TOKEN} }
engine: { kind: memory, dataDir: ./ferry-data }
zone: a
api: { defaultMode: sync }
models:
  - name: embed
    backend: { kind: http, protocol: batch, workers: [http://gpu-1:9000/infer, http://gpu-2:9000/infer] }
    maxBatchSize: 64
    maxWaitMs: 50
    policy: adaptive
    timeouts: { queueMs: 2000, workerMs: 3000, totalMs: 4000 }
    retry: { max: 3, baseMs: 50, maxMs: 1000 }
    cache: { ttlMs: 300000, scope: tenant }
    collapse: true
tiers:
  enterprise: { ratePerMinute: 60000 }
  paid: { ratePerMinute: 6000 }
  free: { ratePerMinute: 1000 }
auth: { mode: none }
limits: { maxBodyBytes: 1048576, maxQueued: 10000, perUserPerMinute: 1000, headersTimeoutMs: 10000, requestTimeoutMs: 30000, drainMs: 15000 }
admission: { mode: predictive, targetUtilization: 0.7 }
results: { ttlMs: 600000, evictAfterRead: false }
requestLog: { url: postgres://ferry@db/ferry }
telemetry: { otlpUrl: http://127.0.0.1:4318, sample: 0.01, logLevel: info }
`;
