/** What counts as capacity, and when it no longer does. */
import { unmeasured } from "../../src/core/cost.ts";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Reply, Worker } from "../../src/workers/backend/backend.ts";
import type { Horizon } from "../../src/core/shed.ts";
import type { Simulation } from "../../src/cli/plan/simulation.ts";
import { type Changes, codes, endings, simulate } from "./simulated.ts";

/** Workers that hang when they are told to; whoever is heard of again answers at once. */
function withSilence(changes: Changes = {}) {
  const silent = new Set<string>();
  const speak: (() => void)[] = [];
  const simulation = simulate({
    ...changes,
    wrap: (worker) => ({
      name: worker.name,
      run(batch, signal): Promise<Reply> {
        if (!silent.has(worker.name)) return worker.run(batch, signal);
        return new Promise((resolve) => {
          signal.addEventListener("abort", () =>
            resolve({ kind: "failed", message: "aborted", blame: "batch" }),
          );
          speak.push(() => void worker.run(batch, signal).then(resolve));
        });
      },
    }),
  });
  return { simulation, silent, speak, ended: endings(simulation) };
}

/** Enough batches of one for the estimates to settle. */
async function settle(simulation: Simulation): Promise<void> {
  simulation.schedule(
    Array.from({ length: 24 }, (_, at) => at * 60),
    () => void simulation.put(),
  );
  await simulation.run(3000);
}

const horizonOf = ({ dispatcher, clock }: Simulation): Horizon => dispatcher.horizon(clock.now());

describe("a worker that is silent for twice its time", () => {
  test("is no capacity at once, and its tasks are done by others", async () => {
    const { simulation, silent, ended } = withSilence({ backend: { workers: 2, baseMs: 100 } });
    await settle(simulation);
    ended.clear();
    const before = horizonOf(simulation);
    assert.deepEqual([before.healthy, before.idle, before.overdue], [2, 2, 0]);
    const first = simulation.dispatcher.workers.best(simulation.clock.now())!.name;
    silent.add(first);
    simulation.put();
    await simulation.run(190);
    assert.equal(horizonOf(simulation).healthy, 2, "not yet");
    await simulation.run(120);
    const after = horizonOf(simulation);
    assert.deepEqual([after.healthy, after.overdue], [1, 1]);
    assert.ok(Math.abs(after.perMs - before.perMs / 2) < 0.01);
    assert.ok(Math.abs(after.nominalPerMs - before.nominalPerMs) < 0.01);
    await simulation.run(100);
    assert.deepEqual(codes(ended), ["ok"]);
  });

  test("is capacity again as soon as it says something", async () => {
    const { simulation, silent, speak } = withSilence({ backend: { workers: 2, baseMs: 100 } });
    await settle(simulation);
    for (const { name } of simulation.backend.workers) silent.add(name);
    simulation.put();
    await simulation.run(400);
    assert.ok(horizonOf(simulation).overdue > 0);
    silent.clear();
    for (const each of speak) each();
    await simulation.run(150);
    const { healthy, overdue } = horizonOf(simulation);
    assert.deepEqual([healthy, overdue], [2, 0]);
  });

  test("is down when its time is up, and tried again after 1, 2, 4 s; until it answers it does not count", async () => {
    const { simulation, silent } = withSilence({ backend: { workers: 2, baseMs: 100 }, workerMs: 500 });
    await settle(simulation);
    const first = simulation.dispatcher.workers.best(simulation.clock.now())!;
    silent.add(first.name);
    simulation.put();
    await simulation.run(510);
    assert.equal(first.state(simulation.clock.now()), "down");
    await simulation.run(1100);
    const probing = horizonOf(simulation);
    assert.equal(probing.healthy, 2, "it may be tried");
    assert.equal(probing.freeAt.length, 1, "it does not count");
  });

  test("alone, with nobody to take its tasks over, keeps them", async () => {
    const { simulation, silent, speak, ended } = withSilence({ backend: { workers: 1, baseMs: 100 } });
    await settle(simulation);
    ended.clear();
    silent.add(simulation.backend.workers[0]!.name);
    let overdue = 0;
    simulation.events.on("batch.overdue", () => overdue++);
    simulation.put();
    await simulation.run(400);
    assert.equal(overdue, 0);
    silent.clear();
    for (const each of speak) each();
    await simulation.run(200);
    assert.deepEqual(codes(ended), ["ok"]);
  });
});

describe("a worker that says how full it is", () => {
  function withLoad(): { simulation: Simulation; say: (share: number) => void } {
    let load: Worker["load"];
    const simulation: Simulation = simulate({
      backend: { workers: 2, baseMs: 100 },
      maxWorkerLoad: 0.9,
      wrap: (worker) => ({
        name: worker.name,
        run: (batch, signal) => worker.run(batch, signal),
        get load() {
          return worker.name.endsWith("1") ? load : undefined;
        },
      }),
    });
    return { simulation, say: (share) => (load = { share, at: simulation.clock.now() }) };
  }

  test("above 90 % it is no capacity, but it is still used and never refused for while it idles", async () => {
    const { simulation, say } = withLoad();
    await simulation.run(2);
    say(0.9);
    assert.equal(horizonOf(simulation).freeAt.length, 2);
    say(0.91);
    await simulation.run(2);
    const { freeAt, healthy, idle } = horizonOf(simulation);
    assert.deepEqual([freeAt.length, healthy, idle], [1, 2, 2]);
  });

  test("what it said is forgotten after three seconds", async () => {
    const { simulation, say } = withLoad();
    say(1);
    await simulation.run(2);
    assert.equal(horizonOf(simulation).freeAt.length, 1);
    await simulation.run(3000);
    assert.equal(horizonOf(simulation).freeAt.length, 2);
  });
});

