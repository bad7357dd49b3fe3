/**
 * How many workers a model should have: fast up, slow down, never to and fro.
 *
 * Looked at about once a second. Three things raise the number, the largest wins:
 *
 *   rules      `depth` tasks queued, or `load` (arrivals ÷ capacity), above a bound for so long → so many more. A rule
 *              that has fired waits its time again, and nothing is added while workers that were asked for are
 *              still on their way and would be enough.
 *   forecast   arrivals are followed with their trend (Holt's two exponential averages) and looked at when a worker that
 *              is started now would be ready: at now + coldStartMs. What is expected then, at `target` of what
 *              a worker serves, is how many are needed. Only a need that lasts counts.
 *   lost       nothing: the number says how many should be there. Whoever applies it replaces what died.
 *
 * One thing lowers it: `load` below a bound for long. Then a few go, at most `maxRemoveShare` of them at a time, not within
 * `coolDownMs` of any other change, and never below what the forecast needs. Load, not how busy workers are: the
 * policy spreads its starts, so workers at 47 % load are busy 80 % of the time.
 *
 * Pure: time comes in with what is seen. Times in ms, rates in tasks per ms.
 */

export interface ScaleUpRule {
  /** Exactly one of the two. */
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
  /** After any change, until workers are removed. */
  readonly coolDownMs: number;
  /** Of the workers, at a time; one may always go. */
  readonly maxRemoveShare: number;
  /** The share of capacity to plan with. */
  readonly target: number;
  /** From asking for a worker to its first batch. */
  readonly coldStartMs: number;
  /** Whether arrivals are looked at ahead of time. */
  readonly forecast: boolean;
}

/** The rules of a model, from the few numbers that users set. With the defaults (queueDepth 100, coldStartMs 1 min,
 *  coolDownMs 5 min): +3 above 500 queued for 30 s, +1 above 100 for a minute, +1 above 85 % load for 5 min, −1 below
 *  40 % load for 15 min. */
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

/** What is seen of a model. */
export interface Sighting {
  readonly at: number;
  /** Workers that may be given work. */
  readonly healthy: number;
  /** Tasks queued. */
  readonly depth: number;
  readonly arrivalsPerMs: number;
  /** Of one worker with full batches; 0 while nothing is known. */
  readonly workerPerMs: number;
}

export interface Scaling {
  readonly desired: number;
  /** Why it last changed, in words. */
  readonly reason: string;
  /** When. */
  readonly changedAt: number;
}

/** A need that is gone before this was noise. */
const NEED_LASTS_MS = 10_000;
/** Time constants of the averages: of the rate, and of its trend. */
const LEVEL_MS = 10_000;
const TREND_MS = 180_000;
/** Below this share of the average rate, what made it is over. */
const OVER = 0.75;
/** How much the last start says of the next. */
const START_WEIGHT = 0.5;
/** However steep the trend, nobody expects more than this many times the rate of now. */
const MOST_GROWTH = 1.5;
/** A gap between two looks that is longer than this says nothing of what was in between. */
const LONGEST_GAP_MS = 30_000;

export class Autoscaler {
  readonly rules: ScalingRules;
  readonly #arrivals = new Trend();
  /** When each rule's bound was crossed, or the rule last fired; undefined while it is not crossed. */
  readonly #since: (number | undefined)[];
  #lowSince: number | undefined;
  #needSince: number | undefined;
  #lastAt = -Infinity;
  #coldStartMs: number;
  #now: Scaling;

  /** `desired`: as many as there are at the start. */
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

  /** Arrivals per ms that are expected when a worker that is asked for now is ready. */
  get expectedPerMs(): number {
    return this.#arrivals.at(this.#coldStartMs);
  }

  /** A worker that was asked for took so long until it was ready: the next will, too. */
  started(ms: number): void {
    this.#coldStartMs += START_WEIGHT * (ms - this.#coldStartMs);
  }

  see(sighting: Sighting): Scaling {
    const { at } = sighting;
    // Whatever was crossed before a pause of this process need not have been so all the time.
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

  /** What the forecast asks for; 0 while there is none. */
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
    // Those that were asked for are on their way: they may be all that was missing.
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
    // While nothing is known of a worker's pace, an empty line is all that can be said.
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

/** Arrivals ÷ capacity of those that are healthy; Infinity when something arrives and nobody is there. */
export function loadOf({ arrivalsPerMs, workerPerMs, healthy }: Sighting): number {
  const perMs = workerPerMs * healthy;
  if (perMs > 0) return arrivalsPerMs / perMs;
  return arrivalsPerMs > 0 && workerPerMs > 0 ? Infinity : 0;
}

/** A rate and how it changes; both forget with time, not with the number of looks. */
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

  /** Expected `aheadMs` from the last look; a falling rate is not counted on. */
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
