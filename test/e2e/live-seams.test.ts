/** One live change in the middle of another: workers that drain, go or come while a backend or a model is replaced. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { eventually, Ferry, reloadConfig } from "./harness.ts";
import { setTimeout as pause } from "node:timers/promises";
import { Random } from "../../src/core/random.ts";
import { Stream } from "./steady-load.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const timeouts = { queueMs: 20_000, workerMs: 20_000, totalMs: 40_000 };
const limits = { drainMs: 10_000, lingerMs: 0 };

type Model = ReturnType<typeof stubModel>;

const model = (stubs: readonly StubWorker[], more: Readonly<Record<string, unknown>> = {}): Model =>
  stubModel(stubs, { timeouts, maxBatchSize: 1, cache: { scope: "off" }, ...more });

/** The same with other settings of its backend, so that every worker is replaced. */
const replaced = (given: Model): Model => ({
  ...given,
  backend: { ...given.backend, authorization: "Bearer new" } as Model["backend"],
});

const reload = (ferry: Ferry, models: readonly object[]): Promise<void> =>
  reloadConfig(ferry, { limits, models });

interface Row {
  readonly name: string;
  readonly model: string;
  readonly state: string;
}

async function workers(ferry: Ferry): Promise<Row[]> {
  const { text } = await ferry.admin("/internal/workers");
  return (JSON.parse(text) as { workers: Row[] }).workers;
}

const nameOf = ({ url }: StubWorker): string => new URL(url).host;

describe("a backend that is replaced", () => {
  test("waits for the batch of a worker that an earlier reload removed", async () => {
    const gate = new Gate();
    await using slow = await StubWorker.listen(gate.hold);
    await using other = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [model([slow])], limits });
    const held = ferry.post({ input: "held" });
    await slow.call(1);
    await reload(ferry, [model([other])]);
    await reload(ferry, [replaced(model([other]))]);
    assert.equal((await ferry.post({ input: "next" })).status, 200);
    gate.open();
    assert.equal((await held).status, 200);
    assert.deepEqual(slow.inputs, ["held"]);
    assert.deepEqual(other.inputs, ["next"], "it was not cut off and run again");
  });

  test("gives a worker that comes back nothing before its last batch is over", async () => {
    const gate = new Gate();
    await using slow = await StubWorker.listen(gate.hold);
    await using other = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [model([slow])], limits });
    const all = [ferry.post({ input: 1 })];
    await slow.call(1);
    await reload(ferry, [model([other])]);
    await reload(ferry, [replaced(model([slow, other]))]);
    for (const input of [2, 3, 4]) all.push(ferry.post({ input }));
    await ferry.healthy(({ queue_depth }) => queue_depth === 2);
    await other.call(1);
    gate.open();
    for (const answer of await Promise.all(all)) assert.equal(answer.status, 200, answer.text);
    assert.deepEqual([slow.mostAtOnce, other.mostAtOnce], [1, 1]);
    assert.equal((await workers(ferry)).length, 2);
  });

  test("keeps those aside that were drained, from the first moment", async () => {
    const gate = new Gate();
    await using slow = await StubWorker.listen(gate.hold);
    await using aside = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [model([slow, aside])], limits });
    const drained = await ferry.admin(`/internal/workers/${nameOf(aside)}/drain`, "POST");
    assert.equal(drained.status, 200, drained.text);
    const all = [1, 2, 3].map((input) => ferry.post({ input }));
    await slow.call(1);
    await ferry.healthy(({ queue_depth }) => queue_depth === 2);
    await reload(ferry, [replaced(model([slow, aside]))]);
    gate.open();
    await Promise.all(all);
    assert.deepEqual(aside.inputs, []);
    const rows = await workers(ferry);
    assert.deepEqual(rows.map(({ state }) => state).sort(), ["draining", "idle"]);
  });
});

