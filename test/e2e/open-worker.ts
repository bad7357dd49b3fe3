/**
 * A worker that any request may reach, for what is passed through. It notes what came, byte by byte where that matters,
 * and answers as its test wants: through `node:http` (`behave`), or as raw bytes on the socket (`RawWorker`).
 */
import { once } from "node:events";
import { createServer, type IncomingMessage, type Server, type ServerResponse } from "node:http";
import {
  type AddressInfo,
  createServer as createTcpServer,
  type Server as TcpServer,
  type Socket,
} from "node:net";
import { ReturningServer } from "./returning-server.ts";

export interface OpenCall {
  readonly request: IncomingMessage;
  readonly response: ServerResponse;
  /** Resolves with the whole body. */
  readonly body: () => Promise<string>;
  /** Resolves when Ferry has hung up, or the answer is over. */
  readonly closed: Promise<void>;
}

export type OpenBehaviour = (call: OpenCall) => void | Promise<void>;

/** Says what it was asked. */
export const tell: OpenBehaviour = async ({ request, response, body }) => {
  const { method, url, rawHeaders } = request;
  const text = await body();
  response.setHeader("content-type", "application/json");
  response.end(JSON.stringify({ method, url, headers: rawHeaders, body: text }));
};

export class OpenWorker extends ReturningServer {
  behave: OpenBehaviour;
  readonly calls: OpenCall[] = [];
  #arrived = Promise.withResolvers<OpenCall>();

  private constructor(behave: OpenBehaviour) {
    super();
    this.behave = behave;
  }

  static async listen(behave: OpenBehaviour = tell): Promise<OpenWorker> {
    const worker = new OpenWorker(behave);
    await worker.open();
    return worker;
  }

  /** The next request whose header has come. */
  arrival(): Promise<OpenCall> {
    return this.#arrived.promise;
  }

  protected override make(): Server {
    const server = createServer({ keepAliveTimeout: 60_000 });
    server.on("request", (request, response) => {
      request.on("error", () => {});
      response.on("error", () => {});
      const closed = once(response, "close").then(() => {});
      const call: OpenCall = { request, response, body: () => textOf(request), closed };
      this.calls.push(call);
      const arrived = this.#arrived;
      this.#arrived = Promise.withResolvers();
      arrived.resolve(call);
      void Promise.resolve(this.behave(call)).catch(() => response.destroy());
    });
    return server;
  }
}

async function textOf(request: IncomingMessage): Promise<string> {
  const chunks: Buffer[] = [];
  for await (const chunk of request) chunks.push(chunk as Buffer);
  return Buffer.concat(chunks).toString("utf8");
}

/** Answers every request header with these bytes, whatever they are. */
export class RawWorker implements AsyncDisposable {
  readonly #server: TcpServer;
  readonly #sockets = new Set<Socket>();
  /** All bytes of each connection. */
  readonly heard: string[] = [];
  answer: string;
  /** Whether the connection ends behind the answer. */
  hangsUp = false;

  private constructor(answer: string) {
    this.answer = answer;
    this.#server = createTcpServer((socket) => this.#connected(socket));
  }

  static async listen(answer: string): Promise<RawWorker> {
    const worker = new RawWorker(answer);
    worker.#server.listen(0, "127.0.0.1");
    await once(worker.#server, "listening");
    return worker;
  }

  get url(): string {
    return `http://127.0.0.1:${(this.#server.address() as AddressInfo).port}`;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    for (const socket of this.#sockets) socket.destroy();
    const closed = once(this.#server, "close");
    this.#server.close();
    await closed;
  }

  #connected(socket: Socket): void {
    this.#sockets.add(socket);
    const at = this.heard.push("") - 1;
    let answered = 0;
    socket.setEncoding("latin1").on("error", () => {});
    socket.on("close", () => this.#sockets.delete(socket));
    socket.on("data", (text: string) => {
      this.heard[at] += text;
      const heads = this.heard[at]!.split("\r\n\r\n").length - 1;
      for (; answered < heads; answered++) socket.write(this.answer, "latin1");
      if (this.hangsUp) socket.end();
    });
  }
}

/** A config's model that passes everything on to these. */
export function openModel(urls: readonly string[], more: Readonly<Record<string, unknown>> = {}) {
  const { backend = {}, ...rest } = more as { backend?: object };
  return {
    name: "open",
    passthrough: true,
    backend: { kind: "http", protocol: "openai-embeddings", workers: urls, ...backend },
    ...rest,
  };
}
