/**
 * Tenants in turn, the batcher's side: how the seats of a tier are shared between the streams of new tasks.
 *
 * The common streams are one party, each tenant that crowds (`redis-crowds.ts`) another, and they take turns
 * as `core/fair.ts` says. The common party weighs as many tenants as have a task in it. Streams do not tell
 * that, but the tasks that were claimed do: the tenants that were served within the last one to two seconds,
 * less those that crowd, and never more than there are tasks. Until somebody was served, each task counts as
 * a tenant.
 *
 * Its error: a tenant that was served and has nothing queued now is counted too, so a tenant that crowds gets
 * its share or less, never more than the others, and at least one turn in as many rounds as tenants were
 * counted; what the common streams leave is its own in any case. A tenant that comes less often than each
 * second may be missed; the common streams are emptied first in each round, so it loses part of a round at
 * most.
 *
 * A tenant's own order may change when it begins or ceases to crowd: its older tasks stand in one party, the
 * newer ones in the other. Neither waits for the other's end: both parties are served in every round.
 */
import type { Clock } from "../clock.ts";
import { type Party, seatParties } from "../core/fair.ts";
import { COMMON } from "./redis-crowds.ts";
import type { StreamView } from "./redis-stream.ts";

const RECENT_MS = 1000;
/** Beyond this nobody's part is worth counting. */
const MAX_RECENT = 1000;

/** The tenants of one model and tier that were served of late. */
export class RecentTenants {
  readonly #clock: Clock;
  #since = -Infinity;
  #now = new Set<string>();
  #before = new Set<string>();

  constructor(clock: Clock) {
    this.#clock = clock;
  }

  served(tenant: string): void {
    if (this.#now.has(tenant)) return;
    this.#turn();
    if (this.#now.size < MAX_RECENT) this.#now.add(tenant);
  }

  get count(): number {
    this.#turn();
    return Math.max(this.#now.size, this.#before.size);
  }

  #turn(): void {
    const now = this.#clock.now();
    if (now < this.#since + RECENT_MS) return;
    const old = now >= this.#since + 2 * RECENT_MS;
    this.#before = old ? new Set() : this.#now;
    this.#now = new Set();
    this.#since = now;
  }
}

interface Seat extends Party {
  readonly kind: string;
}

/** The rounds of one tier of one group: how far each party is. */
export class Rounds {
  /** The round of those that wait; nobody who had nothing is behind it. */
  #round = 0;
  /** Of those that are ahead of it. */
  #ahead = new Map<string, number>();

  /**
   * How many new tasks of each kind of stream get one of `seats`. Undefined where there is one party, and
   * nothing to share.
   */
  share(
    streams: readonly StreamView[],
    seats: number,
    tenants: RecentTenants,
  ): Map<string, number> | undefined {
    if (!streams.some(({ isNew, about }) => isNew && about.kind !== COMMON)) return undefined;
    const free = new Map<string, number>();
    for (const { isNew, about, free: some } of streams) {
      if (isNew) free.set(about.kind, (free.get(about.kind) ?? 0) + some);
    }
    if (free.size < 2) return undefined;
    const common = free.get(COMMON) ?? 0;
    const crowds = free.size - (common > 0 ? 1 : 0);
    const recent = tenants.count;
    const weight = recent === 0 ? common : Math.min(common, Math.max(1, recent - crowds));
    const parties: Seat[] = [];
    // The common streams are named first: they go first in a round.
    if (common > 0) parties.push({ kind: COMMON, free: common, weight, at: this.#at(COMMON) });
    for (const [kind, some] of free) {
      if (kind !== COMMON) parties.push({ kind, free: some, weight: 1, at: this.#at(kind) });
    }
    const taken = seatParties(seats, parties);
    this.#remember(parties, taken);
    return new Map(parties.map(({ kind }, which) => [kind, taken[which]!]));
  }

  #at(kind: string): number {
    return Math.max(this.#round, this.#ahead.get(kind) ?? 0);
  }

  #remember(parties: readonly Seat[], taken: readonly number[]): void {
    const left = parties.filter(({ free }, which) => taken[which]! < free);
    const waiting = left.length > 0 ? left : parties;
    this.#round = waiting.reduce((least, { at }) => Math.min(least, at), Infinity);
    this.#ahead = new Map(parties.filter(({ at }) => at > this.#round).map(({ kind, at }) => [kind, at]));
  }
}
