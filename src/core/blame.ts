/**
 * Decides whether a failed call is the worker's fault or an input's. Pure; times are milliseconds.
 *
 *   guilty      an input that failed alone twice: again at a worker that answered other inputs in between, or at a
 *               second worker while any worker answered. It never counts against a worker and keeps its normal retries.
 *   suspected   a tenant whose last `failures` calls failed, with no other tenant's input in them and none of its
 *               inputs answered since, while others' were. Its next input that fails alone is guilty at once, without a
 *               retry.
 *   barred      an input that killed its worker, alone there, at its last attempt, and every input of a suspected
 *               tenant after one that did. Rejected for `barMs`: restarting a worker costs more than a call.
 *   confirmed   a worker's failure: all inputs of the call were answered elsewhere and it answered no call since. It
 *               counts, whatever the first finding was.
 *
 * Whether a failure counts against its worker:
 *
 *   no      the input is guilty, or one was found guilty within the window and this worker answered within it. `doubt`
 *           where the worker died.
 *   doubt   an input was found guilty within the window and this worker answered nothing in it; or it answered within
 *           `ejectMs`; or the call holds an input of a tenant that got no answer since the worker's failures in a row
 *           began, while others did within the window. Retried after short pauses.
 *   yes     otherwise, e.g. a worker that never answered
 *
 * Distinct inputs are counted, not attempts: a call whose inputs all failed at this worker before, with no answer in
 * between, is `repeated` and adds nothing. So one client cannot eject a worker by resending one input; a worker that
 * fails everything is ejected by its third distinct input.
 *
 * "Not found" does not count against the worker unless a call with the same parameters was answered within the window.
 *
 * The window is TRUST · `ejectMs`. A broken worker is detected after `ejectMs` if two tenants use it, sooner if a
 * second worker answers its inputs, and at the latest when the window ends, if no input is guilty. Without credentials
 * all tenants are one, and an answer vouches for `ejectMs` only. State is bounded and kept for the window (barred
 * inputs: for `barMs`); while nothing fails nothing is kept, and an answer costs one comparison.
 */
import assert from "node:assert/strict";

/** Window in units of `ejectMs`: how long an answer is evidence about a failure. */
export const TRUST = 10;
const BAR_MS = 10_000;
const MAX_INPUTS = 4096;
const MAX_ROW = 4096; // inputs kept per worker for its failures in a row; larger than any batch
const MAX_TENANTS = 1024;
const MAX_BARRED = 1024;
const MAX_FOUND = 256;
const MAX_FOUND_CHARS = 4096;

export interface BlameLimits {
  /** Failures in a row that eject a worker or make a tenant suspected. */
  readonly failures: number;
  readonly ejectMs: number;
  /** How long to reject an input that killed a worker. Default: BAR_MS. */
  readonly barMs?: number | undefined;
}

export interface Suspect {
  /** Equal for equal inputs, across tasks. */
  readonly key: string;
  readonly tenant: string;
}

export class Standing {
  answeredAt = -Infinity;
  rowSince = Infinity; // first failure since `answeredAt`; Infinity if none
  readonly #row = new Map<string, true>();
  #tenant = "";
  #otherAt = -Infinity;

  answered(tenant: string, now: number): void {
    if (tenant !== this.#tenant) {
      this.#otherAt = this.answeredAt;
      this.#tenant = tenant;
    }
    this.answeredAt = now;
    if (this.rowSince === Infinity) return;
    this.rowSince = Infinity;
    this.#row.clear();
  }

