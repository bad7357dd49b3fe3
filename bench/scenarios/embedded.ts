/**
 * `embedded`: the throughput of the whole path on one core, as a share of the floor's.
 *
 * Requests with a body of 2 KB go through parsing, admission, queue, batch, simulated worker, settling
 * and reply; 64 workers of 1 ms make sure that none of them is what is waited for. The floor is a bare
 * `node:http` echo (floor.ts) on the same core. Both send the 2 KB back.
 *
 * A machine's speed drifts (other tenants, clock, heat), so the two take turns in short slices, each
 * after a warm-up of its own, and the ratio is that of the medians. When neither the server nor the
 * generator came near its core's limit, a note says so: throughput was then not a matter of CPU.
 *
 * The last turn against the first shows what gets slower as Ferry fills up: after some 100,000 answers
 * the cache and the kept results have reached their bounds, which is the state that a server lives in.
 */
import { median } from "../../src/core/median.ts";
import { measure, type Measured } from "../generator.ts";
import type { LoadSpec } from "../load.ts";
import { FerryServer, FloorServer, workBetween, type Counters } from "../server.ts";
import { durationMs, figure, loadNotes, type Bench, type Report, type Scenario } from "../scenario.ts";

const callers = 256;

export const embedded: Scenario = {
  name: "embedded",
  summary: "the whole path against a bare node:http echo: 2 KB body, 64 workers of 1 ms, same core, in turns",
  run,
};

async function run(bench: Bench): Promise<Report> {
  const core = bench.cores?.server;
  await using floor = await FloorServer.start({ core });
  await using ferry = await FerryServer.start({
    dir: bench.dir,
    core,
    models: [{ name: "bench", workers: 64, baseMs: 1 }],
  });
  const turns = bench.quick ? 2 : 5;
  const floorRuns: Measured[] = [];
  const ferryRuns: Measured[] = [];
  // Before the first turn that counts: both then run optimised code, which takes Ferry some ten seconds.
  await slice(bench, floor, false, 2);
  await slice(bench, ferry, true, 10);
  const before = await ferry.counters();
  for (let turn = 1; turn <= turns; turn++) {
    bench.progress(`turn ${turn} of ${turns}: floor`);
    floorRuns.push(await slice(bench, floor, false, 4));
    bench.progress(`turn ${turn} of ${turns}: ferry`);
    ferryRuns.push(await slice(bench, ferry, true, 4));
  }
  return report(floorRuns, ferryRuns, before, await ferry.counters());
}

function slice(
  bench: Bench,
  server: FloorServer | FerryServer,
  verify: boolean,
  seconds: number,
): Promise<Measured> {
  const spec: LoadSpec = {
    target: server.target,
    bodyBytes: 2048,
    verify,
    warmMs: 1500,
    measureMs: durationMs(bench, seconds),
    drainMs: 2000,
    load: { kind: "closed", callers },
  };
  return measure(spec, { core: bench.cores?.generator, serverPid: server.pid });
}

function report(
  floorRuns: readonly Measured[],
  ferryRuns: readonly Measured[],
  before: Counters,
  after: Counters,
): Report {
  const runs = [...floorRuns, ...ferryRuns];
  const floorRate = median(floorRuns.map((run) => run.rate));
  const ferryRate = median(ferryRuns.map((run) => run.rate));
  const ferryCpu = median(ferryRuns.map((run) => run.serverCpuShare));
  const generatorCpu = Math.max(...runs.map((run) => run.cpuShare));
  const notes = [
    ...floorRuns.flatMap((run, i) => loadNotes(run, `the generator, floor turn ${i + 1},`)),
    ...ferryRuns.flatMap((run, i) => loadNotes(run, `the generator, ferry turn ${i + 1},`)),
  ];
  const alone = runs.every((run) => run.otherCores < 0.1);
  if (alone && ferryCpu < 0.9 && generatorCpu < 0.9)
    notes.push("ferry did not use its whole core: it waited for something");
  return {
    figures: [
      figure("throughput, share of the floor's", ferryRate / floorRate, "ratio", ">=", 0.5),
      figure("floor throughput, median", floorRate, "req/s"),
      figure("ferry throughput, median", ferryRate, "req/s"),
      figure("ferry throughput, last turn to first", ferryRuns.at(-1)!.rate / ferryRuns[0]!.rate, "ratio"),
      figure("ferry latency, p99", median(ferryRuns.map((run) => run.latency.percentileMs(99))), "ms"),
      figure("mean batch", workBetween(before, after).meanBatch, "count"),
      figure("ferry CPU", ferryCpu * 100, "%"),
      figure("generator CPU, highest", generatorCpu * 100, "%"),
      figure(
        "errors",
        runs.reduce((sum, run) => sum + run.errors, 0),
        "count",
        "<=",
        0,
      ),
    ],
    notes,
  };
}
