/** A request of many inputs: all through the one path, gathered in order, or given up together. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Admission } from "../../src/gateway/admission/admission.ts";
import { Credentials } from "../../src/gateway/admission/credentials.ts";
import { CapacityGate } from "../../src/gateway/admission/capacity-gate.ts";
import { Refusal } from "../../src/core/errors.ts";
import type { Horizon } from "../../src/core/shed.ts";
import { MemoryEngine } from "../../src/engine/memory/engine.ts";
import { type ModelRoute, type PathRequest, RequestPath } from "../../src/gateway/request-path.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Waiters } from "../../src/gateway/waiters.ts";
import { Events } from "../../src/observe/events.ts";
import type { RecordView, Verdict } from "../../src/engine/engine.ts";

const MODEL = "m";
const TIERS = [{ name: "first", weight: 1 }];
const caller = { tenant: "ann", tier: 0 };

/** One worker that is free. */
const HORIZON: Horizon = {
  healthy: 1,
  idle: 1,
  overdue: 0,
  perMs: 1,
  nominalPerMs: 1,
  batchSize: 64,
  batchMs: 64,
  runMs: 64,
  deviationMs: 0,
  freeAt: [0],
  nextUsableAt: Infinity,
};

class Guest implements PathRequest {
  readonly startedAt = 0;
  readonly trace = undefined;
  readonly headers: Record<string, string> = {};
  id = "";
  model = "";
  tier = "";
  tenant = "";
  work: PathRequest["work"] = "own";
  ending: PathRequest["ending"] = undefined;
  #gone = (): void => {};
  onLeft = (): void => {};
  failed = (error: unknown): void => assert.fail(String(error));

  leave(): void {
    this.#gone();
    this.onLeft();
  }

  header(name: string): string | undefined {
    return this.headers[name];
  }

  onGone(gone: () => void): void {
    this.#gone = gone;
  }
}

class Stage {
  readonly clock = new VirtualClock();
  readonly engine: MemoryEngine;
  readonly waiters: Waiters;
  readonly admission: Admission;
  readonly path: RequestPath;

  constructor(
    limits: { maxQueued?: number; perUserPerMinute?: number } = {},
    horizon = HORIZON,
    shares = false,
  ) {
    const { clock } = this;
    const events = new Events();
    const options = {
      models: new Map([[MODEL, { queueMs: 2000, totalMs: 4000 }]]),
      tiers: 1,
      maxQueued: limits.maxQueued ?? 1000,
      maxQueuedBytes: 1_000_000,
      results: { ttlMs: 60_000, evictAfterRead: false, maxBytes: 10_000_000 },
      deadLetters: { max: 10, ttlMs: 60_000 },
    };
    const engine = (this.engine = new MemoryEngine(() => options, clock, events));
    const waiters = (this.waiters = new Waiters(engine, clock));
    const { perUserPerMinute } = limits;
    const rates = { tiers: TIERS, ...(perUserPerMinute !== undefined && { perUserPerMinute }) };
    const admission = (this.admission = new Admission(() => rates, engine, clock, events));
    const hasRoom = (waiting: number): boolean => horizon === HORIZON || waiting < horizon.batchSize;
    const prospects = { horizon: () => horizon, hasRoom, othersPerMs: () => 0 };
    const thresholds = { targetUtilization: 0.7, lastTierDepth: 100, firstTierDepth: 500 };
    const rules = {
      ...thresholds,
      mode: "predictive",
      model: MODEL,
      tiers: 1,
      queueMs: 2000,
      totalMs: 4000,
    } as const;
    const route: ModelRoute = {
      name: MODEL,
      totalMs: 4000,
      cache: shares ? { ttlMs: 60_000, scope: "tenant" } : { ttlMs: 0, scope: "off" },
      collapse: shares,
      open: true,
    };
    const gate = new CapacityGate({ ...rules, looksForFree: true }, prospects, engine);
    const put = gate.put.bind(gate);
    const credentials = new Credentials({ tiers: TIERS, anonymousTier: "first" }, {});
    const parts = { routes: [route], credentials, admission, waiters, engine, put, clock, durable: false };
    this.path = new RequestPath(parts);
  }

