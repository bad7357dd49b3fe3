/**
 * The gate of one model: lets in what the workers can serve in time, and tells the rest when to come again.
 *
 * `core/shed.ts` has the rules and the formulas. Here is what they are fed with: how the workers are (a
 * `Horizon` from the dispatcher or the fleet), what waits (from the engine), and how fast each tier is let in,
 * counted here and, in a fleet, by the other gateways.
 *
 * Which answer a refusal gets: 429 where somebody else's better tier is served first; 503 where the capacity
 * itself is missing: workers are lost, or the first tier alone is too much.
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

/** How a model's workers are, and what other gateways let in. */
export interface Prospects {
  horizon(now: number): Horizon;
  /** Whether a worker idles and takes one more beside those that wait; cheaper than the horizon. */
  hasRoom(waiting: number, now: number): boolean;
  /** Tasks per ms of a tier that other gateways let in; undefined where there are none. */
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
  /** False: the model is not served here any more, also for those who came while it was. */
  open = true;

  /** `before`: the same model's by other rules; what it learned stays. */
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

  /** Tasks per ms that are let in here, by tier. */
  admittedPerMs(now: number): number[] {
    return this.#admitted.map((rate) => rate.perMs(now));
  }

  /** A task of this caller was queued. Whoever found an answer, or joined another's task, needs no worker. */
  queued({ tier }: Caller, now: number): void {
    this.#admitted[tier]!.count(now);
  }

  /**
   * Lets a task of this caller in, or says why not. `ofMany`: it is one of a request that is answered as a whole. By
   * a guess those are not refused: none of them would run then, and the guess would never be corrected.
   */
  enter(caller: Caller, now: number, ofMany = false): CapacityRefusal | undefined {
    // Most requests meet an idle worker and a short queue; where they would stand need not be known then.
    const predictive = this.#rules.mode === "predictive";
    if (predictive && this.#prospects.hasRoom(this.#waiting(), now)) return undefined;
    const horizon = this.#prospects.horizon(now);
    if (predictive && ofMany && horizon.guessed === true && horizon.healthy > 0) return undefined;
    const reason = this.#reason(caller, horizon, now);
    if (reason === undefined) return undefined;
    return { ...answerTo(reason, caller.tier, horizon), reason, waitMs: this.retryInMs(caller, now) };
  }

  /** How long somebody for whom there is no room should stay away. */
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
