/**
 * How far a run is: on a terminal one line that is written over, elsewhere a line every 5 s.
 *
 *   12 s ━━━━━━━━━━━╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌ 30 s   1,801 req/s   p99 131 ms   fill 56/64   refused 0
 */
import type { Alarm, Clock } from "../app/clock.ts";
import type { Driver } from "./bench/driver.ts";
import { number } from "./bench-report.ts";
import type { Console } from "./command.ts";

const TTY_EVERY_MS = 250;
const PLAIN_EVERY_MS = 5000;
const BAR = 27;
/** Over the old line, without wrapping: a narrow terminal shows less of it, not two of it. */
const BEGIN = "\r\u001b[K\u001b[?7l";
const END = "\u001b[?7h";

export class Progress {
  /** Known when the server was asked. */
  maxBatchSize: number | undefined;
  readonly #driver: Driver;
  readonly #durationMs: number;
  readonly #console: Console;
  readonly #clock: Clock;
  #alarm: Alarm | undefined;

  constructor(driver: Driver, durationMs: number, console: Console, clock: Clock) {
    this.#driver = driver;
    this.#durationMs = durationMs;
    this.#console = console;
    this.#clock = clock;
  }

  start(): void {
    const everyMs = this.#console.errIsTTY ? TTY_EVERY_MS : PLAIN_EVERY_MS;
    this.#alarm = this.#clock.at(this.#clock.now() + everyMs, () => {
      this.#say(this.line());
      this.start();
    });
  }

  stop(): void {
    this.#alarm?.cancel();
    if (this.#console.errIsTTY) this.#console.err(`${BEGIN}${END}`);
  }

  line(): string {
    const { account, elapsedMs } = this.#driver;
    if (elapsedMs <= 0) return `  warming up, ${number(-elapsedMs / 1000, 1)} s left`;
    const done = Math.min(1, elapsedMs / this.#durationMs);
    const filled = Math.round(done * BAR);
    const time = [elapsedMs, this.#durationMs].map((ms) => `${number(ms / 1000)} s`);
    const p99 = account.latency.percentileMs(99);
    const fill = account.meanFill;
    const bad = account.errors === 0 ? "" : `   errors ${number(account.errors)}`;
    return [
      `  ${time[0]} ${"━".repeat(filled)}${"╌".repeat(BAR - filled)} ${time[1]}`,
      `${number((account.served * 1000) / elapsedMs)} req/s`,
      ...(Number.isNaN(p99) ? [] : [`p99 ${number(p99)} ms`]),
      ...(Number.isNaN(fill)
        ? []
        : [`fill ${number(fill)}${this.maxBatchSize === undefined ? "" : `/${this.maxBatchSize}`}`]),
      `refused ${number(account.refused)}${bad}`,
    ].join("   ");
  }

  #say(line: string): void {
    this.#console.err(this.#console.errIsTTY ? `${BEGIN}${line}${END}` : `${line}\n`);
  }
}
