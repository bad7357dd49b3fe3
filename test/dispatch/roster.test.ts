/** Workers that come and go while their dispatcher runs. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { codes, endings, simulate } from "./simulated.ts";

const worker = { workers: 2, baseMs: 100, perItemMs: 0 };

describe("a worker that comes", () => {
  test("gets a batch at once when one waits", async () => {
    const simulation = simulate({ backend: { ...worker, workers: 1 }, limits: { maxBatchSize: 1 } });
    const ended = endings(simulation);
    for (let at = 0; at < 4; at++) simulation.put();
    await simulation.run(10);
    const added = await simulation.backend.grow();
    simulation.dispatcher.join(added);
    await simulation.run(195);
    // Two by the first, at 100 and 200 ms; one by the other, at 110 ms.
    assert.equal(ended.size, 3);
    await simulation.run(50);
    assert.deepEqual(codes(ended), ["ok", "ok", "ok", "ok"]);
  });

  test("is capacity", async () => {
    const simulation = simulate({ backend: { ...worker, workers: 1 } });
    assert.equal(simulation.dispatcher.horizon(simulation.clock.now()).healthy, 1);
    simulation.dispatcher.join(await simulation.backend.grow());
    assert.equal(simulation.dispatcher.horizon(simulation.clock.now()).healthy, 2);
  });
});

describe("a worker that goes", () => {
  test("finishes what it runs, gets nothing more, and is gone then", async () => {
    const simulation = simulate({ backend: worker, limits: { maxBatchSize: 1 } });
    const ended = endings(simulation);
    for (let at = 0; at < 6; at++) simulation.put();
    await simulation.run(50);
    const [slot] = simulation.dispatcher.workers.slots;
    let gone = false;
    const retired = simulation.dispatcher.retire(slot!).then(() => (gone = true));
    assert.deepEqual(
      [slot!.state(simulation.clock.now()), simulation.dispatcher.horizon(simulation.clock.now()).healthy],
      ["draining", 1],
    );
    await simulation.run(40);
    assert.equal(gone, false);
    await simulation.run(20);
    await retired;
    assert.deepEqual([slot!.tasks, simulation.dispatcher.workers.slots.length], [1, 1]);
    await simulation.run(600);
    assert.deepEqual(
      codes(ended),
      Array.from({ length: 6 }, () => "ok"),
    );
    assert.equal(slot!.tasks, 1);
  });

  test("goes once, however often it is told to, and takes no other along", async () => {
    const simulation = simulate({ backend: worker, limits: { maxBatchSize: 1 } });
    for (let at = 0; at < 2; at++) simulation.put();
    await simulation.run(50);
    const { dispatcher } = simulation;
    const [slot, other] = dispatcher.workers.slots;
    const both = Promise.all([dispatcher.retire(slot!), dispatcher.retire(slot!)]);
    await simulation.run(100);
    await both;
    await dispatcher.retire(slot!);
    assert.deepEqual(dispatcher.workers.slots, [other]);
  });

  test("leaves at once when it is idle, and how busy the others were stays true", async () => {
    const simulation = simulate({ backend: worker, limits: { maxBatchSize: 1 } });
    for (let at = 0; at < 20; at++) simulation.put();
    await simulation.run(1500);
    const [, slot] = simulation.dispatcher.workers.slots;
    await simulation.dispatcher.retire(slot!);
    assert.equal(simulation.dispatcher.workers.slots.length, 1);
    const share = simulation.dispatcher.workers.utilization(simulation.clock.now());
    assert(share >= 0 && share <= 1, String(share));
  });

  test("when the last one goes, tasks wait for the next", async () => {
    const simulation = simulate({ backend: { ...worker, workers: 1 } });
    const ended = endings(simulation);
    await simulation.dispatcher.retire(simulation.dispatcher.workers.slots[0]!);
    simulation.put();
    await simulation.run(1000);
    assert.equal(ended.size, 0);
    simulation.dispatcher.join(await simulation.backend.grow());
    await simulation.run(200);
    assert.deepEqual(codes(ended), ["ok"]);
  });
});
