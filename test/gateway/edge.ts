/** A listener with TLS and a few routes, and clients for HTTP/1.1 and HTTP/2 that trust its authority. */
import { type EventEmitter, once } from "node:events";
import { connect as connectHttp2, type ClientHttp2Session, type IncomingHttpHeaders } from "node:http2";
import { connect as connectTcp, type Socket } from "node:net";
import { connect as connectTls, type ConnectionOptions, type TLSSocket } from "node:tls";
import { Agent, request } from "undici";
import { Certificates } from "../../src/gateway/certificates.ts";
import { SystemClock } from "../../src/app/clock.ts";
import { ClientBytes } from "../../src/gateway/client-request.ts";
import type { PageGuard } from "../../src/gateway/page-guard.ts";
import { Listener, type ListenerLimits, type Routes } from "../../src/gateway/server.ts";
import { Events } from "../../src/observe/events.ts";
import { Authority, type Pair } from "../fixtures/certificates.ts";

export const LIMITS: ListenerLimits = {
  maxBodyBytes: 1000,
  maxHeaders: 20,
  maxConnections: 50,
  headersTimeoutMs: 30_000,
  requestTimeoutMs: 30_000,
  keepAliveTimeoutMs: 30_000,
};

export interface Answered {
  readonly status: number;
  readonly headers: Readonly<Record<string, unknown>>;
  readonly text: string;
}

export interface Asked {
  readonly method?: string;
  readonly path?: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body?: string;
}

export class Edge implements AsyncDisposable {
  readonly authority = new Authority();
  readonly pair: Pair = this.authority.issue();
  readonly events = new Events();
  readonly bytes = new ClientBytes(() => 2 ** 20);
  /** Resolves what waits at /slow. */
  readonly released = Promise.withResolvers<void>();
  /** Resolves when somebody waits there. */
  /** Those that came whole to /echo. */
  readonly bodies: string[] = [];
  readonly waited = Promise.withResolvers<void>();
  readonly #clock = new SystemClock();
  readonly #certificates = new Certificates("tls", this.pair, 20, this.#clock, this.events);
  #listener: Listener | undefined;
  url = "";

  static async open(
    limits: Partial<ListenerLimits> = {},
    tls: { minVersion?: "TLSv1.3"; http2?: boolean; maxStreams?: number } = {},
    pages?: PageGuard,
  ): Promise<Edge> {
    const edge = new Edge();
    const certificates = edge.#certificates;
    await certificates.start();
    const options = { certificates, minVersion: "TLSv1.2", http2: true, maxStreams: 10, ...tls } as const;
    const all = { ...LIMITS, ...limits };
    edge.#listener = new Listener(edge.#routes(), all, edge.#clock, edge.events, {
      tls: options,
      pages,
      bytes: edge.bytes,
    });
    edge.url = await edge.#listener.listen("127.0.0.1", 0);
    return edge;
  }

  get listener(): Listener {
    return this.#listener!;
  }

  get port(): number {
    return Number(new URL(this.url).port);
  }

  tcp(): Socket {
    return connectTcp(this.port, "127.0.0.1");
  }

  tls(options: ConnectionOptions = {}): TLSSocket {
    const ca = this.authority.own.cert;
    return connectTls({ port: this.port, host: "127.0.0.1", servername: "localhost", ca, ...options });
  }

  /** The same, once it is open. */
  async open(options: ConnectionOptions = {}): Promise<TLSSocket> {
    const socket = this.tls(options);
    await once(socket, "secureConnect");
    return socket;
  }

  async http1({ method = "GET", path = "/", headers = {}, body }: Asked): Promise<Answered> {
    const agent = new Agent({ allowH2: false, connect: { ca: this.authority.own.cert } });
    try {
      const wishes = { method: method as "GET", headers, body: body ?? null, dispatcher: agent };
      const answer = await request(this.url + path, wishes);
      return { status: answer.statusCode, headers: answer.headers, text: await answer.body.text() };
    } finally {
      await agent.destroy();
    }
  }

  async session(settings: { initialWindowSize?: number } = {}): Promise<ClientHttp2Session> {
    const session = connectHttp2(this.url, { ca: this.authority.own.cert, settings });
    session.on("error", () => {});
    await once(session, "remoteSettings");
    return session;
  }

  async http2(asked: Asked): Promise<Answered> {
    const session = await this.session();
    try {
      return await ask(session, asked);
    } finally {
      session.destroy();
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.released.resolve();
    this.listener.close();
    this.#certificates.stop();
    this.authority[Symbol.dispose]();
    await Promise.resolve();
  }

  #routes(): Routes {
    return {
      "/": { GET: (exchange) => exchange.send(200, '{"hello":"é"}') },
      "/echo": {
        POST: async (exchange) => {
          const body = await exchange.body();
          this.bodies.push(body);
          exchange.send(200, body);
        },
      },
      "/host": { GET: (exchange) => exchange.send(200, JSON.stringify(exchange.header("host"))) },
      "/nothing": { DELETE: (exchange) => exchange.sendNothing(204) },
      "/large": { GET: (exchange) => exchange.send(200, JSON.stringify("a".repeat(4_000_000))) },
      "/sized/{id}": { GET: (exchange, id) => exchange.send(200, JSON.stringify("a".repeat(Number(id)))) },
      "/endless": { GET: (exchange) => void exchange.relay(200, []).write(Buffer.from("a")) },
      "/bug": { GET: () => Promise.reject(new Error("oops")) },
      "/slow": {
        GET: async (exchange) => {
          this.waited.resolve();
          await this.released.promise;
          exchange.send(200, '"late"');
        },
      },
    };
  }
}

/** Resolves when it is closed, by whatever error; `once` would reject. */
export function closed(what: EventEmitter): Promise<void> {
  return new Promise((resolve) => what.on("error", () => {}).once("close", resolve));
}

/** One request on a session; rejects when its stream ends without an answer. */
export function ask(session: ClientHttp2Session, asked: Asked): Promise<Answered> {
  const { method = "GET", path = "/", headers = {}, body } = asked;
  const head = { ":method": method, ":path": path, ...headers };
  return new Promise((resolve, reject) => {
    const stream = session.request(head, { endStream: body === undefined });
    const chunks: Buffer[] = [];
    let reply: IncomingHttpHeaders | undefined;
    stream.on("error", reject);
    stream.on("response", (received) => (reply = received));
    stream.on("data", (chunk: Buffer) => chunks.push(chunk));
    stream.on("close", () => {
      if (reply === undefined) return reject(new Error(`closed with ${stream.rstCode} and no answer`));
      const text = Buffer.concat(chunks).toString("utf8");
      resolve({ status: Number(reply[":status"]), headers: reply, text });
    });
    if (body !== undefined) stream.end(body);
  });
}
