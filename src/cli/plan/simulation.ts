/** Ferry without HTTP on virtual time, with simulated workers; for `ferry plan` and the simulation tests. */
import { type SimulatedOptions, SimulatedBackend } from "../../workers/backend/simulated.ts";
import type { Worker } from "../../workers/backend/backend.ts";
import type { Clock } from "../../app/clock.ts";
import { CapacityGate, type CapacityRules } from "../../gateway/admission/capacity-gate.ts";
import { Random } from "../../core/random.ts";
import type { CapacityRefusal } from "../../core/shed.ts";
import type { Json, Task } from "../../core/task.ts";
import { Dispatcher } from "../../dispatch/dispatcher.ts";
import type { ModelRules } from "../../dispatch/model-rules.ts";
import { Reaper } from "../../dispatch/reaper.ts";
import type { EngineLimits, PutReply, Sharing } from "../../engine/engine.ts";
import { MemoryEngine } from "../../engine/memory/engine.ts";
import { Events } from "../../observe/events.ts";
import { VirtualClock } from "./virtual-clock.ts";

export interface SimulationOptions {
  /** Omitted: one tier, everything admitted. */
  readonly admission?: Omit<CapacityRules, "model" | "queueMs" | "totalMs">;
  readonly seed: number;
  readonly rules: ModelRules;
  readonly timeouts: { readonly queueMs: number; readonly totalMs: number };
  readonly backend: Omit<SimulatedOptions, "seed">;
  readonly engine?: Partial<EngineLimits>;
  readonly wrap?: (worker: Worker) => Worker;
  /** The dispatcher's clock, for example with late alarms; omitted: the virtual one. */
  readonly dispatcherClock?: (clock: Clock) => Clock;
}

const LET_ALL_IN = {
  mode: "off",
  tiers: 1,
  targetUtilization: 1,
  lastTierDepth: Infinity,
  firstTierDepth: Infinity,
} as const;

export class Simulation {
  readonly clock = new VirtualClock();
  readonly events = new Events();
  readonly engine: MemoryEngine;
  readonly backend: SimulatedBackend;
  readonly dispatcher: Dispatcher;
  /** After a change call `dispatcher.wake()`. */
  rules: ModelRules;
  readonly gate: CapacityGate;
  readonly random: Random;
  readonly startedAt: number;
  readonly #options: SimulationOptions;
  readonly #reaper: Reaper;
  #ids = 0;
  #batches = 0;

  constructor(options: SimulationOptions) {
    this.#options = options;
    this.startedAt = this.clock.now();
    this.random = new Random(options.seed);
    const { rules, timeouts } = options;
    this.rules = rules;
    const limits = {
      models: new Map([[rules.name, timeouts]]),
      tiers: options.admission?.tiers ?? 1,
      maxQueued: 1_000_000,
      maxQueuedBytes: Infinity,
      results: { ttlMs: 600_000, evictAfterRead: false, maxBytes: Infinity },
      deadLetters: { max: 10_000, ttlMs: Infinity },
      ...options.engine,
    };
    this.engine = new MemoryEngine(() => limits, this.clock, this.events);
    this.backend = new SimulatedBackend({ ...options.backend, seed: options.seed }, this.clock);
    const workers = this.backend.workers.map((worker) => options.wrap?.(worker) ?? worker);
    this.dispatcher = new Dispatcher(() => this.rules, workers, {
      engine: this.engine,
      clock: options.dispatcherClock?.(this.clock) ?? this.clock,
      events: this.events,
      random: () => this.random.next(),
      newBatchId: () => `batch-${++this.#batches}`,
    });
    this.#reaper = new Reaper(this.engine, this.clock);
    const admission = options.admission ?? LET_ALL_IN;
    this.gate = new CapacityGate(
      { ...admission, ...timeouts, model: rules.name },
      {
        horizon: (now) => this.dispatcher.horizon(now),
        hasRoom: (waiting, now) => this.dispatcher.hasRoom(waiting, now),
      },
      this.engine,
    );
  }

  /** Calls `arrive` at each instant, counted from the start. */
  schedule(arrivals: readonly number[], arrive: (index: number) => void): void {
    const next = (index: number): void => {
      if (index === arrivals.length) return;
      this.clock.at(this.startedAt + arrivals[index]!, () => {
        arrive(index);
        next(index + 1);
      });
    };
    next(0);
  }

  /**
   * As `schedule`, for millions of arrivals whose `arrive` only calls `knock`: time pauses for promises only when a
   * batch left. `next` returns each instant from the start, Infinity after the last.
   */
  stream(next: () => number, arrive: () => void): void {
    const { startedAt } = this;
    const stream = {
      nextAt: startedAt + next(),
      arrive: () => {
        const before = this.#batches;
        arrive();
        stream.nextAt = startedAt + next();
        return this.#batches !== before;
      },
    };
    this.clock.follow(stream);
  }

  /** Submits one task through admission: admitted, or the refusal. */
  knock(tier: number, tenant = "anonymous", input: Json = "null"): { id: string } | CapacityRefusal {
    const now = this.clock.now();
    const refusal = this.gate.enter({ tier, tenant }, now);
    if (refusal !== undefined) return refusal;
    this.gate.queued({ tier, tenant }, now);
    return this.put({ tier, tenant, input });
  }

  /** Enqueues one task, without admission. */
  put(
    changes: Partial<Task> = {},
    sharing: Sharing = {},
  ): { id: string; reply: PutReply | Promise<PutReply> } {
    const createdAt = this.clock.now();
    const task = {
      id: `task-${++this.#ids}`,
      tenant: "anonymous",
      tier: 0,
      model: this.#options.rules.name,
      input: "null",
      parameters: "",
      content: "",
      createdAt,
      deadlineAt: createdAt + this.#options.timeouts.totalMs,
      ...changes,
    };
    return { id: task.id, reply: this.engine.put(task, sharing) };
  }

  run(ms: number): Promise<number> {
    return this.clock.run(this.clock.now() + ms);
  }

  stop(): void {
    this.#reaper.stop();
  }
}
