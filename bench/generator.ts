/** Runs the load generator (load.ts) in a process of its own and reads what it says. */
import { join } from "node:path";
import { Histogram } from "./histogram.ts";
import type { LoadResult, LoadSpec, Tick } from "./load.ts";
import { Child, cpuMs, machineCpuMs, type ChildOptions } from "./process.ts";

export interface LoadOptions extends ChildOptions {
  /** The server, for its CPU share. */
  readonly serverPid: number;
  onTick?(tick: Tick): void;
  /** Called when measuring begins and ends; must not take long. */
  onStart?(): Promise<void>;
  onStop?(): Promise<void>;
}

/** One run of the generator, as the scenarios read it. */
export interface Measured extends Omit<LoadResult, "latency" | "lag"> {
  readonly latency: Histogram;
  readonly lag: Histogram;
  /** Answers with status 200 per second. */
  readonly rate: number;
  /** Everything that was not answered, or answered with another status than 200, or crossed. */
  readonly errors: number;
  readonly serverCpuShare: number;
  /** Cores that other processes used meanwhile, and that the hypervisor took away. */
  readonly otherCores: number;
}

interface CpuReading {
  readonly serverMs: number;
  readonly usedMs: number;
  readonly stolenMs: number;
}

export async function measure(spec: LoadSpec, options: LoadOptions): Promise<Measured> {
  await using child = new Child(join(import.meta.dirname, "load.ts"), [JSON.stringify(spec)], options);
  const readings: Promise<void>[] = [];
  const cpu: CpuReading[] = [];
  const readCpu = (): number => cpu.push({ serverMs: cpuMs(options.serverPid), ...machineCpuMs() });
  child.onLine((line) => {
    const tick = parseTick(line);
    if (tick === undefined) return;
    if (tick.event === "start") {
      readCpu();
      readings.push(options.onStart?.() ?? Promise.resolve());
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
    rate: ok / result.seconds,
    errors: result.answered - ok + result.crossed + result.broken + result.unanswered + result.unsent,
    ...cpuShares(cpu, result),
  };
}

function cpuShares(
  [from, to]: readonly CpuReading[],
  { seconds, cpuShare }: LoadResult,
): Pick<Measured, "serverCpuShare" | "otherCores"> {
  if (from === undefined || to === undefined) return { serverCpuShare: NaN, otherCores: NaN };
  const cores = (pick: (reading: CpuReading) => number): number => (pick(to) - pick(from)) / (seconds * 1000);
  const serverCpuShare = cores((reading) => reading.serverMs);
  const all = cores((reading) => reading.usedMs + reading.stolenMs);
  return { serverCpuShare, otherCores: Math.max(0, all - serverCpuShare - cpuShare) };
}

function parseTick(line: string): Tick | undefined {
  // Node's own warnings also come this way.
  return line.startsWith('{"event":') ? (JSON.parse(line) as Tick) : undefined;
}
