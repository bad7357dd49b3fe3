/**
 * Load for the demo: requests from this process to its own public address, over real connections.
 *
 * Open loop: arrivals are a Poisson process at `perSecond` for each model, and nobody waits for an answer before
 * the next is sent. Inputs are new, but for a share that asks for one of a few popular ones again (the cache
 * answers) or for what was asked a moment ago (the two are joined). What is on its way is bounded by
 * `MAX_IN_FLIGHT` connections; an arrival that finds none is left out and counted.
 */
import { randomUUID } from "node:crypto";
import { Pool, type Dispatcher } from "undici";
import type { Alarm, Clock } from "../../app/clock.ts";
import type { Random } from "../../core/random.ts";

export interface Stream {
  readonly model: string;
  readonly perSecond: number;
}

export interface LoadCounts {
  readonly sent: number;
  readonly answered: number;
  /** 429 and 503: told to come again. */
  readonly refused: number;
  /** Any other status, and connections that broke. */
  readonly failed: number;
  /** Never sent: too many were on their way. */
  readonly leftOut: number;
  readonly seconds: number;
}

const MAX_IN_FLIGHT = 2000;
const POPULAR_INPUTS = 100;
const POPULAR_SHARE = 0.1;
const REPEATED_SHARE = 0.05;
/** After a longer pause of the process the arrivals of that time are not made up for. */
const MAX_BEHIND_MS = 250;
/** Less than servers give an idle connection, so that none is closed while a request is on its way to it. */
const IDLE_CONNECTION_MS = 1000;
const HEADERS = { "content-type": "application/json" };

export class DemoLoad {
  readonly #pool: Pool;
  readonly #clock: Clock;
  readonly #random: Random;
  readonly #startedAt: number;
  /** Tells the inputs of this load from those of another. */
  readonly #name = randomUUID();
  readonly #alarms = new Map<Stream, Alarm>();
  readonly #ended = Promise.withResolvers<LoadCounts>();
  #inFlight = 0;
  #sent = 0;
  #answered = 0;
  #refused = 0;
  #failed = 0;
  #leftOut = 0;
  #stoppedAt: number | undefined;

  /** Begins at once. */
  constructor(url: string, streams: readonly Stream[], clock: Clock, random: Random) {
    this.#clock = clock;
    this.#random = random;
    this.#startedAt = clock.now();
    this.#pool = new Pool(url, {
      connections: MAX_IN_FLIGHT,
      pipelining: 1,
      keepAliveTimeout: IDLE_CONNECTION_MS,
      keepAliveMaxTimeout: IDLE_CONNECTION_MS,
      headersTimeout: 0,
      bodyTimeout: 0,
    });
    for (const stream of streams) this.#arrive(stream, this.#startedAt + this.#gapMs(stream));
  }

  /** Sends nothing more; resolves with the counts when the last answer is in. */
  async stop(): Promise<LoadCounts> {
    if (this.#stoppedAt === undefined) {
      this.#stoppedAt = this.#clock.now();
      for (const alarm of this.#alarms.values()) alarm.cancel();
      this.#endWhenQuiet();
    }
    const counts = await this.#ended.promise;
    await this.#pool.destroy();
    return counts;
  }

  #arrive(stream: Stream, at: number): void {
    const ring = (): void => {
      const now = this.#clock.now();
      let next = Math.max(at, now - MAX_BEHIND_MS);
      // A timer rings once a millisecond at most: several may be due.
      for (; next <= now; next += this.#gapMs(stream)) this.#send(stream);
      this.#arrive(stream, next);
    };
    this.#alarms.set(stream, this.#clock.at(at, ring));
  }

  #gapMs({ perSecond }: Stream): number {
    return this.#random.exponential(1000 / perSecond);
  }

  #send({ model }: Stream): void {
    if (this.#inFlight >= MAX_IN_FLIGHT) {
      this.#leftOut++;
      return;
    }
    this.#inFlight++;
    this.#sent++;
    const body = JSON.stringify({ model, input: this.#input() });
    this.#pool.dispatch(
      { path: "/v1/inference", method: "POST", headers: HEADERS, body },
      new Caller((status) => this.#heard(status)),
    );
  }

  #input(): string {
    const draw = this.#random.next();
    if (draw < POPULAR_SHARE) return `popular ${Math.floor((draw / POPULAR_SHARE) * POPULAR_INPUTS)}`;
    const repeats = draw < POPULAR_SHARE + REPEATED_SHARE;
    return `${this.#name} ${repeats ? this.#sent - 1 : this.#sent}`;
  }

  /** `status` is 0 when the connection broke. */
  #heard(status: number): void {
    this.#inFlight--;
    if (status === 200) this.#answered++;
    else if (status === 429 || status === 503) this.#refused++;
    else this.#failed++;
    this.#endWhenQuiet();
  }

  #endWhenQuiet(): void {
    if (this.#stoppedAt === undefined || this.#inFlight > 0) return;
    this.#ended.resolve({
      sent: this.#sent,
      answered: this.#answered,
      refused: this.#refused,
      failed: this.#failed,
      leftOut: this.#leftOut,
      seconds: (this.#stoppedAt - this.#startedAt) / 1000,
    });
  }
}

/** One request: only its status counts. */
class Caller implements Dispatcher.DispatchHandler {
  readonly #heard: (status: number) => void;
  #status = 0;

  constructor(heard: (status: number) => void) {
    this.#heard = heard;
  }

  onRequestStart(): void {}

  onResponseStart(_controller: unknown, status: number): void {
    this.#status = status;
  }

  onResponseData(): void {}

  onResponseEnd(): void {
    this.#heard(this.#status);
  }

  onResponseError(): void {
    this.#heard(0);
  }
}
