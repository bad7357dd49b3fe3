/**
 * One HTTP request and its response.
 *
 * The body is read only on demand, never beyond the limit, and must be UTF-8; one declared too large is refused unread.
 * Exactly one response is written, with its length: JSON for clients, a file or a stream for the dashboard. Proxied
 * bodies are streamed both ways (`inflow`, `relay`).
 */
import { isUtf8 } from "node:buffer";
import { type IncomingMessage, ServerResponse } from "node:http";
import { Readable, type Writable } from "node:stream";
import { Refusal } from "../core/errors.ts";
import { newId } from "../engine/ids.ts";
import { CLIENT_LEFT } from "../observe/events.ts";
import { type ClientBytes, ClientRequest } from "./client-request.ts";
import { DirectConnection } from "./direct.ts";
import { JSON_TYPE, quotaHeaders } from "./reply.ts";

const JSON_ONLY = ["application/json"];
const NOTHING = Buffer.alloc(0);
/** A body declared larger is not started unless all of it fits the budget. */
const LARGE_BODY_BYTES = 65_536;
const OPEN_BRACE = 0x7b;
/** White space, byte order marks, and the zeros of UTF-16 and UTF-32, which some JSON parsers accept. */
const BEFORE_JSON: ReadonlySet<number> = new Set([0, 9, 10, 13, 32, 0xef, 0xbb, 0xbf, 0xfe, 0xff]);

export interface ExchangeLimits {
  readonly maxBodyBytes: number;
  /** A client that does not read its response within this time is disconnected. */
  readonly writeTimeoutMs: number;
  readonly bytes: ClientBytes;
}

/** How a protocol renders an error: status and JSON body. */
export type ErrorShape = (refusal: Refusal) => { readonly status?: number; readonly body: string | Buffer };

export type Failed = (exchange: Exchange, error: unknown) => void;

type Use<Body> = (body: Body) => void;

export interface Outflow {
  write(text: string): void;
  /** The client does not keep up: writes are buffered in memory. */
  readonly behind: boolean;
  end(): void;
  /** Ends it at once and discards the buffer. */
  cut(): void;
}

export interface Relay {
  /** False: backpressure; `onDrain` tells when to go on. */
  write(chunk: Buffer): boolean;
  onDrain(drained: () => void): void;
  end(): void;
}

export class Exchange extends ClientRequest {
  readonly path: string;
  readonly query: string;
  /** Undefined while the request is direct (`direct.ts`). */
  #response: ServerResponse | undefined;
  readonly #direct: DirectConnection<Exchange> | undefined;
  #collects: boolean; // the body of a direct request comes in one piece, into `#head`
  /** Reads the body once it is complete, or a stream. */
  #reader: (() => void) | undefined;
  #written = false; // the direct response is with the socket
  #isTaken = false; // the kernel has the direct response
  readonly #length: number | undefined; // of the body, as declared
  readonly #limits: ExchangeLimits;
  readonly #failed: Failed;
  #broken = false;
  mayContinue = false;
  /** Set while draining: the connection closes after this response. */
  last = false;
  /** Body bytes read to detect its type; the whole body of a direct request. */
  #head: Buffer = NOTHING;
  errorShape: ErrorShape | undefined = undefined;

  constructor(
    request: IncomingMessage,
    response: ServerResponse | DirectConnection<Exchange>,
    limits: ExchangeLimits,
    now: number,
    failed: Failed,
  ) {
    super(request, now, limits.bytes);
    const { "content-length": length } = request.headers;
    if (length !== undefined) this.#length = Number(length);
    this.#collects = response instanceof DirectConnection;
    if (response instanceof DirectConnection) this.#direct = response;
    else this.#response = response;
    this.#limits = limits;
    this.#failed = failed;
    const url = originForm(request.url!, request.headers.host);
    const mark = url.indexOf("?");
    this.path = mark < 0 ? url : url.slice(0, mark);
    this.query = mark < 0 ? "" : url.slice(mark + 1);
  }

  /** The previous request on the same connection, until it is complete. */
  #before: Exchange | undefined;

