/**
 * What a task costs Redis when more processes share it: bytes, calls and CPU, for fleets of several sizes.
 *
 *   node bench/fanout.ts                              # 1 × 1, 2 × 2 and 6 × 3 gateways × batchers, about a minute
 *   node bench/fanout.ts --rate 1000 --seconds 8 4x4
 *
 * Puts are grouped by gateway, notes go to each gateway of a batch, and everybody hears the bell; so a task costs more
 * in a larger fleet at the same rate. `docs/scale.md` needs to know how much. The rate is low on purpose: the fleet,
 * the load and Redis share this machine, and at a high one the processes would wait for each other. For what a task
 * costs where everything is grouped as much as it can be, see the scenario `redis`.
 *
 * 2 KB in and out, eight workers that are busy 85 % of the time with batches of up to 64, append-only file on, 2,000
 * tasks before anything counts. Bytes and calls are Redis's own counters (INFO), CPU is that of /proc; registry and
 * questions that are asked anyway are in them. The listener is one more gateway that nobody calls: its CPU is what it
 * costs every process to hear of tasks that are not its own. Memory is what is kept of a task, all of whose results still are.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";
import { parseArgs } from "node:util";
import { Pool } from "undici";
import { cpuMs, killChildren } from "./process.ts";
import { RedisServer } from "./redis.ts";
import { FerryServer } from "./server.ts";

const BODY_BYTES = 2048;
const WARM_TASKS = 2000;
const WORKERS = 8;
const BATCH = 64;
const LOAD = 0.85;
const TICK_MS = 2;
const IDLE_MS = 3000;
/** What a process knows of the others' workers is at most a second old. */
const SEEN_MS = 1500;

interface Size {
  readonly gateways: number;
  readonly batchers: number;
}

interface Reading {
  readonly atMs: number;
  readonly redisMs: number;
  readonly gatewaysMs: number;
  readonly batchersMs: number;
  readonly listenerMs: number;
  readonly inBytes: number;
  readonly outBytes: number;
  readonly fileBytes: number;
  readonly memoryBytes: number;
  readonly scripts: number;
  readonly notes: number;
}

/** Whether it was answered, with its own input; on a machine that is busy with other things some are refused. */
async function one(door: Pool, id: number): Promise<boolean> {
  const input = `${id} `.padEnd(BODY_BYTES - 12, "x");
  const { statusCode, body } = await door.request({
    path: "/v1/inference",
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ input }),
  });
  const text = await body.text();
  if (statusCode === 200 && !text.includes(`"${id} `)) throw new Error(`crossed: ${text.slice(0, 300)}`);
  return statusCode === 200;
}

/** `count` requests at `rate`, to the doors in turn, each at its instant; how many were answered. */
async function load(doors: readonly Pool[], rate: number, count: number, from: number): Promise<number> {
  const startedAt = performance.now();
  const open: Promise<boolean>[] = [];
  while (open.length < count) {
    const due = Math.min(count, Math.floor(((performance.now() - startedAt) / 1000) * rate));
    while (open.length < due) open.push(one(doors[open.length % doors.length]!, from + open.length));
    await pause(TICK_MS);
  }
  return (await Promise.all(open)).filter(Boolean).length;
}

async function read(
  redis: RedisServer,
  gateways: readonly FerryServer[],
  batchers: readonly FerryServer[],
  listener: FerryServer,
): Promise<Reading> {
  const info = await redis.info("everything");
  const field = (name: string): number => Number(new RegExp(`^${name}:(\\d+)`, "m").exec(info)?.[1] ?? 0);
  const calls = (name: string): number =>
    Number(new RegExp(`^cmdstat_${name}:calls=(\\d+)`, "m").exec(info)?.[1] ?? 0);
  const cpu = (servers: readonly FerryServer[]): number =>
    servers.reduce((sum, { pid }) => sum + cpuMs(pid), 0);
  return {
    atMs: performance.now(),
    redisMs: cpuMs(redis.pid),
    gatewaysMs: cpu(gateways),
    batchersMs: cpu(batchers),
    listenerMs: cpu([listener]),
    inBytes: field("total_net_input_bytes"),
    outBytes: field("total_net_output_bytes"),
    fileBytes: field("aof_current_size"),
    memoryBytes: field("used_memory"),
    scripts: calls("evalsha"),
    notes: calls("spublish"),
  };
}

