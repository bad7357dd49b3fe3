/** What a gateway and a core promise each other while connections, and either of them, come and go. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Refusal } from "../../src/core/errors.ts";
import type { Task } from "../../src/core/task.ts";
import type { RecordView } from "../../src/engine/engine.ts";
import { newId } from "../../src/engine/ids.ts";
import type { Link } from "../../src/engine/remote/channel.ts";
import { ANSWER_WITHIN_MS, HOLD_MS, type RemoteEngine } from "../../src/engine/remote/engine.ts";
import { done, LEASE_MS, MODEL, PLAIN, TOTAL_MS } from "../contract/engine-stage.ts";
import { type Cable, Machine } from "./remote-stage.ts";

function newTask({ clock }: Machine, more: Partial<Task> = {}): Task {
  const now = clock.now();
  const rest = { tenant: "ann", tier: 0, model: MODEL, input: '"in"', parameters: "", content: "" };
  return { id: newId(now), ...rest, createdAt: now, deadlineAt: now + TOTAL_MS, ...more };
}

async function settleAll({ core, clock }: Machine): Promise<number> {
  const batch = { id: "batch", reason: "full", worker: "gpu", startedAt: clock.now(), why: "why" } as const;
  const lease = await core!.claim({ model: MODEL, parameters: "", max: 64, leaseMs: LEASE_MS, batch });
  await core!.settle(
    lease,
    lease.tasks.map(({ task }) => done(task.id)),
  );
  return lease.tasks.length;
}

/** Every end that a gateway is told. */
function ends(remote: RemoteEngine): RecordView[] {
  const told: RecordView[] = [];
  remote.watch({ settled: (record) => void told.push(record) });
  return told;
}

/** Everything sent so far has been handled and answered. */
async function quiet(remote: RemoteEngine): Promise<void> {
  await remote.outcome("nobody");
}

const refusedWith =
  (pattern: RegExp) =>
  (error: unknown): boolean => {
    assert(error instanceof Refusal);
    assert.deepEqual([error.code, error.status, error.retryAfterMs], ["SERVICE_OVERLOADED", 503, 1000]);
    assert.match(error.message, pattern);
    return true;
  };

describe("a connection that is cut", () => {
  /** Bytes that a gateway and the core send until one put is answered. */
  async function bytesOfOnePut(): Promise<{ gateway: number; core: number }> {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    await remote.put(newTask(machine));
    const [{ gateway, core }] = machine.cables as [Cable];
    await remote.close();
    return { gateway: gateway.sent, core: core.sent };
  }

  for (const side of ["gateway", "core"] as const) {
    test(`after any byte of what the ${side} sent: the put is sent again and queued once`, async () => {
      const bytes = (await bytesOfOnePut())[side];
      assert.ok(bytes > 20);
      for (let cutAfter = 0; cutAfter < bytes; cutAfter++) {
        const machine = new Machine(PLAIN);
        machine.onCable = (cable) => {
          if (machine.cables.length === 1) cable[side].cutAfter = cutAfter;
        };
        const remote = machine.gateway();
        const told = ends(remote);
        const opened = remote.open();
        await machine.pass(100);
        await opened;
        const task = newTask(machine);
        const put = remote.put(task);
        await machine.pass(100);
        assert.deepEqual(await put, { kind: "queued", id: task.id });
        assert.equal(machine.core!.stats().queued, 1, `cut after ${cutAfter}`);
        assert.equal(await settleAll(machine), 1);
        await quiet(remote);
        assert.deepEqual(
          told.map(({ task: { id } }) => id),
          [task.id],
        );
        await remote.close();
      }
    });
  }

  test("the other verbs are asked again; who leaves is not counted twice", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    const task = newTask(machine);
    await remote.put(task);
    const [cable] = machine.cables as [Cable];
    cable.core.hold();
    const abandoned = remote.cancel(task.id, "ann", true);
    const [outcome, follow, spend] = [remote.outcome("x"), remote.follow("y", "ann"), remote.spend("k", 5)];
    const cancel = remote.cancel(newTask(machine).id, "ann");
    cable.cut();
    assert.equal(await abandoned, "kept");
    assert.deepEqual(await Promise.all([outcome, follow]), [undefined, undefined]);
    assert.equal((await spend).allowed, true);
    assert.equal(await cancel, "unknown");
    await remote.close();
  });

  test("what was told is dropped, and told again by whoever wants to when it is back, before the puts", async () => {
    const machine = new Machine(PLAIN);
    const order: string[] = [];
    machine.start(undefined, {
      told: (_, message) => void order.push(message),
      put: (task) => {
        order.push("put");
        return machine.core!.put(task);
      },
    });
    const remote = machine.gateway({ connected: () => remote.tell("hello") });
    await remote.open();
    remote.tell("one");
    await remote.put(newTask(machine));
    remote.tell("two");
    await quiet(remote);
    assert.deepEqual(order.splice(0), ["hello", "one", "put", "two"]);
    machine.cables[0]!.cut();
    remote.tell("lost");
    await remote.put(newTask(machine));
    assert.deepEqual(order, ["hello", "put"]);
    await remote.close();
  });
});

