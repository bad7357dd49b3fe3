/**
 * How many workers a model should have: fast up, slow down, no oscillation. Evaluated about once a second. Pure: time
 * comes with each sighting. Times in ms, rates in tasks per ms.
 *
 * The largest of these raises the number:
 *   rules      `depth` queued, or `load` (arrivals ÷ capacity), above a bound for a time → add. A rule that fired waits
 *              its time again, and nothing is added while workers already requested would be enough.
 *   forecast   arrivals with their trend (Holt's two exponential averages) at now + coldStartMs, when a worker started
 *              now is ready, divided by `target` of a worker's rate. Only a lasting need counts.
 * Dead workers change nothing: the caller replaces them to reach the number.
 *
 * `load` below a bound for long lowers it: by at most `maxRemoveShare`, not within `coolDownMs` of any change, and
 * never below the forecast. Load, not busy time: the policy spreads starts, so workers at 47 % load are busy 80 % of
 * the time.
 */

export interface ScaleUpRule {
  /** Exactly one of the two is set. */
  readonly depth?: number;
  readonly load?: number;
  readonly forMs: number;
  readonly add: number;
}

export interface ScaleDownRule {
  readonly load: number;
  readonly forMs: number;
  readonly remove: number;
}

export interface ScalingRules {
  readonly min: number;
  readonly max: number;
  readonly up: readonly ScaleUpRule[];
  readonly down: ScaleDownRule;
  /** From any change until workers may be removed. */
  readonly coolDownMs: number;
  /** Share of the workers per step; one may always be removed. */
  readonly maxRemoveShare: number;
  /** Planned utilization. */
  readonly target: number;
  /** From requesting a worker to its first batch. */
  readonly coldStartMs: number;
  readonly forecast: boolean;
}

/**
 * The rules from the few numbers that users set. Defaults (queueDepth 100, coldStartMs 1 min, coolDownMs 5 min): +3
 * above 500 queued for 30 s, +1 above 100 for 1 min, +1 above 85 % load for 5 min, −1 below 40 % load for 15 min.
 */
export function scalingRules(
  set: Pick<ScalingRules, "min" | "max" | "coldStartMs" | "coolDownMs"> & { readonly queueDepth: number },
  target: number,
): ScalingRules {
  const { min, max, queueDepth, coldStartMs, coolDownMs } = set;
  const up = [
    { depth: 5 * queueDepth, forMs: coldStartMs / 2, add: 3 },
    { depth: queueDepth, forMs: coldStartMs, add: 1 },
    { load: 0.85, forMs: coolDownMs, add: 1 },
  ];
  const down = { load: 0.4, forMs: 3 * coolDownMs, remove: 1 };
  return { min, max, up, down, coolDownMs, coldStartMs, target, maxRemoveShare: 0.2, forecast: true };
}

export interface Sighting {
  readonly at: number;
  readonly healthy: number;
  readonly depth: number;
  readonly arrivalsPerMs: number;
  /** One worker's rate with full batches; 0 while unknown. */
  readonly workerPerMs: number;
}

export interface Scaling {
  readonly desired: number;
  readonly reason: string;
  readonly changedAt: number;
}

const NEED_LASTS_MS = 10_000; // a shorter need is noise
const LEVEL_MS = 10_000; // time constant of the average rate
const TREND_MS = 180_000; // time constant of its trend
const OVER = 0.75; // below this share of the average rate the peak is over
const START_WEIGHT = 0.5; // weight of the last start time in the estimate
const MOST_GROWTH = 1.5; // bound on the forecast, as a multiple of the current rate
const LONGEST_GAP_MS = 30_000; // a longer gap between evaluations says nothing about the time between

export class Autoscaler {
  readonly rules: ScalingRules;
  readonly #arrivals = new Trend();
  /** When each rule's bound was crossed or the rule last fired; undefined while not crossed. */
  readonly #since: (number | undefined)[];
  #lowSince: number | undefined;
  #needSince: number | undefined;
  #lastAt = -Infinity;
  #coldStartMs: number;
  #now: Scaling;

  constructor(rules: ScalingRules, desired: number, at: number) {
    this.rules = rules;
    this.#since = rules.up.map(() => undefined);
    this.#coldStartMs = rules.coldStartMs;
    const most = desired > rules.max ? `scaling.max is ${rules.max}` : "as configured";
    const reason = desired < rules.min ? `scaling.min is ${rules.min}` : most;
    this.#now = { desired: clamp(desired, rules), reason, changedAt: at };
  }

  get scaling(): Scaling {
    return this.#now;
  }

  /** Arrivals per ms expected when a worker requested now is ready. */
  get expectedPerMs(): number {
    return this.#arrivals.at(this.#coldStartMs);
  }

  /** Records how long a requested worker took to be ready. */
  started(ms: number): void {
    this.#coldStartMs += START_WEIGHT * (ms - this.#coldStartMs);
  }

