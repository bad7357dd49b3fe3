/**
 * One call to a worker over HTTP and what came back, until exactly one reply is known.
 *
 * What a call says and where the outputs are in its reply is the protocol's affair. What each answer means is not:
 *
 *   2xx                        `match` decides; not JSON, not UTF-8 or over maxReplyBytes is `unusable`
 *   429, 503                   `busy`, for as long as Retry-After(-Ms) says, 1 s when it says nothing
 *   401, 403, 429              `rejected` with a code where the call carried the client's own credential
 *   401, 403, 404, 405         `rejected` with a code where the client named what it is about (`client-names.ts`); without one,
 *                              where that is an input
 *   401, 403, 404, 405, 407    otherwise `failed`, blame worker: a wrong URL or credential is not about one input
 *   408, 3xx, 5xx              `failed`, blame worker; redirects are never followed
 *   any other 4xx              `rejected`
 *   no connection              `failed`, blame nobody; also when TLS cannot be agreed on (`worker-tls.ts`)
 *   connection lost            `failed`, blame batch, once the request was written; also in mid-reply
 */
import { isUtf8 } from "node:buffer";
import { type Dispatcher, errors } from "undici";
import type { Clock } from "../../app/clock.ts";
import type { Outputs, WorkerSide } from "../../gateway/protocol/protocol.ts";
import type { Batch, ClientCode, Reply } from "./backend.ts";
import { clientNamed } from "./client-names.ts";
import { failed, match, quote, rejected, unusable } from "./match.ts";
import { headerLoad } from "./worker-health.ts";
import { CONNECT_TIMEOUT_MS, tlsTrouble } from "./worker-tls.ts";

/** Enough of an error page to quote from. */
const MAX_ERROR_BYTES = 16 * 1024;
const DEFAULT_RETRY_AFTER_MS = 1_000;
const MIN_RETRY_AFTER_MS = 10;
const MAX_RETRY_AFTER_MS = 30_000;

/** What a refusal is judged by. */
export interface CallFacts {
  /** Of the model, at the worker. */
  readonly model: string;
  /** See `Call.named`. */
  readonly named: boolean;
  /** The credential is the client's own, or missing because the client sent none (`forwardAuthorization`). */
  readonly ownCredential: boolean;
}

/** One request and what came back, until exactly one reply is known. */
export class HttpExchange implements Dispatcher.DispatchHandler {
  readonly inputs: readonly string[];
  readonly #batch: Batch;
  readonly #protocol: WorkerSide;
  readonly #facts: CallFacts;
  readonly #maxReplyBytes: number;
  readonly #clock: Clock;
  readonly #done: (reply: Reply, intact: boolean) => void;
  readonly #chunks: Buffer[] = [];
  #finished = false;
  #sent = false;
  /** 0 until it is known. */
  status = 0;
  #headers: Headers = {};
  #bytes = 0;
  /** How full the worker says it is. */
  load: number | undefined;
  /** Its reply was for all inputs together and could not be cut. */
  inseparable = false;

  constructor(
    batch: Batch,
    protocol: WorkerSide,
    facts: CallFacts,
    maxReplyBytes: number,
    clock: Clock,
    done: HttpExchange["finish"],
  ) {
    this.inputs = batch.tasks.map(({ input }) => input);
    this.#batch = batch;
    this.#protocol = protocol;
    this.#facts = facts;
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
    this.status = status;
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

  #tooLarge(): void {
    this.#chunks.length = 0;
    this.finish(unusable(`worker's reply is larger than maxReplyBytes (${this.#maxReplyBytes})`), false);
  }

