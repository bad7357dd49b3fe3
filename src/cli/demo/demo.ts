/**
 * Kills simulated workers of this process, to demonstrate failures. Picks the worker with the fullest batch, which
 * hurts most: that batch fails as if its connection were reset, later ones as if it were refused, until the time is
 * over.
 */
import type { SimulatedBackend } from "../../workers/backend/simulated.ts";
import type { PoolWorker as Slot } from "../../workers/worker.ts";

export interface Killed {
  readonly worker: string;
  readonly model: string;
  /** Tasks in the killed batch. */
  readonly inFlight: number;
  /** Workers of its model: alive, and all. */
  readonly left: number;
  readonly workers: number;
}

interface Fleet {
  readonly model: string;
  readonly backend: SimulatedBackend;
  readonly slots: readonly Slot[];
}

export class Demo {
  readonly #fleets: Fleet[] = [];

  add(model: string, backend: SimulatedBackend, slots: readonly Slot[]): void {
    this.forget(model);
    this.#fleets.push({ model, backend, slots });
  }

  forget(model: string): void {
    const at = this.#fleets.findIndex((fleet) => fleet.model === model);
    if (at >= 0) this.#fleets.splice(at, 1);
  }

  /** Kills the busiest live worker; undefined when none is alive. */
  kill(forMs: number): Killed | undefined {
    let busiest: { readonly fleet: Fleet; readonly slot: Slot } | undefined;
    for (const fleet of this.#fleets) {
      fleet.slots.forEach((slot) => {
        const alive = fleet.backend.workers.find((each) => each === slot.worker)?.downFor === 0;
        if (alive && (busiest === undefined || busier(slot, busiest.slot))) busiest = { fleet, slot };
      });
    }
    if (busiest === undefined) return undefined;
    const { fleet, slot } = busiest;
    const inFlight = slot.batch?.size ?? 0;
    fleet.backend.kill(slot.worker.name, forMs);
    const { workers } = fleet.backend;
    const left = workers.filter(({ downFor }) => downFor === 0).length;
    return { worker: slot.name, model: fleet.model, inFlight, left, workers: workers.length };
  }
}

function busier(one: Slot, other: Slot): boolean {
  const now = (one.batch?.size ?? 0) - (other.batch?.size ?? 0);
  return now === 0 ? one.tasks > other.tasks : now > 0;
}
