/** When a task that Redis no longer knows is said to be lost: not for one bad moment, however many looked then. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { RedisClock, frame } from "../../src/engine/redis-frames.ts";
import { RedisNews } from "../../src/engine/redis-news.ts";
import type { RedisParts } from "../../src/engine/redis-parts.ts";
import { VirtualClock } from "../../src/plan/virtual-clock.ts";
import { Events } from "../../src/telemetry/events.ts";

const SWEEP_MS = 1000;

test("looks that are on their way together count once; three sweeps that find nothing tell of it, once", async () => {
  const clock = new VirtualClock();
  const events = new Events();
  const lost: string[] = [];
  events.on("task.lost", ({ id }) => lost.push(id));
  let heard: (shard: number, payload: Buffer) => void = () => {};
  let looks = 0;
  const nodes = {
    subscribe: (_: unknown, hear: typeof heard) => {
      heard = hear;
      return Promise.resolve(() => {});
    },
    // Neither an outcome nor a state: it ended between the two questions, or it is gone.
    command: (_: number, [verb, ...names]: string[]) => {
      if (verb === "HMGET") looks++;
      return Promise.resolve(verb === "HMGET" ? names.slice(1).map(() => null) : names.map(() => null));
    },
  };
  const parts = {
    options: { sweepMs: SWEEP_MS },
    clock,
    events,
    nodes,
    name: "me",
    shared: new RedisClock(),
    keys: { bases: [""], notes: () => "" },
    shardOf: () => 0,
    spread: (ids: Iterable<string>, _: unknown, work: (ids: string[], shards: number[]) => unknown) =>
      work([...ids], [0]),
  };
  const news = new RedisNews(parts as unknown as RedisParts, () => {});
  await news.open();
  news.expect("task", clock.now() + 60_000);
  news.accepted("task");
  for (const number of [1, 3, 5, 7, 9, 11]) heard(0, frame(["sender", String(number)]));
  await clock.run(clock.now() + SWEEP_MS / 2);
  assert.equal(looks, 5, "a look for each gap");
  assert.deepEqual(lost, []);
  await clock.run(clock.now() + 5 * SWEEP_MS);
  assert.deepEqual(lost, ["task"]);
  news.close();
});
