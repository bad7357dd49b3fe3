/** Tensors and bytes, as functions return them, in the words of each protocol. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Refusal } from "../../../src/core/errors.ts";
import { bytesText, type Dtype, tensorText } from "../../../src/core/tensor.ts";
import { cohere } from "../../../src/gateway/protocol/cohere.ts";
import { kserveV1 } from "../../../src/gateway/protocol/kserve-v1.ts";
import { answerOf } from "../../../src/gateway/protocol/oip-grpc.ts";
import { oipV2 } from "../../../src/gateway/protocol/oip-v2.ts";
import { ollama } from "../../../src/gateway/protocol/ollama.ts";
import { openaiEmbeddings } from "../../../src/gateway/protocol/openai.ts";
import type { Protocol } from "../../../src/gateway/protocol/protocol.ts";
import { readInferResponse } from "../../../src/gateway/protocol/oip-proto.ts";
import { tei } from "../../../src/gateway/protocol/tei.ts";
import { LIMITS } from "./spoken.ts";

const base64 = (view: ArrayBufferView): string => Buffer.from(view.buffer as ArrayBuffer).toString("base64");
const tensor = (dtype: Dtype, view: ArrayBufferView, shape: number[]): string =>
  tensorText({ dtype, shape, base64: base64(view) });
const singles = tensor("float32", Float32Array.of(0.1, -2), [2]);
const halves = tensor("float16", Uint16Array.of(0x3c00, 0xc000), [2]);
const oneRow = tensor("float64", Float64Array.of(0.5, 1), [1, 2]);
const square = tensor("int32", Int32Array.of(1, 2, 3, 4), [2, 2]);

/** What a client gets that asked so, when the model's outputs are these. */
function rendered(protocol: Protocol, path: string, body: object, outputs: readonly string[]) {
  const route = protocol.client.infer.find((each) => each.path === path)!;
  const asked = {
    names: { model: "m" },
    body: Buffer.from(JSON.stringify(body)),
    limits: LIMITS,
    header: () => undefined,
  };
  const drafts = route.read(asked);
  assert.ok(!("unbatched" in drafts));
  return drafts.render(outputs, "m", { id: "1", at: 0 });
}

function text(protocol: Protocol, path: string, body: object, outputs: readonly string[]): string {
  return String(rendered(protocol, path, body, outputs).body);
}

function assertRefused(protocol: Protocol, path: string, body: object, outputs: readonly string[]): void {
  assert.throws(
    () => rendered(protocol, path, body, outputs),
    (error) => error instanceof Refusal && error.code === "INFERENCE_FAILED",
  );
}

