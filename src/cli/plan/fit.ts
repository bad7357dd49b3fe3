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

/** A timed batch of inputs of known length. */
export interface ShapeTiming extends Timing {
  readonly longest: number;
  readonly total: number;
}

/** A length must explain this share of what rows alone leave unexplained. */
const WORTH_A_TERM = 0.5;

/**
 * Time by rows alone, by rows and n·l (padded), or by rows and t (packed), whichever leaves the least relative error;
 * least squares of relative errors, no term negative. Needs batches that mix lengths: n·l and t are equal otherwise.
 */
export function fitShapes(timings: readonly ShapeTiming[]): ServiceTime {
  const padded = leastSquares(timings, ({ size, longest }) => size * longest);
  const packed = leastSquares(timings, ({ total }) => total);
  const rows = leastSquares(timings, () => 0);
  const [baseMs, perTaskMs, perToken] = padded.error <= packed.error ? padded.terms : packed.terms;
  if (Math.min(padded.error, packed.error) > WORTH_A_TERM * rows.error) {
    return { baseMs: rows.terms[0], perTaskMs: rows.terms[1] };
  }
  const kind = padded.error <= packed.error ? "perCellMs" : "perTokenMs";
  return { baseMs, perTaskMs, [kind]: perToken };
}

type Terms = [baseMs: number, perTask: number, perToken: number];

/** ms ≈ base + perTask · size + perToken · tokens; the best fit of those in which only non-negative terms are used. */
function leastSquares(
  timings: readonly ShapeTiming[],
  tokens: (timing: ShapeTiming) => number,
): { terms: Terms; error: number } {
  // Every choice of terms is tried: there are seven.
  let best: { terms: Terms; error: number } = { terms: [0, 0, 0], error: Infinity };
  for (let used = 1; used < 8; used++) {
    const columns = [0, 1, 2].filter((term) => (used >> term) & 1);
    const rows = timings.map((timing) => {
      const all = [1, timing.size, tokens(timing)];
      return columns.map((term) => all[term]! / timing.ms);
    });
    const found = solve(rows);
    if (found === undefined || found.some((value) => value < 0)) continue;
    const error = rows.reduce(
      (sum, row) => sum + (row.reduce((ms, value, at) => ms + value * found[at]!, 0) - 1) ** 2,
      0,
    );
    if (error >= best.error - 1e-12) continue;
    const terms: Terms = [0, 0, 0];
    for (const [at, term] of columns.entries()) terms[term] = found[at]!;
    best = { terms, error };
  }
  return best;
}

/** The x with rows · x ≈ 1, by the normal equations; undefined where they do not determine it. */
function solve(rows: readonly (readonly number[])[]): number[] | undefined {
  const width = rows[0]!.length;
  const matrix = Array.from({ length: width }, (_, one) => [
    ...Array.from({ length: width }, (_, other) =>
      rows.reduce((sum, row) => sum + row[one]! * row[other]!, 0),
    ),
    rows.reduce((sum, row) => sum + row[one]!, 0),
  ]);
  for (let at = 0; at < width; at++) {
    const [pivot, before] = [matrix[at]![at]!, rows.reduce((sum, row) => sum + row[at]! ** 2, 0)];
    if (!(pivot > 1e-9 * before)) return undefined;
    for (let other = 0; other < width; other++) {
      if (other === at) continue;
      const factor = matrix[other]![at]! / pivot;
      matrix[other] = matrix[other]!.map((value, column) => value - factor * matrix[at]![column]!);
    }
  }
  return matrix.map((row, at) => row[width]! / row[at]!);
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
