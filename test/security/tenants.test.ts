/** Item 12 in the hardest place: two tenants with the same body in one and the same batch. */
import assert from "node:assert/strict";
import { after, before, test } from "node:test";
import { eventually, Ferry, Folder, runFerry, writeConfig } from "../e2e/harness.ts";
import { stubModel, StubWorker } from "../e2e/stub-worker.ts";

let folder: Folder;
let stub: StubWorker;
before(async () => {
  folder = await Folder.make();
  // Answers by lot, as a model that samples does.
  let drawn = 0;
  stub = await StubWorker.listen((call) => call.outputs(call.inputs.map(() => `word ${++drawn}`)));
});
after(async () => {
  await stub?.[Symbol.asyncDispose]();
  await folder?.[Symbol.asyncDispose]();
});

/** What "ann" and "bob" get who ask the same at the same time, while the one worker is busy. */
async function askTogether(scope: "tenant" | "shared"): Promise<unknown[]> {
  const { behave } = stub;
  const config = {
    models: [stubModel([stub], { cache: { scope } })],
    auth: { mode: "required", keysFile: "./keys.json" },
  };
  const file = await writeConfig(folder, config);
  const keys: string[] = [];
  for (const user of ["ann", "bob"]) {
    const { stdout } = await runFerry(["keys", "create", "--user", user, "--tier", "paid", "-c", file]);
    keys.push(stdout.trim());
  }
  await using ferry = await Ferry.start(config, folder);
  const ask = (at: number, input: string) => ferry.post({ input }, { "x-api-key": keys[at]! });
  const busy = Promise.withResolvers<void>();
  const calls = stub.calls.length;
  stub.behave = async (call) => {
    await busy.promise;
    await behave(call);
  };
  const first = ask(0, "first");
  await stub.call(calls + 1);
  const both = [ask(0, "a password, please"), ask(1, "a password, please")];
  await eventually(async () => (await ferry.health()).queue_depth === 2);
  busy.resolve();
  stub.behave = behave;
  const answers = await Promise.all([...both, first]);
  assert.equal(stub.calls.length, calls + 2, "both were in one batch");
  return answers.slice(0, 2).map(({ json }) => json.output);
}

test("12 the same body from two tenants in one batch: two inputs, and nobody has the other's answer", async () => {
  const [ann, bob] = await askTogether("tenant");
  assert.notEqual(ann, bob);
});

test("12 cache.scope: shared says that answers may be everybody's: one input", async () => {
  const [ann, bob] = await askTogether("shared");
  assert.equal(ann, bob);
});
