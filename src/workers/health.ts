/**
 * Circuit breaker of a worker: opens after consecutive failures.
 *
 *   closed ──failures in a row──► open for ejectMs ──► half-open: one batch ──fails──► open, twice as long
 *     ▲                                                     │
 *     └─────────────────────────── answers ─────────────────┘
 *
 * An unreachable worker opens it at once. A worker that asks for a pause (429, 503) gets it without a failure. Where it
 * is in doubt who caused the failures (`core/blame.ts`) it stays closed, with a pause of ejectMs / 10 after each, so
 * that other workers can tell. Retries of inputs that failed there before do not add to the row: distinct inputs are
 * counted.
 */
import { Standing } from "../core/blame.ts";

/** Longest ejection in ejectMs: doubles up to half a minute with the default of a second. */
export const LONGEST_EJECTION = 30;
const DOUBT_PAUSE = 0.1;
const FAILING = 1e4;
const EJECTED = 1e8;

export interface HealthLimits {
  readonly failures: number;
  readonly ejectMs: number;
  readonly maxEjectMs: number;
  /** How long to reject an input that crashed workers; default `BAR_MS`. */
  readonly barMs?: number;
}

/** How a failure counts against a worker (`core/blame.ts`). */
export interface Held {
  /** The input may be at fault. */
  readonly doubt: boolean;
  /** Its inputs failed there before: not counted again. */
  readonly repeated: boolean;
}

const CERTAIN: Held = { doubt: false, repeated: false };

export class Circuit {
  readonly #limits: () => HealthLimits;
  readonly standing = new Standing();
  /** Multiplies its service time when choosing: failing workers come after all others, ejected ones last. */
  reluctance = 1;
  #failures = 0;
  #ejections = 0;
  #closedUntil = 0;
  #pausedUntil = 0;
  /** Why it was last ejected; "" while it is well. */
  why = "";

  constructor(limits: () => HealthLimits) {
    this.#limits = limits;
  }

  down(now: number): boolean {
    return now < this.#closedUntil;
  }

  paused(now: number): boolean {
    return now < this.#pausedUntil;
  }

  /** Half-open: the ejection is over and no batch has confirmed recovery. */
  get probing(): boolean {
    return this.#ejections > 0;
  }

  get usableAt(): number {
    return Math.max(this.#closedUntil, this.#pausedUntil);
  }

  answered(): void {
    this.#failures = this.#ejections = 0;
    this.reluctance = 1;
    this.#closedUntil = this.#pausedUntil = 0;
    this.why = "";
  }

  /** Counts a failure; true when it ejects the worker. */
  failed(now: number, why: string, unreachable = false, { doubt, repeated }: Held = CERTAIN): boolean {
    if (!unreachable && !repeated) this.#failures++;
    this.reluctance = this.probing ? EJECTED : FAILING;
    const { failures, ejectMs, maxEjectMs } = this.#limits();
    const enough = this.#failures >= failures;
    if (!unreachable && doubt) {
      if (enough) this.pause(now + DOUBT_PAUSE * ejectMs);
      return false;
    }
    // In half-open any failure ejects, except of an input that failed there before.
    if (!unreachable && !enough && (repeated || !this.probing)) return false;
    const ms = Math.min(maxEjectMs, ejectMs * 2 ** this.#ejections);
    this.#ejections++;
    this.reluctance = EJECTED;
    this.#closedUntil = now + ms;
    this.why = why;
    return true;
  }

  pause(until: number): void {
    this.#pausedUntil = Math.max(this.#pausedUntil, until);
  }
}
