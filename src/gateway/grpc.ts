/**
 * The gRPC listener: `inference.GRPCInferenceService` of the Open Inference Protocol v2.
 *
 * h2c or, with `tls`, the HTTP listener's certificates, under the same limits (`http2.ts`). ModelInfer becomes one task
 * per row (`protocol/oip-grpc.ts`), which take the same path as HTTP requests (`request-path.ts`).
 *
 * ServerLive and ServerReady are for load balancers: no credentials, not counted. The others need `authorization` or
 * `x-api-key` in the metadata.
 */
import type { IncomingMessage, ServerResponse } from "node:http";
import {
  constants,
  type Http2ServerResponse,
  type OutgoingHttpHeaders,
  type ServerHttp2Stream,
} from "node:http2";
import { type AddressInfo, createServer as createPlainServer, type Server, type Socket } from "node:net";
import { createServer as createTlsServer, type TLSSocket } from "node:tls";
import type { Alarm, Clock } from "../app/clock.ts";
import { type ErrorCode, Refusal } from "../core/errors.ts";
import type { Sampler } from "../core/trace.ts";
import { newId } from "../engine/ids.ts";
import { CLIENT_LEFT, type Events } from "../observe/events.ts";
import { type ClientBytes, ClientRequest } from "./client-request.ts";
import { headerFlaw } from "./headers.ts";
import { type EdgeTls, Http2Sessions } from "./http2.ts";
import type { PageGuard } from "./page-guard.ts";
import {
  codeNumber,
  framed,
  GRPC_TYPE,
  type GrpcCode,
  isGrpcType,
  percentEncoded,
  timeoutMs,
  Unframer,
} from "./protocol/grpc-wire.ts";
import { answerOf, draftsOf } from "./protocol/oip-grpc.ts";
import {
  OIP_SERVICE,
  readModelName,
  writeModelMetadata,
  writeServerMetadata,
  writeYes,
} from "./protocol/oip-proto.ts";
import type { Pad } from "./protocol/oip-pad.ts";
import { ProtoFlaw, type ProtoWriter } from "./protocol/protobuf.ts";
import { quotaHeaders } from "./reply.ts";
import type { PathRequest, RequestPath } from "./request-path.ts";
import type { ListenerLimits } from "./server.ts";

export interface GrpcModel {
  readonly name: string;
  readonly alone: boolean;
  readonly pad?: Pad | undefined;
  readonly ready: () => boolean;
}

/** Concurrent calls per connection; the clients of one process share a connection. */
export const MAX_CALLS = 1024;

export interface GrpcLimits extends Omit<ListenerLimits, "maxBodyBytes"> {
  readonly maxMessageBytes: number;
  readonly maxRows: number;
  readonly maxStreams: number;
}

export interface GrpcParts {
  readonly path: RequestPath;
  readonly models: readonly GrpcModel[];
  readonly ready: () => boolean;
  readonly version: string;
  /** Undefined: any `:authority` is accepted. */
  readonly pages?: PageGuard | undefined;
  readonly bytes: ClientBytes;
  readonly clock: Clock;
  readonly events: Events;
  readonly tls?: EdgeTls | undefined;
  readonly sampler?: Sampler | undefined;
}

type Answer = (call: GrpcCall) => Promise<void>;

const MAX_HEADER_BYTES = 16_384;
/** Bound for messages that are empty or name a model and a version: all but ModelInfer's. */
const MAX_QUESTION_BYTES = 512;

export class GrpcListener {
  readonly #limits: GrpcLimits;
  readonly #callLimits: CallLimits;
  readonly #parts: GrpcParts;
  readonly #methods: ReadonlyMap<string, Answer>;
  readonly #http2: Http2Sessions;
  readonly #server: Server;
  readonly #sockets = new Set<Socket>();
  readonly #fail = (call: GrpcCall, error: unknown): void => this.#failed(call, error);
  #open = 0;
  #whenQuiet: (() => void) | undefined;

