/**
 * Runs a recorded trace under every combination of maxBatchSize, maxWaitMs and policy. The frontier holds those not
 * beaten in both the goal's latency quantile and batches per 1,000 requests. The best is the one on it with the fewest
 * batches that meets the goal; if none does, the fastest.
 */
import type { Limits, PolicyName } from "../../core/policy.ts";
import { Random } from "../../core/random.ts";
import { type Goal, meetsGoal, quantileOf } from "./planner.ts";
import type { LengthMix } from "./lengths.ts";
import { type Figures, type TrialFleet, runTrial, withCapacity } from "./trial.ts";
import type { Trace } from "./trace-file.ts";
import { replayed } from "./workload.ts";

export interface Candidate {
  readonly limits: Limits;
  readonly figures: Figures;
  readonly meets: boolean;
}

export interface Frontier {
  /** Fewest batches first. */
  readonly worthIt: readonly Candidate[];
  readonly best: Candidate;
  readonly tried: number;
}

const SHARES = [1, 1 / 2, 1 / 4] as const;
const WAITS_MS = [5, 10, 25, 50, 100] as const;

/** The largest batch and two smaller ones, each with each wait and policy. */
export function grid({ maxBatchSize, maxWaitMs }: Limits, policies: readonly PolicyName[]): Limits[] {
  const sizes = [...new Set(SHARES.map((share) => Math.max(1, Math.round(share * maxBatchSize))))];
  const waits = [...new Set([...WAITS_MS, maxWaitMs])].sort((one, other) => one - other);
  return policies.flatMap((policy) =>
    sizes.flatMap((size) =>
      // The latency policy never comes near the wait cap: one value is enough.
      (policy === "latency" ? [maxWaitMs] : waits).map((wait) => ({
        policy,
        maxBatchSize: size,
        maxWaitMs: wait,
      })),
    ),
  );
}

export interface ReplayOptions {
  readonly fleet: TrialFleet;
  readonly trace: Trace;
  readonly workers: number;
  readonly goal: Goal;
  readonly seed: number;
  /** Start of the trace that only settles the estimates. */
  readonly warmMs: number;
  /** How long the inputs are of which the trace does not say it. Omitted: all alike. */
  readonly lengths?: LengthMix | undefined;
  tell(limits: Limits, runs: number, all: number): void;
}

export async function replay(all: readonly Limits[], options: ReplayOptions): Promise<Frontier> {
  const candidates: Candidate[] = [];
  for (const limits of all) {
    options.tell(limits, candidates.length, all.length);
    const figures = await replayOnce(limits, options);
    candidates.push({ limits, figures, meets: meetsGoal(figures, options.goal) });
  }
  return frontierOf(candidates, options.goal);
}

export async function replayOnce(
  limits: Limits,
  options: Omit<ReplayOptions, "tell" | "goal">,
): Promise<Figures> {
  const { trace, workers, seed, warmMs, lengths } = options;
  const random = new Random(seed + 0.25);
  let arrived = 0;
  const traffic = {
    arrivals: replayed(trace.instants),
    durationMs: (trace.instants.at(-1) ?? 0) + 1,
    warmMs,
    shares: trace.tierNames.map(() => 1),
    tiers: trace.tiers,
    nextLength: lengths && (() => trace.lengths[arrived++]! || lengths.draw(random)),
  };
  const fleet = await withCapacity({ ...options.fleet, limits }, lengths, seed);
  return runTrial(fleet, traffic, workers, seed);
}

export function frontierOf(candidates: readonly Candidate[], goal: Goal): Frontier {
  const cost = ({ figures }: Candidate): number => figures.batchesPerThousand;
  const wait = ({ figures }: Candidate): number => quantileOf(figures, goal);
  // Refusing shortens queues; that must not put a candidate on the frontier.
  const unserved = ({ figures }: Candidate): number => figures.refused + figures.late;
  const fewest = Math.min(...candidates.map(unserved));
  const served = candidates.filter((one) => unserved(one) <= fewest + 0.001);
  const inOrder = served.toSorted((one, other) => cost(one) - cost(other) || wait(one) - wait(other));
  const worthIt: Candidate[] = [];
  for (const one of inOrder) {
    if (worthIt.length === 0 || wait(one) < wait(worthIt.at(-1)!)) worthIt.push(one);
  }
  const best = worthIt.find(({ meets }) => meets) ?? worthIt.at(-1)!;
  return { worthIt, best, tried: candidates.length };
}
