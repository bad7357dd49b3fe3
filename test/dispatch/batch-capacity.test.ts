/** Budgets of tokens and bytes, and workers that take fewer at once than the model may have. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Batch, Reply, Worker } from "../../src/workers/backend/backend.ts";
import { Random } from "../../src/core/random.ts";
import { estimateTokens, inputBytes } from "../../src/core/weight.ts";
import { Budget } from "../../src/dispatch/capacity.ts";
import type { Simulation } from "../../src/cli/plan/simulation.ts";
import type { EventFields } from "../../src/observe/events.ts";
import { type Changes, codes, endings, simulate } from "./simulated.ts";
import { leaseUntil } from "./watched.ts";

type Answer = (batch: Batch, answered: Reply, worker: string) => Reply;

/** Workers whose caps are in `caps` and may be changed there, and what they were sent. */
function stubbed(changes: Changes, caps: Map<string, number> = new Map(), answer?: Answer) {
  const calls: { worker: string; inputs: string[]; cap: number }[] = [];
  const wrap = (worker: Worker): Worker => ({
    name: worker.name,
    get maxBatchSize() {
      return caps.get(worker.name);
    },
    async run(batch, signal): Promise<Reply> {
      const inputs = batch.tasks.map(({ input }) => input);
      calls.push({ worker: worker.name, inputs, cap: caps.get(worker.name) ?? Infinity });
      const answered = await worker.run(batch, signal);
      return answer?.(batch, answered, worker.name) ?? answered;
    },
  });
  const simulation = simulate({ totalMs: 60_000, queueMs: 60_000, ...changes, wrap });
  return { simulation, calls, ended: endings(simulation) };
}

/** A string that is estimated to have so many tokens. */
const ofTokens = (tokens: number, name = ""): string => `"${name.padEnd(4 * tokens, "x")}"`;
const tokensOf = (inputs: readonly string[]): number =>
  inputs.reduce((sum, each) => sum + estimateTokens(each), 0);
const bytesOf = (inputs: readonly string[]): number =>
  inputs.reduce((sum, each) => sum + inputBytes(each), 0);

function started(simulation: Simulation): EventFields["batch.started"][] {
  const batches: EventFields["batch.started"][] = [];
  simulation.events.on("batch.started", (fields) => batches.push(fields));
  return batches;
}

/** One task keeps the worker busy so that the others queue up behind it. */
async function putTogether(simulation: Simulation, inputs: readonly string[]): Promise<string[]> {
  simulation.put();
  await simulation.run(1);
  return inputs.map((input) => simulation.put({ input }).id);
}

