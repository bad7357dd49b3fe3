/** The share rule, on a real server with a clock of our own. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { Random } from "../../../src/core/random.ts";
import type { RedisNodes } from "../../../src/engine/redis/client/nodes.ts";
import { type Server, startServer } from "../../engine/redis-client/servers.ts";
import { Actor, openNodes, registryOf } from "./stage.ts";

const ALIVE_MS = 2000;
const BEAT_MS = 500;
const WORKERS = Array.from({ length: 9 }, (_, at) => `m http://gpu-${at}/`);

let server: Server;
let nodes: RedisNodes;
let worlds = 0;
before(async () => {
  server = await startServer();
  nodes = await openNodes(server.url);
});
after(async () => {
  await nodes.close();
  await server.stop();
});

class World {
  /** The batchers' own clock, and what the registry's differs from it. */
  now = 1_000_000;
  skewMs = 0;
  readonly prefix = `share-${++worlds}`;
  readonly registry = registryOf(nodes, this.prefix, ALIVE_MS, () => Math.floor(this.now + this.skewMs));
  readonly actors: Actor[] = [];
  readonly asleep = new Set<Actor>();
  /** What anybody was ever told to give back. */
  readonly asked = new Set<string>();
  #ids = 0;

  join(leases: readonly string[] = WORKERS, id = `b-${++this.#ids}`): Actor {
    const actor = new Actor(id, leases, this.registry, ALIVE_MS, () => this.now);
    this.actors.push(actor);
    return actor;
  }

  /** kill -9. */
  kill(actor: Actor): void {
    this.actors.splice(this.actors.indexOf(actor), 1);
    this.asleep.delete(actor);
  }

  async leave(actor: Actor): Promise<void> {
    this.kill(actor);
    await this.registry.leave(actor.id);
  }

  /** Lets time pass; whoever is awake beats when it is time. */
  async pass(ms: number): Promise<void> {
    const until = this.now + ms;
    while (this.now < until) {
      this.now = Math.min(until, this.now + 100);
      for (const actor of this.actors) {
        if (this.asleep.has(actor) || this.now - actor.lastBeatAt < BEAT_MS) continue;
        for (const lease of (await actor.beat()).giveBack) this.asked.add(lease);
      }
      this.check();
    }
  }

  /** At no instant do two batchers believe that they may use the same worker. */
  check(): void {
    const holders = new Map<string, string>();
    for (const actor of this.actors) {
      for (const lease of actor.held()) {
        assert.equal(holders.get(lease), undefined, `${lease} is held by ${actor.id} too`);
        holders.set(lease, actor.id);
      }
    }
  }

  start(actor: Actor, lease: string): void {
    for (const other of this.actors) {
      const runs = other !== actor && other.holdings.get(lease)?.running === true;
      assert.ok(!runs || this.asleep.has(other) || !other.held().includes(lease), `two batches on ${lease}`);
    }
    actor.holdings.get(lease)!.running = true;
  }

  counts(): number[] {
    return this.actors.map((actor) => actor.held().length);
  }

  spread(): number[] {
    return this.counts().sort((a, b) => a - b);
  }
}

/** Everything that somebody lists is held by one who lists it, and no single move would make it more even. */
function assertSettled(world: World): void {
  const holder = new Map<string, Actor>();
  for (const actor of world.actors) for (const lease of actor.held()) holder.set(lease, actor);
  for (const actor of world.actors) {
    assert.deepEqual(actor.last!.giveBack, []);
    assert.deepEqual(actor.last!.unheld, []);
    for (const lease of actor.listed[0]!.leases) {
      const held = holder.get(lease);
      assert.ok(held !== undefined, `${lease} is held by nobody`);
      assert.ok(held.listed[0]!.leases.includes(lease), `${lease} is held by ${held.id}`);
      const more = held.held().length - actor.held().length;
      assert.ok(more <= 1, `${held.id} holds ${more} more than ${actor.id}, which lists ${lease} too`);
    }
  }
}

async function act(world: World, random: Random): Promise<void> {
  const pick = <T>(from: readonly T[]): T | undefined => from[Math.floor(random.next() * from.length)];
  const actor = pick(world.actors);
  const roll = random.next();
  if (actor === undefined || (roll < 0.15 && world.actors.length < 5)) {
    const some = WORKERS.filter(() => random.next() < 0.6);
    world.join(random.next() < 0.6 ? WORKERS : some);
  } else if (roll < 0.2) {
    world.kill(actor);
  } else if (roll < 0.25) {
    if (![...actor.holdings.values()].some(({ running }) => running)) await world.leave(actor);
  } else if (roll < 0.32) {
    world.asleep.add(actor);
  } else if (roll < 0.42) {
    world.asleep.delete(actor);
  } else if (roll < 0.7) {
    const lease = pick(actor.usable());
    if (lease !== undefined && !world.asleep.has(actor)) world.start(actor, lease);
  } else if (roll < 0.98) {
    for (const holding of actor.holdings.values()) if (random.next() < 0.5) holding.running = false;
  } else if (roll < 0.99) {
    // Nobody gets through.
    world.now += Math.ceil(2 * ALIVE_MS * random.next());
  } else {
    // The registry's clock is set an hour on or back.
    world.skewMs += random.next() < 0.5 ? 3_600_000 : -3_600_000;
  }
}

