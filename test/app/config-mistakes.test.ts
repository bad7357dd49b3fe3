/** One mistake, one line: what each kind of mistake is answered with. */
import assert from "node:assert/strict";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, describe, test } from "node:test";
import { stringify } from "yaml";
import { settingRows } from "../../src/app/config/config.ts";
import { parseConfig, type Loaded } from "../../src/app/config/load.ts";
import { REMOVED } from "../../src/app/config/removed.ts";

const folder = mkdtempSync(join(tmpdir(), "ferry-config-"));
after(() => rmSync(folder, { recursive: true }));
writeFileSync(join(folder, "model.py"), "def batchstring(inputs): return inputs\n");

function parse(text: string, env: NodeJS.ProcessEnv = {}): Loaded {
  return parseConfig(text, join(folder, "ferry.yaml"), env);
}

const models = "models: [{ name: embed, backend: { kind: http, workers: [http://gpu-1:9000/infer] } }]\n";
/** A file with one model, to which settings of that model can be added. */
const withModel = (more: string) =>
  `models:\n  - name: embed\n    backend: { kind: http, workers: [http://gpu-1:9000/infer] }\n${more}`;

/** A file whose workers get clients' credentials. */
const forwarding = (more: string) =>
  `models: [{ name: a, backend: { kind: http, workers: [http://g/x], forwardAuthorization: true${more} } }]\n`;

/** A file with one model of tensors, whose rows are padded. */
const padded = (pad: string, more = "maxBatchSize: 8") =>
  `models: [{ name: a, backend: { kind: grpc, workers: [grpc://g:1] }, pad: { ${pad} }, ${more} }]\n`;

