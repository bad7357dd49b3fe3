/**
 * The thread that writes rows to PostgreSQL and spans to a collector, seen from the main thread:
 *
 *   PostgresLog ──rows──┐                              ┌── PostgresLink ──► PostgreSQL
 *                       ├─► Sender ──one post──► thread ┤
 *   SpanBuffer ──spans──┘      ◄──one answer────        └── OTLP exporter ─► collector
 *
 * Both senders post one bundle at a time and wait for the reply, so unwritten data are bounded and survive the thread.
 * It starts with the first request. When it dies, pending requests reject with a `SenderTrouble`, one notice is
 * emitted, and the next request starts another.
 */
import { extname } from "node:path";
import { Worker } from "node:worker_threads";
import type { Attributes } from "@opentelemetry/api";
import type { Events } from "./events.ts";
import type { OtlpRules } from "./otlp.ts";
import type { RowBundle } from "./request-log-schema.ts";
import type { LoggedRequest } from "./request-log.ts";
import type { Delivery } from "./span-buffer.ts";

/** A PostgreSQL connection in the thread, by a number that is never reused. */
interface OfStore {
  readonly store: number;
}

export interface OtlpStart extends OtlpRules {
  readonly about: Attributes;
  readonly version: string;
}

/** Requests to the thread: by verb, argument and result. */
export interface Verbs {
  /** Connects and migrates the table. */
  readonly openRows: [given: OfStore & { readonly url: string; readonly timeoutMs: number }, answer: void];
  readonly insertRows: [given: OfStore & RowBundle, answer: void];
  readonly updateRows: [given: OfStore & RowBundle, answer: void];
  readonly deleteOldRows: [given: OfStore & { readonly days: number; readonly max: number }, answer: number];
  readonly findRows: [
    given: OfStore & { readonly id: string; readonly max: number },
    answer: LoggedRequest[],
  ];
  /** Resolves when the connection is gone, whatever the cause. */
  readonly rowsEnd: [given: OfStore, answer: void];
  readonly closeRows: [given: OfStore, answer: void];
  /** SpanFacts[] as JSON: cheaper to transfer than many small objects. */
  readonly deliverSpans: [given: { readonly start: OtlpStart; readonly spans: string }, answer: Delivery];
  readonly closeSpans: [given: undefined, answer: void];
}
export type Verb = keyof Verbs;

export interface SenderQuestion {
  readonly number: number;
  readonly verb: Verb;
  readonly given: unknown;
}
export type SenderAnswer =
  | { readonly number: number; readonly value: unknown }
  | { readonly number: number; readonly trouble: string; readonly state: string };

/** The request failed. `message` is our own text, safe to show and log. */
export class SenderTrouble extends Error {
  /** PostgreSQL's SQLSTATE; "" where it did not answer. */
  readonly state: string;
  /** The thread failed, not the operation. */
  readonly isOfTheThread: boolean;

  constructor(message: string, { state = "", isOfTheThread = false } = {}) {
    super(message);
    this.state = state;
    this.isOfTheThread = isOfTheThread;
  }

  /** PostgreSQL rejects the values themselves; a retry would fail too. */
  get ofTheData(): boolean {
    return this.state.startsWith("22") || this.state.startsWith("23");
  }
}

/** The same extension as this file: .ts in a checkout, .js in dist/. */
const PROGRAM = new URL(`./sender-thread${extname(import.meta.filename)}`, import.meta.url);

export class Sender {
  readonly #events: Events;
  readonly #program: URL;
  readonly #asked = new Map<number, PromiseWithResolvers<unknown>>();
  #thread: Worker | undefined;
  #number = 0;
  /** Its death was reported, and nothing was answered since. */
  #said = false;
  #closed = false;

  /** `program`: what the thread runs, for tests. */
  constructor(events: Events, program: URL = PROGRAM) {
    this.#events = events;
    this.#program = program;
  }

  /** Rejects with a `SenderTrouble`. */
  async ask<Asked extends Verb>(verb: Asked, given: Verbs[Asked][0]): Promise<Verbs[Asked][1]> {
    if (this.#closed) throw new SenderTrouble("this is the end", { isOfTheThread: true });
    this.#thread ??= this.#start();
    const question: SenderQuestion = { number: ++this.#number, verb, given };
    const asked = Promise.withResolvers<unknown>();
    this.#asked.set(question.number, asked);
    this.#thread.postMessage(question);
    return (await asked.promise) as Verbs[Asked][1];
  }

  /** Terminates the thread; idempotent. */
  async close(): Promise<void> {
    this.#closed = true;
    await this.#thread?.terminate();
  }

  #start(): Worker {
    const thread = new Worker(this.#program, { name: "sender" });
    let why = "";
    thread.on("message", (answer: SenderAnswer) => this.#hear(answer));
    thread.on("error", (error) => (why = error instanceof Error ? error.message : String(error)));
    thread.on("exit", (code) => {
      this.#thread = undefined;
      this.#died(why === "" ? `exit code ${code}` : why);
    });
    return thread;
  }

  #hear(answer: SenderAnswer): void {
    const asked = this.#asked.get(answer.number);
    this.#asked.delete(answer.number);
    this.#said = false;
    if ("trouble" in answer) asked?.reject(new SenderTrouble(answer.trouble, answer));
    else asked?.resolve(answer.value);
  }

  #died(why: string): void {
    const waiting = [...this.#asked.values()];
    this.#asked.clear();
    const trouble = new SenderTrouble("the thread that sends it ended", { isOfTheThread: true });
    for (const { reject } of waiting) reject(trouble);
    if (this.#closed || this.#said) return;
    this.#said = true;
    const message =
      `the thread that sends rows and spans ended: ${why}; requests go on, and it is started again ` +
      "when there is something to send";
    this.#events.emit("notice", { level: "error", message });
  }
}
