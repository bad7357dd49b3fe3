/**
 * What a Ferry with little to do costs, beside Mosec with the same Python function and batch size.
 *
 *   node bench/idle.ts [--mosec PYTHON] [--rounds 3] [--seconds 12] [--wait 10,1] [--results BYTES]
 *
 * Each round starts `ferry serve` with one Python worker, then Mosec (where `--mosec` names a Python that has it), and
 * loads each from another process: nothing for a while, 100 and 500 requests/s (Poisson), 64 callers in a closed loop,
 * and nothing again. Told of each phase are the CPU time of all processes of the server (user and system), for a request
 * or for a minute, and the memory (PSS) of all of them at its end. Medians, with their range in brackets.
 *
 * Not pinned: Mosec has several threads. FERRY_CLI=/other/checkout/src/cli.ts measures that checkout. `--wait` is
 * Mosec's `max_wait_time`: 10 ms is its default, 1 ms comes closest to Ferry, which waits for nothing while its worker is
 * free. `--results` is Ferry's `results.maxBytes`: Mosec keeps no results. Pages that other processes have too, such as
 * Node's own code, count in part: other Node processes make Ferry look smaller.
 */
import { mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { availableParallelism, cpus, loadavg, tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as sleep } from "node:timers/promises";
import { parseArgs } from "node:util";
import type { Target } from "../src/cli/bench/connection.ts";
import { median } from "../src/core/median.ts";
import { measure } from "./generator.ts";
import type { LoadSpec } from "./load.ts";
import { Child, killChildren } from "./process.ts";
import { FerryServer, freePorts, host } from "./server.ts";

const { values } = parseArgs({
  options: {
    mosec: { type: "string" },
    rounds: { type: "string", default: "3" },
    seconds: { type: "string", default: "12" },
    wait: { type: "string", default: "10,1" },
    results: { type: "string" },
  },
});
const [rounds, seconds] = [Number(values.rounds), Number(values.seconds)];
const waits = values.wait.split(",").map(Number);
const { mosec, results: maxBytes } = values;
const BATCH = 64;
const BODY_BYTES = 256;
const CALLERS = 64;
const WARM_MS = 2000;
/** Ferry gives memory back 10 to 20 s after its last request. */
const AGAIN_SECONDS = 22;

const MODEL = `
def tell(inputs):
    return [f"{len(text)}: {text}" for text in inputs]
`;
const MOSEC = `
import os
from mosec import Server, Worker
from model import tell

class Tell(Worker):
    def forward(self, data):
        return tell([each["input"] for each in data])

if __name__ == "__main__":
    server = Server()
    server.append_worker(Tell, num=1, max_batch_size=${BATCH}, max_wait_time=int(os.environ["WAIT_MS"]))
    server.run()
`;

interface Server extends AsyncDisposable {
  readonly pid: number;
  readonly target: Target;
}

/** Names of the phases, and what their CPU time is divided by. */
const PHASES = {
  "at rest": undefined,
  "100 req/s": { kind: "open", rate: 100, warmRate: 100, arrivals: "poisson", connections: 8 },
  "500 req/s": { kind: "open", rate: 500, warmRate: 500, arrivals: "poisson", connections: 16 },
  saturated: { kind: "closed", callers: CALLERS },
  "100 req/s again": { kind: "open", rate: 100, warmRate: 100, arrivals: "poisson", connections: 8 },
  "at rest again": undefined,
} satisfies Record<string, LoadSpec["load"] | undefined>;

interface Figures {
  /** Of a request, or of a minute at rest. */
  readonly cpuMs: number;
  readonly pssMb: number;
  readonly rate: number;
  readonly p50Ms: number;
  readonly p99Ms: number;
}

const dir = mkdtempSync(join(tmpdir(), "ferry-idle-"));

async function startFerry(): Promise<Server> {
  const backend = { kind: "python", function: `${dir}/model.py:tell`, workers: 1 };
  const settings = {
    models: [{ name: "tell", backend, maxBatchSize: BATCH }],
    ...(maxBytes !== undefined && { results: { maxBytes: Number(maxBytes) } }),
  };
  return await FerryServer.start({ dir, models: [], settings });
}

async function startMosec(python: string, waitMs: number): Promise<Server> {
  const [port] = await freePorts(1);
  const args = ["--address", host, "--port", String(port), "--log-level", "warning"];
  const child = new Child(join(dir, "mosec_server.py"), args, {
    program: python,
    env: { WAIT_MS: String(waitMs) },
  });
  const target = { host, port: port!, path: "/inference" };
  const request = { method: "POST", body: '{"input":"x"}' };
  for (let left = 100; ; left--) {
    const answer = await fetch(`http://${host}:${port}${target.path}`, request).catch(() => undefined);
    if (answer?.ok === true) break;
    if (left === 0) throw new Error(`Mosec does not answer: ${await answer?.text()}`);
    await sleep(100);
  }
  return { pid: child.pid, target, [Symbol.asyncDispose]: () => child[Symbol.asyncDispose]() };
}

/** A process, its children, and whatever left them but is in the session of one (a worker's guard). */
function treeOf(root: number): number[] {
  const rows = readdirSync("/proc").flatMap((name) => {
    const fields = /^\d+$/.test(name) ? statOf(Number(name)) : undefined;
    return fields === undefined
      ? []
      : [{ pid: Number(name), parent: fields.parent, session: fields.session }];
  });
  const tree = new Set([root]);
  for (let before = 0; before < tree.size;) {
    before = tree.size;
    for (const { pid, parent, session } of rows) if (tree.has(parent) || tree.has(session)) tree.add(pid);
  }
  return [...tree];
}

function statOf(pid: number): { parent: number; session: number; cpuMs: number } | undefined {
  try {
    const text = readFileSync(`/proc/${pid}/stat`, "utf8");
    const fields = text.slice(text.lastIndexOf(")") + 2).split(" ");
    // utime, stime, and of children that have ended.
    const ticks = fields.slice(11, 15).reduce((sum, each) => sum + Number(each), 0);
    return { parent: Number(fields[1]), session: Number(fields[3]), cpuMs: ticks * 10 };
  } catch {
    return undefined;
  }
}

const cpuMsOf = (root: number): number =>
  treeOf(root).reduce((sum, pid) => sum + (statOf(pid)?.cpuMs ?? 0), 0);

const pssMbOf = (root: number): number =>
  treeOf(root).reduce((sum, pid) => {
    const text = readFileSync(`/proc/${pid}/smaps_rollup`, "utf8");
    return sum + Number(/^Pss:\s+(\d+) kB$/m.exec(text)?.[1]) / 1024;
  }, 0);

async function phase(
  { pid, target }: Server,
  load: LoadSpec["load"] | undefined,
  again: boolean,
): Promise<Figures> {
  if (load === undefined) {
    const from = cpuMsOf(pid);
    const restSeconds = again ? AGAIN_SECONDS : seconds;
    await sleep(restSeconds * 1000);
    const cpuMs = ((cpuMsOf(pid) - from) * 60) / restSeconds;
    return { cpuMs, pssMb: pssMbOf(pid), rate: 0, p50Ms: NaN, p99Ms: NaN };
  }
  const cpu: number[] = [];
  const read = async (): Promise<void> => void cpu.push(cpuMsOf(pid));
  const measureMs = seconds * 1000;
  const run = await measure(
    { target, bodyBytes: BODY_BYTES, verify: true, warmMs: WARM_MS, measureMs, drainMs: 1000, load },
    { serverPid: pid, onStart: read, onStop: read },
  );
  if (run.errors > 0) throw new Error(`${run.errors} errors: ${JSON.stringify(run.statuses)}`);
  return {
    cpuMs: (cpu[1]! - cpu[0]!) / (run.rate * run.seconds),
    pssMb: pssMbOf(pid),
    rate: run.rate,
    p50Ms: run.latency.percentileMs(50),
    p99Ms: run.latency.percentileMs(99),
  };
}

async function round(name: string, start: () => Promise<Server>): Promise<Figures[]> {
  await using server = await start();
  await sleep(1000);
  const figures: Figures[] = [];
  for (const [phaseName, load] of Object.entries(PHASES)) {
    figures.push(await phase(server, load, figures.length > 0));
    const { cpuMs, pssMb } = figures.at(-1)!;
    process.stderr.write(`${name}, ${phaseName}: ${cpuMs.toFixed(3)} ms, ${pssMb.toFixed(0)} MB\n`);
  }
  return figures;
}

/** Median and range of one figure over the rounds. */
function told(all: readonly Figures[], pick: (figures: Figures) => number, digits: number): string {
  const each = all.map(pick);
  const [low, high] = [Math.min(...each), Math.max(...each)];
  return Number.isNaN(low)
    ? ""
    : `${median(each).toFixed(digits)} [${low.toFixed(digits)}–${high.toFixed(digits)}]`;
}

function print(results: ReadonlyMap<string, readonly (readonly Figures[])[]>): void {
  const columns = ["phase", "server", "CPU ms", "PSS MB", "req/s", "p50 ms", "p99 ms"];
  const widths = [17, 13, 22, 17, 26, 22, 22];
  const line = (cells: readonly string[]): void =>
    console.log(
      cells
        .map((cell, at) => cell.padEnd(widths[at]!))
        .join("")
        .trimEnd(),
    );
  line(columns);
  for (const [at, [name, load]] of Object.entries(PHASES).entries()) {
    const cpu: number[] = [];
    const pss: number[] = [];
    for (const [server, runs] of results) {
      const all = runs.map((run) => run[at]!);
      cpu.push(median(all.map(({ cpuMs }) => cpuMs)));
      pss.push(median(all.map(({ pssMb }) => pssMb)));
      const ms = told(all, ({ cpuMs }) => cpuMs, load === undefined ? 0 : 3);
      const rate = load?.kind === "closed" ? told(all, (each) => each.rate, 0) : "";
      const latency = [told(all, ({ p50Ms }) => p50Ms, 2), told(all, ({ p99Ms }) => p99Ms, 2)];
      line([name, server, ms, told(all, ({ pssMb }) => pssMb, 0), rate, ...latency]);
    }
    for (let other = 1; other < cpu.length; other++) {
      const [ratio, memory] = [cpu[0]! / cpu[other]!, pss[0]! / pss[other]!];
      line([name, `1 / ${other + 1}`, Number.isFinite(ratio) ? ratio.toFixed(2) : "", memory.toFixed(2)]);
    }
  }
}

try {
  writeFileSync(join(dir, "model.py"), MODEL);
  writeFileSync(join(dir, "mosec_server.py"), MOSEC);
  console.log(
    `${cpus()[0]?.model}, ${availableParallelism()} cores, Node ${process.version}, load average ${loadavg()[0]!.toFixed(2)}`,
  );
  console.log(
    `${rounds} rounds, phases of ${seconds} s, bodies of ${BODY_BYTES} bytes; at rest: CPU ms a minute`,
  );
  console.log(`the function: ${MODEL.trim().replace(/\s+/g, " ")}`);
  console.log(`Ferry: one worker, maxBatchSize ${BATCH}, results.maxBytes ${maxBytes ?? "as it comes"}`);
  const results = new Map<string, Figures[][]>();
  const servers = new Map<string, () => Promise<Server>>([["Ferry", startFerry]]);
  for (const waitMs of mosec === undefined ? [] : waits) {
    console.log(`Mosec: one worker, max_batch_size ${BATCH}, max_wait_time ${waitMs} ms`);
    servers.set(`Mosec, ${waitMs} ms`, () => startMosec(mosec!, waitMs));
  }
  console.log();
  for (let at = 0; at < rounds; at++) {
    for (const [name, start] of servers) {
      const runs = results.get(name) ?? [];
      runs.push(await round(name, start));
      results.set(name, runs);
    }
  }
  print(results);
} finally {
  killChildren();
  rmSync(dir, { recursive: true, force: true });
}
