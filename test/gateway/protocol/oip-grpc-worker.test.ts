/** From batches to ModelInfer; messages made by the real library. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { callOf } from "../../../src/gateway/protocol/oip-grpc.ts";
import { rawFromJson } from "../../../src/gateway/protocol/oip-tensors.ts";
import { readRequest } from "./oip-service.ts";
import { drafts, worker } from "./oip-stage.ts";
import { called, drafted, floats, outputs, pair } from "./oip-walk.ts";

describe("a batch becomes one call", () => {
  test("rows of several requests stand one behind the other", () => {
    const drafts = drafted(pair);
    const sent = called(drafts, [...drafts.inputs, drafts.inputs[0]!]);
    assert.equal(sent.model_name, "upstream");
    assert.equal(sent.id, "batch-1");
    assert.deepEqual(
      sent.inputs.map(({ shape }) => shape),
      [["3", "3"], ["3"]],
    );
    assert.deepEqual(sent.raw_input_contents, [
      floats(1, 2, 3, 4, 5, 6, 1, 2, 3),
      rawFromJson("[7,9223372036854775807,7]", "INT64"),
    ]);
  });

  test("parameters, outputs and the version go along", () => {
    const parameters = { k: { double_param: 5 }, n: { int64_param: "9223372036854775807" } };
    const drafts = drafted({ ...pair, model_version: "3", parameters, outputs: [{ name: "y" }] });
    const sent = called(drafts);
    assert.equal(sent.model_version, "3");
    assert.equal(sent.outputs![0]!.name, "y");
    assert.equal((sent.parameters!["k"] as { double_param: number }).double_param, 5);
    assert.equal((sent.parameters!["n"] as { int64_param: string }).int64_param, "9223372036854775807");
  });

  test("rows in JSON, as HTTP clients send them, become raw", () => {
    const parameters =
      '{"inputs":[{"datatype":"INT64","name":"x","shape":[2]},{"datatype":"BYTES","name":"t","shape":[1]}]}';
    const call = callOf(
      { id: "b", parameters, inputs: ['[[1,9007199254740993],["é"]]', '[[3,4],["b"]]'] },
      "m",
      "7",
    );
    assert.ok(call.flaw === undefined, String(call.flaw));
    const sent = readRequest(Buffer.concat(call.parts));
    assert.equal(sent.model_version, "7");
    assert.deepEqual(sent.raw_input_contents, [
      rawFromJson("[1,9007199254740993,3,4]", "INT64"),
      rawFromJson('["é","b"]', "BYTES"),
    ]);
  });

  test("a row that is longer or shorter than its shape joins nobody", () => {
    const { parameters, inputs } = drafted(pair);
    const [ids] = (JSON.parse(inputs[0]!) as string[]).slice(1);
    const row = (raw: Buffer): string => JSON.stringify([raw.toString("base64"), ids]);
    for (const bad of [
      row(floats(1, 2)),
      row(floats(1, 2, 3, 4)),
      '["%%%%%%%%%%%%%%%%","AAAAAAAAAAA="]',
      "[]",
      "{}",
      '"x"',
      "7",
    ]) {
      const call = callOf({ id: "b", parameters, inputs: [inputs[0]!, bad] }, "m", "");
      assert.ok(call.flaw !== undefined, bad);
    }
    const words = '{"binary":true,"inputs":[{"datatype":"BYTES","name":"t","shape":[1]}]}';
    const two = JSON.stringify([rawFromJson('["a","b"]', "BYTES").toString("base64")]);
    const none = '[""]';
    assert.match(
      callOf({ id: "b", parameters: words, inputs: [two, none] }, "m", "").flaw!,
      /"t" has 5 bytes behind/,
    );
  });

  test("requests that HTTP did not cut go as they are, one by one", () => {
    const body =
      '{"inputs":[{"name":"x","shape":[2,2],"datatype":"FP32","data":[1,2,3,4]},' +
      '{"name":"n","shape":[],"datatype":"INT64","data":[9007199254740993]}]}';
    const whole = drafts(body, {}, { alone: true });
    const { inputs, parameters } = whole;
    const call = callOf({ id: "b", parameters, inputs }, "m", "");
    assert.ok(call.flaw === undefined, String(call.flaw));
    const sent = readRequest(Buffer.concat(call.parts));
    assert.deepEqual(
      sent.inputs.map(({ shape }) => shape),
      [["2", "2"], undefined],
    );
    assert.deepEqual(sent.raw_input_contents, [
      floats(1, 2, 3, 4),
      rawFromJson("[9007199254740993]", "INT64"),
    ]);
    const count = { name: "count", datatype: "INT64", shape: [] };
    const reply = { model_name: "m", outputs: [count], raw_output_contents: [rawFromJson("[4]", "INT64")] };
    assert.match(String(whole.render(outputs(reply, 1), "m").body), /"shape":\[\],"data":\[4\]/);
    const two = [...inputs, ...inputs];
    assert.match(callOf({ id: "b", parameters, inputs: two }, "m", "").flaw!, /one by one/);
    assert.match(worker.call(two, parameters, "m").flaw!, /one by one/);
  });

  test("what HTTP clients say about their bodies stays behind", () => {
    const { inputs, parameters } = drafts(
      '{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}],"parameters":{"binary_data_output":true,"k":2},' +
        '"outputs":[{"name":"y","parameters":{"binary_data":true,"classification":3}}]}',
    );
    const call = callOf({ id: "b", parameters, inputs }, "m", "");
    assert.ok(call.flaw === undefined, String(call.flaw));
    const sent = readRequest(Buffer.concat(call.parts));
    assert.deepEqual(Object.keys(sent.parameters!), ["k"]);
    assert.deepEqual(Object.keys(sent.outputs![0]!.parameters!), ["classification"]);
  });

  test("tasks of other protocols are told which one it is", () => {
    for (const parameters of [
      "",
      '{"temperature":1}',
      '{"inputs":[]}',
      '{"inputs":[1]}',
      '{"inputs":[{"name":"x"}]}',
    ]) {
      assert.match(
        callOf({ id: "b", parameters, inputs: ['"hello"'] }, "m", "").flaw!,
        /Open Inference Protocol/,
      );
    }
  });
});
