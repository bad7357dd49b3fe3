/**
 * The table of settings: every name in `ferry.yaml`, with kind, bounds, default and description.
 *
 * The only definition of a setting: `Config` is inferred from it, `load.ts` reads files by it, and
 * `scripts/generate-docs.ts` generates `ferry.example.yaml` and `docs/configuration.md`. A range is [default, min,
 * max]. Names end in their unit (`maxWaitMs`, `maxBodyBytes`). Rules between settings are in `check.ts`.
 *
 * Add a setting only if two users would set it differently; anything else is a constant beside its code.
 */
import { PROTOCOL_NAMES } from "../../gateway/protocol/protocol.ts";
import {
  address,
  boolean,
  bytes,
  choice,
  days,
  dnsServer,
  fractionalMs,
  functionIn,
  group,
  grpcUrl,
  integer,
  lengthClass,
  list,
  ms,
  named,
  number,
  oneOf,
  optional,
  optionalGroup,
  path,
  pattern,
  perMinute,
  postgresUrl,
  program,
  redisUrl,
  required,
  server,
  share,
  text,
  tokens,
  url,
  urlPath,
  workerUrl,
  type SettingFields,
  type Leaf,
  type OneOf,
  type Setting,
  type SettingValue,
  type Variants,
} from "./kinds.ts";

const second = 1000;
const minute = 60 * second;
const hour = 60 * minute;
const day = 24 * hour;
/** Node's timers hold at most 24.8 days and fire at once beyond that. */
const longestTtl = 24 * day;
const mebibyte = 2 ** 20;
const gibibyte = 1024 * mebibyte;

// ── Engine ──────────────────────────────────────────────────────────────────────────────────────

const memory = group("In this process.", {
  dataDir: optional(
    path(
      "./ferry-data",
      "Folder where tasks, results and dead letters survive a restart. Not set: memory only.",
    ),
  ),
});

const redis = group("In Redis 7.0 or newer, or Valkey: one server, a primary with replicas, or a Cluster.", {
  url: optional(
    redisUrl("redis://127.0.0.1:6379", "The server, or any node of a Cluster; set this or `nodes`."),
  ),
  nodes: list("Nodes of a Cluster, or a primary and its replicas.", server("redis-1:6379", "One server."), {
    min: 0,
    max: 1000,
  }),
  username: optional(text("ferry", 128, "User for `nodes`. Not set: the default user.", { secret: true })),
  password: optional(text("${REDIS_PASSWORD}", 512, "Password for `nodes`.", { secret: true })),
  tls: boolean(false, "Whether to use TLS to `nodes`; in a `url`, rediss:// says so."),
  durability: choice(
    ["auto", "replica", "local"],
    "When a task is accepted: `replica` once a replica has it, `local` once the primary has it, `auto` replica while one is connected.",
  ),
  keyPrefix: text("ferry:", 64, "Prefix of every key; processes that share tasks have the same one.", {
    without: ["{", "}"],
  }),
  commandTimeoutMs: ms([second, 10, minute], "How long Redis may take to answer before Ferry reconnects."),
  // Not 0: WAIT takes that as "for ever".
  waitTimeoutMs: ms([200, 1, minute], "How long a write may wait for a replica."),
  leaseMs: ms(
    [2 * second, 100, 10 * minute],
    "How long a batcher that stopped responding keeps its tasks before others run them.",
  ),
  aliveMs: ms(
    [2 * second, 30, 10 * minute],
    "How long a batcher may be silent before others take over its workers; on a Cluster, longer than a failover.",
  ),
  zoneSpillMs: ms(
    [100, 0, minute],
    "How long a task waits for a worker in its own `zone` before any other takes it.",
  ),
});

// ── Backends ────────────────────────────────────────────────────────────────────────────────────

const workers = integer([1, 1, 1024], "How many workers; each runs one batch at a time.");
const maxReplyBytes = bytes(
  [64 * mebibyte, 1024, 2 * gibibyte],
  "The largest answer accepted from a worker for one batch.",
);
const startTimeoutMs = ms(
  [5 * minute, 100, hour],
  "How long a worker may take to become ready, loading the model included.",
);
const workerModel = (example: string) =>
  optional(text(example, 256, "The model's name at the workers. Not set: the name that clients use."));

