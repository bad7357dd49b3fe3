/** Outputs that are bytes, from Python and JavaScript functions to every client in the form that it asked for. */
import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { after, before, describe, test } from "node:test";
import fc from "fast-check";
import OpenAI from "openai";
import { request } from "undici";
import { type Dtype, DTYPES, elementBytes, numbersText } from "../../src/core/tensor.ts";
import { assertError, eventually, Ferry, Folder } from "./harness.ts";

const PYTHON = `
import hashlib, json

class Array:
    def __init__(self, data, typestr, shape):
        self.__array_interface__ = {"version": 3, "data": data, "typestr": typestr, "shape": tuple(shape)}

def stream(seed, length):
    data = b""
    while len(data) < length:
        data += hashlib.sha256(("%s %d" % (seed, len(data))).encode()).digest()
    return data[:length]

def one(wish):
    if not isinstance(wish, dict):
        return wish
    if "echo" in wish:
        return wish["echo"]
    length = wish["length"]
    if wish["dtype"] == "bytes":
        return stream(wish["seed"], length)
    size = wish["size"]
    return Array(stream(wish["seed"], length), "<%s%d" % (wish["dtype"][0], size), wish["shape"])

def anything(inputs):
    return [one(wish) for wish in inputs]

def embed(inputs, parameters=None):
    texts = [text if isinstance(text, str) else json.dumps(text) for text in inputs]
    data = b"".join(bytes([byte & 0x3F if at % 4 == 3 else byte for at, byte in enumerate(stream(text, 32))]) for text in texts)
    return lambda: Array(data, "<f4", (len(inputs), 8))
`;

const MODULE = `
export default function (inputs) {
  return inputs.map((text) => (text === "bytes" ? Buffer.from("abc") : Float32Array.of(text.length, 0.1)));
}
`;

/** The same bytes as Python's \`stream\`. */
function stream(seed: string, length: number): Buffer {
  const blocks: Buffer[] = [];
  for (let bytes = 0; bytes < length; bytes += 32) {
    blocks.push(createHash("sha256").update(`${seed} ${bytes}`).digest());
  }
  return Buffer.concat(blocks).subarray(0, length);
}

/** The embedding of a text, as bytes and as numbers: all of them finite. */
function vector(text: string): Buffer {
  return Buffer.from(stream(text, 32).map((byte, at) => (at % 4 === 3 ? byte & 0x3f : byte)));
}

function numbers(bytes: Buffer): number[] {
  return Array.from({ length: bytes.length / 4 }, (_, at) => bytes.readFloatLE(4 * at));
}

interface Wish {
  readonly dtype: Dtype | "bytes";
  readonly shape: readonly number[];
  readonly seed: string;
  readonly length: number;
  readonly size: number;
}

interface Asked {
  readonly dtype: Dtype | "bytes";
  readonly shape: readonly number[];
  readonly seed: number;
  readonly encoding: string;
}

