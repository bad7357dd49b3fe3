/**
 * What each tenant holds of the kept results: how many bytes, and how many of them are unfetched.
 *
 * The bytes of all tenants together are bounded. When there are too many, the tenant that holds the most loses its
 * oldest result that was fetched; a tenant that holds no more than its share (the bound divided by the tenants that
 * hold any) loses none. What was promised and not fetched is never dropped before its time: instead a tenant gets no
 * further promises when it has had its share of them (`core/share.ts`).
 */
import { type Due, Heap } from "../../core/heap.ts";
import { hasShare } from "../../core/share.ts";
import { Table } from "../../core/table.ts";
import type { Slab } from "./packed-form.ts";
import { RecordList } from "./record.ts";

/** A holding's place in one of the orders. */
class Rank implements Due {
  readonly of: Holding;
  dueAt = Infinity;
  place = -1;

  constructor(of: Holding) {
    this.of = of;
  }
}

export class Holding {
  readonly tenant: string;
  /** Of all its results, those of the cache included. */
  bytes = 0;
  awaitedBytes = 0;
  /** Packed results, oldest first, in slabs that are linked; written by `packed.ts`. */
  oldest: Slab | undefined;
  newest: Slab | undefined;
  /** Where the oldest record starts in the oldest slab. */
  start = 0;
  /** No record before this place is awaited. */
  awaitedFrom: { slab: Slab; start: number } | undefined;
  /** Results kept as records, in the order in which they came; written by `shelf.ts`. */
  readonly awaited = new RecordList();
  readonly delivered = new RecordList();
  /** By bytes, while some of them can be dropped. */
  readonly bySize = new Rank(this);
  /** By the instant at which its first result is to be forgotten; never late. */
  readonly byAge = new Rank(this);

  constructor(tenant: string) {
    this.tenant = tenant;
  }
}

export class Holdings {
  readonly #byTenant: Table<Holding>;
  readonly #bySize = new Heap<Rank>();
  readonly #byAge = new Heap<Rank>();
  /** Number of tenants with unfetched results. */
  #awaiting = 0;
  bytes = 0;
  awaitedBytes = 0;

  constructor(seed: number) {
    this.#byTenant = new Table(seed);
  }

  get size(): number {
    return this.#byTenant.size;
  }

  all(): Holding[] {
    return this.#byTenant.unordered();
  }

  find(tenant: string): Holding | undefined {
    return this.#byTenant.get(tenant);
  }

  of(tenant: string): Holding {
    let holding = this.#byTenant.get(tenant);
    if (holding === undefined) this.#byTenant.set(tenant, (holding = new Holding(tenant)));
    return holding;
  }

  /** Adds to its bytes, and to its unfetched bytes; negative to subtract. */
  charge(holding: Holding, bytes: number, awaitedBytes: number): void {
    this.bytes += bytes;
    holding.bytes += bytes;
    if (awaitedBytes !== 0) {
      const awaiting = holding.awaitedBytes > 0 ? 1 : 0;
      this.awaitedBytes += awaitedBytes;
      holding.awaitedBytes += awaitedBytes;
      this.#awaiting += (holding.awaitedBytes > 0 ? 1 : 0) - awaiting;
    }
    if (holding.bytes > holding.awaitedBytes) this.#bySize.set(holding.bySize, -holding.bytes);
    else this.#bySize.remove(holding.bySize);
    if (holding.bytes > 0) return;
    this.#byAge.remove(holding.byAge);
    this.#byTenant.delete(holding.tenant);
  }

  /** Whose oldest result is to be dropped; undefined: all fit, or no tenant beyond its share has one that may be dropped. */
  toTrim(maxBytes: number): Holding | undefined {
    if (this.bytes <= maxBytes) return undefined;
    const most = this.#bySize.first?.of;
    return most !== undefined && most.bytes > maxBytes / this.size ? most : undefined;
  }

  /** Whether this tenant may be promised one more result; `weight`: as if it had so many times what it has. */
  mayPromise(tenant: string, maxBytes: number, weight = 1): boolean {
    if (this.awaitedBytes === 0) return true;
    const own = this.find(tenant)?.awaitedBytes ?? 0;
    return hasShare(weight * own, this.awaitedBytes, maxBytes, this.#awaiting);
  }

  /** Its first result is to be forgotten at this instant, or some time after it. */
  dueAt(holding: Holding, at: number): void {
    if (at < holding.byAge.dueAt || holding.byAge.place < 0) this.#byAge.set(holding.byAge, at);
  }

  /** The holding that is to be looked at first, and when. */
  get firstDue(): { readonly holding: Holding; readonly at: number } | undefined {
    const { first } = this.#byAge;
    return first && { holding: first.of, at: first.dueAt };
  }

  /** It was looked at, and is to be looked at again then; Infinity: it has nothing left. */
  lookedAt(holding: Holding, next: number): void {
    if (next === Infinity) this.#byAge.remove(holding.byAge);
    else this.#byAge.set(holding.byAge, next);
  }
}
