/**
 * Calls of one message each way to one gRPC server: one HTTP/2 connection, one call at a time.
 *
 * The connection is made for the first call and kept. A call that is aborted is cancelled (RST_STREAM) and takes
 * its connection along: what went silent once should not be trusted with the next batch. The connection is also
 * left when the server says that it will close it (GOAWAY), and when the certificates changed.
 *
 * A peer that died without a word: an idle connection is tried by TCP (`keepAliveMs`); a call that has heard nothing
 * for `keepAliveMs` sends an HTTP/2 PING, and again after twice and four times as long. A PING that is not answered
 * within `keepAliveMs` ends the connection. There are three at most in one call, and none without one, because gRPC
 * servers hang up on clients that ask more often ("too_many_pings").
 *
 * What becomes of a call:
 *
 *   message   status OK and one message
 *   status    the server said another status; also what a proxy's HTTP status stands for
 *   flawed    status OK, but no message that can be read
 *   lost      no status. `nobody`: the server has not got it, or says that it did not look at it;
 *             `batch`: the connection ended with the call in the server's hands; `worker`: the server broke it off
 */
import { constants, type ClientHttp2Session, type ClientHttp2Stream, connect } from "node:http2";
import type { IncomingHttpHeaders, IncomingHttpStatusHeader } from "node:http2";
import type { Alarm, Clock } from "../../app/clock.ts";
import {
  codeOf,
  codeOfHttp,
  type GrpcCode,
  GRPC_TYPE,
  isGrpcType,
  percentDecoded,
  Unframer,
} from "../../gateway/protocol/grpc-wire.ts";
import { reason } from "./http-exchange.ts";
import { tlsTrouble, type WorkerTls } from "./worker-tls.ts";

/** A connection that was silent for so long is checked. */
export const KEEP_ALIVE_MS = 10_000;

export interface GrpcRequest {
  /** `/package.Service/Method` */
  readonly path: string;
  /** Metadata, names in small letters. */
  readonly headers: Readonly<Record<string, string>>;
  /** With its prefix. */
  readonly body: Buffer;
  readonly maxReplyBytes: number;
}

export type GrpcResult = { readonly headers: IncomingHttpHeaders } & (
  | { readonly kind: "message"; readonly message: Buffer }
  | { readonly kind: "status"; readonly code: GrpcCode; readonly words: string }
  | { readonly kind: "flawed"; readonly flaw: string }
  | { readonly kind: "lost"; readonly blame: "worker" | "batch" | "nobody"; readonly message: string }
);

const STREAM_WINDOW_BYTES = 1024 * 1024;
const SESSION_WINDOW_BYTES = 4 * 1024 * 1024;
/** How long a connection that was told to end may take. */
const GOODBYE_MS = 1000;
const MAX_PINGS = 3;

export class GrpcChannel {
  readonly #url: URL;
  readonly #host: string | undefined;
  readonly #tls: WorkerTls;
  readonly #clock: Clock;
  readonly #keepAliveMs: number;
  #session: ClientHttp2Session | undefined;
  /** Of the certificates with which it was made. */
  #version = 0;
  /** Those that were told to end, each with the time that it has. */
  readonly #retired = new Map<ClientHttp2Session, Alarm>();
  #call: Call | undefined;
  #closed = false;

  /** `host`: the `name:port` that it is asked by, where its URL holds an address that was looked up. */
  constructor(
    { url, host }: { readonly url: URL; readonly host?: string | undefined },
    tls: WorkerTls,
    clock: Clock,
    keepAliveMs: number,
  ) {
    this.#url = url;
    this.#host = host;
    this.#tls = tls;
    this.#clock = clock;
    this.#keepAliveMs = keepAliveMs;
  }

