/**
 * One Redis server as a child process, with everything that a test may do to it.
 *
 * Its files are in a folder of its own, redis.log among them. A server that starts is waited for by asking
 * it; what it said is in the error when it does not start. A port that somebody else took in the meantime is
 * replaced at the first start, and waited for at a restart.
 */
import type { ChildProcess } from "node:child_process";
import { once } from "node:events";
import { mkdir, open, readFile, rm, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { scheduler } from "node:timers/promises";
import { exchange, textOf, type Reply } from "./exchange.ts";
import { folder, releasePort, spawnGuarded, takePort } from "./guard.ts";

export type Settings = Readonly<Record<string, string>>;

export const HOST = "127.0.0.1";
const START_LIMIT_MS = 60_000;
const END_LIMIT_MS = 60_000;
const REPLY_LIMIT_MS = 60_000;
/** Short: whoever else listens on the port may never answer. */
const READY_LIMIT_MS = 5000;
const UNTIL_LIMIT_MS = 60_000;
const PORT_TRIES = 5;

const DEFAULTS: Settings = {
  bind: HOST,
  appendonly: "yes",
  // Not `everysec`: while a slow disk syncs, Redis holds back its writes for up to two seconds, and a kill -9 then takes
  // what it has acknowledged with it. Without syncs every reply's write is with the kernel.
  appendfsync: "no",
  save: "",
  "enable-debug-command": "yes",
  // A primary would wait ten seconds for a replica that is behind, or paused, before it ends.
  "shutdown-timeout": "0",
  // A replica's first copy would start five seconds later, in case that more replicas come.
  "repl-diskless-sync-delay": "0",
  // The command line then names the folder for as long as the server lives: pgrep -f finds it.
  "set-proc-title": "no",
};

/** Asks until `check` says true. An error counts as "not yet"; the last one is the cause when time is up. */
export async function until(
  check: () => boolean | Promise<boolean>,
  what = "what the test waits for",
  limitMs = UNTIL_LIMIT_MS,
): Promise<void> {
  const startedAt = performance.now();
  for (;;) {
    let cause: unknown;
    try {
      if (await check()) return;
    } catch (error) {
      cause = error;
    }
    const passed = performance.now() - startedAt;
    if (passed >= limitMs) throw new Error(`${what}: not within ${limitMs} ms`, { cause });
    // Seldom when it takes long: six nodes that are asked 200 times a second take a core.
    await scheduler.wait(Math.min(50, 2 + passed / 10));
  }
}

class PortTaken extends Error {}

export class Server implements AsyncDisposable {
  readonly port: number;
  /** The cluster's bus; free, and unused, in a server that is alone. */
  readonly busPort: number;
  readonly url: string;
  readonly password: string;
  readonly #folder: string;
  #child: ChildProcess | undefined;
  #paused = false;

  private constructor(port: number, busPort: number, settings: Settings) {
    this.port = port;
    this.busPort = busPort;
    this.password = settings["requirepass"] ?? "";
    const user = this.password === "" ? "" : `:${encodeURIComponent(this.password)}@`;
    this.url = `redis://${user}${HOST}:${port}`;
    this.#folder = join(folder(), String(port));
  }

  static async start(settings: Settings): Promise<Server> {
    for (let tries = 1; ; tries++) {
      const server = new Server(await takePort(), await takePort(), settings);
      try {
        await server.#configure(settings);
        await server.#start();
        return server;
      } catch (error) {
        await server[Symbol.asyncDispose]();
        if (!(error instanceof PortTaken) || tries === PORT_TRIES) throw error;
      }
    }
  }

  /** Changes with every restart. */
  get pid(): number {
    if (this.#child?.pid === undefined) throw new Error(`redis-server on port ${this.port} does not run`);
    return this.#child.pid;
  }

  /** It runs and is not paused, as far as this object did it. */
  get answers(): boolean {
    return this.#child !== undefined && !this.#paused;
  }

  /** The reply as text, as redis-cli prints it to a pipe; rejects when the reply is an error. */
  async cli(...words: string[]): Promise<string> {
    return textOf(await this.ask(...words));
  }

  /** The reply as it is. */
  ask(...words: string[]): Promise<Reply> {
    return this.#ask(words, REPLY_LIMIT_MS);
  }

  /** kill -9. What Redis wrote is in the file; what the disk does not have yet is with the kernel. */
  async kill(): Promise<void> {
    await this.#end("SIGKILL");
  }

  /** SIGTERM: writes and syncs its file, then ends. A paused server is resumed for it. */
  async stop(): Promise<void> {
    this.resume();
    await this.#end("SIGTERM");
  }

  /** SIGSTOP: its connections stay open and nobody answers. */
  pause(): void {
    this.#paused = process.kill(this.pid, "SIGSTOP");
  }

  resume(): void {
    this.#child?.kill("SIGCONT");
    this.#paused = false;
  }

  /** Starts it again where it was, after `stop` if it still runs; resolves when its data is loaded. */
  async restart(): Promise<void> {
    await this.stop();
    // Somebody who looks for a free port may stand on ours for a moment.
    for (let tries = 1; ; tries++) {
      try {
        return await this.#start();
      } catch (error) {
        if (!(error instanceof PortTaken) || tries === PORT_TRIES) throw error;
        await scheduler.wait(20);
      }
    }
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
    await rm(this.#folder, { recursive: true, force: true, maxRetries: 3 });
    releasePort(this.port);
    releasePort(this.busPort);
  }

  async #configure(settings: Settings): Promise<void> {
    const password = this.password === "" ? {} : { masterauth: this.password };
    const lines = { ...DEFAULTS, port: String(this.port), ...password, ...settings };
    if (settings["cluster-enabled"] === "yes") Object.assign(lines, { "cluster-port": String(this.busPort) });
    const text = Object.entries(lines).map(([name, value]) => `${name} ${value === "" ? '""' : value}\n`);
    await mkdir(this.#folder);
    await writeFile(join(this.#folder, "redis.conf"), text.join(""));
  }

  async #start(): Promise<void> {
    // Its output, not its own log file: there it does not write what is wrong with its settings.
    const log = await open(join(this.#folder, "redis.log"), "w");
    const child = spawnGuarded("redis-server", [join(this.#folder, "redis.conf")], this.#folder, log.fd);
    this.#child = child;
    let failed = "";
    child.on("error", (error) => (failed = error.message));
    child.on("exit", () => {
      failed ||= "it ended";
      if (this.#child === child) this.#child = undefined;
    });
    await log.close();
    const ready = async (): Promise<boolean> => failed !== "" || (await this.#isReady());
    await until(ready, `redis-server on port ${this.port} answers`, START_LIMIT_MS);
    if (failed === "") return;
    const said = await this.#said();
    if (/address already in use/i.test(said))
      throw new PortTaken(`port ${this.port} is taken by another program`);
    throw new Error(`redis-server did not start: ${failed}; its log ends with:\n${said}`);
  }

  async #ask(words: readonly string[], limitMs: number): Promise<Reply> {
    const login = this.password === "" ? [] : [["AUTH", this.password]];
    return (await exchange(this.port, [...login, words], limitMs)).at(-1)!;
  }

  /** It is ours that answers, not somebody else's server on the same port, and its data is loaded. */
  async #isReady(): Promise<boolean> {
    const info = textOf(await this.#ask(["INFO"], READY_LIMIT_MS)).split("\r\n");
    return info.includes(`process_id:${this.#child?.pid}`) && info.includes("loading:0");
  }

  async #said(): Promise<string> {
    const log = await readFile(join(this.#folder, "redis.log"), "utf8").catch(() => "");
    return log.slice(-1000).trimEnd();
  }

  async #end(signal: NodeJS.Signals): Promise<void> {
    const child = this.#child;
    this.#paused = false;
    if (child?.pid === undefined) return;
    const ended = once(child, "exit").then(() => true);
    // For as long as somebody waits for its end, it keeps this process alive.
    child.ref();
    const endsAt = performance.now() + END_LIMIT_MS;
    // Again and again: a replica that has just got its first copy refuses ("Writing initial AOF").
    do {
      if (performance.now() > endsAt)
        throw new Error(
          `redis-server on port ${this.port} outlives ${signal}; its log ends with:\n${await this.#said()}`,
        );
      child.kill(signal);
    } while (!(await Promise.race([ended, scheduler.wait(50)])));
  }
}

/** Up in 15 ms, the first one of a process in 40 ms. */
export function startServer(settings: Settings = {}): Promise<Server> {
  return Server.start(settings);
}
