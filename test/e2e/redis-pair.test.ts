/** A primary and its replica: accepted means that both have it, so that either may die. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { startPair, type Pair } from "../engine/redis-client/servers.ts";
import { Caller, Load } from "./fleet-load.ts";
import { alert, Fleet, fleetConfig, patient } from "./fleet.ts";
import { assertError, eventually } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const nodes = ({ primary, replica }: Pair): string[] =>
  [primary, replica].map(({ port }) => `127.0.0.1:${port}`);

async function startFleet(pair: Pair, worker: StubWorker, engine = {}): Promise<Fleet> {
  const model = stubModel([worker], { timeouts: patient });
  const config = fleetConfig({ nodes: nodes(pair), ...alert, ...engine }, [model]);
  return Fleet.start({ gateways: 2, batchers: 1 }, config);
}

test("a paused replica: nothing is accepted meanwhile, and it is said soon", async () => {
  await using pair = await startPair();
  await using worker = await StubWorker.listen();
  await using fleet = await startFleet(pair, worker);
  const [a, b] = fleet.doors;
  // Not at once on a machine that is busy: both have to have it within 200 ms.
  await eventually(async () => (await a!.post({ input: "both" })).status === 200);
  pair.replica.pause();
  for (const [at, door] of [a!, b!, a!, b!].entries()) {
    const startedAt = performance.now();
    const answer = await door.post({ input: `one only ${at}` }, { prefer: "respond-async" });
    const tookMs = performance.now() - startedAt;
    assertError(answer, 503, "SERVICE_OVERLOADED");
    assert.ok(tookMs < 15_000, `refused after ${tookMs.toFixed(0)} ms`);
  }
  pair.replica.resume();
  const takes = async (): Promise<boolean> => (await a!.post({ input: "both again" })).status === 200;
  await eventually(takes);
});

test("the primary dies while its replica lags: every 202 that was given is answered", async () => {
  await using pair = await startPair();
  await using worker = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 20));
  await using fleet = await startFleet(pair, worker);
  await using load = new Load(() => fleet.doors, { callers: 48 });
  await load.more(200);
  pair.replica.pause();
  // The lag: what is written now, the replica does not get before the primary is dead.
  await pause(600);
  await pair.primary.kill();
  pair.replica.resume();
  await pair.promote();
  const promotedAt = performance.now();
  await load.more(200);
  const ledger = await load.stop();
  ledger.assertWhole();
  const late = ledger.refusals.filter(({ at }) => at > promotedAt + 20_000);
  assert.deepEqual(late, []);
});

test("the primary dies with a full queue: all of it is at the replica", async () => {
  await using pair = await startPair();
  const gate = new Gate();
  await using worker = await StubWorker.listen(gate.hold);
  await using fleet = await startFleet(pair, worker);
  const caller = new Caller(() => fleet.doors);
  const callers = Array.from({ length: 200 }, (_, i) => caller.run(`queued ${i}`, "polled"));
  await eventually(() => caller.ledger.accepted === 200);
  await pair.primary.kill();
  await pair.promote();
  gate.open();
  await Promise.all(callers);
  caller.ledger.assertWhole();
});

test("the replica dies: refused until it is known to be gone, then accepted on one server", async () => {
  await using pair = await startPair();
  await using worker = await StubWorker.listen();
  await using fleet = await startFleet(pair, worker);
  await using load = new Load(() => fleet.doors);
  await load.more(100);
  await pair.replica.kill();
  const killedAt = performance.now();
  await load.more(100);
  const ledger = await load.stop();
  ledger.assertWhole();
  const late = ledger.refusals.filter(({ at }) => at > killedAt + 20_000);
  assert.deepEqual(late, []);
});
