/** The settings of gRPC: the listener for clients, and workers that speak it. Read by `settings.ts`. */
import { address, grpcUrl, workerUrl } from "./setting-addresses.ts";
import { boolean, group, integer, type Leaf, list, optional, text } from "./setting-kinds.ts";
import { dnsRules } from "./settings-dns.ts";
import { workerTls } from "./settings-entry.ts";

const mebibyte = 2 ** 20;

export const grpcDoor = group(
  "gRPC for clients: the Open Inference Protocol v2, beside HTTP (docs/protocols.md).",
  {
    listen: optional(
      address(
        "Where gRPC clients connect, with the certificate of `tls` if there is one; left out: nowhere.",
        "127.0.0.1:8082",
        true,
      ),
    ),
    maxMessageBytes: integer("The largest message of a client.", {
      default: 4 * mebibyte,
      min: 1024,
      max: 1024 * mebibyte,
      unit: "bytes",
    }),
    maxRows: integer("The most rows (dimension 0) in one request; each is a task.", {
      default: 2048,
      min: 1,
      max: 65_536,
    }),
    maxStreams: integer("Calls at once on one connection.", { default: 1024, min: 1, max: 10_000 }),
  },
);

/** `maxReplyBytes` is the same for several kinds of backend. */
export const grpcBackend = (maxReplyBytes: Leaf<number>) =>
  group("Servers of the Open Inference Protocol v2 over gRPC, such as Triton and MLServer.", {
    workers: list(
      "Their addresses, one per GPU; no address twice. `dns://NAME:PORT`: one worker at each address of the name.",
      workerUrl(grpcUrl("One worker; grpcs:// for TLS.", "grpc://gpu-1:8001"), "grpcs"),
      { min: 1, max: 1024, single: true },
    ),
    ...dnsRules,
    model: optional(
      text("What the workers call the model; left out: as clients do.", {
        maxLength: 256,
        example: "resnet50",
      }),
    ),
    version: optional(
      text("The model's version where a client asks for none; left out: the worker chooses.", {
        maxLength: 64,
        example: "'1'",
      }),
    ),
    authorization: optional(
      text("What is sent to the workers as `authorization`.", {
        maxLength: 4096,
        secret: true,
        words: true,
        example: "Bearer ${WORKER_KEY}",
      }),
    ),
    maxReplyBytes,
    keepAliveMs: integer(
      "A connection that has been silent for so long is tried; if that gets no answer it ends.",
      {
        default: 10_000,
        min: 100,
        max: 3_600_000,
        unit: "ms",
      },
    ),
    askReady: boolean("Whether workers are asked by ModelReady how they are, every health.askMs.", true),
    tls: workerTls,
  });
