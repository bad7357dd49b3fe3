/**
 * What a batch costs its worker, in milliseconds, learned from settled batches. Of n rows, with lengths in tokens:
 *
 *   rows      a + b·n                    the lengths do not matter, or all are alike
 *   padded    a + b·n + c·n·longest      every row is computed at the length of the longest, or at the next power of
 *                                        two (`stepped`: compiled for these), whichever explains more
 *   packed    a + b·n + c·total          only what was sent is computed
 *
 * Each is fitted by weighted least squares (relative errors, a memory of some hundred batches, no coefficient below 0).
 * `rows` holds until another explains clearly more: an error below ON of its error, kept until above OFF of it.
 *
 * Between `padded` and `packed` only batches of unlike inputs can decide, and under backlog every batch in order of
 * arrival has one long input: then neither differs from `rows`. `undecided` says that batches of other lengths than
 * usual are still needed to tell.
 */
import type { ServiceCurve } from "./policy.ts";
import { ServiceEstimate } from "./estimate.ts";

/** A padded model computes rows × longest cells, of which `total` are useful. */
export interface BatchShape {
  readonly rows: number;
  readonly longest: number;
  readonly total: number;
  /** The longest of the batch of as many rows that order of arrival would have made. */
  readonly inOrder: number;
}

/** Of a batch whose lengths are not known. */
export const unmeasured = (rows: number): BatchShape => ({ rows, longest: 0, total: 0, inOrder: 0 });

export type CostKind = "rows" | "padded" | "packed";
type FitKind = CostKind | "stepped";

const KEPT = 0.99; // decay per measured batch
const ERROR_WEIGHT = 0.03;
const FIRST_SAMPLES = 6; // these give the mean time only, by which the others weigh: of a cold start they are small and slow
const LEAST_SAMPLES = 18;
const ON = 0.6;
const OFF = 0.8;
const GOOD_ENOUGH = 0.0025; // mean squared relative error: `rows` is within 5 %
const CLEARER = 0.8; // of the kinds that know lengths, one replaces another below this share of its error
const CONTRASTS = 12; // batches of half or twice the usual longest that are enough to decide
const LEAST_UNLIKE = 3; // batches of half or twice the mean longest: without them a better fit is chance
/** Inputs of up to so many tokens are alike: no model gains by telling them apart. */
export const SHORT = 16;
const UNLIKE = 1.2; // computed over useful cells of batches of unlike inputs
const CLIP = 4;
const LEAST_MS = 0.1;
const WEIGHT = 0.05;

/**
 * Least squares over a few features that are never negative.
 *
 * A time is from reply to reply: a reply that was read late has taken from the next, and of two read at once the second
 * took no time. So a sample weighs by what was expected of it, which makes late and early cancel out, and short batches,
 * of which little is left, are judged against the mean time.
 */
class LinearFit {
  readonly #size: number;
  readonly #products: Float64Array; // Σ w·x·xᵀ
  readonly #targets: Float64Array; // Σ w·x·y
  readonly factors: Float64Array;
  error = 0; // mean squared error of predictions, relative to the larger of them, the batch's and the mean time

  constructor(size: number) {
    this.#size = size;
    this.#products = new Float64Array(size * size);
    this.#targets = new Float64Array(size);
    this.factors = new Float64Array(size);
  }

