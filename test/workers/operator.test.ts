/** Workers that people add, drain, resume and remove while batches run, on virtual time. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../src/core/errors.ts";
import { Orders } from "../../src/workers/fleet/orders.ts";
import { codes, endings, simulate } from "../dispatch/simulated.ts";
import { emptyModel, httpModel, modelOf, poolOf } from "./network-workers.ts";
import { Operator } from "../../src/workers/operator.ts";
import { type PoolParts, WorkerPool } from "../../src/workers/pool.ts";

const URLS = ["http://gpu-1:9000/infer", "http://gpu-2:9000/infer"] as const;

async function two(changes: Parameters<typeof emptyModel>[0] = {}) {
  const stage = emptyModel(changes);
  for (const url of URLS) await stage.operator.add(undefined, url);
  return stage;
}

function refused(status: number, message: RegExp) {
  return (error: unknown): boolean => {
    assert(error instanceof Refusal, String(error));
    assert.match(error.message, message);
    assert.equal(error.status, status);
    return true;
  };
}

describe("a worker that is added", () => {
  test("gets batches at once, under its host and port", async () => {
    const { simulation, operator } = emptyModel({ limits: { maxBatchSize: 1 } });
    const ended = endings(simulation);
    simulation.put();
    await simulation.run(500);
    assert.equal(ended.size, 0);
    const address = "http://gpu-1:9000/infer";
    assert.deepEqual(await operator.add("m", address), { model: "m", name: "gpu-1:9000", address });
    await simulation.run(101);
    assert.deepEqual(codes(ended), ["ok"]);
  });

  test("is checked as the config would", async () => {
    const { operator } = await two();
    const cases: [string | undefined, number, RegExp][] = [
      [undefined, 400, /^say where the worker is: url, like http:\/\/gpu-1:9000\/infer$/],
      ["gpu-3", 400, /^url is not a full URL; write one like/],
      ["ftp://gpu-3/", 400, /^url must begin with http:\/\/ or https:\/\/$/],
      ["http://u:p@gpu-3/", 400, /^url holds credentials/],
      ["dns://gpu:9000/", 400, /^names of DNS belong in the config/],
      [URLS[1], 409, /^http:\/\/gpu-2:9000\/infer is a worker of model m; it would get two batches at once$/],
    ];
    for (const [url, status, message] of cases) {
      await assert.rejects(operator.add("m", url), refused(status, message), url);
    }
    await assert.rejects(operator.add("n", URLS[0]), refused(404, /^there is no model n; one of m$/));
  });

  test("of two that come at once with one URL, one is let in", async () => {
    const { operator, names } = emptyModel();
    const added = await Promise.allSettled([operator.add("m", URLS[0]), operator.add("m", URLS[0])]);
    assert.deepEqual(added.map(({ status }) => status).sort(), ["fulfilled", "rejected"]);
    assert.deepEqual(names(), ["gpu-1:9000"]);
  });

  test("Ferry starts it, where it starts the others; unless the autoscaler says how many there are", async () => {
    const own = (scaling: object) =>
      modelOf({ name: "m", backend: { kind: "simulated", workers: 1 }, scaling });
    const simulation = simulate();
    const { operator, change } = poolOf([simulation], [own({})]);
    assert.deepEqual(await operator.add(undefined, undefined), { model: "m", name: "gpu-2" });
    await assert.rejects(operator.add(undefined, URLS[0]), refused(400, /leave out url$/));
    assert.deepEqual(await operator.remove("gpu-2"), { model: "m", name: "gpu-2", gone: true });
    assert.equal(simulation.backend.workers.length, 1);
    await change(own({ apply: true }));
    await assert.rejects(operator.add(undefined, undefined), refused(409, /raise scaling\.min instead$/));
  });

  test("a gateway has none", async () => {
    const { clock, events, orders } = emptyModel();
    const pool = new WorkerPool({ clock, events, orders } as unknown as PoolParts);
    const operator = new Operator({ clock, events, models: () => [httpModel()], pool, orders });
    await assert.rejects(operator.add("m", URLS[0]), refused(409, /it is a gateway; ask a batcher$/));
  });
});

describe("a worker that is drained", () => {
  test("ends what it runs, gets nothing more, is no capacity, and comes back when it is let in", async () => {
    const { simulation, dispatcher, operator, clock } = await two({ limits: { maxBatchSize: 1 } });
    const ended = endings(simulation);
    for (let at = 0; at < 12; at++) simulation.put();
    await simulation.run(50);
    const [slot, other] = dispatcher.workers.slots;
    assert.equal(operator.drain("gpu-1:9000").name, "gpu-1:9000");
    assert.deepEqual([slot!.state(clock.now()), slot!.batch?.size], ["draining", 1]);
    assert.equal(dispatcher.horizon(clock.now()).healthy, 1);
    await simulation.run(400);
    assert.deepEqual([slot!.tasks, other!.tasks, slot!.batch], [1, 5, undefined]);
    assert.equal(slot!.state(clock.now()), "draining", "it stays in the list");
    operator.resume("gpu-1:9000", "m");
    assert.equal(slot!.batch?.size, 1, "at once");
    await simulation.run(2000);
    assert.deepEqual(new Set(codes(ended)), new Set(["ok"]));
    assert.equal(ended.size, 12);
  });

  test("drained twice is drained, resumed twice is resumed", async () => {
    const { dispatcher, operator } = await two();
    const [slot] = dispatcher.workers.slots;
    operator.drain("gpu-1:9000");
    operator.drain("gpu-1:9000");
    assert.equal(slot!.drained, true);
    operator.resume("gpu-1:9000");
    operator.resume("gpu-1:9000");
    assert.equal(slot!.drained, false);
  });

  test("when all are drained, tasks wait", async () => {
    const { simulation, operator, dispatcher, clock } = await two();
    const ended = endings(simulation);
    operator.drain("gpu-1:9000");
    operator.drain("gpu-2:9000");
    simulation.put();
    await simulation.run(1000);
    assert.deepEqual([ended.size, dispatcher.horizon(clock.now()).healthy], [0, 0]);
    operator.resume("gpu-2:9000");
    await simulation.run(200);
    assert.deepEqual(codes(ended), ["ok"]);
  });
});

describe("a worker that is removed", () => {
  test("is gone when its batch is over; until then it drains, and is not let back in", async () => {
    const { simulation, operator, names, backend } = await two({ limits: { maxBatchSize: 1 } });
    const ended = endings(simulation);
    for (let at = 0; at < 4; at++) simulation.put();
    await simulation.run(50);
    assert.equal((await operator.remove("gpu-1:9000")).gone, false);
    assert.equal((await operator.remove("gpu-1:9000")).gone, false, "asked twice");
    assert.throws(() => operator.resume("gpu-1:9000"), refused(409, /^gpu-1:9000 is being removed/));
    await assert.rejects(operator.add("m", URLS[0]), refused(409, /is being removed from model m/));
    assert.deepEqual(names(), ["gpu-1:9000", "gpu-2:9000"]);
    await simulation.run(60);
    assert.deepEqual([names(), backend.retired], [["gpu-2:9000"], ["gpu-1:9000"]]);
    await simulation.run(1000);
    assert.deepEqual(codes(ended), ["ok", "ok", "ok", "ok"]);
    await operator.add("m", URLS[0]);
    assert.deepEqual(names(), ["gpu-1:9000", "gpu-2:9000"]);
  });

  test("is gone at once when it is idle, and what was ordered of it with it", async () => {
    const { operator, names, dispatcher } = await two();
    operator.drain("gpu-1:9000");
    assert.equal((await operator.remove("gpu-1:9000")).gone, true);
    assert.deepEqual(names(), ["gpu-2:9000"]);
    await operator.add("m", URLS[0]);
    assert.equal(dispatcher.workers.slots[1]!.drained, false);
  });
});

describe("names", () => {
  test("one that is not there is told with the one that was perhaps meant", async () => {
    const { operator } = await two();
    const unknown = /^there is no worker gpu-1:900; did you mean gpu-1:9000\?; GET \/internal\/workers lists/;
    assert.throws(() => operator.drain("gpu-1:900"), refused(404, unknown));
    await assert.rejects(operator.remove("x"), refused(404, /^there is no worker x; GET/));
    assert.throws(() => operator.drain("gpu-1:9000", "n"), refused(404, /^there is no model n/));
  });

  test("where two models have one, the model must be said", async () => {
    const [one, other] = [simulate(), simulate({ name: "n" })];
    const { operator } = poolOf([one, other], [httpModel(), httpModel([], "n")]);
    await operator.add("m", "http://gpu-1:9000/infer");
    await operator.add("n", "http://gpu-1:9000/rank");
    await assert.rejects(operator.add(undefined, URLS[1]), refused(400, /^say for which model: m, n$/));
    const both = /^several models have a worker gpu-1:9000: m, n; say which with model$/;
    assert.throws(() => operator.drain("gpu-1:9000"), refused(409, both));
    assert.equal(operator.drain("gpu-1:9000", "n").address, "http://gpu-1:9000/rank");
    assert.equal(one.dispatcher.workers.slots[0]!.drained, false);
    assert.equal(other.dispatcher.workers.slots[0]!.drained, true);
  });
});

describe("orders", () => {
  test("all who heard the same orders, in whichever order, want the same", () => {
    const order = fc.record({
      key: fc.constantFrom("a", "b", "c"),
      version: fc.integer({ min: 1, max: 6 }),
      aside: fc.boolean(),
    });
    const shuffled = fc
      .array(order, { maxLength: 12 })
      .chain((all) => fc.tuple(fc.constant(all), fc.shuffledSubarray(all, { minLength: all.length })));
    fc.assert(
      fc.property(shuffled, ([all, again]) => {
        const [one, other] = [new Orders(), new Orders()];
        for (const each of all) one.hear([each]);
        other.hear(again);
        for (const key of ["a", "b", "c"]) assert.equal(one.isAside(key), other.isAside(key));
        // And whoever is told afterwards overrules all of it, everywhere.
        one.give("a", !one.isAside("a"));
        other.hear(one.all);
        assert.equal(other.isAside("a"), one.isAside("a"));
      }),
    );
  });

  test("what is no order is not heard, and those that were lifted are not kept for ever", () => {
    const orders = new Orders();
    for (const said of [undefined, "x", [null], [{ key: 1 }], [{ key: "a", aside: true, version: "2" }]]) {
      orders.hear(said);
    }
    assert.deepEqual(orders.all, []);
    orders.give("kept", true);
    for (let at = 0; at < 1000; at++) {
      orders.give(`worker ${at}`, true);
      orders.give(`worker ${at}`, false);
    }
    assert.equal(orders.all.length, 257);
    assert.equal(orders.isAside("kept"), true);
  });
});
