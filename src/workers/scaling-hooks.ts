/**
 * Reports the desired number of workers to a webhook or an operator's program.
 *
 * One call at a time; only the latest number waits. A failed call is retried after 1 s, doubling up to a minute, unless
 * a newer number came; each reason is logged once, and the recovery. In a fleet one process calls; the others keep
 * their number, and a new leader reports its own, so a number is not lost with its leader.
 *
 * The program is run without a shell, with FERRY_MODEL, FERRY_DESIRED, FERRY_HEALTHY and FERRY_REASON in its
 * environment, in its own process group: on a timeout the whole group is killed. If it fails, its last stderr line is
 * part of the reason.
 */
import { spawn } from "node:child_process";
import type { Alarm, Clock } from "../app/clock.ts";
import type { Scaling } from "../core/scaling.ts";
import type { Events } from "../observe/events.ts";

export interface HookOptions {
  readonly model: string;
  readonly webhook?: string | undefined;
  readonly command?: string | undefined;
  readonly timeoutMs: number;
  /** Whether this process makes the calls; checked before each. */
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
/** How often a non-leader checks whether it leads now. */
const LOOK_MS = 5000;
/** Kept end of stderr, in UTF-16 units. */
const KEPT_WORDS = 2000;
const LONGEST_LINE = 200;
/** How long to wait for the stderr of an ended program. */
const LAST_WORDS_MS = 500;

export class ScalingHooks {
  readonly #options: HookOptions;
  readonly #clock: Clock;
  readonly #events: Events;
  #latest: News | undefined;
  #calling = false;
  #trouble: string | undefined;
  #waitMs = FIRST_WAIT_MS;
  #alarm: Alarm | undefined;
  #stopped = false;
  readonly #abort = new AbortController();

  constructor(options: HookOptions, clock: Clock, events: Events) {
    this.#options = options;
    this.#clock = clock;
    this.#events = events;
  }

  /** Why the last call failed; undefined when it did not. */
  get trouble(): string | undefined {
    return this.#trouble;
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
    if (!this.#options.leads()) return this.#later(LOOK_MS);
    this.#calling = true;
    const { webhook, command } = this.#options;
    const failures: string[] = [];
    const note = (error: unknown): void =>
      void failures.push(error instanceof Error ? error.message : String(error));
    if (webhook !== undefined) await this.#post(webhook, news).catch(note);
    if (command !== undefined) await this.#run(command, news).catch(note);
    this.#calling = false;
    if (this.#stopped) return;
    this.#learn(failures.length === 0 ? undefined : failures.join("; "));
    if (this.#latest !== news) return this.#call();
    if (failures.length === 0) {
      this.#latest = undefined;
      return;
    }
    this.#later(this.#waitMs);
    this.#waitMs = Math.min(MAX_WAIT_MS, 2 * this.#waitMs);
  }

  #later(ms: number): void {
    this.#alarm = this.#clock.at(this.#clock.now() + ms, () => void this.#call());
  }

  /** Logs a new trouble, or the end of one. */
  #learn(trouble: string | undefined): void {
    const before = this.#trouble;
    this.#trouble = trouble;
    if (trouble === before) return;
    const { model } = this.#options;
    const what = `${model}: nobody could be told how many workers there should be: ${trouble}; it is tried again`;
    if (trouble !== undefined) this.#events.emit("notice", { level: "warn", message: what });
    else {
      const message = `${model}: who sees to the number of workers could be told again`;
      this.#events.emit("notice", { level: "info", message });
    }
  }

  async #post(webhook: string, news: News): Promise<void> {
    const { timeoutMs } = this.#options;
    const limit = AbortSignal.timeout(timeoutMs);
    const answer = await fetch(webhook, {
      method: "POST",
      headers: { "content-type": "application/json" },
      body: JSON.stringify(news),
      redirect: "error",
      signal: AbortSignal.any([limit, this.#abort.signal]),
    }).catch((error: unknown) => {
      if (limit.aborted) throw new Error(`the webhook did not answer within ${timeoutMs} ms`);
      throw new Error(`the webhook cannot be reached (${causeOf(error)})`);
    });
    await answer.body?.cancel();
    if (!answer.ok) throw new Error(`the webhook answered ${answer.status}`);
  }

  async #run(command: string, { model, desired, healthy, reason }: News): Promise<void> {
    const { timeoutMs } = this.#options;
    const child = spawn(command, {
      env: {
        ...process.env,
        FERRY_MODEL: model,
        FERRY_DESIRED: String(desired),
        FERRY_HEALTHY: String(healthy),
        FERRY_REASON: reason,
      },
      stdio: ["ignore", "ignore", "pipe"],
      detached: true,
    });
    let words = "";
    child.stderr.setEncoding("utf8");
    child.stderr.on("data", (chunk: string) => (words = (words + chunk).slice(-KEPT_WORDS)));
    let late = false;
    const end = (): void => killAll(child.pid);
    let alarm = this.#clock.at(this.#clock.now() + timeoutMs, () => {
      late = true;
      end();
    });
    this.#abort.signal.addEventListener("abort", end);
    await new Promise<void>((resolve, reject) => {
      child.on("error", (error) => reject(new Error(`the command cannot be run (${causeOf(error)})`)));
      child.on("exit", (code, signal) => {
        if (code === 0) return resolve();
        const how = code === null ? `was killed by ${signal}` : `ended with ${code}`;
        const fail = (): void =>
          reject(new Error(`the command ${late ? `did not end within ${timeoutMs} ms` : how}${last(words)}`));
        // A process it left behind may hold its stderr open.
        alarm.cancel();
        alarm = this.#clock.at(this.#clock.now() + LAST_WORDS_MS, fail);
        child.on("close", fail);
      });
    }).finally(() => {
      alarm.cancel();
      this.#abort.signal.removeEventListener("abort", end);
      child.stderr.destroy();
    });
  }
}

function killAll(pid: number | undefined): void {
  if (pid === undefined) return;
  try {
    process.kill(-pid, "SIGKILL");
  } catch {
    // It is already gone.
  }
}

/** `: ` and the last line written, sanitized. */
function last(words: string): string {
  const line = words.trimEnd().split("\n").at(-1)!.trim().slice(0, LONGEST_LINE);
  return line === "" ? "" : `: ${line}`;
}

function causeOf(error: unknown): string {
  const { cause, code, message } = error as Error & { code?: string; cause?: Error & { code?: string } };
  return cause?.code ?? cause?.message ?? code ?? message;
}
