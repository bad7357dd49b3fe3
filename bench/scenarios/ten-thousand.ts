/**
 * `10k`: ten thousand requests a second for thirty seconds, on schedule, against 32 workers of 200 ms.
 *
 * The workers can do 32 x 64 / 0.2 s = 10,240 a second, so this runs at 98 % of what is possible: a
 * batch that leaves with 62 of 64 seats taken, or a worker that rests for 5 ms between two batches, is
 * already more than there is to spare, and the queue grows until it shows in the p99. Arrivals come one
 * per 100 µs, each at a random instant of its stretch; BENCH_ARRIVALS=poisson makes them independent, and
 * BENCH_RATE=5000 tries another rate. The warm-up runs at 60 % of the rate, so the measurement starts without a
 * backlog. Nothing is pinned: all processes, their garbage collectors and the generator share the machine's cores,
 * as they would anywhere.
 *
 * It is one Ferry with the memory engine; `two-10k` of bench/scaleout.ts sends the same through Redis.
 *
 * CPU shares are of one core. What is left of the machine decides the p99: where all shares together come near the
 * number of cores, the queue in front of a core is part of the latency.
 */
import { measure, type Measured } from "../generator.ts";
import { FerryServer, workBetween, type Counters, type Work } from "../server.ts";
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
const arrivals = process.env["BENCH_ARRIVALS"] === "poisson" ? "poisson" : "even";
const maxBatchSize = 64;
const maxFiles = 20_000;
const models = [{ name: "bench", workers: 32, baseMs: 200, maxBatchSize }];

export const tenThousand: Scenario = {
  name: "10k",
  summary:
    "open loop, 10,000 requests/s for 30 s, 32 workers of 200 ms, batch 64; latency from intended start",
  async run(bench) {
    await using server = await FerryServer.start({ dir: bench.dir, maxFiles, models });
    return report(...(await load(bench, server)));
  },
};

async function load(bench: Bench, server: FerryServer): Promise<[Measured, Work, number]> {
  const measureMs = durationMs(bench, 30);
  const counters: Counters[] = [];
  let delayMs = NaN;
  const read = async (): Promise<void> => {
    delayMs = await server.loopDelayMs();
    counters.push(await server.counters());
  };
  const run = await measure(
    {
      target: server.target,
      bodyBytes: 2048,
      verify: true,
      warmMs: 5000,
      measureMs,
      drainMs: 6000,
      load: { kind: "open", rate, arrivals, warmRate: rate * 0.6, connections: 4096 },
    },
    {
      maxFiles,
      serverPid: server.pid,
      onTick: (tick) => bench.progress(tickText(tick, measureMs / 1000)),
      onStart: read,
      onStop: read,
    },
  );
  return [run, workBetween(counters[0]!, counters[1]!), delayMs];
}

function report(run: Measured, work: Work, delayMs: number): Report {
  return {
    figures: [
      figure("latency, p50", run.latency.percentileMs(50), "ms"),
      figure("latency, p99", run.latency.percentileMs(99), "ms", "<", 400),
      figure("latency, p99.9", run.latency.percentileMs(99.9), "ms"),
      figure("latency, max", run.latency.maxMs, "ms"),
      figure("errors", run.errors, "count", "<=", 0),
      figure("event loop delay of the gateway, p99", delayMs, "ms", "<", 20),
      figure("offered", run.sent / run.seconds, "req/s", ">=", rate * 0.99),
      figure("mean fill of a batch", (work.meanBatch / maxBatchSize) * 100, "%"),
      figure("workers busy", work.busyShare * 100, "%"),
      figure("ferry CPU", run.serverCpuShare * 100, "%"),
      figure("generator CPU", run.cpuShare * 100, "%"),
      figure("late sends", (run.late / run.sent) * 100, "%"),
      figure("connections", run.connections, "count"),
    ],
    notes: [`arrivals: ${arrivals}`, ...loadNotes(run)],
  };
}
