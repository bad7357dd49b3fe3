/**
 * When a failed task is retried: exponential backoff with full jitter, attempt k waits a random time in [0, min(maxMs,
 * baseMs·2^(k−1))].
 *
 * `RetryBudget` keeps a broken fleet from being called more often than a healthy one: a call with only retried tasks is
 * extra. While no worker answers, extra calls are at most `share` of first calls, plus a small reserve so that a single
 * crash is repaired at once. For ten seconds after an answer they are free: the fleet is up, and the calls isolate the
 * failing input. When the budget is spent tasks wait; none fails because of it.
 */

export interface RetryLimits {
  /** Retries after the first attempt. */
  readonly max: number;
  readonly baseMs: number;
  readonly maxMs: number;
}

/** When to retry after `attempt` (first is 1) failed; undefined if it was the last. */
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

/** `share` in production: extra calls per first call. */
export const RETRY_BUDGET = 0.1;
const RESERVE_CALLS = 10;
const REFILL_PER_MS = 1 / 1000;
const FREE_MS = 10_000;

export class RetryBudget {
  readonly #share: () => number;
  #calls = RESERVE_CALLS;
  #at = 0;
  #freeUntil = -Infinity;

  constructor(share: () => number) {
    this.#share = share;
  }

  /** A call with at least one task that was never tried. */
  first(): void {
    this.#calls = Math.min(RESERVE_CALLS, this.#calls + this.#share());
  }

  answered(now: number): void {
    this.#calls = RESERVE_CALLS;
    this.#freeUntil = now + FREE_MS;
  }

  /** Takes an extra call from the budget if there is one. A quiet system earns one per second. */
  extra(now: number): boolean {
    if (this.#at > 0) this.#calls = Math.min(RESERVE_CALLS, this.#calls + (now - this.#at) * REFILL_PER_MS);
    this.#at = now;
    if (now < this.#freeUntil) return true;
    if (this.#calls < 1) return false;
    this.#calls--;
    return true;
  }

  waitMs(): number {
    return Math.max(0, (1 - this.#calls) / REFILL_PER_MS);
  }
}

/** Largest batch that may include the cause, when there are few tries: a quarter, so 64 to 1 in three steps. */
export function smallerBatch(size: number): number {
  return Math.max(1, Math.ceil(size / 4));
}

/**
 * The same for a batch whose worker failed or died. The first time all are retried together, as the worker's fault: if
 * half of the workers just died, small batches would cost the remaining capacity. Then an eighth, then alone. Either
 * way the cause is alone at its fourth attempt.
 */
export function smallerBatchAfter(attempt: number, size: number, retries: number): number {
  if (retries < ENOUGH_RETRIES) return smallerBatch(size);
  if (attempt === 1) return Infinity;
  return attempt === 2 ? Math.max(1, Math.ceil(size / 8)) : 1;
}

const ENOUGH_RETRIES = 3;

/**
 * An expired lease means that the process that ran the batch is gone: usually a deploy or a full machine, sometimes an
 * input that kills it. First all are retried together; a task that lost two leases runs alone from then on; its fourth
 * lost attempt makes it a dead letter. The same for a process that dies with its in-process workers
 * (`ClaimRequest.inProcess`): the next start runs its tasks one at a time, so that a second death has one suspect. A
 * death is charged only to the running tasks with the most deaths so far.
 */
export const ALONE_FROM_LOST = 2;
export const DEAD_FROM_ATTEMPT = 4;
