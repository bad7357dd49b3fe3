/**
 * The table of settings: every name that `ferry.yaml` may hold, with kind, unit, bounds and default.
 *
 * It is the only place where a setting is written down; `engine` is long and stands in
 * `settings-engine.ts`, what decides who enters in `settings-entry.ts`, what is told in
 * `settings-telemetry.ts`, gRPC in `settings-grpc.ts`. The loader reads files by it, `ferry.example.yaml` and `docs/configuration.md` are
 * generated from it, and `tsc` checks it against `Config`. A name ends in its unit (`maxWaitMs`,
 * `maxBodyBytes`). Rules between two settings are in `app/config/check.ts`.
 */
import { PROTOCOL_NAMES } from "../../gateway/protocol/protocol.ts";
import { address } from "./setting-addresses.ts";
import {
  boolean,
  choice,
  group,
  integer,
  list,
  named,
  number,
  optional,
  text,
  type Value,
} from "./setting-kinds.ts";
import { pattern } from "./setting-patterns.ts";
import { backends } from "./settings-backends.ts";
import { engines } from "./settings-engine.ts";
import { admission, auth, edgeTls } from "./settings-entry.ts";
import { grpcDoor } from "./settings-grpc.ts";
import { scaling } from "./settings-scaling.ts";
import { requestLog, telemetry } from "./settings-telemetry.ts";

const second = 1000;
const minute = 60 * second;
const hour = 60 * minute;
const day = 24 * hour;
/** A timer of Node holds 24.8 days at most and fires at once beyond that. */
const longestTtl = 24 * day;
const mebibyte = 2 ** 20;

const model = group("One model: its backend, its batches, its limits.", {
  name: text("What clients write in `model`.", { maxLength: 128, example: "embed" }),
  backend: backends,
  maxBatchSize: integer("The most tasks in one batch.", { default: 64, min: 1, max: 10_000 }),
  maxBatchTokens: optional(
    integer(
      "The most tokens in one batch, by an estimate (docs/tuning.md); a task with more rides alone. Left out: no budget.",
      { min: 1, max: 1_000_000_000, unit: "tokens", example: 16_384 },
    ),
  ),
  maxBatchBytes: optional(
    integer(
      "The most bytes of input in one batch, as JSON text; a task with more rides alone. Left out: no budget.",
      {
        min: 1,
        max: 2048 * mebibyte,
        unit: "bytes",
        example: mebibyte,
      },
    ),
  ),
  maxWaitMs: integer("The longest a task waits for others while a worker is free.", {
    default: 50,
    min: 0,
    max: minute,
    unit: "ms",
  }),
  policy: choice(
    "When a batch leaves: for latency and fill, for latency, for full batches, or by size and time only.",
    ["adaptive", "latency", "eco", "fixed"],
    "adaptive",
  ),
  pipeline: choice(
    "Batches in a worker's hands: 2 gives it the next while it runs one; auto where it queues and that pays.",
    ["auto", 1, 2],
    "auto",
  ),
  timeouts: group("How long things may take; enforced also while every worker is busy.", {
    queueMs: timeout("From accepted to on its way to a worker.", 2 * second),
    workerMs: timeout("One call to a worker.", 3 * second),
    totalMs: timeout("From arrival to answer; at least workerMs + maxWaitMs.", 4 * second),
  }),
  retry: group("What happens when a worker fails: exponential backoff with jitter, then dead letter.", {
    max: integer("Retries after the first attempt.", { default: 3, min: 0, max: 100 }),
    baseMs: integer("The first backoff; it doubles each time.", {
      default: 50,
      min: 0,
      max: minute,
      unit: "ms",
    }),
    maxMs: integer("The longest backoff.", { default: second, min: 0, max: hour, unit: "ms" }),
    budget: number("Calls that only repeat, as a share of first calls: a dying worker causes no storm.", {
      default: 0.1,
      min: 0,
      max: 1,
      unit: "share",
    }),
  }),
  cache: group("Reusing the outcome of an identical input.", {
    ttlMs: integer("How long an outcome is reused.", {
      default: 5 * minute,
      min: 0,
      max: longestTtl,
      unit: "ms",
    }),
    scope: choice("Who may share outcomes.", ["tenant", "shared", "off"], "tenant"),
  }),
  collapse: boolean("Identical inputs in flight run once, and every caller gets the answer.", true),
  scaling,
  protocols: list(
    "What clients may speak besides Ferry's own API; that of backend.protocol is always among them.",
    choice("One protocol.", PROTOCOL_NAMES, "openai-embeddings"),
    { min: 0, max: PROTOCOL_NAMES.length },
  ),
  passthrough: boolean(
    "Whether requests that no route here answers go to a worker as they came, streams included.",
    false,
  ),
  deny: list(
    "Requests that hold a string which fits one of these are refused, batched or not (docs/security.md); default: none.",
    pattern("One pattern.", "'(?i)ignore (all )?previous instructions'"),
    { min: 0, max: 100 },
  ),
  health: group("When a worker is left alone for a while.", {
    failures: integer("Distinct inputs that fail in a row until it is down.", {
      default: 3,
      min: 1,
      max: 1000,
    }),
    ejectMs: integer("How long it stays down the first time; doubles each time.", {
      default: second,
      min: 10,
      max: hour,
      unit: "ms",
    }),
    maxEjectMs: integer("The longest it stays down between two tries.", {
      default: 30 * second,
      min: 10,
      max: day,
      unit: "ms",
    }),
    barMs: integer("How long an input that ended workers is refused untried; 0: it is not.", {
      default: 10 * second,
      min: 0,
      max: hour,
      unit: "ms",
    }),
    askMs: integer(
      "Where workers are asked how they are (backend.healthPath, backend.askReady): the time between two questions.",
      {
        default: second,
        min: 10,
        max: hour,
        unit: "ms",
      },
    ),
    askTimeoutMs: timeout("How long a worker may take to answer such a question.", 2 * second),
  }),
});

