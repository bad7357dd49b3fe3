/**
 * Buffer of spans for the collector. At most `maxSpans` wait, including those being sent; more are dropped and counted.
 * They leave a second after the first, or once a bundle is full, one bundle at a time. An unreachable collector gets
 * the same bundle again; a refused bundle is lost. Either is reported when it begins and when it is over. `load` opens
 * the collector with the first spans: the library takes longer to load than Ferry to start.
 */
import type { Attributes, Link } from "@opentelemetry/api";
import type { Alarm, Clock } from "../app/clock.ts";
import type { SpanPlace } from "../core/trace.ts";
import type { Events } from "./events.ts";
import { type OtlpStart, type Sender, SenderTrouble } from "./sender.ts";

/** Numbers, so that the library need not be loaded for them. */
export const KIND = { internal: 0, server: 1, client: 2, consumer: 4 } as const;

export interface SpanFacts {
  readonly name: string;
  readonly kind: (typeof KIND)[keyof typeof KIND];
  readonly place: SpanPlace;
  /** Omitted: a root span. */
  readonly parentId?: string;
  /** The parent is in another process. */
  readonly remote?: boolean;
  readonly state?: string;
  readonly startedAt: number;
  readonly endedAt: number;
  readonly attributes: Attributes;
  readonly links?: Link[];
  /** Failed by our fault, not the caller's. */
  readonly failed?: boolean;
}

/** "refused" bundles are not retried. */
export interface Delivery {
  readonly kind: "taken" | "refused" | "away";
  readonly why: string;
}

export interface Collector {
  deliver(spans: readonly SpanFacts[]): Promise<Delivery>;
  close(): Promise<void>;
}

export interface BufferRules {
  readonly maxSpans: number;
  /** Time limit for sending the rest on close. */
  readonly closeMs: number;
  /** The collector, for messages. */
  readonly place: string;
}

/** Spans per request. Handing a bundle over takes 0.5 ms of the main thread (`node bench/later.ts`). */
const BUNDLE_SPANS = 256;
const BUNDLE_WEIGHT = 2048;
const GATHER_MS = 1000;
const TRY_AGAIN_MS = 5000;

export class SpanBuffer {
  readonly #rules: BufferRules;
  readonly #load: () => Promise<Collector>;
  readonly #clock: Clock;
  readonly #events: Events;
  #waiting: SpanFacts[] = [];
  #onTheWire = 0;
  #collector: Promise<Collector> | undefined;
  #alarm: Alarm | undefined;
  #sending: Promise<boolean> | undefined;
  #trouble = false;
  #closed = false;
  #dropped = 0;

  constructor(rules: BufferRules, load: () => Promise<Collector>, clock: Clock, events: Events) {
    this.#rules = rules;
    this.#load = load;
    this.#clock = clock;
    this.#events = events;
  }

  get dropped(): number {
    return this.#dropped;
  }

  /** Never sends synchronously: the caller may be on the request path. */
  add(span: SpanFacts): void {
    const waiting = this.#waiting;
    if (this.#closed || waiting.length + this.#onTheWire >= this.#rules.maxSpans) {
      this.#dropped++;
      return;
    }
    waiting.push(span);
    if (this.#sending !== undefined) return;
    if (this.#alarm === undefined) this.#wakeIn(GATHER_MS);
    else if (waiting.length === BUNDLE_SPANS && !this.#trouble) this.#wakeIn(0);
  }

  /** Counts spans that could not be built. */
  drop(count = 1): void {
    this.#dropped += count;
  }

  /** Sends what waits for up to `closeMs`; the rest is dropped. */
  async close(): Promise<void> {
    this.#closed = true;
    this.#alarm?.cancel();
    const late = Promise.withResolvers<void>();
    const alarm = this.#clock.at(this.#clock.now() + this.#rules.closeMs, late.resolve);
    await Promise.race([this.#flush(), late.promise]);
    alarm.cancel();
    this.#dropped += this.#waiting.length + this.#onTheWire;
    this.#waiting = [];
    this.#onTheWire = 0;
  }

  async #flush(): Promise<void> {
    await this.#sending;
    while (this.#waiting.length > 0 && (await this.#send()));
    const collector = await this.#collector?.catch(() => undefined);
    await collector?.close();
  }

  #wakeIn(ms: number): void {
    this.#alarm?.cancel();
    this.#alarm = this.#clock.at(this.#clock.now() + ms, () => {
      this.#alarm = undefined;
      this.#sending = this.#send().finally(() => this.#sent());
    });
  }

  #sent(): void {
    this.#sending = undefined;
    if (this.#closed || this.#waiting.length === 0) return;
    const more = this.#waiting.length >= BUNDLE_SPANS;
    this.#wakeIn(this.#trouble ? TRY_AGAIN_MS : more ? 0 : GATHER_MS);
  }

  /** Sends one bundle; returns whether to continue at once. */
  async #send(): Promise<boolean> {
    const bundle = this.#take();
    this.#onTheWire = bundle.length;
    const { kind, why } = await this.#deliver(bundle);
    // Closed meanwhile without waiting for this: already counted as dropped.
    if (this.#onTheWire === 0) return false;
    this.#onTheWire = 0;
    if (kind === "taken") this.#well();
    else this.#complain(kind, why);
    if (kind === "refused") this.#dropped += bundle.length;
    if (kind === "away") this.#waiting = bundle.concat(this.#waiting);
    return kind !== "away";
  }

  #take(): SpanFacts[] {
    let count = 0;
    let weight = 0;
    for (const { links } of this.#waiting) {
      weight += 1 + (links === undefined ? 0 : links.length);
      if (count > 0 && (count >= BUNDLE_SPANS || weight > BUNDLE_WEIGHT)) break;
      count++;
    }
    return this.#waiting.splice(0, count);
  }

  async #deliver(bundle: SpanFacts[]): Promise<Delivery> {
    try {
      const collector = await (this.#collector ??= this.#load());
      return await collector.deliver(bundle);
    } catch (error) {
      return { kind: "refused", why: error instanceof Error ? error.message : String(error) };
    }
  }

  #well(): void {
    if (!this.#trouble) return;
    this.#trouble = false;
    const lost = this.#dropped === 0 ? "no span was dropped" : `${this.#dropped} spans were dropped so far`;
    this.#say("info", `the collector of traces at ${this.#rules.place} takes spans again; ${lost}`);
  }

  #complain(kind: Delivery["kind"], why: string): void {
    if (this.#trouble) return;
    this.#trouble = true;
    const { place, maxSpans } = this.#rules;
    const message =
      kind === "refused"
        ? `the collector of traces at ${place} refuses spans (${why}): they are dropped; check telemetry.otlpUrl`
        : `the collector of traces at ${place} cannot be reached (${why}): at most ${maxSpans} spans wait for ` +
          "it, more are dropped; requests go on as before";
    this.#say("warn", message);
  }

  #say(level: "info" | "warn", message: string): void {
    this.#events.emit("notice", { level, message });
  }
}

/** A collector whose connection lives in the thread of `sender.ts`. */
export function sentCollector(sender: Pick<Sender, "ask">, start: OtlpStart): Collector {
  return {
    deliver: async (spans): Promise<Delivery> => {
      try {
        return await sender.ask("deliverSpans", { start, spans: JSON.stringify(spans) });
      } catch (error) {
        // The next thread gets the same bundle. Any other error would repeat.
        if (error instanceof SenderTrouble && error.isOfTheThread)
          return { kind: "away", why: error.message };
        throw error;
      }
    },
    close: () => sender.ask("closeSpans", undefined),
  };
}