describe("a tensor of a function", () => {
  test("is an embedding to OpenAI's clients, whatever its type", () => {
    const ask = (format: string, output: string): string =>
      text(openaiEmbeddings, "/v1/embeddings", { input: "a", encoding_format: format }, [output]);
    assert.match(ask("base64", singles), new RegExp(`"embedding":"${base64(Float32Array.of(0.1, -2))}"`));
    assert.match(ask("float", singles), /"embedding":\[0\.1,-2\]/);
    assert.match(ask("base64", halves), new RegExp(`"embedding":"${base64(Float32Array.of(1, -2))}"`));
    assert.match(ask("float", oneRow), /"embedding":\[0\.5,1\]/);
    const inside = `{"embedding":${singles},"prompt_tokens":3}`;
    assert.match(ask("float", inside), /"embedding":\[0\.1,-2\].*"prompt_tokens":3/);
    for (const output of [square, bytesText("AACAPw==")]) {
      assertRefused(openaiEmbeddings, "/v1/embeddings", { input: "a" }, [output]);
    }
  });

  test("is what TEI's routes want", () => {
    assert.equal(text(tei, "/embed", { inputs: "a" }, [singles]), "[[0.1,-2]]");
    assert.equal(text(tei, "/embed_all", { inputs: "a" }, [square]), "[[[1,2],[3,4]]]");
    const scores = [0.25, 0.5].map((score) => tensor("float32", Float32Array.of(score), [1]));
    const ranks = text(tei, "/rerank", { query: "q", texts: ["a", "b"] }, scores);
    assert.equal(ranks, '[{"index":1,"score":0.5},{"index":0,"score":0.25}]');
  });

  test("is an embedding to Ollama's clients and Cohere's", () => {
    const answer = text(ollama, "/api/embed", { model: "m", input: "a" }, [singles]);
    assert.match(answer, /"embeddings":\[\[0\.1,-2\]\]/);
    const ask = (types: string[], output: string): string =>
      text(cohere, "/v2/embed", { model: "m", texts: ["a"], embedding_types: types }, [output]);
    const both = ask(["float", "base64"], singles);
    assert.match(both, /"float":\[\[0\.1,-2\]\]/);
    assert.match(both, new RegExp(`"base64":\\["${base64(Float32Array.of(0.1, -2))}"\\]`));
    assert.match(
      ask(["int8", "binary"], tensor("int8", Int8Array.of(-1, 5), [2])),
      /"int8":\[\[-1,5\]\],"binary"/,
    );
    assert.match(ask(["ubinary"], tensor("uint8", Uint8Array.of(9), [1])), /"ubinary":\[\[9\]\]/);
    const wrong = { model: "m", texts: ["a"], embedding_types: ["int8"] };
    assertRefused(cohere, "/v2/embed", wrong, [singles]);
    assertRefused(cohere, "/v2/embed", wrong, [square]);
  });

  test("is numbers to KServe's v1, and bytes are what TensorFlow Serving writes", () => {
    const path = "/v1/models/{model}:predict";
    const answer = text(kserveV1, path, { instances: [1, 2] }, [square, bytesText("AACAPw==")]);
    assert.equal(answer, '{"predictions":[[[1,2],[3,4]],{"b64":"AACAPw=="}]}');
  });
});

describe("a tensor of a function to clients of the Open Inference Protocol", () => {
  const path = "/v2/models/{model}/infer";
  const inputs = [{ name: "x", shape: [2, 1], datatype: "INT32", data: [1, 2] }];
  const two = [singles, tensor("float32", Float32Array.of(3, 4), [2])];

  test("over HTTP it is numbers, or its very bytes", () => {
    const json = JSON.parse(text(oipV2, path, { inputs }, two)) as object;
    assert.deepEqual(json, {
      model_name: "m",
      outputs: [{ name: "output-0", datatype: "FP32", shape: [2, 2], data: [0.1, -2, 3, 4] }],
    });
    const asked = { inputs, outputs: [{ name: "vector", parameters: { binary_data: true } }] };
    const { body, headers } = rendered(oipV2, path, asked, two);
    const raw = (body as Buffer).subarray(Number(headers![1]));
    assert.deepEqual(raw, Buffer.from(Float32Array.of(0.1, -2, 3, 4).buffer));
    assert.match(String(body), /"name":"vector","datatype":"FP32","shape":\[2,2\]/);
    const one = [{ ...inputs[0]!, shape: [1, 1], data: [1] }];
    const texts = text(oipV2, path, { inputs: one }, [bytesText(Buffer.from("hé").toString("base64"))]);
    assert.match(texts, /"datatype":"BYTES","shape":\[1\],"data":\["hé"\]/);
    assert.match(
      text(oipV2, path, { inputs: one }, [halves]),
      /"datatype":"FP16","shape":\[1,2\],"data":\[1,-2\]/,
    );
    assertRefused(oipV2, path, { inputs }, [singles, square]);
  });

  test("over gRPC its bytes leave as raw contents", () => {
    const answer = answerOf({ model: "m", id: "7", typed: false, only: "vector" }, [halves, halves]);
    assert.ok(!("flaw" in answer && answer.flaw !== undefined));
    const { tensors, raw } = readInferResponse(Buffer.concat((answer as { parts: readonly Buffer[] }).parts));
    assert.deepEqual(
      tensors.map(({ name, datatype, shape }) => ({ name, datatype, shape })),
      [{ name: "vector", datatype: "FP16", shape: [2, 2] }],
    );
    assert.deepEqual(raw, [Buffer.from(Uint16Array.of(0x3c00, 0xc000, 0x3c00, 0xc000).buffer)]);
  });
});
