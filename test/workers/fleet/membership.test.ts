/** The loop of one process, on virtual time with a registry that says what the test wants. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import type { Worker } from "../../../src/workers/backend/backend.ts";
import type { PoolWorker } from "../../../src/workers/worker.ts";
import type { Engine } from "../../../src/engine/engine.ts";
import type { MembershipOptions } from "../../../src/workers/fleet/membership.ts";
import { leaseNames } from "../../../src/workers/fleet/orders.ts";
import { VirtualClock } from "../../../src/cli/plan/virtual-clock.ts";
import { Batcher, gpus, member, ScriptedRegistry } from "./batcher.ts";
import { MODEL } from "./stage.ts";

const LEASES = leaseNames(MODEL, ["http://gpu-0:80/run", "http://gpu-1:80/run"]);
const BEAT_MS = 500;
const USABLE_MS = 1800;

function stage(
  changes: Partial<MembershipOptions> & { wrap?: (engine: Engine, clock: VirtualClock) => Engine } = {},
) {
  const clock = new VirtualClock();
  const registry = new ScriptedRegistry(clock);
  const fleet = gpus(2, 100);
  const { wrap, ...options } = changes;
  const batcher = new Batcher(fleet, registry, clock, options, (engine) => wrap?.(engine, clock) ?? engine);
  const notices: string[] = [];
  batcher.events.on("notice", ({ level, message }) => notices.push(`${level}: ${message}`));
  const run = (ms: number): Promise<number> => clock.run(clock.now() + ms);
  return { clock, registry, fleet, batcher, notices, run, slots: batcher.dispatcher.workers.slots };
}

const never = new Promise<never>(() => {});
const away = (): Promise<never> => Promise.reject(new Error("redis is away"));

test("a shared worker is used only while it is held, and at once when it is", async () => {
  const { registry, fleet, batcher, run } = stage();
  batcher.put(3);
  await batcher.membership.start();
  await run(BEAT_MS - 1);
  assert.deepEqual(
    fleet.map(({ batches }) => batches),
    [0, 0],
  );
  registry.answer = () => ({ held: [LEASES[1]!] });
  await run(2);
  assert.deepEqual(
    fleet.map(({ batches }) => batches),
    [0, 1],
  );
  await run(BEAT_MS / 10);
  registry.answer = () => ({});
  await run(BEAT_MS + 400);
  assert.equal(fleet[1]!.batches, 3, "the lease was lost after the third");
  batcher.put();
  await run(1000);
  assert.equal(fleet[1]!.batches, 3);
});

describe("the zombie rule", () => {
  test("no batch starts once heldUntil has passed, and none is needed to find out", async () => {
    const { registry, fleet, batcher, run } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    registry.answer = () => never;
    await run(USABLE_MS - 1);
    batcher.put();
    await run(0);
    assert.equal(fleet[0]!.batches + fleet[1]!.batches, 1);
    await run(2);
    batcher.put();
    await run(5000);
    assert.equal(fleet[0]!.batches + fleet[1]!.batches, 1);
    assert.equal(batcher.dispatcher.workers.healthy(batcher.membership.fleet.startedAt + 9000), 0);
  });

  test("a beat whose answer comes after its own time gives nothing", async () => {
    const { clock, registry, batcher, run, slots } = stage();
    const late = Promise.withResolvers<{ held: string[] }>();
    registry.answer = () => late.promise;
    void batcher.membership.start();
    await run(USABLE_MS + 1);
    late.resolve({ held: LEASES });
    registry.answer = () => never;
    await run(0);
    assert.equal(slots[0]!.held(clock.now()), false);
  });

  test("tasks that were claimed for a slot whose lease ran out meanwhile go back untried", async () => {
    const claimMs = { now: 0 };
    const wrap = (engine: Engine, clock: VirtualClock): Engine =>
      new Proxy(engine, {
        get(target, name) {
          const value: unknown = Reflect.get(target, name, target);
          if (typeof value !== "function") return value;
          if (name !== "claim") return value.bind(target);
          return async (request: Parameters<Engine["claim"]>[0]) => {
            const lease = await target.claim(request);
            await new Promise<void>((resolve) => clock.at(clock.now() + claimMs.now, resolve));
            return lease;
          };
        },
      });
    const { registry, fleet, batcher, run } = stage({ wrap });
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    registry.answer = away;
    claimMs.now = 3000;
    const [id] = batcher.put();
    await run(3001);
    assert.deepEqual([fleet[0]!.batches, fleet[1]!.batches], [0, 0]);
    assert.equal((await batcher.engine.outcome(id!))?.state, "queued");
    claimMs.now = 0;
    registry.answer = () => ({ held: LEASES });
    await run(1000);
    const record = await batcher.engine.outcome(id!);
    assert.equal(record?.state, "done");
    assert.equal(record.attempt, 1);
  });
});

describe("giving back", () => {
  test("no further batch starts there, and it is let go at once when its batch is done", async () => {
    const { clock, registry, fleet, batcher, run, slots } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    for (const gpu of fleet) gpu.serviceMs = 130;
    batcher.keepBusy(8);
    await run(BEAT_MS + 40);
    // From the beat at 550 on it is to leave, with a batch from 520 to 650.
    registry.answer = () => ({ held: LEASES, giveBack: [LEASES[0]!] });
    await run(20);
    assert.equal(slots[0]!.state(clock.now()), "draining");
    assert.deepEqual(registry.last.releasing, []);
    const batches = fleet[0]!.batches;
    registry.answer = ({ held, releasing }) => ({ held: held.filter((lease) => !releasing.includes(lease)) });
    await run(95);
    assert.deepEqual(registry.last.releasing, [LEASES[0]]);
    assert.deepEqual(registry.last.held[0], LEASES[0], "what leaves is the first to lose");
    const sinceStart = Math.round(registry.beats.at(-1)!.at - fleet[0]!.lastStartAt);
    assert.equal(sinceStart, 130, "not at the next regular beat");
    await run(1000);
    assert.equal(fleet[0]!.batches, batches);
    assert.ok(fleet[1]!.batches > batches);
  });

  test("an idle one that is to leave is named in the next beat only: a batch could start meanwhile", async () => {
    const { registry, batcher, run } = stage();
    registry.answer = () => ({ held: LEASES, giveBack: LEASES });
    await batcher.membership.start();
    assert.deepEqual(registry.last.releasing, []);
    registry.answer = () => ({});
    await run(BEAT_MS / 10 + 1);
    assert.deepEqual(registry.last.releasing, LEASES);
    assert.equal(registry.beats.length, 2);
  });

  test("draining, it lists nothing more and lets go of each worker when that is idle", async () => {
    const { registry, fleet, batcher, run } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    fleet[0]!.serviceMs = 130;
    batcher.put();
    await run(1);
    batcher.membership.drain();
    registry.answer = ({ held, releasing }) => {
      const kept = held.filter((lease) => !releasing.includes(lease));
      return { held: kept, giveBack: kept };
    };
    await run(50);
    assert.deepEqual(registry.last.listed, []);
    await run(50);
    assert.deepEqual(registry.last.releasing, [LEASES[1]]);
    assert.equal(fleet[0]!.running, 1);
    await run(50);
    assert.deepEqual(registry.last.releasing, [LEASES[0]]);
    await batcher.stop();
    assert.deepEqual(registry.left, ["me"]);
  });

  test("stopped in mid-batch it frees nothing", async () => {
    const { registry, batcher, run } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    batcher.put();
    await run(1);
    await batcher.membership.stop();
    assert.deepEqual(registry.left, []);
  });
});

describe("when to beat", () => {
  test("every beatMs, less at most a tenth", async () => {
    const { registry, batcher, run } = stage();
    await batcher.membership.start();
    await run(10 * BEAT_MS + 1);
    assert.equal(registry.beats.length, 11);
  });

  test("at the instant at which somebody who is late will be dead", async () => {
    const { clock, registry, batcher, run } = stage();
    const startedAt = clock.now();
    registry.answer = () => ({ members: [member({ id: "late", ageMs: 1900 })] });
    await batcher.membership.start();
    registry.answer = () => ({});
    await run(102);
    assert.deepEqual(
      registry.beats.map(({ at }) => Math.round(at - startedAt)),
      [0, 101],
    );
  });

  test("soon after workers were taken, which what it said of itself did not know", async () => {
    const { registry, batcher, run } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    assert.equal(registry.last.member.models[0]!.healthy, 0);
    await run(BEAT_MS / 10 + 1);
    assert.equal(registry.beats.length, 2);
    assert.equal(registry.last.member.models[0]!.healthy, 2);
    await run(BEAT_MS - 10);
    assert.equal(registry.beats.length, 2, "and then as always");
  });

  test("soon after a worker went down, so that gateways know", async () => {
    const { registry, batcher, run, slots } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    await run(200);
    batcher.dispatcher.workers.failed(slots[0]!, batcher.membership.fleet.startedAt + 200, "gone", true);
    const before = registry.beats.length;
    await run(1);
    assert.equal(registry.beats.length, before + 1);
    assert.equal(registry.last.member.models[0]!.healthy, 1);
    assert.equal(registry.last.member.workers[0]!.down!.why, "gone");
  });
});

test("a registry that is away: slots last until heldUntil, one warning, then all goes on by itself", async () => {
  const { clock, registry, fleet, batcher, notices, run, slots } = stage();
  registry.answer = () => ({ held: LEASES });
  await batcher.membership.start();
  registry.answer = away;
  await run(USABLE_MS - 10);
  assert.equal(slots[0]!.free(clock.now()), true);
  await run(5000);
  assert.equal(slots[0]!.free(clock.now()), false);
  assert.deepEqual(notices, [
    "warn: the fleet's registry does not answer; shared workers get no batch once their leases have run out: redis is away",
  ]);
  batcher.put();
  registry.answer = () => ({ held: LEASES });
  await run(BEAT_MS / 4 + 1);
  assert.equal(fleet[0]!.batches, 1);
  assert.deepEqual(notices.slice(1), ["info: the fleet's registry answers again"]);
});

test("lease names: the same for the same worker whatever else is listed, and without secrets", () => {
  assert.deepEqual(
    leaseNames("m", ["http://user:pass@gpu/run", "http://gpu/other", "http://gpu:80/run", "not a url"]),
    ["m http://gpu/run", "m http://gpu/other", "m http://gpu/run #2", "m not a url"],
  );
  const [name] = leaseNames("m", ["http://gpu/run?key=secret"]);
  assert.match(name!, /^m http:\/\/gpu\/run\?[0-9a-f]{8}$/);
});

/** As a reload does: the same machine and its lease, by other rules. */
function replace({ dispatcher }: Batcher, worker: Worker, before: PoolWorker): void {
  dispatcher.join(worker, { predecessors: [before], lease: before.lease });
}

