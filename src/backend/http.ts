/**
 * Workers behind HTTP, protocol `batch`: the plainest fixed API.
 *
 *   POST <worker's URL>  {"inputs":[…]}  or  {"inputs":[…],"parameters":{…}}
 *   200                  {"outputs":[…]}     one output per input, in order; other fields are ignored
 *
 * Bodies are joined and cut as text; no value is parsed and printed again. What each answer means:
 *
 *   2xx                        `match` decides; not JSON, not UTF-8 or over maxReplyBytes is `unusable`
 *   429, 503                   `busy`, for as long as Retry-After(-Ms) says, 1 s when it says nothing
 *   401, 403, 404, 405, 407    `failed`, blame worker: a wrong URL or credential is not about one input
 *   408, 3xx, 5xx              `failed`, blame worker; redirects are never followed
 *   any other 4xx              `rejected`
 *   no connection              `failed`, blame nobody; also when TLS cannot be agreed on (`worker-tls.ts`)
 *   connection lost            `failed`, blame batch, once the request was written; also in mid-reply
 *
 * Each worker has one connection, kept alive between batches. Whatever does not end with a complete
 * reply (an abort, a reply over the cap, an error) destroys that connection, so the next batch starts on
 * a fresh one and can never read the tail of another. The caller's signal is the only clock of a call;
 * a worker that drips a byte a second is aborted like one that hangs.
 *
 * Any reply may carry `x-ferry-load`, how full the worker is. `start` does not wait for workers: one that is
 * down at boot may come up later. Where there is a `healthPath` it begins to ask them (`worker-health.ts`).
 */
import assert from "node:assert/strict";
import { isUtf8 } from "node:buffer";
import { Client, type Dispatcher, errors } from "undici";
import type { Clock } from "../clock.ts";
import { splitField } from "../core/json-split.ts";
import type { Events } from "../telemetry/events.ts";
import type { Backend, Batch, Reply, Worker, WorkerHealth } from "./backend.ts";
import { failed, match, quote, rejected, requestText, unusable } from "./match.ts";
import { headerLoad, type HealthRules, HealthQuestions } from "./worker-health.ts";
import { CONNECT_TIMEOUT_MS, tlsTrouble, WorkerTls, type WorkerTlsOptions } from "./worker-tls.ts";

export interface HttpOptions {
  /** Full endpoint URLs. */
  readonly workers: readonly string[];
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
/** Enough of an error page to quote from. */
const MAX_ERROR_BYTES = 16 * 1024;
const DEFAULT_RETRY_AFTER_MS = 1_000;
const MIN_RETRY_AFTER_MS = 10;
const MAX_RETRY_AFTER_MS = 30_000;

export class HttpBackend implements Backend {
  readonly workers: readonly HttpWorker[];
  readonly #tls: WorkerTls;

  constructor(options: HttpOptions, { model, clock, events }: HttpAround) {
    const urls = options.workers.map((worker) => new URL(worker));
    const names = workerNames(urls);
    const tls = new WorkerTls(`model ${model}: backend.tls`, options.tls, clock, events);
    this.#tls = tls;
    this.workers = urls.map((url, index) => new HttpWorker(names[index]!, url, options, tls, clock));
  }

  async start(): Promise<void> {
    await this.#tls.start();
    for (const worker of this.workers) worker.start();
  }

  async stop(): Promise<void> {
    this.#tls.stop();
    await Promise.all(this.workers.map((worker) => worker.stop()));
  }
}

class HttpWorker implements Worker {
  readonly name: string;
  readonly #url: URL;
  readonly #path: string;
  readonly #headers: Record<string, string>;
  readonly #maxReplyBytes: number;
  readonly #tls: WorkerTls;
  readonly #clock: Clock;
  readonly #questions: HealthQuestions | undefined;
  /** The worker's one connection; undefined until the first batch and after each broken exchange. */
  #client: Client | undefined;
  /** Of the certificates with which it was made. */
  #version = 0;
  #exchange: Exchange | undefined;
  #reached = true;
  #stopped = false;
  load: Worker["load"];