  constructor(limits: GrpcLimits, parts: GrpcParts) {
    this.#limits = limits;
    this.#callLimits = {
      maxMessageBytes: limits.maxMessageBytes,
      writeTimeoutMs: limits.requestTimeoutMs,
      bytes: parts.bytes,
    };
    this.#parts = parts;
    this.#methods = this.#service();
    const take = (request: IncomingMessage, response: ServerResponse): GrpcCall =>
      this.#take(request, response);
    const odd = (request: IncomingMessage, response: ServerResponse): GrpcCall =>
      this.#take(request, response, new Refusal("INVALID_REQUEST", "gRPC calls expect nothing"));
    this.#http2 = new Http2Sessions(
      { ...limits, maxHeaderBytes: MAX_HEADER_BYTES },
      { request: take, mayContinue: odd, expectsTooMuch: odd, wantsTunnel: take },
      parts.clock,
      parts.events,
    );
    this.#server = parts.tls === undefined ? createPlainServer() : this.#secure(parts.tls);
    Object.assign(this.#server, { maxConnections: limits.maxConnections, dropMaxConnection: true });
    this.#server.on("connection", (socket: Socket) => {
      this.#sockets.add(socket);
      socket.once("close", () => this.#sockets.delete(socket));
      socket.setNoDelay(true);
      if (parts.tls === undefined) this.#http2.enter(socket);
    });
  }

  get open(): number {
    return this.#open;
  }

  async listen(host: string, port: number): Promise<string> {
    await new Promise<void>((resolve, reject) => {
      this.#server.once("error", reject);
      this.#server.listen({ port, host, backlog: 4096 }, () => {
        this.#server.removeListener("error", reject);
        resolve();
      });
    });
    const { address, family, port: bound } = this.#server.address() as AddressInfo;
    const scheme = this.#parts.tls === undefined ? "grpc" : "grpcs";
    return `${scheme}://${family === "IPv6" ? `[${address}]` : address}:${bound}`;
  }

  /** Sends GOAWAY, so unlike HTTP/1.1 it needs no lingering. */
  async drain(): Promise<void> {
    this.#server.close();
    this.#http2.drain();
    if (this.#open > 0) await new Promise<void>((resolve) => (this.#whenQuiet = resolve));
  }

  async settle(ms: number): Promise<void> {
    if (this.#open === 0) return;
    const { clock } = this.#parts;
    await new Promise<void>((resolve) => {
      const alarm = clock.at(clock.now() + ms, resolve);
      this.#whenQuiet = () => {
        alarm.cancel();
        resolve();
      };
    });
  }

  close(): void {
    this.#server.close();
    this.#http2.close();
    for (const socket of this.#sockets) socket.destroy();
  }

  #secure({ certificates, minVersion }: EdgeTls): Server {
    const server = createTlsServer({
      ...certificates.material,
      minVersion,
      handshakeTimeout: this.#limits.headersTimeoutMs,
      ALPNProtocols: ["h2"],
    });
    certificates.onChange((material) => server.setSecureContext({ ...material, minVersion }));
    // A client that offers only HTTP/1.1 is refused in the handshake; one without ALPN, here.
    server.on("secureConnection", (socket: TLSSocket) => {
      if (socket.alpnProtocol === "h2") this.#http2.enter(socket);
      else socket.destroy();
    });
    return server;
  }

  #take(request: IncomingMessage, response: ServerResponse, refusal?: Refusal): GrpcCall {
    const { clock, sampler } = this.#parts;
    // `http2.ts` passes HTTP/2 objects under HTTP/1.1 types.
    const answer = response as unknown as Http2ServerResponse;
    const { stream } = answer;
    const call = new GrpcCall(request, answer, this.#callLimits, clock, this.#fail);
    if (sampler !== undefined) {
      call.trace = sampler.begin(call.header("traceparent"), call.header("tracestate"));
    }
    this.#open++;
    response.once("close", () => this.#closed(call));
    // A client that disconnects while sending is not our error; without a listener it would be thrown.
    request.on("error", ignore);
    stream.on("error", ignore);
    const flaw =
      refusal ?? headerFlaw(request, this.#limits.maxHeaders) ?? this.#parts.pages?.flaw(request.headers);
    this.#run(call, flaw).catch((error: unknown) => this.#failed(call, error));
    return call;
  }

  async #run(call: GrpcCall, refusal: Refusal | undefined): Promise<void> {
    if (refusal !== undefined) throw refusal;
    const { foreign } = call;
    if (foreign !== undefined) return call.failHttp(foreign);
    const answer = this.#methods.get(call.path);
    if (answer === undefined) {
      const words = `there is no such method; ${OIP_SERVICE} has ${[...METHODS].join(", ")}`;
      return call.fail(new Refusal("NOT_FOUND", words), "UNIMPLEMENTED");
    }
    call.route = call.path;
    const flaw = call.check();
    if (flaw !== undefined) throw flaw;
    await answer(call);
  }

  #closed(call: GrpcCall): void {
    call.closed();
    this.#open--;
    if (this.#open === 0) this.#whenQuiet?.();
    const { events, clock } = this.#parts;
    if (!call.counts || !events.heard("request.answered")) return;
    call.over(clock.now());
    events.emit("request.answered", call);
  }

  #failed(call: GrpcCall, error: unknown): void {
    if (call.answered) return;
    if (error instanceof Refusal) return call.fail(error);
    if (error instanceof ProtoFlaw) return call.fail(malformed(error.message));
    const what = error instanceof Error ? (error.stack ?? error.message) : String(error);
    this.#parts.events.emit("notice", { level: "error", message: `this is a bug in Ferry: ${what}` });
    call.fail(new Refusal("INTERNAL", "an internal error; it is logged, and the call may be made again"));
  }

  #service(): ReadonlyMap<string, Answer> {
    const { ready, version } = this.#parts;
    const enter = async (call: GrpcCall): Promise<unknown> => this.#parts.path.identify(call);
    const ours: Record<Method, Answer> = {
      ServerLive: (call) => this.#tell(call, () => writeYes(true)),
      ServerReady: (call) => this.#tell(call, () => writeYes(ready())),
      ServerMetadata: async (call) => {
        await enter(call);
        await call.message(MAX_QUESTION_BYTES);
        call.answer(writeServerMetadata("ferry", version, []).parts());
      },
      ModelReady: async (call) => {
        await enter(call);
        const model = this.#model(readModelName(await call.message(MAX_QUESTION_BYTES)).name);
        call.answer(writeYes(ready() && model.ready()).parts());
      },
      ModelMetadata: async (call) => {
        await enter(call);
        const { name } = this.#model(readModelName(await call.message(MAX_QUESTION_BYTES)).name);
        // Ferry does not know the tensors of a model.
        const known = { name, versions: [], platform: "ferry", inputs: [], outputs: [] };
        call.answer(writeModelMetadata(known).parts());
      },
      ModelInfer: (call) => this.#infer(call),
    };
    return new Map(METHODS.map((name) => [`/${OIP_SERVICE}/${name}`, ours[name]]));
  }

  async #tell(call: GrpcCall, told: () => ProtoWriter): Promise<void> {
    call.counts = false;
    await call.message(MAX_QUESTION_BYTES);
    call.answer(told().parts());
  }

  async #infer(call: GrpcCall): Promise<void> {
    const { path } = this.#parts;
    const caller = await path.admit(call);
    const { maxRows } = this.#limits;
    const drafts = draftsOf(await call.message(), (name) => this.#model(name), maxRows);
    if (drafts.flaw !== undefined) throw malformed(drafts.flaw);
    const { name } = this.#model(drafts.model);
    const { inputs, parameters } = drafts;
    await path.run(call, caller, { model: name, inputs, parameters }, (ended) => {
      if (call.answered) return;
      const answer = answerOf({ ...drafts, model: name }, path.outputs(ended));
      if (answer.flaw !== undefined) throw new Refusal("INFERENCE_FAILED", answer.flaw);
      call.answer(answer.parts, ["x-request-id", call.id, ...ended.headers]);
    });
  }

  /** By name; without a name, the only model. */
  #model(name: string): GrpcModel {
    const { models } = this.#parts;
    const model = name === "" && models.length === 1 ? models[0] : models.find((each) => each.name === name);
    if (model !== undefined) return model;
    const what = name === "" ? "name a model" : `the model ${JSON.stringify(name.slice(0, 128))} is not here`;
    const names = models.map((each) => each.name).join(", ");
    throw new Refusal("NOT_FOUND", `${what}; those that speak tensors: ${names || "none"}`);
  }
}

