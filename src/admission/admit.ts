/**
 * Who may enter, and when not: the order of refusal, in one place.
 *
 *   draining → nobody may            503, come back when the next process is there
 *   credential → tenant and tier     before all else, in `credentials.ts`
 *   rate of the user, of the tier    429 with the time until the window closes
 *   no healthy worker                503 with the time until one is tried again
 *
 * The engine has the last word: its queue may be full.
 */
import type { Clock } from "../clock.ts";
import { type Quota, Refusal } from "../core/errors.ts";
import type { Engine } from "../engine/engine.ts";
import type { Events, ShedReason } from "../telemetry/events.ts";
import type { Caller } from "./caller.ts";

/** What admission knows of a model's workers; the dispatcher tells. */
export interface Capacity {
  healthy(now: number): number;
  /** When a worker that is down will be tried again. */
  nextUsableAt(now: number): number;
  /** How long a full queue needs to make room. */
  drainMs(now: number): number;
}

export interface AdmissionRules {
  readonly tiers: readonly { readonly name: string; readonly ratePerMinute?: number }[];
  readonly perUserPerMinute?: number;
}

export class Admission {
  readonly #rules: AdmissionRules;
  readonly #engine: Engine;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #limited: boolean;
  draining = false;

  constructor(rules: AdmissionRules, engine: Engine, clock: Clock, events: Events) {
    this.#rules = rules;
    this.#engine = engine;
    this.#clock = clock;
    this.#events = events;
    this.#limited =
      rules.perUserPerMinute !== undefined ||
      rules.tiers.some(({ ratePerMinute }) => ratePerMinute !== undefined);
  }

  tierName(tier: number): string {
    return this.#rules.tiers[tier]!.name;
  }

  /** Throws a Refusal, or gives the quota where one applies; waits only where there is a rate to look up. */
  admit(caller: Caller, capacity: Capacity): Promise<Quota | undefined> | undefined {
    if (this.draining) {
      throw this.refuse(caller, "draining", "this process is shutting down; send the request again", 1000);
    }
    if (this.#limited) {
      return this.#spendRates(caller).then((quota) => {
        this.#checkWorkers(caller, capacity);
        return quota;
      });
    }
    this.#checkWorkers(caller, capacity);
    return undefined;
  }

  #checkWorkers(caller: Caller, capacity: Capacity): void {
    const now = this.#clock.now();
    if (capacity.healthy(now) > 0) return;
    const waitMs = capacity.nextUsableAt(now) - now;
    throw this.refuse(caller, "no_worker", "no worker of this model is healthy", waitMs);
  }

  /** A refusal, counted by its reason. */
  refuse(caller: Caller, reason: ShedReason, message: string, waitMs: number, quota?: Quota): Refusal {
    this.#events.emit("request.shed", { tier: this.tierName(caller.tier), reason });
    const code = reason === "rate" ? "RATE_LIMITED" : "SERVICE_OVERLOADED";
    const retryAfterMs = Math.max(1, Math.ceil(Number.isFinite(waitMs) ? waitMs : 1000));
    return new Refusal(code, message, { retryAfterMs, ...(quota && { quota }) });
  }

  /** Counts what is no task against its user: a guess at somebody's task id. Throws when that was too many. */
  async spend(caller: Caller): Promise<void> {
    await this.#spend(`user:${caller.tenant}`, this.#rules.perUserPerMinute, caller, "your limit");
  }

  async #spendRates(caller: Caller): Promise<Quota | undefined> {
    const tier = this.#rules.tiers[caller.tier]!;
    const user = await this.#spend(
      `user:${caller.tenant}`,
      this.#rules.perUserPerMinute,
      caller,
      "your limit",
    );
    const all = await this.#spend(
      `tier:${tier.name}`,
      tier.ratePerMinute,
      caller,
      `the limit of tier ${tier.name}`,
    );
    return all === undefined || (user !== undefined && user.left <= all.left) ? user : all;
  }

  async #spend(
    key: string,
    limit: number | undefined,
    caller: Caller,
    whose: string,
  ): Promise<Quota | undefined> {
    if (limit === undefined) return undefined;
    const { allowed, left, resetMs } = await this.#engine.spend(key, limit);
    const quota = { limit, left, resetMs };
    if (allowed) return quota;
    throw this.refuse(caller, "rate", `${whose} of ${limit} requests a minute is used up`, resetMs, quota);
  }
}
