/**
 * All values of a kind, as numbers in one growing array, for exact percentiles: 8 bytes a value.
 *
 * Quantile q is the smallest value such that at least a share q of all is not above it (nearest rank).
 */
export class Sample {
  #values = new Float64Array(1024);
  #sorted = true;
  size = 0;
  #sum = 0;

  add(value: number): void {
    if (this.size === this.#values.length) {
      const larger = new Float64Array(2 * this.size);
      larger.set(this.#values);
      this.#values = larger;
    }
    this.#values[this.size++] = value;
    this.#sum += value;
    this.#sorted = false;
  }

  /** NaN where there is none: no values is not 0. */
  get mean(): number {
    return this.size === 0 ? NaN : this.#sum / this.size;
  }

  /** `share` from 0 to 1. */
  quantile(share: number): number {
    if (this.size === 0) return NaN;
    const values = this.#values.subarray(0, this.size);
    if (!this.#sorted) values.sort();
    this.#sorted = true;
    return values[Math.min(this.size - 1, Math.max(0, Math.ceil(share * this.size) - 1))]!;
  }
}
