/**
 * Admission: when a task that arrives now would be done, whether to refuse it, and when a refused one should retry.
 * Everything in milliseconds, at most 30 s ahead. Pure: time is an argument; `RetrySlots` only remembers.
 *
 * `predictive` refuses what would miss its deadline. With μ tasks per ms of capacity, B tasks in a batch that takes S
 * ms on average and R ms where it runs, and the workers' free times f (earliest first):
 *
 *   left   = μ − λ of the better tiers − floors of the lower tiers that wait · μ
 *   ahead  = Q of the better tiers + Q before it in its own tier · μ / left      served in order, and
 *            + (3·√(λ·W) + 0.03·λ·W) · μ / left,  W = ahead / μ                  arrivals scatter, λ is an estimate
 *            + 3·dev/S·√(ahead/B)·B · (μ / left − 1)                             and so do batches
 *   ahead  = at most (Q before it in its own tier + 1) / floor                   its floor is guaranteed
 *   j      = ⌊ahead / B⌋                                                         the batch it goes with
 *   start  = when the j-th batch starts if worker i starts one at f[i], f[i] + S, f[i] + 2·S …
 *   rounds = ⌊(start − f[0]) / S⌋
 *   margin = 3·dev·√(rounds + rounds²/25), at least 4 % of the wait              S is an estimate, too
 *   finish = start + R + max(2 ms, 3·dev·√(1 + rounds + rounds²/25))
 *
 * It is admitted if it starts, margin included, and finishes in time. It is never refused while a worker idles and less
 * than one batch waits: otherwise an estimate that is too high would refuse everything, see no batch and never be
 * corrected. For the same reason one batch's worth may wait for an overdue worker, and for workers of which none counts
 * (full by their own report, or on trial). Where all are overdue, more may wait if they would start in time should the
 * silence last half as long again:
 *
 *   start = now + 1.04 · (silence / 2 + ⌊Q / (workers · B)⌋ · S)
 *
 * `thresholds`: above `targetUtilization`, or with more than `lastTierDepth` queued, the last tier is refused; with
 * more than `firstTierDepth` all but the first.
 *
 * Each refused task gets a separate retry time, at the rate left for its tier:
 *
 *   slot = max(last slot, now + max(50 ms, Q / left)) + 1 / max(floor·μ, 0.9·μ − λ of the better tiers)
 */

/** Worker state of a model, from the dispatcher or the fleet. */
export interface Horizon {
  /** Workers that may be given work, now or after their current batch. */
  readonly healthy: number;
  readonly idle: number;
  readonly overdue: number;
  /** How long the first of them has been overdue. */
  readonly silentMs?: number;
  /** Tasks per ms with full batches, of workers that are proven and not overloaded. */
  readonly perMs: number;
  /** The same if every worker were healthy. */
  readonly nominalPerMs: number;
  /** Tasks in a batch under backlog. */
  readonly batchSize: number;
  /** Time of such a batch, averaged over batches: a fast worker runs more of them. */
  readonly batchMs: number;
  /** Its time where it runs: longer if most workers are slower than that average. */
  readonly runMs: number;
  /** No batch has come back yet, so its time is a guess. Default: false. */
  readonly guessed?: boolean;
  readonly deviationMs: number;
  /** How long later tasks may overtake one because of its length. Default: 0. */
  readonly overtakeMs?: number;
  /** When each worker that counts is free, earliest first. */
  readonly freeAt: readonly number[];
  /** When a worker that is down is tried again; Infinity if never. */
  readonly nextUsableAt: number;
}

export interface Line {
  readonly waiting: number;
  readonly above: number;
  /** Admitted tasks per ms of better tiers. */
  readonly abovePerMs: number;
  readonly own: number;
  /** Share of a batch guaranteed to its tier under backlog. */
  readonly floor: number;
  /** The same of the lower tiers that have tasks queued. */
  readonly belowFloor: number;
}

export interface Terms {
  /** Latest time to leave the queue. */
  readonly startBy: number;
  readonly finishBy: number;
}

export type Refused = "no_worker" | "capacity" | "deadline";

export interface CapacityRefusal {
  readonly reason: Refused;
  readonly code: "RATE_LIMITED" | "SERVICE_OVERLOADED";
  readonly message: string;
  readonly waitMs: number;
}

