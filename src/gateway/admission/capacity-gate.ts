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
  type CapacityRefusal,
  type Horizon,
  type Line,
  lost,
  refuseByForecast,
  refuseByThresholds,
  type Refused,
  RetrySlots,
  type Thresholds,
} from "../../core/shed.ts";
import type { Task } from "../../core/task.ts";
import type { Engine, Placed, PutReply, Sharing } from "../../engine/engine.ts";

/** Where a task stands in line. */
type Place = Pick<Task, "tier" | "tenant">;

export interface CapacityRules extends Thresholds {
  readonly mode: "predictive" | "thresholds" | "off";
  readonly model: string;
  readonly tiers: number;
  readonly queueMs: number;
  readonly totalMs: number;
  /** Whether looking up a shareable outcome costs no round trip; with an Idempotency-Key it is done anyway. */
  readonly looksForFree?: boolean;
}

export interface Prospects {
  horizon(now: number): Horizon;
  /** Whether an idle worker can take one more beside the waiting tasks; cheaper than the horizon. */
  hasRoom(waiting: number, now: number): boolean;
  /** Tasks per ms of a tier that other gateways admit; undefined without other gateways. */
  othersPerMs?(tier: number): number;
}

export class CapacityGate {
  readonly #rules: CapacityRules;
  readonly #prospects: Prospects;
  readonly #engine: Engine;
  readonly #admitted: readonly SurgeEstimate[];
  readonly #slots: RetrySlots;

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

  /**
   * Puts a new task if there is capacity for it, or if it can share the work of another. `ofMany`: see `enter`.
   * Returns without a promise where the engine does.
   */
  put(task: Task, sharing: Sharing, ofMany: boolean): Placed | Promise<Placed> {
    const refusal = this.enter(task, task.createdAt, ofMany);
    if (refusal !== undefined && !this.#mayShare(sharing)) return { kind: "refused", ...refusal };
    const reply = this.#engine.put(task, refusal === undefined ? sharing : { ...sharing, only: true });
    if (!(reply instanceof Promise)) return this.#placed(task, reply, refusal);
    return reply.then((known) => this.#placed(task, known, refusal));
  }

  #placed(task: Task, reply: PutReply, refusal: CapacityRefusal | undefined): Placed {
    if (reply.kind === "queued") this.queued(task, task.createdAt);
    if (reply.kind !== "full" || reply.never === true) return reply;
    if (refusal !== undefined) return { kind: "refused", ...refusal };
    return { ...reply, retryInMs: reply.retryInMs ?? this.retryInMs(task, task.createdAt) };
  }

  #mayShare({ idempotency, joinKey, cacheKey }: Sharing): boolean {
    if (idempotency !== undefined) return true;
    return this.#rules.looksForFree === true && (joinKey !== undefined || cacheKey !== undefined);
  }

  /** Counts a task that was queued; cached and joined ones need no worker. */
  queued({ tier }: Place, now: number): void {
    this.#admitted[tier]!.count(now);
  }

  /**
   * Admits a task or says why not. `ofMany`: one of a request that is answered as a whole; never refused on a
   * prediction, since then none would run to correct that prediction.
   */
  enter(caller: Place, now: number, ofMany = false): CapacityRefusal | undefined {
    // Most requests meet an idle worker and a short queue, and need no position estimate.
    const predictive = this.#rules.mode === "predictive";
    if (predictive && this.#prospects.hasRoom(this.#waiting(), now)) return undefined;
    const horizon = this.#prospects.horizon(now);
    if (predictive && ofMany && horizon.guessed === true && horizon.healthy > 0) return undefined;
    const reason = this.#reason(caller, horizon, now);
    if (reason === undefined) return undefined;
    return { ...answerTo(reason, caller.tier, horizon), reason, waitMs: this.retryInMs(caller, now) };
  }

  retryInMs(caller: Place, now: number): number {
    return this.#slots.reserve(caller.tier, this.#line(caller, now), this.#prospects.horizon(now), now);
  }

  #reason(caller: Place, horizon: Horizon, now: number): Refused | undefined {
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

  #line({ tier, tenant }: Place, now: number): Line {
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
