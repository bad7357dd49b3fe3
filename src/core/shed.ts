/**
 * What is refused at the door: when a task that comes now would be done, and when a refused one should
 * come again.
 *
 * `predictive` refuses what would miss its deadline. With μ tasks per ms of capacity, B seats in a batch
 * that takes S ms, and the workers' free times f (earliest first):
 *
 *   left   = μ − λ of the better tiers − floors of the lower tiers that wait · μ
 *   ahead  = Q of the better tiers + Q before it in its own tier · μ / left      served in order, and
 *            + (3·√(λ·W) + 0.03·λ·W) · μ / left,  W = ahead / μ                  arrivals scatter, λ is a guess
 *   ahead  = at most (Q before it in its own tier + 1) / floor                   its floor is its own
 *   j      = ⌊ahead / B⌋, rounds = ⌊j / |f|⌋                                     which batch it rides in
 *   start  = f[j mod |f|] + rounds·S
 *   finish = start + S + max(2 ms, 3·dev·√(1 + rounds + rounds²/25))             S is a guess, too
 *
 * and it is let in if it starts and finishes in time. Never is it refused while a worker idles and less than
 * one batch waits: without that rule an estimate that is too high would refuse everything, see no batch and
 * so never be corrected. For the same reason one batch's worth may wait for a worker that is overdue.
 *
 * `thresholds` is the classic rule set: above `targetUtilization` of the capacity, or with more than
 * `lastTierDepth` queued, the last tier is refused; with more than `firstTierDepth` all but the first.
 *
 * Whoever is refused is given a slot of its own in the time to come, at the rate that is left for its tier,
 * so that those who come again come one after the other and not all at once:
 *
 *   slot = max(last slot, now + max(50 ms, Q / left)) + 1 / max(floor·μ, 0.9·μ − λ of the better tiers)
 *
 * Everything is in milliseconds, at most 30 s ahead. Pure: time comes in, `RetrySlots` only remembers.
 */

/** What is known of a model's workers; the dispatcher or the fleet tells. */
export interface Horizon {
  /** Workers that may be given work, now or after what they run. */
  readonly healthy: number;
  /** Of these, how many could start now. */
  readonly idle: number;
  /** Workers that are overdue and may yet answer. */
  readonly overdue: number;
  /** Tasks per ms with full batches; only workers that are proven and not overloaded count. */
  readonly perMs: number;
  /** The same if every worker were well. */
  readonly nominalPerMs: number;
  /** Seats that are taken in a batch while tasks queue up. */
  readonly batchSize: number;
  /** What such a batch takes. */
  readonly batchMs: number;
  readonly deviationMs: number;
  /** When each worker that counts is free, earliest first. */
  readonly freeAt: readonly number[];
  /** When a worker that is down will be tried again; Infinity when none will. */
  readonly nextUsableAt: number;
}

/** Where a new task would stand. */
export interface Line {
  /** Queued in all tiers. */
  readonly waiting: number;
  /** Queued in better tiers. */
  readonly above: number;
  /** Tasks per ms of better tiers that are let in. */
  readonly abovePerMs: number;
  /** Of its own tier, those that go before it. */
  readonly own: number;
  /** The share of the seats that its tier gets under backlog, whatever the others do. */
  readonly floor: number;
  /** The same of the lower tiers that have tasks queued. */
  readonly belowFloor: number;
}

export interface Terms {
  /** The latest instant to leave the queue. */
  readonly startBy: number;
  readonly finishBy: number;
}

export type Refused = "no_worker" | "capacity" | "deadline";

const MARGIN_MS = 2;
const MARGIN_DEVIATIONS = 3;
const SCATTER = 3;
const RATE_ERROR = 0.03;
/** Below this share of what the fleet could do, capacity is lost; above it, there is just too much to do. */
const LOST_BELOW = 0.9;