describe("a core that is away", () => {
  test("holds requests for a second, then they are refused, and new ones at once", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    machine.stop();
    assert.equal(remote.connected, false);
    const put = remote.put(newTask(machine));
    const outcome = remote.outcome("x");
    let refusals = 0;
    for (const each of [put, outcome]) each.catch(() => refusals++);
    await machine.pass(HOLD_MS - 1);
    assert.equal(refusals, 0);
    await machine.pass(2);
    await assert.rejects(put, refusedWith(/it is away.*nothing was accepted; send it again/));
    await assert.rejects(outcome, refusedWith(/ask again/));
    await assert.rejects(remote.put(newTask(machine)), refusedWith(/it is away/));
    assert.equal(await remote.cancel("x", "ann", true), "kept");
    machine.start(machine.core);
    await machine.pass(100);
    assert.equal(remote.connected, true);
    assert.equal((await remote.put(newTask(machine))).kind, "queued");
    await remote.close();
  });

  test("comes back with its tasks: what ended meanwhile is told, the rest when it ends", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    const told = ends(remote);
    const first = newTask(machine);
    await remote.put(first);
    machine.stop();
    assert.equal(await settleAll(machine), 1);
    const second = newTask(machine);
    const held = remote.put(second);
    await machine.pass(500);
    machine.start(machine.core);
    await machine.pass(100);
    assert.equal((await held).kind, "queued");
    assert.deepEqual(
      told.map(({ task, outcome }) => [task.id, outcome?.ok]),
      [[first.id, true]],
    );
    await settleAll(machine);
    await quiet(remote);
    assert.deepEqual(
      told.map(({ task }) => task.id),
      [first.id, second.id],
    );
    await remote.close();
  });

  test("comes back without them: their callers are told to send them again", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    const told = ends(remote);
    const [lost, held] = [newTask(machine), newTask(machine)];
    await remote.put(lost);
    const followed = await remote.follow(lost.id, "ann");
    assert.equal(followed?.state, "queued");
    machine.stop();
    const put = remote.put(held);
    machine.start();
    await machine.pass(100);
    assert.equal((await put).kind, "queued");
    await quiet(remote);
    assert.equal(told.length, 1);
    const { task, state, outcome } = told[0]!;
    assert.deepEqual([task.id, task.tenant, task.model, state], [lost.id, "ann", MODEL, "failed"]);
    assert(outcome?.ok === false);
    assert.equal(outcome.code, "SERVICE_OVERLOADED");
    assert.match(outcome.message, /send the request again/);
    assert.equal(machine.core!.stats().queued, 1);
    await remote.close();
  });

  test("and is not there in time for open", async () => {
    const machine = new Machine(PLAIN);
    machine.stop();
    const remote = machine.gateway();
    const opened = remote.open(3000);
    const failed = assert.rejects(
      opened,
      /core process cannot be reached \(nothing listens there\) within 3000 ms/,
    );
    await machine.pass(3001);
    await failed;
    await remote.close();
  });
});

