/**
 * The leases that this process holds, renewed in the background.
 *
 * A lease in Redis is short, so that the tasks of a process that died are back in their queue soon; while
 * the process lives it renews all its leases together, each third of their length, up to the time that the
 * claim asked for. What is not settled when the process stops is given back at once.
 */
import type { Alarm, Clock } from "../clock.ts";
import { Table } from "../core/table.ts";
import type { Lease } from "./engine.ts";

interface Held {
  readonly lease: Lease;
  readonly open: Set<string>;
  /** Not renewed beyond this: the worker's own time is up by then. */
  until: number;
}

export class RedisLeases {
  readonly #leaseMs: number;
  readonly #clock: Clock;
  readonly #renew: (lease: Lease, ids: readonly string[], until: number) => Promise<unknown>;
  /** By token; bounded by the slots of this process. */
  readonly #held = new Table<Held>(0);
  #alarm: Alarm | undefined;

  constructor(
    leaseMs: number,
    clock: Clock,
    renew: (lease: Lease, ids: readonly string[], until: number) => Promise<unknown>,
  ) {
    this.#leaseMs = leaseMs;
    this.#clock = clock;
    this.#renew = renew;
  }

  /** When a lease that was asked for until `until` runs out if it is not renewed. */
  first(until: number): number {
    return Math.min(until, this.#clock.now() + this.#leaseMs);
  }

  hold(lease: Lease, until: number): void {
    if (lease.tasks.length === 0 || this.first(until) === until) return;
    this.#held.set(lease.token, { lease, open: new Set(lease.tasks.map(({ task }) => task.id)), until });
    this.#alarm ??= this.#clock.at(this.#clock.now() + this.#leaseMs / 3, () => this.#ring());
  }

  extended(lease: Lease, until: number): void {
    const held = this.#held.get(lease.token);
    if (held !== undefined) held.until = until;
  }

  settled(lease: Lease, ids: readonly string[]): void {
    const held = this.#held.get(lease.token);
    if (held === undefined) return;
    for (const id of ids) held.open.delete(id);
    if (held.open.size === 0) this.#held.delete(lease.token);
  }

  /** Everything that is still held; nothing is renewed any more. */
  close(): { lease: Lease; ids: string[] }[] {
    this.#alarm?.cancel();
    const left = this.#held.values().map(({ lease, open }) => ({ lease, ids: [...open] }));
    this.#held.clear();
    return left;
  }

  #ring(): void {
    this.#alarm = undefined;
    const now = this.#clock.now();
    for (const { lease, open, until } of this.#held.values()) {
      if (until <= now) this.#held.delete(lease.token);
      // A renewal that fails is tried again at the next third; the lease outlives two.
      else this.#renew(lease, [...open], this.first(until)).catch(() => {});
    }
    if (this.#held.size > 0) this.#alarm = this.#clock.at(now + this.#leaseMs / 3, () => this.#ring());
  }
}
