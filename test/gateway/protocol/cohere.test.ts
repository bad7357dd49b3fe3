/** Cohere: what a request becomes, what a worker is told, what comes of its reply, what is answered. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { Refusal } from "../../../src/core/errors.ts";
import { cohere } from "../../../src/gateway/protocol/cohere.ts";
import { embeddingText } from "./servers/cohere-server.ts";
import { tokensOf } from "./servers/json-server.ts";
import { bodyOf, Spoken } from "./spoken.ts";

const spoken = new Spoken(cohere);
const PATH = "/v2/embed";
const BASE = { model: "embed-v4.0", input_type: "search_document" };
const read = (body: object) => spoken.read(PATH, { ...BASE, ...body });

interface Embedded {
  readonly id: string;
  readonly embeddings: Readonly<Record<string, readonly unknown[]>>;
  readonly texts?: readonly string[];
  readonly meta: {
    readonly billed_units?: Readonly<Record<string, number>>;
    readonly tokens?: unknown;
    readonly warnings?: unknown;
  };
  readonly response_type: string;
}
const parsed = (text: string): Embedded => JSON.parse(text) as Embedded;

describe("Cohere, a request:", () => {
  test("each text, or each of inputs, is a task; images go to a worker as they came", () => {
    assert.deepEqual(read({ texts: ["a", "b"] }).inputs, ['"a"', '"b"']);
    const inputs = [{ content: [{ type: "text", text: "a" }] }];
    assert.deepEqual(read({ inputs }).inputs, [JSON.stringify(inputs[0])]);
    assert.deepEqual(read({ texts: ["a"], images: null }).inputs, ['"a"']);
    const images = spoken.any(PATH, { ...BASE, input_type: "image", images: ["data:image/png;base64,AA=="] });
    assert.deepEqual(images, { unbatched: true, model: "embed-v4.0" });
  });

  test("what could change an answer keeps requests apart, what cannot does not", () => {
    const of = (more: object): string => read({ texts: ["a"], ...more }).parameters;
    assert.equal(of({ priority: 3 }), of({}));
    assert.equal(of({ embedding_types: ["float"] }), of({}));
    assert.equal(
      of({ embedding_types: ["int8", "float", "int8"] }),
      of({ embedding_types: ["float", "int8"] }),
    );
    assert.notEqual(of({ embedding_types: ["int8"] }), of({}));
    assert.notEqual(of({ input_type: "search_query" }), of({}));
    assert.notEqual(of({ truncate: "START" }), of({}));
    assert.notEqual(of({ output_dimension: 256 }), of({}));
    assert.notEqual(read({ inputs: [{}] }).parameters, of({}));
  });

  test("what is refused", () => {
    spoken.refuses(PATH, BASE, /send one of/);
    spoken.refuses(PATH, { ...BASE, texts: ["a"], inputs: [{}] }, /send one of/);
    spoken.refuses(PATH, { ...BASE, texts: [] }, /empty/);
    spoken.refuses(PATH, { ...BASE, texts: "a" }, /list of strings/);
    spoken.refuses(PATH, { ...BASE, texts: ["a", 1] }, /list of strings/);
    spoken.refuses(PATH, { ...BASE, inputs: ["a"] }, /list of objects/);
    spoken.refuses(PATH, { ...BASE, texts: ["a"], embedding_types: ["double"] }, /list of float/);
    spoken.refuses(PATH, { ...BASE, texts: ["a"], embedding_types: "float" }, /list of float/);
    spoken.refuses(PATH, { ...BASE, texts: ["a"], $kind: "inputs" }, /unknown field/);
    spoken.refuses(PATH, { ...BASE, texts: Array.from({ length: 2049 }, () => "a") }, /more than 2048/);
  });

  test("a call has the inputs under the name they came by, and no priority", () => {
    const { inputs, parameters } = read({ texts: ["a", "b"], priority: 1, truncate: "END" });
    const { path, body } = spoken.call(inputs, parameters, "embed-v4.0");
    assert.equal(path, PATH);
    assert.deepEqual(JSON.parse(body), {
      ...BASE,
      texts: ["a", "b"],
      embedding_types: ["float"],
      truncate: "END",
    });
    const other = read({ inputs: [{ content: [] }], x: { $kind: "texts" } });
    assert.match(spoken.call(other.inputs, other.parameters).body, /"inputs":\[\{"content":\[\]\}\]/);
    const hidden = read({ texts: ["a"], x: { $kind: "inputs" } });
    assert.match(spoken.call(hidden.inputs, hidden.parameters).body, /"texts":\["a"\]/);
    assert.equal(cohere.worker.maxBatchSize, 96);
  });
});

describe("Cohere, an answer:", () => {
  test("every type, numbers as they were written, its own id, no warning of somebody else", () => {
    const drafts = read({ texts: ["a", "b"], embedding_types: ["base64", "float"] });
    const { inputs, parameters } = drafts;
    const reply =
      '{"id":"x","embeddings":{"float":[[0.10],[9007199254740993]],"int8":null,"base64":["AAAAAA==","BBBBBA=="]},"texts":["a","b"],' +
      '"meta":{"api_version":{"version":"2"},"billed_units":{"input_tokens":5.0,"images":null},"warnings":["b!"]}}';
    const outputs = spoken.outputs(reply, inputs, parameters);
    const answer = bodyOf(drafts.render(outputs, "m", { id: "mine", at: 0 }));
    assert.match(answer, /"float":\[\[0\.10\],\[9007199254740993\]\]/);
    const { id, embeddings, texts, meta, response_type: type } = parsed(answer);
    assert.deepEqual(embeddings["base64"], ["AAAAAA==", "BBBBBA=="]);
    assert.deepEqual(Object.keys(embeddings), ["float", "base64"]);
    assert.deepEqual(texts, ["a", "b"]);
    assert.deepEqual(meta, { api_version: { version: "2" }, billed_units: { input_tokens: 5 } });
    assert.equal(type, "embeddings_by_type");
    assert.equal(id, "mine");
  });

  test("replies that cannot be used", () => {
    const { inputs, parameters } = read({ texts: ["a", "b"] });
    const flaw = (reply: unknown): string => spoken.flaw(reply, inputs, parameters);
    assert.match(flaw({ embeddings: { float: [[1]] } }), /1 embeddings for 2 inputs/);
    assert.match(flaw({ embeddings: { float: [[1], [2]], int8: [[1]] } }), /1 embeddings for 2 inputs/);
    assert.match(flaw({ embeddings: { float: [[1], 2] } }), /something else/);
    assert.match(flaw({ embeddings: { float: {} } }), /not an array/);
    assert.match(flaw({ embeddings: {} }), /no embeddings/);
    assert.match(flaw({ embeddings: [[1], [2]] }), /no object "embeddings"/);
    assert.match(flaw({ message: "no" }), /no object "embeddings"/);
    assert.match(flaw([]), /no object/);
    assert.match(flaw('{"embeddings":{"float":[[1],[2]]},"embeddings":{}}'), /no object/);
    assert.match(flaw('{"embeddings":{"float":[[1e999],[2]]}}'), /./);
  });

  test("a function may return the vector alone, for float and base64; a type that is not there is an error", () => {
    const base64 = Buffer.from(Float32Array.of(0.5).buffer).toString("base64");
    const drafts = read({ texts: ["a", "b"], embedding_types: ["float", "base64"] });
    assert.deepEqual(parsed(bodyOf(drafts.render(["[0.5]", `"${base64}"`], "m"))).embeddings, {
      float: [[0.5], [0.5]],
      base64: [base64, base64],
    });
    const failed = (error: unknown): boolean => error instanceof Refusal && error.code === "INFERENCE_FAILED";
    assert.throws(() => read({ texts: ["a"], embedding_types: ["int8"] }).render(["[1]"], "m"), failed);
    assert.throws(() => read({ texts: ["a"] }).render(['{"x":1}'], "m"), failed);
    assert.throws(() => read({ texts: ["a"] }).render(["null"], "m"), failed);
  });

  test("errors in its shape", () => {
    assert.deepEqual(cohere.client.fail(new Refusal("INFERENCE_FAILED", "why")), {
      status: 500,
      body: '{"message":"why"}',
    });
    assert.equal(cohere.client.fail(new Refusal("RATE_LIMITED", "why")).status, 429);
  });
});

test("Cohere: whatever the batch, an input gets its own vectors, and the bills sum up", () => {
  const texts = fc.array(fc.string({ minLength: 1, maxLength: 20 }), { minLength: 1, maxLength: 8 });
  fc.assert(
    fc.property(fc.array(texts, { minLength: 1, maxLength: 5 }), (callers) => {
      const types = ["float", "int8", "base64"];
      const drafts = callers.map((each) => read({ texts: each, embedding_types: types }));
      const inputs = drafts.flatMap((each) => each.inputs);
      const sent = (JSON.parse(spoken.call(inputs, drafts[0]!.parameters).body) as { texts: string[] }).texts;
      const list = (of: readonly string[], type: string): string =>
        `[${of.map((text) => embeddingText(text, type)).join(",")}]`;
      const billed = sent.reduce((sum, text) => sum + tokensOf(text), 0);
      const lists = types.map((type) => `"${type}":${list(sent, type)}`);
      const reply = `{"embeddings":{${lists.join(",")}},"meta":{"billed_units":{"input_tokens":${billed}}}}`;
      const outputs = [...spoken.outputs(reply, inputs, drafts[0]!.parameters)];
      let told = 0;
      callers.forEach((each, caller) => {
        const answer = bodyOf(drafts[caller]!.render(outputs.splice(0, each.length), "m"));
        for (const type of types) assert(answer.includes(`"${type}":${list(each, type)}`));
        const { meta, texts: echoed } = parsed(answer);
        told += meta.billed_units!["input_tokens"]!;
        assert.deepEqual(echoed, each);
      });
      assert.equal(told, billed);
    }),
    { numRuns: 200 },
  );
});