describe("a core that hangs", () => {
  test("leaves requests unanswered: they are refused in time, later ones at once, until it is heard", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    const told = ends(remote);
    const accepted = newTask(machine);
    await remote.put(accepted);
    machine.cables[0]!.gateway.hold();
    const late = newTask(machine, { deadlineAt: machine.clock.now() + 2 * ANSWER_WITHIN_MS });
    const put = remote.put(late);
    const refused = assert.rejects(put, refusedWith(/does not answer.*safe to send it again/));
    await machine.pass(ANSWER_WITHIN_MS + 1);
    await refused;
    await assert.rejects(remote.put(newTask(machine)), refusedWith(/does not answer.*nothing was accepted/));
    // It goes on: the late reply, and the end of that task, concern nobody.
    machine.cables[0]!.gateway.release();
    await machine.pass(1);
    assert.equal((await remote.put(newTask(machine))).kind, "queued");
    await settleAll(machine);
    await quiet(remote);
    assert.equal(told.filter(({ task }) => task.id === accepted.id).length, 1);
    assert.equal(told.length, 2);
    await remote.close();
  });

  test("a put is not waited for beyond its task's deadline, and that says nothing of the core", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    machine.cables[0]!.gateway.hold();
    const other = remote.put(newTask(machine, { deadlineAt: machine.clock.now() + ANSWER_WITHIN_MS / 2 }));
    const put = remote.put(newTask(machine, { deadlineAt: machine.clock.now() + 100 }));
    const refused = assert.rejects(put, refusedWith(/does not answer.*safe to send it again/));
    await machine.pass(101);
    await refused;
    const outcome = remote.outcome("x");
    machine.cables[0]!.gateway.release();
    assert.equal((await other).kind, "queued");
    assert.equal(await outcome, undefined);
    await remote.close();
  });

  test("takes in only so many bytes", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    machine.cables[0]!.gateway.hold();
    const large = "x".repeat(32 << 20);
    for (let count = 0; count < 100; count++) remote.tell(large);
    await assert.rejects(remote.put(newTask(machine)), refusedWith(/more slowly than they come/));
    machine.cables[0]!.gateway.release();
    await machine.pass(20);
    assert.equal((await remote.put(newTask(machine))).kind, "queued");
    assert.ok(machine.told.length < 10);
    await remote.close();
  });

  test("does not keep a gateway from ending", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    machine.cables[0]!.gateway.end = () => {};
    const put = assert.rejects(remote.put(newTask(machine)), refusedWith(/this process is ending/));
    const closed = remote.close();
    await put;
    await machine.pass(1001);
    await closed;
  });
});

