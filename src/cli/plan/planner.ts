/**
 * How many workers a rate and a goal need: runs the same arrivals through fleets of different size.
 *
 *   meets        the goal's quantile of answered requests is within the goal, and at most one in a thousand was
 *                refused or late
 *   survives     with one worker fewer the goal is still met
 *   recommended  the smallest fleet with load ≤ 0.70 that meets the goal and survives
 *   knee         the smallest fleet that meets the goal at all
 *
 * Both are found by search: latency falls with every worker, within the noise of one run. A run has 100,000 requests by
 * default, at least 10 s (60 s with bursts), at most an hour. No size is run twice.
 *
 * Where time depends on the inputs' length, a worker's capacity is what it does while eight full batches wait, and
 * bounds use that no batch computes fewer cells than its inputs have tokens. Runs then start slowly: a server that is
 * loaded beyond what order of arrival can do before it has learned to group works off that backlog for seconds.
 */
import { leastLatency } from "./bounds.ts";
import type { PolicyName } from "../../core/policy.ts";
import { Random } from "../../core/random.ts";
import { atLength, capacityOf, serviceMs } from "./fit.ts";
import { type LengthMix, sampleLengths } from "./lengths.ts";
import { type Figures, type TrialFleet, runTrial } from "./trial.ts";
import { burstArrivals, poissonArrivals, slowStart, slowStartMs } from "./workload.ts";

export interface Goal {
  readonly name: string;
  /** 0 to 1. */
  readonly share: number;
  readonly ms: number;
}

export interface PlanRequest {
  readonly perSecond: number;
  readonly goal: Goal;
  readonly fleet: TrialFleet;
  /** Peak rate over mean rate; omitted: no bursts. */
  readonly burst?: number;
  readonly tiers: readonly { readonly name: string; readonly share: number }[];
  /** Omitted: all inputs have the same length. */
  readonly lengths?: LengthMix | undefined;
  readonly seed: number;
  /** Simulated; omitted: by the number of requests. */
  readonly durationMs?: number;
}

export interface PlanRow extends Figures {
  readonly meets: boolean;
  /** With one worker fewer; undefined where that leaves none. */
  readonly oneFewer: (Figures & { readonly meets: boolean }) | undefined;
}

export interface Plan {
  readonly rows: readonly PlanRow[];
  readonly recommended: PlanRow;
  /** Undefined where the number of workers was given. */
  readonly knee: PlanRow | undefined;
  readonly policies: readonly { readonly policy: PolicyName; readonly figures: Figures }[];
  /** Lower bound of the goal's quantile for any policy. */
  readonly boundMs: number;
}

export class Impossible extends Error {}

export const TARGET_LOAD = 0.7;
const MOST_UNSERVED = 0.001;
const REQUESTS = 100_000;
const SHORTEST_MS = 10_000;
const SHORTEST_BURSTS_MS = 60_000;
const LONGEST_MS = 3_600_000;
const WARM_MS = 2000;
const LONGEST_FILL_MS = 30_000;
/** A slow model too must have completed some batches before measuring. */
const WARM_BATCHES = 10;
const SAMPLED_LENGTHS = 10_000;
const POLICIES: readonly PolicyName[] = ["latency", "adaptive", "eco"];

export class Planner {
  readonly ask: PlanRequest;
  readonly durationMs: number;
  readonly warmMs: number;
  readonly #tell: (workers: number, runs: number) => void;
  readonly #runs = new Map<string, Promise<Figures>>();
  /** Ascending, in tokens; a single 0 where all inputs have the same length. */
  readonly #lengths: readonly number[];
  readonly #meanLength: number;

  constructor(ask: PlanRequest, tell: (workers: number, runs: number) => void = () => {}) {
    this.ask = ask;
    this.#tell = tell;
    const { service, limits } = ask.fleet;
    const lengths = ask.lengths === undefined ? [0] : sampleLengths(ask.lengths, SAMPLED_LENGTHS, 1);
    this.#lengths = lengths.sort((one, other) => one - other);
    this.#meanLength = lengths.reduce((sum, length) => sum + length, 0) / lengths.length;
    const slowestMs = serviceMs(service, limits.maxBatchSize, ask.lengths?.longest);
    this.warmMs = Math.max(WARM_MS, WARM_BATCHES * slowestMs);
    const least = ask.burst === undefined ? SHORTEST_MS : SHORTEST_BURSTS_MS;
    const usual = Math.min(LONGEST_MS, Math.max(least, (1000 * REQUESTS) / ask.perSecond));
    const wanted = ask.durationMs ?? usual;
    this.durationMs = this.warmMs + wanted;
  }