/** Common to http and grpc workers. */
const networkBackend = {
  dnsMs: ms(
    [5 * second, 100, hour],
    "How often the names of `dns://` workers are resolved; an address that is missing three times is removed.",
  ),
  dnsServers: list(
    "DNS servers to ask instead of the system's, such as a Consul agent.",
    dnsServer("127.0.0.1:8600", "One server."),
    { min: 0, max: 8 },
  ),
  maxReplyBytes,
  authorization: optional(
    text("Bearer ${WORKER_KEY}", 4096, "Value of the `Authorization` header sent to the workers.", {
      secret: true,
      words: true,
    }),
  ),
  tls: group("TLS to workers whose address begins with https:// or grpcs://.", {
    caFile: optional(
      path("./workers-ca.crt", "CA certificates that sign the workers' (PEM). Not set: the system's."),
    ),
    certFile: optional(path("./ferry.crt", "Client certificate that Ferry shows to the workers (PEM).")),
    keyFile: optional(path("./ferry.key", "Private key of `certFile` (PEM).")),
    serverName: optional(
      text("gpu.internal", 253, "Name in the workers' certificates. Not set: the host in their address."),
    ),
  }),
};

const backends = {
  http: group("A batch API over HTTP.", {
    protocol: choice(
      ["batch", ...PROTOCOL_NAMES],
      'What the workers speak. `batch`: POST {"inputs":[…]} answers {"outputs":[…]}.',
    ),
    workers: list(
      "Full endpoint URLs, one per GPU. `dns://NAME:PORT/PATH` stands for one worker at each address of the name.",
      workerUrl(url("http://gpu-1:9000/infer", ["http", "https"], "One worker."), "https"),
      { min: 1, max: 1024, single: true },
    ),
    model: workerModel("BAAI/bge-small-en"),
    forwardAuthorization: boolean(
      false,
      "Send the client's own `Authorization` to the workers; only with `auth.mode: none` and the memory engine.",
    ),
    healthPath: optional(
      urlPath("/health", "Path where a worker answers 2xx while it is well, with its load if it knows."),
    ),
    ...networkBackend,
  }),
  grpc: group("Servers of the Open Inference Protocol v2 over gRPC, such as Triton and MLServer.", {
    workers: list(
      "Addresses, one per GPU; grpcs:// for TLS. `dns://NAME:PORT` stands for one worker at each address of the name.",
      workerUrl(grpcUrl("grpc://gpu-1:8001", "One worker."), "grpcs"),
      { min: 1, max: 1024, single: true },
    ),
    model: workerModel("resnet50"),
    version: optional(
      text("'1'", 64, "Model version where a client asks for none. Not set: the worker chooses."),
    ),
    ...networkBackend,
  }),
  python: group("A Python function `def batch(inputs): return outputs`; one process per worker.", {
    function: functionIn("model.py:batchstring", "The function, in a file that stays as it is.", {
      endings: [".py"],
      nameRequired: true,
    }),
    workers,
    python: program("python3", "The interpreter: a name on PATH, or a path such as .venv/bin/python."),
    inputs: choice(
      ["json", "int32", "int64", "float32"],
      "What the function gets: parsed JSON, or one array of such numbers for each input, which is much cheaper.",
    ),
    gpus: optional(
      text(
        "0,1,2,3",
        1024,
        'GPUs to share out, as in "0,1,2,3": each worker sees one (CUDA_VISIBLE_DEVICES).',
      ),
    ),
    startTimeoutMs,
    maxReplyBytes,
  }),
  module: group("A JavaScript or TypeScript function; one thread per worker.", {
    function: functionIn("model.ts:batch", "The function; without a name, the file's default export.", {
      endings: [".ts", ".mts", ".js", ".mjs", ".cjs"],
      nameRequired: false,
    }),
    workers,
    startTimeoutMs,
  }),
  simulated: group("A simulated GPU, for trying things out.", {
    workers,
    baseMs: fractionalMs(
      [100, 0, minute],
      "A batch of n inputs, the longest of l tokens, takes baseMs + n × perItemMs + n × l × perTokenMs.",
    ),
    perItemMs: fractionalMs([0, 0, minute], "What each input adds to its batch's time."),
    perTokenMs: fractionalMs(
      [0, 0, minute],
      "What each token of the padded batch adds: every input counts as long as the longest.",
    ),
  }),
};

// ── Models ──────────────────────────────────────────────────────────────────────────────────────