test("random joins, deaths, naps and clock jumps: one holder each, all held, even, and then at rest", async () => {
  for (let seed = 1; seed <= 30; seed++) {
    const world = new World();
    const random = new Random(seed);
    for (let step = 0; step < 40; step++) {
      await act(world, random);
      await world.pass(Math.ceil(700 * random.next()));
    }
    world.asleep.clear();
    if (world.actors.length === 0) world.join();
    for (const { holdings } of world.actors) for (const holding of holdings.values()) holding.running = false;
    await world.pass(3 * ALIVE_MS);
    try {
      assertSettled(world);
      const before = world.actors.map((actor) => actor.held().sort());
      await world.pass(4 * BEAT_MS);
      assert.deepEqual(
        world.actors.map((actor) => actor.held().sort()),
        before,
      );
    } catch (error) {
      throw new Error(`seed ${seed}`, { cause: error });
    }
  }
});

test("a clock set back by about aliveMs, so that some beats lie too far ahead and others do not", async () => {
  for (let backMs = ALIVE_MS - 100; backMs <= ALIVE_MS + BEAT_MS + 100; backMs += 50) {
    const world = new World();
    world.join();
    await world.pass(BEAT_MS / 2);
    world.join();
    await world.pass(4 * ALIVE_MS);
    world.skewMs -= backMs;
    await world.pass(3 * ALIVE_MS);
    assertSettled(world);
  }
});

describe("spreading", () => {
  test("counts differ by at most one as batchers come and go, and no more moves than needed", async () => {
    const world = new World();
    world.join();
    await world.pass(BEAT_MS);
    assert.deepEqual(world.counts(), [9]);
    for (const expected of [
      [4, 5],
      [3, 3, 3],
      [2, 2, 2, 3],
    ]) {
      world.asked.clear();
      const newcomer = world.join();
      await world.pass(4 * BEAT_MS);
      assert.deepEqual(world.spread(), expected);
      assert.deepEqual([...world.asked].sort(), newcomer.held().sort(), "only the newcomer's share moved");
    }
    await world.leave(world.actors[0]!);
    await world.pass(2 * BEAT_MS);
    assert.deepEqual(world.counts(), [3, 3, 3]);
  });

  test("where models have one worker each, batchers share the models", async () => {
    const world = new World();
    const models = ["a", "b", "c", "d"].map((model) => ({ model, leases: [`${model} http://gpu/`] }));
    for (let at = 0; at < 2; at++) {
      world.join().listed = models;
      await world.pass(4 * BEAT_MS);
    }
    assert.deepEqual(world.counts(), [2, 2]);
  });

  test("a worker goes only to who lists it, also when that is uneven", async () => {
    const world = new World();
    world.join(WORKERS.slice(0, 8));
    world.join(WORKERS.slice(7));
    await world.pass(6 * BEAT_MS);
    assert.deepEqual(world.counts(), [7, 2]);
    assertSettled(world);
  });
});

describe("giving back", () => {
  test("a busy worker stays until its batch is done, idle ones go first", async () => {
    const world = new World();
    const first = world.join(WORKERS.slice(0, 4));
    await world.pass(BEAT_MS);
    const [busyA, busyB, busyC] = first.held();
    for (const lease of [busyA!, busyB!, busyC!]) world.start(first, lease);
    const second = world.join(WORKERS.slice(0, 4));
    await world.pass(4 * BEAT_MS);
    assert.equal(second.held().length, 1, "the idle one");
    const leaving = first.held().filter((lease) => !first.usable().includes(lease));
    assert.equal(leaving.length, 1, "one more is asked for, always the same one");
    await world.pass(4 * ALIVE_MS);
    assert.equal(first.holdings.get(leaving[0]!)!.leaving, true);
    assert.equal(first.held().length, 3);
    first.holdings.get(leaving[0]!)!.running = false;
    await world.pass(2 * BEAT_MS);
    assert.deepEqual(second.held().includes(leaving[0]!), true);
    assert.deepEqual(world.counts(), [2, 2]);
  });

  test("it may keep what it was to give back when the other is gone meanwhile", async () => {
    const world = new World();
    const first = world.join(WORKERS.slice(0, 2));
    await world.pass(BEAT_MS);
    for (const lease of first.held()) world.start(first, lease);
    const second = world.join(WORKERS.slice(0, 2));
    await world.pass(2 * BEAT_MS);
    assert.equal(first.usable().length, 1);
    world.kill(second);
    await world.pass(ALIVE_MS + BEAT_MS);
    assert.equal(first.usable().length, 2);
  });

  test("a beat that was overtaken by a later one changes nothing", async () => {
    const world = new World();
    const actor = world.join();
    const old = registryOf(nodes, world.prefix, ALIVE_MS, () => world.now);
    await actor.beat();
    await actor.beat();
    const member = {
      id: actor.id,
      zone: "",
      role: "batcher",
      version: "",
      models: [],
      workers: [],
      doors: [],
    } as const;
    const beat = { member, listed: [], held: WORKERS, releasing: WORKERS };
    await assert.rejects(old.beat(beat), /OVERTAKEN/);
    assert.equal((await actor.beat()).held.length, WORKERS.length);
  });
});

