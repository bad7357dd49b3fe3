/** Every gateway and every batcher is replaced under load, one after another, and no request fails. */
import assert from "node:assert/strict";
import { cp, readFile, symlink, writeFile } from "node:fs/promises";
import { join } from "node:path";
import { describe, test } from "node:test";
import { startServer } from "../engine/redis-client/servers.ts";
import { Fleet, fleetConfig, Part, patient } from "./fleet.ts";
import { type Config, Folder, ROOT, runFerry, writeConfig } from "./harness.ts";
import { Balancer, Stream } from "./steady-load.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

const PER_SECOND = 120;

async function stubs(stack: AsyncDisposableStack, count: number): Promise<StubWorker[]> {
  const workers: StubWorker[] = [];
  for (let i = 0; i < count; i++) {
    const worker = await StubWorker.listen((call) => void setTimeout(() => call.echo(), 20));
    workers.push(stack.use(worker));
  }
  return workers;
}

describe("a rolling restart", () => {
  test("of two gateways and two batchers under load: 0 failed", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers = await stubs(stack, 4);
    const model = stubModel(workers, { timeouts: patient, maxBatchSize: 16 });
    const config = fleetConfig({ url: redis.url }, [model], { limits: { drainMs: 50_000, lingerMs: 3000 } });
    const fleet = stack.use(await Fleet.start({ gateways: 2, batchers: 2 }, config));
    const balancer = stack.use(await Balancer.listen(() => fleet.doors.map(({ url }) => url)));
    await using load = new Stream({ port: balancer.port, perSecond: PER_SECOND });
    await load.more(PER_SECOND);
    for (const gateway of fleet.gateways.slice()) {
      assert.deepEqual(await gateway.stop(), { code: 0, signal: null });
      await fleet.add("gateway");
      await fleet.serves();
      await load.more(PER_SECOND / 2);
    }
    for (const batcher of fleet.batchers.slice()) {
      assert.deepEqual(await batcher.stop(), { code: 0, signal: null });
      await fleet.add("batcher");
      await fleet.serves();
      await load.more(PER_SECOND / 2);
    }
    await load.stop();
    assert.deepEqual(load.failed, [], load.told());
    assert.equal(load.answered + load.refusedFull, load.sent);
    assert.ok(workers.every(({ mostAtOnce }) => mostAtOnce === 1));
  });

  test("no process ends: SIGHUP brings them other workers and rules under load, 0 failed", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers = await stubs(stack, 4);
    const limits = { drainMs: 50_000 };
    const config = (some: readonly StubWorker[], more: object = {}, others: readonly object[] = []): Config =>
      fleetConfig(
        { url: redis.url },
        [stubModel(some, { timeouts: patient, maxBatchSize: 16, ...more }), ...others],
        {
          limits,
        },
      );
    const fleet = stack.use(await Fleet.start({ gateways: 2, batchers: 2 }, config(workers.slice(0, 2))));
    const balancer = stack.use(await Balancer.listen(() => fleet.doors.map(({ url }) => url)));
    const parts = [...fleet.batchers, ...fleet.gateways];
    const reload = async (next: Config, told: RegExp): Promise<void> => {
      for (const part of parts) assert.match(await part.reload(next), told);
    };
    await using load = new Stream({ port: balancer.port, perSecond: PER_SECOND, model: "stub" });
    await load.more(PER_SECOND / 2);
    await reload(config(workers), /backend\.workers \+http\S+ \+http/);
    await fleet.spread([2, 2]);
    await load.more(PER_SECOND / 2);
    assert.ok(
      workers.every(({ calls }) => calls.length > 0),
      "all four get batches",
    );
    await reload(
      config(workers.slice(2), { maxBatchSize: 8 }),
      /workers −http\S+ −http\S+; .*maxBatchSize 16 → 8/,
    );
    await fleet.spread([1, 1]);
    const before = workers.map(({ calls }) => calls.length);
    await load.more(PER_SECOND / 2);
    const after = workers.map(({ calls }) => calls.length);
    assert.deepEqual(after.slice(0, 2), before.slice(0, 2), "those that went get no more");
    const other = { name: "other", backend: { kind: "simulated", workers: 1, baseMs: 5 } };
    await reload(config(workers.slice(2), { maxBatchSize: 8 }, [other]), /models\[other\] added/);
    await fleet.serves();
    for (const door of fleet.doors) {
      const answer = await door.post({ input: "new", model: "other" });
      assert.equal(answer.status, 200, answer.text);
    }
    await load.stop();
    assert.deepEqual(load.failed, [], load.told());
    assert.ok(workers.every(({ mostAtOnce }) => mostAtOnce === 1));
  });
});