const METHODS = [
  "ServerLive",
  "ServerReady",
  "ModelReady",
  "ServerMetadata",
  "ModelMetadata",
  "ModelInfer",
] as const;
type Method = (typeof METHODS)[number];

function malformed(flaw: string): Refusal {
  return new Refusal("INVALID_REQUEST", flaw);
}

function ignore(): void {}

export interface CallLimits {
  readonly maxMessageBytes: number;
  /** A client that does not read its response within this time is cut off. */
  readonly writeTimeoutMs: number;
  readonly bytes: ClientBytes;
}

export class GrpcCall extends ClientRequest implements PathRequest {
  readonly path: string;
  readonly #response: Http2ServerResponse;
  readonly #stream: ServerHttp2Stream;
  readonly #limits: CallLimits;
  readonly #clock: Clock;
  readonly #failed: (call: GrpcCall, error: unknown) => void;
  #alarm: Alarm | undefined;
  #answered = false;

  constructor(
    request: IncomingMessage,
    response: Http2ServerResponse,
    limits: CallLimits,
    clock: Clock,
    failed: (call: GrpcCall, error: unknown) => void,
  ) {
    super(request, clock.now(), limits.bytes);
    this.#response = response;
    this.#stream = response.stream;
    this.#limits = limits;
    this.#clock = clock;
    this.#failed = failed;
    this.path = request.url!;
  }

