import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Reply } from "../../src/workers/backend/backend.ts";
import type { Simulation } from "../../src/cli/plan/simulation.ts";
import { type Changes, codes, endings, simulate } from "./simulated.ts";
import { leaseUntil } from "./watched.ts";

/** A fleet that answers as `behave` says, and counts its calls. */
function stubbed(behave: (inputs: string[], call: number) => Reply["kind"] | Reply, changes: Changes = {}) {
  const calls: number[] = [];
  const simulation: Simulation = simulate({
    ...changes,
    wrap: (worker) => ({
      name: worker.name,
      async run(batch, signal): Promise<Reply> {
        calls.push(batch.tasks.length);
        const answered = await worker.run(batch, signal);
        const reply = behave(
          batch.tasks.map(({ input }) => input),
          calls.length,
        );
        if (typeof reply !== "string") return reply;
        if (reply === "answered") return answered;
        if (reply === "busy") return { kind: "busy", message: "later", retryAfterMs: 500 };
        if (reply === "failed") return { kind: "failed", message: "broken", blame: "worker" };
        return { kind: reply, message: "no" };
      },
    }),
  });
  return { simulation, calls, ended: endings(simulation) };
}

/** One task keeps the worker busy so that the others leave as one batch. */
async function putTogether(simulation: Simulation, inputs: readonly string[]): Promise<string[]> {
  simulation.put({ input: '"first"' });
  await simulation.run(1);
  return inputs.map((input) => simulation.put({ input: JSON.stringify(input) }).id);
}

const sixtyFour = Array.from({ length: 64 }, (_, at) => `good-${at}`);

describe("a worker that refuses a batch", () => {
  for (const kind of ["rejected", "unusable"] as const) {
    test(`${kind}: wherever the guilty input stands among 64, only it fails, in at most 14 calls`, async () => {
      for (let guilty = 0; guilty < 64; guilty += 7) {
        const inputs = sixtyFour.with(guilty, "bad");
        const { simulation, calls, ended } = stubbed((seen) => (seen.includes('"bad"') ? kind : "answered"), {
          backend: { baseMs: 10 },
        });
        const ids = await putTogether(simulation, inputs);
        await simulation.run(2000);
        const failed = ids.filter((id) => ended.get(id)?.outcome?.ok !== true);
        assert.deepEqual(failed, [ids[guilty]]);
        assert.equal(codes(new Map([["", ended.get(ids[guilty]!)!]]))[0], "INPUT_REJECTED");
        assert.ok(calls.length - 1 <= 14, `${calls.length - 1} calls`);
      }
    });
  }

  test("no further call to a worker whose lease has run out meanwhile: the rest goes back, no attempt counted", async () => {
    const { simulation, calls, ended } = stubbed((seen, call) => {
      const [slot] = simulation.dispatcher.workers.slots;
      // After the first half of the batch: another process may use it from here on.
      if (call === 3) leaseUntil(slot!, simulation.clock.now());
      return seen.includes('"bad"') ? "rejected" : "answered";
    });
    const ids = await putTogether(simulation, sixtyFour.with(40, "bad"));
    await simulation.run(1000);
    assert.deepEqual(calls, [1, 64, 32]);
    const open = await Promise.all(ids.slice(32).map((id) => simulation.engine.outcome(id)));
    for (const record of open) assert.deepEqual([record?.state, record?.attempt], ["queued", 0]);
    leaseUntil(simulation.dispatcher.workers.slots[0]!, Infinity);
    simulation.dispatcher.wake();
    await simulation.run(3000);
    const failed = ids.filter((id) => ended.get(id)?.outcome?.ok !== true);
    assert.deepEqual(failed, [ids[40]]);
  });

  for (const retries of [3, 0]) {
    test(`many guilty inputs, ${retries} retries: the innocent are answered, the guilty refused, in few calls`, async () => {
      const inputs = sixtyFour.map((input, at) => (at % 5 === 0 ? `bad-${at}` : input));
      const { simulation, ended, calls } = stubbed(
        (seen) => (seen.some((input) => input.startsWith('"bad')) ? "rejected" : "answered"),
        { backend: { baseMs: 5, workers: 2 }, totalMs: 60_000, queueMs: 60_000, retries },
      );
      const ids = await putTogether(simulation, inputs);
      await simulation.run(30_000);
      ids.forEach((id, at) => assert.equal(ended.get(id)?.outcome?.ok, at % 5 !== 0));
      assert.ok(calls.length < 130, `${calls.length} calls`);
    });
  }

  test("a task whose time was up before its last attempt failed is no dead letter, and nobody says so", async () => {
    const { simulation, ended } = stubbed(() => "failed", {
      backend: { baseMs: 200 },
      retries: 0,
      totalMs: 150,
    });
    let told = 0;
    simulation.events.on("task.dead", () => told++);
    simulation.put();
    await simulation.run(1000);
    assert.deepEqual(codes(ended), ["DEADLINE_EXCEEDED"]);
    assert.equal((await simulation.engine.deadLetters.list()).length, 0);
    assert.equal(told, 0);
  });

  test("everything unusable, always: 502 and dead letters, not 422", async () => {
    const { simulation, ended } = stubbed(() => "unusable", {
      backend: { baseMs: 1 },
      totalMs: 60_000,
      queueMs: 60_000,
    });
    simulation.put();
    await simulation.run(60_000);
    assert.deepEqual(codes(ended), ["INFERENCE_FAILED"]);
    assert.equal((await simulation.engine.deadLetters.list()).length, 1);
  });
});