const scaling = group("How many workers there should be (docs/operations.md).", {
  min: integer([1, 0, 10_000], "The fewest workers to ask for."),
  max: integer([32, 1, 10_000], "The most workers to ask for."),
  queueDepth: integer(
    [100, 1, 1_000_000],
    "Queued tasks above which one more worker is asked for; above five times this, three more.",
  ),
  coldStartMs: ms(
    [minute, 0, hour],
    "How long a new worker takes until its first batch; arrivals are forecast this far ahead.",
  ),
  coolDownMs: ms([5 * minute, 0, day], "How long after any change before workers are removed."),
  apply: boolean(false, "Whether Ferry starts and stops workers itself: python, module and simulated ones."),
  webhook: optional(
    url(
      "http://scaler:9090/ferry",
      ["http", "https"],
      "URL that gets the wanted number as JSON whenever it changes.",
    ),
  ),
  command: optional(
    program(
      "./scale.sh",
      "Program to run whenever the number changes, with FERRY_MODEL and FERRY_DESIRED set.",
    ),
  ),
});

const model = group("One model: its backend, its batches, its limits.", {
  name: required(text("embed", 128, "What clients write in `model`.")),
  backend: oneOf("How Ferry talks to the workers of this model.", backends),
  maxBatchSize: integer([64, 1, 10_000], "The most inputs in one batch."),
  maxBatchTokens: optional(
    tokens(
      [16_384, 1, 1_000_000_000],
      "The most tokens in one batch, by an estimate (docs/tuning.md). A larger input runs alone. Not set: no limit.",
    ),
  ),
  maxBatchBytes: optional(
    bytes(
      [mebibyte, 1, 2 * gibibyte],
      "The most bytes of input in one batch, as JSON text. A larger input runs alone. Not set: no limit.",
    ),
  ),
  maxWaitMs: ms([50, 0, minute], "The longest an input waits for others while a worker is free."),
  lengths: list(
    "Batches of inputs of similar length: `auto` where the model is seen to pad (default), `off`, or the lengths that it pads to (docs/tuning.md).",
    lengthClass("One length, ascending."),
    { min: 0, max: 64, single: true },
  ),
  pad: optionalGroup(
    "Tensors of different length in one batch (docs/protocols.md). Not set: only rows of equal shape share one.",
    {
      axis: integer([1, 1, 31], "The dimension in which rows may differ; dimension 0 is the batch's."),
      value: number(
        [0, -1e9, 1e9],
        "What rows are filled up with, for example the padding token; inputs with `mask` in their name get 0.",
      ),
      inputs: list(
        "The inputs to pad. Not set: all that have the dimension; BYTES are never padded.",
        text("input_ids", 256, "One input."),
        { min: 0, max: 64 },
      ),
      outputs: list(
        "The outputs to cut back to each row's length, `none`, or `auto`: those seen to follow the padded length (default).",
        text("last_hidden_state", 256, "One output, or auto, or none."),
        { min: 0, max: 64, single: true },
      ),
      lengthsInput: optional(
        text("input_lengths", 256, "Name of an input to add with each row's length, of shape [rows, 1]."),
      ),
    },
  ),
  policy: choice(
    ["adaptive", "latency", "eco", "fixed"],
    "When a batch leaves: for latency and fill, for latency, for full batches, or by size and time only.",
  ),
  pipeline: choice(
    ["auto", 1, 2],
    "Batches at one worker: 2 sends the next while one runs, `auto` does so where the worker queues and it pays.",
  ),
  timeouts: group("Time limits; they hold also while every worker is busy.", {
    queueMs: ms([2 * second, 1, hour], "The longest a task waits for a worker."),
    workerMs: ms([3 * second, 1, hour], "The longest one call to a worker may take."),
    totalMs: ms([4 * second, 1, hour], "The longest from arrival to answer; at least workerMs + maxWaitMs."),
  }),
  retry: group("Retries when a worker fails: exponential backoff with jitter, then dead letter.", {
    max: integer([3, 0, 100], "Retries after the first attempt."),
    baseMs: ms([50, 0, minute], "The first backoff; it doubles each time."),
    maxMs: ms([second, 0, hour], "The longest backoff."),
  }),
  cache: group("Reusing the result of an identical input.", {
    ttlMs: ms([5 * minute, 0, longestTtl], "How long a result is reused."),
    scope: choice(
      ["tenant", "shared", "off"],
      "Who shares results: one tenant's requests, everyone, or nobody.",
    ),
  }),
  collapse: boolean(true, "Whether identical inputs in flight run once and every caller gets the answer."),
  scaling,
  protocols: list(
    "Protocols that clients may use besides Ferry's own API; `backend.protocol` is always among them.",
    choice(PROTOCOL_NAMES, "One protocol."),
    { min: 0, max: PROTOCOL_NAMES.length },
  ),
  passthrough: boolean(
    false,
    "Whether requests without a route here go to a worker unchanged, streams included.",
  ),
  deny: list(
    "Patterns: a request with a string that matches one is refused, batched or not (docs/security.md).",
    pattern("'(?i)ignore (all )?previous instructions'", "One pattern."),
    { min: 0, max: 100 },
  ),
  health: group("When a worker is left alone for a while.", {
    failures: integer([3, 1, 1000], "Distinct inputs that fail in a row until a worker is taken out."),
    ejectMs: ms(
      [second, 10, hour],
      "How long a worker is taken out the first time; doubles each time, up to 30 times this.",
    ),
    barMs: ms([10 * second, 0, hour], "How long to reject an input that crashed a worker; 0 disables."),
    askMs: ms([second, 10, hour], "How often to check workers (`backend.healthPath`; ModelReady over gRPC)."),
  }),
});

