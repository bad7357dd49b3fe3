/**
 * A real HTTP worker whose behaviour each test chooses. It notes what it saw: the bodies, how many
 * connections were opened, and whether two requests were ever open at once. It echoes by default. A GET is a
 * question about its health; `onQuestion` answers it.
 */
import { once } from "node:events";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import { createServer as createTlsServer, type Server as TlsServer, type ServerOptions } from "node:https";
import type { AddressInfo, Socket } from "node:net";

export interface StubCall {
  readonly body: string;
  readonly inputs: readonly unknown[];
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  readonly socket: Socket;
}

export type Behaviour = (call: StubCall) => void | Promise<void>;

export class StubWorker {
  behave: Behaviour;
  onQuestion: (request: IncomingMessage, response: ServerResponse) => void = (_, response) => response.end();
  readonly url: string;
  readonly bodies: string[] = [];
  readonly requests: IncomingMessage[] = [];
  connections = 0;
  mostAtOnce = 0;
  readonly #server: Server;
  #open = 0;
  #arrived = Promise.withResolvers<StubCall>();

  private constructor(server: Server, behave: Behaviour, scheme: "http" | "https") {
    this.#server = server;
    this.url = `${scheme}://127.0.0.1:${(server.address() as AddressInfo).port}/infer?v=1`;
    this.behave = behave;
  }

  static async listen(behave: Behaviour = echo, tls?: ServerOptions): Promise<StubWorker> {
    const server = tls === undefined ? createServer() : createTlsServer(tls);
    server.listen(0, "127.0.0.1");
    await once(server, "listening");
    const stub = new StubWorker(server, behave, tls === undefined ? "http" : "https");
    server.on("connection", () => stub.connections++);
    server.on("request", (request, response) => void stub.#answer(request, response));
    return stub;
  }

  /** The next request that arrives in full. */
  arrival(): Promise<StubCall> {
    return this.#arrived.promise;
  }

  /** Another certificate, for connections from now on. */
  renew({ cert, key }: { readonly cert: string; readonly key: string }): void {
    (this.#server as TlsServer).setSecureContext({ cert, key });
  }

  async [Symbol.asyncDispose](): Promise<void> {
    if (!this.#server.listening) return;
    const closed = once(this.#server, "close");
    this.#server.close();
    this.#server.closeAllConnections();
    await closed;
  }

  async #answer(request: IncomingMessage, response: ServerResponse): Promise<void> {
    if (request.method === "GET") return this.onQuestion(request, response);
    this.mostAtOnce = Math.max(this.mostAtOnce, ++this.#open);
    response.on("close", () => this.#open--);
    const chunks: Buffer[] = [];
    try {
      for await (const chunk of request) chunks.push(chunk as Buffer);
    } catch {
      return; // The client went away while it was sending.
    }
    const body = Buffer.concat(chunks).toString("utf8");
    this.bodies.push(body);
    this.requests.push(request);
    const { inputs } = JSON.parse(body) as { inputs: unknown[] };
    const call: StubCall = { body, inputs, request, response, socket: request.socket };
    const arrived = this.#arrived;
    this.#arrived = Promise.withResolvers();
    arrived.resolve(call);
    await this.behave(call);
  }
}

/** The inputs' exact text comes back: `inputs` is the first field of the body. */
export const echo: Behaviour = ({ body, response }) => {
  const end = body.lastIndexOf('],"parameters":');
  const inputs = body.slice('{"inputs":['.length, end < 0 ? body.lastIndexOf("]") : end);
  response.setHeader("content-type", "application/json").end(`{"outputs":[${inputs}],"usage":{"ms":1}}`);
};

/** This body with status 200, whatever came in. */
export const saying =
  (body: string | Buffer, type = "application/json"): Behaviour =>
  ({ response }) =>
    void response.setHeader("content-type", type).end(body);

export const status =
  (code: number, headers: Record<string, string> = {}, body = ""): Behaviour =>
  ({ response }) =>
    void response.writeHead(code, headers).end(body);

export const hang: Behaviour = () => {};

/** Bytes for ever, as fast as they are taken, until the client hangs up. */
export const endless: Behaviour = async ({ response }) => {
  const chunk = Buffer.alloc(64 * 1024, "a");
  response.writeHead(200, { "content-type": "application/json" });
  response.write('{"outputs":["');
  const gone = once(response, "close");
  while (!response.destroyed) {
    if (!response.write(chunk)) await Promise.race([once(response, "drain"), gone]);
  }
};
