/**
 * Telling somebody else how many workers a model should have: a webhook, or a program of the operator's.
 *
 * One call at a time; while it runs only the latest number waits. One that fails is tried again, after a second and
 * then twice as long each time, up to a minute, unless a newer number came; the log says so once for each reason, and
 * once more when it works again. Of a fleet one process tells; the others keep their number, and whoever takes over
 * tells its own: a number that nobody heard because its teller died is not lost.
 *
 * The program is run as it is, not through a shell, with FERRY_MODEL, FERRY_DESIRED, FERRY_HEALTHY and FERRY_REASON in
 * its environment. It leads a process group of its own: when it takes too long, all that it started ends with it. If it
 * fails, the last line that it wrote to stderr is part of the reason.
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
/** How often who does not lead looks whether it does now. */
const LOOK_MS = 5000;
/** Of what a program writes to stderr, the end; in UTF-16 units. */
const KEPT_WORDS = 2000;
const LONGEST_LINE = 200;
/** How long the words of a program that has ended may take to arrive. */
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

  /** Told when it is another trouble than before, or none any more. */
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
        // What it left behind may hold its stderr open.
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
    // It is gone already.
  }
}

/** `: the last line that was written`, as far as it can be read. */
function last(words: string): string {
  const line = words.trimEnd().split("\n").at(-1)!.trim().slice(0, LONGEST_LINE);
  return line === "" ? "" : `: ${line}`;
}

function causeOf(error: unknown): string {
  const { cause, code, message } = error as Error & { code?: string; cause?: Error & { code?: string } };
  return cause?.code ?? cause?.message ?? code ?? message;
}
