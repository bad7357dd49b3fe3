/** What the admin listener shows of the process: /internal/health and /internal/workers. */
import type { Clock } from "./clock.ts";
import type { Dispatcher } from "./dispatch/dispatcher.ts";
import type { Slot } from "./dispatch/workers.ts";
import type { Engine } from "./engine/engine.ts";
import type { Inside, WorkerReport } from "./gateway/admin.ts";
import type { Tally } from "./telemetry/tally.ts";

export class Report implements Inside {
  readonly #engine: Engine;
  readonly #dispatchers: readonly Dispatcher[];
  readonly #tally: Tally;
  readonly #clock: Clock;
  readonly #startedAt: number;
  readonly draining: () => boolean;

  constructor(
    engine: Engine,
    dispatchers: readonly Dispatcher[],
    tally: Tally,
    clock: Clock,
    draining: () => boolean,
  ) {
    this.#engine = engine;
    this.#dispatchers = dispatchers;
    this.#tally = tally;
    this.#clock = clock;
    this.#startedAt = clock.now();
    this.draining = draining;
  }

  health(): Record<string, unknown> {
    const now = this.#clock.now();
    const { queued, running, kept, deadLetters } = this.#engine.stats();
    const fleets = this.#dispatchers.map(({ workers }) => workers);
    const sum = (each: (fleet: (typeof fleets)[number]) => number): number =>
      fleets.reduce((total, fleet) => total + each(fleet), 0);
    const workers = sum(({ slots }) => slots.length);
    const served = fleets.every((fleet) => fleet.healthy(now) > 0);
    return {
      status: this.draining() ? "draining" : served ? "ok" : "degraded",
      gpu_utilization: thousandths(sum((fleet) => fleet.utilization(now) * fleet.slots.length) / workers),
      queue_depth: queued,
      requests_per_second: this.#tally.requestsPerSecond(),
      running,
      workers,
      healthy_workers: sum((fleet) => fleet.healthy(now)),
      results_kept: kept,
      dead_letters: deadLetters,
      uptime_ms: Math.round(now - this.#startedAt),
      totals: this.#tally.totals(),
    };
  }

  workers(): WorkerReport[] {
    const now = this.#clock.now();
    return this.#dispatchers.flatMap(({ rules, workers }) =>
      workers.slots.map((slot) => this.#worker(rules.name, slot, now)),
    );
  }

  #worker(model: string, slot: Slot, now: number): WorkerReport {
    const { name, circuit, batches, tasks, calls, failures } = slot;
    const busyMs = slot.busyMsUntil(now);
    const uptimeMs = Math.max(1, now - this.#startedAt);
    return {
      model,
      name,
      state: slot.state(now),
      in_flight: slot.batch?.size ?? 0,
      batches,
      tasks,
      calls,
      failures,
      busy_ms: Math.round(busyMs),
      utilization: thousandths(busyMs / uptimeMs),
      ratio: Math.round(100 * slot.ratio) / 100,
      ...(circuit.down(now) && {
        down: { why: circuit.why, retry_in_ms: Math.ceil(circuit.usableAt - now) },
      }),
    };
  }
}

function thousandths(share: number): number {
  return Math.round(1000 * share) / 1000;
}
