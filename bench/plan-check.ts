/**
 * Whether `ferry plan` tells the truth: the same arrivals through its simulation and through a real `ferry serve`.
 *
 *   node bench/plan-check.ts               # 30, 70 and 90 % load, about 75 s
 *   node bench/plan-check.ts 70            # one of them
 *   node bench/plan-check.ts --lengths mixed         # inputs that differ in length, on workers that pad
 *   node bench/plan-check.ts --lengths mixed --off   # the same in order of arrival
 *   node bench/plan-check.ts --slow 4      # all times four times as long: for a machine that is not quiet, to develop
 *
 * 8 simulated workers of 100 ms with 16 seats on the wall clock (1,280 requests/s), Poisson arrivals from a seed
 * over HTTP on 127.0.0.1; the plan gets the instants and the lengths that the generator was told to send. With
 * --lengths a batch of n takes 50 + n + 0.05·n·l ms, and the workers can do what they do in the plan while eight
 * full batches wait; the warm-up has a quarter of the rate, in which the server learns to group. Nothing is added to
 * what it predicts. Measured latency counts from the intended start and so holds everything that is not simulated:
 * HTTP, the event loop, timers that ring on whole milliseconds, in the server and in the generator. Goal: p50 and p99
 * within 10 %, and with inputs of equal length p99 within 5 % or 5 ms. It needs two cores and nothing else running.
 */
