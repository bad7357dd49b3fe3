/**
 * Admission: the order of refusal, in one place.
 *
 *   credential → tenant and tier    401 or 403, before the body is read; `credentials.ts`
 *   CPU time of this process        503, before the body is read; `process-load.ts`
 *   draining                        503, retry once the next process is up
 *   rate of the user, of the tier   429 with the time until the window closes
 *   capacity                        429 or 503 with a retry time; `capacity-gate.ts`
 *
 * Without capacity the request path still looks for a cached outcome before it refuses. The engine may refuse last: its
 * queue may be full.
 */
import type { Clock } from "../../app/clock.ts";
import { type Quota, Refusal } from "../../core/errors.ts";
import type { CapacityRefusal } from "../../core/shed.ts";
import type { TaskStore } from "../../engine/engine.ts";
import type { Events, ShedReason } from "../../observe/events.ts";
import type { Caller } from "./credentials.ts";
import { type Bottleneck, ProcessLoad } from "./process-load.ts";

export interface AdmissionRules {
  readonly tiers: readonly { readonly name: string; readonly ratePerMinute?: number }[];
  readonly perUserPerMinute?: number;
  /** Undefined: several models are served, and the body names one. */
  readonly onlyModel?: string | undefined;
}

/** Retry-After has whole seconds: retries are spread over half as long again. */
const SPREAD = 0.5;
const GOLDEN_RATIO = 0.618_033_988_749_895;
const MAX_RETRY_AFTER_S = 30;
const MAX_NAMED = 3;
/** The least Retry-After when this process is overloaded; retries are spread over as much again. */
const BUSY_RETRY_MS = 1000;
/** Number of different retry times, given out in turn. */
const BUSY_SLOTS = 64;

export class Admission {
  readonly #rules: () => AdmissionRules;
  readonly #engine: TaskStore;
  readonly #events: Events;
  #refusals = 0;
  #busySlot = 0;
  draining = false;
  readonly load: ProcessLoad;

  constructor(
    rules: () => AdmissionRules,
    engine: TaskStore,
    clock: Clock,
    events: Events,
    load = new ProcessLoad(rules().tiers.length, clock),
  ) {
    this.load = load;
    this.#rules = rules;
    this.#engine = engine;
    this.#events = events;
  }

  /** The model of a request whose body was not read; "" if unknown. */
  get onlyModel(): string {
    return this.#rules().onlyModel ?? "";
  }

  tierName(tier: number): string {
    return this.#rules().tiers[tier]!.name;
  }

  /** Undefined: start now. Else resolves when there is time, or throws a Refusal. Call before the body is read. */
  turn(caller: Caller): Promise<void> | undefined {
    const bottleneck = this.load.refuses(caller.tier);
    if (bottleneck === undefined) return this.load.turn();
    const slot = this.countBusy(caller);
    throw this.busy(caller.tier, bottleneck, slot);
  }

  busy(tier: number, bottleneck: Bottleneck, slot: number): Refusal {
    const retryAfterMs = busyRetryMs(slot);
    const what =
      bottleneck === "turn"
        ? "this gateway process has more requests than it can handle"
        : "this gateway process cannot store tasks as fast as they come";
    const now = `tier ${this.tierName(tier)} is refused for the moment`;
    return new Refusal("SERVICE_OVERLOADED", `${what}: ${now}; ${tryAgain(retryAfterMs)}`, { retryAfterMs });
  }

  /** Counts an overload refusal and returns its retry slot, for `busy`. */
  countBusy(caller: Caller): number {
    this.load.refused();
    this.#busySlot = (this.#busySlot + 1) % BUSY_SLOTS;
    this.#shed(caller, this.onlyModel, "full", busyRetryMs(this.#busySlot));
    return this.#busySlot;
  }

  /** Counts one request, of any number of tasks, against its rates; undefined: none apply. Rejects with a Refusal. */
  count(caller: Caller, model: string): Promise<Quota | undefined> | undefined {
    const { tiers, perUserPerMinute } = this.#rules();
    const limited = perUserPerMinute !== undefined || tiers[caller.tier]!.ratePerMinute !== undefined;
    return limited ? this.#spendRates(caller, model) : undefined;
  }

