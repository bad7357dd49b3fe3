/** gRPC servers with `pipeline: 2` while reloads replace them, add and take away: every row its own, none twice at once. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { request } from "undici";
import { echo } from "../workers/backend/grpc-stage.ts";
import { OipServer } from "../gateway/protocol/oip-service.ts";
import { type Config, eventually, Ferry, reloadConfig } from "./harness.ts";

const limits = { drainMs: 10_000, lingerMs: 0 };
const timeouts = { queueMs: 20_000, workerMs: 10_000, totalMs: 30_000 };

interface Watched extends AsyncDisposable {
  readonly server: OipServer;
  open: number;
  most: number;
  /** Called off before they were answered. */
  cut: number;
}

/** One that takes a while, and knows how many calls it had at once. */
async function slowServer(ms: number): Promise<Watched> {
  const server = await OipServer.listen(async (call, context) => {
    watched.most = Math.max(watched.most, ++watched.open);
    await pause(ms);
    watched.open--;
    if (context.cancelled) watched.cut++;
    return echo(call, context);
  });
  const watched: Watched = {
    server,
    open: 0,
    most: 0,
    cut: 0,
    [Symbol.asyncDispose]: () => server[Symbol.asyncDispose](),
  };
  return watched;
}

function configOf(servers: readonly Watched[], authorization: string, more: object = {}): Config {
  const workers = servers.map(({ server }) => server.url);
  const backend = { kind: "grpc", workers, authorization };
  const model = { name: "m", backend, pipeline: 2, maxBatchSize: 4, maxWaitMs: 5, timeouts, ...more };
  return { models: [{ ...model, cache: { scope: "off" } }], limits };
}

async function ask(ferry: Ferry, text: string): Promise<void> {
  const inputs = [{ name: "text", datatype: "BYTES", shape: [1], data: [text] }];
  const answer = await request(`${ferry.url}/v2/models/m/infer`, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify({ inputs }),
  });
  const body = await answer.body.text();
  assert.equal(answer.statusCode, 200, `${text}: ${body}`);
  const { outputs } = JSON.parse(body) as { outputs: { data: string[] }[] };
  assert.deepEqual(outputs[0]!.data, [text]);
}

interface Row {
  readonly pipeline: number;
  readonly ahead: string | null;
}

async function rows(ferry: Ferry): Promise<Row[]> {
  return (JSON.parse((await ferry.admin("/internal/workers")).text) as { workers: Row[] }).workers;
}

test("replaced in the middle of two batches each: all answers right, never a third batch, nothing left", async () => {
  await using one = await slowServer(60);
  await using other = await slowServer(60);
  await using third = await slowServer(60);
  await using ferry = await Ferry.start(configOf([one, other], "Bearer 0"));
  let sent = 0;
  const state = { stopped: false };
  const caller = async (name: number): Promise<void> => {
    for (let turn = 0; !state.stopped; turn++) {
      sent++;
      await ask(ferry, `${name} ${turn}`);
    }
  };
  const callers = Array.from({ length: 32 }, (_, name) => caller(name));
  await eventually(async () => (await rows(ferry)).some(({ ahead }) => ahead !== null), 20_000);
  const steps: Config[] = [
    configOf([one, other], "Bearer 1"),
    configOf([one, other, third], "Bearer 1"),
    configOf([one, other, third], "Bearer 2"),
    configOf([one, third], "Bearer 2", { maxBatchSize: 2 }),
    configOf([one, third], "Bearer 3", { pipeline: 1 }),
    configOf([one, other], "Bearer 4"),
    configOf([third], "Bearer 4"),
    configOf([one, other, third], "Bearer 5"),
  ];
  for (const step of steps) {
    const [before] = [sent];
    await reloadConfig(ferry, step);
    await eventually(() => sent > before + 40, 20_000);
  }
  state.stopped = true;
  await Promise.all(callers);
  for (const { most } of [one, other, third]) assert.ok(most >= 1 && most <= 2, `${most} at once`);
  await eventually(async () => (await rows(ferry)).length === 3);
  await eventually(async () =>
    (await rows(ferry)).every(({ ahead, pipeline }) => ahead === null && pipeline === 2),
  );
  const last = third.server.metadata.at(-1)!.get("authorization");
  assert.deepEqual(last, ["Bearer 5"]);
  const all = [one, other, third];
  assert.deepEqual(
    all.map(({ open, cut }) => [open, cut]),
    all.map(() => [0, 0]),
    "no call was cut off",
  );
});
