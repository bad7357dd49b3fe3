/**
 * A bounded number of places that tenants share without a reservation for any of them.
 *
 * A tenant may take another place while it holds fewer than are free. So one tenant alone gets at most half of them
 * (rounded up), k that all want as many as they can get settle at 1/(k+1) each, and a tenant that holds none gets in
 * as long as one place is free. Every step is a lookup; nothing is kept of a tenant that holds nothing.
 */
export class FairShare {
  readonly #held = new Map<string, number>();
  #taken = 0;

  /** How many places this tenant holds. */
  heldBy(tenant: string | undefined): number {
    return tenant === undefined ? 0 : (this.#held.get(tenant) ?? 0);
  }

  /**
   * Takes one place of `capacity`, which may have changed since the last time; says why where it cannot. Without a
   * tenant only the number of places counts.
   */
  take(tenant: string | undefined, capacity: number): "taken" | "full" | "over share" {
    const free = capacity - this.#taken;
    const held = this.heldBy(tenant);
    if (free <= 0) return "full";
    if (held >= free) return "over share";
    if (tenant !== undefined) this.#held.set(tenant, held + 1);
    this.#taken++;
    return "taken";
  }

  /** After `take` with the same tenant. */
  giveBack(tenant: string | undefined): void {
    const held = this.heldBy(tenant);
    if (held > 1) this.#held.set(tenant!, held - 1);
    else if (held === 1) this.#held.delete(tenant!);
    this.#taken--;
  }
}
