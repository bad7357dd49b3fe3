/** What stands in `examples/` runs: each folder as it is, on ports of its own. */
import assert from "node:assert/strict";
import { execFile, spawn } from "node:child_process";
import { once } from "node:events";
import { cp, readFile } from "node:fs/promises";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { test } from "node:test";
import { promisify } from "node:util";
import OpenAI from "openai";
import { parse } from "yaml";
import { type Config, Ferry, Folder, ROOT } from "./harness.ts";

const run = promisify(execFile);

/** A copy of the example's folder, and Ferry with its config; `change` puts other ports into its text. */
async function serve(
  folder: Folder,
  name: string,
  change = (text: string): string => text,
): Promise<{ ferry: Ferry; client: OpenAI }> {
  await cp(join(ROOT, "examples", name), folder.path, { recursive: true });
  const config = parse(change(await readFile(join(folder.path, "ferry.yaml"), "utf8"))) as Config;
  const ferry = await Ferry.start(config, folder);
  return { ferry, client: new OpenAI({ baseURL: `${ferry.url}/v1`, apiKey: "any", maxRetries: 0 }) };
}

test("python-function: a function by Ferry's own API and by OpenAI's", async () => {
  await using folder = await Folder.make();
  const { ferry, client } = await serve(folder, "python-function");
  await using _ = ferry;
  const own = (await ferry.infer("a ferry", { model: "words" })) as number[];
  const { data } = await client.embeddings.create({ model: "words", input: ["a ferry", "a boat"] });
  assert.deepEqual(data[0]!.embedding, [...Float32Array.from(own)]);
  assert.notDeepEqual(data[1]!.embedding, data[0]!.embedding);
  const prompt = "ferries carry many";
  const { choices, usage } = await client.completions.create({ model: "backwards", prompt, max_tokens: 2 });
  assert.deepEqual(choices, [{ index: 0, text: " many carry", logprobs: null, finish_reason: "length" }]);
  assert.deepEqual(usage, { prompt_tokens: 3, completion_tokens: 2, total_tokens: 5 });
  await assert.rejects(
    client.completions.create({ model: "backwards", prompt, stream: true }),
    OpenAI.BadRequestError,
  );
});

test("openai-embeddings: a hundred clients share a few calls", async () => {
  await using folder = await Folder.make();
  const place = join(ROOT, "examples/openai-embeddings");
  const server = spawn("python3", [join(place, "server.py"), "0"], { stdio: ["ignore", "pipe", "inherit"] });
  try {
    const [line] = (await once(createInterface({ input: server.stdout }), "line")) as [string];
    const url = /http:\S+/.exec(line)![0];
    const { ferry, client } = await serve(folder, "openai-embeddings", (text) => {
      assert.match(text, /http:\/\/127\.0\.0\.1:8000/);
      return text.replace("http://127.0.0.1:8000", url);
    });
    await using _ = ferry;
    const direct = new OpenAI({ baseURL: `${url}/v1`, apiKey: "any", maxRetries: 0 });
    const ask = { model: "words", input: "a ferry", encoding_format: "float" } as const;
    assert.deepEqual(await client.embeddings.create(ask), await direct.embeddings.create(ask));
    const { stdout } = await run("python3", [join(place, "load.py"), ferry.url, "100"]);
    assert.match(stdout, /^100 clients, 100 embeddings, largest batch \d{2,}: /);
    const { totals } = await ferry.health();
    assert.ok(totals.calls < 50, `${totals.calls} calls for 101 requests`);
  } finally {
    const ended = once(server, "exit");
    server.kill();
    await ended;
  }
});