  of(features: readonly number[]): number {
    let sum = 0;
    for (let at = 0; at < this.#size; at++) sum += this.factors[at]! * features[at]!;
    return sum;
  }

  learn(features: readonly number[], ms: number, meanMs: number, judged: boolean): void {
    const size = this.#size;
    const expected = this.of(features);
    if (judged) {
      const off = (expected - ms) / Math.max(ms, expected, meanMs);
      this.error += ERROR_WEIGHT * (off * off - this.error);
    }
    const usual = Math.max(expected, ms / CLIP, meanMs / CLIP, LEAST_MS);
    const weight = 1 / (usual * usual);
    for (let row = 0; row < size; row++) {
      const x = weight * features[row]!;
      this.#targets[row] = KEPT * this.#targets[row]! + x * ms;
      for (let column = 0; column < size; column++) {
        const at = row * size + column;
        this.#products[at] = KEPT * this.#products[at]! + x * features[column]!;
      }
    }
    this.#solve();
  }

  /** Drops the most negative factor until none is. */
  #solve(): void {
    let used = Array.from({ length: this.#size }, (_, at) => at);
    for (;;) {
      const factors = this.#solveFor(used);
      const worst = factors.reduce((least, value, at) => (value < (factors[least] ?? 0) ? at : least), -1);
      if (worst < 0) {
        this.factors.fill(0);
        used.forEach((feature, at) => (this.factors[feature] = factors[at]!));
        return;
      }
      used = used.filter((_, at) => at !== worst);
    }
  }

  /** Gaussian elimination on scaled normal equations; a tiny ridge keeps features that vary together finite. */
  #solveFor(used: readonly number[]): number[] {
    const size = this.#size;
    const scale = used.map((at) => 1 / Math.sqrt(this.#products[at * size + at]! || 1));
    const rows = used.map((row, i) => [
      ...used.map(
        (column, j) => this.#products[row * size + column]! * scale[i]! * scale[j]! + (i === j ? 1e-6 : 0),
      ),
      this.#targets[row]! * scale[i]!,
    ]);
    const count = used.length;
    for (let pivot = 0; pivot < count; pivot++) {
      for (let row = pivot + 1; row < count; row++) {
        const factor = rows[row]![pivot]! / rows[pivot]![pivot]!;
        for (let column = pivot; column <= count; column++)
          rows[row]![column]! -= factor * rows[pivot]![column]!;
      }
    }
    const found: number[] = [];
    for (let row = count - 1; row >= 0; row--) {
      let value = rows[row]![count]!;
      for (let column = row + 1; column < count; column++) value -= rows[row]![column]! * found[column]!;
      found[row] = value / rows[row]![row]!;
    }
    return found.map((value, at) => value * scale[at]!);
  }
}

export class CostEstimate implements ServiceCurve {
  readonly #line = new ServiceEstimate();
  readonly #fits = {
    rows: new LinearFit(2),
    padded: new LinearFit(3),
    stepped: new LinearFit(3),
    packed: new LinearFit(3),
  };
  #kind: FitKind = "rows";
  #measured = 0;
  #contrasts = 0;
  #meanLongest = 0;
  #unlike = 0;
  #most = 0; // rows of the largest batch
  #longest = 0; // usual longest input of large batches
  #cells = 0; // means over measured batches: rows × longest, the same in steps, tokens, rows
  #steps = 0;
  #tokens = 0;
  #rows = 0;
  #meanMs = 0;
  #deviationMs = 0; // around `msOf`, while that knows lengths

  /** The model is known to pad: nothing has to be found out. */
  assumePadded = false;

  get kind(): CostKind {
    return this.#kind === "stepped" ? "padded" : this.#kind;
  }

  /** Rows are padded to a power of two. */
  get stepped(): boolean {
    return this.#kind === "stepped";
  }

  get samples(): number {
    return this.#line.samples;
  }

  get settled(): boolean {
    return this.#line.settled;
  }

  /** Whether inputs differ in length, and batches of other lengths are needed to learn what their time follows. */
  get undecided(): boolean {
    if (this.#kind !== "rows" || this.#contrasts >= CONTRASTS) return false;
    return this.#measured < LEAST_SAMPLES || this.paddingRatio > UNLIKE;
  }

  /** Mean deviation of batches from `msOf`. */
  get deviationMs(): number {
    return this.#kind === "rows" ? this.#line.deviationMs : this.#deviationMs;
  }

  /** Mean deviation of batches from `msFor`: with unlike batches, more than `deviationMs`. */
  get spreadMs(): number {
    return this.#line.deviationMs;
  }

  get baseMs(): number {
    return this.#kind === "rows" ? this.#line.baseMs : this.#fits[this.#kind].factors[0]!;
  }

  /** b, and where lengths matter the usual cost of a row's tokens. */
  get perTaskMs(): number {
    if (this.#kind === "rows") return this.#line.perTaskMs;
    const tokens = this.#kind === "packed" ? this.#tokens : this.stepped ? this.#steps : this.#cells;
    return this.perRowMs + (this.perTokenMs * tokens) / Math.max(1, this.#rows);
  }

  get perRowMs(): number {
    return this.#kind === "rows" ? this.#line.perTaskMs : this.#fits[this.#kind].factors[1]!;
  }

  /** c: of a computed token; 0 where lengths do not matter. */
  get perTokenMs(): number {
    return this.#kind === "rows" ? 0 : this.#fits[this.#kind].factors[2]!;
  }

  /** Computed over useful cells of the batches of late, were they padded; 1 before any was measured. */
  get paddingRatio(): number {
    return this.#tokens === 0 ? 1 : (this.stepped ? this.#steps : this.#cells) / this.#tokens;
  }

  /** Expected time of a usual batch of `size`. */
  msFor(size: number): number {
    if (this.#kind === "rows") return this.#line.msFor(size);
    return Math.max(LEAST_MS, this.baseMs + this.perTaskMs * size);
  }

  /** Expected time of this batch. */
  msOf(shape: BatchShape): number {
    if (this.#kind === "rows" || shape.total === 0) return this.msFor(shape.rows);
    return Math.max(LEAST_MS, this.#fits[this.#kind].of(featuresOf(this.#kind, shape)));
  }

  /** `shape.total` 0: its lengths were not measured. */
  learn(shape: BatchShape, ms: number): void {
    if (!Number.isFinite(ms)) return; // one would make every estimate NaN for ever
    const { rows, longest, total } = shape;
    if (this.#kind !== "rows")
      this.#deviationMs += WEIGHT * (Math.abs(ms - this.msOf(shape)) - this.#deviationMs);
    this.#line.learn(rows, ms);
    if (total === 0) return;
    this.#measured++;
    const weight = Math.max(WEIGHT, 1 / this.#measured);
    this.#contrast(rows, longest, weight);
    const length = Math.max(SHORT, longest);
    if (length * 2 <= this.#meanLongest || length >= 2 * this.#meanLongest) this.#unlike++;
    this.#meanLongest += weight * (length - this.#meanLongest);
    this.#rows += weight * (rows - this.#rows);
    this.#cells += weight * (rows * longest - this.#cells);
    this.#steps += weight * (rows * powerOfTwo(longest) - this.#steps);
    this.#tokens += weight * (total - this.#tokens);
    this.#meanMs += weight * (ms - this.#meanMs);
    const sample = this.settled ? Math.min(ms, CLIP * Math.max(this.msOf(shape), this.#meanMs)) : ms;
    const judged = this.#measured > LEAST_SAMPLES / 2;
    if (this.#measured <= FIRST_SAMPLES) return;
    for (const kind of ["rows", "padded", "stepped", "packed"] as const)
      this.#fits[kind].learn(featuresOf(kind, shape), sample, this.#meanMs, judged);
    if (this.#measured >= LEAST_SAMPLES) this.#decide();
  }

  /** Only batches of at least half the most rows: single inputs cost the same padded and packed. */
  #contrast(rows: number, longest: number, weight: number): void {
    if (rows >= 2 * this.#most) this.#contrasts = this.#longest = 0;
    this.#most = Math.max(this.#most, rows);
    if (rows * 2 < this.#most) return;
    if (this.#longest === 0) this.#longest = longest;
    if (longest * 2 <= this.#longest || longest >= 2 * this.#longest) this.#contrasts++;
    this.#longest += weight * (longest - this.#longest);
  }

  #decide(): void {
    const { rows } = this.#fits;
    const before = this.#kind;
    let best = before === "rows" ? "padded" : before;
    for (const other of ["padded", "stepped", "packed"] as const) {
      const clearer = before === best && other !== best ? CLEARER : 1;
      if (this.#fits[other].error < clearer * this.#fits[best].error) best = other;
    }
    if (this.assumePadded) best = "padded";
    const explains = this.#fits[best].error < (before === "rows" ? ON : OFF) * rows.error;
    const rowsWillDo = before === "rows" && (rows.error < GOOD_ENOUGH || this.#unlike < LEAST_UNLIKE);
    this.#kind = this.assumePadded || (explains && !rowsWillDo) ? best : "rows";
    // What seemed to explain it no longer does: find out again.
    if (before !== "rows" && this.#kind === "rows") this.#contrasts = 0;
    if (before === "rows" && this.#kind !== "rows")
      this.#deviationMs = Math.sqrt(this.#fits[best].error) * this.msFor(this.#rows);
  }
}

function featuresOf(kind: FitKind, { rows, longest, total }: BatchShape): number[] {
  if (kind === "rows") return [1, rows];
  if (kind === "packed") return [1, rows, total];
  return [1, rows, rows * (kind === "padded" ? longest : powerOfTwo(longest))];
}

/** The power of two that holds it. */
export function powerOfTwo(length: number): number {
  return 2 ** (32 - Math.clz32(length - 1));
}
