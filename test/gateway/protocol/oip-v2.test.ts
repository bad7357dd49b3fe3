/** What a server would have answered to a request alone is what its client gets, whatever the batch. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import type { ProtocolAnswer, Drafts } from "../../../src/gateway/protocol/protocol.ts";
import { bypass, called, drafts, replied, run, worker } from "./oip-stage.ts";
import { exactly, HEADER, infer, readMessage, type Sent, type Tensor, writeMessage } from "./servers/oip.ts";

/** An answer in a form that can be compared. */
function told(body: Buffer | string, length: string | undefined): unknown {
  const { tensors, ...rest } = readMessage(Buffer.from(body as string), length, "outputs");
  const plain = tensors.map(({ raw, data, ...tensor }) => ({
    ...tensor,
    raw: raw?.toString("hex"),
    data: data?.map((each) => JSON.stringify(each)),
  }));
  return JSON.parse(JSON.stringify({ ...rest, outputs: plain }));
}

function toldBy({ body, headers = [] }: ProtocolAnswer): unknown {
  return told(body, headers[headers.indexOf(HEADER) + 1]);
}

const text = fc.string({ unit: "grapheme", maxLength: 6 });
const numberText = fc.oneof(
  fc.bigInt({ min: -(2n ** 63n), max: 2n ** 63n - 1n }).map(String),
  fc.constantFrom("1.0", "0.10", "-0", "1e-7", "2.50E+3", "9007199254740993"),
);

/** A tensor of so many rows; as bytes it can be anything that has the length. */
function tensorOf(name: string, rows: number, binary: boolean): fc.Arbitrary<Tensor> {
  return fc.integer({ min: 0, max: 3 }).chain((width): fc.Arbitrary<Tensor> => {
    const shape = [rows, width];
    const total = rows * width;
    const length = { minLength: total, maxLength: total };
    if (binary) {
      const strings = fc.array(fc.uint8Array({ maxLength: 5 }), length).map((each) => {
        const parts = each.flatMap((bytes) => [
          Buffer.from(Uint32Array.of(bytes.length).buffer),
          Buffer.from(bytes),
        ]);
        return { name, datatype: "BYTES", shape, raw: Buffer.concat(parts) };
      });
      const halves = fc
        .uint8Array({ minLength: 2 * total, maxLength: 2 * total })
        .map((bytes) => ({ name, datatype: "FP16", shape, raw: Buffer.from(bytes) }));
      const long = fc.array(fc.bigInt({ min: -(2n ** 63n), max: 2n ** 63n - 1n }), length).map((each) => ({
        name,
        datatype: "INT64",
        shape,
        raw: Buffer.from(BigInt64Array.from(each).buffer),
      }));
      return fc.oneof(strings, halves, long);
    }
    const strings = fc.array(text, length).map((data) => ({ name, datatype: "BYTES", shape, data }));
    const numbers = fc.array(numberText, length).map((each) => ({
      name,
      datatype: "FP64",
      shape,
      data: each.map((one) => exactly(one)),
    }));
    return fc.oneof(strings, numbers);
  });
}

interface Question {
  readonly sent: Sent;
}

const question: fc.Arbitrary<Question> = fc
  .record({
    rows: fc.integer({ min: 1, max: 4 }),
    binary: fc.boolean(),
    id: fc.option(text, { nil: undefined }),
  })
  .chain(({ rows, binary, id }) =>
    fc.tuple(tensorOf("a", rows, binary), tensorOf("b é", rows, binary)).map((tensors) => {
      const parameters = binary ? { parameters: { binary_data_output: true, priority: 3, timeout: 9 } } : {};
      return { sent: writeMessage({ ...(id !== undefined && { id }), ...parameters }, tensors, "inputs") };
    }),
  );

