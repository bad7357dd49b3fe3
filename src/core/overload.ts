/**
 * When a gateway process has more requests than it can handle, and whom it refuses then. Pure: time is an argument.
 *
 * Two waits count. Both are of this process; what the workers can do is `shed.ts`.
 *
 *   for its turn     requests that were read and wait until this process has time for them (`refusesTurn`)
 *   to be stored     how long ago the newest task was put of those that the engine has answered (`PutWait`)
 *
 * A request is refused when either is more than its tier may wait. The last tier may wait least, so it is refused first,
 * and its refusal is what keeps the wait short for the others.
 *
 * There is no hysteresis: a refused request adds nothing to either wait, so each request is judged by the waits as they
 * are, and the share that is refused settles where the rest fills the process.
 */

/**
 * How many requests may wait for their turn.
 *
 * A request that waits keeps its connection busy; callers that come meanwhile open new ones, and each of those costs as
 * much as a request. So no more may wait than there were connections a second ago, and fewer while new ones come.
 * Callers that each send their next request with the last answer are never refused by that. A burst that is over after
 * `BURST_MS` is served, whatever it opens. A wait below `SHORT_WAIT_MS` is always allowed, one above `LONG_WAIT_MS` never.
 * All of it for the first tier; see `shareOf`.
 */
const SHORT_WAIT_MS = 50;
const LONG_WAIT_MS = 1000;
const BURST_MS = 100;
/** A put takes milliseconds; by default a task may wait 2 s in the queue. */
const PUT_WAIT_MS = 1000;
const SETTLED_AFTER_MS = 1000;
/** By so many fewer requests may wait for each connection that is new. */
const LESS_FOR_NEW = 4;

/** Which part of the first tier's bounds a tier has: the last one half, those between lie between. */
function shareOf(tier: number, tiers: number): number {
  return tiers <= 1 ? 1 : 1 - tier / (2 * (tiers - 1));
}

/** What waits for this process. */
export interface Waiting {
  readonly requests: number;
  /** How long this process takes for each of them. */
  readonly msEach: number;
  /** How many may wait by the number of connections. */
  readonly connections: number;
  /** Since when there was always a request that waits. */
  readonly busyMs: number;
}

/** Whether a request of this tier is refused for what waits before it. */
export function refusesTurn(tier: number, tiers: number, waiting: Waiting): boolean {
  const requests = waiting.requests / shareOf(tier, tiers);
  const ms = requests * waiting.msEach;
  if (ms > LONG_WAIT_MS) return true;
  return ms > SHORT_WAIT_MS && requests > waiting.connections && waiting.busyMs > BURST_MS;
}

/** Whether a request of this tier is refused while storing a task takes `putMs`. */
export function refusesPut(tier: number, tiers: number, putMs: number): boolean {
  return putMs > PUT_WAIT_MS * shareOf(tier, tiers);
}

/** How many connections there were a second ago, less `LESS_FOR_NEW` for each that has come since. */
export class Connections {
  open = 0;
  /** Requests that connections of HTTP/2 may have open; they need no other connection, so these count at once. */
  streams = 0;
  #before = 0;
  #latest = 0;
  #latestAt = -Infinity;

  mayWait(now: number): number {
    if (now - this.#latestAt >= SETTLED_AFTER_MS) {
      // After a long silence all of them are old enough.
      this.#before = now - this.#latestAt >= 2 * SETTLED_AFTER_MS ? this.open : this.#latest;
      this.#latest = this.open;
      this.#latestAt = now;
    }
    const settled = Math.min(this.#before, this.open);
    return settled - LESS_FOR_NEW * (this.open - settled) + this.streams;
  }
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
  /** When the newest put began of those that were answered, or the first one after none was open. */
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