const MARGIN_MS = 2;
const MARGIN_DEVIATIONS = 3;
const SCATTER = 3;
const MOST = 0.9;
const TOO_SLOW = 0.8; // a worker that needs more than this share of the callers' time is left out of the plan
const RATE_ERROR = 0.03;
const START_ERROR = 0.04;
const ROUNDING = 1e-9; // rounding of fractions of a batch or round
const LOST_BELOW = 0.9; // below this share of nominal capacity, capacity was lost; above it, demand is too high
const SILENCE = 0.5; // expected further silence, as a share of the silence so far

/** Undefined: admitted. */
export function refuseByForecast(
  line: Line,
  horizon: Horizon,
  terms: Terms,
  now: number,
): Refused | undefined {
  const { healthy, idle, batchSize, freeAt } = horizon;
  if (healthy === 0) return mayWait(line, horizon, terms, now) ? undefined : "no_worker";
  if (idle > 0 && line.waiting < batchSize) return undefined;
  if (freeAt.length === 0) return line.waiting < batchSize ? undefined : "capacity";
  const { latestStartAt, finishAt } = forecast(line, fit(horizon, terms, now), now);
  if (latestStartAt <= terms.startBy && finishAt <= terms.finishBy) return undefined;
  return lost(horizon) ? "capacity" : "deadline";
}

/** Whether one more may wait when all workers are overdue: usually they are only late. One batch each always may. */
function mayWait({ waiting }: Line, horizon: Horizon, { startBy, finishBy }: Terms, now: number): boolean {
  const { overdue, batchSize, batchMs, silentMs = 0 } = horizon;
  const rounds = Math.floor(waiting / (overdue * batchSize) + ROUNDING);
  if (overdue === 0 || rounds === 0) return overdue > 0;
  const startAt = now + (1 + START_ERROR) * (SILENCE * silentMs + rounds * batchMs);
  return startAt <= startBy && startAt + batchMs <= finishBy;
}

export interface Forecast {
  readonly startAt: number;
  /** With a margin for what is before it. */
  readonly latestStartAt: number;
  readonly finishAt: number;
}

const NEVER: Forecast = { startAt: Infinity, latestStartAt: Infinity, finishAt: Infinity };

export function forecast(line: Line, horizon: Horizon, now: number): Forecast {
  const { freeAt, batchSize, batchMs, runMs, deviationMs, overtakeMs = 0 } = horizon;
  const tasks = ahead(line, horizon);
  if (freeAt.length === 0 || tasks === Infinity) return NEVER;
  const startAt = startOf(Math.floor(tasks / batchSize + ROUNDING), freeAt, batchMs, now);
  const rounds = Math.floor((startAt - Math.max(now, freeAt[0]!)) / batchMs + ROUNDING);
  // Batches scatter independently; a mean that is off by a fifth of that is off in every round.
  const scatter = rounds + (rounds / 5) ** 2;
  const margin = (variance: number): number => MARGIN_DEVIATIONS * deviationMs * Math.sqrt(variance);
  // A task that leaves with the next batch is not overtaken.
  const overtakenMs = Math.min(overtakeMs, rounds * batchMs);
  return {
    startAt,
    latestStartAt: startAt + overtakenMs + Math.max(START_ERROR * (startAt - now), margin(scatter)),
    finishAt: startAt + overtakenMs + runMs + Math.max(MARGIN_MS, margin(1 + scatter)),
  };
}

/** Drops workers too slow for any task, so that tasks are not refused because of them. */
function fit(horizon: Horizon, { finishBy }: Terms, now: number): Horizon {
  const { batchMs, runMs, deviationMs } = horizon;
  const tooSlow = runMs + MARGIN_DEVIATIONS * deviationMs > TOO_SLOW * (finishBy - now);
  return tooSlow && runMs > batchMs ? { ...horizon, runMs: batchMs } : horizon;
}

/** When a batch starts that has `batches` others before it. */
function startOf(batches: number, freeAt: readonly number[], batchMs: number, now: number): number {
  const workers = freeAt.length;
  const first = Math.max(now, freeAt[0]!);
  if (freeAt[workers - 1]! <= first + batchMs) {
    return Math.max(now, freeAt[batches % workers]!) + Math.floor(batches / workers) * batchMs;
  }
  // Some are busy for longer: the others run several batches before they join.
  let early = first;
  let late = first + batches * batchMs;
  while (late - early > 1) {
    const middle = (early + late) / 2;
    if (startedBy(middle, freeAt, batchMs, now) > batches) late = middle;
    else early = middle;
  }
  return late;
}

