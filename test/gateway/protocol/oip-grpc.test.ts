/** From ModelInfer to tasks, and from replies to answers; messages made by the real library. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { canonical } from "../../../src/core/json.ts";
import { answerOf, draftsOf, outputsOf } from "../../../src/gateway/protocol/oip-grpc.ts";
import { rawFromJson } from "../../../src/gateway/protocol/oip-tensors.ts";
import { type InferResponse, requestBytes, responseBytes } from "./oip-service.ts";
import { drafts } from "./oip-stage.ts";
import { answered, called, drafted, floats, outputs, pair, refused } from "./oip-walk.ts";

const ID = rawFromJson("[7]", "INT64");

describe("a request becomes tasks", () => {
  test("one per row, with what they share as canonical parameters", () => {
    const drafts = drafted({
      ...pair,
      model_version: "3",
      parameters: {
        z: { int64_param: "5" },
        a: { string_param: "é" },
        priority: { int64_param: 1 },
        timeout: { int64_param: 9 },
      },
      outputs: [{ name: "y", parameters: { classification: { int64_param: 2 } } }],
    });
    assert.equal(
      drafts.parameters,
      '{"binary":true,"inputs":[{"datatype":"FP32","name":"x","shape":[3]},{"datatype":"INT64","name":"ids","shape":[]}],' +
        '"outputs":[{"name":"y","parameters":{"classification":2}}],"parameters":{"a":"é","z":5},"version":"3"}',
    );
    assert.equal(canonical(drafts.parameters), drafts.parameters);
    assert.deepEqual(
      drafts.inputs.map((input) => JSON.parse(input) as unknown),
      [
        [floats(1, 2, 3).toString("base64"), rawFromJson("[7]", "INT64").toString("base64")],
        [
          floats(4, 5, 6).toString("base64"),
          rawFromJson("[9223372036854775807]", "INT64").toString("base64"),
        ],
      ],
    );
    assert.deepEqual([drafts.model, drafts.id, drafts.typed], ["m", "mine", false]);
  });

  test("typed contents become the same rows, and stay typed towards the worker", () => {
    const drafts = drafted({
      model_name: "m",
      inputs: [
        { name: "x", datatype: "FP32", shape: [2, 3], contents: { fp32_contents: [1, 2, 3, 4, 5, 6] } },
        {
          name: "ids",
          datatype: "INT64",
          shape: [2],
          contents: { int64_contents: ["7", "9223372036854775807"] },
        },
      ],
    });
    assert.deepEqual(drafts.inputs, drafted(pair).inputs);
    assert.match(drafts.parameters, /^\{"binary":true,"contents":true,/);
    const sent = called(drafts);
    assert.deepEqual(sent.inputs[0]!.contents!.fp32_contents, [1, 2, 3, 4, 5, 6]);
    assert.deepEqual(sent.inputs[1]!.contents!.int64_contents, ["7", "9223372036854775807"]);
    assert.equal(sent.raw_input_contents, undefined);
  });

  test("a model that takes one task at a time gets the request as a whole", () => {
    const shapes = [
      { name: "x", datatype: "FP32", shape: [3, 2] },
      { name: "ids", datatype: "INT64", shape: [] },
    ];
    const request = { ...pair, inputs: shapes, raw_input_contents: [floats(1, 2, 3, 4, 5, 6), ID] };
    const whole = draftsOf(requestBytes(request), (model) => ({ alone: model === "m" }));
    assert.ok(whole.flaw === undefined, String(whole.flaw));
    assert.equal(whole.inputs.length, 1);
    assert.equal(
      whole.parameters,
      '{"binary":true,"inputs":[{"datatype":"FP32","name":"x","shape":[3,2]},' +
        '{"datatype":"INT64","name":"ids","shape":[]}],"whole":true}',
    );
    const sent = called(whole);
    assert.deepEqual(
      sent.inputs.map(({ shape }) => shape),
      [["3", "2"], undefined],
    );
    assert.deepEqual(sent.raw_input_contents, request.raw_input_contents);
    const y = { name: "y", datatype: "FP32", shape: [2] };
    const reply = { model_name: "m", outputs: [y], raw_output_contents: [floats(8, 9)] };
    const answer = answered(whole, outputs(reply, 1));
    assert.deepEqual(answer.outputs[0]!.shape, ["2"]);
    assert.deepEqual(answer.raw_output_contents, [floats(8, 9)]);
    const long = { ...request, raw_input_contents: [floats(1), ID] };
    assert.match(draftsOf(requestBytes(long), () => ({ alone: true })).flaw!, /"x" has 4 bytes/);
  });

  test("what cannot be cut or read is refused in words", () => {
    const one = { name: "x", datatype: "FP32", shape: [1] };
    assert.match(refused({ model_name: "m", inputs: [] }), /no inputs/);
    assert.match(refused({ ...pair, raw_input_contents: [floats(1)] }), /1 raw contents for 2 inputs/);
    assert.match(
      refused({ model_name: "m", inputs: [one], raw_input_contents: [floats(1, 2)] }),
      /^input "x" has 8 bytes, but FP32 of shape \[1\] needs 4$/,
    );
    assert.match(
      refused({
        model_name: "m",
        inputs: [{ ...one, contents: { fp32_contents: [1] } }],
        raw_input_contents: [floats(1)],
      }),
      /beside the raw ones/,
    );
    assert.match(
      refused({
        model_name: "m",
        inputs: [one, { ...one, name: "y", shape: [2] }],
        raw_input_contents: [floats(1), floats(1, 2)],
      }),
      /"x" and "y" disagree in dimension 0, which is the batch's: 1 and 2/,
    );
    assert.match(
      refused({ model_name: "m", inputs: [{ ...one, shape: [0] }], raw_input_contents: [floats()] }),
      /no rows/,
    );
    assert.match(
      refused({ model_name: "m", inputs: [{ ...one, shape: [] }], raw_input_contents: [floats(1)] }),
      /empty shape/,
    );
    assert.match(
      refused({ model_name: "m", inputs: [{ ...one, shape: [-1] }], raw_input_contents: [floats(1)] }),
      /-1/,
    );
    assert.match(
      refused({ ...pair, parameters: { sequence_id: { int64_param: 4 } } }),
      /sequence_id .*not batched/,
    );
    const shared = { ...one, parameters: { shared_memory_region: { string_param: "r" } } };
    assert.match(refused({ model_name: "m", inputs: [shared] }), /shared memory/);
    assert.match(refused({ model_name: "m", inputs: [{ ...one, datatype: "TF32" }] }), /"TF32"/);
    assert.match(draftsOf(Buffer.from([0x0a])).flaw!, /in the middle/);
  });
});

describe("a reply becomes outputs", () => {
  const y = { name: "y", datatype: "FP32", shape: [2, 1] };
  const reply: InferResponse = {
    model_name: "upstream",
    model_version: "4",
    outputs: [y, { name: "label", datatype: "BYTES", shape: [2] }],
    raw_output_contents: [floats(0.5, 1.5), rawFromJson('["cat","a dog"]', "BYTES")],
  };

  test("each row gets its own, and answers put them together again", () => {
    const texts = outputs(reply, 2);
    assert.deepEqual(JSON.parse(texts[1]!), {
      outputs: [
        { name: "y", datatype: "FP32", shape: [1, 1], raw: floats(1.5).toString("base64") },
        {
          name: "label",
          datatype: "BYTES",
          shape: [1],
          raw: rawFromJson('["a dog"]', "BYTES").toString("base64"),
        },
      ],
      model_version: "4",
    });
    const answer = answered(drafted(pair), texts);
    assert.equal(answer.model_name, "m");
    assert.equal(answer.model_version, "4");
    assert.equal(answer.id, "mine");
    assert.deepEqual(
      answer.outputs.map(({ shape }) => shape),
      [["2", "1"], ["2"]],
    );
    assert.deepEqual(answer.raw_output_contents, reply.raw_output_contents);
    assert.deepEqual(answered(drafted(pair), texts.toReversed()).raw_output_contents, [
      floats(1.5, 0.5),
      rawFromJson('["a dog","cat"]', "BYTES"),
    ]);
  });

  test("typed contents come back typed to those who sent typed ones, raw to the others", () => {
    const typed = {
      ...pair,
      raw_input_contents: [],
      inputs: [{ name: "x", datatype: "FP32", shape: [2], contents: { fp32_contents: [1, 2] } }],
    };
    const texts = outputs(
      { model_name: "m", outputs: [{ ...y, contents: { fp32_contents: [0.5, 1.5] } }] },
      2,
    );
    const answer = answered(drafted(typed), texts);
    assert.deepEqual(answer.outputs[0]!.contents!.fp32_contents, [0.5, 1.5]);
    assert.equal(answer.raw_output_contents, undefined);
    assert.deepEqual(answered(drafted(pair), texts).raw_output_contents, [floats(0.5, 1.5)]);
    const raw = outputs({ model_name: "m", outputs: [y], raw_output_contents: [floats(0.5, 1.5)] }, 2);
    assert.deepEqual(answered(drafted(typed), raw).raw_output_contents, [floats(0.5, 1.5)]);
  });

  test("outputs in JSON, as workers behind HTTP give them", () => {
    const json = '{"outputs":[{"name":"n","datatype":"INT64","shape":[1,2],"data":[9007199254740993,-1]}]}';
    assert.deepEqual(answered(drafted(pair), [json, json]).raw_output_contents, [
      rawFromJson("[9007199254740993,-1,9007199254740993,-1]", "INT64"),
    ]);
    const typed = drafted({
      model_name: "m",
      inputs: [{ name: "x", datatype: "FP32", shape: [1], contents: { fp32_contents: [1] } }],
    });
    assert.deepEqual(answered(typed, [json]).outputs[0]!.contents!.int64_contents, [
      "9007199254740993",
      "-1",
    ]);
  });

  test("a batch of one keeps whatever shape the worker gave it", () => {
    for (const [shape, values] of [
      [[], [1]],
      [[3], [1, 2, 3]],
      [[0, 5], []],
      [
        [4, 2],
        [1, 2, 3, 4, 5, 6, 7, 8],
      ],
    ] as const) {
      const texts = outputs(
        { model_name: "m", outputs: [{ ...y, shape }], raw_output_contents: [floats(...values)] },
        1,
      );
      const answer = answered(drafted(pair), texts);
      assert.deepEqual((answer.outputs[0]!.shape ?? []).map(Number), shape);
      assert.deepEqual(answer.raw_output_contents, [floats(...values)]);
    }
  });

  test("several rows whose dimension 0 disagrees are not cut", () => {
    const odd = outputsOf(
      responseBytes({
        model_name: "m",
        outputs: [{ ...y, shape: [3] }],
        raw_output_contents: [floats(1, 2, 3)],
      }),
      2,
    );
    assert.deepEqual(odd, { flaw: 'has an output "y" of shape [3] for 2 rows', inseparable: true, rows: 3 });
    const none = outputsOf(
      responseBytes({ model_name: "m", outputs: [{ ...y, shape: [] }], raw_output_contents: [floats(1)] }),
      2,
    );
    assert.deepEqual(none, {
      flaw: 'has an output "y" of shape [] for 2 rows',
      inseparable: true,
      rows: undefined,
    });
  });

  test("replies that lie about themselves are flawed", () => {
    const flaw = (response: InferResponse, rows = 2): string => {
      const read = outputsOf(responseBytes(response), rows);
      assert.ok(read.flaw !== undefined);
      return read.flaw;
    };
    assert.match(flaw({ model_name: "m", outputs: [] }), /no outputs/);
    assert.match(
      flaw({ model_name: "m", outputs: [y], raw_output_contents: [floats(1), floats(2)] }),
      /2 raw contents for 1/,
    );
    assert.match(
      flaw({ model_name: "m", outputs: [y], raw_output_contents: [floats(1)] }),
      /"y" has 4 bytes/,
    );
    assert.match(
      flaw({ model_name: "m", outputs: [{ ...y, shape: [1, 1] }], raw_output_contents: [floats(1, 2)] }, 1),
      /bytes/,
    );
    assert.match(
      flaw({ model_name: "m", outputs: [{ ...y, datatype: "?" }], raw_output_contents: [floats(1, 2)] }),
      /"\?"/,
    );
    assert.match(outputsOf(Buffer.from([0xff]), 1).flaw!, /middle/);
  });

  test("answers that are no tensors, or do not fit together, say so", () => {
    const flawOf = (...texts: string[]): string => answerOf(drafted(pair), texts).flaw!;
    for (const text of ['"hello"', "[1]", "{}", '{"outputs":3}', "null"])
      assert.match(flawOf(text), /^the model's answer holds no tensors; ask this model by POST/, text);
    assert.match(flawOf('{"outputs":[{"name":"y"}]}'), /output "y" that has no "data"/);
    const row = (shape: string): string =>
      `{"outputs":[{"name":"y","datatype":"FP32","shape":${shape},"raw":"AAAAAA=="}]}`;
    assert.match(flawOf(row("[1,1]"), row("[1]")), /rows of different shapes/);
    assert.match(flawOf(row("[1]"), '{"outputs":[]}'), /rows of different shapes/);
    assert.match(flawOf(row("[]"), row("[]")), /not one for each row/);
  });

  test("rows that did not bring one of their own are not joined, nor such as make up for each other", () => {
    const row = (shape: number[], data: number[] | string[], datatype = "FP32"): string =>
      JSON.stringify({ outputs: [{ name: "y", datatype, shape, data }] });
    const raw = (shape: number[], bytes: Buffer, datatype = "FP32"): string =>
      JSON.stringify({ outputs: [{ name: "y", datatype, shape, raw: bytes.toString("base64") }] });
    const words = (...of: string[]): Buffer => rawFromJson(JSON.stringify(of), "BYTES");
    const http = drafts('{"inputs":[{"name":"x","shape":[2],"datatype":"FP32","data":[1,2]}]}');
    const cases: [one: string, other: string, words: RegExp][] = [
      [row([2, 1], [1, 2]), row([2, 1], [3, 4]), /not one for each row/],
      [row([2, 1], [1, 2]), row([1, 1], [3]), /not one for each row/],
      [row([0, 1], []), row([2, 1], [3, 4]), /not one for each row/],
      [row([1, 1], [1, 2]), row([1, 1], []), /another size than its shape says/],
      [raw([1, 1], floats(1, 2)), raw([1, 1], Buffer.alloc(0)), /another size than its shape says/],
      [raw([1], words("a", "b"), "BYTES"), raw([1], words(), "BYTES"), /behind the 1 elements/],
      [
        raw([1], floats(1)),
        '{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"raw":"!!!!!!"}]}',
        /base64/,
      ],
    ];
    for (const [one, other, why] of cases) {
      assert.match(answerOf(drafted(pair), [one, other]).flaw!, why, one);
      assert.throws(() => http.render([one, other], "m"), why, one);
    }
  });
});

test("whatever is sent, each row comes back to its own request", () => {
  const row = fc.array(fc.integer({ min: -(2 ** 31), max: 2 ** 31 - 1 }), { minLength: 2, maxLength: 2 });
  fc.assert(
    fc.property(
      fc.array(fc.array(row, { minLength: 1, maxLength: 4 }), { minLength: 1, maxLength: 5 }),
      fc.boolean(),
      (requests, typed) => {
        const drafts = requests.map((rows) => {
          const tensor = { name: "x", datatype: "INT32", shape: [rows.length, 2] };
          const contents = { int_contents: rows.flat() };
          return drafted(
            typed
              ? { model_name: "m", inputs: [{ ...tensor, contents }] }
              : {
                  model_name: "m",
                  inputs: [tensor],
                  raw_input_contents: [rawFromJson(JSON.stringify(rows.flat()), "INT32")],
                },
          );
        });
        const all = drafts.flatMap(({ inputs }) => inputs);
        const sent = called(drafts[0]!, all);
        // The worker echoes.
        const echo = {
          model_name: "m",
          outputs: sent.inputs,
          raw_output_contents: sent.raw_input_contents ?? [],
        };
        const texts = [...outputs(echo, all.length)];
        for (const [at, draft] of drafts.entries()) {
          const answer = answered(draft, texts.splice(0, draft.inputs.length));
          const values = typed
            ? answer.outputs[0]!.contents!.int_contents!
            : [...new Int32Array(new Uint8Array(answer.raw_output_contents![0]!).buffer)];
          assert.deepEqual(values, requests[at]!.flat());
        }
      },
    ),
  );
});