  constructor(name: string, url: URL, options: HttpOptions, tls: WorkerTls, clock: Clock) {
    const { maxReplyBytes, healthPath, health } = options;
    this.name = name;
    this.#url = url;
    this.#path = url.pathname + url.search;
    this.#headers = { "content-type": "application/json", accept: "application/json", ...basicAuth(url) };
    this.#maxReplyBytes = maxReplyBytes;
    this.#tls = tls;
    this.#clock = clock;
    if (healthPath === undefined) return;
    const headers = { accept: "application/json", ...basicAuth(url) };
    const place = { path: healthPath, headers, client: () => this.#connect() };
    this.#questions = new HealthQuestions(place, health, clock, (share) => this.#heardLoad(share));
  }

  start(): void {
    this.#questions?.start();
  }

  get health(): WorkerHealth | undefined {
    return this.#questions?.health;
  }

  set onHealth(changed: (() => void) | undefined) {
    if (this.#questions !== undefined) this.#questions.onChange = changed;
  }

  /** Only of use after it could not be reached: that it answers questions does not mean that it runs batches. */
  get probe(): Worker["probe"] {
    const questions = this.#questions;
    return questions === undefined || this.#reached ? undefined : (signal) => questions.ask(signal);
  }

  #headersFor({ traceparent }: Batch): Record<string, string> {
    return traceparent === undefined ? this.#headers : { ...this.#headers, traceparent };
  }

  run(batch: Batch, signal: AbortSignal): Promise<Reply> {
    if (signal.aborted) return Promise.resolve(failed("aborted", "nobody"));
    if (this.#stopped) return Promise.resolve(failed("worker was stopped", "nobody"));
    assert(this.#exchange === undefined, "a worker runs one batch at a time");
    return new Promise((resolve) => {
      if (this.#version !== this.#tls.version) this.#disconnect();
      this.#version = this.#tls.version;
      const client = (this.#client ??= this.#connect());
      const abort = (): void => exchange.abort();
      const exchange = new Exchange(batch, this.#maxReplyBytes, this.#clock, (reply, intact) => {
        signal.removeEventListener("abort", abort);
        this.#exchange = undefined;
        if (!intact) this.#disconnect();
        this.#noteReply(reply, exchange.load);
        resolve(reply);
      });
      this.#exchange = exchange;
      signal.addEventListener("abort", abort);
      client.dispatch(
        { path: this.#path, method: "POST", headers: this.#headersFor(batch), body: requestText(batch) },
        exchange,
      );
    });
  }

  async stop(): Promise<void> {
    this.#stopped = true;
    this.#questions?.stop();
    const client = this.#client;
    this.#exchange?.finish(failed("worker was stopped", "nobody"), false);
    await client?.destroy();
  }

  #noteReply(reply: Reply, load: number | undefined): void {
    this.#reached = reply.kind !== "failed" || reply.blame !== "nobody";
    if (reply.kind !== "failed") this.#questions?.answered();
    if (load !== undefined) this.#heardLoad(load);
  }

  #heardLoad(share: number): void {
    this.load = { share, at: this.#clock.now() };
  }

  #connect(): Client {
    const https = this.#url.protocol === "https:";
    return new Client(this.#url.origin, {
      pipelining: 1,
      // HTTP/2 would share one connection between an aborted exchange and the next.
      allowH2: false,
      ...(https && { connect: this.#tls.connector(CONNECT_TIMEOUT_MS) }),
      connectTimeout: CONNECT_TIMEOUT_MS,
      keepAliveTimeout: IDLE_CONNECTION_MS,
      headersTimeout: 0,
      bodyTimeout: 0,
    });
  }

  #disconnect(): void {
    const client = this.#client;
    this.#client = undefined;
    void client?.destroy();
  }
}

/** One request and what came back, until exactly one reply is known. */
class Exchange implements Dispatcher.DispatchHandler {
  readonly #batch: Batch;
  readonly #maxReplyBytes: number;
  readonly #clock: Clock;
  readonly #done: (reply: Reply, intact: boolean) => void;
  readonly #chunks: Buffer[] = [];
  #finished = false;
  #sent = false;
  #status = 0;
  #headers: Headers = {};
  #bytes = 0;
  /** How full the worker says it is. */
  load: number | undefined;

  constructor(batch: Batch, maxReplyBytes: number, clock: Clock, done: Exchange["finish"]) {
    this.#batch = batch;
    this.#maxReplyBytes = maxReplyBytes;
    this.#clock = clock;
    this.#done = done;
  }

  /** `intact`: the exchange is complete, the connection can carry the next one. */
  finish(reply: Reply, intact: boolean): void {
    if (this.#finished) return;
    this.#finished = true;
    this.#done(reply, intact);
  }

  abort(): void {
    this.finish(failed("aborted", this.#sent ? "batch" : "nobody"), false);
  }

  onRequestStart(): void {}

  onRequestSent(): void {
    this.#sent = true;
  }

  onResponseStart(_controller: unknown, status: number, headers: Headers): void {
    if (status < 200) return; // "103 Early Hints" and the like come before the answer.
    this.#status = status;
    this.#headers = headers;
    this.load = headerLoad(headers);
    if (this.#isAnswer() && Number(first(headers["content-length"])) > this.#maxReplyBytes) this.#tooLarge();
  }

  onResponseData(_controller: unknown, chunk: Buffer): void {
    if (this.#finished) return;
    this.#bytes += chunk.length;
    this.#chunks.push(chunk);
    if (this.#isAnswer()) {
      if (this.#bytes > this.#maxReplyBytes) this.#tooLarge();
    } else if (this.#bytes > MAX_ERROR_BYTES) this.finish(this.#refusal(), false);
  }

  onResponseEnd(): void {
    if (!this.#finished) this.finish(this.#isAnswer() ? this.#answer() : this.#refusal(), true);
  }

  onResponseError(_controller: unknown, error: Error): void {
    const code = "code" in error ? String(error.code) : "";
    const tls = tlsTrouble(error);
    if (tls !== undefined && (tls.final || !this.#sent)) this.finish(failed(tls.message, "nobody"), false);
    else if (error instanceof errors.HTTPParserError) {
      this.finish(failed("worker does not speak HTTP/1.1 at this URL", "worker"), false);
    } else if (this.#sent) {
      const when = this.#status === 0 ? "before it answered" : "in the middle of its reply";
      this.finish(failed(`worker closed the connection ${when} (${reason(error, code)})`, "batch"), false);
    } else this.finish(failed(`cannot connect to the worker: ${reason(error, code)}`, "nobody"), false);
  }

  #isAnswer(): boolean {
    return this.#status >= 200 && this.#status < 300;
  }

  #tooLarge(): void {
    this.#chunks.length = 0;
    this.finish(unusable(`worker's reply is larger than maxReplyBytes (${this.#maxReplyBytes})`), false);
  }

  #answer(): Reply {
    const body = Buffer.concat(this.#chunks);
    if (!isUtf8(body)) return unusable("worker's reply is not UTF-8");
    const text = body.toString("utf8");
    try {
      JSON.parse(text);
    } catch (error) {
      const type = first(this.#headers["content-type"]) ?? "no content type";
      const brief = "worker's reply is not JSON";
      return unusable(`${brief} (${quote(type, 60)}): ${quote((error as Error).message)}`, brief);
    }
    const { elements, flaw } = splitField(text, "outputs");
    return flaw === undefined
      ? match(this.#batch, elements.map(detached))
      : unusable(`worker's reply ${flaw}`);
  }

  #refusal(): Reply {
    const status = this.#status;
    const words = quote(Buffer.concat(this.#chunks).toString("utf8"));
    const brief = `worker answered ${status}`;
    const message = words === "" ? brief : `${brief}: ${words}`;
    if (status < 400) {
      return failed(
        `worker answered ${status}; redirects are not followed, configure the final URL`,
        "worker",
      );
    }
    if (status === 429 || status === 503) {
      return { kind: "busy", message, brief, retryAfterMs: retryAfterMs(this.#headers, this.#clock.now()) };
    }
    if (status === 401 || status === 403 || status === 407) {
      const advice = "(check the worker's URL and credentials)";
      return failed(`${message} ${advice}`, "worker", `${brief} ${advice}`);
    }
    if (status === 404 || status === 405) {
      const advice = "(check the worker's URL)";
      return failed(`${message} ${advice}`, "worker", `${brief} ${advice}`);
    }
    return status === 408 || status >= 500 ? failed(message, "worker", brief) : rejected(message);
  }
}

type Headers = Record<string, string | string[] | undefined>;

/**
 * A copy that stands alone. V8 cuts a string by pointing into the whole, so one output kept for ten
 * minutes would keep its batch-mates' megabytes too.
 */
function detached(text: string): string {
  return Buffer.from(text, "utf8").toString("utf8");
}

/** How long a busy worker asks to be left alone. */
export function retryAfterMs(headers: Headers, now: number): number {
  const ms = first(headers["retry-after-ms"]);
  const after = first(headers["retry-after"]);
  let wanted = NaN;
  if (ms !== undefined) wanted = Number.parseFloat(ms);
  if (Number.isNaN(wanted) && after !== undefined) {
    wanted = /^\s*\d/.test(after) ? Number.parseFloat(after) * 1000 : Date.parse(after) - now;
  }
  if (Number.isNaN(wanted)) return DEFAULT_RETRY_AFTER_MS;
  return Math.min(MAX_RETRY_AFTER_MS, Math.max(MIN_RETRY_AFTER_MS, wanted));
}

function first(value: string | string[] | undefined): string | undefined {
  return Array.isArray(value) ? value[0] : value;
}

function reason(error: Error, code: string): string {
  switch (code) {
    case "ECONNREFUSED":
      return "connection refused";
    case "ECONNRESET":
    case "EPIPE":
      return "connection reset";
    case "ENOTFOUND":
    case "EAI_AGAIN":
      return "its name cannot be resolved";
    case "UND_ERR_CONNECT_TIMEOUT":
      return `no connection within ${CONNECT_TIMEOUT_MS} ms`;
    default:
      return quote(error.message) || code || error.name;
  }
}

/** Credentials in a URL become a header; they are never part of a name or a message. */
function basicAuth(url: URL): { authorization?: string } {
  if (url.username === "" && url.password === "") return {};
  const pair = `${decodeURIComponent(url.username)}:${decodeURIComponent(url.password)}`;
  return { authorization: `Basic ${Buffer.from(pair).toString("base64")}` };
}

/** Host and port, with the path where that is not enough, with a number where that is not either. */
function workerNames(urls: readonly URL[]): string[] {
  const unique = (names: readonly string[]): boolean => new Set(names).size === names.length;
  const hosts = urls.map((url) => url.host);
  if (unique(hosts)) return hosts;
  const paths = urls.map((url) => url.host + url.pathname);
  return unique(paths) ? paths : paths.map((path, index) => `${path}#${index + 1}`);
}
