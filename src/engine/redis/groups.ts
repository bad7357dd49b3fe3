/**
 * The bound on different parameters (`MAX_GROUPS`), as far as one gateway sees it: of the tasks that it put and that have not
 * ended. The fleet may hold as many for each gateway.
 */
import { hasShare } from "../../core/share.ts";
import { Table } from "../../core/table.ts";
import type { Task } from "../../core/task.ts";
import { MAX_GROUPS, type PutReply } from "../engine.ts";

interface Group {
  readonly opener: string;
  tasks: number;
}

interface ModelGroups {
  /** V8 hashes long texts by their length alone, so that a Map of them could be made slow. */
  readonly groups: Table<Group>;
  readonly opened: Map<string, number>;
}

export class GroupShares {
  readonly #seed: number;
  readonly #models = new Map<string, ModelGroups>();

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

  entered({ model, parameters, tenant }: Task): void {
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
    known.opened.set(tenant, (known.opened.get(tenant) ?? 0) + 1);
  }

  left({ model, parameters }: Task): void {
    const known = this.#models.get(model);
    const group = parameters === "" ? undefined : known?.groups.get(parameters);
    if (known === undefined || group === undefined || --group.tasks > 0) return;
    known.groups.delete(parameters);
    const opened = known.opened.get(group.opener)! - 1;
    if (opened === 0) known.opened.delete(group.opener);
    else known.opened.set(group.opener, opened);
    if (known.groups.size === 0) this.#models.delete(model);
  }
}