describe("a model that goes and comes back", () => {
  for (const [what, changed] of [
    ["as it was", (same: Model) => same],
    ["with another backend", replaced],
  ] as const) {
    test(`${what}, while it still has work, gives no worker two batches`, async () => {
      const gate = new Gate();
      await using slow = await StubWorker.listen(gate.hold);
      const other = { name: "b", backend: { kind: "simulated", workers: 1 } };
      await using ferry = await Ferry.start({ models: [model([slow]), other], limits });
      const ask = (input: number): ReturnType<Ferry["post"]> => ferry.post({ input, model: "stub" });
      const all = [ask(1)];
      await slow.call(1);
      all.push(ask(2));
      await ferry.healthy(({ queue_depth }) => queue_depth === 1);
      await reload(ferry, [other]);
      assert.equal((await ask(0)).status, 400);
      await reload(ferry, [changed(model([slow])), other]);
      for (const input of [3, 4]) {
        all.push(ask(input));
        await ferry.healthy(({ queue_depth }) => queue_depth === input - 1);
      }
      gate.open();
      for (const answer of await Promise.all(all)) assert.equal(answer.status, 200, answer.text);
      assert.equal(slow.mostAtOnce, 1);
      assert.deepEqual(slow.inputs, [1, 2, 3, 4]);
      await eventually(async () => (await workers(ferry)).length === 2);
      assert.equal((await ask(5)).status, 200);
    });
  }

  test("a new name for it gives no worker two batches", async () => {
    const gate = new Gate();
    await using slow = await StubWorker.listen(gate.hold);
    await using ferry = await Ferry.start({ models: [model([slow])], limits });
    const all = [1, 2].map((input) => ferry.post({ input }));
    await slow.call(1);
    await ferry.healthy(({ queue_depth }) => queue_depth === 1);
    await reload(ferry, [{ ...model([slow]), name: "renamed" }]);
    all.push(...[3, 4].map((input) => ferry.post({ input })));
    await ferry.healthy(({ queue_depth }) => queue_depth >= 2);
    gate.open();
    for (const answer of await Promise.all(all)) assert.equal(answer.status, 200, answer.text);
    assert.equal(slow.mostAtOnce, 1);
  });
});

describe("a number of workers", () => {
  test("that changes is how many there are then, whoever was removed or added before", async () => {
    const some = (workers: number): object => ({ name: "a", backend: { kind: "simulated", workers } });
    await using ferry = await Ferry.start({ models: [some(4)], limits });
    for (const { name } of (await workers(ferry)).slice(0, 2)) {
      assert.equal((await ferry.admin(`/internal/workers/${name}`, "DELETE")).status, 204);
    }
    await reload(ferry, [some(2)]);
    assert.equal((await workers(ferry)).length, 2);
    assert.equal(
      (await ferry.admin("/internal/workers", "POST", { "content-type": "application/json" })).status,
      201,
    );
    await reload(ferry, [some(5)]);
    await eventually(async () => (await workers(ferry)).length === 5);
  });
});

test("machines that move between three models, in 100 reloads under load: 0 failed, never two batches", async () => {
  await using stack = new AsyncDisposableStack();
  const random = new Random(1);
  const below = (most: number): number => Math.floor(random.next() * most);
  const stubs: StubWorker[] = [];
  for (let at = 0; at < 6; at++) {
    const wait = (): number => 5 + below(50);
    stubs.push(stack.use(await StubWorker.listen((call) => void setTimeout(() => call.echo(), wait()))));
  }
  const names = ["stub", "two", "three"];
  const share = (owners: readonly number[], secret: number): Model[] =>
    names.flatMap((name, at) => {
      const own = { ...model(stubs.filter((_, each) => owners[each] === at)), name, maxBatchSize: 8 };
      const backend = { ...own.backend, authorization: `Bearer ${at === 0 ? secret : 0}` };
      return own.backend.workers.length === 0 ? [] : [{ ...own, backend }];
    });
  await using ferry = await Ferry.start({ models: share([0, 1, 2, 2, 0, 1], 0), limits });
  const port = Number(new URL(ferry.url).port);
  const loads = ["stub", "two"].map((name) => stack.use(new Stream({ port, perSecond: 120, model: name })));
  let secret = 0;
  const others: ReturnType<Ferry["post"]>[] = [];
  for (let round = 0; round < 100; round++) {
    secret++;
    // 3: nobody's.
    const owners = [0, 1, below(4), below(4), below(4), below(4)];
    await reload(ferry, share(owners, secret));
    if (owners.includes(2)) {
      for (let each = 0; each < 6; each++)
        others.push(ferry.post({ input: `${round} ${each}`, model: "three" }));
    }
    await pause(below(40));
  }
  // Those that came when it had gone were told so.
  for (const { status, text } of await Promise.all(others)) assert.ok(status === 200 || status === 400, text);
  for (const load of loads) {
    await load.stop();
    assert.deepEqual(load.failed, [], load.told());
  }
  assert.deepEqual(
    stubs.map(({ mostAtOnce }) => mostAtOnce),
    [1, 1, 1, 1, 1, 1],
  );
});
