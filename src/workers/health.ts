/**
 * Whether a worker may be given work: a circuit that opens after failures in a row.
 *
 *   closed ──failures in a row──► open for ejectMs ──► half-open: one batch ──fails──► open, twice as long
 *     ▲                                                     │
 *     └─────────────────────────── answers ─────────────────┘
 *
 * A worker that cannot be reached at all opens it at once. A worker that asks for a pause (429, 503) is
 * left alone for that long, and nothing is held against it. Where it is in doubt whose fault the failures are
 * (`core/blame.ts`) it stays closed, with a pause of a tenth of ejectMs after each, so that others can tell. A further attempt
 * of inputs that failed there before adds nothing to the row: distinct inputs are counted.
 */
import { Standing } from "../core/blame.ts";

/** The longest ejection, in ejectMs: it doubles up to half a minute with the default of a second. */
export const LONGEST_EJECTION = 30;
const DOUBT_PAUSE = 0.1;
const FAILING = 1e4;
const EJECTED = 1e8;

export interface HealthLimits {
  /** Failures in a row that eject a worker. */
  readonly failures: number;
  readonly ejectMs: number;
  readonly maxEjectMs: number;
  /** How long an input that ended workers is refused untried; left out: `BAR_MS`. */
  readonly barMs?: number;
}

/** How a failure is held against a worker (`core/blame.ts`). */
export interface Held {
  /** It may be the input's. */
  readonly doubt: boolean;
  /** Its inputs failed there before: it adds nothing to the row. */
  readonly repeated: boolean;
}

const CERTAIN: Held = { doubt: false, repeated: false };

export class Circuit {
  readonly #limits: () => HealthLimits;
  readonly standing = new Standing();
  /** What its pace is taken by when a worker is chosen: those that fail come after all that do not, the ejected last. */
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

  /** Ejected, and its time is not over. */
  down(now: number): boolean {
    return now < this.#closedUntil;
  }

  paused(now: number): boolean {
    return now < this.#pausedUntil;
  }

  /** Ejected, its time is over, and no batch has told yet whether it is well again. */
  get probing(): boolean {
    return this.#ejections > 0;
  }

  /** When it may be given a batch again. */
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
    // One that is on trial is ejected by any failure, but for that of an input it failed with before.
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
