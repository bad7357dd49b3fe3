/** What a process says of the whole fleet: to its admission, and on its admin page. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { demoConfig } from "../../../src/app/config/load.ts";
import { Fleet } from "../../../src/workers/fleet/fleet.ts";
import type { WorkerDesk } from "../../../src/gateway/admin.ts";
import { leaseNames } from "../../../src/workers/fleet/orders.ts";
import type { ModelBeat, WorkerBeat } from "../../../src/workers/fleet/registry.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Report } from "../../../src/app/report.ts";
import { Events } from "../../../src/observe/events.ts";
import { FleetOutlook } from "../../../src/workers/fleet/outlook.ts";
import { Tally } from "../../../src/observe/tally.ts";
import { Batcher, gpus, member, memoryEngine, ScriptedRegistry } from "./batcher.ts";
import { MODEL } from "./stage.ts";

const model: ModelBeat = {
  name: MODEL,
  workers: 2,
  healthy: 1,
  capacity: {
    idle: 0,
    overdue: 0,
    counted: 1,
    perMs: 0.5,
    nominalPerMs: 1,
    batchSize: 50,
    batchMs: 100,
    runMs: 100,
    deviationMs: 2,
  },
  nextUsableInMs: 300,
  arrivalsPerMs: 0,
  utilization: 0.75,
};

const worker: WorkerBeat = {
  name: "gpu-7",
  model: MODEL,
  state: "busy",
  inFlight: 3,
  batches: 4,
  tasks: 9,
  calls: 4,
  failures: 1,
  busyMs: 1234,
  utilization: 0.25,
  ratio: 1.5,
  leased: true,
};

const down = { ...worker, name: "gpu-8", state: "down", down: { why: "gone", retryInMs: 70 } } as const;
const others = [
  member({ id: "b1", zone: "west", models: [model], workers: [worker, down], ageMs: 40 }),
  member({ id: "b2", models: [{ ...model, healthy: 2, nextUsableInMs: null, utilization: 0.25 }] }),
  member({
    id: "idle",
    models: [
      {
        ...model,
        workers: 0,
        healthy: 0,
        capacity: { ...model.capacity, counted: 0, perMs: 0, nominalPerMs: 0 },
      },
    ],
  }),
  member({ id: "g1", role: "gateway" }),
];

function gateway(models: readonly string[]) {
  const clock = new VirtualClock();
  const events = new Events();
  const config = demoConfig();
  const fleet = new Fleet({ id: "g1", zone: "west", models, dispatchers: [] }, clock);
  const engine = memoryEngine(clock, events);
  const report = new Report({
    config: { ...config, models: models.map((name) => ({ ...config.models[0]!, name })) },
    role: "gateway",
    engine,
    dispatchers: [],
    tally: new Tally(events, clock),
    clock,
    fleet,
    draining: () => false,
    writable: () => true,
    prospects: (model) => new FleetOutlook(fleet, model),
    durability: () => "local",
    reachable: () => true,
    scaling: () => undefined,
    desk: { removed: () => [] } as unknown as WorkerDesk,
  });
  return { clock, fleet, report };
}

test("a model is the sum of the members that serve it; ages count", async () => {
  const { clock, fleet } = gateway([MODEL]);
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others });
  await clock.run(clock.now() + 60);
  assert.deepEqual(fleet.model(MODEL), {
    batchers: 2,
    workers: 4,
    healthy: 3,
    capacityPerMs: 1,
    nextUsableInMs: 200,
    utilization: 0.5,
  });
  assert.equal(fleet.healthy(MODEL), 3);
  assert.equal(fleet.healthy("other"), 0);
  assert.equal(fleet.model("other").nextUsableInMs, Infinity);
});

test("a worker that changes hands counts as healthy, and stands on the page under nobody", () => {
  const { fleet, report } = gateway([MODEL]);
  const lease = leaseNames(MODEL, ["http://gpu-9/run"])[0]!;
  fleet.hear({ held: [], giveBack: [], unheld: [{ model: MODEL, lease }], members: [] });
  assert.equal(fleet.model(MODEL).healthy, 1);
  const [row] = report.workers();
  assert.deepEqual([row!.name, row!.batcher, row!.state], ["gpu-9", "", "idle"]);
});

test("and stands there once, under one name, also while its last holder or its next one names it", () => {
  const { fleet, report } = gateway([MODEL]);
  const leased = (name: string): typeof worker => ({ ...worker, name, leased: true });
  const old = member({ id: "b1", workers: [leased("gpu-9"), leased("gpu-1/a")], ageMs: 400 });
  const next = member({ id: "b2", workers: [leased("gpu-9")], ageMs: 10 });
  const addresses = ["http://gpu-9/run", "http://gpu-1/a", "http://gpu-1/b"];
  const unheld = leaseNames(MODEL, addresses).map((lease) => ({ model: MODEL, lease }));
  fleet.hear({ held: [], giveBack: [], unheld, members: [old, next] });
  assert.equal(fleet.changingHands(MODEL), 1);
  const rows = report.workers().map(({ name, batcher }) => [name, batcher]);
  assert.deepEqual(rows, [
    ["gpu-9", "b2"],
    ["gpu-1/a", "b1"],
    ["gpu-1/b", ""],
  ]);
  // Children of two processes are two workers, though both are called the same.
  const child = { ...worker, name: "python-1", leased: false };
  const members = ["b1", "b2"].map((id) => member({ id, workers: [child] }));
  fleet.hear({ held: [], giveBack: [], unheld: [], members });
  assert.equal(report.workers().length, 2);
});

test("a gateway's admin page shows the fleet", () => {
  const { fleet, report } = gateway([MODEL]);
  assert.equal(report.health()["status"], "degraded", "nobody is there yet");
  assert.equal(report.health()["gpu_utilization"], 0);
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others });
  const { status, workers, healthy_workers, gpu_utilization } = report.health();
  assert.deepEqual([status, workers, healthy_workers, gpu_utilization], ["ok", 4, 3, 0.5]);
  const rows = report.workers();
  assert.deepEqual(rows[0], {
    model: MODEL,
    name: "gpu-7",
    state: "busy",
    in_flight: 3,
    batches: 4,
    tasks: 9,
    calls: 4,
    failures: 1,
    busy_ms: 1234,
    utilization: 0.25,
    ratio: 1.5,
    pipeline: 1,
    ahead: null,
    batcher: "b1",
    zone: "west",
  });
  assert.deepEqual(rows[1]!.down, { why: "gone", retry_in_ms: 70 });
});

test("a model that nobody serves makes the fleet degraded", () => {
  const { fleet, report } = gateway([MODEL, "other"]);
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others });
  assert.equal(report.health()["status"], "degraded");
});

test("as many workers are wanted as there are while nobody knows what they can do, all dead or none there", () => {
  const { fleet, report } = gateway([MODEL]);
  const desired = (): number => report.models()[0]!.desiredWorkers;
  assert.equal(desired(), 1, "an autoscaler that is told 0 would never start one");
  const capacity = { ...model.capacity, counted: 0, perMs: 0 };
  const dead = member({ id: "b1", models: [{ ...model, workers: 3, healthy: 0, capacity }] });
  fleet.hear({ held: [], giveBack: [], unheld: [], members: [dead] });
  assert.equal(desired(), 3);
});

test("a batcher's own numbers are fresh, not those of its last beat", async () => {
  const clock = new VirtualClock();
  const registry = new ScriptedRegistry(clock);
  const batcher = new Batcher(gpus(2, 100), registry, clock);
  const held = leaseNames(MODEL, ["http://gpu-0:80/run"]);
  registry.answer = ({ member }) => ({ held, members: [{ ...member, ageMs: 0 }] });
  await batcher.membership.start();
  const { fleet } = batcher.membership;
  assert.equal(fleet.members[0]!.models[0]!.healthy, 0, "it said so before it held anything");
  assert.equal(fleet.model(MODEL).healthy, 1);
  assert.equal(fleet.healthy(MODEL), 1);
  batcher.put();
  await clock.run(clock.now() + 1);
  const rows = fleet.workers().map(({ name, state, batcher }) => [name, state, batcher]);
  assert.deepEqual(rows, [["gpu-0", "busy", "me"]]);
  assert.equal(fleet.model(MODEL).utilization, 1);
});

test("what a gateway lets in by: the sum of what counts, free times spread over a batch", async () => {
  const { clock, fleet, report } = gateway([MODEL]);
  const outlook = new FleetOutlook(fleet, MODEL);
  // The others are of a version that does not report it.
  const b1 = member({
    ...others[0]!,
    models: [{ ...model, capacity: { ...model.capacity, overtakeMs: 150 } }],
  });
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others.with(0, b1) });
  const now = clock.now();
  assert.deepEqual(outlook.horizon(now), {
    guessed: false,
    healthy: 3,
    idle: 0,
    overdue: 0,
    perMs: 1,
    nominalPerMs: 2,
    batchSize: 50,
    batchMs: 100,
    runMs: 100,
    deviationMs: Math.hypot(20, 2),
    overtakeMs: 150,
    freeAt: [now + 100, now + 100],
    nextUsableAt: now + 260,
  });
  const { models } = report.health() as { models: { capacity_per_second: number }[] };
  assert.equal(models[0]!.capacity_per_second, 1000);
});

test("the last picture stands while nobody speaks, as long as somebody just did", async () => {
  const { clock, fleet } = gateway([MODEL]);
  const outlook = new FleetOutlook(fleet, MODEL);
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others });
  assert.equal(outlook.horizon(clock.now()).perMs, 1);
  fleet.hear({ held: [], giveBack: [], unheld: [], members: [] });
  await clock.run(clock.now() + 100);
  const { perMs, healthy, freeAt } = outlook.horizon(clock.now());
  assert.deepEqual([perMs, healthy, freeAt.length], [1, 3, 2]);
  await clock.run(clock.now() + 4000);
  assert.equal(outlook.horizon(clock.now()).healthy, 0);
});

test("a batcher that holds no worker does not speak for the model", async () => {
  const { clock, fleet } = gateway([MODEL]);
  const outlook = new FleetOutlook(fleet, MODEL);
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others });
  assert.equal(outlook.horizon(clock.now()).perMs, 1);
  // Those that held workers have just left; this one will hold them in a moment.
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others.filter(({ id }) => id === "idle") });
  await clock.run(clock.now() + 100);
  const { perMs, healthy, freeAt } = outlook.horizon(clock.now());
  assert.deepEqual([perMs, healthy, freeAt.length], [1, 3, 2]);
});

test("before anybody held a worker, those who will say how large a batch may be", () => {
  const { clock, fleet } = gateway([MODEL]);
  const outlook = new FleetOutlook(fleet, MODEL);
  const lease = leaseNames(MODEL, ["http://gpu-8/run"])[0]!;
  const members = others.filter(({ id }) => id === "idle");
  fleet.hear({ held: [], giveBack: [], unheld: [{ model: MODEL, lease }], members });
  const { batchSize, healthy, freeAt } = outlook.horizon(clock.now());
  assert.deepEqual([batchSize, healthy, freeAt.length], [50, 1, 0]);
});

test("what other gateways let in is summed by tier", () => {
  const { fleet } = gateway([MODEL]);
  const doors = [{ name: MODEL, admittedPerMs: [1, 2, 3] }];
  const members = [
    member({ id: "g1", role: "gateway", doors }),
    member({ id: "g2", role: "gateway", doors }),
    member({ id: "g3", role: "gateway", doors: [...doors, { name: "other", admittedPerMs: [9] }] }),
  ];
  fleet.hear({ held: [], giveBack: [], unheld: [], members });
  const outlook = new FleetOutlook(fleet, MODEL);
  assert.deepEqual(
    [0, 1, 2, 3].map((tier) => outlook.othersPerMs(tier)),
    [2, 4, 6, 0],
  );
});

test("workers that change hands count as those last heard of", async () => {
  const { clock, fleet } = gateway([MODEL]);
  const outlook = new FleetOutlook(fleet, MODEL);
  fleet.hear({ held: [], giveBack: [], unheld: [], members: others });
  assert.equal(outlook.horizon(clock.now()).perMs, 1);
  const leases = leaseNames(MODEL, ["http://gpu-8/run", "http://gpu-9/run"]);
  fleet.hear({
    held: [],
    giveBack: [],
    unheld: leases.map((lease) => ({ model: MODEL, lease })),
    members: [],
  });
  await clock.run(clock.now() + 100);
  const { perMs, nominalPerMs, healthy, freeAt, idle } = outlook.horizon(clock.now());
  assert.deepEqual([perMs, nominalPerMs, healthy, freeAt.length, idle], [1, 2, 2, 2, 0]);
});
