/** What a gateway shows of workers and batches that other processes run. */
import assert from "node:assert/strict";
import { test } from "node:test";
import type { Hello } from "../../src/observe/dashboard/frames.ts";
import { startServer } from "../engine/redis-client/server.ts";
import { Fleet, fleetConfig, type Part, patient } from "./fleet.ts";
import { eventually } from "./harness.ts";

/** What somebody who comes now is told first. */
async function hello({ adminUrl }: Part): Promise<Hello> {
  const leave = new AbortController();
  const response = await fetch(`${adminUrl}/internal/live`, { signal: leave.signal });
  let text = "";
  for await (const chunk of response.body!.pipeThrough(new TextDecoderStream())) {
    text += chunk;
    const data = /^event: hello\ndata: (.*)\n\n/m.exec(text)?.[1];
    if (data === undefined) continue;
    leave.abort();
    return JSON.parse(data) as Hello;
  }
  throw new Error(`no hello in ${text.slice(0, 200)}`);
}

test("workers of two batchers that are called alike are told apart, and have the batches of tasks that nobody waits for", async () => {
  await using redis = await startServer();
  const model = {
    name: "demo",
    backend: { kind: "simulated", workers: 2, baseMs: 20, perItemMs: 0 },
    maxBatchSize: 4,
    timeouts: patient,
    cache: { scope: "off" },
  };
  await using fleet = await Fleet.start(
    { gateways: 1, batchers: 2 },
    fleetConfig({ url: redis.url }, [model]),
  );
  const gateway = fleet.gateways[0]!;
  await eventually(async () => (await gateway.workers()).length === 4);
  const workers = (await gateway.workers()).map(({ name }) => name);
  assert.equal(new Set(workers).size, 4, workers.join(" "));
  for (const name of workers) assert.match(name, /^gpu-[12]@f[0-9a-f]{4}$/);
  const ids = await Promise.all(Array.from({ length: 40 }, (_, n) => gateway.accept({ input: n })));
  for (const id of ids) assert.equal((await gateway.result(id)).status, "SUCCESS");
  let shown = (await hello(gateway)).frame.models[0]!;
  assert.deepEqual(new Set(shown.workers.map(({ name }) => name)), new Set(workers));
  const tasks = (): number => shown.batches.reduce((sum, [, , , , size]) => sum + size, 0);
  // A batcher tells of its batches with its beats.
  await eventually(async () => {
    shown = (await hello(gateway)).frame.models[0]!;
    return tasks() >= 40;
  });
  assert.equal(tasks(), 40, JSON.stringify(shown.batches));
  for (const [, worker] of shown.batches) assert.ok(workers.includes(worker), worker);
});
