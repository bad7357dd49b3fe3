/**
 * What batches of inputs of similar length are worth: dispatcher, engine, policy and admission on virtual time, one
 * worker with the batch times of one H200 (bert-base shape, bf16, CUDA graphs; medians), Poisson arrivals, batches of
 * at most 64. Nothing depends on this machine's speed.
 *
 *   node bench/lengths.ts                          # everything: `mixed` and `chat`, three seeds; minutes
 *   node bench/lengths.ts --mix mixed --seeds 1    # to see what a change of the policy does
 *   node bench/lengths.ts --only capacity          # one of capacity, rates, low, predictive
 *   node bench/lengths.ts --lengths 16,64,512      # these classes instead of auto
 *   node bench/lengths.ts --equal                  # all inputs of 128 tokens: grouping must change nothing
 *
 *   capacity     the highest rate with p99 ≤ 60 ms and at most 0.1 % refused or late, to 1 %, without admission; and
 *                the bound: what the worker does per second with all inputs known and sorted, in full batches
 *   rates        p50 / p99 at fixed rates
 *   low          p99 at 50, 35 and 20 % of what order of arrival can do: grouping must not cost more than 5 %
 *   predictive   the same capacity with admission: predictive
 *
 * Figures are the median of the seeds with their range. The first fifth of the tasks is not counted: in it the server
 * starts knowing nothing and learns what its batches cost, in the first second at 2,000/s. Overtaking: from the first
 * later task that leaves before this one until it leaves itself, the longest of all tasks. Padding: computed cells ÷ useful cells.
 */
import { parseArgs } from "node:util";
import { median } from "../src/core/median.ts";
import { Random } from "../src/core/random.ts";
import type { ModelRules } from "../src/dispatch/model-rules.ts";
import { inputOf, type LengthMix, parseLengths, sampleLengths } from "../src/cli/plan/lengths.ts";
import { Simulation } from "../src/cli/plan/simulation.ts";
import { poissonArrivals } from "../src/cli/plan/workload.ts";

const BATCH = 64;
const GOAL_MS = 60;
const MOST_UNSERVED = 0.001;
const RATES = [2000, 4000, 6000, 12_000, 16_000, 20_000];
const LOW = [0.5, 0.35, 0.2];
const MOST_AT_LOW = 1.05;
const LEAST_GAIN = 3;
const LEAST_OF_BOUND = 0.8;

/** Milliseconds by rows and padded length. */
const LENGTHS = [16, 32, 64, 128, 256, 512];
const ROWS = [1, 8, 16, 32, 64];
const H200_MS = [
  [0.525, 0.588, 0.599, 0.616, 0.664, 0.791],
  [0.563, 0.643, 0.706, 0.853, 1.301, 2.254],
  [0.625, 0.75, 0.896, 1.249, 2.119, 4.141],
  [0.795, 0.934, 1.291, 2.041, 3.862, 8.056],
  [1.063, 1.411, 2.165, 3.718, 7.528, 15.795],
];
const BETWEEN_MS = 0.3;

const { values } = parseArgs({
  options: {
    mix: { type: "string", multiple: true },
    seeds: { type: "string", default: "3" },
    tasks: { type: "string", default: "100000" },
    only: { type: "string", multiple: true },
    lengths: { type: "string" },
    equal: { type: "boolean", default: false },
  },
});
const TASKS = Number(values.tasks);
const WARM = 0.2;
/** At the start it may learn at a rate that any setting can serve, or a backlog of the first moments is what counts. */
const [LEARN_MS, LEARN_RATE] = [1000, 2000];
const SEEDS = Array.from({ length: Number(values.seeds) }, (_, seed) => seed + 1);
const GROUPED = values.lengths === undefined ? "auto" : values.lengths.split(",").map(Number);
const PARTS = values.only ?? ["capacity", "rates", "low", "predictive"];

type Lengths = NonNullable<ModelRules["lengths"]>;

interface Trial {
  readonly rate: number;
  readonly mix: LengthMix;
  readonly lengths: Lengths;
  readonly seed: number;
  readonly admission?: "off" | "predictive";
}

interface Outcome {
  readonly p50: number;
  readonly p99: number;
  readonly unserved: number;
  readonly fill: number;
  readonly padding: number;
  readonly overtakenMs: number;
}

const OVERLOADED: Outcome = {
  p50: Infinity,
  p99: Infinity,
  unserved: NaN,
  fill: BATCH,
  padding: NaN,
  overtakenMs: NaN,
};

