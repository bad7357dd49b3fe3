/** `scaling.apply` on a whole Ferry: workers come with the load and go with it, and nobody's request fails. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { eventually, Ferry } from "./harness.ts";

interface Shown {
  readonly models: readonly {
    readonly model: string;
    readonly desired: number;
    readonly healthy: number;
    readonly reason: string;
    readonly applied_by: string;
  }[];
}

test("more workers under load, fewer after it, and no request fails", async () => {
  const scaling = {
    apply: true,
    min: 1,
    max: 3,
    queueDepth: 4,
    coldStartMs: 1000,
    coolDownMs: 700,
  };
  const backend = { kind: "simulated", workers: 1, baseMs: 300 };
  const timeouts = { queueMs: 40_000, workerMs: 20_000, totalMs: 50_000 };
  const model = {
    name: "m",
    backend,
    maxBatchSize: 4,
    cache: { scope: "off" },
    collapse: false,
    timeouts,
    scaling,
  };
  await using ferry = await Ferry.start({ models: [model], admission: { mode: "off" } });
  const shown = async (): Promise<Shown["models"][number]> =>
    ((await ferry.admin("/internal/scaling")).json as unknown as Shown).models[0]!;
  assert.deepEqual(await shown().then(({ desired, applied_by }) => [desired, applied_by]), [1, "ferry"]);
  const load = new AbortController();
  const callers = Array.from({ length: 24 }, async (_, caller) => {
    for (let number = 0; !load.signal.aborted; number++) {
      const { status, text } = await ferry.post({ input: `${caller}.${number}` });
      assert.equal(status, 200, text);
    }
  });
  await eventually(async () => (await shown()).healthy === 3);
  assert.match((await ferry.admin("/metrics")).text, /ferry_desired_workers\{model="m"\} 3/);
  load.abort();
  await Promise.all(callers);
  await eventually(async () => (await shown()).healthy === 1);
  const { desired, reason } = await shown();
  assert.equal(desired, 1);
  assert.match(reason, /load below 40 % for 2 s: −1/);
  assert.equal((await ferry.post({ input: "after" })).status, 200);
});