  /** Records a failed call; true if every input had failed here before in the same row of failures. */
  failed(suspects: readonly Suspect[], now: number): boolean {
    this.rowSince = Math.min(this.rowSince, now);
    const fresh = suspects.filter(({ key }) => !this.#row.has(key));
    for (const { key } of fresh) remember(this.#row, key, true, MAX_ROW);
    return fresh.length === 0;
  }

  answeredOtherAt(tenant: string): number {
    return tenant === this.#tenant ? this.#otherAt : this.answeredAt;
  }
}

export interface FailedCall<W> {
  readonly suspects: readonly Suspect[];
  readonly worker: W;
  readonly standing: Standing;
  /** All workers of the model. */
  readonly fleet: readonly Standing[];
  /** No other input or batch can have been the cause. */
  readonly alone: boolean;
  readonly died: boolean;
}

export interface Finding {
  /** The input was alone, is the cause, and must not be retried. */
  readonly over: boolean;
  readonly counts: "yes" | "no" | "doubt";
  /** Every input had failed at this worker before, with no answer since. */
  readonly repeated: boolean;
}

interface LastFailure<W> {
  readonly worker: W;
  readonly standing: Standing;
  readonly at: number;
  readonly alone: boolean;
  /** Inputs of the call not yet answered elsewhere; Infinity if the failure counted against the worker already. */
  left: number;
}

interface Streak {
  failures: number;
  readonly since: number;
  at: number;
  barredUntil: number;
}

/** Failure history of one model's inputs and tenants. */
export class Blame<W> {
  readonly #limits: () => BlameLimits;
  readonly #inputs = new Map<string, LastFailure<W>>();
  readonly #barred = new Map<string, number>(); // key to expiry time
  readonly #streaks = new Map<string, Streak>();
  readonly #found = new Map<string, number>(); // parameters of answered calls, with the time
  #guiltyAt = -Infinity;
  #until = -Infinity; // when the newest record expires; -Infinity while there is none

  constructor(limits: () => BlameLimits) {
    this.#limits = limits;
  }

  get windowMs(): number {
    return TRUST * this.#limits().ejectMs;
  }

  /** No recent failures: callers may skip every other check. */
  get idle(): boolean {
    return this.#until === -Infinity;
  }

  active(now: number): boolean {
    if (this.idle) return false;
    if (now <= this.#until) return true;
    this.#inputs.clear();
    this.#barred.clear();
    this.#streaks.clear();
    this.#until = -Infinity;
    return false;
  }

  /** Records an answer; returns the workers at which these inputs had failed, once per failure not counted yet. */
  answered(suspects: readonly Suspect[], worker: W, now: number): W[] {
    const confirmed: W[] = [];
    for (const { key, tenant } of suspects) {
      this.#streaks.delete(tenant);
      const last = this.#inputs.get(key);
      this.#inputs.delete(key);
      if (last === undefined || last.worker === worker || --last.left > 0) continue;
      if (this.#recent(last.at, now) && last.standing.answeredAt <= last.at) confirmed.push(last.worker);
    }
    return confirmed;
  }

  failed(call: FailedCall<W>, now: number): Finding {
    const { suspects, worker, standing, fleet, alone, died } = call;
    assert(suspects.length > 0, "a call holds an input");
    this.active(now);
    const { tenant } = suspects[0]!;
    const streak = suspects.every((each) => each.tenant === tenant) ? this.#lengthen(tenant, now) : undefined;
    const repeated = standing.failed(suspects, now);
    const over = alone && streak !== undefined && this.#isSuspected(streak, tenant, fleet, now);
    const guilty = over || (alone && this.#failsAgain(call, now));
    const found = guilty ? "no" : this.#counts(call, now);
    // A worker that just died may need time to restart, whatever the cause.
    const counts = died && found === "no" ? "doubt" : found;
    if (guilty) this.#guiltyAt = now;
    const left = counts === "yes" && !repeated ? Infinity : suspects.length;
    const last = { worker, standing, at: now, alone, left };
    for (const { key } of suspects) remember(this.#inputs, key, last, MAX_INPUTS);
    this.#until = Math.max(this.#until, now + this.windowMs);
    if (over && died) streak.barredUntil = this.#barredUntil(now);
    return { over, counts, repeated };
  }

  /** A call with these parameters was answered, so what they name exists. */
  found(parameters: string, now: number): void {
    if (parameters === "" || parameters.length > MAX_FOUND_CHARS) return;
    remember(this.#found, parameters, now, MAX_FOUND);
  }

  wasFound(parameters: string, now: number): boolean {
    return this.#recent(this.#found.get(parameters) ?? -Infinity, now);
  }

  /** The input killed its worker, alone, at its last attempt. */
  bar({ key }: Suspect, now: number): void {
    remember(this.#barred, key, this.#barredUntil(now), MAX_BARRED);
  }

  #barredUntil(now: number): number {
    const until = now + (this.#limits().barMs ?? BAR_MS);
    this.#until = Math.max(this.#until, until);
    return until;
  }

  /** Whether to send this tenant's inputs apart from others'. */
  suspected({ tenant }: Suspect, fleet: readonly Standing[], now: number): boolean {
    const streak = this.#streaks.get(tenant);
    return streak !== undefined && this.#isSuspected(streak, tenant, fleet, now);
  }

  /** Whether to reject it without a call: it killed workers, or its tenant's last inputs all did. */
  barred({ key, tenant }: Suspect, now: number): boolean {
    const until = Math.max(
      this.#barred.get(key) ?? -Infinity,
      this.#streaks.get(tenant)?.barredUntil ?? -Infinity,
    );
    return until > now;
  }

  #failsAgain({ suspects, worker, standing, fleet }: FailedCall<W>, now: number): boolean {
    const last = this.#inputs.get(suspects[0]!.key);
    if (last === undefined || !last.alone || !this.#recent(last.at, now)) return false;
    if (last.worker === worker) return standing.answeredAt >= last.at;
    return fleet.some(({ answeredAt }) => answeredAt >= last.at);
  }

  #isSuspected(streak: Streak, tenant: string, fleet: readonly Standing[], now: number): boolean {
    if (streak.failures < this.#limits().failures || !this.#recent(streak.at, now)) return false;
    const otherAt = othersAnsweredAt(fleet, tenant);
    return otherAt >= streak.since && this.#recent(otherAt, now);
  }

  #counts({ suspects, standing, fleet }: FailedCall<W>, now: number): Finding["counts"] {
    const { answeredAt, rowSince } = standing;
    if (this.#recent(this.#guiltyAt, now)) return this.#recent(answeredAt, now) ? "no" : "doubt";
    if (now - answeredAt <= this.#limits().ejectMs) return "doubt";
    const explained = suspects.some(({ tenant }) => {
      const streak = this.#streaks.get(tenant);
      if (streak === undefined || streak.since > rowSince) return false;
      return this.#recent(othersAnsweredAt(fleet, tenant), now);
    });
    return explained ? "doubt" : "yes";
  }

  #recent(at: number, now: number): boolean {
    return now - at <= this.windowMs;
  }

  #lengthen(tenant: string, now: number): Streak {
    let streak = this.#streaks.get(tenant);
    if (streak === undefined || !this.#recent(streak.at, now)) {
      streak = { failures: 0, since: now, at: now, barredUntil: -Infinity };
      remember(this.#streaks, tenant, streak, MAX_TENANTS);
    }
    streak.failures++;
    streak.at = now;
    return streak;
  }
}

function othersAnsweredAt(fleet: readonly Standing[], tenant: string): number {
  let latest = -Infinity;
  for (const standing of fleet) latest = Math.max(latest, standing.answeredOtherAt(tenant));
  return latest;
}

/** Inserts as the newest; evicts the oldest beyond `most`. */
function remember<V>(map: Map<string, V>, key: string, value: V, most: number): void {
  map.delete(key);
  if (map.size >= most) map.delete(map.keys().next().value!);
  map.set(key, value);
}
