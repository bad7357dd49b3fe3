/**
 * The loop around the autoscaler: looks at every model once a second, says how many workers it should have, and sees
 * to it where it was told to.
 *
 *   apply      our own workers: one more is started, or one is drained and ended, one after another towards the
 *              number. A worker that cannot be started is told once and tried again later.
 *   hooks      a webhook or a command is told the number whenever it changes (`workers/scaling-hooks.ts`).
 *   otherwise  the number is published (`ferry_desired_workers`, /internal/scaling) for KEDA, an HPA or people.
 *
 * In a fleet every process sees the same numbers and comes to much the same conclusion; one of them tells the hooks.
 */
import type { Alarm, Clock } from "../app/clock.ts";
import { Autoscaler, loadOf, type Scaling, type ScalingRules, type Sighting } from "../core/scaling.ts";
import type { Events } from "../observe/events.ts";

/** Workers that this process starts and ends itself. */
export interface OwnWorkers {
  readonly count: number;
  /** Resolves when it can take a batch. */
  grow(): Promise<void>;
  /** Drains one and ends it. */
  shrink(): Promise<void>;
}

export interface ScaledModel {
  readonly name: string;
  readonly rules: ScalingRules;
  /** Workers at the start. */
  readonly workers: number;
  readonly see: (now: number) => Omit<Sighting, "at">;
  /** Left out: somebody else sees to it. */
  readonly own?: OwnWorkers | undefined;
  /** Told of every change, in order; left out: nobody is. */
  readonly tell?: ((scaling: Scaling, healthy: number) => void) | undefined;
  /** Why they could not be told the last time; undefined when they could. */
  readonly trouble?: (() => string | undefined) | undefined;
  /** Who sees to it, in a word. */
  readonly appliedBy: "ferry" | "webhook" | "command" | "outside";
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
  readonly applied_by: ScaledModel["appliedBy"];
  /** Why the number is not seen to now; left out: nothing is known to be in the way. */
  readonly trouble?: string;
}

const LOOK_EVERY_MS = 1000;
/** After a worker that could not be started. */
const TRY_AGAIN_MS = 10_000;

export class ScalingLoop {
  #models: ReadonlyMap<string, Watched> = new Map();
  readonly #clock: Clock;
  readonly #events: Events;
  #alarm: Alarm | undefined;

  constructor(models: readonly ScaledModel[], clock: Clock, events: Events) {
    this.#clock = clock;
    this.#events = events;
    this.retune(models);
    this.#next();
  }

  /** Those that are the same as before go on as they were; the others begin anew. */
  retune(models: readonly ScaledModel[]): void {
    const before = new Map([...this.#models.values()].map((each) => [each.model, each]));
    this.#models = new Map(
      models.map((model) => [model.name, before.get(model) ?? new Watched(model, this.#clock, this.#events)]),
    );
    for (const [model, watched] of before) if (!models.includes(model)) watched.stop();
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
    this.#alarm = this.#clock.at(this.#clock.now() + LOOK_EVERY_MS, () => {
      for (const model of this.#models.values()) model.look();
      this.#next();
    });
  }
}

class Watched {
  readonly model: ScaledModel;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #scaler: Autoscaler;
  #seen: Sighting;
  #moving = false;
  #trouble: string | undefined;
  #stillUntil = -Infinity;
  #stopped = false;

  constructor(model: ScaledModel, clock: Clock, events: Events) {
    this.model = model;
    this.#clock = clock;
    this.#events = events;
    const now = clock.now();
    this.#scaler = new Autoscaler(model.rules, model.workers, now);
    this.#seen = { at: now, ...model.see(now) };
  }

  get scaling(): Scaling {
    return this.#scaler.scaling;
  }

  stop(): void {
    this.#stopped = true;
  }

  look(): void {
    const now = this.#clock.now();
    const before = this.scaling;
    this.#seen = { at: now, ...this.model.see(now) };
    const scaling = this.#scaler.see(this.#seen);
    if (scaling.desired !== before.desired) this.#changed(before.desired, scaling);
    if (this.model.own !== undefined) void this.#move(this.model.own);
  }

  #changed(from: number, scaling: Scaling): void {
    const { name, tell } = this.model;
    const { desired, reason } = scaling;
    this.#events.emit("scaling.changed", { model: name, from, desired, reason });
    tell?.(scaling, this.#seen.healthy);
  }

  /** One step towards the number; the next look takes the next. */
  async #move(own: OwnWorkers): Promise<void> {
    const missing = this.scaling.desired - own.count;
    if (missing === 0 || this.#moving || this.#stopped || this.#clock.now() < this.#stillUntil) return;
    this.#moving = true;
    const startedAt = this.#clock.now();
    try {
      if (missing > 0) await own.grow();
      else await own.shrink();
      if (missing > 0) this.#scaler.started(this.#clock.now() - startedAt);
      this.#trouble = undefined;
    } catch (error) {
      this.#failed(error);
    }
    this.#moving = false;
    if (!this.#stopped) void this.#move(own);
  }

  #failed(error: unknown): void {
    this.#stillUntil = this.#clock.now() + TRY_AGAIN_MS;
    const known = this.#trouble !== undefined;
    const why = error instanceof Error ? error.message : String(error);
    this.#trouble = `a worker could not be started or ended: ${why}`;
    if (known || this.#stopped) return;
    const message = `${this.model.name}: ${this.#trouble}; it is tried again`;
    this.#events.emit("notice", { level: "warn", message });
  }

  report(): ScalingReport {
    const { name, rules, appliedBy } = this.model;
    const { desired, reason, changedAt } = this.scaling;
    const load = loadOf(this.#seen);
    const trouble = this.#trouble ?? this.model.trouble?.();
    return {
      model: name,
      desired,
      healthy: this.#seen.healthy,
      load: Number.isFinite(load) ? Math.round(1000 * load) / 1000 : 0,
      queue_depth: this.#seen.depth,
      expected_per_second: Math.round(10_000 * this.#scaler.expectedPerMs) / 10,
      reason,
      changed_at: new Date(changedAt).toISOString(),
      min: rules.min,
      max: rules.max,
      applied_by: appliedBy,
      ...(trouble === undefined ? {} : { trouble }),
    };
  }
}