describe("a budget", () => {
  test("no call holds more, nothing is tried twice, and the words say why", async () => {
    const { simulation, calls, ended } = stubbed({ maxBatchTokens: 100, backend: { baseMs: 10 } });
    const batches = started(simulation);
    let retried = 0;
    simulation.events.on("task.retried", () => retried++);
    await putTogether(
      simulation,
      Array.from({ length: 40 }, () => ofTokens(25)),
    );
    await simulation.run(1000);
    assert.deepEqual(
      calls.map(({ inputs }) => inputs.length),
      [1, ...Array.from({ length: 10 }, () => 4)],
    );
    assert.deepEqual(new Set(codes(ended)), new Set(["ok"]));
    assert.equal(ended.size, 41);
    for (const { attempt } of ended.values()) assert.equal(attempt, 1);
    assert.equal(retried, 0, "what was never sent is not tried again");
    const last = batches.at(-1)!.batch;
    assert.deepEqual([last.reason, last.size], ["full", 4]);
    assert.match(last.why, /^a full batch of 4 left after \d+ ms: (about )?4 tasks fill maxBatchTokens$/);
    for (const { batch, tasks } of batches) assert.equal(batch.size, tasks.length);
    const record = [...ended.values()].at(-1)!;
    assert.equal(record.batch?.size, 4, "the answer tells the batch that it rode in");
  });

  test("a task that is over it alone rides alone, and those behind it do not wait for it", async () => {
    const { simulation, calls, ended } = stubbed({ maxBatchBytes: 1000, backend: { baseMs: 10 } });
    const heavy = ofTokens(2000);
    const inputs = Array.from({ length: 21 }, (_, at) => (at === 10 ? heavy : ofTokens(10)));
    await putTogether(simulation, inputs);
    await simulation.run(1000);
    assert.equal(codes(ended).filter((code) => code === "ok").length, 22);
    const alone = calls.find(({ inputs: sent }) => sent.includes(heavy))!;
    assert.equal(alone.inputs.length, 1);
    assert.ok(calls.length <= 5, `${calls.length} calls`);
  });

  test("is learned: of tasks that are alike no claim is too large twice", async () => {
    const { simulation } = stubbed({ maxBatchTokens: 100, backend: { baseMs: 10 } });
    const claims: number[] = [];
    const claim = simulation.engine.claim.bind(simulation.engine);
    simulation.engine.claim = (request) => {
      claims.push(request.max);
      return claim(request);
    };
    await putTogether(
      simulation,
      Array.from({ length: 200 }, () => ofTokens(10)),
    );
    await simulation.run(1000);
    assert.ok(
      claims.slice(3).every((max) => max <= 11),
      claims.join(" "),
    );
  });

  test("what does not fit is at once there for another worker", async () => {
    const { simulation, ended } = stubbed({
      maxBatchTokens: 100,
      limits: { policy: "latency" },
      backend: { workers: 4, baseMs: 100 },
    });
    const ids = Array.from({ length: 3 }, () => simulation.put({ input: ofTokens(90) }).id);
    await simulation.run(130);
    for (const id of ids) assert.equal(ended.get(id)?.outcome?.ok, true);
  });

  test("what does not fit comes back together: the next batch is not made of the first of it", async () => {
    const { simulation, calls } = stubbed({ maxBatchTokens: 100, backend: { workers: 2, baseMs: 100 } });
    const [, second] = simulation.dispatcher.workers.slots;
    leaseUntil(second!, -Infinity);
    const claim = simulation.engine.claim.bind(simulation.engine);
    simulation.engine.claim = (request) => {
      // It is there by the time that the others come back, which have waited for maxWaitMs already.
      if (request.max > 1) leaseUntil(second!, Infinity);
      return claim(request);
    };
    await putTogether(
      simulation,
      Array.from({ length: 6 }, () => ofTokens(30)),
    );
    await simulation.run(110);
    assert.deepEqual(
      calls.map(({ inputs }) => inputs.length),
      [1, 3, 3],
    );
  });

  test("weights that scatter: how full batches leave, and how much is claimed in vain", async (t) => {
    const budget = 1600;
    const random = new Random(5);
    const { simulation, calls } = stubbed({ maxBatchTokens: budget, backend: { workers: 2, baseMs: 20 } });
    let back = 0;
    const settle = simulation.engine.settle.bind(simulation.engine);
    simulation.engine.settle = (lease, verdicts) => {
      back += verdicts.filter((each) => each.kind === "retry" && each.unsent === true).length;
      return settle(lease, verdicts);
    };
    const arrivals = Array.from({ length: 20_000 }, (_, at) => at * 0.3);
    // 16 of the mean weight fill a batch.
    simulation.schedule(arrivals, () =>
      simulation.put({ input: ofTokens(Math.ceil(random.exponential(100))) }),
    );
    await simulation.run(60_000);
    const fill = calls.reduce((sum, { inputs }) => sum + tokensOf(inputs), 0) / calls.length / budget;
    const share = back / arrivals.length;
    t.diagnostic(`${(100 * fill).toFixed(0)} % full, ${(100 * share).toFixed(0)} % claimed in vain`);
    assert.ok(fill > 0.85 && share < 0.12, `${fill} full, ${share} in vain`);
  });

  test("arrivals are not counted again when they come back", async () => {
    const { simulation } = stubbed({ maxBatchTokens: 100, backend: { baseMs: 400 } });
    simulation.put();
    await simulation.run(1);
    const before = simulation.dispatcher.arrivalsPerMs();
    for (let each = 0; each < 40; each++) simulation.put({ input: ofTokens(90) });
    const counted = simulation.dispatcher.arrivalsPerMs();
    assert.ok(counted > before);
    await simulation.run(410);
    assert.ok(simulation.dispatcher.arrivalsPerMs() < counted);
  });

  test("the heavy task of a lower tier is overtaken at most so often", async () => {
    const { simulation, ended } = stubbed({
      maxBatchTokens: 100,
      backend: { baseMs: 10 },
      tiers: 3,
    });
    simulation.put();
    await simulation.run(1);
    const { id } = simulation.put({ input: ofTokens(100), tier: 2 });
    simulation.schedule(
      Array.from({ length: 20_000 }, (_, at) => at / 4),
      () => simulation.put({ input: ofTokens(8), tier: 0 }),
    );
    await simulation.run(2000);
    assert.equal(ended.get(id)?.outcome?.ok, true, "the better tier never lets up");
  });

  test("that it is full does not depend on why the batch was about to leave", async () => {
    const { simulation } = stubbed({ maxBatchTokens: 100, backend: { baseMs: 10 } });
    const batches = started(simulation);
    await putTogether(simulation, [ofTokens(60), ofTokens(60)]);
    await simulation.run(1000);
    const [, first] = batches;
    assert.deepEqual([first!.batch.reason, first!.batch.size], ["full", 1]);
    assert.match(first!.batch.why, /^a full batch of 1 left after 9 ms: 1 task fills maxBatchTokens$/);
  });
});

