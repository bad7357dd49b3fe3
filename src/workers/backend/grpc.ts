/**
 * Workers behind gRPC: `ModelInfer` of the Open Inference Protocol v2 (Triton, MLServer, KServe and others).
 *
 * A batch is one call, its rows concatenated in each input (`gateway/protocol/oip-grpc.ts`). `grpc-timeout` tells the
 * worker its deadline; the caller's signal enforces it. By status:
 *
 *   OK                                           outputs, split into rows; `unusable` where impossible. If the reply is
 *                                                for all rows together, tasks are sent one at a time for a minute
 *   UNAVAILABLE, RESOURCE_EXHAUSTED              `busy` for grpc-retry-pushback-ms, default 1 s; a message that is too
 *                                                large is `rejected`, since half of the batch may fit
 *   INVALID_ARGUMENT, OUT_OF_RANGE,              `rejected`
 *   FAILED_PRECONDITION
 *   NOT_FOUND, UNAUTHENTICATED,                  `rejected` with a code where the client named the subject: a version,
 *   PERMISSION_DENIED                            or a parameter that the worker's message repeats
 *   NOT_FOUND, UNIMPLEMENTED, UNAUTHENTICATED,   otherwise `failed`, blame worker: a wrong name or credential is not
 *   PERMISSION_DENIED                            about one input
 *   any other                                    `failed`, blame worker
 *   none                                         `failed`; see `GrpcResult` for the blame
 *
 * Health is asked by ModelReady; UNIMPLEMENTED counts as well.
 *
 * On node:http2 rather than grpc-js, because blame depends on whether the server got a call, and an aborted call must
 * not share its connection with the next: test/workers/backend/grpc-replies.test.ts.
 */
import assert from "node:assert/strict";
import { constants, type ClientHttp2Session, type ClientHttp2Stream, connect } from "node:http2";
import type { IncomingHttpHeaders, IncomingHttpStatusHeader } from "node:http2";
import type { Alarm, Clock } from "../../app/clock.ts";
import {
  codeOf,
  codeOfHttp,
  framed,
  GRPC_TYPE,
  type GrpcCode,
  isGrpcType,
  percentDecoded,
  timeoutText,
  Unframer,
} from "../../gateway/protocol/grpc-wire.ts";
import { callOf, outputsOf } from "../../gateway/protocol/oip-grpc.ts";
import type { PadMemory } from "../../gateway/protocol/oip-pad.ts";
import { cutFor } from "../../gateway/protocol/oip-task.ts";
import { OIP_SERVICE, readYes, writeModelName } from "../../gateway/protocol/oip-proto.ts";
import { ProtoFlaw } from "../../gateway/protocol/protobuf.ts";
import type { Batch, ClientCode, Reply } from "./backend.ts";
import {
  ASK_TIMEOUT_MS,
  headerLoad,
  type HealthRules,
  MAX_WORKER_CALLS,
  type NetworkAround,
  NetworkWorkers,
  NetworkWorker,
  padMemory,
  type HealthVerdict,
  type WorkerPlace,
} from "./network.ts";
import {
  type FailureBlame,
  boundedWaitMs,
  clientNamed,
  failed,
  match,
  matchMade,
  quote,
  rejected,
  unusable,
} from "./replies.ts";
import { reason, tlsTrouble, type WorkerTls, type WorkerTlsOptions } from "./worker-tls.ts";

export interface GrpcOptions {
  /** grpc://host:port, or grpcs:// for TLS. */
  readonly workers: readonly string[];
  /** The model's name at the workers; default: the same. */
  readonly model?: string;
  /** When the client asks for none; default: the worker chooses. */
  readonly version?: string;
  /** Sent as `authorization`. Never shown. */
  readonly authorization?: string;
  readonly maxReplyBytes: number;
  /** KEEP_ALIVE_MS by default. */
  readonly keepAliveMs?: number;
  /** For tests: true by default. */
  readonly askReady?: boolean;
  readonly health: HealthRules;
  readonly tls: WorkerTlsOptions;
}

type NamedOptions = GrpcOptions & { readonly model: string; readonly memory: PadMemory };

const MAX_READY_BYTES = 1024;
/** Silence after which a connection is checked. */
const KEEP_ALIVE_MS = 10_000;

