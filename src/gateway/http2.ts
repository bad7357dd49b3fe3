/**
 * HTTP/2 connections with the requests, responses and limits of HTTP/1.1.
 *
 * Node's HTTP/2 compatibility objects fit `Exchange`. Bounded here: a connection without open requests has
 * `headersTimeoutMs` for its first one and `keepAliveTimeoutMs` for the next, whatever else it sends; a request has
 * `requestTimeoutMs` for its body. Node bounds streams, headers, resets, settings and pings; headers beyond those
 * bounds reset the stream instead of a 431.
 */
import type { IncomingMessage, ServerResponse } from "node:http";
import {
  constants,
  createServer,
  type Http2Server,
  type Http2ServerRequest,
  type Http2ServerResponse,
  type ServerHttp2Session,
  type ServerHttp2Stream,
} from "node:http2";
import { createServer as createHttpsServer, type Server, type ServerOptions } from "node:https";
import type { Socket } from "node:net";
import type { Duplex } from "node:stream";
import type { TLSSocket } from "node:tls";
import type { Alarm, Clock } from "../app/clock.ts";
import { Refusal } from "../core/errors.ts";
import type { Events } from "../observe/events.ts";
import type { Certificates } from "./certificates.ts";

export interface Http2Limits {
  readonly maxHeaders: number;
  readonly maxHeaderBytes: number;
  readonly maxStreams: number;
  readonly headersTimeoutMs: number;
  readonly requestTimeoutMs: number;
  readonly keepAliveTimeoutMs: number;
}

export type Taker = (request: IncomingMessage, response: ServerResponse) => { fail(refusal: Refusal): void };
export type Http2Takers = {
  readonly [name in "request" | "mayContinue" | "expectsTooMuch" | "wantsTunnel"]: Taker;
};

/** `:method`, `:scheme`, `:authority` and `:path` count as headers. */
const PSEUDO_HEADERS = 4;
/** Header fields per request; more than any client or proxy sends. */
export const MAX_HEADERS = 100;
export const MAX_STREAMS = 256;
/** Beyond `maxHeaders`, so that a few too many get a 431 and only a flood is cut. */
const HEADERS_TO_ANSWER = 100;
/** Unread bytes per request, and per connection. */
const STREAM_WINDOW_BYTES = 256 * 1024;
const SESSION_WINDOW_BYTES = 1024 * 1024;
/** Sustained resets per second per client; the burst is two per stream. */
const RESETS_PER_SECOND = 33;
/**
 * Requests opened beyond `maxStreams` before the client has read SETTINGS count as bad too: with Node's default, a
 * burst of some hundred would end the connection and all its responses.
 */
const MAX_BAD_FRAMES = 10_000;
/**
 * MB per session. Node counts unread responses: beyond the bound it resets requests, and after
 * `maxSessionRejectedStreams` the connection. 512 concurrent calls with 60 KB responses far exceed the default of 10.
 * Responses are bounded by tenant (`client-request.ts`), requests by `maxStreams`, headers and windows.
 */
const NO_SESSION_BOUND = 2 ** 32 - 1;
/** Connection errors are logged at most this often. */
const TELL_EVERY_MS = 60_000;
const ORDINARY_ENDS: ReadonlySet<string | undefined> = new Set(["ECONNRESET", "EPIPE", "ETIMEDOUT"]);
/** How long a connection may take to close after GOAWAY. */
const GOODBYE_MS = 1000;

interface Visit {
  open: number;
  asked: boolean;
  alarm: Alarm | undefined;
}

export class Http2Sessions {
  readonly #server: Http2Server;
  readonly #limits: Http2Limits;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #visits = new Map<ServerHttp2Session, Visit>();
  #toldAt = -Infinity;
  #draining = false;

