/** The config is read again while Ferry runs: what changes does so at once, under load, and nothing else does. */
import assert from "node:assert/strict";
import { writeFile } from "node:fs/promises";
import { describe, test } from "node:test";
import { type Answer, assertError, type Config, Ferry, patientModels, runFerry } from "./harness.ts";
import { Stream } from "./steady-load.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

/** A Ferry whose config file can be written anew. */
async function start(config: Config): Promise<Ferry> {
  return Ferry.start({ ...config });
}

async function rewrite(ferry: Ferry, config: Config): Promise<void> {
  const limits = { drainMs: 1000, lingerMs: 0, ...(config["limits"] as object | undefined) };
  const models = patientModels(config["models"]);
  const whole = { listen: "127.0.0.1:0", admin: { listen: "127.0.0.1:0" }, ...config, ...models, limits };
  await writeFile(ferry.configFile, JSON.stringify(whole, null, 2));
}

async function reload(ferry: Ferry, config: Config): Promise<string[]> {
  await rewrite(ferry, config);
  const answer = await ferry.admin("/internal/reload", "POST");
  assert.equal(answer.status, 200, answer.text);
  return (JSON.parse(answer.text) as { changed: string[] }).changed;
}

async function refused(ferry: Ferry, config: Config): Promise<string[]> {
  await rewrite(ferry, config);
  return problemsOf(await ferry.admin("/internal/reload", "POST"));
}

function problemsOf(answer: Answer): string[] {
  assert.equal(answer.status, 422, answer.text);
  const { problems, ...rest } = JSON.parse(answer.text) as { problems: string[] };
  const text = JSON.stringify(rest);
  assert.match(assertError({ status: 422, text }, 422, "INVALID_REQUEST").message!, /nothing was changed/);
  return problems;
}

const simulated = (name: string, more: object = {}): object => ({
  name,
  backend: { kind: "simulated", workers: 1, baseMs: 5, perItemMs: 0 },
  ...more,
});

describe("models", () => {
  test("one comes and answers; one goes, and whoever asks for it is told which there are", async () => {
    await using ferry = await start({ models: [simulated("a")] });
    assert.equal((await ferry.post({ input: 1, model: "b" })).status, 400);
    const changed = await reload(ferry, { models: [simulated("a"), simulated("b")] });
    assert.deepEqual(changed, ["models[b] added (simulated, 1 worker)"]);
    await ferry.infer(1, { model: "b" });
    await ferry.infer(1, { model: "a" });
    const metrics = (await ferry.admin("/metrics")).text;
    assert.match(metrics, /ferry_arrivals_total\{[^}]*model="b"[^}]*\} 1/);
    assert.match(metrics, /ferry_arrivals_total\{[^}]*model="a"[^}]*\} 1/);

    assert.deepEqual(await reload(ferry, { models: [simulated("b")] }), ["models[a] removed"]);
    const gone = await ferry.post({ input: 1, model: "a" });
    assert.match(
      assertError(gone, 400, "INVALID_REQUEST").message!,
      /"a" is not served here; choose one of: b/,
    );
    await ferry.infer(1);
    const { models } = (await ferry.health()) as unknown as { models: { name: string }[] };
    assert.deepEqual(
      models.map(({ name }) => name),
      ["b"],
    );
  });

  test("what waits for a model that goes is served first; what is left after drainMs is refused", async () => {
    const held = Promise.withResolvers<void>();
    await using slow = await StubWorker.listen(async (call) => {
      await held.promise;
      call.echo();
    });
    const limits = { drainMs: 600 };
    const config = { models: [stubModel([slow], { maxBatchSize: 1 }), simulated("b")], limits };
    await using ferry = await start(config);
    const running = ferry.post({ input: "running", model: "stub" });
    await slow.call(1);
    const waiting = ferry.post({ input: "waiting", model: "stub" });
    await ferry.healthy(({ queue_depth }) => queue_depth === 1);
    await reload(ferry, { models: [simulated("b")], limits });
    assert.equal((await ferry.post({ input: 1, model: "stub" })).status, 400);
    const late = await waiting;
    held.resolve();
    assert.match(
      assertError(late, 404, "NOT_FOUND").message!,
      /"stub" was removed before this task had its turn/,
    );
    assert.equal((await running).status, 200, "what ran was waited for");
  });

  test("other rules hold for the next batches, and those in flight end by the old ones", async () => {
    await using stub = await StubWorker.listen();
    const model = (maxBatchSize: number): object =>
      stubModel([stub], { maxBatchSize, maxWaitMs: 50, policy: "fixed" });
    await using ferry = await start({ models: [model(8)] });
    const send = (round: string): Promise<unknown> =>
      Promise.all(Array.from({ length: 16 }, (_, i) => ferry.infer(`${round} ${i}`)));
    await send("before");
    assert.ok(stub.calls.some(({ inputs }) => inputs.length > 2));
    const before = stub.calls.length;
    assert.deepEqual(await reload(ferry, { models: [model(2)] }), ["models[stub].maxBatchSize 8 → 2"]);
    await send("after");
    const after = stub.calls.slice(before).map(({ inputs }) => inputs.length);
    assert.equal(Math.max(...after), 2);
  });

  test("another backend under the same name takes over at once", async () => {
    await using one = await StubWorker.listen();
    await using ferry = await start({ models: [stubModel([one])] });
    await ferry.infer("first");
    const other = { ...(stubModel([one]) as { name: string }), backend: undefined };
    const changed = await reload(ferry, { models: [{ ...simulated(other.name) }] });
    assert.ok(changed.includes("models[stub].backend http → simulated"), String(changed));
    await ferry.infer("second");
    assert.deepEqual(one.inputs, ["first"]);
  });
});

