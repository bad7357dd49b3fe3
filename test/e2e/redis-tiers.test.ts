/** Tiers and tenants through two gateways on one Redis: who is served first does not depend on the door. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, type Part, patient } from "./fleet.ts";
import { eventually, Folder, runFerry, writeConfig } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const BATCH = 8;

/** A fleet whose worker holds its first batch, a way to make callers, and the inputs in the order of service. */
async function stage() {
  const stack = new AsyncDisposableStack();
  const redis = stack.use(await startServer());
  const folder = stack.use(await Folder.make());
  const stub = stack.use(await StubWorker.listen());
  const gate = new Gate();
  stub.behave = gate.hold;
  const model = stubModel([stub], { timeouts: patient, maxBatchSize: BATCH, retry: { max: 0 } });
  const config = fleetConfig({ url: redis.url, durability: "local" }, [model], {
    auth: { mode: "required" },
    admission: { mode: "off" },
  });
  await writeConfig(folder, config);
  const fleet = stack.use(await Fleet.start({ gateways: 2, batchers: 1 }, config));
  const caller = async (user: string, tier: string) => {
    const words = ["keys", "create", "--user", user, "--tier", tier, "-c", `${folder.path}/ferry.yaml`];
    const { code, stdout, stderr } = await runFerry(words);
    assert.equal(code, 0, stderr);
    return async (door: Part, input: string): Promise<void> => {
      const headers = { authorization: `Bearer ${stdout.trim()}`, prefer: "respond-async" };
      const answer = await door.post({ input }, headers);
      assert.equal(answer.status, 202, answer.text);
    };
  };
  /** The batcher has read all that waits. */
  const allRead = async (): Promise<boolean> => {
    const streams = (await redis.ask("KEYS", "ferry:*:q:*")) as string[];
    const groups = await Promise.all(streams.map((stream) => redis.ask("XINFO", "GROUPS", stream)));
    return (groups.flat() as unknown[][]).every((group) => group[group.indexOf("lag") + 1] === 0);
  };
  const served = async (count: number): Promise<string[]> => {
    await eventually(allRead);
    gate.open();
    await eventually(async () => stub.inputs.length >= count);
    return stub.inputs.map(String);
  };
  return { stack, fleet, stub, caller, served };
}

describe("through two gateways", () => {
  test("the better tier goes first, whichever door it came by", async () => {
    const { stack, fleet, stub, caller, served } = await stage();
    await using all = stack;
    void all;
    const [a, b] = fleet.gateways as [Part, Part];
    const [free, enterprise] = [await caller("cheap", "free"), await caller("dear", "enterprise")];
    await free(a, "running");
    await stub.call(1);
    for (let at = 0; at < 32; at++) await free(a, `free ${at}`);
    for (let at = 0; at < 6; at++) await enterprise(b, `dear ${at}`);
    const order = await served(39);
    const last = Math.max(...Array.from({ length: 6 }, (_, at) => order.indexOf(`dear ${at}`)));
    assert.ok(last <= 1 + BATCH, `the last of the first tier is number ${last}: ${order.join(", ")}`);
  });

  test("a tenant that floods at one door does not hold up the others at both", async () => {
    const { stack, fleet, stub, caller, served } = await stage();
    await using all = stack;
    void all;
    const [a, b] = fleet.gateways as [Part, Part];
    const loud = await caller("loud", "free");
    const quiet = await Promise.all(["q1", "q2", "q3"].map((user) => caller(user, "free")));
    await loud(a, "running");
    await stub.call(1);
    // Whoever floods is known by comparison: the others were there before.
    for (const [at, each] of quiet.entries()) await each(a, `early ${at}`);
    for (let at = 0; at < 80; at++) await loud(a, `loud ${at}`);
    for (const [at, each] of quiet.entries()) {
      await each(a, `late at a ${at}`);
      await each(b, `late at b ${at}`);
    }
    const order = await served(90);
    const places = order.flatMap((input, at) => (input.startsWith("late") ? [at] : []));
    assert.equal(places.length, 6);
    assert.ok(Math.max(...places) < 60, `served at ${places.join(", ")} of ${order.length}`);
  });
});
