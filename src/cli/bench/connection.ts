/**
 * One keep-alive HTTP/1.1 connection of the load generator, on a raw socket, with optional TLS. No pipelining. All
 * connections read into one shared buffer (libuv fills it and calls back before it reads another socket), so a reply
 * that arrives in one piece is parsed in place and never copied. The parser accepts a status line, `content-length` or
 * chunks, and a body. Anything else (unexpected bytes, an early end) breaks the connection, which the owner counts as
 * an error; it is never repaired silently.
 */
import { randomInt } from "node:crypto";
import { type Socket, connect } from "node:net";
import { type ConnectionOptions, connect as connectTls } from "node:tls";
import type { Clock } from "../../app/clock.ts";
import type { Requests } from "./requests.ts";

export interface Target {
  readonly host: string;
  readonly port: number;
  readonly path: string;
  /** Omitted: plain text. */
  readonly tls?: ConnectionOptions;
}

export const markerLength = 16;

/** A request without its marker: the text before and after it, one character per byte. */
export interface Template {
  readonly front: string;
  readonly back: string;
}

/** A request with a body of about `bodyBytes`: {"input":"<marker> xxx…"}; `fields` go beside the input. */
export function template(
  target: Target,
  bodyBytes: number,
  fields: Readonly<Record<string, string>>,
  headers: Readonly<Record<string, string>> = {},
): Template {
  const rest = Object.entries(fields).map(
    ([name, value]) => `,${JSON.stringify(name)}:${JSON.stringify(value)}`,
  );
  const open = '{"input":"';
  const close = `"${rest.join("")}}`;
  const fill = Math.max(0, bodyBytes - open.length - markerLength - close.length);
  const rear = "x".repeat(fill) + close;
  const more = Object.entries(headers).map(([name, value]) => `${name}: ${value}\r\n`);
  const head =
    `POST ${target.path} HTTP/1.1\r\nhost: ${target.host}:${target.port}\r\n${more.join("")}` +
    `content-type: application/json\r\ncontent-length: ${open.length + markerLength + Buffer.byteLength(rear)}\r\n\r\n`;
  return { front: head + open, back: Buffer.from(rear).toString("latin1") };
}

/** Fixed-width markers, unique in this run and, by their random start, across runs. */
export class Markers {
  readonly #radix: number;
  readonly #run: string;
  #next: number;

  constructor(radix = 36) {
    this.#radix = radix;
    this.#run = randomInt(radix ** 6)
      .toString(radix)
      .padStart(6, "0");
    this.#next = radix ** 9;
  }

  take(): string {
    // From radix^9 on numbers have ten digits; in base 36, ten billion years of requests fit before the eleventh.
    return this.#run + (this.#next++).toString(this.#radix);
  }
}

/** Connection callbacks; at most one call per request. */
export interface Owner {
  /** The socket is open; requests passed to `send` earlier leave now. */
  opened?(connection: Connection): void;
  /** `connection.status` and `connection.crossed` describe the reply; `send` may be called at once. */
  answered(connection: Connection): void;
  /** The socket is closed. `inFlight`: a request was sent and not answered. */
  closed(connection: Connection, inFlight: boolean): void;
}

/** Ferry's metadata are at the end of the body, within this many bytes. */
const tailBytes = 256;
/** Holds most heads, and the marker at the start of the output. */
const headBytes = 1024;
const maxHeadBytes = 65_536;
const readBuffer = Buffer.allocUnsafeSlow(256 * 1024);

export class Connection {
  /** When the request in flight was due, and when it was sent; performance.now(). */
  intendedAt = 0;
  /** When the last request ended; written by the owner for its pool. */
  idleSince = 0;
  /** Kind of caller; written by the owner. */
  kind = 0;
  status = 0;
  crossed = false;
  /** First bytes of the last reply (with the head), and its last bytes. */
  head = "";
  tail = "";
  /** The server closes the connection after this reply. */
  last = false;
  isOpen = false;
  /** System error code; "" for a plain close. */
  error = "";

  readonly #owner: Owner;
  readonly #socket: Socket;
  #marker = "";
  #inFlight = false;
  #partial: Buffer | undefined;

