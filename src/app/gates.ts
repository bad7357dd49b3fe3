/** The capacity gates of all models. A reload makes new ones, which keep what the old ones learned. */
import { CapacityGate, type Prospects } from "../gateway/admission/capacity-gate.ts";
import { THRESHOLD_DEPTHS } from "../core/shed.ts";
import type { Task } from "../core/task.ts";
import type { Engine, Placed, Sharing } from "../engine/engine.ts";
import type { Config } from "./config/config.ts";

export interface GateParts {
  readonly engine: Engine;
  /** Undefined once the model is gone. */
  readonly prospects: (model: string) => Prospects | undefined;
  /** See `CapacityRules`. */
  readonly looksForFree: boolean;
}

/** Forecast of a removed model, whose accepted tasks still count. */
const NO_WORKERS = {
  healthy: 0,
  idle: 0,
  overdue: 0,
  perMs: 0,
  nominalPerMs: 0,
  batchSize: 1,
  batchMs: 0,
  runMs: 0,
  deviationMs: 0,
  freeAt: [],
  nextUsableAt: Infinity,
} as const;

export class Gates {
  readonly #parts: GateParts;
  #byModel: ReadonlyMap<string, CapacityGate> = new Map();

  constructor(config: Config, parts: GateParts) {
    this.#parts = parts;
    this.follow(config);
  }

  follow({ models, admission, tiers }: Config): void {
    const { engine, looksForFree } = this.#parts;
    const before = this.#byModel;
    this.#byModel = new Map(
      models.map(({ name, timeouts }) => {
        const rules = { ...admission, ...THRESHOLD_DEPTHS, ...timeouts, model: name, tiers: tiers.length };
        const prospects = this.#prospects(name);
        return [name, new CapacityGate({ ...rules, looksForFree }, prospects, engine, before.get(name))];
      }),
    );
  }

  put(task: Task, sharing: Sharing, ofMany: boolean): Placed | Promise<Placed> {
    const gate = this.#byModel.get(task.model);
    if (gate !== undefined) return gate.put(task, sharing, ofMany);
    const message = `model ${JSON.stringify(task.model)} is no longer served here`;
    return { kind: "refused", reason: "no_worker", code: "SERVICE_OVERLOADED", message, waitMs: 1000 };
  }

  admitted(now: number): { name: string; admittedPerMs: number[] }[] {
    return [...this.#byModel].map(([name, gate]) => ({ name, admittedPerMs: gate.admittedPerMs(now) }));
  }

  /** Looked up per call: a new model's workers start after its gate is made. */
  #prospects(model: string): Prospects {
    const { prospects } = this.#parts;
    return {
      horizon: (now) => prospects(model)?.horizon(now) ?? NO_WORKERS,
      hasRoom: (waiting, now) => prospects(model)?.hasRoom(waiting, now) ?? false,
      othersPerMs: (tier) => prospects(model)?.othersPerMs?.(tier) ?? 0,
    };
  }
}
