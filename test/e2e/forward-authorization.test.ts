/** With forwardAuthorization the client's credential reaches the worker, and nothing else. */
import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { join } from "node:path";
import { test } from "node:test";
import { Ferry, Folder } from "./harness.ts";
import { openModel, OpenWorker } from "./open-worker.ts";
import { StubWorker } from "./stub-worker.ts";

interface Asked {
  readonly input: readonly string[];
}

/** An embeddings server that says who asked: one number, the length of the credential. */
async function embedder(): Promise<OpenWorker> {
  return OpenWorker.listen(async ({ request, response, body }) => {
    const text = await body();
    const size = request.headers.authorization?.length ?? 0;
    if (request.url !== "/v1/embeddings") return void response.end(String(size));
    const { input } = JSON.parse(text) as Asked;
    const data = input.map((_, index) => ({ object: "embedding", index, embedding: [size] }));
    response.setHeader("content-type", "application/json");
    response.end(
      JSON.stringify({ object: "list", data, model: "m", usage: { prompt_tokens: 1, total_tokens: 1 } }),
    );
  });
}

test("batches carry the credential of their callers, and of no other; streams do too", async () => {
  await using worker = await embedder();
  const more = { backend: { forwardAuthorization: true }, maxWaitMs: 50 };
  await using ferry = await Ferry.start({ models: [openModel([`${worker.url}/v1/embeddings`], more)] });
  const secrets = ["Bearer a-secret", "Bearer another-secret", undefined];
  const answers = await Promise.all(
    Array.from({ length: 60 }, async (_, n) => {
      const authorization = secrets[n % 3];
      const headers: Record<string, string> = authorization === undefined ? {} : { authorization };
      const answer = await ferry.post({ input: `text ${n % 7}` }, headers, "/v1/embeddings");
      assert.equal(answer.status, 200, answer.text);
      const { data } = JSON.parse(answer.text) as { data: { embedding: number[] }[] };
      return [data[0]!.embedding[0], authorization?.length ?? 0];
    }),
  );
  for (const [got, own] of answers) assert.equal(got, own, "somebody else's credential was used");
  for (const { request } of worker.calls) assert.ok(secrets.includes(request.headers.authorization));
  const passed = await ferry.post("{}", { authorization: secrets[0]! }, "/v1/chat/completions");
  assert.equal(passed.text, String(secrets[0]!.length));
  assert.doesNotMatch(ferry.stderr(), /secret/);
});

test("it is not written to disk, not shown, cannot be named by others, and is forgotten at a restart", async () => {
  await using folder = await Folder.make();
  await using stub = await StubWorker.listen((call) => call.reply(500, "{}"));
  const model = {
    name: "stub",
    backend: { kind: "http", workers: [stub.url], forwardAuthorization: true },
    retry: { max: 0 },
  };
  const config = { models: [model], engine: { kind: "memory", dataDir: "./data" } };
  const authorization = "Bearer very-secret";
  let id = "";
  {
    await using ferry = await Ferry.start(config, folder);
    const failed = await ferry.post({ input: 1, parameters: { a: 1 } }, { authorization });
    assert.equal(failed.status, 502, failed.text);
    const [call] = stub.calls;
    assert.equal(call!.headers["authorization"], authorization);
    assert.deepEqual(call!.parameters, { a: 1 });
    id = failed.json.request_id!;
    const letter = (await ferry.admin(`/internal/dead-letters/${id}`)).text;
    assert.match(letter, /"a":1/);
    assert.doesNotMatch(letter + ferry.stderr(), /very-secret/);
    const forged = await ferry.post({ input: 1, parameters: { $auth: "x" } });
    assert.equal(forged.status, 400, forged.text);
    stub.behave = (call) => call.echo();
    const plain = await ferry.post({ input: 2 });
    assert.equal(plain.status, 200);
    assert.equal(stub.calls.at(-1)!.headers["authorization"], undefined);
  }
  for (const name of readdirSync(join(folder.path, "data"), { recursive: true, withFileTypes: true })) {
    if (!name.isFile()) continue;
    const bytes = readFileSync(join(name.parentPath, name.name));
    assert.ok(!bytes.includes("very-secret"), name.name);
  }
  const before = stub.calls.length;
  await using again = await Ferry.start(config, folder);
  const headers = { "content-type": "application/json" };
  assert.equal((await again.admin(`/internal/dead-letters/${id}/replay`, "POST", headers)).status, 202);
  const { error, message } = await again.result(id);
  assert.deepEqual([error, /credential is not known any more/.test(message!)], ["INPUT_REJECTED", true]);
  assert.equal(stub.calls.length, before, "nothing was sent without it");
});
