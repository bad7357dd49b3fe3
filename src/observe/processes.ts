/**
 * CPU, memory and event-loop delay of each process of one Ferry: `core` and `gateway-1`, `gateway-2` … with
 * `--processes`, else `ferry`. Each process reads itself once a second; gateways send what they read to the core, whose
 * `/metrics` shows all of them.
 */
import { type Alarm, type Clock, nextBeat } from "../app/clock.ts";
import type { Events } from "./events.ts";

export interface ProcessSample {
  /** `core`, `gateway-1`, `ferry`. */
  readonly process: string;
  readonly pid: number;
  /** User and system, since the process started. */
  readonly cpuSeconds: number;
  readonly residentBytes: number;
  /** The worst since the sample before. */
  readonly loopDelayMs: number;
}

const EVERY_MS = 1000;

/** Reads this process once a second. */
export class ProcessSampler {
  readonly #process: string;
  readonly #clock: Clock;
  readonly #told: (sample: ProcessSample) => void;
  readonly #delay: LoopDelay;
  readonly #off: () => void;
  #alarm: Alarm;

  constructor(
    process: string,
    events: Pick<Events, "on">,
    clock: Clock,
    told: (sample: ProcessSample) => void,
  ) {
    this.#process = process;
    this.#clock = clock;
    this.#told = told;
    this.#delay = new LoopDelay(clock);
    this.#off = events.on("request.answered", () => this.#delay.watch());
    this.#alarm = this.#read(clock.now());
  }

  stop(): void {
    this.#alarm.cancel();
    this.#off();
    this.#delay.stop();
  }

  #read(dueAt: number): Alarm {
    const { user, system } = process.cpuUsage();
    this.#told({
      process: this.#process,
      pid: process.pid,
      cpuSeconds: (user + system) / 1e6,
      residentBytes: process.memoryUsage.rss(),
      loopDelayMs: Math.max(0, this.#delay.take(dueAt)),
    });
    const next = nextBeat(this.#clock.now(), EVERY_MS);
    return this.#clock.at(next, () => (this.#alarm = this.#read(next)));
  }
}

/** A process that has not sent a sample for this long is gone. */
const GONE_MS = 10_000;

interface Latest {
  sample: ProcessSample;
  at: number;
  /** CPU of the processes that had this name before. */
  cpuBefore: number;
  /** Since the last `take`. */
  worstDelayMs: number;
}

/** The latest sample of each process. */
export class ProcessSamples {
  readonly #clock: Clock;
  readonly #byProcess = new Map<string, Latest>();

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  put(sample: ProcessSample): void {
    const at = this.#clock.now();
    const latest = this.#byProcess.get(sample.process);
    const worstDelayMs = sample.loopDelayMs;
    if (latest === undefined) {
      this.#byProcess.set(sample.process, { sample, at, cpuBefore: 0, worstDelayMs });
      return;
    }
    // A successor starts at 0 again; the counter goes on.
    if (latest.sample.pid !== sample.pid) latest.cpuBefore += latest.sample.cpuSeconds;
    latest.sample = sample;
    latest.at = at;
    latest.worstDelayMs = Math.max(latest.worstDelayMs, worstDelayMs);
  }

  /** Of the processes that live, by name: CPU of all that had the name, and the worst delay since the last call. */
  take(): ProcessSample[] {
    const since = this.#clock.now() - GONE_MS;
    const living = [...this.#byProcess.values()].filter(({ at }) => at >= since);
    return living
      .map((latest) => {
        const { sample, cpuBefore, worstDelayMs } = latest;
        latest.worstDelayMs = 0;
        return { ...sample, cpuSeconds: cpuBefore + sample.cpuSeconds, loopDelayMs: worstDelayMs };
      })
      .sort((a, b) => ORDER.compare(a.process, b.process));
  }
}

const ORDER = new Intl.Collator("en", { numeric: true });

const DELAY_EVERY_MS = 50;

/**
 * Event-loop delay: how late a 50 ms alarm fires, which may read as much short. Node's `monitorEventLoopDelay` misses a
 * stall that spans its reset, and would need a reset each second. Without requests only the lateness of `take` itself is
 * read: fifty alarms a second were all that an idle process did.
 */
export class LoopDelay {
  readonly #clock: Clock;
  #alarm: Alarm | undefined;
  #dueAt = Infinity;
  #watched = false;
  #worstMs = 0;

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  /** There are requests: measure until a `take` finds that there were none. */
  watch(): void {
    this.#watched = true;
    if (this.#alarm === undefined) this.#arm(this.#clock.now());
  }

  /** The worst since the last call, including a delay still in progress. `dueAt`: when this should have been called. */
  take(dueAt: number): number {
    const worst = Math.max(this.#worstMs, this.#clock.now() - Math.min(dueAt, this.#dueAt));
    this.#worstMs = 0;
    if (!this.#watched) this.stop();
    this.#watched = false;
    return worst;
  }

  stop(): void {
    this.#alarm?.cancel();
    this.#alarm = undefined;
    this.#dueAt = Infinity;
  }

  #arm(now: number): void {
    this.#dueAt = nextBeat(now, DELAY_EVERY_MS);
    this.#alarm = this.#clock.at(this.#dueAt, () => {
      const rangAt = this.#clock.now();
      this.#worstMs = Math.max(this.#worstMs, rangAt - this.#dueAt);
      this.#arm(rangAt);
    });
  }
}
