/**
 * Who fills a batch. First which tiers: strict order, with a floor for the lower ones while there is a
 * backlog. Then, inside a tier, which tenants: each in turn.
 *
 * Strict order alone starves the last tier for as long as the first is flooded; weighted shares alone let
 * the first tier miss deadlines that it need not miss. So every tier but the first earns credit for a
 * small share of each batch while more is queued than the batch holds, and spends it before the rest is
 * filled in order. The last tier's floor is 5 % of the batch, those between get 10 %, together at most 30 %.
 *
 * Inside a tier tenants take turns (`engine/memory/queues.ts`): one task of each that has any, then one of each again: deficit
 * round robin with the cost of one. A tenant that floods the tier lengthens its own wait and no other's.
 *
 *  - The place in the ring is kept from batch to batch; a batch may end in the middle of a round.
 *  - A tenant that had nothing and now has something goes to the end of the ring.
 *  - A tenant's own tasks go in the order of their arrival.
 *  - A task that comes back goes where its arrival puts it among its tenant's; its tenant is next.
 */

const MIDDLE_FLOOR = 0.1;
const LAST_FLOOR = 0.05;
/** All those between together: with many tiers the first must still come first. */
const MIDDLE_FLOORS = 0.3;

export function floorOf(tier: number, tiers: number): number {
  if (tier === 0) return 0;
  if (tier === tiers - 1) return LAST_FLOOR;
  return Math.min(MIDDLE_FLOOR, MIDDLE_FLOORS / (tiers - 2));
}

/**
 * How many tasks of each tier go into a batch of `seats`. `depths[t]` is what tier t has queued;
 * `credits[t]` is carried from batch to batch and is updated in place.
 */
export function seatTiers(seats: number, depths: readonly number[], credits: number[]): number[] {
  const taken = depths.map(() => 0);
  const backlog = depths.reduce((sum, depth) => sum + depth, 0);
  let left = Math.min(seats, backlog);
  if (backlog > seats) {
    for (let tier = 1; tier < depths.length; tier++) {
      const credit = Math.min(seats, (credits[tier] ?? 0) + floorOf(tier, depths.length) * seats);
      const owed = Math.min(Math.floor(credit), depths[tier]!, left);
      credits[tier] = credit - owed;
      taken[tier] = owed;
      left -= owed;
    }
  }
  for (let tier = 0; tier < depths.length && left > 0; tier++) {
    const more = Math.min(left, depths[tier]! - taken[tier]!);
    taken[tier] = taken[tier]! + more;
    left -= more;
  }
  return taken;
}
