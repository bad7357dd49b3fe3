/**
 * How values spread over buckets, for several series at once: what a histogram shows, in typed arrays.
 *
 * A series is a small integer, so that to observe a value is a binary search among the bounds and three
 * additions: no text, no map, nothing to collect. A bucket holds the values up to and including its bound;
 * behind the last bound there is one more for the rest. They are added up only when somebody reads them.
 */

/** A value that can be looked up elsewhere: the trace that it came from. */
export interface Exemplar {
  traceId: string;
  value: number;
  /** ms since 1970. */
  at: number;
}

export class Spread {
  readonly bounds: Float64Array;
  readonly #buckets: Float64Array;
  readonly #sums: Float64Array;
  /** By bucket; the last value of each that was traced. */
  readonly #exemplars: (Exemplar | undefined)[] = [];

  /** `bounds` must rise. */
  constructor(series: number, bounds: readonly number[]) {
    this.bounds = Float64Array.from(bounds);
    this.#buckets = new Float64Array(series * (bounds.length + 1));
    this.#sums = new Float64Array(series);
  }

  /** Takes over what another one, with the same bounds, has of a series. */
  adopt(series: number, from: Spread, of: number): void {
    const width = this.bounds.length + 1;
    for (let at = 0; at < width; at++) {
      this.#buckets[series * width + at] = from.#buckets[of * width + at]!;
      this.#exemplars[series * width + at] = from.#exemplars[of * width + at];
    }
    this.#sums[series] = from.#sums[of]!;
  }

  observe(series: number, value: number): void {
    this.#buckets[this.#bucket(series, value)]!++;
    this.#sums[series]! += value;
  }

  /** As `observe`, and remembers where the value came from. */
  observeTraced(series: number, value: number, traceId: string, at: number): void {
    this.observe(series, value);
    const bucket = this.#bucket(series, value);
    const kept = this.#exemplars[bucket];
    if (kept === undefined) {
      this.#exemplars[bucket] = { traceId, value, at };
      return;
    }
    kept.traceId = traceId;
    kept.value = value;
    kept.at = at;
  }

  sum(series: number): number {
    return this.#sums[series]!;
  }

  /** Values up to and including each bound; the last is all of them. */
  upTo(series: number): number[] {
    const width = this.bounds.length + 1;
    const counts = new Array<number>(width);
    let total = 0;
    for (let at = 0; at < width; at++) {
      total += this.#buckets[series * width + at]!;
      counts[at] = total;
    }
    return counts;
  }

  /** Of the n-th bucket of a series. */
  exemplar(series: number, at: number): Exemplar | undefined {
    return this.#exemplars[series * (this.bounds.length + 1) + at];
  }

  #bucket(series: number, value: number): number {
    const { bounds } = this;
    let low = 0;
    let high = bounds.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (value <= bounds[middle]!) high = middle;
      else low = middle + 1;
    }
    return series * (bounds.length + 1) + low;
  }
}
