/**
 * Spans on their way to the collector.
 *
 * At most `maxSpans` wait, those on the wire included; more are dropped and counted. They leave a second after the first,
 * or as soon as a full bundle waits, one bundle at a time. A collector that cannot be reached gets the same bundle again
 * later; one that refuses a bundle has lost it. Either is said once when it begins and once when it is over. `load` opens
 * the collector when the first spans leave: the library takes longer to load than Ferry to start.
 */
import type { Attributes, Link } from "@opentelemetry/api";
import type { Alarm, Clock } from "../app/clock.ts";
import type { SpanPlace } from "../core/trace.ts";
import type { Events } from "./events.ts";
import { type OtlpStart, type Sender, SenderTrouble } from "./sender.ts";

/** As numbers, so that nothing of the library is loaded for them. */
export const KIND = { internal: 0, server: 1, client: 2, consumer: 4 } as const;

/** A span that is over. */
export interface SpanFacts {
  readonly name: string;
  readonly kind: (typeof KIND)[keyof typeof KIND];
  readonly place: SpanPlace;
  /** Left out: it begins its trace. */
  readonly parentId?: string;
  /** The parent lives in another process. */
  readonly remote?: boolean;
  /** A caller's `tracestate`. */
  readonly state?: string;
  readonly startedAt: number;
  readonly endedAt: number;
  readonly attributes: Attributes;
  readonly links?: Link[];
  /** It went wrong by our own doing, not by the caller's. */
  readonly failed?: boolean;
}

/** How a bundle fared: "refused" ones are not worth another try. */
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
  /** At the end: so long what still waits may take. */
  readonly closeMs: number;
  /** The collector, as people are told. */
  readonly place: string;
}

/**
 * In one request, at most; with their links, which are what makes them long. Handing a bundle over takes 0.5 ms of the
 * thread that serves requests (`node bench/later.ts`).
 */
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

  /** Spans that nobody will ever see. */
  get dropped(): number {
    return this.#dropped;
  }

  /** Never on the wire at once: the caller stands in somebody's path. */
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

  /** A span that could not even be made. */
  drop(count = 1): void {
    this.#dropped += count;
  }

  /** Sends what waits, for as long as `closeMs` allows; the rest is dropped. */
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

  /** One bundle; whether it is worth to go on at once. */
  async #send(): Promise<boolean> {
    const bundle = this.#take();
    this.#onTheWire = bundle.length;
    const { kind, why } = await this.#deliver(bundle);
    // Closed meanwhile, and nobody waited for this: it is counted as dropped already.
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

/** The collector as the thread of the requests sees it: the thread of `sender.ts` speaks to it. */
export function sentCollector(sender: Pick<Sender, "ask">, start: OtlpStart): Collector {
  return {
    deliver: async (spans): Promise<Delivery> => {
      try {
        return await sender.ask("deliverSpans", { start, spans: JSON.stringify(spans) });
      } catch (error) {
        // The next thread gets the same bundle. Any other error would come again.
        if (error instanceof SenderTrouble && error.isOfTheThread)
          return { kind: "away", why: error.message };
        throw error;
      }
    },
    close: () => sender.ask("closeSpans", undefined),
  };
}