describe("a worker that takes fewer at once than the model may have", () => {
  test("is never sent more, and the words say why", async () => {
    const { simulation, calls, ended } = stubbed({ backend: { baseMs: 10 } }, new Map([["gpu-1", 32]]));
    const batches = started(simulation);
    await putTogether(
      simulation,
      Array.from({ length: 96 }, () => "1"),
    );
    await simulation.run(200);
    assert.deepEqual(
      calls.map(({ inputs }) => inputs.length),
      [1, 32, 32, 32],
    );
    assert.equal(codes(ended).length, 97);
    const { batch } = batches.at(-1)!;
    assert.equal(batch.reason, "full");
    assert.match(batch.why, /^a full batch of 32 left after \d+ ms: its worker takes no more at once$/);
  });

  test("fleets with different caps: each gets what it takes", async () => {
    const caps = new Map([
      ["gpu-1", 4],
      ["gpu-2", 16],
    ]);
    const { simulation, calls, ended } = stubbed({ backend: { workers: 3, baseMs: 50 } }, caps);
    const arrivals = Array.from({ length: 4000 }, (_, at) => at * 0.7);
    simulation.schedule(arrivals, () => simulation.put());
    await simulation.run(6000);
    assert.equal(codes(ended).filter((code) => code === "ok").length, 4000);
    const largest = (name: string): number =>
      Math.max(...calls.filter(({ worker }) => worker === name).map(({ inputs }) => inputs.length));
    assert.deepEqual([largest("gpu-1"), largest("gpu-2")], [4, 16]);
    assert.ok(largest("gpu-3") > 16);
  });

  test("the forecast counts what it takes, also after that has changed", async () => {
    const caps = new Map([["gpu-1", 32]]);
    const { simulation } = stubbed({ backend: { workers: 2, baseMs: 100 } }, caps);
    simulation.schedule(
      Array.from({ length: 24 }, (_, at) => at * 60),
      () => simulation.put(),
    );
    await simulation.run(3000);
    const horizon = () => simulation.dispatcher.horizon(simulation.clock.now());
    const near = (value: number, wanted: number): void =>
      assert.ok(Math.abs(value / wanted - 1) < 0.02, `${value} is not near ${wanted}`);
    near(horizon().batchSize, 48);
    near(horizon().perMs, 0.96);
    caps.set("gpu-2", 32);
    await simulation.run(5);
    near(horizon().batchSize, 32);
    near(horizon().perMs, 0.64);
    const { dispatcher, clock } = simulation;
    assert.deepEqual(
      [dispatcher.hasRoom(31, clock.now()), dispatcher.hasRoom(32, clock.now())],
      [true, false],
    );
  });

  test("says so while its batch is on the way: what is too much by then goes back", async () => {
    const caps = new Map<string, number>();
    const { simulation, calls, ended } = stubbed({ backend: { baseMs: 10 } }, caps);
    const claim = simulation.engine.claim.bind(simulation.engine);
    simulation.engine.claim = async (request) => {
      const lease = await claim(request);
      if (request.max > 8) caps.set("gpu-1", 8);
      return lease;
    };
    await putTogether(
      simulation,
      Array.from({ length: 20 }, () => "1"),
    );
    await simulation.run(200);
    assert.deepEqual(
      calls.map(({ inputs }) => inputs.length),
      [1, 8, 8, 4],
    );
    for (const { attempt } of ended.values()) assert.equal(attempt, 1);
  });

  test("refuses a batch because it takes fewer now: no half of it is larger", async () => {
    const caps = new Map<string, number>();
    const { simulation, calls, ended } = stubbed({ backend: { baseMs: 10 } }, caps, (batch, answered) => {
      if (batch.tasks.length <= 5) return answered;
      caps.set("gpu-1", 5);
      return { kind: "rejected", message: "too many" };
    });
    await putTogether(
      simulation,
      Array.from({ length: 64 }, (_, at) => String(at)),
    );
    await simulation.run(2000);
    assert.deepEqual(new Set(codes(ended)), new Set(["ok"]));
    assert.equal(ended.size, 65);
    for (const { inputs, cap } of calls) assert.ok(inputs.length <= cap);
  });
});

describe("a property, with workers that fail, refuse, ask for patience and change what they take", () => {
  for (let seed = 1; seed <= 60; seed++) {
    test(`seed ${seed}`, () => play(seed));
  }
});

