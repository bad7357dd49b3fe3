/**
 * What the admin listener shows of the process: /internal/health and /internal/workers. In a fleet both are
 * about all of it, whichever process is asked.
 */
import type { Clock } from "./clock.ts";
import type { Dispatcher } from "./dispatch/dispatcher.ts";
import type { Horizon } from "./core/shed.ts";
import type { Engine } from "./engine/engine.ts";
import { heldWorkers, thousandths } from "./fleet/describe.ts";
import type { Fleet } from "./fleet/fleet.ts";
import type { WorkerBeat } from "./fleet/registry.ts";
import type { Inside, WorkerReport } from "./gateway/admin.ts";
import type { Tally } from "./telemetry/tally.ts";

/** In a fleet a row says who runs the worker; "" while it changes hands. */
export type FleetWorkerReport = WorkerReport & { readonly batcher?: string; readonly zone?: string };

interface ModelSums {
  readonly name: string;
  readonly workers: number;
  readonly healthy: number;
  readonly utilization: number;
}

export class Report implements Inside {
  readonly #engine: Engine;
  readonly #dispatchers: readonly Dispatcher[];
  readonly #tally: Tally;
  readonly #clock: Clock;
  readonly #fleet: Fleet | undefined;
  readonly #horizon: (model: string, now: number) => Horizon;
  readonly #durability: (() => "replica" | "local") | undefined;
  readonly #reachable: () => boolean;
  readonly #startedAt: number;
  readonly draining: () => boolean;

  constructor(
    engine: Engine,
    dispatchers: readonly Dispatcher[],
    tally: Tally,
    clock: Clock,
    more: {
      draining: () => boolean;
      fleet?: Fleet;
      /** What a model's workers can do, here or in all of the fleet. */
      horizon: (model: string, now: number) => Horizon;
      durability?: () => "replica" | "local";
      reachable?: () => boolean;
    },
  ) {
    this.#engine = engine;
    this.#dispatchers = dispatchers;
    this.#tally = tally;
    this.#clock = clock;
    this.#fleet = more.fleet;
    this.#horizon = more.horizon;
    this.#durability = more.durability;
    this.#reachable = more.reachable ?? (() => true);
    this.#startedAt = clock.now();
    this.draining = more.draining;
  }

  health(): Record<string, unknown> {
    const now = this.#clock.now();
    const { queued, running, kept, deadLetters } = this.#engine.stats();
    const models = this.#models(now);
    const sum = (each: (model: ModelSums) => number): number =>
      models.reduce((total, model) => total + each(model), 0);
    const workers = sum((model) => model.workers);
    const busy = sum((model) => model.utilization * model.workers);
    const served = this.#reachable() && models.every(({ healthy }) => healthy > 0);
    return {
      status: this.draining() ? "draining" : served ? "ok" : "degraded",
      gpu_utilization: thousandths(busy / Math.max(1, workers)),
      queue_depth: queued,
      requests_per_second: this.#tally.requestsPerSecond(),
      running,
      workers,
      healthy_workers: sum(({ healthy }) => healthy),
      results_kept: kept,
      dead_letters: deadLetters,
      ...(this.#durability && { store: this.#reachable() ? "ok" : "away", durability: this.#durability() }),
      ...(this.#fleet && { members: this.#fleet.members.length }),
      models: models.map((model) => this.#model(model, now)),
      uptime_ms: Math.round(now - this.#startedAt),
      totals: this.#tally.totals(),
    };
  }

  workers(): FleetWorkerReport[] {
    if (this.#fleet === undefined) {
      return heldWorkers(this.#dispatchers, this.#startedAt, this.#clock.now()).map(workerReport);
    }
    return this.#fleet.workers().map((worker) => {
      const { batcher, zone } = worker;
      return { ...workerReport(worker), batcher, zone };
    });
  }

  /** What one model can do, and what waits for it. */
  #model({ name, workers, healthy, utilization }: ModelSums, now: number): object {
    const { perMs, nominalPerMs } = this.#horizon(name, now);
    return {
      name,
      workers,
      healthy_workers: healthy,
      utilization: thousandths(utilization),
      queued_by_tier: [...this.#engine.waiting(name)],
      capacity_per_second: Math.round(1000 * perMs),
      nominal_capacity_per_second: Math.round(1000 * nominalPerMs),
    };
  }

  #models(now: number): ModelSums[] {
    const fleet = this.#fleet;
    if (fleet !== undefined) return fleet.self.models.map((name) => ({ name, ...fleet.model(name) }));
    return this.#dispatchers.map(({ rules, workers }) => ({
      name: rules.name,
      workers: workers.slots.length,
      healthy: workers.healthy(now),
      utilization: workers.utilization(now),
    }));
  }
}

function workerReport(worker: WorkerBeat): WorkerReport {
  const { model, name, state, inFlight, batches, tasks, calls, failures } = worker;
  const { busyMs, utilization, ratio, load, down } = worker;
  return {
    model,
    name,
    state,
    in_flight: inFlight,
    batches,
    tasks,
    calls,
    failures,
    busy_ms: busyMs,
    utilization,
    ratio,
    ...(load !== undefined && { load }),
    ...(down && { down: { why: down.why, retry_in_ms: down.retryInMs } }),
  };
}
