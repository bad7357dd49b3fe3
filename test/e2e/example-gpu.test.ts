/**
 * examples/gpu-embeddings does what its README says, with a tiny model on the CPU. PyTorch is not installed for this: a
 * gigabyte for one test. Where it is missing, the run says so, and checks what a user without it is told instead.
 * FERRY_TORCH_PYTHON names another interpreter that has it.
 */
import assert from "node:assert/strict";
import { spawnSync } from "node:child_process";
import { cp, readFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";
import OpenAI from "openai";
import { parse } from "yaml";
import { type Config, Ferry, Folder, ROOT } from "./harness.ts";

const python = process.env["FERRY_TORCH_PYTHON"] ?? "python3";
const hasTorch = spawnSync(python, ["-c", "import torch"]).status === 0;
const WIDTH = 64;

test("gpu-embeddings: vectors as bytes, base64 and numbers, one and the same", async (t) => {
  await using folder = await Folder.make();
  await cp(join(ROOT, "examples/gpu-embeddings"), folder.path, { recursive: true });
  const config = parse(await readFile(join(folder.path, "ferry.yaml"), "utf8")) as Config;
  const [model] = config["models"] as { backend: Record<string, unknown> }[];
  model!.backend["python"] = python;
  process.env["EMBED_SHAPE"] = "tiny";
  if (!hasTorch) {
    t.diagnostic(`${python} has no PyTorch: the example was not run, only what it says without`);
    await assert.rejects(Ferry.start(config, folder), /No module named 'torch'/);
    return;
  }
  await using ferry = await Ferry.start(config, folder);
  const client = new OpenAI({ baseURL: `${ferry.url}/v1`, apiKey: "any", maxRetries: 0 });
  const { data } = await client.embeddings.create({ model: "embed", input: ["a ferry", "a boat"] });
  const [vector] = data.map(({ embedding }) => embedding);
  assert.equal(vector!.length, WIDTH);
  assert.notDeepEqual(data[1]!.embedding, vector);
  const ask = (fields: object, headers: Record<string, string> = {}): Promise<Response> =>
    fetch(`${ferry.url}/v1/inference`, {
      method: "POST",
      headers: { "content-type": "application/json", ...headers },
      body: JSON.stringify({ model: "embed", input: "a ferry", ...fields }),
    });
  const { output } = (await (await ask({ encoding: "json" })).json()) as { output: number[] };
  assert.deepEqual([...Float32Array.from(output)], vector);
  const raw = await ask({}, { accept: "application/octet-stream" });
  assert.deepEqual([...new Float32Array(await raw.arrayBuffer())], vector);
  // Eight callers with texts of other lengths, one of them beyond all words: the others are answered.
  const asked = await Promise.all(
    Array.from({ length: 8 }, (_, at) => ask({ input: at === 3 ? [99_999] : "word ".repeat(3 ** at % 200) })),
  );
  assert.deepEqual(
    asked.map(({ status }) => status === 200),
    Array.from({ length: 8 }, (_, at) => at !== 3),
  );
  // Token ids by `inputs: int32`, of equal and of different lengths, are the same inputs.
  const [first, second] = [[101, 2054, 102], Array.from({ length: 16 }, (_, at) => 1000 + at)];
  const asJson = await client.embeddings.create({ model: "embed", input: [first, second] });
  model!.backend["inputs"] = "int32";
  await using arrays = await Ferry.start(config, folder);
  const other = new OpenAI({ baseURL: `${arrays.url}/v1`, apiKey: "any", maxRetries: 0 });
  const asArrays = await other.embeddings.create({ model: "embed", input: [first, second] });
  for (const [at, { embedding }] of asArrays.data.entries()) {
    embedding.forEach((value, place) =>
      assert.ok(Math.abs(value - asJson.data[at]!.embedding[place]!) < 1e-5),
    );
  }
  const alone = await other.embeddings.create({ model: "embed", input: second });
  alone.data[0]!.embedding.forEach((value, place) =>
    assert.ok(Math.abs(value - asJson.data[1]!.embedding[place]!) < 1e-5),
  );
});
