import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import type { Engine, EngineListener, RecordView } from "../../src/engine/engine.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Waiters } from "../../src/gateway/waiters.ts";

/** As much of an engine as waiters see. */
function stage() {
  const clock = new VirtualClock();
  const done = new Map<string, RecordView>();
  let listener: EngineListener = {};
  const engine = {
    watch(given: EngineListener) {
      listener = given;
      return () => (listener = {});
    },
    outcome: (id: string) => Promise.resolve(done.get(id)),
  } as unknown as Engine;
  const waiters = new Waiters(engine, clock);
  const settle = (id: string): void => {
    const record = {
      task: { id },
      state: "done",
      outcome: { ok: true, output: id },
    } as unknown as RecordView;
    done.set(id, record);
    listener.settled?.(record);
  };
  return { clock, waiters, settle, engine };
}

test("an outcome that comes between expect and wait is not missed", async () => {
  const { waiters, settle } = stage();
  const waiter = waiters.expect("a");
  settle("a");
  assert.equal((await waiters.wait(waiter, Infinity))?.task.id, "a");
});

test("everybody who waits for a task is woken, nobody else, and only once", async () => {
  const { waiters, settle, clock } = stage();
  const first = waiters.wait(waiters.expect("a"), Infinity);
  const second = waiters.wait(waiters.expect("a"), Infinity);
  const other = waiters.wait(waiters.expect("b"), clock.now() + 100);
  settle("a");
  settle("a");
  assert.equal((await first)?.task.id, "a");
  assert.equal((await second)?.task.id, "a");
  await clock.run(clock.now() + 101);
  assert.equal(await other, undefined);
  assert.equal(waiters.size, 0);
});

test("whoever joins another task hears of it, also when it ended before", async () => {
  const { waiters, settle } = stage();
  const early = waiters.expect("a");
  settle("leader");
  await waiters.follow(early, "leader");
  assert.equal((await waiters.wait(early, Infinity))?.task.id, "leader");
  const late = waiters.expect("b");
  await waiters.follow(late, "leader-2");
  settle("leader-2");
  assert.equal((await waiters.wait(late, Infinity))?.task.id, "leader-2");
  assert.equal(waiters.size, 0);
});

test("release says whether somebody else waits", () => {
  fc.assert(
    fc.property(
      fc.array(fc.nat(4), { minLength: 1, maxLength: 5 }),
      fc.infiniteStream(fc.nat(100)),
      (ids, picks) => {
        const { waiters } = stage();
        const left = ids.map((id) => waiters.expect(`task-${id}`));
        while (left.length > 0) {
          const [waiter] = left.splice(picks.next().value! % left.length, 1);
          const others = left.some(({ id }) => id === waiter!.id);
          assert.equal(waiters.release(waiter!), !others);
        }
        assert.equal(waiters.size, 0);
      },
    ),
  );
});

test("timeouts ring in order, whatever was settled before", async () => {
  const { waiters, settle, clock } = stage();
  const start = clock.now();
  const woken: string[] = [];
  const wait = (id: string, ms: number): void =>
    void waiters
      .wait(waiters.expect(id), start + ms)
      .then((record) => woken.push(`${id} ${record?.task.id ?? "late"}`));
  wait("c", 300);
  wait("a", 100);
  wait("b", 200);
  settle("b");
  await clock.run(start + 1000);
  assert.deepEqual(woken, ["b b", "a late", "c late"]);
});

test("close wakes everybody empty-handed", async () => {
  const { waiters } = stage();
  const waiting = waiters.wait(waiters.expect("a"), Infinity);
  waiters.close();
  assert.equal(await waiting, undefined);
});

test("a waiter that is called for between its outcome and the telling is told once", async () => {
  const { waiters, settle } = stage();
  const waiter = waiters.expect("a");
  settle("a");
  let told = 0;
  waiters.call(waiter, Infinity, () => told++);
  await new Promise(setImmediate);
  assert.equal(told, 1);
});