describe("several gateways", () => {
  test("are told of the tasks that they put or joined, once each", async () => {
    const machine = new Machine(PLAIN);
    const [one, two, third] = [await machine.opened(), await machine.opened(), await machine.opened()];
    assert.equal(machine.server!.gateways, 3);
    const told = [one, two, third].map(ends);
    const task = newTask(machine);
    const sharing = { joinKey: "same ann" };
    assert.equal((await one.put(task, sharing)).kind, "queued");
    for (let twice = 0; twice < 2; twice++) {
      assert.deepEqual(await two.put(newTask(machine), sharing), { kind: "joined", id: task.id });
    }
    await settleAll(machine);
    for (const each of [one, two, third]) await quiet(each);
    assert.deepEqual(
      told.map(({ length }) => length),
      [1, 1, 0],
    );
    for (const each of [one, two, third]) await each.close();
    await machine.server!.whenEmpty();
    assert.equal(machine.server!.gateways, 0);
  });

  test("one that dies takes nothing along: its tasks run, and who joined them is told", async () => {
    const machine = new Machine(PLAIN);
    const [dying, staying] = [await machine.opened({ connect: onlyOnce(machine) }), await machine.opened()];
    const told = ends(staying);
    const [shared, alone] = [newTask(machine), newTask(machine)];
    await dying.put(shared, { joinKey: "same ann" });
    await dying.put(alone);
    await staying.put(newTask(machine), { joinKey: "same ann" });
    machine.cables[0]!.cut();
    await machine.pass(100);
    assert.equal(machine.server!.gateways, 1);
    assert.equal(await settleAll(machine), 2);
    await quiet(staying);
    assert.deepEqual(
      told.map(({ task }) => task.id),
      [shared.id],
    );
    assert.equal((await staying.outcome(alone.id, "ann"))?.state, "done");
    for (const each of [dying, staying]) await each.close();
  });

  /** The process is gone: it never connects again. */
  function onlyOnce(machine: Machine): () => Link {
    let connected = false;
    return () => {
      if (connected) throw new Error("it is dead");
      connected = true;
      return machine.connect();
    };
  }

  test("hear the status first, and then each change once", async () => {
    const machine = new Machine(PLAIN);
    machine.status = "first";
    const remote = await machine.opened();
    assert.equal(remote.status, "first");
    const heard: string[] = [];
    remote.onStatus((status) => void heard.push(status));
    machine.server!.publish();
    machine.status = "second";
    for (let twice = 0; twice < 2; twice++) machine.server!.publish();
    await quiet(remote);
    assert.deepEqual(heard, ["second"]);
    await remote.close();
  });

  test("puts of one request arrive together", async () => {
    const machine = new Machine(PLAIN);
    const remote = await machine.opened();
    const arrivals: number[] = [];
    machine.core!.watch({ queued: (_, __, ___, count) => void arrivals.push(count) });
    const tasks = [newTask(machine), newTask(machine), newTask(machine)];
    await remote.together(() => Promise.all(tasks.map((task) => remote.put(task))));
    assert.deepEqual(arrivals, [3]);
    await remote.close();
  });
});

describe("what does not fit together", () => {
  test("another version: neither serves the other, and both say why", async () => {
    const machine = new Machine(PLAIN);
    const remote = machine.gateway({ version: "0.0.9" });
    await assert.rejects(remote.open(), /core process runs version 1\.2\.3, this process 0\.0\.9/);
    assert.match(
      machine.notices.join("\n"),
      /gateway process was ended: it runs version 0\.0\.9, this process 1\.2\.3/,
    );
    assert.equal(machine.server!.gateways, 0);
    await remote.close();
  });

  test("a verb that fails in the core: a refusal arrives as it is, a bug as a refusal and a notice", async () => {
    const machine = new Machine(PLAIN);
    const errors = [
      new Refusal("RATE_LIMITED", "not now", { retryAfterMs: 70 }),
      new TypeError("secret is undefined"),
    ];
    machine.start(undefined, {
      put: () => {
        throw errors.shift()!;
      },
    });
    const remote = await machine.opened();
    await assert.rejects(remote.put(newTask(machine)), {
      code: "RATE_LIMITED",
      message: "not now",
      retryAfterMs: 70,
    });
    await assert.rejects(remote.put(newTask(machine)), { code: "INTERNAL", message: /core process failed/ });
    assert.match(machine.notices.join("\n"), /secret is undefined/);
    await remote.close();
  });

  test("garbage: that connection ends with a notice, and the others do not notice", async () => {
    const machine = new Machine(PLAIN);
    const [remote, other] = [await machine.opened(), await machine.opened()];
    const put = remote.put(newTask(machine));
    machine.cables[0]!.core.receive(Buffer.from([0xff, 0xff, 0xff, 0xff, 1, 2, 3]));
    await machine.pass(100);
    assert.equal((await put).kind, "queued");
    assert.match(
      machine.notices.join("\n"),
      /gateway process was ended: a message has the length 4294967295/,
    );
    machine.cables.at(-1)!.gateway.receive(Buffer.from([2, 0, 0, 0, 77, 0]));
    await machine.pass(100);
    assert.equal(remote.connected, true);
    assert.match(
      machine.notices.join("\n"),
      /connection to the core process was lost: a message of kind 77 ends early/,
    );
    assert.equal((await other.put(newTask(machine))).kind, "queued");
    for (const each of [remote, other]) await each.close();
  });
});
