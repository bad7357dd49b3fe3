/**
 * A fleet as its operators run it: gateways and batchers, each `ferry serve --role …` with a config file of
 * its own, on one Redis.
 *
 *   await using fleet = await Fleet.start({ gateways: 2, batchers: 1 }, fleetConfig(redis, [model]));
 *   await fleet.gateways[0].post({ input: "a" });
 *   await fleet.batchers[0].kill();          // kill -9; pause and resume: SIGSTOP and SIGCONT
 *   await fleet.add("batcher");
 *
 * `Part` is the sibling of the harness's `Ferry`, which is always a whole Ferry in one process. Everything
 * ends with the test, also parts that are paused. A part that ended by itself fails the test.
 * FERRY_FLEET_LOG=1 shows on stderr what every part says.
 */
import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as pause } from "node:timers/promises";
import { Agent, type Dispatcher } from "undici";
import {
  type Answer,
  ask,
  eventually,
  Folder,
  ROOT,
  SOON_MS,
  writeConfig,
  type Body,
  type Config,
  type Exit,
  type Headers,
  type Health,
  type LogLine,
} from "./harness.ts";

export type Role = "all" | "gateway" | "batcher";

/** epoll_wait and epoll_pwait of x86-64, epoll_pwait of arm64. */
const EPOLL_WAITS = [232, 281, 22];
/** Beyond the short drain that `writeConfig` sets. */
const END_MS = 20_000;
/** How long the pipe of a process that has ended may take to be read, when a child of its keeps it open. */
const LAST_LINES_MS = 10_000;
/** An answer that takes longer is none; no test here holds a caller for so long. */
const ANSWER_MS = 60_000;
const SHOW = process.env["FERRY_FLEET_LOG"] === "1";

/** Nobody's deadline is what these tests are about, unless they say so. */
export const patient = { queueMs: 30_000, workerMs: 20_000, totalMs: 40_000 };

/**
 * Times of the engine where nobody dies: a machine that stands still for seconds loses no lease, and refuses nobody
 * because Redis did not answer in time.
 */
const calm = {
  commandTimeoutMs: 10_000,
  waitTimeoutMs: 10_000,
  leaseMs: 20_000,
  aliveMs: 20_000,
};

/** Where a batcher dies and the others take over, soon, and nobody is refused meanwhile. */
export const brisk = { ...calm, commandTimeoutMs: 3000, waitTimeoutMs: 3000, leaseMs: 6000, aliveMs: 5000 };

/** Those of production, for tests in which Redis is away. */
export const alert = {
  commandTimeoutMs: 1000,
  waitTimeoutMs: 200,
  leaseMs: 2000,
  aliveMs: 2000,
};

/** A config on this Redis (or Redises); whose test says nothing of times has calm ones. */
export function fleetConfig(
  redis: Readonly<Record<string, unknown>>,
  models: readonly object[],
  more: Config = {},
): Config {
  return { engine: { kind: "redis", ...calm, ...redis }, models, ...more };
}

export interface WorkerRow {
  readonly name: string;
  readonly state: string;
  readonly in_flight: number;
  readonly batches: number;
  /** Who holds its lease; "" while nobody does. */
  readonly batcher: string;
}

export class Part implements AsyncDisposable {
  readonly role: Role;
  readonly lines: LogLine[] = [];
  readonly exited: Promise<Exit>;
  url = "";
  adminUrl = "";
  readonly #process: ChildProcess;
  readonly #folder: Folder;
  readonly #agent = new Agent({ headersTimeout: ANSWER_MS, bodyTimeout: ANSWER_MS });
  #ending = false;

