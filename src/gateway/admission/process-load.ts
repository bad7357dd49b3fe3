/**
 * Load of this process and the refusals it causes; the rule is in `core/overload.ts`.
 *
 * One event loop turn reads every ready socket. Handling all those requests in the same turn would block accepts and
 * refusals for as long. So a turn starts a few requests; the others wait here in FIFO order while the loop goes on
 * reading, accepting and refusing.
 */
import type { Clock } from "../../app/clock.ts";
import { Fifo } from "../../core/fifo.ts";
import { Pace, PutWait, refusesPut, refusesTurn, type Waiting } from "../../core/overload.ts";

/** Requests started per event loop turn: about half a millisecond of work. */
const PER_TURN = 16;
/** At least one request is started per so many refusals, so that refusing never takes all the time. */
const REFUSALS_EACH = 4;

/** What a request would wait for too long: its turn, or the store. */
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
  #begun = 0;
  #refused = 0;
  #inTurn = false;
  /** Since when the queue has not been empty. */
  #busySince = 0;
  /** When the last turn ended with requests waiting, and how many it could start. */
  #busyAt: number | undefined;
  #most = PER_TURN;

  /** `afterTurn` runs a function once, after all ready sockets were read. */
  constructor(tiers: number, clock: Clock, afterTurn: (run: () => void) => void = setImmediate) {
    this.#tiers = tiers;
    this.#clock = clock;
    this.#afterTurn = afterTurn;
  }

  /** What a request of this tier would wait too long for; undefined: admitted. */
  refuses(tier: number): Bottleneck | undefined {
    const { requests } = this.#waiting;
    // Requests that start at the end of this turn wait no longer than the turn takes.
    const over = requests > 0 && requests * REFUSALS_EACH >= this.#refused;
    if (over && refusesTurn(tier, this.#tiers, this.#waiting)) return "turn";
    if (this.puts.open === 0) return undefined;
    return refusesPut(tier, this.#tiers, this.puts.ms(this.#clock.now())) ? "put" : undefined;
  }

  get refusing(): boolean {
    return this.refuses(this.#tiers - 1) !== undefined;
  }

  refused(): void {
    this.#refused++;
  }

  /** Undefined: an admitted request may start. Else resolves when it may. */
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
