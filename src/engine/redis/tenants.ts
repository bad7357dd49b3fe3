/** How many tasks each tenant has in flight through this gateway, by model and tier: whose turn comes when is estimated by it. */
import type { Task } from "../../core/task.ts";

interface Tier {
  total: number;
  readonly tenants: Map<string, number>;
}

export class TenantCounts {
  readonly #tiers = new Map<string, Tier>();

  entered({ model, tier, tenant }: Task): void {
    const key = `${tier}:${model}`;
    let found = this.#tiers.get(key);
    if (found === undefined) this.#tiers.set(key, (found = { total: 0, tenants: new Map() }));
    found.total++;
    found.tenants.set(tenant, (found.tenants.get(tenant) ?? 0) + 1);
  }

  left({ model, tier, tenant }: Task): void {
    const found = this.#tiers.get(`${tier}:${model}`);
    const count = found?.tenants.get(tenant);
    if (found === undefined || count === undefined) return;
    found.total--;
    if (count === 1) found.tenants.delete(tenant);
    else found.tenants.set(tenant, count - 1);
  }

  /**
   * How many of `waiting` tasks are served before a new one of this tenant, if the fleet's tenants are as this gateway's:
   * as many turns as the tenant has tasks, and one of each tenant in every turn.
   */
  turn(model: string, tier: number, tenant: string, waiting: number): number {
    const found = this.#tiers.get(`${tier}:${model}`);
    if (found === undefined || found.total === 0) return waiting;
    const own = found.tenants.get(tenant) ?? 0;
    const tenants = found.tenants.size;
    if (tenants === 1 && own > 0) return waiting;
    const before = (own + 1) * tenants;
    return Math.min(waiting, Math.ceil((before * Math.max(waiting, found.total)) / found.total));
  }
}
