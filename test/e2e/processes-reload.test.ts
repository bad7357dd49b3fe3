/** A reload of `ferry serve --processes`: all processes or none, and never two configs. */
import assert from "node:assert/strict";
import { after, before, describe, test } from "node:test";
import { patient } from "./fleet.ts";
import { engineConfig, KINDS, Several } from "./gateways.ts";
import { assertError, type Config, eventually, Folder } from "./harness.ts";
import { stubModel, StubWorker } from "./stub-worker.ts";

for (const kind of KINDS) {
  describe(`a reload, ${kind}`, () => {
    const stack = new AsyncDisposableStack();
    let stub: StubWorker;
    let ferry: Several;
    let base: Config;

    const simulated = (name: string): object => ({
      name,
      timeouts: patient,
      backend: { kind: "simulated", workers: 1, baseMs: 1 },
    });
    const config = (size: number, others: readonly string[] = [], more: Config = {}): Config => ({
      ...base,
      models: [
        stubModel([stub], { timeouts: patient, maxBatchSize: size }),
        ...others.map((name) => simulated(name)),
      ],
      ...more,
    });
    /** As the core has it. */
    const maxBatchSize = async (): Promise<number> => {
      const { text } = await ferry.part.admin("/internal/workers");
      return (JSON.parse(text) as { models: { max_batch_size: number }[] }).models[0]!.max_batch_size;
    };
    /** Whether each gateway knows these models. */
    const served = async (...models: readonly string[]): Promise<number[]> => {
      const asked = ferry
        .doors()
        .flatMap((door) => models.map((model) => door.post({ model, input: Math.random() })));
      return (await Promise.all(asked)).map(({ status }) => status);
    };

    /** At once; on Redis gateways hear of a new model's workers with the next beat. */
    const assertServed = async (models: readonly string[], statuses: readonly number[]): Promise<void> => {
      if (kind === "memory") assert.deepEqual(await served(...models), statuses);
      else await eventually(async () => String(await served(...models)) === String(statuses));
    };

    before(async () => {
      const folder = stack.use(await Folder.make());
      stub = stack.use(await StubWorker.listen());
      base = await engineConfig(kind, stack, folder, [], { admission: { mode: "off" } });
      ferry = stack.use(await Several.start(config(2), 2));
    });
    after(() => stack.disposeAsync());

    test("by SIGHUP and by the admin listener: a new model, a removed one and limits, at once and at all", async () => {
      const { part } = ferry;
      assert.match(await part.reload(config(2, ["a"])), /models\[a\] added/);
      await assertServed(["stub", "a"], [200, 200, 200, 200]);

      await part.rewrite({ ...config(2, ["a", "b"]), zone: "z" });
      const refused = await part.admin("/internal/reload", "POST");
      assert.equal(refused.status, 422);
      assert.match(refused.text, /zone .* needs a restart/);
      await assertServed(["a", "b"], [200, 400, 200, 400]);

      await part.rewrite(config(2, ["b"], { limits: { maxBodyBytes: 2000 } }));
      const done = await part.admin("/internal/reload", "POST");
      assert.equal(done.status, 200, done.text);
      const { changed } = JSON.parse(done.text) as { changed: string[] };
      assert.deepEqual(changed.slice(-2), ["models[a] removed", "models[b] added (simulated, 1 worker)"]);
      await assertServed(["a", "b"], [400, 200, 400, 200]);
      for (const door of ferry.doors())
        assertError(await door.post({ model: "b", input: "x".repeat(3000) }), 413, "PAYLOAD_TOO_LARGE");

      // Who comes later has the same.
      for (const name of ["core", "gateway-1"]) await ferry.restart(name);
      await eventually(async () => String(await served("a", "b")) === "400,200,400,200");
      assert.match(await part.reload(config(2)), /models\[b\] removed/);
      assert.deepEqual(await served("b"), [400, 400]);
    });

    test("one is stopped: nothing changes, the reason is told, and awake again it is as the others are", async () => {
      const { part } = ferry;
      assert.match(await part.reload(config(3)), /maxBatchSize 2 → 3/);
      const name = kind === "memory" ? "gateway-2" : "core";
      const stopped = ferry.pid(name);
      process.kill(stopped, "SIGSTOP");
      try {
        const why = await part.reload(config(4, ["late"]));
        assert.match(why, new RegExp(`nothing was changed: process ${name} did not answer for 5000 ms`));
        assert.ok(why.includes(`kill -9 ${stopped}`), why);
      } finally {
        process.kill(stopped, "SIGCONT");
      }
      await eventually(async () => String(await served("stub", "late")) === "200,400,200,400");
      assert.equal(await maxBatchSize(), 3);
      assert.match(await part.reload(config(6)), /maxBatchSize 3 → 6/);
      assert.equal(await maxBatchSize(), 6);
    });

    test("one that hangs is killed while it is waited for: its successor has the config of the others", async () => {
      const { part } = ferry;
      const name = kind === "memory" ? "core" : "gateway-1";
      const hung = ferry.pid(name);
      process.kill(hung, "SIGSTOP");
      const reload = part.reload(config(7, ["next"]));
      process.kill(hung, "SIGKILL");
      assert.match(await reload, /maxBatchSize 6 → 7/);
      await eventually(() => ferry.pid(name) !== hung);
      await eventually(async () => String(await served("stub", "next")) === "200,200,200,200");
      assert.equal(await maxBatchSize(), 7);
    });
  });
}