  constructor(target: Target, owner: Owner) {
    this.#owner = owner;
    const onread = { buffer: readBuffer, callback: (length: number): boolean => this.#read(length) };
    const { host, port, tls } = target;
    this.#socket =
      tls === undefined
        ? connect({ host, port, noDelay: true, onread })
        : connectTls({ ...tls, host, port, onread } as ConnectionOptions).setNoDelay(true);
    this.#socket.once(tls === undefined ? "connect" : "secureConnect", () => {
      this.isOpen = true;
      this.#owner.opened?.(this);
    });
    // 'close' always follows, and is where it is counted.
    this.#socket.on("error", (error: NodeJS.ErrnoException) => (this.error = error.code ?? error.message));
    this.#socket.on("close", () => this.#owner.closed(this, this.#inFlight));
  }

  /** A whole request, one character per byte; sent once connected. An empty marker accepts any reply. */
  send(text: string, marker: string, intendedAt: number): void {
    this.#marker = marker;
    this.intendedAt = intendedAt;
    this.#inFlight = true;
    this.#socket.write(text, "latin1");
  }

  get isMarked(): boolean {
    return this.#marker !== "";
  }

  close(): void {
    this.#socket.destroy();
  }

  #read(length: number): boolean {
    let bytes = readBuffer;
    let end = length;
    if (this.#partial !== undefined) {
      bytes = Buffer.concat([this.#partial, readBuffer.subarray(0, length)]);
      end = bytes.length;
    }
    const answer = readAnswer(bytes, end);
    if (answer.length > end) {
      // Buffer.from must copy: the shared buffer is about to be overwritten.
      this.#partial = this.#partial === undefined ? Buffer.from(readBuffer.subarray(0, length)) : bytes;
    } else if (answer.length === end && this.#inFlight) {
      this.#partial = undefined;
      this.#inFlight = false;
      this.status = answer.status;
      this.#keep(answer, bytes);
      this.crossed = this.isMarked && answer.status === 200 && !this.#isOurs(answer, bytes);
      this.#owner.answered(this);
    } else {
      this.#socket.destroy();
    }
    return true;
  }

  #keep({ text, headEnd, length }: Answer, bytes: Buffer): void {
    this.head = text;
    const from = Math.max(headEnd, length - tailBytes);
    this.tail = length <= text.length ? text.slice(from, length) : bytes.toString("latin1", from, length);
    this.last = closes(text, headEnd);
  }

  #isOurs(answer: Answer, bytes: Buffer): boolean {
    const { text, headEnd, length } = answer;
    if (text.includes(this.#marker, headEnd)) return true;
    return bytes.toString("latin1", headEnd, length).includes(this.#marker);
  }
}

interface Answer {
  /** Head and body. Beyond the bytes given: incomplete. -1: malformed. */
  readonly length: number;
  readonly status: number;
  readonly headEnd: number;
  readonly text: string;
}

const unknown: Answer = { length: -1, status: 0, headEnd: 0, text: "" };

/** Parses the first `end` bytes. A length below `end` means more bytes than expected. */
export function readAnswer(bytes: Buffer, end: number): Answer {
  let text = bytes.toString("latin1", 0, Math.min(end, headBytes));
  let headEnd = text.indexOf("\r\n\r\n");
  if (headEnd < 0 && end > headBytes) {
    text = bytes.toString("latin1", 0, end);
    headEnd = text.indexOf("\r\n\r\n");
  }
  if (headEnd < 0) return end < maxHeadBytes ? { length: end + 1, status: 0, headEnd: 0, text } : unknown;
  if (!text.startsWith("HTTP/1.1 ")) return unknown;
  const status = Number.parseInt(text.slice(9, 12), 10);
  const bodyLength = contentLength(text, headEnd);
  if (bodyLength >= 0) return { length: headEnd + 4 + bodyLength, status, headEnd, text };
  if (!/\r\ntransfer-encoding: *chunked\r\n/i.test(text.slice(0, headEnd + 2))) return unknown;
  return { length: chunkedEnd(bytes, headEnd + 4, end), status, headEnd, text };
}

/** End of the last chunk; beyond `end` when incomplete, -1 when malformed. */
function chunkedEnd(bytes: Buffer, from: number, end: number): number {
  for (let at = from; ;) {
    const lineEnd = bytes.subarray(0, end).indexOf("\r\n", at, "latin1");
    if (lineEnd < 0) return end - at < headBytes ? end + 1 : -1;
    const size = /^[\da-f]{1,8}/i.exec(bytes.toString("latin1", at, lineEnd))?.[0];
    if (size === undefined) return -1;
    const length = Number.parseInt(size, 16);
    // Trailers after the last, empty chunk are not supported; Ferry sends none.
    at = lineEnd + 2 + length + 2;
    if (at > end) return at;
    if (length === 0) return at;
  }
}

function closes(text: string, headEnd: number): boolean {
  let at = text.indexOf("\r\nconnection: close");
  if (at < 0) at = text.indexOf("\r\nConnection: close");
  return at >= 0 && at < headEnd;
}

/** -1 when absent. Tries the two usual spellings before the slower general search. */
function contentLength(text: string, headEnd: number): number {
  let at = text.indexOf("\r\ncontent-length: ");
  if (at < 0) at = text.indexOf("\r\nContent-Length: ");
  if (at < 0) at = text.slice(0, headEnd).toLowerCase().indexOf("\r\ncontent-length: ");
  if (at < 0 || at > headEnd) return -1;
  let length = 0;
  for (let i = at + 18; i < headEnd; i++) {
    const digit = text.charCodeAt(i) - 48;
    if (digit < 0 || digit > 9) break;
    length = length * 10 + digit;
  }
  return length;
}

/** One probe before the load: a wrong call would fail at full rate. A full server is no reason not to measure. */

export type Sign =
  | { readonly status: number; readonly error: string; readonly message: string }
  /** No reply: the system's error code, "timeout", or "" for a plain close. */
  | { readonly status: 0; readonly error: string; readonly message: "" };

export function preflight(
  target: Target,
  requests: Requests,
  timeoutMs: number,
  clock: Clock,
): Promise<Sign> {
  return new Promise((resolve) => {
    const connection = new Connection(target, {
      answered: (it) => end({ status: it.status, ...wordsOf(it.head) }),
      closed: (it) => end({ status: 0, error: it.error, message: "" }),
    });
    const alarm = clock.at(clock.now() + timeoutMs, () => end({ status: 0, error: "timeout", message: "" }));
    const end = (sign: Sign): void => {
      alarm.cancel();
      resolve(sign);
      connection.close();
    };
    connection.send(requests.next(0), requests.marker, clock.now());
  });
}

/** Error code and message of a refusal, from the first bytes; "" where unknown. */
function wordsOf(head: string): { error: string; message: string } {
  const body = head.slice(head.indexOf("\r\n\r\n") + 4);
  const value = (name: string): string => {
    const text = new RegExp(`"${name}":("(?:[^"\\\\]|\\\\.)*")`).exec(body)?.[1];
    // Replies are decoded as latin1; non-ASCII text in messages is not restored.
    return text === undefined ? "" : (JSON.parse(text) as string);
  };
  try {
    return { error: value("error"), message: value("message") };
  } catch {
    return { error: "", message: "" };
  }
}
