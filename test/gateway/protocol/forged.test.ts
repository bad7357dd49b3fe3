/**
 * Parameters and inputs that a caller of Ferry's own API wrote for workers of a drop-in protocol: no such text makes
 * a worker's side throw, says something in a call that the call says itself, or finds its way to another path.
 */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { canonical, scan } from "../../../src/core/json.ts";
import { batch } from "../../../src/gateway/protocol/batch.ts";
import { answerOf, callOf } from "../../../src/gateway/protocol/oip-grpc.ts";
import { PROTOCOL_NAMES, type WorkerSide } from "../../../src/gateway/protocol/protocol.ts";
import { protocols } from "../../../src/gateway/protocol/protocols.ts";

const SIDES: readonly (readonly [string, WorkerSide])[] = [
  ["batch", batch],
  ...PROTOCOL_NAMES.map((name) => [name, protocols[name]!.worker] as const),
];
const TENSOR = { name: "x", datatype: "FP32", shape: [1] };

function call(name: string, parameters: object, inputs: readonly unknown[] = ["a"]) {
  const [, side] = SIDES.find(([each]) => each === name)!;
  const texts = inputs.map((input) => JSON.stringify(input));
  return side.call(texts, canonical(JSON.stringify(parameters)), "ours");
}

describe("parameters that a caller wrote", () => {
  test("another model, or other inputs, are not for a caller to name", () => {
    const forged = {
      model: "dearer",
      input: ["b"],
      inputs: ["b"],
      texts: ["b"],
      images: ["b"],
      instances: ["b"],
      prompt: "b",
      keep_alive: -1,
      dimensions: 3,
    };
    const told: Record<string, object> = {
      "openai-embeddings": { model: "ours", input: ["a"], encoding_format: "base64" },
      "openai-completions": { model: "ours", prompt: "a" },
      tei: { inputs: ["a"] },
      ollama: { model: "ours", input: ["a"] },
      cohere: { model: "ours", texts: ["a"] },
      "kserve-v1": { instances: ["a"] },
    };
    for (const [name, own] of Object.entries(told)) {
      const { body } = call(name, forged);
      assert.equal(scan(String(body)).problem, undefined, `${name}: ${String(body)}`);
      const said = JSON.parse(String(body)) as Record<string, unknown>;
      for (const [field, value] of Object.entries(own))
        assert.deepEqual(said[field], value, `${name} ${field}`);
      assert.equal(said["dimensions"], 3, "what is not the call's own goes on");
    }
  });

  test("a version is a text, and no way to another path", () => {
    for (const version of [{ toString: 1 }, [{ toString: 1 }], 5, null, true]) {
      assert.equal(call("kserve-v1", { $version: version }).path, undefined);
    }
    for (const version of ["", ".", "..", "../x", "1/../../other", "..\\x"]) {
      assert.match(String(call("kserve-v1", { $version: version }).flaw), /version/);
      assert.match(String(call("oip-v2", { inputs: [TENSOR], version }, [[[1]]]).flaw), /version/);
    }
    assert.equal(
      call("oip-v2", { inputs: [TENSOR], version: "2" }, [[[1]]]).path,
      "/v2/models/ours/versions/2/infer",
    );
  });

  test("how many bytes a tensor has is not for a caller to say", () => {
    const inputs = [{ ...TENSOR, parameters: { binary_data_size: 400, other: 1 } }];
    const row = Buffer.from(new Float32Array([1]).buffer).toString("base64");
    const { body, headers } = call("oip-v2", { binary: true, inputs }, [[row]]);
    const json = (body as Buffer).subarray(0, Number(headers!["inference-header-content-length"])).toString();
    assert.equal(scan(json).problem, undefined, json);
    assert.match(json, /"parameters":\{"binary_data_size":4,"other":1\}/);
  });

  test("whatever they are, no worker's side throws, and what it sends is JSON with each field once", () => {
    const names =
      "$route $tokens $version $kind $auth n echo model input inputs texts instances prompt name datatype shape binary " +
      "whole version parameters outputs contents keep_alive text toString constructor binary_data_size";
    const word = fc.constantFrom(...names.split(" "));
    const leaf = fc.oneof(
      fc.constantFrom("FP32", "BYTES", "INT64", "AAAA", "!!", "", "..", "predict", "rerank", "inputs", "5m"),
      fc.constantFrom(0, 1, 2, -1, 1.5, 2 ** 53 - 1, true, false, null),
    );
    const { tree } = fc.letrec((tie) => ({
      tree: fc.oneof(
        { maxDepth: 4 },
        leaf,
        fc.array(tie("tree"), { maxLength: 3 }),
        fc.dictionary(word, tie("tree"), { maxKeys: 4 }),
      ),
    }));
    const parameters = fc.oneof(
      fc.dictionary(word, tree, { maxKeys: 5 }),
      fc.record({ inputs: fc.array(fc.record({ name: leaf, datatype: leaf, shape: tree })), binary: leaf }),
    );
    fc.assert(
      fc.property(parameters, fc.array(tree, { minLength: 1, maxLength: 3 }), (fields, inputs) => {
        const text = canonical(JSON.stringify(fields));
        const texts = inputs.map((input) => JSON.stringify(input));
        callOf({ id: "b", parameters: text, inputs: texts }, "ours", "");
        for (const [name, side] of SIDES) {
          const { body, flaw } = side.call(texts, text, "ours");
          if (flaw !== undefined || typeof body !== "string") continue;
          JSON.parse(body);
          assert.equal(scan(body).problem, undefined, `${name}: ${body}`);
        }
      }),
      { numRuns: 1000 },
    );
  });
});

test("a function that answers gRPC with anything but tensors is told so, in words", () => {
  const outputs = [
    null,
    5,
    { outputs: [null] },
    { outputs: [5] },
    { outputs: [{ name: "y", datatype: "FP32", shape: [1], data: 5 }] },
    { outputs: [{ name: "y", datatype: "BYTES", shape: [1], data: {} }] },
    { outputs: [{ name: "y", datatype: "BOOL", shape: [1], data: null }] },
  ];
  for (const output of outputs) {
    const { flaw } = answerOf({ model: "m", id: "", typed: false }, [JSON.stringify(output)]);
    assert.ok(flaw, JSON.stringify(output));
  }
  const nested = { outputs: [{ name: "y", datatype: "FP32", shape: [1, 2], data: [[1, 2]] }] };
  assert.equal(answerOf({ model: "m", id: "", typed: false }, [JSON.stringify(nested)]).flaw, undefined);
});
