/**
 * An HTTP listener: sockets, limits, routes. Bounds connections, headers, bytes and timeouts before a handler runs.
 * Node's parser refuses malformed requests; repeated single-value headers such as `Host`, which it accepts, are refused
 * here. Every refusal has the same JSON shape. For TLS see `http2.ts`.
 */
import cluster from "node:cluster";
import { once } from "node:events";
import {
  createServer,
  type IncomingMessage,
  type Server,
  type ServerResponse,
  STATUS_CODES,
} from "node:http";
import {
  type AddressInfo,
  createServer as createNetServer,
  type ListenOptions,
  Server as NetServer,
  type Socket,
} from "node:net";
import type { Duplex } from "node:stream";
import { setImmediate as turn } from "node:timers/promises";
import type { Alarm, Clock } from "../app/clock.ts";
import { type ErrorCode, errors, Refusal } from "../core/errors.ts";
import type { Sampler } from "../core/trace.ts";
import { newId } from "../engine/ids.ts";
import type { Events } from "../observe/events.ts";
import { ClientBytes } from "./client-request.ts";
import { DirectConnection, type DirectOwner, isShort, type Parser } from "./direct.ts";
import type { EarlyRefusals, WorkRoute } from "./early-refusal.ts";
import { type ErrorShape, Exchange, type ExchangeLimits, type Failed } from "./exchange.ts";
import { headerFlaw } from "./headers.ts";
import { type EdgeTls, Http2Sessions, isTlsTrouble, TlsServer } from "./http2.ts";
import type { PageGuard } from "./page-guard.ts";

export interface ListenerLimits {
  readonly maxBodyBytes: number;
  readonly maxHeaders: number;
  readonly maxConnections: number;
  readonly headersTimeoutMs: number;
  readonly requestTimeoutMs: number;
  readonly keepAliveTimeoutMs: number;
}

export interface RouteHandler {
  (exchange: Exchange, id: string): Promise<void> | void;
  /** Set for a POST with work, which may be refused early; undefined: never refused early. */
  readonly work?: Pick<WorkRoute, "shape">;
}

/** Marks a handler of POSTs with work. `shape` of its errors; default: Ferry's native one. */
export function bringsWork(answer: RouteHandler, shape?: ErrorShape): RouteHandler {
  return Object.assign((exchange: Exchange, id: string) => answer(exchange, id), { work: { shape } });
}
export type Methods = Readonly<Record<string, RouteHandler>>;

/** Path → method → handler. `{id}` in a path matches one segment. */
export type Routes = Readonly<Record<string, Methods>>;

export interface ListenerOptions {
  readonly tls?: EdgeTls | undefined;
  /** Chooses the traced requests; default: none. */
  readonly sampler?: Sampler | undefined;
  /** For operators: requests are not counted. */
  readonly uncounted?: boolean;
  readonly elsewhere?: ((path: string) => Elsewhere | undefined) | undefined;
  /** Shared with the process's other listeners; default: a private budget. */
  readonly bytes?: ClientBytes | undefined;
  readonly pages?: PageGuard | undefined;
  readonly early?: EarlyRefusals | undefined;
}

/** A dynamic route; `path` is its label, whatever the parameters. */
export interface Elsewhere {
  readonly path: string;
  readonly methods: Methods;
}

interface Pattern {
  readonly path: string;
  readonly before: string;
  readonly after: string;
  readonly methods: Methods;
}

interface Pipeline {
  /** The last request, until it is complete. */
  latest: Exchange | undefined;
  /** Requests whose responses the kernel has not taken yet. */
  open: number;
  /** Set while reading is paused: pauses again when Node resumes the socket for a request's body. */
  stop: (() => void) | undefined;
  /** Undefined where all requests go through `node:http`. */
  direct: DirectConnection<Exchange> | undefined;
}
const PIPELINE = Symbol("pipeline");
type Visited = Duplex & { [PIPELINE]?: Pipeline };

/** Unanswered requests per HTTP/1.1 connection; beyond it reading pauses until half are answered. */
const MAX_PIPELINED = 64;
const MAX_HEADER_BYTES = 16_384;
const OWN_BYTES = 64 * 2 ** 20;
const CHECK_EVERY_MS = 1000;
const BACKLOG = 4096;

