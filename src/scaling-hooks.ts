/**
 * Telling somebody else how many workers a model should have: a webhook, or a program of the operator's.
 *
 * One call at a time; while it runs only the latest number waits. One that fails is tried again, after a second and
 * then twice as long each time, up to a minute, unless a newer number came. The program is run as it is, not through a
 * shell, with FERRY_MODEL, FERRY_DESIRED, FERRY_HEALTHY and FERRY_REASON in its environment.
 */
import { execFile } from "node:child_process";
import type { Alarm, Clock } from "./clock.ts";
import type { Scaling } from "./core/scaling.ts";
import type { Events } from "./telemetry/events.ts";

export interface HookOptions {
  readonly model: string;
  readonly webhook?: string | undefined;
  readonly command?: string | undefined;
  readonly timeoutMs: number;
  /** Whether this process is the one that tells; asked before each call. */
  readonly leads: () => boolean;
}

interface News {
  readonly model: string;
  readonly desired: number;
  readonly healthy: number;
  readonly reason: string;
}

const FIRST_WAIT_MS = 1000;
const MAX_WAIT_MS = 60_000;

export class ScalingHooks {
  readonly #options: HookOptions;
  readonly #clock: Clock;
  readonly #events: Events;
  #latest: News | undefined;
  #calling = false;
  #waitMs = FIRST_WAIT_MS;
  #alarm: Alarm | undefined;
  #stopped = false;
  readonly #abort = new AbortController();

  constructor(options: HookOptions, clock: Clock, events: Events) {
    this.#options = options;
    this.#clock = clock;
    this.#events = events;
  }

  tell({ desired, reason }: Scaling, healthy: number): void {
    this.#latest = { model: this.#options.model, desired, healthy, reason };
    this.#waitMs = FIRST_WAIT_MS;
    this.#alarm?.cancel();
    void this.#call();
  }

  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
    this.#abort.abort();
  }

  async #call(): Promise<void> {
    const news = this.#latest;
    if (news === undefined || this.#calling || this.#stopped) return;
    if (!this.#options.leads()) return;
    this.#calling = true;
    const { webhook, command } = this.#options;
    const failures: string[] = [];
    const note = (error: unknown): void =>
      void failures.push(error instanceof Error ? error.message : String(error));
    if (webhook !== undefined) await this.#post(webhook, news).catch(note);
    if (command !== undefined) await this.#run(command, news).catch(note);
    this.#calling = false;
    if (failures.length === 0 && this.#latest === news) this.#latest = undefined;
    else if (failures.length > 0 && this.#latest === news) this.#again(failures.join("; "));
    else void this.#call();
  }

  #again(why: string): void {
    if (this.#stopped) return;
    const { model } = this.#options;
    const message = `${model}: nobody could be told how many workers there should be: ${why}; it is tried again`;
    this.#events.emit("notice", { level: "warn", message });
    this.#alarm = this.#clock.at(this.#clock.now() + this.#waitMs, () => void this.#call());
    this.#waitMs = Math.min(MAX_WAIT_MS, 2 * this.#waitMs);
  }

  async #post(webhook: string, news: News): Promise<void> {
    const limit = AbortSignal.timeout(this.#options.timeoutMs);
    const answer = await fetch(webhook, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(news),
      redirect: "error",
      signal: AbortSignal.any([limit, this.#abort.signal]),
    }).catch((error: unknown) => {
      throw new Error(
        `the webhook cannot be reached (${limit.aborted ? "no answer in time" : causeOf(error)})`,
      );
    });
    await answer.body?.cancel();
    if (!answer.ok) throw new Error(`the webhook answered ${answer.status}`);
  }

  #run(command: string, { model, desired, healthy, reason }: News): Promise<void> {
    const env = {
      ...process.env,
      FERRY_MODEL: model,
      FERRY_DESIRED: String(desired),
      FERRY_HEALTHY: String(healthy),
      FERRY_REASON: reason,
    };
    const { timeoutMs: timeout } = this.#options;
    return new Promise((resolve, reject) => {
      execFile(command, { env, timeout, killSignal: "SIGKILL", signal: this.#abort.signal }, (error) => {
        if (error === null) return resolve();
        const { code, killed } = error;
        const how = killed === true ? "did not end in time" : `ended with ${String(code ?? "an error")}`;
        reject(new Error(`the command ${how}`));
      });
    });
  }
}

function causeOf(error: unknown): string {
  const cause = (error as { cause?: { code?: string } }).cause?.code;
  return cause ?? (error as Error).name;
}