async function measure(dir: string, { gateways, batchers }: Size, rate: number, count: number): Promise<Row> {
  await using started = new AsyncDisposableStack();
  const redis = started.use(await RedisServer.start(dir));
  const settings = { engine: { kind: "redis", url: redis.url, durability: "local" } };
  const start = async (role: "gateway" | "batcher", workers: number): Promise<FerryServer> => {
    const baseMs = Math.round((1000 * LOAD * WORKERS * BATCH) / rate);
    const models = [{ name: "bench", workers, baseMs, maxBatchSize: BATCH }];
    return started.use(await FerryServer.start({ dir, models, settings, role }));
  };
  const behind: FerryServer[] = [];
  for (let i = 0; i < batchers; i++) {
    behind.push(await start("batcher", Math.floor(WORKERS / batchers) + (i < WORKERS % batchers ? 1 : 0)));
  }
  const doors: FerryServer[] = [];
  const listener = await start("gateway", 1);
  for (let i = 0; i < gateways; i++) doors.push(await start("gateway", 1));
  const pools = doors.map(({ target }) => new Pool(`http://${target.host}:${target.port}`));
  started.defer(async () => void (await Promise.all(pools.map((pool) => pool.destroy()))));
  await load(pools, rate, WARM_TASKS, 0);
  const rested = await read(redis, doors, behind, listener);
  await pause(IDLE_MS);
  const before = await read(redis, doors, behind, listener);
  const batchesBefore = await batchesOf(behind);
  const answered = await load(pools, rate, count, WARM_TASKS);
  const after = await read(redis, doors, behind, listener);
  const perTask = (name: keyof Reading): number => (after[name] - before[name]) / answered;
  // What the listener does when there is nothing to hear goes on beside it.
  const idleMs =
    ((before.listenerMs - rested.listenerMs) * (after.atMs - before.atMs)) / (before.atMs - rested.atMs);
  await pause(SEEN_MS);
  return {
    perTask,
    idleShare: (before.redisMs - rested.redisMs) / IDLE_MS,
    noteUs: (1000 * (after.listenerMs - before.listenerMs - idleMs)) / (after.notes - before.notes),
    refused: count - answered,
    meanBatch: answered / ((await batchesOf(behind)) - batchesBefore),
  };
}

interface Row {
  readonly perTask: (name: keyof Reading) => number;
  readonly meanBatch: number;
  readonly refused: number;
  /** Of Redis's core, when nobody sends anything. */
  readonly idleShare: number;
  /** Of the listener, for each note beyond what it uses anyway. */
  readonly noteUs: number;
}

/** Any process knows the workers of all. */
async function batchesOf(batchers: readonly FerryServer[]): Promise<number> {
  return (await batchers[0]!.counters()).batches;
}

function line({ gateways, batchers }: Size, { perTask, meanBatch, refused, idleShare, noteUs }: Row): string {
  const kb = (name: keyof Reading): string => (perTask(name) / 1000).toFixed(1);
  const us = (name: keyof Reading): string => (perTask(name) * 1000).toFixed(0);
  const cells = [
    `${gateways} × ${batchers}`,
    meanBatch.toFixed(0),
    kb("inBytes"),
    kb("outBytes"),
    kb("fileBytes"),
    kb("memoryBytes"),
    perTask("scripts").toFixed(2),
    perTask("notes").toFixed(2),
    us("redisMs"),
    us("gatewaysMs"),
    us("batchersMs"),
    us("listenerMs"),
    noteUs.toFixed(0),
    `${(100 * idleShare).toFixed(1)} %`,
    String(refused),
  ];
  return `| ${cells.join(" | ")} |`;
}

const { values, positionals } = parseArgs({
  options: { rate: { type: "string", default: "1000" }, seconds: { type: "string", default: "8" } },
  allowPositionals: true,
});
const rate = Number(values.rate);
const sizes = (positionals.length > 0 ? positionals : ["1x1", "2x2", "6x3"]).map((text): Size => {
  const [gateways, batchers] = text.split("x").map(Number);
  if (!(gateways! > 0 && batchers! > 0)) throw new Error(`${text}: write gateways x batchers, as in 4x2`);
  return { gateways: gateways!, batchers: batchers! };
});
const dir = mkdtempSync(join(tmpdir(), "ferry-fanout-"));
process.on("exit", () => {
  killChildren();
  rmSync(dir, { recursive: true, force: true, maxRetries: 3 });
});
console.log(`${rate} tasks/s, ${Number(values.seconds) * rate} each; per task:\n`);
console.log(
  "| gateways × batchers | mean batch | KB into Redis | KB out | KB of file | KB of memory | scripts | notes | Redis µs | gateways µs | batchers µs | listener µs | a note heard µs | Redis idle | refused |",
);
console.log("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
for (const size of sizes)
  console.log(line(size, await measure(dir, size, rate, rate * Number(values.seconds))));