  after(other: Exchange | undefined): void {
    if (other !== undefined && !other.#finished) this.#before = other;
  }

  /** Read and unanswered, itself or one before it: anything written now would be taken for that response. */
  get holdsUp(): boolean {
    if (this.#waits) return true;
    for (let each = this.#before; each !== undefined; each = each.#before) if (each.#waits) return true;
    return false;
  }

  get #waits(): boolean {
    return this.request.complete && !this.#finished;
  }

  get #finished(): boolean {
    return this.#response === undefined ? this.#isTaken : this.#response.writableFinished;
  }

  /** True also once the client has left. */
  get answered(): boolean {
    return this.#written || this.#response?.writableEnded === true || this.left;
  }

  closed(): void {
    // Responses leave in order, so earlier ones are complete too.
    this.#before = undefined;
    this.releaseAll();
    // A response that the connection did not take was not delivered.
    if (!this.#taken && !this.#broken) {
      this.status = CLIENT_LEFT;
      this.code = "";
    }
    if (!this.answered) this.leave();
  }

  /**
   * Whether the connection took the whole response. HTTP/2's response does not say, its stream does; Node also finishes
   * a stream that the client has reset.
   */
  get #taken(): boolean {
    const response: (ServerResponse & { stream?: Writable }) | undefined = this.#response;
    if (response === undefined) return this.#isTaken;
    return response.writableEnded && (response.stream ?? response).writableFinished;
  }

