/**
 * Latency histogram with parts: cheap to add to, merge and read (an add takes some 10 ns). A bucket is 1/32 of an
 * octave of milliseconds, from 2^-6 (16 µs) to 2^23 (2.3 h), clamped; its middle is within 1/64 = 1.6 % of everything
 * in it. The index is the top bits of the float, so no logarithm is taken. Each bucket keeps a count and three sums in
 * one cache line: total, queue, worker. The slowest 5 % are the buckets from the top down, so their parts are averages
 * over those very requests; the bucket at the edge counts pro rata with its mean.
 */

const SUB_BITS = 5;
const LOWEST_EXPONENT = -6;
const HIGHEST_EXPONENT = 23;
const EXPONENT_BIAS = 1023;
const BUCKETS = (HIGHEST_EXPONENT - LOWEST_EXPONENT) << SUB_BITS;
const FIRST = (EXPONENT_BIAS + LOWEST_EXPONENT) << SUB_BITS;
const STRIDE = 4;

const double = new Float64Array(1);
const words = new Uint32Array(double.buffer);
/** Sign, exponent and first mantissa bits. */
const HIGH_WORD = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1 ? 1 : 0;

/** Shared by empty histograms: most seconds of most models have no request, and the cells take 30 KB. */
const NONE = new Float64Array(0);

/** Means; the parts add up to the whole. */
export interface Parts {
  readonly queueMs: number;
  readonly workerMs: number;
  readonly gatewayMs: number;
}

export class Latencies {
  /** By bucket: count, sum of total, queue and worker time. */
  #cells = NONE;
  #count = 0;
  /** Range of non-empty buckets, so that clear and merge touch only those. */
  #low = BUCKETS;
  #high = -1;

  get count(): number {
    return this.#count;
  }

  add(totalMs: number, queueMs: number, workerMs: number): void {
    if (this.#cells === NONE) this.#open();
    const bucket = bucketOf(totalMs);
    const cells = this.#cells;
    const at = bucket * STRIDE;
    cells[at]! += 1;
    cells[at + 1]! += totalMs;
    cells[at + 2]! += queueMs;
    cells[at + 3]! += workerMs;
    this.#count++;
    if (bucket < this.#low) this.#low = bucket;
    if (bucket > this.#high) this.#high = bucket;
  }

  merge(other: Latencies): void {
    if (other.#count === 0) return;
    if (this.#cells === NONE) this.#open();
    const [to, from] = [this.#cells, other.#cells];
    const end = (other.#high + 1) * STRIDE;
    for (let at = other.#low * STRIDE; at < end; at++) to[at]! += from[at]!;
    this.#count += other.#count;
    this.#low = Math.min(this.#low, other.#low);
    this.#high = Math.max(this.#high, other.#high);
  }

  clear(): void {
    if (this.#count === 0) return;
    this.#cells.fill(0, this.#low * STRIDE, (this.#high + 1) * STRIDE);
    this.#count = 0;
    this.#low = BUCKETS;
    this.#high = -1;
  }

  #open(): void {
    this.#cells = new Float64Array(BUCKETS * STRIDE);
  }

  /** The smallest value with at least this share at or below it, to 1.6 %; null when empty. */
  quantile(share: number): number | null {
    if (this.#count === 0) return null;
    let left = Math.max(1, Math.ceil(share * this.#count));
    for (let bucket = this.#low; bucket <= this.#high; bucket++) {
      left -= this.#cells[bucket * STRIDE]!;
      if (left <= 0) return middleOf(bucket);
    }
    return middleOf(this.#high);
  }

  mean(): number | null {
    if (this.#count === 0) return null;
    let sum = 0;
    for (let bucket = this.#low; bucket <= this.#high; bucket++) sum += this.#cells[bucket * STRIDE + 1]!;
    return sum / this.#count;
  }

  /** Where the slowest `share` spent their time; null when empty. */
  slowest(share: number): Parts | null {
    if (this.#count === 0) return null;
    const wanted = Math.max(1, Math.ceil(share * this.#count));
    let [left, total, queue, worker] = [wanted, 0, 0, 0];
    for (let at = this.#high * STRIDE; left > 0 && at >= 0; at -= STRIDE) {
      const count = this.#cells[at]!;
      if (count === 0) continue;
      const taken = Math.min(1, left / count);
      total += taken * this.#cells[at + 1]!;
      queue += taken * this.#cells[at + 2]!;
      worker += taken * this.#cells[at + 3]!;
      left -= count;
    }
    const gateway = Math.max(0, total - queue - worker);
    return { queueMs: queue / wanted, workerMs: worker / wanted, gatewayMs: gateway / wanted };
  }
}

function bucketOf(ms: number): number {
  double[0] = ms;
  const bucket = (words[HIGH_WORD]! >>> (20 - SUB_BITS)) - FIRST;
  // Also for negative values: the sign bit would make the index too large.
  if (ms < 0 || bucket < 0) return 0;
  return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

function middleOf(bucket: number): number {
  const octave = 2 ** ((bucket >> SUB_BITS) + LOWEST_EXPONENT);
  const steps = 1 << SUB_BITS;
  return octave * (1 + ((bucket & (steps - 1)) + 0.5) / steps);
}
