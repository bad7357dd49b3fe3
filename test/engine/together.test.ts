/** The inputs of one request enter the memory engine together, so that they can leave together. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Events } from "../../src/observe/events.ts";
import { holdsOn, type OpenEngine } from "../contract/engine-stage.ts";

const openBare: OpenEngine = async (options) => {
  const [clock, events] = [new VirtualClock(), new Events()];
  return { engine: new MemoryEngine(() => options, clock, events), clock, events };
};
const holds = holdsOn(openBare);

holds("what is put together is told once, when the last one is in", async (stage) => {
  const { engine } = stage;
  const told: [depth: number, count: number][] = [];
  engine.watch({ queued: (_model, _parameters, depth, count) => void told.push([depth, count]) });
  engine.together(() => {
    for (let at = 0; at < 3; at++) void engine.put(stage.task());
    assert.deepEqual(told, []);
  });
  assert.deepEqual(told, [[3, 3]]);
  void engine.put(stage.task());
  assert.deepEqual(told.at(-1), [4, 1]);
});

holds("a throw in between leaves nothing untold", async (stage) => {
  const { engine } = stage;
  let told = 0;
  engine.watch({ queued: (_model, _parameters, _depth, count) => void (told += count) });
  const breaks = (): void =>
    engine.together(() => {
      void engine.put(stage.task());
      throw new Error("in between");
    });
  assert.throws(breaks, /in between/);
  assert.equal(told, 1);
});

test("with a turn of the event loop as the unit, all that arrives in one is told once", () => {
  const limits = {
    models: new Map([["m", { queueMs: 1000, totalMs: 1000 }]]),
    tiers: 1,
    maxQueued: 10,
    maxQueuedBytes: 1000,
    results: { ttlMs: 1000, evictAfterRead: false, maxBytes: 1000 },
    deadLetters: { max: 1, ttlMs: 1000 },
  };
  const turns: (() => void)[] = [];
  const afterTurn = (run: () => void): void => void turns.push(run);
  const engine = new MemoryEngine(() => limits, new VirtualClock(), new Events(), { afterTurn });
  const told: [depth: number, count: number][] = [];
  engine.watch({ queued: (_model, _parameters, depth, count) => void told.push([depth, count]) });
  const put = (id: string): void => {
    const own = { id, tenant: "t", tier: 0, model: "m", input: "1", parameters: "", content: "" };
    void engine.put({ ...own, createdAt: 0, deadlineAt: 1000 });
  };
  put("a");
  engine.together(() => put("b"));
  put("c");
  assert.deepEqual([told, turns.length], [[], 1]);
  turns.shift()!();
  assert.deepEqual(told, [[3, 3]]);
  put("d");
  turns.shift()!();
  assert.deepEqual(told.at(-1), [4, 1]);
});
