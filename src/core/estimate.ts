/**
 * What Ferry learns from traffic: how long a batch takes, and how fast tasks arrive.
 *
 * Service time is modelled as  S(n) = a + b·n  ms for a batch of n, fitted by exponentially weighted
 * least squares over settled batches (weight 0.05; the first samples weigh 1/count so that the model is
 * useful at once). Two clamps keep noise from doing harm: a sample counts as at most four times what was
 * expected, and the slope stays between 0 and mean/n, so that the intercept is never negative and a
 * narrow range of sizes cannot tilt the line. `deviation` is the weighted mean of |sample − S(n)|.
 *
 * The arrival rate is a decaying count with a time constant of 500 ms, in tasks per millisecond.
 */

const WEIGHT = 0.05;
const FIRST_GUESS_MS = 50;
const RATE_WINDOW_MS = 500;
/** Below this many samples the slope is taken as 0 and nothing is clipped. */
const ENOUGH_SAMPLES = 8;
const CLIP = 4;

export class ServiceEstimate {
  #samples = 0;
  #meanMs = FIRST_GUESS_MS;
  #meanSize = 0;
  #sizeVariance = 0;
  #covariance = 0;
  #deviationMs = 0;

  get samples(): number {
    return this.#samples;
  }

  get deviationMs(): number {
    return this.#deviationMs;
  }

  /** Enough batches were seen to act on how late one is. */
  get settled(): boolean {
    return this.#samples >= ENOUGH_SAMPLES;
  }

  learn(size: number, ms: number): void {
    const expected = this.msFor(size);
    const sample = this.settled ? Math.min(ms, CLIP * expected) : ms;
    this.#samples++;
    const weight = Math.max(WEIGHT, 1 / this.#samples);
    if (this.#samples > 1) this.#deviationMs += weight * (Math.abs(sample - expected) - this.#deviationMs);
    const sizeStep = size - this.#meanSize;
    const msStep = sample - this.#meanMs;
    this.#meanSize += weight * sizeStep;
    this.#meanMs += weight * msStep;
    this.#sizeVariance = (1 - weight) * (this.#sizeVariance + weight * sizeStep * sizeStep);
    this.#covariance = (1 - weight) * (this.#covariance + weight * sizeStep * msStep);
  }

  /** b: what one more task costs. */
  get perTaskMs(): number {
    const spread = this.#sizeVariance > 0.01 * this.#meanSize * this.#meanSize;
    if (!spread || !this.settled) return 0;
    const slope = Math.max(0, this.#covariance / this.#sizeVariance);
    return Math.min(slope, this.#meanMs / this.#meanSize);
  }

  /** a: what a batch costs before its first task. */
  get baseMs(): number {
    return this.#meanMs - this.perTaskMs * this.#meanSize;
  }

  /** S(n). */
  msFor(size: number): number {
    return Math.max(0.1, this.#meanMs + this.perTaskMs * (size - this.#meanSize));
  }
}

export class RateEstimate {
  #perMs = 0;
  #at = 0;

  count(now: number, arrivals = 1): void {
    this.#perMs = this.perMs(now) + arrivals / RATE_WINDOW_MS;
    this.#at = now;
  }

  perMs(now: number): number {
    return this.#perMs * Math.exp((this.#at - now) / RATE_WINDOW_MS);
  }
}
