/** Batches that are handed over while their worker runs another (`src/dispatch/pipeline.ts`), on virtual time. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Simulation } from "../../src/cli/plan/simulation.ts";
import { type Changes, codes, endings } from "./simulated.ts";
import { leaseUntil, putMany, slotOf, type Stage, stage, train } from "./watched.ts";

describe("a full batch", () => {
  test("is handed over at once, and begins when the one before it ends", async () => {
    const { simulation, given } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } });
    const ended = endings(simulation);
    putMany(simulation, 5);
    await simulation.run(50);
    assert.deepEqual(
      given.map(({ size, at, begunAt }) => [size, at, begunAt]),
      [
        [1, 0, 0],
        [4, 0, undefined],
      ],
    );
    const slot = slotOf(simulation);
    assert.equal(slot.ahead?.id, given[1]!.id);
    assert.equal(simulation.dispatcher.pipelineOf(slot), 2);
    await simulation.run(151);
    assert.equal(Math.round(given[1]!.begunAt!), 100);
    assert.equal(Math.round(given[1]!.endedAt!), 200);
    const { batch } = ended.get("task-5")!;
    assert.match(batch!.why, /^a full batch of 4 handed over early after 0 ms$/);
    assert.equal(Math.round(batch!.startedAt - simulation.startedAt), 100);
    assert.equal(slot.batch, undefined);
  });

  test("waits for its worker's reply with pipeline: 1, and with auto where there is no gap", async () => {
    for (const pipeline of [1, "auto"] as const) {
      const watched = stage({ pipeline, limits: { maxBatchSize: 4 } });
      putMany(watched.simulation, 40);
      await watched.simulation.run(2000);
      assert.equal(watched.mostAtOnce, 1);
      assert.equal(watched.given.length, 11);
    }
  });

  test("is never handed over while another worker is free", async () => {
    const watched = stage({ pipeline: 2, backend: { workers: 2 }, limits: { maxBatchSize: 4 } });
    putMany(watched.simulation, 5);
    await watched.simulation.run(50);
    assert.deepEqual(
      watched.given.map(({ worker, size }) => [worker, size]),
      [
        ["gpu-1", 1],
        ["gpu-2", 4],
      ],
    );
    putMany(watched.simulation, 4);
    await watched.simulation.run(1);
    assert.equal(slotOf(watched.simulation).ahead?.size, 4, "behind the one that will be free first");
    assert.equal(slotOf(watched.simulation, 1).ahead, undefined);
  });

  test("is one of two in a worker's hands at most", async () => {
    for (const mute of [false, true]) {
      const watched = stage({ pipeline: 2, limits: { maxBatchSize: 4 } }, mute);
      const ended = endings(watched.simulation);
      putMany(watched.simulation, 60);
      await watched.simulation.run(1900);
      assert.equal(watched.mostAtOnce, 2);
      assert.deepEqual(new Set(codes(ended)), new Set(["ok"]));
      assert.equal(ended.size, 60);
    }
  });
});

describe("a batch that is not full", () => {
  const changes = { pipeline: 2, backend: { handoverMs: 10 } } as const;

  /** Leaves with a batch that runs since just now, and a gap that is known. */
  async function running(more: Changes = {}): Promise<Stage & { from: number }> {
    const watched = stage({ ...changes, ...more });
    const { simulation, given } = watched;
    await train(simulation);
    // A batch that leaves at a reply because work waits: the gap.
    for (let i = 0; i < 12; i++) {
      simulation.put();
      await simulation.run(0.5);
      simulation.put({ parameters: '{"other":1}' });
      await simulation.run(400);
    }
    simulation.put();
    await simulation.run(10.5);
    given.length = 0;
    return { ...watched, given, from: simulation.clock.now() - simulation.startedAt - 0.5 };
  }

  test("is bound at the last useful moment, with whoever has come until then", async () => {
    const { simulation, given, from } = await running();
    for (let i = 0; i < 8; i++) {
      simulation.put();
      await simulation.run(10);
    }
    assert.equal(given.length, 0, "not while it can still fill");
    simulation.put();
    await simulation.run(400);
    const [first] = given;
    assert.equal(first!.size, 9);
    assert.ok(first!.at >= from + 85 && first!.at <= from + 90.01, `${first!.at - from}`);
    assert.ok(first!.begunAt! - from <= 100.1, `${first!.begunAt! - from}`);
  });

  test("stays in its queue if the policy would not send it then either", async () => {
    const { simulation, given, from } = await running({ limits: { policy: "fixed", maxWaitMs: 60_000 } });
    simulation.put();
    await simulation.run(99);
    assert.equal(given.filter(({ at }) => at >= from).length, 0);
  });

  test("is not bound before it is known how long a batch takes", async () => {
    const { simulation, given } = stage(changes);
    simulation.put();
    await simulation.run(1);
    simulation.put();
    await simulation.run(100);
    assert.equal(given.length, 1);
  });
});