  ask(guest: Guest, ...inputs: string[]) {
    return this.run(
      guest,
      inputs.map((input) => JSON.stringify(input)),
      "",
    );
  }

  /** Its outputs and headers; undefined: the client left. */
  async run(guest: Guest, inputs: readonly string[], parameters: string) {
    const { promise, resolve, reject } = Promise.withResolvers<
      { outputs: readonly string[]; headers: readonly string[] } | undefined
    >();
    const leave = (): void => resolve(undefined);
    guest.onLeft = leave;
    guest.failed = reject;
    const ran = this.path.run(guest, caller, { model: MODEL, inputs, parameters }, (ended) =>
      resolve({ outputs: this.path.outputs(ended), headers: ended.headers }),
    );
    await ran;
    return promise;
  }

  /** Claims everything that waits; the inputs, in the order of the batch. */
  async claim(max = 64, id = "b", parameters = "") {
    const batch = {
      id,
      worker: "w",
      reason: "full",
      size: 0,
      startedAt: this.clock.now(),
      why: "",
    } as const;
    return this.engine.claim({ model: MODEL, parameters, max, batch, leaseMs: 10_000 });
  }

  async end(
    lease: Awaited<ReturnType<Stage["claim"]>>,
    judge: (input: string) => Omit<Verdict, "id">,
  ): Promise<void> {
    const verdicts = lease.tasks.map(
      ({ task }) => ({ id: task.id, ...judge(JSON.parse(task.input) as string) }) as Verdict,
    );
    await this.engine.settle(lease, verdicts.toReversed());
  }
}

const echo = (input: string) => ({ kind: "done", output: JSON.stringify(`${input}!`) }) as const;

async function refusalOf(asked: Promise<unknown>): Promise<Refusal> {
  try {
    await asked;
  } catch (error) {
    assert(error instanceof Refusal, String(error));
    return error;
  }
  return assert.fail("it was not refused");
}

describe("of several inputs, the one that settled last is told of", () => {
  /** Three inputs in three batches, of which the second ends last; `bad` fails. */
  const runThree = async (bad = ""): Promise<{ stage: Stage; guest: Guest; headers: readonly string[] }> => {
    const stage = new Stage();
    const guest = new Guest();
    const ran = stage.ask(guest, "a", "b", "c").catch((error: unknown) => {
      assert(error instanceof Refusal);
      return { headers: [] };
    });
    const leases = new Map<string, Awaited<ReturnType<Stage["claim"]>>>();
    for (const input of ["a", "b", "c"]) {
      await stage.clock.run(stage.clock.now() + 10);
      leases.set(input, await stage.claim(1, `batch of ${input}`));
    }
    for (const input of ["c", "a", "b"]) {
      await stage.clock.run(stage.clock.now() + 10);
      const failure = { kind: "failed", code: "INPUT_REJECTED", message: "no" } as const;
      await stage.end(leases.get(input)!, (one) => (one === bad ? failure : echo(one)));
    }
    const { headers } = (await ran)!;
    return { stage, guest, headers };
  };

  test("in the headers and in the log alike", async () => {
    const { guest, headers } = await runThree();
    assert.deepEqual(headers.slice(0, 6), [
      "x-ferry-batch-id",
      "batch of b",
      "x-ferry-batch-size",
      "1",
      "x-ferry-queue-ms",
      "20",
    ]);
    const { batch, attempt, queuedAt, settledAt } = guest.ending!;
    assert.deepEqual([batch!.id, attempt, batch!.startedAt - queuedAt], ["batch of b", 1, 20]);
    assert.equal(settledAt! - queuedAt, 60);
  });

  test("of a request that failed, the one that failed", async () => {
    const { guest } = await runThree("c");
    assert.equal(guest.ending!.batch!.id, "batch of c");
  });

  test("of one batch, the first", async () => {
    const stage = new Stage();
    const guest = new Guest();
    const ran = stage.ask(guest, "a", "b");
    await stage.end(await stage.claim(), echo);
    await ran;
    assert.equal((guest.ending as RecordView).task.input, '"a"');
  });

  test("nothing, while the client did not wait for the end", async () => {
    const stage = new Stage();
    const guest = new Guest();
    const ran = stage.ask(guest, "a", "b");
    const lease = await stage.claim(1);
    await stage.end(lease, echo);
    guest.leave();
    assert.equal(await ran, undefined);
    assert.equal(guest.ending, undefined);
  });

  test("its work is its own where any input was, and cached where all were", async () => {
    const stage = new Stage({}, HORIZON, true);
    const work = async (...inputs: string[]): Promise<Guest["work"]> => {
      const guest = new Guest();
      const ran = stage.ask(guest, ...inputs);
      await new Promise(setImmediate);
      await stage.end(await stage.claim(), echo);
      await ran;
      return guest.work;
    };
    assert.equal(await work("a", "b"), "own");
    assert.equal(await work("b", "a"), "cached");
    const first = stage.ask(new Guest(), "c");
    // The first is in the cache, the second on its way.
    const both = work("a", "c");
    assert.equal(await both, "joined");
    await first;
    assert.equal(await work("a", "d"), "own");
  });
});

