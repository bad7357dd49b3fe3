/**
 * Requests with work that bypass `node:http`'s streams and responses, which cost a quarter of a bare echo's CPU time.
 *
 * For a POST with a short body of known length to a fixed path, while the requests of its connection come one at a
 * time. Node's parser has read the headers; the body is taken from it in one piece, and the response is written to the
 * socket as one text. Node knows nothing of such a request, so idle connections and the end of a connection are handled
 * here. What needs more (a second request before the response, a stream, a proxied response, a connection that
 * has to be closed) is handed to Node then, as if it had just arrived (`handOver`).
 */
import { type IncomingMessage, STATUS_CODES } from "node:http";
import type { Socket } from "node:net";
import { TLSSocket } from "node:tls";
import type { Clock } from "../app/clock.ts";

/** Internals of Node's parser, stable since io.js; without `onIncoming` every request goes Node's way. */
export interface Parser {
  onIncoming?: OnIncoming;
  /** The request that gets the body; null: the body is discarded. */
  incoming: IncomingMessage | null;
}
export type OnIncoming = (request: IncomingMessage, keepsAlive: boolean) => number;

/** An `Exchange`. */
export interface DirectRequest {
  readonly request: IncomingMessage;
  /** The parser's calls of `push`: pieces of the body, then null. */
  received(piece: Buffer | null): void;
  /** The kernel has the whole response. */
  taken(): void;
}

export interface DirectOwner<Request> {
  readonly clock: Clock;
  readonly keepAliveMs: number;
  /** Seconds, counted: a socket's timer would be restarted twice for each request. */
  readonly second: number;
  /** The response was taken, or the connection closed. Returns whether no request of the connection is open. */
  over(request: Request): boolean;
}

/** A longer body comes in pieces. */
const MAX_BODY_BYTES = 65_536;
/** Beyond the time that the client was told, as Node does: one that comes at the last moment must not find it closed. */
const KEEP_ALIVE_GRACE_S = 2;
const NOTHING = Buffer.alloc(0);
const SCRATCH_BYTES = 65_536;
const UNSAFE = /[^\x20-\x7e]/;

/** Whether a request with work qualifies by its headers. */
export function isShort({ headers, httpVersion }: IncomingMessage): boolean {
  const bytes = Number(headers["content-length"]);
  return (
    bytes > 0 &&
    httpVersion === "1.1" &&
    bytes <= MAX_BODY_BYTES &&
    headers.expect === undefined &&
    headers["transfer-encoding"] === undefined
  );
}

export class DirectConnection<Request extends DirectRequest> {
  readonly #socket: Socket;
  readonly #parser: Parser;
  readonly #take: OnIncoming;
  readonly #owner: DirectOwner<Request>;
  readonly #encrypted: boolean; // never written at once
  #current: Request | undefined;
  #sending = false; // the response of the current request is with the socket
  #idleSince = Infinity; // second of the owner
  /** The request that is being handed to Node, which makes its response now. */
  handed: Request | undefined;

  /** `take`: the parser's original `onIncoming`. */
  constructor(socket: Socket, parser: Parser, take: OnIncoming, owner: DirectOwner<Request>) {
    this.#socket = socket;
    this.#parser = parser;
    this.#take = take;
    this.#owner = owner;
    this.#encrypted = socket instanceof TLSSocket;
    socket.on("close", () => this.#end());
  }

  /** The request's own `push`, until it is deleted, takes what the parser reads of its body. */
  begin(direct: Request): void {
    this.#idleSince = Infinity;
    this.#current = direct;
    direct.request.push = this.#push;
  }

  readonly #push = (piece: Buffer | null): boolean => {
    this.#current?.received(piece);
    return true;
  };

  /**
   * The head of a response that keeps its connection, byte by byte as Node writes it. `headers`: name, value, name,
   * value… Undefined: a value is not plain ASCII.
   */
  head(status: number, headers: readonly string[]): string | undefined {
    let text = `HTTP/1.1 ${status} ${STATUS_CODES[status] ?? "unknown"}\r\n`;
    for (let at = 0; at < headers.length; at += 2) {
      if (UNSAFE.test(headers[at + 1]!)) return undefined;
      text += `${headers[at]}: ${headers[at + 1]}\r\n`;
    }
    const { clock, keepAliveMs } = this.#owner;
    return text + endOfHead(Math.floor(clock.wall() / 1000), keepAliveMs);
  }

  /** Writes the whole response of so many bytes, and disconnects a client that does not take it within `withinMs`. */
  send(pieces: readonly string[], bytes: number, ascii: boolean, withinMs: number): void {
    const socket = this.#socket;
    this.#sending = true;
    // The client has closed its side, and Node therefore ours.
    if (!socket.writable) return;
    if (!ascii) socket.write(pieces.join(""));
    else if (bytes > SCRATCH_BYTES || this.#encrypted) socket.write(pieces.join(""), "latin1");
    else this.#writeScratch(pieces);
    if (socket.writableLength === 0) return this.#taken();
    const cut = (): void => void socket.destroy();
    socket.setTimeout(withinMs, cut);
    // Called once everything before it is taken.
    socket.write(NOTHING, (error) => {
      socket.removeListener("timeout", cut);
      socket.setTimeout(0);
      if (error === undefined || error === null) this.#taken();
    });
  }

  /** One text of all pieces would be another string on the heap. */
  #writeScratch(pieces: readonly string[]): void {
    let end = 0;
    for (const piece of pieces) end += scratch.write(piece, end, "latin1");
    this.#socket.write(scratch.subarray(0, end));
    // The rest is written from there later.
    if (this.#socket.writableLength > 0) scratch = Buffer.allocUnsafeSlow(SCRATCH_BYTES);
  }

  #taken(): void {
    const current = this.#current!;
    // An idle connection must not keep its last request alive.
    if (this.#parser.incoming === current.request) this.#parser.incoming = null;
    current.taken();
    if (this.#end()) this.idle();
  }

  #end(): boolean {
    const current = this.#current;
    this.#current = undefined;
    this.#sending = false;
    return current !== undefined && this.#owner.over(current);
  }

  /** Nothing is open. */
  idle(): void {
    this.#idleSince = this.#owner.second;
  }

  /** Closes the connection if it was idle for too long. */
  check(): void {
    const { second, keepAliveMs } = this.#owner;
    const keptS = keepAliveMs === 0 ? Infinity : Math.ceil(keepAliveMs / 1000) + KEEP_ALIVE_GRACE_S;
    if (second - this.#idleSince >= keptS) this.#socket.destroy();
  }

  /** Node's turn: gives it the unanswered request, so that responses keep their order. */
  handOver(): void {
    this.#idleSince = Infinity;
    const current = this.#current;
    if (current === undefined || this.#sending) return;
    this.#current = undefined;
    this.handed = current;
    this.#take(current.request, true);
    this.handed = undefined;
  }
}

let scratch = Buffer.allocUnsafeSlow(SCRATCH_BYTES);
let lastSecond = NaN;
let lastMs = NaN;
let lastEnd = "";

function endOfHead(second: number, keepAliveMs: number): string {
  if (second !== lastSecond || keepAliveMs !== lastMs) {
    [lastSecond, lastMs] = [second, keepAliveMs];
    const keepAlive = keepAliveMs === 0 ? "" : `Keep-Alive: timeout=${Math.floor(keepAliveMs / 1000)}\r\n`;
    lastEnd = `Date: ${new Date(second * 1000).toUTCString()}\r\nConnection: keep-alive\r\n${keepAlive}\r\n`;
  }
  return lastEnd;
}
