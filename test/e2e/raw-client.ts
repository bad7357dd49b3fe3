/**
 * A client that sends exactly the bytes it is told to, well-formed or not, and reads answers one by one.
 */
import assert from "node:assert/strict";
import { once } from "node:events";
import { connect, type Socket } from "node:net";

export interface RawAnswer {
  readonly status: number;
  /** Names in lower case. */
  readonly headers: Readonly<Record<string, string>>;
  readonly text: string;
}

const PATIENCE_MS = 60_000;

export class RawClient implements AsyncDisposable {
  readonly socket: Socket;
  /** Interim answers such as 100 that came before a final one. */
  readonly interims: number[] = [];
  #received = "";
  #closed = false;
  #woken = Promise.withResolvers<void>();

  private constructor(socket: Socket) {
    this.socket = socket;
    socket.setNoDelay(true);
    socket.setEncoding("latin1");
    socket.on("data", (text: string) => {
      this.#received += text;
      this.#wake();
    });
    socket.on("error", () => this.#end()); // A reset is one way to be closed.
    socket.on("close", () => this.#end());
  }

  static async connect(url: string): Promise<RawClient> {
    const { hostname, port } = new URL(url);
    const socket = connect(Number(port), hostname);
    const client = new RawClient(socket);
    await once(socket, "connect");
    return client;
  }

  send(bytes: string | Buffer): void {
    if (this.#closed) return;
    if (typeof bytes === "string") this.socket.write(bytes, "latin1");
    else this.socket.write(bytes);
  }

  /** The next final answer; fails when the connection ends without one. */
  async answer(): Promise<RawAnswer> {
    for (;;) {
      const answer = this.#take();
      if (answer !== undefined && answer.status >= 200) return answer;
      if (answer !== undefined) this.interims.push(answer.status);
      else if (this.#closed) throw new Error(`closed without an answer: ${JSON.stringify(this.#received)}`);
      else await this.#change();
    }
  }

  /** Waits until the server has closed the connection. */
  async closed(): Promise<void> {
    while (!this.#closed) await this.#change();
  }

  get isClosed(): boolean {
    return this.#closed;
  }

  /** What came and was not taken as an answer. */
  get rest(): string {
    return this.#received;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (this.socket.closed) return;
    const closed = once(this.socket, "close");
    this.socket.destroy();
    await closed;
  }

  async #change(): Promise<void> {
    const late = Promise.withResolvers<never>();
    const id = setTimeout(() => late.reject(new Error(`nothing came in ${PATIENCE_MS} ms`)), PATIENCE_MS);
    try {
      await Promise.race([this.#woken.promise, late.promise]);
    } finally {
      clearTimeout(id);
    }
  }

  #end(): void {
    this.#closed = true;
    this.#wake();
  }

  #wake(): void {
    const woken = this.#woken;
    this.#woken = Promise.withResolvers();
    woken.resolve();
  }

  /** Cuts one whole answer from what was received. */
  #take(): RawAnswer | undefined {
    const end = this.#received.indexOf("\r\n\r\n");
    if (end < 0) return undefined;
    const [first = "", ...fields] = this.#received.slice(0, end).split("\r\n");
    const status = Number(/^HTTP\/1\.1 (\d{3}) /.exec(first)?.[1]);
    assert.ok(status >= 100, `not a status line: ${first}`);
    const headers: Record<string, string> = {};
    for (const field of fields) {
      const colon = field.indexOf(":");
      headers[field.slice(0, colon).toLowerCase()] = field.slice(colon + 1).trim();
    }
    const bodyless = status < 200 || status === 204 || status === 304;
    const rest = this.#received.slice(end + 4);
    const body = bodyless ? { text: "", length: 0 } : readBody(rest, headers, this.#closed);
    if (body === undefined) return undefined;
    this.#received = rest.slice(body.length);
    return { status, headers, text: Buffer.from(body.text, "latin1").toString("utf8") };
  }
}

function readBody(rest: string, headers: Readonly<Record<string, string>>, closed: boolean) {
  const length = headers["content-length"];
  if (length !== undefined) {
    return rest.length < Number(length)
      ? undefined
      : { text: rest.slice(0, Number(length)), length: Number(length) };
  }
  if (headers["transfer-encoding"] !== "chunked")
    return closed ? { text: rest, length: rest.length } : undefined;
  let text = "";
  for (let at = 0; ;) {
    const line = rest.indexOf("\r\n", at);
    const size = Number.parseInt(rest.slice(at, line), 16);
    if (line < 0 || rest.length < line + 2 + size + 2) return undefined;
    text += rest.slice(line + 2, line + 2 + size);
    at = line + 2 + size + 2;
    if (size === 0) return { text, length: at };
  }
}

/** The head of a POST of JSON, with its blank line. */
export function postHead(length: number | undefined, ...fields: readonly string[]): string {
  const lengths = length === undefined ? [] : [`Content-Length: ${length}`];
  const lines = ["POST /v1/inference HTTP/1.1", "Host: localhost", "Content-Type: application/json"];
  return [...lines, ...lengths, ...fields, "", ""].join("\r\n");
}

/** A whole POST of this JSON text. */
export function postText(body: string, ...fields: readonly string[]): string {
  return postHead(Buffer.byteLength(body), ...fields) + Buffer.from(body, "utf8").toString("latin1");
}
