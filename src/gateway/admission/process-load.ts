/**
 * What waits for this process itself, and who is refused because of it; `core/overload.ts` has the rule.
 *
 * A turn of the event loop reads every socket that has something. A process that also did the work of all these requests
 * in the same turn would accept no connection for as long as that takes, and could refuse no request. So a turn
 * begins a few requests; the others wait here, in order of arrival, while the loop goes on reading, accepting and
 * refusing.
 */
import type { Clock } from "../../app/clock.ts";
import { Fifo } from "../../core/fifo.ts";
import { Pace, PutWait, refusesPut, refusesTurn, type Waiting } from "../../core/overload.ts";

/** Requests that are begun in one turn of the event loop: about half a millisecond of work. */
const PER_TURN = 16;
/** For so many refusals a request is begun, so that refusing never takes all of the time. */
const REFUSALS_EACH = 4;

/** What a request would wait for too long: its turn, or to be stored. */
export type Bottleneck = "turn" | "put";

export class ProcessLoad {
  readonly #clock: Clock;
  readonly #afterTurn: (run: () => void) => void;
  readonly #tiers: number;
  readonly #turnOver = (): void => this.#endTurn();
  readonly #begin = new Fifo<() => void>();
  readonly #pace = new Pace();
  readonly puts = new PutWait();
  readonly #waiting = { requests: 0, msEach: 0, busyMs: 0 } satisfies Waiting;
  /** Requests begun and requests refused in this turn. */
  #begun = 0;
  #refused = 0;
  /** The end of this turn is awaited. */
  #inTurn = false;
  /** Since when there was always a request that waits. */
  #busySince = 0;
  /** When the last turn was over, if requests waited, and how many of them could be begun. */
  #busyAt: number | undefined;
  #most = PER_TURN;

  /** `afterTurn`: runs a function once, when every socket that has something was read. */
  constructor(tiers: number, clock: Clock, afterTurn: (run: () => void) => void = setImmediate) {
    this.#tiers = tiers;
    this.#clock = clock;
    this.#afterTurn = afterTurn;
  }

  /** What a request of this tier would wait for longer than it may; undefined: it is let in. */
  refuses(tier: number): Bottleneck | undefined {
    const { requests } = this.#waiting;
    // Those that are begun with the end of this turn wait no longer than the turn takes.
    const over = requests > 0 && requests * REFUSALS_EACH >= this.#refused;
    if (over && refusesTurn(tier, this.#tiers, this.#waiting)) return "turn";
    if (this.puts.open === 0) return undefined;
    return refusesPut(tier, this.#tiers, this.puts.ms(this.#clock.now())) ? "put" : undefined;
  }

  /** Whether any tier is refused now. */
  get refusing(): boolean {
    return this.refuses(this.#tiers - 1) !== undefined;
  }

  /** Counts a refusal. */
  refused(): void {
    this.#refused++;
  }

  /** Undefined: a request that was let in may begin. Else resolves when it may. */
  turn(): Promise<void> | undefined {
    if (!this.#inTurn) this.#awaitEnd();
    if (this.#begin.size === 0 && this.#begun < PER_TURN) {
      this.#begun++;
      return undefined;
    }
    if (this.#begin.size === 0) this.#busySince = this.#clock.now();
    this.#waiting.requests++;
    return new Promise((begin) => this.#begin.push(begin));
  }

  #awaitEnd(): void {
    this.#inTurn = true;
    this.#afterTurn(this.#turnOver);
  }

  #endTurn(): void {
    const now = this.#clock.now();
    this.#inTurn = false;
    if (this.#busyAt !== undefined) this.#pace.count(this.#most, now - this.#busyAt);
    this.#most = Math.max(PER_TURN, Math.ceil(this.#refused / REFUSALS_EACH));
    this.#begun = 0;
    this.#refused = 0;
    this.#busyAt = undefined;
    if (this.#begin.size === 0) return;
    this.#busyAt = now;
    for (; this.#begun < this.#most && this.#begin.size > 0; this.#begun++) this.#begin.shift()!();
    this.#waiting.requests = this.#begin.size;
    this.#waiting.msEach = this.#pace.msEach;
    this.#waiting.busyMs = now - this.#busySince;
    this.#awaitEnd();
  }
}
