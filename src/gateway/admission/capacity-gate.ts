/**
 * Capacity check of one model: admits what the workers can serve in time, and gives the rest a retry time.
 *
 * The rules and formulas are in `core/shed.ts`. Inputs: the workers' state (a `Horizon` from the dispatcher or the
 * fleet), the queue (from the engine), and each tier's admission rate, here and at the other gateways.
 *
 * 429 where a better tier of another caller is served first; 503 where capacity is missing: workers are down, or the
 * first tier alone is too much.
 */
import { SurgeEstimate } from "../../core/estimate.ts";
import { floorOf } from "../../core/fair.ts";
import {
  type Horizon,
  type Line,
  lost,
  refuseByForecast,
  refuseByThresholds,
  type Refused,
  RetrySlots,
  type Thresholds,
} from "../../core/shed.ts";
import type { Engine } from "../../engine/engine.ts";
import type { Caller } from "./credentials.ts";

export interface CapacityRules extends Thresholds {
  readonly mode: "predictive" | "thresholds" | "off";
  readonly model: string;
  readonly tiers: number;
  readonly queueMs: number;
  readonly totalMs: number;
}

export interface Prospects {
  horizon(now: number): Horizon;
  /** Whether an idle worker can take one more beside the waiting tasks; cheaper than the horizon. */
  hasRoom(waiting: number, now: number): boolean;
  /** Tasks per ms of a tier that other gateways admit; undefined without other gateways. */
  othersPerMs?(tier: number): number;
}

export interface CapacityRefusal {
  readonly reason: Refused;
  readonly code: "RATE_LIMITED" | "SERVICE_OVERLOADED";
  readonly message: string;
  readonly waitMs: number;
}

export class CapacityGate {
  readonly #rules: CapacityRules;
  readonly #prospects: Prospects;
  readonly #engine: Engine;
  readonly #admitted: readonly SurgeEstimate[];
  readonly #slots: RetrySlots;
  /** False: the model was removed, also for requests that arrived before. */
  open = true;

  /** `before`: the same model's gate under earlier rules, whose learned rates are kept. */
  constructor(rules: CapacityRules, prospects: Prospects, engine: Engine, before?: CapacityGate) {
    this.#rules = rules;
    this.#prospects = prospects;
    this.#engine = engine;
    const learned = before && { admitted: before.#admitted, slots: before.#slots };
    this.#admitted = learned?.admitted ?? Array.from({ length: rules.tiers }, () => new SurgeEstimate());
    this.#slots = learned?.slots ?? new RetrySlots(rules.tiers);
  }

  get model(): string {
    return this.#rules.model;
  }

  admittedPerMs(now: number): number[] {
    return this.#admitted.map((rate) => rate.perMs(now));
  }

  /** Counts a task that was queued; cached and joined ones need no worker. */
  queued({ tier }: Caller, now: number): void {
    this.#admitted[tier]!.count(now);
  }

  /**
   * Admits a task or says why not. `ofMany`: one of a request that is answered as a whole; never refused on a
   * prediction, since then none would run to correct that prediction.
   */
  enter(caller: Caller, now: number, ofMany = false): CapacityRefusal | undefined {
    // Most requests meet an idle worker and a short queue, and need no position estimate.
    const predictive = this.#rules.mode === "predictive";
    if (predictive && this.#prospects.hasRoom(this.#waiting(), now)) return undefined;
    const horizon = this.#prospects.horizon(now);
    if (predictive && ofMany && horizon.guessed === true && horizon.healthy > 0) return undefined;
    const reason = this.#reason(caller, horizon, now);
    if (reason === undefined) return undefined;
    return { ...answerTo(reason, caller.tier, horizon), reason, waitMs: this.retryInMs(caller, now) };
  }

  retryInMs(caller: Caller, now: number): number {
    return this.#slots.reserve(caller.tier, this.#line(caller, now), this.#prospects.horizon(now), now);
  }

  #reason(caller: Caller, horizon: Horizon, now: number): Refused | undefined {
    const { mode, queueMs, totalMs, tiers } = this.#rules;
    if (mode === "predictive") {
      const terms = { startBy: now + queueMs, finishBy: now + totalMs };
      return refuseByForecast(this.#line(caller, now), horizon, terms, now);
    }
    if (mode === "thresholds") {
      let perMs = 0;
      for (let tier = 0; tier < tiers; tier++) perMs += this.#perMs(tier, now);
      const load = perMs / horizon.perMs;
      return refuseByThresholds(caller.tier, tiers, this.#waiting(), load, horizon, this.#rules);
    }
    return horizon.healthy === 0 && horizon.overdue === 0 ? "no_worker" : undefined;
  }

  #line({ tier, tenant }: Caller, now: number): Line {
    const { model, tiers } = this.#rules;
    const depths = this.#engine.waiting(model);
    let above = 0;
    let abovePerMs = 0;
    for (let better = 0; better < tier; better++) {
      above += depths[better] ?? 0;
      abovePerMs += this.#perMs(better, now);
    }
    let belowFloor = 0;
    for (let lower = tier + 1; lower < tiers; lower++) {
      if (depths[lower]! > 0) belowFloor += floorOf(lower, tiers);
    }
    const own = this.#engine.turn(model, tier, tenant);
    return { waiting: this.#waiting(), above, abovePerMs, own, floor: floorOf(tier, tiers), belowFloor };
  }

  #perMs(tier: number, now: number): number {
    return this.#admitted[tier]!.perMs(now) + (this.#prospects.othersPerMs?.(tier) ?? 0);
  }

  #waiting(): number {
    let waiting = 0;
    for (const depth of this.#engine.waiting(this.#rules.model)) waiting += depth;
    return waiting;
  }
}

function answerTo(
  reason: Refused,
  tier: number,
  horizon: Horizon,
): Pick<CapacityRefusal, "code" | "message"> {
  if (reason === "no_worker") {
    return { code: "SERVICE_OVERLOADED", message: "no worker of this model is healthy" };
  }
  if (lost(horizon)) {
    return { code: "SERVICE_OVERLOADED", message: "too few workers of this model are healthy" };
  }
  const message = "more requests than the workers can serve in time";
  return { code: tier === 0 ? "SERVICE_OVERLOADED" : "RATE_LIMITED", message };
}
