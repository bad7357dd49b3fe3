/**
 * `redis-10k`: as `10k`, through one gateway, Redis and one batcher.
 *
 * Ten thousand requests a second for thirty seconds, on schedule, against 32 workers of 200 ms with batches
 * of 64: 98 % of the 10,240 a second that these can do. Every task is written to Redis, claimed from there
 * in its batch, settled there and told to the gateway. Nothing is pinned: the four processes, the load
 * generator being one of them, share the machine's cores. BENCH_ARRIVALS=poisson as in `10k`; BENCH_RATE=5000
 * tries another rate, BENCH_REDIS_AOF=no keeps Redis from writing its file.
 *
 * Three processes on the same cores are slower to optimise than one, and 60 % of the rate is more than they
 * can do cold: so callers in a closed loop, which cannot overload anything, come first.
 *
 * CPU shares are of one core. What is left of the machine decides the p99 here: where all shares together
 * come near the number of cores, the queue in front of a core is part of the latency.
 */
import { measure } from "../generator.ts";
import { Fleet } from "../redis.ts";
import { workBetween, type Counters } from "../server.ts";
import {
  durationMs,
  figure,
  loadNotes,
  tickText,
  type Bench,
  type Report,
  type Scenario,
} from "../scenario.ts";

const rate = Number(process.env["BENCH_RATE"] ?? 10_000);
const maxBatchSize = 64;
const maxFiles = 20_000;

export const redisTenThousand: Scenario = {
  name: "redis-10k",
  summary:
    "10k through gateway, Redis and batcher: 10,000 requests/s for 30 s, 32 workers of 200 ms, batch 64",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const arrivals = process.env["BENCH_ARRIVALS"] === "poisson" ? "poisson" : "even";
  await using fleet = await Fleet.start({
    dir: bench.dir,
    maxFiles,
    models: [{ name: "bench", workers: 32, baseMs: 200, maxBatchSize }],
  });
  bench.progress("warming up");
  await warm(bench, fleet);
  const measureMs = durationMs(bench, 30);
  const counters: Counters[] = [];
  const read = async (): Promise<void> => void counters.push(await fleet.batcher.counters());
  const run = await measure(
    {
      target: fleet.gateway.target,
      bodyBytes: 2048,
      verify: true,
      warmMs: 5000,
      measureMs,
      drainMs: 6000,
      load: { kind: "open", rate, arrivals, warmRate: rate * 0.6, connections: 4096 },
    },
    {
      maxFiles,
      serverPid: fleet.gateway.pid,
      behind: fleet.behind,
      onTick: (tick) => bench.progress(tickText(tick, measureMs / 1000)),
      onStart: read,
      onStop: read,
    },
  );
  const work = workBetween(counters[0]!, counters[1]!);
  const { redis = NaN, batcher = NaN } = run.behindCpuShares;
  return {
    figures: [
      figure("latency, p50", run.latency.percentileMs(50), "ms"),
      figure("latency, p99", run.latency.percentileMs(99), "ms", "<", 500),
      figure("latency, p99.9", run.latency.percentileMs(99.9), "ms"),
      figure("latency, max", run.latency.maxMs, "ms"),
      figure("errors", run.errors, "count", "<=", 0),
      figure("offered", run.sent / run.seconds, "req/s", ">=", rate * 0.99),
      figure("mean fill of a batch", (work.meanBatch / maxBatchSize) * 100, "%"),
      figure("workers busy", work.busyShare * 100, "%"),
      figure("gateway CPU", run.serverCpuShare * 100, "%"),
      figure("Redis CPU", redis * 100, "%"),
      figure("Redis CPU, rewriting its file", run.childrenCpuShare * 100, "%"),
      figure("batcher CPU", batcher * 100, "%"),
      figure("generator CPU", run.cpuShare * 100, "%"),
      figure("late sends", (run.late / run.sent) * 100, "%"),
      figure("connections", run.connections, "count"),
    ],
    notes: [`arrivals: ${arrivals}`, ...loadNotes(run)],
  };
}

async function warm(bench: Bench, { gateway }: Fleet): Promise<void> {
  const load = { kind: "closed", callers: 1024 } as const;
  const spec = { target: gateway.target, bodyBytes: 2048, verify: true, load };
  const times = { warmMs: 0, measureMs: durationMs(bench, 10), drainMs: 2000 };
  await measure({ ...spec, ...times }, { maxFiles, serverPid: gateway.pid });
}
