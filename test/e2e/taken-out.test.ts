/** What people did to workers by hand survives whatever else is changed by a reload. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { setTimeout as pause } from "node:timers/promises";
import { eventually, Ferry, Folder, runFerry, reloadConfig } from "./harness.ts";
import { Gate, stubModel, StubWorker } from "./stub-worker.ts";

const limits = { drainMs: 10_000, lingerMs: 0 };
const timeouts = { queueMs: 20_000, workerMs: 20_000, totalMs: 40_000 };

type Model = ReturnType<typeof stubModel>;

/** `secret`: another setting of the backend, so that every worker is replaced. */
function model(
  stubs: readonly StubWorker[],
  secret = 0,
  more: Readonly<Record<string, unknown>> = {},
): Model {
  const made = stubModel(stubs, { timeouts, maxBatchSize: 1, cache: { scope: "off" }, ...more });
  return { ...made, backend: { ...made.backend, authorization: `Bearer ${secret}` } as Model["backend"] };
}

const reload = (ferry: Ferry, models: readonly object[]): Promise<void> =>
  reloadConfig(ferry, { limits, models });

interface Row {
  readonly name: string;
  readonly model: string;
  readonly state: string;
}

async function seen(ferry: Ferry): Promise<{ workers: Row[]; removed: Row[] }> {
  return JSON.parse((await ferry.admin("/internal/workers")).text) as { workers: Row[]; removed: Row[] };
}

async function names(ferry: Ferry): Promise<{ here: string[]; removed: string[] }> {
  const { workers, removed } = await seen(ferry);
  const sorted = (rows: readonly Row[]): string[] => rows.map(({ name }) => name).sort();
  return { here: sorted(workers.filter(({ state }) => state !== "gone")), removed: sorted(removed) };
}

/** A worker that was replaced is listed until its predecessor is gone. */
async function settled(ferry: Ferry, here: readonly string[], removed: readonly string[]): Promise<void> {
  const wanted = JSON.stringify({ here: here.toSorted(), removed: removed.toSorted() });
  let last = "";
  try {
    await eventually(async () => (last = JSON.stringify(await names(ferry))) === wanted);
  } catch {
    assert.equal(last, wanted);
  }
}

const nameOf = ({ url }: StubWorker): string => new URL(url).host;

async function remove(ferry: Ferry, name: string): Promise<void> {
  const { status, text } = await ferry.admin(`/internal/workers/${encodeURIComponent(name)}`, "DELETE");
  assert.ok(status === 204 || status === 202, text);
}

describe("a worker that was removed by hand", () => {
  test("stays out of every backend that follows, until it is added again", async () => {
    await using bad = await StubWorker.listen();
    await using good = await StubWorker.listen();
    const both = [bad, good];
    await using ferry = await Ferry.start({ models: [model(both)], limits });
    const workers = (...words: string[]) =>
      runFerry(["workers", ...words, "-c", ferry.configFile, "--admin", ferry.adminUrl]);
    await remove(ferry, nameOf(bad));
    for (const secret of [1, 2]) {
      await reload(ferry, [model(both, secret)]);
      await settled(ferry, [nameOf(good)], [nameOf(bad)]);
      for (let at = 0; at < 4; at++) await ferry.infer(`${secret} ${at}`);
    }
    assert.deepEqual(bad.inputs, []);
    const listed = await workers("list");
    assert.match(listed.stdout, new RegExp(`${nameOf(bad)} +stub +removed .*ferry workers add ${bad.url}`));
    assert.match(listed.stderr, /1 worker and 1 removed\./);
    const resumed = await workers("resume", nameOf(bad));
    assert.equal(resumed.code, 1);
    assert.match(resumed.stderr, /was removed by hand; ferry workers add http\S+ takes it back/);
    const added = await workers("add", bad.url);
    assert.equal(added.code, 0, added.stderr);
    assert.doesNotMatch(added.stderr, /Until the next restart/, "the config lists it");
    await settled(ferry, both.map(nameOf), []);
    await reload(ferry, [model(both, 3)]);
    await settled(ferry, both.map(nameOf), []);
    await Promise.all([1, 2, 3, 4].map((input) => ferry.infer(input)));
    assert.ok(bad.calls.length > 0);
  });

  test("is forgotten when the config lists it no more, and comes when it lists it again", async () => {
    await using bad = await StubWorker.listen();
    await using good = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [model([bad, good])], limits });
    await remove(ferry, nameOf(bad));
    await reload(ferry, [model([good])]);
    await settled(ferry, [nameOf(good)], []);
    await reload(ferry, [model([bad, good])]);
    await settled(ferry, [bad, good].map(nameOf), []);
  });

  test("stays out while its last batch runs, and of its model under another name", async () => {
    const gate = new Gate();
    await using bad = await StubWorker.listen(gate.hold);
    await using good = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [model([bad])], limits });
    const held = ferry.post({ input: "held" });
    await bad.call(1);
    await remove(ferry, nameOf(bad));
    await reload(ferry, [model([bad, good], 1)]);
    for (let at = 0; at < 3; at++) await ferry.infer(at);
    await reload(ferry, [{ ...model([bad, good], 1), name: "renamed" }]);
    gate.open();
    assert.equal((await held).status, 200);
    for (let at = 0; at < 3; at++) await ferry.infer(at);
    assert.deepEqual(bad.inputs, ["held"]);
    const { removed } = await seen(ferry);
    assert.deepEqual(
      removed.map((row) => [row.model, row.name]),
      [["renamed", nameOf(bad)]],
    );
  });

  test("a drained one stays drained under another name of its model, and is resumed there", async () => {
    await using aside = await StubWorker.listen();
    await using good = await StubWorker.listen();
    await using ferry = await Ferry.start({ models: [model([aside, good])], limits });
    const order = async (what: string): Promise<void> => {
      const { status, text } = await ferry.admin(`/internal/workers/${nameOf(aside)}/${what}`, "POST");
      assert.equal(status, 200, text);
    };
    await order("drain");
    await reload(ferry, [{ ...model([aside, good], 1), name: "renamed" }]);
    await Promise.all([1, 2, 3, 4].map((input) => ferry.infer(input)));
    assert.deepEqual(aside.inputs, []);
    await order("resume");
    await Promise.all([1, 2, 3, 4].map((input) => ferry.infer(input)));
    assert.ok(aside.calls.length > 0);
  });

  test("is not taken into another model by the way; the config may move it", async () => {
    await using bad = await StubWorker.listen();
    await using good = await StubWorker.listen();
    await using third = await StubWorker.listen();
    const two = (stubs: readonly StubWorker[], secret: number): Model => ({
      ...model(stubs, secret),
      name: "two",
    });
    await using ferry = await Ferry.start({ models: [model([bad, good]), two([third], 0)], limits });
    await remove(ferry, nameOf(bad));
    await reload(ferry, [model([bad, good], 1), two([third], 1)]);
    await settled(ferry, [good, third].map(nameOf), [nameOf(bad)]);
    await reload(ferry, [model([good], 1), two([third, bad], 1)]);
    await settled(ferry, [good, third, bad].map(nameOf), []);
    await reload(ferry, [model([good], 1), two([third, bad], 2)]);
    await settled(ferry, [good, third, bad].map(nameOf), []);
  });
});

