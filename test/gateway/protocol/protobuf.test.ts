/** The wire format, against the real library and against noise. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import {
  type InferRecord,
  rawOfContents,
  readInferRequest,
  readInferResponse,
  readModelName,
  readYes,
  writeInferRequest,
  writeInferResponse,
  writeModelMetadata,
  writeModelName,
  writeServerMetadata,
  writeYes,
} from "../../../src/gateway/protocol/oip-proto.ts";
import { TensorFlaw } from "../../../src/gateway/protocol/oip-tensors.ts";
import { ProtoFlaw, ProtoReader, ProtoWriter } from "../../../src/gateway/protocol/protobuf.ts";
import { type Parameter, readRequest, readResponse, requestBytes, service } from "./oip-service.ts";

const bytesOf = (writer: ProtoWriter): Buffer => Buffer.concat(writer.parts());
const int64 = fc.bigInt({ min: -(2n ** 63n), max: 2n ** 63n - 1n });
const uint64 = fc.bigInt({ min: 0n, max: 2n ** 64n - 1n });
const double = fc.double({ noNaN: true, noDefaultInfinity: true });

describe("fields", () => {
  test("every kind comes back as it was written", () => {
    const fields = fc.record({
      flag: fc.boolean(),
      whole: int64,
      real: double,
      text: fc.string({ unit: "grapheme" }).filter((text) => text.isWellFormed()),
      bytes: fc.uint8Array({ maxLength: 2000 }),
      field: fc.integer({ min: 1, max: 2 ** 29 - 1 }),
      numbers: fc.array(int64),
    });
    fc.assert(
      fc.property(fc.array(fields, { maxLength: 8 }), (all) => {
        const writer = new ProtoWriter();
        for (const { flag, whole, real, text, bytes, field, numbers } of all) {
          const inner = new ProtoWriter();
          inner.bool(1, flag);
          inner.int64(2, whole);
          inner.double(3, real);
          inner.string(4, text);
          inner.bytes(field, Buffer.from(bytes));
          inner.packed(5, (into) => numbers.forEach((each) => into.rawBig(each)));
          writer.message(field, inner);
        }
        const written = bytesOf(writer);
        assert.equal(written.length, writer.length);
        const reader = new ProtoReader(written);
        for (const { flag, whole, real, text, bytes, field, numbers } of all) {
          assert.ok(reader.next());
          assert.equal(reader.field, field);
          const inner = reader.message();
          assert.ok(inner.next() && inner.bool() === flag);
          assert.ok(inner.next() && BigInt.asIntN(64, inner.uint64()) === whole);
          assert.ok(inner.next() && Object.is(inner.double(), real));
          assert.ok(inner.next() && inner.string() === text);
          assert.ok(inner.next() && inner.field === field);
          assert.deepEqual(inner.bytes(), Buffer.from(bytes));
          const found: bigint[] = [];
          while (inner.next()) inner.each((one) => found.push(BigInt.asIntN(64, one.uint64())));
          assert.deepEqual(found, numbers);
        }
        assert.ok(!reader.next());
      }),
      { numRuns: 50 },
    );
  });

  test("fields that nobody knows are skipped, groups included", () => {
    const writer = new ProtoWriter();
    writer.double(99, 1.5);
    writer.bytes(98, Buffer.from("what"));
    writer.int64(97, -1n);
    const group = Buffer.from([
      (0x0b << 3) | 3,
      0x08,
      0x01,
      (0x0c << 3) | 3,
      (0x0c << 3) | 4,
      (0x0b << 3) | 4,
    ]);
    const bytes = Buffer.concat([bytesOf(writer), group, bytesOf(writeModelName("m", "2")), bytesOf(writer)]);
    assert.deepEqual(readModelName(bytes), { name: "m", version: "2" });
  });

  test("what is malformed is a ProtoFlaw that says how", () => {
    const cases: [hex: string, words: RegExp][] = [
      ["0a", /in the middle/],
      ["0a05", /in the middle/],
      ["0a0561", /in the middle/],
      ["0affffffffffffffffff01", /in the middle/],
      ["ffffffffffffffffffff01", /longer than 64 bits/],
      ["0a02fffe", /not UTF-8/],
      ["0801", /wire type 0 instead of 2/],
      ["00", /out of range/],
      ["5b", /in the middle of a group/],
      ["5b64", /did not begin/],
      ["5c", /wire type 4/],
      ["0e", /wire type 6/],
      ["5b".repeat(40), /nested/],
    ];
    for (const [hex, words] of cases) {
      const bytes = Buffer.from(hex, "hex");
      assert.throws(
        () => readModelName(bytes),
        (error) => error instanceof ProtoFlaw && words.test(error.message),
        hex,
      );
    }
    assert.throws(() => new ProtoReader(Buffer.alloc(0), 40), ProtoFlaw);
  });

  test("noise never does anything but give a flaw", () => {
    const expected = (read: () => unknown): void => {
      try {
        read();
      } catch (error) {
        assert.ok(error instanceof ProtoFlaw || error instanceof TensorFlaw, String(error));
      }
    };
    const good = requestBytes({
      model_name: "m",
      inputs: [{ name: "x", datatype: "INT64", shape: [2], contents: { int64_contents: ["-1", "5"] } }],
      raw_input_contents: [Buffer.from("abcdefgh")],
      parameters: { a: { double_param: 2.5 }, b: { string_param: "z" } },
    });
    const spoilt = fc
      .tuple(fc.nat(good.length - 1), fc.nat(255), fc.nat(good.length))
      .map(([at, byte, cut]) => {
        const copy = Buffer.from(good);
        copy[at] = byte;
        return copy.subarray(0, cut);
      });
    const noise = fc.uint8Array({ maxLength: 300 }).map((bytes) => Buffer.from(bytes));
    fc.assert(
      fc.property(fc.oneof(noise, spoilt), (bytes) => {
        expected(() => readInferRequest(bytes));
        expected(() => readInferResponse(bytes));
        expected(() => readModelName(bytes));
        expected(() => readYes(bytes));
        for (const datatype of ["INT64", "FP32", "BYTES", "BOOL", "UINT8"])
          expected(() => rawOfContents([bytes], datatype));
      }),
      { numRuns: 2000 },
    );
  });

  test("a message of very many tensors, parameters or dimensions is refused", () => {
    const tensor = Buffer.from([0x2a, 0x00]);
    assert.throws(() => readInferRequest(Buffer.concat(Array(2000).fill(tensor))), /more than 1024 tensors/);
    const deep = new ProtoWriter();
    const inner = new ProtoWriter();
    inner.packed(3, (into) => Array.from({ length: 33 }, () => into.rawVarint(1)));
    deep.message(5, inner);
    assert.throws(() => readInferRequest(bytesOf(deep)), /more than 32 dimensions/);
    const parameters = Object.fromEntries(
      Array.from({ length: 1025 }, (_, at) => [`p${at}`, { bool_param: true }]),
    );
    assert.throws(
      () => readInferRequest(requestBytes({ model_name: "", inputs: [], parameters })),
      /1024 parameters/,
    );
    // A key and nothing else, again: two bytes each would cost a message each.
    const again = Buffer.from([0x22, 0, 0x22, 0]);
    assert.throws(() => readInferRequest(again), /the parameter "" stands twice/);
  });
});

/** A parameter as the library takes it, and as we keep it. */
const parameter: fc.Arbitrary<[Parameter, string]> = fc.oneof(
  fc.boolean().map((value): [Parameter, string] => [{ bool_param: value }, String(value)]),
  int64.map((value): [Parameter, string] => [{ int64_param: String(value) }, String(value)]),
  fc.string().map((value): [Parameter, string] => [{ string_param: value }, JSON.stringify(value)]),
  uint64
    .filter((value) => value >= 2n ** 63n)
    .map((value): [Parameter, string] => [{ uint64_param: String(value) }, String(value)]),
);

