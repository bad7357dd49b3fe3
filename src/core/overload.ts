/**
 * When a gateway process is overloaded, and which requests it refuses. Pure: time is an argument.
 *
 * A request is refused when either wait exceeds its tier's bound: the wait of read requests for this process
 * (`refusesTurn`), or the age of the newest answered put while puts are open (`PutWait`). The last tier has the
 * smallest bound, so it is refused first. No hysteresis: a refused request adds to neither wait, so the refused share
 * settles where the rest fills the process.
 */

/**
 * Bounds of the first tier (others: `shareOf`). A burst is served as long as each request waits less than
 * `LONG_WAIT_MS`. Once requests have waited without a break for `BURST_MS`, arrivals exceed capacity and the wait is
 * kept short.
 */
const LONG_WAIT_MS = 2000;
const BURST_MS = 3000;
const SHORT_WAIT_MS = 250;
const PUT_WAIT_MS = 1000; // a put takes milliseconds; by default a task may wait 2 s in the queue

/** Share of the first tier's bounds: 1 down to one half for the last tier. */
function shareOf(tier: number, tiers: number): number {
  return tiers <= 1 ? 1 : 1 - tier / (2 * (tiers - 1));
}

export interface Waiting {
  readonly requests: number;
  readonly msEach: number;
  /** How long at least one request has been waiting without a break. */
  readonly busyMs: number;
}

export function refusesTurn(tier: number, tiers: number, waiting: Waiting): boolean {
  const waitMs = (waiting.requests * waiting.msEach) / shareOf(tier, tiers);
  return waitMs > (waiting.busyMs > BURST_MS ? SHORT_WAIT_MS : LONG_WAIT_MS);
}

export function refusesPut(tier: number, tiers: number, putMs: number): boolean {
  return putMs > PUT_WAIT_MS * shareOf(tier, tiers);
}

const HALF_LIFE_MS = 500; // half-life of a measurement: long enough that a 50 ms garbage collection counts little

/** Time per request while requests wait. */
export class Pace {
  #ms = 0;
  #requests = 0;

  /** `requests` were handled within `ms`, or would have been had there been that many. */
  count(requests: number, ms: number): void {
    const kept = 0.5 ** (ms / HALF_LIFE_MS);
    this.#ms = this.#ms * kept + ms;
    this.#requests = this.#requests * kept + requests;
  }

  /** 0 while unknown. */
  get msEach(): number {
    return this.#requests === 0 ? 0 : this.#ms / this.#requests;
  }
}

/** Age of the oldest unanswered put. With several servers, one that hangs does not count while others answer. */
export class PutWait {
  open = 0;
  #answeredUpTo = 0; // start of the newest answered put, or of the first put after none was open

  began(now: number): void {
    if (this.open++ === 0 && now > this.#answeredUpTo) this.#answeredUpTo = now;
  }

  ended(beganAt: number): void {
    this.open--;
    if (beganAt > this.#answeredUpTo) this.#answeredUpTo = beganAt;
  }

  ms(now: number): number {
    return this.open === 0 ? 0 : now - this.#answeredUpTo;
  }
}
