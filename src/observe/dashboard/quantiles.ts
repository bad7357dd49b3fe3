/**
 * How long requests took, and where: a histogram that is cheap to add to, to merge and to read.
 *
 * A bucket is 1/32 of an octave of milliseconds, from 2^-6 (16 µs) to 2^23 (2.3 h); what lies beyond stands in
 * the outermost ones. A bucket's middle is at most 1/64 = 1.6 % from everything in it. Its number is the top of
 * the float's own bits, so that no logarithm is taken. Each bucket keeps a count and three sums side by side
 * (one line of the processor's cache): the whole time, the share of it in the queue, the share at the worker.
 * The slowest 5 % are then the buckets from the top down, and their parts are averages over those very requests;
 * of the bucket at the edge, its mean counts as often as is needed. Adding takes some 10 ns.
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
/** The sign, the exponent and the first bits of the mantissa. */
const HIGH_WORD = new Uint8Array(new Uint16Array([1]).buffer)[0] === 1 ? 1 : 0;

/** Of one that was never added to: most seconds of most models have no request, and 30 KB are not little. */
const NONE = new Float64Array(0);

/** Averages over some requests; the parts add up to the whole. */
export interface Parts {
  readonly queueMs: number;
  readonly workerMs: number;
  readonly gatewayMs: number;
}

export class Latencies {
  /** By bucket: count, sum of the whole, of the queue's part, of the worker's part. */
  #cells = NONE;
  #count = 0;
  /** Buckets that hold something lie between these two, so that a clear and a merge touch only those. */
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

  /** The smallest value with at least this share of all at or below it, to 1.6 %; null when there is none. */
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

  /** Where the slowest `share` spent their time; null when there is none. */
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
  // Also for what is negative: its sign bit makes the number too large, and it cannot have taken that long.
  if (ms < 0 || bucket < 0) return 0;
  return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

function middleOf(bucket: number): number {
  const octave = 2 ** ((bucket >> SUB_BITS) + LOWEST_EXPONENT);
  const steps = 1 << SUB_BITS;
  return octave * (1 + ((bucket & (steps - 1)) + 0.5) / steps);
}
