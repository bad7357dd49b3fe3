/**
 * The autoscaler's loop: once a second computes how many workers each model should have.
 *
 *   apply      Ferry's own workers: the number is an input of the pool's desired set (`WorkerPool.resize`)
 *   hooks      a webhook or a command gets the number whenever it changes (`scaling-hooks.ts`)
 *   otherwise  the number is published (`ferry_desired_workers`, /internal/scaling) for KEDA, an HPA or people
 *
 * In a fleet every process computes from the same numbers; one of them calls the hooks.
 */
import { isDeepStrictEqual } from "node:util";
import { type Alarm, type Clock, nextBeat } from "../app/clock.ts";
import type { Config, ModelConfig } from "../app/config/config.ts";
import { isDns } from "../app/config/worker-addresses.ts";
import { Autoscaler, loadOf, type Scaling, scalingRules, type Sighting } from "../core/scaling.ts";
import type { Events } from "../observe/events.ts";
import type { WorkerPool } from "./pool.ts";
import { ScalingHooks } from "./scaling-hooks.ts";

export interface ScalingParts {
  readonly clock: Clock;
  readonly events: Events;
  readonly config: () => Config;
  /** Without models in a gateway. */
  readonly pool: Pick<WorkerPool, "of" | "resize">;
  /** State of a model across the fleet. */
  readonly see: (model: string, now: number) => Omit<Sighting, "at">;
  /** Whether this process calls the hooks. */
  readonly leads: () => boolean;
}

/** One model, as /internal/scaling shows it. */
export interface ScalingReport {
  readonly model: string;
  readonly desired: number;
  readonly healthy: number;
  readonly load: number;
  readonly queue_depth: number;
  readonly expected_per_second: number;
  readonly reason: string;
  readonly changed_at: string;
  readonly min: number;
  readonly max: number;
  readonly applied_by: "ferry" | "webhook" | "command" | "outside";
  /** Why the number cannot be reached now; omitted: no known obstacle. */
  readonly trouble?: string;
}

const LOOK_EVERY_MS = 1000;
/** Time limit of a webhook or command. */
const HOOK_TIMEOUT_MS = 30_000;

export class ScalingLoop {
  readonly #parts: ScalingParts;
  #models: ReadonlyMap<string, ScaledModel> = new Map();
  #alarm: Alarm | undefined;

  constructor(parts: ScalingParts) {
    this.#parts = parts;
    this.wake();
    this.#next();
  }

  /** After a reload: models with unchanged scaling and workers continue, the others start over. */
  wake(): void {
    const { models, admission } = this.#parts.config();
    const before = this.#models;
    this.#models = new Map(
      models.map((model) => {
        const known = before.get(model.name);
        if (known?.goesBy(model, admission.targetUtilization) === true) return [model.name, known];
        known?.stop();
        return [model.name, new ScaledModel(model, admission.targetUtilization, this.#parts, known)];
      }),
    );
    for (const [name, model] of before) if (!this.#models.has(name)) model.stop();
  }

  stop(): void {
    this.#alarm?.cancel();
    for (const model of this.#models.values()) model.stop();
  }

  desired(model: string): number | undefined {
    return this.#models.get(model)?.scaling.desired;
  }

  report(): ScalingReport[] {
    return [...this.#models.values()].map((model) => model.report());
  }

  #next(): void {
    const { clock } = this.#parts;
    this.#alarm = clock.at(nextBeat(clock.now(), LOOK_EVERY_MS), () => {
      for (const model of this.#models.values()) model.look();
      this.#next();
    });
  }
}

class ScaledModel {
  readonly #parts: ScalingParts;
  readonly #model: ModelConfig;
  readonly #target: number;
  readonly #scaler: Autoscaler;
  readonly #hooks: ScalingHooks | undefined;
  #seen: Sighting;

  /** `before`: the same model under other rules. */
  constructor(model: ModelConfig, target: number, parts: ScalingParts, before: ScaledModel | undefined) {
    this.#parts = parts;
    this.#model = model;
    this.#target = target;
    const { name, scaling, backend } = model;
    const { clock, events, leads } = parts;
    const { webhook, command } = scaling;
    if (webhook !== undefined || command !== undefined)
      this.#hooks = new ScalingHooks(
        { model: name, webhook, command, timeoutMs: HOOK_TIMEOUT_MS, leads },
        clock,
        events,
      );
    const now = clock.now();
    this.#seen = { at: now, ...parts.see(name, now) };
    const live = parts.pool.of(name)?.live.filter(({ drained }) => !drained).length;
    // If only the rules or the backend changed, keep the desired number.
    const same = before !== undefined && before.#model.backend.workers === backend.workers;
    const asBefore = scaling.apply && same ? live : undefined;
    const workers = asBefore ?? listedWorkers(model) ?? Math.max(live ?? 0, this.#seen.healthy);
    this.#scaler = new Autoscaler(scalingRules(scaling, target), workers, now);
  }

  goesBy({ scaling, backend }: ModelConfig, target: number): boolean {
    const { scaling: ownScaling, backend: ownBackend } = this.#model;
    return isDeepStrictEqual([ownScaling, ownBackend, this.#target], [scaling, backend, target]);
  }

  get scaling(): Scaling {
    return this.#scaler.scaling;
  }

  stop(): void {
    this.#hooks?.stop();
  }

  look(): void {
    const { clock, events, pool, see } = this.#parts;
    const { name, scaling: settings } = this.#model;
    const now = clock.now();
    const { desired: from } = this.scaling;
    this.#seen = { at: now, ...see(name, now) };
    const scaling = this.#scaler.see(this.#seen);
    const { desired, reason } = scaling;
    if (desired !== from) {
      events.emit("scaling.changed", { model: name, from, desired, reason });
      this.#hooks?.tell(scaling, this.#seen.healthy);
    }
    if (settings.apply) pool.resize(name, desired, (ms) => this.#scaler.started(ms));
  }

  report(): ScalingReport {
    const { name, scaling: settings } = this.#model;
    const { desired, reason, changedAt } = this.scaling;
    const load = loadOf(this.#seen);
    const trouble = this.#parts.pool.of(name)?.trouble ?? this.#hooks?.trouble;
    return {
      model: name,
      desired,
      healthy: this.#seen.healthy,
      load: Number.isFinite(load) ? Math.round(1000 * load) / 1000 : 0,
      queue_depth: this.#seen.depth,
      expected_per_second: Math.round(10_000 * this.#scaler.expectedPerMs) / 10,
      reason,
      changed_at: new Date(changedAt).toISOString(),
      min: settings.min,
      max: settings.max,
      applied_by: appliedBy(settings),
      ...(trouble === undefined ? {} : { trouble }),
    };
  }
}

function appliedBy({ apply, webhook, command }: ModelConfig["scaling"]): ScalingReport["applied_by"] {
  return apply ? "ferry" : webhook ? "webhook" : command ? "command" : "outside";
}

/** Undefined where DNS decides: then as many as there are. */
function listedWorkers({ backend }: ModelConfig): number | undefined {
  if (typeof backend.workers === "number") return backend.workers;
  return backend.workers.some(isDns) ? undefined : backend.workers.length;
}