describe("no batch is handed over to a worker", () => {
  const cases: Record<string, (simulation: Simulation) => void> = {
    "that is to be given back": (simulation) =>
      slotOf(simulation).transition({ type: "lease", lease: { until: Infinity, release: true } }),
    "that is to go": (simulation) => slotOf(simulation).transition({ type: "retire" }),
    "whose batch is long overdue": (simulation) => slotOf(simulation).transition({ type: "silent" }),
    "that asked for a pause": (simulation) => slotOf(simulation).circuit.pause(simulation.clock.now() + 1000),
    "that has to prove itself": (simulation) =>
      slotOf(simulation).circuit.failed(simulation.clock.now() - 5000, "test", true),
    "whose lease will run out": (simulation) => leaseUntil(slotOf(simulation), simulation.clock.now() + 60),
    "whose batch is being cut": (simulation) => slotOf(simulation).batch!.transition("settling", 0),
  };
  for (const [name, change] of Object.entries(cases)) {
    test(name, async () => {
      const { simulation, given } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } });
      simulation.put();
      await simulation.run(10);
      change(simulation);
      putMany(simulation, 4);
      await simulation.run(20);
      assert.equal(given.length, 1);
    });
  }

  test("whose batch takes longer than it should", async () => {
    const { simulation, given } = stage({
      pipeline: 2,
      limits: { maxBatchSize: 4 },
      backend: { hangRate: 1 },
    });
    simulation.put();
    await simulation.run(10);
    const { batch } = slotOf(simulation);
    await simulation.run(1.6 * (batch!.expectedFreeAt - batch!.startedAt));
    putMany(simulation, 4);
    await simulation.run(1);
    assert.equal(given.length, 1);
  });
});

describe("time", () => {
  test("a worker has workerMs for each, from its turn on", async () => {
    for (const mute of [false, true]) {
      const { simulation } = stage({ pipeline: 2, workerMs: 150, limits: { maxBatchSize: 4 } }, mute);
      const ended = endings(simulation);
      putMany(simulation, 13);
      await simulation.run(1000);
      assert.deepEqual(new Set(codes(ended)), new Set(["ok"]), `mute: ${mute}`);
      assert.equal(ended.size, 13);
    }
  });

  test("and not a moment longer: one that hangs is given up workerMs after its turn", async () => {
    for (const mute of [false, true]) {
      const { simulation, given } = stage({ pipeline: 2, workerMs: 150, limits: { maxBatchSize: 4 } }, mute);
      const worker = simulation.backend.workers[0]!;
      const run = worker.run.bind(worker);
      worker.run = (batch, signal, begun) => {
        if (batch.tasks.length === 1) return run(batch, signal, begun);
        return new Promise((resolve) => {
          const reply = { kind: "failed", message: "aborted", blame: "batch" } as const;
          signal.addEventListener("abort", () => resolve(reply));
        });
      };
      putMany(simulation, 5);
      await simulation.run(240);
      assert.equal(given.length, 2);
      assert.equal(given[1]!.endedAt, undefined, `mute: ${mute}`);
      await simulation.run(20);
      assert.equal(Math.round(given[1]!.endedAt!), 250, `mute: ${mute}`);
    }
  });

  test("what is learned of a batch is its own time, and busy time is not counted twice", async () => {
    for (const mute of [false, true]) {
      const { simulation } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } }, mute);
      putMany(simulation, 80);
      await simulation.run(1500);
      const { workers } = simulation.dispatcher;
      assert.ok(Math.abs(workers.service.msFor(4) - 100) < 0.1, `${workers.service.msFor(4)}`);
      assert.ok(Math.abs(slotOf(simulation).busyMsUntil(simulation.clock.now()) - 1500) < 0.1);
      assert.ok(workers.utilization(simulation.clock.now()) <= 1);
    }
  });

  test("whoever asks for the outlook is told that it is free one batch later", async () => {
    const { simulation } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } });
    await train(simulation);
    putMany(simulation, 4);
    await simulation.run(1);
    putMany(simulation, 4);
    await simulation.run(1);
    const now = simulation.clock.now();
    assert.deepEqual(
      simulation.dispatcher.horizon(now).freeAt.map((at) => Math.round(at - now)),
      [198],
    );
  });
});

