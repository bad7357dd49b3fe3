/**
 * How close the policy comes to what is possible, with the real engine, dispatcher and estimates on virtual time:
 * Poisson arrivals, batches of at most 64. Each test prints what it measured; the bounds are in src/cli/plan/bounds.ts,
 * the table in docs/tuning.md.
 *
 * `npm run test:long` measures the whole table. Other arrivals: FERRY_SEED=<seed> node --test test/sim/policy-goals.test.ts
 */
import assert from "node:assert/strict";
import { describe, test, type TestContext } from "node:test";
import "../fixtures/unhooked.ts";
import type { PolicyName } from "../../src/core/policy.ts";
import { batchesPerThousand, frontier, meanWait, p99Bound } from "../../src/cli/plan/bounds.ts";
import { usually } from "../fixtures/long.ts";
import { mean, measure, quantile, type Trial } from "./policy-lab.ts";

const SEED = Number(process.env["FERRY_SEED"] ?? 1);
/** At low load one p99 is like another; the more batches swing, the longer it takes to see theirs. */
function requestsAt(load: number, service: Service): number {
  if (load < 0.7) return 10_000;
  return service === AFFINE && load < 0.9 ? 60_000 : 30_000;
}
/** Near the capacity queues come and go by chance, most with few workers: the middle one of so many runs counts. */
const NEAR = 0.9;
const RUNS = new Map([
  [4, 5],
  [8, 3],
  [32, 1],
]);
const LOADS = usually([0.1, 0.5, 0.7, 0.9], [0.05, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95]);
const FLEETS = usually([8], [4, 8, 32]);
const CONSTANT = { maxBatchSize: 64, baseMs: 100, perTaskMs: 0 };
const AFFINE = { maxBatchSize: 64, baseMs: 36, perTaskMs: 1 };

type Service = typeof CONSTANT;
interface Cell {
  readonly load: number;
  readonly workers: number;
  /** p99 over what no policy can beat. */
  readonly overBound: number;
  /** p99 over what no policy that sends as few batches can beat. */
  readonly overFrontier: number;
  /** Mean wait over what the sizes of the batches say it must be, less 1. */
  readonly identityError: number;
  /** Batches over as few as there can be. */
  readonly cost: number;
}

/** A whole table is measured once, by whichever test asks first. */
const tables = new Map<string, Promise<Cell[]>>();

function table(service: Service, policy: PolicyName, fleets: readonly number[] = FLEETS): Promise<Cell[]> {
  const name = `${policy} ${service.baseMs}`;
  let cells = tables.get(name);
  if (cells === undefined) tables.set(name, (cells = fill(service, policy, fleets)));
  return cells;
}

async function fill(service: Service, policy: PolicyName, fleets: readonly number[]): Promise<Cell[]> {
  const cells: Cell[] = [];
  for (const workers of fleets) {
    for (const load of LOADS) {
      const count = load >= NEAR && service === CONSTANT ? RUNS.get(workers)! : 1;
      const requests = requestsAt(load, service);
      const runs: Cell[] = [];
      for (let run = 0; run < count; run++)
        runs.push(await cellOf({ ...service, workers, load, policy, requests, seed: 10 * SEED + run }));
      runs.sort((one, other) => one.overBound - other.overBound);
      cells.push(runs[(runs.length - 1) / 2]!);
    }
  }
  return cells;
}

async function cellOf(trial: Trial): Promise<Cell> {
  const { load, workers } = trial;
  const { perMs, latencies, sizes, waitMs } = await measure(trial);
  const [p99, batch] = [quantile(latencies, 0.99), mean(sizes)];
  return {
    load,
    workers,
    overBound: p99 / p99Bound(trial, perMs),
    overFrontier: p99 / frontier(0.99, trial, perMs, batch),
    identityError: waitMs / meanWait(perMs, sizes) - 1,
    cost: 1000 / batch / batchesPerThousand(trial),
  };
}

/** Prints a line for each fleet, and holds every cell to its limit; a load without one is only printed. */
function hold(
  t: TestContext,
  cells: readonly Cell[],
  of: (cell: Cell) => number,
  limit: (load: number, workers: number) => number | undefined,
): void {
  for (const workers of new Set(cells.map((cell) => cell.workers))) {
    const row = cells.filter((cell) => cell.workers === workers);
    const figures = row.map((cell) => `${percent(cell.load)} ${of(cell).toFixed(3)}`);
    t.diagnostic(`${workers} workers: ${figures.join(", ")}`);
  }
  for (const cell of cells) {
    const most = limit(cell.load, cell.workers);
    if (most === undefined) continue;
    const where = `${cell.workers} workers at ${percent(cell.load)}`;
    assert.ok(of(cell) <= most, `${where}: ${of(cell).toFixed(3)}, the goal is ${most}`);
  }
}

const percent = (share: number): string => `${Math.round(100 * share)} %`;