// ── Who may call ────────────────────────────────────────────────────────────────────────────────

/** All asymmetric: a server that verifies tokens must not be able to issue them. */
const JWT_ALGORITHMS = [
  "RS256",
  "RS384",
  "RS512",
  "PS256",
  "PS384",
  "PS512",
  "ES256",
  "ES384",
  "ES512",
  "EdDSA",
] as const;

const jwt = optionalGroup("JSON Web Tokens. Not set: none are accepted.", {
  jwksUrl: optional(url("https://id.example/jwks.json", ["https", "http"], "URL of the public keys (JWKS).")),
  publicKeyFile: optional(path("./jwt.pem", "Or the public key itself (PEM).")),
  algorithm: choice(JWT_ALGORITHMS, "The one algorithm that is accepted, whatever a token says."),
  issuer: required(text("https://id.example", 512, "The `iss` that a token must carry.")),
  audience: required(text("ferry", 512, "The `aud` that a token must carry.")),
  userClaim: text("sub", 128, "The claim that names the user."),
  tierClaim: text("tier", 128, "The claim that names the tier."),
  defaultTier: optional(text("free", 64, "Tier of a token without that claim. Not set: it is refused.")),
  maxLifeMs: ms([day, minute, 366 * day], "Tokens that expire later than this from now are refused."),
});

const auth = group("Who may call.", {
  mode: choice(
    ["none", "required"],
    "`none`: everybody is the tenant `anonymous`; `required`: an API key or a JSON Web Token.",
  ),
  anonymousTier: optional(
    text("enterprise", 64, "Tier of everybody while `auth.mode` is none. Not set: the first."),
  ),
  allowedHosts: list(
    "With `auth.mode: none` on loopback: host names besides localhost that requests may use, such as a proxy's.",
    text("api.example.com", 253, "One name, without a port."),
    { min: 0, max: 100 },
  ),
  keysFile: optional(
    path("./keys.json", "File with the API keys' digests; with the redis engine they are in Redis instead."),
  ),
  secret: optional(
    text(
      "${FERRY_KEY_SECRET}",
      512,
      "Key of the digests. Not set: Ferry makes one and keeps it beside them.",
      { min: 32, secret: true },
    ),
  ),
  jwt,
});

// ── The whole ───────────────────────────────────────────────────────────────────────────────────