describe("rows in any company", () => {
  test("what a server would have answered alone is what the client gets", () => {
    fc.assert(
      fc.property(
        fc.array(question, { minLength: 1, maxLength: 5 }),
        fc.integer({ min: 1, max: 5 }),
        (all, size) => {
          const requests = all.map(({ sent }) => drafts(sent.body, { ...sent.headers }));
          const outputs = requests.map(({ inputs }): string[] => Array.from({ length: inputs.length }));
          const groups = new Map<string, { input: string; put: (output: string) => void }[]>();
          requests.forEach(({ inputs, parameters }, request) => {
            const group = groups.get(parameters) ?? [];
            groups.set(parameters, group);
            inputs.forEach((input, row) =>
              group.push({ input, put: (output) => (outputs[request]![row] = output) }),
            );
          });
          for (const [parameters, tasks] of groups) {
            for (let at = 0; at < tasks.length; at += size) {
              const batch = tasks.slice(at, at + size);
              const texts = run(
                batch.map(({ input }) => input),
                parameters,
              );
              batch.forEach(({ put }, index) => put(texts[index]!));
            }
          }
          requests.forEach((request, index) => {
            const { sent } = all[index]!;
            const alone = infer(sent.body, sent.headers);
            const answer = request.render(outputs[index]!, "toy");
            assert.deepEqual(toldBy(answer), told(alone.body, alone.headers[HEADER]));
          });
        },
      ),
      { numRuns: 200 },
    );
  });

  test("nested data is the same as flat data", () => {
    const body =
      '{"inputs":[{"name":"x","shape":[2,2],"datatype":"INT64","data":[[1,9007199254740993],[ 3 , 4]]}]}';
    const { inputs, parameters } = drafts(body);
    assert.deepEqual(inputs, ["[[1,9007199254740993]]", "[[3,4]]"]);
    assert.equal(parameters, '{"inputs":[{"datatype":"INT64","name":"x","shape":[2]}]}');
  });

  test("bytes and numbers in one request all become bytes", () => {
    const tensors = [
      { name: "a", datatype: "FP32", shape: [2, 1], raw: Buffer.from(Float32Array.of(1, 2).buffer) },
      {
        name: "b",
        datatype: "INT64",
        shape: [2],
        data: [exactly("9007199254740993"), exactly("-1")],
      },
    ];
    const { body, headers } = writeMessage({}, tensors, "inputs");
    const { inputs, parameters } = drafts(body, { ...headers });
    assert.match(parameters, /^\{"binary":true,/);
    assert.deepEqual(inputs, ['["AACAPw==","AQAAAAAAIAA="]', '["AAAAQA==","//////////8="]']);
  });

  test("outputs leave as they were asked for, binary or not, also where the worker does otherwise", () => {
    const ask = (parameters: object, outputs?: object): Drafts =>
      drafts(
        JSON.stringify({
          parameters,
          inputs: [{ name: "x", shape: [1], datatype: "FP32", data: [0.5] }],
          ...(outputs && { outputs }),
        }),
      );
    const json = '{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"data":[0.5]}]}';
    const raw =
      '{"outputs":[{"name":"y","datatype":"FP32","shape":[1],"raw":"AAAAPw=="}],"model_version":"2"}';
    for (const output of [json, raw]) {
      const numbers = ask({}).render([output], "m");
      assert.match(String(numbers.body), /"data":\[0.5\]/);
      const bytes = ask({ binary_data_output: true }).render([output], "m");
      assert.equal(bytes.type, "application/octet-stream");
      assert.equal((bytes.body as Buffer).subarray(-4).toString("hex"), "0000003f");
      const named = ask({ binary_data_output: true }, [{ name: "y", parameters: { binary_data: false } }]);
      assert.match(String(named.render([output], "m").body), /"data":\[0.5\]/);
    }
  });
});

describe("a worker without the binary extension", () => {
  const bytes = (...texts: string[]): Buffer =>
    Buffer.concat(
      texts.flatMap((each) => {
        const element = Buffer.from(each);
        return [Buffer.from(Uint32Array.of(element.length).buffer), element];
      }),
    );
  const view = (array: ArrayBufferView): Buffer => Buffer.from(array.buffer as ArrayBuffer);
  const raws: Record<string, Buffer> = {
    BOOL: Buffer.from([1, 0]),
    INT8: view(Int8Array.of(-128, 127)),
    UINT8: view(Uint8Array.of(0, 255)),
    INT16: view(Int16Array.of(-32768, 32767)),
    UINT16: view(Uint16Array.of(0, 65535)),
    INT32: view(Int32Array.of(-(2 ** 31), 2 ** 31 - 1)),
    UINT32: view(Uint32Array.of(0, 2 ** 32 - 1)),
    INT64: view(BigInt64Array.of(-(2n ** 63n), 9007199254740993n)),
    UINT64: view(BigUint64Array.of(2n ** 64n - 1n, 9007199254740993n)),
    FP16: view(Uint16Array.of(0x3c01, 0x8001)),
    FP32: view(Float32Array.of(0.1, -3.4e38)),
    FP64: view(Float64Array.of(0.1, -0)),
    BYTES: bytes("é\n", ""),
  };

  /** What such a server answers that gives back what it gets: JSON alone. */
  function echoed({ body, headers = {}, type }: ReturnType<typeof called>, rows: number): readonly string[] {
    assert.equal(typeof body, "string");
    assert.deepEqual([type, headers], [undefined, {}]);
    assert.doesNotMatch(body as string, /binary_data/);
    const asked = (body as string).replace('"outputs":', '"asked":');
    const reply = Buffer.from(asked.replace('{"inputs":', '{"model_name":"toy","outputs":'));
    const { outputs, flaw } = replied({ status: 200, headers: {}, body: reply }, rows);
    assert.equal(flaw, undefined);
    return outputs;
  }

  test("gets every datatype as JSON, and its client gets the very bytes back", () => {
    for (const [datatype, raw] of Object.entries(raws)) {
      const tensors = [{ name: "x", datatype, shape: [2, 1], raw }];
      for (const head of [
        { parameters: { binary_data_output: true, top: 1 } },
        { outputs: [{ name: "x", parameters: { binary_data: true, class: 2 } }] },
      ]) {
        const sent = writeMessage(head, tensors, "inputs");
        const asked = drafts(sent.body, { ...sent.headers });
        const call = worker.call(asked.inputs, asked.parameters, "toy", true);
        assert.equal(call.flaw, undefined, datatype);
        assert.match(call.body as string, "outputs" in head ? /"class":2/ : /"parameters":\{"top":1\}/);
        const { body, headers = [] } = asked.render(echoed(call, 2), "toy");
        const length = headers[headers.indexOf(HEADER) + 1];
        const json = (body as Buffer).subarray(0, Number(length)).toString();
        assert.match(json, new RegExp(`"datatype":"${datatype}","shape":\\[2,1\\]`));
        assert.deepEqual((body as Buffer).subarray(Number(length)), raw, datatype);
      }
    }
  });

  test("is not sent what JSON cannot say", () => {
    const cases: [datatype: string, raw: Buffer, words: RegExp][] = [
      [
        "BF16",
        Buffer.alloc(2),
        /^input "x" is BF16, which JSON cannot say; this model's workers take nothing else$/,
      ],
      ["FP32", view(Float32Array.of(Number.NaN)), /NaN or infinity/],
      ["FP16", Buffer.from("007c", "hex"), /NaN or infinity/],
      ["BYTES", Buffer.concat([Buffer.from(Uint32Array.of(1).buffer), Buffer.from([0xff])]), /not UTF-8/],
    ];
    for (const [datatype, raw, words] of cases) {
      const sent = writeMessage({}, [{ name: "x", datatype, shape: [1, 1], raw }], "inputs");
      const { inputs, parameters } = drafts(sent.body, { ...sent.headers });
      assert.match(worker.call(inputs, parameters, "toy", true).flaw ?? "", words);
      assert.equal(worker.call(inputs, parameters, "toy").flaw, undefined);
    }
  });

  test("says so in its metadata", () => {
    const { extension } = worker;
    assert.equal(
      extension!.listed('{"name":"triton","extensions":["classification","binary_tensor_data"]}'),
      true,
    );
    for (const text of ['{"name":"mlserver","extensions":[]}', '{"extensions":{}}', "[]", ""])
      assert.equal(extension!.listed(text), false);
  });
});

describe("what shares a batch", () => {
  const one = (more: object, tensor: object = {}): string => {
    const inputs = [{ name: "x", shape: [1, 2], datatype: "FP32", data: [1, 2], ...tensor }];
    return drafts(JSON.stringify({ inputs, ...more })).parameters;
  };

  test("id, priority and timeout do not matter, everything else does", () => {
    const plain = one({});
    assert.equal(one({ id: "7", parameters: { priority: 1, timeout: 5 }, outputs: [] }), plain);
    const others = [
      one({ parameters: { temperature: 1 } }),
      one({ parameters: { temperature: 1.5 } }),
      one({ outputs: [{ name: "y" }] }),
      one({ parameters: { binary_data_output: true } }),
      one({}, { name: "z" }),
      one({}, { datatype: "FP64" }),
      one({}, { shape: [2, 1] }),
      one({}, { shape: [1, 1, 2] }),
      one({}, { parameters: { content_type: "np" } }),
      drafts(
        JSON.stringify({ inputs: [{ name: "x", shape: [1, 2], datatype: "FP32", data: [1, 2] }] }),
        {},
        {
          names: { model: "toy", version: "3" },
        },
      ).parameters,
    ];
    assert.equal(new Set([plain, ...others]).size, others.length + 1);
    assert.equal(one({ parameters: { a: 1, b: 2 } }), one({ parameters: { b: 2, a: 1 } }));
  });

  test("what concerns one request alone, or cannot be cut, passes the batches by", () => {
    const tensor = { name: "x", shape: [1], datatype: "FP32", data: [1] };
    const body = (more: object, ...tensors: object[]): string =>
      JSON.stringify({ inputs: [tensor, ...tensors], ...more });
    assert.match(bypass(body({ parameters: { sequence_id: 4 } })), /sequence_id/);
    assert.match(bypass(body({ parameters: { triton_enable_empty_final_response: true } })), /triton_/);
    assert.match(
      bypass(body({ outputs: [{ name: "y", parameters: { shared_memory_region: "r" } }] })),
      /shared/,
    );
    assert.match(bypass(body({}, { ...tensor, parameters: { shared_memory_region: "r" } })), /shared/);
    assert.match(bypass(body({}, { ...tensor, shape: [2], data: [1, 2] })), /dimension 0/);
    assert.match(bypass(body({}, { ...tensor, shape: [] })), /dimension 0/);
    assert.match(bypass(JSON.stringify({ inputs: [{ ...tensor, shape: [0], data: [] }] })), /dimension 0/);
    assert.match(bypass(body({ model_name: "x" })), /model_name/);
    assert.match(bypass("raw", { [HEADER]: "0" }), /raw body/);
  });

  test("a model that takes one task at a time gets the request as a whole", () => {
    const body =
      '{"id":"q","inputs":[{"name":"x","shape":[2],"datatype":"INT64","data":[1,2]},' +
      '{"name":"y","shape":[],"datatype":"FP32","data":[0.50]}]}';
    const request = drafts(body, {}, { alone: true });
    const { inputs, parameters } = request;
    assert.deepEqual(inputs, ["[[1,2],[0.50]]"]);
    const sent = JSON.parse(called(inputs, parameters).body as string) as { inputs: { shape: number[] }[] };
    assert.deepEqual(
      sent.inputs.map(({ shape }) => shape),
      [[2], []],
    );
    assert.match(called(inputs, parameters).body as string, /0\.50/);
    assert.ok(worker.call([inputs[0]!, inputs[0]!], parameters, "toy").flaw);
    const reply =
      '{"model_name":"m","outputs":[{"name":"o","datatype":"FP32","shape":[5],"data":[1,2,3,4,5]}]}';
    const { outputs } = replied({ status: 200, headers: {}, body: Buffer.from(reply) }, 1);
    assert.match(
      String(request.render(outputs!, "toy").body),
      /"id":"q","outputs":\[\{"name":"o","datatype":"FP32","shape":\[5\]/,
    );
  });
});

describe("around the calls", () => {
  test("a worker's URL says where its base is and what it calls the model", () => {
    assert.equal(worker.basePath("/v2/models/m/infer"), "");
    assert.equal(worker.basePath("/gpu/v2/models/m/versions/3/infer"), "/gpu");
    assert.equal(worker.basePath("/gpu/"), "/gpu");
    assert.equal(worker.modelOf!("/v2/models/a%20b/infer"), "a b");
    assert.equal(worker.modelOf!("/"), undefined);
  });

  test("a version is asked for at its own path", () => {
    const body = '{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[1]}]}';
    const { inputs, parameters } = drafts(body, {}, { names: { model: "toy", version: "3/4" } });
    assert.equal(called(inputs, parameters).path, "/v2/models/toy/versions/3%2F4/infer");
    const astray = parameters.replace("3/4", "../../other");
    assert.throws(() => called(inputs, astray), /version must be/);
    assert.equal(called(inputs, drafts(body).parameters).path, undefined);
  });
});
