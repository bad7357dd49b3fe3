/**
 * Workers behind HTTP, in whichever protocol they speak (`src/gateway/protocol`): one call per batch.
 * What each answer means stands in `http-exchange.ts`.
 *
 * Each worker has one connection, kept alive between batches, and a second one where a batch is handed over while it runs
 * another. Whatever does not end with a complete reply (an abort, a reply over the cap, an error) destroys the
 * connection it was on and no other, so the next batch starts on a fresh one and can never read the tail of another. The caller's signal is the only clock of a call;
 * a worker that drips a byte a second is aborted like one that hangs.
 *
 * A call that uses an extension of its protocol (`Call.extended`) and is refused by a worker that has not answered such a call
 * lately may have been refused for that. The worker is asked whether it speaks the extension; if it does not say so, the same
 * batch is sent again without. Nothing of that is held against the worker, and if it answers, it gets no such call any more.
 *
 *   refused: 4xx about the inputs, 500, 501 ── listed in its metadata ──► the refusal stands
 *                                           ── not listed ──► sent again without the extension; that reply counts
 *                                           ── cannot be asked ──► the refusal stands
 *
 * Any reply may carry `x-ferry-load`, how full the worker is. `start` does not wait for workers: one that is
 * down at boot may come up later. Where there is a `healthPath` it begins to ask them (`worker-health.ts`), and where
 * their protocol has a place for it, how many inputs they take in one call (`worker-info.ts`).
 */
import assert from "node:assert/strict";
import { Client } from "undici";
import type { Clock } from "../../app/clock.ts";
import { batch as batchApi } from "../../gateway/protocol/batch.ts";
import { uncredited } from "../../gateway/protocol/fields.ts";
import type { Call, WorkerSide } from "../../gateway/protocol/protocol.ts";
import type { Events } from "../../observe/events.ts";
import type { Backend, Batch, Reply, Worker, WorkerHealth } from "./backend.ts";
import { HttpExchange } from "./http-exchange.ts";
import { failed, rejected } from "./match.ts";
import { type HealthPlace, type HealthRules, HealthQuestions, overHttp } from "./worker-health.ts";
import { ask, InfoQuestions } from "./worker-info.ts";
import { CONNECT_TIMEOUT_MS, WorkerTls, type WorkerTlsOptions } from "./worker-tls.ts";

export interface HttpOptions {
  /** Left out: `batch`. */
  readonly protocol?: WorkerSide;
  /** Full endpoint URLs. */
  readonly workers: readonly string[];
  /** What the workers call the model; left out: as we do. */
  readonly model?: string;
  /** What is sent as `Authorization`; left out: nothing. Never to be shown. */
  readonly authorization?: string;
  /** Where clients' own credentials are, which go to the workers in its place; left out: they do not. */
  readonly vault?: { find(name: string): string | undefined } | undefined;
  readonly maxReplyBytes: number;
  /** Left out: workers are not asked how they are. */
  readonly healthPath?: string;
  readonly health: HealthRules;
  readonly tls: WorkerTlsOptions;
}

/** Whose backend it is, and what it lives by. */
export interface HttpAround {
  readonly model: string;
  readonly clock: Clock;
  readonly events: Events;
}

/**
 * Shorter than the idle timeout of common servers (gunicorn 2 s, uvicorn and Node 5 s), so that a batch
 * is not written to a connection that the worker is about to close. A server's own hint comes first.
 */
const IDLE_CONNECTION_MS = 1_000;
/** What a worker may be given at once: one to run, and one behind it. */
const MOST_AT_ONCE = 2;
/** So long a worker whose reply could not be cut gets one task at a time; then the next batch is tried. */
export const INSEPARABLE_HOLDS_MS = 60_000;

/** So long after an answer to a call with an extension a refusal of another is taken to be about its inputs. */
const EXTENSION_HOLDS_MS = 60_000;

/** What holds for every connection to a worker. */
export const CONNECTION = {
  pipelining: 1,
  // HTTP/2 would share one connection between an aborted exchange and the next.
  allowH2: false,
  connectTimeout: CONNECT_TIMEOUT_MS,
  keepAliveTimeout: IDLE_CONNECTION_MS,
  headersTimeout: 0,
  bodyTimeout: 0,
} as const;

export class HttpBackend implements Backend {
  readonly #options: HttpOptions;
  readonly #model: string;
  readonly #clock: Clock;
  readonly #workers: HttpWorker[];
  readonly #tls: WorkerTls;

