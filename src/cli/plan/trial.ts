/**
 * One run of a fleet on virtual time, and its figures. Admission, queues, dispatcher and policy are the serving code
 * (`simulation.ts`); workers take base + n·perTask ms, with optional jitter. The first `warmMs` is not counted, so that
 * estimates settle. TrialLatency is arrival to outcome plus `overheadMs` (HTTP and network, not simulated). Shares are
 * of the arrivals counted.
 */
import { Histogram } from "../bench/histogram.ts";
import { Random } from "../../core/random.ts";
import type { Limits } from "../../core/policy.ts";
import type { CapacityRules } from "../../gateway/admission/capacity-gate.ts";
import type { ServiceTime } from "./fit.ts";
import { Simulation } from "./simulation.ts";
import type { NextArrival } from "./workload.ts";

export interface TrialFleet {
  readonly limits: Limits;
  readonly service: ServiceTime;
  /** Standard deviation over mean of the service time. */
  readonly jitter: number;
  readonly timeouts: { readonly queueMs: number; readonly workerMs: number; readonly totalMs: number };
  readonly admission: Omit<CapacityRules, "model" | "queueMs" | "totalMs" | "tiers">;
  readonly maxQueued: number;
  readonly overheadMs: number;
}

export interface Traffic {
  readonly arrivals: NextArrival;
  /** Until the last arrival. */
  readonly durationMs: number;
  readonly warmMs: number;
  /** Share of arrivals by tier, best first; sums to 1. */
  readonly shares: readonly number[];
  /** The tier of each arrival, instead of drawing by shares. */
  readonly tiers?: Uint8Array;
}

export interface TrialLatency {
  readonly offered: number;
  /** Share not admitted. */
  readonly refused: number;
  /** Share admitted and not answered in time. */
  readonly late: number;
  readonly meanMs: number;
  readonly p50: number;
  readonly p95: number;
  readonly p99: number;
  readonly p999: number;
}

export interface Figures extends TrialLatency {
  readonly workers: number;
  readonly batches: number;
  /** Mean tasks per batch. */
  readonly fill: number;
  readonly batchesPerThousand: number;
  /** Arrival rate over the workers' capacity with full batches. */
  readonly load: number;
  readonly tiers: readonly TrialLatency[];
}

const MODEL = "plan";
const RETRY = { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 };
const HEALTH = { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 };
const NO_FAULTS = { errorRate: 0, hangRate: 0, shortRate: 0, slowRate: 0, slowFactor: 1 };

class Count {
  readonly latency = new Histogram();
  offered = 0;
  late = 0;

  get figures(): TrialLatency {
    const { latency, offered } = this;
    // Neither refused nor ended: the queue itself was full.
    const unanswered = offered - latency.count - this.late;
    return {
      offered,
      refused: offered === 0 ? 0 : unanswered / offered,
      late: offered === 0 ? 0 : this.late / offered,
      meanMs: latency.meanMs,
      p50: latency.percentileMs(50),
      p95: latency.percentileMs(95),
      p99: latency.percentileMs(99),
      p999: latency.percentileMs(99.9),
    };
  }
}

export async function runTrial(
  fleet: TrialFleet,
  traffic: Traffic,
  workers: number,
  seed: number,
): Promise<Figures> {
  const { durationMs, warmMs, shares } = traffic;
  const simulation = open(fleet, shares.length, workers, seed);
  const counts = [new Count(), ...shares.map(() => new Count())];
  const countedFrom = simulation.startedAt + warmMs;
  const [all] = counts as [Count];
  simulation.engine.watch({
    settled: ({ task, outcome, settledAt }) => {
      // The caller has its answer: the engine need not keep it.
      simulation.engine.delivered(task.id);
      if (task.createdAt < countedFrom) return;
      const own = counts[task.tier + 1]!;
      if (outcome?.ok === true) {
        const ms = settledAt! - task.createdAt + fleet.overheadMs;
        all.latency.record(ms);
        own.latency.record(ms);
      } else {
        all.late++;
        own.late++;
      }
    },
  });
  let [batches, tasks] = [0, 0];
  simulation.events.on("batch.settled", ({ size }) => {
    const now = simulation.clock.now();
    if (now < countedFrom || now > simulation.startedAt + durationMs) return;
    batches++;
    tasks += size;
  });
  const tierOf = drawTiers(traffic, seed);
  simulation.stream(traffic.arrivals, () => {
    const tier = tierOf();
    simulation.knock(tier);
    if (simulation.clock.now() < countedFrom) return;
    all.offered++;
    counts[tier + 1]!.offered++;
  });
  await simulation.run(durationMs + fleet.timeouts.totalMs);
  simulation.stop();
  const { limits, service } = fleet;
  const fullMs = service.baseMs + service.perTaskMs * limits.maxBatchSize;
  const capacity = (workers * limits.maxBatchSize) / fullMs;
  return {
    ...all.figures,
    workers,
    batches,
    fill: tasks / batches,
    batchesPerThousand: (1000 * batches) / tasks,
    load: all.offered / (durationMs - warmMs) / capacity,
    tiers: counts.slice(1).map(({ figures }) => figures),
  };
}

function open(fleet: TrialFleet, tiers: number, workers: number, seed: number): Simulation {
  const { limits, service, jitter, timeouts, maxQueued } = fleet;
  return new Simulation({
    seed,
    timeouts,
    rules: { name: MODEL, limits, workerMs: timeouts.workerMs, retry: RETRY, health: HEALTH },
    backend: { workers, baseMs: service.baseMs, perItemMs: service.perTaskMs, jitter, ...NO_FAULTS },
    admission: { ...fleet.admission, tiers },
    engine: { maxQueued, results: { ttlMs: 600_000, evictAfterRead: true, maxBytes: Infinity } },
  });
}

function drawTiers({ shares, tiers }: Traffic, seed: number): () => number {
  if (tiers !== undefined) {
    let index = 0;
    return () => tiers[index++]!;
  }
  if (shares.length === 1) return () => 0;
  // A separate generator: the same arrivals have the same tiers in every fleet.
  const random = new Random(seed + 0.5);
  return () => {
    let left = random.next();
    let tier = 0;
    while (tier < shares.length - 1 && (left -= shares[tier]!) >= 0) tier++;
    return tier;
  };
}
