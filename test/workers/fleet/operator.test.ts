/** Workers that are put aside or removed in a fleet: on virtual time, and with two batchers on a real server. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import type { Backend } from "../../../src/workers/backend/backend.ts";
import { type Clock, SystemClock } from "../../../src/app/clock.ts";
import { leaseNames } from "../../../src/workers/fleet/orders.ts";
import { Membership } from "../../../src/workers/fleet/membership.ts";
import type { WorkerBeat } from "../../../src/workers/fleet/registry.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import type { RedisNodes } from "../../../src/engine/redis/client/nodes.ts";
import { Operator } from "../../../src/workers/operator.ts";
import { WorkerPool } from "../../../src/workers/pool.ts";
import { httpModel } from "../network-workers.ts";
import type { Config } from "../../../src/app/config/config.ts";
import type { Engine } from "../../../src/engine/engine.ts";
import type { Dispatcher } from "../../../src/dispatch/dispatcher.ts";
import { Events } from "../../../src/observe/events.ts";
import { type Server, startServer, until } from "../../engine/redis-client/servers.ts";
import { Batcher, gpus, member, ScriptedRegistry } from "./batcher.ts";
import { MODEL, openNodes, registryOf } from "./stage.ts";

const URLS = ["http://gpu-0:80/run", "http://gpu-1:80/run"];
const LEASES = leaseNames(MODEL, URLS);

const backend: Backend = {
  workers: [],
  start: () => Promise.resolve(),
  stop: () => Promise.resolve(),
  grow: () => Promise.reject(new Error("there are no more")),
  retire: () => Promise.resolve(),
};

/** The operator of a batcher, or of a gateway: without a dispatcher. */
function operatorOf(
  membership: Membership,
  events: Events,
  clock: Clock,
  runs?: { readonly dispatcher: Dispatcher; readonly engine: Engine },
): Operator {
  const { orders } = membership;
  const models = [httpModel(URLS, MODEL)];
  const pool = new WorkerPool({
    clock,
    events,
    orders,
    makeBackend: () => backend,
    makeDispatcher: () => runs!.dispatcher,
    rulesOf: () => runs!.dispatcher.rules,
    onWorkers: () => membership.changed(),
  });
  if (runs !== undefined) {
    const config = { models } as unknown as Config;
    void pool.open(config);
    pool.begin(config, runs.engine, true);
  }
  return new Operator({ clock, events, models: () => models, pool, orders, membership });
}

function operatorFor(batcher: Batcher, clock: Clock = new SystemClock()): Operator {
  return operatorOf(batcher.membership, batcher.events, clock, batcher);
}

function stage() {
  const clock = new VirtualClock();
  const registry = new ScriptedRegistry(clock);
  registry.answer = () => ({ held: LEASES });
  const batcher = new Batcher(gpus(2, 100), registry, clock);
  const operator = operatorFor(batcher, clock);
  const run = (ms: number): Promise<number> => clock.run(clock.now() + ms);
  return { clock, registry, batcher, operator, run, slots: batcher.dispatcher.workers.slots };
}

describe("an order", () => {
  test("goes out with the next beat, which comes soon, and the worker stays held and listed", async () => {
    const { registry, batcher, operator, run, slots } = stage();
    await batcher.membership.start();
    await run(100);
    const before = registry.beats.length;
    assert.equal(registry.last.member.orders, undefined);
    operator.drain("gpu-0");
    await run(50);
    assert.equal(registry.beats.length, before + 1);
    const { orders, workers } = registry.last.member;
    assert.deepEqual(orders, [{ key: LEASES[0]!, version: 1, aside: true }]);
    assert.deepEqual(registry.last.held.toSorted(), LEASES);
    assert.deepEqual(registry.last.listed[0]!.leases, LEASES);
    const drained = workers.find(({ name }) => name === "gpu-0");
    assert.deepEqual([drained?.state, drained?.address], ["draining", "http://gpu-0/run"]);
    assert.deepEqual([slots[0]!.drained, slots[1]!.drained], [true, false]);
  });

  test("is heard from another member, also one that was told before we came", async () => {
    const { registry, batcher, run, slots } = stage();
    batcher.put(2);
    const orders = [{ key: LEASES[0]!, version: 7, aside: true }];
    registry.answer = () => ({ held: LEASES, members: [member({ id: "other", orders })] });
    await batcher.membership.start();
    await run(300);
    assert.deepEqual([slots[0]!.batches, slots[1]!.batches], [0, 2]);
    assert.deepEqual(batcher.membership.orders.all, orders);
    const lifted = [{ key: LEASES[0]!, version: 8, aside: false }];
    registry.answer = () => ({ held: LEASES, members: [member({ id: "other", orders: lifted })] });
    batcher.put(2);
    await run(600);
    assert.equal(slots[0]!.drained, false);
  });

  test("is given through a gateway, by what others say of their workers", () => {
    const clock = new VirtualClock();
    const events = new Events();
    const registry = new ScriptedRegistry(clock);
    const membership = new Membership(
      {
        id: "g",
        zone: "",
        role: "gateway",
        version: "1",
        beatMs: 500,
        aliveMs: 2000,
        models: () => [MODEL],
        dispatchers: () => [],
      },
      { registry, clock, events, random: () => 0 },
    );
    const workers = [{ ...WORKER, name: "gpu-0", address: "http://gpu-0/run" }];
    membership.fleet.hear({ held: [], giveBack: [], unheld: [], members: [member({ id: "b", workers })] });
    const operator = operatorOf(membership, events, clock);
    operator.drain("gpu-0");
    assert.equal(membership.orders.isAside(LEASES[0]!), true);
    return assert.rejects(operator.remove("gpu-0"), /another process lists gpu-0; ask that one, or drain it/);
  });
});