describe("under load", () => {
  test("workers come and go, rules change, a backend is replaced: 0 failed", async () => {
    await using stack = new AsyncDisposableStack();
    const workers: StubWorker[] = [];
    for (let i = 0; i < 4; i++) {
      workers.push(stack.use(await StubWorker.listen((call) => void setTimeout(() => call.echo(), 10))));
    }
    const timeouts = { queueMs: 20_000, workerMs: 10_000, totalMs: 30_000 };
    const model = (some: readonly StubWorker[], more: object = {}): object =>
      stubModel(some, { timeouts, maxBatchSize: 16, ...more });
    const config = (models: readonly object[]): Config => ({ models, limits: { drainMs: 10_000 } });
    await using ferry = await start(config([model(workers.slice(0, 2))]));
    await using load = new Stream({ port: Number(new URL(ferry.url).port), perSecond: 300, model: "stub" });
    await load.more(100);
    await reload(ferry, config([model(workers)]));
    await load.more(200);
    const allBusy = (): boolean => workers.every(({ calls }) => calls.length > 0);
    // On a machine that stands still for moments two workers can do all of the work for a while.
    for (let round = 0; round < 30 && !allBusy(); round++) await load.more(100);
    assert.ok(allBusy(), "those that came get batches");
    const changed = await reload(ferry, config([model(workers.slice(2))]));
    assert.match(String(changed), /^models\[stub\]\.backend\.workers −http\S+ −http/);
    const before = workers.map(({ calls }) => calls.length);
    await load.more(200);
    const after = workers.map(({ calls }) => calls.length);
    assert.ok(
      after[0]! - before[0]! <= 1 && after[1]! - before[1]! <= 1,
      "those that went end what they had",
    );
    await reload(ferry, config([model(workers.slice(2), { maxBatchSize: 4, health: { askMs: 4000 } })]));
    await load.more(100);
    await reload(ferry, config([model(workers.slice(2)), simulated("b")]));
    const backend = { authorization: "Bearer of-workers" };
    const own = model(workers.slice(2)) as { backend: object };
    await reload(ferry, config([{ ...own, backend: { ...own.backend, ...backend } }]));
    await load.more(100);
    process.kill(ferry.pid, "SIGHUP");
    await ferry.line(({ msg }) => msg === "the config was read again: nothing in it changed");
    await load.more(100);
    await load.stop();
    assert.deepEqual(load.failed, [], load.told());
    assert.ok(
      workers.every(({ mostAtOnce }) => mostAtOnce === 1),
      "never two batches at once",
    );
    assert.equal(workers[3]!.calls.at(-1)!.headers.authorization, "Bearer of-workers");
    assert.doesNotMatch(ferry.stderr(), /of-workers/);
  });
});

describe("numbers", () => {
  test("of simulated workers grow and shrink", async () => {
    const config = (workers: number): Config => ({
      models: [{ name: "a", backend: { kind: "simulated", workers, baseMs: 5 } }],
    });
    await using ferry = await start(config(1));
    assert.deepEqual(await reload(ferry, config(3)), ["models[a].backend.workers 1 → 3"]);
    await ferry.healthy(({ healthy_workers }) => healthy_workers === 3);
    await reload(ferry, config(2));
    await ferry.healthy(({ healthy_workers }) => healthy_workers === 2);
    await ferry.infer("x");
  });
});

