/**
 * HTTP/2 connections: the same requests, answers and limits as on HTTP/1.1.
 *
 * Node's own objects for HTTP/2 requests behave like those of HTTP/1.1, so an `Exchange` takes both. What
 * HTTP/1.1's server bounds by itself is bounded here: a connection on which no request is open has
 * `headersTimeoutMs` for its first one and `keepAliveTimeoutMs` for the next, whatever else it sends; a
 * request has `requestTimeoutMs` for its body. Streams at once, headers, resets, settings and pings are
 * bounded by Node. Headers beyond those bounds end the stream rather than being answered 431.
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

/** What the listener does with a request; the objects are HTTP/2's, under HTTP/1.1's names. */
export type Taker = (request: IncomingMessage, response: ServerResponse) => { fail(refusal: Refusal): void };
export type Http2Takers = {
  readonly [name in "request" | "mayContinue" | "expectsTooMuch" | "wantsTunnel"]: Taker;
};

/** `:method`, `:scheme`, `:authority` and `:path` are not headers that anybody wrote. */
const PSEUDO_HEADERS = 4;
/** Header fields of one request; more than any client or proxy sends. */
export const MAX_HEADERS = 100;
/** Requests at once on one HTTP/2 connection. */
export const MAX_STREAMS = 256;
/** Beyond `maxHeaders`, so that a few too many are answered 431 and only a flood is cut. */
const HEADERS_TO_ANSWER = 100;
/** Unread bytes of one request, and of all requests of a connection. */
const STREAM_WINDOW_BYTES = 256 * 1024;
const SESSION_WINDOW_BYTES = 1024 * 1024;
/** Resets a second that a client may send for long; it may send two for each stream at once. */
const RESETS_PER_SECOND = 33;
/**
 * Requests that a client opens beyond `maxStreams` before it has read how many it may count as bad, too: with Node's
 * usual bounds a burst of some hundred would end the connection with the answers to all others.
 */
const MAX_BAD_FRAMES = 10_000;
/**
 * Of a connection's memory, in MB, which Node counts with all answers that the client has not taken: beyond it requests
 * are reset, and after `maxSessionRejectedStreams` of them the connection with all its answers. A client of 512 calls
 * at once with answers of 60 KB is far beyond the default of 10. Answers are bounded by tenant (`byte-budget.ts`),
 * requests by `maxStreams`, headers and windows.
 */
const NO_SESSION_BOUND = 2 ** 32 - 1;
/** A connection that ends in an error is worth a line in the log, but a flood of them is not worth a flood. */
const TELL_EVERY_MS = 60_000;
/** A client that is gone. */
const ORDINARY_ENDS: ReadonlySet<string | undefined> = new Set(["ECONNRESET", "EPIPE", "ETIMEDOUT"]);
/** How long a connection that was told to end may take. */
const GOODBYE_MS = 1000;

interface Visit {
  open: number;
  /** It was used for requests. */
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
      // Node's own answer would leave the stream open, and with it the connection, for as long as a client likes.
      ["connect", takers.wantsTunnel],
    ] as const) {
      this.#server.on(event, (request: Http2ServerRequest, response: Http2ServerResponse) =>
        this.#take(request, response, take),
      );
    }
  }

  /** A connection whose client chose HTTP/2, or has no other choice. */
  enter(socket: Duplex): void {
    this.#server.emit("connection", socket);
  }

  /** Every connection takes no further request and ends with its last answer. */
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

  /** Says that Node ended a connection, and with it the answers that were on their way. */
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
    // What Exchange uses of both is the same; `last` alone means nothing on a connection that many share.
    const exchange = take(request as unknown as IncomingMessage, response as unknown as ServerResponse);
    const { stream } = request;
    if (stream.endAfterHeaders || stream.destroyed) return;
    const late = this.#clock.at(this.#clock.now() + this.#limits.requestTimeoutMs, () =>
      exchange.fail(new Refusal("REQUEST_TIMEOUT", "the request was sent too slowly")),
    );
    request.once("end", () => late.cancel());
    response.once("close", () => late.cancel());
    // Answered before the body was read: the client may stop sending. Not before the answer is on its way, which
    // leaves with the end of this turn: the word to stop would overtake it.
    stream.once("finish", () =>
      setImmediate(() => {
        if (!request.complete && !stream.destroyed) stream.close(constants.NGHTTP2_NO_ERROR);
      }),
    );
  }
}

/** What a listener needs to speak TLS; the certificates are started, and outlive it. */
export interface EdgeTls {
  readonly certificates: Certificates;
  readonly minVersion: "TLSv1.2" | "TLSv1.3";
  readonly http2: boolean;
  /** Requests at once on one HTTP/2 connection. */
  readonly maxStreams: number;
}

export interface TlsLimits {
  readonly maxConnections: number;
  readonly headersTimeoutMs: number;
}

export class TlsServer {
  readonly server: Server;
  /** All of them, also those that are still in their handshake, which the server does not know yet. */
  readonly #sockets = new Set<Socket>();
  readonly #door: Http2Sessions | undefined;

  constructor(options: ServerOptions, tls: EdgeTls, limits: TlsLimits, door: Http2Sessions | undefined) {
    const { certificates, minVersion } = tls;
    this.server = createHttpsServer({
      ...options,
      ...certificates.material,
      minVersion,
      handshakeTimeout: limits.headersTimeoutMs,
      // Whoever offers only what is not here is refused in the handshake; curl --http1.0 offers nothing else.
      ALPNProtocols: [...(door === undefined ? [] : ["h2"]), "http/1.1", "http/1.0"],
    });
    // The second where several processes share the port: else one without room would give the connection back,
    // and the parent would hand it on until there is room. Node's types do not know it yet.
    Object.assign(this.server, { maxConnections: limits.maxConnections, dropMaxConnection: true });
    this.server.on("connection", (socket: Socket) => this.#keep(socket));
    certificates.onChange((material) => this.server.setSecureContext({ ...material, minVersion }));
    this.#door = door;
    if (door !== undefined) this.#parts(door);
  }

  /** HTTP/2 is told to open no more requests; HTTP/1.1 is the server's own affair. */
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

  /** Puts the choice in front of what node:https does with a connection. */
  #parts(door: Http2Sessions): void {
    const http1 = this.server.listeners("secureConnection") as ((socket: TLSSocket) => void)[];
    this.server.removeAllListeners("secureConnection");
    this.server.on("secureConnection", (socket: TLSSocket) => {
      if (socket.alpnProtocol === "h2") door.enter(socket);
      else for (const each of http1) each.call(this.server, socket);
    });
  }
}

/** Trouble below HTTP: there is nobody who could read an answer. */
export function isTlsTrouble(code: string | undefined): boolean {
  return code !== undefined && /^(?:ERR_SSL_|ERR_TLS_|EPROTO$)/.test(code);
}