test("workers that say for ever that they are full still run full batches", async () => {
  const options = { tiers: 1, targetUtilization: 0.7, lastTierDepth: 100, firstTierDepth: 500 };
  const simulation: Simulation = simulate({
    backend: { workers: 1, baseMs: 100 },
    maxWorkerLoad: 0.9,
    admission: { mode: "predictive", ...options },
    wrap: (worker) => ({
      name: worker.name,
      run: (batch, signal) => worker.run(batch, signal),
      get load() {
        return { share: 0.93, at: simulation.clock.now() };
      },
    }),
  });
  const ended = endings(simulation);
  const waits: number[] = [];
  // Twice of what the worker can do.
  simulation.schedule(
    Array.from({ length: 2 * 64 * 50 }, (_, at) => at * (100 / 128)),
    () => {
      const reply = simulation.knock(0);
      if ("waitMs" in reply) waits.push(reply.waitMs);
    },
  );
  await simulation.run(6000);
  assert.ok(ended.size >= 0.95 * 64 * 50, `${ended.size} ended`);
  assert.equal(Math.max(...waits), 1000, "nobody knows when, so nobody is sent away for long");
});

test("one batch that takes five times as long makes nobody slow; several in a row do", async () => {
  const simulation = simulate({ backend: { workers: 3, baseMs: 100 } });
  await settle(simulation);
  const { workers } = simulation.dispatcher;
  const [slot] = workers.slots;
  const now = simulation.clock.now();
  workers.answered(slot!, unmeasured(1), 500, now);
  assert.ok(!workers.slow(slot!, now), `${slot!.usualRatio} of the usual time`);
  assert.ok(slot!.ratio > 1.5, "admission goes by what happened");
  for (let batch = 0; batch < 3; batch++) workers.answered(slot!, unmeasured(1), 500, now);
  assert.ok(workers.slow(slot!, now), `${slot!.usualRatio} of the usual time`);
});

test("the fastest worker is gone: the others are not slow for that", async () => {
  const simulation = simulate({ backend: { workers: 3, baseMs: 100 } });
  await settle(simulation);
  const { workers } = simulation.dispatcher;
  const [fast, ...others] = workers.slots;
  fast!.ratio = fast!.usualRatio = 0.4;
  const now = simulation.clock.now();
  assert.ok(others.every((slot) => workers.slow(slot, now)));
  simulation.backend.kill(fast!.name);
  workers.failed(fast!, now, "killed", true);
  assert.ok(others.every((slot) => !workers.slow(slot, now)));
  assert.ok(
    others.every((slot) => !workers.slow(slot, now + 1500)),
    "nor while it is yet to be tried",
  );
});

test("tasks that cannot share a batch make the capacity smaller, for as long as they crowd", async () => {
  const simulation = simulate({ backend: { workers: 2, baseMs: 100 }, queueMs: 60_000, totalMs: 60_000 });
  for (let each = 0; each < 400; each++) simulation.put({ parameters: `{"n":${each}}` });
  await simulation.run(3000);
  assert.ok(horizonOf(simulation).batchSize < 16, `${horizonOf(simulation).batchSize} seats`);
  await simulation.run(60_000);
  simulation.schedule(
    Array.from({ length: 60 }, (_, at) => at * 150),
    () => void simulation.put(),
  );
  await simulation.run(20_000);
  assert.ok(horizonOf(simulation).batchSize > 50);
});

test("a worker that says it is unwell gets nothing and counts for nothing, until it says it is well", async () => {
  let health = { well: true, why: "", since: 0 };
  let tell: (() => void) | undefined;
  const simulation = simulate({
    backend: { workers: 1, baseMs: 10 },
    wrap: (worker) => ({
      name: worker.name,
      run: (batch, signal) => worker.run(batch, signal),
      get health() {
        return health;
      },
      set onHealth(listener: (() => void) | undefined) {
        tell = listener;
      },
    }),
  });
  const ended = endings(simulation);
  const states: string[] = [];
  simulation.events.on("worker.changed", ({ state, why }) => states.push(`${state}: ${why}`));
  health = { well: false, why: "out of memory", since: 0 };
  tell!();
  await simulation.run(2);
  assert.deepEqual([horizonOf(simulation).healthy, horizonOf(simulation).idle], [0, 0]);
  simulation.put();
  await simulation.run(500);
  assert.equal(ended.size, 0);
  health = { well: true, why: "", since: 0 };
  tell!();
  await simulation.run(20);
  assert.deepEqual(codes(ended), ["ok"]);
  assert.deepEqual(states, ["down: out of memory", "idle: it says that it is well again"]);
});