function startedBy(at: number, freeAt: readonly number[], batchMs: number, now: number): number {
  let batches = 0;
  for (const free of freeAt) {
    if (free > at) break;
    batches += Math.floor((at - Math.max(now, free)) / batchMs) + 1;
  }
  return batches;
}

/** The 90th percentile of batch times over the workers; `perMs` is how many batches each runs. */
export function runMsOf(workers: readonly { readonly ms: number; readonly perMs: number }[]): number {
  const inOrder = workers.toSorted((one, other) => one.ms - other.ms);
  let left = MOST * inOrder.reduce((sum, { perMs }) => sum + perMs, 0);
  for (const { ms, perMs } of inOrder) if ((left -= perMs) <= ROUNDING) return ms;
  return inOrder.at(-1)?.ms ?? 0;
}

/** Tasks served before it, including better tiers' arrivals in the meantime. */
function ahead(line: Line, { perMs, batchSize, batchMs, deviationMs }: Horizon): number {
  const byFloor = line.floor > 0 ? (line.own + 1) / line.floor : Infinity;
  const left = leftFor(line, perMs);
  if (left <= 0) return byFloor;
  const inOrder = line.above + (line.own * perMs) / left;
  const expected = (line.abovePerMs * inOrder) / perMs;
  const more = ((SCATTER * Math.sqrt(expected) + RATE_ERROR * expected) * perMs) / left;
  // What the better tiers leave scatters by as much as all batches do.
  const batches = Math.sqrt(inOrder / batchSize);
  const less = SCATTER * (deviationMs / batchMs) * batches * batchSize * (perMs / left - 1);
  return Math.min(inOrder + more + less, byFloor);
}

/** Tasks per ms that the better tiers and the lower tiers' floors leave. */
function leftFor({ abovePerMs, belowFloor }: Line, perMs: number): number {
  return perMs - abovePerMs - belowFloor * perMs;
}

export function lost({ perMs, nominalPerMs }: Horizon): boolean {
  return perMs < LOST_BELOW * nominalPerMs;
}

/** Above the first depth `thresholds` refuses the last tier, above the second all but the first. */
export const THRESHOLD_DEPTHS = { lastTierDepth: 100, firstTierDepth: 500 } as const;

export interface Thresholds {
  readonly targetUtilization: number;
  readonly lastTierDepth: number;
  readonly firstTierDepth: number;
}

/** Undefined: admitted. `load`: admitted rate ÷ capacity. */
export function refuseByThresholds(
  tier: number,
  tiers: number,
  waiting: number,
  load: number,
  horizon: Horizon,
  rules: Thresholds,
): Refused | undefined {
  if (horizon.healthy === 0 && horizon.overdue === 0) return "no_worker";
  if (tier === 0) return undefined;
  if (waiting > rules.firstTierDepth) return "capacity";
  const last = tier === tiers - 1;
  return last && (waiting > rules.lastTierDepth || load > rules.targetUtilization) ? "capacity" : undefined;
}

const SOONEST_MS = 50;
const LATEST_MS = 30_000;
const UNKNOWN_MS = 1000; // retry time when it is unknown when a worker will be back
const SPARE = 0.9; // keeps some capacity free, or the queue would never shrink

/** Last retry time given out, by tier. */
export class RetrySlots {
  readonly #last: number[];

  constructor(tiers: number) {
    this.#last = Array.from({ length: tiers }, () => -Infinity);
  }

  /** How long a refused task of `tier` should wait. */
  reserve(tier: number, line: Line, horizon: Horizon, now: number): number {
    const { perMs } = horizon;
    if (perMs <= 0) {
      const { nextUsableAt } = horizon;
      return nextUsableAt === Infinity
        ? UNKNOWN_MS
        : Math.min(LATEST_MS, Math.max(SOONEST_MS, nextUsableAt - now));
    }
    const queueMs = ahead(line, horizon) / perMs;
    const spare = Math.max(line.floor * perMs, SPARE * perMs - line.abovePerMs, 0.01 * perMs);
    const from = Math.max(this.#last[tier]!, now + Math.max(SOONEST_MS, queueMs));
    const slot = Math.min(now + LATEST_MS, from + 1 / spare);
    this.#last[tier] = slot;
    return slot - now;
  }
}
