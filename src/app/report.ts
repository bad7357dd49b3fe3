/** State for /internal/health, /internal/workers, metrics and the dashboard; in a fleet, of the whole fleet. */
import type { Prospects } from "../gateway/admission/capacity-gate.ts";
import type { Clock } from "./clock.ts";
import type { CurveReading, Throughput } from "../core/knee.ts";
import type { Sighting } from "../core/scaling.ts";
import type { Config, Role } from "./config/config.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import type { Engine } from "../engine/engine.ts";
import { type Fleet, heldWorkers, thousandths } from "../workers/fleet/fleet.ts";
import type { WorkerBeat } from "../workers/fleet/registry.ts";
import type { CurveReport, Inside, WorkerDesk, WorkerReport } from "../gateway/admin.ts";
import type { ScalingLoop, ScalingReport } from "../workers/scaling.ts";
import type { CostSight, ModelSight, ProcessSight, Sight, WorkerSight } from "../observe/sight.ts";
import type { Tally } from "../observe/tally.ts";

/** `batcher`: the owner in a fleet; "" while the worker changes owner. */
export type FleetWorkerReport = WorkerReport & { readonly batcher?: string; readonly zone?: string };

export interface ReportParts {
  readonly config: Config;
  readonly role: Role;
  readonly engine: Engine;
  readonly dispatchers: readonly Dispatcher[];
  readonly tally: Tally;
  readonly clock: Clock;
  readonly desk: WorkerDesk;
  readonly fleet?: Fleet | undefined;
  draining(): boolean;
  /** Capacity of a model's workers, here or in the whole fleet. */
  prospects(model: string): Prospects;
  durability(): ProcessSight["durability"];
  /** The store answers, and (`writable`) tasks can be stored. */
  reachable(): boolean;
  writable(): boolean;
  /** Wanted workers per model; undefined until it runs. */
  scaling(): ScalingLoop | undefined;
}

interface ModelSums {
  readonly name: string;
  readonly workers: number;
  readonly healthy: number;
  readonly utilization: number;
}

export class Report implements Inside, Sight {
  readonly #parts: ReportParts;
  readonly #startedAt: number;
  readonly draining: () => boolean;
  readonly writable: () => boolean;
  readonly desk: WorkerDesk;

  constructor(parts: ReportParts) {
    this.#parts = parts;
    this.desk = parts.desk;
    this.#startedAt = parts.clock.now();
    this.draining = () => parts.draining();
    this.writable = () => parts.writable();
  }

