import { unmeasured } from "../../src/core/cost.ts";
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Lease } from "../../src/engine/engine.ts";
import type { EventFields } from "../../src/observe/events.ts";
import { poisson } from "../../src/cli/plan/workload.ts";
import type { Simulation } from "../../src/cli/plan/simulation.ts";
import { Waiters } from "../../src/gateway/waiters.ts";
import { codes, endings, simulate } from "./simulated.ts";

function started(simulation: Simulation): EventFields["batch.started"][] {
  const list: EventFields["batch.started"][] = [];
  simulation.events.on("batch.started", (fields) => list.push(fields));
  return list;
}

describe("batching", () => {
  test("a lone task on an idle fleet leaves at once", async () => {
    const simulation = simulate();
    const ended = endings(simulation);
    const { id } = simulation.put();
    await simulation.run(101);
    assert.equal(ended.get(id)?.batch?.reason, "idle");
    assert.ok(ended.get(id)!.settledAt! - simulation.startedAt < 100.01);
  });

  test("a batch goes on filling while every worker is busy, and leaves into the first free slot", async () => {
    const simulation = simulate();
    const batches = started(simulation);
    simulation.put();
    await simulation.run(10);
    for (let i = 0; i < 30; i++) simulation.put();
    await simulation.run(80);
    for (let i = 0; i < 10; i++) simulation.put();
    await simulation.run(20);
    assert.deepEqual(
      batches.map(({ batch }) => batch.size),
      [1, 40],
    );
    // How long its first task waited, though the queue is empty when it starts.
    assert.deepEqual(
      batches.map(({ oldestWaitMs }) => Math.round(oldestWaitMs)),
      [0, 90],
    );
  });

  test("no batch is larger than maxBatchSize, and what is left goes next", async () => {
    const simulation = simulate({ backend: { workers: 2 }, limits: { maxBatchSize: 16 } });
    const batches = started(simulation);
    for (let i = 0; i < 40; i++) simulation.put();
    await simulation.run(1000);
    // The first task leaves alone: the fleet was idle and nothing said that more would come.
    assert.deepEqual(
      batches.map(({ batch }) => batch.size),
      [1, 16, 16, 7],
    );
  });

  test("tasks with different parameters never share a batch, and none of them starves", async () => {
    const simulation = simulate({ backend: { workers: 2 } });
    const ended = endings(simulation);
    for (let i = 0; i < 300; i++) simulation.put({ parameters: `{"p":${i % 5}}` });
    const seen: string[] = [];
    simulation.events.on("batch.started", ({ batch }) => seen.push(batch.id));
    await simulation.run(2000);
    assert.deepEqual(new Set(codes(ended)), new Set(["ok"]));
    assert.equal(ended.size, 300);
    const byBatch = Map.groupBy(ended.values(), ({ batch }) => batch!.id);
    for (const records of byBatch.values()) {
      assert.equal(new Set(records.map(({ task }) => task.parameters)).size, 1);
    }
  });

  test("no task waits longer than maxWaitMs while a worker is free", async () => {
    for (const policy of ["adaptive", "latency", "eco", "fixed"] as const) {
      const simulation = simulate({
        backend: { workers: 4, jitter: 0.1 },
        limits: { policy, maxWaitMs: 20 },
      });
      let freeSince = simulation.startedAt;
      simulation.events.on("batch.settled", () => {
        const others = simulation.dispatcher.workers.free(simulation.clock.now());
        if (others === 0) freeSince = simulation.clock.now();
      });
      simulation.events.on("batch.started", ({ oldestWaitMs }) => {
        const now = simulation.clock.now();
        const dueAt = Math.max(now - oldestWaitMs + 20, freeSince);
        assert.ok(now <= dueAt + 0.1, `${policy}: ${now - dueAt} ms late`);
      });
      simulation.schedule(poisson(1.5, 5000, 3), () => simulation.put());
      await simulation.run(8000);
    }
  });

  test("a worker's next batch leaves before the answers of its last one are given out", async () => {
    const order: string[] = [];
    const simulation = simulate({
      wrap: (worker) => ({
        name: worker.name,
        run: (batch, signal) => (order.push(`start ${batch.tasks.length}`), worker.run(batch, signal)),
      }),
    });
    const waiters = new Waiters(simulation.engine, simulation.clock);
    const { id } = simulation.put();
    void waiters.wait(waiters.expect(id), Infinity).then(() => order.push("answer"));
    await simulation.run(10);
    for (let i = 0; i < 3; i++) simulation.put();
    await simulation.run(95);
    assert.equal(simulation.dispatcher.workers.slots[0]!.batch?.size, 3);
    assert.deepEqual(order, ["start 1", "start 3", "answer"]);
  });

  test("identical content in one batch is sent once, also across tenants, and everybody is answered", async () => {
    const sizes: number[] = [];
    const simulation = simulate({
      wrap: (worker) => ({
        name: worker.name,
        run: (batch, signal) => (sizes.push(batch.tasks.length), worker.run(batch, signal)),
      }),
    });
    const ended = endings(simulation);
    simulation.put();
    for (let i = 0; i < 20; i++) simulation.put({ tenant: `t${i}`, content: "same", input: '"same"' });
    await simulation.run(300);
    assert.deepEqual(sizes, [1, 1]);
    assert.deepEqual(codes(ended), new Array(21).fill("ok"));
  });

  test("saturated: batches are at least 95 % full and workers busy 97 % of the time", async () => {
    const simulation = simulate({ backend: { workers: 4 }, queueMs: 60_000, totalMs: 60_000 });
    let open = 0;
    const refill = (): void => {
      for (; open < 512; open++) simulation.put();
    };
    simulation.engine.watch({ settled: () => open-- });
    simulation.events.on("batch.settled", refill);
    refill();
    await simulation.run(1000);
    const before = simulation.dispatcher.workers.slots.map(({ tasks, batches }) => ({ tasks, batches }));
    const busy = simulation.dispatcher.workers.slots.map((slot) => slot.busyMsUntil(simulation.clock.now()));
    await simulation.run(10_000);
    simulation.dispatcher.workers.slots.forEach((slot, at) => {
      assert.ok((slot.tasks - before[at]!.tasks) / (slot.batches - before[at]!.batches) >= 0.95 * 64);
      assert.ok((slot.busyMsUntil(simulation.clock.now()) - busy[at]!) / 10_000 >= 0.97);
    });
  });
});

