/**
 * Fits batch timings: the line S(n) = base + n · perTask, and the knee. Theil-Sen: the slope is the median of all
 * pairwise slopes, the intercept the median residual, so a few disturbed sizes do not move it. Neither is negative. The
 * knee is the smallest size with nine tenths of the best throughput n / S(n); larger batches take longer for no gain.
 * The line is fitted to the sizes up to the knee, where it is used.
 */
import { WORTH } from "../../core/knee.ts";
import { median } from "../../core/median.ts";

export interface Timing {
  readonly size: number;
  readonly ms: number;
}

export interface Fit {
  readonly service: ServiceTime;
  readonly knee: number;
  /** The knee is the largest size timed: a larger one may be better. */
  readonly open: boolean;
}

/** Timings ordered by size; at least one. */
export function fit(timings: readonly Timing[]): Fit {
  const knee = kneeOf(timings);
  const service = fitLine(timings.filter(({ size }) => size <= knee));
  return { service, knee, open: knee === timings.at(-1)!.size };
}

export function kneeOf(timings: readonly Timing[]): number {
  const best = Math.max(...timings.map(throughput));
  return timings.find((timing) => throughput(timing) >= WORTH * best)!.size;
}

function throughput({ size, ms }: Timing): number {
  return size / ms;
}

export function fitLine(timings: readonly Timing[]): ServiceTime {
  const slopes: number[] = [];
  for (const one of timings) {
    for (const other of timings) {
      if (other.size > one.size) slopes.push((other.ms - one.ms) / (other.size - one.size));
    }
  }
  const perTaskMs = slopes.length === 0 ? 0 : Math.max(0, median(slopes));
  const baseMs = Math.max(0, median(timings.map(({ size, ms }) => ms - perTaskMs * size)));
  return { baseMs, perTaskMs };
}

/**
 * Service time of a batch: S(n) = baseMs + n · perTaskMs, written `200ms`, `0.2s` or `36+1n`. With λ arrivals per ms, k
 * workers and largest batch B: capacity = k · B / S(B), load = λ / capacity.
 */

export interface ServiceTime {
  readonly baseMs: number;
  readonly perTaskMs: number;
}

const PATTERN = /^(?:(\d+(?:\.\d+)?)(ms|s)?)(?:\+(\d+(?:\.\d+)?)(?:ms)?\*?n)?$|^(\d+(?:\.\d+)?)(?:ms)?\*?n$/;

export function parseService(text: string): ServiceTime | undefined {
  const match = PATTERN.exec(text.replaceAll(" ", "").replaceAll("·", "*"));
  if (match === null) return undefined;
  const baseMs = Number(match[1] ?? 0) * (match[2] === "s" ? 1000 : 1);
  const perTaskMs = Number(match[3] ?? match[4] ?? 0);
  return baseMs + perTaskMs > 0 ? { baseMs, perTaskMs } : undefined;
}

export function formatService({ baseMs, perTaskMs }: ServiceTime): string {
  const digits = (value: number): string => String(Number(value.toPrecision(3)));
  return perTaskMs === 0 ? `${digits(baseMs)} ms` : `${digits(baseMs)} + ${digits(perTaskMs)}·n ms`;
}

export function serviceMs({ baseMs, perTaskMs }: ServiceTime, size: number): number {
  return baseMs + perTaskMs * size;
}

/** Tasks per ms of one worker with full batches. */
export function capacityOf(service: ServiceTime, maxBatchSize: number): number {
  return maxBatchSize / serviceMs(service, maxBatchSize);
}