  /** Never rejects. One at a time. */
  async call(request: GrpcRequest, signal: AbortSignal): Promise<GrpcResult> {
    const call = (this.#call = new Call(request, this.#clock, this.#keepAliveMs));
    const abort = (): void => call.finish(lost("nobody", "aborted"));
    signal.addEventListener("abort", abort);
    void this.#start(call);
    const result = await call.result;
    signal.removeEventListener("abort", abort);
    this.#call = undefined;
    if (!call.intact) this.#retire();
    return result;
  }

  /** Ends what is running, at once. */
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

  async #start(call: Call): Promise<void> {
    try {
      if (this.#version !== this.#tls.version) this.#retire();
      this.#version = this.#tls.version;
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
    const { protocol, host, hostname } = this.#url;
    const secure = protocol === "grpcs:";
    const socket = await this.#tls.open(this.#url, this.#host);
    if (secure && socket.alpnProtocol !== "h2") {
      socket.destroy();
      throw new NoHttp2();
    }
    socket.setKeepAlive(true, this.#keepAliveMs);
    const session = connect(`${secure ? "https" : "http"}://${(this.#host ?? host) || hostname}`, {
      createConnection: () => socket,
      settings: { enablePush: false, initialWindowSize: STREAM_WINDOW_BYTES },
    });
    // What a stream has to say about it, it says itself.
    session.on("error", () => {});
    session.once("connect", () => {
      if (!session.destroyed) session.setLocalWindowSize(SESSION_WINDOW_BYTES);
    });
    return session;
  }

  /** It takes no further call; what it still has to send, it sends. */
  #retire(): void {
    const session = this.#session;
    this.#session = undefined;
    if (session === undefined || session.destroyed) return;
    session.close();
    if (this.#closed || session.destroyed) return session.destroy();
    const alarm = this.#clock.at(this.#clock.now() + GOODBYE_MS, () => session.destroy());
    this.#retired.set(session, alarm);
    session.once("close", () => {
      alarm.cancel();
      this.#retired.delete(session);
    });
  }
}

/** One call until exactly one result is known. */
class Call {
  readonly result: Promise<GrpcResult>;
  readonly #request: GrpcRequest;
  readonly #clock: Clock;
  readonly #keepAliveMs: number;
  readonly #body: Unframer;
  #resolve: (result: GrpcResult) => void = () => {};
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

  constructor(request: GrpcRequest, clock: Clock, keepAliveMs: number) {
    this.#request = request;
    this.#clock = clock;
    this.#keepAliveMs = keepAliveMs;
    this.#body = new Unframer(request.maxReplyBytes);
    this.result = new Promise((resolve) => (this.#resolve = resolve));
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
    stream.on("error", (error) => (this.#error ??= error));
    stream.on("finish", () => (this.#sent = true));
    stream.on("response", (headers) => this.#answered(headers));
    stream.on("data", (chunk: Buffer) => this.#read(chunk));
    stream.on("trailers", (trailers) => this.#noteStatus(trailers));
    stream.on("end", () => {
      if (this.#trailers !== undefined || this.#http !== 200) this.#conclude();
    });
    stream.on("close", () => this.#conclude());
    session.on("error", this.#sessionFailed);
    stream.end(body);
    this.#listen(this.#keepAliveMs);
  }

  /** The first one counts. Without one from the server the call is cancelled. */
  finish(result: GrpcResult): void {
    if (this.finished) return;
    this.finished = true;
    this.#alarm?.cancel();
    this.#session?.off("error", this.#sessionFailed);
    const said = result.kind === "message" || result.kind === "status";
    this.intact = said;
    const stream = this.#stream;
    if (stream !== undefined && !stream.closed) {
      // It may answer before it has read everything, and need not read the rest then.
      if (!said || !stream.writableFinished) stream.close(constants.NGHTTP2_CANCEL);
    }
    const sent = result.kind === "lost" && result.message === "aborted" && this.#sent;
    this.#resolve(sent ? lost("batch", "aborted") : result);
  }

  readonly #sessionFailed = (error: Error): void => {
    this.#error ??= error;
  };

  #answered(headers: IncomingHttpHeaders & IncomingHttpStatusHeader): void {
    this.#heard();
    this.#http = headers[":status"] ?? 0;
    this.#headers = headers;
    this.#noteStatus(headers);
  }

  #noteStatus(headers: IncomingHttpHeaders): void {
    this.#heard();
    if (headers["grpc-status"] !== undefined) this.#trailers = headers;
  }

  #read(chunk: Buffer): void {
    this.#heard();
    if (this.finished || this.#http !== 200 || !isGrpcType(this.#headers["content-type"])) return;
    if (!this.#body.take(chunk)) this.#flawed();
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
    if (code !== "OK") {
      const words = percentDecoded(String(trailers["grpc-message"] ?? ""));
      return this.finish({ kind: "status", code, words, headers });
    }
    const read = this.#body.end();
    if (read.flaw === undefined) this.finish({ kind: "message", message: read.message, headers });
    else this.#flawed();
  }

  #flawed(): void {
    const read = this.#body.end();
    if (read.flaw === undefined) return;
    const flaw =
      read.flaw === "too large"
        ? `is larger than maxReplyBytes (${this.#request.maxReplyBytes})`
        : `cannot be read: its message is ${read.flaw}`;
    this.finish({ kind: "flawed", flaw, headers: this.#headers });
  }

  /** The stream is over and the server has said no status. */
  #broken(): GrpcResult {
    const session = this.#session!;
    const code = this.#stream!.rstCode;
    const when = this.#http === 0 ? "before it answered" : "in the middle of its reply";
    if (this.#silent) return lost("batch", `worker did not answer a ping within ${this.#keepAliveMs} ms`);
    if (!session.destroyed && !session.closed) {
      if (code === constants.NGHTTP2_REFUSED_STREAM) return lost("nobody", "worker refused the call unseen");
      return lost("worker", `worker broke the call off ${when} (HTTP/2 error ${code})`);
    }
    if (code === constants.NGHTTP2_REFUSED_STREAM) return lost("nobody", "worker was closing the connection");
    const error = this.#error;
    const tls = error && tlsTrouble(error);
    if (tls?.final === true) return lost("nobody", tls.message);
    if (error !== undefined && speaksNoHttp2(error)) return unreachable(new NoHttp2());
    const why = error === undefined ? "connection closed" : reason(error);
    return lost(this.#sent ? "batch" : "nobody", `worker closed the connection ${when} (${why})`);
  }

  #heard(): void {
    this.#pings = 0;
  }

  /** Asks after a silence of `ms`; each time it waits twice as long. */
  #listen(ms: number): void {
    this.#alarm = this.#clock.at(this.#clock.now() + ms, () => {
      if (this.#pings === MAX_PINGS) return;
      this.#pings++;
      const session = this.#session!;
      this.#alarm = this.#clock.at(this.#clock.now() + this.#keepAliveMs, () => {
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
  const tls = tlsTrouble(error);
  if (tls !== undefined) return lost("nobody", tls.message);
  return lost("nobody", `cannot connect to the worker: ${reason(error)}`);
}

/** What Node says when the bytes that come are no frames. */
function speaksNoHttp2(error: Error): boolean {
  return codeText(error) === "ERR_HTTP2_ERROR" && /protocol error|magic/i.test(error.message);
}

function codeText(error: Error): string {
  return "code" in error ? String(error.code) : "";
}

function lost(blame: "worker" | "batch" | "nobody", message: string): GrpcResult {
  return { kind: "lost", blame, message, headers: {} };
}
