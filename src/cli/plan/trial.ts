/**
 * One run of a fleet on virtual time, and its figures. Admission, queues, dispatcher and policy are the serving code
 * (`simulation.ts`); workers take the time of `fit.ts`, with optional jitter. The first `warmMs` is not counted, so that
 * estimates settle. TrialLatency is arrival to outcome plus `overheadMs` (HTTP and network, not simulated). Shares are
 * of the arrivals counted.
 */
import { Histogram } from "../bench/histogram.ts";
import { Random } from "../../core/random.ts";
import type { Limits } from "../../core/policy.ts";
import type { CapacityRules } from "../../gateway/admission/capacity-gate.ts";
import type { ModelRules } from "../../dispatch/model-rules.ts";
import { capacityOf, dependsOnLength, type ServiceTime, serviceMs } from "./fit.ts";
import { inputOf, type LengthMix } from "./lengths.ts";
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
  /** Default: `off`. */
  readonly lengths?: ModelRules["lengths"];
  /** Tasks per ms of one worker with full batches, where that depends on lengths (`withCapacity`). */
  readonly workerPerMs?: number;
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
  /** The length of each arrival, in tokens. Default: all alike. */
  readonly nextLength?: (() => number) | undefined;
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
  /** Computed cells ÷ useful cells: rows × longest over the sum of lengths. 1 where all are alike. */
  readonly padding: number;
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
  const { durationMs, warmMs, shares, nextLength } = traffic;
  let [cells, useful] = [0, 0];
  const simulation = open(fleet, shares.length, workers, seed, (rows, longest, total) => {
    if (simulation.clock.now() < countedFrom) return;
    cells += rows * longest;
    useful += total;
  });
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
    if (nextLength === undefined) simulation.knock(tier);
    else simulation.knock(tier, undefined, inputOf(nextLength()));
    if (simulation.clock.now() < countedFrom) return;
    all.offered++;
    counts[tier + 1]!.offered++;
  });
  await simulation.run(durationMs + fleet.timeouts.totalMs);
  simulation.stop();
  const { limits, service, workerPerMs = capacityOf(service, limits.maxBatchSize) } = fleet;
  return {
    ...all.figures,
    workers,
    batches,
    fill: tasks / batches,
    batchesPerThousand: (1000 * batches) / tasks,
    load: all.offered / (durationMs - warmMs) / (workers * workerPerMs),
    padding: useful === 0 ? 1 : cells / useful,
    tiers: counts.slice(1).map(({ figures }) => figures),
  };
}

/** Counted after the first hundred. */
const SATURATED_BATCHES = 400;
const SATURATED_WARM_BATCHES = 100;
/** Waiting tasks, in full batches: enough to choose from, and less than a policy looks at. */
const SATURATED_DEPTH = 8;

/** The fleet with its `workerPerMs`, where that depends on lengths. */
export async function withCapacity(
  fleet: TrialFleet,
  mix: LengthMix | undefined,
  seed: number,
): Promise<TrialFleet> {
  if (mix === undefined || !dependsOnLength(fleet.service)) return fleet;
  return { ...fleet, workerPerMs: await saturatedPerMs(fleet, mix, seed) };
}

/** Tasks per ms of one worker while always as many wait. */
async function saturatedPerMs(fleet: TrialFleet, mix: LengthMix, seed: number): Promise<number> {
  const { maxBatchSize } = fleet.limits;
  const endless = { ...fleet.timeouts, queueMs: Number.MAX_SAFE_INTEGER, totalMs: Number.MAX_SAFE_INTEGER };
  const admission = { ...fleet.admission, mode: "off" } as const;
  const simulation = open({ ...fleet, timeouts: endless, admission, maxQueued: Infinity }, 1, 1, seed);
  const random = new Random(seed + 0.25);
  const put = (count: number): void => {
    for (let task = 0; task < count; task++) simulation.knock(0, undefined, inputOf(mix.draw(random)));
  };
  simulation.engine.watch({ settled: ({ task }) => simulation.engine.delivered(task.id) });
  let [batches, tasks, from, until] = [0, 0, 0, 0];
  simulation.events.on("batch.settled", ({ size }) => {
    if (batches >= SATURATED_BATCHES) return;
    until = simulation.clock.now();
    if (++batches <= SATURATED_WARM_BATCHES) from = until;
    else tasks += size;
    simulation.clock.at(until, () => put(size));
  });
  put(SATURATED_DEPTH * maxBatchSize);
  const { workerMs } = fleet.timeouts;
  for (let waited = 0; waited < SATURATED_BATCHES; waited++) {
    await simulation.run(workerMs);
    if (batches === SATURATED_BATCHES) break;
  }
  simulation.stop();
  return tasks / (until - from);
}

function open(
  fleet: TrialFleet,
  tiers: number,
  workers: number,
  seed: number,
  ran?: (rows: number, longest: number, total: number) => void,
): Simulation {
  const { limits, service, jitter, timeouts, maxQueued, lengths = "off" } = fleet;
  const batchMs = (rows: number, longest: number, total: number): number => {
    ran?.(rows, longest, total);
    return serviceMs(service, rows, longest, total);
  };
  return new Simulation({
    seed,
    timeouts,
    rules: { name: MODEL, limits, lengths, workerMs: timeouts.workerMs, retry: RETRY, health: HEALTH },
    backend: {
      workers,
      baseMs: service.baseMs,
      perItemMs: service.perTaskMs,
      batchMs: dependsOnLength(service) ? batchMs : undefined,
      jitter,
      ...NO_FAULTS,
    },
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
