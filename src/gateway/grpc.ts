/**
 * The listener for clients that speak gRPC: `inference.GRPCInferenceService` of the Open Inference Protocol v2.
 *
 * HTTP/2 by itself (h2c) or, with `tls`, behind the same certificates as the HTTP listener, and under the same
 * limits (`http2.ts`). A call goes through the same door as every request: ModelInfer becomes one task per row
 * (`gateway/protocol/oip-grpc.ts`), which ride in whichever batches come first (`crossing.ts`).
 *
 * ServerLive and ServerReady are for load balancers: they need no credentials and are not counted. The others do, as
 * `authorization` or `x-api-key` in the metadata.
 */
import { createServer as createPlainServer, type AddressInfo, type Server, type Socket } from "node:net";
import type { IncomingMessage, ServerResponse } from "node:http";
import type { Http2ServerResponse } from "node:http2";
import { createServer as createTlsServer, type TLSSocket } from "node:tls";
import type { Clock } from "../app/clock.ts";
import { Refusal } from "../core/errors.ts";
import type { Sampler } from "../core/trace.ts";
import { answerOf, draftsOf } from "./protocol/oip-grpc.ts";
import {
  OIP_SERVICE,
  readModelName,
  writeModelMetadata,
  writeServerMetadata,
  writeYes,
} from "./protocol/oip-proto.ts";
import { ProtoFlaw, type ProtoWriter } from "./protocol/protobuf.ts";
import type { Events } from "../observe/events.ts";
import type { ClientBytes } from "./byte-budget.ts";
import type { Crossing } from "./crossing.ts";
import { type CallLimits, GrpcCall } from "./grpc-call.ts";
import { Http2Door, streamFlaw } from "./http2.ts";
import type { PageGuard } from "./page-guard.ts";
import type { ListenerLimits } from "./server.ts";
import type { EdgeTls } from "./tls.ts";

export interface GrpcModel {
  readonly name: string;
  /** It takes one task at a time (`maxBatchSize: 1`). */
  readonly alone: boolean;
  readonly ready: () => boolean;
}

/** Calls at once on one connection; clients of one process share a connection. */
export const MAX_CALLS = 1024;

export interface GrpcDoorLimits extends Omit<ListenerLimits, "maxBodyBytes"> {
  readonly maxMessageBytes: number;
  /** Of one request. */
  readonly maxRows: number;
  readonly maxStreams: number;
}

export interface GrpcDoorParts {
  readonly crossing: Crossing;
  /** Those that speak tensors. */
  readonly models: readonly GrpcModel[];
  /** This process takes requests. */
  readonly ready: () => boolean;
  readonly version: string;
  /** Undefined: any `:authority` is accepted. */
  readonly pages?: PageGuard | undefined;
  /** Shared with the other listeners. */
  readonly bytes: ClientBytes;
  readonly clock: Clock;
  readonly events: Events;
  readonly tls?: EdgeTls | undefined;
  readonly sampler?: Sampler | undefined;
}

type Answer = (call: GrpcCall) => Promise<void>;

const MAX_HEADER_BYTES = 16_384;
/** Of a message that is empty, or names a model and a version: every method's but ModelInfer's. */
const MAX_QUESTION_BYTES = 512;

export class GrpcDoor {
  readonly #limits: GrpcDoorLimits;
  readonly #callLimits: CallLimits;
  readonly #parts: GrpcDoorParts;
  readonly #methods: ReadonlyMap<string, Answer>;
  readonly #http2: Http2Door;
  readonly #server: Server;
  readonly #sockets = new Set<Socket>();
  #open = 0;
  #whenQuiet: (() => void) | undefined;

  constructor(limits: GrpcDoorLimits, parts: GrpcDoorParts) {
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
    this.#http2 = new Http2Door(
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

  /** Calls that are not answered yet. */
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

  /** Takes no new connection or call; HTTP/2 has a word for that, so nobody need linger. */
  async drain(): Promise<void> {
    this.#server.close();
    this.#http2.drain();
    if (this.#open > 0) await new Promise<void>((resolve) => (this.#whenQuiet = resolve));
  }

  /** Waits until every call is answered, but not longer than `ms`. */
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
    // Whoever offers nothing else but HTTP/1.1 is refused in the handshake; who offers nothing, here.
    server.on("secureConnection", (socket: TLSSocket) => {
      if (socket.alpnProtocol === "h2") this.#http2.enter(socket);
      else socket.destroy();
    });
    return server;
  }

  #take(request: IncomingMessage, response: ServerResponse, refusal?: Refusal): GrpcCall {
    const { clock, sampler } = this.#parts;
    // What `http2.ts` hands out is HTTP/2's, under HTTP/1.1's name.
    const answer = response as unknown as Http2ServerResponse;
    const { stream } = answer;
    const call = new GrpcCall(request, answer, this.#callLimits, clock);
    if (sampler !== undefined) {
      call.trace = sampler.begin(call.header("traceparent"), call.header("tracestate"));
    }
    this.#open++;
    response.once("close", () => this.#closed(call));
    // A client that leaves while it sends is no error of ours; without a listener it would be.
    request.on("error", ignore);
    stream.on("error", ignore);
    const flaw =
      refusal ?? streamFlaw(request, this.#limits.maxHeaders) ?? this.#parts.pages?.flaw(request.headers);
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
    const enter = (call: GrpcCall): Promise<unknown> => this.#parts.crossing.enter(call);
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
        // Tensors are whatever the model's workers take: nobody here knows them.
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
    const { crossing } = this.#parts;
    const caller = await crossing.enterWithTask(call);
    const { maxRows } = this.#limits;
    const drafts = draftsOf(await call.message(), (name) => this.#model(name).alone, maxRows);
    if (drafts.flaw !== undefined) throw malformed(drafts.flaw);
    const { name } = this.#model(drafts.model);
    const { inputs, parameters } = drafts;
    const crossed = await crossing.cross(call, caller, { model: name, inputs, parameters });
    if (crossed === undefined || call.answered) return;
    const answer = answerOf({ ...drafts, model: name }, crossed.outputs);
    if (answer.flaw !== undefined) throw new Refusal("INFERENCE_FAILED", answer.flaw);
    call.answer(answer.parts, ["x-request-id", call.id, ...crossed.headers]);
  }

  /** By its name; the only one where none is named. */
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
