/**
 * Client of the admin listener: dead letters, workers, and the live event stream. Every failure becomes a `Failure`
 * with one actionable line. Replies come from another process, perhaps another version, so their shape is validated.
 * Redirects are not followed: they would send the token to another host. TLS: a listener that presents the certificate
 * in `tls.certFile` is trusted whatever host name the certificate has (the config says `127.0.0.1`, certificates rarely
 * do). Any other must be signed by it or by the system CAs, for the host in the URL.
 */
import { X509Certificate } from "node:crypto";
import { readFile } from "node:fs/promises";
import {
  checkServerIdentity,
  getCACertificates,
  type SecureContextOptions,
  type PeerCertificate,
} from "node:tls";
import type { Clock } from "../app/clock.ts";
import { printable } from "./terminal/terminal.ts";
import { Failure } from "./command.ts";
import { readEvents, StreamTooLong, type StreamEvent } from "./event-stream.ts";

export interface DeadLetterRow {
  readonly taskId: string;
  readonly model: string;
  readonly tier: string;
  readonly attempts: number;
  readonly error: string;
  readonly message: string;
  readonly diedAt: number;
  readonly raw: object;
}

interface Answer {
  readonly status: number;
  readonly text: string;
}

export type JsonObject = { readonly [name: string]: unknown };

interface Sent {
  readonly body?: object;
  readonly headers?: Record<string, string>;
  readonly moreMs?: number;
}

const timeoutMs = 10_000;
/** After a rotation the listener may present the old certificate for a moment. */
const NEW_CERTIFICATE = "; if that is new, wait 2 seconds, or send SIGHUP";
/** The slowest worker start. */
const reloadTimeoutMs = 3_600_000;

export class AdminClient {
  readonly #base: string;
  readonly #token: string | undefined;
  readonly #doing: string;
  readonly #certFile: string | undefined;

  /** `doing` prefixes every error line ("dead list"). `certFile`: the config's certificate, if any. */
  constructor(base: string, token: string | undefined, doing: string, certFile?: string) {
    this.#base = base;
    this.#token = token;
    this.#doing = doing;
    this.#certFile = certFile;
  }

  async list(): Promise<DeadLetterRow[]> {
    const { body } = await this.#call("GET", "", [200]);
    const rows = body["dead_letters"];
    if (!Array.isArray(rows)) throw this.#notFerry();
    return rows.map((row: unknown) => {
      if (!isObject(row) || typeof row["task_id"] !== "string") throw this.#notFerry();
      return {
        taskId: row["task_id"],
        model: textOf(row["model"]),
        tier: textOf(row["tier"]),
        attempts: Number(row["attempts"] ?? 0),
        error: textOf(row["error"]),
        message: textOf(row["message"]),
        diedAt: instantOf(row["died_at"]),
        raw: row,
      };
    });
  }

  async get(id: string): Promise<object> {
    const { status, body } = await this.#call("GET", `/${id}`, [200, 404]);
    if (status === 404) throw this.unknown(id);
    return body;
  }