  health(): Record<string, unknown> {
    const { clock, engine, tally, fleet } = this.#parts;
    const now = clock.now();
    const { queued, running, kept, deadLetters } = engine.stats();
    const sums = this.#sums(now);
    const sum = (each: (model: ModelSums) => number): number =>
      sums.reduce((total, model) => total + each(model), 0);
    const workers = sum((model) => model.workers);
    const busy = sum((model) => model.utilization * model.workers);
    const reachable = this.#parts.reachable();
    const durability = this.#parts.durability();
    const served = reachable && this.writable() && sums.every(({ healthy }) => healthy > 0);
    return {
      status: this.draining() ? "draining" : served ? "ok" : "degraded",
      gpu_utilization: thousandths(busy / Math.max(1, workers)),
      queue_depth: queued,
      requests_per_second: tally.requestsPerSecond(),
      running,
      workers,
      healthy_workers: sum(({ healthy }) => healthy),
      results_kept: kept,
      dead_letters: deadLetters,
      ...(fleet && {
        store: reachable ? "ok" : "away",
        durability,
        members: fleet.members.length,
      }),
      ...(durability === "disk" && { journal: this.writable() ? "ok" : "unwritable" }),
      models: sums.map((each) => this.#health(each, now)),
      uptime_ms: Math.round(now - this.#startedAt),
      totals: tally.totals(),
    };
  }

  serves(model: string): boolean {
    return this.#parts.config.models.some(({ name }) => name === model);
  }

  workers(): FleetWorkerReport[] {
    const { fleet } = this.#parts;
    if (fleet === undefined) return this.#held().map(workerReport);
    return fleet.workers().map((worker) => {
      const { batcher, zone } = worker;
      return { ...workerReport(worker), batcher, zone };
    });
  }

  curves(): CurveReport[] {
    const { clock, dispatchers, tally } = this.#parts;
    const now = clock.now();
    return dispatchers.map((dispatcher) => {
      const { rules } = dispatcher;
      const { maxBatchSize } = rules.limits;
      const curve = curveReport(rules.name, maxBatchSize, curveOf(dispatcher, now));
      const { kind, baseMs, perRowMs, perTokenMs, grouped } = costOf(dispatcher);
      const ratio = tally.paddingRatio(rules.name);
      return {
        ...curve,
        cost: {
          kind,
          base_ms: millionths(baseMs),
          per_row_ms: millionths(perRowMs),
          per_token_ms: millionths(perTokenMs),
          padding_ratio: ratio === undefined ? null : thousandths(ratio),
          grouped,
        },
      };
    });
  }

  models(): ModelSight[] {
    const { clock, config, engine, dispatchers, tally } = this.#parts;
    const now = clock.now();
    const workers = this.#workerSights();
    return this.#sums(now).map((sums) => {
      const { name, healthy, utilization } = sums;
      let oldestAt = now;
      for (const queue of engine.queues(name)) oldestAt = Math.min(oldestAt, queue.oldestAt);
      const { maxBatchSize } = config.models.find((model) => model.name === name)!;
      const own = dispatchers.find(({ rules }) => rules.name === name);
      return {
        name,
        maxBatchSize,
        queuedByTier: [...engine.waiting(name)],
        oldestWaitMs: now - oldestAt,
        workers: workers.get(name) ?? [],
        healthy,
        utilization,
        curve: own && curveOf(own, now),
        cost: own && costOf(own),
        paddingRatio: tally.paddingRatio(name),
        ...this.#load(sums, now),
      };
    });
  }

  process(): ProcessSight {
    const { config, role, engine, fleet } = this.#parts;
    const { queued, running, deadLetters } = engine.stats();
    return {
      id: fleet?.self.id ?? "",
      role,
      members: Math.max(1, fleet?.members.length ?? 1),
      engine: config.engine.kind,
      durability: this.#parts.durability(),
      reachable: this.#parts.reachable() && this.writable(),
      draining: this.draining(),
      queued,
      running,
      deadLetters,
      startedAt: this.#startedAt,
    };
  }

