/**
 * The admin listener's dead-letter routes, from the caller's side.
 *
 * Every failure becomes a `Failure` with one line that says what to do. The answer comes from another
 * process, so nothing about its shape is taken for granted. Redirects are not followed: they would
 * carry the token to somebody else.
 */
import { printable } from "../terminal.ts";
import { Failure } from "./command.ts";

export interface DeadLetterRow {
  readonly taskId: string;
  readonly model: string;
  readonly tier: string;
  readonly attempts: number;
  readonly error: string;
  readonly message: string;
  readonly diedAt: number;
  /** As the listener sent it. */
  readonly raw: object;
}

type JsonObject = { readonly [name: string]: unknown };

const timeoutMs = 10_000;

export class AdminClient {
  readonly #base: string;
  readonly #token: string | undefined;
  readonly #doing: string;

  /** `doing` begins every error line: "dead list". */
  constructor(base: string, token: string | undefined, doing: string) {
    this.#base = base;
    this.#token = token;
    this.#doing = doing;
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
    if (status === 404) throw this.#unknown(id);
    return body;
  }

  async replay(id: string): Promise<void> {
    const { status } = await this.#call("POST", `/${id}/replay`, [200, 202, 204, 404]);
    if (status === 404) throw this.#unknown(id);
  }

  /** False when there is no such dead letter. */
  async purge(id: string): Promise<boolean> {
    const { status } = await this.#call("DELETE", `/${id}`, [200, 204, 404]);
    return status !== 404;
  }

  async #call(
    method: string,
    path: string,
    expected: readonly number[],
  ): Promise<{ status: number; body: JsonObject }> {
    const url = `${this.#base}/internal/dead-letters${path}`;
    const headers: Record<string, string> = { accept: "application/json" };
    if (this.#token !== undefined) headers["authorization"] = `Bearer ${this.#token}`;
    let response: Response;
    let text: string;
    try {
      const signal = AbortSignal.timeout(timeoutMs);
      response = await fetch(url, { method, headers, redirect: "error", signal });
      text = await response.text();
    } catch (error) {
      throw this.#unreachable(error as Error);
    }
    const body = parseObject(text);
    if (expected.includes(response.status)) {
      if (text !== "" && body === undefined) throw this.#notFerry();
      return { status: response.status, body: body ?? {} };
    }
    if (response.status === 401 || response.status === 403) throw this.#refused();
    const why = textOf(body?.["message"]);
    throw this.#failure(`answered ${response.status}${why === "" ? "" : `: ${why}`}`);
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
    if (error.name === "TimeoutError") return this.#failure(`did not answer in ${timeoutMs / 1000} s`);
    return this.#failure(`cannot be reached (${cause?.code ?? cause?.message ?? error.message})`);
  }

  #notFerry(): Failure {
    return this.#failure("answered something else than Ferry would; check the address");
  }

  #unknown(id: string): Failure {
    return new Failure(
      `${this.#doing}: there is no dead letter ${printable(id)}; ferry dead list shows them`,
    );
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

/** Milliseconds since 1970, from a number or from ISO text; unknown reads as just now. */
function instantOf(value: unknown): number {
  const instant = typeof value === "number" ? value : Date.parse(textOf(value));
  return Number.isFinite(instant) ? instant : Number.POSITIVE_INFINITY;
}
