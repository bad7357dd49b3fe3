/**
 * Fleet-wide worker names, and which workers operators drained.
 *
 * Display names depend on what else a process lists, so leases and orders use the model and the worker's address. Two
 * spellings of one address (localhost and 127.0.0.1) are leased twice. Credentials are removed and a query, which may
 * hold one, is hashed: the names appear on admin pages.
 *
 * An order drains or resumes one worker. Every member repeats all known orders in its heartbeat and adopts newer ones:
 * an order reaches all within two heartbeats, and lives as long as one process does. The higher `version` wins; a new
 * order is one above all ever seen, so no clock is involved. On equal versions "drained" wins everywhere. Resume orders
 * are kept too, or an older drain would come back from a member that missed them; both are bounded.
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

/** Without secrets. */
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

/** The same in every process: by address as shown, or for a child by its name, which contains its process. */
export function workerKey(model: string, name: string, shown: string | undefined): string {
  return `${model} ${shown ?? name}`;
}

export class Orders {
  readonly #orders = new Map<string, WorkerOrder>();
  #version = 0;

  get all(): readonly WorkerOrder[] {
    return [...this.#orders.values()];
  }

  isAside(key: string): boolean {
    return this.#orders.get(key)?.aside === true;
  }

  knows(key: string): boolean {
    return this.#orders.has(key);
  }

  give(key: string, aside: boolean): void {
    if (this.isAside(key) !== aside) this.#take({ key, aside, version: this.#version + 1 });
  }

  /** From another process, perhaps of another version of Ferry. */
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

  /** Applies the orders to every worker of this process. */
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
