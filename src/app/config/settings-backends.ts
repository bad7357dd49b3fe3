/** The part of the table that says who runs the batches: one group for each kind of backend. */
import { PROTOCOL_NAMES } from "../../gateway/protocol/protocol.ts";
import { url, urlPath, workerUrl } from "./setting-addresses.ts";
import {
  boolean,
  choice,
  functionIn,
  group,
  integer,
  list,
  number,
  oneOf,
  optional,
  path,
  text,
} from "./setting-kinds.ts";
import { dnsRules } from "./settings-dns.ts";
import { workerTls } from "./settings-entry.ts";
import { grpcBackend } from "./settings-grpc.ts";

const second = 1000;
const minute = 60 * second;
const hour = 60 * minute;
const mebibyte = 2 ** 20;

const workers = integer("How many workers; each runs one batch at a time.", {
  default: 1,
  min: 1,
  max: 1024,
});
const maxReplyBytes = integer("The largest answer taken from a worker for one batch.", {
  default: 64 * mebibyte,
  min: 1024,
  max: 2048 * mebibyte,
  unit: "bytes",
});
const startTimeoutMs = integer("How long a worker may take until it is ready, loading the model included.", {
  default: 5 * minute,
  min: 100,
  max: hour,
  unit: "ms",
});
const share = (doc: string) => number(doc, { default: 0, min: 0, max: 1, unit: "share" });

export const backends = oneOf(
  "How Ferry talks to the workers of this model.",
  {
    http: group("A fixed batch API over HTTP; nothing about it has to change.", {
      protocol: choice(
        'What the workers speak. `batch`: POST {"inputs":[…]} answers {"outputs":[…]}.',
        ["batch", ...PROTOCOL_NAMES],
        "batch",
      ),
      workers: list(
        "Full endpoint URLs, one per GPU; no URL twice. `dns://NAME:PORT/PATH`: one worker at each address of the name.",
        workerUrl(url("One worker.", ["http", "https"], "http://gpu-1:9000/infer"), "https"),
        { min: 1, max: 1024, single: true },
      ),
      ...dnsRules,
      maxReplyBytes,
      model: optional(
        text("What the workers call the model; left out: as clients do.", {
          maxLength: 256,
          example: "BAAI/bge-small-en",
        }),
      ),
      authorization: optional(
        text("What is sent to the workers as `Authorization`.", {
          maxLength: 4096,
          secret: true,
          words: true,
          example: "Bearer ${WORKER_KEY}",
        }),
      ),
      forwardAuthorization: boolean(
        "Whether workers get the client's own `Authorization`; only with auth.mode none and engine.kind memory.",
        false,
      ),
      healthPath: optional(
        urlPath("Where each worker answers 2xx while it is well, with its load if it knows.", "/health"),
      ),
      tls: workerTls,
    }),
    grpc: grpcBackend(maxReplyBytes),
    python: group("A Python function `def batch(inputs): return outputs`; one process per worker.", {
      function: functionIn("The function, in a file that stays as it is.", {
        endings: [".py"],
        nameRequired: true,
        example: "model.py:batchstring",
      }),
      workers,
      python: path("The interpreter: a name on PATH, or a path such as .venv/bin/python.", {
        default: "python3",
        program: true,
      }),
      inputs: choice(
        "What its inputs become: JSON of every kind, or one array of numbers each, which costs Python next to nothing to read.",
        ["json", "int32", "int64", "float32"],
        "json",
      ),
      gpus: optional(
        text('The GPUs to share out, as in "0,1,2,3": each worker sees one (CUDA_VISIBLE_DEVICES).', {
          maxLength: 1024,
          example: "0,1,2,3",
        }),
      ),
      startTimeoutMs,
      maxReplyBytes,
    }),
    module: group("A JavaScript or TypeScript function; one thread per worker.", {
      function: functionIn("The function; without a name, the file's default export.", {
        endings: [".ts", ".mts", ".js", ".mjs", ".cjs"],
        nameRequired: false,
        example: "model.ts:batch",
      }),
      workers,
      startTimeoutMs,
    }),
    simulated: group("A GPU made of arithmetic, for trying things out.", {
      workers,
      baseMs: number("A batch of n takes baseMs + n × perItemMs.", {
        default: 100,
        min: 0,
        max: minute,
        unit: "ms",
      }),
      perItemMs: number("What each task adds to its batch.", { default: 0, min: 0, max: minute, unit: "ms" }),
      jitter: share("How far service times scatter, as a share of the time (one standard deviation)."),
      errorRate: share("Share of batches that fail."),
      hangRate: share("Share of batches that never come back."),
      shortRate: share("Share of batches that come back with an output missing."),
      slowRate: share("Share of batches that take slowFactor times longer."),
      slowFactor: number("How many times longer a slow batch takes.", {
        default: 10,
        min: 1,
        max: 1000,
        unit: "times",
      }),
      seed: integer("The same seed gives the same faults.", { default: 1, min: 0, max: 2 ** 32 - 1 }),
    }),
  },
  {},
);
