/**
 * Who is to blame when a call fails: the worker, or the inputs that it was given. Pure; times are milliseconds.
 *
 * A worker that answers 500 may be broken, or may have met an input that it cannot take. What else happened tells:
 *
 *   guilty      an input that failed alone, and failed alone again at a worker that answered others in between, or at another
 *               one while any did. Nothing of it counts against a worker. It is tried as often as any other: a worker may
 *               fail now and then by itself.
 *   suspected   a tenant: its last `failures` calls failed, with no other tenant's input in them, and none of its inputs was
 *               answered since, while others' were. The first failure of its next input, alone, makes that guilty and is its
 *               last: a tenant that sends only inputs that fail costs one call for each.
 *   barred      an input that ended its worker, alone there, at its last attempt; and whatever a suspected tenant sends
 *               after one that ended a worker. Refused untried for `barMs`: restarting a worker costs more than a call.
 *   confirmed   a worker's failure: all that failed there in one call was answered elsewhere, and it answered no call since.
 *               It counts, whatever was thought of it at first.
 *
 * Whether a failure counts against its worker:
 *
 *   no      the input is guilty; or one was found guilty within the window, and this worker answered within it. Where the
 *           worker ended with it: doubt
 *   doubt   an input was found guilty within the window, and this worker answered no call in it, so that others have to
 *           confirm; or it answered within `ejectMs`; or the call holds an input of a tenant of which nothing was answered
 *           since the worker's failures in a row began, while others' were within the window. It is tried further, with short pauses
 *   yes     otherwise: as with any worker that was never seen to answer
 *
 * Inputs are counted, not attempts: where every input of a failed call had failed at this worker before, and it answered
 * no call in between, the call is `repeated` and adds nothing to the failures in a row. However often one client sends one
 * input, it cannot eject a worker with it; a worker that fails with everything is ejected by its third distinct input.
 *
 * "Not found" of what a client named is believed, and does not count against the worker, unless a call with the
 * same parameters was answered within the window: then it is a failure like any other.
 *
 * The window is TRUST times `ejectMs`. A worker that breaks down entirely is found out after `ejectMs` where two tenants meet
 * it, sooner where a second worker answers what it did not, and at the latest when the window is over, if no input is guilty.
 * Without credentials all tenants are one, and an answer vouches for `ejectMs` alone.
 *
 * Everything is remembered for the window (what ended workers: for `barMs`) and bounded; while nothing fails, nothing is
 * remembered, and an answer costs one comparison.
 */
import assert from "node:assert/strict";

/** For so many times `ejectMs` an answer tells something of a failure. */
export const TRUST = 10;
const BAR_MS = 10_000;
const MAX_INPUTS = 4096;
/** Inputs remembered of one worker's failures in a row; more than the largest batch has. */
const MAX_ROW = 4096;
const MAX_TENANTS = 1024;
const MAX_BARRED = 1024;
const MAX_FOUND = 256;
const MAX_FOUND_CHARS = 4096;

export interface BlameLimits {
  /** Failures in a row that eject a worker, and that make a tenant suspected. */
  readonly failures: number;
  readonly ejectMs: number;
  /** How long an input that ended workers is refused untried. Default: BAR_MS. */
  readonly barMs?: number | undefined;
}

/** An input in a call. */
export interface Suspect {
  /** The same for the same input, however many tasks it is sent as. */
  readonly key: string;
  readonly tenant: string;
}

/** What one worker did recently. */
export class Standing {
  /** When it last answered a call. */
  answeredAt = -Infinity;
  /** When its first failure since then was; Infinity while there is none. */
  rowSince = Infinity;
  /** The inputs of those failures. */
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