describe("a worker that does not have what the client named", () => {
  const notFound: Reply = { kind: "rejected", message: "no version 7", code: "NOT_FOUND" };

  test("all tasks of the batch are answered after one call, and nothing counts against it", async () => {
    const { simulation, calls, ended } = stubbed(() => notFound, { failures: 1 });
    const downs: string[] = [];
    simulation.events.on("worker.changed", ({ worker }) => downs.push(worker));
    simulation.put({ parameters: '{"version":"7"}' });
    await simulation.run(1);
    for (let at = 0; at < 8; at++) simulation.put({ input: String(at), parameters: '{"version":"7"}' });
    await simulation.run(2000);
    assert.deepEqual(calls, [1, 8]);
    assert.deepEqual([...new Set(codes(ended))], ["NOT_FOUND"]);
    assert.equal(ended.size, 9);
    assert.deepEqual(downs, []);
  });

  test("what one worker answered a moment ago is another's failure, and tried again", async () => {
    const simulation = simulate({
      backend: { workers: 2, baseMs: 5 },
      limits: { maxBatchSize: 1 },
      wrap: (worker) => ({
        name: worker.name,
        run: async (batch, signal, begun) => {
          const answered = await worker.run(batch, signal, begun);
          const at = simulation.clock.now() - simulation.startedAt;
          return worker.name === "gpu-1" && at > 500 ? notFound : answered;
        },
      }),
    });
    const ended = endings(simulation);
    const downs: string[] = [];
    simulation.events.on("worker.changed", ({ worker, state }) => {
      if (state === "down") downs.push(worker);
    });
    simulation.schedule(
      Array.from({ length: 200 }, (_, at) => at * 10),
      (at) => simulation.put({ input: String(at), parameters: '{"version":"7"}' }),
    );
    await simulation.run(6000);
    assert.deepEqual([...new Set(codes(ended))], ["ok"]);
    assert.deepEqual([...new Set(downs)], ["gpu-1"]);
  });

  test("what is named and not ready is waited for by its client alone", async () => {
    const busy: Reply = { kind: "busy", message: "version 7 is loading", retryAfterMs: 1000, named: true };
    const { simulation, calls, ended } = stubbed((inputs) => (inputs.includes("7") ? busy : "answered"), {
      backend: { baseMs: 5 },
    });
    const answeredMs: number[] = [];
    simulation.engine.watch({
      settled: ({ outcome, task }) => {
        if (outcome?.ok === true) answeredMs.push(simulation.clock.now() - task.createdAt);
      },
    });
    simulation.schedule([0], () => simulation.put({ input: "7", parameters: '{"version":"7"}' }));
    simulation.schedule(
      Array.from({ length: 30 }, (_, at) => 20 + at * 50),
      (at) => simulation.put({ input: `[${at}]` }),
    );
    await simulation.run(5000);
    assert.equal(answeredMs.length, 30);
    assert.ok(Math.max(...answeredMs) < 100, `${Math.max(...answeredMs)} ms`);
    assert.deepEqual([...new Set(codes(ended))].sort(), ["DEADLINE_EXCEEDED", "ok"]);
    assert.ok(calls.length <= 30 + 5, `${calls.length} calls`);
  });

  test("it does not make up for failures either", async () => {
    const { simulation } = stubbed((inputs) => (inputs.includes("7") ? notFound : "failed"), {
      limits: { maxBatchSize: 1 },
      backend: { baseMs: 5 },
    });
    simulation.schedule([0, 20, 40, 60], (at) => {
      simulation.put({ input: String(at) });
      simulation.put({ input: "7", parameters: '{"version":"7"}' });
    });
    await simulation.run(500);
    assert.equal(simulation.dispatcher.workers.slots[0]!.circuit.probing, true);
  });
});