/** A checkout with another version, and with another data format where one is given. */
async function otherVersion(folder: Folder, version: string, format?: string): Promise<string> {
  const root = folder.path;
  await cp(join(ROOT, "src"), join(root, "src"), { recursive: true });
  await cp(join(ROOT, "bin"), join(root, "bin"), { recursive: true });
  await symlink(join(ROOT, "node_modules"), join(root, "node_modules"));
  const about = await readFile(join(ROOT, "package.json"), "utf8");
  await writeFile(join(root, "package.json"), about.replace(/"version": "[^"]+"/, `"version": "${version}"`));
  if (format === undefined) return root;
  const file = join(root, "src/engine/redis/format.ts");
  const text = await readFile(file, "utf8");
  const changed = text.replace(/const FORMAT = "\d+"/, `const FORMAT = "${format}"`);
  assert.notEqual(changed, text);
  await writeFile(file, changed);
  return root;
}

describe("a rolling upgrade", () => {
  test("to another version with the same data format under load: 0 failed", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const workers = await stubs(stack, 2);
    const root = await otherVersion(stack.use(await Folder.make()), "9.9.9");
    const model = stubModel(workers, { timeouts: patient, maxBatchSize: 16 });
    const config = fleetConfig({ url: redis.url }, [model], { limits: { drainMs: 50_000, lingerMs: 3000 } });
    const fleet = stack.use(await Fleet.start({ gateways: 1, batchers: 1 }, config));
    const balancer = stack.use(await Balancer.listen(() => fleet.doors.map(({ url }) => url)));
    await using load = new Stream({ port: balancer.port, perSecond: PER_SECOND });
    await load.more(PER_SECOND / 2);
    const [oldGateway, oldBatcher] = [fleet.gateways[0]!, fleet.batchers[0]!];
    const polled = await oldGateway.accept({ input: "accepted by the old version" });
    // Each pair of versions serves for a while: old and new side by side, new gateway before old batcher, new ones alone.
    const batcher = await fleet.add("batcher", {}, root);
    const gateway = await fleet.add("gateway", {}, root);
    for (const part of [batcher, gateway])
      assert.equal((await part.line(({ msg }) => msg === "ready"))["version"], "9.9.9");
    await fleet.serves();
    await load.more(PER_SECOND);
    assert.deepEqual(await oldGateway.stop(), { code: 0, signal: null });
    await load.more(PER_SECOND / 2);
    assert.deepEqual(await oldBatcher.stop(), { code: 0, signal: null });
    await load.more(PER_SECOND / 2);
    assert.deepEqual((await gateway.result(polled)).output, { of: "accepted by the old version" });
    await load.stop();
    assert.deepEqual(load.failed, [], load.told());
    assert.equal(load.answered + load.refusedFull, load.sent);
  });

  test("to a version with another data format is refused at the start, and the fleet goes on", async () => {
    await using stack = new AsyncDisposableStack();
    const redis = stack.use(await startServer());
    const [worker] = await stubs(stack, 1);
    const config = fleetConfig({ url: redis.url }, [stubModel([worker!], { timeouts: patient })]);
    const fleet = stack.use(await Fleet.start({ gateways: 1, batchers: 1 }, config));
    const root = await otherVersion(stack.use(await Folder.make()), "9.9.9", "3");
    const file = await writeConfig(stack.use(await Folder.make()), config);
    const [door] = fleet.doors;
    for (const role of ["gateway", "batcher", "all"]) {
      const { code, stderr } = await runFerry(["serve", "-c", file, "--role", role], { root });
      assert.equal(code, 1, stderr);
      assert.match(stderr, /redis holds data of format 2 under ferry:\{f0h\}:format, .* reads format 3/);
    }
    assert.equal((await door!.post({ input: "still served" })).status, 200);
    // Beside it, under another prefix, the new version starts.
    const other = fleetConfig({ url: redis.url, keyPrefix: "ferry3:" }, [
      { name: "m", backend: { kind: "simulated", workers: 1, baseMs: 1 } },
    ]);
    await using part = await Part.start("all", other, [], root);
    assert.equal((await part.post({ input: "of the new fleet" })).status, 200);
    assert.equal(await redis.ask("GET", "ferry3:{f0h}:format"), "3");
  });

  test("from format 1: refused with what to do", async () => {
    await using redis = await startServer();
    await redis.cli("SET", "ferry:{f0h}:format", "1");
    await using folder = await Folder.make();
    const models = [{ name: "m", backend: { kind: "simulated", workers: 1, baseMs: 1 } }];
    const file = await writeConfig(folder, fleetConfig({ url: redis.url }, models));
    const { code, stderr } = await runFerry(["serve", "-c", file]);
    assert.equal(code, 1, stderr);
    assert.match(
      stderr,
      /redis holds data of format 1 under ferry:\{f0h\}:format, and this version of Ferry reads format 2: start the version that wrote it, or set another engine\.keyPrefix/,
    );
    assert.equal(await redis.ask("GET", "ferry:{f0h}:format"), "1");
  });
});
