/** One request of a drop-in protocol and its answer, as the routes see an `Exchange`, without HTTP around it. */
import { Refusal } from "../../src/core/errors.ts";
import type { DropIns } from "../../src/gateway/dropin.ts";
import type { ErrorShape, Exchange } from "../../src/gateway/exchange.ts";
import type { Routes } from "../../src/gateway/server.ts";
import type { SimRequest } from "./dropin-table.ts";

export interface Told {
  readonly status: number;
  readonly body: Buffer;
  /** Lower case. */
  readonly header: (name: string) => string | undefined;
  readonly refusal: Refusal | undefined;
}

export class DropInTalk {
  readonly startedAt: number;
  readonly method = "POST";
  readonly query = "";
  readonly #request: SimRequest;
  readonly #headers: Readonly<Record<string, string>>;
  readonly #told: (told: Told) => void;
  #gone: (() => void) | undefined;
  answered = false;
  errorShape: ErrorShape | undefined = undefined;
  // What the routes note of a request; nobody looks here.
  id = "";
  tier = "";
  tenant = "";
  model = "";
  work = "own";
  ending: unknown = undefined;
  trace: undefined = undefined;

  constructor(
    request: SimRequest,
    headers: Readonly<Record<string, string>>,
    startedAt: number,
    told: (told: Told) => void,
  ) {
    this.#request = request;
    this.#headers = headers;
    this.startedAt = startedAt;
    this.#told = told;
  }

  /** From its route to its answer, as the listener does it. */
  async serve(routes: Routes, dropIns: DropIns): Promise<void> {
    const { path } = this.#request;
    const post = routes[path]?.["POST"] ?? dropIns.find(path)?.methods["POST"];
    try {
      await post!(this as unknown as Exchange, "");
    } catch (error) {
      this.failed(error);
    }
  }

  failed(error: unknown): void {
    if (error instanceof Refusal) this.fail(error);
    else throw error;
  }

  header(name: string): string | undefined {
    return this.#headers[name];
  }

  bytes(): Promise<Buffer> {
    return Promise.resolve(this.#request.body);
  }

  onGone(gone: () => void): void {
    this.#gone = gone;
  }

  /** The client hangs up; false when it was answered already. */
  leave(): boolean {
    if (this.answered) return false;
    this.answered = true;
    this.#gone?.();
    return true;
  }

  send(status: number, body: string, headers: readonly string[] = []): void {
    this.#tell(status, Buffer.from(body), headers, undefined);
  }

  sendBytes(_type: string, body: Buffer, headers: readonly string[] = [], status = 200): void {
    this.#tell(status, body, headers, undefined);
  }

  fail(refusal: Refusal): void {
    const { status = refusal.status, body } = this.errorShape!(refusal);
    // In every protocol's shape it is JSON, and says something.
    if (Object.keys(JSON.parse(String(body)) as object).length === 0) throw new Error("an empty error");
    this.#tell(status, Buffer.from(String(body)), [], refusal);
  }

  #tell(status: number, body: Buffer, headers: readonly string[], refusal: Refusal | undefined): void {
    if (this.answered) return;
    this.answered = true;
    const header = (name: string): string | undefined => {
      const at = headers.findIndex((each, place) => place % 2 === 0 && each === name);
      return at < 0 ? undefined : headers[at + 1];
    };
    this.#told({ status, body, header, refusal });
  }
}
