/**
 * What the Redis (and PostgreSQL) servers of one test process share: a folder, ports, and an end.
 *
 * The end. A server must not outlive the process that started it, however that process ends. On a normal end
 * the `exit` hook kills the servers. For a kill -9 there is the guard: one `sh` for all servers, in a session
 * of its own, that is told every pid over a pipe ("+ 123", "- 123"). When the test process is gone, the pipe
 * is at its end; the guard then kills what is still on its list and removes the folder.
 *
 * Ports. Not the ones that the OS hands out for port 0: those are in the range of outgoing connections, so
 * that any connection may take the port of a server that is down for a moment, and a client that keeps
 * trying such a port can even connect to itself. Ports are taken from 20000 to 31999, a block of 60 per
 * process, and tried by listening on them. A block is whose process listens on its first port, for as long as it
 * lives: test files that run side by side never share one, so a port that is down for a moment stays its owner's.
 */
import { spawn, type ChildProcess } from "node:child_process";
import { once } from "node:events";
import { mkdtempSync } from "node:fs";
import { createServer, type Server, type Socket } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";

const FIRST_PORT = 20_000;
const BLOCKS = 200;
const BLOCK_SIZE = 60;

const GUARD = `
live=""
while read -r sign pid; do
  if [ "$sign" = "+" ]; then live="$live $pid"; continue; fi
  rest=""
  for one in $live; do [ "$one" = "$pid" ] || rest="$rest $one"; done
  live=$rest
done
for one in $live; do kill -9 "$one"; done
rm -rf "$1"`;

interface Guard {
  readonly folder: string;
  readonly pipe: Socket;
  readonly live: Set<ChildProcess>;
}

let guard: Guard | undefined;
let nextPort = 0;
let block: Promise<number> | undefined;
const heldPorts = new Set<number>();

function theGuard(): Guard {
  if (guard !== undefined) return guard;
  const folder = mkdtempSync(join(tmpdir(), "ferry-redis-"));
  const live = new Set<ChildProcess>();
  const watcher = spawn("sh", ["-c", GUARD, "guard", folder], {
    detached: true,
    stdio: ["pipe", "ignore", "ignore"],
  });
  const pipe = watcher.stdin as Socket;
  // It waits for us; we must not wait for it.
  watcher.unref();
  pipe.unref();
  process.on("exit", () => {
    for (const child of live) child.kill("SIGKILL");
  });
  guard = { folder, pipe, live };
  return guard;
}

/** The folder of this process's servers; it goes with the process. */
export function folder(): string {
  return theGuard().folder;
}

/** A program that ends with this process and does not keep it from ending; `output` is a file descriptor. */
export function spawnGuarded(
  command: string,
  words: readonly string[],
  cwd: string,
  output: number,
  as: { readonly uid?: number; readonly gid?: number } = {},
): ChildProcess {
  const { pipe, live } = theGuard();
  const child = spawn(command, words, { cwd, stdio: ["ignore", output, output], ...as });
  live.add(child);
  child.unref();
  if (child.pid !== undefined) pipe.write(`+ ${child.pid}\n`);
  const gone = (): void => {
    if (live.delete(child) && child.pid !== undefined) pipe.write(`- ${child.pid}\n`);
  };
  child.on("exit", gone).on("error", gone);
  return child;
}

/** A port that nobody listens on; it is not given out again before `releasePort`. */
export async function takePort(): Promise<number> {
  const first = await (block ??= ownBlock());
  for (let tries = 1; tries < BLOCK_SIZE; tries++) {
    const port = first + 1 + (nextPort++ % (BLOCK_SIZE - 1));
    if (heldPorts.has(port)) continue;
    heldPorts.add(port);
    if (await isFree(port)) return port;
    heldPorts.delete(port);
  }
  throw new Error(
    `no free port from ${first + 1} to ${first + BLOCK_SIZE - 1}: dispose of servers that are done`,
  );
}

/** Its first port, on which this process listens from now on. */
async function ownBlock(): Promise<number> {
  for (let tries = 0; tries < BLOCKS; tries++) {
    const port = FIRST_PORT + ((process.pid + tries) % BLOCKS) * BLOCK_SIZE;
    const owner = await listenOn(port);
    if (owner === undefined) continue;
    owner.unref();
    return port;
  }
  throw new Error(`all ${BLOCKS} blocks of ports are taken: end the tests that still run`);
}

export function releasePort(port: number): void {
  heldPorts.delete(port);
}

async function isFree(port: number): Promise<boolean> {
  const probe = await listenOn(port);
  if (probe === undefined) return false;
  probe.close();
  await once(probe, "close");
  return true;
}

/** Undefined where somebody else does. */
async function listenOn(port: number): Promise<Server | undefined> {
  const server = createServer();
  try {
    // Rejects on "error", such as EADDRINUSE.
    await once(server.listen(port, "127.0.0.1"), "listening");
    return server;
  } catch {
    return undefined;
  }
}
