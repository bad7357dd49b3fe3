/**
 * Asks one worker how it is, on a connection of its own, `askMs` after the last answer: over HTTP by
 * GET origin + healthPath, over gRPC by ModelReady (`grpc.ts`). A worker that does not answer within `askTimeoutMs` has failed the question, and so has one that
 * answers anything but 2xx.
 *
 *   2xx                         it is well. A JSON object may say how full it is: the largest of `load`,
 *                               `queue` and `memory` (shares, 0 to 1) counts, beside the header x-ferry-load
 *   `failures` failed in a row  it is not well: it should get no new batch until a question succeeds
 *
 * That it is well says only that it may be given batches: whether it runs them is judged by the batches
 * themselves. The other way round, a worker that answers a batch is not dead: silence on the health path then
 * means that it cannot do two things at once, and is not counted. Another status than 2xx always is.
 */
import { Client, type Dispatcher } from "undici";
import type { Alarm, Clock } from "../../app/clock.ts";
import type { WorkerHealth } from "./backend.ts";
import { quote } from "./match.ts";
import { tlsTrouble } from "./worker-tls.ts";

/** How long a worker may take to answer a question about its health. */
export const ASK_TIMEOUT_MS = 2000;

export interface HealthRules {
  readonly askMs: number;
  /** ASK_TIMEOUT_MS by default. */
  readonly askTimeoutMs?: number;
  readonly failures: number;
}

export interface HealthPlace {
  readonly path: string;
  readonly headers: Record<string, string>;
  /** How to reach it with the certificates of now; asked for each question. */
  client(): Client;
}

const MAX_BODY_BYTES = 64 * 1024;
const SHARES = ["load", "queue", "memory"] as const;

/** The question, in whichever protocol. */
export interface Question {
  /** What is asked, in words: "its health path /health". */
  readonly what: string;
  /** Never throws. */
  ask(signal: AbortSignal): Promise<Verdict>;
}

export interface Verdict {
  /** "" when it is well. */
  readonly why: string;
  /** It said nothing at all. */
  readonly silent: boolean;
  readonly share?: number | undefined;
}

export class HealthQuestions {
  readonly #question: Question;
  readonly #rules: HealthRules;
  readonly #clock: Clock;
  readonly #heard: (share: number) => void;
  /** Of the next question, or of the patience for the answer. */
  #alarm: Alarm | undefined;
  #asking: AbortController | undefined;
  #failed = 0;
  #silent = false;
  #stopped = false;
  health: WorkerHealth | undefined;
  /** Called when `health.well` changed. */
  onChange: (() => void) | undefined;

  /** `heard` is told each load that the worker reports. */
  constructor(question: Question, rules: HealthRules, clock: Clock, heard: (share: number) => void) {
    this.#question = question;
    this.#rules = rules;
    this.#clock = clock;
    this.#heard = heard;
  }

  start(): void {
    void this.#round();
  }

  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
    this.#asking?.abort();
  }

  /** One question; true when it is well. Never throws. */
  async ask(signal: AbortSignal): Promise<boolean> {
    if (this.#stopped || signal.aborted) return false;
    const verdict = await this.#question.ask(signal);
    if (!this.#stopped) this.#take(verdict);
    return verdict.why === "";
  }

  /** The worker answered a batch. */
  answered(): void {
    if (this.#silent) this.#failed = 0;
  }

  async #round(): Promise<void> {
    const asking = (this.#asking = new AbortController());
    const { askMs, askTimeoutMs = ASK_TIMEOUT_MS } = this.#rules;
    this.#alarm = this.#clock.at(this.#clock.now() + askTimeoutMs, () => asking.abort());
    await this.ask(asking.signal);
    this.#alarm.cancel();
    if (this.#stopped) return;
    this.#alarm = this.#clock.at(this.#clock.now() + askMs, () => void this.#round());
  }

  #take({ why, silent, share }: Verdict): void {
    if (share !== undefined) this.#heard(share);
    this.#silent = silent;
    this.#failed = why === "" ? 0 : this.#failed + 1;
    if (why === "") this.#set(true, "");
    else if (this.#failed >= this.#rules.failures) {
      const times = this.#failed === 1 ? "" : ` (${this.#rules.failures} times in a row)`;
      this.#set(false, `${this.#question.what} ${why}${times}`);
    }
  }

  #set(well: boolean, why: string): void {
    const before = this.health?.well ?? true;
    if (this.health?.well === well) return;
    this.health = { well, why, since: this.#clock.now() };
    if (before !== well) this.onChange?.();
  }
}

/** GET, and what the status and the body say. */
export function overHttp(place: HealthPlace): Question {
  return { what: `its health path ${place.path}`, ask: (signal) => ask(place, signal) };
}

async function ask(place: HealthPlace, signal: AbortSignal): Promise<Verdict> {
  const { path, headers } = place;
  const client = place.client();
  try {
    const answer = await client.request({ path, method: "GET", headers, signal });
    const { statusCode: status } = answer;
    if (status < 200 || status > 299) return { why: `answered ${status}`, silent: false };
    const said = [headerLoad(answer.headers), bodyLoad(await readBody(answer.body))];
    const shares = said.filter((share) => share !== undefined);
    return { why: "", silent: false, share: shares.length === 0 ? undefined : Math.max(...shares) };
  } catch (error) {
    return { why: signal.aborted ? "did not answer in time" : troubleOf(error as Error), silent: true };
  } finally {
    // A connection for each question: nothing of one is left for the next.
    void client.destroy();
  }
}

function troubleOf(error: Error & { code?: string }): string {
  const why = tlsTrouble(error)?.message ?? (quote(error.message, 120) || error.code || error.name);
  return `cannot be asked: ${why}`;
}

/** The text, or nothing when it is longer than anybody's health should be. */
export async function readBody(
  body: Dispatcher.ResponseData["body"],
  maxBytes = MAX_BODY_BYTES,
): Promise<string> {
  const chunks: Buffer[] = [];
  let bytes = 0;
  for await (const chunk of body as AsyncIterable<Buffer>) {
    bytes += chunk.length;
    if (bytes > maxBytes) return "";
    chunks.push(chunk);
  }
  return Buffer.concat(chunks).toString("utf8");
}

/** The largest share that a JSON object names; undefined when it names none. */
export function bodyLoad(text: string): number | undefined {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch {
    return undefined;
  }
  if (typeof value !== "object" || value === null) return undefined;
  const shares = SHARES.map((name) => (value as Record<string, unknown>)[name]).filter(
    (share): share is number => typeof share === "number" && share >= 0 && share <= 1,
  );
  return shares.length === 0 ? undefined : Math.max(...shares);
}

/** `x-ferry-load: 0.93`; undefined when it is missing or not a number from 0 to 1. */
export function headerLoad(
  headers: Readonly<Record<string, string | string[] | undefined>>,
): number | undefined {
  const text = headers["x-ferry-load"];
  if (typeof text !== "string" || !/^\s*[01](?:\.\d{1,12})?\s*$/.test(text)) return undefined;
  const share = Number(text);
  return share <= 1 ? share : undefined;
}
