/** What a batcher knows of the queues in Redis, and which streams its claims read. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { RedisClock } from "../../src/engine/redis-frames.ts";
import { QueueMirror } from "../../src/engine/redis-view.ts";
import { Random } from "../../src/core/random.ts";
import { VirtualClock } from "../../src/plan/virtual-clock.ts";

const MODEL = "m";

class View {
  readonly clock = new VirtualClock();
  readonly mirror: QueueMirror;
  #version = 0;

  constructor(zone = "") {
    const options = { tiers: 3, models: [MODEL], zone, zoneSpillMs: 100 };
    this.mirror = new QueueMirror(options, this.clock, new RedisClock());
  }

  /** `count` tasks came to a stream just now. */
  came(shard: number, count: number, more: { tier?: number; kind?: string; zone?: string } = {}): void {
    this.mirror.told(this.line(shard, ++this.#version, "+", count, more));
  }

  left(shard: number, depth: number, more: { tier?: number; kind?: string; zone?: string } = {}): void {
    this.mirror.told(this.line(shard, ++this.#version, String(depth), 0, more));
  }

  line(
    shard: number,
    version: number,
    depth: string,
    count: number,
    { tier = 0, kind = "n", zone = "" }: { tier?: number; kind?: string; zone?: string } = {},
  ): string {
    const now = Math.round(this.clock.now() * 1000);
    return [shard, version, `q:${MODEL}::${zone}:${tier}:${kind}`, depth, count, now, now + 4e6, ""].join(
      "\t",
    );
  }

  get depth(): number {
    return this.mirror.queues(MODEL)[0]?.depth ?? 0;
  }

  /** Shard and count of each stream that a claim of `max` would read. */
  plan(max: number): [shard: number, count: number][] {
    const wanted = this.mirror.plan(MODEL, "", max);
    this.mirror.release(wanted);
    return wanted.map(({ stream, count }) => [stream.shard, count]);
  }
}

describe("the mirror", () => {
  test("notes may come in any order, once or twice as late, and the depth is right in the end", () => {
    const step = fc.record({ out: fc.boolean(), count: fc.integer({ min: 1, max: 5 }) });
    fc.assert(
      fc.property(fc.array(step, { maxLength: 20 }), fc.infiniteStream(fc.nat(1000)), (steps, random) => {
        const view = new View();
        let depth = 0;
        const notes = steps.map(({ out, count }, at) => {
          const taken = out ? Math.min(depth, count) : 0;
          depth += out ? -taken : count;
          return view.line(0, at + 1, out ? String(depth) : "+", out ? 0 : count);
        });
        const shuffled = notes
          .map((note) => ({ note, at: random.next().value as number }))
          .sort((one, other) => one.at - other.at);
        for (const { note } of shuffled) view.mirror.told(note);
        assert.equal(view.depth, depth);
      }),
    );
  });

  test("a look that is older than what is known changes nothing", () => {
    const view = new View();
    view.came(0, 3);
    view.came(0, 2);
    view.mirror.told(view.line(0, 1, "3", 3), true);
    assert.equal(view.depth, 5);
    view.mirror.told(view.line(0, 9, "1", 1), true);
    assert.equal(view.depth, 1);
  });

  test("of very many queues the first of each tier are named, in their order", async () => {
    const view = new View();
    const kinds = Array.from({ length: 40 }, (_, at) => at);
    const random = new Random(3);
    for (const kind of kinds.toSorted(() => random.next() - 0.5)) {
      const parameters = `{"kind":${kind}}`;
      const [version, queuedAt] = [kind + 1, 1_000_000 + 1000 * kind];
      const name = `q:${MODEL}:${kind}::${kind % 2}:n`;
      view.mirror.told([0, version, name, "+", 1, queuedAt, queuedAt + 4e6, parameters].join("\t"));
    }
    const named = view.mirror.queues(MODEL, 3).map(({ parameters }) => parameters);
    assert.deepEqual(
      named,
      [0, 2, 4, 1, 3, 5].map((kind) => `{"kind":${kind}}`),
    );
    assert.equal(view.mirror.queues(MODEL).length, 40);
  });

  test("what a claim is on its way for is not counted on again", () => {
    const view = new View();
    view.came(0, 10);
    const first = view.mirror.plan(MODEL, "", 8);
    assert.equal(view.depth, 2);
    assert.deepEqual(
      view.mirror.plan(MODEL, "", 8).map(({ count }) => count),
      [2],
    );
    view.mirror.release(first);
    assert.equal(view.depth, 8);
  });
});

describe("a claim", () => {
  test("gathers thin traffic from all shards into one full batch", () => {
    const view = new View();
    for (let shard = 0; shard < 16; shard++) view.came(shard, 4);
    const plan = view.plan(64);
    assert.equal(plan.length, 16);
    assert.equal(
      plan.reduce((sum, [, count]) => sum + count, 0),
      64,
    );
  });

  test("reads its own shards first, and steals when they are not enough", () => {
    const view = new View();
    view.mirror.rank = { prefers: (shard) => shard >= 8, deserted: () => false };
    for (let shard = 0; shard < 16; shard++) view.came(shard, 8);
    assert.ok(view.plan(64).every(([shard]) => shard >= 8));
    assert.equal(view.plan(128).length, 16);
  });

  test("but nobody's tasks wait for ever: the oldest go before a preference", async () => {
    const view = new View();
    view.mirror.rank = { prefers: (shard) => shard === 1, deserted: () => false };
    view.came(0, 4);
    await view.clock.run(view.clock.now() + 50);
    view.came(1, 4);
    assert.deepEqual(view.plan(4), [[0, 4]]);
  });

  test("a backlog in many shards is served in order, whatever the size of a batch", async () => {
    const view = new View();
    const random = new Random(4);
    const queued: number[][] = Array.from({ length: 16 }, () => []);
    for (let task = 0; task < 400; task++) {
      const shard = Math.floor(16 * random.next());
      view.came(shard, 1);
      queued[shard]!.push(view.clock.now());
      await view.clock.run(view.clock.now() + 5);
    }
    while (view.depth > 0) {
      const wanted = view.mirror.plan(MODEL, "", 8);
      assert.equal(
        wanted.reduce((sum, { count }) => sum + count, 0),
        8,
      );
      const taken = wanted.flatMap(({ stream, count }) => queued[stream.shard]!.splice(0, count));
      const oldestLeft = Math.min(...queued.map(([first = Infinity]) => first));
      assert.ok(Math.max(...taken) <= oldestLeft + 25, `${Math.max(...taken) - oldestLeft} ms ahead`);
      view.mirror.release(wanted);
      for (const { stream } of wanted) view.left(stream.shard, queued[stream.shard]!.length);
    }
  });

  test("two claims at once do not count on the same tasks, and stay in order", async () => {
    const view = new View();
    for (let task = 0; task < 8; task++) {
      view.came(task % 2, 1);
      await view.clock.run(view.clock.now() + 50);
    }
    const plans = [view.mirror.plan(MODEL, "", 4), view.mirror.plan(MODEL, "", 4)];
    const counts = plans.map((wanted) => wanted.map(({ count }) => count));
    assert.deepEqual(counts, [
      [2, 2],
      [2, 2],
    ]);
  });

  test("takes what came back before what is new, and a suspicious task alone", () => {
    const view = new View();
    view.came(0, 10);
    view.came(1, 2, { kind: "0" });
    assert.deepEqual(view.plan(4), [
      [1, 2],
      [0, 2],
    ]);
    view.came(2, 3, { kind: "1" });
    assert.deepEqual(view.plan(4), [[2, 1]]);
  });

  test("the better tier first, a floor for the others under a backlog", () => {
    const view = new View();
    view.came(0, 100, { tier: 0 });
    view.came(1, 100, { tier: 2 });
    const taken = new Map<number, number>();
    for (let round = 0; round < 20; round++)
      for (const [shard, count] of view.plan(10)) taken.set(shard, (taken.get(shard) ?? 0) + count);
    assert.equal(taken.get(1), 10, "5 % of 200");
  });
});

describe("zones", () => {
  test("tasks of another zone wait for their own, then anybody may take them", async () => {
    const view = new View("a");
    view.mirror.rank = { prefers: () => true, deserted: () => false };
    view.came(0, 5, { zone: "b" });
    view.came(1, 2, { zone: "a" });
    assert.equal(view.depth, 2);
    assert.deepEqual(view.plan(64), [[1, 2]]);
    const spillAt = view.mirror.nextSpillAt();
    assert.equal(spillAt, view.clock.now() + 100);
    await view.clock.run(spillAt);
    assert.equal(view.depth, 7);
  });

  test("at once when nobody serves that zone, and those of no zone always", () => {
    const view = new View("a");
    view.mirror.rank = { prefers: () => true, deserted: (zone) => zone === "b" };
    view.came(0, 5, { zone: "b" });
    view.came(1, 2);
    view.came(2, 3, { zone: "c" });
    assert.equal(view.depth, 7);
  });

  test("the end of the wait is told to whoever watches", async () => {
    const view = new View("a");
    view.mirror.rank = { prefers: () => true, deserted: () => false };
    const heard: number[][] = [];
    view.mirror.arrived = (_, __, depth, count) => heard.push([depth, count]);
    view.came(0, 5, { zone: "b" });
    await view.clock.run(view.mirror.nextSpillAt());
    view.mirror.spilled();
    assert.deepEqual(heard, [
      [0, 5],
      [5, 0],
    ]);
  });
});
