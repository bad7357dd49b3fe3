/**
 * Ferry as its users meet it: a process with a config file, two listeners, lines on stderr and an exit code.
 *
 * `Ferry.start(config)` writes the config to a folder of its own, waits for the line that says `ready` and
 * returns a client. Everything is `await using`: at the end the process has exited, also when a test failed,
 * and a process that died by itself fails the test that owned it. Nothing here sleeps: it waits for lines,
 * for answers, for exits, always with a deadline.
 *
 * A machine that runs tests may stand still for seconds. Therefore deadlines are those of a hang (`SOON_MS`), not of
 * what is usual, and a model whose test says nothing of timeouts has patient ones.
 */
import assert from "node:assert/strict";
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { setTimeout as pause } from "node:timers/promises";
import { Agent, request, type Dispatcher } from "undici";
import { main } from "../../src/cli.ts";
import { releasePort, takePort } from "../engine/redis-client/guard.ts";

export const ROOT = join(import.meta.dirname, "../..");
const FERRY = join(ROOT, "bin/ferry");
/** Within which whatever must happen has happened, on any machine; who waits for longer waits in vain. */
export const SOON_MS = 60_000;
/** Of models in tests that are not about deadlines: a machine that stands still for seconds makes nobody late. */
const PATIENT = { queueMs: 30_000, workerMs: 20_000, totalMs: 40_000 };
const PROCESS_IS_FULL = /this gateway process (?:has more requests than|cannot store tasks)/;
/** Beyond the short drain that `writeConfig` sets. */
const END_MS = 20_000;
/** How long the pipe of a process that has ended may take to be read, when a child of its keeps it open. */
const LAST_LINES_MS = 10_000;

/** `FERRY_TEST_PROCESSES=2`: the same tests against `ferry serve --processes 2`. */
const PROCESSES = process.env["FERRY_TEST_PROCESSES"];

export type Config = Readonly<Record<string, unknown>>;
export type Headers = Readonly<Record<string, string>>;

/** What Ferry answers, every field as if it may be there: the tests say which must be. */
export interface Body {
  readonly request_id?: string;
  readonly task_id?: string;
  readonly status?: string;
  readonly output?: unknown;
  readonly error?: string;
  readonly message?: string;
  readonly retry_after_ms?: number;
  readonly latency_ms?: number;
  readonly metadata?: Readonly<Record<string, unknown>>;
}

export interface Health {
  readonly status: string;
  readonly gpu_utilization: number;
  readonly queue_depth: number;
  readonly requests_per_second: number;
  readonly running: number;
  readonly healthy_workers: number;
  readonly models: readonly { readonly capacity_per_second: number }[];
  readonly dead_letters: number;
  readonly totals: Readonly<
    Record<"calls" | "dropped" | "retried" | "dead" | "lost" | "shed" | "tasks", number>
  >;
}

export interface LogLine {
  readonly level?: string;
  readonly msg?: string;
  readonly [field: string]: unknown;
}

export class Answer {
  readonly status: number;
  readonly headers: Readonly<Record<string, string | string[] | undefined>>;
  readonly text: string;

  constructor(status: number, headers: Answer["headers"], text: string) {
    this.status = status;
    this.headers = headers;
    this.text = text;
  }

  get json(): Body {
    return JSON.parse(this.text) as Body;
  }

  /** Refused because the process is slow, not because of what was asked or of the workers. */
  get isFull(): boolean {
    return this.status === 503 && PROCESS_IS_FULL.test(this.text);
  }

  header(name: string): string {
    return String(this.headers[name] ?? "");
  }
}

/** A folder that is gone at the end. */
export class Folder implements AsyncDisposable {
  readonly path: string;

  private constructor(path: string) {
    this.path = path;
  }

  static async make(): Promise<Folder> {
    return new Folder(await mkdtemp(join(tmpdir(), "ferry-e2e-")));
  }

  async write(name: string, text: string): Promise<string> {
    const path = join(this.path, name);
    await writeFile(path, text);
    return path;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await rm(this.path, { recursive: true, force: true, maxRetries: 3 });
  }
}

export interface Exit {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
}

export class Ferry implements AsyncDisposable {
  readonly configFile: string;
  readonly lines: LogLine[] = [];
  stdout = "";
  readonly exited: Promise<Exit>;
  url = "";
  adminUrl = "";
  /**
   * Whether a request is sent again that was refused because the process is slow: on a machine that stands still for a
   * second that may be any request of a burst, and only tests of that refusal want to see it.
   */
  comesAgain = true;
  readonly #process: ChildProcess;
  readonly #owned: Folder | undefined;
  readonly #agent = new Agent({ headersTimeout: SOON_MS, bodyTimeout: SOON_MS, keepAliveTimeout: 20_000 });
  readonly #watchers = new Set<() => void>();
  #ending = false;