export class GrpcBackend extends NetworkWorkers {
  constructor(options: GrpcOptions, around: NetworkAround) {
    const named = { ...options, model: options.model ?? around.model, memory: padMemory(around) };
    super(options, around, {
      wanted: "grpc://host:port, or grpcs:// for TLS",
      parse: (address = "") => {
        const url = URL.parse(address);
        return url !== null && /^grpcs?:$/.test(url.protocol) && url.port !== "" ? url : undefined;
      },
      make: (place, tls) => new GrpcWorker(place, named, tls, around.clock),
    });
  }
}

class GrpcWorker extends NetworkWorker {
  readonly #options: NamedOptions;
  /** One, or two with pipelining. */
  readonly #idle: GrpcChannel[] = [];
  readonly #calling = new Set<GrpcChannel>();
  readonly #newChannel: () => GrpcChannel;
  readonly #metadata: Readonly<Record<string, string>>;

  constructor(place: WorkerPlace, options: NamedOptions, tls: WorkerTls, clock: Clock) {
    super(place, clock);
    const { authorization, keepAliveMs = KEEP_ALIVE_MS, askReady = true, health } = options;
    this.#options = options;
    this.#newChannel = () => new GrpcChannel({ place, tls, clock, keepAliveMs });
    this.#metadata = authorization === undefined ? {} : { authorization };
    if (!askReady) return;
    this.checkHealth({ what: "its ModelReady", ask: (signal) => this.#askReady(signal) }, health);
  }

  override async stop(): Promise<void> {
    await super.stop();
    for (const channel of [...this.#calling, ...this.#idle]) channel.close();
  }

  async run(batch: Batch, signal: AbortSignal): Promise<Reply> {
    if (signal.aborted) return failed("aborted", "nobody");
    if (this.stopped) return failed("worker was stopped", "nobody");
    assert(this.#calling.size < MAX_WORKER_CALLS, "a worker gets two batches at a time at most");
    const { id, parameters, tasks, timeoutMs, traceparent } = batch;
    const { model, version = "", maxReplyBytes, memory } = this.#options;
    const call = callOf({ id, parameters, inputs: tasks.map(({ input }) => input) }, model, version);
    if (call.flaw !== undefined) return rejected(call.flaw);
    const request = {
      path: `/${OIP_SERVICE}/ModelInfer`,
      headers: {
        ...this.#metadata,
        ...(timeoutMs !== undefined && { "grpc-timeout": timeoutText(timeoutMs) }),
        ...(traceparent !== undefined && { traceparent }),
      },
      body: framed(call.parts),
      maxReplyBytes,
    };
    // Concurrent calls use separate connections, because an aborted call ends its connection.
    const channel = this.#idle.pop() ?? this.#newChannel();
    this.#calling.add(channel);
    const result = await channel.call(request, signal);
    this.#calling.delete(channel);
    this.#idle.push(channel);
    const { reply, inseparable = false } = replyOf({ batch, model, named: call.named, memory }, result);
    this.noteReply(reply, tasks.length, headerLoad(result.headers), inseparable);
    return reply;
  }

  /** On a separate connection, so that nothing is left over for the next question. */
  async #askReady(signal: AbortSignal): Promise<HealthVerdict> {
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

function verdictOf(result: GrpcResult, late: boolean): HealthVerdict {
  const share = headerLoad(result.headers);
  switch (result.kind) {
    case "message":
      return { why: isReady(result.message) ? "" : "says that it is not ready", silent: false, share };
    case "status":
      return { why: result.code === "UNIMPLEMENTED" ? "" : `answered ${result.code}`, silent: false, share };
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

interface Asked {
  readonly batch: Batch;
  readonly model: string;
  /** The client named a version. */
  readonly named: boolean;
  readonly memory: PadMemory;
}

/** `inseparable`: the reply is for all rows together. */
function replyOf(asked: Asked, result: GrpcResult): { reply: Reply; inseparable?: boolean } {
  switch (result.kind) {
    case "message":
      return answer(asked, result.message);
    case "status":
      return { reply: refusal(result, asked) };
    case "flawed":
      return { reply: unusable(`worker's reply ${result.flaw}`) };
    case "lost":
      return { reply: failed(result.message, result.blame) };
  }
}

function answer({ batch, memory }: Asked, message: Buffer): { reply: Reply; inseparable?: boolean } {
  const { tasks, parameters } = batch;
  const padded = cutFor(
    tasks.map(({ input }) => input),
    parameters,
    memory,
  );
  const read = outputsOf(message, tasks.length, padded);
  if (read.flaw === undefined) return { reply: match(batch, read.outputs) };
  if (read.divide === true) return { reply: rejected(`worker's reply ${quote(read.flaw)}`) };
  const inseparable = read.inseparable === true;
  if (inseparable && read.rows !== undefined)
    return { reply: matchMade(batch, { length: read.rows }), inseparable };
  return { reply: unusable(`worker's reply ${quote(read.flaw)}`, "worker's reply is flawed"), inseparable };
}

/** Servers' wording for an oversized message. */
const TOO_LARGE = /larger than max|exceeds (the )?max|message length too large/i;
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
/** Codes that are the client's error where it named the subject. */
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
  if (code === "UNAVAILABLE" || code === "RESOURCE_EXHAUSTED") {
    const pushback = String(headers["grpc-retry-pushback-ms"]);
    const retryAfterMs = boundedWaitMs(/^\d{1,9}$/.test(pushback) ? Number(pushback) : NaN);
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

/** `byVersion`: it may be about the version the client asked for. */
function isNamed(words: string, { batch, model, named }: Asked, byVersion = true): boolean {
  if (named && byVersion) return true;
  // Inputs are tensors and contain no names.
  return clientNamed({ words, parameters: batch.parameters, inputs: [], model }) === "parameters";
}

interface GrpcRequest {
  /** `/package.Service/Method` */
  readonly path: string;
  /** Metadata, lower-case names. */
  readonly headers: Readonly<Record<string, string>>;
  /** With the 5-byte gRPC prefix. */
  readonly body: Buffer;
  readonly maxReplyBytes: number;
}

/**
 *   message   status OK and one message
 *   status    any other status; also what a proxy's HTTP status stands for
 *   flawed    status OK, but no readable message
 *   lost      no status. `nobody`: the server did not get or not process it; `batch`: the connection ended while the
 *             server had the call; `worker`: the server broke it off
 */
type GrpcResult = { readonly headers: IncomingHttpHeaders } & (
  | { readonly kind: "message"; readonly message: Buffer }
  | { readonly kind: "status"; readonly code: GrpcCode; readonly words: string }
  | { readonly kind: "flawed"; readonly flaw: string }
  | { readonly kind: "lost"; readonly blame: FailureBlame; readonly message: string }
);

const STREAM_WINDOW_BYTES = 1024 * 1024;
const SESSION_WINDOW_BYTES = 4 * 1024 * 1024;
/** Time limit for closing a retired connection. */
const GOODBYE_MS = 1000;
const MAX_PINGS = 3;

interface ChannelOptions {
  readonly place: WorkerPlace;
  readonly tls: WorkerTls;
  readonly clock: Clock;
  readonly keepAliveMs: number;
}

/**
 * Unary calls to one gRPC server: one HTTP/2 connection, one call at a time.
 *
 * The connection is made for the first call and kept. An aborted call is cancelled (RST_STREAM) and ends its
 * connection: a silent one should not be trusted with the next batch. It is also replaced after GOAWAY and when the
 * certificates changed.
 *
 * Dead peers: idle connections use TCP keep-alive (`keepAliveMs`); a call that has heard nothing for `keepAliveMs`
 * sends an HTTP/2 PING, and again after twice and four times as long. A PING unanswered for `keepAliveMs` ends the
 * connection. At most three per call and none while idle, because gRPC servers disconnect clients that ping more
 * ("too_many_pings").
 */
class GrpcChannel {
  readonly #options: ChannelOptions;
  #session: ClientHttp2Session | undefined;
  /** Version of the certificates it was made with. */
  #version = 0;
  /** Closing sessions, each with the alarm that destroys it. */
  readonly #retired = new Map<ClientHttp2Session, Alarm>();
  #call: GrpcCall | undefined;
  #closed = false;

  constructor(options: ChannelOptions) {
    this.#options = options;
  }

  /** Never rejects. */
  async call(request: GrpcRequest, signal: AbortSignal): Promise<GrpcResult> {
    const call = (this.#call = new GrpcCall(request, this.#options));
    const abort = (): void => call.abort();
    signal.addEventListener("abort", abort);
    void this.#start(call);
    const result = await call.result;
    signal.removeEventListener("abort", abort);
    this.#call = undefined;
    if (!call.intact) this.#retire();
    return result;
  }

  close(): void {
    this.#closed = true;
    this.#call?.finish(lost("nobody", "worker was stopped"));
    this.#session?.destroy();
    for (const [session, alarm] of this.#retired) {
      alarm.cancel();
      session.destroy();
    }
    this.#retired.clear();
  }

  async #start(call: GrpcCall): Promise<void> {
    try {
      const { version } = this.#options.tls;
      if (this.#version !== version) this.#retire();
      this.#version = version;
      const kept = this.#session;
      if (kept !== undefined && !kept.closed && !kept.destroyed) return call.start(kept);
      const session = await this.#connect();
      if (call.finished || this.#closed) return session.destroy();
      this.#session = session;
      session.once("close", () => {
        if (this.#session === session) this.#session = undefined;
      });
      call.start(session);
    } catch (error) {
      call.finish(unreachable(error as Error));
    }
  }

  async #connect(): Promise<ClientHttp2Session> {
    const { place, tls, keepAliveMs } = this.#options;
    const { url, host = url.host } = place;
    const secure = url.protocol === "grpcs:";
    const socket = await tls.open(url, place.host);
    if (secure && socket.alpnProtocol !== "h2") {
      socket.destroy();
      throw new NoHttp2();
    }
    socket.setKeepAlive(true, keepAliveMs);
    const session = connect(`${secure ? "https" : "http"}://${host}`, {
      createConnection: () => socket,
      settings: { enablePush: false, initialWindowSize: STREAM_WINDOW_BYTES },
    });
    // Each call listens for errors itself.
    session.on("error", () => {});
    session.once("connect", () => {
      if (!session.destroyed) session.setLocalWindowSize(SESSION_WINDOW_BYTES);
    });
    return session;
  }

  /** Takes no further call, but finishes sending. */
  #retire(): void {
    const session = this.#session;
    this.#session = undefined;
    if (session === undefined || session.destroyed) return;
    session.close();
    if (this.#closed || session.destroyed) return session.destroy();
    const { clock } = this.#options;
    const alarm = clock.at(clock.now() + GOODBYE_MS, () => session.destroy());
    this.#retired.set(session, alarm);
    session.once("close", () => {
      alarm.cancel();
      this.#retired.delete(session);
    });
  }
}

class GrpcCall {
  readonly #outcome = Promise.withResolvers<GrpcResult>();
  readonly result = this.#outcome.promise;
  readonly #request: GrpcRequest;
  readonly #options: ChannelOptions;
  readonly #body: Unframer;
  #session: ClientHttp2Session | undefined;
  #stream: ClientHttp2Stream | undefined;
  #alarm: Alarm | undefined;
  #pings = 0;
  #sent = false;
  #http = 0;
  #headers: IncomingHttpHeaders = {};
  /** Headers or trailers with a `grpc-status`. */
  #trailers: IncomingHttpHeaders | undefined;
  #error: Error | undefined;
  #silent = false;
  finished = false;
  /** The connection may carry the next call. */
  intact = false;

  constructor(request: GrpcRequest, options: ChannelOptions) {
    this.#request = request;
    this.#options = options;
    this.#body = new Unframer(request.maxReplyBytes);
  }

  start(session: ClientHttp2Session): void {
    if (this.finished) return;
    const { path, headers, body } = this.#request;
    this.#session = session;
    const stream = (this.#stream = session.request({
      ":method": "POST",
      ":path": path,
      "content-type": GRPC_TYPE,
      te: "trailers",
      ...headers,
    }));
    stream.on("error", this.#noteError);
    stream.on("finish", () => (this.#sent = true));
    stream.on("response", (headers) => this.#answered(headers));
    stream.on("data", (chunk: Buffer) => this.#read(chunk));
    stream.on("trailers", (trailers) => this.#noteStatus(trailers));
    stream.on("end", () => {
      if (this.#trailers !== undefined || this.#http !== 200) this.#conclude();
    });
    stream.on("close", () => this.#conclude());
    session.on("error", this.#noteError);
    stream.end(body);
    this.#listen(this.#options.keepAliveMs);
  }

  abort(): void {
    this.finish(lost(this.#sent ? "batch" : "nobody", "aborted"));
  }

  /** The first result counts. Without one from the server the call is cancelled. */
  finish(result: GrpcResult): void {
    if (this.finished) return;
    this.finished = true;
    this.#alarm?.cancel();
    this.#session?.off("error", this.#noteError);
    this.intact = result.kind === "message" || result.kind === "status";
    const stream = this.#stream;
    // A server may answer before it has read everything, and need not read the rest.
    if (stream !== undefined && !stream.closed && !(this.intact && stream.writableFinished))
      stream.close(constants.NGHTTP2_CANCEL);
    this.#outcome.resolve(result);
  }

  readonly #noteError = (error: Error): void => {
    this.#error ??= error;
  };

  #answered(headers: IncomingHttpHeaders & IncomingHttpStatusHeader): void {
    this.#http = headers[":status"] ?? 0;
    this.#headers = headers;
    this.#noteStatus(headers);
  }

  #noteStatus(headers: IncomingHttpHeaders): void {
    this.#pings = 0;
    if (headers["grpc-status"] !== undefined) this.#trailers = headers;
  }

  #read(chunk: Buffer): void {
    this.#pings = 0;
    if (this.finished || this.#http !== 200 || !isGrpcType(this.#headers["content-type"])) return;
    if (!this.#body.take(chunk)) this.#finishBody(this.#headers);
  }

  #conclude(): void {
    if (this.finished) return;
    const { "content-type": type } = this.#headers;
    const trailers = this.#trailers;
    const headers = { ...this.#headers, ...trailers };
    if (this.#http === 0 || (this.#http === 200 && trailers === undefined && isGrpcType(type))) {
      return this.finish(this.#broken());
    }
    if (trailers === undefined) {
      const code = this.#http === 200 ? "UNKNOWN" : codeOfHttp(this.#http);
      const words = `HTTP status ${this.#http} (${type ?? "no content type"}) instead of gRPC`;
      return this.finish({ kind: "status", code, words, headers });
    }
    const code = codeOf(String(trailers["grpc-status"]));
    if (code === "OK") return this.#finishBody(headers);
    const words = percentDecoded(String(trailers["grpc-message"] ?? ""));
    this.finish({ kind: "status", code, words, headers });
  }

  #finishBody(headers: IncomingHttpHeaders): void {
    const { message, flaw } = this.#body.end();
    if (flaw === undefined) return this.finish({ kind: "message", message, headers });
    const limit = `is larger than maxReplyBytes (${this.#request.maxReplyBytes})`;
    const words = flaw === "too large" ? limit : `cannot be read: its message is ${flaw}`;
    this.finish({ kind: "flawed", flaw: words, headers });
  }

  /** The stream ended without a status. */
  #broken(): GrpcResult {
    const session = this.#session!;
    const code = this.#stream!.rstCode;
    const when = this.#http === 0 ? "before it answered" : "in the middle of its reply";
    const { keepAliveMs } = this.#options;
    if (this.#silent) return lost("batch", `worker did not answer a ping within ${keepAliveMs} ms`);
    const open = !session.destroyed && !session.closed;
    if (code === constants.NGHTTP2_REFUSED_STREAM) {
      return lost("nobody", open ? "worker refused the call unseen" : "worker was closing the connection");
    }
    if (open) return lost("worker", `worker broke the call off ${when} (HTTP/2 error ${code})`);
    const error = this.#error;
    const tls = error && tlsTrouble(error);
    if (tls?.final === true) return lost("nobody", tls.message);
    if (error !== undefined && isNoHttp2(error)) return unreachable(new NoHttp2());
    const why = error === undefined ? "connection closed" : reason(error);
    return lost(this.#sent ? "batch" : "nobody", `worker closed the connection ${when} (${why})`);
  }

  /** Pings after a silence of `ms`, which doubles each time. */
  #listen(ms: number): void {
    const { clock, keepAliveMs } = this.#options;
    this.#alarm = clock.at(clock.now() + ms, () => {
      if (this.#pings === MAX_PINGS) return;
      this.#pings++;
      const session = this.#session!;
      this.#alarm = clock.at(clock.now() + keepAliveMs, () => {
        this.#silent = true;
        session.destroy();
      });
      session.ping((error) => {
        if (this.finished || error !== null) return;
        this.#alarm?.cancel();
        this.#listen(ms * 2);
      });
    });
  }
}

class NoHttp2 extends Error {}

function unreachable(error: Error): GrpcResult {
  if (error instanceof NoHttp2) return lost("worker", "worker does not speak HTTP/2 at this address");
  const message = tlsTrouble(error)?.message ?? `cannot connect to the worker: ${reason(error)}`;
  return lost("nobody", message);
}

/** Node's error when the peer does not speak HTTP/2. */
function isNoHttp2(error: Error & { code?: string }): boolean {
  return error.code === "ERR_HTTP2_ERROR" && /protocol error|magic/i.test(error.message);
}

function lost(blame: FailureBlame, message: string): GrpcResult {
  return { kind: "lost", blame, message, headers: {} };
}
