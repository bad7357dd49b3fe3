/**
 * One PostgreSQL server as a child process, with everything that a test may do to it.
 *
 * `initdb` runs once for each test process, without waiting for the disk; every server gets a copy of that. It
 * refuses to run as root, so for root it runs as the user `postgres`, which Debian's package makes.
 */
import { type ChildProcess, execFileSync } from "node:child_process";
import { once } from "node:events";
import { chmodSync, chownSync, mkdirSync, writeFileSync } from "node:fs";
import { open, readFile, rm } from "node:fs/promises";
import { join } from "node:path";
import { setImmediate as turn } from "node:timers/promises";
import postgres from "postgres";
import { postgresProgram, postgresUser } from "./program.ts";
import type { Pair } from "../../fixtures/certificates.ts";
import { folder, releasePort, spawnGuarded, takePort } from "../../engine/redis-client/guard.ts";
import { until } from "../../engine/redis-client/server.ts";

const USER = "ferry";
const PASSWORD = "pass word/%";
const START_LIMIT_MS = 60_000;

let template: string | undefined;

function makeTemplate(): string {
  if (template !== undefined) return template;
  const as = postgresUser() ?? {};
  // The servers' own user must be able to reach its folders.
  chmodSync(folder(), 0o711);
  const path = join(folder(), "postgres-template");
  ownFolder(path, as);
  const password = join(folder(), "postgres-password");
  writeFileSync(password, PASSWORD);
  const words = ["-D", path, "-U", USER, "-A", "scram-sha-256", `--pwfile=${password}`, "-E", "UTF8"];
  words.push("--no-locale", "--no-sync");
  execFileSync(postgresProgram("initdb"), words, { ...as, cwd: path, stdio: "pipe" });
  return (template = path);
}

function ownFolder(path: string, as: { uid?: number; gid?: number }): void {
  mkdirSync(path, { mode: 0o700 });
  own(path, as);
}

function own(path: string, { uid, gid }: { uid?: number; gid?: number }): void {
  if (uid !== undefined && gid !== undefined) chownSync(path, uid, gid);
}

export class PostgresServer implements AsyncDisposable {
  readonly port: number;
  readonly url: string;
  /** For what a test looks up and changes itself. */
  readonly sql: postgres.Sql;
  readonly #folder: string;
  readonly #as = postgresUser() ?? {};
  #child: ChildProcess | undefined;
  #tls = false;

  private constructor(port: number) {
    this.port = port;
    this.url = `postgres://${USER}:${encodeURIComponent(PASSWORD)}@127.0.0.1:${port}/postgres`;
    this.#folder = join(folder(), `postgres-${port}`);
    this.sql = postgres(this.url, { max: 2, idle_timeout: 1, onnotice: () => {}, backoff: () => 0.05 });
  }

  /** A place for a server, which does not run yet. */
  static async prepare(): Promise<PostgresServer> {
    const from = makeTemplate();
    const server = new PostgresServer(await takePort());
    ownFolder(server.#folder, server.#as);
    execFileSync("cp", ["-a", `${from}/.`, server.#folder]);
    return server;
  }

  static async start(): Promise<PostgresServer> {
    const server = await PostgresServer.prepare();
    await server.start();
    return server;
  }

  /** It takes connections with TLS and without; set before it starts. */
  useTls({ cert, key }: Pair): void {
    for (const [name, text] of [
      ["server.crt", cert],
      ["server.key", key],
    ] as const) {
      const path = join(this.#folder, name);
      writeFileSync(path, text, { mode: 0o600 });
      own(path, this.#as);
    }
    this.#tls = true;
  }

  async start(): Promise<void> {
    const log = await open(join(folder(), `postgres-${this.port}.log`), "a");
    const settings = {
      port: this.port,
      listen_addresses: "127.0.0.1",
      unix_socket_directories: "",
      fsync: "off",
      full_page_writes: "off",
      shared_buffers: "16MB",
      max_connections: 20,
      ssl: this.#tls ? "on" : "off",
    };
    const words = Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${value}`]);
    const child = spawnGuarded(
      postgresProgram("postgres"),
      ["-D", this.#folder, ...words],
      this.#folder,
      log.fd,
      this.#as,
    );
    this.#child = child;
    await log.close();
    let ended = false;
    child.once("exit", () => {
      ended = true;
      if (this.#child === child) this.#child = undefined;
    });
    const ready = async (): Promise<boolean> => ended || (await this.sql`SELECT 1`).length === 1;
    await until(ready, `PostgreSQL on port ${this.port} answers`, START_LIMIT_MS);
    if (ended) throw new Error(`PostgreSQL did not start; its log ends with:\n${await this.#said()}`);
  }

  /** kill -9, and wait until it and all that it forked are gone. */
  async kill(): Promise<void> {
    const child = this.#child;
    if (child === undefined) return;
    child.ref();
    const ended = once(child, "exit");
    // Its children see that it is gone and end by themselves; some seconds later, so they are told.
    for (const pid of [child.pid!, ...this.#forked()]) kill(pid, "SIGKILL");
    await ended;
  }

  /** SIGSTOP to it and all that it forked: connections stay open and nobody answers. */
  pause(): void {
    for (const pid of this.#all()) kill(pid, "SIGSTOP");
  }

  resume(): void {
    for (const pid of this.#all()) kill(pid, "SIGCONT");
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await this.kill();
    await this.sql.end({ timeout: 0 });
    await turn();
    await rm(this.#folder, { recursive: true, force: true, maxRetries: 3 });
    releasePort(this.port);
  }

  #all(): number[] {
    return this.#child?.pid === undefined ? [] : [this.#child.pid, ...this.#forked()];
  }

  #forked(): number[] {
    const pid = this.#child?.pid;
    if (pid === undefined) return [];
    try {
      const found = execFileSync("ps", ["-o", "pid=", "--ppid", String(pid)], { encoding: "utf8" });
      return found.trim().split(/\s+/).map(Number);
    } catch {
      return [];
    }
  }

  async #said(): Promise<string> {
    const log = await readFile(join(folder(), `postgres-${this.port}.log`), "utf8").catch(() => "");
    return log.slice(-1000).trimEnd();
  }
}

function kill(pid: number, signal: NodeJS.Signals): void {
  try {
    process.kill(pid, signal);
  } catch {
    // It has ended by itself.
  }
}
