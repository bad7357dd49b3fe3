/** From the config to the loop that says how many workers each model should have. */
import { isDeepStrictEqual } from "node:util";
import type { Backend } from "./backend/backend.ts";
import type { Clock } from "../app/clock.ts";
import type { Config, ModelConfig } from "../app/config/config.ts";
import { scalingRules, type Sighting } from "../core/scaling.ts";
import { isDns } from "../app/config/worker-addresses.ts";
import type { Dispatcher } from "../dispatch/dispatcher.ts";
import type { PoolWorker } from "./worker.ts";
import { ScalingHooks } from "./scaling-hooks.ts";
import { type OwnWorkers, type ScaledModel, ScalingLoop } from "./scaling.ts";
import type { Events } from "../observe/events.ts";

/** How long a webhook or a command may take. */
const HOOK_TIMEOUT_MS = 30_000;

export interface ScalingNeeds {
  readonly clock: Clock;
  readonly events: Events;
  /** In the order of the models; empty in a gateway. */
  readonly dispatchers: readonly Dispatcher[];
  readonly backends: readonly Backend[];
  /** What is known of a model, in all of the fleet. */
  readonly see: (model: string, now: number) => Omit<Sighting, "at">;
  /** Of all processes that could tell hooks, this is the one. */
  readonly leads: () => boolean;
}

export interface OpenScaling {
  readonly loop: ScalingLoop;
  /** Models whose rules and workers are as before go on as they were. */
  readonly retune: (config: Config) => void;
  readonly close: () => void;
}

interface Known {
  /** Whatever it goes by. */
  readonly by: unknown;
  /** As the config has them. */
  readonly workers: ModelConfig["backend"]["workers"];
  readonly model: ScaledModel;
  readonly hook: ScalingHooks | undefined;
}

export function openScaling(config: Config, needs: ScalingNeeds): OpenScaling {
  const { clock, events, see, leads } = needs;
  const known = new Map<string, Known>();
  const scaled = (model: ModelConfig, at: number, config: Config): ScaledModel => {
    const { name, scaling } = model;
    const by = [scaling, model.backend, config.admission.targetUtilization];
    const same = known.get(name);
    if (same !== undefined && isDeepStrictEqual(same.by, by)) return same.model;
    same?.hook?.stop();
    const { webhook, command } = scaling;
    const hook =
      webhook === undefined && command === undefined
        ? undefined
        : new ScalingHooks(
            { model: name, webhook, command, timeoutMs: HOOK_TIMEOUT_MS, leads },
            clock,
            events,
          );
    const dispatcher = needs.dispatchers[at];
    // Where nothing but the rules or the backend changed, as many are wanted as before.
    const asBefore = scaling.apply && same?.workers === model.backend.workers ? dispatcher : undefined;
    const own = scaling.apply && dispatcher ? ownWorkers(dispatcher, needs.backends[at]!, needs) : undefined;
    const next: ScaledModel = {
      name,
      rules: scalingRules(scaling, config.admission.targetUtilization),
      workers:
        (asBefore && countOf(asBefore)) ??
        workersOf(model) ??
        Math.max(dispatcher?.workers.slots.length ?? 0, see(name, clock.now()).healthy),
      see: (now) => see(name, now),
      own,
      tell: hook && ((news, healthy) => hook.tell(news, healthy)),
      trouble: hook && (() => hook.trouble),
      appliedBy: scaling.apply ? "ferry" : webhook ? "webhook" : command ? "command" : "outside",
    };
    known.set(name, { by, workers: model.backend.workers, model: next, hook });
    return next;
  };
  const all = (config: Config): ScaledModel[] => {
    for (const [name, { hook }] of known) {
      if (config.models.some((model) => model.name === name)) continue;
      hook?.stop();
      known.delete(name);
    }
    return config.models.map((model, at) => scaled(model, at, config));
  };
  const loop = new ScalingLoop(all(config), clock, events);
  return {
    loop,
    retune: (next) => loop.retune(all(next)),
    close: () => {
      loop.stop();
      for (const { hook } of known.values()) hook?.stop();
    },
  };
}

/** Undefined where DNS says how many: then as many as there are. */
function workersOf({ backend }: ModelConfig): number | undefined {
  if (typeof backend.workers === "number") return backend.workers;
  return backend.workers.some(isDns) ? undefined : backend.workers.length;
}

function ownWorkers(
  dispatcher: Dispatcher,
  backend: Backend,
  { backends, clock }: Pick<ScalingNeeds, "backends" | "clock">,
): OwnWorkers {
  return {
    get count() {
      return countOf(dispatcher);
    },
    async grow() {
      const worker = await backend.grow();
      // Meanwhile the config may have changed: then this backend is at its end.
      if (backends.includes(backend)) dispatcher.join(worker);
      else await backend.retire(worker);
    },
    async shrink() {
      const slot = leastMissed(dispatcher.workers.slots, clock.now());
      if (slot === undefined) return;
      await dispatcher.retire(slot);
      await backend.retire(slot.worker);
    },
  };
}

function countOf({ workers }: Dispatcher): number {
  return workers.slots.filter(({ retiring, drained }) => !retiring && !drained).length;
}

/** One that is down; else the slowest; of equals one that is idle, and then the last that came. */
function leastMissed(slots: readonly PoolWorker[], now: number): PoolWorker | undefined {
  const worth = (slot: PoolWorker): number => (slot.healthy(now) ? 1 / slot.usualRatio : 0);
  return slots
    .filter(({ retiring, drained }) => !retiring && !drained)
    .toReversed()
    .toSorted(
      (a, b) => worth(a) - worth(b) || Number(a.batch !== undefined) - Number(b.batch !== undefined),
    )[0];
}
