/**
 * When a batch is late. From its turn on, with U what its worker usually needs for it and D how far batches scatter:
 *
 *   overdue   max( 1.5 U, U + 4 D, U + 20 ms )   its tasks may ride a second time elsewhere
 *   suspect   max( 2 U, U + 8 D, U + 50 ms )     its worker is taken for dead until it answers
 *
 * Undefined until enough batches were seen to know.
 *
 * The milliseconds are for batches so short that the machine's own pauses are longer: a collection, a neighbour, a busy
 * event loop, behind which the alarm rings before the reply is read. They do not shrink with the batch: with 10 ms
 * instead of 20 at 5 ms a batch, p99 of 8 workers of which one pauses for 20 to 40 ms now and then rose from 7.7 to 8.7 ms (by
 * hand). A worker that is alone loses nobody by being suspected: what may wait for it then, `core/shed.ts` says.
 */
import type { PoolWorker as Slot } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";

const OVERDUE_FACTOR = 1.5;
const OVERDUE_DEVIATIONS = 4;
const OVERDUE_FLOOR_MS = 20;
const SUSPECT_FACTOR = 2;
const SUSPECT_DEVIATIONS = 8;
const SUSPECT_FLOOR_MS = 50;

export function lateness(
  { service, surprise }: Workers,
  slot: Slot,
  size: number,
): { readonly overdueMs: number; readonly suspectMs: number } | undefined {
  if (!service.settled) return undefined;
  const fleetMs = service.msFor(size);
  // Its last accident must not make the next one wait longer for its second try.
  const usualMs = fleetMs * slot.usualRatio;
  const deviationMs = Math.max(service.deviationMs, surprise.share * fleetMs * slot.ratio);
  const late = (factor: number, deviations: number, floorMs: number): number =>
    Math.max(factor * usualMs, usualMs + deviations * deviationMs, usualMs + floorMs);
  return {
    overdueMs: late(OVERDUE_FACTOR, OVERDUE_DEVIATIONS, OVERDUE_FLOOR_MS),
    suspectMs: late(SUSPECT_FACTOR, SUSPECT_DEVIATIONS, SUSPECT_FLOOR_MS),
  };
}