describe("a worker that fails", () => {
  test("a task is tried 1 + 3 times with growing pauses, then it is a dead letter", async () => {
    const { simulation, calls, ended } = stubbed(() => "failed", { failures: 100 });
    const { id } = simulation.put();
    await simulation.run(4000);
    assert.equal(calls.length, 4);
    assert.deepEqual(codes(ended), ["INFERENCE_FAILED"]);
    assert.equal((await simulation.engine.deadLetters.get(id))?.attempts, 4);
  });

  test("after failures in a row it is left alone, then tried with one small batch, for ever longer", async () => {
    const calledAt: number[] = [];
    const { simulation } = stubbed(
      () => {
        calledAt.push(Math.round(simulation.clock.now() - simulation.startedAt));
        return "failed";
      },
      { failures: 1, retries: 100, totalMs: 60_000, queueMs: 60_000, backend: { baseMs: 1 } },
    );
    simulation.put();
    await simulation.run(20_000);
    const gaps = calledAt.slice(1).map((at, index) => Math.round((at - calledAt[index]!) / 1000));
    assert.deepEqual(gaps.slice(0, 4), [1, 2, 4, 8]);
  });

  for (const how of ["worker", "batch"] as const) {
    for (const [what, put] of [
      ["one task", (simulation: Simulation) => [simulation.put({ input: '"poison"' })]],
      [
        "one input sent as five tasks",
        (simulation: Simulation) =>
          Array.from({ length: 5 }, () => simulation.put({ input: '"poison"', content: "" })),
      ],
    ] as const) {
      test(`${what} that fails at every attempt (blame: ${how}) ejects no worker, however often it is tried`, async () => {
        for (const workers of [1, 2]) {
          const { simulation, ended } = stubbed(
            (inputs) =>
              inputs.includes('"poison"') ? { kind: "failed", message: "500", blame: how } : "answered",
            {
              backend: { workers, baseMs: 5 },
              limits: { maxBatchSize: 1 },
              totalMs: 60_000,
              queueMs: 60_000,
            },
          );
          const downs: string[] = [];
          simulation.events.on("worker.changed", ({ worker, state }) => {
            if (state === "down") downs.push(worker);
          });
          const tasks = put(simulation);
          await simulation.run(20_000);
          assert.deepEqual(downs, []);
          assert.equal(ended.size, tasks.length);
          assert.deepEqual([...new Set(codes(ended))], ["INFERENCE_FAILED"]);
        }
      });
    }
  }

  test("one input that a worker never answers ejects each worker once at most", async () => {
    for (const workers of [1, 3]) {
      const simulation = simulate({
        backend: { workers, baseMs: 5 },
        totalMs: 60_000,
        queueMs: 60_000,
        wrap: (worker) => ({
          name: worker.name,
          run: async (batch, signal, begun) => {
            if (batch.tasks.every(({ input }) => input !== '"hang"')) return worker.run(batch, signal, begun);
            await new Promise((resolve) => signal.addEventListener("abort", resolve));
            return { kind: "failed", message: "aborted", blame: "batch" };
          },
        }),
      });
      const ended = endings(simulation);
      const ejected: string[] = [];
      let last = "";
      simulation.events.on("worker.changed", ({ worker, state, why }) => {
        last = state;
        if (state === "down" && why.startsWith("no answer within")) ejected.push(worker);
      });
      simulation.schedule(
        Array.from({ length: 40 }, (_, at) => at * 20),
        (at) => simulation.put({ input: String(at) }),
      );
      simulation.schedule([1000], () => simulation.put({ input: '"hang"' }));
      await simulation.run(40_000);
      assert.equal(codes(ended).filter((code) => code !== "ok").length, 1);
      assert.equal(new Set(ejected).size, ejected.length, ejected.join());
      assert.equal(last, "idle");
    }
  });

  test("distinct inputs, one client's, that all fail eject a worker by the third of them", async () => {
    const { simulation, calls } = stubbed(() => "failed", { backend: { baseMs: 5 } });
    let downAfter = 0;
    simulation.events.on("worker.changed", ({ state }) => {
      if (state === "down" && downAfter === 0) downAfter = calls.length;
    });
    simulation.schedule([0, 20, 40, 60], (at) => simulation.put({ input: String(at) }));
    await simulation.run(1000);
    const [first] = simulation.dispatcher.workers.slots;
    assert.ok(downAfter >= 3 && downAfter <= 6, `down after ${downAfter} calls`);
    assert.equal(first!.circuit.probing, true);
  });

  test("poison that kills its worker ends alone; its mates are answered", async () => {
    const inputs = sixtyFour.with(40, "killer");
    const simulation = simulate({
      backend: { workers: 2, baseMs: 10, crash: (input) => input === '"killer"' },
      totalMs: 60_000,
      queueMs: 60_000,
    });
    const ended = endings(simulation);
    const ids = await putTogether(simulation, inputs);
    await simulation.run(30_000);
    ids.forEach((id, at) => assert.equal(ended.get(id)?.outcome?.ok, at !== 40, `task ${at}`));
    assert.equal((await simulation.engine.deadLetters.get(ids[40]!))?.attempts, 4);
  });

  test("429 and 503 are honoured: the worker is left alone, no attempt counts", async () => {
    const at: number[] = [];
    const { simulation, ended } = stubbed((_, call) => {
      at.push(simulation.clock.now());
      return call < 4 ? "busy" : "answered";
    });
    simulation.put();
    await simulation.run(3000);
    assert.deepEqual(codes(ended), ["ok"]);
    assert.equal([...ended.values()][0]!.attempt, 1);
    assert.ok(at.slice(1).every((time, index) => time - at[index]! >= 500));
  });

  test("an outage costs at most a tenth more calls than there were first ones, and its end is noticed", async () => {
    let down = true;
    const { simulation, calls, ended } = stubbed(() => (down ? "failed" : "answered"), {
      failures: 1_000_000,
      backend: { workers: 4, baseMs: 5 },
      retries: 1000,
    });
    simulation.schedule(
      Array.from({ length: 2000 }, (_, at) => at * 10),
      () => simulation.put(),
    );
    simulation.clock.at(simulation.startedAt + 18_000, () => (down = false));
    await simulation.run(18_000);
    const allowed = 1.1 * 1800 + 10 + 18 + 20;
    assert.ok(calls.length <= allowed, `${calls.length} calls, ${allowed} allowed`);
    await simulation.run(6000);
    assert.ok(
      codes(ended)
        .slice(-100)
        .every((code) => code === "ok"),
    );
  });
});

