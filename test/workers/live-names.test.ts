/** Names of DNS and workers added by hand, while the config changes under them, on virtual time. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { parseConfig } from "../../src/app/config/load.ts";
import type { ModelConfig } from "../../src/app/config/config.ts";
import { Roster } from "../../src/workers/roster.ts";
import { TakenOut } from "../../src/workers/taken-out.ts";
import { emptyModel, NetworkBackend } from "./network-workers.ts";

const [A, B] = ["10.0.0.1", "10.0.0.2"];
const EVERY_MS = 5000;
const GRACE_MS = 15_000;

function models(backend: object): readonly ModelConfig[] {
  const { config, problems } = parseConfig(
    JSON.stringify({ models: [{ name: "m", backend }] }),
    "f.yaml",
    {},
  );
  assert.ok(config, JSON.stringify(problems));
  return config.models;
}

const http = (...workers: readonly string[]): readonly ModelConfig[] => models({ kind: "http", workers });

function stage(places: Readonly<Record<string, string[]>>) {
  const stage = emptyModel();
  const { model, clock, events, dispatcher } = stage;
  const asked: string[] = [];
  const resolve = (name: string): Promise<string[]> => {
    asked.push(name);
    return Promise.resolve(places[name] ?? []);
  };
  const roster = new Roster([model], { clock, events, resolve });
  const change = (next: readonly ModelConfig[], backend = stage.backend): void =>
    roster.retune(next, { dispatchers: [dispatcher], backends: [backend] });
  return { ...stage, roster, change, asked };
}

describe("a reload", () => {
  test("that gives the name another spelling keeps the workers that both stand for", async () => {
    const places = { short: [A, B], long: [A, B] };
    const { simulation, roster, change, names, backend, dispatcher } = stage(places);
    await roster.followAll(http("dns://short:1/"));
    change(http("dns://long:1/"));
    await simulation.run(2 * EVERY_MS);
    assert.deepEqual([names(), backend.retired], [["10.0.0.1:1", "10.0.0.2:1"], []]);
    assert.equal(roster.foundBy("m", dispatcher.workers.slots[0]!), "dns://long:1/");
    places.long = [A];
    await simulation.run(GRACE_MS + 2 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:1"]);
    roster.stop();
  });

  test("there and back, faster than a lookup, changes nothing", async () => {
    const { simulation, roster, change, names, backend } = stage({ one: [A], two: [B] });
    await roster.followAll(http("dns://one:1/"));
    change(http("dns://two:1/"));
    change(http("dns://one:1/"));
    await simulation.run(EVERY_MS);
    assert.ok(!backend.retired.includes("10.0.0.1:1"));
    await simulation.run(GRACE_MS + 2 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:1"]);
    roster.stop();
  });

  test("that writes down a worker which DNS found keeps it when DNS forgets it", async () => {
    const places = { gpu: [A, B] };
    const { simulation, roster, change, names, dispatcher, backend } = stage(places);
    await roster.followAll(http("dns://gpu:1/"));
    change(http("dns://gpu:1/", "http://10.0.0.1:1/"));
    places.gpu = [B];
    await simulation.run(GRACE_MS + 3 * EVERY_MS);
    assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
    places.gpu = [A, B];
    await simulation.run(EVERY_MS);
    change(http("dns://gpu:1/"));
    const slot = dispatcher.workers.slots.find(({ worker }) => worker.address === "http://10.0.0.1:1/")!;
    await dispatcher.retire(slot).then(() => backend.retire(slot.worker));
    await simulation.run(EVERY_MS + 1);
    assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"], "now it is the name's again");
    roster.stop();
  });

  test("to another kind of workers looks the name up anew, or not any more", async () => {
    const { simulation, roster, change, asked } = stage({ gpu: [A] });
    await roster.followAll(http("dns://gpu:1/"));
    change(models({ kind: "grpc", workers: ["dns://gpu:1"] }));
    await simulation.run(1);
    assert.equal(asked.length, 2, "at once");
    change(models({ kind: "simulated", workers: 1 }));
    await simulation.run(10 * EVERY_MS);
    assert.equal(asked.length, 2);
    roster.stop();
  });

  test("that changes how often a name is looked up need not wait for the next time", async () => {
    const { simulation, roster, change, asked } = stage({ gpu: [A] });
    const every = (dnsMs: number): readonly ModelConfig[] =>
      models({ kind: "http", workers: ["dns://gpu:1/"], dnsMs });
    await roster.followAll(every(3_600_000));
    change(every(1000));
    await simulation.run(1001);
    assert.equal(asked.length, 2);
    roster.stop();
  });
});

test("one of the config that was removed by hand is not brought back by a name that has its address, too", async () => {
  const { simulation, model, clock, events, names, notices, dispatcher, backend } = stage({});
  const takenOut = new TakenOut();
  const resolve = (): Promise<string[]> => Promise.resolve([A, B]);
  const roster = new Roster([model], { clock, events, resolve, takenOut });
  const listed = http("http://10.0.0.1:1/", "dns://gpu:1/");
  takenOut.retune(listed);
  await roster.join("m", "http://10.0.0.1:1/");
  await roster.followAll(listed);
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
  await roster.remove("10.0.0.1:1");
  await simulation.run(5 * EVERY_MS);
  assert.deepEqual(names(), ["10.0.0.2:1"]);
  assert.equal(notices.filter((each) => /was removed by hand|is a worker of model/.test(each)).length, 1);
  assert.deepEqual(
    roster.removed().map(({ name }) => name),
    ["10.0.0.1:1"],
  );
  await roster.add("m", "http://10.0.0.1:1/");
  assert.deepEqual([names(), roster.removed()], [["10.0.0.1:1", "10.0.0.2:1"], []]);
  // Where the config lists it no more, the name may have it.
  await roster.remove("10.0.0.1:1");
  const byName = http("dns://gpu:1/");
  takenOut.retune(byName);
  roster.retune(byName, { dispatchers: [dispatcher], backends: [backend] });
  await simulation.run(2 * EVERY_MS);
  assert.deepEqual(names(), ["10.0.0.1:1", "10.0.0.2:1"]);
  roster.stop();
});

test("a worker that was on its way to a backend that is replaced meanwhile is not given to it", async () => {
  const { simulation, roster, change, names, backend } = stage({});
  const adding = roster.add("m", "http://gpu-1:1/");
  const next = new NetworkBackend(simulation);
  change(http("http://gpu-2:1/"), next);
  await assert.rejects(adding, /the config was read again meanwhile; ask again$/);
  assert.deepEqual([names(), backend.workers], [[], []]);
  await roster.add("m", "http://gpu-1:1/");
  assert.deepEqual(names(), ["gpu-1:1"]);
});