describe("outputs that are bytes", () => {
  let folder: Folder;
  let ferry: Ferry;

  before(async () => {
    folder = await Folder.make();
    await folder.write("model.py", PYTHON);
    await folder.write("model.mjs", MODULE);
    const python = (name: string) => ({ kind: "python", function: `model.py:${name}`, workers: 2 });
    const timeouts = { queueMs: 20_000, workerMs: 20_000, totalMs: 30_000 };
    ferry = await Ferry.start(
      {
        models: [
          { name: "any", backend: python("anything"), timeouts, maxBatchSize: 16 },
          {
            name: "embed",
            backend: python("embed"),
            timeouts,
            protocols: ["openai-embeddings", "tei", "ollama", "cohere", "kserve-v1", "oip-v2"],
          },
          { name: "js", backend: { kind: "module", function: "model.mjs", workers: 1 }, timeouts },
        ],
        results: { evictAfterRead: false },
        limits: { perUserPerMinute: 1_000_000 },
      },
      folder,
    );
  });
  after(async () => {
    await ferry?.[Symbol.asyncDispose]();
    await folder?.[Symbol.asyncDispose]();
  });

  /** Raw: the harness reads answers as text. */
  async function call(path: string, body: unknown, headers: Record<string, string> = {}) {
    const answer = await request(`${ferry.url}${path}`, {
      method: body === undefined ? "GET" : "POST",
      headers: { "content-type": "application/json", ...headers },
      ...(body !== undefined && { body: JSON.stringify(body) }),
    });
    const bytes = Buffer.from(await answer.body.arrayBuffer());
    const json = () => JSON.parse(bytes.toString()) as Record<string, unknown>;
    return { status: answer.statusCode, headers: answer.headers, bytes, text: bytes.toString(), json };
  }

  const wish = (dtype: Dtype | "bytes", shape: readonly number[], seed: string): Wish => {
    const size = dtype === "bytes" ? 1 : elementBytes(dtype);
    return { dtype, shape, seed, size, length: shape.reduce((product, each) => product * each, size) };
  };

  test("base64 by default, numbers where they are asked for, nothing but bytes where those are", async () => {
    const input = "one text";
    const base64 = vector(input).toString("base64");
    const shown = { output: base64, encoding: "base64", dtype: "float32", shape: [8] };
    const plain = await call("/v1/inference", { model: "embed", input });
    const { output, encoding, dtype, shape, task_id: id } = plain.json();
    assert.deepEqual({ output, encoding, dtype, shape }, shown);
    const json = (await call("/v1/inference", { model: "embed", input, encoding: "json" })).json();
    assert.deepEqual((json["output"] as number[]).map(Math.fround), numbers(vector(input)));
    assert.equal(json["encoding"], undefined);
    assert.equal(
      (json["metadata"] as { cached: boolean }).cached,
      true,
      "the encoding is no part of the content",
    );
    const accept = { accept: "application/octet-stream" };
    const raw = await call("/v1/inference", { model: "embed", input }, accept);
    assert.deepEqual([raw.status, raw.headers["content-type"]], [200, "application/octet-stream"]);
    assert.deepEqual([raw.headers["x-ferry-dtype"], raw.headers["x-ferry-shape"]], ["float32", "8"]);
    assert.ok(raw.headers["x-ferry-batch-id"] !== undefined && raw.headers["x-request-id"] !== undefined);
    assert.deepEqual(raw.bytes, vector(input));
    for (const [query, headers, wanted] of [
      ["", {}, base64],
      ["?encoding=json", {}, json["output"]],
    ] as const) {
      const polled = (await call(`/v1/result/${String(id)}${query}`, undefined, headers)).json();
      assert.deepEqual(polled["output"], wanted);
    }
    const polled = await call(`/v1/result/${String(id)}`, undefined, accept);
    assert.deepEqual(polled.bytes, vector(input));
    assertError(await call(`/v1/result/${String(id)}?encoding=hex`, undefined), 400, "INVALID_REQUEST");
    assertError(
      await call("/v1/inference", { model: "embed", input, encoding: "hex" }),
      400,
      "INVALID_REQUEST",
    );
  });

  test("who takes nothing but bytes is told when there are none, and finds the result", async () => {
    const accept = { accept: "application/octet-stream" };
    const answer = await call("/v1/inference", { model: "any", input: "text" }, accept);
    const { message, request_id: id } = assertError(answer, 406, "NOT_ACCEPTABLE");
    assert.match(String(message), /the output is JSON/);
    assert.equal((await call(`/v1/result/${String(id)}`, undefined)).json()["output"], "text");
    const either = { accept: "application/octet-stream, application/json;q=0.5" };
    const json = await call("/v1/inference", { model: "any", input: "text" }, either);
    assert.equal(json.json()["output"], "text");
    const bytes = await call("/v1/inference", { model: "any", input: wish("bytes", [5], "b") }, either);
    assert.deepEqual([bytes.bytes, bytes.headers["x-ferry-dtype"]], [stream("b", 5), undefined]);
    const asJson = { model: "any", input: wish("bytes", [5], "b"), encoding: "json" };
    const stays = (await call("/v1/inference", asJson)).json();
    assert.deepEqual([stays["output"], stays["encoding"]], [stream("b", 5).toString("base64"), "base64"]);
  });

  test("an input that comes back as what no tensor is costs its sender an answer, and nobody the model", async () => {
    for (let count = 0; count < 12; count++) {
      const answer = await ferry.post({
        model: "any",
        input: { echo: { $bytes: "A".repeat(4 * count + 1) } },
      });
      assertError(answer, 422, "INPUT_REJECTED");
    }
    const empty = { $tensor: "float32", shape: [60_000, 60_000, 0], base64: "" };
    const { json } = await ferry.post({ model: "any", input: { echo: empty }, encoding: "json" });
    assert.deepEqual(json.output, []);
  });

  test("whatever mixture of types, shapes and encodings is asked for, each client gets its own bytes", async () => {
    const wishes = fc.record({
      dtype: fc.constantFrom<Dtype | "bytes">(...DTYPES, "bytes"),
      shape: fc.array(fc.integer({ min: 0, max: 6 }), { minLength: 1, maxLength: 3 }),
      seed: fc.integer({ min: 0, max: 1e9 }),
      encoding: fc.constantFrom("base64", "json", "bytes"),
    });
    const ask = async ({ dtype, shape, seed, encoding }: Asked): Promise<void> => {
      const input = wish(dtype, shape, String(seed));
      const bytes = stream(input.seed, input.length);
      const headers: Record<string, string> =
        encoding === "bytes" ? { accept: "application/octet-stream" } : {};
      const body = { model: "any", input, ...(encoding === "json" && { encoding }) };
      const answer = await call("/v1/inference", body, headers);
      assert.equal(answer.status, 200, answer.text);
      if (encoding === "bytes") return assert.deepEqual(answer.bytes, bytes);
      const { output } = answer.json();
      const base64 = bytes.toString("base64");
      if (encoding === "base64" || dtype === "bytes") return assert.equal(output, base64);
      assert.deepEqual(output, JSON.parse(numbersText({ dtype, shape, base64 })));
    };
    await fc.assert(
      fc.asyncProperty(fc.array(wishes, { minLength: 1, maxLength: 48 }), async (all) => {
        await Promise.all(all.map(ask));
      }),
      { numRuns: 25 },
    );
  });

  test("so large that they are written in pieces: the same numbers, in every protocol, many at once", async () => {
    const shape = [100, 1000];
    const input = wish("int32", shape, "large");
    const base64 = stream(input.seed, input.length).toString("base64");
    const text = numbersText({ dtype: "int32", shape, base64 });
    const asked = Array.from({ length: 6 }, () =>
      call("/v1/inference", { model: "any", input, encoding: "json" }),
    );
    for (const answer of await Promise.all(asked)) {
      assert.equal(answer.status, 200);
      assert.equal(Number(answer.headers["content-length"]), answer.bytes.length);
      assert.ok(answer.text.includes(`"status":"SUCCESS","output":${text},"metadata":{"model":"any",`));
      const kept = await call(`/v1/result/${String(answer.json()["task_id"])}?encoding=json`, undefined);
      assert.ok(kept.text.includes(`"output":${text},"metadata":`));
    }
    const inputs = Array.from({ length: 1500 }, (_, at) => `text ${at}`);
    const vectors = inputs.map((each) => numbers(vector(each)));
    const exact = (rows: unknown): number[][] => (rows as number[][]).map((row) => row.map(Math.fround));
    const tei = await call("/models/embed/embed", { inputs });
    assert.equal(tei.status, 200, tei.text.slice(0, 200));
    assert.deepEqual(exact(tei.json()), vectors);
    const openai = (await call("/models/embed/v1/embeddings", { input: inputs, model: "embed" })).json();
    assert.deepEqual(
      exact((openai["data"] as { embedding: number[] }[]).map(({ embedding }) => embedding)),
      vectors,
    );
    const kserve = await call("/models/embed/v1/models/embed:predict", { instances: inputs });
    assert.deepEqual(exact(kserve.json()["predictions"]), vectors);
  });

  test("typed arrays and Buffers of a JavaScript function, and the minimal contract", async () => {
    await using alone = await Ferry.start(
      { models: [{ name: "js", backend: { kind: "module", function: "model.mjs", workers: 1 } }] },
      folder,
    );
    const ask = async (body: object, accept = "*/*"): Promise<Buffer> => {
      const headers = { "content-type": "application/json", accept };
      const answer = await request(`${alone.url}/api/inference`, {
        method: "POST",
        headers,
        body: JSON.stringify(body),
      });
      return Buffer.from(await answer.body.arrayBuffer());
    };
    const minimal = String(await ask({ input: "four" }));
    assert.match(
      minimal,
      /^\{"output":"AACAQM3MzD0=","encoding":"base64","dtype":"float32","shape":\[2\],"request_id"/,
    );
    assert.match(
      String(await ask({ input: "four", encoding: "json" })),
      /^\{"output":\[4,0\.1\],"request_id"/,
    );
    assert.equal(String(await ask({ input: "bytes" }, "application/octet-stream")), "abc");
    const tensor = (await call("/v1/inference", { model: "js", input: "four" })).json();
    const bytes = Buffer.from(Float32Array.of(4, 0.1).buffer).toString("base64");
    assert.deepEqual([tensor["output"], tensor["dtype"], tensor["shape"]], [bytes, "float32", [2]]);
    const asJson = (await call("/v1/inference", { model: "js", input: "four", encoding: "json" })).text;
    assert.match(asJson, /"output":\[4,0\.1\],/);
    const raw = await call(
      "/v1/inference",
      { model: "js", input: "bytes" },
      { accept: "application/octet-stream" },
    );
    assert.equal(raw.text, "abc");
  });

  test("OpenAI's SDK, which asks for base64; and numbers", async () => {
    const client = new OpenAI({ baseURL: `${ferry.url}/v1`, apiKey: "sk-any", maxRetries: 0 });
    const input = Array.from({ length: 100 }, (_, at) => `text ${at}`);
    const { data } = await client.embeddings.create({ model: "embed", input });
    assert.deepEqual(
      data.map(({ embedding }) => embedding),
      input.map((text) => numbers(vector(text))),
    );
    const floats = await client.embeddings.create({ model: "embed", input: "a", encoding_format: "float" });
    assert.deepEqual(floats.data[0]!.embedding.map(Math.fround), numbers(vector("a")));
  });

  test("TEI, Ollama, Cohere, KServe v1 and the Open Inference Protocol", async () => {
    const vectors = (value: unknown): number[][] =>
      (value as number[][]).map((row) => row.map((each) => Math.fround(each)));
    const wanted = [numbers(vector("a")), numbers(vector("b"))];
    const tei = JSON.parse((await call("/embed", { inputs: ["a", "b"] })).text) as unknown;
    assert.deepEqual(vectors(tei), wanted);
    const ollama = (await call("/api/embed", { model: "embed", input: ["a", "b"] })).json();
    assert.deepEqual(vectors(ollama["embeddings"]), wanted);
    const body = { model: "embed", texts: ["a", "b"], input_type: "x", embedding_types: ["float", "base64"] };
    const cohere = (await call("/v2/embed", body)).json()["embeddings"] as Record<string, unknown>;
    assert.deepEqual(vectors(cohere["float"]), wanted);
    assert.deepEqual(
      cohere["base64"],
      ["a", "b"].map((text) => vector(text).toString("base64")),
    );
    const kserve = (await call("/v1/models/embed:predict", { instances: ["a", "b"] })).json();
    assert.deepEqual(vectors(kserve["predictions"]), wanted);
    const inputs = [{ name: "x", shape: [1, 1], datatype: "INT32", data: [7] }];
    const oip = { inputs, outputs: [{ name: "vector", parameters: { binary_data: true } }] };
    const answer = await call("/v2/models/embed/infer", oip);
    const at = Number(answer.headers["inference-header-content-length"]);
    assert.deepEqual(answer.bytes.subarray(at), vector("[[7]]"));
    assert.match(answer.text, /"name":"vector","datatype":"FP32","shape":\[1,8\]/);
  });

  test("what was answered asynchronously is there as bytes, too", async () => {
    const input = wish("float16", [3, 2], "later");
    const prefer = { prefer: "respond-async", accept: "application/octet-stream" };
    const { task_id: id } = (await call("/v1/inference", { model: "any", input }, prefer)).json();
    await eventually(async () => {
      const answer = await call(`/v1/result/${String(id)}`, undefined, { accept: prefer.accept });
      if (answer.headers["content-type"] !== "application/octet-stream") return false;
      assert.deepEqual(answer.bytes, stream("later", 12));
      assert.equal(answer.headers["x-ferry-shape"], "3,2");
      return true;
    });
  });
});