  constructor(options: HttpOptions, { model, clock, events }: HttpAround) {
    const urls = options.workers.map((worker) => new URL(worker));
    const names = workerNames(urls);
    this.#options = options;
    this.#model = model;
    this.#clock = clock;
    this.#tls = new WorkerTls(`model ${model}: backend.tls`, options.tls, clock, events);
    this.#workers = urls.map((url, index) => this.#worker(names[index]!, url));
  }

  get workers(): readonly HttpWorker[] {
    return this.#workers;
  }

  async start(): Promise<void> {
    await this.#tls.start();
    for (const worker of this.workers) worker.start();
  }

  /** It need not be up: like those of the config, it may come later. */
  grow(address?: string, host?: string): Promise<HttpWorker> {
    if (address === undefined || !URL.canParse(address)) {
      return Promise.reject(new Error("say where the worker is: its full endpoint URL"));
    }
    if (this.#workers.some((worker) => worker.address === address)) {
      return Promise.reject(new Error("this worker is there already"));
    }
    const url = new URL(address);
    const taken = new Set(this.#workers.map(({ name }) => name));
    const name = [url.host, url.host + url.pathname, address].find((each) => !taken.has(each)) ?? address;
    const worker = this.#worker(name, url, host);
    worker.start();
    this.#workers.push(worker);
    return Promise.resolve(worker);
  }

  async retire(worker: Worker): Promise<void> {
    const at = this.#workers.findIndex((each) => each === worker);
    if (at >= 0) await this.#workers.splice(at, 1)[0]!.stop();
  }

  #worker(name: string, url: URL, host?: string): HttpWorker {
    const { model, protocol } = this.#options;
    const named = { ...this.#options, model: model ?? protocol?.modelOf?.(url.pathname) ?? this.#model };
    return new HttpWorker({ name, url, host }, named, this.#tls, this.#clock);
  }

  async stop(): Promise<void> {
    this.#tls.stop();
    await Promise.all(this.workers.map((worker) => worker.stop()));
  }
}

/** One worker: what it is called, where it is, and by which `name:port` it is asked, if that is not in its URL. */
interface Place {
  readonly name: string;
  readonly url: URL;
  readonly host?: string | undefined;
}

class HttpWorker implements Worker {
  readonly name: string;
  readonly address: string;
  readonly host: string | undefined;
  readonly #url: URL;
  readonly #protocol: WorkerSide;
  readonly #model: string;
  readonly #path: string;
  readonly #basePath: string;
  readonly #headers: Record<string, string>;
  readonly #vault: HttpOptions["vault"];
  readonly #maxReplyBytes: number;
  readonly #tls: WorkerTls;
  readonly #clock: Clock;
  readonly #questions: HealthQuestions | undefined;
  readonly #info: InfoQuestions | undefined;
  /** Connections that carry nothing: none until the first batch and after each broken exchange. */
  readonly #idle: Client[] = [];
  /** Of the certificates with which they were made. */
  #version = 0;
  /** What is under way, each with its connection. */
  readonly #exchanges = new Map<HttpExchange, Client>();
  #reached = true;
  #aloneUntil = -Infinity;
  /** It does not speak its protocol's extension. */
  #plain = false;
  /** When it last showed that it does. */
  #extendedAt = -Infinity;
  readonly #asked: Omit<HealthPlace, "path">;
  #stopped = false;
  load: Worker["load"];

  constructor(
    { name, url, host }: Place,
    options: HttpOptions & { readonly model: string },
    tls: WorkerTls,
    clock: Clock,
  ) {
    const { protocol = batchApi, maxReplyBytes, health } = options;
    this.name = name;
    this.address = url.href;
    this.host = host;
    this.#url = url;
    this.#protocol = protocol;
    this.#model = options.model;
    this.#path = url.pathname + url.search;
    this.#basePath = protocol.basePath(url.pathname);
    const always = { ...authorizationOf(url, options.authorization), ...(host !== undefined && { host }) };
    this.#headers = { "content-type": "application/json", accept: "application/json", ...always };
    this.#vault = options.vault;
    this.#maxReplyBytes = maxReplyBytes;
    this.#tls = tls;
    this.#clock = clock;
    const healthPath = options.healthPath ?? behind(this.#basePath, protocol.healthPath);
    const headers = { accept: "application/json", ...always };
    const asked = (this.#asked = { headers, client: () => this.#connect() });
    if (protocol.info !== undefined) {
      const place = { ...asked, path: this.#basePath + protocol.info.path };
      this.#info = new InfoQuestions(place, protocol.info.maxBatchSize, health, clock);
    }
    if (healthPath === undefined) return;
    const place = { ...asked, path: healthPath };
    this.#questions = new HealthQuestions(overHttp(place), health, clock, (share) => this.#heardLoad(share));
  }

  start(): void {
    this.#questions?.start();
    this.#info?.start();
  }

  get health(): WorkerHealth | undefined {
    return this.#questions?.health;
  }

  set onHealth(changed: (() => void) | undefined) {
    const questions = this.#questions;
    if (questions === undefined) return;
    questions.onChange = () => {
      if (questions.health?.well === true) this.#info?.again();
      changed?.();
    };
  }

  /** Only of use after it could not be reached: that it answers questions does not mean that it runs batches. */
  get probe(): Worker["probe"] {
    const questions = this.#questions;
    return questions === undefined || this.#reached ? undefined : (signal) => questions.ask(signal);
  }

  /** What it can be sent at once; undefined: anything. */
  get maxBatchSize(): number | undefined {
    if (this.#clock.now() < this.#aloneUntil) return 1;
    return this.#info?.maxBatchSize ?? this.#protocol.maxBatchSize;
  }

  #headersFor({ traceparent }: Batch, { type, headers }: Call): Record<string, string> {
    return {
      ...this.#headers,
      ...(traceparent !== undefined && { traceparent }),
      ...(type !== undefined && { "content-type": type, accept: "*/*" }),
      ...headers,
    };
  }

  run(given: Batch, signal: AbortSignal): Promise<Reply> {
    if (this.#vault === undefined) return this.#run(given, signal, undefined);
    const { parameters, name } = uncredited(given.parameters);
    const authorization = name === undefined ? undefined : this.#vault.find(name);
    if (name === undefined || authorization !== undefined)
      return this.#run({ ...given, parameters }, signal, authorization);
    const message =
      "the client's credential is not known any more (it is kept in memory only); send it again";
    return Promise.resolve(rejected(message));
  }

  async #run(batch: Batch, signal: AbortSignal, authorization: string | undefined): Promise<Reply> {
    const call = this.#call(batch, this.#plain);
    const { reply, status } = await this.#send(call, batch, signal, authorization);
    if (call.extended !== true) return reply;
    const now = this.#clock.now();
    if (reply.kind === "answered") {
      // Where only outputs were asked for in another form the worker may just have paid no heed.
      if (typeof call.body !== "string") this.#extendedAt = now;
      return reply;
    }
    if (!mayBeTheForm(reply, status) || now - this.#extendedAt <= EXTENSION_HOLDS_MS) return reply;
    return this.#plainly(batch, signal, authorization, reply);
  }

  /** What was refused may have been the extension: finds out, and does without it if so. */
  async #plainly(
    batch: Batch,
    signal: AbortSignal,
    authorization: string | undefined,
    refused: Reply,
  ): Promise<Reply> {
    const { path, listed } = this.#protocol.extension!;
    const metadata = await ask({ ...this.#asked, path: this.#basePath + path }, signal);
    if (metadata === undefined) return refused;
    if (listed(metadata)) {
      this.#extendedAt = this.#clock.now();
      return refused;
    }
    const { reply } = await this.#send(this.#call(batch, true), batch, signal, authorization);
    if (reply.kind === "answered") this.#plain = true;
    return reply;
  }

  #call({ tasks, parameters }: Batch, plain: boolean): Call {
    const inputs = tasks.map(({ input }) => input);
    return this.#protocol.call(inputs, parameters, this.#model, plain);
  }

  #send(
    call: Call,
    batch: Batch,
    signal: AbortSignal,
    authorization: string | undefined,
  ): Promise<{ readonly reply: Reply; readonly status: number }> {
    const unsent = (reply: Reply) => Promise.resolve({ reply, status: 0 });
    if (signal.aborted) return unsent(failed("aborted", "nobody"));
    if (this.#stopped) return unsent(failed("worker was stopped", "nobody"));
    assert(this.#exchanges.size < MOST_AT_ONCE, "a worker gets two batches at a time at most");
    if (call.flaw !== undefined) return unsent(rejected(call.flaw));
    const ours = this.#headers["authorization"] !== undefined;
    const ownCredential = this.#vault !== undefined && (authorization !== undefined || !ours);
    return new Promise((resolve) => {
      const client = this.#connection();
      const { version } = this.#tls;
      const abort = (): void => exchange.abort();
      const exchange = new HttpExchange(
        batch,
        this.#protocol,
        { model: this.#model, named: call.named === true, ownCredential },
        this.#maxReplyBytes,
        this.#clock,
        (reply, intact) => {
          signal.removeEventListener("abort", abort);
          this.#exchanges.delete(exchange);
          // After a 5xx servers may hang up without a word (uvicorn does), and the next batch would be taken for the cause.
          const kept = intact && exchange.status < 500;
          if (kept && version === this.#version && !this.#stopped) this.#idle.push(client);
          else void client.destroy();
          if (exchange.inseparable) this.#aloneUntil = this.#clock.now() + INSEPARABLE_HOLDS_MS;
          this.#noteReply(reply, exchange);
          resolve({ reply, status: exchange.status });
        },
      );
      this.#exchanges.set(exchange, client);
      signal.addEventListener("abort", abort);
      const path = behind(this.#basePath, call.path) ?? this.#path;
      const headers = this.#headersFor(batch, call);
      // Where clients' own credentials go to the workers, a caller without one does not borrow that of the URL.
      if (authorization !== undefined) headers["authorization"] = authorization;
      else if (this.#vault !== undefined) delete headers["authorization"];
      client.dispatch({ path, method: "POST", headers, body: call.body }, exchange);
    });
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    this.#questions?.stop();
    this.#info?.stop();
    const clients = [...this.#exchanges.values(), ...this.#idle];
    for (const exchange of this.#exchanges.keys())
      exchange.finish(failed("worker was stopped", "nobody"), false);
    await Promise.all(clients.map((client) => client.destroy()));
  }

  #noteReply(reply: Reply, { inputs, load }: HttpExchange): void {
    const reached = reply.kind !== "failed" || reply.blame !== "nobody";
    // It may have been started anew, and it may be that there were just too many.
    if ((reached && !this.#reached) || (reply.kind === "rejected" && inputs.length > 1)) this.#info?.again();
    if (!reached) {
      this.#plain = false;
      this.#extendedAt = -Infinity;
    }
    this.#reached = reached;
    if (reply.kind !== "failed") this.#questions?.answered();
    if (load !== undefined) this.#heardLoad(load);
  }

  #heardLoad(share: number): void {
    this.load = { share, at: this.#clock.now() };
  }

  /** One that carries nothing and was made with the certificates of now, or a new one. */
  #connection(): Client {
    if (this.#version !== this.#tls.version) {
      for (const client of this.#idle.splice(0)) void client.destroy();
      this.#version = this.#tls.version;
    }
    return this.#idle.pop() ?? this.#connect();
  }

  #connect(): Client {
    const https = this.#url.protocol === "https:";
    return new Client(this.#url.origin, {
      ...CONNECTION,
      ...(https && { connect: this.#tls.connector(CONNECT_TIMEOUT_MS, { host: this.host }) }),
    });
  }
}

/** Whether a worker that cannot read a call would say so in this way. */
function mayBeTheForm(reply: Reply, status: number): boolean {
  if (reply.kind === "rejected") return status >= 400 && reply.code === undefined;
  return status === 500 || status === 501;
}

/** `path` behind a worker's base; undefined where there is none. */
function behind(basePath: string, path: string | undefined): string | undefined {
  return path === undefined ? undefined : basePath + path;
}

/** What the config says; credentials in a URL become a header too, and are never part of a name or a message. */
export function authorizationOf(url: URL, configured: string | undefined): { authorization?: string } {
  if (configured !== undefined) return { authorization: configured };
  if (url.username === "" && url.password === "") return {};
  const pair = `${decodeURIComponent(url.username)}:${decodeURIComponent(url.password)}`;
  return { authorization: `Basic ${Buffer.from(pair).toString("base64")}` };
}

/** Host and port, with the path where that is not enough, with a number where that is not either. */
export function workerNames(urls: readonly URL[]): string[] {
  const unique = (names: readonly string[]): boolean => new Set(names).size === names.length;
  const hosts = urls.map((url) => url.host);
  if (unique(hosts)) return hosts;
  const paths = urls.map((url) => url.host + url.pathname);
  return unique(paths) ? paths : paths.map((path, index) => `${path}#${index + 1}`);
}
