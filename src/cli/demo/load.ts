/**
 * Load for the demo: requests from this process to its own public address, over real connections. Open loop: Poisson
 * arrivals at `perSecond` for each model. Inputs are new except for a share that repeats a popular one (a cache hit) or
 * a very recent one (joined in flight). An arrival beyond `MAX_IN_FLIGHT` is counted but not sent.
 */
import { randomUUID } from "node:crypto";
import type { Clock } from "../../app/clock.ts";
import type { Random } from "../../core/random.ts";
import { Driver, type RequestSource } from "../bench/driver.ts";

export interface Stream {
  readonly model: string;
  readonly perSecond: number;
}

export interface LoadCounts {
  readonly sent: number;
  readonly answered: number;
  /** 429 and 503. */
  readonly refused: number;
  /** Any other status, and broken connections. */
  readonly failed: number;
  /** Not sent: `MAX_IN_FLIGHT` reached. */
  readonly leftOut: number;
  readonly seconds: number;
}

const MAX_IN_FLIGHT = 2000;
const POPULAR_INPUTS = 100;
const POPULAR_SHARE = 0.1;
const REPEATED_SHARE = 0.05;
/** Longer than any demo; a timer takes at most 24 days. */
const FOREVER_MS = 20 * 86_400_000;
const TIMEOUT_MS = 600_000;

export class DemoLoad {
  readonly #driver: Driver;

  /** Starts at once. */
  constructor(url: string, streams: readonly Stream[], clock: Clock, random: Random) {
    const { hostname, port, host } = new URL(url);
    const rate = streams.reduce((sum, { perSecond }) => sum + perSecond, 0);
    this.#driver = new Driver({
      target: { host: hostname.replace(/^\[|\]$/g, ""), port: Number(port || 80), path: "/v1/inference" },
      load: { kind: "open", rate, arrivals: "poisson" },
      kinds: streams.map(({ model, perSecond }) => ({ label: model, share: perSecond })),
      requests: new DemoRequests(host, streams, random),
      warmMs: 0,
      measureMs: FOREVER_MS,
      timeoutMs: TIMEOUT_MS,
      connections: MAX_IN_FLIGHT,
      outstanding: MAX_IN_FLIGHT,
      clock,
      draw: () => random.next(),
      cpuMs: () => 0,
    });
    this.#driver.start();
  }

  /** Stops sending; resolves with the counts after the last reply. */
  async stop(): Promise<LoadCounts> {
    const driver = this.#driver;
    driver.stop();
    await driver.ended;
    const { offered, served, refused, failed, lost, unsent } = driver.account;
    const seconds = driver.elapsedMs / 1000;
    return {
      sent: offered - unsent,
      answered: served,
      refused,
      failed: failed + lost,
      leftOut: unsent,
      seconds,
    };
  }
}

class DemoRequests implements RequestSource {
  readonly marker = "";
  readonly #lines: string;
  readonly #heads: readonly string[];
  readonly #random: Random;
  readonly #name = randomUUID();
  #made = 0;

  constructor(host: string, streams: readonly Stream[], random: Random) {
    this.#random = random;
    this.#heads = streams.map(({ model }) => `{"model":${JSON.stringify(model)},"input":"`);
    this.#lines = `POST /v1/inference HTTP/1.1\r\nhost: ${host}\r\ncontent-type: application/json\r\n`;
  }

  next(kind: number): string {
    const body = Buffer.from(`${this.#heads[kind]}${this.#input()}"}`);
    return `${this.#lines}content-length: ${body.length}\r\n\r\n${body.toString("latin1")}`;
  }

  #input(): string {
    this.#made++;
    const draw = this.#random.next();
    if (draw < POPULAR_SHARE) return `popular ${Math.floor((draw / POPULAR_SHARE) * POPULAR_INPUTS)}`;
    const repeats = draw < POPULAR_SHARE + REPEATED_SHARE;
    return `${this.#name} ${repeats ? this.#made - 1 : this.#made}`;
  }
}