describe("a worker that goes", () => {
  test("runs what it was given, and is gone only then", async () => {
    const { simulation } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } });
    const ended = endings(simulation);
    putMany(simulation, 5);
    await simulation.run(10);
    let gone = false;
    void simulation.dispatcher.retire(slotOf(simulation)).then(() => (gone = true));
    await simulation.run(140);
    assert.equal(gone, false);
    assert.equal(ended.size, 1);
    await simulation.run(60);
    assert.equal(gone, true);
    assert.deepEqual(codes(ended), ["ok", "ok", "ok", "ok", "ok"]);
  });

  test("a dispatcher that drains waits for both", async () => {
    const { simulation } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } });
    const ended = endings(simulation);
    putMany(simulation, 9);
    await simulation.run(10);
    let drained = false;
    void simulation.dispatcher.drain().then(() => (drained = true));
    await simulation.run(150);
    assert.equal(drained, false);
    await simulation.run(60);
    assert.equal(drained, true);
    assert.equal(ended.size, 5, "what nobody was given stays queued");
  });
});

describe("a worker that dies", () => {
  test("costs what it held behind its batch no attempt, and counts once", async () => {
    const { simulation } = stage({ pipeline: 2, limits: { maxBatchSize: 4 } });
    const ended = endings(simulation);
    putMany(simulation, 5);
    await simulation.run(50);
    simulation.backend.kill("gpu-1", 10);
    await simulation.run(0.5);
    assert.equal(slotOf(simulation).failures, 1);
    assert.equal(slotOf(simulation).batch?.early, false, "it is tried again as any other");
    await simulation.run(3000);
    assert.deepEqual(new Set(codes(ended)), new Set(["ok"]));
    assert.deepEqual(
      [1, 2, 3, 4, 5].map((at) => ended.get(`task-${at}`)?.attempt),
      [2, 1, 1, 1, 1],
    );
  });

  test("and is silent about it: both batches ride elsewhere", async () => {
    const { simulation, given } = stage({
      pipeline: 2,
      backend: { workers: 2 },
      limits: { maxBatchSize: 4 },
    });
    await train(simulation);
    await train(simulation);
    const ended = endings(simulation);
    given.length = 0;
    // Both are busy and have one more; then one of them hangs.
    const { workers } = simulation.backend;
    const first = workers[0]!;
    const run = first.run.bind(first);
    first.run = (batch, signal, begun) => {
      begun?.();
      return given.length > 4 ? run(batch, signal, begun) : new Promise(() => {});
    };
    const ids = putMany(simulation, 16);
    await simulation.run(900);
    assert.equal(slotOf(simulation).silent, true);
    assert.deepEqual(
      ids.map((id) => ended.get(id)?.outcome?.ok),
      ids.map(() => true),
    );
  });
});

describe("a batch that is refused", () => {
  test("is cut after the one behind it, and no third one comes", async () => {
    const watched = stage({
      pipeline: 2,
      limits: { maxBatchSize: 8 },
      backend: { reject: (input) => input === '"bad"' },
    });
    const { simulation, given } = watched;
    const ended = endings(simulation);
    simulation.put();
    await simulation.run(10);
    const bad = simulation.put({ input: '"bad"' }).id;
    putMany(simulation, 7);
    await simulation.run(150);
    putMany(simulation, 24);
    await simulation.run(3000);
    assert.equal(watched.mostAtOnce, 2);
    assert.equal(ended.size, 33);
    for (const [id, { outcome }] of ended) {
      assert.equal(outcome!.ok ? "ok" : outcome!.code, id === bad ? "INPUT_REJECTED" : "ok");
    }
    const cut = given[1]!.id;
    const after = given.slice(given.findIndex(({ id }) => id === cut) + 1);
    assert.notEqual(after[0]!.id, cut, "one was handed over behind it");
    const calls = after.filter(({ id }) => id === cut);
    assert.ok(calls.length > 2);
    assert.ok(calls.every(({ at }) => at >= after[0]!.endedAt!));
  });

  test("holds its lease while it waits for the one behind it, and costs nobody an attempt", async () => {
    const { simulation } = stage({
      pipeline: 2,
      limits: { maxBatchSize: 4 },
      backend: { baseMs: 9000, reject: (input) => input === '"bad"' },
      workerMs: 10_000,
      queueMs: 600_000,
      totalMs: 600_000,
    });
    const ended = endings(simulation);
    const lost: string[] = [];
    simulation.events.on("task.retried", ({ id, message }) => lost.push(`${id}: ${message}`));
    simulation.put();
    const bad = simulation.put({ input: '"bad"' }).id;
    putMany(simulation, 7);
    // Refused after 18 s; the one behind it runs until 27 s.
    await simulation.run(120_000);
    assert.equal(ended.size, 9);
    assert.deepEqual(lost, []);
    for (const [id, { outcome, attempt }] of ended)
      assert.deepEqual([outcome!.ok, attempt], [id !== bad, 1], id);
  });
});