  /** A call failed; true where every input of it had failed here before, in the same row of failures. */
  failed(suspects: readonly Suspect[], now: number): boolean {
    this.rowSince = Math.min(this.rowSince, now);
    const fresh = suspects.filter(({ key }) => !this.#row.has(key));
    for (const { key } of fresh) remember(this.#row, key, true, MAX_ROW);
    return fresh.length === 0;
  }

  /** When it last answered another tenant. */
  answeredOtherAt(tenant: string): number {
    return tenant === this.#tenant ? this.#otherAt : this.answeredAt;
  }
}

/** A call that failed. */
export interface FailedCall<W> {
  readonly suspects: readonly Suspect[];
  readonly worker: W;
  readonly standing: Standing;
  /** Of all workers of the model. */
  readonly fleet: readonly Standing[];
  /** Nothing else can have been the cause. */
  readonly alone: boolean;
  /** Its worker ended with it. */
  readonly died: boolean;
}

export interface Finding {
  /** The input was alone, is the cause, and is not worth a further try. */
  readonly over: boolean;
  readonly counts: "yes" | "no" | "doubt";
  /** Every input of the call had failed at this worker before, and it has answered no call since. */
  readonly repeated: boolean;
}

/** The last failure of an input. */
interface LastFailure<W> {
  readonly worker: W;
  readonly standing: Standing;
  readonly at: number;
  readonly alone: boolean;
  /** How many of its call were not answered elsewhere since; Infinity where it counted against the worker. */
  left: number;
}

/** Calls of one tenant that failed, since it was last answered. */
interface Streak {
  failures: number;
  readonly since: number;
  at: number;
  barredUntil: number;
}

/** What is known of the inputs of one model and of the tenants that send them. */
export class Blame<W> {
  readonly #limits: () => BlameLimits;
  readonly #inputs = new Map<string, LastFailure<W>>();
  /** Until when. */
  readonly #barred = new Map<string, number>();
  readonly #streaks = new Map<string, Streak>();
  /** Parameters of calls that were answered, and when. */
  readonly #found = new Map<string, number>();
  #guiltyAt = -Infinity;
  /** When the last of what is remembered is of no use any more; -Infinity while nothing is. */
  #until = -Infinity;

  constructor(limits: () => BlameLimits) {
    this.#limits = limits;
  }

  get windowMs(): number {
    return TRUST * this.#limits().ejectMs;
  }

  /** Nothing failed recently: no other question need be asked. */
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

  /** A worker answered these: returns the workers at which they had failed, each as often as that did not count yet. */
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
    // A worker that just ended may need a moment, whatever ended it.
    const counts = died && found === "no" ? "doubt" : found;
    if (guilty) this.#guiltyAt = now;
    const left = counts === "yes" && !repeated ? Infinity : suspects.length;
    const last = { worker, standing, at: now, alone, left };
    for (const { key } of suspects) remember(this.#inputs, key, last, MAX_INPUTS);
    this.#until = Math.max(this.#until, now + this.windowMs);
    if (over && died) streak.barredUntil = this.#barredUntil(now);
    return { over, counts, repeated };
  }

  /** A call with these parameters was answered: what they name exists. */
  found(parameters: string, now: number): void {
    if (parameters === "" || parameters.length > MAX_FOUND_CHARS) return;
    remember(this.#found, parameters, now, MAX_FOUND);
  }

  wasFound(parameters: string, now: number): boolean {
    return this.#recent(this.#found.get(parameters) ?? -Infinity, now);
  }

  /** It ended its worker, alone, and is given up. */
  bar({ key }: Suspect, now: number): void {
    remember(this.#barred, key, this.#barredUntil(now), MAX_BARRED);
  }

  #barredUntil(now: number): number {
    const until = now + (this.#limits().barMs ?? BAR_MS);
    this.#until = Math.max(this.#until, until);
    return until;
  }

  /** Whether an input of this tenant should not be sent with others'. */
  suspected({ tenant }: Suspect, fleet: readonly Standing[], now: number): boolean {
    const streak = this.#streaks.get(tenant);
    return streak !== undefined && this.#isSuspected(streak, tenant, fleet, now);
  }

  /** Whether it is refused untried: it ended workers, or its tenant's last ones all did. */
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

/** When any of them last answered another tenant. */
function othersAnsweredAt(fleet: readonly Standing[], tenant: string): number {
  let latest = -Infinity;
  for (const standing of fleet) latest = Math.max(latest, standing.answeredOtherAt(tenant));
  return latest;
}

/** Adds an entry as the newest; the oldest makes room. */
function remember<V>(map: Map<string, V>, key: string, value: V, most: number): void {
  map.delete(key);
  if (map.size >= most) map.delete(map.keys().next().value!);
  map.set(key, value);
}
