import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import type { Engine, EngineListener, RecordView } from "../../src/engine/engine.ts";
import { VirtualClock } from "../../src/cli/plan/virtual-clock.ts";
import { Router } from "../../src/gateway/router.ts";

/** As much of an engine as a router sees. */
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
  const router = new Router(engine, clock);
  const settle = (id: string): void => {
    const record = {
      task: { id },
      state: "done",
      outcome: { ok: true, output: id },
    } as unknown as RecordView;
    done.set(id, record);
    listener.settled?.(record);
  };
  return { clock, router, settle, engine };
}

test("an outcome that comes between expect and wait is not missed", async () => {
  const { router, settle } = stage();
  const waiter = router.expect("a");
  settle("a");
  assert.equal((await router.wait(waiter, Infinity))?.task.id, "a");
});

test("everybody who waits for a task is woken, nobody else, and only once", async () => {
  const { router, settle, clock } = stage();
  const first = router.wait(router.expect("a"), Infinity);
  const second = router.wait(router.expect("a"), Infinity);
  const other = router.wait(router.expect("b"), clock.now() + 100);
  settle("a");
  settle("a");
  assert.equal((await first)?.task.id, "a");
  assert.equal((await second)?.task.id, "a");
  await clock.run(clock.now() + 101);
  assert.equal(await other, undefined);
  assert.equal(router.waiting, 0);
});

test("whoever joins another task hears of it, also when it ended before", async () => {
  const { router, settle } = stage();
  const early = router.expect("a");
  settle("leader");
  await router.follow(early, "leader");
  assert.equal((await router.wait(early, Infinity))?.task.id, "leader");
  const late = router.expect("b");
  await router.follow(late, "leader-2");
  settle("leader-2");
  assert.equal((await router.wait(late, Infinity))?.task.id, "leader-2");
  assert.equal(router.waiting, 0);
});

test("release says whether somebody else waits", () => {
  fc.assert(
    fc.property(
      fc.array(fc.nat(4), { minLength: 1, maxLength: 5 }),
      fc.infiniteStream(fc.nat(100)),
      (ids, picks) => {
        const { router } = stage();
        const waiters = ids.map((id) => router.expect(`task-${id}`));
        while (waiters.length > 0) {
          const [waiter] = waiters.splice(picks.next().value! % waiters.length, 1);
          const others = waiters.some(({ id }) => id === waiter!.id);
          assert.equal(router.release(waiter!), !others);
        }
        assert.equal(router.waiting, 0);
      },
    ),
  );
});

test("timeouts ring in order, whatever was settled before", async () => {
  const { router, settle, clock } = stage();
  const start = clock.now();
  const woken: string[] = [];
  const wait = (id: string, ms: number): void =>
    void router
      .wait(router.expect(id), start + ms)
      .then((record) => woken.push(`${id} ${record?.task.id ?? "late"}`));
  wait("c", 300);
  wait("a", 100);
  wait("b", 200);
  settle("b");
  await clock.run(start + 1000);
  assert.deepEqual(woken, ["b b", "a late", "c late"]);
});

test("close wakes everybody empty-handed", async () => {
  const { router } = stage();
  const waiting = router.wait(router.expect("a"), Infinity);
  router.close();
  assert.equal(await waiting, undefined);
});
