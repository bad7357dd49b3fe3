/**
 * One HTTP request and its one answer.
 *
 * Reading: the body is taken only when it is asked for, never beyond the limit, and must be UTF-8. A
 * body that is announced too large is refused before a byte of it is read. Writing: exactly one answer,
 * with its length; JSON for clients, a file or a stream for the people at the dashboard. What is passed on goes
 * both ways as it comes (`inflow`, `relay`).
 */
import { isUtf8 } from "node:buffer";
import type { IncomingMessage, ServerResponse } from "node:http";
import { Readable, type Writable } from "node:stream";
import { Refusal } from "../core/errors.ts";
import { newId } from "../engine/ids.ts";
import { CLIENT_LEFT } from "../observe/events.ts";
import { type ClientBytes, ClientRequest } from "./client-request.ts";
import { JSON_TYPE, quotaHeaders } from "./reply.ts";

const JSON_ONLY = ["application/json"];
const NOTHING = Buffer.alloc(0);
/** A body that is announced to be larger is not begun when there is no room for all of it. */
const LARGE_BODY_BYTES = 65_536;
const OPEN_BRACE = 0x7b;
/** White space, byte order marks, and the zeros of UTF-16 and UTF-32, which some readers of JSON take. */
const BEFORE_JSON: ReadonlySet<number> = new Set([0, 9, 10, 13, 32, 0xef, 0xbb, 0xbf, 0xfe, 0xff]);

export interface ExchangeLimits {
  readonly maxBodyBytes: number;
  /** An answer that the client does not take within this time ends the connection. */
  readonly writeTimeoutMs: number;
  readonly bytes: ClientBytes;
}

/** How an error looks to a client: its status and its JSON body. */
export type ErrorShape = (refusal: Refusal) => { readonly status?: number; readonly body: string | Buffer };

/** Answers a request with what was thrown on its way. */
export type Failed = (exchange: Exchange, error: unknown) => void;

/** What is done with a body. */
type Use<Body> = (body: Body) => void;

/** The way to a client that takes what happens, as it happens. */
export interface Outflow {
  write(text: string): void;
  /** It does not keep up: what is written now waits in our memory. */
  readonly behind: boolean;
  end(): void;
  /** Ends it at once, with what it was not given yet. */
  cut(): void;
}

/** The way to a client for an answer that somebody else makes. */
export interface Relay {
  /** False: it does not keep up, and `onDrain` tells when it has. */
  write(chunk: Buffer): boolean;
  onDrain(drained: () => void): void;
  end(): void;
}

export class Exchange extends ClientRequest {
  readonly path: string;
  readonly query: string;
  readonly #response: ServerResponse;
  readonly #limits: ExchangeLimits;
  readonly #failed: Failed;
  /** It was this side that ended the answer in its middle. */
  #broken = false;
  /** The client waits for a 100 before it sends its body. */
  mayContinue = false;
  /** Set while the server drains: the connection ends with this answer. */
  last = false;
  /** Bytes of the body that were read to see what it is. */
  #head = NOTHING;
  /** Left out: Ferry's own. */
  errorShape: ErrorShape | undefined = undefined;

  constructor(
    request: IncomingMessage,
    response: ServerResponse,
    limits: ExchangeLimits,
    now: number,
    failed: Failed,
  ) {
    super(request, now, limits.bytes);
    this.#response = response;
    this.#limits = limits;
    this.#failed = failed;
    const url = originForm(request.url!, request.headers.host);
    const mark = url.indexOf("?");
    this.path = mark < 0 ? url : url.slice(0, mark);
    this.query = mark < 0 ? "" : url.slice(mark + 1);
  }

  /** Came on the same connection before this one; only while that is not over. */
  #before: Exchange | undefined;