  #answer(): Reply {
    const body = Buffer.concat(this.#chunks);
    const type = first(this.#headers["content-type"]) ?? "no content type";
    const flaw = this.#protocol.readsBytes === true ? undefined : notJson(body, type);
    if (flaw !== undefined) return flaw;
    const header = (name: string): string | undefined => first(this.#headers[name]);
    return this.#matched(this.#protocol.outputs({ header, body }, this.inputs, this.#batch.parameters));
  }

  #matched({ outputs, flaw, inseparable = false }: Outputs & { inseparable?: boolean }): Reply {
    if (flaw === undefined) return match(this.#batch, outputs);
    this.inseparable = inseparable;
    // Refused as one, the batch is cut until its tasks go alone.
    return inseparable ? rejected(`worker's reply ${flaw}`) : unusable(`worker's reply ${flaw}`);
  }

  #refusal(): Reply {
    const status = this.status;
    const page = Buffer.concat(this.#chunks).toString("utf8");
    const words = quote(page);
    const brief = `worker answered ${status}`;
    const message = words === "" ? brief : `${brief}: ${words}`;
    if (status < 400) {
      return failed(
        `worker answered ${status}; redirects are not followed, configure the final URL`,
        "worker",
      );
    }
    const mistake = this.#clientsMistake(status, page, message);
    if (mistake !== undefined) return mistake;
    if (status === 429 || status === 503) {
      const waitMs = retryAfterMs(this.#headers, this.#clock.now());
      return {
        kind: "busy",
        message,
        brief,
        retryAfterMs: waitMs,
        named: this.#about(page) === "parameters",
      };
    }
    if (status === 401 || status === 403 || status === 407) {
      const advice = "(check the worker's URL and credentials)";
      return failed(`${message} ${advice}`, "worker", `${brief} ${advice}`);
    }
    if (status === 404 || status === 405) {
      return failed(`${message} ${CHECK_URL}`, "worker", `${brief} ${CHECK_URL}`);
    }
    return status === 408 || status >= 500 ? failed(message, "worker", brief) : rejected(message);
  }

  /** Undefined where it is the worker's failure, or not known whose. */
  #clientsMistake(status: number, page: string, message: string): Reply | undefined {
    const { ownCredential } = this.#facts;
    const code = CLIENT_CODES.get(status);
    if (code === undefined) return undefined;
    if (ownCredential && code !== "NOT_FOUND") return rejected(message, code);
    if (code === "RATE_LIMITED") return undefined;
    const about = this.#about(page, code === "NOT_FOUND");
    if (about === undefined) return undefined;
    if (about === "input") return rejected(message);
    const brief = `worker answered ${status} ${CHECK_URL}`;
    return rejected(message, code === "UNAUTHENTICATED" ? "FORBIDDEN" : code, brief);
  }

  /** What that the client wrote a refusal is about, if anything; `byPath`: the path of the call may be it. */
  #about(page: string, byPath = true): ReturnType<typeof clientNamed> {
    const { named, model } = this.#facts;
    if (named && byPath) return "parameters";
    return clientNamed({ words: page, parameters: this.#batch.parameters, inputs: this.inputs, model });
  }
}

const CHECK_URL = "(check the worker's URL)";
/** What a status means where it is the client's mistake. */
const CLIENT_CODES: ReadonlyMap<number, ClientCode> = new Map<number, ClientCode>([
  [401, "UNAUTHENTICATED"],
  [403, "FORBIDDEN"],
  [404, "NOT_FOUND"],
  [405, "NOT_FOUND"],
  [429, "RATE_LIMITED"],
]);

type Headers = Record<string, string | string[] | undefined>;

function notJson(body: Buffer, type: string): Reply | undefined {
  if (!isUtf8(body)) return unusable("worker's reply is not UTF-8");
  try {
    JSON.parse(body.toString("utf8"));
    return undefined;
  } catch (error) {
    const brief = "worker's reply is not JSON";
    return unusable(`${brief} (${quote(type, 60)}): ${quote((error as Error).message)}`, brief);
  }
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

/** Why there is no connection, or none any more, in words for operators. */
export function reason(error: Error): string {
  const code = "code" in error ? String(error.code) : "";
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
