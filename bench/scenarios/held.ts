/**
 * `held`: what ten thousand waiting callers cost in memory.
 *
 * A held connection is a request that a worker has not answered yet: socket, parsed request, task and
 * timers. An idle one is a keep-alive connection between two requests. Each is measured on a server of
 * its own: warmed up with 1,000 requests over 64 connections and left alone until its RSS stands still
 * (`before`), then given the connections and left alone again (`after`). The figure is (after - before) /
 * connections; memory that the kernel spends on sockets is not in it.
 *
 * Two models: `slow` never comes back, so nothing that is held gets answered; `fast` serves the warm-up
 * and the idle connections. All timeouts are far beyond the scenario's end.
 */
import { once } from "node:events";
import { createServer } from "node:http";
import type { AddressInfo } from "node:net";
import { setTimeout as pause } from "node:timers/promises";
import { join } from "node:path";
import { measure } from "../generator.ts";
import type { HoldSpec, HoldState } from "../hold.ts";
import { Child, openFiles, rssKb } from "../process.ts";
import { FerryServer } from "../server.ts";
import { figure, type Bench, type Figure, type Report, type Scenario } from "../scenario.ts";

const longMs = 600_000;
const maxFiles = 20_000;
/** Files a server has open beside its connections, with room to spare. */
const otherFiles = 200;

export const held: Scenario = {
  name: "held",
  summary: "10,000 callers waiting for their answer, then 10,000 idle keep-alive connections: memory of each",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const wanted = bench.quick ? 2000 : 10_000;
  const figures: Figure[] = [];
  const notes: string[] = [];
  for (const kind of ["held", "idle"] as const) {
    const { connections, state, beforeKb, afterKb } = await hold(bench, kind, wanted);
    if (connections < wanted)
      notes.push(`${kind}: only ${connections} connections, for the limit of open files`);
    if (state.open < connections) {
      notes.push(`${kind}: ${state.closed} connections ended; answers ${JSON.stringify(state.statuses)}`);
    }
    const name = kind === "held" ? "held request" : "idle connection";
    const eachKb = (afterKb - beforeKb) / connections;
    figures.push(
      kind === "held"
        ? figure(`${name}, memory`, eachKb, "KB", "<=", 40)
        : figure(`${name}, memory`, eachKb, "KB"),
      figure(
        `${name}s open`,
        kind === "held" ? state.open - state.answered : state.open,
        "count",
        ">=",
        wanted,
      ),
      figure(`server before, ${kind}`, beforeKb, "KB"),
      figure(`server after, ${kind}`, afterKb, "KB"),
    );
  }
  return { figures, notes };
}

interface Held {
  readonly connections: number;
  readonly state: HoldState;
  readonly beforeKb: number;
  readonly afterKb: number;
}

async function hold(bench: Bench, kind: HoldSpec["kind"], wanted: number): Promise<Held> {
  const timeouts = { queueMs: longMs, workerMs: longMs * 2, totalMs: longMs * 4 };
  // A worker that takes a batch and never answers.
  await using silent = createServer(() => {}).listen(0, "127.0.0.1");
  await once(silent, "listening");
  await using server = await FerryServer.start({
    dir: bench.dir,
    maxFiles,
    models: [
      { name: "fast", workers: 16, baseMs: 1 },
      { name: "slow", urls: [`http://127.0.0.1:${(silent.address() as AddressInfo).port}/`], timeouts },
    ],
    settings: {
      limits: {
        maxQueued: maxFiles,
        maxConnections: maxFiles,
        requestTimeoutMs: longMs * 4,
        keepAliveTimeoutMs: longMs,
        // What is held here will never be answered; there is nothing to drain.
        drainMs: 100,
      },
      admission: { mode: "off" },
    },
  });
  bench.progress(`${kind}: warming up`);
  await warm(server);
  const beforeKb = await settledKb(bench, server.pid, kind);
  const connections = Math.min(wanted, openFiles(server.pid) - otherFiles);
  const spec: HoldSpec = {
    target: server.target,
    kind,
    connections,
    bodyBytes: 256,
    fields: { model: kind === "held" ? "slow" : "fast" },
    maxMs: longMs,
  };
  await using child = new Child(join(import.meta.dirname, "../hold.ts"), [JSON.stringify(spec)], {
    maxFiles,
  });
  bench.progress(`${kind}: opening ${connections} connections`);
  await holdState(child, 60_000);
  const afterKb = await settledKb(bench, server.pid, kind);
  child.write("\n");
  return { connections, state: await holdState(child, 5000), beforeKb, afterKb };
}

/** Short: the garbage of a long one would leave a heap with room for everything that is held later. */
async function warm(server: FerryServer): Promise<void> {
  const load = { kind: "closed", callers: 64, requests: 1000 } as const;
  const spec = { target: server.target, bodyBytes: 256, fields: { model: "fast" }, verify: true, load };
  await measure({ ...spec, warmMs: 0, measureMs: 10_000, drainMs: 2000 }, { serverPid: server.pid });
}

async function holdState(child: Child, timeoutMs: number): Promise<HoldState> {
  return JSON.parse(await child.line((line) => line.startsWith('{"event":"hold"'), timeoutMs)) as HoldState;
}

/** RSS once it has moved by less than 1 % for five seconds, or after half a minute as it is then. */
async function settledKb(bench: Bench, pid: number, kind: string): Promise<number> {
  let reference = rssKb(pid);
  let still = 0;
  for (let second = 1; second <= 30 && still < (bench.quick ? 2 : 5); second++) {
    bench.progress(`${kind}: settling, RSS ${(reference / 1024).toFixed(0)} MB`);
    await pause(1000);
    const now = rssKb(pid);
    still = Math.abs(now - reference) < reference / 100 ? still + 1 : 0;
    if (still === 0) reference = now;
  }
  return rssKb(pid);
}