  /** `gone`: no such dead letter. `full`: no room in the queue before `retryAfterMs`. */
  async replay(
    id: string,
  ): Promise<
    | { readonly kind: "replayed" | "gone" }
    | { readonly kind: "full"; readonly retryAfterMs: number; readonly why: string }
  > {
    const { status, body } = await this.#call("POST", `/${id}/replay`, [200, 202, 204, 404, 503]);
    if (status !== 503) return { kind: status === 404 ? "gone" : "replayed" };
    const { retry_after_ms: retryAfterMs, message } = body;
    const why = `answered 503: ${textOf(message)}`;
    if (typeof retryAfterMs !== "number") throw this.#failure(why);
    return { kind: "full", retryAfterMs, why: this.#failure(why).message };
  }

  /** False when there is no such dead letter. */
  async purge(id: string): Promise<boolean> {
    const { status } = await this.#call("DELETE", `/${id}`, [200, 204, 404]);
    return status !== 404;
  }

  /** Reloads the config; may wait for workers to start. */
  async reload(): Promise<{ changed?: string[]; problems?: string[] }> {
    let answer: Answer;
    const url = `${this.#base}/internal/reload`;
    try {
      answer = await this.#fetch("POST", url, this.#headers("application/json"), { moreMs: reloadTimeoutMs });
    } catch (error) {
      throw error instanceof Failure ? error : this.#unreachable(error as Error);
    }
    const body = parseObject(answer.text);
    const lines = (value: unknown): string[] | undefined =>
      Array.isArray(value) ? value.map((each) => printable(textOf(each))) : undefined;
    const [changed, problems] = [lines(body?.["changed"]), lines(body?.["problems"])];
    if (answer.status === 200 && changed !== undefined) return { changed };
    if (answer.status === 422 && problems !== undefined) return { problems };
    throw this.#unexpected(answer);
  }

  async metrics(): Promise<string> {
    let answer: Answer;
    try {
      answer = await this.#fetch("GET", `${this.#base}/metrics`, this.#headers("text/plain"));
    } catch (error) {
      throw error instanceof Failure ? error : this.#unreachable(error as Error);
    }
    if (answer.status === 404) throw this.#failure("has no /metrics; set telemetry.metrics: true");
    if (answer.status !== 200) throw this.#unexpected(answer);
    return answer.text;
  }

  /** Reads /internal/live until `stop` fires. Any other end, or silence past the reply timeout, is a `Failure`. */
  async *live(clock: Clock, stop: AbortSignal): AsyncGenerator<StreamEvent> {
    const silence = new AbortController();
    const hush = (): void => silence.abort(new DOMException("silent", "TimeoutError"));
    let alarm = clock.at(clock.now() + timeoutMs, hush);
    const heard = (): void => {
      alarm.cancel();
      alarm = clock.at(clock.now() + timeoutMs, hush);
    };
    try {
      yield* this.#events(AbortSignal.any([stop, silence.signal]), heard);
      throw this.#failure("ended the stream");
    } catch (error) {
      if (stop.aborted) return;
      if (error instanceof Failure) throw error;
      throw error instanceof StreamTooLong ? this.#notFerry() : this.#unreachable(error as Error);
    } finally {
      alarm.cancel();
    }
  }

  async *#events(signal: AbortSignal, heard: () => void): AsyncGenerator<StreamEvent> {
    const url = `${this.#base}/internal/live`;
    const wishes = { headers: this.#headers("text/event-stream"), redirect: "error", signal } as const;
    const { Agent, fetch: fetchThrough } = await import("undici");
    const dispatcher = new Agent(url.startsWith("https:") ? { connect: await this.#trust() } : {});
    try {
      const response = await fetchThrough(url, { ...wishes, dispatcher });
      const type = response.headers.get("content-type") ?? "";
      if (response.status !== 200) {
        if (response.status === 404)
          throw this.#failure("has no /internal/live; set telemetry.dashboard: true");
        throw this.#unexpected({ status: response.status, text: await response.text() });
      }
      if (!type.startsWith("text/event-stream") || response.body === null) throw this.#notFerry();
      const noted = async function* (body: AsyncIterable<Uint8Array>): AsyncGenerator<Uint8Array> {
        for await (const chunk of body) {
          heard();
          yield chunk;
        }
      };
      yield* readEvents(noted(response.body as AsyncIterable<Uint8Array>));
    } finally {
      await dispatcher.destroy();
    }
  }

  /** Any other route. A refusal becomes a `Failure` with the listener's own message. */
  async ask(
    method: string,
    path: string,
    { body, moreMs = 0 }: { readonly body?: object; readonly moreMs?: number } = {},
  ): Promise<{ status: number; body: JsonObject }> {
    let answer: Answer;
    try {
      const headers = this.#headers("application/json");
      const sent = body && { headers: { ...headers, "content-type": "application/json" }, body };
      answer = await this.#fetch(method, this.#base + path, headers, { ...sent, moreMs });
    } catch (error) {
      throw error instanceof Failure ? error : this.#unreachable(error as Error);
    }
    const { status, text } = answer;
    const said = parseObject(text);
    if (status >= 200 && status < 300) {
      if (text !== "" && said === undefined) throw this.#notFerry();
      return { status, body: said ?? {} };
    }
    const why = textOf(said?.["message"]);
    const refused = status === 400 || status === 404 || status === 409;
    if (refused && why !== "") throw new Failure(printable(`${this.#doing}: ${why}`));
    throw this.#unexpected(answer);
  }

  async #call(
    method: string,
    path: string,
    expected: readonly number[],
  ): Promise<{ status: number; body: JsonObject }> {
    const url = `${this.#base}/internal/dead-letters${path}`;
    let answer: Answer;
    try {
      answer = await this.#fetch(method, url, this.#headers("application/json"));
    } catch (error) {
      throw error instanceof Failure ? error : this.#unreachable(error as Error);
    }
    const { status, text } = answer;
    const body = parseObject(text);
    if (expected.includes(status)) {
      if (text !== "" && body === undefined) throw this.#notFerry();
      return { status, body: body ?? {} };
    }
    throw this.#unexpected(answer);
  }

  #headers(accept: string): Record<string, string> {
    return { accept, ...(this.#token !== undefined && { authorization: `Bearer ${this.#token}` }) };
  }

  #unexpected({ status, text }: Answer): Failure {
    if (status === 401 || status === 403) return this.#refused();
    const why = textOf(parseObject(text)?.["message"]);
    return this.#failure(`answered ${status}${why === "" ? "" : `: ${why}`}`);
  }

  async #fetch(
    method: string,
    url: string,
    given: Record<string, string>,
    { body, headers = given, moreMs = 0 }: Sent = {},
  ): Promise<Answer> {
    const signal = AbortSignal.timeout(timeoutMs + moreMs);
    const sent = body === undefined ? {} : { body: JSON.stringify(body) };
    const wishes = { method, headers, redirect: "error", signal, ...sent } as const;
    if (!url.startsWith("https:")) {
      const response = await fetch(url, wishes);
      return { status: response.status, text: await response.text() };
    }
    const { Agent, fetch: fetchThrough } = await import("undici");
    const dispatcher = new Agent({ connect: await this.#trust() });
    try {
      const response = await fetchThrough(url, { ...wishes, dispatcher });
      return { status: response.status, text: await response.text() };
    } finally {
      await dispatcher.destroy();
    }
  }

  #trust(): Promise<Trust> {
    return trustIn(this.#certFile, this.#doing);
  }

  #failure(what: string): Failure {
    return new Failure(printable(`${this.#doing}: admin listener ${this.#base} ${what}`));
  }

  #refused(): Failure {
    const how =
      this.#token === undefined
        ? "asks for a token; set admin.token"
        : "refused the token; check admin.token";
    return this.#failure(`${how} in the config file named by -c`);
  }

  #unreachable(error: Error): Failure {
    const cause = error.cause as NodeJS.ErrnoException | undefined;
    if (cause?.code === "ECONNREFUSED")
      return this.#failure("refused the connection; is ferry serve running?");
    const code = cause?.code ?? (error as NodeJS.ErrnoException).code ?? "";
    if (code === "CERT_HAS_EXPIRED") return this.#failure("shows a certificate that has expired; renew it");
    if (/CERT|SIGNATURE|ISSUER|ALTNAME/.test(code)) {
      const which =
        this.#certFile === undefined ? "" : `, and it is not the one of tls.certFile${NEW_CERTIFICATE}`;
      return this.#failure(`shows a certificate that cannot be trusted (${code})${which}`);
    }
    if (code.startsWith("ERR_SSL_")) return this.#failure(`does not speak TLS (${code}); check admin.tls`);
    if (code === "UND_ERR_SOCKET")
      return this.#failure("closed the connection; does it speak TLS? Check admin.tls");
    if (error.name === "TimeoutError") return this.#failure(`did not answer in ${timeoutMs / 1000} s`);
    return this.#failure(`cannot be reached (${cause?.code ?? cause?.message ?? error.message})`);
  }