/** Why a task that comes now is refused by `predictive`; undefined when it is let in. */
export function refuseByForecast(
  line: Line,
  horizon: Horizon,
  terms: Terms,
  now: number,
): Refused | undefined {
  const { healthy, idle, overdue, batchSize } = horizon;
  if (healthy === 0) {
    return overdue > 0 && line.waiting < batchSize * overdue ? undefined : "no_worker";
  }
  if (idle > 0 && line.waiting < batchSize) return undefined;
  const { startAt, finishAt } = forecast(line, horizon, now);
  if (startAt <= terms.startBy && finishAt <= terms.finishBy) return undefined;
  return lost(horizon) ? "capacity" : "deadline";
}

export function forecast(
  line: Line,
  horizon: Horizon,
  now: number,
): { readonly startAt: number; readonly finishAt: number } {
  const { freeAt, batchSize, batchMs, deviationMs } = horizon;
  const workers = freeAt.length;
  const tasks = ahead(line, horizon);
  if (workers === 0 || tasks === Infinity) return { startAt: Infinity, finishAt: Infinity };
  const batches = Math.floor(tasks / batchSize);
  const rounds = Math.floor(batches / workers);
  const startAt = Math.max(now, freeAt[batches % workers]!) + rounds * batchMs;
  // Batches scatter one by one; a mean that is off by a fifth of that is off in every round.
  const scatter = Math.sqrt(1 + rounds + (rounds / 5) ** 2);
  const margin = Math.max(MARGIN_MS, MARGIN_DEVIATIONS * deviationMs * scatter);
  return { startAt, finishAt: startAt + batchMs + margin };
}

/** How many tasks are served before it, those of better tiers that come meanwhile included. */
function ahead(line: Line, { perMs }: Horizon): number {
  const byFloor = line.floor > 0 ? (line.own + 1) / line.floor : Infinity;
  const left = leftFor(line, perMs);
  if (left <= 0) return byFloor;
  const inOrder = line.above + (line.own * perMs) / left;
  const expected = (line.abovePerMs * inOrder) / perMs;
  const more = ((SCATTER * Math.sqrt(expected) + RATE_ERROR * expected) * perMs) / left;
  return Math.min(inOrder + more, byFloor);
}

/** Tasks per ms that the better tiers leave, beside what lower ones get in any case. */
function leftFor({ abovePerMs, belowFloor }: Line, perMs: number): number {
  return perMs - abovePerMs - belowFloor * perMs;
}

export function lost({ perMs, nominalPerMs }: Horizon): boolean {
  return perMs < LOST_BELOW * nominalPerMs;
}

export interface Thresholds {
  readonly targetUtilization: number;
  readonly lastTierDepth: number;
  readonly firstTierDepth: number;
}

/** Why a task that comes now is refused by `thresholds`; `load` is what is let in over the capacity. */
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
/** A little of the capacity stays free, or the queue would never shrink. */
const SPARE = 0.9;

/** The slots that were given away, by tier. */
export class RetrySlots {
  readonly #last: number[];

  constructor(tiers: number) {
    this.#last = Array.from({ length: tiers }, () => -Infinity);
  }

  /** How long a refused task of `tier` should stay away. */
  reserve(tier: number, line: Line, horizon: Horizon, now: number): number {
    const { perMs } = horizon;
    // With no capacity known, whoever comes back finds out; nobody is sent away for longer than that takes.
    if (perMs <= 0) return Math.min(LATEST_MS, Math.max(SOONEST_MS, horizon.nextUsableAt - now));
    const queueMs = ahead(line, horizon) / perMs;
    const spare = Math.max(line.floor * perMs, SPARE * perMs - line.abovePerMs, 0.01 * perMs);
    const from = Math.max(this.#last[tier]!, now + Math.max(SOONEST_MS, queueMs));
    const slot = Math.min(now + LATEST_MS, from + 1 / spare);
    this.#last[tier] = slot;
    return slot - now;
  }
}
