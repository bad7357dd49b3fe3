/** Item 18: the store that counts requests is away. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { eventually, Ferry } from "../e2e/harness.ts";
import { HOST, startServer } from "../engine/redis-client/server.ts";

describe("18 limiter store down: counted locally, never open, never 500", () => {
  test("18 while Redis is away every request is refused with 429 or 503, and afterwards the limit holds", async () => {
    await using server = await startServer();
    await using ferry = await Ferry.start({
      engine: { kind: "redis", url: `redis://${HOST}:${server.port}` },
      models: [{ name: "m", backend: { kind: "simulated", baseMs: 1 } }],
      limits: { perUserPerMinute: 5 },
    });
    await eventually(async () => (await ferry.post({ input: "first" })).status === 200);
    await server.kill();
    const statuses = new Set<number>();
    for (let at = 0; at < 20; at++) statuses.add((await ferry.post({ input: at })).status);
    assert.ok(
      [...statuses].every((status) => status === 429 || status === 503),
      [...statuses].join(),
    );
    assert.ok(statuses.has(429), "the local count has its limit too");
    await server.restart();
    const after = new Set<number>();
    // Twice the limit and more: also when a new minute begins in between.
    for (let at = 0; at < 100 && !after.has(429); at++)
      after.add((await ferry.post({ input: `a ${at}` })).status);
    assert.ok(after.has(429) && !after.has(500), [...after].join());
  });
});