const mistakes: readonly (readonly [string, RegExp])[] = [
  ["models: []\n", /^models: is empty; add a model/],
  ["zone: a\n", /^models: is missing; add a model/],
  [`listn: x\n${models}`, /^listn: unknown setting; did you mean listen\?$/],
  [`maxWaitMs: 5\n${models}`, /^maxWaitMs: unknown setting here; models\[\]\.maxWaitMs exists$/],
  [`qqqqq: 5\n${models}`, /^qqqqq: unknown setting; docs\/configuration\.md lists them$/],
  [`zone: a\nzone: b\n${models}`, /^zone: is written twice; keep one$/],
  [`listen: 8080\n${models}`, /^listen: 8080 is not host:port; write one like/],
  [`listen: 127.0.0.1:70000\n${models}`, /^listen: .* is not host:port/],
  [`listen: 300.0.0.1:80\n${models}`, /^listen: .* is not host:port/],
  [`listen: ":8080"\n${models}`, /^listen: .* is not host:port/],
  [`zone: [a]\n${models}`, /^zone: a list stands where one value belongs/],
  [`zone: 5\n${models}`, /^zone: 5 is not text; put it in quotes$/],
  [`zone:\n${models}`, /^zone: has no value; write one, or remove the line$/],
  [`limits: 5\n${models}`, /^limits: a single value stands where a map/],
  [
    `limits: { maxBodyBytes: 1MB }\n${models}`,
    /^limits\.maxBodyBytes: "1MB" is not a number; write 1048576 \(bytes\)$/,
  ],
  [withModel("    maxWaitMs: 2s\n"), /^models\[0\]\.maxWaitMs: "2s" is not a number; write 2000 \(ms\)$/],
  [withModel("    maxWaitMs: 0.5\n"), /is not a whole number$/],
  [withModel("    maxWaitMs: .inf\n"), /is not a number/],
  [withModel("    maxBatchSize: 0\n"), /^models\[0\]\.maxBatchSize: 0 is too small; write 1 to 10,000$/],
  [
    withModel("    maxBatchTokens: 0\n"),
    /^models\[0\]\.maxBatchTokens: 0 is too small; write 1 to 1,000,000,000$/,
  ],
  [withModel("    maxBatchTokens: 0.5\n"), /^models\[0\]\.maxBatchTokens: 0.5 is not a whole number$/],
  [
    withModel("    maxBatchBytes: 1MB\n"),
    /^models\[0\]\.maxBatchBytes: "1MB" is not a number; write 1048576 \(bytes\)$/,
  ],
  [
    `maxBatchTokens: 5\n${models}`,
    /^maxBatchTokens: unknown setting here; models\[\]\.maxBatchTokens exists$/,
  ],
  [
    withModel("    pad: { axis: 1 }\n"),
    /^models\[0\]\.pad: only tensors can be padded: the backend must be grpc, or http with protocol oip-v2/,
  ],
  [padded("axis: 0"), /^models\[0\]\.pad\.axis: 0 is too small; write 1 to 31$/],
  [padded("value: x"), /^models\[0\]\.pad\.value: "x" is not a number$/],
  [padded("outputs: [y, none]"), /^models\[0\]\.pad\.outputs: auto and none stand alone/],
  [
    padded("axis: 1", "lengths: [16, 32]"),
    /^models\[0\]\.pad\.outputs: with a list of lengths Ferry cannot see/,
  ],
  [
    padded("axis: 1", "maxBatchSize: 1"),
    /^models\[0\]\.pad: maxBatchSize is 1, so that rows are never padded/,
  ],
  [withModel("    policy: adaptve\n"), /"adaptve" is not one of .*; did you mean adaptive\?$/],
  [withModel("    collapse: yes\n"), /"yes" is neither true nor false$/],
  [
    withModel("    deny: [one, two, '(a']\n"),
    /^models\[0\]\.deny\[2\]: "\(a" has a \( that is never closed$/,
  ],
  [
    "models: [{ name: a, passthrough: true, backend: { kind: simulated } }]\n",
    /^models\[0\]\.passthrough: needs workers that are reached by HTTP; backend\.kind is simulated/,
  ],
  [
    `auth: { mode: required, keysFile: ./k.json }\n${forwarding("")}`,
    /^models\[0\]\.backend\.forwardAuthorization: clients have one Authorization/,
  ],
  [
    `engine: { kind: redis, url: "redis://r:6379" }\n${forwarding("")}`,
    /^models\[0\]\.backend\.forwardAuthorization: .* never in Redis; use engine\.kind memory/,
  ],
  [
    forwarding(", authorization: Bearer x"),
    /^models\[0\]\.backend\.forwardAuthorization: .* keep one of them$/,
  ],
  [withModel("    deny: [5]\n"), /^models\[0\]\.deny\[0\]: 5 is not text; put it in single quotes$/],
  [withModel("    deny: ['(?=a)b']\n"), /^models\[0\]\.deny\[0\]: .* \(\?i\) goes in front/],
  [withModel("    deny: ['.*']\n"), /^models\[0\]\.deny\[0\]: ".*" fits every text/],
  [
    withModel("    deny: ['a{900}', 'b{900}', 'c{900}']\n"),
    /^models\[0\]\.deny: the patterns need 2703 states together, more than 2000; use fewer or simpler$/,
  ],
  [
    withModel("    maxWaitMs: 2000\n    timeouts: { workerMs: 1000 }\n"),
    /^models\[0\]\.maxWaitMs: maxWaitMs 2000 ≥ timeouts\.queueMs 2000/,
  ],
  [
    withModel("    timeouts: { workerMs: 3951 }\n"),
    /^models\[0\]\.timeouts\.workerMs: totalMs 4000 < workerMs 3951/,
  ],
  [withModel("    retry: { maxMs: 10 }\n"), /^models\[0\]\.retry\.maxMs: maxMs 10 < baseMs 50/],
  [
    withModel("  - name: embed\n    backend: { kind: simulated }\n"),
    /^models\[1\]\.name: embed is also the name of models\[0\]/,
  ],
  [
    "models: [{ name: a b, backend: { kind: simulated } }]\n",
    /^models\[0\]\.name: "a b" may hold only 1 to 128 visible/,
  ],
  [
    `models: [{ name: ${"x".repeat(129)}, backend: { kind: simulated } }]\n`,
    /too long; write 1 to 128 visible/,
  ],
  [
    "models: [{ backend: { kind: simulated } }]\n",
    /^models\[0\]\.name: is missing; add one, for example embed$/,
  ],
  ["models: [{ name: a }]\n", /^models\[0\]\.backend: is missing; add one, for example \{ kind: http/],
  [
    "models: [{ name: a, backend: {} }]\n",
    /^models\[0\]\.backend\.kind: is missing; write one of http, grpc, python/,
  ],
  ["models: [{ name: a, backend: { kind: htp } }]\n", /"htp" is not one of .*; did you mean http\?$/],
  ["models: [{ name: a, backend: { kind: grpc } }]\n", /backend\.workers: is missing; add at least one/],
  [
    "models: [{ name: a, backend: { kind: grpc, workers: ['http://gpu-1:8001'] } }]\n",
    /must begin with grpc:\/\/ or grpcs:/,
  ],
  ["models: [{ name: a, backend: { kind: grpc, workers: ['grpc://gpu-1'] } }]\n", /names no port/],
  [
    "models: [{ name: a, backend: { kind: grpc, workers: ['grpc://gpu-1:8001/x'] } }]\n",
    /has something behind its port/,
  ],
  [
    "models: [{ name: a, backend: { kind: http } }]\n",
    /^models\[0\]\.backend\.workers: is missing; add at least one$/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: 4 } }]\n",
    /workers\[0\]: 4 is not a full URL; write one like http:\/\/gpu-1:9000\/infer$/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: dns://10.0.0.7:9000/infer } }]\n",
    /^models\[0\]\.backend\.workers\[0\]: "dns:\/\/10\.0\.0\.7:9000\/infer" does not name a host; write one like dns:/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: dns+http://gpu:9000/infer } }]\n",
    /workers\[0\]: .* must begin with dns:\/\/ or dns\+https:\/\/$/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: 'dns://u:p@gpu:9000/infer' } }]\n",
    /workers\[0\]: the URL holds credentials, which would be logged with it/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: [dns://gpu:9000/infer, dns://GPU:9000/infer] } }]\n",
    /workers\[1\]: the same worker as models\[0\]\.backend\.workers\[0\]/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: 'dns://gpu:9000/infer', tls: { serverName: x } } }]\n",
    /workers\[0\]: is not https:\/\/, and tls is set: inputs would go there unencrypted/,
  ],
  [
    "models: [{ name: a, backend: { kind: grpc, workers: dns://gpu } }]\n",
    /workers\[0\]: "dns:\/\/gpu" names no port/,
  ],
  [
    "models: [{ name: a, backend: { kind: grpc, workers: dns://gpu:8001/x } }]\n",
    /workers\[0\]: "dns:\/\/gpu:8001\/x" has something behind its port/,
  ],
  [
    "models: [{ name: a, backend: { kind: simulated, workers: [b] } }]\n",
    /workers: a list stands where one value belongs/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: [gpu-1] } }]\n",
    /workers\[0\]: "gpu-1" is not a full URL/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: [ftp://x/] } }]\n",
    /must begin with http:\/\/ or https:\/\//,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: [http://g/x, http://G:80/x] } }]\n",
    /workers\[1\]: the same worker as models\[0\]\.backend\.workers\[0\]/,
  ],
  [
    "grpc: { listen: '127.0.0.1:8080' }\nmodels: [{ name: a, backend: { kind: simulated } }]\n",
    /^grpc\.listen: listen and grpc\.listen are both on port 8080; give one of them another port$/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, protocol: tie, workers: [http://g] } }]\n",
    /"tie" is not one of batch, openai-embeddings, .*did you mean tei/,
  ],
  [
    "models: [{ name: a, protocols: [tei], backend: { kind: http, protocol: ollama, workers: [http://g] } }]\n",
    /tei cannot be spoken to clients while the workers speak ollama; remove it$/,
  ],
  [
    "models: [{ name: a, backend: { kind: python, function: gone.py:f } }]\n",
    /"gone\.py:f" names a file that is not there: /,
  ],
  [
    "models: [{ name: a, backend: { kind: python, function: model.py } }]\n",
    /is not file:function; write one like model\.py:batchstring$/,
  ],
  [
    `admin: { listen: 127.0.0.1:8080 }\n${models}`,
    /^admin\.listen: listen and admin\.listen are both on port 8080/,
  ],
  [`listen: 0.0.0.0:8081\n${models}`, /^listen: listen and admin\.listen are both on port 8081/],
  [
    `admin: { listen: 0.0.0.0:8081 }\n${models}`,
    /^admin\.listen: anyone who reaches the port could .*; set admin\.token/,
  ],
  [
    `auth: { anonymousTier: gold }\n${models}`,
    /^auth\.anonymousTier: gold is not one of tiers: enterprise, paid, free$/,
  ],
  [`auth: { mode: required }\n${models}`, /^auth\.mode: nobody could enter; add auth\.keysFile/],
  [
    `auth: { mode: required, jwt: { jwksUrl: "https://a/b", audience: a } }\n${models}`,
    /^auth\.jwt\.issuer: is missing; add one, for example https/,
  ],
  [
    `auth: { jwt: { jwksUrl: "https://a/b", publicKeyFile: a, issuer: a, audience: a } }\n${models}`,
    /^auth\.jwt\.publicKeyFile: jwksUrl says where/,
  ],
  [`auth: { jwt: { issuer: a, audience: b } }\n${models}`, /^auth\.jwt: has no key to check with/],
  [
    `auth: { jwt: { jwksUrl: "https://a/b", issuer: a, audience: a, defaultTier: x } }\n${models}`,
    /^auth\.jwt\.defaultTier: x is not one of tiers: enterprise, paid, free$/,
  ],
  [`auth: { secret: short }\n${models}`, /^auth\.secret: the value is too short; write 32 to 512/],
  [`tls: { certFile: a }\n${models}`, /^tls\.keyFile: is missing; add one/],
  [`tls: { keyFile: a }\n${models}`, /^tls\.certFile: is missing; add one/],
  [`admin: { tls: true }\n${models}`, /^admin\.tls: needs the certificate of tls/],
  [
    "models: [{ name: a, backend: { kind: http, workers: [http://g/i], tls: { caFile: ca } } }]\n",
    /^models\[0\]\.backend\.workers\[0\]: is not https:\/\/, and tls is set/,
  ],
  [
    "models: [{ name: a, backend: { kind: http, workers: [http://g/i], healthPath: health } }]\n",
    /^models\[0\]\.backend\.healthPath: "health" is not a path on the worker/,
  ],
  [
    `engine: { kind: redis }\n${models}`,
    /^engine\.url: is missing; add url: redis:\/\/HOST:6379, or nodes: \[/,
  ],
  [
    `engine: { url: redis://r }\n${models}`,
    /^engine\.url: kind memory has no such setting, only redis; write kind: redis, or remove it$/,
  ],
  [
    `engine: { kind: redis, url: redis://r, dataDir: x }\n${models}`,
    /^engine\.dataDir: kind redis has no such setting, only memory; write kind: memory, or remove it$/,
  ],
  [
    `engine: { kind: reddis }\n${models}`,
    /^engine\.kind: "reddis" is not one of memory, redis; did you mean redis\?$/,
  ],
  [`engine: redis\n${models}`, /^engine: a single value stands where a map with a kind belongs$/],
  [`engine: { kind: }\n${models}`, /^engine\.kind: is missing; write one of memory, redis$/],
  [
    "models: [{ name: a, backend: { kind: simulated, startTimeoutMs: 5 } }]\n",
    /startTimeoutMs: kind simulated has no such setting, only python, module; change the kind, or remove it$/,
  ],
  [`tiers: { "a b": {} }\n${models}`, /^tiers\.a b: is no name; use 1 to 64 letters/],
  [`tiers: {}\n${models}`, /^tiers: is empty; add at least one/],
  [
    `limits: { headersTimeoutMs: 40000 }\n${models}`,
    /^limits\.headersTimeoutMs: headersTimeoutMs 40000 > requestTimeoutMs 30000/,
  ],
  [
    `limits: { maxBodyBytes: 300000000 }\n${models}`,
    /^limits\.maxBodyBytes: maxBodyBytes 300000000 > maxQueuedBytes 268435456/,
  ],
  [`results: *gone\n${models}`, /^results: alias \*gone points to nothing/],
  [`<<: { zone: a }\n${models}`, /^<<: merging maps is not supported/],
];

describe("a setting that was removed says what applies now", () => {
  for (const path of REMOVED.keys()) {
    test(path, () => {
      assert.ok(!settingRows.some((row) => row.path === path || row.path.startsWith(`${path}.`)));
      const config: Record<string, unknown> = {
        models: [{ name: "m", backend: { kind: "http", workers: ["http://g/x"] } }],
        ...(path.startsWith("engine.") && { engine: { kind: "redis", url: "redis://r" } }),
        ...(path.startsWith("tls.") && { tls: { certFile: "a", keyFile: "b" } }),
        ...(path.startsWith("auth.jwt.") && {
          auth: { mode: "required", jwt: { jwksUrl: "https://a/b", issuer: "i", audience: "a" } },
        }),
      };
      const at = path.replace("[]", ".0").replace("NAME", "free").split(".");
      const last = at.pop()!;
      const parent = at.reduce((map, key) => (map[key] ??= {}) as Record<string, unknown>, config);
      parent[last] = 1;
      const { problems = [] } = parse(stringify(config));
      assert.deepEqual(
        problems.map((problem) => problem.path),
        [path.replace("[]", "[0]").replace("NAME", "free")],
      );
      assert.match(problems[0]!.message, /^was removed: [^;].*; delete the line$/);
    });
  }
});

describe("one mistake is one line", () => {
  for (const [text, expected] of mistakes) {
    test(
      text.replace(models, "").replace(withModel(""), "").trim().slice(0, 90).replaceAll("\n", " "),
      () => {
        const { problems = [] } = parse(text);
        const found = problems.map(({ path, message }) => `${path}: ${message}`);
        assert.equal(found.length, 1, found.join("\n"));
        assert.match(found[0]!, expected);
      },
    );
  }
});