  shed(caller: Caller, model: string, { reason, code, message, waitMs }: CapacityRefusal): Refusal {
    const retryAfterMs = Math.max(1, Math.ceil(waitMs));
    this.#shed(caller, model, reason, retryAfterMs);
    const part = (++this.#refusals * GOLDEN_RATIO) % 1;
    const seconds = Math.ceil((retryAfterMs / 1000) * (1 + SPREAD * part));
    const first = code === "RATE_LIMITED" ? this.#first(caller.tier) : "";
    return new Refusal(code, `${message}${first}; ${tryAgain(retryAfterMs)}`, {
      retryAfterMs,
      retryAfterSeconds: Math.min(MAX_RETRY_AFTER_S, seconds),
    });
  }

  /** The tiers served before a refused one; by name while they are few. */
  #first(tier: number): string {
    const better = this.#rules()
      .tiers.slice(0, tier)
      .map(({ name }) => name);
    const names = better.length > MAX_NAMED ? "better tiers" : better.join(" and ");
    return `: tier ${this.tierName(tier)} is refused now, ${names} served first`;
  }

  /** A refusal, counted by reason. `own`: the caller's own limit; other callers are served. */
  refuse(
    caller: Caller,
    model: string,
    reason: ShedReason,
    message: string,
    waitMs: number,
    quota?: Quota,
    own = reason === "rate",
  ): Refusal {
    const code = own ? "RATE_LIMITED" : "SERVICE_OVERLOADED";
    const retryAfterMs = Math.max(1, Math.ceil(Number.isFinite(waitMs) ? waitMs : 1000));
    this.#shed(caller, model, reason, retryAfterMs);
    const told = reason === "draining" ? message : `${message}; ${tryAgain(retryAfterMs)}`;
    return new Refusal(code, told, { retryAfterMs, ...(quota && { quota }) });
  }

  ending(caller: Caller, model: string): Refusal {
    return this.refuse(
      caller,
      model,
      "draining",
      "this process is shutting down; send the request again",
      1000,
    );
  }

  #shed({ tier, tenant }: Caller, model: string, reason: ShedReason, retryAfterMs: number): void {
    this.#events.emit("request.shed", { model, tier: this.tierName(tier), tenant, reason, retryAfterMs });
  }

  /** Charges the user for a guessed task id. Throws when the rate limit is exceeded. */
  async spend(caller: Caller): Promise<void> {
    await this.#spendOwn(caller, "");
  }

  #spendOwn(caller: Caller, model: string): Promise<Quota | undefined> {
    return this.#spend(`user:${caller.tenant}`, this.#rules().perUserPerMinute, caller, model, "your limit");
  }

  async #spendRates(caller: Caller, model: string): Promise<Quota | undefined> {
    const { name, ratePerMinute } = this.#rules().tiers[caller.tier]!;
    const user = await this.#spendOwn(caller, model);
    const whose = `the limit of tier ${name}`;
    const all = await this.#spend(`tier:${name}`, ratePerMinute, caller, model, whose);
    return all === undefined || (user !== undefined && user.left <= all.left) ? user : all;
  }

  async #spend(
    key: string,
    limit: number | undefined,
    caller: Caller,
    model: string,
    whose: string,
  ): Promise<Quota | undefined> {
    if (limit === undefined) return undefined;
    const { allowed, left, resetMs } = await this.#engine.spend(key, limit);
    const quota = { limit, left, resetMs };
    if (allowed) return quota;
    const message = `${whose} of ${limit} requests a minute is used up`;
    throw this.refuse(caller, model, "rate", message, resetMs, quota);
  }
}

function busyRetryMs(slot: number): number {
  return BUSY_RETRY_MS + Math.floor((BUSY_RETRY_MS * slot) / BUSY_SLOTS);
}

/** Rounded up: a client that retries a moment early is refused again. */
function tryAgain(ms: number): string {
  return `try again in ${ms < 10_000 ? Math.ceil(ms / 100) / 10 : Math.ceil(ms / 1000)} s`;
}
