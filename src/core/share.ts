/**
 * How tenants share a bounded resource: bytes of bodies, answers and unfetched results, passed-through requests, groups
 * of queued tasks. A tenant may take more while (dynamic thresholds, Choudhury and Hahne 1998)
 *
 *   mine < max( bound − all, bound / (8 · (holders + 1)) )
 *
 * One tenant alone gets half, n get 1/(n + 1) each, so some is always free for the next. Commitments may exceed the
 * bound (outputs are larger than inputs); the second term is what each tenant keeps then, ln(n)/8 of the bound in all.
 */
const FLOOR = 8;

/** `all`: held by all `holders` together. */
export function hasShare(mine: number, all: number, bound: number, holders: number): boolean {
  return mine < Math.max(bound - all, bound / (FLOOR * (holders + 1)));
}

/** Amount per holder and in total; a holder with 0 has no entry. */
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

  /** For a resource never held beyond its bound (which may change): the rule without its second term. */
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