describe("a batch takes 100 ms whatever its size", () => {
  test("p99 over the bound: at most 1.07 from 10 to 95 % load, 1.12 at 5 %", async (t) => {
    const cells = await table(CONSTANT, "adaptive");
    hold(
      t,
      cells,
      (cell) => cell.overBound,
      (load) => (load < 0.1 ? 1.12 : 1.07),
    );
  });

  // With 4 workers the goals of 1.02 at 90 % load and 1.06 at 95 % are missed by some seeds of six: 1.016 to 1.023 and
  // 1.059 to 1.070, the middle of five runs. The bound is for arrivals as even as can be. At 95 % load 61 are expected
  // between two starts, every third time more than 64 come, and with no gap between batches the rest waits for the
  // next one. A policy cannot help that; `adaptive`, which leaves gaps, has 1.049 to 1.056.
  test("latency: p99 over the bound at most 1.02 up to 90 % load, 1.06 at 95 %; 1.03 and 1.08 with 4 workers", async (t) => {
    const cells = await table(CONSTANT, "latency");
    const few = (load: number): number => (load > 0.9 ? 1.08 : load > 0.8 ? 1.03 : 1.02);
    hold(
      t,
      cells,
      (cell) => cell.overBound,
      (load, workers) => (workers === 4 ? few(load) : load > 0.9 ? 1.06 : 1.02),
    );
  });

  test("the mean wait is what the sizes of the batches say, within 2 % up to 70 % load", async (t) => {
    for (const policy of ["adaptive", "latency"] as const) {
      t.diagnostic(policy);
      const cells = await table(CONSTANT, policy);
      hold(
        t,
        cells,
        (cell) => Math.abs(cell.identityError),
        (load) => (load > 0.7 ? undefined : 0.02),
      );
    }
  });

  test("p99 over the frontier at its own cost: at most 1.03 from 10 to 90 % load", async (t) => {
    const cells = await table(CONSTANT, "adaptive");
    hold(
      t,
      cells,
      (cell) => cell.overFrontier,
      (load) => (load < 0.1 || load > 0.9 ? undefined : 1.03),
    );
  });

  test("batches over as few as there can be: 1.2 at 70 % load, 1.06 at 80 %, 1.02 from 90 %", async (t) => {
    const cells = await table(CONSTANT, "adaptive");
    const most = new Map([
      [0.7, 1.2],
      [0.8, 1.06],
      [0.9, 1.02],
      [0.95, 1.02],
    ]);
    hold(
      t,
      cells,
      (cell) => cell.cost,
      (load) => most.get(load),
    );
  });
});

// Over six seeds at most 1.433, and 1.299 with `latency`: these goals have next to no margin.
describe("a batch of n takes 36 + n ms", () => {
  test("p99 over the bound: at most 1.45", async (t) => {
    hold(
      t,
      await table(AFFINE, "adaptive"),
      (cell) => cell.overBound,
      () => 1.45,
    );
  });

  test("latency, 8 workers: p99 over the bound at most 1.3", async (t) => {
    hold(
      t,
      await table(AFFINE, "latency", [8]),
      (cell) => cell.overBound,
      () => 1.3,
    );
  });
});

/**
 * The tail of a few long batches that overlap now and then is long itself, so several runs are put together: of one
 * alone p99.9 scatters between 270 and 510 ms, of these between 271 and 326 over six seeds, with one 355 at 80 %.
 */
describe("1 % of the batches take five times as long", () => {
  const all = [
    { load: 0.3, runs: 4, requests: 80_000 },
    { load: 0.6, runs: 6, requests: 80_000 },
    { load: 0.8, runs: 6, requests: 120_000 },
  ];
  for (const { load, runs, requests } of usually(all.slice(0, 1), all)) {
    test(`p99.9 at most 330 ms at ${percent(load)} load, for no more batches and 1.5 % of the seats`, async (t) => {
      const trial = { ...CONSTANT, workers: 8, load, requests };
      const latencies: number[] = [];
      let [again, alone, batches] = [0, 0, 0];
      for (let run = 0; run < runs; run++) {
        const figures = await measure({ ...trial, seed: 100 * SEED + run, slow: { rate: 0.01, factor: 5 } });
        for (const ms of figures.latencies) latencies.push(ms);
        again += figures.rodeAgain / runs;
        alone += figures.onlyAgain / runs;
        batches += 1000 / mean(figures.sizes) / runs;
      }
      const usual = 1000 / mean((await measure({ ...trial, seed: SEED, requests: 40_000 })).sizes);
      const p999 = quantile(Float64Array.from(latencies).sort(), 0.999);
      t.diagnostic(
        `p99.9 ${p999.toFixed(0)} ms, ${(100 * again).toFixed(2)} % of the tasks twice; ` +
          `${batches.toFixed(2)} batches per 1,000 (${(100 * alone).toFixed(2)} % with nobody new), ` +
          `${usual.toFixed(2)} where none is slow`,
      );
      assert.ok(p999 <= 330, `p99.9 ${p999} ms`);
      assert.ok(again <= 0.015, `${100 * again} % of the tasks twice`);
      // Their seats were empty: no batch is started for them that would not have left anyway.
      assert.ok(batches <= usual, `${batches} batches, ${usual} where none is slow`);
    });
  }
});

describe("timers that ring on whole milliseconds, up to one late", () => {
  // A batch that leaves late makes the next one late as well, never the sum of them: starts are spread anew each time.
  for (const baseMs of [5, 100]) {
    test(`batches of ${baseMs} ms: p99 at most 2 ms more`, async (t) => {
      for (const load of [0.1, 0.5]) {
        const trial = { ...CONSTANT, baseMs, workers: 8, load, requests: 10_000, seed: SEED };
        const exact = await measure(trial);
        const late = await measure({ ...trial, lateTimers: true });
        const [before, after] = [quantile(exact.latencies, 0.99), quantile(late.latencies, 0.99)];
        const batches = mean(late.sizes) / mean(exact.sizes);
        t.diagnostic(
          `${percent(load)}: ${before.toFixed(2)} → ${after.toFixed(2)} ms, batches ${batches.toFixed(2)} times as large`,
        );
        assert.ok(after - before <= 2, `${percent(load)}: ${before} → ${after} ms`);
      }
    });
  }
});
