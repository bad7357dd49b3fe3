/**
 * The autoscaler over hours of traffic: the real dispatcher, engine and admission on virtual time, with workers that take
 * a minute to start and are replaced when they die; beside it the same traffic on a fleet that never changes.
 *
 * A request misses the goal when it is refused, fails, or takes longer than `goalMs`.
 */
import { Autoscaler, type ScalingRules } from "../../src/core/scaling.ts";
import { Random } from "../../src/core/random.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";

export const WORKER = { baseMs: 1000, batch: 8 };
/** Requests a second of one worker with full batches. */
export const PACE = (1000 * WORKER.batch) / WORKER.baseMs;
export const goalMs = 3000;
export const COLD_START_MS = 60_000;

/** With the defaults of the config. */
export const RULES: ScalingRules = {
  min: 1,
  max: 64,
  up: [
    { depth: 500, forMs: 30_000, add: 3 },
    { depth: 100, forMs: 60_000, add: 1 },
    { load: 0.85, forMs: 300_000, add: 1 },
  ],
  down: { load: 0.4, forMs: 900_000, remove: 1 },
  coolDownMs: 300_000,
  maxRemoveShare: 0.2,
  target: 0.7,
  coldStartMs: COLD_START_MS,
  forecast: true,
};

export interface Traffic {
  readonly hours: number;
  /** Requests a second, at an instant in ms from the start. */
  rate(atMs: number): number;
  /** Never more than this. */
  readonly most: number;
}

export interface Course {
  readonly requests: number;
  readonly missed: number;
  readonly workerHours: number;
  /** Every number that was wanted, with when. */
  readonly wanted: readonly { readonly atMs: number; readonly workers: number }[];
  readonly least: number;
  readonly mostWorkers: number;
}

export interface Plan {
  readonly traffic: Traffic;
  readonly workers: number;
  /** Left out: the fleet never changes. */
  readonly rules?: ScalingRules;
  /** That many are gone for good, at this instant. */
  readonly loss?: { readonly atMs: number; readonly workers: number };
  readonly seed?: number;
}

export async function play(plan: Plan): Promise<Course> {
  return new Lab(plan).run();
}

class Lab {
  readonly #plan: Plan;
  readonly #simulation: Simulation;
  readonly #scaler: Autoscaler | undefined;
  readonly #wanted: { atMs: number; workers: number }[] = [];
  #starting = 0;
  #requests = 0;
  #late = 0;
  #answered = 0;
  #workerMs = 0;
  #arrivals = 0;
  #least = Infinity;
  #most = 0;

