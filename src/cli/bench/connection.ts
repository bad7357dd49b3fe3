/**
 * One keep-alive HTTP/1.1 connection of a load generator, on a raw socket, with TLS where the target has it.
 *
 * Reads go into one buffer shared by all connections (libuv fills it and calls back before it reads another socket),
 * so an answer that arrives in one piece, the rule, is parsed where it lies and never copied.
 *
 * One request is in flight per connection at most: no pipelining, since real clients do not pipeline.
 *
 * The parser knows what servers send and no more: a status line, a `content-length` or chunks, a body.
 * Anything else (bytes nobody asked for, an early end) breaks the connection, and a broken connection is
 * counted by its owner as an error; it is never repaired in silence.
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
  /** Left out: plain text. */
  readonly tls?: ConnectionOptions;
}

export const markerLength = 16;

/** A request but for its marker: what stands before it and behind it, a character for each byte. */
export interface Template {
  readonly front: string;
  readonly back: string;
}

/**
 * A request whose body is `bodyBytes` long (as near as its frame allows): {"input":"<marker> xxx…"}.
 * `fields` are further fields of the body, such as the model; `headers` further headers.
 */
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

/** Markers of fixed width, unique in this run and, by their random start, across runs. */
export class Markers {
  readonly #radix: number;
  readonly #run: string;
  #next: number;

  /** 10: digits alone. */
  constructor(radix = 36) {
    this.#radix = radix;
    this.#run = randomInt(radix ** 6)
      .toString(radix)
      .padStart(6, "0");
    this.#next = radix ** 9;
  }

  take(): string {
    // From radix^9 on numbers have ten digits; of 36, ten billion years of requests fit before the eleventh.
    return this.#run + (this.#next++).toString(this.#radix);
  }
}

/** What an owner hears of its connections; always at most one call per request. */
export interface Owner {
  /** Requests can leave; those that were given before do so now. */
  opened?(connection: Connection): void;
  /** `connection.status` and `connection.crossed` describe the answer; `send` may be called at once. */
  answered(connection: Connection): void;
  /** The socket is gone. `inFlight`: a request had been sent and was not answered. */
  closed(connection: Connection, inFlight: boolean): void;
}

/** Ferry's metadata stand at the end of a body, and fit in this. */
const tailBytes = 256;
/** Most heads fit; the marker, at the front of the output, lies in the same stretch. */
const headBytes = 1024;
const maxHeadBytes = 65_536;
const readBuffer = Buffer.allocUnsafeSlow(256 * 1024);

export class Connection {
  /** When the request now in flight should have left, and when it did; performance.now(). */
  intendedAt = 0;
  /** Since when there has been nothing in flight; written by the owner, for its pool. */
  idleSince = 0;
  /** Whose connection it is, where there are several kinds of caller; written by the owner. */
  kind = 0;
  status = 0;
  crossed = false;
  /** Of the last answer: its first bytes, which hold the head, and its last ones. */
  head = "";
  tail = "";
  /** The server closes the connection after this answer. */
  last = false;
  isOpen = false;
  /** Why it ended, as the system calls it; "" when it just did. */
  error = "";

  readonly #owner: Owner;
  readonly #socket: Socket;
  #marker = "";
  #inFlight = false;
  /** The front of an answer that came in pieces. */
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
    // An error is always followed by close, where it is counted.
    this.#socket.on("error", (error: NodeJS.ErrnoException) => (this.error = error.code ?? error.message));
    this.#socket.on("close", () => this.#owner.closed(this, this.#inFlight));
  }

  /**
   * A whole request, a character for each byte. With a marker of "" any answer will do. May be called before the
   * connection is open: the bytes then leave when it is.
   */
  send(text: string, marker: string, intendedAt: number): void {
    this.#marker = marker;
    this.intendedAt = intendedAt;
    this.#inFlight = true;
    this.#socket.write(text, "latin1");
  }

  /** Whether an answer to the last request can be told from another's. */
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
      // Buffer.from copies, which it must: the shared buffer is about to be read into again.
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

/** The answer at the front of some bytes. */
interface Answer {
  /** Of head and body. More than there are bytes: some are still to come. -1: nothing that we know. */
  readonly length: number;
  readonly status: number;
  readonly headEnd: number;
  /** The first bytes, decoded: the head and at least a part of the body. */
  readonly text: string;
}

const unknown: Answer = { length: -1, status: 0, headEnd: 0, text: "" };

/** Looks at the first `end` of `bytes`. A length below `end` means more bytes than were asked for. */
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

/** Where the last of some chunks ends; beyond `end` when it is still to come, -1 when these are no chunks. */
function chunkedEnd(bytes: Buffer, from: number, end: number): number {
  for (let at = from; ;) {
    const lineEnd = bytes.subarray(0, end).indexOf("\r\n", at, "latin1");
    if (lineEnd < 0) return end - at < headBytes ? end + 1 : -1;
    const size = /^[\da-f]{1,8}/i.exec(bytes.toString("latin1", at, lineEnd))?.[0];
    if (size === undefined) return -1;
    const length = Number.parseInt(size, 16);
    // Behind the last chunk, which is empty, there may be headers; nobody in front of Ferry sends any.
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

/** -1 when there is none. Both usual spellings are tried before the general, slower way. */
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

/*
 * One request before the load: whether anybody is there, and would take it.
 *
 * What a wrong call looks like (no credential, an unknown model, a path that is none) looks the same ten
 * thousand times a second, so it is asked once. That a server is full is no reason not to measure it.
 */

export type Sign =
  | { readonly status: number; readonly error: string; readonly message: string }
  /** No answer: the system's word for it, "timeout", or "" for a connection that just ended. */
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

/** What a refusal says, from the first bytes of an answer; "" where it says nothing that we know. */
function wordsOf(head: string): { error: string; message: string } {
  const body = head.slice(head.indexOf("\r\n\r\n") + 4);
  const value = (name: string): string => {
    const text = new RegExp(`"${name}":("(?:[^"\\\\]|\\\\.)*")`).exec(body)?.[1];
    // Answers were read byte by byte; what was written beyond ASCII is not worth more here.
    return text === undefined ? "" : (JSON.parse(text) as string);
  };
  try {
    return { error: value("error"), message: value("message") };
  } catch {
    return { error: "", message: "" };
  }
}
