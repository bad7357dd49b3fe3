/**
 * One gRPC call of a client and its one answer: a message, or a status.
 *
 * The request's message is taken only when it is asked for and never beyond the limit. For those who look on it is
 * a request like one over HTTP: its route is the method's path, its status what HTTP would have said. How errors
 * become statuses:
 *
 *   400, 409, 422   INVALID_ARGUMENT        413, 429   RESOURCE_EXHAUSTED
 *   401             UNAUTHENTICATED         503        UNAVAILABLE
 *   403             PERMISSION_DENIED       504, 408   DEADLINE_EXCEEDED
 *   404             NOT_FOUND               405, 415   UNIMPLEMENTED
 *   else            INTERNAL
 *
 * A refusal that says when to come back carries `retry-after-ms` and, as gRPC calls it, `grpc-retry-pushback-ms`.
 */
import {
  constants,
  type Http2ServerResponse,
  type OutgoingHttpHeaders,
  type ServerHttp2Stream,
} from "node:http2";
import type { IncomingMessage } from "node:http";
import type { Alarm, Clock } from "../app/clock.ts";
import { type ErrorCode, Refusal } from "../core/errors.ts";
import {
  codeNumber,
  framed,
  type GrpcCode,
  GRPC_TYPE,
  isGrpcType,
  percentEncoded,
  timeoutMs,
  Unframer,
} from "./protocol/grpc-wire.ts";
import { CLIENT_LEFT } from "../observe/events.ts";
import type { ClientBytes } from "./byte-budget.ts";
import { CountedRequest } from "./counted-request.ts";
import { newId } from "../engine/ids.ts";
import { quotaHeaders } from "./reply.ts";
import type { PathRequest } from "./request-path.ts";

export interface CallLimits {
  readonly maxMessageBytes: number;
  /** An answer that the client does not take within this time ends the call. */
  readonly writeTimeoutMs: number;
  readonly bytes: ClientBytes;
}

export class GrpcCall extends CountedRequest implements PathRequest {
  readonly path: string;
  readonly startedAt: number;
  readonly #response: Http2ServerResponse;
  readonly #stream: ServerHttp2Stream;
  readonly #limits: CallLimits;
  readonly #clock: Clock;
  readonly #failed: (call: GrpcCall, error: unknown) => void;
  /** Of the client's deadline. */
  #alarm: Alarm | undefined;
  #gone: (() => void) | undefined;
  /** The client was gone before it was answered, or its time was up. */
  #left = false;
  #answered = false;

  constructor(
    request: IncomingMessage,
    response: Http2ServerResponse,
    limits: CallLimits,
    clock: Clock,
    failed: (call: GrpcCall, error: unknown) => void,
  ) {
    super(request, limits.bytes);
    this.#response = response;
    this.#stream = response.stream;
    this.#limits = limits;
    this.#clock = clock;
    this.#failed = failed;
    this.startedAt = clock.now();
    this.path = request.url!;
  }

  get method(): string {
    return this.request.method!;
  }

  header(name: string): string | undefined {
    const value = this.request.headers[name];
    return typeof value === "string" ? value : value?.[0];
  }

  /** Or nobody is there any more to be answered. */
  get answered(): boolean {
    return this.#answered || this.#left;
  }

  failed(error: unknown): void {
    this.#failed(this, error);
  }

  onGone(gone: () => void): void {
    this.#gone = gone;
    if (this.#left) gone();
  }

  /** What is wrong with the call before anything of its message is read; also starts the client's clock. */
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

  /** It is no gRPC at all: told in HTTP's words. */
  get foreign(): number | undefined {
    if (this.method !== "POST") return 405;
    return isGrpcType(this.header("content-type")) ? undefined : 415;
  }

  failHttp(status: number): void {
    if (this.answered) return;
    this.#end(status, status === 405 ? "METHOD_NOT_ALLOWED" : "UNSUPPORTED_MEDIA_TYPE");
    this.#stream.respond({ ":status": status }, { endStream: true });
  }

  /** The request's message. Never settles when the client leaves in the middle: then nobody is left to be answered. */
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
    // Node's own object for the response sends the trailers, and would send none before anybody else could.
    this.#response.addTrailers({ "grpc-status": "0" });
    this.#response.writeHead(200, { "content-type": GRPC_TYPE, ...fields(headers) });
    const message = framed(parts);
    this.#response.end(message);
    this.holdAnswer(message.length);
    stream.setTimeout(this.#limits.writeTimeoutMs, () => stream.close(constants.NGHTTP2_CANCEL));
  }

  /** `code`: where another fits better than that of the refusal's HTTP status. */
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

  /** The listener's word that the stream is at its end. */
  closed(): void {
    this.#alarm?.cancel();
    this.releaseAll();
    // An answer that the connection did not take was not given; one that came too late for the client stays a 504.
    if (!this.#left && !this.#stream.writableFinished) {
      this.status = CLIENT_LEFT;
      this.code = "";
    }
    if (!this.answered) this.#leave();
  }

  /** It is over, and its fields stay as they are. */
  over(now: number): void {
    this.latencyMs = now - this.startedAt;
    if (this.status === 0) this.status = CLIENT_LEFT;
  }

  /** The client waits no longer: what it asked for is cancelled as if it had left. */
  #late(): void {
    if (this.answered) return;
    this.fail(new Refusal("DEADLINE_EXCEEDED", "no answer within the client's own deadline"));
    this.#leave();
  }

  #leave(): void {
    this.#left = true;
    this.#gone?.();
  }

  #end(status: number, code: ErrorCode | ""): void {
    this.#answered = true;
    this.#alarm?.cancel();
    this.status = status;
    this.code = code;
  }
}

/** name, value, name, value… as Node takes them for HTTP/2. */
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