  see(sighting: Sighting): Scaling {
    const { at } = sighting;
    // A bound crossed before a pause of this process need not have stayed crossed.
    if (at - this.#lastAt > LONGEST_GAP_MS) this.#forget();
    this.#lastAt = at;
    this.#arrivals.learn(sighting.arrivalsPerMs, at);
    const up = this.#byForecast(sighting) ?? this.#byRules(sighting);
    if (up !== undefined) this.#change(up.desired, up.reason, at);
    else this.#down(sighting);
    return this.#now;
  }

  #byForecast({ at, workerPerMs, arrivalsPerMs }: Sighting): Pick<Scaling, "desired" | "reason"> | undefined {
    const needed = this.#needed(workerPerMs);
    // A peak that is over stays in the averages for a while.
    const over = arrivalsPerMs < OVER * this.#arrivals.level;
    if (needed <= this.#now.desired || over) {
      this.#needSince = undefined;
      return undefined;
    }
    this.#needSince ??= at;
    if (at - this.#needSince < NEED_LASTS_MS) return undefined;
    this.#needSince = undefined;
    const { target } = this.rules;
    const reason =
      `${perSecond(this.expectedPerMs)} requests/s expected in ${seconds(this.#coldStartMs)} need ${needed} workers ` +
      `at ${percent(target)} load`;
    return { desired: needed, reason };
  }

  /** 0 without a forecast. */
  #needed(workerPerMs: number): number {
    const { forecast, target } = this.rules;
    if (!forecast || workerPerMs <= 0) return 0;
    return clamp(Math.ceil(this.expectedPerMs / (workerPerMs * target) - 1e-9), this.rules);
  }

  #byRules(sighting: Sighting): Pick<Scaling, "desired" | "reason"> | undefined {
    const { at, depth, healthy } = sighting;
    const { desired, changedAt } = this.#now;
    const load = loadOf(sighting);
    let best: ScaleUpRule | undefined;
    for (const [index, rule] of this.rules.up.entries()) {
      const crossed = rule.depth === undefined ? load > rule.load! : depth > rule.depth;
      if (!crossed) this.#since[index] = undefined;
      else if ((this.#since[index] ??= at) <= at - rule.forMs && rule.add > (best?.add ?? 0)) best = rule;
    }
    if (best === undefined || desired >= this.rules.max) return undefined;
    // Workers already requested may be all that is missing.
    if (healthy < desired && at - changedAt < this.#coldStartMs) return undefined;
    this.#since.fill(undefined);
    const bound =
      best.depth === undefined ? `load above ${percent(best.load!)}` : `more than ${best.depth} tasks queued`;
    return {
      desired: clamp(desired + best.add, this.rules),
      reason: `${bound} for ${seconds(best.forMs)}: +${best.add}`,
    };
  }

  #down(sighting: Sighting): void {
    const { at, workerPerMs } = sighting;
    const { down, coolDownMs, maxRemoveShare } = this.rules;
    const { desired, changedAt } = this.#now;
    // While a worker's rate is unknown, only an empty queue counts as low.
    const low =
      workerPerMs > 0 ? loadOf(sighting) < down.load : sighting.arrivalsPerMs === 0 && sighting.depth === 0;
    if (!low) {
      this.#lowSince = undefined;
      return;
    }
    this.#lowSince ??= at;
    if (at - this.#lowSince < down.forMs || at - changedAt < coolDownMs) return;
    const most = Math.max(1, Math.floor(desired * maxRemoveShare));
    const fewer = clamp(desired - Math.min(down.remove, most), this.rules);
    const least = Math.max(fewer, this.#needed(workerPerMs));
    if (least >= desired) return;
    this.#lowSince = undefined;
    this.#change(
      least,
      `load below ${percent(down.load)} for ${seconds(down.forMs)}: −${desired - least}`,
      at,
    );
  }

  #change(desired: number, reason: string, at: number): void {
    if (desired === this.#now.desired) return;
    this.#now = { desired, reason, changedAt: at };
    this.#lowSince = undefined;
    this.#needSince = undefined;
  }

  #forget(): void {
    this.#since.fill(undefined);
    this.#lowSince = undefined;
    this.#needSince = undefined;
  }
}

/** Arrivals ÷ capacity of healthy workers; Infinity when tasks arrive and there are none. */
export function loadOf({ arrivalsPerMs, workerPerMs, healthy }: Sighting): number {
  const perMs = workerPerMs * healthy;
  if (perMs > 0) return arrivalsPerMs / perMs;
  return arrivalsPerMs > 0 && workerPerMs > 0 ? Infinity : 0;
}

/** A rate and its slope; both decay with time, not with the number of samples. */
class Trend {
  level = 0;
  #slope = 0;
  #at: number | undefined;

  learn(rate: number, at: number): void {
    if (this.#at === undefined || at - this.#at > LONGEST_GAP_MS) {
      this.level = rate;
      this.#slope = 0;
      this.#at = at;
      return;
    }
    const ms = at - this.#at;
    if (ms <= 0) return;
    const before = this.level;
    const alpha = 1 - Math.exp(-ms / LEVEL_MS);
    const beta = 1 - Math.exp(-ms / TREND_MS);
    this.level = alpha * rate + (1 - alpha) * (before + this.#slope * ms);
    this.#slope = beta * ((this.level - before) / ms) + (1 - beta) * this.#slope;
    this.#at = at;
  }

  /** Expected `aheadMs` after the last sample; a falling trend is ignored. */
  at(aheadMs: number): number {
    const level = Math.max(0, this.level);
    const ahead = level + Math.max(0, this.#slope) * aheadMs;
    return Math.min(MOST_GROWTH * level, ahead);
  }
}

function clamp(workers: number, { min, max }: ScalingRules): number {
  return Math.min(max, Math.max(min, workers));
}

function perSecond(perMs: number): string {
  return Math.round(perMs * 1000).toLocaleString("en-US");
}

function seconds(ms: number): string {
  return ms % 60_000 === 0 && ms > 0 ? `${ms / 60_000} min` : `${Math.round(ms / 1000)} s`;
}

function percent(share: number): string {
  return `${Math.round(share * 100)} %`;
}
