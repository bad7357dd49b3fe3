/**
 * `overload`: five times what the workers can do, for a minute.
 *
 * Four workers of 200 ms with batches of 64 do C = 1,280 a second. Open loop, one tier, no credentials,
 * default timeouts (2 s in the queue, 4 s in all): 5 s at half of C, 60 s at five times C, 15 s at half
 * again. Who is refused does not come again: the load is what it is.
 *
 *   goodput          200s that arrived per second of the overload, without its first 2 s, over C
 *   accepted         of the whole overload: 200 and 504; missed are the 504s, and 200s later than 4 s
 *   back to normal   from the end of the overload to the first stretch of one second without a refusal in
 *                    which p99 is at most 1.5 times that before it
 *
 * BENCH_WORKERS=1 makes C and with it every rate smaller, where this machine cannot send or refuse so much.
 * BENCH_ENGINE=redis puts a gateway, Redis and a batcher in place of the one process.
 *
 * Nothing is pinned, as in `10k`: what is held for 2 s survives many collections, and a collector that has to
 * share Ferry's core stops it for 20 to 100 ms at a time. Pinned, the refusals' p99 was 75 ms, unpinned 17 ms.
 */
import {
  admissionNotes,
  capacity,
  count,
  errors,
  maxFiles,
  missedShare,
  poolLimits,
  progress,
  showTimeline,
  phasedLoad,
  timeouts,
  workers,
} from "../admission.ts";
import { measure, type Measured } from "../generator.ts";
import { Fleet } from "../redis.ts";
import { FerryServer, type SimulatedModel } from "../server.ts";
import { figure, type Bench, type Figure, type Report, type Scenario } from "../scenario.ts";

const model: SimulatedModel = { name: "bench", workers, baseMs: 200, maxBatchSize: 64, timeouts };
const onsetMs = 2000;

export const overload: Scenario = {
  name: "overload",
  summary:
    "open loop, 5 times what 4 workers of 200 ms can do, for 60 s: goodput, deadlines, refusals, after",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const onRedis = process.env["BENCH_ENGINE"] === "redis";
  const setup = { dir: bench.dir, maxFiles, models: [model], settings: { limits: poolLimits } };
  if (!onRedis) {
    await using server = await FerryServer.start(setup);
    return report(await load(bench, server, {}), []);
  }
  await using fleet = await Fleet.start(setup);
  return report(await load(bench, fleet.gateway, fleet.behind), ["through Redis"]);
}

function load(
  bench: Bench,
  server: FerryServer,
  behind: Readonly<Record<string, number>>,
): Promise<Measured> {
  const [beforeS, overloadS, afterS] = bench.quick ? [2, 8, 5] : [5, 60, 15];
  const phases = [
    { name: "before", ms: beforeS * 1000, rate: capacity / 2 },
    { name: "onset", ms: onsetMs, rate: capacity * 5 },
    { name: "overload", ms: overloadS * 1000 - onsetMs, rate: capacity * 5 },
    { name: "after", ms: afterS * 1000, rate: capacity / 2 },
  ];
  const { spec, seconds } = phasedLoad(bench, server.target, phases, { warmRate: capacity / 2 });
  const onTick = progress(bench, "", seconds);
  return measure(spec, { maxFiles, serverPid: server.pid, behind, onTick });
}

function report(run: Measured, notes: readonly string[]): Report {
  showTimeline(run);
  const { tally } = run;
  const span = tally.span("overload");
  const crowd = tally.account(["onset", "overload"]);
  const later = tally.account(["overload"]);
  const { ok, refused } = crowd.latencies;
  const steady = tally.window(span.fromMs, span.toMs);
  const normalMs = tally.account(["before"]).latencies.ok.percentileMs(99);
  const backMs = tally.msUntil(
    span.toMs,
    tally.endMs,
    1000,
    (second) => second.refused + second.failed === 0 && second.ok.percentileMs(99) <= 1.5 * normalMs,
  );
  const { server = NaN, generator = NaN } = run.phaseCpu["overload"] ?? {};
  const behind = Object.entries(run.behindCpuShares).map(([name, share]): Figure =>
    figure(`${name} CPU, whole run`, share * 100, "%"),
  );
  return {
    figures: [
      figure("goodput, share of capacity", steady.arrivedOk / steady.seconds / capacity, "ratio", ">=", 0.95),
      figure("accepted, p99", ok.percentileMs(99), "ms", "<=", timeouts.totalMs),
      figure("accepted, missed their deadline", missedShare(crowd) * 100, "%", "<=", 0.1),
      figure("refusals, p99", refused.percentileMs(99), "ms", "<", 50),
      figure("back to normal after", backMs / 1000, "s", "<", 10),
      figure("errors", errors(run), "count", "<=", 0),
      figure("offered during the overload", crowd.sent / (steady.seconds + onsetMs / 1000), "req/s"),
      figure("refused", (count(crowd, 429, 503) / crowd.sent) * 100, "%"),
      figure("missed, without the first 2 s", missedShare(later) * 100, "%"),
      figure("accepted, p50", ok.percentileMs(50), "ms"),
      figure("accepted, max", ok.maxMs, "ms"),
      figure("refusals, p50", refused.percentileMs(50), "ms"),
      figure("refusals, max", refused.maxMs, "ms"),
      figure("refusals, p99, without the first 2 s", later.latencies.refused.percentileMs(99), "ms"),
      figure("p99 before", normalMs, "ms"),
      figure("ferry CPU, overload", server * 100, "%"),
      figure("generator CPU, overload", generator * 100, "%"),
      ...behind,
    ],
    notes: [...notes, ...admissionNotes(run)],
  };
}
