/**
 * Three ways in which two processes can share one port, measured: why `ferry serve --processes` takes the first.
 *
 *   node bench/doors.ts          a table, in about a minute
 *
 *   round robin   node:cluster as it is: a parent takes the connections and hands them out in turn
 *   one socket    node:cluster with SCHED_NONE: both processes take from one listening socket
 *   reuse port    SO_REUSEPORT: each process has a listening socket, the kernel draws one by a hash
 *
 * The server is the echo of `floor.ts`, so that the ways differ as much as they can. Four figures each: how evenly
 * kept connections are spread (1/2 is even; the mean and the worst of the rounds), answers a second on kept
 * connections, connections a second where each carries one request, and how many of new connections get no answer
 * while one of the two processes hangs (SIGSTOP). Nothing is pinned; the client runs on the same cores.
 */
import cluster from "node:cluster";
import { fork } from "node:child_process";
import { once } from "node:events";
import { createServer } from "node:http";
import { connect, type AddressInfo, type Socket } from "node:net";
import { measure } from "./generator.ts";
import { Child, killChildren } from "./process.ts";
import { freePorts, host } from "./server.ts";

const ways = ["round robin", "one socket", "reuse port"] as const;
type Way = (typeof ways)[number];

const processes = 2;
const connections = 32;
const rounds = 10;
const seconds = 4;
/** An echo takes well under a millisecond. */
const hangsAfterMs = 1000;

interface Ready {
  readonly port: number;
  readonly pids: readonly number[];
}

/** The parent of the two: prints where they are. */
async function serve(way: Way): Promise<void> {
  const [port] = await freePorts(1);
  if (way === "one socket") cluster.schedulingPolicy = cluster.SCHED_NONE;
  const env = { DOORS_PORT: String(port), DOORS_WAY: way };
  const children = Array.from({ length: processes }, () =>
    way === "reuse port"
      ? fork(import.meta.filename, { env: { ...process.env, ...env } })
      : cluster.fork(env).process,
  );
  await Promise.all(children.map((child) => once(child, "message")));
  process.on("SIGTERM", () => {
    for (const child of children) child.kill("SIGKILL");
    process.exit(0);
  });
  const ready: Ready = { port: port!, pids: children.map(({ pid }) => pid!) };
  process.stderr.write(`${JSON.stringify({ msg: "ready", ...ready })}\n`);
}

/** One of the two. */
function echo(port: number, way: string): void {
  const server = createServer((request, response) => {
    const chunks: Buffer[] = [];
    request.on("data", (chunk: Buffer) => chunks.push(chunk));
    request.on("end", () => {
      const body = Buffer.concat(chunks);
      response.writeHead(200, { "x-pid": process.pid, "content-length": body.length }).end(body);
    });
  });
  server.listen({ port, host, backlog: 4096, reusePort: way === "reuse port" }, () => {
    process.send?.((server.address() as AddressInfo).port);
  });
}

/** Opens so many connections and asks once on each: who answers, 0 for nobody in time. All are closed then. */
async function ask(port: number, count: number): Promise<number[]> {
  const sockets: Socket[] = [];
  const answers = Array.from({ length: count }, async () => {
    const socket = connect(port, host);
    sockets.push(socket);
    socket.on("error", () => {});
    socket.write(`GET / HTTP/1.1\r\nHost: ${host}\r\n\r\n`);
    const chunks = await once(socket, "data", { signal: AbortSignal.timeout(hangsAfterMs) }).catch(() => []);
    return Number(/x-pid: (\d+)/.exec(String(chunks[0] ?? ""))?.[1] ?? 0);
  });
  const pids = await Promise.all(answers);
  for (const socket of sockets) socket.destroy();
  return pids;
}

/** Each caller opens a connection, asks, reads to its end, and opens the next. */
async function oneEach(port: number): Promise<number> {
  const until = performance.now() + seconds * 1000;
  let done = 0;
  const caller = async (): Promise<void> => {
    while (performance.now() < until) {
      const socket = connect(port, host);
      socket.end(`GET / HTTP/1.1\r\nHost: ${host}\r\nConnection: close\r\n\r\n`);
      socket.resume();
      await once(socket, "close");
      done++;
    }
  };
  await Promise.all(Array.from({ length: connections }, caller));
  return done / seconds;
}

async function row(way: Way): Promise<string> {
  await using child = new Child(import.meta.filename, ["serve", way]);
  const ready = JSON.parse(await child.line((line) => line.includes('"ready"'), 10_000)) as Ready;
  const { port, pids } = ready;
  const most: number[] = [];
  for (let round = 0; round < rounds; round++) {
    const answered = await ask(port, connections);
    const counts = pids.map((pid) => answered.filter((other) => other === pid).length);
    most.push(Math.max(...counts) / connections);
  }
  const load = { kind: "closed", callers: connections } as const;
  const times = { warmMs: 2000, measureMs: seconds * 1000, drainMs: 1000 };
  const target = { host, port, path: "/" };
  const kept = await measure(
    { target, bodyBytes: 2048, verify: true, ...times, load },
    { serverPid: child.pid },
  );
  const fresh = await oneEach(port);
  process.kill(pids[0]!, "SIGSTOP");
  const stuck = (await ask(port, connections)).filter((pid) => pid === 0).length;
  process.kill(pids[0]!, "SIGCONT");
  const percent = (share: number): string => `${(share * 100).toFixed(0)} %`;
  const mean = most.reduce((sum, share) => sum + share, 0) / rounds;
  const cells = [
    way,
    `${percent(mean)}, ${percent(Math.max(...most))}`,
    Math.round(kept.rate).toLocaleString("en-US"),
    Math.round(fresh).toLocaleString("en-US"),
    `${stuck} of ${connections}`,
  ];
  return `| ${cells.join(" | ")} |\n`;
}

async function table(): Promise<void> {
  process.on("exit", killChildren);
  process.stdout.write(
    `| way | busier one's share of ${connections}, mean and worst | answers/s, kept | connections/s | unanswered, one hangs |\n` +
      "|---|---|---|---|---|\n",
  );
  for (const way of ways) process.stdout.write(await row(way));
}

if (process.env["DOORS_PORT"] !== undefined)
  echo(Number(process.env["DOORS_PORT"]), process.env["DOORS_WAY"]!);
else if (process.argv[2] === "serve") await serve(process.argv[3] as Way);
else await table();