describe("a request of several inputs", () => {
  test("gives the outputs in the order of the inputs, whatever the batches and their order", async () => {
    const stage = new Stage();
    const guest = new Guest();
    const ran = stage.ask(guest, "a", "b", "c");
    await stage.end(await stage.claim(), echo);
    const { outputs, headers } = (await ran)!;
    assert.deepEqual(outputs, ['"a!"', '"b!"', '"c!"']);
    assert.equal(headers[0], "x-ferry-batch-id");
    assert.notEqual(guest.id, "");
    assert.equal(stage.waiters.size, 0);
  });

  test("fails as a whole with the failure of one, and cancels what still waits", async () => {
    const stage = new Stage();
    const ran = stage.ask(new Guest(), "a", "bad", "c");
    const lease = await stage.claim();
    const later = stage.ask(new Guest(), "d");
    const one = lease.tasks.find(({ task }) => task.input === '"a"')!;
    await stage.engine.settle(lease, [{ id: one.task.id, kind: "done", output: "1" }]);
    const bad = lease.tasks.find(({ task }) => task.input === '"bad"')!;
    await stage.engine.settle(lease, [
      { id: bad.task.id, kind: "failed", code: "INPUT_REJECTED", message: "no" },
    ]);
    assert.equal((await refusalOf(ran)).code, "INPUT_REJECTED");
    await stage.end(await stage.claim(), echo);
    assert.deepEqual((await later)!.outputs, ['"d!"']);
    assert.equal(stage.waiters.size, 0);
  });

  test("a full queue refuses the request, and leaves nothing of it behind", async () => {
    const stage = new Stage({ maxQueued: 3 });
    const before = stage.ask(new Guest(), "z");
    assert.equal((await refusalOf(stage.ask(new Guest(), "a", "b", "c"))).code, "SERVICE_OVERLOADED");
    assert.equal(stage.engine.stats().queued, 1);
    await stage.end(await stage.claim(), echo);
    await before;
    assert.equal(stage.waiters.size, 0);
  });

  test("more than could ever be queued is too large, and nothing is put", async () => {
    const stage = new Stage({ maxQueued: 2 });
    const refusal = await refusalOf(stage.ask(new Guest(), "a", "b", "c"));
    assert.equal(refusal.code, "PAYLOAD_TOO_LARGE");
    assert.match(refusal.message, /3 inputs are more .* \(limits\.maxQueued 2\)/);
    assert.equal(stage.engine.stats().queued, 0);
  });

  test("its shared fields are one text for all inputs, and stand in keys as a digest", async () => {
    const stage = new Stage({}, HORIZON, true);
    const parameters = `{"a":"${"x".repeat(500_000)}"}`;
    const inputs = Array.from({ length: 300 }, (_, at) => `"${at}"`);
    const ran = stage.run(new Guest(), inputs, parameters);
    await new Promise(setImmediate);
    const lease = await stage.claim(300, "b", parameters);
    assert.equal(lease.tasks.length, 300);
    // Keys name long parameters by their digest.
    for (const { task } of lease.tasks) {
      assert.equal(task.parameters, parameters);
      assert.ok(task.content.length < 200, `${task.content.length} characters`);
    }
    await stage.end(lease, echo);
    assert.equal((await ran)!.outputs.length, 300);
    // Other parameters of the same length are other work.
    const other = parameters.replace("xx", "xy");
    const again = stage.run(new Guest(), inputs, other);
    await new Promise(setImmediate);
    const next = await stage.claim(300, "c", other);
    assert.equal(next.tasks.length, 300);
    await stage.end(next, echo);
    await again;
    // Equal ones are answered from the cache.
    const cached = await stage.run(new Guest(), inputs, parameters);
    assert.equal(cached!.outputs[7], '"7!"');
  });

  test("a request that is refused because the engine is away leaves no waiter behind", async () => {
    const stage = new Stage();
    const { engine, waiters } = stage;
    const away = new Refusal("SERVICE_OVERLOADED", "Redis does not answer; send it again");
    engine.put = () => Promise.reject(away);
    for (let n = 0; n < 50; n++) assert.equal(await refusalOf(stage.ask(new Guest(), "a", "b")), away);
    assert.equal(waiters.size, 0);
    // Accepted by joining a task, and then nobody can say how that one stands.
    engine.put = (task) => Promise.resolve({ kind: "joined", id: `${task.id}-leader` });
    engine.outcome = () => Promise.reject(away);
    for (let n = 0; n < 50; n++) assert.equal(await refusalOf(stage.ask(new Guest(), "a", "b")), away);
    assert.equal(waiters.size, 0);
  });

  test("inputs that no queue has room for are refused for good, and none of them enters it", async () => {
    const stage = new Stage();
    const half = "x".repeat(500_000);
    const refusal = await refusalOf(stage.ask(new Guest(), half, half));
    assert.deepEqual(
      [refusal.code, refusal.status, refusal.retryAfterMs],
      ["PAYLOAD_TOO_LARGE", 413, undefined],
    );
    assert.match(refusal.message, /take 1000004 bytes, .* \(limits.maxQueuedBytes 1000000\)/);
    assert.equal(stage.engine.stats().queued, 0);
    const first = stage.ask(new Guest(), half);
    // Here it is the queue that is full, for now.
    const second = await refusalOf(stage.ask(new Guest(), half, "y"));
    assert.equal(second.code, "SERVICE_OVERLOADED");
    assert(second.retryAfterMs! > 0);
    await stage.end(await stage.claim(), echo);
    await first;
  });

  test("one input that its engine never has room for is refused for good, too", async () => {
    // As in Redis, where a shard holds a part of what the queue may hold.
    const stage = new Stage();
    stage.engine.neverFits = () => undefined;
    const refusal = await refusalOf(stage.ask(new Guest(), "x".repeat(1_000_000)));
    assert.deepEqual([refusal.code, refusal.retryAfterMs], ["PAYLOAD_TOO_LARGE", undefined]);
    assert.equal(stage.waiters.size, 0);
  });

  test("a client that leaves takes its tasks along", async () => {
    const stage = new Stage();
    const guest = new Guest();
    const ran = stage.ask(guest, "a", "b");
    await new Promise(setImmediate);
    guest.leave();
    assert.equal(await ran, undefined);
    assert.equal(stage.engine.stats().queued, 0);
    assert.equal(stage.waiters.size, 0);
  });

  test("a client that leaves is promised nothing, answers from the cache included", async () => {
    const stage = new Stage({}, HORIZON, true);
    const large = "x".repeat(1_000_000);
    const first = stage.ask(new Guest(), "a");
    await new Promise(setImmediate);
    await stage.end(await stage.claim(), () => ({ kind: "done", output: JSON.stringify(large) }));
    await first;
    // Each time the answer for "a" is known at once; together they are more than results.maxBytes.
    for (let n = 0; n < 12; n++) {
      const guest = new Guest();
      const ran = stage.ask(guest, "a", `other ${n}`);
      await new Promise(setImmediate);
      guest.leave();
      assert.equal(await ran, undefined);
    }
    assert.equal(stage.engine.stats().queued, 0);
  });

  test("is one request to the rates, however many inputs it has", async () => {
    const stage = new Stage({ perUserPerMinute: 2 });
    const first = stage.ask(new Guest(), "a", "b", "c");
    await new Promise(setImmediate);
    await stage.end(await stage.claim(), echo);
    const { headers } = (await first)!;
    assert.equal(headers[headers.indexOf("ratelimit-remaining") + 1], "1");
    const second = stage.ask(new Guest(), "d");
    await new Promise(setImmediate);
    await stage.end(await stage.claim(), echo);
    await second;
    const third = await refusalOf(stage.ask(new Guest(), "e", "f"));
    assert.deepEqual([third.code, stage.engine.stats().queued], ["RATE_LIMITED", 0]);
  });

  test("ends with the total timeout", async () => {
    const stage = new Stage();
    const refused = refusalOf(stage.ask(new Guest(), "a", "b"));
    await stage.clock.run(stage.clock.now() + 4001);
    assert.equal((await refused).code, "DEADLINE_EXCEEDED");
    assert.equal(stage.waiters.size, 0);
  });

  test("while the process stops: told to send it again", async () => {
    const stage = new Stage();
    const refused = refusalOf(stage.ask(new Guest(), "a", "b"));
    await new Promise(setImmediate);
    stage.admission.draining = true;
    stage.waiters.releaseAll();
    assert.equal((await refused).code, "SERVICE_OVERLOADED");
  });

  test("an Idempotency-Key holds for each input", async () => {
    const stage = new Stage();
    const [one, two] = [new Guest(), new Guest()];
    one.headers["idempotency-key"] = two.headers["idempotency-key"] = "k";
    const both = [stage.ask(one, "a", "a"), stage.ask(two, "a", "a")];
    const lease = await stage.claim();
    assert.equal(lease.tasks.length, 2);
    await stage.end(lease, echo);
    for (const ran of await Promise.all(both)) assert.deepEqual(ran!.outputs, ['"a!"', '"a!"']);
    assert.equal(two.work, "joined");
  });

  test("an Idempotency-Key holds for the array as a whole: one input more or less is another body", async () => {
    for (const other of [["a"], ["a", "b", "c"]]) {
      const stage = new Stage();
      const [one, two] = [new Guest(), new Guest()];
      one.headers["idempotency-key"] = two.headers["idempotency-key"] = "k";
      const first = stage.ask(one, "a", "b");
      assert.equal((await refusalOf(stage.ask(two, ...other))).code, "IDEMPOTENCY_CONFLICT");
      await stage.end(await stage.claim(), echo);
      assert.deepEqual((await first)!.outputs, ['"a!"', '"b!"']);
    }
  });

  test("an Idempotency-Key is no longer than elsewhere", async () => {
    const guest = new Guest();
    guest.headers["idempotency-key"] = "k".repeat(256);
    assert.equal((await refusalOf(new Stage().ask(guest, "a"))).code, "INVALID_REQUEST");
  });

  test("many inputs at once are not refused by a guess, which nothing would ever correct", async () => {
    const inputs = Array.from({ length: 64 }, (_, at) => `${at}`);
    // Sixteen batches of four, 200 ms each: they would begin within 3 s, not within the 2 s of the queue.
    const known = { ...HORIZON, batchSize: 4, perMs: 0.02, batchMs: 200, runMs: 200 };
    const told = await refusalOf(new Stage({}, known).ask(new Guest(), ...inputs));
    assert.equal(told.code, "SERVICE_OVERLOADED");
    const stage = new Stage({}, { ...known, guessed: true });
    const ran = stage.ask(new Guest(), ...inputs);
    // One alone needs no such favour: it runs as soon as a worker idles.
    assert.equal((await refusalOf(stage.ask(new Guest(), "one"))).code, "SERVICE_OVERLOADED");
    await stage.end(await stage.claim(), echo);
    assert.equal((await ran)!.outputs.length, 64);
  });
});
