/**
 * Estimates learned from traffic: batch service time and arrival rate.
 *
 * S(n) = a + b·n  ms for a batch of n, by exponentially weighted least squares over settled batches (weight 0.05; the
 * first samples weigh 1/count). A sample is clipped to four times the expectation, and 0 ≤ b ≤ mean/n, so that the
 * intercept is never negative and a narrow range of sizes cannot tilt the line. `deviation` is the weighted mean of
 * |sample − S(n)|.
 */

const WEIGHT = 0.05;
const FIRST_GUESS_MS = 50;
const ENOUGH_SAMPLES = 8; // below this many samples b = 0 and nothing is clipped
const CLIP = 4;

export class ServiceEstimate {
  samples = 0;
  deviationMs = 0;
  #meanMs = FIRST_GUESS_MS;
  #meanSize = 0;
  #sizeVariance = 0;
  #covariance = 0;

  /** Enough batches were seen to judge how late one is. */
  get settled(): boolean {
    return this.samples >= ENOUGH_SAMPLES;
  }

  learn(size: number, ms: number): void {
    const expected = this.msFor(size);
    const sample = this.settled ? Math.min(ms, CLIP * expected) : ms;
    this.samples++;
    const weight = Math.max(WEIGHT, 1 / this.samples);
    if (this.samples > 1) this.deviationMs += weight * (Math.abs(sample - expected) - this.deviationMs);
    const sizeStep = size - this.#meanSize;
    const msStep = sample - this.#meanMs;
    this.#meanSize += weight * sizeStep;
    this.#meanMs += weight * msStep;
    this.#sizeVariance = (1 - weight) * (this.#sizeVariance + weight * sizeStep * sizeStep);
    this.#covariance = (1 - weight) * (this.#covariance + weight * sizeStep * msStep);
  }

  /** b: the cost of one more task. */
  get perTaskMs(): number {
    const spread = this.#sizeVariance > 0.01 * this.#meanSize * this.#meanSize;
    if (!spread || !this.settled) return 0;
    const slope = Math.max(0, this.#covariance / this.#sizeVariance);
    return Math.min(slope, this.#meanMs / this.#meanSize);
  }

  /** a: the fixed cost of a batch. */
  get baseMs(): number {
    return this.#meanMs - this.perTaskMs * this.#meanSize;
  }

  msFor(size: number): number {
    return Math.max(0.1, this.#meanMs + this.perTaskMs * (size - this.#meanSize));
  }
}

const SURPRISE_WEIGHT = 0.02;
const MOST_SURPRISING = 20; // clip: one batch that hung for a minute must not dominate the next hundred

/**
 * Actual over expected batch time. Rare batches that take ten times as long (a compilation, a long answer) are clipped
 * in S(n), and the mean of 1/x exceeds 1/mean of x, so summing the workers' paces overstates capacity.
 */
export class SurpriseEstimate {
  #mean = 1;
  #share = 0;

  /** `times`: actual over expected. */
  learn(times: number): void {
    const surprise = Math.min(times, MOST_SURPRISING);
    this.#mean += SURPRISE_WEIGHT * (surprise - this.#mean);
    this.#share += SURPRISE_WEIGHT * (Math.abs(surprise - 1) - this.#share);
  }

  /** Mean of `times`, at least 1. */
  get factor(): number {
    return Math.max(1, this.#mean);
  }

  /** Mean deviation from 1, minus 0.1 for the normal scatter of expectations. */
  get share(): number {
    return 0.9 * this.#share;
  }
}

const RATE_WINDOW_MS = 500;
const SURGE_WINDOW_MS = 100;

/** Arrivals per millisecond: a decaying count with a time constant of `windowMs`. */
export class RateEstimate {
  readonly #windowMs: number;
  #perMs = 0;
  #at = 0;

  constructor(windowMs = RATE_WINDOW_MS) {
    this.#windowMs = windowMs;
  }

  count(now: number, arrivals = 1): void {
    this.#perMs = this.perMs(now) + arrivals / this.#windowMs;
    this.#at = now;
  }

  perMs(now: number): number {
    return now === this.#at ? this.#perMs : this.#perMs * Math.exp((this.#at - now) / this.#windowMs);
  }
}

/** The same, but quick to see a surge. */
export class SurgeEstimate {
  readonly #steady = new RateEstimate();
  readonly #quick = new RateEstimate(SURGE_WINDOW_MS);

  count(now: number): void {
    this.#steady.count(now);
    this.#quick.count(now);
  }

  perMs(now: number): number {
    return Math.max(this.#steady.perMs(now), this.#quick.perMs(now));
  }
}
