/** A backend behind gRPC with a server of grpc-js at its other end, for inputs of any JSON as the contract has them. */
import assert from "node:assert/strict";
import type { Backend, Batch, Reply, Worker } from "../../../src/workers/backend/backend.ts";
import { GrpcBackend, type GrpcOptions } from "../../../src/workers/backend/grpc.ts";
import { type Clock, SystemClock } from "../../../src/app/clock.ts";
import { rawFromJson } from "../../../src/gateway/protocol/oip-tensors.ts";
import { Events } from "../../../src/observe/events.ts";
import { assertOneLine, batchOf } from "../../contract/backend.ts";
import {
  type InferRequest,
  type InferResponse,
  OipServer,
  type Serve,
} from "../../gateway/protocol/oip-service.ts";

export const never = new AbortController().signal;
export const MAX_REPLY_BYTES = 1_000_000;

export function backendFor(
  urls: readonly string[],
  more: Partial<GrpcOptions> = {},
  clock: Clock = new SystemClock(),
): GrpcBackend {
  const health = { askMs: 1000, askTimeoutMs: 2000, failures: 3 };
  const options = {
    workers: urls,
    maxReplyBytes: MAX_REPLY_BYTES,
    keepAliveMs: 10_000,
    askReady: false,
    health,
    tls: { reloadMs: 2000 },
    ...more,
  };
  return new GrpcBackend(options, { model: "m", clock, events: new Events() });
}

/** Inputs of any JSON as rows of one tensor of BYTES. */
export const TEXTS = '{"binary":true,"inputs":[{"datatype":"BYTES","name":"text","shape":[]}]}';

export function asRows({ id, tasks, parameters }: Batch): Batch {
  const rows = tasks.map((task) => {
    const raw = rawFromJson(JSON.stringify([task.input]), "BYTES");
    return { id: task.id, input: JSON.stringify([raw.toString("base64")]) };
  });
  const own = parameters === "" ? TEXTS : TEXTS.replace(/\}$/, `,"parameters":${parameters}}`);
  return { id, tasks: rows, parameters: own };
}

export function asTexts(reply: Reply): Reply {
  if (reply.kind !== "answered") return reply;
  const texts = reply.outputs.map((output) => {
    const { outputs } = JSON.parse(output) as { outputs: { raw: string }[] };
    return Buffer.from(outputs[0]!.raw, "base64").subarray(4).toString("utf8");
  });
  return { kind: "answered", outputs: texts };
}

/** The contract knows inputs of any JSON; these workers know tensors. */
export class TextWorker implements Worker {
  readonly worker: Worker;

  constructor(worker: Worker) {
    this.worker = worker;
  }
  get name(): string {
    return this.worker.name;
  }
  get address(): string {
    return this.worker.address!;
  }
  get probe(): Worker["probe"] {
    return this.worker.probe;
  }
  async run(batch: Batch, signal: AbortSignal): Promise<Reply> {
    return asTexts(await this.worker.run(asRows(batch), signal));
  }
}

export const texts = ({ raw_input_contents: [raw] = [] }: InferRequest): string[] => {
  const found: string[] = [];
  for (let at = 0; at < raw!.length;) {
    const end = at + 4 + raw!.readUInt32LE(at);
    found.push(raw!.toString("utf8", at + 4, end));
    at = end;
  }
  return found;
};
export const echoing = (request: InferRequest, rows: readonly string[]): InferResponse => ({
  model_name: request.model_name,
  outputs: [{ name: "text", datatype: "BYTES", shape: [rows.length] }],
  raw_output_contents: [rawFromJson(JSON.stringify(rows), "BYTES")],
});
export const echo: Serve = (request) => echoing(request, texts(request));

export async function withServer(
  serve: Serve,
  check: (worker: Worker, server: OipServer) => Promise<void>,
  more: Partial<GrpcOptions> = {},
): Promise<void> {
  await using server = await OipServer.listen(serve);
  const backend = backendFor([server.url], more);
  try {
    await check(backend.workers[0]!, server);
  } finally {
    await backend.stop();
  }
}

export async function replyTo(serve: Serve, more?: Partial<GrpcOptions>): Promise<Reply> {
  let reply: Reply | undefined;
  await withServer(
    serve,
    async (worker) => void (reply = await worker.run(asRows(batchOf(["1", "2"])), never)),
    more,
  );
  return reply!;
}

export function assertReply(reply: Reply, kind: Reply["kind"], message: RegExp, blame?: string): void {
  assert(reply.kind !== "answered", "answered");
  assert.equal(reply.kind, kind, reply.message);
  assert.match(reply.message, message);
  assertOneLine(reply.message);
  if (reply.kind === "failed") assert.equal(reply.blame, blame);
}

/** A backend whose workers take inputs of any JSON. */
export class TextBackend implements Backend {
  readonly #backend: GrpcBackend;
  readonly #known = new Map<Worker, TextWorker>();

  constructor(backend: GrpcBackend) {
    this.#backend = backend;
  }

  get workers(): readonly TextWorker[] {
    return this.#backend.workers.map((worker) => this.#texts(worker));
  }
  start(): Promise<void> {
    return this.#backend.start();
  }
  stop(): Promise<void> {
    return this.#backend.stop();
  }
  async grow(address?: string): Promise<Worker> {
    return this.#texts(await this.#backend.grow(address));
  }
  retire(worker: Worker): Promise<void> {
    return this.#backend.retire((worker as TextWorker).worker);
  }

  #texts(worker: Worker): TextWorker {
    const known = this.#known.get(worker) ?? new TextWorker(worker);
    this.#known.set(worker, known);
    return known;
  }
}
