/**
 * When a gateway process has more requests than it can handle, and which it refuses then. Pure: time is an argument.
 *
 *   for its turn     requests that were read and wait until this process has time for them (`refusesTurn`)
 *   to be stored     age of the newest put that the engine has answered, while puts are open (`PutWait`)
 *
 * A request is refused when either wait is more than its tier may wait. The last tier may wait least, so it is refused
 * first, which keeps the wait short for the others. There is no hysteresis: a refused request adds nothing to either
 * wait, so the share that is refused settles where the rest fills the process.
 */

/**
 * How long a request of the first tier may wait for its turn; see `shareOf` for the others. A burst is served whatever it
 * is, as long as each of its requests has its turn within `LONG_WAIT_MS`. When requests have waited without a break for
 * `BURST_MS`, more come than the process can handle: then the wait is kept short.
 */
const LONG_WAIT_MS = 2000;
const BURST_MS = 3000;
const SHORT_WAIT_MS = 250;
/** A put takes milliseconds; by default a task may wait 2 s in the queue. */
const PUT_WAIT_MS = 1000;

/** Which part of the first tier's bounds a tier has: the last one half, those between lie between. */
function shareOf(tier: number, tiers: number): number {
  return tiers <= 1 ? 1 : 1 - tier / (2 * (tiers - 1));
}

/** What waits for this process. */
export interface Waiting {
  readonly requests: number;
  /** How long this process takes for each of them. */
  readonly msEach: number;
  /** Since when there was always a request that waits. */
  readonly busyMs: number;
}

/** Whether a request of this tier is refused for what waits before it. */
export function refusesTurn(tier: number, tiers: number, waiting: Waiting): boolean {
  const waitMs = (waiting.requests * waiting.msEach) / shareOf(tier, tiers);
  return waitMs > (waiting.busyMs > BURST_MS ? SHORT_WAIT_MS : LONG_WAIT_MS);
}

/** Whether a request of this tier is refused while storing a task takes `putMs`. */
export function refusesPut(tier: number, tiers: number, putMs: number): boolean {
  return putMs > PUT_WAIT_MS * shareOf(tier, tiers);
}

/** What was measured so long ago counts half: a pause of 50 ms for garbage counts little. */
const HALF_LIFE_MS = 500;

/** How long this process takes for each request while requests wait for it. */
export class Pace {
  #ms = 0;
  #requests = 0;

  /** So many had their turn within `ms`, or would have had it if they had been there. */
  count(requests: number, ms: number): void {
    const kept = 0.5 ** (ms / HALF_LIFE_MS);
    this.#ms = this.#ms * kept + ms;
    this.#requests = this.#requests * kept + requests;
  }

  /** 0 while nothing is known. */
  get msEach(): number {
    return this.#requests === 0 ? 0 : this.#ms / this.#requests;
  }
}

/**
 * How long the engine takes to answer a put, as far as that is known.
 *
 * In an engine that answers in order this is the age of its oldest unanswered put. Where several servers answer, each in
 * its own order, one that hangs does not count while the others answer.
 */
export class PutWait {
  /** Puts that are not answered yet. */
  open = 0;
  /** Start of the newest answered put, or of the first put after none was open. */
  #answeredUpTo = 0;

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