function paddedTo(longest: number): number {
  return LENGTHS.find((length) => length >= longest)!;
}

/** Between measured rows it is interpolated; a length is rounded up, as the CUDA graphs are. */
function h200Ms(rows: number, longest: number): number {
  const column = LENGTHS.indexOf(paddedTo(longest));
  const above = ROWS.findIndex((measured) => measured >= rows);
  const [most, at] = [ROWS[above]!, H200_MS[above]![column]!];
  if (most === rows) return at + BETWEEN_MS;
  const [least, from] = [ROWS[above - 1]!, H200_MS[above - 1]![column]!];
  return from + ((at - from) * (rows - least)) / (most - least) + BETWEEN_MS;
}

let [trials, tasksRun] = [0, 0];

async function run({ rate, mix, lengths, seed, admission = "off" }: Trial): Promise<Outcome> {
  trials++;
  const durationMs = (1000 * TASKS) / rate;
  const timeouts = { queueMs: 2000, totalMs: 4000 };
  const overtaking = new Overtaking();
  let [batches, rowsRun, cells, useful] = [0, 0, 0, 0];
  const simulation = new Simulation({
    seed,
    timeouts,
    rules: {
      name: "lengths",
      limits: { policy: "adaptive", maxBatchSize: BATCH, maxWaitMs: 50 },
      lengths,
      workerMs: 3000,
      retry: { max: 3, baseMs: 50, maxMs: 1000, budget: 0.1 },
      health: { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 },
    },
    backend: {
      workers: 1,
      baseMs: 0,
      perItemMs: 0,
      batchMs: (rows, longest, total) => {
        if (simulation.clock.now() >= countedFrom) {
          batches++;
          rowsRun += rows;
          cells += rows * paddedTo(longest);
          useful += total;
        }
        return h200Ms(rows, longest);
      },
    },
    admission: { mode: admission, tiers: 1, targetUtilization: 0.7, lastTierDepth: 100, firstTierDepth: 500 },
    engine: { maxQueued: TASKS, results: { ttlMs: 600_000, evictAfterRead: true, maxBytes: Infinity } },
    wrap: (worker) => ({
      name: worker.name,
      queues: true,
      run: (batch, signal, begun) => {
        overtaking.leave(batch.tasks, simulation.clock.now());
        return worker.run(batch, signal, begun);
      },
    }),
  });
  const countedFrom = simulation.startedAt + WARM * durationMs;
  const latencies: number[] = [];
  let [offered, counted, settled] = [0, 0, 0];
  simulation.engine.watch({
    settled: ({ task, outcome, settledAt }) => {
      settled++;
      simulation.engine.delivered(task.id);
      if (outcome?.ok === true && task.createdAt >= countedFrom) latencies.push(settledAt! - task.createdAt);
    },
  });
  // Separate generators: the same arrivals have the same lengths under every setting.
  const random = new Random(seed + 0.5);
  let refused = 0;
  const quiet = new Random(seed + 0.25);
  simulation.stream(poissonArrivals(rate / 1000, durationMs, seed), () => {
    const learning = simulation.clock.now() < simulation.startedAt + LEARN_MS;
    if (learning && quiet.next() > LEARN_RATE / rate) return;
    offered++;
    if (simulation.clock.now() >= countedFrom) counted++;
    if (!("id" in simulation.knock(0, "anonymous", inputOf(mix.draw(random))))) refused++;
  });
  const sliceMs = 100;
  for (let ms = 0; ms < durationMs + timeouts.totalMs; ms += sliceMs) {
    await simulation.run(sliceMs);
    const waiting = offered - refused - settled;
    if (ms >= durationMs && waiting === 0) break;
    // A second of arrivals waits: no later one comes near the goal.
    if (waiting > Math.max(rate, BATCH)) {
      tasksRun += offered;
      simulation.stop();
      return OVERLOADED;
    }
  }
  simulation.stop();
  tasksRun += offered;
  latencies.sort((one, other) => one - other);
  const quantile = (share: number): number => latencies[Math.floor(share * latencies.length)] ?? NaN;
  return {
    p50: quantile(0.5),
    p99: quantile(0.99),
    unserved: (counted - latencies.length) / counted,
    fill: rowsRun / batches,
    padding: cells / useful,
    overtakenMs: overtaking.longestMs,
  };
}

/**
 * How long later tasks went on leaving before a waiting one: from the first that did to the last. What comes after that
 * is waiting in turn. Tasks are numbered in order of arrival; there is one tier and one tenant.
 */