  /** Counted here; in a fleet, with what other gateways admit. */
  #load(
    { name: model, workers }: ModelSums,
    now: number,
  ): Pick<ModelSight, "capacityPerSecond" | "arrivalsPerSecond" | "load" | "desiredWorkers"> {
    const { config, tally } = this.#parts;
    const prospects = this.#parts.prospects(model);
    let arrivalsPerSecond = tally.arrivalsPerSecond(model);
    for (let tier = 0; tier < config.tiers.length; tier++) {
      arrivalsPerSecond += 1000 * (prospects.othersPerMs?.(tier) ?? 0);
    }
    const perSecond = 1000 * prospects.horizon(now).perMs;
    const capacityPerSecond = Number.isFinite(perSecond) ? perSecond : 0;
    return {
      capacityPerSecond,
      arrivalsPerSecond,
      load: capacityPerSecond > 0 ? arrivalsPerSecond / capacityPerSecond : 0,
      desiredWorkers: this.#parts.scaling()?.desired(model) ?? Math.max(1, workers),
    };
  }

  sighting(model: string, now: number): Omit<Sighting, "at"> {
    const sums = this.#sums(now).find(({ name }) => name === model)!;
    const { capacityPerSecond, arrivalsPerSecond } = this.#load(sums, now);
    let depth = 0;
    for (const queued of this.#parts.engine.waiting(model)) depth += queued;
    return {
      healthy: sums.healthy,
      depth,
      arrivalsPerMs: arrivalsPerSecond / 1000,
      workerPerMs: sums.healthy === 0 ? 0 : capacityPerSecond / 1000 / sums.healthy,
    };
  }

  scaling(): readonly ScalingReport[] {
    return this.#parts.scaling()?.report() ?? [];
  }

  #workerSights(): Map<string, WorkerSight[]> {
    const { fleet } = this.#parts;
    const all = fleet?.workers() ?? this.#held().map((worker) => ({ ...worker, batcher: "", zone: "" }));
    const self = fleet?.self.id ?? "";
    const byModel = new Map<string, WorkerSight[]>();
    for (const worker of all) {
      const rows = byModel.get(worker.model) ?? [];
      byModel.set(worker.model, rows);
      rows.push({ ...worker, own: worker.batcher === self });
    }
    return byModel;
  }

  #held(): WorkerBeat[] {
    const { dispatchers, clock } = this.#parts;
    return heldWorkers(dispatchers, this.#startedAt, clock.now());
  }

  #health({ name, workers, healthy, utilization }: ModelSums, now: number): object {
    const { perMs, nominalPerMs } = this.#parts.prospects(name).horizon(now);
    return {
      name,
      workers,
      healthy_workers: healthy,
      utilization: thousandths(utilization),
      queued_by_tier: [...this.#parts.engine.waiting(name)],
      capacity_per_second: Math.round(1000 * perMs),
      nominal_capacity_per_second: Math.round(1000 * nominalPerMs),
    };
  }

  #sums(now: number): ModelSums[] {
    const { fleet, dispatchers } = this.#parts;
    if (fleet !== undefined) return fleet.self.models.map((name) => ({ name, ...fleet.model(name) }));
    return dispatchers.map(({ rules, workers }) => ({
      name: rules.name,
      workers: workers.slots.length,
      healthy: workers.healthy(now),
      utilization: workers.utilization(now),
    }));
  }
}

function workerReport(worker: WorkerBeat): WorkerReport {
  const { model, name, state, inFlight, batches, tasks, calls, failures } = worker;
  const { busyMs, utilization, ratio, load, down, address } = worker;
  return {
    model,
    name,
    ...(address !== undefined && { address }),
    state,
    in_flight: inFlight,
    batches,
    tasks,
    calls,
    failures,
    busy_ms: busyMs,
    utilization,
    ratio,
    pipeline: worker.pipeline ?? 1,
    ahead: worker.ahead ?? null,
    ...(load !== undefined && { load }),
    ...(down && { down: { why: down.why, retry_in_ms: down.retryInMs } }),
  };
}

/** Where a batch's time follows its lengths, its size alone shows no knee. */
function curveOf({ rules, workers }: Dispatcher, now: number): CurveReading {
  const reading = workers.curve.read(rules.limits.maxBatchSize, now);
  return workers.service.kind === "rows" ? reading : { points: reading.points, knee: undefined, hint: "" };
}

function costOf({ workers, lengths }: Dispatcher): CostSight {
  const { kind, baseMs, perRowMs, perTokenMs } = workers.service;
  return { kind, baseMs, perRowMs, perTokenMs, grouped: lengths.active };
}

/** A token may take less than a microsecond. */
function millionths(ms: number): number {
  return Math.round(ms * 1e6) / 1e6;
}

function curveReport(
  name: string,
  maxBatchSize: number,
  { points, knee, hint }: CurveReading,
): Omit<CurveReport, "cost"> {
  const at = ({ size, ms, perSecond }: Throughput): { size: number; ms: number; per_second: number } => ({
    size,
    ms: thousandths(ms),
    per_second: Math.round(perSecond),
  });
  return {
    name,
    max_batch_size: maxBatchSize,
    curve: points.map((point) => ({ ...point, ms: thousandths(point.ms) })),
    knee: knee === undefined ? null : { ...at(knee), full: at(knee.full) },
    hint: hint === "" ? null : hint,
  };
}
