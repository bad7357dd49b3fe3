/** Raw bytes and flat JSON say the same, and rows are cut where they end. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import {
  bytesOfElement,
  checkCells,
  countFlat,
  datatypeBytes,
  elementCount,
  elementsOfBytes,
  flatten,
  joinFlat,
  jsonFromRaw,
  rawFromJson,
  rowsOf,
  rowsOfFlat,
  rowsOfRaw,
  TensorFlaw,
} from "../../../src/gateway/protocol/oip-tensors.ts";

const flaw = (words: RegExp) => (error: unknown) => error instanceof TensorFlaw && words.test(error.message);

const FIXED = ["BOOL", "INT8", "UINT8", "INT16", "UINT16", "INT32", "UINT32", "INT64", "UINT64"] as const;

describe("raw and JSON", () => {
  test("known bytes", () => {
    assert.equal(rawFromJson("[1,-2]", "INT32").toString("hex"), "01000000feffffff");
    assert.equal(rawFromJson("[1.5]", "FP32").toString("hex"), "0000c03f");
    assert.equal(rawFromJson("[1.5]", "FP64").toString("hex"), "000000000000f83f");
    assert.equal(rawFromJson("[true, false, 1, 0]", "BOOL").toString("hex"), "01000100");
    assert.equal(rawFromJson('["é","" ]', "BYTES").toString("hex"), "02000000c3a900000000");
    assert.equal(
      rawFromJson("[9223372036854775807, -9223372036854775808,1.0,1e3]", "INT64").toString("hex"),
      "ffffffffffffff7f00000000000000800100000000000000e803000000000000",
    );
    assert.equal(rawFromJson("[]", "FP32").length, 0);
  });

  test("every integer comes back with all of its digits", () => {
    for (const datatype of FIXED) {
      const size = datatypeBytes(datatype);
      fc.assert(
        fc.property(fc.uint8Array({ maxLength: 12 }), (seed) => {
          const raw = Buffer.alloc(seed.length * size);
          seed.forEach((byte, at) => raw.fill(datatype === "BOOL" ? byte & 1 : byte ^ at, at * size));
          if (datatype === "BOOL") raw.forEach((byte, at) => (raw[at] = byte & 1));
          const text = jsonFromRaw(raw, datatype);
          assert.doesNotThrow(() => JSON.parse(text));
          assert.deepEqual(rawFromJson(text, datatype), raw);
        }),
      );
    }
  });

  test("a bigint of any value survives", () => {
    fc.assert(
      fc.property(fc.array(fc.bigInt({ min: 0n, max: 2n ** 64n - 1n })), (values) => {
        const text = `[${values.join(",")}]`;
        assert.equal(jsonFromRaw(rawFromJson(text, "UINT64"), "UINT64"), text);
      }),
    );
  });

  test("floats are printed as short as they read back", () => {
    assert.equal(
      jsonFromRaw(rawFromJson("[0.1,-0,3e38,1e-45,16777216,1e-7]", "FP32"), "FP32"),
      ["[0.1,-0,3e+38,1e-45,16777216,1e-7]"][0],
    );
    const float = fc.float({ noNaN: true, noDefaultInfinity: true });
    fc.assert(
      fc.property(fc.array(float), (values) => {
        const raw = Buffer.from(new Float32Array(values).buffer);
        const text = jsonFromRaw(raw, "FP32");
        assert.deepEqual(rawFromJson(text, "FP32"), raw);
        for (const word of text.slice(1, -1).split(",")) {
          assert.ok(word.replace(/^-|e.*$|\./g, "").replace(/^0+|0+$/g, "").length <= 9, word);
        }
      }),
    );
    fc.assert(
      fc.property(fc.array(fc.double({ noNaN: true, noDefaultInfinity: true })), (values) => {
        const raw = Buffer.from(new Float64Array(values).buffer);
        assert.deepEqual(rawFromJson(jsonFromRaw(raw, "FP64"), "FP64"), raw);
      }),
    );
  });

  test("every half that is a number comes back", () => {
    const all = Uint16Array.from({ length: 65_536 }, (_, bits) => bits).filter(
      (bits) => (bits & 0x7c00) !== 0x7c00,
    );
    const raw = Buffer.from(all.buffer);
    const text = jsonFromRaw(raw, "FP16");
    assert.doesNotThrow(() => JSON.parse(text));
    assert.deepEqual(rawFromJson(text, "FP16"), raw);
    assert.equal(jsonFromRaw(rawFromJson("[1.5,-2,65504]", "FP16"), "FP16"), "[1.5,-2,65504]");
    assert.throws(() => jsonFromRaw(Buffer.from("007c", "hex"), "FP16"), flaw(/infinity/));
  });

  test("raw that starts at an odd place", () => {
    const raw = Buffer.concat([Buffer.from([7]), rawFromJson("[1.25,2]", "FP64")]).subarray(1);
    assert.equal(jsonFromRaw(raw, "FP64"), "[1.25,2]");
  });

  test("strings survive, bytes that are none are refused", () => {
    const text = fc.array(fc.string({ unit: "grapheme" }).filter((word) => word.isWellFormed()));
    fc.assert(
      fc.property(text, (words) => {
        const raw = rawFromJson(JSON.stringify(words), "BYTES");
        assert.deepEqual(JSON.parse(jsonFromRaw(raw, "BYTES")), words);
      }),
    );
    assert.throws(() => jsonFromRaw(bytesOfElement(Buffer.from([0xff])), "BYTES"), flaw(/not UTF-8/));
    assert.throws(() => rawFromJson('["\\ud800"]', "BYTES"), flaw(/surrogate/));
    assert.throws(() => [...elementsOfBytes(Buffer.from([5, 0, 0, 0, 1]))], flaw(/in the middle/));
    assert.throws(() => [...elementsOfBytes(Buffer.from([5, 0]))], flaw(/in the middle/));
  });

  test("what does not fit is said", () => {
    assert.throws(() => rawFromJson("[256]", "UINT8"), flaw(/^holds 256, which is no value of UINT8$/));
    assert.throws(() => rawFromJson("[1.5]", "INT8"), flaw(/holds 1.5/));
    assert.throws(() => rawFromJson('["a"]', "FP32"), flaw(/holds "a"/));
    assert.throws(() => rawFromJson("[null]", "BOOL"), flaw(/holds null/));
    assert.throws(() => rawFromJson("[1e39]", "FP32"), flaw(/range of FP32/));
    assert.throws(() => rawFromJson("[1e400]", "FP64"), flaw(/range of FP64/));
    assert.throws(() => rawFromJson("[-1]", "UINT64"), flaw(/holds -1/));
    assert.throws(() => rawFromJson("[9223372036854775808]", "INT64"), flaw(/holds 9223372036854775808/));
    assert.throws(() => rawFromJson("[1.5]", "INT64"), flaw(/holds 1.5/));
    assert.throws(() => rawFromJson("[1e400]", "INT64"), flaw(/double/));
    assert.throws(() => rawFromJson("[65520]", "FP16"), flaw(/range of FP16/));
    assert.throws(() => rawFromJson("[1]", "BF16"), flaw(/binary form/));
    assert.throws(() => jsonFromRaw(Buffer.alloc(2), "BF16"), flaw(/binary form/));
    assert.throws(() => jsonFromRaw(Buffer.alloc(3), "FP32"), flaw(/no whole number/));
    assert.throws(() => jsonFromRaw(Buffer.from("0000807f", "hex"), "FP32"), flaw(/infinity/));
    assert.throws(() => datatypeBytes("FLOAT"), flaw(/"FLOAT", which is not known/));
  });
});

describe("rows", () => {
  test("of raw are slices, in order", () => {
    const raw = rawFromJson("[1,2,3,4,5,6]", "INT16");
    const rows = rowsOfRaw(raw, "INT16", [3, 2]);
    assert.deepEqual(
      rows.map((row) => jsonFromRaw(row, "INT16")),
      ["[1,2]", "[3,4]", "[5,6]"],
    );
    assert.equal(rows[1]!.buffer, raw.buffer);
    assert.deepEqual(Buffer.concat(rows), raw);
    assert.deepEqual(rowsOfRaw(Buffer.alloc(0), "FP32", [0, 4]), []);
    assert.equal(rowsOfRaw(Buffer.alloc(0), "FP32", [2, 0]).length, 2);
    assert.throws(() => rowsOfRaw(raw, "INT16", [3, 3]), flaw(/has 12 bytes, but .* needs 18/));
  });

  test("of BYTES end where their elements do", () => {
    const words = ["a", "", "ccc", "dd"];
    const rows = rowsOfRaw(rawFromJson(JSON.stringify(words), "BYTES"), "BYTES", [2, 2]);
    assert.deepEqual(
      rows.map((row) => jsonFromRaw(row, "BYTES")),
      ['["a",""]', '["ccc","dd"]'],
    );
    assert.throws(() => rowsOfRaw(rows[0]!, "BYTES", [1, 1]), flaw(/4 bytes behind/));
    assert.throws(() => rowsOfRaw(rows[0]!, "BYTES", [1, 3]), flaw(/in the middle/));
  });

  test("a shape is bounded", () => {
    assert.throws(() => rowsOf([]), flaw(/empty shape/));
    assert.throws(() => rowsOf([-1]), flaw(/dimension of -1/));
    assert.throws(() => rowsOf([1, 0.5]), flaw(/dimension of 0.5/));
    assert.equal(rowsOf([2 ** 40, 0]), 2 ** 40);
    assert.throws(() => checkCells(1025, 1), flaw(/at most 1024 tensors/));
    assert.throws(() => checkCells(33, 2048), flaw(/has 2048 rows of 33 tensors; /));
    checkCells(32, 2048);
    assert.throws(() => elementCount([2 ** 40, 2 ** 40]), flaw(/too large/));
    assert.equal(elementCount([]), 1);
  });

  test("of flat text are cut between values", () => {
    assert.deepEqual(rowsOfFlat("[1, 2.50,3 ,4]", 2), ["[1, 2.50]", "[3 ,4]"]);
    assert.deepEqual(rowsOfFlat('["a,b","]","\\"," ,""]', 4), ['["a,b"]', '["]"]', '["\\","]', '[""]']);
    assert.deepEqual(rowsOfFlat(" [ ] ", 2), ["[]", "[]"]);
    assert.deepEqual(rowsOfFlat("[]", 0), []);
    assert.throws(() => rowsOfFlat("[1,2,3]", 2), flaw(/3 values, which cannot be cut into 2 rows/));
    assert.throws(() => rowsOfFlat("[1]", 0), flaw(/0 rows/));
  });

  test("cut and joined again, a flat array is the same", () => {
    const value = fc.oneof(
      fc.integer(),
      fc.string(),
      fc.boolean(),
      fc.constantFrom('"', ",", "[", "\\", "]"),
    );
    fc.assert(
      fc.property(fc.integer({ min: 1, max: 5 }), fc.array(value), (rows, values) => {
        const all = Array.from({ length: rows }, () => values).flat();
        const text = JSON.stringify(all);
        assert.equal(countFlat(text), all.length);
        const cut = rowsOfFlat(text, rows);
        assert.deepEqual(cut, Array(rows).fill(JSON.stringify(values)));
        assert.equal(joinFlat(cut), text);
      }),
    );
  });

  test("nested arrays become flat, and number texts stay", () => {
    assert.equal(flatten(" [[1.10, 2e5],\n[-0 ,9223372036854775807]] "), "[1.10,2e5,-0,9223372036854775807]");
    assert.equal(flatten("[1, 2]"), "[1, 2]");
    assert.equal(flatten("[[],[]]"), "[]");
    assert.equal(flatten('[["a]","\\"["],["{"]]'), '["a]","\\"[","{"]');
    assert.throws(() => flatten("[[{}]]"), flaw(/object/));
    assert.throws(() => flatten('[{"a":1}]'), flaw(/object/));
    assert.throws(() => flatten("3"), flaw(/no array/));
    const leaf = fc.oneof(fc.integer(), fc.string(), fc.boolean());
    const tree = fc.letrec<{ node: unknown; array: unknown[] }>((tie) => ({
      node: fc.oneof({ maxDepth: 4 }, leaf, tie("array")),
      array: fc.array(tie("node"), { maxLength: 4 }),
    })).array;
    fc.assert(
      fc.property(tree, fc.constantFrom(undefined, 1), (values, indent) => {
        const flat = values.flat(Infinity);
        assert.deepEqual(JSON.parse(flatten(JSON.stringify(values, null, indent))), flat);
      }),
    );
  });
});
