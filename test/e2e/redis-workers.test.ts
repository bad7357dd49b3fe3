/** Batchers that list the same workers: each worker belongs to one of them, and never sees two batches. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Load } from "./fleet-load.ts";
import { alert, brisk, Fleet, fleetConfig, type Part, patient } from "./fleet.ts";
import { eventually } from "./harness.ts";
import { type Behaviour, stubModel, StubWorker } from "./stub-worker.ts";

/** A worker that needs a while, and knows how many batches it had at once. */
async function fourWorkers(stack: AsyncDisposableStack, serviceMs: number): Promise<StubWorker[]> {
  const workers: StubWorker[] = [];
  for (let i = 0; i < 4; i++) {
    const worker = await StubWorker.listen((call) => void setTimeout(() => call.echo(), serviceMs));
    workers.push(stack.use(worker));
  }
  return workers;
}

const mostAtOnce = (workers: readonly StubWorker[]): number[] => workers.map((each) => each.mostAtOnce);

describe("two batchers, four workers", () => {
  test("two each; all four with the one that is left, soon; two each again", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers = await fourWorkers(stack, 30);
    const model = stubModel(workers, { timeouts: patient, maxBatchSize: 4 });
    const config = fleetConfig({ url: redis.url, ...brisk }, [model]);
    const fleet = stack.use(await Fleet.start({ gateways: 1, batchers: 2 }, config));
    await fleet.spread([2, 2]);
    await using load = new Load(() => fleet.doors, { callers: 24 });
    await load.more(200);
    assert.deepEqual(mostAtOnce(workers), [1, 1, 1, 1]);

    const killedAt = performance.now();
    await fleet.batchers[0]!.kill();
    const before = workers.map(({ calls }) => calls.length);
    const allRun = (): boolean => workers.every(({ calls }, at) => calls.length > before[at]!);
    await eventually(allRun);
    const takenOverMs = performance.now() - killedAt;
    await fleet.spread([4]);
    // A worker whose batcher was killed still has that call for a moment: killed connections end it.
    assert.ok(takenOverMs < brisk.aliveMs + 20_000, `taken over after ${takenOverMs.toFixed(0)} ms`);
    const afterKill = mostAtOnce(workers);

    await fleet.add("batcher");
    await fleet.spread([2, 2]);
    await load.more(200);
    (await load.stop()).assertWhole();
    assert.deepEqual(mostAtOnce(workers), afterKill);
    assert.deepEqual(mostAtOnce(workers), [1, 1, 1, 1]);
  });

  test("a batcher that comes takes its share under load, and nobody is refused", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers = await fourWorkers(stack, 50);
    const model = stubModel(workers, { timeouts: patient, maxBatchSize: 4 });
    const config = fleetConfig({ url: redis.url }, [model]);
    const fleet = stack.use(await Fleet.start({ gateways: 1, batchers: 1 }, config));
    await fleet.spread([4]);
    await using load = new Load(() => fleet.doors, { callers: 24 });
    await load.more(100);
    await fleet.add("batcher");
    await fleet.spread([2, 2]);
    await load.more(100);
    await fleet.batchers[1]!.stop();
    await fleet.spread([4]);
    await load.more(100);
    const ledger = await load.stop();
    ledger.assertWhole();
    assert.deepEqual(ledger.refusals, []);
    assert.deepEqual(mostAtOnce(workers), [1, 1, 1, 1]);
  });

  test("a paused batcher starts nothing on a worker that is another's when it wakes", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers = await fourWorkers(stack, 40);
    const model = stubModel(workers, { timeouts: patient, maxBatchSize: 4 });
    const config = fleetConfig({ url: redis.url, ...alert, aliveMs: 1500 }, [model]);
    const fleet = stack.use(await Fleet.start({ gateways: 1, batchers: 2 }, config));
    await fleet.spread([2, 2]);
    await using load = new Load(() => fleet.doors, { callers: 32 });
    for (let round = 0; round < 3; round++) {
      await load.more(60);
      const zombie = fleet.batchers[round % 2]!;
      await zombie.pauseAsleep();
      await fleet.spread([4]);
      // Calls that the paused one had open end by themselves: it does not read their answers.
      await load.more(60);
      for (const worker of workers) worker.mostAtOnce = 0;
      zombie.resume();
      await fleet.spread([2, 2]);
      await load.more(60);
      assert.deepEqual(mostAtOnce(workers), [1, 1, 1, 1], `round ${round}`);
    }
    (await load.stop()).assertWhole();
  });

  test("a worker that a gateway is told to drain gets nothing, also from the batcher that takes it over", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers = await fourWorkers(stack, 30);
    const model = stubModel(workers, { timeouts: patient, maxBatchSize: 4 });
    const fleet = stack.use(
      await Fleet.start({ gateways: 1, batchers: 2 }, fleetConfig({ url: redis.url }, [model])),
    );
    const gateway = fleet.gateways[0]!;
    await fleet.spread([2, 2]);
    await using load = new Load(() => fleet.doors, { callers: 16 });
    await load.more(100);
    const { host } = new URL(workers[0]!.url);
    const route = `/internal/workers/${encodeURIComponent(host)}`;
    const rowOf = async () => (await gateway.workers()).find(({ name }) => name === host);
    assert.equal((await gateway.admin(`${route}/drain`, "POST")).status, 200);
    await eventually(async () => {
      const row = await rowOf();
      return row?.state === "draining" && row.in_flight === 0;
    });
    const before = workers[0]!.calls.length;
    await load.more(100);
    const refused = await gateway.admin(route, "DELETE");
    assert.equal(refused.status, 409, refused.text);
    const holder = (await rowOf())!.batcher;
    const [gone, left] = fleet.batchers as [Part, Part];
    await gone.stop();
    await fleet.spread([4]);
    await load.more(100);
    assert.equal(workers[0]!.calls.length, before, `first held by ${holder}`);
    // The one that stays has it from the other's beats, or was told: either way it can be told again.
    assert.equal((await left.admin(`${route}/resume`, "POST")).status, 200);
    await eventually(() => workers[0]!.calls.length > before + 3);
    const ledger = await load.stop();
    ledger.assertWhole();
    assert.deepEqual(ledger.refusals, []);
    assert.deepEqual(mostAtOnce(workers), [1, 1, 1, 1]);
  });
});

test("a batcher that joins takes its part of what the first one has read", async () => {
  await using redis = await startServer();
  const slow: Behaviour = (call) => void setTimeout(() => call.echo(), 100);
  await using one = await StubWorker.listen(slow);
  await using two = await StubWorker.listen(slow);
  const model = stubModel([one, two], { timeouts: patient, maxBatchSize: 1 });
  const config = fleetConfig({ url: redis.url }, [model], { admission: { mode: "off" } });
  await using fleet = await Fleet.start({ gateways: 1, batchers: 1 }, config);
  const [door] = fleet.gateways;
  const ids: string[] = [];
  for (let i = 0; i < 200; i++) ids.push(await door!.accept({ input: `waits ${i}` }));
  const second = await fleet.add("batcher");
  for (const id of ids) assert.equal((await door!.result(id)).status, "SUCCESS");
  await second.stop();
  const { tasks } = await second.line(({ msg }) => msg === "stopped");
  assert.ok(Number(tasks) > 20, `it did ${String(tasks)} of 200`);
});
