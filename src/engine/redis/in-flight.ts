/**
 * Tasks that this gateway put and that have not ended: distinct parameters, for `MAX_GROUPS` (per gateway), and tasks
 * per tenant, to estimate turns.
 */
import { hasShare } from "../../core/share.ts";
import { Table } from "../../core/table.ts";
import type { Task } from "../../core/task.ts";
import { MAX_GROUPS, type PutReply } from "../engine.ts";

interface ModelGroups {
  /** Not a Map: V8 hashes long texts by their length alone, so a client could make it slow. */
  readonly groups: Table<{ readonly opener: string; tasks: number }>;
  readonly opened: Map<string, number>; // groups that each tenant opened
}

export class InFlight {
  readonly #seed: number;
  readonly #models = new Map<string, ModelGroups>();
  /** Tasks of each tenant, by tier and model. */
  readonly #tiers = new Map<string, { total: number; readonly tenants: Map<string, number> }>();

  constructor(seed: number) {
    this.#seed = seed;
  }

  full({ model, parameters, tenant }: Task): (PutReply & { kind: "full" }) | undefined {
    const known = this.#models.get(model);
    if (parameters === "" || known === undefined || known.groups.get(parameters) !== undefined)
      return undefined;
    const { groups, opened } = known;
    if (hasShare(opened.get(tenant) ?? 0, groups.size, MAX_GROUPS, opened.size)) return undefined;
    const message =
      `too many different parameters are queued for this model at once (${MAX_GROUPS}, shared by all tenants); ` +
      "send equal parameters, or fewer requests at once";
    return { kind: "full", message, own: true };
  }

  entered({ model, tier, tenant, parameters }: Task): void {
    const key = `${tier}:${model}`;
    let counts = this.#tiers.get(key);
    if (counts === undefined) this.#tiers.set(key, (counts = { total: 0, tenants: new Map() }));
    counts.total++;
    add(counts.tenants, tenant, 1);
    if (parameters === "") return;
    let known = this.#models.get(model);
    if (known === undefined) {
      this.#models.set(model, (known = { groups: new Table(this.#seed), opened: new Map() }));
    }
    const group = known.groups.get(parameters);
    if (group !== undefined) {
      group.tasks++;
      return;
    }
    known.groups.set(parameters, { opener: tenant, tasks: 1 });
    add(known.opened, tenant, 1);
  }

  left({ model, tier, tenant, parameters }: Task): void {
    const counts = this.#tiers.get(`${tier}:${model}`);
    if (counts?.tenants.has(tenant)) {
      counts.total--;
      add(counts.tenants, tenant, -1);
    }
    const known = this.#models.get(model);
    const group = parameters === "" ? undefined : known?.groups.get(parameters);
    if (known === undefined || group === undefined || --group.tasks > 0) return;
    known.groups.delete(parameters);
    add(known.opened, group.opener, -1);
    if (known.groups.size === 0) this.#models.delete(model);
  }

  /**
   * Of `waiting` tasks, how many are served before a new one of this tenant, if the fleet's tenants are as this
   * gateway's: as many rounds as the tenant has tasks, with one task of each tenant per round.
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

function add(counts: Map<string, number>, key: string, count: number): void {
  const sum = (counts.get(key) ?? 0) + count;
  if (sum === 0) counts.delete(key);
  else counts.set(key, sum);
}
