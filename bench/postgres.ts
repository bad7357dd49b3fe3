/**
 * A PostgreSQL of our own for the request log: its defaults, one database, nobody asked for a password, on a free
 * port of 127.0.0.1. Its files lie in the benchmark's folder and go with it.
 *
 * It refuses to run as root; there it runs as the user `postgres` that its package makes.
 */
import { execFileSync } from "node:child_process";
import { chmodSync, chownSync, mkdtempSync } from "node:fs";
import { join } from "node:path";
import { postgresProgram, postgresUser } from "../test/observe/postgres/program.ts";
import { Child, type ChildOptions } from "./process.ts";
import { freePorts, host } from "./server.ts";

const readyTimeoutMs = 30_000;
const user = "ferry";

export class PostgresServer implements AsyncDisposable {
  readonly pid: number;
  readonly url: string;
  readonly #child: Child;
  readonly #port: number;

  private constructor(child: Child, port: number) {
    this.#child = child;
    this.#port = port;
    this.pid = child.pid;
    this.url = `postgres://${user}@${host}:${port}/postgres`;
  }

  static async start(dir: string, options: Pick<ChildOptions, "core">): Promise<PostgresServer> {
    const [port] = await freePorts(1);
    const folder = mkdtempSync(join(dir, "postgres-"));
    const as = postgresUser();
    if (as !== undefined) {
      // Its user must be able to reach its folder, and to do more there than that.
      chmodSync(dir, 0o711);
      chownSync(folder, as.uid, as.gid);
    }
    const words = ["-D", folder, "-U", user, "-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync"];
    execFileSync(postgresProgram("initdb"), words, { ...as, cwd: folder, stdio: "pipe" });
    const settings = ["-c", `listen_addresses=${host}`, "-c", "unix_socket_directories="];
    const server = [postgresProgram("postgres"), "-D", folder, "-p", String(port), ...settings];
    // `setpriv` becomes what it starts, so that the process is the server's.
    const [program, file, ...rest] =
      as === undefined
        ? server
        : ["setpriv", `--reuid=${as.uid}`, `--regid=${as.gid}`, "--clear-groups", ...server];
    const child = new Child(file!, rest, { ...options, program });
    try {
      await child.line((line) => line.includes("ready to accept connections"), readyTimeoutMs);
    } catch (error) {
      await child[Symbol.asyncDispose]();
      throw error;
    }
    return new PostgresServer(child, port!);
  }

  /** Rows written so far to whatever tables there are; it may be a second behind. */
  rows(): number {
    const sql = "SELECT coalesce(sum(n_tup_ins), 0) FROM pg_stat_user_tables";
    const words = ["-h", host, "-p", String(this.#port), "-U", user, "-d", "postgres", "-tAc", sql];
    return Number(execFileSync(postgresProgram("psql"), words, { encoding: "utf8" }));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.#child.signal("SIGINT"); // does not wait for those who are connected
    await this.#child[Symbol.asyncDispose]();
  }
}
