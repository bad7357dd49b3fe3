/**
 * One cell of a table: a fleet of simulated workers under Poisson arrivals at a share of what it can do, on
 * virtual time with the real engine, dispatcher, policy and estimates. What it measured comes back as figures.
 */
import type { Clock } from "../../src/app/clock.ts";
import type { PolicyName } from "../../src/core/policy.ts";
import { Random } from "../../src/core/random.ts";
import { capacityPerMs, type BoundedFleet } from "../../src/cli/plan/bounds.ts";
import { Simulation } from "../../src/cli/plan/simulation.ts";
import { poisson } from "../../src/cli/plan/workload.ts";

export interface Trial extends BoundedFleet {
  /** Arrivals as a share of the fleet's capacity. */
  readonly load: number;
  readonly policy?: PolicyName;
  /** Arrivals that count; those of the warm-up come before. */
  readonly requests: number;
  readonly seed: number;
  /** A share of the batches takes so many times as long. */
  readonly slow?: { readonly rate: number; readonly factor: number };
  /** The dispatcher's alarms ring like those of a process: on whole milliseconds, up to one late. */
  readonly lateTimers?: boolean;
}

export interface Figures {
  /** Tasks per ms that came. */
  readonly perMs: number;
  /** In ms, ascending, of everybody who came after the warm-up. */
  readonly latencies: Float64Array;
  readonly waitMs: number;
  /** Of the batches that left after the warm-up. */
  readonly sizes: readonly number[];
  /** The share of the tasks that rode in a second batch because their first was overdue. */
  readonly rodeAgain: number;
  /** The share of the batches with nobody but those in them. */
  readonly onlyAgain: number;
}

/** The arrival rate is learned in half a second, the service time in some twenty batches. */
const WARM_UP_MS = 1000;
const DEADLINE_MS = 5000;

export async function measure(trial: Trial): Promise<Figures> {
  const { workers, baseMs, perTaskMs, maxBatchSize, seed, policy = "adaptive" } = trial;
  const perMs = trial.load * capacityPerMs(trial);
  const durationMs = WARM_UP_MS + trial.requests / perMs;
  const simulation = new Simulation({
    seed,
    timeouts: { queueMs: DEADLINE_MS, totalMs: DEADLINE_MS },
    rules: {
      name: "m",
      limits: { policy, maxBatchSize, maxWaitMs: 50 },
      workerMs: DEADLINE_MS,
      retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
    },
    backend: {
      workers,
      baseMs,
      perItemMs: perTaskMs,
      jitter: 0,
      errorRate: 0,
      hangRate: 0,
      shortRate: 0,
      slowRate: trial.slow?.rate ?? 0,
      slowFactor: trial.slow?.factor ?? 1,
    },
    ...(trial.lateTimers === true && { dispatcherClock: (clock) => ringingLate(clock, new Random(seed)) }),
    engine: { results: { ttlMs: 1, evictAfterRead: false, maxBytes: Infinity } },
  });
  const from = simulation.startedAt + WARM_UP_MS;
  const latencies: number[] = [];
  const sizes: number[] = [];
  const putBack = new Set<string>();
  let [waitMs, started, rodeAgain, onlyAgain] = [0, 0, 0, 0];
  simulation.engine.watch({
    settled: ({ task, settledAt }) => {
      if (task.createdAt >= from) latencies.push(settledAt! - task.createdAt);
    },
  });
  simulation.events.on("task.retried", ({ id }) => putBack.add(id));
  simulation.events.on("batch.started", ({ batch, tasks }) => {
    if (batch.startedAt < from) return;
    let again = 0;
    for (const { task } of tasks) {
      if (putBack.has(task.id)) again++;
      else {
        waitMs += batch.startedAt - task.createdAt;
        started++;
      }
    }
    rodeAgain += again;
    if (again === tasks.length) onlyAgain++;
    sizes.push(tasks.length);
  });
  const arrivals = atRate(perMs, poisson(perMs, durationMs, seed + 1_000_003), durationMs);
  simulation.schedule(arrivals, () => void simulation.put());
  await simulation.run(durationMs + DEADLINE_MS);
  simulation.stop();
  const came = arrivals.filter((at) => at >= WARM_UP_MS).length;
  return {
    perMs,
    latencies: Float64Array.from(latencies).sort(),
    waitMs: waitMs / started,
    sizes,
    rodeAgain: rodeAgain / came,
    onlyAgain: onlyAgain / sizes.length,
  };
}

function ringingLate(clock: Clock, random: Random): Clock {
  return {
    now: () => clock.now(),
    wall: () => clock.wall(),
    at: (time, ring) => clock.at(Math.ceil(time) + random.next(), ring),
  };
}

/** Stretched after the warm-up so that exactly as many come as the load says: where they fall remains chance. */
function atRate(perMs: number, arrivals: readonly number[], durationMs: number): number[] {
  const counted = arrivals.filter((at) => at >= WARM_UP_MS).length;
  const stretch = counted / perMs / (durationMs - WARM_UP_MS);
  return arrivals.map((at) => (at < WARM_UP_MS ? at : WARM_UP_MS + (at - WARM_UP_MS) * stretch));
}

export function quantile(ascending: Float64Array, share: number): number {
  return ascending[Math.min(ascending.length - 1, Math.ceil(share * ascending.length) - 1)]!;
}

export function mean(values: readonly number[]): number {
  return values.reduce((sum, value) => sum + value, 0) / values.length;
}