export const settings = group("Everything Ferry can be told.", {
  listen: address("127.0.0.1:8080", "Where clients connect."),
  tls: optionalGroup("TLS for clients. Not set: plain HTTP.", {
    certFile: required(path("./tls.crt", "The certificate with its intermediates (PEM).")),
    keyFile: required(path("./tls.key", "Its private key (PEM).")),
    minVersion: choice(["TLSv1.2", "TLSv1.3"], "The oldest TLS version that is accepted."),
  }),
  grpc: group("gRPC for clients: the Open Inference Protocol v2 (docs/protocols.md).", {
    listen: optional(
      address("127.0.0.1:8082", "Where gRPC clients connect, with `tls` if set. Not set: nowhere."),
    ),
    maxMessageBytes: bytes([4 * mebibyte, 1024, gibibyte], "The largest message of a client."),
  }),
  admin: group("The listener for operators: health, metrics, dashboard, dead letters.", {
    listen: address("127.0.0.1:8081", "Where operators connect; keep it away from clients."),
    tls: boolean(false, "Whether it uses the certificate of `tls` too."),
    token: optional(
      text(
        "${FERRY_ADMIN_TOKEN}",
        512,
        "Token to send as `Authorization: Bearer …`; required unless on loopback.",
        { secret: true },
      ),
    ),
  }),
  engine: oneOf("Where accepted tasks and their results live.", { memory, redis }, "memory"),
  zone: {
    ...text("", 64, "Where this process runs: on the redis engine, workers of the same zone come first."),
    example: "a",
  },
  api: group("How clients are answered.", {
    defaultMode: choice(["sync", "async"], "`async` answers 202 at once unless the client asks to wait."),
  }),
  models: list("The models that clients can name.", model, { min: 1, max: 256 }),
  tiers: named(
    "Priority tiers; earlier ones are served first.",
    {
      ratePerMinute: optional(
        perMinute(
          [6000, 1, 1_000_000_000],
          "Requests of the whole tier. Not set: with `auth.mode: required` 60000 for a tier named enterprise, 6000 for paid, 1000 for free; otherwise no limit.",
        ),
      ),
    },
    { max: 16, fallback: ["enterprise", "paid", "free"] },
  ),
  auth,
  limits: group("Limits on what clients can make this process hold.", {
    maxBodyBytes: bytes([mebibyte, 1, gibibyte], "The largest request body."),
    maxQueued: integer([10_000, 1, 10_000_000], "The most tasks queued at once; more are refused."),
    maxQueuedBytes: bytes(
      [256 * mebibyte, mebibyte, 64 * gibibyte],
      "The most bytes of queued inputs. The same limit applies to bodies being read, and to answers not yet taken.",
    ),
    maxInputs: integer(
      [2048, 1, 65_536],
      "The most inputs in one request of a drop-in protocol; each is a task.",
    ),
    maxConnections: integer([20_000, 1, 1_000_000], "The most open connections from clients."),
    perUserPerMinute: optional(
      perMinute(
        [1000, 1, 1_000_000_000],
        "Requests of one tenant. Not set: 1000 with `auth.mode: required`, otherwise no limit.",
      ),
    ),
    headersTimeoutMs: ms([10 * second, 1, hour], "How long a client may take to send the header."),
    requestTimeoutMs: ms([30 * second, 1, hour], "How long a client may take to send a whole request."),
    keepAliveTimeoutMs: ms(
      [75 * second, 1, hour],
      "How long an idle connection stays open; set it longer than a load balancer's.",
    ),
    maxPassthrough: integer(
      [256, 1, 100_000],
      "The most requests passed through at once (`passthrough`, streams).",
    ),
    passthroughIdleMs: ms(
      [minute, 1, hour],
      "How long an answer that is passed through may make no progress.",
    ),
    drainMs: ms([15 * second, 0, hour], "How long accepted work may continue after a signal to stop."),
    lingerMs: ms(
      [second, 0, minute],
      "How long idle connections stay open after a signal to stop, each until its next answer; at most half of drainMs.",
    ),
  }),
  admission: group("What is refused when more arrives than the workers can serve.", {
    mode: choice(
      ["predictive", "thresholds", "off"],
      "`predictive`: what would miss its deadline; `thresholds`: by load and queue depth; `off`: only what does not fit the queue.",
    ),
    targetUtilization: share(
      [0.7, 0.05, 1],
      "The share of capacity that quotas and autoscaling plan with; `thresholds` sheds above it.",
    ),
  }),
  results: group("Results kept for polling.", {
    ttlMs: ms([10 * minute, second, longestTtl], "How long a result is kept after its task ended."),
    evictAfterRead: boolean(false, "Whether to delete a result once its owner has read it."),
    maxBytes: bytes(
      [128 * mebibyte, mebibyte, 64 * gibibyte],
      "The most memory for results, cached ones included; the tenant with the most loses its oldest first.",
    ),
  }),
  deadLetters: group("Tasks that failed for good, kept for an operator.", {
    max: integer([10_000, 0, 1_000_000], "How many are kept; the oldest go first."),
    ttlMs: ms([7 * day, second, longestTtl], "How long they are kept."),
  }),
  requestLog: group("A row for every request, written off its critical path.", {
    url: optional(
      postgresUrl("${POSTGRES_URL}", "PostgreSQL to write to. Not set: only the latest are kept, in memory."),
    ),
    recent: integer([10_000, 0, 1_000_000], "How many of the latest requests are kept in memory; 0: none."),
    retentionDays: days([30, 0, 36_500], "How long rows are kept; 0: for ever."),
  }),
  telemetry: group("Metrics, traces and logs.", {
    metrics: boolean(true, "Whether /metrics is kept, for Prometheus."),
    dashboard: boolean(true, "Whether the admin listener serves the dashboard."),
    otlpUrl: optional(
      url(
        "http://127.0.0.1:4318",
        ["http", "https"],
        "OTLP/HTTP collector for traces, without /v1/traces. Not set: no traces.",
      ),
    ),
    sample: share(
      [0.01, 0, 1],
      "Share of requests that are traced; those traced by their caller always are.",
    ),
    logLevel: choice(["debug", "info", "warn", "error", "silent"], "JSON lines on stderr.", "info"),
  }),
});

