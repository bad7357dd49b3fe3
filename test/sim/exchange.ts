/** One request and its answer, as the native protocol sees an `Exchange`, without HTTP around it. */
import { Refusal } from "../../src/core/errors.ts";
import type { Host } from "./host.ts";

export interface Answer {
  readonly status: number;
  readonly body: string;
}

export class Talk {
  readonly startedAt: number;
  readonly request: { readonly method: string };
  readonly query: string;
  readonly #headers: Readonly<Record<string, string>>;
  readonly #text: string;
  readonly #answer: (answer: Answer) => void;
  readonly #end = Promise.withResolvers<void>();
  #gone: (() => void) | undefined;
  answered = false;
  // What the protocol notes of a request; nobody looks here.
  id = "";
  tier = "";
  tenant = "";
  model = "";
  work = "own";
  ending: unknown = undefined;
  trace: undefined = undefined;

  constructor(
    host: Host,
    asked: { method: string; headers: Readonly<Record<string, string>>; text?: string; query?: string },
    answer: (answer: Answer) => void,
  ) {
    this.startedAt = host.now();
    this.request = { method: asked.method };
    this.query = asked.query ?? "";
    this.#headers = asked.headers;
    this.#text = asked.text ?? "";
    this.#answer = answer;
  }

  header(name: string): string | undefined {
    return this.#headers[name];
  }

  withBody(use: (text: string) => Promise<void> | void): void {
    void Promise.resolve(this.#text)
      .then(use)
      .catch((error: unknown) => this.failed(error));
  }

  /** As the listener does: a refusal is answered, and anything else is a bug, which ends the run. */
  failed(error: unknown): void {
    if (error instanceof Refusal) this.fail(error);
    else this.#end.reject(error);
  }

  /** Resolves when it is answered or its caller has left; rejects with a bug. */
  get over(): Promise<void> {
    return this.#end.promise;
  }

  onGone(gone: () => void): void {
    this.#gone = gone;
  }

  /** The caller hangs up. */
  leave(): void {
    if (this.answered) return;
    this.answered = true;
    this.#end.resolve();
    this.#gone?.();
  }

  send(status: number, body: string): void {
    if (this.answered) return;
    this.answered = true;
    this.#end.resolve();
    this.#answer({ status, body });
  }

  sendPieces(status: number, pieces: readonly string[]): void {
    this.send(status, pieces.join(""));
  }

  sendNothing(status: number): void {
    this.send(status, "{}");
  }

  fail({ status, code, message }: Refusal): void {
    this.send(status, JSON.stringify({ error: code, message, request_id: this.id }));
  }
}