const WORKER: Omit<WorkerBeat, "name"> = {
  model: MODEL,
  state: "idle",
  inFlight: 0,
  batches: 0,
  tasks: 0,
  calls: 0,
  failures: 0,
  busyMs: 0,
  utilization: 0,
  ratio: 1,
  leased: true,
};

test("a lease whose worker was removed is given back with the next beat", async () => {
  const { registry, batcher, operator, run } = stage();
  await batcher.membership.start();
  await run(10);
  assert.equal((await operator.remove("gpu-0")).gone, true);
  await run(200);
  assert.deepEqual(registry.last.listed[0]!.leases, [LEASES[1]]);
  assert.deepEqual(registry.last.releasing, [LEASES[0]]);
  registry.answer = () => ({ held: [LEASES[1]!] });
  await run(1000);
  assert.deepEqual(registry.last.releasing, []);
});

describe("two batchers on a real server", () => {
  const QUICK = { beatMs: 20, aliveMs: 400 };
  const clock = new SystemClock();
  let server: Server;
  let nodes: RedisNodes;
  before(async () => {
    server = await startServer();
    nodes = await openNodes(server.url, 2000);
  });
  after(async () => {
    await nodes.close();
    await server.stop();
  });

  test("a worker that one drains, both leave alone; one that one removes, the other takes", async () => {
    const fleet = gpus(3, 5);
    const batchers: Batcher[] = [];
    for (const id of ["a", "b"]) {
      const batcher = new Batcher(fleet, registryOf(nodes, "roster", QUICK.aliveMs), clock, { ...QUICK, id });
      batcher.keepBusy(20);
      await batcher.membership.start();
      batchers.push(batcher);
    }
    const [one, other] = batchers as [Batcher, Batcher];
    const held = (): number =>
      one.dispatcher.workers.held(clock.now()) + other.dispatcher.workers.held(clock.now());
    await until(() => held() === 3 && fleet.every(({ batches }) => batches > 5), "all work");
    operatorFor(one).drain("gpu-2");
    const aside = ({ dispatcher }: Batcher): boolean => dispatcher.workers.slots[2]!.drained;
    await until(() => aside(one) && aside(other) && fleet[2]!.running === 0, "all know");
    const before = fleet.map(({ batches }) => batches);
    await until(
      () => fleet[0]!.batches > before[0]! + 20 && fleet[1]!.batches > before[1]! + 20,
      "others work",
    );
    assert.equal(fleet[2]!.batches, before[2]);
    operatorFor(other).resume("gpu-2");
    await until(() => fleet[2]!.batches > before[2]! + 5, "it works again");
    const holder = one.dispatcher.workers.slots[0]!.held(clock.now()) ? one : other;
    const next = holder === one ? other : one;
    await operatorFor(holder).remove("gpu-0");
    await until(() => next.dispatcher.workers.slots[0]!.held(clock.now()), "the other has it");
    const since = fleet[0]!.batches;
    await until(() => fleet[0]!.batches > since + 5, "and uses it");
    assert.equal(Math.max(...fleet.map(({ most }) => most)), 1, "never two batches at once");
    await Promise.all(batchers.map((batcher) => batcher.stop()));
  });
});
