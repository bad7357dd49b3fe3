/** Workers that die with two batches in their hands: who is tried again, where, and who is to blame. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Reply } from "../../src/workers/backend/backend.ts";
import { endings } from "./simulated.ts";
import { putMany, slotOf, type Stage, stage } from "./watched.ts";

describe("a worker that died", () => {
  test("is given nothing behind a batch that came back", async () => {
    const { simulation, given } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } });
    const death = Promise.withResolvers<void>();
    const [worker] = simulation.backend.workers;
    worker!.run = async (_batch, _signal, begun) => {
      assert.ok(given.length < 100, "it is asked again and again");
      if (given.length > 2) return { kind: "failed", message: "there is no child", blame: "nobody" };
      begun?.();
      await death.promise;
      return { kind: "failed", message: "it died", blame: "batch" };
    };
    putMany(simulation, 41);
    await simulation.run(50);
    assert.equal(given.length, 2);
    death.resolve();
    await simulation.run(500);
    assert.ok(given.length <= 4, `${given.length - 2} batches for a worker that is not there`);
    assert.equal(slotOf(simulation).state(simulation.clock.now()), "down");
  });
});

describe("an input that kills its worker", () => {
  /** All that is in its hands dies with it: it overlaps its batches, as functions that return callables do. */
  function overlapping({ simulation }: Stage): void {
    const [worker] = simulation.backend.workers;
    const inHands = new Set<{ readonly poisoned: boolean; readonly dies: () => void }>();
    worker!.run = (batch, _signal, begun) => {
      begun?.();
      const { promise, resolve } = Promise.withResolvers<Reply>();
      const outputs = batch.tasks.map(({ input }) => input);
      const dies = (): void => resolve({ kind: "failed", message: "it died", blame: "batch" });
      const held = { poisoned: outputs.includes('"poison"'), dies };
      inHands.add(held);
      simulation.clock.at(simulation.clock.now() + 10, () => {
        if ([...inHands].some(({ poisoned }) => poisoned)) for (const each of inHands) each.dies();
        inHands.delete(held);
        resolve({ kind: "answered", outputs });
      });
      return promise;
    };
  }

  test("is a dead letter, and takes nobody with it who happened to be there", async () => {
    for (const retries of [2, 3]) {
      const watched = stage({
        pipeline: 2,
        limits: { maxBatchSize: 4 },
        retries,
        queueMs: 60_000,
        totalMs: 60_000,
      });
      const { simulation } = watched;
      overlapping(watched);
      const ended = endings(simulation);
      const poisons: string[] = [];
      for (let count = 0; count < 60; count++) {
        putMany(simulation, 3);
        if (count % 3 === 0) poisons.push(simulation.put({ input: '"poison"' }).id);
        await simulation.run(7);
      }
      await simulation.run(50_000);
      assert.equal(watched.mostAtOnce, 2);
      const dead = [...ended].flatMap(([id, { outcome }]) => (outcome?.ok === false ? [id] : []));
      assert.ok(dead.length > 0);
      assert.deepEqual(
        dead.filter((id) => !poisons.includes(id)),
        [],
      );
    }
  });
});
