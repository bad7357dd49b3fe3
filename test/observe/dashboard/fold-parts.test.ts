/** What the fold is made of: latencies and their parts, who is refused, and the bounds of what it sends. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { ShedReason } from "../../../src/observe/events.ts";
import type { Frame } from "../../../src/observe/dashboard/frames.ts";
import { WorkerBook } from "../../../src/observe/dashboard/workers.ts";
import { LoopDelay } from "../../../src/observe/processes.ts";
import { Latencies } from "../../../src/observe/dashboard/quantiles.ts";
import { RefusedTenants } from "../../../src/observe/dashboard/model-fold.ts";
import { ManualClock } from "../../workers/backend/manual-clock.ts";
import { Stage, workerSight } from "./stage.ts";

const gold = (size: number): number[] => new Array<number>(size).fill(0);

describe("latency", () => {
  test("the slowest 5 % are split into parts of those very requests", async () => {
    using stage = new Stage();
    await stage.to(900);
    const at = stage.clock.now();
    for (let n = 0; n < 95; n++) stage.answer(10);
    for (let n = 0; n < 5; n++) {
      const startedAt = at - 200;
      const batch = stage.note("b", startedAt + 82, 4);
      stage.answer(200, {
        ending: { queuedAt: startedAt + 2, attempt: 1, settledAt: startedAt + 182, batch },
      });
    }
    await stage.to(1000);
    const { slots, recent } = stage.look();
    assert.deepEqual(recent.slow, { queueMs: 80, workerMs: 100, gatewayMs: 20 });
    assert.deepEqual(slots.columns.slowQueueMs, [80]);
    assert.deepEqual(slots.columns.slowWorkerMs, [100]);
    assert.deepEqual(slots.columns.slowGatewayMs, [20]);
    assert.equal(recent.requestsPerSecond, 100);
    assert.equal(recent.meanMs, 19.5);
  });

  test("a part lies inside its request: joined late, or answered from before", async () => {
    using stage = new Stage();
    await stage.to(900);
    const at = stage.clock.now();
    const batch = stage.note("b", at - 100, 4);
    // Joined 50 ms ago what had left 100 ms ago.
    stage.answer(50, {
      work: "joined",
      ending: { queuedAt: at - 120, attempt: 1, settledAt: at - 1, batch },
    });
    await stage.to(1000);
    assert.deepEqual(stage.look().recent.slow, { queueMs: 0, workerMs: 49, gatewayMs: 1 });
  });

  test("who waited for an end that never came counts; who did not wait does not", async () => {
    using stage = new Stage();
    await stage.to(900);
    stage.answer(400, { status: 504, ending: undefined });
    stage.answer(1, { status: 202, ending: undefined });
    await stage.to(1000);
    assert.ok(Math.abs(stage.look().recent.p50! - 400) < 8);
  });

  test("quantiles are within 1.6 % of the exact ones, merged or not, and the sums are exact", () => {
    const values = fc.array(fc.double({ min: 0.02, max: 1e6, noNaN: true }), {
      minLength: 1,
      maxLength: 300,
    });
    fc.assert(
      fc.property(values, values, fc.double({ min: 0.01, max: 1, noNaN: true }), (one, two, share) => {
        const [first, second] = [new Latencies(), new Latencies()];
        for (const value of one) first.add(value, value / 4, value / 2);
        for (const value of two) second.add(value, value / 4, value / 2);
        first.merge(second);
        const sorted = [...one, ...two].toSorted((a, b) => a - b);
        const exact = sorted[Math.max(1, Math.ceil(share * sorted.length)) - 1]!;
        assert.ok(
          Math.abs(first.quantile(share)! - exact) <= exact / 60,
          `${first.quantile(share)} for ${exact}`,
        );
        const slow = first.slowest(share)!;
        const count = Math.max(1, Math.ceil(share * sorted.length));
        const mean = sorted.slice(-count).reduce((sum, each) => sum + each, 0) / count;
        assert.ok(Math.abs(slow.queueMs + slow.workerMs + slow.gatewayMs - mean) <= mean / 25 + 1e-9);
        assert.ok(Math.abs(slow.workerMs - 2 * slow.queueMs) < 1e-6 * mean);
        const sum = sorted.reduce((total, each) => total + each, 0);
        assert.ok(Math.abs(first.mean()! - sum / sorted.length) < 1e-6 * sum);
        first.clear();
        assert.equal(first.quantile(0.5), null);
      }),
      { numRuns: 300 },
    );
  });

  test("no time is too odd to be counted", () => {
    const latencies = new Latencies();
    for (const value of [0, -3, 1e-9, 1e12, Infinity]) latencies.add(value, 0, 0);
    assert.equal(latencies.count, 5);
    assert.ok(latencies.quantile(0.1)! < 0.02);
    assert.ok(latencies.quantile(1)! > 8e6);
  });
});

describe("refusals", () => {
  test("by tier and reason, with those who are refused most", async () => {
    using stage = new Stage();
    const shed = (tier: string, tenant: string, reason: ShedReason): void =>
      stage.events.emit("request.shed", { model: "embed", tier, tenant, reason, retryAfterMs: 700 });
    shed("tin", "u1", "capacity");
    shed("tin", "u1", "capacity");
    shed("gold", "u2", "rate");
    stage.answer(1, { status: 429, ending: undefined });
    await stage.to(1000);
    const { slots, refusedTenants, recent } = stage.look();
    assert.deepEqual(slots.shed, { "gold rate": [1], "tin capacity": [2] });
    assert.deepEqual(slots.columns.refused, [3]);
    assert.deepEqual(slots.columns.arrivals, [2]);
    assert.deepEqual(refusedTenants, [
      ["u1", 2, 700],
      ["u2", 1, 700],
    ]);
    assert.equal(recent.refusedShare, 1);
    await stage.to(120_000);
    assert.deepEqual(stage.look().refusedTenants, []);
  });

  test("a crowd does not hide whoever is refused most, and no count is too small", () => {
    const sketch = new RefusedTenants();
    for (let n = 0; n < 10_000; n++) {
      sketch.count(`crowd-${n}`, 1);
      if (n % 20 === 0) sketch.count("loud", 5);
    }
    const [[tenant, times]] = sketch.top(1) as [[string, number, number]];
    assert.equal(tenant, "loud");
    assert.ok(times >= 500 && times < 500 + 10_500 / 64, String(times));
    assert.equal(sketch.top(1000).length, 64);
  });
});

describe("a worker that is slow", () => {
  /** Half a minute of batches of 5 in 25 ms, then sixteen of another kind. */
  function after(size: number, ms: number): unknown {
    const book = new WorkerBook(0);
    let now = 0;
    for (; now < 30_000; now += 100) book.took("gpu-1", 25, 5, now);
    for (let n = 0; n < 16; n++) book.took("gpu-1", ms, size, (now += 100));
    return book.slowest(["gpu-1"], now);
  }

  test("needs twice its usual time for batches of the usual size", () => {
    assert.deepEqual(after(5, 60), { name: "gpu-1", nowMs: 60, usualMs: 25 });
    assert.deepEqual(after(2, 60), { name: "gpu-1", nowMs: 60, usualMs: 25 });
    assert.equal(after(5, 49), undefined);
  });

  test("is not one that is given larger batches, unless they take longer than in proportion", () => {
    assert.equal(after(128, 148), undefined);
    assert.equal(after(10, 60), undefined);
    assert.deepEqual(after(10, 120), { name: "gpu-1", nowMs: 120, usualMs: 25 });
  });
});

