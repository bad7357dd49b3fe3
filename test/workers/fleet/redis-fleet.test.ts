/** Whole batchers on a real server, in real time: quick beats here, the real ones where a process is killed. */
import assert from "node:assert/strict";
import { type ChildProcess, fork } from "node:child_process";
import { once } from "node:events";
import { join } from "node:path";
import { after, before, describe, test } from "node:test";
import { SystemClock } from "../../../src/app/clock.ts";
import type { RedisNodes } from "../../../src/engine/redis/client/nodes.ts";
import type { Registry } from "../../../src/workers/fleet/registry.ts";
import { type Server, startServer, until } from "../../engine/redis-client/servers.ts";
import { Batcher, type Gpu, gpus } from "./batcher.ts";
import { MODEL, openNodes, registryOf } from "./stage.ts";

const QUICK = { beatMs: 20, aliveMs: 200 };
const clock = new SystemClock();
let server: Server;
let nodes: RedisNodes;
let fleets = 0;
before(async () => {
  server = await startServer();
  nodes = await openNodes(server.url, 2000);
});
after(async () => {
  await nodes.close();
  await server.stop();
});

function held(batcher: Batcher): number {
  return batcher.dispatcher.workers.held(clock.now());
}

/** Batchers of one fleet, stopped with the test. */
class Stage implements AsyncDisposable {
  readonly gpus: Gpu[];
  readonly registry: Registry;
  readonly #prefix = `fleet-${++fleets}`;
  readonly #batchers: Batcher[] = [];

