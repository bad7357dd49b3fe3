/** How much a batcher reads: by its own workers now, and by what the others said in their last heartbeat. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { FleetDemand } from "../../../src/workers/fleet/demand.ts";
import { leaseNames } from "../../../src/workers/fleet/orders.ts";
import type { Member, ModelBeat } from "../../../src/workers/fleet/registry.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Batcher, gpus, member, ScriptedRegistry } from "./batcher.ts";
import { MODEL } from "./stage.ts";

const SERVICE_MS = 100;

function beat(changes: Partial<ModelBeat> & { idle?: number } = {}): ModelBeat {
  const { idle = 0, ...rest } = changes;
  return {
    name: MODEL,
    workers: 1,
    healthy: 1,
    capacity: {
      idle,
      overdue: 0,
      counted: 1,
      perMs: 0.5,
      nominalPerMs: 0.5,
      batchSize: 50,
      batchMs: 100,
      runMs: 100,
      deviationMs: 2,
    },
    nextUsableInMs: null,
    arrivalsPerMs: 0,
    utilization: 0,
    ...rest,
  };
}

/** The batcher "me" in zone "a" with two workers, and whoever else is there. */
async function stage(...others: Member[]) {
  const clock = new VirtualClock();
  const registry = new ScriptedRegistry(clock);
  const batcher = new Batcher(gpus(2, SERVICE_MS), registry, clock);
  let members = others;
  let held = leaseNames(
    MODEL,
    [0, 1].map((n) => `http://gpu-${n}:80/run`),
  );
  registry.answer = ({ member: self }) => ({ held, members: [{ ...self, ageMs: 0 }, ...members] });
  await batcher.membership.start();
  const demand = new FleetDemand(batcher.membership.fleet, clock);
  const pass = (ms: number): Promise<number> => clock.run(clock.now() + ms);
  // The first heartbeat was sent before it held a worker.
  await pass(1000);
  return {
    batcher,
    demand,
    pass,
    hear: async (next: Member[], leases = held): Promise<void> => {
      members = next;
      held = leases;
      await pass(1000);
    },
  };
}

test("room is what idle workers take; a batcher without a worker wants nothing", async () => {
  const { batcher, demand, pass, hear } = await stage();
  assert.deepEqual(demand.models(), [MODEL]);
  assert.equal(demand.room(MODEL), 2);
  assert.deepEqual([demand.room("other"), demand.batchSize("other"), demand.pacePerMs("other")], [0, 0, 0]);
  batcher.put(1);
  await pass(1);
  assert.equal(demand.room(MODEL), 1);
  batcher.put(1);
  await pass(1);
  assert.equal(demand.room(MODEL), 0);
  assert.deepEqual(demand.models(), [MODEL], "its workers are busy, and well");
  await pass(SERVICE_MS);
  assert.equal(demand.room(MODEL), 2);
  assert.ok(demand.pacePerMs(MODEL) > 0);
  assert.equal(demand.batchSize(MODEL), 1);
  await hear([], []);
  assert.deepEqual([demand.models(), demand.room(MODEL)], [[], 0]);
  await batcher.stop();
});

test("the first by id leads among those of its zone that can run the model now", async () => {
  const before = { id: "a-first", models: [beat()] };
  const { batcher, demand, hear } = await stage(member({ ...before, zone: "a" }));
  assert.equal(demand.leads(MODEL), false);
  for (const [why, other] of [
    ["another zone", member({ ...before, zone: "b" })],
    ["a gateway", member({ ...before, zone: "a", role: "gateway" })],
    ["no healthy worker", member({ ...before, zone: "a", models: [beat({ healthy: 0 })] })],
    ["another model", member({ ...before, zone: "a", models: [beat({ name: "other" })] })],
    ["later by id", member({ ...before, id: "z-last", zone: "a" })],
  ] as const) {
    await hear([other]);
    assert.equal(demand.leads(MODEL), true, why);
  }
  await hear([]);
  assert.equal(demand.leads(MODEL), true, "it is alone");
  await batcher.stop();
});

test("others are idle when one has a worker without a batch, wherever it is", async () => {
  const other = (changes: Parameters<typeof beat>[0]): Member[] => [
    member({ id: "b", models: [beat(changes)] }),
  ];
  const { batcher, demand, hear } = await stage(...other({ idle: 1 }));
  assert.equal(demand.othersIdle(MODEL), true);
  assert.equal(demand.othersIdle("other"), false);
  await hear(other({ idle: 0 }));
  assert.equal(demand.othersIdle(MODEL), false);
  await hear(other({ idle: 1, workers: 0, healthy: 0 }));
  assert.equal(demand.othersIdle(MODEL), false, "it holds none");
  await hear([]);
  assert.equal(demand.othersIdle(MODEL), false, "its own idle workers are not another's");
  await batcher.stop();
});

test("zones are those of other gateways; deserted without a batcher that can run something", async () => {
  const gateway = (zone: string): Member => member({ id: `g-${zone}`, zone, role: "gateway" });
  const { batcher, demand, hear } = await stage(
    gateway("a"),
    gateway("b"),
    gateway("c"),
    member({ id: "b-b", zone: "b", models: [beat()] }),
    member({ id: "b-c", zone: "c", models: [beat({ healthy: 0 })] }),
    member({ id: "b-d", zone: "d", models: [beat()] }),
  );
  const zones = (): Record<string, boolean> =>
    Object.fromEntries(demand.zones().map(({ zone, deserted }) => [zone, deserted]));
  assert.deepEqual(zones(), { b: false, c: true });
  await hear([gateway("b"), member({ id: "both", zone: "e", role: "all", models: [beat()] })]);
  assert.deepEqual(zones(), { b: true, c: true, e: false });
  // Nobody of them is left: what their gateways accepted is still there.
  await hear([]);
  assert.deepEqual(zones(), { b: true, c: true, e: true });
  await batcher.stop();
});
