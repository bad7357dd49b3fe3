/** Gateways and batchers are killed, paused and stopped: what was accepted is answered, once, by its own. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Caller, Load, runTwice } from "./fleet-load.ts";
import { brisk, Fleet, fleetConfig, patient } from "./fleet.ts";
import { eventually } from "./harness.ts";
import { echo, Gate, stubModel, StubWorker } from "./stub-worker.ts";

describe("a gateway", () => {
  test("killed with 200 held callers: each retry at the other gateway joins, and runs once", async () => {
    await using redis = await startServer();
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    const model = stubModel([stub], { timeouts: patient, maxBatchSize: 64 });
    const config = fleetConfig({ url: redis.url }, [model]);
    await using fleet = await Fleet.start({ gateways: 2, batchers: 1 }, config);
    const [first, second] = fleet.gateways;
    const names = Array.from({ length: 200 }, (_, i) => `held ${i}`);
    const headers = (name: string) => ({ "idempotency-key": name });
    const cut = names.map((name) => assert.rejects(first!.post({ input: name }, headers(name))));
    await first!.health();
    const waits = async (): Promise<boolean> => {
      const { queue_depth, running } = await fleet.batchers[0]!.health();
      return queue_depth + running === 200;
    };
    await eventually(waits);
    await first!.kill();
    await Promise.all(cut);
    const retried = names.map((name) => second!.post({ input: name }, headers(name)));
    await second!.health();
    stub.behave = echo;
    gate.open();
    for (const [i, answer] of (await Promise.all(retried)).entries()) {
      assert.equal(answer.status, 200, answer.text);
      assert.deepEqual(answer.json.output, { of: names[i] });
    }
    assert.deepEqual(runTwice(stub.inputs), []);
    assert.equal(stub.inputs.length, 200);
  });

  test("killed under load: its callers go on at the other one, and nothing is lost", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 10));
    const config = fleetConfig({ url: redis.url }, [stubModel([stub], { timeouts: patient })]);
    await using fleet = await Fleet.start({ gateways: 2, batchers: 1 }, config);
    await using load = new Load(() => fleet.doors);
    await load.more(200);
    await fleet.gateways[0]!.kill();
    await load.more(200);
    const ledger = await load.stop();
    ledger.assertWhole();
    assert.deepEqual(runTwice(stub.inputs), [], "every retry had the key of its first try");
  });

  test("stopped under load: every caller gets its answer or a 202, and nothing is lost", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 1500));
    const config = fleetConfig({ url: redis.url }, [stubModel([stub], { timeouts: patient })]);
    await using fleet = await Fleet.start({ gateways: 2, batchers: 1 }, config);
    await using load = new Load(() => fleet.doors);
    await load.more(100);
    const { code } = await fleet.gateways[0]!.stop();
    assert.equal(code, 0, fleet.gateways[0]!.stderr());
    await load.more(100);
    const ledger = await load.stop();
    ledger.assertWhole();
    // New connections that the listener had not taken yet when it closed are reset by the kernel, at once; a
    // request that was accepted, which takes 1,500 ms at least, is not.
    const cut = ledger.refusals.filter(({ status, ms }) => status !== 503 && ms > 1000);
    assert.deepEqual(cut, []);
  });

  test("stopped with callers that wait longer than the drain: they get a 202, and their answers", async () => {
    await using redis = await startServer();
    const gate = new Gate();
    await using stub = await StubWorker.listen(gate.hold);
    const config = fleetConfig({ url: redis.url }, [stubModel([stub], { timeouts: patient })], {
      limits: { drainMs: 300 },
    });
    await using fleet = await Fleet.start({ gateways: 2, batchers: 1 }, config);
    const [first, second] = fleet.gateways;
    const names = Array.from({ length: 50 }, (_, i) => `drained ${i}`);
    const held = names.map((input) => first!.post({ input }));
    await stub.call(1);
    await eventually(async () => {
      const { queue_depth, running } = await fleet.batchers[0]!.health();
      return queue_depth + running === 50;
    });
    await first!.stop();
    const answers = await Promise.all(held);
    for (const answer of answers) assert.equal(answer.status, 202, answer.text);
    stub.behave = echo;
    gate.open();
    for (const [i, answer] of answers.entries())
      assert.deepEqual((await second!.result(answer.json.task_id!)).output, { of: names[i] });
  });
});

describe("a batcher", () => {
  test("killed in the middle of a batch: its tasks end at the other, soon, and are answered once", async () => {
    await using redis = await startServer();
    const gate = new Gate();
    await using one = await StubWorker.listen(gate.hold);
    await using two = await StubWorker.listen(gate.hold);
    const model = stubModel([one, two], { timeouts: patient, maxBatchSize: 16 });
    const config = fleetConfig({ url: redis.url, ...brisk }, [model]);
    await using fleet = await Fleet.start({ gateways: 1, batchers: 2 }, config);
    await fleet.spread([1, 1]);
    const caller = new Caller(() => fleet.doors);
    const { ledger } = caller;
    const callers = Array.from({ length: 32 }, (_, i) =>
      caller.run(`crash ${i}`, i % 2 === 0 ? "held" : "polled"),
    );
    await Promise.all([one.call(1), two.call(1)]);
    const killedAt = performance.now();
    await fleet.batchers[0]!.kill();
    // What the dead one's worker says now, nobody hears; the other one's batch ends.
    gate.open();
    await Promise.all(callers);
    const recoveredMs = performance.now() - killedAt;
    ledger.assertWhole();
    assert.deepEqual(ledger.refusals, []);
    const twice = runTwice([...one.inputs, ...two.inputs]);
    assert.ok(twice.length > 0 && twice.length <= 16, `${twice.length} ran twice`);
    assert.ok(recoveredMs < brisk.leaseMs + 20_000, `recovered after ${recoveredMs.toFixed(0)} ms`);
  });

  test("paused for longer than its lease: one answer each, none crossed", async () => {
    await using redis = await startServer();
    await using stub = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 20));
    await using other = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 20));
    const model = stubModel([stub, other], { timeouts: patient, maxBatchSize: 8 });
    // Shorter than those of production, in proportion.
    const engine = { leaseMs: 1000, commandTimeoutMs: 400, waitTimeoutMs: 200, aliveMs: 800 };
    await using fleet = await Fleet.start(
      { gateways: 2, batchers: 2 },
      fleetConfig({ url: redis.url, ...engine }, [model]),
    );
    await using load = new Load(() => fleet.doors, { callers: 24 });
    await load.more(100);
    for (let round = 0; round < 2; round++) {
      const zombie = fleet.batchers[round]!;
      zombie.pause();
      const pausedAt = performance.now();
      await load.more(100);
      await eventually(() => performance.now() - pausedAt > 1.5 * engine.leaseMs);
      zombie.resume();
      await load.more(100);
    }
    const ledger = await load.stop();
    ledger.assertWhole();
    assert.deepEqual([stub.mostAtOnce <= 2, other.mostAtOnce <= 2], [true, true]);
    for (const door of fleet.doors) assert.equal((await door.health()).totals.lost, 0);
  });

  test("stopped under load: no caller notices", async () => {
    await using redis = await startServer();
    // Long batches: on a busy machine one must not become overdue, since its tasks would be sent to the other worker, too.
    await using stub = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 400));
    await using other = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 400));
    const model = stubModel([stub, other], { timeouts: patient, maxBatchSize: 24 });
    await using fleet = await Fleet.start(
      { gateways: 1, batchers: 2 },
      fleetConfig({ url: redis.url }, [model], { limits: { drainMs: 15_000 } }),
    );
    await using load = new Load(() => fleet.doors);
    await load.more(200);
    const { code } = await fleet.batchers[0]!.stop();
    assert.equal(code, 0, fleet.batchers[0]!.stderr());
    await load.more(200);
    const ledger = await load.stop();
    ledger.assertWhole();
    assert.deepEqual(ledger.refusals, []);
    assert.deepEqual(runTwice([...stub.inputs, ...other.inputs]), [], "it finished or handed back its batch");
  });
});
