/** Five times what the workers can do, through two gateways on one Redis. */
import assert from "node:assert/strict";
import { test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig } from "./fleet.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

/** Four workers of four seats and 400 ms: slow enough for a busy machine. */
const BATCH_MS = 400;
const CAPACITY_PER_S = 40;
const STEP_MS = 10;

test("both gateways let in what the fleet can do, and what is let in is answered in time", async (t) => {
  await using stack = new AsyncDisposableStack();
  const redis = stack.use(await startServer());
  const workers: StubWorker[] = [];
  for (let i = 0; i < 4; i++) {
    const worker = await StubWorker.listen((call) => void setTimeout(() => call.echo(), BATCH_MS));
    workers.push(stack.use(worker));
  }
  const timeouts = { queueMs: 7000, workerMs: 6000, totalMs: 8000 };
  const model = stubModel(workers, { maxBatchSize: 4, maxWaitMs: 10, timeouts });
  const config = fleetConfig({ url: redis.url }, [model]);
  const fleet = stack.use(await Fleet.start({ gateways: 2, batchers: 2 }, config));
  await fleet.spread([2, 2]);

  const statuses = [new Map<number, number>(), new Map<number, number>()];
  const sent: Promise<void>[] = [];
  const knock = async (door: number, counted: boolean): Promise<void> => {
    const { status } = await fleet.gateways[door]!.post({ input: `${door} ${sent.length}` });
    if (counted) statuses[door]!.set(status, (statuses[door]!.get(status) ?? 0) + 1);
  };
  /** By the clock, so that a machine that is busy sends as many. */
  const flood = async (perS: number, ms: number, counted: boolean): Promise<void> => {
    const [from, first] = [performance.now(), sent.length];
    while (performance.now() - from < ms) {
      const due = first + (perS * (performance.now() - from)) / 1000;
      while (sent.length < due) sent.push(knock(sent.length % 2, counted));
      await pause(STEP_MS);
    }
  };
  await flood(CAPACITY_PER_S / 2, 3000, false);
  await flood(5 * CAPACITY_PER_S, 4000, false);
  await flood(5 * CAPACITY_PER_S, 6000, true);
  await Promise.all(sent);

  const [one, other] = statuses.map((each) => ({ ok: each.get(200) ?? 0, late: each.get(504) ?? 0 }));
  const ok = one!.ok + other!.ok;
  const late = one!.late + other!.late;
  t.diagnostic(JSON.stringify(statuses.map((each) => [...each])));
  const said = JSON.stringify(statuses.map((each) => [...each]));
  // The machine may stand still for a while: what is asserted is far from what is usual (0.93 C, none late), and far from
  // what comes of letting in everybody (four of five late) or nobody.
  assert.ok(ok >= 0.3 * CAPACITY_PER_S * 6, said);
  assert.ok(late < ok, said);
  assert.ok(Math.min(one!.ok, other!.ok) >= 0.25 * ok, said);
});
