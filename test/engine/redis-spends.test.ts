/** Rate windows on Redis: spent together, exact across processes, and not open when Redis is away. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { WINDOW_MS } from "../../src/core/window.ts";
import type { RedisNodes } from "../../src/engine/redis/client/nodes.ts";
import { PLAIN } from "../contract/engine-stage.ts";
import { type Server, startServer } from "./redis-client/servers.ts";
import { makeEngine, openNodes } from "./redis-engines.ts";

describe("units of a window", () => {
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

  async function scriptCalls(): Promise<number> {
    const stats = String(await server.ask("INFO", "commandstats"));
    return Number(/cmdstat_evalsha:calls=(\d+)/.exec(stats)?.[1] ?? 0);
  }

  test("that are spent in one tick are one call, each with its own answer", async () => {
    const { engine } = makeEngine(nodes, PLAIN);
    await engine.spend("warm", 1);
    const calls = await scriptCalls();
    const units = Array.from({ length: 300 }, (_, n) => engine.spend(`user-${n % 100}`, 2));
    const spent = await Promise.all(units);
    assert.equal((await scriptCalls()) - calls, 1);
    spent.forEach(({ allowed, left }, n) => {
      assert.deepEqual([allowed, left], n < 100 ? [true, 1] : n < 200 ? [true, 0] : [false, 0]);
    });
  });

  test("are exact over processes, also when a limit changes between them", async () => {
    const engines = [1, 2, 3].map(() => makeEngine(nodes, PLAIN, { prefix: "spends:" }).engine);
    const units = Array.from({ length: 90 }, (_, n) => engines[n % 3]!.spend("tier:paid", 40));
    const allowed = (await Promise.all(units)).filter((each) => each.allowed).length;
    assert.equal(allowed, 40);
    const more = await Promise.all([41, 41, 43].map((limit) => engines[0]!.spend("tier:paid", limit)));
    assert.deepEqual(
      more.map((each) => [each.allowed, each.left]),
      [
        [true, 0],
        [false, 0],
        [true, 1],
      ],
    );
  });
});

test("when Redis goes away in the middle of a minute the window goes on from what it said", async () => {
  const server = await startServer();
  const nodes = await openNodes({ url: server.url }, { commandTimeoutMs: 500 });
  const { engine, clock } = makeEngine(nodes, PLAIN);
  for (let n = 0; n < 8; n++) await engine.spend("ann", 10);
  await clock.run(clock.now() + WINDOW_MS / 2);
  await server.stop();
  const spent = await Promise.all(Array.from({ length: 4 }, () => engine.spend("ann", 10)));
  assert.deepEqual(
    spent.map(({ allowed, left }) => [allowed, left]),
    [
      [true, 1],
      [true, 0],
      [false, 0],
      [false, 0],
    ],
  );
  assert.equal(spent[0]!.resetMs, WINDOW_MS / 2);
  await clock.run(clock.now() + WINDOW_MS / 2);
  assert.equal((await engine.spend("ann", 10)).left, 9);
  await nodes.close();
});