describe("bounds", () => {
  test("a frame at 400 batches a second is at most 12 KB, and says what it left out", async () => {
    using stage = new Stage();
    stage.model.workers = Array.from({ length: 16 }, (_, at) => workerSight(`gpu-${at}`, "busy"));
    stage.fold.frame();
    for (let n = 0; n < 200; n++) {
      const id = `${String(n).padStart(8, "0")}-1111-4111-8111-111111111111`;
      stage.begin(id, `gpu-${n % 16}`, gold(60));
      stage.end(id, `gpu-${n % 16}`, 60, 30);
    }
    await stage.to(1000);
    const frame = stage.fold.frame();
    const { batches, batchesLeftOut, workers } = frame.models[0]!;
    const bytes = JSON.stringify(frame).length;
    assert.ok(bytes <= 12_288, `${bytes} bytes`);
    assert.equal(batches.length + batchesLeftOut, 200);
    assert.ok(batches.length >= 30, `${batches.length} batches`);
    // All of a worker's batches, or none; but for the last.
    const whole = new Set(batches.map(([, worker]) => worker));
    assert.ok(whole.size <= Math.ceil(batches.length / 12));
    assert.equal(workers.length, 16);
  });

  test("batches come before the sentences of batches, and those of the last before the others", async () => {
    using stage = new Stage();
    const why = "48 of 64: similar length; 9 longer ones wait for the next worker, at most 12 ms";
    const run = (count: number): void => {
      for (let n = 0; n < count; n++) {
        const id = `${stage.clock.now()}-${String(n).padStart(4, "0")}-4111-8111-111111111111`;
        stage.begin(id, "gpu-1", gold(60), { why });
        stage.end(id, "gpu-1", 60, 1);
      }
    };
    const told = (frame: Frame): boolean[] => frame.models[0]!.batches.map((row) => row[11] === why);
    stage.fold.frame();
    run(10);
    assert.ok(told(stage.fold.frame()).every((each) => each));
    await stage.to(1000);
    run(90);
    const frame = stage.fold.frame();
    const bytes = JSON.stringify(frame).length;
    assert.ok(bytes <= 12_288, `${bytes} bytes`);
    assert.deepEqual([frame.models[0]!.batches.length, frame.models[0]!.batchesLeftOut], [90, 0]);
    const first = told(frame).indexOf(true);
    assert.ok(first > 20 && first < 89, `from the ${first}th on`);
    assert.ok(
      told(frame)
        .slice(first)
        .every((each) => each),
    );
    for (let second = 2; second < 22; second++) {
      await stage.to(1000 * second);
      run(60);
    }
    const hello = stage.fold.hello();
    assert.equal(hello.models[0]!.batches.length, 1000);
    assert.ok(JSON.stringify(hello).length < 300_000);
    assert.deepEqual([told(hello)[0], told(hello)[999]], [false, true]);
  });

  test("a model that is quiet leaves its room in the frame to the one that is not", async () => {
    const quiet = { name: "quiet", maxBatchSize: 64, maxWaitMs: 50, policy: "adaptive" };
    using stage = new Stage({ models: [{ ...quiet, name: "embed" }, quiet] });
    stage.fold.frame();
    for (let n = 0; n < 85; n++) {
      const id = `${String(n).padStart(8, "0")}-1111-4111-8111-111111111111`;
      stage.begin(id, `gpu-${1 + (n % 2)}`, gold(60));
      stage.end(id, `gpu-${1 + (n % 2)}`, 60, 30);
    }
    await stage.to(1000);
    const frame = stage.fold.frame();
    const bytes = JSON.stringify(frame).length;
    assert.ok(bytes <= 12_288 && bytes > 6144, `${bytes} bytes`);
    assert.deepEqual([frame.models[0]!.batches.length, frame.models[0]!.batchesLeftOut], [85, 0]);
  });

  test("a hello says how many batches it left out of what is drawn, not of the minute before", async () => {
    using stage = new Stage();
    const run = (count: number): void => {
      for (let n = 0; n < count; n++) {
        stage.begin(`${stage.clock.now()}-${n}`, "gpu-1", gold(60));
        stage.end(`${stage.clock.now()}-${n}`, "gpu-1", 60, 1);
      }
    };
    run(1500);
    await stage.to(20_000);
    run(700);
    await stage.to(21_000);
    assert.deepEqual([stage.look().batches.length, stage.look().batchesLeftOut], [1000, 0]);
    run(700);
    await stage.to(22_000);
    assert.deepEqual([stage.look().batches.length, stage.look().batchesLeftOut], [1000, 400]);
  });

  test("a hello after a quarter of an hour at full speed is at most 300 KB", async () => {
    using stage = new Stage();
    for (let second = 0; second < 900; second++) {
      stage.answer(100 + second / 7);
      for (let n = 0; n < 10; n++) {
        stage.begin(`${second}-${n}-4111-8111-111111111111-11111`, "gpu-1", [0, 1, 2]);
        stage.end(`${second}-${n}-4111-8111-111111111111-11111`, "gpu-1", 3, 61.3);
      }
      stage.events.emit("request.shed", {
        model: "embed",
        tier: "tin",
        tenant: `u${second}`,
        reason: "rate",
        retryAfterMs: 9,
      });
      await stage.to(1000 * (second + 1));
    }
    const bytes = JSON.stringify(stage.fold.hello()).length;
    assert.ok(bytes < 300_000, `${bytes} bytes`);
  });

  test("a storm of notes is cut to ten a second, and counted", async () => {
    using stage = new Stage();
    for (let n = 0; n < 500; n++) {
      stage.events.emit("task.dead", {
        id: `d${n}`,
        model: "embed",
        code: "INFERENCE_FAILED",
        message: "said by a worker",
      });
    }
    await stage.to(1000);
    const { notes } = stage.fold.hello();
    assert.equal(notes.length, 11);
    assert.equal(notes[0]!.text, "dead letter d0 of embed: INFERENCE_FAILED");
    assert.match(notes.at(-1)!.text, /^and 490 more/);
  });
});

describe("event-loop delay", () => {
  test("is measured while there are requests; at rest nothing is awaited, and a late look still shows", () => {
    const clock = new ManualClock();
    const delay = new LoopDelay(clock);
    assert.equal(clock.nextMs, Infinity);
    assert.equal(delay.take(clock.now() - 30), 30);
    delay.watch();
    delay.watch();
    clock.advance(990);
    assert.equal(delay.take(clock.now()), 0);
    assert.ok(clock.nextMs <= 50);
    clock.advance(1000);
    assert.equal(delay.take(clock.now()), 0);
    assert.equal(clock.nextMs, Infinity);
  });
});