import { mkdtempSync, rmSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { capacityOf } from "../src/cli/plan/fit.ts";
import { parseLengths } from "../src/cli/plan/lengths.ts";
import { runTrial, type Figures, type TrialFleet, withCapacity } from "../src/cli/plan/trial.ts";
import { Arrivals, type OpenLoad } from "../src/cli/bench/arrivals.ts";
import { measure, type Measured } from "./generator.ts";
import { lengthsOf, type LoadSpec } from "./load.ts";
import { killChildren } from "./process.ts";
import { FerryServer, workBetween, type Counters } from "./server.ts";

const WORKERS = 8;
const BATCH = 16;

process.on("exit", killChildren);
const { values, positionals } = parseArgs({
  options: {
    lengths: { type: "string" },
    off: { type: "boolean", default: false },
    slow: { type: "string", default: "1" },
  },
  allowPositionals: true,
});
const SLOW = Number(values.slow);
const WARM_MS = 4000 * SLOW;
const MEASURE_MS = 20_000 * SLOW;
const DRAIN_MS = 3000 * SLOW;
const loads = positionals.map(Number);
const mix = values.lengths === undefined ? undefined : parseLengths(values.lengths)!;
const service = mix
  ? { baseMs: 50 * SLOW, perTaskMs: SLOW, perCellMs: 0.05 * SLOW }
  : { baseMs: 100 * SLOW, perTaskMs: 0 };
const fleet: TrialFleet = await withCapacity(
  {
    limits: { policy: "adaptive", maxBatchSize: BATCH, maxWaitMs: 50 * SLOW },
    service,
    jitter: 0,
    timeouts: { queueMs: 2000 * SLOW, workerMs: 3000 * SLOW, totalMs: 4000 * SLOW },
    admission: { mode: "predictive", targetUtilization: 0.7, lastTierDepth: 100, firstTierDepth: 500 },
    maxQueued: 10_000,
    overheadMs: 0,
    lengths: values.off ? "off" : "auto",
  },
  mix,
  1,
);
const { workerPerMs = capacityOf(service, BATCH) } = fleet;
const dir = mkdtempSync(join(tmpdir(), "ferry-plan-check-"));
const rows = [
  [
    "load",
    "p50 planned",
    "measured",
    "ratio",
    "p99 planned",
    "measured",
    "ratio",
    "batch planned",
    "measured",
  ],
];
let good = true;
try {
  for (const percent of loads.length === 0 ? [30, 70, 90] : loads) {
    const rate = Math.round((percent / 100) * WORKERS * workerPerMs * 1000);
    const load: OpenLoad = {
      kind: "open",
      rate,
      // Before it has learned to group, a server can do no more than in order of arrival.
      warmRate: mix === undefined ? rate : rate / 4,
      arrivals: "poisson",
      connections: 512,
      seed: percent,
    };
    process.stderr.write(
      `  ${percent} % of what the workers can do: ${rate} requests/s for ${MEASURE_MS / 1000} s\n`,
    );
    const lengths = mix && { mix: mix.name, seed: percent + 0.5 };
    const planned = await simulate(load, lengths);
    const { run, meanBatch } = await serve(load, lengths);
    if (run.errors > 0) {
      const statuses = JSON.stringify(run.statuses);
      throw new Error(`${run.errors} requests failed (${statuses}); the figures mean nothing`);
    }
    const [p50, p99] = [run.latency.percentileMs(50), run.latency.percentileMs(99)];
    const apart = Math.abs(p99 - planned.p99);
    good &&= within(planned.p50, p50) && within(planned.p99, p99);
    good &&= mix !== undefined || apart <= 5 || apart <= 0.05 * p99;
    rows.push([
      `${percent} %`,
      ...compared(planned.p50, p50),
      ...compared(planned.p99, p99),
      planned.fill.toFixed(1),
      meanBatch.toFixed(1),
    ]);
    if (run.otherCores > 0.1) {
      process.stderr.write(
        `  others used ${run.otherCores.toFixed(2)} of a core meanwhile: not to be quoted\n`,
      );
    }
  }
} finally {
  rmSync(dir, { recursive: true });
}
for (const [at, row] of rows.entries()) {
  process.stdout.write(`| ${row.join(" | ")} |\n`);
  if (at === 0) process.stdout.write(`|${row.map(() => "---").join("|")}|\n`);
}
const goal = `p50 and p99 within 10 %${mix === undefined ? ", p99 within 5 % or 5 ms" : ""}`;
process.stdout.write(`${good ? "✓" : "✗"} ${goal}\n`);
process.exitCode = good ? 0 : 1;

/** The instants and lengths that the generator of this seed will be told, from its own schedule. */
function simulate(load: OpenLoad, lengths: LoadSpec["lengths"]): Promise<Figures> {
  const schedule = new Arrivals(load, [{ label: "all", share: 1 }], 0, WARM_MS, Math.random);
  const durationMs = WARM_MS + MEASURE_MS;
  const arrivals = (): number => {
    const at = schedule.nextAt;
    schedule.advance();
    return at < durationMs ? at : Infinity;
  };
  const nextLength = lengths && lengthsOf(lengths);
  return runTrial(fleet, { arrivals, durationMs, warmMs: WARM_MS, shares: [1], nextLength }, WORKERS, 1);
}

async function serve(
  load: OpenLoad,
  lengths: LoadSpec["lengths"],
): Promise<{ run: Measured; meanBatch: number }> {
  const { baseMs, perTaskMs: perItemMs, perCellMs: perTokenMs = 0 } = service;
  const times = { baseMs, perItemMs, perTokenMs };
  const { maxBatchSize, maxWaitMs } = fleet.limits;
  const limits = { maxBatchSize, maxWaitMs, timeouts: fleet.timeouts };
  await using server = await FerryServer.start({
    dir,
    models: [{ name: "plan", workers: WORKERS, ...times, ...limits, lengths: values.off ? "off" : "auto" }],
  });
  const counters: Counters[] = [];
  const read = async (): Promise<void> => void counters.push(await server.counters());
  const run = await measure(
    {
      target: server.target,
      bodyBytes: 256,
      ...(lengths && { lengths }),
      verify: true,
      warmMs: WARM_MS,
      measureMs: MEASURE_MS,
      drainMs: DRAIN_MS,
      load,
    },
    { serverPid: server.pid, onStart: read, onStop: read },
  );
  return { run, meanBatch: workBetween(counters[0]!, counters[1]!).meanBatch };
}

function within(planned: number, measured: number): boolean {
  return Math.abs(measured / planned - 1) <= 0.1;
}

function compared(planned: number, measured: number): string[] {
  return [`${planned.toFixed(1)} ms`, `${measured.toFixed(1)} ms`, (measured / planned).toFixed(3)];
}