async function play(seed: number): Promise<void> {
  const random = new Random(seed * 31 + 7);
  const upTo = (most: number): number => Math.floor(random.next() * most);
  const chance = (share: number): boolean => random.next() < share;
  const maxBatchTokens = chance(0.8) ? 20 + upTo(200) : undefined;
  const maxBatchBytes = chance(0.5) ? 100 + upTo(1000) : undefined;
  const workers = 1 + upTo(4);
  const caps = new Map<string, number>();
  const [rejects, fails, asks] = [chance(0.5), chance(0.5), chance(0.3)];
  const poisonous = (inputs: readonly string[]): boolean =>
    rejects && inputs.some((input) => input.startsWith('"poison'));
  const { simulation, calls, ended } = stubbed(
    {
      seed,
      limits: { maxBatchSize: 1 + upTo(64), policy: chance(0.5) ? "adaptive" : "fixed" },
      ...(maxBatchTokens !== undefined && { maxBatchTokens }),
      ...(maxBatchBytes !== undefined && { maxBatchBytes }),
      backend: { workers, baseMs: 5 + upTo(50), hangRate: chance(0.2) ? 0.05 : 0, jitter: 0.1 },
      workerMs: 1000,
      retries: 50,
      tiers: 1 + upTo(3),
      totalMs: 600_000,
      queueMs: 600_000,
    },
    caps,
    (batch, answered, worker) => {
      if (chance(0.1)) caps.set(worker, 1 + upTo(40));
      if (poisonous(batch.tasks.map(({ input }) => input))) return { kind: "rejected", message: "poison" };
      if (fails && chance(0.1)) return { kind: "failed", message: "broken", blame: "worker" };
      if (asks && chance(0.05)) return { kind: "busy", message: "later", retryAfterMs: 100 };
      return answered;
    },
  );
  for (const { name } of simulation.backend.workers) if (chance(0.5)) caps.set(name, 1 + upTo(40));
  const ends = new Map<string, number>();
  simulation.engine.watch({ settled: ({ task }) => ends.set(task.id, (ends.get(task.id) ?? 0) + 1) });
  const inputs = new Map<string, string>();
  const arrivals = Array.from({ length: 300 }, () => random.next() * 2000).sort((one, other) => one - other);
  simulation.schedule(arrivals, (at) => {
    const length = Math.ceil(random.exponential(chance(0.05) ? 200 : 10));
    const input = ofTokens(length, `${rejects && chance(0.03) ? "poison" : "good"}-${at}-`);
    inputs.set(simulation.put({ input, tier: upTo(3), parameters: chance(0.2) ? "{}" : "" }).id, input);
  });
  await simulation.run(120_000);
  for (const { inputs: sent, cap } of calls) {
    assert.ok(sent.length <= cap, `${sent.length} to a worker that takes ${cap}`);
    if (sent.length === 1) continue;
    assert.ok(tokensOf(sent) <= (maxBatchTokens ?? Infinity), `${tokensOf(sent)} tokens`);
    assert.ok(bytesOf(sent) <= (maxBatchBytes ?? Infinity), `${bytesOf(sent)} bytes`);
  }
  assert.equal(inputs.size, 300);
  for (const [id, input] of inputs) {
    assert.equal(ends.get(id), 1, `${id} ended ${ends.get(id)} times`);
    const outcome = ended.get(id)?.outcome;
    if (poisonous([input])) assert.equal(outcome?.ok === false && outcome.code, "INPUT_REJECTED");
    else assert.deepEqual(outcome, { ok: true, output: input });
  }
  const { queued, running } = simulation.engine.stats();
  assert.deepEqual([queued, running], [0, 0]);
  simulation.stop();
}

describe("the usual weight", () => {
  function send(budget: Budget, weight: number, tasks: number): void {
    budget.take(weight);
    budget.close(tasks);
  }

  test("is unknown at first, then says how many tasks fit, and at least one", () => {
    const budget = new Budget("maxBatchTokens", 100, estimateTokens);
    assert.equal(budget.tasks, Infinity);
    send(budget, 40, 4);
    assert.equal(budget.tasks, 10);
    const small = new Budget("maxBatchTokens", 5, estimateTokens);
    send(small, 40, 1);
    assert.equal(small.tasks, 1);
  });

  test("follows a change within some tens of batches, and a batch counts by its tasks", () => {
    const budget = new Budget("maxBatchTokens", 2000, estimateTokens);
    for (let batch = 0; batch < 100; batch++) send(budget, 160, 16);
    send(budget, 1000, 1);
    assert.ok(budget.tasks > 100, "one heavy task among many is no reason for small batches");
    for (let batch = 0; batch < 50; batch++) send(budget, 1600, 16);
    assert.equal(budget.tasks, 20);
  });
});