  /** Arrivals, tasks per ms. */
  get perMs(): number {
    return this.ask.perSecond / 1000;
  }

  boundMs(workers: number): number {
    const { service, limits, overheadMs } = this.ask.fleet;
    const { maxBatchSize } = limits;
    const fleet = { workers, maxBatchSize, ...atLength(service, this.#meanLength) };
    const fastest = atLength(service, this.#lengths[0]!);
    const least = leastLatency(this.ask.goal.share, fleet, this.perMs, fastest);
    return Math.max(least + overheadMs, this.#aloneMs());
  }

  /** The goal's quantile of what inputs take that each have a worker to themselves. */
  #aloneMs(): number {
    const { goal, fleet } = this.ask;
    const length = this.#lengths[Math.floor(goal.share * this.#lengths.length)]!;
    return serviceMs(fleet.service, 1, length) + fleet.overheadMs;
  }

  /** Tasks per ms of one worker with full batches. */
  get #workerPerMs(): number {
    const { service, limits, workerPerMs } = this.ask.fleet;
    return workerPerMs ?? capacityOf(service, limits.maxBatchSize);
  }

  run(workers: number, policy = this.ask.fleet.limits.policy): Promise<Figures> {
    const name = `${policy} ${workers}`;
    let figures = this.#runs.get(name);
    if (figures === undefined) {
      this.#tell(workers, this.#runs.size);
      figures = this.#run(workers, policy);
      this.#runs.set(name, figures);
    }
    return figures;
  }

  #run(workers: number, policy: PolicyName): Promise<Figures> {
    const { ask } = this;
    const { burst, seed } = ask;
    const { lengths } = ask;
    const fillMs = this.#fillMs(workers);
    const slowMs = lengths === undefined ? 0 : this.warmMs;
    const extraMs = fillMs + slowStartMs(slowMs);
    const [durationMs, warmMs] = [this.durationMs + extraMs, this.warmMs + extraMs];
    const dense =
      burst === undefined
        ? poissonArrivals(this.perMs, this.durationMs + fillMs, seed)
        : burstArrivals(this.perMs, burst, this.durationMs + fillMs, seed);
    const arrivals = slowStart(dense, slowMs);
    const fleet = { ...ask.fleet, limits: { ...ask.fleet.limits, policy } };
    const shares = ask.tiers.map(({ share }) => share);
    // A separate generator: the same arrivals have the same lengths in every fleet.
    const random = new Random(seed + 0.25);
    const nextLength = lengths && (() => lengths.draw(random));
    return runTrial(fleet, { arrivals, durationMs, warmMs, shares, nextLength }, workers, seed);
  }

  /** An overloaded fleet refuses nothing until its queue is full: measuring starts that much later. */
  #fillMs(workers: number): number {
    const load = this.perMs / (workers * this.#workerPerMs);
    return load > 1 ? Math.min(LONGEST_FILL_MS, this.ask.fleet.timeouts.queueMs / (load - 1)) : 0;
  }

  meets(figures: Figures): boolean {
    return meetsGoal(figures, this.ask.goal);
  }

  async row(workers: number): Promise<PlanRow> {
    const figures = await this.run(workers);
    const fewer = workers > 1 ? await this.run(workers - 1) : undefined;
    return {
      ...figures,
      meets: this.meets(figures),
      oneFewer: fewer && { ...fewer, meets: this.meets(fewer) },
    };
  }

  async plan(given?: number): Promise<Plan> {
    this.#refuseImpossible();
    const chosen = given ?? (await this.#recommend());
    const knee = given === undefined ? await this.#knee(chosen) : undefined;
    const rows: PlanRow[] = [];
    for (const workers of around(knee ?? chosen, chosen)) rows.push(await this.row(workers));
    const policies = [];
    for (const policy of POLICIES) policies.push({ policy, figures: await this.run(chosen, policy) });
    return {
      rows,
      recommended: rows.find(({ workers }) => workers === chosen)!,
      knee: rows.find(({ workers }) => workers === knee),
      policies,
      boundMs: this.boundMs(chosen),
    };
  }

  /** The recommended fleet, or the given one; undefined if none meets the goal. */
  async only(given?: number): Promise<Figures | undefined> {
    try {
      return await this.run(given ?? (await this.#recommend()));
    } catch (error) {
      if (error instanceof Impossible) return undefined;
      throw error;
    }
  }

  #refuseImpossible(): void {
    const { goal } = this.ask;
    const aloneMs = this.#aloneMs();
    if (goal.ms < aloneMs) {
      throw new Impossible(
        `${goal.name} of ${ms(goal.ms)} is impossible: a batch of one alone takes ${ms(aloneMs)}; ` +
          `a goal above that is needed, or a faster model`,
      );
    }
  }

  /** With fewer, the load is over 0.70 or the bound above the goal. */
  #least(): number {
    let workers = Math.max(1, Math.ceil(this.perMs / (TARGET_LOAD * this.#workerPerMs) - 1e-9));
    while (workers < this.#most() && this.boundMs(workers) > this.ask.goal.ms) workers++;
    return workers;
  }

  /** With more, every request has a worker to itself and nothing improves. */
  #most(): number {
    const alone = this.perMs * serviceMs(this.ask.fleet.service, 1, this.#meanLength);
    const full = this.perMs / this.#workerPerMs;
    return Math.ceil(2 * Math.max(alone, full) + 6 * Math.sqrt(alone) + 8);
  }

  async #recommend(): Promise<number> {
    const least = this.#least();
    if (await this.#will(least)) return least;
    // Growing steps up, then bisect between the last two.
    let [bad, step] = [least, Math.max(1, Math.round(least / 16))];
    for (;;) {
      const good = Math.min(this.#most(), bad + step);
      if (await this.#will(good)) return this.#between(bad, good, (workers) => this.#will(workers));
      if (good === this.#most()) throw await this.#tooTight(good);
      bad = good;
      step *= 2;
    }
  }

  /** Meets the goal, also with one worker down. */
  async #will(workers: number): Promise<boolean> {
    if (!this.meets(await this.run(workers))) return false;
    return workers > 1 && this.meets(await this.run(workers - 1));
  }

  /** Bisects for the smallest size that passes; `bad` does not, `good` does. */
  async #between(bad: number, good: number, does: (workers: number) => Promise<boolean>): Promise<number> {
    while (good - bad > 1) {
      const middle = (bad + good) >> 1;
      if (await does(middle)) good = middle;
      else bad = middle;
    }
    return good;
  }

  #knee(chosen: number): Promise<number> {
    const least = Math.floor(this.perMs / this.#workerPerMs);
    const bad = Math.min(chosen - 1, Math.max(0, least - 1));
    return this.#between(bad, chosen, async (workers) => this.meets(await this.run(workers)));
  }

  async #tooTight(workers: number): Promise<Impossible> {
    const { goal, fleet } = this.ask;
    const best = quantileOf(await this.run(workers), goal);
    const other =
      fleet.limits.policy !== "latency" && this.meets(await this.run(workers, "latency"))
        ? "; --policy latency meets it"
        : "; a larger goal is needed, or a faster model";
    return new Impossible(
      `${goal.name} of ${ms(goal.ms)} is out of reach: with ${workers} workers, more than which help ` +
        `nobody, it is ${ms(best)} (policy ${fleet.limits.policy})${other}`,
    );
  }
}

export function meetsGoal(figures: Figures, goal: Goal): boolean {
  return quantileOf(figures, goal) <= goal.ms && figures.refused + figures.late <= MOST_UNSERVED;
}

export function quantileOf({ p50, p95, p99, p999 }: Figures, { share }: Goal): number {
  return share === 0.5 ? p50 : share === 0.95 ? p95 : share === 0.99 ? p99 : p999;
}

/** Sizes to show: from just below the knee to just above the choice, at most seven. */
export function around(knee: number, chosen: number): number[] {
  const above = chosen + Math.max(1, Math.round(chosen / 10));
  const between = Math.max(0, chosen - knee - 1);
  const shown = new Set([Math.max(1, knee - 1), knee, chosen, above]);
  const steps = Math.min(3, between);
  for (let step = 1; step <= steps; step++)
    shown.add(knee + Math.round((step * (chosen - knee)) / (steps + 1)));
  return [...shown].sort((one, other) => one - other);
}

function ms(value: number): string {
  return `${Number(value.toPrecision(3))} ms`;
}