export class Listener {
  readonly #server: Server;
  readonly #listening: WideListener;
  readonly #front: TlsServer | undefined;
  #paths: ReadonlyMap<string, Methods> = new Map();
  #work: ReadonlyMap<string, WorkRoute> = new Map();
  #patterns: readonly Pattern[] = [];
  readonly #limits: ListenerLimits;
  readonly #bytes: ClientBytes;
  #exchangeLimits: ExchangeLimits;
  readonly #fail: Failed = (exchange, error) => this.#failed(exchange, error);
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #sampler: Sampler | undefined;
  readonly #counted: boolean;
  #elsewhere: ListenerOptions["elsewhere"];
  #pages: PageGuard | undefined;
  /** Connections that close after a refusal: anything after the refused request is ignored. */
  readonly #ended = new WeakSet<Duplex>();
  #connections = 0;
  #open = 0;
  #draining = false;
  /** Connections that may have a request unknown to `node:http`. */
  readonly #directs = new Set<DirectConnection<Exchange>>();
  readonly #directOwner: DirectOwner<Exchange> & { second: number };
  #everySecond: Alarm | undefined;
  #over: Exchange[] = [];
  #whenQuiet: (() => void) | undefined;

  constructor(
    routes: Routes,
    limits: ListenerLimits,
    clock: Clock,
    events: Events,
    { tls, sampler, uncounted = false, elsewhere, bytes, pages, early }: ListenerOptions = {},
  ) {
    const { maxBodyBytes, requestTimeoutMs: writeTimeoutMs } = limits;
    this.#limits = limits;
    this.#bytes = bytes ?? new ClientBytes(() => Math.max(OWN_BYTES, 4 * maxBodyBytes));
    this.#exchangeLimits = { maxBodyBytes, writeTimeoutMs, bytes: this.#bytes };
    this.#clock = clock;
    this.#events = events;
    this.#sampler = sampler;
    this.#counted = !uncounted;
    this.#directOwner = {
      clock,
      keepAliveMs: limits.keepAliveTimeoutMs,
      second: 0,
      over: (exchange) => this.#directOver(exchange),
    };
    this.serve(routes, { elsewhere, pages });
    const options = {
      maxHeaderSize: MAX_HEADER_BYTES,
      headersTimeout: limits.headersTimeoutMs,
      requestTimeout: limits.requestTimeoutMs,
      connectionsCheckingInterval: CHECK_EVERY_MS,
      keepAliveTimeout: limits.keepAliveTimeoutMs,
      noDelay: true,
      // Checked below, so that the error has our shape.
      requireHostHeader: false,
    };
    this.#front = tls && new TlsServer(options, tls, limits, this.#door(tls));
    this.#server = this.#front?.server ?? createServer(options);
    // Operators' listeners need one socket; with TLS the server counts its own connections.
    this.#listening = new WideListener(this.#server, early !== undefined && tls === undefined);
    this.#server.maxHeadersCount = limits.maxHeaders + 1;
    if (tls === undefined) this.#server.on("connection", (socket) => this.#connected(socket));
    if (early !== undefined) {
      const connected = tls === undefined ? "connection" : "secureConnection";
      this.#server.on(connected, (socket: Socket) => this.#intercept(socket, early));
    }
    // Node's timer of an idle connection knows nothing of direct requests.
    this.#server.on("timeout", (socket: Visited) => {
      if ((socket[PIPELINE]?.open ?? 0) === 0) socket.destroy();
    });
    this.#server.on("request", (request, response) => {
      const handed = (request.socket as Visited)[PIPELINE]?.direct?.handed;
      if (handed?.request === request) this.#handedOver(handed, response);
      else if (!this.#isBehindRefusal(request)) this.#request(request, response);
    });
    this.#server.on("checkContinue", (request, response) => {
      if (!this.#isBehindRefusal(request)) this.#mayContinue(request, response);
    });
    this.#server.on("checkExpectation", (request, response) => {
      if (!this.#isBehindRefusal(request)) this.#expectsTooMuch(request, response);
    });
    this.#server.on("clientError", (error, socket) => this.#malformed(error, socket));
  }

  /** Replaces routes and body limit; requests in progress keep the old ones. */
  serve(
    routes: Routes,
    { elsewhere, pages }: Pick<ListenerOptions, "elsewhere" | "pages"> = {},
    maxBodyBytes = this.#limits.maxBodyBytes,
  ): void {
    this.#paths = new Map(Object.entries(routes));
    this.#patterns = Object.entries(routes)
      .filter(([path]) => path.includes("{id}"))
      .map(([path, methods]) => {
        const [before = "", after = ""] = path.split("{id}");
        return { path, before, after, methods };
      });
    this.#work = new Map(
      Object.entries(routes).flatMap(([path, { POST }]) =>
        POST?.work === undefined ? [] : [[path, { path, shape: POST.work.shape }]],
      ),
    );
    this.#elsewhere = elsewhere;
    this.#pages = pages;
    const { requestTimeoutMs: writeTimeoutMs } = this.#limits;
    this.#exchangeLimits = { maxBodyBytes, writeTimeoutMs, bytes: this.#bytes };
  }

  get open(): number {
    return this.#open;
  }

  async listen(host: string, port: number): Promise<string> {
    // Processes may share a client port; an operator's port belongs to one.
    await this.#listening.listen({ port, host, backlog: BACKLOG, exclusive: !this.#counted });
    const { address, family, port: bound } = this.#server.address() as AddressInfo;
    const scheme = this.#front === undefined ? "http" : "https";
    return `${scheme}://${family === "IPv6" ? `[${address}]` : address}:${bound}`;
  }

  /** Accepts the backlog; call it before closing the listener. */
  takeWaiting(): Promise<void> {
    return takeWaiting(this.#server, BACKLOG);
  }

  /**
   * Stops accepting, and closes each connection after its next response; resolves when none is left, or after `ms`.
   * Clients cannot know that a connection is about to close, and one closed during a request loses that request.
   */
  async linger(ms: number): Promise<void> {
    this.#draining = true;
    this.#front?.drain();
    await new Promise<void>((resolve) => {
      const alarm = this.#clock.at(this.#clock.now() + ms, resolve);
      void this.#listening.close().then(() => {
        alarm.cancel();
        resolve();
      });
    });
  }

  /** As `linger`, but closes idle connections now; resolves when every request is answered. */
  async drain(): Promise<void> {
    this.#draining = true;
    void this.#listening.close();
    // Node would take their connections for idle.
    for (const direct of this.#directs) direct.handOver();
    this.#server.closeIdleConnections();
    this.#front?.drain();
    if (this.#open > 0) await new Promise<void>((resolve) => (this.#whenQuiet = resolve));
  }

  async settle(ms: number): Promise<void> {
    if (this.#open === 0) return;
    await new Promise<void>((resolve) => {
      const alarm = this.#clock.at(this.#clock.now() + ms, resolve);
      this.#whenQuiet = () => {
        alarm.cancel();
        resolve();
      };
    });
  }

  close(): void {
    this.#everySecond?.cancel();
    void this.#listening.close();
    this.#server.closeAllConnections();
    this.#front?.close();
  }

  #door({ http2, maxStreams }: EdgeTls): Http2Sessions | undefined {
    if (!http2) return undefined;
    const limits = { ...this.#limits, maxStreams, maxHeaderBytes: MAX_HEADER_BYTES };
    const takers = {
      request: this.#request.bind(this),
      mayContinue: this.#mayContinue.bind(this),
      expectsTooMuch: this.#expectsTooMuch.bind(this),
      wantsTunnel: this.#wantsTunnel.bind(this),
    };
    return new Http2Sessions(limits, takers, this.#clock, this.#events);
  }

  #connected(socket: Socket): void {
    this.#connections++;
    socket.once("close", () => this.#connections--);
    if (this.#connections <= this.#limits.maxConnections) return;
    const message = `more than ${this.#limits.maxConnections} connections; try again later`;
    refuseSocket(socket, 503, "SERVICE_OVERLOADED", message, newId(this.#clock.now()));
  }

  /**
   * Hooks into a connection before `node:http`: to refuse at minimal cost (`early-refusal.ts`), and to serve requests with
   * work without its streams and responses (`direct.ts`).
   */
  #intercept(socket: Visited & Socket, early: EarlyRefusals): void {
    const { parser } = socket as { parser?: Parser | null };
    const take = parser?.onIncoming;
    if (parser === undefined || parser === null || take === undefined) return;
    const direct = new DirectConnection(socket, parser, take, this.#directOwner);
    pipelineOf(socket).direct = direct;
    this.#directs.add(direct);
    if (this.#everySecond === undefined) this.#checkLater();
    socket.on("close", () => this.#directs.delete(direct));
    parser.onIncoming = (request, keepsAlive) => {
      const route = keepsAlive ? this.#workRoute(socket, request) : undefined;
      const answer = route !== undefined && early.active ? early.answer(request, route) : undefined;
      if (answer !== undefined) {
        parser.incoming = null;
        socket.write(answer, "latin1");
        direct.idle();
      } else if (route !== undefined && isShort(request)) {
        const exchange = this.#exchange(request, direct);
        direct.begin(exchange);
        this.#begin(exchange, socket);
      } else {
        direct.handOver();
        return take(request, keepsAlive);
      }
      return 0;
    };
  }

  #checkLater(): void {
    this.#everySecond = this.#clock.at(this.#clock.now() + CHECK_EVERY_MS, () => {
      this.#directOwner.second++;
      for (const direct of this.#directs) direct.check();
      this.#everySecond = undefined;
      if (this.#directs.size > 0) this.#checkLater();
    });
  }

  /** Of a plain request with no response pending on its connection. */
  #workRoute(socket: Visited, request: IncomingMessage): WorkRoute | undefined {
    const { method, url, rawHeaders, upgrade } = request as IncomingMessage & { upgrade?: boolean };
    const route = method === "POST" ? this.#work.get(url!) : undefined;
    if (route === undefined || upgrade === true || this.#draining) return undefined;
    const waits = socket[PIPELINE]!.open > 0 || socket.writableLength > 0 || !socket.writable;
    return waits || rawHeaders.length > 2 * this.#limits.maxHeaders ? undefined : route;
  }

  /** A direct request needs more than that. */
  #handedOver(exchange: Exchange, response: ServerResponse): void {
    const { request } = exchange;
    response.on("close", () => {
      unqueued(request.socket, exchange);
      this.#closed(exchange);
    });
    request.on("error", ignore);
    exchange.handedOver(response);
  }

  #directOver(exchange: Exchange): boolean {
    const pipeline = unqueued(exchange.request.socket, exchange);
    // Reported after all responses of this turn are written.
    if (this.#over.push(exchange) === 1) queueMicrotask(this.#reportOver);
    return pipeline.open === 0;
  }

  readonly #reportOver = (): void => {
    const over = this.#over;
    this.#over = [];
    for (const exchange of over) this.#closed(exchange);
  };

  /** Whether an earlier refusal closes its connection; Node keeps the request until then, so it counts. */
  #isBehindRefusal({ socket }: IncomingMessage): boolean {
    if (!this.#ended.has(socket)) return false;
    countIn(socket);
    return true;
  }

  #mayContinue(request: IncomingMessage, response: ServerResponse): Exchange {
    return this.#request(request, response, true);
  }

  #expectsTooMuch(request: IncomingMessage, response: ServerResponse): Exchange {
    const refusal = new Refusal("INVALID_REQUEST", "only Expect: 100-continue is understood", {
      status: 417,
    });
    return this.#refuse(request, response, refusal);
  }

  /** For HTTP/2; over HTTP/1.1 Node closes the connection. */
  #wantsTunnel(request: IncomingMessage, response: ServerResponse): Exchange {
    return this.#refuse(request, response, new Refusal("METHOD_NOT_ALLOWED", "this is no proxy"));
  }

  #refuse(request: IncomingMessage, response: ServerResponse, refusal: Refusal): Exchange {
    const exchange = this.#exchange(request, response);
    exchange.last = true;
    this.#open++;
    response.once("close", () => this.#closed(exchange));
    exchange.fail(refusal);
    return exchange;
  }

  #exchange(request: IncomingMessage, response: ServerResponse | DirectConnection<Exchange>): Exchange {
    return new Exchange(request, response, this.#exchangeLimits, this.#clock.now(), this.#fail);
  }

  #request(request: IncomingMessage, response: ServerResponse, mayContinue = false): Exchange {
    const exchange = this.#exchange(request, response);
    exchange.mayContinue = mayContinue;
    // HTTP/2 responses need no order.
    const connection = request.httpVersionMajor === 1 ? (request.socket as Visited) : undefined;
    // Fires once: `once` would allocate a wrapper per request.
    response.on("close", () => {
      if (connection !== undefined) unqueued(connection, exchange);
      this.#closed(exchange);
    });
    // A client that disconnects while sending is not our error; without a listener it would be thrown.
    request.on("error", ignore);
    this.#begin(exchange, connection);
    return exchange;
  }

  #begin(exchange: Exchange, connection: Visited | undefined): void {
    exchange.last = this.#draining;
    if (this.#sampler !== undefined) {
      exchange.trace = this.#sampler.begin(exchange.header("traceparent"), exchange.header("tracestate"));
    }
    this.#open++;
    if (connection !== undefined) queued(connection, exchange);
    try {
      const answer = this.#find(exchange, exchange.request);
      const done = answer.run(exchange, answer.id);
      if (done !== undefined) done.catch((error: unknown) => this.#failed(exchange, error));
    } catch (error) {
      this.#failed(exchange, error);
    }
  }

  #closed(exchange: Exchange): void {
    exchange.closed();
    this.#open--;
    if (this.#open === 0) this.#whenQuiet?.();
    if (!this.#counted || !exchange.counts || !this.#events.heard("request.answered")) return;
    exchange.over(this.#clock.now());
    this.#events.emit("request.answered", exchange);
  }

  #find(exchange: Exchange, request: IncomingMessage): { run: RouteHandler; id: string } {
    const { maxHeaders } = this.#limits;
    const flaw = headerFlaw(request, maxHeaders);
    if (flaw !== undefined) {
      exchange.last = true;
      if (request.httpVersionMajor === 1) this.#ended.add(request.socket);
      throw flaw;
    }
    const foreign = this.#pages?.flaw(request.headers);
    if (foreign !== undefined) throw foreign;
    const { path, methods, id } = this.#route(exchange.path);
    exchange.route = path;
    const method = request.method === "HEAD" ? "GET" : request.method!;
    const run = Object.hasOwn(methods, method) ? methods[method] : undefined;
    if (run !== undefined) return { run, id };
    throw new Refusal("METHOD_NOT_ALLOWED", `use ${Object.keys(methods).join(" or ")} here`);
  }

  #route(path: string): { path: string; methods: Methods; id: string } {
    const methods = this.#paths.get(path);
    if (methods !== undefined) return { path, methods, id: "" };
    for (const { path: pattern, before, after, methods } of this.#patterns) {
      if (path.length <= before.length + after.length || !path.startsWith(before) || !path.endsWith(after))
        continue;
      const id = path.slice(before.length, path.length - after.length);
      if (!id.includes("/")) return { path: pattern, methods, id };
    }
    const found = this.#elsewhere?.(path);
    if (found !== undefined) return { ...found, id: "" };
    throw new Refusal("NOT_FOUND", "there is nothing at this path");
  }

  #failed(exchange: Exchange, error: unknown): void {
    if (exchange.answered) return;
    const refusal = error instanceof Refusal ? error : this.#bug(error);
    // The rest of an unread body would be parsed as the next request.
    if (hasBody(exchange.request) && !exchange.request.complete) exchange.last = true;
    const allow =
      refusal.code === "METHOD_NOT_ALLOWED"
        ? ["allow", Object.keys(this.#route(exchange.path).methods).join(", ")]
        : [];
    exchange.fail(refusal, allow);
  }

  #bug(error: unknown): Refusal {
    const what = error instanceof Error ? (error.stack ?? error.message) : String(error);
    this.#events.emit("notice", { level: "error", message: `this is a bug in Ferry: ${what}` });
    return new Refusal("INTERNAL", "an internal error; it is logged, and the request may be sent again");
  }

  #malformed(error: Error & { code?: string }, socket: Duplex): void {
    // Already refused for its headers: that response closes the connection.
    if (this.#ended.has(socket)) return;
    // Data after `Connection: close` is ignored, and the requests before it are answered.
    if (error.code === "HPE_CLOSED_CONNECTION") return;
    const id = newId(this.#clock.now());
    // A response now would be taken for that of an earlier, unanswered request.
    const early = (socket as Visited)[PIPELINE]?.latest?.holdsUp === true;
    const gone = error.code === "ECONNRESET" || isTlsTrouble(error.code) || !socket.writable;
    if (gone || early) socket.destroy();
    else if (error.code === "ERR_HTTP_REQUEST_TIMEOUT") {
      refuseSocket(socket, 408, "REQUEST_TIMEOUT", "the request was sent too slowly", id);
    } else if (error.code === "HPE_HEADER_OVERFLOW") {
      refuseSocket(
        socket,
        431,
        "INVALID_REQUEST",
        `the headers are larger than ${MAX_HEADER_BYTES} bytes`,
        id,
      );
    } else {
      refuseSocket(socket, 400, "INVALID_REQUEST", "this is not well-formed HTTP", id);
    }
  }
}

function queued(connection: Visited, exchange: Exchange): void {
  const pipeline = countIn(connection);
  exchange.after(pipeline.latest);
  pipeline.latest = exchange;
}

/** Counts an unanswered request, and pauses reading at the limit. */
function countIn(connection: Visited): Pipeline {
  const pipeline = pipelineOf(connection);
  if (++pipeline.open < MAX_PIPELINED || pipeline.stop !== undefined) return pipeline;
  pipeline.stop = () => void connection.pause();
  connection.pause().on("resume", pipeline.stop);
  return pipeline;
}

function unqueued(connection: Visited, exchange: Exchange): Pipeline {
  const pipeline = connection[PIPELINE]!;
  // An idle connection must not keep its last request alive.
  if (pipeline.latest === exchange) pipeline.latest = undefined;
  if (--pipeline.open > MAX_PIPELINED / 2 || pipeline.stop === undefined) return pipeline;
  connection.off("resume", pipeline.stop).resume();
  pipeline.stop = undefined;
  return pipeline;
}

function pipelineOf(connection: Visited): Pipeline {
  return (connection[PIPELINE] ??= { latest: undefined, open: 0, stop: undefined, direct: undefined });
}

function hasBody({ headers }: IncomingMessage): boolean {
  return headers["transfer-encoding"] !== undefined || Number(headers["content-length"] ?? 0) > 0;
}

function ignore(): void {}

export function refuseSocket(
  socket: Duplex,
  status: number,
  code: ErrorCode,
  message: string,
  id: string,
): void {
  const wait = errors[code].status === 503 ? { retry_after_ms: 1000 } : {};
  const body = JSON.stringify({ error: code, message, request_id: id, ...wait });
  const retry = errors[code].status === 503 ? "Retry-After: 1\r\n" : "";
  socket.end(
    `HTTP/1.1 ${status} ${STATUS_CODES[status]}\r\nContent-Type: application/json; charset=utf-8\r\n` +
      `Content-Length: ${Buffer.byteLength(body)}\r\n${retry}Connection: close\r\n\r\n${body}`,
  );
}

export async function takeWaiting(server: Server, most: number): Promise<void> {
  let taken = 0;
  const count = (): void => void taken++;
  server.on("connection", count);
  for (let left = most; left > 0; left--) {
    const before = taken;
    await turn();
    await turn();
    if (taken === before) break;
  }
  server.off("connection", count);
}

const SOCKETS = 8;

export class WideListener {
  readonly #server: NetServer;
  readonly #others: NetServer[] = [];

  readonly #sockets: number;

  /** `server` counts only the connections of its own socket, so one with `maxConnections` must not be `wide`. */
  constructor(server: NetServer, wide: boolean) {
    this.#server = server;
    const spreads = process.platform === "linux" && !cluster.isWorker;
    this.#sockets = wide && spreads ? SOCKETS : 1;
  }

  async listen(options: ListenOptions): Promise<void> {
    if (this.#sockets === 1) return open(this.#server, options);
    if (options.port !== 0) await close(await opened(createNetServer(), options));
    await open(this.#server, { ...options, reusePort: true });
    const { port } = this.#server.address() as { port: number };
    const { allowHalfOpen } = this.#server as NetServer & { allowHalfOpen: boolean };
    for (let at = 1; at < this.#sockets; at++) {
      const other = createNetServer({ allowHalfOpen, noDelay: true }, (socket: Socket) =>
        this.#server.emit("connection", socket),
      );
      await open(other, { ...options, port, reusePort: true });
      this.#others.push(other);
    }
  }

  async close(): Promise<void> {
    // node:http's `close` would also close idle connections.
    const closed = [this.#server, ...this.#others].map(
      (each) => new Promise<void>((resolve) => NetServer.prototype.close.call(each, () => resolve())),
    );
    await Promise.all(closed);
  }
}

async function open(server: NetServer, options: ListenOptions): Promise<void> {
  await opened(server, options);
}

async function opened(server: NetServer, options: ListenOptions): Promise<NetServer> {
  server.listen(options);
  await once(server, "listening");
  return server;
}

async function close(server: NetServer): Promise<void> {
  server.close();
  await once(server, "close");
}
