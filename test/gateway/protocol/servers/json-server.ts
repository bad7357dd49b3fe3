/**
 * A model server for tests: POST and GET routes that take and answer JSON text, made from a protocol's documents.
 *
 * It notes every call. `instead`, while it is set, may answer in the server's place: that is how it misbehaves. What is
 * POSTed waits for `busy`.
 */
import { once } from "node:events";
import { createServer, type IncomingHttpHeaders, type Server } from "node:http";
import type { AddressInfo } from "node:net";

export interface Served {
  readonly status: number;
  readonly text: string;
  readonly headers?: Readonly<Record<string, string>>;
}

export interface Called {
  readonly method: string;
  readonly path: string;
  readonly text: string;
  readonly headers: IncomingHttpHeaders;
}

export abstract class JsonServer implements AsyncDisposable {
  readonly calls: Called[] = [];
  instead: ((call: Called) => Served | undefined) | undefined;
  busy: Promise<void> | undefined;
  readonly #server: Server;

  constructor() {
    this.#server = createServer((request, response) => {
      const chunks: Buffer[] = [];
      request.on("data", (chunk: Buffer) => chunks.push(chunk));
      request.on("error", () => {});
      request.on("end", () => {
        const text = Buffer.concat(chunks).toString("utf8");
        const call = { method: request.method!, path: request.url!, text, headers: request.headers };
        this.calls.push(call);
        const answer = (): void => {
          const { status, text: said, headers } = this.instead?.(call) ?? this.serve(call);
          response.writeHead(status, { "content-type": "application/json", ...headers }).end(said);
        };
        if (this.busy === undefined || call.method !== "POST") answer();
        else void this.busy.then(answer);
      });
    });
  }

  protected abstract serve(call: Called): Served;

  async listen(): Promise<this> {
    this.#server.listen(0, "127.0.0.1");
    await once(this.#server, "listening");
    return this;
  }

  get url(): string {
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  /** What it answers without anybody in between. */
  async ask(path: string, body: unknown): Promise<{ status: number; text: string; tokens: string | null }> {
    const headers = { "content-type": "application/json" };
    const answer = await fetch(this.url + path, { method: "POST", headers, body: JSON.stringify(body) });
    return {
      status: answer.status,
      text: await answer.text(),
      tokens: answer.headers.get("x-compute-tokens"),
    };
  }

  /** Those of one path. */
  callsOf(path: string): readonly Called[] {
    return this.calls.filter((call) => call.path === path);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const closed = once(this.#server, "close");
    this.#server.close();
    this.#server.closeAllConnections();
    await closed;
  }
}

/** Numbers that nobody else's text has, written as a server would, a few of them hard to keep. */
export function vectorText(text: string, more = ""): string {
  let sum = 0;
  for (const code of Buffer.from(`${text}\u0000${more}`)) sum = (sum * 31 + code) % 2_147_483_647;
  return `[${sum},${text.length},0.30000001192092896,-1.17549435E-38,9007199254740993]`;
}

/** As many as words, and two for the ends. */
export function tokensOf(text: string): number {
  return text.split(/\s+/).filter((word) => word !== "").length + 2;
}
