/** Typed contents, against the real library. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import {
  contentsOfRaw,
  NO_PARAMETERS,
  rawOfContents,
  readInferRequest,
  writeInferRequest,
} from "../../../src/gateway/protocol/oip-proto.ts";
import { jsonFromRaw, rawFromJson, TensorFlaw } from "../../../src/gateway/protocol/oip-tensors.ts";
import { ProtoFlaw, ProtoWriter } from "../../../src/gateway/protocol/protobuf.ts";
import { type Contents, readRequest, requestBytes } from "./oip-service.ts";

const bytesOf = (writer: ProtoWriter): Buffer => Buffer.concat(writer.parts());

describe("typed contents", () => {
  const cases: [datatype: string, contents: Contents, json: string][] = [
    ["BOOL", { bool_contents: [true, false] }, "[true,false]"],
    ["INT8", { int_contents: [-128, 127] }, "[-128,127]"],
    ["INT16", { int_contents: [-32768, 0, 32767] }, "[-32768,0,32767]"],
    ["INT32", { int_contents: [-2147483648, 2147483647] }, "[-2147483648,2147483647]"],
    [
      "INT64",
      { int64_contents: ["-9223372036854775808", "9223372036854775807"] },
      "[-9223372036854775808,9223372036854775807]",
    ],
    ["UINT8", { uint_contents: [0, 255] }, "[0,255]"],
    ["UINT32", { uint_contents: [4294967295] }, "[4294967295]"],
    ["UINT64", { uint64_contents: ["18446744073709551615"] }, "[18446744073709551615]"],
    ["FP32", { fp32_contents: [0.5, -1.25] }, "[0.5,-1.25]"],
    ["FP64", { fp64_contents: [0.1] }, "[0.1]"],
    ["BYTES", { bytes_contents: [Buffer.from("a"), Buffer.alloc(0), Buffer.from("é")] }, '["a","","é"]'],
  ];
  for (const [datatype, contents, json] of cases) {
    test(`${datatype}, read and written`, () => {
      const bytes = requestBytes({
        model_name: "m",
        inputs: [{ name: "x", datatype, shape: [1], contents }],
      });
      const raw = rawOfContents(readInferRequest(bytes).tensors[0]!.contents, datatype);
      assert.equal(jsonFromRaw(raw, datatype), json);
      assert.deepEqual(raw, rawFromJson(json, datatype));
      const tensor = { name: "x", datatype, shape: [1], parameters: NO_PARAMETERS, raw };
      const written = {
        model: "m",
        version: "",
        id: "",
        parameters: NO_PARAMETERS,
        tensors: [tensor],
        typed: true,
      };
      const read = readRequest(bytesOf(writeInferRequest(written)));
      const [list] = Object.keys(contents) as (keyof Contents)[];
      assert.deepEqual([...read.inputs[0]!.contents![list!]!], [...contents[list!]!]);
    });
  }

  test("in several pieces and unpacked they are the same", () => {
    const unpacked = Buffer.from([0x10, 0x01, 0x10, 0x02, 0x12, 0x02, 0x03, 0x04]);
    assert.equal(jsonFromRaw(rawOfContents([unpacked, unpacked], "INT32"), "INT32"), "[1,2,3,4,1,2,3,4]");
    const floats = bytesOf(contentsOfRaw(rawFromJson("[1,2]", "FP32"), "FP32"));
    const one = Buffer.concat([Buffer.from([0x35]), rawFromJson("[3]", "FP32")]);
    assert.equal(jsonFromRaw(rawOfContents([floats, one], "FP32"), "FP32"), "[1,2,3]");
  });

  test("what does not fit is refused", () => {
    const packed = (field: number, ...values: bigint[]): Buffer => {
      const writer = new ProtoWriter();
      writer.packed(field, (into) => values.forEach((each) => into.rawBig(each)));
      return bytesOf(writer);
    };
    assert.throws(() => rawOfContents([packed(2, 128n)], "INT8"), /128, which is no value of INT8/);
    assert.throws(() => rawOfContents([packed(4, 256n)], "UINT8"), TensorFlaw);
    assert.throws(() => rawOfContents([packed(2, 1n)], "FP32"), /contents of another type/);
    assert.throws(() => rawOfContents([], "FP16"), /send raw contents/);
    assert.throws(() => rawOfContents([], "FLOAT"), /not known/);
    assert.throws(() => rawOfContents([Buffer.from([0x32, 0x03, 0, 0, 0])], "FP32"), ProtoFlaw);
    assert.throws(() => contentsOfRaw(Buffer.alloc(3), "INT32"), TensorFlaw);
    assert.throws(() => contentsOfRaw(Buffer.alloc(4), "BF16"), TensorFlaw);
  });
});
