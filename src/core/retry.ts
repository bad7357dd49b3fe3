/**
 * When a failed task is tried again.
 *
 * Backoff is exponential with full jitter: attempt k waits a random time in [0, min(maxMs, baseMs·2^(k−1))].
 * `RetryBudget` keeps a broken fleet from being hit harder than a healthy one: a call that carries only tasks tried before is
 * extra, and while no worker answers, extra calls may be at most `share` of the first ones, beside a small reserve so that a
 * single crash is repaired at once. For ten seconds after an answer they are free: then the fleet is not down, and the calls
 * find out which input fails. When the budget is spent the tasks wait; nothing fails because of it.
 */

export interface RetryLimits {
  /** Retries after the first attempt. */
  readonly max: number;
  readonly baseMs: number;
  readonly maxMs: number;
}

/** When to try again after `attempt` failed (first is 1), or undefined when it was the last. */
export function retryAt(
  attempt: number,
  limits: RetryLimits,
  now: number,
  random: number,
): number | undefined {
  if (attempt > limits.max) return undefined;
  const ceiling = Math.min(limits.maxMs, limits.baseMs * 2 ** (attempt - 1));
  return now + ceiling * random;
}

/** `share` in production: as many extra calls as first calls, times this. */
export const RETRY_BUDGET = 0.1;
const RESERVE_CALLS = 10;
const REFILL_PER_MS = 1 / 1000;
const FREE_MS = 10_000;

export class RetryBudget {
  readonly #share: () => number;
  #calls = RESERVE_CALLS;
  #at = 0;
  #freeUntil = -Infinity;

  /** `share` of the first calls. */
  constructor(share: () => number) {
    this.#share = share;
  }

  /** A call that carries at least one task for the first time. */
  first(): void {
    this.#calls = Math.min(RESERVE_CALLS, this.#calls + this.#share());
  }

  /** A worker answered. */
  answered(now: number): void {
    this.#calls = RESERVE_CALLS;
    this.#freeUntil = now + FREE_MS;
  }

  /** May an extra call go now? Takes it from the budget if so. A quiet system earns one a second. */
  extra(now: number): boolean {
    if (this.#at > 0) this.#calls = Math.min(RESERVE_CALLS, this.#calls + (now - this.#at) * REFILL_PER_MS);
    this.#at = now;
    if (now < this.#freeUntil) return true;
    if (this.#calls < 1) return false;
    this.#calls--;
    return true;
  }

  /** How long until an extra call may go. */
  waitMs(): number {
    return Math.max(0, (1 - this.#calls) / REFILL_PER_MS);
  }
}

/** The largest batch for tasks of which one may be the cause, when there are few tries: a quarter; 64 to 1 in three steps. */
export function smallerBatch(size: number): number {
  return Math.max(1, Math.ceil(size / 4));
}

/**
 * The same for a batch whose worker failed or died with it, with `retries` of them. The first time that is taken for the
 * worker's trouble, and all are tried again together: where half of the workers just died, small batches would cost what
 * is left of the capacity. After that an eighth, then alone. Both ways the cause is alone at its fourth attempt.
 */
export function smallerBatchAfter(attempt: number, size: number, retries: number): number {
  if (retries < ENOUGH_RETRIES) return smallerBatch(size);
  if (attempt === 1) return Infinity;
  return attempt === 2 ? Math.max(1, Math.ceil(size / 8)) : 1;
}

const ENOUGH_RETRIES = 3;

/**
 * A lease that runs out says that the process that ran the batch is gone: most often a deploy or a full machine, now
 * and then an input that kills it. The first time all are tried again together; a task that lost two leases is run
 * alone from then on; one whose fourth attempt ends like this is a dead letter.
 *
 * The same for a process that dies with its own workers (`ClaimRequest.inProcess`). Its tasks ran side by side, so the next
 * start runs them one at a time, and a second death has one suspect. Of those that ran at a death only the ones with the
 * most deaths so far are charged with it.
 */
export const ALONE_FROM_LOST = 2;
export const DEAD_FROM_ATTEMPT = 4;