const tierFields = {
  weight: integer("Has no effect yet: the order of the tiers and fixed floors decide who is served.", {
    default: 1,
    min: 1,
    max: 1000,
  }),
  ratePerMinute: optional(
    integer(
      "Requests of the whole tier. Left out: with `auth.mode: required` 60000 for a tier named enterprise, 6000 for " +
        "paid, 1000 for free; otherwise no limit.",
      {
        min: 1,
        max: 1_000_000_000,
        unit: "per minute",
        example: 6000,
      },
    ),
  ),
};

export const settings = group("Everything Ferry can be told.", {
  listen: address("Where clients connect.", "127.0.0.1:8080"),
  tls: edgeTls,
  grpc: grpcDoor,
  admin: group("The listener for operators: health, metrics, dead letters.", {
    listen: address("Keep it away from clients.", "127.0.0.1:8081"),
    tls: boolean("Whether it uses the certificate of `tls` too.", false),
    token: optional(
      text("Asked as `Authorization: Bearer …`; required unless the listener is on loopback.", {
        maxLength: 512,
        secret: true,
        example: "${FERRY_ADMIN_TOKEN}",
      }),
    ),
  }),
  engine: engines,
  zone: text("Where this process runs: on the redis engine, workers of the same zone come first.", {
    maxLength: 64,
    default: "",
    example: "a",
  }),
  api: group("How clients are answered.", {
    defaultMode: choice(
      "`async` answers 202 at once unless the client says otherwise.",
      ["sync", "async"],
      "sync",
    ),
    maxPollMs: integer("The longest a result is waited for with `?wait=`.", {
      default: 30 * second,
      min: 0,
      max: 10 * minute,
      unit: "ms",
    }),
  }),
  models: list("The models that clients can name.", model, { min: 1, max: 256 }),
  tiers: named("Who is served first: in the order written here.", tierFields, {
    max: 16,
    fallback: [
      { name: "enterprise", weight: 8 },
      { name: "paid", weight: 4 },
      { name: "free", weight: 1 },
    ],
  }),
  auth,
  limits: group("Bounds on what clients can make this process hold.", {
    maxBodyBytes: integer("The largest request body.", {
      default: mebibyte,
      min: 1,
      max: 1024 * mebibyte,
      unit: "bytes",
    }),
    maxQueued: integer("Tasks queued at once; more are refused.", {
      default: 10_000,
      min: 1,
      max: 10_000_000,
    }),
    maxQueuedBytes: integer(
      "Bytes of their inputs and parameters; more are refused. Also bounds, each by itself, bodies being read and answers not taken.",
      {
        default: 256 * mebibyte,
        min: mebibyte,
        max: 64 * 1024 * mebibyte,
        unit: "bytes",
      },
    ),
    maxInputs: integer("Inputs in one request of a drop-in protocol; each is a task.", {
      default: 2048,
      min: 1,
      max: 65_536,
    }),
    maxHeaders: integer("Header fields in one request.", { default: 100, min: 10, max: 2000 }),
    maxConnections: integer("Open connections from clients.", { default: 20_000, min: 1, max: 1_000_000 }),
    perUserPerMinute: optional(
      integer("Requests of one tenant. Left out: 1000 with `auth.mode: required`, otherwise no limit.", {
        min: 1,
        max: 1_000_000_000,
        unit: "per minute",
        example: 1000,
      }),
    ),
    headersTimeoutMs: timeout("How long a client may take to send the header.", 10 * second),
    requestTimeoutMs: timeout("How long a client may take to send all of a request.", 30 * second),
    keepAliveTimeoutMs: timeout(
      "How long an idle connection stays open; longer than a load balancer's.",
      75 * second,
    ),
    maxPassthrough: integer(
      "Requests that are passed through at once (`passthrough`, streams); users share them.",
      {
        default: 256,
        min: 1,
        max: 100_000,
      },
    ),
    passthroughIdleMs: timeout("How long nothing may move of an answer that is passed through.", minute),
    drainMs: integer("How long accepted work may go on after a signal to stop.", {
      default: 15 * second,
      min: 0,
      max: hour,
      unit: "ms",
    }),
    lingerMs: integer(
      "After a signal to stop: how long connections that clients keep open are served, each to its next answer; half of `drainMs` at most.",
      { default: second, min: 0, max: minute, unit: "ms" },
    ),
    processAnswerMs: integer(
      "With `--processes`: one that says nothing for so long during a reload is taken for hung, and nothing is changed.",
      { default: 5 * second, min: second, max: hour, unit: "ms" },
    ),
  }),
  admission,
  results: group("Outcomes kept for polling.", {
    ttlMs: integer("How long after the end of its task.", {
      default: 10 * minute,
      min: second,
      max: longestTtl,
      unit: "ms",
    }),
    evictAfterRead: boolean("Forget an outcome once its owner has it.", false),
    maxBytes: integer(
      "The most memory for kept outcomes, those of the cache included; the tenant with the most loses its oldest first.",
      {
        default: 128 * mebibyte,
        min: mebibyte,
        max: 64 * 1024 * mebibyte,
        unit: "bytes",
      },
    ),
  }),
  deadLetters: group("Tasks that will not be tried again, kept for a person.", {
    max: integer("How many; the oldest go first.", { default: 10_000, min: 0, max: 1_000_000 }),
    ttlMs: integer("How long.", { default: 7 * day, min: second, max: longestTtl, unit: "ms" }),
  }),
  requestLog,
  telemetry,
});

/** What a valid file becomes, before `app/config/load.ts` fills in what depends on other settings. */
export type Settings = Value<typeof settings>;

function timeout(doc: string, fallback: number) {
  return integer(doc, { default: fallback, min: 1, max: hour, unit: "ms" });
}