describe("a worker by other rules", () => {
  test("has the lease that it had, at once, and is leased once", async () => {
    const { clock, registry, fleet, batcher, run, slots } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    batcher.put();
    await run(10);
    const before = [...slots];
    for (const [at, gpu] of fleet.entries()) replace(batcher, gpu.asWorker(clock), before[at]!);
    for (const slot of before) void batcher.dispatcher.retire(slot);
    batcher.membership.changed();
    batcher.put(2);
    assert.equal(batcher.dispatcher.horizon(clock.now()).healthy, 2, "nobody is refused meanwhile");
    registry.answer = ({ listed, held }) => ({
      held: listed[0]!.leases.filter((lease) => held.includes(lease)),
    });
    await run(60);
    assert.deepEqual(registry.last.listed, [{ model: MODEL, leases: LEASES }]);
    assert.deepEqual(registry.last.held.toSorted(), LEASES);
    assert.deepEqual(registry.last.releasing, []);
    await run(1000);
    assert.deepEqual(
      fleet.map(({ most }) => most),
      [1, 1],
    );
    assert.equal(fleet[0]!.batches + fleet[1]!.batches, 3);
    assert.deepEqual(registry.last.held, LEASES);
  });

  test("is given back only when the batch that it had before is over", async () => {
    const { clock, registry, fleet, batcher, run, slots } = stage();
    registry.answer = () => ({ held: LEASES });
    await batcher.membership.start();
    fleet[0]!.serviceMs = 900;
    batcher.put();
    await run(10);
    const [busy] = slots;
    replace(batcher, fleet[0]!.asWorker(clock), busy!);
    void batcher.dispatcher.retire(busy!);
    registry.answer = () => ({ held: LEASES, giveBack: [LEASES[0]!] });
    await run(600);
    assert.deepEqual(registry.last.releasing, [], "it still runs one");
    await run(350);
    assert.ok(
      registry.beats.some(({ beat }) => beat.releasing.includes(LEASES[0]!)),
      "and then at once",
    );
  });
});
