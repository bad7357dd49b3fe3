/**
 * Child processes of the benchmark: started on a chosen core, watched, and always ended.
 *
 * A child is Node, or another `program`, running one file. `core` pins it with `taskset`, `maxFiles` raises
 * its limit of open files; both go through `exec`, so `pid` is the program itself and what /proc says of it
 * is what it used. A child that is not stopped by its owner is killed when this process exits.
 */
import { spawn, spawnSync, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { readdirSync, readFileSync } from "node:fs";
import { createInterface } from "node:readline";
import type { Readable } from "node:stream";

export interface ChildOptions {
  readonly core?: number | undefined;
  readonly maxFiles?: number | undefined;
  /** What runs the file, if not Node. Its lines on stdout are then heard like those on stderr. */
  readonly program?: string | undefined;
  /** Beside ours. */
  readonly env?: Readonly<Record<string, string>> | undefined;
}

/** How much of what a child says is kept for the error that tells of its death. */
const keptLines = 20;
const running = new Set<ChildProcess>();

export class Child implements AsyncDisposable {
  readonly pid: number;
  readonly #process: ChildProcess;
  readonly #exited: Promise<unknown>;
  readonly #said: string[] = [];
  readonly #listeners = new Set<(line: string) => void>();
  #stdout = "";

  constructor(file: string, args: readonly string[], options: ChildOptions = {}) {
    const [command, ...rest] = commandLine(file, args, options);
    const env = { ...process.env, ...options.env };
    this.#process = spawn(command!, rest, { stdio: ["pipe", "pipe", "pipe"], env });
    this.#exited = once(this.#process, "close");
    running.add(this.#process);
    this.#process.on("close", () => running.delete(this.#process));
    this.#process.stdout!.setEncoding("utf8").on("data", (text: string) => (this.#stdout += text));
    this.#hear(this.#process.stderr!);
    if (options.program !== undefined) this.#hear(this.#process.stdout!);
    // A pipe to a child that has died is no news: its exit code says so.
    this.#process.stdin!.on("error", () => {});
    if (this.#process.pid === undefined) {
      this.#exited.catch(() => {}); // nobody will wait for what never began
      throw new Error(`cannot start ${command}: install it, or put it on PATH`);
    }
    this.pid = this.#process.pid;
  }

  #hear(input: Readable): void {
    createInterface({ input }).on("line", (line) => {
      this.#said.push(line);
      if (this.#said.length > keptLines) this.#said.shift();
      for (const listener of this.#listeners) listener(line);
    });
  }

  /** Calls `listener` with every later line that it says; returns what ends that. */
  onLine(listener: (line: string) => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** The first line that `accepts`; rejects when the child dies or `timeoutMs` pass before. */
  async line(accepts: (line: string) => boolean, timeoutMs: number): Promise<string> {
    const found = Promise.withResolvers<string>();
    const stop = this.onLine((line) => accepts(line) && found.resolve(line));
    const timer = setTimeout(() => found.reject(this.#error(`said nothing for ${timeoutMs} ms`)), timeoutMs);
    const died = this.#exited.then(() => Promise.reject(this.#error(`ended with ${this.#ending()}`)));
    try {
      return await Promise.race([found.promise, died]);
    } finally {
      clearTimeout(timer);
      stop();
    }
  }

  /** Waits for the end and returns stdout; a child that fails or takes longer is an Error. */
  async output(timeoutMs: number): Promise<string> {
    let late = false;
    const timer = setTimeout(() => (late = this.#process.kill("SIGKILL")), timeoutMs);
    await this.#exited;
    clearTimeout(timer);
    if (late) throw this.#error(`did not end in ${timeoutMs} ms`);
    if (this.#process.exitCode !== 0) throw this.#error(`ended with ${this.#ending()}`);
    return this.#stdout;
  }

  write(text: string): void {
    this.#process.stdin!.write(text);
  }

  signal(name: NodeJS.Signals): void {
    this.#process.kill(name);
  }

  /** SIGTERM, and SIGKILL when that is not enough. */
  async [Symbol.asyncDispose](): Promise<void> {
    this.#process.kill("SIGTERM");
    const timer = setTimeout(() => this.#process.kill("SIGKILL"), 10_000);
    await this.#exited;
    clearTimeout(timer);
  }

  #ending(): string {
    return this.#process.signalCode ?? `exit code ${this.#process.exitCode}`;
  }

  #error(what: string): Error {
    const command = this.#process.spawnargs.join(" ").slice(0, 200);
    return new Error(`${command}: ${what}\n${this.#said.join("\n")}`);
  }
}

/** For the end of this process, however it comes. Synchronous. */
export function killChildren(): void {
  for (const child of running) child.kill("SIGKILL");
}

function commandLine(file: string, args: readonly string[], options: ChildOptions): string[] {
  const bare = [options.program ?? process.execPath, file, ...args];
  const pinned = options.core === undefined ? bare : ["taskset", "-c", String(options.core), ...bare];
  if (options.maxFiles === undefined) return pinned;
  // Above the hard limit only root may go; then the hard limit must do, and openFiles() tells.
  const script = 'ulimit -n "$0" 2>/dev/null || ulimit -n "$(ulimit -H -n)"; exec "$@"';
  return ["sh", "-c", script, String(options.maxFiles), ...pinned];
}

/** One core for the server, another for the generator. */
export interface Cores {
  readonly server: number;
  readonly generator: number;
}

/** The first two cores this process may use; undefined without `taskset`, with one core only, or by wish. */
export function pickCores(): Cores | undefined {
  if (process.env["BENCH_PIN"] === "no") return undefined;
  if (spawnSync("taskset", ["--version"]).status !== 0) return undefined;
  const allowed = /^Cpus_allowed_list:\s*(.+)$/m.exec(proc(process.pid, "status"))?.[1] ?? "";
  const cores = allowed.split(",").flatMap((range) => {
    const [first = NaN, last = first] = range.split("-").map(Number);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, i) => first + i);
  });
  const [server, generator] = cores;
  return server === undefined || generator === undefined ? undefined : { server, generator };
}

/** User and system time of a process so far, in steps of 10 ms. */
export function cpuMs(pid: number): number {
  const fields = stat(pid);
  return (Number(fields[11]) + Number(fields[12])) * 10;
}

/** The same of the children of a process, those that have ended included. */
export function childrenCpuMs(pid: number): number {
  const fields = stat(pid);
  const ended = (Number(fields[13]) + Number(fields[14])) * 10;
  return childPids(pid).reduce((sum, child) => {
    try {
      return sum + cpuMs(child);
    } catch {
      return sum; // it has ended since the folder was read
    }
  }, ended);
}

/** Those that run now. */
export function childPids(pid: number): number[] {
  return readdirSync("/proc")
    .filter((name) => /^\d+$/.test(name))
    .map(Number)
    .filter((other) => {
      try {
        return stat(other)[1] === String(pid);
      } catch {
        return false;
      }
    });
}

/** Its children, their children and so on, without itself. */
export function descendants(pid: number): number[] {
  return childPids(pid).flatMap((child) => [child, ...descendants(child)]);
}

/** Program and arguments; empty for a process that has ended. */
export function commandOf(pid: number): string[] {
  try {
    return proc(pid, "cmdline").split("\0").slice(0, -1);
  } catch {
    return [];
  }
}

/** From the third field on. The second, the name in parentheses, may hold spaces: count from behind it. */
function stat(pid: number): string[] {
  const text = proc(pid, "stat");
  return text.slice(text.lastIndexOf(")") + 2).split(" ");
}

/**
 * What all processes of this machine together have used so far, without interrupts (loopback traffic
 * is partly served there), and what the hypervisor gave to others.
 */
export function machineCpuMs(): { usedMs: number; stolenMs: number } {
  const line = readFileSync("/proc/stat", "utf8").split("\n", 1)[0]!;
  const [user, nice, system, , , , , steal] = line
    .split(/\s+/)
    .slice(1)
    .map((ticks) => Number(ticks) * 10);
  return { usedMs: user! + nice! + system!, stolenMs: steal! };
}

export function rssKb(pid: number): number {
  return Number(/^VmRSS:\s*(\d+) kB$/m.exec(proc(pid, "status"))?.[1]);
}

/** The limit of open files a process runs under. */
export function openFiles(pid: number): number {
  return Number(/^Max open files\s+(\d+)/m.exec(proc(pid, "limits"))?.[1]);
}

function proc(pid: number, name: string): string {
  return readFileSync(`/proc/${pid}/${name}`, "utf8");
}
