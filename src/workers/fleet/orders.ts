/**
 * Which workers somebody put aside, as every process of the fleet knows it.
 *
 * An order is about one worker, under the name that all processes have for it (`workerKey`): put aside, or let back in.
 * Every member says all orders that it knows with its beat, and takes over newer ones that it hears. So an order reaches
 * everybody within two beats, whichever process was told, and lives for as long as one process does. Nothing is
 * written elsewhere: when the last process ends, so do the orders.
 *
 * Of two orders about one worker the higher `version` counts; each new one is one above all that were ever heard, so that
 * no clock is asked. Two that were given at the same moment have the same version: then "aside" wins, everywhere.
 * An order to let back in must be remembered too, or the older one would come back from a member that missed it; of
 * those the last `MAX_LIFTED` are, of the others the last `MAX_ASIDE`.
 */
import type { Dispatcher } from "../../dispatch/dispatcher.ts";
import type { PoolWorker } from "../worker.ts";
import { shownAddress } from "./lease-names.ts";

export interface Order {
  readonly key: string;
  readonly version: number;
  readonly aside: boolean;
}

const MAX_LIFTED = 256;
const MAX_ASIDE = 4096;

/** The same in every process: by address, as shown, or, for a child of a process, by its name, which has that in it. */
export function workerKey(model: string, name: string, shown: string | undefined): string {
  return `${model} ${shown ?? name}`;
}

export class Orders {
  readonly #orders = new Map<string, Order>();
  #version = 0;

  /** As a beat says them. */
  get all(): readonly Order[] {
    return [...this.#orders.values()];
  }

  isAside(key: string): boolean {
    return this.#orders.get(key)?.aside === true;
  }

  /** Whether anybody has said anything about it. */
  knows(key: string): boolean {
    return this.#orders.has(key);
  }

  give(key: string, aside: boolean): void {
    if (this.isAside(key) !== aside) this.#take({ key, aside, version: this.#version + 1 });
  }

  /** Whatever another process says: it may be of another version of Ferry. */
  hear(said: unknown): void {
    if (!Array.isArray(said)) return;
    for (const order of said as readonly Partial<Order>[]) {
      const { key, version, aside } = order ?? {};
      if (typeof key !== "string" || typeof aside !== "boolean" || !Number.isSafeInteger(version)) continue;
      const known = this.#orders.get(key);
      const newer = known === undefined || version! > known.version;
      if (newer || (version === known.version && aside && !known.aside))
        this.#take({ key, aside, version: version! });
    }
  }

  /** Puts every worker of this process where the orders want it. */
  apply(dispatcher: Dispatcher): void {
    const { rules, workers } = dispatcher;
    for (const slot of workers.slots) workers.drain(slot, this.isAside(keyOf(rules.name, slot)));
  }

  #take(order: Order): void {
    this.#version = Math.max(this.#version, order.version);
    this.#orders.set(order.key, order);
    const alike = this.all.filter(({ aside }) => aside === order.aside);
    if (alike.length <= (order.aside ? MAX_ASIDE : MAX_LIFTED)) return;
    const oldest = alike.reduce((a, b) => (b.version < a.version ? b : a));
    this.#orders.delete(oldest.key);
  }
}

function keyOf(model: string, { name, worker }: PoolWorker): string {
  const { address } = worker;
  return workerKey(model, name, address === undefined ? undefined : shownAddress(address));
}
