/**
 * How fast `ferry plan` simulates: requests per second of CPU, whole process, for fleets as people ask for.
 *
 *   node bench/plan.ts
 *
 * Each line is one run of the planner's own trial, gate and tiers included; the first one also pays for V8's
 * learning. CPU time counts all threads, so the garbage collector's too. Goal: 200,000.
 */
import { parseService } from "../src/cli/plan/fit.ts";
import { runTrial } from "../src/cli/plan/trial.ts";
import { burstArrivals, poissonArrivals } from "../src/cli/plan/workload.ts";

const SECONDS = 20;
const cases = [
  { name: "10k/s, 46 × 200 ms (cold)", rate: 10_000, workers: 46, service: "200ms" },
  { name: "10k/s, 46 × 200 ms", rate: 10_000, workers: 46, service: "200ms" },
  { name: "10k/s, 33 × 200 ms, 95 % load", rate: 10_000, workers: 33, service: "200ms" },
  { name: "10k/s, three tiers", rate: 10_000, workers: 46, service: "200ms", shares: [0.1, 0.3, 0.6] },
  { name: "3k/s, 7 × 100 ms", rate: 3000, workers: 7, service: "100ms" },
  { name: "5k/s, 12 × (36 + n) ms", rate: 5000, workers: 12, service: "36+1n" },
  { name: "10k/s in crowds, 64 × 200 ms", rate: 10_000, workers: 64, service: "200ms", burst: 2.5 },
  { name: "10k/s, 20 × 200 ms, refusing", rate: 10_000, workers: 20, service: "200ms" },
];

let [requests, cpuSeconds] = [0, 0];
for (const { name, rate, workers, service, shares = [1], burst } of cases) {
  const durationMs = SECONDS * 1000;
  const perMs = rate / 1000;
  const fleet = {
    limits: { policy: "adaptive", maxBatchSize: 64, maxWaitMs: 50 },
    service: parseService(service)!,
    jitter: 0,
    timeouts: { queueMs: 2000, workerMs: 3000, totalMs: 4000 },
    admission: { mode: "predictive", targetUtilization: 0.7, lastTierDepth: 100, firstTierDepth: 500 },
    maxQueued: 100_000,
    overheadMs: 0,
  } as const;
  const arrivals =
    burst === undefined ? poissonArrivals(perMs, durationMs, 1) : burstArrivals(perMs, burst, durationMs, 1);
  const before = process.cpuUsage();
  const figures = await runTrial(fleet, { arrivals, durationMs, warmMs: 0, shares }, workers, 1);
  const { user, system } = process.cpuUsage(before);
  const seconds = (user + system) / 1e6;
  requests += figures.offered;
  cpuSeconds += seconds;
  process.stdout.write(
    `${name.padEnd(34)} ${perSecond(figures.offered, seconds)}   p99 ${figures.p99.toFixed(0)} ms, refused ` +
      `${(100 * figures.refused).toFixed(1)} %\n`,
  );
}
process.stdout.write(`${"all".padEnd(34)} ${perSecond(requests, cpuSeconds)}\n`);

function perSecond(count: number, seconds: number): string {
  return `${Math.round(count / seconds)
    .toLocaleString("en")
    .padStart(9)} requests per CPU second`;
}
