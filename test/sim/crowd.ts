/**
 * A crowd before a simulated Ferry: arrivals of several tiers and tenants knock at the gate, some come again
 * when they are told to, and what became of each is written down.
 */
import type { Reply } from "../../src/workers/backend/backend.ts";
import { Random } from "../../src/core/random.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";

export interface CrowdOptions {
  readonly workers: number;
  /** Scatter of service times. */
  readonly jitter?: number;
  /** A share of the batches takes so many times as long. */
  readonly slow?: { readonly rate: number; readonly factor: number };
  /** What each worker needs of the usual time, at least 1; left out: that. */
  readonly paces?: readonly number[];
  /** From arrival to answer. */
  readonly totalMs: number;
  /** From arrival to the worker; left out: `totalMs`. */
  readonly queueMs?: number;
  readonly workerMs?: number;
  readonly mode?: "predictive" | "thresholds" | "off";
  /** Shares of enterprise, paid and free. */
  readonly mix?: readonly [number, number, number];
  /** How often whoever is refused comes again. */
  readonly retries?: number;
  readonly seed?: number;
}

export const BATCH_MS = 100;
export const MAX_BATCH_SIZE = 64;

interface Visit {
  readonly tier: number;
  readonly firstAt: number;
  attempts: number;
  /** Since its accepted attempt; NaN until it is answered. */
  latencyMs: number;
  doneAt: number;
  fate: "waiting" | "answered" | "late" | "refused";
}

export class Crowd {
  readonly simulation: Simulation;
  readonly visits: Visit[] = [];
  readonly #options: CrowdOptions;
  readonly #random: Random;
  readonly #byTask = new Map<string, Visit>();
  readonly #dead = new Set<string>();

  constructor(options: CrowdOptions) {
    this.#options = options;
    this.#random = new Random(options.seed ?? 9);
    const { workers, jitter = 0, totalMs, queueMs = totalMs, workerMs = 3000 } = options;
    const { mode = "predictive" } = options;
    this.simulation = new Simulation({
      seed: options.seed ?? 3,
      timeouts: { queueMs, totalMs },
      rules: {
        name: "m",
        limits: { policy: "adaptive", maxBatchSize: MAX_BATCH_SIZE, maxWaitMs: 50 },
        workerMs,
        retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
        health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
      },
      backend: {
        workers,
        baseMs: BATCH_MS,
        perItemMs: 0,
        jitter,
        errorRate: 0,
        hangRate: 0,
        shortRate: 0,
        slowRate: options.slow?.rate ?? 0,
        slowFactor: options.slow?.factor ?? 1,
      },
      admission: { mode, tiers: 3, targetUtilization: 0.7, lastTierDepth: 100, firstTierDepth: 500 },
      wrap: (worker) => ({
        name: worker.name,
        run: async (batch, signal) => {
          if (this.#dead.has(worker.name)) return silence(signal);
          const reply = await worker.run(batch, signal);
          await this.#tarry((this.#pace(worker.name) - 1) * BATCH_MS);
          return reply;
        },
      }),
    });
    this.simulation.engine.watch({
      settled: ({ task, outcome, settledAt }) => {
        const visit = this.#byTask.get(task.id)!;
        visit.doneAt = settledAt!;
        visit.latencyMs = settledAt! - task.createdAt;
        visit.fate = outcome?.ok === true ? "answered" : "late";
      },
    });
  }

  /** Tasks per ms that the fleet can do. */
  get capacity(): number {
    const { workers, paces = Array.from({ length: workers }, () => 1) } = this.#options;
    return paces.reduce((sum, pace) => sum + 1 / pace, 0) * (MAX_BATCH_SIZE / BATCH_MS);
  }

  get now(): number {
    return this.simulation.clock.now() - this.simulation.startedAt;
  }

  /** These workers take batches and never answer, until they are revived. */
  kill(count: number): void {
    for (const { name } of this.simulation.backend.workers.slice(0, count)) this.#dead.add(name);
  }

  revive(): void {
    this.#dead.clear();
  }

  /** One visitor for each instant, of a tier drawn by the mix. */
  arrive(arrivals: readonly number[]): void {
    const [enterprise, paid] = this.#options.mix ?? [1, 0, 0];
    this.simulation.schedule(arrivals, (index) => {
      const draw = this.#random.next();
      const tier = draw < enterprise ? 0 : draw < enterprise + paid ? 1 : 2;
      const visit: Visit = {
        tier,
        firstAt: arrivals[index]!,
        attempts: 0,
        latencyMs: NaN,
        doneAt: NaN,
        fate: "waiting",
      };
      this.visits.push(visit);
      this.#knock(visit);
    });
  }

  /** Those of a tier (of all when left out) that first came between two instants. */
  between(from: number, to: number, tier?: number): Visit[] {
    return this.visits.filter(
      (visit) => visit.firstAt >= from && visit.firstAt < to && (tier === undefined || visit.tier === tier),
    );
  }

  async pass(ms: number): Promise<void> {
    await this.simulation.run(ms);
  }

  #pace(name: string): number {
    const which = this.simulation.backend.workers.findIndex((worker) => worker.name === name);
    return this.#options.paces?.[which] ?? 1;
  }

  async #tarry(ms: number): Promise<void> {
    const { clock } = this.simulation;
    if (ms > 0) await new Promise<void>((resolve) => clock.at(clock.now() + ms, resolve));
  }

  #knock(visit: Visit): void {
    visit.attempts++;
    const reply = this.simulation.knock(visit.tier);
    if ("id" in reply) this.#byTask.set(reply.id, visit);
    else if (visit.attempts > (this.#options.retries ?? 0)) visit.fate = "refused";
    else {
      const { clock } = this.simulation;
      clock.at(clock.now() + reply.waitMs, () => this.#knock(visit));
    }
  }
}

function silence(signal: AbortSignal): Promise<Reply> {
  return new Promise((resolve) => {
    const reply: Reply = { kind: "failed", message: "aborted", blame: "batch" };
    signal.addEventListener("abort", () => resolve(reply));
  });
}

export function count(visits: readonly Visit[], fate: Visit["fate"]): number {
  return visits.filter((visit) => visit.fate === fate).length;
}

/** Of those who came, the share that was answered in time. */
export function answered(visits: readonly Visit[]): number {
  return count(visits, "answered") / visits.length;
}

/** Of those who were let in, the share that was not answered in time. */
export function late(visits: readonly Visit[]): number {
  const lateOnes = count(visits, "late");
  return lateOnes / Math.max(1, lateOnes + count(visits, "answered"));
}

export function percentile(values: readonly number[], share: number): number {
  const sorted = values.filter((value) => !Number.isNaN(value)).toSorted((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))] ?? NaN;
}

/** Answers in a stretch of time, as a share of `capacity` (tasks per ms). */
export function goodput(crowd: Crowd, from: number, to: number, tier?: number): number {
  const start = crowd.simulation.startedAt;
  const done = crowd.visits.filter(
    (visit) =>
      visit.fate === "answered" &&
      visit.doneAt - start >= from &&
      visit.doneAt - start < to &&
      (tier === undefined || visit.tier === tier),
  );
  return done.length / (to - from) / crowd.capacity;
}
