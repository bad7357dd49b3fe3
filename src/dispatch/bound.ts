/** A batch on its way to a worker: what was ordered, and what became bound to the worker. */
import type { DispatchReason } from "../core/task.ts";
import type { ClaimedTask, Lease, QueueView } from "../engine/engine.ts";
import type { Hold } from "./hold.ts";
import type { PoolWorker as Slot } from "../workers/worker.ts";

/** What is to leave, and for which worker. */
export interface Order {
  readonly slot: Slot;
  readonly queue: QueueView;
  readonly size: number;
  readonly reason: DispatchReason;
  readonly now: number;
  /** Behind the batch that the worker runs. */
  readonly early: boolean;
}

/** A batch that was claimed for a worker. */
export interface Bound {
  readonly slot: Slot;
  readonly hold: Hold;
  readonly lease: Lease;
  /** Those of the lease that ride. */
  readonly tasks: readonly ClaimedTask[];
  /** When the longest-waiting of its queue came. */
  readonly oldestAt: number;
}

/** Why a batch that was claimed for a worker cannot go there any more; undefined: it can. */
export function tooLate({ slot, hold }: Bound, now: number): string | undefined {
  // We slept, or the engine did, and the worker may be somebody else's by now.
  if (!slot.held(now)) return `the lease of ${slot.name} ran out before its batch could start`;
  const well = slot.well && !slot.silent && now >= slot.circuit.usableAt;
  return hold.early && !well ? `${slot.name} broke down before its next batch was there` : undefined;
}
