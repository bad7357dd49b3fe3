/**
 * Workers behind HTTP, in any protocol of `src/gateway/protocol`: one call per batch.
 *
 * Each worker has one keep-alive connection, and a second one while pipelining. An exchange without a complete reply
 * (an abort, a reply over the limit, an error) destroys its own connection only, so the next batch can never read the
 * tail of this one. The caller's signal is the only time limit; a worker that drips bytes is aborted like one that
 * hangs. By answer:
 *
 *   2xx                        `match` decides; not JSON, not UTF-8 or over maxReplyBytes is `unusable`
 *   429, 503                   `busy` for Retry-After(-Ms), default 1 s
 *   401, 403, 429              `rejected` with a code where the call carried the client's own credential
 *   401, 403, 404, 405         `rejected` with a code where the client named the subject (`clientNamed`); without one
 *                              where that is an input
 *   401, 403, 404, 405, 407    otherwise `failed`, blame worker: a wrong URL or credential is not about one input
 *   408, 3xx, 5xx              `failed`, blame worker; redirects are never followed
 *   any other 4xx              `rejected`
 *   no connection              `failed`, blame nobody; also when TLS fails (`worker-tls.ts`)
 *   connection lost            `failed`, blame batch, once the request was written; also in the middle of a reply
 *
 * A worker that refuses a call with a protocol extension (`Call.extended`), and has not answered such a call lately,
 * may not support it. It is asked, and the refusal does not count against it if it does not:
 *
 *   refused: 4xx about the inputs, 500, 501 ── listed in its metadata ──► the refusal stands
 *                                           ── not listed ──► sent again without the extension; that reply counts, and
 *                                                             if it is an answer, the extension is not used any more
 *                                           ── cannot be asked ──► the refusal stands
 *
 * Any reply may carry `x-ferry-load`, the worker's load.
 */
import assert from "node:assert/strict";
import { isUtf8 } from "node:buffer";
import { Client, type Dispatcher, errors } from "undici";
import type { Clock } from "../../app/clock.ts";
import { batch as batchApi } from "../../gateway/protocol/batch.ts";
import { uncredited } from "../../gateway/protocol/fields.ts";
import type { PadMemory } from "../../gateway/protocol/oip-pad.ts";
import type { WorkerCall, WorkerSide } from "../../gateway/protocol/protocol.ts";
import type { Batch, ClientCode, Reply } from "./backend.ts";
import {
  askText,
  headerLoad,
  healthOverHttp,
  type HealthRules,
  type HttpPlace,
  MAX_WORKER_CALLS,
  type NetworkAround,
  NetworkWorkers,
  NetworkWorker,
  padMemory,
  type WorkerPlace,
} from "./network.ts";
import { boundedWaitMs, clientNamed, failed, match, quote, rejected, unusable } from "./replies.ts";
import {
  CONNECT_TIMEOUT_MS,
  reason,
  tlsTrouble,
  type WorkerTls,
  type WorkerTlsOptions,
} from "./worker-tls.ts";

export interface HttpOptions {
  /** Default: `batch`. */
  readonly protocol?: WorkerSide;
  /** Full endpoint URLs. */
  readonly workers: readonly string[];
  /** The model's name at the workers; default: the same. */
  readonly model?: string;
  /** Sent as `Authorization`. Never shown. */
  readonly authorization?: string;
  /** Clients' own credentials, sent to the workers in place of `authorization`. */
  readonly vault?: { find(name: string): string | undefined } | undefined;
  readonly maxReplyBytes: number;
  /** Default: the protocol's; without either, health is not checked. */
  readonly healthPath?: string;
  readonly health: HealthRules;
  readonly tls: WorkerTlsOptions;
}

/**
 * Shorter than the idle timeout of common servers (gunicorn 2 s, uvicorn and Node 5 s), so that no batch is written to
 * a connection the worker is about to close. A server's own hint takes precedence.
 */
const IDLE_CONNECTION_MS = 1_000;
/** For this long after an extended call succeeded, a refusal of another is about its inputs. */
const EXTENSION_HOLDS_MS = 60_000;
/** Enough of an error page to quote from. */
const MAX_ERROR_BYTES = 16 * 1024;

