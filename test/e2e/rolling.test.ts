/** Every gateway and every batcher is replaced under load, one after another, and no request fails. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { startServer } from "../redis/servers.ts";
import { Fleet, fleetConfig, patient } from "./fleet.ts";
import { Balancer, Stream } from "./steady-load.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const PER_SECOND = 300;

describe("a rolling restart", () => {
  test("of two gateways and two batchers under 300 requests/s: 0 failed", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers: StubWorker[] = [];
    for (let i = 0; i < 4; i++) {
      const worker = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 20));
      workers.push(stack.use(worker));
    }
    const model = stubModel(workers, { timeouts: patient, maxBatchSize: 16 });
    const config = fleetConfig({ url: redis.url }, [model], { limits: { drainMs: 15_000, lingerMs: 1000 } });
    const fleet = stack.use(await Fleet.start({ gateways: 2, batchers: 2 }, config));
    const balancer = stack.use(await Balancer.listen(() => fleet.doors.map(({ url }) => url)));
    await using load = new Stream({ port: balancer.port, perSecond: PER_SECOND });
    await load.more(PER_SECOND);
    for (const gateway of [...fleet.gateways]) {
      assert.deepEqual(await gateway.stop(), { code: 0, signal: null });
      await fleet.add("gateway");
      await fleet.serves();
      await load.more(PER_SECOND / 2);
    }
    for (const batcher of [...fleet.batchers]) {
      assert.deepEqual(await batcher.stop(), { code: 0, signal: null });
      await fleet.add("batcher");
      await fleet.serves();
      await load.more(PER_SECOND / 2);
    }
    await load.stop();
    assert.deepEqual(load.failed, [], load.told());
    assert.equal(load.answered, load.sent);
    assert.ok(workers.every(({ mostAtOnce }) => mostAtOnce === 1));
  });
});
