/** The parts of `ferry plan`: times and bounds, fits, samples, traces, the frontier. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { type Candidate, frontierOf, grid } from "../../../src/cli/plan/frontier.ts";
import {
  atLength,
  fit,
  fitLine,
  fitShapes,
  formatService,
  kneeOf,
  parseService,
  serviceMs,
} from "../../../src/cli/plan/fit.ts";
import { inputOf, parseLengths, recordedLengths, sampleLengths } from "../../../src/cli/plan/lengths.ts";
import { lengthProbes, sizesUpTo } from "../../../src/cli/plan/measure.ts";
import { around } from "../../../src/cli/plan/planner.ts";
import { leastLatency } from "../../../src/cli/plan/bounds.ts";
import { lengthsIn, spreadWholeMs, TraceReader } from "../../../src/cli/plan/trace-file.ts";
import { Random } from "../../../src/core/random.ts";
import { estimateTokens } from "../../../src/core/weight.ts";
import {
  burstArrivals,
  poisson,
  poissonArrivals,
  slowStart,
  slowStartMs,
} from "../../../src/cli/plan/workload.ts";

test("service times as people write them", () => {
  const cases: [string, [number, number] | undefined][] = [
    ["200ms", [200, 0]],
    ["200", [200, 0]],
    ["0.2s", [200, 0]],
    ["36+1n", [36, 1]],
    ["36ms + 1.5n", [36, 1.5]],
    ["36+1*n", [36, 1]],
    ["2n", [0, 2]],
    ["1n+36", [36, 1]],
    ["0ms", undefined],
    ["36+4", undefined],
    ["36+1n+1n", undefined],
    ["36+1x", undefined],
    ["fast", undefined],
    ["-5ms", undefined],
    ["", undefined],
  ];
  for (const [text, expected] of cases) {
    const found = parseService(text);
    assert.deepEqual(found && [found.baseMs, found.perTaskMs], expected, text);
  }
  assert.equal(formatService({ baseMs: 200, perTaskMs: 0 }), "200 ms");
  assert.equal(formatService({ baseMs: 36.04, perTaskMs: 1.001 }), "36 + 1·n ms");
});

test("service times that follow the inputs' length", () => {
  const padded = parseService("0.5+0.005n+0.00046nl")!;
  assert.deepEqual(padded, { baseMs: 0.5, perTaskMs: 0.005, perCellMs: 0.00046 });
  assert.deepEqual(parseService("0.5 + 4.6e-4*n*l"), { baseMs: 0.5, perTaskMs: 0, perCellMs: 0.00046 });
  assert.deepEqual(parseService("5ms+0.02t"), { baseMs: 5, perTaskMs: 0, perTokenMs: 0.02 });
  assert.equal(formatService(padded), "0.5 + 0.005·n + 0.00046·n·l ms");
  assert.ok(Math.abs(serviceMs(padded, 64, 512) - 15.89) < 0.01);
  assert.equal(serviceMs({ baseMs: 5, perTaskMs: 1, perTokenMs: 0.02 }, 2, 512, 600), 5 + 2 + 12);
  assert.deepEqual(atLength(padded, 100), { baseMs: 0.5, perTaskMs: 0.005 + 100 * 0.00046 });
});

describe("lengths", () => {
  test("named and written distributions", () => {
    const mean = (written: string): number => {
      const drawn = sampleLengths(parseLengths(written)!, 20_000, 3);
      assert.ok(drawn.every((length) => Number.isInteger(length) && length >= 1 && length <= 512));
      return drawn.reduce((sum, length) => sum + length, 0) / drawn.length;
    };
    // 0.5 · 11 + 0.4 · 81 + 0.1 · 356
    assert.ok(Math.abs(mean("mixed") - 73.5) < 2, `${mean("mixed")}`);
    assert.ok(Math.abs(mean("chat") - 58) < 2, `${mean("chat")}`);
    assert.ok(Math.abs(mean("50%:6-16,40%:40-120,10%:200-512") - 73.1) < 2);
    assert.equal(mean("100%:128"), 128);
    assert.equal(parseLengths("1:8,3:16-32")!.longest, 32);
    for (const wrong of ["long", "50%", "50%:0-3", "50%:9-3", "0%:5", "50%:5;50%:6", "10%:5-1000000", ""]) {
      assert.equal(parseLengths(wrong), undefined, wrong);
    }
  });

  test("an input has the length that it was made for", () => {
    for (const tokens of [1, 2, 16, 512]) assert.equal(estimateTokens(inputOf(tokens)), tokens);
    assert.ok(Math.abs(estimateTokens(inputOf(54_321)) / 54_321 - 1) < 0.02);
  });

  test("recorded lengths, in all the forms that a line may have", () => {
    assert.deepEqual(lengthsIn("17"), [17]);
    assert.deepEqual(lengthsIn('{"tokens":5}'), [5]);
    assert.deepEqual(lengthsIn('{"input_tokens":6,"arrived_at":"2026-01-05T10:00:00Z"}'), [6]);
    assert.deepEqual(lengthsIn('{"input":"12345678"}'), [2]);
    assert.deepEqual(lengthsIn('{"requests":[{"length":7},{"input":[1,2,3]},{}]}'), [7, 3]);
    for (const none of ["", "no json", "{}", '{"tokens":0}', '{"tokens":"many"}'])
      assert.deepEqual(lengthsIn(none), []);
    const recorded = recordedLengths("file", Uint32Array.of(4, 9));
    assert.deepEqual(new Set(sampleLengths(recorded, 100, 1)), new Set([4, 9]));
    assert.equal(recorded.longest, 9);
  });

  test("what time follows is told from equal batches and one long input among short ones", () => {
    const tokens = (count: number): string => inputOf(count);
    const probes = lengthProbes(16, [8, 64, 512], tokens);
    assert.deepEqual(
      probes.slice(0, 4).map(({ size, longest, total }) => [size, longest, total]),
      [
        [1, 8, 8],
        [1, 64, 64],
        [1, 512, 512],
        [2, 8, 16],
      ],
    );
    assert.equal(probes.length, 3 + 4 * 4);
    for (const text of ["0.5+0.005n+0.00046nl", "5+0.02t", "5+0.1n", "3+0.2nl"]) {
      const service = parseService(text)!;
      const timings = probes.map((probe, at) => ({
        ...probe,
        ms: serviceMs(service, probe.size, probe.longest, probe.total) * (at % 2 === 0 ? 1.01 : 0.99),
      }));
      const found = fitShapes(timings);
      for (const part of ["baseMs", "perCellMs", "perTokenMs"] as const) {
        const [got, wanted] = [found[part] ?? 0, service[part] ?? 0];
        assert.ok(Math.abs(got - wanted) <= 0.05 * wanted, `${text}: ${part} ${got}`);
      }
    }
  });
});

test("the bound: S(1 + q/k) where arrivals are dense, S(1) where they are rare, none beyond the capacity", () => {
  const constant = { baseMs: 100, perTaskMs: 0 };
  const bound = (service: typeof constant, perMs: number, workers: number): number =>
    leastLatency(0.99, { ...service, workers, maxBatchSize: 64 }, perMs);
  assert.ok(Math.abs(bound(constant, 3, 7) - 113.8) < 0.1);
  assert.ok(Math.abs(bound(constant, 0.6, 1) - 197.35) < 0.1);
  assert.equal(bound(constant, 0.001, 4), 100);
  assert.equal(bound(constant, 1, 1), Infinity);
  // 36 + n, 70 % of eight workers: m = λa / (k − λb).
  const perMs = 0.7 * 8 * 0.64;
  const m = (perMs * 36) / (8 - perMs);
  const affine = bound({ baseMs: 36, perTaskMs: 1 }, perMs, 8);
  assert.ok(Math.abs(affine - (36 + m + (0.99 * (m - 1)) / perMs)) < 1e-9);
});

describe("fits", () => {
  const sizes = sizesUpTo(64);

  test("sizes are powers of two and the largest", () => {
    assert.deepEqual(sizes, [1, 2, 4, 8, 16, 32, 64]);
    assert.deepEqual(sizesUpTo(48), [1, 2, 4, 8, 16, 32, 48]);
    assert.deepEqual(sizesUpTo(1), [1]);
  });

  test("a line is found, also when one size was disturbed", () => {
    const clean = sizes.map((size) => ({ size, ms: 36 + size }));
    const line = fitLine(clean);
    assert.ok(Math.abs(line.baseMs - 36) < 1e-9 && Math.abs(line.perTaskMs - 1) < 1e-9);
    const disturbed = clean.map(({ size, ms }) => ({ size, ms: size === 16 ? 5 * ms : ms }));
    const { baseMs, perTaskMs } = fitLine(disturbed);
    assert.ok(Math.abs(baseMs - 36) < 3 && Math.abs(perTaskMs - 1) < 0.1, `${baseMs} + ${perTaskMs}n`);
    assert.deepEqual(fitLine([{ size: 1, ms: 7 }]), { baseMs: 7, perTaskMs: 0 });
  });

  test("the knee: flat to 32, twice the time for twice the size beyond", () => {
    const flat = [1, 8, 32, 64, 128].map((size) => ({ size, ms: size <= 32 ? 5 : (5 * size) / 32 }));
    const { knee, open, service } = fit(flat);
    assert.deepEqual({ knee, open }, { knee: 32, open: false });
    assert.ok(Math.abs(service.baseMs - 5) < 1e-9);
    assert.equal(kneeOf(sizes.map((size) => ({ size, ms: 100 }))), 64);
    assert.equal(kneeOf(sizes.map((size) => ({ size, ms: 10 * size }))), 1);
  });
});

describe("arrivals", () => {
  test("one by one they are those of the list", () => {
    const next = poissonArrivals(2, 1000, 5);
    const list = poisson(2, 1000, 5);
    assert.ok(list.length > 1500);
    for (const at of list) assert.equal(next(), at);
    assert.equal(next(), Infinity);
  });

  test("a slow start is a quarter as dense, and later ones keep their gaps", () => {
    const list = poisson(1, 10_000, 5);
    const next = slowStart(poissonArrivals(1, 10_000, 5), 2000);
    const slow = list.map(() => next());
    assert.equal(next(), Infinity);
    const early = list.filter((at) => at < 500).length;
    assert.ok(slow[early - 1]! < 2000 && slow[early]! >= 2000);
    assert.equal(slow[early]! - list[early]!, slowStartMs(2000));
  });

  test("crowds keep the mean, and peak where they should", () => {
    const [durationMs, perMs, peak] = [400_000, 1, 2.5];
    const next = burstArrivals(perMs, peak, durationMs, 3);
    const seconds = new Float64Array(durationMs / 1000);
    let count = 0;
    for (let at = next(); at !== Infinity; at = next()) {
      count++;
      seconds[Math.floor(at / 1000)]!++;
    }
    const mean = count / durationMs;
    assert.ok(mean > 0.85 && mean < 1.15, `mean ${mean}`);
    const sorted = seconds.toSorted();
    const [calm, crowd] = [
      sorted[Math.floor(0.3 * sorted.length)]!,
      sorted[Math.floor(0.97 * sorted.length)]!,
    ];
    assert.ok(calm > 420 && calm < 580, `calm ${calm}`);
    assert.ok(crowd > 2200 && crowd < 2800, `crowd ${crowd}`);
  });
});

describe("recorded traces", () => {
  test("what Ferry tells, what others write, and what cannot be read", () => {
    const reader = new TraceReader(100);
    for (const line of [
      '{"arrived_at":"2026-01-05T10:00:00.200Z","tier":"free","work":"own","status":200}',
      '{"arrived_at":"2026-01-05T10:00:00.100Z","tier":"enterprise","work":"own","status":503}',
      '{"started_at":"2026-01-05 10:00:00.300+00","tier":"free"}',
      '{"arrived_at":"2026-01-05T10:00:00.150Z","tier":"free","work":"cached","status":200}',
      '{"arrived_at":"2026-01-05T10:00:00.150Z","status":400}',
      "",
      "no json",
      '{"tier":"free"}',
      '{"requests":[{"arrived_at":"2026-01-05T10:00:00.250Z","tier":"paid","tokens":40}]}',
    ]) {
      reader.line(line);
    }
    const trace = reader.end(["enterprise", "paid", "free"]);
    assert.deepEqual([...trace.instants], [0, 100, 150, 200]);
    assert.deepEqual([...trace.tiers], [0, 2, 1, 2]);
    assert.deepEqual([...trace.lengths], [0, 0, 40, 0]);
    const { unreadable, unreadableAt, seatless, turnedAway, cut, lines } = trace;
    assert.deepEqual(
      { unreadable, unreadableAt, seatless, turnedAway, cut, lines },
      { unreadable: 2, unreadableAt: 7, seatless: 1, turnedAway: 1, cut: false, lines: 9 },
    );
  });

  test("bare instants, and no more than fit", () => {
    const reader = new TraceReader(3);
    for (const at of [30, 10, 20.5, 40]) reader.line(String(at));
    const trace = reader.end();
    assert.deepEqual([...trace.instants], [0, 10.5, 20]);
    assert.equal(trace.cut, true);
    assert.equal(new TraceReader(3).end().instants.length, 0);
  });

  test("whole milliseconds are spread, fractions stay", () => {
    const spread = spreadWholeMs(Float64Array.of(0, 0, 0, 1), new Random(1));
    assert.equal(new Set(spread).size, 4);
    assert.deepEqual(spread, spread.toSorted());
    const exact = Float64Array.of(0, 0.5);
    assert.equal(spreadWholeMs(exact, new Random(1)), exact);
  });
});

test("the frontier: what nothing beats in both; the cheapest that meets the goal is best", () => {
  const goal = { name: "p99", share: 0.99, ms: 120 };
  const limits = grid({ policy: "adaptive", maxBatchSize: 64, maxWaitMs: 50 }, ["adaptive", "latency"]);
  assert.equal(new Set(limits.map((each) => JSON.stringify(each))).size, limits.length);
  assert.ok(limits.every(({ maxBatchSize }) => maxBatchSize <= 64));
  const candidate = (p99: number, batchesPerThousand: number, refused = 0): Candidate => ({
    limits: limits[0]!,
    meets: p99 <= goal.ms && refused === 0,
    figures: { p99, batchesPerThousand, refused, late: 0 } as Candidate["figures"],
  });
  const [cheap, good, fast, beaten] = [
    candidate(150, 16),
    candidate(118, 20),
    candidate(112, 40),
    candidate(130, 25),
  ];
  const found = frontierOf([beaten, fast, candidate(90, 15, 0.3), cheap, good], goal);
  assert.deepEqual(found.worthIt, [cheap, good, fast]);
  assert.equal(found.best, good);
  assert.equal(frontierOf([cheap, beaten], goal).best, beaten);
});

test("the sizes that are shown hold the knee and the choice, and are few", () => {
  assert.deepEqual(around(5, 7), [4, 5, 6, 7, 8]);
  assert.deepEqual(around(1, 1), [1, 2]);
  const many = around(32, 460);
  assert.ok(many.length <= 7 && many.includes(32) && many.includes(460));
});
