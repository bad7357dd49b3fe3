/**
 * Asks one worker how it is set up, where its protocol has a place for that (TEI's `/info`), and remembers how many
 * inputs it takes in one call. On a connection of its own; no batch waits for the answer.
 *
 *   it answered             again after 60 `askMs`, whether or not it said how many
 *   it did not, or with 5xx again after `askMs`; what it said before holds
 *   it was out of reach and is back, or refused a batch of several    again at once, but not twice in one `askMs`
 */
import type { Dispatcher } from "undici";
import type { Alarm, Clock } from "../../app/clock.ts";
import { ASK_TIMEOUT_MS, type HealthPlace, type HealthRules, readBody } from "./worker-health.ts";

/** TEI's has every label of a classifier in it. */
const MAX_BODY_BYTES = 4 * 1024 * 1024;
/** In `askMs`, while nothing happens. */
const SELDOM = 60;

export class InfoQuestions {
  readonly #place: HealthPlace;
  readonly #read: (text: string) => number | undefined;
  readonly #rules: HealthRules;
  readonly #clock: Clock;
  /** Of the next question, or of the patience for the answer. */
  #alarm: Alarm | undefined;
  #asking: AbortController | undefined;
  #askedAt = -Infinity;
  #stopped = false;
  /** The most inputs that it takes in one call; undefined until it has said so. */
  maxBatchSize: number | undefined;

  constructor(
    place: HealthPlace,
    read: (text: string) => number | undefined,
    rules: HealthRules,
    clock: Clock,
  ) {
    this.#place = place;
    this.#read = read;
    this.#rules = rules;
    this.#clock = clock;
  }

  start(): void {
    void this.#round();
  }

  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
    this.#asking?.abort();
  }

  /** It may be set up differently by now. */
  again(): void {
    const { askMs } = this.#rules;
    // Before its time: a worker that refuses every batch is not asked after each of them.
    if (this.#stopped || this.#asking !== undefined || this.#askedAt === -Infinity) return;
    this.#alarm?.cancel();
    const due = Math.max(this.#clock.now(), this.#askedAt + askMs);
    if (due <= this.#clock.now()) void this.#round();
    else this.#alarm = this.#clock.at(due, () => void this.#round());
  }

  async #round(): Promise<void> {
    const asking = (this.#asking = new AbortController());
    const { askMs, askTimeoutMs = ASK_TIMEOUT_MS } = this.#rules;
    this.#askedAt = this.#clock.now();
    this.#alarm = this.#clock.at(this.#askedAt + askTimeoutMs, () => asking.abort());
    const text = await ask(this.#place, asking.signal);
    this.#asking = undefined;
    this.#alarm.cancel();
    if (this.#stopped) return;
    if (text !== undefined) this.maxBatchSize = this.#read(text) ?? this.maxBatchSize;
    const next = this.#clock.now() + (text === undefined ? askMs : SELDOM * askMs);
    this.#alarm = this.#clock.at(next, () => void this.#round());
  }
}

/** Asks once. What it said, "" when that is of no use; undefined when it could not be asked. */
export async function ask(place: HealthPlace, signal: AbortSignal): Promise<string | undefined> {
  const { path, headers } = place;
  const client = place.client();
  try {
    const answer: Dispatcher.ResponseData = await client.request({ path, method: "GET", headers, signal });
    if (answer.statusCode >= 500 || answer.statusCode === 429) return undefined;
    const text = await readBody(answer.body, MAX_BODY_BYTES);
    return answer.statusCode >= 200 && answer.statusCode < 300 && isJson(text) ? text : "";
  } catch {
    return undefined;
  } finally {
    void client.destroy();
  }
}

function isJson(text: string): boolean {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
