/**
 * Fits batch timings: the line S(n) = base + n · perTask, and the knee. Theil-Sen: the slope is the median of all
 * pairwise slopes, the intercept the median residual, so a few disturbed sizes do not move it. Neither is negative. The
 * knee is the smallest size with nine tenths of the best throughput n / S(n); larger batches take longer for no gain.
 * The line is fitted to the sizes up to the knee, where it is used.
 */
import { CostEstimate } from "../../core/cost.ts";
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

/** A timed batch of inputs of known length. */
export interface ShapeTiming extends Timing {
  readonly longest: number;
  readonly total: number;
}

/** Early samples weigh less; after so many rounds of all batches they weigh nothing. */
const ROUNDS = 20;

/**
 * What time follows, as a dispatcher learns it: rows alone, n·l (padded) or t (packed). Needs batches that mix lengths:
 * n·l and t are equal otherwise.
 */
export function fitShapes(timings: readonly ShapeTiming[]): ServiceTime {
  const cost = new CostEstimate();
  for (let round = 0; round < ROUNDS; round++) {
    for (const { size, longest, total, ms } of timings) {
      cost.learn({ rows: size, longest, total, inOrder: longest }, ms);
    }
  }
  const { kind, baseMs, perRowMs: perTaskMs, perTokenMs } = cost;
  if (kind === "rows") return fitLine(timings);
  return { baseMs, perTaskMs, [kind === "padded" ? "perCellMs" : "perTokenMs"]: perTokenMs };
}

/**
 * Service time of a batch of n inputs, the longest of l tokens, all together of t: baseMs + n · perTaskMs + n·l ·
 * perCellMs + t · perTokenMs. Written `200ms`, `0.2s`, `36+1n`, `0.5+0.005n+0.00046nl` (a padded model) or `5+0.02t` (a
 * packed one).
 */

export interface ServiceTime {
  readonly baseMs: number;
  readonly perTaskMs: number;
  /** Per token of the padded batch, n·l. Default: 0. */
  readonly perCellMs?: number;
  /** Per token of its inputs, t. Default: 0. */
  readonly perTokenMs?: number;
}

const TERM = /^(\d+(?:\.\d+)?(?:e-?\d+)?)(?:(ms|s)?|(?:ms)?\*?(n\*?l|n|t))$/;
const PARTS = { n: "perTaskMs", nl: "perCellMs", t: "perTokenMs" } as const;

/** Undefined unless it is a sum of such terms, each at most once, that takes any time at all. */
export function parseService(text: string): ServiceTime | undefined {
  const found = new Map<keyof ServiceTime, number>();
  const terms = text.replaceAll(" ", "").replaceAll("·", "*").split("+");
  for (const term of terms) {
    const match = TERM.exec(term);
    if (match === null) return undefined;
    const [, value, unit, of] = match;
    const part = of === undefined ? "baseMs" : PARTS[of.replace("*", "") as keyof typeof PARTS];
    if (found.has(part)) return undefined;
    found.set(part, Number(value) * (unit === "s" ? 1000 : 1));
  }
  if (![...found.values()].some((value) => value > 0)) return undefined;
  return { baseMs: 0, perTaskMs: 0, ...Object.fromEntries(found) };
}

export function formatService({ baseMs, perTaskMs, perCellMs = 0, perTokenMs = 0 }: ServiceTime): string {
  const digits = (value: number): string => String(Number(value.toPrecision(3)));
  const further = (value: number, of: string): string => (value === 0 ? "" : ` + ${digits(value)}·${of}`);
  return `${digits(baseMs)}${further(perTaskMs, "n")}${further(perCellMs, "n·l")}${further(perTokenMs, "t")} ms`;
}

/** Without lengths of a model whose time does not depend on them. */
export function serviceMs(service: ServiceTime, size: number, longest = 0, total = size * longest): number {
  const { baseMs, perTaskMs, perCellMs = 0, perTokenMs = 0 } = service;
  return baseMs + perTaskMs * size + perCellMs * size * longest + perTokenMs * total;
}

export function dependsOnLength({ perCellMs = 0, perTokenMs = 0 }: ServiceTime): boolean {
  return perCellMs + perTokenMs > 0;
}

/** The same for inputs of one length: a line in n. */
export function atLength(service: ServiceTime, length: number): ServiceTime {
  const { baseMs, perTaskMs, perCellMs = 0, perTokenMs = 0 } = service;
  return { baseMs, perTaskMs: perTaskMs + (perCellMs + perTokenMs) * length };
}

/** Tasks per ms of one worker with full batches, where time does not depend on length. */
export function capacityOf(service: ServiceTime, maxBatchSize: number): number {
  return maxBatchSize / serviceMs(service, maxBatchSize);
}
