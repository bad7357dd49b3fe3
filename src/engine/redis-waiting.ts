/**
 * How many tasks of one model wait in each tier, in the common streams and in those of tenants that crowd;
 * tasks that are on their way in are counted with them. Read for every request, so the sums are kept and not
 * made.
 */
import { COMMON } from "./redis-crowds.ts";

export class Waiting {
  /** By tier. */
  readonly byTier: number[];
  /** By tier: what waits in streams of tenants' own, by their kind; none that is empty. */
  readonly #crowds: Map<string, number>[];
  readonly #crowded: number[];

  constructor(tiers: number) {
    this.byTier = Array.from({ length: tiers }, () => 0);
    this.#crowded = Array.from({ length: tiers }, () => 0);
    this.#crowds = Array.from({ length: tiers }, () => new Map<string, number>());
  }

  add(tier: number, kind: string, count: number): void {
    if (count === 0) return;
    this.byTier[tier]! += count;
    if (kind === COMMON || !kind.startsWith(COMMON)) return;
    this.#crowded[tier]! += count;
    const crowds = this.#crowds[tier]!;
    const sum = (crowds.get(kind) ?? 0) + count;
    if (sum === 0) crowds.delete(kind);
    else crowds.set(kind, sum);
  }

  /**
   * How many are served before a new task that goes to this kind of stream, where this process has tasks of
   * so many tenants in flight. In the common streams: what is there, and the turns that the others have
   * meanwhile. In a stream of a tenant's own: a round of all tenants for each of its tasks.
   */
  turn(tier: number, kind: string, tenants: number): number {
    const all = this.byTier[tier] ?? 0;
    const crowds = this.#crowds[tier];
    if (crowds === undefined || crowds.size === 0) return all;
    const crowded = this.#crowded[tier]!;
    const common = all - crowded;
    const sharing = Math.max(1, tenants - crowds.size);
    if (kind === COMMON) {
      const rounds = Math.ceil((common + 1) / sharing);
      return common + Math.min(crowded, rounds * crowds.size);
    }
    const turns = (crowds.get(kind) ?? 0) + 1;
    return Math.min(all, turns * (Math.min(common, sharing) + Math.max(1, crowds.size)));
  }
}
