/** Other bounds and other models while an engine, and a dispatcher on it, run. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { EngineLimits } from "../../src/engine/engine.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import { dead, done, MODEL, PLAIN, RESULT_TTL_MS, Stage } from "../contract/engine-stage.ts";
import { codes, endings, simulate } from "../dispatch/simulated.ts";

/** `live.limits` is what the engine goes by; a test switches it as a reload does. */
function stage(): { play: Stage; live: { limits: EngineLimits } } {
  const [clock, events, live] = [new VirtualClock(), new Events(), { limits: PLAIN }];
  const engine = new MemoryEngine(() => live.limits, clock, events);
  return { play: new Stage({ engine, clock, events }), live };
}

describe("an engine", () => {
  test("has a queue for a model that is new, and keeps what waits for the others", async () => {
    const { play, live } = stage();
    const { engine } = play;
    await engine.put(play.task());
    live.limits = { ...PLAIN, models: new Map([...PLAIN.models, ["new", { queueMs: 100, totalMs: 200 }]]) };
    assert.equal((await engine.put(play.task({ model: "new" }))).kind, "queued");
    assert.deepEqual([engine.waiting("new")[0], engine.waiting(MODEL)[0]], [1, 1]);
  });

  test("goes by new bounds: the queue's, how long results are kept, how many dead letters", async () => {
    const { play, live } = stage();
    const { engine } = play;
    const [a, b, c] = [play.task(), play.task(), play.task()];
    for (const task of [a, b, c]) await engine.put(task);
    const lease = await play.claim(64);
    await play.settle(lease, done(a.id));
    await play.settle(lease, dead(b.id));
    const results = { ...PLAIN.results, ttlMs: 1000 };
    live.limits = { ...PLAIN, maxQueued: 0, results, deadLetters: { ...PLAIN.deadLetters, max: 1 } };
    assert.equal((await engine.put(play.task())).kind, "full");
    await play.settle(lease, dead(c.id));
    assert.deepEqual(
      (await engine.deadLetters.list()).map(({ task }) => task.id),
      [c.id],
    );
    assert.ok(RESULT_TTL_MS > 1000);
    await play.pass(1001);
    assert.equal(await engine.outcome(a.id), undefined);
  });
});

describe("a dispatcher", () => {
  test("fills the next batch by its new rules, and what waits stays", async () => {
    const simulation = simulate({
      backend: { workers: 1, baseMs: 100, perItemMs: 0 },
      limits: { maxBatchSize: 2 },
    });
    const ended = endings(simulation);
    for (let at = 0; at < 9; at++) simulation.put();
    await simulation.run(50);
    const { dispatcher } = simulation;
    const { rules } = simulation;
    simulation.rules = { ...rules, limits: { ...rules.limits, maxBatchSize: 8 } };
    dispatcher.wake();
    await simulation.run(160);
    // The one that ran, then all that waited.
    assert.equal(dispatcher.workers.slots[0]!.batches, 2);
    assert.equal(codes(ended).length, 9);
  });

  test("whose worker is replaced twice starts nothing on it before its first batch has ended", async () => {
    const simulation = simulate({
      backend: { workers: 1, baseMs: 100, perItemMs: 0 },
      limits: { maxBatchSize: 1 },
    });
    const { dispatcher, backend } = simulation;
    simulation.put();
    simulation.put();
    await simulation.run(50);
    let [slot] = dispatcher.workers.slots;
    const batches: number[] = [];
    for (let round = 0; round < 2; round++) {
      const next = dispatcher.join(await backend.grow(), { predecessors: [slot!] });
      void dispatcher.retire(slot!);
      slot = next;
      dispatcher.wake();
      await simulation.run(10);
      batches.push(slot.batches);
    }
    await simulation.run(50);
    assert.deepEqual([...batches, slot!.batches], [0, 0, 1]);
  });
});
