/**
 * Who is overtaken in an engine, seen from outside: from the order of puts and from what each claim takes, not from
 * what the engine notes. Of tasks with equal parameters in one tier, one that waits is overtaken
 *
 *   by a later task of its own tenant;
 *   while it is the first of its tenant, by another tenant's task that is not that tenant's first, or by a first one if
 *   that tenant has had a turn since.
 *
 * In service order none of this happens. The bound is what claims state, by the tier's floor for a lower tier. A task
 * that was claimed once is left out from then on: when it comes back it is next, and with it its tenant, so between
 * tenants nothing is checked after that.
 */
import { floorOf } from "../../src/core/fair.ts";
import type { Task } from "../../src/core/task.ts";
import type { ClaimRequest, Lease } from "../../src/engine/engine.ts";

const ROUNDING_MS = 0.01;

interface Waiting {
  readonly id: string;
  readonly tier: number;
  readonly tenant: string;
  readonly parameters: string;
  readonly number: number;
  /** Tenants that have had a turn since it is the first of its own. */
  readonly turns: Set<string>;
  queued: boolean;
  /** Since when it is overtaken. */
  since: number | undefined;
  boundMs: number;
}

export interface Overtaken {
  readonly id: string;
  readonly tier: number;
  readonly forMs: number;
  readonly boundMs: number;
}

export class Overtaking {
  readonly #tiers: number;
  readonly #waiting = new Map<string, Waiting>();
  #puts = 0;
  #returned = false;
  /** The longest, as a share of its bound. */
  longest = 0;
  /** Tasks that were overtaken. */
  count = 0;

  constructor(tiers: number) {
    this.#tiers = tiers;
  }

  put({ id, tier, tenant, parameters }: Task): void {
    const turns = new Set<string>();
    const number = ++this.#puts;
    const waiting = {
      id,
      tier,
      tenant,
      parameters,
      number,
      turns,
      queued: false,
      since: undefined,
      boundMs: 0,
    };
    this.#waiting.set(id, waiting);
  }

  /** It is known to be queued: a put that waits for a disk may have joined another. */
  queued(id: string): void {
    const waiting = this.#waiting.get(id);
    if (waiting !== undefined) waiting.queued = true;
  }

  /** It has ended, was joined (which may change its tier), or was not taken in. */
  gone(id: string): void {
    this.#waiting.delete(id);
  }

  /** A task has come back. */
  returned(): void {
    this.#returned = true;
  }

  /** The tasks that this claim let wait for longer than stated. */
  claimed({ parameters, composition }: ClaimRequest, lease: Lease, now: number): Overtaken[] {
    const left: Waiting[] = [];
    const taken: Waiting[] = [];
    const claimed = new Set(lease.tasks.map(({ task }) => task.id));
    for (const each of this.#waiting.values()) {
      if (each.parameters !== parameters) continue;
      if (claimed.has(each.id)) taken.push(each);
      else if (each.queued) left.push(each);
    }
    const rowOf = ({ tier, tenant }: Waiting): string => `${tier} ${tenant}`;
    const heads = new Map<string, Waiting>();
    for (const each of [...left, ...taken]) {
      const head = heads.get(rowOf(each));
      if (head === undefined || each.number < head.number) heads.set(rowOf(each), each);
    }
    const isHead = (each: Waiting): boolean => heads.get(rowOf(each)) === each;
    const tooLong: Overtaken[] = [];
    for (const each of left) {
      if (composition !== undefined)
        each.boundMs = Math.max(
          each.boundMs,
          composition.overtakeMs / (floorOf(each.tier, this.#tiers) || 1),
        );
      const first = isHead(each);
      let overtaken = false;
      for (const other of taken) {
        if (other.tier !== each.tier) continue;
        if (other.tenant === each.tenant) overtaken ||= other.number > each.number;
        else if (first && !this.#returned) overtaken ||= !isHead(other) || each.turns.has(other.tenant);
      }
      if (first)
        for (const other of taken)
          if (other.tier === each.tier && isHead(other)) each.turns.add(other.tenant);
      if (!overtaken || each.boundMs === 0) continue; // in service order
      if (each.since === undefined) this.count++;
      each.since ??= now;
      const forMs = now - each.since;
      const { id, tier, boundMs } = each;
      if (forMs > 0) this.longest = Math.max(this.longest, forMs / boundMs);
      if (forMs > boundMs + ROUNDING_MS) tooLong.push({ id, tier, forMs, boundMs });
    }
    for (const { id } of taken) this.#waiting.delete(id);
    return tooLong;
  }
}