class Overtaking {
  /** Where the highest number that has left rose: to what, and when. */
  readonly #numbers: number[] = [];
  readonly #times: number[] = [];
  /** The highest of each batch, and when it left. */
  readonly #batches: { readonly highest: number; readonly at: number }[] = [];
  longestMs = 0;

  leave(tasks: readonly { readonly id: string }[], at: number): void {
    let highest = 0;
    for (const { id } of tasks) {
      const number = Number(id.slice("task-".length));
      highest = Math.max(highest, number);
      const first = this.#firstAbove(number);
      if (first === undefined) continue;
      const last = this.#batches.findLast((batch) => batch.highest > number)!.at;
      this.longestMs = Math.max(this.longestMs, last - first);
    }
    this.#batches.push({ highest, at });
    if (highest <= (this.#numbers.at(-1) ?? 0)) return;
    this.#numbers.push(highest);
    this.#times.push(at);
  }

  #firstAbove(number: number): number | undefined {
    let [from, to] = [0, this.#numbers.length];
    while (from < to) {
      const middle = (from + to) >> 1;
      if (this.#numbers[middle]! > number) to = middle;
      else from = middle + 1;
    }
    return this.#times[from];
  }
}

/** Tasks per second of one worker that knows all inputs beforehand: sorted, in full batches. */
function offlinePerSecond(mix: LengthMix, seed: number): number {
  const sorted = sampleLengths(mix, TASKS - (TASKS % BATCH), seed).sort((one, other) => one - other);
  let ms = 0;
  for (let end = BATCH; end <= sorted.length; end += BATCH) ms += h200Ms(BATCH, sorted[end - 1]!);
  return (1000 * sorted.length) / ms;
}

interface Capacity extends Outcome {
  readonly perSecond: number;
}

/** The highest rate that passes, to 1 %. */
async function capacity(trial: Omit<Trial, "rate">): Promise<Capacity> {
  let [good, bad] = [0, 1.02 * offlinePerSecond(trial.mix, trial.seed)];
  let best: Outcome = OVERLOADED;
  while (bad - good > 0.01 * bad) {
    const rate = (good + bad) / 2;
    const outcome = await run({ ...trial, rate });
    if (outcome.p99 <= GOAL_MS && outcome.unserved <= MOST_UNSERVED) [good, best] = [rate, outcome];
    else bad = rate;
  }
  return { perSecond: good, ...best };
}

function spread(numbers: readonly number[], digits: number): string {
  const [least, most] = [Math.min(...numbers), Math.max(...numbers)];
  const middle = median([...numbers]);
  if (!Number.isFinite(middle)) return "overloaded";
  const text = (value: number): string =>
    value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  return numbers.length === 1 ? text(middle) : `${text(middle)} (${text(least)}–${text(most)})`;
}

function table(title: string, head: readonly string[], rows: readonly (readonly string[])[]): void {
  const lines = [head, head.map(() => "---"), ...rows].map((row) => `| ${row.join(" | ")} |`);
  process.stdout.write(`\n${title}\n\n${lines.join("\n")}\n`);
}

function mark(good: boolean): string {
  return good ? "✓" : "✗";
}

const mixes: LengthMix[] = values.equal
  ? [parseLengths("100%:128")!]
  : (values.mix ?? ["mixed", "chat"]).map((name) => parseLengths(name)!);
const settings: readonly (readonly [string, Lengths])[] = [
  ["off", "off"],
  [values.lengths ?? "auto", GROUPED],
];
const startedAt = performance.now();
for (const mix of mixes) await report(mix);
const seconds = (performance.now() - startedAt) / 1000;
process.stderr.write(
  `\n${trials} trials, ${tasksRun.toLocaleString("en")} tasks in ${seconds.toFixed(0)} s: ` +
    `${Math.round(tasksRun / seconds).toLocaleString("en")} a second\n`,
);

async function report(mix: LengthMix): Promise<void> {
  const found = new Map<string, Capacity[]>();
  const find = async (lengths: Lengths, admission: "off" | "predictive"): Promise<Capacity[]> => {
    const key = `${String(lengths)} ${admission}`;
    let each = found.get(key);
    if (each === undefined) {
      process.stderr.write(`  ${mix.name}, lengths ${String(lengths)}, admission ${admission}: capacity\n`);
      each = [];
      for (const seed of SEEDS) each.push(await capacity({ mix, lengths, seed, admission }));
      found.set(key, each);
    }
    return each;
  };
  if (PARTS.includes("capacity")) await reportCapacity(mix, "off", find);
  if (PARTS.includes("rates")) await reportRates(mix);
  if (PARTS.includes("low")) await reportLow(mix, await find("off", "off"));
  if (PARTS.includes("predictive")) await reportCapacity(mix, "predictive", find);
}

async function reportCapacity(
  mix: LengthMix,
  admission: "off" | "predictive",
  find: (lengths: Lengths, admission: "off" | "predictive") => Promise<Capacity[]>,
): Promise<void> {
  const bounds = SEEDS.map((seed) => offlinePerSecond(mix, seed));
  const off = await find("off", admission);
  const rows: string[][] = [];
  for (const [name, lengths] of settings) {
    const each = await find(lengths, admission);
    const gains = each.map(({ perSecond }, at) => perSecond / off[at]!.perSecond);
    const ofBound = each.map(({ perSecond }, at) => perSecond / bounds[at]!);
    rows.push([
      name,
      spread(
        each.map(({ perSecond }) => perSecond),
        0,
      ),
      spread(gains, 2) + (lengths === "off" || values.equal ? "" : ` ${mark(median(gains) >= LEAST_GAIN)}`),
      spread(ofBound, 2) + (lengths === "off" ? "" : ` ${mark(median(ofBound) >= LEAST_OF_BOUND)}`),
      spread(
        each.map(({ p50 }) => p50),
        1,
      ),
      spread(
        each.map(({ p99 }) => p99),
        1,
      ),
      spread(
        each.map(({ fill }) => fill),
        1,
      ),
      spread(
        each.map(({ padding }) => padding),
        2,
      ),
      spread(
        each.map(({ overtakenMs }) => overtakenMs),
        1,
      ),
    ]);
  }
  rows.push(["sorted, full batches", spread(bounds, 0), "", "1", "", "", String(BATCH), "", ""]);
  table(
    `${mix.name}: highest rate with p99 ≤ ${GOAL_MS} ms, admission ${admission}`,
    ["lengths", "req/s", "× off", "of the bound", "p50", "p99", "fill", "padding", "overtaken, ms"],
    rows,
  );
}

async function reportRates(mix: LengthMix): Promise<void> {
  const rows: string[][] = [];
  for (const rate of RATES) {
    process.stderr.write(`  ${mix.name}, ${rate}/s\n`);
    const cells: string[] = [];
    for (const [, lengths] of settings) {
      const each: Outcome[] = [];
      for (const seed of SEEDS) each.push(await run({ rate, mix, lengths, seed }));
      cells.push(
        spread(
          each.map(({ p50 }) => p50),
          1,
        ),
        spread(
          each.map(({ p99 }) => p99),
          1,
        ),
      );
    }
    rows.push([rate.toLocaleString("en"), ...cells]);
  }
  const head = settings.flatMap(([name]) => [`${name}: p50, ms`, "p99"]);
  table(`${mix.name}: fixed rates, admission off`, ["req/s", ...head], rows);
}

async function reportLow(mix: LengthMix, off: readonly Capacity[]): Promise<void> {
  const best = median(off.map(({ perSecond }) => perSecond));
  const rows: string[][] = [];
  for (const share of LOW) {
    const rate = share * best;
    process.stderr.write(`  ${mix.name}, ${Math.round(rate)}/s\n`);
    const [first, second] = [[] as Outcome[], [] as Outcome[]];
    for (const seed of SEEDS) {
      first.push(await run({ rate, mix, lengths: "off", seed }));
      second.push(await run({ rate, mix, lengths: GROUPED, seed }));
    }
    const ratios = second.map(({ p99 }, at) => p99 / first[at]!.p99);
    rows.push([
      `${100 * share} %, ${Math.round(rate).toLocaleString("en")}`,
      spread(
        first.map(({ p50 }) => p50),
        2,
      ),
      spread(
        second.map(({ p50 }) => p50),
        2,
      ),
      spread(
        first.map(({ p99 }) => p99),
        2,
      ),
      spread(
        second.map(({ p99 }) => p99),
        2,
      ),
      `${spread(ratios, 3)} ${mark(median(ratios) <= MOST_AT_LOW)}`,
    ]);
  }
  const name = settings[1]![0];
  table(
    `${mix.name}: at part of what order of arrival can do`,
    ["req/s", "p50 off", `p50 ${name}`, "p99 off", `p99 ${name}`, `p99 ${name} ÷ off`],
    rows,
  );
}
