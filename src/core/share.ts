/**
 * How tenants share a bounded resource: bytes of bodies, of answers and of results that wait to be fetched, places for
 * requests that are passed through, groups of queued tasks.
 *
 * A tenant may take more while it holds less than is left free (dynamic thresholds, Choudhury and Hahne 1998):
 *
 *   mine < max( bound − all, bound / (8 · (holders + 1)) )
 *
 * One tenant alone gets half, n get 1/(n + 1) each: some of it is always free for the next. What is promised already may come
 * to more than the bound (outputs are larger than their inputs). The second term is what each tenant keeps then;
 * it can add ln(n)/8 of the bound in all.
 */
const FLOOR = 8;

/** Whether a tenant that holds `mine` of `bound` may take more; `all` is what the `holders` hold together. */
export function hasShare(mine: number, all: number, bound: number, holders: number): boolean {
  return mine < Math.max(bound - all, bound / (FLOOR * (holders + 1)));
}

/** Who holds how much: one number per holder and one for all; nothing is kept of a holder that holds nothing. */
export class Shares {
  readonly #held = new Map<string, number>();
  #total = 0;

  get total(): number {
    return this.#total;
  }

  get holders(): number {
    return this.#held.size;
  }

  heldBy(holder: string): number {
    return this.#held.get(holder) ?? 0;
  }

  /**
   * Whether it may take so much more of `bound`, which may change while some of it is held. For what is never held
   * beyond the bound: the rule without its second term.
   */
  fits(holder: string, amount: number, bound: number): boolean {
    return this.heldBy(holder) + amount <= bound - this.#total;
  }

  add(holder: string, amount: number): void {
    this.#total += amount;
    this.#held.set(holder, this.heldBy(holder) + amount);
  }

  remove(holder: string, amount: number): void {
    this.#total -= amount;
    const left = this.heldBy(holder) - amount;
    if (left > 0) this.#held.set(holder, left);
    else this.#held.delete(holder);
  }
}
