/** Two zones on one Redis: a task runs in the zone where it came in, while that zone can run it. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Load } from "./fleet-load.ts";
import { brisk, Fleet, fleetConfig, patient, type Part } from "./fleet.ts";
import { eventually } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

/** A task that waits so long does so for its zone, not for this machine. */
const SPILL_MS = 10_000;

interface Zone {
  readonly worker: StubWorker;
  readonly gateway: Part;
  readonly batcher: Part;
}

/** A gateway, a batcher and a worker of its own in each zone. */
async function startZones(stack: AsyncDisposableStack, engine = {}): Promise<Record<"a" | "b", Zone>> {
  const redis = stack.use(await startServer());
  const workers = { a: stack.use(await StubWorker.listen()), b: stack.use(await StubWorker.listen()) };
  const fleet = stack.use(new Fleet(fleetConfig({ url: redis.url, ...engine }, [])));
  const start = async (zone: "a" | "b"): Promise<Zone> => {
    const worker = workers[zone];
    worker.behave = (call) => void setTimeout(() => call.echo(), 10);
    const more = { zone, models: [stubModel([worker], { timeouts: patient, maxBatchSize: 16 })] };
    const [gateway, batcher] = await Promise.all([fleet.add("gateway", more), fleet.add("batcher", more)]);
    return { worker, gateway, batcher };
  };
  const [a, b] = await Promise.all([start("a"), start("b")]);
  // Each part by itself: a batcher that has not heard of the other zone's takes its tasks, rightly.
  const knowsBoth = async (part: Part): Promise<boolean> => {
    const workers = await part.workers();
    return workers.length === 2 && workers.every(({ batcher }) => batcher !== "");
  };
  const parts = [a.gateway, a.batcher, b.gateway, b.batcher];
  await eventually(async () => (await Promise.all(parts.map(knowsBoth))).every(Boolean));
  return { a, b };
}

test("each zone runs its own tasks while its workers keep up", async () => {
  await using stack = new AsyncDisposableStack();
  const { a, b } = await startZones(stack, { zoneSpillMs: SPILL_MS });
  const inA = stack.use(new Load(() => [a.gateway], { callers: 8, name: "a" }));
  const inB = stack.use(new Load(() => [b.gateway], { callers: 8, name: "b" }));
  await Promise.all([inA.more(200), inB.more(200)]);
  for (const load of [inA, inB]) (await load.stop()).assertWhole();
  const strangers = (worker: StubWorker, own: string): number =>
    worker.inputs.filter((input) => !String(input).startsWith(own)).length / worker.inputs.length;
  // A task that a pause of this machine kept for longer than SPILL_MS may run elsewhere, rightly.
  assert.ok(strangers(a.worker, "a") < 0.02, `${strangers(a.worker, "a")} of a's were b's`);
  assert.ok(strangers(b.worker, "b") < 0.02, `${strangers(b.worker, "b")} of b's were a's`);
});

test("a zone whose worker is busy spills over", async () => {
  await using stack = new AsyncDisposableStack();
  const { a, b } = await startZones(stack, { zoneSpillMs: 4000 });
  const gate = new Gate();
  a.worker.behave = gate.hold;
  const first = a.gateway.post({ input: "first" });
  await a.worker.call(1);
  const spilled = await a.gateway.post({ input: "spilled" });
  assert.deepEqual(spilled.json.output, { of: "spilled" });
  assert.deepEqual(b.worker.inputs, ["spilled"]);
  gate.open();
  assert.deepEqual((await first).json.output, { of: "first" });
});

test("a zone whose batcher is killed goes on at the other zone's", async () => {
  await using stack = new AsyncDisposableStack();
  const { a, b } = await startZones(stack, brisk);
  const load = stack.use(new Load(() => [a.gateway], { callers: 8, name: "a" }));
  await load.more(100);
  const before = b.worker.calls.length;
  await a.batcher.kill();
  await load.more(100);
  const ledger = await load.stop();
  ledger.assertWhole();
  assert.deepEqual(ledger.refusals, [], "the other zone's workers are there");
  assert.ok(b.worker.calls.length > before);
});
