/** Runs the load generator (load.ts) in a process of its own and reads what it says. */
import { join } from "node:path";
import { Histogram } from "../src/cli/bench/histogram.ts";
import type { LoadResult, LoadSpec, Tick } from "./load.ts";
import { Tallied } from "./tally.ts";
import { Child, childrenCpuMs, cpuMs, machineCpuMs, type ChildOptions } from "./process.ts";

export interface LoadOptions extends ChildOptions {
  /** The server, for its CPU share. */
  readonly serverPid: number;
  /** The processes behind the server, by name, for theirs. */
  readonly behind?: Readonly<Record<string, number>>;
  onTick?(tick: Tick): void;
  /** Called when a phase after the first begins. */
  onPhase?(phase: string): void;
  /** Called when measuring begins and ends; must not take long. */
  onStart?(): Promise<void>;
  onStop?(): Promise<void>;
}

/** One run of the generator, as the scenarios read it. */
export interface Measured extends Omit<LoadResult, "latency" | "lag" | "tally"> {
  readonly latency: Histogram;
  readonly lag: Histogram;
  /** Empty unless the spec has `sliceMs`. */
  readonly tally: Tallied;
  /** Answers with status 200 per second. */
  readonly rate: number;
  /** Everything that was not answered, or answered with another status than 200, or crossed. */
  readonly errors: number;
  readonly serverCpuShare: number;
  /** CPU shares in each phase, as far as phases have names. */
  readonly phaseCpu: Readonly<Record<string, { readonly server: number; readonly generator: number }>>;
  /** By the names in `behind`. */
  readonly behindCpuShares: Readonly<Record<string, number>>;
  /** Of the children of all these: a Redis that rewrites its file has one. */
  readonly childrenCpuShare: number;
  /** Cores that other processes used meanwhile, and that the hypervisor took away. */
  readonly otherCores: number;
}

interface CpuReading {
  readonly atMs: number;
  readonly generatorMs: number;
  readonly serverMs: number;
  readonly behindMs: Readonly<Record<string, number>>;
  readonly childrenMs: number;
  readonly usedMs: number;
  readonly stolenMs: number;
}

export async function measure(spec: LoadSpec, options: LoadOptions): Promise<Measured> {
  await using child = new Child(join(import.meta.dirname, "load.ts"), [JSON.stringify(spec)], options);
  const readings: Promise<void>[] = [];
  const cpu: CpuReading[] = [];
  const behind = Object.entries(options.behind ?? {});
  const readCpu = (): void => {
    const behindMs = Object.fromEntries(behind.map(([name, pid]) => [name, cpuMs(pid)]));
    const childrenMs = behind.reduce((sum, [, pid]) => sum + childrenCpuMs(pid), 0);
    cpu.push({
      atMs: performance.now(),
      generatorMs: cpuMs(child.pid),
      serverMs: cpuMs(options.serverPid),
      behindMs,
      childrenMs,
      ...machineCpuMs(),
    });
  };
  child.onLine((line) => {
    const tick = parseTick(line);
    if (tick === undefined) return;
    if (tick.event === "start") {
      readCpu();
      readings.push(options.onStart?.() ?? Promise.resolve());
    } else if (tick.event === "phase") {
      readCpu();
      options.onPhase?.(tick.phase!);
    } else if (tick.event === "stop") {
      readCpu();
      readings.push(options.onStop?.() ?? Promise.resolve());
    }
    options.onTick?.(tick);
  });
  const output = await child.output(spec.warmMs + spec.measureMs + spec.drainMs + 20_000);
  await Promise.all(readings);
  const result = JSON.parse(output) as LoadResult;
  const ok = result.statuses["200"] ?? 0;
  return {
    ...result,
    latency: Histogram.from(result.latency),
    lag: Histogram.from(result.lag),
    tally: new Tallied(result.tally ?? { sliceMs: 1000, phases: [], accounts: [], slices: [] }),
    rate: ok / result.seconds,
    errors: result.answered - ok + result.crossed + result.broken + result.unanswered + result.unsent,
    ...cpuShares([cpu[0], cpu.at(-1)], result),
    phaseCpu: phaseShares(cpu, spec),
  };
}

/** There is a reading at the start of each phase, and one at the end of the last. */
function phaseShares(cpu: readonly CpuReading[], { load }: LoadSpec): Measured["phaseCpu"] {
  const phases = (load.kind === "open" && load.phases) || [];
  const shares = phases.flatMap(({ name }, i) => {
    const [from, to] = [cpu[i], cpu[i + 1]];
    if (from === undefined || to === undefined) return [];
    const ms = to.atMs - from.atMs;
    const server = (to.serverMs - from.serverMs) / ms;
    return [[name, { server, generator: (to.generatorMs - from.generatorMs) / ms }] as const];
  });
  return Object.fromEntries(shares);
}

function cpuShares(
  [from, to]: readonly (CpuReading | undefined)[],
  { seconds, cpuShare }: LoadResult,
): Pick<Measured, "serverCpuShare" | "behindCpuShares" | "childrenCpuShare" | "otherCores"> {
  if (from === undefined || to === undefined)
    return { serverCpuShare: NaN, behindCpuShares: {}, childrenCpuShare: NaN, otherCores: NaN };
  const cores = (pick: (reading: CpuReading) => number): number => (pick(to) - pick(from)) / (seconds * 1000);
  const serverCpuShare = cores((reading) => reading.serverMs);
  const all = cores((reading) => reading.usedMs + reading.stolenMs);
  const names = Object.keys(from.behindMs);
  const behindCpuShares = Object.fromEntries(
    names.map((name) => [name, cores((reading) => reading.behindMs[name]!)]),
  );
  const childrenCpuShare = cores((reading) => reading.childrenMs);
  const known = [cpuShare, serverCpuShare, childrenCpuShare, ...Object.values(behindCpuShares)];
  const otherCores = Math.max(
    0,
    known.reduce((rest, share) => rest - share, all),
  );
  return { serverCpuShare, behindCpuShares, childrenCpuShare, otherCores };
}

function parseTick(line: string): Tick | undefined {
  // Node's own warnings also come this way.
  return line.startsWith('{"event":') ? (JSON.parse(line) as Tick) : undefined;
}
