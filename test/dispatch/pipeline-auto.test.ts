/** When `pipeline: auto` hands batches over early. */
import { unmeasured } from "../../src/core/cost.ts";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Worker } from "../../src/workers/backend/backend.ts";
import { GapEstimate, Pipeline, type PipelineMode } from "../../src/dispatch/pipeline.ts";
import { Workers } from "../../src/workers/workers.ts";
import { Events } from "../../src/observe/events.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { putMany, slotOf, stage } from "./watched.ts";

const HEALTH = { failures: 3, ejectMs: 1000, maxEjectMs: 30_000 };

describe("auto", () => {
  function pipeline(mode: PipelineMode = "auto"): { it: Pipeline; pays: (gapMs: number) => number } {
    const queues = { name: "gpu-1", queues: true } as Worker;
    const workers = new Workers("m", [queues, { name: "gpu-2" } as Worker], {
      limits: () => HEALTH,
      clock: new VirtualClock(),
      events: new Events(),
    });
    for (let i = 0; i < 10; i++) workers.service.learn(unmeasured(64), 5);
    const it = new Pipeline(() => ({ pipeline: mode }), workers);
    const pays = (gapMs: number): number => {
      for (let i = 0; i < 40; i++) it.learn(gapMs, 5);
      return it.depth(workers.slots[0]!);
    };
    assert.equal(it.depth(workers.slots[1]!), mode === 2 ? 2 : 1, "it does not queue by contract");
    return { it, pays };
  }

  test("is on above a twentieth of a batch, off below half of that, and stays in between", () => {
    const { pays } = pipeline();
    assert.equal(pays(0.2), 1);
    assert.equal(pays(0.3), 2);
    assert.equal(pays(0.2), 2);
    assert.equal(pays(0.1), 1);
    assert.equal(pays(0.2), 1);
  });

  test("the others do not ask", () => {
    assert.equal(pipeline(1).pays(100), 1);
    assert.equal(pipeline(2).pays(0), 2);
  });

  test("one gap that is out of all proportion says little", () => {
    const gap = new GapEstimate();
    for (let i = 0; i < 20; i++) gap.learn(0.1);
    gap.learn(500);
    assert.ok(gap.ms < 0.14);
  });

  test("turns on by itself where a batch is short, and goes on measuring", async () => {
    const watched = stage({
      pipeline: "auto",
      backend: { baseMs: 5, handoverMs: 1.5 },
      limits: { maxBatchSize: 8 },
      queueMs: 60_000,
      totalMs: 60_000,
    });
    const { simulation, given } = watched;
    putMany(simulation, 4000);
    await simulation.run(2000);
    assert.equal(simulation.dispatcher.pipelineOf(slotOf(simulation)), 2);
    const tail = given.slice(100, 356);
    const waited = tail.filter(({ at, begunAt }) => begunAt! - at < 1.6);
    assert.equal(waited.length, 2, "every 128th leaves when its worker is free");
  });
});