  constructor(limits: Http2Limits, takers: Http2Takers, clock: Clock, events: Events) {
    this.#limits = limits;
    this.#clock = clock;
    this.#events = events;
    this.#server = createServer({
      settings: {
        enablePush: false,
        maxConcurrentStreams: limits.maxStreams,
        maxHeaderListSize: limits.maxHeaderBytes,
        initialWindowSize: STREAM_WINDOW_BYTES,
      },
      maxHeaderListPairs: limits.maxHeaders + PSEUDO_HEADERS + HEADERS_TO_ANSWER,
      maxSessionInvalidFrames: MAX_BAD_FRAMES,
      maxSessionRejectedStreams: MAX_BAD_FRAMES,
      maxSessionMemory: NO_SESSION_BOUND,
      streamResetBurst: 2 * limits.maxStreams,
      streamResetRate: RESETS_PER_SECOND,
    });
    this.#server.on("session", (session) => this.#entered(session));
    this.#server.on("sessionError", (error, session) => this.#ended(error, session));
    for (const [event, take] of [
      ["request", takers.request],
      ["checkContinue", takers.mayContinue],
      ["checkExpectation", takers.expectsTooMuch],
      // Node's own response would leave the stream, and so the connection, open for as long as the client likes.
      ["connect", takers.wantsTunnel],
    ] as const) {
      this.#server.on(event, (request: Http2ServerRequest, response: Http2ServerResponse) =>
        this.#take(request, response, take),
      );
    }
  }

  /** A connection that negotiated HTTP/2, or h2c. */
  enter(socket: Duplex): void {
    this.#server.emit("connection", socket);
  }

  drain(): void {
    this.#draining = true;
    for (const session of this.#visits.keys()) session.close();
  }

  close(): void {
    for (const [session, { alarm }] of this.#visits) {
      alarm?.cancel();
      session.destroy();
    }
  }

  #entered(session: ServerHttp2Session): void {
    const visit: Visit = { open: 0, asked: false, alarm: undefined };
    this.#visits.set(session, visit);
    session.once("close", () => {
      visit.alarm?.cancel();
      this.#visits.delete(session);
    });
    session.setLocalWindowSize(SESSION_WINDOW_BYTES);
    session.on("stream", (stream: ServerHttp2Stream) => {
      visit.open++;
      visit.asked = true;
      visit.alarm?.cancel();
      stream.once("close", () => {
        if (--visit.open === 0) this.#endLater(session, visit, this.#limits.keepAliveTimeoutMs);
      });
    });
    this.#endLater(session, visit, this.#limits.headersTimeoutMs);
    if (this.#draining) session.close();
  }

  /** Logs that Node ended a connection and the responses in progress on it. */
  #ended(error: Error & { code?: string }, session: ServerHttp2Session): void {
    const now = this.#clock.now();
    if (this.#visits.get(session)?.asked !== true || now < this.#toldAt + TELL_EVERY_MS) return;
    if (ORDINARY_ENDS.has(error.code)) return;
    this.#toldAt = now;
    const message = `a client's HTTP/2 connection was ended, unanswered requests included: ${error.message}`;
    this.#events.emit("notice", { level: "warn", message });
  }

  #endLater(session: ServerHttp2Session, visit: Visit, ms: number): void {
    if (session.destroyed) return;
    visit.alarm?.cancel();
    visit.alarm = this.#clock.at(this.#clock.now() + ms, () => {
      session.close();
      if (session.destroyed) return;
      visit.alarm = this.#clock.at(this.#clock.now() + GOODBYE_MS, () => session.destroy());
    });
  }

  #take(request: Http2ServerRequest, response: Http2ServerResponse, take: Taker): void {
    request.headers.host ??= request.headers[":authority"];
    // CONNECT has no path.
    request.url ??= "";
    // `Exchange` uses only what both have; `last` has no effect on a shared connection.
    const exchange = take(request as unknown as IncomingMessage, response as unknown as ServerResponse);
    const { stream } = request;
    if (stream.endAfterHeaders || stream.destroyed) return;
    const late = this.#clock.at(this.#clock.now() + this.#limits.requestTimeoutMs, () =>
      exchange.fail(new Refusal("REQUEST_TIMEOUT", "the request was sent too slowly")),
    );
    request.once("end", () => late.cancel());
    response.once("close", () => late.cancel());
    // Answered before the body was read: the client may stop sending. Deferred, since the response is sent at the end
    // of this turn and the reset would overtake it.
    stream.once("finish", () =>
      setImmediate(() => {
        if (!request.complete && !stream.destroyed) stream.close(constants.NGHTTP2_NO_ERROR);
      }),
    );
  }
}

/** TLS of a listener; the certificates are already started, and outlive it. */
export interface EdgeTls {
  readonly certificates: Certificates;
  readonly minVersion: "TLSv1.2" | "TLSv1.3";
  readonly http2: boolean;
  readonly maxStreams: number;
}

export interface TlsLimits {
  readonly maxConnections: number;
  readonly headersTimeoutMs: number;
}

export class TlsServer {
  readonly server: Server;
  /** Also those still in their handshake, which the server does not list. */
  readonly #sockets = new Set<Socket>();
  readonly #door: Http2Sessions | undefined;

  constructor(options: ServerOptions, tls: EdgeTls, limits: TlsLimits, door: Http2Sessions | undefined) {
    const { certificates, minVersion } = tls;
    this.server = createHttpsServer({
      ...options,
      ...certificates.material,
      minVersion,
      handshakeTimeout: limits.headersTimeoutMs,
      // A client that offers only other protocols is refused in the handshake; curl --http1.0 offers only http/1.0.
      ALPNProtocols: [...(door === undefined ? [] : ["h2"]), "http/1.1", "http/1.0"],
    });
    // `dropMaxConnection` (not in Node's types yet): where processes share a port, a full one would return the
    // connection, and the parent would pass it on until one has room.
    Object.assign(this.server, { maxConnections: limits.maxConnections, dropMaxConnection: true });
    this.server.on("connection", (socket: Socket) => this.#keep(socket));
    certificates.onChange((material) => this.server.setSecureContext({ ...material, minVersion }));
    this.#door = door;
    if (door !== undefined) this.#parts(door);
  }

  /** HTTP/2 connections get GOAWAY; HTTP/1.1 is drained by the server. */
  drain(): void {
    this.#door?.drain();
  }

  close(): void {
    this.#door?.close();
    for (const socket of this.#sockets) socket.destroy();
  }

  #keep(socket: Socket): void {
    this.#sockets.add(socket);
    socket.once("close", () => this.#sockets.delete(socket));
  }

  /** Chooses by ALPN before node:https handles the connection. */
  #parts(door: Http2Sessions): void {
    const http1 = this.server.listeners("secureConnection") as ((socket: TLSSocket) => void)[];
    this.server.removeAllListeners("secureConnection");
    this.server.on("secureConnection", (socket: TLSSocket) => {
      if (socket.alpnProtocol === "h2") door.enter(socket);
      else for (const each of http1) each.call(this.server, socket);
    });
  }
}

/** Errors below HTTP, where no response can be sent. */
export function isTlsTrouble(code: string | undefined): boolean {
  return code !== undefined && /^(?:ERR_SSL_|ERR_TLS_|EPROTO$)/.test(code);
}
