/**
 * What workers are called in the whole fleet, and which of them operators drained.
 *
 * The names that a process shows depend on what else it lists, so leases and orders go by the model and the worker's address,
 * the same in every process. Two processes that write one address differently (localhost and 127.0.0.1) lease it twice.
 * Credentials are left out, and a query, which may hold one, is hashed: the names are seen on admin pages.
 *
 * An order says that one worker is drained, or resumed. Every member repeats all orders that it knows with its heartbeat, and
 * takes over newer ones: an order reaches everybody within two beats, and lives for as long as one process does. The higher
 * `version` counts; each new order is one above all that were ever heard, so that no clock is asked. Of two with the same
 * version "drained" wins, everywhere. Orders to resume are remembered too, or an older one would come back from a member
 * that missed it; both kinds are bounded.
 */
import { hash } from "node:crypto";
import type { Dispatcher } from "../../dispatch/dispatcher.ts";
import type { PoolWorker } from "../worker.ts";

export function leaseNames(model: string, addresses: readonly string[]): string[] {
  const seen = new Map<string, number>();
  return addresses.map((address) => {
    const place = shownAddress(address);
    const times = (seen.get(place) ?? 0) + 1;
    seen.set(place, times);
    // Listed twice, it has room for two batches.
    return `${model} ${place}${times === 1 ? "" : ` #${times}`}`;
  });
}

/** An address as it may be shown. */
export function shownAddress(address: string): string {
  if (!URL.canParse(address)) return address;
  const { protocol, host, pathname, search } = new URL(address);
  return `${protocol}//${host}${pathname}${search === "" ? "" : `?${hash("sha256", search).slice(0, 8)}`}`;
}

export interface WorkerOrder {
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
  readonly #orders = new Map<string, WorkerOrder>();
  #version = 0;

  /** As a beat says them. */
  get all(): readonly WorkerOrder[] {
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
    for (const order of said as readonly Partial<WorkerOrder>[]) {
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

  #take(order: WorkerOrder): void {
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
