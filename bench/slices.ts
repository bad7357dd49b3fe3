/**
 * What scenarios that take turns read from the slices of one side.
 *
 * CPU per task is what a process used during all of its slices over the tasks answered in them.
 */
import { median } from "../src/core/median.ts";
import type { Measured } from "./generator.ts";

export interface Slices {
  readonly runs: readonly Measured[];
}

/** `share`: of which process, in cores. */
export function perTaskMicros(side: Slices, share: (run: Measured) => number): number {
  const seconds = side.runs.reduce((sum, run) => sum + share(run) * run.seconds, 0);
  return (seconds * 1e6) / answered(side);
}

/** By all processes of the scenario. */
export function coresUsed({ cpuShare, serverCpuShare, behindCpuShares, childrenCpuShare }: Measured): number {
  return [cpuShare, serverCpuShare, childrenCpuShare, ...Object.values(behindCpuShares)].reduce(
    (sum, share) => sum + share,
  );
}

export function p99Ms({ runs }: Slices): number {
  return median(runs.map((run) => run.latency.percentileMs(99)));
}

export function answered({ runs }: Slices): number {
  return runs.reduce((sum, run) => sum + run.answered, 0);
}

export function errors({ runs }: Slices): number {
  return runs.reduce((sum, run) => sum + run.errors, 0);
}
