/**
 * Latency histogram with a bounded relative error and fixed memory. Milliseconds, stored as whole microseconds in
 * log-linear buckets: 1 µs wide below 256 µs, above that 128 per power of two. A percentile returns the middle of its
 * bucket, so the error is at most 1/256 (0.4 %) plus 0.5 µs rounding. `min`, `max` and `meanMs` are exact. Clamped to 0
 * … 71 minutes. Percentile p is the smallest value with at least p % of the samples at or below it (nearest rank), so
 * p100 is the maximum. Every figure of an empty histogram is NaN: no samples is not "0 ms", and a goal compared with
 * NaN is missed.
 */

const subBits = 7;
const sub = 1 << subBits;
const maxMicros = 0xffff_ffff;
const bucketCount = (32 - subBits + 1) * sub;

/** Sent from the load generator's process to ours. */
export interface HistogramState {
  readonly buckets: readonly (readonly [index: number, count: number])[];
  readonly sumMs: number;
  readonly minMs: number;
  readonly maxMs: number;
}

export class Histogram {
  readonly #counts = new Float64Array(bucketCount);
  #count = 0;
  #sumMs = 0;
  #minMs = Infinity;
  #maxMs = -Infinity;

  record(ms: number): void {
    const value = ms > 0 ? ms : 0;
    const index = bucketOf(Math.min(Math.round(value * 1000), maxMicros));
    this.#counts[index] = this.#counts[index]! + 1;
    this.#count += 1;
    this.#sumMs += value;
    if (value < this.#minMs) this.#minMs = value;
    if (value > this.#maxMs) this.#maxMs = value;
  }

  merge(other: Histogram): void {
    for (let i = 0; i < bucketCount; i++) this.#counts[i] = this.#counts[i]! + other.#counts[i]!;
    this.#count += other.#count;
    this.#sumMs += other.#sumMs;
    this.#minMs = Math.min(this.#minMs, other.#minMs);
    this.#maxMs = Math.max(this.#maxMs, other.#maxMs);
  }

  get count(): number {
    return this.#count;
  }

  get meanMs(): number {
    return this.#count === 0 ? NaN : this.#sumMs / this.#count;
  }

  get minMs(): number {
    return this.#count === 0 ? NaN : this.#minMs;
  }

  get maxMs(): number {
    return this.#count === 0 ? NaN : this.#maxMs;
  }

  percentileMs(p: number): number {
    if (this.#count === 0) return NaN;
    const rank = Math.max(1, Math.ceil((p / 100) * this.#count));
    // The ends are exact; the middle of their bucket could lie outside the measured range.
    if (rank >= this.#count) return this.#maxMs;
    let seen = 0;
    for (let i = 0; i < bucketCount; i++) {
      seen += this.#counts[i]!;
      if (seen >= rank) return Math.min(Math.max(middleOf(i) / 1000, this.#minMs), this.#maxMs);
    }
    return this.#maxMs;
  }

  /** Samples above this; those in its own bucket do not count. */
  countAbove(ms: number): number {
    let above = 0;
    const from = bucketOf(Math.min(Math.round(ms * 1000), maxMicros)) + 1;
    for (let i = from; i < bucketCount; i++) above += this.#counts[i]!;
    return above;
  }

  state(): HistogramState {
    const buckets: [number, number][] = [];
    for (let i = 0; i < bucketCount; i++) {
      if (this.#counts[i]! > 0) buckets.push([i, this.#counts[i]!]);
    }
    // JSON has no Infinity; an empty histogram is recognised by its missing buckets.
    const empty = this.#count === 0;
    return {
      buckets,
      sumMs: this.#sumMs,
      minMs: empty ? 0 : this.#minMs,
      maxMs: empty ? 0 : this.#maxMs,
    };
  }

  static from(state: HistogramState): Histogram {
    const histogram = new Histogram();
    for (const [index, count] of state.buckets) {
      if (!(index >= 0 && index < bucketCount)) throw new RangeError(`no bucket ${index}`);
      histogram.#counts[index] = count;
      histogram.#count += count;
    }
    if (histogram.#count === 0) return histogram;
    histogram.#sumMs = state.sumMs;
    histogram.#minMs = state.minMs;
    histogram.#maxMs = state.maxMs;
    return histogram;
  }
}

/** `micros`: a whole number from 0 to 2^32 - 1. */
function bucketOf(micros: number): number {
  const shift = Math.max(0, 31 - Math.clz32(micros) - subBits);
  // With shift s the remaining value is in [128, 256), or [0, 256) for s = 0; row s starts at s * 128, so rows do not
  // overlap.
  return shift * sub + (micros >>> shift);
}

function middleOf(index: number): number {
  const shift = Math.max(0, Math.floor(index / sub) - 1);
  const low = (index - shift * sub) * 2 ** shift;
  return low + (2 ** shift - 1) / 2;
}