  #notFerry(): Failure {
    return this.#failure("answered something else than Ferry would; check the address");
  }

  unknown(id: string): Failure {
    return new Failure(
      `${this.#doing}: there is no dead letter ${printable(id)}; ferry dead list shows them`,
    );
  }
}

export interface Trust extends SecureContextOptions {
  readonly rejectUnauthorized: true;
  readonly checkServerIdentity?: (host: string, peer: PeerCertificate) => Error | undefined;
}

/** Trusts a listener that presents this certificate, or one signed by the system CAs. */
export async function trustIn(
  certFile: string | undefined,
  doing: string,
  name = "tls.certFile",
): Promise<Trust> {
  const always = { rejectUnauthorized: true, minVersion: "TLSv1.2" } as const;
  if (certFile === undefined) return always;
  try {
    const own = await readFile(certFile, "latin1");
    const { fingerprint256 } = new X509Certificate(own);
    return {
      ...always,
      ca: [own, ...getCACertificates("default")],
      // Trust the file's first certificate itself, even when it is not self-signed.
      allowPartialTrustChain: true,
      checkServerIdentity: (host, peer) =>
        peer.fingerprint256 === fingerprint256 ? undefined : checkServerIdentity(host, peer),
    };
  } catch (error) {
    const why = (error as NodeJS.ErrnoException).code ?? (error as Error).message;
    throw new Failure(printable(`${doing}: ${name} ${certFile} cannot be read (${why})`));
  }
}

function parseObject(text: string): JsonObject | undefined {
  try {
    const value: unknown = JSON.parse(text);
    return isObject(value) ? value : undefined;
  } catch {
    return undefined;
  }
}

function isObject(value: unknown): value is JsonObject {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}

function textOf(value: unknown): string {
  return typeof value === "string" || typeof value === "number" ? String(value) : "";
}

/** Milliseconds since 1970, from a number or ISO text; unknown reads as now. */
function instantOf(value: unknown): number {
  const instant = typeof value === "number" ? value : Date.parse(textOf(value));
  return Number.isFinite(instant) ? instant : Number.POSITIVE_INFINITY;
}