  /** Node's response: a direct request is handed over to get one. After the connection has closed, one that goes nowhere. */
  get #node(): ServerResponse {
    if (this.#response === undefined) this.#direct!.handOver();
    return (this.#response ??= new ServerResponse(this.request));
  }

  /** For `DirectConnection`. */
  handedOver(response: ServerResponse): void {
    this.#response = response;
    this.#streamBody();
  }

  /** For `DirectConnection`. A body in one piece is complete and never counts as held. */
  received(piece: Buffer | null): void {
    if (piece === null) return this.#goOn();
    if (piece.length === this.#length) this.#head = piece;
    else {
      this.#streamBody();
      this.request.push(piece);
    }
  }

  /** For `DirectConnection`. */
  taken(): void {
    this.#isTaken = true;
  }

  #goOn(): void {
    const reader = this.#reader;
    this.#reader = undefined;
    reader?.();
  }

  /** From here on the body comes through Node's stream. */
  #streamBody(): void {
    if (!this.#collects) return;
    this.#collects = false;
    const { request } = this;
    Reflect.deleteProperty(request, "push");
    if (this.#head.length > 0) request.push(this.#head);
    this.#head = NOTHING;
    if (request.complete) request.push(null);
    this.#goOn();
  }

  /** For errors that no promise carries to the handler's caller. */
  failed(error: unknown): void {
    this.#failed(this, error);
  }

  /** The body as text; refused if too large, not JSON or not UTF-8. Never settles if the client leaves first. */
  body(): Promise<string> {
    return new Promise((resolve) => this.#take(JSON_ONLY, asText, resolve));
  }

  /** As `body`, with a callback, whose failure is the request's. */
  withBody(use: (text: string) => Promise<void> | void): void {
    this.#take(JSON_ONLY, asText, (text) => {
      const done = use(text);
      if (done !== undefined) done.catch((error: unknown) => this.failed(error));
    });
  }

  bytes(types: readonly string[] = JSON_ONLY): Promise<Buffer> {
    return new Promise((resolve) => this.#take(types, asItCame, resolve));
  }

  /**
   * The whole body if its first character may start a JSON object, whatever its declared type. Undefined: something
   * else, readable with `inflow` from its first byte. Never settles if the client leaves first.
   */
  objectBody(): Promise<Buffer | undefined> {
    this.checkLength();
    this.#mayGoOn();
    const { maxBodyBytes } = this.#limits;
    return new Promise((resolve) => this.#read(maxBodyBytes, asItCame, resolve, () => resolve(undefined)));
  }

  #mayGoOn(): void {
    if (this.mayContinue) this.#node.writeContinue();
    this.mayContinue = false;
  }

  #take<Body>(types: readonly string[], read: (body: Buffer) => Body, use: Use<Body>): void {
    checkType(this, types);
    this.checkLength();
    const announced = this.#length ?? 0;
    const refusal = announced > LARGE_BODY_BYTES ? this.noRoomFor(announced) : undefined;
    if (refusal !== undefined) throw refusal;
    // Only after the checks: a client that waits for 100 Continue is refused before it sends the body.
    this.#mayGoOn();
    this.#read(this.#limits.maxBodyBytes, read, use);
  }

  get hasBody(): boolean {
    const { request } = this;
    if (request.httpVersionMajor > 1)
      return !(request as unknown as { stream: { endAfterHeaders: boolean } }).stream.endAfterHeaders;
    return request.headers["transfer-encoding"] !== undefined || (this.#length ?? 0) > 0;
  }

  checkLength(): void {
    if ((this.#length ?? 0) > this.#limits.maxBodyBytes) throw this.#tooLarge();
  }

  inflow(): Inflow {
    const { maxBodyBytes: maxBytes } = this.#limits;
    // Node tells when the client leaves.
    void this.#node;
    const rules = { maxBytes, begin: () => this.#mayGoOn(), tooLarge: () => this.#tooLarge() };
    return new Inflow(this.request, rules, this.#head);
  }

  /** `streamed` is called instead of `use` if the body is not a JSON object. */
  #read<Body>(
    maxBodyBytes: number,
    read: (body: Buffer) => Body,
    use: Use<Body>,
    streamed?: () => void,
  ): void {
    const { request } = this;
    if (this.#collects && streamed === undefined) {
      if (request.complete) this.#use(this.#head, read, use);
      else this.#reader = () => this.#read(maxBodyBytes, read, use);
      return;
    }
    this.#streamBody();
    // Over HTTP/1.1 a body in one chunk is complete and never held. Over HTTP/2 the end is a separate frame.
    const wholeAt = request.httpVersionMajor === 1 ? this.#length : undefined;
    const chunks: Buffer[] = [];
    let bytes = 0;
    let undecided = streamed !== undefined;
    let refused = false;
    const refuse = (refusal: Refusal): void => {
      refused = true;
      chunks.length = 0;
      request.removeAllListeners("data");
      this.releaseBody();
      this.failed(refusal);
    };
    request.on("data", (chunk: Buffer) => {
      bytes += chunk.length;
      if (bytes > maxBodyBytes) return refuse(this.#tooLarge());
      const refusal = bytes === wholeAt ? undefined : this.holdBody(chunk.length);
      if (refusal !== undefined) return refuse(refusal);
      chunks.push(chunk);
      const first = undecided ? chunk.find((byte) => !BEFORE_JSON.has(byte)) : undefined;
      if (first === undefined) return;
      undecided = false;
      if (first === OPEN_BRACE) return;
      request.pause();
      request.removeAllListeners("data");
      request.off("end", ended);
      this.releaseBody();
      this.#head = Buffer.concat(chunks);
      streamed!();
    });
    const ended = (): void => {
      this.releaseBody();
      // Over HTTP/2 an aborted stream ends like any other.
      if (request.aborted || refused) return;
      const body = chunks.length === 1 ? chunks[0]! : Buffer.concat(chunks);
      // This closure lives as long as the request; release the bytes now.
      chunks.length = 0;
      this.#use(body, read, use);
    };
    request.on("end", ended);
  }

  #use<Body>(bytes: Buffer, read: (body: Buffer) => Body, use: Use<Body>): void {
    this.#head = NOTHING;
    try {
      use(read(bytes));
    } catch (error) {
      this.failed(error);
    }
  }

  #tooLarge(): Refusal {
    this.last = true;
    return new Refusal("PAYLOAD_TOO_LARGE", `the body is larger than ${this.#limits.maxBodyBytes} bytes`);
  }

  /** `headers`: name, value, name, value… */
  send(status: number, body: string, headers: readonly string[] = []): void {
    this.sendPieces(status, [body], headers, Buffer.byteLength(body));
  }

  /** As `send`, without joining the pieces to count and to send them. `bytes`: of all. */
  sendPieces(status: number, pieces: readonly string[], headers: readonly string[], bytes: number): void {
    if (this.answered) return;
    this.status = status;
    const head = ["content-type", JSON_TYPE, "content-length", String(bytes), ...headers];
    // Equal byte and character counts mean ASCII, which latin1 writes without conversion.
    const ascii = bytes === pieces.reduce((sum, { length }) => sum + length, 0);
    if (this.#response === undefined && this.#sendDirectly(status, head, pieces, ascii, bytes)) return;
    const response = this.#node;
    if (this.#ends()) head.push("connection", "close");
    response.writeHead(status, head);
    response.end(pieces.join(""), ascii ? "latin1" : "utf8");
    this.#sent(bytes);
  }

  #sendDirectly(
    status: number,
    headers: readonly string[],
    pieces: readonly string[],
    ascii: boolean,
    bytes: number,
  ): boolean {
    const head = this.last || !this.request.complete ? undefined : this.#direct!.head(status, headers);
    if (head === undefined) return false;
    this.#written = true;
    this.#direct!.send([head, ...pieces], head.length + bytes, ascii, this.#limits.writeTimeoutMs);
    if (!this.#isTaken) this.holdAnswer(bytes);
    return true;
  }

  fail(refusal: Refusal, headers: readonly string[] = []): void {
    this.code = refusal.code;
    // The response has started: all that is left is to abort it.
    if (this.#written || this.#response?.headersSent === true) return this.cut();
    if (this.id === "") this.id = newId(this.startedAt);
    const answer = renderRefusal(refusal, this.id, this.errorShape);
    this.send(answer.status, answer.body, [...headers, ...answer.headers]);
  }

  /** For non-JSON or already encoded JSON; written in parts if large. */
  sendBytes(
    type: string,
    bytes: Buffer | readonly Buffer[],
    headers: readonly string[] = [],
    status = 200,
  ): void {
    if (this.answered) return;
    const response = this.#node;
    this.status = status;
    const parts = Buffer.isBuffer(bytes) ? [bytes] : bytes;
    const length = parts.reduce((sum, part) => sum + part.length, 0);
    const head = ["content-type", type, "content-length", String(length), ...headers];
    if (this.#ends()) head.push("connection", "close");
    response.writeHead(status, head);
    for (const part of parts.slice(0, -1)) response.write(part);
    response.end(parts.at(-1));
    this.#sent(length);
  }

  /** A response that streams until either side ends it; `onGone` tells when the client did. */
  stream(type: string, headers: readonly string[] = []): Outflow {
    const response = this.#node;
    this.status = 200;
    response.writeHead(200, ["content-type", type, ...headers]);
    response.flushHeaders();
    return {
      write: (text) => void response.write(text),
      get behind() {
        return response.writableNeedDrain;
      },
      end: () => void response.end(),
      cut: () => void response.destroy(),
    };
  }

  /** Streams a proxied response. `headers` has no connection headers. */
  relay(status: number, headers: readonly string[]): Relay {
    const response = this.#node;
    this.status = status;
    response.writeHead(status, this.#ends() ? [...headers, "connection", "close"] : [...headers]);
    const { httpVersionMajor, method } = this.request;
    if (httpVersionMajor > 1 || method === "HEAD" || status === 204 || status === 304)
      response.flushHeaders();
    // Sends the header too, as latin1; Node would write it in UTF-8.
    else response.write(NOTHING);
    return {
      write: (chunk) => response.write(chunk),
      onDrain: (drained) => void response.on("drain", drained),
      end: () => void response.end(),
    };
  }

  /** Aborts the response, so that the client cannot take it for a complete one. */
  cut(): void {
    this.#broken = true;
    if (this.#written) return void this.request.socket.destroy();
    const response = this.#node;
    // Without an error an HTTP/2 stream would end normally.
    if (this.request.httpVersionMajor > 1) response.destroy(new Error("the answer was broken off"));
    else response.destroy();
  }

  sendNothing(status: number, headers: readonly string[] = []): void {
    this.status = status;
    this.#node.writeHead(status, this.#ends() ? [...headers, "connection", "close"] : [...headers]);
    this.#node.end();
  }

  /** HTTP/2 has no Connection header: requests share the connection, which drains by itself. */
  #ends(): boolean {
    return this.last && this.request.httpVersionMajor === 1;
  }

  /** Disconnects a client that does not read. Over HTTP/2 each stream has its own window, so that is unknown yet. */
  #sent(bytes: number): void {
    const response = this.#node;
    if (response.writableLength === 0 && this.request.httpVersionMajor === 1) return;
    this.holdAnswer(bytes);
    if (this.request.httpVersionMajor > 1) {
      return void response.setTimeout(this.#limits.writeTimeoutMs, () =>
        response.destroy(new Error("the client does not take its answer")),
      );
    }
    const { socket } = response;
    if (socket === null) return;
    const cut = (): void => void socket.destroy();
    socket.setTimeout(this.#limits.writeTimeoutMs, cut);
    response.once("finish", () => {
      socket.setTimeout(0);
      socket.removeListener("timeout", cut);
    });
  }
}

export function renderRefusal(
  refusal: Refusal,
  requestId: string,
  shape: ErrorShape | undefined,
): { readonly status: number; readonly body: string; readonly headers: readonly string[] } {
  const { code, message, retryAfterMs, status, quota } = refusal;
  const seconds = refusal.retryAfterSeconds ?? Math.ceil((retryAfterMs ?? 0) / 1000);
  const challenge = code === "UNAUTHENTICATED" ? ["www-authenticate", "Bearer"] : [];
  const wait =
    retryAfterMs === undefined
      ? []
      : ["retry-after", String(seconds), "retry-after-ms", String(retryAfterMs)];
  const headers = [...challenge, ...wait, ...quotaHeaders(quota)];
  if (shape === undefined) {
    const body = {
      error: code,
      message,
      request_id: requestId,
      ...(retryAfterMs && { retry_after_ms: retryAfterMs }),
    };
    return { status, body: JSON.stringify(body), headers };
  }
  const shaped = shape(refusal);
  return {
    status: shaped.status ?? status,
    body: String(shaped.body),
    // Not in every protocol's shape, but needed for support.
    headers: ["x-request-id", requestId, ...headers],
  };
}

function asItCame(body: Buffer): Buffer {
  return body;
}

function asText(body: Buffer): string {
  if (isUtf8(body)) return body.toString("utf8");
  throw new Refusal("INVALID_REQUEST", "the body is not UTF-8");
}

/** An absolute-form target ("GET http://host/path") is accepted only if it names our Host. */
function originForm(url: string, host: string | undefined): string {
  if (url.startsWith("/")) return url;
  const own = [`http://${host ?? ""}/`, `https://${host ?? ""}/`].find((each) => url.startsWith(each));
  return own === undefined ? url : url.slice(own.length - 1);
}

interface Headed {
  header(name: string): string | undefined;
}

/** Types that a form or a script of any web page can send without a CORS preflight. */
const FROM_ANY_PAGE = new Set(["", "text/plain", "application/x-www-form-urlencoded"]);

/** "" among the types: Content-Type is optional. */
export function checkType(exchange: Headed, types: readonly string[]): void {
  const type = exchange.header("content-type") ?? "";
  if (type === "application/json" && exchange.header("content-encoding") === undefined) return;
  const name = type.split(";")[0]!.trim().toLowerCase();
  // Browsers send these types cross-site without a preflight, but with an Origin.
  const foreign = FROM_ANY_PAGE.has(name) && exchange.header("origin") !== undefined;
  if (foreign || !types.includes(name)) {
    const others = types
      .slice(1)
      .filter((each) => !FROM_ANY_PAGE.has(each))
      .map((each) => ` or ${each}`)
      .join("");
    throw new Refusal(
      "UNSUPPORTED_MEDIA_TYPE",
      `send Content-Type: application/json${others} (curl: --json)`,
    );
  }
  const charset = /charset="?([^";\s]+)/i.exec(type)?.[1];
  if (charset !== undefined && charset.toLowerCase() !== "utf-8") {
    throw new Refusal("UNSUPPORTED_MEDIA_TYPE", `send the body as UTF-8, not ${charset.slice(0, 32)}`);
  }
  checkUncompressed(exchange);
}

export function checkUncompressed(exchange: Headed): void {
  const encoding = exchange.header("content-encoding");
  if (encoding !== undefined && encoding.toLowerCase() !== "identity") {
    throw new Refusal(
      "UNSUPPORTED_MEDIA_TYPE",
      `send the body without Content-Encoding: ${encoding.slice(0, 32)}`,
    );
  }
}

export interface InflowRules {
  readonly maxBytes: number;
  /** Called once, before the first byte is read. */
  readonly begin: () => void;
  readonly tooLarge: () => Error;
}

export class Inflow extends Readable {
  readonly #request: IncomingMessage;
  readonly #rules: InflowRules;
  readonly #head: Buffer;
  #bytes = 0;
  #begun = false;

  /** `head`: bytes already read; the request is paused behind them. */
  constructor(request: IncomingMessage, rules: InflowRules, head: Buffer) {
    super();
    this.#request = request;
    this.#rules = rules;
    this.#head = head;
  }

  override _read(): void {
    const request = this.#request;
    if (this.#begun) return void request.resume();
    this.#begun = true;
    this.#rules.begin();
    request.on("data", this.#onData);
    request.once("end", this.#onEnd);
    request.once("close", this.#onClose);
    if (this.#head.length === 0) return;
    this.#bytes = this.#head.length;
    if (this.push(this.#head)) request.resume();
  }

  override _destroy(error: Error | null, done: (error?: Error | null) => void): void {
    const request = this.#request;
    request.off("data", this.#onData);
    request.off("end", this.#onEnd);
    request.off("close", this.#onClose);
    if (this.#begun && !request.readableEnded) request.pause();
    done(error);
  }

  readonly #onData = (chunk: Buffer): void => {
    this.#bytes += chunk.length;
    if (this.#bytes > this.#rules.maxBytes) return void this.destroy(this.#rules.tooLarge());
    if (!this.push(chunk)) this.#request.pause();
  };

  readonly #onEnd = (): void => {
    // Over HTTP/2 an aborted stream ends like any other.
    if (this.#request.aborted) this.#onClose();
    else this.push(null);
  };

  readonly #onClose = (): void => {
    if (!this.#request.readableEnded || this.#request.aborted)
      this.destroy(new Error("the client left while it was sending"));
  };
}