describe("limits", () => {
  test("bodies, rates, the log level", async () => {
    const models = [simulated("a")];
    await using ferry = await start({ models });
    await ferry.infer("x".repeat(5000));
    const limits = { maxBodyBytes: 1024, perUserPerMinute: 2 };
    const changed = await reload(ferry, { models, limits, telemetry: { logLevel: "debug" } });
    assert.equal(changed.length, 3, String(changed));
    assertError(await ferry.post({ input: "x".repeat(5000) }), 413, "PAYLOAD_TOO_LARGE");
    await ferry.line(({ msg }) => msg === "request answered");
    const statuses = [];
    for (let i = 0; i < 3; i++) statuses.push((await ferry.post({ input: i })).status);
    assert.equal(statuses.at(-1), 429, String(statuses));
    await reload(ferry, { models });
    await ferry.infer("x".repeat(5000));
  });
});

describe("what cannot be used changes nothing, and says why", () => {
  test("a file with mistakes: all of them; without it; with what needs a restart", async () => {
    const models = [simulated("a", { maxBatchSize: 7 })];
    await using ferry = await start({ models });
    const secret = "hush-hush-hush-hush-hush-hush-hush-hush";
    const problems = await refused(ferry, {
      models: [simulated("a", { maxBatchSize: -1 })],
      limitz: {},
      admin: { listen: "127.0.0.1:0", token: secret },
    });
    assert.equal(problems.length, 2, String(problems));
    assert.match(problems.join("\n"), /ferry\.yaml:\d+:\d+ .*limitz[^]*maxBatchSize|maxBatchSize[^]*limitz/);
    const restart = await refused(ferry, {
      models: [simulated("a", { maxBatchSize: 3 })],
      listen: "127.0.0.1:1",
      admin: { listen: "127.0.0.1:0", token: secret },
    });
    assert.match(String(restart), /listen\.port 0 → 1: needs a restart/);
    assert.match(String(restart), /admin\.token changed: needs a restart/);
    await writeFile(ferry.configFile, "models: [");
    process.kill(ferry.pid, "SIGHUP");
    await ferry.line(({ msg }) => /nothing was changed: .*a bracket is not closed/.test(msg ?? ""));
    await rewrite(ferry, { models: [simulated("a", { maxBatchSize: 5 })] });
    await ferry.infer("still here");
    assert.deepEqual(await reload(ferry, { models: [simulated("a", { maxBatchSize: 6 })] }), [
      "models[a].maxBatchSize 7 → 6",
    ]);
    assert.doesNotMatch(ferry.stderr() + problems + restart, new RegExp(secret));
  });

  test("a worker that cannot be started: the other changes are not made either", async () => {
    await using ferry = await start({ models: [simulated("a", { maxBatchSize: 7 })] });
    const [why] = await refused(ferry, {
      models: [
        simulated("a", { maxBatchSize: 3 }),
        { name: "p", backend: { kind: "module", function: new URL(import.meta.url).pathname + ":nothing" } },
      ],
    });
    assert.match(why!, /nothing/);
    assertError(await ferry.post({ input: 1, model: "p" }), 400, "INVALID_REQUEST");
    assert.deepEqual(await reload(ferry, { models: [simulated("a", { maxBatchSize: 3 })] }), [
      "models[a].maxBatchSize 7 → 3",
    ]);
  });
});

describe("ferry reload", () => {
  test("prints what changed, or what is wrong", async () => {
    await using ferry = await start({ models: [simulated("a")] });
    await rewrite(ferry, { models: [simulated("a"), simulated("b")] });
    const words = ["reload", "-c", ferry.configFile, "--admin", ferry.adminUrl];
    const done = await runFerry(words);
    assert.equal(done.code, 0, done.stderr);
    assert.match(done.stdout, /^models\[b\] added \(simulated, 1 worker\)\n$/);
    const again = await runFerry([...words, "--json"]);
    assert.deepEqual(JSON.parse(again.stdout), { changed: [] });
    await rewrite(ferry, { models: [simulated("a")], listen: "127.0.0.1:1" });
    const not = await runFerry(words);
    assert.equal(not.code, 1);
    assert.match(not.stderr, /listen\.port 0 → 1: needs a restart[^]*1 problem, nothing was changed/);
  });
});
