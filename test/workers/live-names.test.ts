/** Names of DNS and workers added by hand, while the config changes under them, on virtual time. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { ModelConfig } from "../../src/app/config/config.ts";
import { emptyModel, httpModel, modelOf } from "./network-workers.ts";

const [A, B] = ["10.0.0.1", "10.0.0.2"];
const EVERY_MS = 5000;
const GRACE_MS = 15_000;

const http = (...workers: readonly string[]): ModelConfig => httpModel(workers);

async function stage(places: Readonly<Record<string, string[]>>, first: ModelConfig) {
  const asked: string[] = [];
  const resolve = (name: string): Promise<string[]> => {
    asked.push(name);
    return Promise.resolve(places[name] ?? []);
  };
  const stage = emptyModel({}, first, { resolve });
  await stage.pool.follow();
  return { ...stage, asked };
}

describe("a reload", () => {
  test("that gives the name another spelling keeps the workers that both stand for", async () => {
    const places = { short: [A, B], long: [A, B] };
    const { simulation, pool, change, names, backend, dispatcher } = await stage(
      places,
      http("dns://short:1/"),
    );
    await change(http("dns://long:1/"));
    await simulation.run(2 * EVERY_MS);
    assert.deepEqual([names(), backend.retired], [["10.0.0.1:1", "10.0.0.2:1"], []]);
    assert.equal(pool.of("m")!.foundBy(dispatcher.workers.slots[0]!), "dns://long:1/");
    places.long = [A];
    await simulation.run(GRACE_MS + 2 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:1"]);
  });

  test("there and back, faster than a lookup, changes nothing", async () => {
    const { simulation, change, names, backend } = await stage({ one: [A], two: [B] }, http("dns://one:1/"));
    const both = [change(http("dns://two:1/")), change(http("dns://one:1/"))];
    await Promise.all(both);
    await simulation.run(EVERY_MS);
    assert.ok(!backend.retired.includes("10.0.0.1:1"));
    await simulation.run(GRACE_MS + 2 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:1"]);
  });

  test("that writes down a worker which DNS found keeps it when DNS forgets it, and the other way round", async () => {
    const places = { gpu: [A, B] };
    const { simulation, change, names, backend } = await stage(places, http("dns://gpu:1/"));
    await change(http("dns://gpu:1/", "http://10.0.0.1:1/"));
    places.gpu = [B];
    await simulation.run(GRACE_MS + 3 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
    places.gpu = [A, B];
    await simulation.run(EVERY_MS);
    await change(http("dns://gpu:1/"));
    await simulation.run(EVERY_MS + 1);
    assert.deepEqual(
      [names(), backend.retired],
      [["10.0.0.1:1", "10.0.0.2:1"], []],
      "now it is the name's again",
    );
  });

  test("to another kind of workers looks the name up anew, or not any more", async () => {
    const { simulation, change, asked } = await stage({ gpu: [A] }, http("dns://gpu:1/"));
    await change(modelOf({ name: "m", backend: { kind: "grpc", workers: ["dns://gpu:1"] } }));
    await simulation.run(1);
    assert.equal(asked.length, 2, "at once");
    await change(modelOf({ name: "m", backend: { kind: "simulated", workers: 1 } }));
    await simulation.run(10 * EVERY_MS);
    assert.equal(asked.length, 2);
  });

  test("that changes how often a name is looked up need not wait for the next time", async () => {
    const every = (dnsMs: number): ModelConfig => httpModel(["dns://gpu:1/"], "m", { dnsMs });
    const { simulation, change, asked } = await stage({ gpu: [A] }, every(3_600_000));
    await change(every(1000));
    await simulation.run(1001);
    assert.equal(asked.length, 2);
  });

  test("that replaces the backend carries over whom DNS named and operators added, also while they are busy", async () => {
    const { simulation, change, names, operator, dispatcher } = await stage(
      { gpu: [A] },
      http("dns://gpu:1/"),
    );
    await operator.add("m", "http://added:1/");
    for (let at = 0; at < 4; at++) simulation.put();
    await simulation.run(20);
    const before = [...dispatcher.workers.slots];
    await change(httpModel(["dns://gpu:1/"], "m", { authorization: "Bearer other" }));
    await simulation.run(1);
    assert.equal(dispatcher.workers.healthy(simulation.clock.now()), 2, "nobody is refused meanwhile");
    await simulation.run(1000);
    assert.deepEqual(names(), ["10.0.0.1:1", "added:1"]);
    assert.ok(before.every(({ phase }) => phase === "gone"));
  });
});

test("one of the config that was removed by hand is not brought back by a name that has its address, too", async () => {
  const listed = http("http://10.0.0.1:1/", "dns://gpu:1/");
  const { simulation, names, notices, operator, change } = await stage({ gpu: [A, B] }, listed);
  await change(httpModel(["http://10.0.0.1:1/", "dns://gpu:1/"], "m", { authorization: "Bearer x" }));
  await simulation.run(1);
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
  await operator.remove("10.0.0.1:1");
  await simulation.run(5 * EVERY_MS);
  assert.deepEqual(names(), ["10.0.0.2:1"]);
  assert.ok(notices.length <= 1, notices.join());
  assert.deepEqual(
    operator.removed().map(({ name }) => name),
    ["10.0.0.1:1"],
  );
  await operator.add("m", "http://10.0.0.1:1/");
  assert.deepEqual([names(), operator.removed()], [["10.0.0.1:1", "10.0.0.2:1"], []]);
  // Where the config lists it no more, the name may have it.
  await operator.remove("10.0.0.1:1");
  await change(httpModel(["dns://gpu:1/"], "m", { authorization: "Bearer x" }));
  await simulation.run(2 * EVERY_MS);
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
});

test("a worker that was on its way to a backend that is replaced meanwhile is not given to it", async () => {
  const { simulation, change, names, operator, backend, clock } = await stage({}, http());
  const grow = backend.grow.bind(backend);
  backend.grow = async (...where) => {
    await new Promise<void>((resolve) => clock.at(clock.now() + 100, resolve));
    return grow(...where);
  };
  const adding = operator.add("m", "http://gpu-1:1/");
  const refused = assert.rejects(adding, /the config was read again meanwhile; ask again$/);
  await change(httpModel(["http://gpu-2:1/"], "m", { authorization: "Bearer x" }));
  await simulation.run(200);
  await refused;
  assert.deepEqual([names(), backend.workers], [["gpu-2:1"], []]);
  await operator.add("m", "http://gpu-1:1/");
  assert.deepEqual(names(), ["gpu-1:1", "gpu-2:1"]);
});