/** undici options for connections to `url`; `host` as in `WorkerPlace`. */
export function connectionOptions(url: URL, host: string | undefined, tls: WorkerTls): Client.Options {
  return {
    pipelining: 1,
    // HTTP/2 would share one connection between an aborted exchange and the next.
    allowH2: false,
    connectTimeout: CONNECT_TIMEOUT_MS,
    keepAliveTimeout: IDLE_CONNECTION_MS,
    headersTimeout: 0,
    bodyTimeout: 0,
    ...(url.protocol === "https:" && { connect: tls.connector(CONNECT_TIMEOUT_MS, { host }) }),
  };
}

export class HttpBackend extends NetworkWorkers {
  constructor(options: HttpOptions, around: NetworkAround) {
    const { protocol } = options;
    const memory = padMemory(around);
    super(options, around, {
      wanted: "its full endpoint URL",
      parse: (address = "") => URL.parse(address) ?? undefined,
      make: (place, tls) => {
        const model = options.model ?? protocol?.modelOf?.(place.url.pathname) ?? around.model;
        return new HttpWorker(place, { ...options, model, memory }, tls, around.clock);
      },
    });
  }
}

type NamedOptions = HttpOptions & { readonly model: string; readonly memory: PadMemory };

class HttpWorker extends NetworkWorker {
  readonly #url: URL;
  readonly #options: NamedOptions;
  readonly #protocol: WorkerSide;
  readonly #basePath: string;
  readonly #headers: Record<string, string>;
  readonly #tls: WorkerTls;
  readonly #questions: Omit<HttpPlace, "path">;
  /** Idle connections: none until the first batch and after each broken exchange. */
  readonly #idle: Client[] = [];
  /** Version of the certificates they were made with. */
  #version = 0;
  readonly #exchanges = new Map<HttpExchange, Client>();
  /** It does not support its protocol's extension. */
  #plain = false;
  /** When it last answered an extended call. */
  #extendedAt = -Infinity;