describe("taking over", () => {
  test("a dead batcher's workers are free aliveMs after its last beat, not before", async () => {
    const world = new World();
    const [first, second] = [world.join(), world.join()];
    await world.pass(4 * BEAT_MS);
    const diedAt = first.lastBeatAt;
    world.kill(first);
    while (second.held().length < WORKERS.length) {
      await world.pass(100);
      assert.ok(world.now - diedAt <= ALIVE_MS + BEAT_MS, "late");
    }
    assert.ok(world.now - diedAt >= ALIVE_MS, "early");
  });

  test("one that slept through its lease holds nothing when it wakes, and then gets its share back", async () => {
    const world = new World();
    const [first, second] = [world.join(), world.join()];
    await world.pass(4 * BEAT_MS);
    const lease = first.usable()[0]!;
    world.asleep.add(first);
    await world.pass(2 * ALIVE_MS);
    assert.deepEqual(first.usable(), []);
    assert.equal(second.held().length, WORKERS.length);
    world.start(second, lease);
    world.asleep.delete(first);
    await world.pass(4 * BEAT_MS);
    assert.deepEqual(world.spread(), [4, 5]);
    assert.ok(second.held().includes(lease), "the busy one stayed");
  });

  test("one with a longer aliveMs is judged by its own, whoever judges", async () => {
    const world = new World();
    const slowMs = 5 * ALIVE_MS;
    const registry = registryOf(nodes, world.prefix, slowMs, () => world.now);
    const slow = new Actor("slow", WORKERS, registry, slowMs, () => world.now);
    const quick = world.join();
    for (let beats = 0; beats < 6; beats++) {
      await slow.beat();
      await world.pass(0.4 * slowMs);
    }
    const held = slow.held();
    assert.ok(held.length >= 4, `it holds ${held.length}`);
    assert.equal(quick.last!.members.length, 2);
    const diedAt = slow.lastBeatAt;
    while (quick.held().length < WORKERS.length) {
      await world.pass(100);
      assert.ok(world.now - diedAt <= slowMs + BEAT_MS, "late");
    }
    assert.ok(world.now - diedAt >= slowMs, "early");
  });

  test("who leaves frees everything at once", async () => {
    const world = new World();
    const [first, second] = [world.join(), world.join()];
    await world.pass(4 * BEAT_MS);
    await world.leave(first);
    await second.beat();
    assert.equal(second.held().length, WORKERS.length);
  });
});

test("a worker that was just taken counts as unheld until its holder has said that it runs it", async () => {
  const world = new World();
  const [holder, gateway] = [world.join(), world.join([])];
  const unheld = async (): Promise<number> => (await gateway.beat()).unheld.length;
  assert.equal(await unheld(), 0, "nobody lists anything");
  assert.equal((await holder.beat()).unheld.length, 0, "it knows of its own");
  assert.equal(await unheld(), WORKERS.length);
  await holder.beat();
  assert.equal(await unheld(), 0);
});

describe("a registry that was away", () => {
  test("for however long: everybody gets back exactly what it held, whoever comes first", async () => {
    for (let awayMs = BEAT_MS; awayMs < 2 * ALIVE_MS; awayMs += 100) {
      const world = new World();
      for (let at = 0; at < 3; at++) {
        world.join();
        await world.pass(200);
      }
      await world.pass(6 * BEAT_MS);
      const before = world.actors.map((actor) => actor.held());
      world.now += awayMs;
      for (const actor of world.actors.toReversed()) {
        await actor.beat();
        world.check();
      }
      assert.deepEqual(
        world.actors.map((actor) => actor.held().sort()),
        before.map((held) => held.sort()),
        `${awayMs} ms`,
      );
    }
  });

  test("and lost its data: nobody takes what another still uses", async () => {
    const world = new World();
    for (let at = 0; at < 3; at++) world.join();
    await world.pass(4 * BEAT_MS);
    const before = world.actors.map((actor) => actor.held().sort());
    await server.cli("FLUSHALL");
    await world.actors[1]!.beat();
    const newcomer = world.join();
    await newcomer.beat();
    assert.deepEqual(newcomer.held(), []);
    await world.pass(BEAT_MS);
    assert.deepEqual(
      world.actors.slice(0, 3).map((actor) => actor.held().sort()),
      before,
    );
    await world.pass(ALIVE_MS + 4 * BEAT_MS);
    assert.deepEqual(world.spread(), [2, 2, 2, 3]);
  });

  test("a fleet that is no more leaves nothing behind", async () => {
    const world = new World();
    const actor = world.join();
    await actor.beat();
    const ttl = Number(await server.cli("PTTL", `${world.prefix}:{f0h}:leases`));
    assert.ok(ttl > 0 && ttl <= 10 * ALIVE_MS);
    await world.leave(actor);
    const left = (await server.cli("KEYS", `${world.prefix}:*`)).trim();
    assert.equal(left, "");
  });
});
