/**
 * `saturated`: with work always waiting, batches are full and no worker rests.
 *
 * 512 callers keep 256 tasks on the four workers and 256 in the queue. Fill and busy share come from
 * the counters of the admin listener: tasks / batches, and busy time / (time x workers), between the
 * start and the stop of the measurement. A batch that runs at either end is counted when it settles;
 * over the whole window that is less than one half of a percent.
 */
import { measure } from "../generator.ts";
import { FerryServer, workBetween, type Counters } from "../server.ts";
import {
  durationMs,
  figure,
  loadNotes,
  tickText,
  type Bench,
  type Report,
  type Scenario,
} from "../scenario.ts";

const workers = 4;
const workerMs = 100;
const maxBatchSize = 64;

export const saturated: Scenario = {
  name: "saturated",
  summary: "512 callers in a closed loop, 4 workers of 100 ms, batch 64: fill of batches and busy workers",
  run,
};

async function run(bench: Bench): Promise<Report> {
  await using server = await FerryServer.start({
    dir: bench.dir,
    core: bench.cores?.server,
    models: [{ name: "bench", workers, baseMs: workerMs, maxBatchSize }],
  });
  const counters: Counters[] = [];
  let utilization = NaN;
  const measureMs = durationMs(bench, 20);
  const run = await measure(
    {
      target: server.target,
      bodyBytes: 256,
      verify: true,
      warmMs: 3000,
      measureMs,
      drainMs: 5000,
      load: { kind: "closed", callers: 512 },
    },
    {
      core: bench.cores?.generator,
      serverPid: server.pid,
      onTick: (tick) => bench.progress(tickText(tick, measureMs / 1000)),
      onStart: async () => void counters.push(await server.counters()),
      onStop: async () => {
        counters.push(await server.counters());
        utilization = (await server.health()).gpu_utilization;
      },
    },
  );
  const work = workBetween(counters[0]!, counters[1]!);
  return {
    figures: [
      figure("mean fill of a batch", (work.meanBatch / maxBatchSize) * 100, "%", ">=", 95),
      figure("workers busy", work.busyShare * 100, "%", ">=", 97),
      figure("gpu_utilization, as /internal/health says", utilization * 100, "%"),
      figure("throughput", run.rate, "req/s"),
      figure("throughput of the bound", (run.rate / ((workers * maxBatchSize * 1000) / workerMs)) * 100, "%"),
      figure("errors", run.errors, "count", "<=", 0),
    ],
    notes: loadNotes(run),
  };
}