describe("while a reload is being prepared", () => {
  /** Its one worker takes a second to start, and the rest of the config waits for it. */
  async function slowModel(folder: Folder): Promise<object> {
    const source = "await new Promise((r) => setTimeout(r, 1500));\nexport default (inputs) => inputs;\n";
    return { name: "slow", backend: { kind: "module", function: await folder.write("slow.mjs", source) } };
  }

  test("one that is removed meanwhile stays out, one that is added again is in, and so with Ferry's own", async () => {
    await using folder = await Folder.make();
    await using first = await StubWorker.listen();
    await using second = await StubWorker.listen();
    await using third = await StubWorker.listen();
    const stubs = [first, second, third];
    const own = (baseMs: number): object => ({
      name: "own",
      backend: { kind: "simulated", workers: 2, baseMs },
    });
    await using ferry = await Ferry.start({ models: [model(stubs), own(5)], limits });
    await remove(ferry, nameOf(second));
    const done = reload(ferry, [model(stubs, 1), own(6), await slowModel(folder)]);
    await pause(500);
    await remove(ferry, nameOf(first));
    await remove(ferry, "gpu-1");
    const add = async (body: object): Promise<void> => {
      const answer = await fetch(`${ferry.adminUrl}/internal/workers`, {
        method: "POST",
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      assert.equal(answer.status, 201, await answer.text());
    };
    await add({ model: "stub", url: second.url });
    await done;
    const slow = "module-1";
    await settled(ferry, [nameOf(second), nameOf(third), "gpu-2", slow], [nameOf(first), "gpu-1"]);
    await Promise.all([1, 2, 3, 4].map((input) => ferry.infer(input, { model: "stub" })));
    assert.deepEqual(first.inputs, []);
    assert.ok(second.calls.length > 0);
  });
});

describe("workers that Ferry starts itself", () => {
  const some = (workers: number, baseMs: number, more: object = {}): object => ({
    name: "a",
    backend: { kind: "simulated", workers, baseMs },
    ...more,
  });
  const add = (ferry: Ferry) =>
    ferry.admin("/internal/workers", "POST", { "content-type": "application/json" });

  test("those removed stay away by their names, those added stay, and a new number is a new list", async () => {
    await using ferry = await Ferry.start({ models: [some(3, 5)], limits });
    await remove(ferry, "gpu-2");
    await reload(ferry, [some(3, 6)]);
    await settled(ferry, ["gpu-1", "gpu-3"], ["gpu-2"]);
    assert.equal((await add(ferry)).status, 201);
    await settled(ferry, ["gpu-1", "gpu-2", "gpu-3"], []);
    assert.equal((await add(ferry)).status, 201);
    await remove(ferry, "gpu-1");
    await reload(ferry, [some(3, 7)]);
    await settled(ferry, ["gpu-2", "gpu-3", "gpu-4"], ["gpu-1"]);
    await ferry.infer("x");
    await reload(ferry, [some(2, 7)]);
    await eventually(async () => (await names(ferry)).here.length === 2);
    assert.deepEqual((await names(ferry)).removed, []);
    await reload(ferry, [some(4, 8)]);
    await settled(ferry, ["gpu-1", "gpu-2", "gpu-3", "gpu-4"], []);
  });

  test("as many as the autoscaler has started are there after it, too", async () => {
    const scaling = { apply: true, min: 3, max: 3 };
    await using ferry = await Ferry.start({ models: [some(1, 5, { scaling })], limits });
    await ferry.healthy(({ healthy_workers }) => healthy_workers === 3);
    await reload(ferry, [some(1, 6, { scaling })]);
    const { workers } = await seen(ferry);
    assert.ok(workers.length >= 3, JSON.stringify(workers));
  });
});
