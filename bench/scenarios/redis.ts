/**
 * `redis`: the throughput through one gateway, Redis and one batcher, as a share of the embedded engine's.
 *
 * The load is that of `embedded` with 512 callers, or BENCH_CALLERS (a body of 2 KB; 64 workers of 1 ms, so
 * that none is waited for). The machine is the same for both: nothing is pinned, and all processes, the load
 * generator among them, share its cores. So the share says what the same machine serves when tasks go through Redis; three
 * processes do more work than one, and on few cores they cannot win that back by running side by side.
 *
 * A machine's speed drifts, so the two engines take turns in short slices, after a warm-up of each, and the
 * ratio is that of the medians. Before a slice of the embedded engine a rewrite of Redis's file is waited
 * for, so that it does not pay for what Redis does.
 *
 * CPU per task is what a process used during all of its slices over the tasks answered in them. A rewrite
 * is the work of a child of Redis and stands in a line of its own, with what it did between the slices.
 */
import { availableParallelism } from "node:os";
import { measure, type Measured } from "../generator.ts";
import type { LoadSpec } from "../load.ts";
import { Fleet, type RedisState } from "../redis.ts";
import { answered, coresUsed, errors, p99Ms, perTaskMicros, type Slices } from "../slices.ts";
import { FerryServer, workBetween, type Counters, type Work } from "../server.ts";
import {
  durationMs,
  figure,
  loadNotes,
  median,
  type Bench,
  type Figure,
  type Report,
  type Scenario,
} from "../scenario.ts";

/** With 256 a fifth of two cores stayed idle in redis turns; the embedded engine is as fast with either. */
const callers = Number(process.env["BENCH_CALLERS"] ?? 512);
const models = [{ name: "bench", workers: 64, baseMs: 1 }];

export const redis: Scenario = {
  name: "redis",
  summary: "gateway, Redis and batcher against the embedded engine: 2 KB body, 64 workers of 1 ms, in turns",
  run,
};

/** One engine's slices, and what its dispatcher did in them. */
interface Side extends Slices {
  readonly work: Work;
}

async function run(bench: Bench): Promise<Report> {
  await using embedded = await FerryServer.start({ dir: bench.dir, models });
  await using fleet = await Fleet.start({ dir: bench.dir, models });
  const turns = bench.quick ? 2 : 5;
  const embeddedRuns: Measured[] = [];
  const redisRuns: Measured[] = [];
  // Before the first turn that counts: optimised code takes some ten seconds.
  bench.progress("warming up");
  await slice(bench, embedded, 10);
  await slice(bench, fleet, 10);
  const counters = async (): Promise<[Counters, Counters, RedisState]> => [
    await embedded.counters(),
    await fleet.batcher.counters(),
    await fleet.redis.state(),
  ];
  const before = await counters();
  for (let turn = 1; turn <= turns; turn++) {
    bench.progress(`turn ${turn} of ${turns}: embedded`);
    await fleet.redis.quiet();
    embeddedRuns.push(await slice(bench, embedded, 4));
    bench.progress(`turn ${turn} of ${turns}: redis`);
    redisRuns.push(await slice(bench, fleet, 4));
  }
  await fleet.redis.quiet();
  const after = await counters();
  return report(
    { runs: embeddedRuns, work: workBetween(before[0], after[0]) },
    { runs: redisRuns, work: workBetween(before[1], after[1]) },
    [before[2], after[2]],
  );
}

function slice(bench: Bench, server: FerryServer | Fleet, seconds: number): Promise<Measured> {
  const door = server instanceof Fleet ? server.gateway : server;
  const spec: LoadSpec = {
    target: door.target,
    bodyBytes: 2048,
    verify: true,
    warmMs: 1500,
    measureMs: durationMs(bench, seconds),
    drainMs: 2000,
    load: { kind: "closed", callers },
  };
  const behind = server instanceof Fleet ? server.behind : {};
  return measure(spec, { serverPid: door.pid, behind });
}

function report(embedded: Side, redis: Side, [before, after]: readonly [RedisState, RedisState]): Report {
  const embeddedRate = median(embedded.runs.map((run) => run.rate));
  const redisRate = median(redis.runs.map((run) => run.rate));
  const rewriteMs = after.rewriteCpuMs - before.rewriteCpuMs;
  const figures = [
    figure("throughput, share of the embedded engine's", redisRate / embeddedRate, "ratio", ">=", 0.65),
    figure("embedded throughput, median", embeddedRate, "req/s"),
    figure("redis throughput, median", redisRate, "req/s"),
    figure("redis throughput, last turn to first", redis.runs.at(-1)!.rate / redis.runs[0]!.rate, "ratio"),
    figure("embedded latency, p99", p99Ms(embedded), "ms"),
    figure("redis latency, p99", p99Ms(redis), "ms"),
    figure("embedded mean batch", embedded.work.meanBatch, "count"),
    figure("redis mean batch", redis.work.meanBatch, "count"),
    ...cpuFigures(embedded, redis),
    figure("Redis CPU per task, rewriting its file", (rewriteMs * 1000) / answered(redis), "µs"),
    figure("Redis rewrites of its file", after.rewrites - before.rewrites, "count"),
    figure("Redis memory at the end", after.memoryKb, "KB"),
    figure("errors", errors(embedded) + errors(redis), "count", "<=", 0),
  ];
  return { figures, notes: [...notes(embedded, "embedded"), ...notes(redis, "redis")] };
}

function cpuFigures(embedded: Side, redis: Side): Figure[] {
  const behind =
    (name: string) =>
    ({ behindCpuShares }: Measured): number =>
      behindCpuShares[name] ?? NaN;
  const door = (run: Measured): number => run.serverCpuShare;
  const generator = (run: Measured): number => run.cpuShare;
  return [
    figure("Redis CPU per task", perTaskMicros(redis, behind("redis")), "µs"),
    figure("gateway CPU per task", perTaskMicros(redis, door), "µs"),
    figure("batcher CPU per task", perTaskMicros(redis, behind("batcher")), "µs"),
    figure("embedded CPU per task", perTaskMicros(embedded, door), "µs"),
    figure("generator CPU per task, redis turns", perTaskMicros(redis, generator), "µs"),
    figure("generator CPU per task, embedded turns", perTaskMicros(embedded, generator), "µs"),
    figure("cores used, redis turns", median(redis.runs.map(coresUsed)), "ratio"),
    figure("cores used, embedded turns", median(embedded.runs.map(coresUsed)), "ratio"),
  ];
}

function notes({ runs }: Side, name: string): string[] {
  const found = runs.flatMap((run, i) => loadNotes(run, `the generator, ${name} turn ${i + 1},`));
  // One process cannot use more than a core and a bit; three and the generator use all there are.
  const idle = availableParallelism() - median(runs.map((run) => coresUsed(run) + run.otherCores));
  if (name === "redis" && idle > 0.3) {
    found.push(`redis turns left ${idle.toFixed(1)} cores idle: throughput was not a matter of CPU alone`);
  }
  return found;
}
