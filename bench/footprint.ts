/**
 * What a task leaves in Redis and on the network: bytes in and out, to a replica, in the append-only file and in memory.
 *
 *   node bench/footprint.ts                                # 2 KB in and out at 100, 500 and 1,000 tasks/s, about a minute
 *   node bench/footprint.ts --bytes 16384 --rate 500       # other sizes and rates
 *   node bench/footprint.ts --keys                         # each request with its own Idempotency-Key
 *
 * One gateway, one batcher, a primary and a replica. The gateway writes the tasks of a tick as one bundle, so a task costs
 * less the more come together: `tasks per bundle` says how many did. Figures are differences of Redis's own counters
 * (INFO) over `--seconds`; heartbeats and the questions that are asked once a second are in them. `kept` is the
 * memory of a task whose result is kept, `waiting` that of one in the queue. CPU is not measured here: see scaleout.ts.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { setTimeout as pause } from "node:timers/promises";
import { parseArgs } from "node:util";
import { Pool } from "undici";
import { killChildren } from "./process.ts";
import { RedisServer } from "./redis.ts";
import { FerryServer, host, type SimulatedModel } from "./server.ts";

const WARM_TASKS = 500;
const WAITING_TASKS = 5000;
const TICK_MS = 2;
/** A replica that copies for the first time confirms nothing. */
const REPLICA_MS = 3000;
const WORKERS = { name: "bench", workers: 8, baseMs: 20 };
/** Nothing ends while it is counted. */
const STUCK = {
  name: "bench",
  workers: 1,
  baseMs: 60_000,
  timeouts: { queueMs: 3_000_000, workerMs: 3_000_000, totalMs: 3_600_000 },
};

interface Sending {
  readonly bytes: number;
  readonly keys: boolean;
  /** 202 at once. */
  readonly async: boolean;
}

async function one(gateway: Pool, id: number, { bytes, keys, async }: Sending): Promise<boolean> {
  const { statusCode, body } = await gateway.request({
    path: "/v1/inference",
    method: "POST",
    headers: {
      "content-type": "application/json",
      ...(keys && { "idempotency-key": `key-${id}` }),
      ...(async && { prefer: "respond-async" }),
    },
    body: JSON.stringify({ input: `${id} `.padEnd(bytes - 2, "x") }),
  });
  await body.dump();
  return statusCode === (async ? 202 : 200);
}

/** `count` requests at `rate`, each at its instant; how many were answered. */
async function load(
  gateway: Pool,
  rate: number,
  count: number,
  from: number,
  sending: Sending,
): Promise<number> {
  const startedAt = performance.now();
  const open: Promise<boolean>[] = [];
  while (open.length < count) {
    const due = Math.min(count, Math.floor(((performance.now() - startedAt) / 1000) * rate));
    while (open.length < due) open.push(one(gateway, from + open.length, sending));
    await pause(TICK_MS);
  }
  return (await Promise.all(open)).filter(Boolean).length;
}

async function readings(redis: RedisServer) {
  const info = await redis.info("everything");
  const field = (name: string): number => Number(new RegExp(`^${name}:(\\d+)`, "m").exec(info)?.[1] ?? 0);
  return {
    in: field("total_net_input_bytes"),
    out: field("total_net_output_bytes") - field("total_net_repl_output_bytes"),
    replica: field("total_net_repl_output_bytes"),
    file: field("aof_current_size"),
    memory: field("used_memory"),
    bundles: Number(/^cmdstat_xadd:calls=(\d+)/m.exec(info)?.[1] ?? 0),
  };
}

/** A fleet of one gateway and one batcher, and what `use` finds out about it. */
async function withFleet<Found>(
  dir: string,
  model: SimulatedModel,
  use: (gateway: Pool, redis: RedisServer) => Promise<Found>,
): Promise<Found> {
  await using started = new AsyncDisposableStack();
  const redis = started.use(await RedisServer.start(dir));
  started.use(await RedisServer.start(dir, [`replicaof ${host} ${redis.port}`, "appendonly no"]));
  await pause(REPLICA_MS);
  const settings = {
    engine: { kind: "redis", url: redis.url },
    limits: { maxQueued: 100_000 },
    // A queue that no worker will ever serve in time is what `waiting` needs.
    admission: { mode: "off" },
  };
  const setup = { dir, models: [model], settings };
  started.use(await FerryServer.start({ ...setup, role: "batcher" }));
  const { target } = started.use(await FerryServer.start({ ...setup, role: "gateway" }));
  const gateway = new Pool(`http://${target.host}:${target.port}`);
  started.defer(() => gateway.destroy());
  return await use(gateway, redis);
}

async function row(dir: string, rate: number, seconds: number, sending: Sending): Promise<string> {
  return withFleet(dir, WORKERS, async (gateway, redis) => {
    await load(gateway, rate, WARM_TASKS, 0, sending);
    const before = await readings(redis);
    const count = Math.round(rate * seconds);
    const answered = await load(gateway, rate, count, WARM_TASKS, sending);
    const after = await readings(redis);
    const kb = (name: keyof typeof before): string =>
      ((after[name] - before[name]) / answered / 1000).toFixed(1);
    const bundle = (answered / (after.bundles - before.bundles)).toFixed(1);
    const names = ["in", "out", "replica", "file", "memory"] as const;
    return `| ${[String(rate), bundle, ...names.map(kb), String(count - answered)].join(" | ")} |`;
  });
}

async function waitingKb(dir: string, rate: number, sending: Sending): Promise<number> {
  return withFleet(dir, STUCK, async (gateway, redis) => {
    await load(gateway, rate, WARM_TASKS, 0, sending);
    const before = await readings(redis);
    const accepted = await load(gateway, rate, WAITING_TASKS, WARM_TASKS, sending);
    if (accepted < WAITING_TASKS) throw new Error(`${WAITING_TASKS - accepted} tasks were not accepted`);
    return ((await readings(redis)).memory - before.memory) / accepted / 1000;
  });
}

const { values } = parseArgs({
  options: {
    rate: { type: "string", multiple: true, default: ["100", "500", "1000"] },
    seconds: { type: "string", default: "8" },
    bytes: { type: "string", default: "2048" },
    keys: { type: "boolean", default: false },
  },
});
const sending = { bytes: Number(values.bytes), keys: values.keys, async: false };
const dir = mkdtempSync(join(tmpdir(), "ferry-footprint-"));
process.on("exit", () => {
  killChildren();
  rmSync(dir, { recursive: true, force: true, maxRetries: 3 });
});
console.log(`${sending.bytes} bytes in and out; KB per task, all but the first two columns:\n`);
console.log("| tasks/s | tasks per bundle | into Redis | out | to a replica | file | kept | refused |");
console.log("|---|---|---|---|---|---|---|---|");
for (const rate of values.rate) console.log(await row(dir, Number(rate), Number(values.seconds), sending));
const waiting = await waitingKb(dir, Number(values.rate.at(-1)), { ...sending, async: true });
console.log(`\nwaiting: ${waiting.toFixed(1)} KB`);