  private constructor(process: ChildProcess, configFile: string, owned: Folder | undefined) {
    this.#process = process;
    this.configFile = configFile;
    this.#owned = owned;
    this.exited = this.#end();
    createInterface({ input: process.stderr! }).on("line", (line) => this.#note(line));
    process.stdout!.setEncoding("utf8").on("data", (text: string) => (this.stdout += text));
  }

  /**
   * Starts Ferry: that of the checkout, or another one. With `folder` the config and a relative `dataDir` live there,
   * and outlive this process.
   */
  static async start(config: Config, folder?: Folder, program = FERRY): Promise<Ferry> {
    const owned = folder === undefined ? await Folder.make() : undefined;
    const configFile = await writeConfig(folder ?? owned!, config);
    const words = ["serve", "-c", configFile, ...(PROCESSES === undefined ? [] : ["--processes", PROCESSES])];
    const child = spawn(program, words, { stdio: ["ignore", "pipe", "pipe"] });
    const ferry = new Ferry(child, configFile, owned);
    try {
      const ready = await ferry.line((line) => line.msg === "ready");
      ferry.url = String(ready["listen"]);
      ferry.adminUrl = String(ready["admin"]);
    } catch (error) {
      await ferry.kill();
      await ferry[Symbol.asyncDispose]();
      throw error;
    }
    return ferry;
  }

  get pid(): number {
    return this.#process.pid!;
  }

  /** The first line on stderr, past or to come, that fits. */
  async line(fits: (line: LogLine) => boolean, timeoutMs = SOON_MS): Promise<LogLine> {
    const found = (): LogLine | undefined => this.lines.find(fits);
    const gone = this.exited.then(() => true);
    const late = AbortSignal.timeout(timeoutMs);
    for (;;) {
      const line = found();
      if (line !== undefined) return line;
      const woken = Promise.withResolvers<boolean>();
      const wake = (): void => woken.resolve(false);
      this.#watchers.add(wake);
      late.addEventListener("abort", wake, { once: true });
      const ended = await Promise.race([woken.promise, gone]);
      this.#watchers.delete(wake);
      const last = found();
      if (last !== undefined) return last;
      if (ended || late.aborted) throw new Error(`no such line; stderr so far:\n${this.stderr()}`);
    }
  }

  stderr(): string {
    return this.lines.map((line) => JSON.stringify(line)).join("\n");
  }

  /** A JSON body (or, from a string, exactly these bytes) to the public listener. */
  post(body: unknown, headers: Headers = {}, path = "/v1/inference", signal?: AbortSignal): Promise<Answer> {
    const text = typeof body === "string" || Buffer.isBuffer(body) ? body : JSON.stringify(body);
    return this.#ask(
      "POST",
      this.url + path,
      { "content-type": "application/json", ...headers },
      text,
      signal,
    );
  }

  get(path: string, headers: Headers = {}): Promise<Answer> {
    return this.#ask("GET", this.url + path, headers);
  }

  delete(path: string, headers: Headers = {}): Promise<Answer> {
    return this.#ask("DELETE", this.url + path, headers);
  }

  admin(path: string, method: Dispatcher.HttpMethod = "GET", headers: Headers = {}): Promise<Answer> {
    return this.#ask(method, this.adminUrl + path, headers);
  }