describe("a mixed fleet", () => {
  test("slow workers get full batches or what has waited long enough", async () => {
    const simulation = simulate({ backend: { workers: 2 } });
    const [fast, slow] = simulation.dispatcher.workers.slots;
    const { workers } = simulation.dispatcher;
    const now = simulation.clock.now();
    for (let i = 0; i < 20; i++) workers.answered(fast!, unmeasured(1), 100, now);
    for (let i = 0; i < 20; i++) workers.answered(slow!, unmeasured(1), 400, now);
    assert.ok(workers.slow(slow!, now) && !workers.slow(fast!, now));
    const batches = started(simulation);
    simulation.put();
    simulation.put();
    await simulation.run(60);
    assert.equal(batches.find(({ batch }) => batch.worker === slow!.name)?.batch.reason, "wait");
  });
});

describe("an overdue batch", () => {
  /** gpu-1 hangs on its first batch after the estimates have settled. */
  function withStraggler(): { simulation: Simulation; calls: string[] } {
    const calls: string[] = [];
    let hang = false;
    const simulation = simulate({
      backend: { workers: 3 },
      wrap: (worker) => ({
        name: worker.name,
        run(batch, signal) {
          calls.push(worker.name);
          if (hang && batch.tasks.some(({ input }) => input === '"slow"')) {
            hang = false;
            return new Promise((resolve) => {
              simulation.clock.at(
                simulation.clock.now() + 1000,
                () => void worker.run(batch, signal).then(resolve),
              );
            });
          }
          return worker.run(batch, signal);
        },
      }),
    });
    const later = (): void => {
      hang = true;
      calls.length = 0;
      simulation.put({ input: '"slow"' });
    };
    simulation.schedule([...Array.from({ length: 20 }, (_, at) => at * 150), 4000], (index) => {
      if (index === 20) later();
      else simulation.put();
    });
    return { simulation, calls };
  }

  test("goes to the queue's front once, and the first answer wins", async () => {
    const { simulation, calls } = withStraggler();
    const ended = endings(simulation);
    let overdue = 0;
    simulation.events.on("batch.overdue", () => overdue++);
    await simulation.run(8000);
    const record = [...ended.values()].at(-1)!;
    assert.equal(record.outcome?.ok, true);
    assert.ok(record.settledAt! - record.task.createdAt < 260, "the second worker answered");
    assert.equal(overdue, 1);
    assert.equal(calls.length, 2);
    assert.equal(record.attempt, 1, "being overdue costs no attempt");
  });
});