  constructor(plan: Plan) {
    this.#plan = plan;
    const faults = { jitter: 0.05, errorRate: 0, hangRate: 0, shortRate: 0, slowRate: 0, slowFactor: 1 };
    this.#simulation = new Simulation({
      seed: plan.seed ?? 1,
      timeouts: { queueMs: 4000, totalMs: 8000 },
      rules: {
        name: "m",
        limits: { policy: "adaptive", maxBatchSize: WORKER.batch, maxWaitMs: 200 },
        workerMs: 6000,
        retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
        health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
      },
      backend: { workers: plan.workers, baseMs: WORKER.baseMs, perItemMs: 0, ...faults },
    });
    const { rules } = plan;
    this.#scaler = rules && new Autoscaler(rules, plan.workers, this.#simulation.clock.now());
  }

  async run(): Promise<Course> {
    const { traffic, loss } = this.#plan;
    const { clock, engine, startedAt } = this.#simulation;
    engine.watch({
      settled: ({ task, outcome }) => {
        this.#answered++;
        if (outcome?.ok !== true || clock.now() - task.createdAt > goalMs) this.#late++;
      },
    });
    this.#arrive();
    this.#lookLater();
    if (loss !== undefined) clock.at(startedAt + loss.atMs, () => this.#lose(loss.workers));
    await this.#simulation.run(traffic.hours * 3_600_000 + 10_000);
    return {
      requests: this.#requests,
      missed: this.#late + this.#requests - this.#answered,
      workerHours: this.#workerMs / 3_600_000,
      wanted: this.#wanted,
      least: this.#least,
      mostWorkers: this.#most,
    };
  }

  /** A Poisson process whose rate changes, by thinning one that has the largest. */
  #arrive(): void {
    const { traffic, seed = 1 } = this.#plan;
    const random = new Random(seed + 1000);
    const endMs = traffic.hours * 3_600_000;
    let at = 0;
    const next = (): number => {
      do at -= (Math.log(1 - random.next()) * 1000) / traffic.most;
      while (at < endMs && random.next() * traffic.most > traffic.rate(at));
      return at < endMs ? at : Infinity;
    };
    this.#simulation.stream(next, () => {
      this.#requests++;
      this.#arrivals++;
      this.#simulation.knock(0);
    });
  }

  #lookLater(): void {
    const { clock, startedAt, dispatcher, engine } = this.#simulation;
    clock.at(clock.now() + 1000, () => {
      const now = clock.now();
      const { slots } = dispatcher.workers;
      const healthy = dispatcher.workers.healthy(now);
      this.#least = Math.min(this.#least, healthy);
      this.#most = Math.max(this.#most, slots.length);
      this.#workerMs += 1000 * (slots.length + this.#starting);
      const perMs = dispatcher.horizon(now).perMs;
      const sighting = {
        at: now,
        healthy,
        depth: engine.waiting("m").reduce((sum, depth) => sum + depth, 0),
        arrivalsPerMs: this.#arrivals / 1000,
        workerPerMs: healthy === 0 ? 0 : perMs / healthy,
      };
      this.#arrivals = 0;
      if (this.#scaler !== undefined) {
        const { desired, changedAt } = this.#scaler.see(sighting);
        if (changedAt === now) this.#wanted.push({ atMs: now - startedAt, workers: desired });
        void this.#follow(desired);
      }
      this.#lookLater();
    });
  }

  async #follow(desired: number): Promise<void> {
    const { clock, dispatcher, backend } = this.#simulation;
    const slots = dispatcher.workers.slots.filter(({ retiring }) => !retiring);
    for (let missing = desired - slots.length - this.#starting; missing > 0; missing--) {
      this.#starting++;
      clock.at(clock.now() + COLD_START_MS, () => {
        this.#starting--;
        void backend.grow().then((worker) => dispatcher.join(worker));
      });
    }
    if (slots.length + this.#starting <= desired || this.#starting > 0) return;
    const slot = slots.at(-1)!;
    await dispatcher.retire(slot);
    await backend.retire(slot.worker);
  }

  /** They are not there any more, and whoever keeps the fleet at its number sees that. */
  #lose(count: number): void {
    const { dispatcher, backend } = this.#simulation;
    for (const slot of dispatcher.workers.slots.slice(0, count)) {
      backend.kill(slot.worker.name);
      void dispatcher.retire(slot).then(() => backend.retire(slot.worker));
    }
  }
}

/** How often the wanted number turned from more to fewer, or back. */
export function turns(wanted: Course["wanted"], from: number): number {
  let turned = 0;
  let before = from;
  let way = 0;
  for (const { workers } of wanted) {
    const now = Math.sign(workers - before);
    if (way !== 0 && now !== way) turned++;
    way = now;
    before = workers;
  }
  return turned;
}

export const HOUR_MS = 3_600_000;

/** `times` as much after a quarter of an hour, for so many hours; then as before, for an hour and a half. */
export function step(before: number, times: number, hours: number): Traffic {
  const from = HOUR_MS / 4;
  const until = from + hours * HOUR_MS;
  const rate = (atMs: number): number => (atMs < from || atMs > until ? before : before * times);
  return { hours: 1.75 + hours, rate, most: before * times };
}

/** Least at midnight, most at noon. */
export function day(least: number, most: number): Traffic {
  const rate = (atMs: number): number =>
    least + ((most - least) * (1 - Math.cos((2 * Math.PI * atMs) / (24 * HOUR_MS)))) / 2;
  return { hours: 24, rate, most };
}

export function steady(rate: number, hours: number): Traffic {
  return { hours, rate: () => rate, most: rate };
}