  constructor(place: WorkerPlace, options: NamedOptions, tls: WorkerTls, clock: Clock) {
    super(place, clock);
    const { url, host } = place;
    const { protocol = batchApi, health } = options;
    this.#url = url;
    this.#options = options;
    this.#protocol = protocol;
    this.#basePath = protocol.basePath(url.pathname);
    this.#tls = tls;
    this.limit = protocol.maxBatchSize;
    const json = "application/json";
    const always = { ...authorizationOf(url, options.authorization), ...(host !== undefined && { host }) };
    this.#headers = { "content-type": json, accept: json, ...always };
    this.#questions = { headers: { accept: json, ...always }, client: () => this.#connect() };
    if (protocol.info !== undefined) {
      const { path, maxBatchSize } = protocol.info;
      this.askInfo({ ...this.#questions, path: this.#basePath + path }, maxBatchSize, health);
    }
    const healthPath = options.healthPath ?? this.#behindBase(protocol.healthPath);
    if (healthPath !== undefined)
      this.checkHealth(healthOverHttp({ ...this.#questions, path: healthPath }), health);
  }

  #behindBase(path: string | undefined): string | undefined {
    return path === undefined ? undefined : this.#basePath + path;
  }

  run(given: Batch, signal: AbortSignal): Promise<Reply> {
    const { vault } = this.#options;
    if (vault === undefined) return this.#run(given, signal, undefined);
    const { parameters, name } = uncredited(given.parameters);
    const authorization = name === undefined ? undefined : vault.find(name);
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
    const now = this.clock.now();
    if (reply.kind === "answered") {
      // Where only the output form was extended, the worker may have ignored that.
      if (typeof call.body !== "string") this.#extendedAt = now;
      return reply;
    }
    if (!mayBeTheForm(reply, status) || now - this.#extendedAt <= EXTENSION_HOLDS_MS) return reply;
    const { path, listed } = this.#protocol.extension!;
    const metadata = await askText({ ...this.#questions, path: this.#basePath + path }, signal);
    if (metadata === undefined) return reply;
    if (listed(metadata)) {
      this.#extendedAt = this.clock.now();
      return reply;
    }
    const { reply: plain } = await this.#send(this.#call(batch, true), batch, signal, authorization);
    if (plain.kind === "answered") this.#plain = true;
    return plain;
  }

  #call({ tasks, parameters }: Batch, plain: boolean): WorkerCall {
    const inputs = tasks.map(({ input }) => input);
    return this.#protocol.call(inputs, parameters, this.#options.model, plain);
  }

  #send(
    call: WorkerCall,
    batch: Batch,
    signal: AbortSignal,
    authorization: string | undefined,
  ): Promise<{ readonly reply: Reply; readonly status: number }> {
    const unsent = (reply: Reply) => Promise.resolve({ reply, status: 0 });
    if (signal.aborted) return unsent(failed("aborted", "nobody"));
    if (this.stopped) return unsent(failed("worker was stopped", "nobody"));
    assert(this.#exchanges.size < MAX_WORKER_CALLS, "a worker gets two batches at a time at most");
    if (call.flaw !== undefined) return unsent(rejected(call.flaw));
    const { vault, model, maxReplyBytes, memory } = this.#options;
    const ours = this.#headers["authorization"] !== undefined;
    const ownCredential = vault !== undefined && (authorization !== undefined || !ours);
    return new Promise((resolve) => {
      const client = this.#connection();
      const { version } = this.#tls;
      const abort = (): void => exchange.abort();
      const exchange = new HttpExchange({
        batch,
        protocol: this.#protocol,
        model,
        named: call.named === true,
        ownCredential,
        maxReplyBytes,
        memory,
        clock: this.clock,
        done: (reply, intact) => {
          signal.removeEventListener("abort", abort);
          this.#exchanges.delete(exchange);
          // After a 5xx servers may close without notice (uvicorn does), and the next batch would be blamed.
          const kept = intact && exchange.status < 500;
          if (kept && version === this.#version && !this.stopped) this.#idle.push(client);
          else void client.destroy();
          this.noteReply(reply, batch.tasks.length, exchange.load, exchange.inseparable);
          if (!this.reached) {
            this.#plain = false;
            this.#extendedAt = -Infinity;
          }
          resolve({ reply, status: exchange.status });
        },
      });
      this.#exchanges.set(exchange, client);
      signal.addEventListener("abort", abort);
      const path = this.#behindBase(call.path) ?? this.#url.pathname + this.#url.search;
      const headers = this.#headersFor(batch, call, authorization);
      client.dispatch({ path, method: "POST", headers, body: call.body }, exchange);
    });
  }

  #headersFor(
    { traceparent }: Batch,
    { type, headers }: WorkerCall,
    authorization: string | undefined,
  ): Record<string, string> {
    const all: Record<string, string> = {
      ...this.#headers,
      ...(traceparent !== undefined && { traceparent }),
      ...(type !== undefined && { "content-type": type, accept: "*/*" }),
      ...headers,
    };
    // With forwarded credentials, a caller without one must not use the configured one.
    if (authorization !== undefined) all["authorization"] = authorization;
    else if (this.#options.vault !== undefined) delete all["authorization"];
    return all;
  }

  override async stop(): Promise<void> {
    await super.stop();
    const clients = [...this.#exchanges.values(), ...this.#idle];
    for (const exchange of this.#exchanges.keys())
      exchange.finish(failed("worker was stopped", "nobody"), false);
    await Promise.all(clients.map((client) => client.destroy()));
  }

  /** An idle one with the current certificates, or a new one. */
  #connection(): Client {
    if (this.#version !== this.#tls.version) {
      for (const client of this.#idle.splice(0)) void client.destroy();
      this.#version = this.#tls.version;
    }
    return this.#idle.pop() ?? this.#connect();
  }

  #connect(): Client {
    return new Client(this.#url.origin, connectionOptions(this.#url, this.host, this.#tls));
  }
}

function mayBeTheForm(reply: Reply, status: number): boolean {
  if (reply.kind === "rejected") return status >= 400 && reply.code === undefined;
  return status === 500 || status === 501;
}

/** The configured credential, else the one in the URL, which is never part of a name or message. */
export function authorizationOf(url: URL, configured: string | undefined): { authorization?: string } {
  if (configured !== undefined) return { authorization: configured };
  if (url.username === "" && url.password === "") return {};
  const pair = `${decodeURIComponent(url.username)}:${decodeURIComponent(url.password)}`;
  return { authorization: `Basic ${Buffer.from(pair).toString("base64")}` };
}

interface ExchangeOptions {
  readonly batch: Batch;
  readonly protocol: WorkerSide;
  readonly model: string;
  /** See `Call.named`. */
  readonly named: boolean;
  /** The credential is the client's own, or missing because the client sent none (`forwardAuthorization`). */
  readonly ownCredential: boolean;
  readonly maxReplyBytes: number;
  readonly memory?: PadMemory;
  readonly clock: Clock;
  /** `intact`: the connection can carry the next exchange. */
  done(reply: Reply, intact: boolean): void;
}

type Headers = Record<string, string | string[] | undefined>;

const CHECK_URL = "(check the worker's URL)";
const CHECK_CREDENTIALS = "(check the worker's URL and credentials)";
/** Statuses that can be the client's error. */
const CLIENT_CODES: ReadonlyMap<number, ClientCode> = new Map<number, ClientCode>([
  [401, "UNAUTHENTICATED"],
  [403, "FORBIDDEN"],
  [404, "NOT_FOUND"],
  [405, "NOT_FOUND"],
  [429, "RATE_LIMITED"],
]);

export class HttpExchange implements Dispatcher.DispatchHandler {
  readonly #options: ExchangeOptions;
  readonly #inputs: readonly string[];
  readonly #chunks: Buffer[] = [];
  #finished = false;
  #sent = false;
  /** 0 until known. */
  status = 0;
  #headers: Headers = {};
  #bytes = 0;
  load: number | undefined;
  /** The reply was for all inputs together and could not be split. */
  inseparable = false;

  constructor(options: ExchangeOptions) {
    this.#options = options;
    this.#inputs = options.batch.tasks.map(({ input }) => input);
  }

  /** The first reply counts. */
  finish(reply: Reply, intact: boolean): void {
    if (this.#finished) return;
    this.#finished = true;
    this.#options.done(reply, intact);
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
    this.status = status;
    this.#headers = headers;
    this.load = headerLoad(headers);
    if (this.#isAnswer() && Number(this.#header("content-length")) > this.#options.maxReplyBytes)
      this.#tooLarge();
  }

  onResponseData(_controller: unknown, chunk: Buffer): void {
    if (this.#finished) return;
    this.#bytes += chunk.length;
    this.#chunks.push(chunk);
    if (this.#isAnswer()) {
      if (this.#bytes > this.#options.maxReplyBytes) this.#tooLarge();
    } else if (this.#bytes > MAX_ERROR_BYTES) this.finish(this.#refusal(), false);
  }

  onResponseEnd(): void {
    if (!this.#finished) this.finish(this.#isAnswer() ? this.#answer() : this.#refusal(), true);
  }

  onResponseError(_controller: unknown, error: Error): void {
    const tls = tlsTrouble(error);
    if (tls !== undefined && (tls.final || !this.#sent)) this.finish(failed(tls.message, "nobody"), false);
    else if (error instanceof errors.HTTPParserError) {
      this.finish(failed("worker does not speak HTTP/1.1 at this URL", "worker"), false);
    } else if (this.#sent) {
      const when = this.status === 0 ? "before it answered" : "in the middle of its reply";
      this.finish(failed(`worker closed the connection ${when} (${reason(error)})`, "batch"), false);
    } else this.finish(failed(`cannot connect to the worker: ${reason(error)}`, "nobody"), false);
  }

  #isAnswer(): boolean {
    return this.status >= 200 && this.status < 300;
  }

  #header(name: string): string | undefined {
    return first(this.#headers[name]);
  }

  #tooLarge(): void {
    this.#chunks.length = 0;
    const { maxReplyBytes } = this.#options;
    this.finish(unusable(`worker's reply is larger than maxReplyBytes (${maxReplyBytes})`), false);
  }

  #answer(): Reply {
    const { batch, protocol, memory } = this.#options;
    const body = Buffer.concat(this.#chunks);
    const type = this.#header("content-type") ?? "no content type";
    const notJson = protocol.readsBytes === true ? undefined : jsonFlaw(body, type);
    if (notJson !== undefined) return notJson;
    const reply = { header: (name: string) => this.#header(name), body };
    const read = protocol.outputs(reply, this.#inputs, batch.parameters, memory);
    if (read.flaw === undefined) return match(batch, read.outputs);
    this.inseparable = read.inseparable === true;
    const message = `worker's reply ${read.flaw}`;
    // A rejected batch is bisected until its tasks go alone.
    return this.inseparable || read.divide === true ? rejected(message) : unusable(message);
  }

  #refusal(): Reply {
    const { status } = this;
    const page = Buffer.concat(this.#chunks).toString("utf8");
    const words = quote(page);
    const brief = `worker answered ${status}`;
    const message = words === "" ? brief : `${brief}: ${words}`;
    if (status < 400)
      return failed(`${brief}; redirects are not followed, configure the final URL`, "worker");
    const mistake = this.#clientsMistake(page, message);
    if (mistake !== undefined) return mistake;
    if (status === 429 || status === 503) {
      const waitMs = retryAfterMs(this.#headers, this.#options.clock.now());
      const named = this.#about(page) === "parameters";
      return { kind: "busy", message, brief, retryAfterMs: waitMs, named };
    }
    if (status === 408 || status >= 500) return failed(message, "worker", brief);
    const advice = [401, 403, 407].includes(status) ? CHECK_CREDENTIALS : CHECK_URL;
    if ([401, 403, 404, 405, 407].includes(status))
      return failed(`${message} ${advice}`, "worker", `${brief} ${advice}`);
    return rejected(message);
  }

  /** Undefined where it is the worker's failure, or unknown. */
  #clientsMistake(page: string, message: string): Reply | undefined {
    const code = CLIENT_CODES.get(this.status);
    if (code === undefined) return undefined;
    if (this.#options.ownCredential && code !== "NOT_FOUND") return rejected(message, code);
    if (code === "RATE_LIMITED") return undefined;
    const about = this.#about(page, code === "NOT_FOUND");
    if (about === undefined) return undefined;
    if (about === "input") return rejected(message);
    const brief = `worker answered ${this.status} ${CHECK_URL}`;
    return rejected(message, code === "UNAUTHENTICATED" ? "FORBIDDEN" : code, brief);
  }

  /** What the client wrote that a refusal is about; `byPath`: also the path of the call. */
  #about(page: string, byPath = true): ReturnType<typeof clientNamed> {
    const { named, model, batch } = this.#options;
    if (named && byPath) return "parameters";
    return clientNamed({ words: page, parameters: batch.parameters, inputs: this.#inputs, model });
  }
}

function jsonFlaw(body: Buffer, type: string): Reply | undefined {
  if (!isUtf8(body)) return unusable("worker's reply is not UTF-8");
  try {
    JSON.parse(body.toString("utf8"));
    return undefined;
  } catch (error) {
    const brief = "worker's reply is not JSON";
    return unusable(`${brief} (${quote(type, 60)}): ${quote((error as Error).message)}`, brief);
  }
}

export function retryAfterMs(headers: Headers, now: number): number {
  const after = first(headers["retry-after"]) ?? "";
  let wanted = Number.parseFloat(first(headers["retry-after-ms"]) ?? "");
  if (Number.isNaN(wanted))
    wanted = /^\s*\d/.test(after) ? Number.parseFloat(after) * 1000 : Date.parse(after) - now;
  return boundedWaitMs(wanted);
}

function first(value: string | string[] | undefined): string | undefined {
  return Array.isArray(value) ? value[0] : value;
}
