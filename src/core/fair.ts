/**
 * How a batch is filled: tiers in strict order with a floor for the lower ones under backlog; inside a tier, tenants in
 * turn.
 *
 * Strict order alone starves the last tier while the first is flooded; weighted shares alone make the first tier miss
 * deadlines. So while more is queued than the batch holds, every tier but the first earns credit for a small share of
 * each batch and spends it before the rest is filled in order: 5 % for the last tier, 10 % for those between, at most
 * 30 % in all.
 *
 * Tenants of a tier (`engine/memory/queues.ts`): deficit round robin with a cost of one per task, FIFO per tenant.
 *  - The ring position is kept across batches; a batch may end in the middle of a round.
 *  - A tenant with its first task joins at the end of the ring.
 *  - A task that comes back takes its arrival position among its tenant's tasks; its tenant is next.
 */

const MIDDLE_FLOOR = 0.1;
const LAST_FLOOR = 0.05;
/** Bound on the sum of the middle tiers' floors, so that the first tier still comes first when there are many. */
const MIDDLE_FLOORS = 0.3;

export function floorOf(tier: number, tiers: number): number {
  if (tier === 0) return 0;
  if (tier === tiers - 1) return LAST_FLOOR;
  return Math.min(MIDDLE_FLOOR, MIDDLE_FLOORS / (tiers - 2));
}

/**
 * After `seatTiers`, with the credits `before` it: gives back what a tier was owed and did not use (`used[t]` tasks
 * went), because none of its tasks could join the batch.
 */
export function refundSeats(
  seats: number,
  depths: readonly number[],
  before: readonly number[],
  credits: number[],
  used: readonly number[],
): void {
  if (!backlogged(seats, depths)) return;
  for (let tier = 1; tier < depths.length; tier++) {
    const earned = Math.min(seats, (before[tier] ?? 0) + floorOf(tier, depths.length) * seats);
    credits[tier] = Math.max(credits[tier]!, earned - used[tier]!);
  }
}

function backlogged(seats: number, depths: readonly number[]): boolean {
  return depths.reduce((sum, depth) => sum + depth, 0) > seats;
}

/** Tasks per tier in a batch of `seats`. `depths[t]`: queued. `credits[t]`: kept across batches, updated in place. */
export function seatTiers(seats: number, depths: readonly number[], credits: number[]): number[] {
  const taken = depths.map(() => 0);
  let left = seats;
  if (backlogged(seats, depths)) {
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
