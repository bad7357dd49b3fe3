/**
 * Who crowds a queue in Redis: the gateway's side of tenants in turn.
 *
 * A stream is first in, first out, so a tenant that floods one delays everybody in it. Its new tasks must go
 * to streams of its own. Each gateway decides that alone, from what it has in flight itself: tasks that it
 * put and whose end it has not heard, by model, tier and tenant. A tenant crowds when it
 *
 *   holds more than `CROWD_FROM` tasks, and more than twice what the lower quartile of the tenants holds,
 *
 * while more wait in its tier than half of what is in flight: below that tasks run longer than they wait, a
 * new one rides in one of the next batches whoever is before it, and more streams would only cost more. It
 * goes on until it holds no more than that quartile (or half of `CROWD_FROM`), or hardly anything waits. The
 * quartile, because half of the tenants may flood at once; it is found by powers of two, so the bound is two
 * to four times the quartile. A tenant that has nobody beside it crowds from `CROWD_FROM` on, so that whoever
 * comes next is not behind it; but only where a second tenant was ever seen, so that without credentials
 * nothing changes.
 *
 * Its error: what a tenant has in the common streams when it is found out stays there. That is `CROWD_FROM`
 * tasks, or four times the quartile, or what is queued before tasks wait longer than they run, for each
 * gateway that it floods. And `MAX_CROWDS` bounds the streams: of more floods than that the later ones stay
 * in the common streams until an earlier one ends.
 */
import { digest } from "./redis-keys.ts";

const CROWD_FROM = 8;
/** Of one model and tier, for each gateway: each of them may have a stream in every shard. */
const MAX_CROWDS = 8;
/** Powers of two: more than a process can hold. */
const SIZES = 32;
/** A digest need not be longer: tenants that share one would only share their turns. */
const DIGEST_LENGTH = 16;

/** The kind of the streams that all tenants share. */
export const COMMON = "n";

/** What one tenant has in flight in one tier. */
export class Holder {
  readonly tenant: string;
  readonly #tier: TierHolders;
  #own = "";
  count = 0;
  crowds = false;

  constructor(tenant: string, tier: TierHolders) {
    this.tenant = tenant;
    this.#tier = tier;
  }

  /** Where its new tasks go. */
  get kind(): string {
    if (!this.crowds) return COMMON;
    return (this.#own ||= COMMON + digest(this.tenant).slice(0, DIGEST_LENGTH));
  }

  /** One of its tasks has ended, or was never taken in. */
  leave(): void {
    this.#tier.leave(this);
  }
}

class TierHolders {
  /** As many as there are tenants with a task in flight. */
  readonly #holders = new Map<string, Holder>();
  /** How many tenants hold 1, 2 to 3, 4 to 7, … tasks. */
  readonly #sizes: number[] = Array.from({ length: SIZES }, () => 0);
  readonly #crowdFrom: number;
  #crowds = 0;
  /** The first tenant that came, and whether another one did since. */
  #sole: string | undefined;
  #several = false;
  count = 0;

  constructor(crowdFrom: number) {
    this.#crowdFrom = crowdFrom;
  }

  get tenants(): number {
    return this.#holders.size;
  }

  find(tenant: string): Holder | undefined {
    return this.#holders.get(tenant);
  }

  enter(tenant: string, waiting: number): Holder {
    let holder = this.#holders.get(tenant);
    if (holder === undefined) this.#holders.set(tenant, (holder = new Holder(tenant, this)));
    this.#several ||= (this.#sole ??= tenant) !== tenant;
    this.#resize(holder, 1);
    if (!this.#several) return holder;
    if (holder.crowds) this.#calm(holder, waiting);
    else if (holder.count > this.#crowdFrom && 2 * waiting > this.count) this.#judge(holder);
    return holder;
  }

  leave(holder: Holder): void {
    this.#resize(holder, -1);
    if (holder.crowds) this.#calm(holder, Infinity);
    if (holder.count === 0) this.#holders.delete(holder.tenant);
  }

  #judge(holder: Holder): void {
    if (this.#crowds >= MAX_CROWDS || holder.count <= 2 * this.#quartile()) return;
    holder.crowds = true;
    this.#crowds++;
  }

  #calm(holder: Holder, waiting: number): void {
    const few = Math.max(this.#crowdFrom / 2, this.#quartile());
    if (holder.count > few && 4 * waiting >= this.count) return;
    holder.crowds = false;
    this.#crowds--;
  }

  /** What the tenant holds, at most, below which a quarter of the tenants are; 0 where there is only one. */
  #quartile(): number {
    if (this.tenants < 2) return 0;
    let below = Math.floor((this.tenants - 1) / 4);
    for (let size = 0; size < SIZES; size++) {
      below -= this.#sizes[size]!;
      if (below < 0) return 2 ** (size + 1) - 1;
    }
    return Infinity;
  }

  #resize(holder: Holder, change: number): void {
    if (holder.count > 0) this.#sizes[sizeOf(holder.count)]!--;
    holder.count += change;
    this.count += change;
    if (holder.count > 0) this.#sizes[sizeOf(holder.count)]!++;
  }
}

function sizeOf(count: number): number {
  return 31 - Math.clz32(count);
}

/** What this gateway has in flight, by model, tier and tenant. */
export class Crowds {
  readonly #models = new Map<string, TierHolders[]>();
  readonly #elsewhere: TierHolders;
  readonly #make: () => TierHolders[];

  constructor(models: Iterable<string>, tiers: number, crowdFrom: number = CROWD_FROM) {
    const make = (): TierHolders => new TierHolders(crowdFrom);
    this.#make = () => Array.from({ length: tiers }, make);
    this.#elsewhere = make();
    this.retune(models);
  }

  /** What is in flight is counted where it was when it set out. */
  retune(models: Iterable<string>): void {
    const names = new Set(models);
    for (const model of this.#models.keys()) if (!names.has(model)) this.#models.delete(model);
    for (const model of names) if (!this.#models.has(model)) this.#models.set(model, this.#make());
  }

  /** A task of this tenant is on its way in, to a tier in which so many wait. */
  enter(model: string, tier: number, tenant: string, waiting: number): Holder {
    return this.#tier(model, tier).enter(tenant, waiting);
  }

  /** The kind of stream to which a new task of this tenant would go. */
  kindOf(model: string, tier: number, tenant: string): string {
    return this.#tier(model, tier).find(tenant)?.kind ?? COMMON;
  }

  tenants(model: string, tier: number): number {
    return this.#tier(model, tier).tenants;
  }

  /** Models and tiers that are not configured here are counted together. */
  #tier(model: string, tier: number): TierHolders {
    return this.#models.get(model)?.[tier] ?? this.#elsewhere;
  }
}