  /** The output for one input; anything but 200 fails the test. */
  async infer(input: unknown, more: Readonly<Record<string, unknown>> = {}): Promise<unknown> {
    const answer = await this.post({ input, ...more });
    assert.equal(answer.status, 200, answer.text);
    return answer.json.output;
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

  /** Asks for the health until it fits. For states that no answer announces. */
  async healthy(fits: (health: Health) => boolean, withinMs = SOON_MS): Promise<Health> {
    let health = await this.health();
    await eventually(async () => fits((health = await this.health())), withinMs).catch((error: unknown) => {
      throw new Error(`health never fitted: ${JSON.stringify(health)}`, { cause: error });
    });
    return health;
  }

  signal(signal: NodeJS.Signals): void {
    this.#ending = true;
    this.#process.kill(signal);
  }

  /** kill -9, and wait until it is gone. */
  async kill(): Promise<void> {
    this.signal("SIGKILL");
    await this.exited;
  }

  /** SIGTERM, and wait for the end. */
  async stop(): Promise<Exit> {
    this.signal("SIGTERM");
    return this.exited;
  }

  async [Symbol.asyncDispose](): Promise<void> {
    const diedAlone = !this.#ending && this.#process.exitCode !== null;
    if (this.#process.exitCode === null && this.#process.signalCode === null) {
      this.signal("SIGTERM");
      using late = timer(END_MS, () => this.#process.kill("SIGKILL"));
      void late;
      await this.exited;
    }
    await this.#agent.destroy();
    await this.#owned?.[Symbol.asyncDispose]();
    assert.ok(!diedAlone, `Ferry ended by itself:\n${this.stderr()}`);
  }

  /** The exit, and every line before it; not held up by a child that inherited stderr. */
  async #end(): Promise<Exit> {
    const closed = once(this.#process, "close");
    const [code, signal] = (await once(this.#process, "exit")) as [Exit["code"], Exit["signal"]];
    const enough = new AbortController();
    await Promise.race([closed, pause(LAST_LINES_MS, undefined, { signal: enough.signal })]);
    enough.abort();
    return { code, signal };
  }

  #note(text: string): void {
    let line: LogLine;
    try {
      line = JSON.parse(text) as LogLine;
    } catch {
      line = { text };
    }
    this.lines.push(line);
    for (const wake of this.#watchers) wake();
  }

  async #ask(
    method: Dispatcher.HttpMethod,
    url: string,
    headers: Headers,
    body: string | Buffer | null = null,
    signal: AbortSignal | null = null,
  ): Promise<Answer> {
    const options = { method, headers, body, signal, dispatcher: this.#agent };
    for (;;) {
      const answer = await ask(url, options);
      if (!this.comesAgain || !answer.isFull) return answer;
      await pause(answer.json.retry_after_ms, undefined, { signal: signal ?? undefined });
    }
  }
}

export async function ask(url: string, options: Parameters<typeof request>[1]): Promise<Answer> {
  const reply = await request(url, options);
  return new Answer(reply.statusCode, reply.headers, await reply.body.text());
}

/** They read, write or ask, and end; the others run for as long as they are let, and hear signals. */
const SHORT_COMMANDS: ReadonlySet<string> = new Set(["check", "dead", "keys", "reload", "workers"]);

/** Runs one command to its end: a short one in this process, which saves a start of Node, any other in its own. */
export async function runFerry(
  args: readonly string[],
  { timeoutMs = SOON_MS, root = ROOT }: { readonly timeoutMs?: number; readonly root?: string } = {},
): Promise<Ended> {
  const output = { stdout: "", stderr: "" };
  if (root === ROOT && SHORT_COMMANDS.has(args[0]!)) {
    const code = await main(args, {
      out: (text) => void (output.stdout += text),
      err: (text) => void (output.stderr += text),
      env: process.env,
      outIsTTY: false,
      errIsTTY: false,
    });
    return { code, ...output };
  }
  const child = spawn(join(root, "bin/ferry"), args, { stdio: ["ignore", "pipe", "pipe"] });
  child.stdout.setEncoding("utf8").on("data", (text: string) => (output.stdout += text));
  child.stderr.setEncoding("utf8").on("data", (text: string) => (output.stderr += text));
  using late = timer(timeoutMs, () => child.kill("SIGKILL"));
  void late;
  const [code] = (await once(child, "close")) as [number | null];
  return { code, ...output };
}

export interface Ended {
  readonly code: number | null;
  readonly stdout: string;
  readonly stderr: string;
}

/** Writes a config with free ports, patience and a short drain beneath it, without lingering; the file's path. */
export function writeConfig(folder: Folder, config: Config): Promise<string> {
  return folder.write("ferry.yaml", wholeConfig(config));
}

/** Writes the next one over it, completed likewise, and has it read while it runs. */
export async function reloadConfig(ferry: Ferry, config: Config): Promise<void> {
  await writeFile(ferry.configFile, wholeConfig(config));
  const answer = await ferry.admin("/internal/reload", "POST");
  assert.equal(answer.status, 200, answer.text);
}

function wholeConfig(config: Config): string {
  const limits = { drainMs: 1000, lingerMs: 0, ...(config["limits"] as object | undefined) };
  const models = patientModels(config["models"]);
  const whole = { listen: "127.0.0.1:0", admin: { listen: "127.0.0.1:0" }, ...config, ...models, limits };
  return JSON.stringify(whole, null, 2);
}

/** Those that say nothing of timeouts are not about them. */
export function patientModels(models: unknown): { readonly models?: unknown } {
  if (!Array.isArray(models)) return {};
  return { models: models.map((model: object) => ({ timeouts: PATIENT, ...model })) };
}

/** A port that nobody listens on, and that nobody is given for port 0 before the test uses it. */
export async function freePort(): Promise<number> {
  const port = await takePort();
  releasePort(port);
  return port;
}

/** Polls until it holds: only for what nothing announces. */
export async function eventually(holds: () => Promise<boolean> | boolean, withinMs = SOON_MS): Promise<void> {
  const startedAt = performance.now();
  while (!(await holds())) {
    const passed = performance.now() - startedAt;
    assert.ok(passed < withinMs, `still not so after ${withinMs} ms`);
    // Seldom when it takes long: each look costs the processes under test the time that they need to get there.
    await pause(Math.min(100, 5 + passed / 10));
  }
}

/** Checks the one shape of errors, and that no inner text leaks. */
export function assertError(answer: { status: number; text: string }, status: number, code: string): Body {
  assert.equal(answer.status, status, answer.text);
  const body = JSON.parse(answer.text) as Body;
  assert.equal(body.error, code, answer.text);
  assert.ok((body.message ?? "").length > 0, answer.text);
  assert.ok((body.request_id ?? "").length > 0, answer.text);
  const known = new Set(["error", "message", "request_id", "retry_after_ms"]);
  const unknown = Object.keys(body).filter((field) => !known.has(field));
  assert.deepEqual(unknown, [], answer.text);
  assert.doesNotMatch(body.message!, /node_modules|\bat .+:\d+:\d+|\/src\//, "no stack trace, no path");
  return body;
}

function timer(ms: number, act: () => void): Disposable {
  const id = setTimeout(act, ms);
  return { [Symbol.dispose]: () => clearTimeout(id) };
}
