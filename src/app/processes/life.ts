/**
 * A child of `ferry serve --processes` (node:cluster): forking, messages, stderr lines.
 *
 * The parent hands connections out by cluster's round robin, so a hung or dead process gets none. SO_REUSEPORT would go
 * on sending it its share: with one of two stopped, 17 of 32 new connections got no answer there, and 1 of 32 here.
 * Also, a second Ferry on the port is refused, TLS tickets work at every process, and it works on every system. The
 * price is the parent's work per connection, which shows only if every request opens one (`node bench/doors.ts` has the
 * figures).
 *
 * The parent reads a child's stderr pipe to its end, so its last lines are printed and lines never interleave.
 */
import type { ChildProcess } from "node:child_process";
import cluster from "node:cluster";
import { once } from "node:events";
import type { Readable } from "node:stream";
import { StringDecoder } from "node:string_decoder";
import type { Clock } from "../clock.ts";
import type { Life, ProcessOrder, Watcher, Word } from "./processes.ts";

/**
 * V8's young generation of a child grows up to three times this (default 16). What waits for a worker then mostly dies
 * before it is copied: six gateways and a core served 72,000 requests/s instead of 59,000 (16 cores, one run each).
 */
const SEMI_SPACE_MB = 64;
/** Longer lines are split, which bounds memory. */
const MAX_LINE_CHARS = 1_048_576;
/** How long to wait for the last lines after exit, as a grandchild may hold the pipe open. */
const LAST_LINES_MS = 1000;

/** How long no connection must have been handed out, and how long that is waited for. */
const QUIET_MS = 50;
const BACKLOG_WITHIN_MS = 500;

/** Connections handed to children. */
let handedOut = 0;

/** Resolves when the connections that had come were handed out: closing the listener would cut them off. */
export async function backlogTaken(clock: Clock): Promise<void> {
  const late = clock.now() + BACKLOG_WITHIN_MS;
  for (let before = -1; before !== handedOut && clock.now() < late;) {
    before = handedOut;
    await new Promise<void>((resolve) => void clock.at(clock.now() + QUIET_MS, resolve));
  }
}

/** Forks this same program with these command line arguments. */
export function forker(words: readonly string[], clock: Clock): (watcher: Watcher) => Life {
  cluster.schedulingPolicy = cluster.SCHED_RR;
  cluster.setupPrimary({
    exec: process.argv[1]!,
    args: [...words],
    execArgv: [...process.execArgv, `--max-semi-space-size=${SEMI_SPACE_MB}`],
    // A config holds `undefined`, which JSON would drop.
    serialization: "advanced",
    stdio: ["ignore", "inherit", "pipe", "ipc"],
  });
  return (watcher) => fork(watcher, clock);
}

function fork(watcher: Watcher, clock: Clock): Life {
  const worker = cluster.fork();
  const { process: child } = worker;
  closeWhatItHeld(child);
  const failed = Promise.withResolvers<string>();
  worker.on("error", (error) => {
    // Later errors are of sends to a dead process, whose exit is reported anyway.
    if (child.pid === undefined) failed.resolve(`could not be started: ${error.message}`);
  });
  worker.on("message", (word: Word) => watcher.word(word));
  // Node makes no pipe without free file descriptors.
  if (child.stderr) readLines(child.stderr, (text) => watcher.line(text));
  const closed = once(child, "close");
  const exited = once(child, "exit").then(([code, signal]) => ending(code, signal));
  closed.catch(() => {});
  void Promise.race([exited, failed.promise]).then(async (how) => {
    const late = Promise.withResolvers<void>();
    const alarm = clock.at(clock.now() + LAST_LINES_MS, late.resolve);
    await Promise.race([
      Promise.allSettled([closed, disconnected(worker.isConnected(), child)]),
      late.promise,
    ]);
    alarm.cancel();
    watcher.gone(how);
  });
  return {
    pid: child.pid ?? 0,
    send: (order: ProcessOrder) => void (worker.isConnected() && worker.send(order, undefined, () => {})),
    kill: () => void child.kill("SIGKILL"),
  };
}

/**
 * node:cluster forgets the connection it was handing to a process that dies: it would stay open in the parent, and its
 * client hang. At most one, since the next is sent after an acknowledgement; closing one that was taken has no effect.
 */
function closeWhatItHeld(child: ChildProcess): void {
  const send = child.send.bind(child) as (...words: unknown[]) => boolean;
  let last: { close(): void } | undefined;
  child.send = (...words: unknown[]): boolean => {
    if (words[1] !== undefined && words[1] !== null) {
      handedOut++;
      last = words[1] as typeof last;
    }
    return send(...words);
  };
  child.once("exit", () => last?.close());
}

/** Resolves once all messages of an exited child have been read. */
async function disconnected(connected: boolean, child: NodeJS.EventEmitter): Promise<void> {
  if (connected) await once(child, "disconnect");
}

function ending(code: number | null, signal: string | null): string {
  return signal === null ? `ended with exit code ${code}` : `was killed by ${signal}`;
}

function readLines(stream: Readable, take: (line: string) => void): void {
  const decoder = new StringDecoder("utf8");
  let rest = "";
  stream.on("data", (chunk: Buffer) => {
    const lines = (rest + decoder.write(chunk)).split("\n");
    rest = lines.pop()!;
    for (const line of lines) take(line);
    if (rest.length <= MAX_LINE_CHARS) return;
    take(rest);
    rest = "";
  });
  stream.on("end", () => {
    rest += decoder.end();
    if (rest !== "") take(rest);
    rest = "";
  });
  stream.on("error", () => {});
}
