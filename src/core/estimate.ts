/**
 * What Ferry learns from traffic: how long a batch takes, and how fast tasks arrive.
 *
 * Service time is modelled as  S(n) = a + b·n  ms for a batch of n, fitted by exponentially weighted
 * least squares over settled batches (weight 0.05; the first samples weigh 1/count so that the model is
 * useful at once). Two clamps keep noise from doing harm: a sample counts as at most four times what was
 * expected, and the slope stays between 0 and mean/n, so that the intercept is never negative and a
 * narrow range of sizes cannot tilt the line. `deviation` is the weighted mean of |sample − S(n)|.
 *
 * S(n) is what a batch usually takes. Where now and then one takes ten times as long (a compilation, a long
 * answer), most of that is clipped, or is held against the worker for a while; and the mean of 1/x lies above
 * 1/mean of x, so a sum of workers' paces promises too much. `SurpriseEstimate` compares what batches took with
 * what was expected of their workers, up to twenty times as much: `factor` is the mean of that, never below 1, `share` the mean
 * deviation from 1.
 *
 * How full batches are matters when tasks queue up: those with different parameters cannot share one, and
 * then a batch leaves with less than it could hold however many wait. `FillEstimate` learns that, as a share of what
 * each could hold, from batches that left a crowd behind; while there is no crowd it slowly goes back to full.
 *
 * The arrival rate is a decaying count with a time constant of 500 ms, in tasks per millisecond. Where a
 * surge must not be missed, `SurgeEstimate` takes the larger of that and a count over 100 ms.
 */

const WEIGHT = 0.05;
const FIRST_GUESS_MS = 50;
const RATE_WINDOW_MS = 500;
const SURGE_WINDOW_MS = 100;
/** Below this many samples the slope is taken as 0 and nothing is clipped. */
const ENOUGH_SAMPLES = 8;
const CLIP = 4;
const SURPRISE_WEIGHT = 0.02;
/** One batch that hung for a minute says nothing of the next hundred. */
const MOST_SURPRISING = 20;

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

export class SurpriseEstimate {
  #mean = 1;
  #share = 0;

  /** A batch took so many times of what was expected. */
  learn(times: number): void {
    const surprise = Math.min(times, MOST_SURPRISING);
    this.#mean += SURPRISE_WEIGHT * (surprise - this.#mean);
    this.#share += SURPRISE_WEIGHT * (Math.abs(surprise - 1) - this.#share);
  }

  get factor(): number {
    return Math.max(1, this.#mean);
  }

  /** Less a tenth: what is expected of a worker scatters by itself. */
  get share(): number {
    return 0.9 * this.#share;
  }
}

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

const FILL_WEIGHT = 0.1;
const HANDOVER_WEIGHT = 0.1;

/** What passes between the choice of a batch and its call: with an engine that is far away, its answer. */
export class HandoverEstimate {
  ms = 0;

  learn(ms: number): void {
    this.ms += HANDOVER_WEIGHT * (ms - this.ms);
  }
}

export class FillEstimate {
  /** Of the seats of a batch, those that are taken while at least a batch's worth waits. */
  share = 1;

  /** A batch of `size` left that could have held `most`; `waiting` is what waited before. */
  learn(size: number, waiting: number, most: number): void {
    const seen = waiting >= most ? size / most : 1;
    this.share += FILL_WEIGHT * (seen - this.share);
  }
}
