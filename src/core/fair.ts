/**
 * Which tiers fill a batch: strict order, with a floor for the lower tiers while there is a backlog.
 *
 * Strict order alone starves the last tier for as long as the first is flooded; weighted shares alone let
 * the first tier miss deadlines that it need not miss. So every tier but the first earns credit for a
 * small share of each batch while more is queued than the batch holds, and spends it before the rest is
 * filled in order. The last tier's floor is 5 % of the seats, those between get 10 %.
 */

const MIDDLE_FLOOR = 0.1;
const LAST_FLOOR = 0.05;

export function floorOf(tier: number, tiers: number): number {
  if (tier === 0) return 0;
  return tier === tiers - 1 ? LAST_FLOOR : MIDDLE_FLOOR;
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
