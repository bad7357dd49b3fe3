/**
 * Workers behind gRPC: `ModelInfer` of the Open Inference Protocol v2 (Triton, MLServer, KServe and others).
 *
 * A batch is one call, its rows one behind the other in each input (`gateway/protocol/oip-grpc-worker.ts`); the way there is
 * `grpc-channel.ts`. The worker is told how long it has (`grpc-timeout`); the caller's signal is the clock all the
 * same. What each status means:
 *
 *   OK                                           outputs, cut into rows; `unusable` where that cannot be done. Where the
 *                                                reply is for all rows together, they go one at a time for a minute
 *   UNAVAILABLE, RESOURCE_EXHAUSTED              `busy`, for as long as grpc-retry-pushback-ms says, 1 s when it
 *                                                says nothing; but a message that is too large is `rejected`,
 *                                                since half of the batch may fit
 *   INVALID_ARGUMENT, OUT_OF_RANGE,              `rejected`
 *   FAILED_PRECONDITION
 *   NOT_FOUND, UNAUTHENTICATED,                  `rejected` with a code where the client named what it is about: a version, or
 *   PERMISSION_DENIED                            what the worker's words repeat of the parameters (`client-names.ts`)
 *   NOT_FOUND, UNIMPLEMENTED, UNAUTHENTICATED,   otherwise `failed`, blame worker: a wrong name or credential is not about
 *   PERMISSION_DENIED                            one input
 *   any other                                    `failed`, blame worker
 *   none                                         `failed`; the channel says whom to blame
 *
 * Workers are asked by ModelReady how they are (`worker-health.ts`). One that does not
 * know the question has answered, and that is enough.
 */
import assert from "node:assert/strict";
import type { Clock } from "../../app/clock.ts";
import { framed, timeoutText, type GrpcCode } from "../../gateway/protocol/grpc-wire.ts";
import { callOf, outputsOf } from "../../gateway/protocol/oip-grpc.ts";
import { OIP_SERVICE, readYes, writeModelName } from "../../gateway/protocol/oip-proto.ts";
import { ProtoFlaw } from "../../gateway/protocol/protobuf.ts";
import type { Events } from "../../observe/events.ts";
import type { Backend, Batch, ClientCode, Reply, Worker, WorkerHealth } from "./backend.ts";
import { clientNamed } from "./client-names.ts";
import { GrpcChannel, type GrpcResult, KEEP_ALIVE_MS } from "./grpc-channel.ts";
import { INSEPARABLE_HOLDS_MS, workerNames } from "./http.ts";
import { failed, match, quote, rejected, unusable } from "./match.ts";
import {
  ASK_TIMEOUT_MS,
  headerLoad,
  HealthQuestions,
  type HealthRules,
  type Verdict,
} from "./worker-health.ts";
import { WorkerTls, type WorkerTlsOptions } from "./worker-tls.ts";

export interface GrpcOptions {
  /** grpc://host:port, or grpcs:// for TLS. */
  readonly workers: readonly string[];
  /** What the workers call the model; left out: as we do. */
  readonly model?: string;
  /** Of the model, where a client asks for none; left out: the worker chooses. */
  readonly version?: string;
  /** What is sent as `authorization`; left out: nothing. Never to be shown. */
  readonly authorization?: string;
  readonly maxReplyBytes: number;
  /** KEEP_ALIVE_MS by default. */
  readonly keepAliveMs?: number;
  /** For tests: true by default. */
  readonly askReady?: boolean;
  readonly health: HealthRules;
  readonly tls: WorkerTlsOptions;
}

export interface GrpcAround {
  readonly model: string;
  readonly clock: Clock;
  readonly events: Events;
}

/** What a worker may be given at once: one to run, and one behind it. */
const MOST_AT_ONCE = 2;
const DEFAULT_PUSHBACK_MS = 1000;
const MIN_PUSHBACK_MS = 10;
const MAX_PUSHBACK_MS = 30_000;
const MAX_READY_BYTES = 1024;