describe("messages, against the real library", () => {
  const name = fc.string({ maxLength: 20 });
  const shape = fc.array(fc.nat(1000), { maxLength: 4 });
  const parameters = fc.dictionary(fc.string({ maxLength: 8 }), parameter, {
    maxKeys: 4,
    noNullPrototype: true,
  });
  const raw = fc.uint8Array({ maxLength: 1000 }).map((bytes) => Buffer.from(bytes));
  const tensor = fc.record({ name, datatype: fc.constantFrom("FP32", "BYTES"), shape, parameters, raw });
  const message = fc.record({
    model: name,
    version: name,
    id: name,
    parameters,
    tensors: fc.array(tensor, { maxLength: 4 }),
    outputs: fc.array(fc.record({ name, parameters }), { maxLength: 3 }),
  });
  const ours = (all: Record<string, [Parameter, string]>): Map<string, string> =>
    new Map(Object.entries(all).map(([key, [, text]]) => [key, text]));
  const theirs = (all: Record<string, [Parameter, string]>): Record<string, Parameter> =>
    Object.fromEntries(Object.entries(all).map(([key, [value]]) => [key, value]));

  test("what it writes, we read", () => {
    fc.assert(
      fc.property(message, ({ model, version, id, parameters, tensors, outputs }) => {
        const record = readInferRequest(
          requestBytes({
            model_name: model,
            model_version: version,
            id,
            parameters: theirs(parameters),
            inputs: tensors.map(({ name, datatype, shape, parameters }) => ({
              name,
              datatype,
              shape,
              parameters: theirs(parameters),
            })),
            outputs: outputs.map(({ name, parameters }) => ({ name, parameters: theirs(parameters) })),
            raw_input_contents: tensors.map(({ raw }) => raw),
          }),
        );
        const expected: InferRecord = {
          model,
          version,
          id,
          parameters: ours(parameters),
          tensors: tensors.map(({ name, datatype, shape, parameters }) => ({
            name,
            datatype,
            shape,
            parameters: ours(parameters),
            contents: [],
          })),
          outputs: outputs.map(({ name, parameters }) => ({ name, parameters: ours(parameters) })),
          raw: tensors.map(({ raw }) => raw),
        };
        assert.deepEqual(record, expected);
      }),
      { numRuns: 100 },
    );
  });

  test("what we write, it reads", () => {
    fc.assert(
      fc.property(message, ({ model, version, id, parameters, tensors, outputs }) => {
        const written = {
          model,
          version,
          id,
          parameters: ours(parameters),
          tensors: tensors.map((each) => ({ ...each, parameters: ours(each.parameters) })),
          outputs: outputs.map(({ name, parameters }) => ({ name, parameters: ours(parameters) })),
          typed: false,
        };
        const read = readRequest(bytesOf(writeInferRequest(written)));
        const value = (each: Parameter): unknown =>
          Object.entries(each).find(([key]) => key.endsWith("_param"))?.[1];
        const found = Object.entries(read.parameters ?? {}).map(([key, each]) => [key, String(value(each))]);
        const sent = Object.entries(parameters).map(([key, [each]]) => [key, String(value(each))]);
        assert.deepEqual(new Map(found as [string, string][]), new Map(sent as [string, string][]));
        assert.equal(read.model_name ?? "", model);
        assert.equal(read.id ?? "", id);
        assert.deepEqual(
          (read.inputs ?? []).map((each) => (each.shape ?? []).map(Number)),
          tensors.map((each) => each.shape),
        );
        assert.deepEqual(
          read.raw_input_contents ?? [],
          tensors.map((each) => each.raw),
        );
        const { outputs: _, ...answer } = written;
        const response = readResponse(bytesOf(writeInferResponse(answer)));
        assert.deepEqual(
          response.raw_output_contents ?? [],
          tensors.map((each) => each.raw),
        );
        assert.deepEqual(
          (response.outputs ?? []).map((each) => each.name ?? ""),
          tensors.map((each) => each.name),
        );
      }),
      { numRuns: 100 },
    );
  });

  test("the small ones", () => {
    const read = (method: string, writer: ProtoWriter): object =>
      service[method]!.responseDeserialize(bytesOf(writer));
    assert.deepEqual({ ...read("ServerLive", writeYes(true)) }, { live: true });
    assert.deepEqual({ ...read("ModelReady", writeYes(false)) }, {});
    assert.equal(readYes(service["ServerReady"]!.responseSerialize({ ready: true })), true);
    const server = read("ServerMetadata", writeServerMetadata("ferry", "1.2", ["binary_tensor_data"]));
    assert.deepEqual({ ...server }, { name: "ferry", version: "1.2", extensions: ["binary_tensor_data"] });
    const asked = service["ModelMetadata"]!.requestSerialize({ name: "m", version: "3" });
    assert.deepEqual(readModelName(asked), { name: "m", version: "3" });
    const model = {
      name: "m",
      versions: ["1", "2"],
      platform: "ferry",
      inputs: [{ name: "x", datatype: "FP32", shape: [-1, 4] }],
      outputs: [],
    };
    const told = JSON.parse(JSON.stringify(read("ModelMetadata", writeModelMetadata(model)))) as unknown;
    assert.deepEqual(told, {
      name: "m",
      versions: ["1", "2"],
      platform: "ferry",
      inputs: [{ name: "x", datatype: "FP32", shape: ["-1", "4"] }],
    });
  });

  test("a double stays one, also when it is whole", () => {
    for (const [value, text] of [
      [5, "5.0"],
      [-0, "-0.0"],
      [1e21, "1e+21"],
      [0.1, "0.1"],
    ] as const) {
      const bytes = requestBytes({ model_name: "m", inputs: [], parameters: { d: { double_param: value } } });
      const { parameters } = readInferRequest(bytes);
      assert.equal(parameters.get("d"), text);
      const again = { model: "", version: "", id: "", parameters, tensors: [], typed: false };
      const read = readRequest(bytesOf(writeInferRequest(again))).parameters!["d"] as {
        double_param: number;
      };
      assert.ok(Object.is(read.double_param, value));
    }
  });
});
