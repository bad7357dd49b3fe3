/** Tenants in turn on Redis: who is found to crowd the others, how seats are shared, what it does. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import fc from "fast-check";
import { Random } from "../../src/core/random.ts";
import { COMMON, Crowds, type Holder } from "../../src/engine/redis-crowds.ts";
import { RedisClock } from "../../src/engine/redis-frames.ts";
import { QueueMirror } from "../../src/engine/redis-view.ts";
import { VirtualClock } from "../../src/plan/virtual-clock.ts";
import type { RedisNodes } from "../../src/redis/nodes.ts";
import { done, idsOf, MODEL, PLAIN, Stage } from "../contract/engine-stage.ts";
import { type Server, startServer } from "../redis/servers.ts";
import { makeEngine, openNodes, openSpread } from "./redis-engines.ts";

/** A tier in which everything that is in flight waits. */
class Tier {
  readonly crowds = new Crowds([MODEL], 1);
  readonly #held: Holder[] = [];

  enter(tenant: string, count = 1, waiting = Infinity): void {
    for (let n = 0; n < count; n++) this.#held.push(this.crowds.enter(MODEL, 0, tenant, waiting));
  }

  leave(tenant: string, count: number): void {
    for (let n = 0; n < count; n++) {
      const at = this.#held.findIndex((each) => each.tenant === tenant);
      this.#held.splice(at, 1)[0]!.leave();
    }
  }

  crowding(tenant: string): boolean {
    return this.crowds.kindOf(MODEL, 0, tenant) !== COMMON;
  }
}

describe("a tenant crowds the others", () => {
  test("never where it is the only one there ever was", () => {
    const tier = new Tier();
    tier.enter("anonymous", 10_000);
    assert.ok(!tier.crowding("anonymous"));
  });

  test("when it holds far more than they do, and no longer when it does not", () => {
    const tier = new Tier();
    for (let n = 0; n < 19; n++) tier.enter(`t${n}`, 2);
    tier.enter("ann", 8);
    assert.ok(!tier.crowding("ann"));
    tier.enter("ann");
    assert.ok(tier.crowding("ann"));
    assert.ok(!tier.crowding("t1"));
    tier.leave("ann", 4);
    assert.ok(tier.crowding("ann"), "not at every turn of the tide");
    tier.leave("ann", 1);
    assert.ok(!tier.crowding("ann"));
  });

  test("also before the others come, once others were seen", () => {
    const tier = new Tier();
    tier.enter("bob");
    tier.leave("bob", 1);
    tier.enter("ann", 9);
    assert.ok(tier.crowding("ann"));
  });

  test("also when half of them do", () => {
    const tier = new Tier();
    for (let n = 0; n < 10; n++) tier.enter(`light${n}`);
    for (let round = 0; round < 20; round++) for (const each of "abcdefgh") tier.enter(each);
    for (const each of "abcdefgh") assert.ok(tier.crowding(each), each);
  });

  test("not while tasks run longer than they wait, and at most eight at a time", () => {
    const tier = new Tier();
    for (let n = 0; n < 30; n++) tier.enter(`light${n}`);
    tier.enter("ann", 100, 10);
    assert.ok(!tier.crowding("ann"));
    for (let n = 0; n < 12; n++) tier.enter(`t${n}`, 50);
    const crowding = Array.from({ length: 12 }, (_, n) => tier.crowding(`t${n}`)).filter(Boolean);
    assert.equal(crowding.length, 8);
    tier.enter("t0", 1, 10);
    assert.ok(!tier.crowding("t0"), "hardly anything waits");
  });
});

class View {
  readonly clock = new VirtualClock();
  readonly mirror = new QueueMirror(
    { tiers: 2, models: [MODEL], zone: "", zoneSpillMs: 100 },
    this.clock,
    new RedisClock(),
  );
  #version = 0;

