/**
 * A process of `ferry serve --processes`, as node:cluster makes it: forked, spoken to, and heard line by line.
 *
 * Connections are handed out by the parent in turn to whoever is free to take one (cluster's round robin). So a
 * process that hangs or dies is given none, where SO_REUSEPORT would go on sending it its share: with one of two
 * stopped, 17 of 32 new connections got no answer there, and 1 of 32 here. A second Ferry on the same port is
 * refused, TLS tickets are good at every process, and it works on every system. The price is the parent's work for
 * each connection, which shows only where every request opens a new one (`node bench/doors.ts` has the figures).
 *
 * A process's stderr is a pipe that the parent reads to its end: what it said before it died was said, and a line is
 * never torn by another's.
 */
import type { ChildProcess } from "node:child_process";
import cluster from "node:cluster";
import { once } from "node:events";
import type { Readable } from "node:stream";
import { StringDecoder } from "node:string_decoder";
import type { Clock } from "../clock.ts";
import type { Life, ProcessOrder, Watcher, Word } from "./processes.ts";

/** A longer line comes out in pieces: nothing is lost and nothing grows. */
const MAX_LINE_CHARS = 1_048_576;
/** After its exit the last lines are waited for, but not for a child of its own that holds the pipe open. */
const LAST_LINES_MS = 1000;

/** What makes a process of the same program as this one, with these words on its command line. */
export function forker(words: readonly string[], clock: Clock): (watcher: Watcher) => Life {
  cluster.schedulingPolicy = cluster.SCHED_RR;
  cluster.setupPrimary({
    exec: process.argv[1]!,
    args: [...words],
    // A config has `undefined` in it, which JSON would drop.
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
    // Later ones are of words that found it dead, and its end is heard of anyway.
    if (child.pid === undefined) failed.resolve(`could not be started: ${error.message}`);
  });
  worker.on("message", (word: Word) => watcher.word(word));
  // Node makes no pipe when it is out of file descriptors.
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
 * node:cluster forgets the connection that it was handing to a process that dies: it would stay open in the parent,
 * and its client wait for an answer for ever. There is at most one, since the next is handed over when the process has
 * said that it has the last; to close one that it had taken changes nothing.
 */
function closeWhatItHeld(child: ChildProcess): void {
  const send = child.send.bind(child) as (...words: unknown[]) => boolean;
  let last: { close(): void } | undefined;
  child.send = (...words: unknown[]): boolean => {
    if (words[1] !== undefined && words[1] !== null) last = words[1] as typeof last;
    return send(...words);
  };
  child.once("exit", () => last?.close());
}

/** Its last words have been read then. */
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
