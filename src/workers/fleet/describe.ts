/** What a process says of its own models and workers: in its beats, and on its own admin page. */
import type { Dispatcher } from "../../dispatch/dispatcher.ts";
import type { PoolWorker } from "../worker.ts";
import { shownAddress } from "./lease-names.ts";
import type { ModelBeat, WorkerBeat } from "./registry.ts";

export function modelBeat(dispatcher: Dispatcher, now: number): ModelBeat {
  const { rules, workers } = dispatcher;
  const { healthy, freeAt, nextUsableAt, ...capacity } = dispatcher.horizon(now);
  return {
    name: rules.name,
    workers: workers.held(now),
    healthy,
    capacity: { ...capacity, counted: freeAt.length },
    nextUsableInMs: nextUsableAt === Infinity ? null : nextUsableAt - now,
    arrivalsPerMs: dispatcher.arrivalsPerMs(),
    utilization: thousandths(workers.utilization(now)),
  };
}

export function workerBeat(
  dispatcher: Dispatcher,
  slot: PoolWorker,
  startedAt: number,
  now: number,
): WorkerBeat {
  const { name, batches, tasks, calls, failures, ahead } = slot;
  const pipeline = dispatcher.pipelineOf(slot);
  const busyMs = slot.busyMsUntil(now);
  return {
    name,
    model: dispatcher.rules.name,
    ...(slot.worker.address !== undefined && { address: shownAddress(slot.worker.address) }),
    state: slot.state(now),
    inFlight: slot.batch?.size ?? 0,
    batches,
    tasks,
    calls,
    failures,
    busyMs: Math.round(busyMs),
    utilization: thousandths(busyMs / Math.max(1, now - startedAt)),
    ratio: Math.round(100 * slot.ratio) / 100,
    leased: slot.shared,
    ...(pipeline > 1 && { pipeline }),
    ...(ahead && { ahead: ahead.id }),
    ...(slot.worker.load && { load: thousandths(slot.worker.load.share) }),
    ...whyDown(slot, now),
  };
}

/** Nobody knows when a worker that is silent, or says that it is unwell, will be back. */
function whyDown({ circuit, worker, silent }: PoolWorker, now: number): Pick<WorkerBeat, "down"> {
  if (circuit.down(now)) {
    return { down: { why: circuit.why, retryInMs: Math.ceil(circuit.usableAt - now) } };
  }
  if (silent) return { down: { why: "what it runs is long overdue", retryInMs: 0 } };
  return worker.health?.well === false ? { down: { why: worker.health.why, retryInMs: 0 } } : {};
}

/** The workers that this process runs: all but those whose lease is somebody else's. */
export function heldWorkers(
  dispatchers: readonly Dispatcher[],
  startedAt: number,
  now: number,
): WorkerBeat[] {
  return dispatchers.flatMap((dispatcher) =>
    dispatcher.workers.slots
      .filter((slot) => slot.held(now))
      .map((slot) => workerBeat(dispatcher, slot, startedAt, now)),
  );
}

export function thousandths(share: number): number {
  return Math.round(1000 * share) / 1000;
}