describe("time", () => {
  test("queue age and total time are enforced while every worker hangs", async () => {
    const simulation = simulate({ backend: { hangRate: 1 }, workerMs: 30_000 });
    const ended = endings(simulation);
    const running = simulation.put();
    await simulation.run(1);
    const queued = simulation.put();
    await simulation.run(2001);
    assert.equal(ended.get(queued.id)?.outcome?.ok, false);
    assert.equal(ended.has(running.id), false);
    await simulation.run(2000);
    assert.deepEqual(codes(ended), ["DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"]);
  });

  test("a worker that answers nothing is given up after workerMs and its tasks are tried elsewhere", async () => {
    let first = true;
    const simulation = simulate({
      backend: { workers: 2 },
      workerMs: 500,
      wrap: (worker) => ({
        name: worker.name,
        run(batch, signal) {
          if (!first) return worker.run(batch, signal);
          first = false;
          return new Promise((resolve) => {
            signal.addEventListener("abort", () =>
              resolve({ kind: "failed", message: "aborted", blame: "batch" }),
            );
          });
        },
      }),
    });
    const ended = endings(simulation);
    simulation.put();
    await simulation.run(2000);
    assert.deepEqual(codes(ended), ["ok"]);
    assert.equal([...ended.values()][0]!.attempt, 2);
  });
});

test("a batch whose end the engine does not hear of is over all the same", async () => {
  const simulation = simulate({ backend: { baseMs: 10 } });
  const open = new Set<string>();
  let calls = 0;
  const notices: string[] = [];
  simulation.events.on("batch.started", ({ batch }) => open.add(batch.id));
  simulation.events.on("batch.settled", (batch) => {
    open.delete(batch.batchId);
    calls += batch.calls;
  });
  simulation.events.on("notice", ({ message }) => notices.push(message));
  simulation.engine.settle = () => Promise.reject(new Error("the store is away"));
  simulation.put();
  await simulation.run(100);
  assert.deepEqual([open.size, calls], [0, 1]);
  assert.deepEqual(notices, ["dispatch of m: the store is away"]);
});

test("a worker whose batch tells more than its health path is not asked there, and nothing breaks", async () => {
  let asked = 0;
  let reached = false;
  const simulation = simulate({
    backend: { workers: 1, baseMs: 10 },
    wrap: (worker) => ({
      name: worker.name,
      run: () => Promise.resolve({ kind: "failed", message: "down", blame: reached ? "worker" : "nobody" }),
      get probe() {
        // As in workers/backend/http.ts: of use only while the worker cannot be reached.
        if (reached) return undefined;
        return () => {
          asked++;
          return Promise.resolve(false);
        };
      },
    }),
  });
  simulation.put();
  await simulation.run(10);
  assert.equal(asked, 1);
  reached = true;
  // The next question was due in here; an exception would end the process.
  await simulation.run(60_000);
  assert.equal(asked, 1);
});

test("a backend that throws fails its batch, which is tried again; the worker goes on", async () => {
  const { simulation, ended } = stubbed(
    (_, call) => {
      if (call === 1) throw new Error("a bug");
      return "answered";
    },
    { backend: { baseMs: 10 } },
  );
  const { id } = simulation.put({ input: '"a"' });
  await simulation.run(2000);
  assert.equal(ended.get(id)?.outcome?.ok, true);
});