  /** True also once the client has left. */
  get answered(): boolean {
    return this.#answered || this.left;
  }

  failed(error: unknown): void {
    this.#failed(this, error);
  }

  /** Checks the call before its message is read, and starts the client's deadline. */
  check(): Refusal | undefined {
    const encoding = this.header("grpc-encoding") ?? "identity";
    if (encoding !== "identity") {
      const words = `send messages uncompressed, not as ${encoding.slice(0, 32)}`;
      return new Refusal("UNSUPPORTED_MEDIA_TYPE", words);
    }
    const timeout = this.header("grpc-timeout");
    if (timeout === undefined) return undefined;
    const ms = timeoutMs(timeout);
    if (ms === undefined) return new Refusal("INVALID_REQUEST", "grpc-timeout is malformed");
    this.#alarm = this.#clock.at(this.startedAt + ms, () => this.#late());
    return undefined;
  }

  get foreign(): number | undefined {
    if (this.method !== "POST") return 405;
    return isGrpcType(this.header("content-type")) ? undefined : 415;
  }

  failHttp(status: number): void {
    if (this.answered) return;
    this.#end(status, status === 405 ? "METHOD_NOT_ALLOWED" : "UNSUPPORTED_MEDIA_TYPE");
    this.#stream.respond({ ":status": status }, { endStream: true });
  }

  /** The request message. Never settles if the client leaves first. */
  message(maxMessageBytes = this.#limits.maxMessageBytes): Promise<Buffer> {
    const body = new Unframer(maxMessageBytes);
    const { request } = this;
    return new Promise((resolve, reject) => {
      const end = (): void => {
        request.removeAllListeners("data");
        this.releaseBody();
        const read = body.end();
        if (read.flaw === undefined) resolve(read.message);
        else reject(flawOf(read.flaw, maxMessageBytes));
      };
      request.on("data", (chunk: Buffer) => {
        if (!body.take(chunk)) return end();
        const refusal = this.holdBody(chunk.length);
        if (refusal === undefined) return;
        request.removeAllListeners("data");
        this.releaseBody();
        reject(refusal);
      });
      request.once("end", () => {
        if (!request.aborted) end();
      });
    });
  }

