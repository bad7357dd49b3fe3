/**
 * `latency-idle`: what Ferry adds to the worker's own time when nothing stands in the way.
 *
 * One idle worker, one request at a time: there is nobody to wait for, so a batch must leave at once.
 * Any habit of waiting for company (a fixed window of 50 ms, say) shows here in full.
 *
 * Added latency is end to end minus the nominal 100 ms of the simulated worker. The lateness of the
 * worker's timer is thereby charged to Ferry; the worker's own time as Ferry measured it is shown, too.
 */
import { measure } from "../generator.ts";
import { FerryServer, workBetween, type Counters } from "../server.ts";
import { figure, loadNotes, tickText, type Bench, type Report, type Scenario } from "../scenario.ts";

const workerMs = 100;
/** `BENCH_PROCESSES=2`: with so many gateway processes and a core process, which are not pinned to one core. */
const processes = Number(process.env["BENCH_PROCESSES"] ?? 1);

export const latencyIdle: Scenario = {
  name: "latency-idle",
  summary:
    "300 requests one at a time, 1 idle worker of 100 ms, policy adaptive: what is added to the 100 ms",
  run,
};

async function run(bench: Bench): Promise<Report> {
  await using server = await FerryServer.start({
    dir: bench.dir,
    ...(processes > 1 ? { processes } : { core: bench.cores?.server }),
    models: [{ name: "bench", workers: 1, baseMs: workerMs, policy: "adaptive" }],
  });
  const requests = bench.quick ? 60 : 300;
  const counters: Counters[] = [];
  const read = async (): Promise<void> => void counters.push(await server.counters());
  const run = await measure(
    {
      target: server.target,
      bodyBytes: 256,
      verify: true,
      lessMs: workerMs,
      // Code that has not run yet is slow, and no server in use is in that state.
      warmMs: 3000,
      measureMs: requests * workerMs * 3,
      drainMs: 2000,
      load: { kind: "closed", callers: 1, requests },
    },
    {
      core: bench.cores?.generator,
      serverPid: server.pid,
      onTick: (tick) => bench.progress(tickText(tick, (requests * workerMs) / 1000)),
      onStart: read,
      onStop: read,
    },
  );
  return {
    figures: [
      figure("added latency, p50", run.latency.percentileMs(50), "ms", "<", 3),
      figure("added latency, p99", run.latency.percentileMs(99), "ms", "<", 10),
      figure("added latency, max", run.latency.maxMs, "ms"),
      figure("worker's own time, mean", workBetween(counters[0]!, counters[1]!).meanBusyMs, "ms"),
      figure("requests", run.answered, "count", ">=", requests),
      figure("errors", run.errors, "count", "<=", 0),
    ],
    notes: loadNotes(run),
  };
}
