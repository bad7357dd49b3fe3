/** A reload of `ferry serve --processes` while one of them is stopped: bounded, all or none, and never two configs. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { brisk, fleetConfig, Part, patient } from "./fleet.ts";
import { type Config, eventually } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

/** How long a process may be silent: well beyond what one needs on a machine that stands still for a moment. */

function childrenOf(pid: number): number[] {
  const text = readFileSync(`/proc/${pid}/task/${pid}/children`, "utf8");
  return text.split(" ").filter(Boolean).map(Number);
}

/** As the process behind this admin listener has it. */
async function maxBatchSize(admin: string): Promise<number> {
  const answer = await fetch(`${admin}/internal/workers`, { headers: { connection: "close" } });
  const { models } = (await answer.json()) as { models: { max_batch_size: number }[] };
  return models[0]!.max_batch_size;
}

test("one is stopped: nothing changes, the reason is told, and awake again it is as the others are", async () => {
  await using redis = await startServer();
  await using stub = await StubWorker.listen();
  const config = (size: number): Config => {
    const models = [stubModel([stub], { timeouts: patient, maxBatchSize: size })];
    return fleetConfig({ url: redis.url, ...brisk }, models);
  };
  await using part = await Part.start("all", config(2), ["--processes", "3"]);
  const { admins } = await part.line(({ msg }) => msg === "ready");
  const urls = admins as string[];
  const sizes = (some = urls): Promise<number[]> => Promise.all(some.map(maxBatchSize));
  assert.match(await part.reload(config(3)), /maxBatchSize 2 → 3/);
  assert.deepEqual(await sizes(), [3, 3, 3]);

  const stopped = childrenOf(part.pid)[1]!;
  process.kill(stopped, "SIGSTOP");
  try {
    const begun = performance.now();
    const why = await part.reload(config(4));
    assert.match(why, /nothing was changed: process \d did not answer for 5000 ms/);
    assert.ok(why.includes(`kill -9 ${stopped}`), why);
    assert.ok(performance.now() - begun < 60_000);
    const number = Number(/process (\d)/.exec(why)![1]);
    const others = urls.filter((_, at) => at !== number - 1);
    assert.deepEqual(await sizes(others), [3, 3]);
    assert.match(await part.reload(config(5)), /nothing was changed: process \d did not answer/);
    assert.deepEqual(await sizes(others), [3, 3]);
  } finally {
    process.kill(stopped, "SIGCONT");
  }
  for (let look = 0; look < 5; look++) assert.deepEqual(await sizes(), [3, 3, 3]);
  assert.match(await part.reload(config(6)), /maxBatchSize 3 → 6/);
  assert.deepEqual(await sizes(), [6, 6, 6]);
  await part.post({ input: "x" });
});

test("one that hangs for good is killed by hand, and its successor has the config of the others", async () => {
  await using redis = await startServer();
  await using stub = await StubWorker.listen();
  const config = (size: number): Config => {
    const models = [stubModel([stub], { timeouts: patient, maxBatchSize: size })];
    return fleetConfig({ url: redis.url, ...brisk }, models);
  };
  await using part = await Part.start("all", config(2), ["--processes", "2"]);
  const { admins } = await part.line(({ msg }) => msg === "ready");
  const urls = admins as string[];
  const [, hung] = childrenOf(part.pid);
  process.kill(hung!, "SIGSTOP");
  const reload = part.reload(config(3));
  // While the parent waits for it.
  process.kill(hung!, "SIGKILL");
  assert.match(await reload, /maxBatchSize 2 → 3/);
  await part.line(({ msg }) => msg === "process ready", 20_000);
  await eventually(
    async () => (await Promise.all(urls.map(maxBatchSize))).every((size) => size === 3),
    10_000,
  );
  assert.match(await part.reload(config(4)), /maxBatchSize 3 → 4/);
  assert.deepEqual(await Promise.all(urls.map(maxBatchSize)), [4, 4]);
});