  answer(parts: readonly Buffer[], headers: readonly string[] = []): void {
    if (this.answered || this.#stream.destroyed) return;
    const stream = this.#stream;
    this.#end(200, "");
    // Node's response object sends the trailers, and sends none if they are added later.
    this.#response.addTrailers({ "grpc-status": "0" });
    this.#response.writeHead(200, { "content-type": GRPC_TYPE, ...fields(headers) });
    const message = framed(parts);
    this.#response.end(message);
    this.holdAnswer(message.length);
    stream.setTimeout(this.#limits.writeTimeoutMs, () => stream.close(constants.NGHTTP2_CANCEL));
  }

  /** `code`: if another fits better than that of the HTTP status. */
  fail(refusal: Refusal, code: GrpcCode = grpcCodeOf(refusal.status)): void {
    if (this.answered || this.#stream.destroyed) return;
    if (this.id === "") this.id = newId(this.startedAt);
    const { retryAfterMs, status } = refusal;
    this.#end(status, refusal.code);
    const wait = retryAfterMs === undefined ? undefined : String(Math.ceil(retryAfterMs));
    this.#stream.respond(
      {
        ":status": 200,
        "content-type": GRPC_TYPE,
        "grpc-status": String(codeNumber(code)),
        "grpc-message": percentEncoded(refusal.message),
        "x-request-id": this.id,
        ...(status === 415 && { "grpc-accept-encoding": "identity" }),
        ...(wait !== undefined && { "retry-after-ms": wait, "grpc-retry-pushback-ms": wait }),
        ...fields(quotaHeaders(refusal.quota)),
      },
      { endStream: true },
    );
  }

  closed(): void {
    this.#alarm?.cancel();
    this.releaseAll();
    // A response the connection did not take was not delivered; one past the client's deadline stays a 504.
    if (!this.left && !this.#stream.writableFinished) {
      this.status = CLIENT_LEFT;
      this.code = "";
    }
    if (!this.answered) this.leave();
  }

  /** The client's deadline passed: cancels its tasks as if it had disconnected. */
  #late(): void {
    if (this.answered) return;
    this.fail(new Refusal("DEADLINE_EXCEEDED", "no answer within the client's own deadline"));
    this.leave();
  }

  #end(status: number, code: ErrorCode | ""): void {
    this.#answered = true;
    this.#alarm?.cancel();
    this.status = status;
    this.code = code;
  }
}

function fields(headers: readonly string[]): OutgoingHttpHeaders {
  const found: OutgoingHttpHeaders = {};
  for (let at = 0; at < headers.length; at += 2) found[headers[at]!] = headers[at + 1];
  return found;
}

function flawOf(flaw: string, maxMessageBytes: number): Refusal {
  if (flaw === "too large") {
    return new Refusal("PAYLOAD_TOO_LARGE", `the message is larger than ${maxMessageBytes} bytes`);
  }
  if (flaw === "compressed") return new Refusal("UNSUPPORTED_MEDIA_TYPE", "send messages uncompressed");
  return new Refusal("INVALID_REQUEST", `send one message: this is ${flaw}`);
}

const CODES: ReadonlyMap<number, GrpcCode> = new Map<number, GrpcCode>([
  [400, "INVALID_ARGUMENT"],
  [401, "UNAUTHENTICATED"],
  [403, "PERMISSION_DENIED"],
  [404, "NOT_FOUND"],
  [405, "UNIMPLEMENTED"],
  [408, "DEADLINE_EXCEEDED"],
  [409, "INVALID_ARGUMENT"],
  [413, "RESOURCE_EXHAUSTED"],
  [415, "UNIMPLEMENTED"],
  [422, "INVALID_ARGUMENT"],
  [429, "RESOURCE_EXHAUSTED"],
  [431, "INVALID_ARGUMENT"],
  [503, "UNAVAILABLE"],
  [504, "DEADLINE_EXCEEDED"],
]);

export function grpcCodeOf(status: number): GrpcCode {
  return CODES.get(status) ?? "INTERNAL";
}