  after(other: Exchange | undefined): void {
    if (other !== undefined && !other.#response.writableFinished) this.#before = other;
  }

  /**
   * It, or one before it on its connection, was read and is not answered: whatever is written to the connection
   * now would be taken for its answer.
   */
  get holdsUp(): boolean {
    if (this.#waits) return true;
    for (let each = this.#before; each !== undefined; each = each.#before) if (each.#waits) return true;
    return false;
  }

  get #waits(): boolean {
    return this.request.complete && !this.#response.writableFinished;
  }

  /** Or nobody is there any more to be answered. */
  get answered(): boolean {
    return this.#response.writableEnded || this.left;
  }

  /** The listener's word that the connection, or this answer, is at its end. */
  closed(): void {
    // Answers leave in order: whatever came before it is over too.
    this.#before = undefined;
    this.releaseAll();
    // An answer that the connection did not take was not given.
    if (!this.#taken && !this.#broken) {
      this.status = CLIENT_LEFT;
      this.code = "";
    }
    if (!this.answered) this.leave();
  }

  /**
   * The connection has taken all of the answer; HTTP/2's object for it does not say, its stream does. That is also
   * finished when the client has reset it in the middle: Node ends it then.
   */
  get #taken(): boolean {
    const response = this.#response as ServerResponse & { stream?: Writable };
    return response.writableEnded && (response.stream ?? response).writableFinished;
  }

  /** Something was thrown that no promise carries to whoever called for the answer. */
  failed(error: unknown): void {
    this.#failed(this, error);
  }

  /**
   * The body as text. Refuses what is too large, not JSON by its own account, or not UTF-8: that refusal is this
   * request's answer. Never settles when the client leaves in the middle: then nobody is left to be answered.
   */
  body(): Promise<string> {
    return new Promise((resolve) => this.#take(JSON_ONLY, asText, resolve));
  }

  /** As `body`, as it came, of one of these media types by its own account. */
  bytes(types: readonly string[] = JSON_ONLY): Promise<Buffer> {
    return new Promise((resolve) => this.#take(types, asItCame, resolve));
  }

  /**
   * The whole body where it may be JSON of an object, by its first character and whatever its type says. Undefined: it
   * is something else, and `inflow` gives it from its first byte. Never settles when the client leaves in the middle.
   */
  objectBody(): Promise<Buffer | undefined> {
    this.checkLength();
    this.#mayGoOn();
    const { maxBodyBytes } = this.#limits;
    return new Promise((resolve) => this.#read(maxBodyBytes, asItCame, resolve, () => resolve(undefined)));
  }

  #mayGoOn(): void {
    if (this.mayContinue) this.#response.writeContinue();
    this.mayContinue = false;
  }

  #take<Body>(types: readonly string[], read: (body: Buffer) => Body, use: Use<Body>): void {
    checkType(this, types);
    this.checkLength();
    const announced = Number(this.header("content-length") ?? 0);
    const refusal = announced > LARGE_BODY_BYTES ? this.noRoomFor(announced) : undefined;
    if (refusal !== undefined) throw refusal;
    // Only now: whoever asks first is refused before it sends the body.
    this.#mayGoOn();
    this.#read(this.#limits.maxBodyBytes, read, use);
  }

  /** Whether there is a body, be it of unknown length. */
  get hasBody(): boolean {
    const { request } = this;
    if (request.httpVersionMajor > 1)
      return !(request as unknown as { stream: { endAfterHeaders: boolean } }).stream.endAfterHeaders;
    return (
      request.headers["transfer-encoding"] !== undefined || Number(this.header("content-length") ?? 0) > 0
    );
  }

  /** Refuses a body that is announced too large. */
  checkLength(): void {
    if (Number(this.header("content-length") ?? 0) > this.#limits.maxBodyBytes) throw this.#tooLarge();
  }

  /** The body on its way to somebody else, of whichever type. */
  inflow(): Inflow {
    const { maxBodyBytes: maxBytes } = this.#limits;
    const rules = { maxBytes, begin: () => this.#mayGoOn(), tooLarge: () => this.#tooLarge() };
    return new Inflow(this.request, rules, this.#head);
  }

  /** `streamed`: called instead of `use` once it is known that the body is no JSON object. */
  #read<Body>(
    maxBodyBytes: number,
    read: (body: Buffer) => Body,
    use: Use<Body>,
    streamed?: () => void,
  ): void {
    const { request } = this;
    // Over HTTP/1.1 a body that comes in one piece is over with it, and never held. Over HTTP/2 its end is a word of
    // the client's own.
    const wholeAt = request.httpVersionMajor === 1 ? Number(this.header("content-length")) : undefined;
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
      // `aborted`: of HTTP/2, where a stream that is broken off ends like any other.
      if (request.aborted || refused) return;
      try {
        const body = read(chunks.length === 1 ? chunks[0]! : Buffer.concat(chunks));
        // The request lives until it is answered, and this function with it; its bytes need not.
        chunks.length = 0;
        use(body);
      } catch (error) {
        this.failed(error);
      }
    };
    request.on("end", ended);
  }

  #tooLarge(): Refusal {
    this.last = true;
    return new Refusal("PAYLOAD_TOO_LARGE", `the body is larger than ${this.#limits.maxBodyBytes} bytes`);
  }

  /**
   * Answers. `headers` are name, value, name, value… A caller that knows how many bytes the body has saves
   * the body from being put together twice: to be counted, and behind its headers to be sent.
   */
  send(status: number, body: string, headers: readonly string[] = [], bytes = Buffer.byteLength(body)): void {
    const response = this.#response;
    if (this.answered) return;
    this.status = status;
    const head = ["content-type", JSON_TYPE, "content-length", String(bytes), ...headers];
    if (this.#ends()) head.push("connection", "close");
    response.writeHead(status, head);
    // As many bytes as characters means ASCII, which can be written as it is.
    response.end(body, bytes === body.length ? "latin1" : "utf8");
    this.#sent(bytes);
  }

  fail(refusal: Refusal, headers: readonly string[] = []): void {
    this.code = refusal.code;
    // The answer has begun: all that is left to say is that it is not whole.
    if (this.#response.headersSent) return this.cut();
    if (this.id === "") this.id = newId(this.startedAt);
    const answer = renderRefusal(refusal, this.id, this.errorShape);
    this.send(answer.status, answer.body, [...headers, ...answer.headers]);
  }

  /** Not JSON, or JSON that was written already; in parts where it is large. */
  sendBytes(
    type: string,
    bytes: Buffer | readonly Buffer[],
    headers: readonly string[] = [],
    status = 200,
  ): void {
    const response = this.#response;
    if (this.answered) return;
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

  /** Answers with a stream that goes on until either side ends it; `onGone` tells when the client did. */
  stream(type: string, headers: readonly string[] = []): Outflow {
    const response = this.#response;
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

  /** Answers with what somebody else says, as it comes. `headers` hold nothing about the connection. */
  relay(status: number, headers: readonly string[]): Relay {
    const response = this.#response;
    this.status = status;
    response.writeHead(status, this.#ends() ? [...headers, "connection", "close"] : [...headers]);
    const { httpVersionMajor, method } = this.request;
    if (httpVersionMajor > 1 || method === "HEAD" || status === 204 || status === 304)
      response.flushHeaders();
    // Sends the header, too, and byte by byte as it came; by itself Node would write it in UTF-8.
    else response.write(NOTHING);
    return {
      write: (chunk) => response.write(chunk),
      onDrain: (drained) => void response.on("drain", drained),
      end: () => void response.end(),
    };
  }

  /** Ends an answer in its middle, so that nobody takes it for a whole one. */
  cut(): void {
    const response = this.#response;
    this.#broken = true;
    // Without an error a stream of HTTP/2 would end as if that were all.
    if (this.request.httpVersionMajor > 1) response.destroy(new Error("the answer was broken off"));
    else response.destroy();
  }

  sendNothing(status: number, headers: readonly string[] = []): void {
    this.status = status;
    this.#response.writeHead(status, this.#ends() ? [...headers, "connection", "close"] : [...headers]);
    this.#response.end();
  }

  /** HTTP/2 has no such header: many requests share the connection, which ends by itself. */
  #ends(): boolean {
    return this.last && this.request.httpVersionMajor === 1;
  }

  /**
   * The client does not read: its answer must not sit in memory for ever. Whether it reads is not known yet over
   * HTTP/2, where each stream has its own window.
   */
  #sent(bytes: number): void {
    const response = this.#response;
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

/** `shape`: undefined for Ferry's own. `headers`: name, value, name, value… */
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
    // Not in every protocol's shape; whoever asks for help has to know it.
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

/** A target may name its host ("GET http://host/path"); it is ours only if that is the Host we were asked for. */
function originForm(url: string, host: string | undefined): string {
  if (url.startsWith("/")) return url;
  const own = [`http://${host ?? ""}/`, `https://${host ?? ""}/`].find((each) => url.startsWith(each));
  return own === undefined ? url : url.slice(own.length - 1);
}

interface Headed {
  header(name: string): string | undefined;
}

/** What a browser's form, or a script of any page, may send without being asked. */
const FROM_ANY_PAGE = new Set(["", "text/plain", "application/x-www-form-urlencoded"]);

/** "" among the types: it need not say one. */
export function checkType(exchange: Headed, types: readonly string[]): void {
  const type = exchange.header("content-type") ?? "";
  if (type === "application/json" && exchange.header("content-encoding") === undefined) return;
  const name = type.split(";")[0]!.trim().toLowerCase();
  // A page in a browser may send these to anybody without being asked, but says where it comes from.
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
  /** What a body that turns out to be larger fails with. */
  readonly tooLarge: () => Error;
}

export class Inflow extends Readable {
  readonly #request: IncomingMessage;
  readonly #rules: InflowRules;
  readonly #head: Buffer;
  #bytes = 0;
  #begun = false;

  /** `head`: bytes that were read of it before; the request is paused behind them. */
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
    // Of HTTP/2, where a stream that is broken off ends like any other.
    if (this.#request.aborted) this.#onClose();
    else this.push(null);
  };

  readonly #onClose = (): void => {
    if (!this.#request.readableEnded || this.#request.aborted)
      this.destroy(new Error("the client left while it was sending"));
  };
}