  private constructor(role: Role, process: ChildProcess, folder: Folder) {
    this.role = role;
    this.#process = process;
    this.#folder = folder;
    this.exited = this.#exit();
    createInterface({ input: process.stderr! }).on("line", (line) => this.#note(line));
    process.stdout!.resume();
  }

  /** `root`: a checkout other than this one. */
  static async start(
    role: Role,
    config: Config,
    more: readonly string[] = [],
    root: string = ROOT,
  ): Promise<Part> {
    const folder = await Folder.make();
    const words = ["serve", "-c", await writeConfig(folder, config), "--role", role, ...more];
    const child = spawn(join(root, "bin/ferry"), words, { stdio: ["ignore", "pipe", "pipe"] });
    const part = new Part(role, child, folder);
    try {
      const ready = await part.line((line) => line.msg === "ready");
      part.url = role === "batcher" ? "" : String(ready["listen"]);
      part.adminUrl = String(ready["admin"]);
    } catch (error) {
      await part.kill();
      await part[Symbol.asyncDispose]();
      throw error;
    }
    return part;
  }

  get pid(): number {
    return this.#process.pid!;
  }

  get runs(): boolean {
    return this.#process.exitCode === null && this.#process.signalCode === null;
  }

  /** The first line on stderr, past or to come, that fits. */
  async line(fits: (line: LogLine) => boolean, withinMs = SOON_MS): Promise<LogLine> {
    let found: LogLine | undefined;
    const look = (): boolean => (found = this.lines.find(fits)) !== undefined || !this.runs;
    await eventually(look, withinMs).catch(() => undefined);
    // The last lines may come after the exit.
    if (!this.runs) await this.exited;
    found = this.lines.find(fits);
    assert.ok(found !== undefined, `no such line; stderr so far:\n${this.stderr()}`);
    return found;
  }

  stderr(): string {
    return this.lines.map((line) => JSON.stringify(line)).join("\n");
  }

  post(body: unknown, headers: Headers = {}, signal?: AbortSignal): Promise<Answer> {
    const fields = { "content-type": "application/json", ...headers };
    return this.#ask("POST", `${this.url}/v1/inference`, fields, JSON.stringify(body), signal);
  }

  get(path: string, signal?: AbortSignal, headers: Headers = {}): Promise<Answer> {
    return this.#ask("GET", this.url + path, headers, null, signal);
  }

  delete(path: string, headers: Headers = {}): Promise<Answer> {
    return this.#ask("DELETE", this.url + path, headers);
  }

  admin(path: string, method: Dispatcher.HttpMethod = "GET"): Promise<Answer> {
    return this.#ask(method, this.adminUrl + path, {});
  }

  /** Sends a task that nobody waits for; its id. */
  async accept(body: unknown, headers: Headers = {}): Promise<string> {
    const answer = await this.post(body, { prefer: "respond-async", ...headers });
    assert.equal(answer.status, 202, answer.text);
    return answer.json.task_id!;
  }

  /** Long-polls until the task has ended; its result. */
  async result(id: string, withinMs = SOON_MS): Promise<Body> {
    const deadline = performance.now() + withinMs;
    for (;;) {
      const left = Math.max(0, Math.ceil((deadline - performance.now()) / 1000));
      const answer = await this.get(`/v1/result/${id}?wait=${left}`);
      assert.equal(answer.status, 200, `${id}: ${answer.text}`);
      if (answer.json.status !== "PENDING") return answer.json;
      assert.ok(left > 0, `${id} is still PENDING after ${withinMs} ms`);
    }
  }

  async health(): Promise<Health> {
    return JSON.parse((await this.admin("/internal/health")).text) as Health;
  }

  async workers(): Promise<WorkerRow[]> {
    return (JSON.parse((await this.admin("/internal/workers")).text) as { workers: WorkerRow[] }).workers;
  }

  /** Another config, read again on SIGHUP; resolves with what changed. */
  async reload(config: Config): Promise<string> {
    await this.rewrite(config);
    const told = this.#reloads();
    process.kill(this.pid, "SIGHUP");
    await eventually(() => this.#reloads() > told);
    return this.lines.findLast(isReload)!.msg!;
  }

  async rewrite(config: Config): Promise<void> {
    await writeConfig(this.#folder, config);
  }

  #reloads(): number {
    return this.lines.filter(isReload).length;
  }

  /** kill -9, and wait until it is gone. */
  async kill(): Promise<void> {
    await this.#end("SIGKILL");
  }

  /** SIGTERM, and wait for the end. */
  async stop(): Promise<Exit> {
    return this.#end("SIGTERM");
  }

  pause(): void {
    process.kill(this.pid, "SIGSTOP");
  }

  /**
   * Pauses it while it waits for events, where the system says what it does (Linux): one that is stopped between its last
   * look at a lease and the write to the worker does that write when it wakes, whatever became of the lease.
   */
  async pauseAsleep(): Promise<void> {
    for (;;) {
      this.pause();
      await pause(5);
      const call = await readFile(`/proc/${this.pid}/syscall`, "utf8").catch(() => "");
      if (call === "" || EPOLL_WAITS.some((number) => call.startsWith(`${number} `))) return;
      this.resume();
      await pause(7);
    }
  }

  resume(): void {
    process.kill(this.pid, "SIGCONT");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const diedAlone = !this.#ending && !this.runs;
    if (this.runs) {
      this.resume();
      const late = setTimeout(() => this.#process.kill("SIGKILL"), END_MS);
      await this.#end("SIGTERM");
      clearTimeout(late);
    }
    await this.#agent.destroy();
    await this.#folder[Symbol.asyncDispose]();
    assert.ok(!diedAlone, `the ${this.role} ended by itself:\n${this.stderr()}`);
  }

  /** The exit, and every line before it. */
  async #exit(): Promise<Exit> {
    const closed = once(this.#process, "close");
    const [code, signal] = (await once(this.#process, "exit")) as [Exit["code"], Exit["signal"]];
    const enough = new AbortController();
    await Promise.race([closed, pause(LAST_LINES_MS, undefined, { signal: enough.signal })]);
    enough.abort();
    return { code, signal };
  }

  #end(signal: NodeJS.Signals): Promise<Exit> {
    this.#ending = true;
    this.#process.kill(signal);
    return this.exited;
  }

  #note(text: string): void {
    if (SHOW) process.stderr.write(`${this.role} ${this.pid}: ${text}\n`);
    try {
      this.lines.push(JSON.parse(text) as LogLine);
    } catch {
      this.lines.push({ text });
    }
  }

  async #ask(
    method: Dispatcher.HttpMethod,
    url: string,
    headers: Headers,
    body: string | null = null,
    signal: AbortSignal | null = null,
  ): Promise<Answer> {
    const options = { method, headers, body, signal, dispatcher: this.#agent };
    for (;;) {
      const answer = await ask(url, options);
      if (!answer.isFull) return answer;
      await pause(answer.json.retry_after_ms, undefined, { signal: signal ?? undefined });
    }
  }
}

function isReload({ msg = "" }: LogLine): boolean {
  return msg.startsWith("the config was read again");
}

export class Fleet implements AsyncDisposable {
  /** All that were started, the dead ones too. */
  readonly gateways: Part[] = [];
  readonly batchers: Part[] = [];
  readonly #config: Config;

  constructor(config: Config) {
    this.#config = config;
  }

  /** Starts them side by side; with batchers, resolves when every gateway takes work. */
  static async start(
    counts: { readonly gateways: number; readonly batchers: number },
    config: Config,
  ): Promise<Fleet> {
    const fleet = new Fleet(config);
    const roles: Role[] = [
      ...Array.from({ length: counts.gateways }, (): Role => "gateway"),
      ...Array.from({ length: counts.batchers }, (): Role => "batcher"),
    ];
    const starts = await Promise.allSettled(roles.map((role) => fleet.add(role)));
    const failure = starts.find((start) => start.status === "rejected");
    try {
      if (failure !== undefined) throw failure.reason;
      if (counts.batchers > 0) await fleet.serves();
      return fleet;
    } catch (error) {
      await fleet[Symbol.asyncDispose]();
      throw error;
    }
  }

  /** Every gateway that runs has heard of a worker: before that it refuses, rightly. */
  async serves(withinMs = SOON_MS): Promise<void> {
    // Workers that nobody holds yet are healthy too, but there is room for one batch alone.
    const hears = async (door: Part): Promise<boolean> => {
      const { healthy_workers, models } = await door.health();
      return healthy_workers > 0 && models.every(({ capacity_per_second }) => capacity_per_second > 0);
    };
    await eventually(async () => (await Promise.all(this.doors.map(hears))).every(Boolean), withinMs);
  }

  /** How many workers each batcher holds, the fewest first, as a gateway sees it. */
  async shares(): Promise<number[]> {
    const shares = new Map<string, number>();
    for (const { batcher } of await this.doors[0]!.workers())
      if (batcher !== "") shares.set(batcher, (shares.get(batcher) ?? 0) + 1);
    return [...shares.values()].sort((a, b) => a - b);
  }

  /** The workers are spread like this: `[2, 2]` is two batchers with two each. */
  async spread(shares: readonly number[], withinMs = SOON_MS): Promise<void> {
    let last: readonly number[] = [];
    const holds = async (): Promise<boolean> => String((last = await this.shares())) === String(shares);
    await eventually(holds, withinMs).catch(() => {
      throw new Error(
        `the workers are spread ${last.join("/")}, not ${shares.join("/")}, after ${withinMs} ms`,
      );
    });
  }

  async add(role: Role, more: Config = {}, root: string = ROOT): Promise<Part> {
    const part = await Part.start(role, { ...this.#config, ...more }, [], root);
    (role === "batcher" ? this.batchers : this.gateways).push(part);
    return part;
  }

  /** The gateways that run. */
  get doors(): Part[] {
    return this.gateways.filter(({ runs }) => runs);
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const parts = [...this.gateways, ...this.batchers];
    const ends = await Promise.allSettled(parts.map((part) => part[Symbol.asyncDispose]()));
    const failure = ends.find((end) => end.status === "rejected");
    if (failure !== undefined) throw failure.reason;
  }
}