describe("tasks that cannot ride together because their parameters differ", () => {
  test("the better tier goes first, however long the other waits; every tenth batch is the other's", async () => {
    const simulation = simulate({
      backend: { workers: 1, baseMs: 100 },
      limits: { maxBatchSize: 4 },
      tiers: 3,
      queueMs: 60_000,
      totalMs: 60_000,
    });
    const order: string[] = [];
    simulation.engine.watch({
      settled: ({ task }) => {
        if (order.at(-1) !== task.parameters) order.push(task.parameters);
      },
    });
    simulation.put({ parameters: "first" });
    await simulation.run(1);
    for (let each = 0; each < 40; each++) simulation.put({ parameters: "low", tier: 2 });
    await simulation.run(10);
    for (let each = 0; each < 400; each++) simulation.put({ parameters: "high", tier: 0 });
    await simulation.run(2500);
    assert.deepEqual(order.slice(0, 5), ["first", "high", "low", "high", "low"]);
    const low = simulation.engine.stats().depth.get("m")!;
    assert.deepEqual([...low].slice(2), [40 - 2 * 4]);
    simulation.stop();
  });
});

describe("claims that find nothing though tasks are shown", () => {
  const MOST_CLAIMS = 1000;

  /** An engine whose claims find nothing for now, by this reply. */
  function blocked(reply: () => Promise<Lease>) {
    const simulation = simulate({ queueMs: 60_000, totalMs: 60_000, backend: { workers: 2 } });
    const { engine } = simulation;
    const claim = engine.claim.bind(engine);
    const counted = { claims: 0 };
    engine.claim = () => {
      // A dispatcher that spins would never let the test go on.
      if (++counted.claims >= MOST_CLAIMS) return new Promise(() => {});
      return reply();
    };
    return { simulation, counted, unblock: () => void (engine.claim = claim) };
  }

  const nothing = async (): Promise<Lease> => ({
    token: "none",
    batch: { id: "b", reason: "idle", worker: "w", startedAt: 0, why: "", size: 0 },
    tasks: [],
  });

  for (const [what, reply] of [
    ["empty", nothing],
    ["rejected", () => Promise.reject(new Error("the store is away"))],
  ] as const) {
    test(`${what}: they come less and less often, and the task runs when it can be had`, async () => {
      const { simulation, counted, unblock } = blocked(reply);
      const ended = endings(simulation);
      const { id } = simulation.put();
      await simulation.run(10_000);
      assert.ok(counted.claims >= 10 && counted.claims <= 60, `${counted.claims} claims in ten seconds`);
      unblock();
      await simulation.run(1200);
      assert.equal(ended.get(id)?.outcome?.ok, true);
    });
  }

  test("what arrives meanwhile is claimed at once", async () => {
    const { simulation, unblock } = blocked(nothing);
    const ended = endings(simulation);
    simulation.put();
    await simulation.run(10_100);
    unblock();
    const { id } = simulation.put({ parameters: '{"other":1}' });
    await simulation.run(400);
    assert.equal(ended.get(id)?.outcome?.ok, true);
  });

  test("also what arrives while every worker waits for a claim that then finds nothing", async () => {
    const slow = { reply: nothing };
    const { simulation, unblock } = blocked(() => slow.reply());
    const ended = endings(simulation);
    simulation.put();
    await simulation.run(10_100);
    const found = Promise.withResolvers<Lease>();
    slow.reply = () => found.promise;
    // Both workers wait for a claim when it comes.
    simulation.put({ parameters: '{"other":1}' });
    await simulation.run(1);
    const { id } = simulation.put({ parameters: '{"other":2}' });
    unblock();
    found.resolve(await nothing());
    await simulation.run(400);
    assert.equal(ended.get(id)?.outcome?.ok, true);
  });
});