  came(kind: string, count: number, { shard = 0, tier = 0, depth = "+" } = {}): void {
    const now = Math.round(this.clock.now() * 1000);
    const line = [shard, ++this.#version, `q:${MODEL}:::${tier}:${kind}`, depth, count, now, now, ""];
    this.mirror.told(line.join("\t"));
  }

  /** Seats by kind of stream. */
  seats(max: number): Record<string, number> {
    const wanted = this.mirror.plan(MODEL, "", max);
    const seats: Record<string, number> = {};
    for (const { stream, count } of wanted)
      seats[stream.about.kind] = (seats[stream.about.kind] ?? 0) + count;
    this.mirror.release(wanted);
    return seats;
  }
}

describe("seats", () => {
  test("the common streams weigh as many tenants as were served of late, less those that crowd", () => {
    const view = new View();
    for (let n = 0; n < 19; n++) view.mirror.served(MODEL, 0, `t${n}`);
    view.mirror.served(MODEL, 0, "ann");
    view.came("n", 100, { shard: 1 });
    view.came("n", 100, { shard: 2 });
    view.came("nann", 500);
    assert.deepEqual(view.seats(40), { n: 38, nann: 2 });
    assert.deepEqual(view.seats(20), { n: 19, nann: 1 });
  });

  test("what came back goes first, the rest is shared; what one party leaves is the other's", () => {
    const view = new View();
    for (const tenant of ["a", "b", "c"]) view.mirror.served(MODEL, 0, tenant);
    view.came("0", 4);
    view.came("n", 3);
    view.came("nann", 500);
    assert.deepEqual(view.seats(20), { "0": 4, n: 3, nann: 13 });
  });

  test("while nobody knows how many tenants there are, each task counts as one", () => {
    const view = new View();
    view.came("n", 30);
    view.came("nann", 500);
    assert.deepEqual(view.seats(31), { n: 30, nann: 1 });
  });

  test("a tenant that crowds does not starve: its turn comes also in batches of one", () => {
    const view = new View();
    for (const tenant of ["a", "b", "c", "ann"]) view.mirror.served(MODEL, 0, tenant);
    view.came("n", 1000);
    view.came("nann", 500);
    const total: Record<string, number> = {};
    for (let batch = 0; batch < 40; batch++) {
      for (const [kind, count] of Object.entries(view.seats(1))) total[kind] = (total[kind] ?? 0) + count;
    }
    assert.deepEqual(total, { n: 30, nann: 10 });
  });

  test("those who crowd share evenly, and one that was away has nothing to catch up on", () => {
    const view = new View();
    view.came("nann", 500);
    view.seats(64);
    view.came("nbob", 500);
    assert.deepEqual(view.seats(64), { nann: 32, nbob: 32 });
  });
});

test("what waits is the sum of what is known, whatever was told, forgotten or tidied", () => {
  const step = fc.record({
    verb: fc.constantFrom("came", "came", "left", "forget", "tidy", "expect"),
    kind: fc.constantFrom("n", "nann", "0", "1"),
    tier: fc.nat(2),
    shard: fc.nat(2),
    count: fc.nat(9),
  });
  fc.assert(
    fc.property(fc.array(step, { maxLength: 40 }), (steps) => {
      const view = new View();
      for (const { verb, kind, tier, shard, count } of steps) {
        if (verb === "came") view.came(kind, count, { shard, tier });
        else if (verb === "left") view.came(kind, 0, { shard, tier, depth: String(count) });
        else if (verb === "forget") view.mirror.forget([shard]);
        else if (verb === "tidy") view.mirror.tidy();
        else {
          view.mirror.expect(MODEL, tier, kind, count);
          view.mirror.expect(MODEL, tier, kind, -count);
        }
        assert.deepEqual(view.mirror.waiting(MODEL), view.mirror.depths().get(MODEL));
        for (const each of ["n", "nann"]) {
          const turn = view.mirror.turn(MODEL, 0, each, 5);
          assert.ok(turn >= 0 && turn <= view.mirror.waiting(MODEL)[0]!);
        }
      }
    }),
  );
});

describe("on a server", () => {
  let server: Server;
  let nodes: RedisNodes;
  before(async () => {
    server = await startServer();
    nodes = await openNodes({ url: server.url });
  });
  after(async () => {
    await nodes.close();
    await server.stop();
  });

  const PATIENT = { ...PLAIN, models: new Map([[MODEL, { queueMs: 1e6, totalMs: 1e6 }]]), maxQueued: 1e5 };

  /** Twenty tenants at 70 % of what twenty seats a round can serve; how many were served before each task. */
  async function play(times: number): Promise<{ p99: number; served: number }> {
    const stage = new Stage(await openSpread(() => nodes)(PATIENT));
    const random = new Random(7);
    const born = new Map<string, number>();
    const ahead: number[] = [];
    let served = 0;
    for (let round = 0; round < 300; round++) {
      const coming: Promise<unknown>[] = [];
      for (let tenant = 0; tenant < 20; tenant++) {
        const name = `t${tenant}`;
        for (let n = tenant === 0 ? times : 1; n > 0; n--) {
          if (random.next() > 0.7) continue;
          const put = stage.queue({ tenant: name, deadlineAt: stage.now + 1e6 });
          coming.push(tenant === 0 ? put : put.then((id) => born.set(id, served)));
        }
      }
      await Promise.all(coming);
      await stage.tick(20);
      const lease = await stage.claim(20);
      served += lease.tasks.length;
      await stage.engine.settle(lease, idsOf(lease).map(done));
      for (const { task } of lease.tasks) if (born.has(task.id)) ahead.push(served - born.get(task.id)!);
    }
    await stage.engine.close();
    ahead.sort((one, other) => one - other);
    return { p99: ahead[Math.floor(0.99 * ahead.length)]!, served };
  }

  test("one of twenty at ten times its share: the others are as near as before", async () => {
    const [calm, flooded] = [await play(1), await play(10)];
    assert.ok(flooded.served > 1.4 * calm.served);
    assert.ok(flooded.p99 <= 1.2 * calm.p99, `${flooded.p99} were served before a task, ${calm.p99} without`);
  });

  test("streams of one tenant go when they are empty, and its tasks are found by their stream", async () => {
    const { engine, clock, events, name } = makeEngine(nodes, PATIENT, { shards: 1 });
    const stage = new Stage({ engine, clock, events, approximate: true });
    await stage.queue({ tenant: "bob" });
    const ids = await stage.queueMany(30, { tenant: "ann" });
    // In every way in which a task may end.
    for (const id of ids.splice(0, 5)) await engine.cancel(id, "ann");
    for (const id of ids.splice(-5)) await engine.cancel(id, "ann", true);
    await stage.queueMany(5, { tenant: "ann", deadlineAt: stage.now + 10 });
    await stage.pass(20);
    const own = async (): Promise<number> => ((await server.ask("KEYS", `${name}:*:n?*`)) as string[]).length;
    assert.equal(await own(), 1);
    for (let lease = await stage.claim(); lease.tasks.length > 0; lease = await stage.claim()) {
      await engine.settle(lease, idsOf(lease).map(done));
    }
    await engine.tend();
    await stage.queueMany(8, { tenant: "ann" });
    assert.equal(await own(), 0, "nothing of hers is in flight any more");
    await stage.claim();
    assert.equal(engine.turn(MODEL, 0, "ann"), 0);
    await engine.close();
  });

  test("two gateways that see a tenant flood share its streams; a batcher serves both", async () => {
    const prefix = "shared:";
    const made = [1, 2, 3].map(() => makeEngine(nodes, PATIENT, { shards: 1, prefix }));
    const [one, other, batcher] = made.map(
      ({ engine, clock, events }) => new Stage({ engine, clock, events, refresh: () => engine.refresh() }),
    ) as [Stage, Stage, Stage];
    for (const gateway of [one, other]) {
      await gateway.queue({ tenant: "bob" });
      await gateway.queueMany(40, { tenant: "ann" });
      await gateway.queueMany(4, { tenant: "bob" });
    }
    await batcher.counts();
    const lease = await batcher.claim(48);
    const bobs = lease.tasks.filter(({ task }) => task.tenant === "bob").length;
    assert.ok(bobs >= 9, `${bobs} of bob's ten`);
    assert.equal(batcher.engine.waiting(MODEL)[0], 90 - 48);
    for (const { engine } of made) await engine.close();
  });
});