export class GrpcBackend implements Backend {
  readonly #options: GrpcOptions & { readonly model: string };
  readonly #clock: Clock;
  readonly #workers: GrpcWorker[];
  readonly #tls: WorkerTls;

  constructor(options: GrpcOptions, { model, clock, events }: GrpcAround) {
    const urls = options.workers.map((worker) => new URL(worker));
    const names = workerNames(urls);
    this.#options = { ...options, model: options.model ?? model };
    this.#clock = clock;
    this.#tls = new WorkerTls(`model ${model}: backend.tls`, options.tls, clock, events);
    this.#workers = urls.map((url, index) => this.#worker(names[index]!, url));
  }

  get workers(): readonly GrpcWorker[] {
    return this.#workers;
  }

  async start(): Promise<void> {
    await this.#tls.start();
    for (const worker of this.#workers) worker.start();
  }

  /** It need not be up: like those of the config, it may come later. */
  grow(address?: string, host?: string): Promise<GrpcWorker> {
    const url = address === undefined ? null : URL.parse(address);
    if (url === null || !/^grpcs?:$/.test(url.protocol) || url.port === "") {
      return Promise.reject(new Error("say where the worker is: grpc://host:port, or grpcs:// for TLS"));
    }
    if (this.#workers.some((worker) => worker.address === address)) {
      return Promise.reject(new Error("this worker is there already"));
    }
    const taken = this.#workers.some(({ name }) => name === url.host);
    const worker = this.#worker(taken ? url.href : url.host, url, host);
    worker.start();
    this.#workers.push(worker);
    return Promise.resolve(worker);
  }

  retire(worker: Worker): Promise<void> {
    const at = this.#workers.findIndex((each) => each === worker);
    if (at >= 0) this.#workers.splice(at, 1)[0]!.stop();
    return Promise.resolve();
  }

  stop(): Promise<void> {
    this.#tls.stop();
    for (const worker of this.#workers) worker.stop();
    return Promise.resolve();
  }

  #worker(name: string, url: URL, host?: string): GrpcWorker {
    return new GrpcWorker({ name, url, host }, this.#options, this.#tls, this.#clock);
  }
}

class GrpcWorker implements Worker {
  readonly name: string;
  readonly address: string;
  readonly host: string | undefined;
  readonly #options: GrpcOptions & { readonly model: string };
  readonly #clock: Clock;
  /** Those that carry no call; one, or two where batches were handed over early. */
  readonly #idle: GrpcChannel[];
  readonly #calling = new Set<GrpcChannel>();
  readonly #newChannel: () => GrpcChannel;
  readonly #metadata: Readonly<Record<string, string>>;
  readonly #questions: HealthQuestions | undefined;
  #reached = true;
  #stopped = false;
  #aloneUntil = -Infinity;
  load: Worker["load"];

  constructor(
    { name, url, host }: { readonly name: string; readonly url: URL; readonly host?: string | undefined },
    options: GrpcOptions & { readonly model: string },
    tls: WorkerTls,
    clock: Clock,
  ) {
    const { authorization, keepAliveMs = KEEP_ALIVE_MS, askReady = true, health } = options;
    this.name = name;
    this.address = url.href;
    this.host = host;
    this.#options = options;
    this.#clock = clock;
    this.#newChannel = () => new GrpcChannel({ url, host }, tls, clock, keepAliveMs);
    this.#idle = [this.#newChannel()];
    this.#metadata = authorization === undefined ? {} : { authorization };
    if (!askReady) return;
    const question = { what: "its ModelReady", ask: (signal: AbortSignal) => this.#askReady(signal) };
    this.#questions = new HealthQuestions(question, health, clock, (share) => this.#heardLoad(share));
  }

  start(): void {
    this.#questions?.start();
  }

  stop(): void {
    this.#stopped = true;
    this.#questions?.stop();
    for (const channel of [...this.#calling, ...this.#idle]) channel.close();
  }

  get health(): WorkerHealth | undefined {
    return this.#questions?.health;
  }

  set onHealth(changed: (() => void) | undefined) {
    if (this.#questions !== undefined) this.#questions.onChange = changed;
  }

  /** Only of use after it could not be reached: that it answers questions does not mean that it runs batches. */
  get probe(): Worker["probe"] {
    const questions = this.#questions;
    return questions === undefined || this.#reached ? undefined : (signal) => questions.ask(signal);
  }

  /** Undefined: anything. */
  get maxBatchSize(): number | undefined {
    return this.#clock.now() < this.#aloneUntil ? 1 : undefined;
  }

  async run(batch: Batch, signal: AbortSignal): Promise<Reply> {
    if (signal.aborted) return failed("aborted", "nobody");
    if (this.#stopped) return failed("worker was stopped", "nobody");
    assert(this.#calling.size < MOST_AT_ONCE, "a worker gets two batches at a time at most");
    const { model, version = "", maxReplyBytes } = this.#options;
    const inputs = batch.tasks.map(({ input }) => input);
    const call = callOf({ id: batch.id, parameters: batch.parameters, inputs }, model, version);
    if (call.flaw !== undefined) return rejected(call.flaw);
    const request = {
      path: `/${OIP_SERVICE}/ModelInfer`,
      headers: this.#headersFor(batch),
      body: framed(call.parts),
      maxReplyBytes,
    };
    // Each on a connection of its own: a call that is aborted takes its connection along, and no other call.
    const channel = this.#idle.pop() ?? this.#newChannel();
    this.#calling.add(channel);
    const result = await channel.call(request, signal);
    this.#calling.delete(channel);
    this.#idle.push(channel);
    const asked = { batch, model, named: call.named };
    const reply = replyOf(asked, result, () => {
      this.#aloneUntil = this.#clock.now() + INSEPARABLE_HOLDS_MS;
    });
    this.#noteReply(reply, headerLoad(result.headers));
    return reply;
  }

  #headersFor({ timeoutMs, traceparent }: Batch): Record<string, string> {
    return {
      ...this.#metadata,
      ...(timeoutMs !== undefined && { "grpc-timeout": timeoutText(timeoutMs) }),
      ...(traceparent !== undefined && { traceparent }),
    };
  }

  #noteReply(reply: Reply, load: number | undefined): void {
    this.#reached = reply.kind !== "failed" || reply.blame !== "nobody";
    if (reply.kind !== "failed") this.#questions?.answered();
    if (load !== undefined) this.#heardLoad(load);
  }

  #heardLoad(share: number): void {
    this.load = { share, at: this.#clock.now() };
  }

  /** On a connection of its own, so that nothing of one question is left for the next. */
  async #askReady(signal: AbortSignal): Promise<Verdict> {
    const channel = this.#newChannel();
    const { model, version = "", health } = this.#options;
    const request = {
      path: `/${OIP_SERVICE}/ModelReady`,
      headers: { ...this.#metadata, "grpc-timeout": timeoutText(health.askTimeoutMs ?? ASK_TIMEOUT_MS) },
      body: framed(writeModelName(model, version).parts()),
      maxReplyBytes: MAX_READY_BYTES,
    };
    const result = await channel.call(request, signal);
    channel.close();
    return verdictOf(result, signal.aborted);
  }
}

function verdictOf(result: GrpcResult, late: boolean): Verdict {
  const share = headerLoad(result.headers);
  switch (result.kind) {
    case "message":
      return { why: isReady(result.message) ? "" : "says that it is not ready", silent: false, share };
    case "status":
      if (result.code === "UNIMPLEMENTED") return { why: "", silent: false, share };
      return { why: `answered ${result.code}`, silent: false, share };
    case "flawed":
      return { why: `answered with a reply that ${result.flaw}`, silent: false };
    case "lost":
      return { why: late ? "did not answer in time" : `cannot be asked: ${result.message}`, silent: true };
  }
}

function isReady(message: Buffer): boolean {
  try {
    return readYes(message);
  } catch (error) {
    if (error instanceof ProtoFlaw) return false;
    throw error;
  }
}

/** What a reply is judged by. */
interface Asked {
  readonly batch: Batch;
  /** At the worker. */
  readonly model: string;
  /** The client named a version. */
  readonly named: boolean;
}

/** `inseparable` is called where the reply is for all rows together. */
function replyOf(asked: Asked, result: GrpcResult, inseparable: () => void): Reply {
  switch (result.kind) {
    case "message":
      return answer(asked.batch, result.message, inseparable);
    case "status":
      return refusal(result, asked);
    case "flawed":
      return unusable(`worker's reply ${result.flaw}`);
    case "lost":
      return failed(result.message, result.blame);
  }
}

function answer(batch: Batch, message: Buffer, inseparable: () => void): Reply {
  const { length } = batch.tasks;
  const read = outputsOf(message, length);
  if (read.flaw === undefined) return match(batch, read.outputs);
  if (read.inseparable === true) {
    inseparable();
    if (read.rows !== undefined)
      return unusable(`worker returned ${plural(read.rows, "output")} for ${plural(length, "input")}`);
  }
  return unusable(`worker's reply ${quote(read.flaw)}`, "worker's reply is flawed");
}

function plural(n: number, noun: string): string {
  return `${n} ${noun}${n === 1 ? "" : "s"}`;
}

/** What servers say when one message is more than they take. */
const TOO_LARGE = /larger than max|exceeds (the )?max|message length too large/i;

const BUSY: ReadonlySet<GrpcCode> = new Set(["UNAVAILABLE", "RESOURCE_EXHAUSTED"]);
const ABOUT_INPUTS: ReadonlySet<GrpcCode> = new Set([
  "INVALID_ARGUMENT",
  "OUT_OF_RANGE",
  "FAILED_PRECONDITION",
]);
const ADVICE: Partial<Record<GrpcCode, string>> = {
  NOT_FOUND: "(check backend.model and backend.version)",
  UNIMPLEMENTED: "(check the worker's address: it must speak the Open Inference Protocol)",
  UNAUTHENTICATED: "(check backend.authorization)",
  PERMISSION_DENIED: "(check backend.authorization)",
};

/** What a code means where the client named what it is about. */
const CLIENT_CODES: Partial<Record<GrpcCode, ClientCode>> = {
  NOT_FOUND: "NOT_FOUND",
  UNAUTHENTICATED: "FORBIDDEN",
  PERMISSION_DENIED: "FORBIDDEN",
};

function refusal({ code, words, headers }: GrpcResult & { kind: "status" }, asked: Asked): Reply {
  const said = quote(words);
  const brief = `worker answered ${code}`;
  const message = said === "" ? brief : `${brief}: ${said}`;
  if (code === "RESOURCE_EXHAUSTED" && TOO_LARGE.test(words)) return rejected(message);
  if (BUSY.has(code)) {
    const retryAfterMs = pushbackMs(headers["grpc-retry-pushback-ms"]);
    return { kind: "busy", message, brief, retryAfterMs, named: isNamed(words, asked) };
  }
  if (ABOUT_INPUTS.has(code)) return rejected(message);
  const advice = ADVICE[code];
  const clientCode = CLIENT_CODES[code];
  if (clientCode !== undefined && isNamed(words, asked, clientCode === "NOT_FOUND")) {
    return rejected(message, clientCode, `${brief} ${advice}`);
  }
  if (advice === undefined) return failed(message, "worker", brief);
  return failed(`${message} ${advice}`, "worker", `${brief} ${advice}`);
}

/** `byVersion`: the version that the client asked for may be what it is about. */
function isNamed(words: string, { batch, model, named }: Asked, byVersion = true): boolean {
  if (named && byVersion) return true;
  // Inputs are tensors: nothing in them is a name.
  return clientNamed({ words, parameters: batch.parameters, inputs: [], model }) === "parameters";
}

function pushbackMs(text: string | string[] | undefined): number {
  if (typeof text !== "string" || !/^\d{1,9}$/.test(text)) return DEFAULT_PUSHBACK_MS;
  return Math.min(MAX_PUSHBACK_MS, Math.max(MIN_PUSHBACK_MS, Number(text)));
}
