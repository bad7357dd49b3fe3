/**
 * `soak`: ten minutes at half of what the workers can do, and the server's memory in each of them.
 *
 * Nothing that comes and goes may stay. What is kept on purpose (results, cache, the latest requests, the dashboard's
 * seconds) is bounded and full within the first minutes at this rate, so that from the third minute on resident
 * memory must stand still: the largest reading of each later minute against that of the third. Inputs never repeat.
 */
import { measure } from "../generator.ts";
import { rssKb } from "../process.ts";
import { FerryServer } from "../server.ts";
import {
  durationMs,
  figure,
  loadNotes,
  tickText,
  type Bench,
  type Report,
  type Scenario,
} from "../scenario.ts";

const rate = 3000;
const minutes = 10;
const settledAfter = 2;

export const soak: Scenario = {
  name: "soak",
  summary: "ten minutes at 3,000 requests/s, 12 workers of 100 ms: does memory stand still?",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const models = [{ name: "bench", workers: 12, baseMs: 100, maxBatchSize: 64 }];
  await using server = await FerryServer.start({ dir: bench.dir, maxFiles: 20_000, models });
  const measureMs = durationMs(bench, minutes * 60);
  const highest: number[] = Array.from({ length: minutes }, () => 0);
  const measured = await measure(
    {
      target: server.target,
      bodyBytes: 2048,
      verify: true,
      warmMs: 3000,
      measureMs,
      drainMs: 5000,
      load: { kind: "open", rate, arrivals: "poisson", warmRate: rate / 2, connections: 1024 },
    },
    {
      maxFiles: 20_000,
      serverPid: server.pid,
      onTick: (tick) => {
        const minute = Math.min(minutes - 1, Math.floor((tick.seconds / measureMs) * 1000 * minutes));
        highest[minute] = Math.max(highest[minute]!, rssKb(server.pid));
        bench.progress(tickText(tick, measureMs / 1000));
      },
    },
  );
  const reference = highest[settledAfter]!;
  const later = highest.slice(settledAfter);
  return {
    figures: [
      figure("memory, highest later minute to the third", Math.max(...later) / reference, "ratio", "<=", 1.1),
      figure("memory, lowest later minute to the third", Math.min(...later) / reference, "ratio", ">=", 0.9),
      ...highest.map((kb, minute) => figure(`memory, minute ${minute + 1}`, kb, "KB")),
      figure("requests", measured.sent, "count"),
      figure("latency, p99", measured.latency.percentileMs(99), "ms"),
      figure("errors", measured.errors, "count", "<=", 0),
      figure("ferry CPU", measured.serverCpuShare * 100, "%"),
    ],
    notes: loadNotes(measured),
  };
}
