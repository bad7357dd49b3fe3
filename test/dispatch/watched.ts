/** A simulation whose workers are watched: what each is given, when it begins, and how much it has in its hands. */
import type { Worker } from "../../src/workers/backend/backend.ts";
import type { PoolWorker as Slot } from "../../src/workers/worker.ts";
import type { Simulation } from "../../src/cli/plan/simulation.ts";
import { type Changes, simulate } from "./simulated.ts";

/** What each worker was given. */
export interface Given {
  readonly worker: string;
  readonly id: string;
  readonly size: number;
  readonly at: number;
  begunAt?: number;
  endedAt?: number;
}

export interface Stage {
  readonly simulation: Simulation;
  readonly given: Given[];
  mostAtOnce: number;
}

/** A simulation whose workers are watched. `mute`: they do not say that they queue, nor when they begin. */
export function stage(changes: Changes, mute = false): Stage {
  const given: Given[] = [];
  const clock = { now: () => 0 };
  const wrap = (worker: Worker): Worker => {
    let inHands = 0;
    return {
      name: worker.name,
      ...(mute ? {} : { queues: true }),
      async run(batch, signal, begun) {
        const row: Given = { worker: worker.name, id: batch.id, size: batch.tasks.length, at: clock.now() };
        given.push(row);
        watched.mostAtOnce = Math.max(watched.mostAtOnce, ++inHands);
        const reply = await worker.run(batch, signal, () => {
          row.begunAt = clock.now();
          if (!mute) begun?.();
        });
        inHands--;
        row.endedAt = clock.now();
        return reply;
      },
    };
  };
  const simulation = simulate({ ...changes, wrap });
  clock.now = () => simulation.clock.now() - simulation.startedAt;
  const watched: Stage = { simulation, given, mostAtOnce: 0 };
  return watched;
}

export function putMany(simulation: Simulation, count: number): string[] {
  return Array.from({ length: count }, () => simulation.put().id);
}

/** Runs ten lone batches, so that it is known how long one takes. Ends with every worker free. */
export async function train(simulation: Simulation): Promise<void> {
  for (let i = 0; i < 10; i++) {
    simulation.put();
    await simulation.run(500);
  }
}

export function slotOf(simulation: Simulation, at = 0): Slot {
  return simulation.dispatcher.workers.slots[at]!;
}

/** As the fleet would: no batch starts there at or after this instant. */
export function leaseUntil(worker: Slot, until: number): void {
  worker.transition({ type: "lease", lease: { until, release: false } });
}