// ── Types ───────────────────────────────────────────────────────────────────────────────────────

export type { Address } from "./kinds.ts";
export type Config = SettingValue<typeof settings>;
export type ModelConfig = Config["models"][number];
export type BackendConfig = ModelConfig["backend"];
export type HttpBackendConfig = Extract<BackendConfig, { readonly kind: "http" }>;
export type GrpcBackendConfig = Extract<BackendConfig, { readonly kind: "grpc" }>;
export type SimulatedBackendConfig = Extract<BackendConfig, { readonly kind: "simulated" }>;
export type MemoryEngineConfig = Extract<Config["engine"], { readonly kind: "memory" }>;
export type RedisEngineConfig = Extract<Config["engine"], { readonly kind: "redis" }>;
export type JwtConfig = NonNullable<Config["auth"]["jwt"]>;

/** Everything, requests only, or batches only. */
export type Role = "all" | "gateway" | "batcher";

/** An error or a warning about a config file. */
export interface Problem {
  readonly file: string;
  /** From 1; undefined: the whole file. */
  readonly line?: number;
  readonly column?: number;
  /** Such as `models[0].maxWaitMs`; "" for the whole file. */
  readonly path: string;
  /** What is wrong and what to do, in one line; never a secret. */
  readonly message: string;
}

// ── The table as flat rows ──────────────────────────────────────────────────────────────────────

export interface SettingRow {
  /** `[]`: each of a list; `NAME`: each of a named map. */
  readonly path: string;
  readonly leaf: Leaf<unknown>;
  /** The list's description if the leaf is its element. */
  readonly doc: string;
  /** The variants that have it; empty: all. */
  readonly kinds: readonly string[];
}

function rowsOf(fields: SettingFields, prefix: string): SettingRow[] {
  return Object.entries(fields).flatMap(([name, setting]) => rowsAt(setting, prefix + name));
}

function rowsAt(setting: Setting, at: string): SettingRow[] {
  switch (setting.type) {
    case "leaf":
      return [{ path: at, leaf: setting, doc: setting.doc, kinds: [] }];
    case "group":
      return rowsOf(setting.fields, `${at}.`);
    case "named":
      return rowsOf(setting.fields, `${at}.NAME.`);
    case "list": {
      const each = setting.each as Setting;
      if (each.type !== "leaf") return rowsAt(each, `${at}[]`);
      return [{ path: `${at}[]`, leaf: required(each), doc: setting.doc, kinds: [] }];
    }
    case "one-of":
      return [...rowsAt(kindLeaf(setting), `${at}.kind`), ...variantRows(setting, at)];
  }
}

/** A setting shared by several variants is one row. */
function variantRows({ variants }: OneOf<Variants>, at: string): SettingRow[] {
  const rows: SettingRow[] = [];
  for (const [kind, { fields }] of Object.entries(variants)) {
    for (const row of rowsOf(fields, `${at}.`)) {
      const same = rows.findIndex(({ path, doc }) => path === row.path && doc === row.doc);
      if (same === -1) rows.push({ ...row, kinds: [kind] });
      else rows[same] = { ...rows[same]!, kinds: [...rows[same]!.kinds, kind] };
    }
  }
  return rows;
}

/** The `kind` of a one-of, which the table holds only as its variants' names. */
function kindLeaf({ doc, variants, fallback }: OneOf<Variants>): Leaf<unknown> {
  const leaf = choice(Object.keys(variants), doc, fallback);
  return fallback === undefined ? required(leaf) : leaf;
}

export const settingRows: readonly SettingRow[] = rowsOf(settings.fields, "");
