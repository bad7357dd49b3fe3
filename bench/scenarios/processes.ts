/**
 * `processes`: one gateway, and one with `--processes 2`, in turns, on the same Redis and the same batcher.
 *
 * The load is that of `redis-1x1` of bench/scaleout.ts (a body of 2 KB, 64 workers of 1 ms, BENCH_CALLERS callers in a closed loop), so what is
 * compared is the gateway alone. Nothing is pinned, and the load generator, Redis and the batcher share the machine's
 * cores with it: a second process can only win where a core is left for it. With fewer cores than these processes want
 * the ratio says what a second one costs, not what it gains; `cores used` and the note say which it was.
 *
 * BENCH_PROCESSES=4 tries another number of them.
 */
import { median } from "../../src/core/median.ts";
import { availableParallelism } from "node:os";
import { measure, type Measured } from "../generator.ts";
import { childPids } from "../process.ts";
import { Fleet } from "../redis.ts";
import type { FerryServer } from "../server.ts";
import { coresUsed, errors, p99Ms, perTaskMicros, type Slices } from "../slices.ts";
import {
  durationMs,
  figure,
  loadNotes,
  type Bench,
  type Figure,
  type Report,
  type Scenario,
} from "../scenario.ts";

const callers = Number(process.env["BENCH_CALLERS"] ?? 512);
const count = Number(process.env["BENCH_PROCESSES"] ?? 2);
const models = [{ name: "bench", workers: 64, baseMs: 1 }];
/** Less than this many idle cores is a machine that is full. */
const idleCores = 0.3;

export const processes: Scenario = {
  name: "processes",
  summary: `one gateway against one with --processes ${count}, on one Redis and batcher, in turns`,
  run,
};

async function run(bench: Bench): Promise<Report> {
  await using fleet = await Fleet.start({ dir: bench.dir, models }, [1, count]);
  const [one, several] = fleet.gateways as [FerryServer, FerryServer];
  const oneRuns: Measured[] = [];
  const severalRuns: Measured[] = [];
  bench.progress("warming up");
  await slice(bench, fleet, one, 8);
  await slice(bench, fleet, several, 10);
  const turns = bench.quick ? 2 : 4;
  for (let turn = 1; turn <= turns; turn++) {
    bench.progress(`turn ${turn} of ${turns}`);
    oneRuns.push(await slice(bench, fleet, one, 4));
    severalRuns.push(await slice(bench, fleet, several, 4));
  }
  return report({ runs: oneRuns }, { runs: severalRuns });
}

function slice(bench: Bench, fleet: Fleet, door: FerryServer, seconds: number): Promise<Measured> {
  // A gateway without a parent has no children.
  const children = childPids(door.pid).map((pid, at) => [`process ${at + 1}`, pid] as const);
  return measure(
    {
      target: door.target,
      bodyBytes: 2048,
      verify: true,
      warmMs: 1500,
      measureMs: durationMs(bench, seconds),
      drainMs: 2000,
      load: { kind: "closed", callers },
    },
    { serverPid: door.pid, behind: { ...fleet.behind, ...Object.fromEntries(children) } },
  );
}

function report(one: Slices, several: Slices): Report {
  const rate = ({ runs }: Slices): number => median(runs.map((run) => run.rate));
  const parent = (run: Measured): number => run.serverCpuShare;
  const spread = several.runs.map((run) => Math.max(...children(run)) / sum(children(run)));
  const figures = [
    figure(`throughput, ${count} processes to one`, rate(several) / rate(one), "ratio"),
    figure("one: throughput, median", rate(one), "req/s"),
    figure(`${count}: throughput, median`, rate(several), "req/s"),
    figure("one: latency, p99", p99Ms(one), "ms"),
    figure(`${count}: latency, p99`, p99Ms(several), "ms"),
    figure("one: gateway CPU per task", perTaskMicros(one, parent), "µs"),
    figure(
      `${count}: gateway CPU per task, all together`,
      perTaskMicros(several, (run) => sum(children(run))),
      "µs",
    ),
    figure(`${count}: parent's CPU per task`, perTaskMicros(several, parent), "µs"),
    figure(`${count}: the busiest process's share of that`, median(spread) * 100, "%"),
    ...behindFigures("one", one),
    ...behindFigures(String(count), several),
    figure("errors", errors(one) + errors(several), "count", "<=", 0),
  ];
  const notes = [
    ...one.runs.flatMap((run, i) => loadNotes(run, `the generator, one, turn ${i + 1},`)),
    ...several.runs.flatMap((run, i) => loadNotes(run, `the generator, ${count}, turn ${i + 1},`)),
  ];
  return { figures, notes: [...notes, ...fullNote(one)] };
}

function behindFigures(name: string, side: Slices): Figure[] {
  return [
    figure(`${name}: Redis CPU per task`, perTaskMicros(side, behind("redis")), "µs"),
    figure(`${name}: batcher CPU per task`, perTaskMicros(side, behind("batcher")), "µs"),
    figure(
      `${name}: generator CPU per task`,
      perTaskMicros(side, (run) => run.cpuShare),
      "µs",
    ),
    figure(`${name}: cores used`, median(side.runs.map(coresUsed)), "ratio"),
  ];
}

/** What one gateway left unused is what a second process could have had. */
function fullNote({ runs }: Slices): string[] {
  const idle = availableParallelism() - median(runs.map((run) => coresUsed(run) + run.otherCores));
  if (idle >= idleCores) return [];
  const cores = `${availableParallelism()} cores`;
  return [
    `with one gateway ${cores} were in use but for ${Math.max(0, idle).toFixed(1)}: nothing was left to gain`,
  ];
}

function behind(name: string): (run: Measured) => number {
  return ({ behindCpuShares }) => behindCpuShares[name] ?? NaN;
}

function children({ behindCpuShares }: Measured): number[] {
  return Object.entries(behindCpuShares)
    .filter(([name]) => name.startsWith("process "))
    .map(([, share]) => share);
}

function sum(values: readonly number[]): number {
  return values.reduce((total, value) => total + value, 0);
}