  constructor(count: number, serviceMs: number) {
    this.gpus = gpus(count, serviceMs);
    this.registry = registryOf(nodes, this.#prefix, QUICK.aliveMs);
  }

  async join(
    id: string,
    registry: Registry = registryOf(nodes, this.#prefix, QUICK.aliveMs),
  ): Promise<Batcher> {
    const batcher = new Batcher(this.gpus, registry, clock, { ...QUICK, id });
    this.#batchers.push(batcher);
    batcher.keepBusy(20);
    await batcher.membership.start();
    return batcher;
  }

  get most(): number {
    return Math.max(...this.gpus.map(({ most }) => most));
  }

  async [Symbol.asyncDispose](): Promise<void> {
    await Promise.all(this.#batchers.map((batcher) => batcher.stop()));
  }
}

describe("under load", () => {
  test("batchers come, drain and leave; no worker ever gets two batches, and none is left out", async () => {
    await using stage = new Stage(6, 7);
    const first = await stage.join("b1");
    await until(() => held(first) === 6);
    const second = await stage.join("b2");
    await until(() => held(first) === 3 && held(second) === 3, "even");
    const third = await stage.join("b3");
    await until(() => [first, second, third].every((batcher) => held(batcher) === 2), "even");
    third.membership.drain();
    await until(() => held(third) === 0 && held(first) === 3 && held(second) === 3, "given back");
    await second.stop();
    await until(() => held(first) === 6, "taken over from who left");
    const before = stage.gpus.map(({ batches }) => batches);
    await until(() => stage.gpus.every(({ batches }, at) => batches > before[at]!));
    assert.equal(stage.most, 1);
  });

  test("one whose beats no longer get through stops in time, and another takes over", async () => {
    await using stage = new Stage(4, 7);
    let cut = false;
    const inner = stage.registry;
    const broken: Registry = {
      beat: (beat) => (cut ? Promise.reject(new Error("no route")) : inner.beat(beat)),
      leave: (id) => inner.leave(id),
    };
    const first = await stage.join("b1", broken);
    const second = await stage.join("b2");
    await until(() => held(first) === 2 && held(second) === 2);
    cut = true;
    await until(() => held(second) === 4, "taken over");
    assert.equal(held(first), 0);
    cut = false;
    await until(() => held(first) === 2 && held(second) === 2, "back with its share");
    assert.equal(stage.most, 1);
  });

  test("a server that stands still: everybody stops, then everybody goes on with what it held", async () => {
    await using stage = new Stage(4, 7);
    const first = await stage.join("b1");
    const second = await stage.join("b2");
    await until(() => held(first) === 2 && held(second) === 2);
    const names = (batcher: Batcher): string[] =>
      batcher.dispatcher.workers.slots.filter((slot) => slot.held(clock.now())).map(({ name }) => name);
    const before = [names(first), names(second)];
    server.pause();
    await until(() => held(first) === 0 && held(second) === 0, "leases ran out");
    server.resume();
    await until(() => held(first) === 2 && held(second) === 2, "leases are back");
    assert.deepEqual([names(first), names(second)], before);
    assert.equal(stage.most, 1);
  });
});

describe("with the real beats", () => {
  const prefix = "killed";

  async function child(fleet: readonly Gpu[]): Promise<ChildProcess> {
    const addresses = fleet.map(({ address }) => address);
    const file = join(import.meta.dirname, "batcher-child.ts");
    const child = fork(file, [server.url, prefix, ...addresses]);
    await once(child, "message");
    return child;
  }

  test("kill -9: every worker of the dead batcher runs a batch of another, soon", async () => {
    const fleet = gpus(4, 5);
    const victim = await child(fleet);
    const survivor = new Batcher(fleet, registryOf(nodes, prefix, 2000), clock, { id: "survivor" });
    await survivor.membership.start();
    await until(() => held(survivor) === 2, "even");
    const lost = fleet.filter((_, at) => !survivor.dispatcher.workers.slots[at]!.held(clock.now()));
    survivor.keepBusy(20);
    victim.kill("SIGKILL");
    const killedAt = clock.now();
    await until(() => lost.every(({ batches }) => batches > 0), "taken over");
    const tookMs = clock.now() - killedAt;
    assert.ok(tookMs < 20_000, `${Math.round(tookMs)} ms`);
    await survivor.stop();
  });

  test("SIGSTOP past its lease, SIGCONT: it starts nothing on what it lost", async () => {
    const fleet = gpus(2, 5);
    const sleeper = await child(fleet);
    const told: { worker: string; at: number }[] = [];
    sleeper.on("message", (started) => told.push(started as { worker: string; at: number }));
    const inner = registryOf(nodes, prefix, 2000);
    let releasedAt = Infinity;
    const registry: Registry = {
      beat(beat) {
        if (beat.releasing.length > 0) releasedAt = clock.now();
        return inner.beat(beat);
      },
      leave: (id) => inner.leave(id),
    };
    const survivor = new Batcher(fleet, registry, clock, { id: "survivor-2" });
    survivor.keepBusy(20);
    await survivor.membership.start();
    await until(() => held(survivor) === 1 && told.length > 0, "even");
    sleeper.kill("SIGSTOP");
    await until(() => held(survivor) === 2, "taken over");
    const takenAt = clock.now();
    releasedAt = Infinity;
    sleeper.kill("SIGCONT");
    await until(() => told.some(({ at }) => at > takenAt), "it works again");
    const { at } = told.find(({ at }) => at > takenAt)!;
    // Two processes' clocks agree to a millisecond or so.
    assert.ok(at > releasedAt - 5, `${releasedAt - at} ms before the worker was given back to it`);
    sleeper.kill("SIGKILL");
    await survivor.stop();
  });
});

test("the fleet's numbers reach a gateway", async () => {
  await using stage = new Stage(3, 7);
  await stage.join("b1");
  const gateway = new Batcher([], stage.registry, clock, {
    ...QUICK,
    id: "g1",
    role: "gateway",
    models: () => [MODEL],
    dispatchers: () => [],
  });
  await gateway.membership.start();
  const { fleet } = gateway.membership;
  await until(() => fleet.model(MODEL).healthy === 3 && fleet.model(MODEL).capacityPerMs > 0);
  assert.deepEqual(fleet.members.map(({ id, role }) => `${id} ${role}`).sort(), ["b1 batcher", "g1 gateway"]);
  assert.equal(fleet.workers().length, 3);
  await gateway.stop();
});
