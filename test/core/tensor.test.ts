import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import {
  asSingles,
  bytesText,
  DTYPES,
  elementBytes,
  fitted,
  mayBeBinary,
  numbersText,
  readBinary,
  singlesList,
  singleText,
  tensorText,
} from "../../src/core/tensor.ts";

const shapes = fc.array(fc.integer({ min: 0, max: 5 }), { maxLength: 4 });
const tensors = fc.record({ dtype: fc.constantFrom(...DTYPES), shape: shapes }).chain(({ dtype, shape }) => {
  const length = shape.reduce((product, each) => product * each, elementBytes(dtype));
  return fc.uint8Array({ minLength: length, maxLength: length }).map((bytes) => ({
    dtype,
    shape,
    base64: Buffer.from(bytes).toString("base64"),
  }));
});

function flat(value: unknown): unknown[] {
  return Array.isArray(value) ? value.flatMap(flat) : [value];
}

describe("a tensor as text", () => {
  test("reads as what was written, and is valid JSON", () => {
    fc.assert(
      fc.property(tensors, (tensor) => {
        const text = tensorText(tensor);
        assert.deepEqual(readBinary(text), tensor);
        assert.equal(fitted(text), text);
        assert.deepEqual(JSON.parse(text), {
          $tensor: tensor.dtype,
          shape: tensor.shape,
          base64: tensor.base64,
        });
        assert.deepEqual(readBinary(bytesText(tensor.base64)), { base64: tensor.base64 });
      }),
    );
  });

  test("written another way it is put in order; what is none is refused", () => {
    const good = '{"$tensor":"float32","shape":[1],"base64":"AACAPw=="}';
    for (const text of [
      '{"$tensor": "float32", "shape": [1], "base64": "AACAPw=="}',
      ' {"$tensor":"float32","base64":"AACAPw==","shape":[1]}',
      '{"$tensor":"float32","shape":[1],"base64":"AACAPw\\u003d="}',
    ]) {
      assert.equal(fitted(text), good, text);
    }
    for (const text of [
      '{"$tensor":"float32"}',
      '{"$tensor":7,"shape":[1],"base64":"AACAPw=="}',
      '{"$tensor":"complex64","shape":[1],"base64":"AACAPw=="}',
      '{"$tensor":"constructor","shape":[1],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":[2],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":[-1],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":[1.5],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":["1"],"base64":"AACA"}',
      '{"$tensor":"float32","shape":1,"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":[null],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":[[]],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":[[1]],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":["1"],"base64":"AACAPw=="}',
      '{"$tensor":"float32","shape":[1],"base64":"AACAPw="}',
      '{"$tensor":"float32","shape":[1],"base64":"AACA!w=="}',
      '{"$tensor":"float32","shape":[1],"base64":"A=CAPw=="}',
      '{"$tensor":"float32","shape":[1],"base64":"AACAPw==","more":1}',
      '{"$tensor":"uint8","shape":[4294967296,4294967296],"base64":""}',
      '{"$bytes":"A"}',
      '{"$bytes":[1]}',
      '{"$bytes":"AAAA","x":"AAAA"}',
    ]) {
      assert.equal(fitted(text), undefined, text);
      assert.ok(mayBeBinary(text));
    }
    for (const text of ["null", "[1]", '"$tensor"', '{"a":{"$tensor":1}}', '{"$tensors":1}', "{}", ""]) {
      assert.equal(fitted(text), text);
      assert.equal(readBinary(text), undefined);
    }
  });

  test("no text at all is a crash, and none is taken for a tensor that is none", () => {
    const near = tensors.chain((tensor) => {
      const text = tensorText(tensor);
      return fc
        .tuple(fc.nat(text.length), fc.nat(3), fc.string({ maxLength: 3 }))
        .map(([at, gone, more]) => `${text.slice(0, at)}${more}${text.slice(at + gone)}`);
    });
    fc.assert(
      fc.property(near, (text) => {
        readBinary(text);
        let value: unknown;
        try {
          value = JSON.parse(text);
        } catch {
          return;
        }
        const fit = fitted(text);
        if (fit === undefined || fit === text) return;
        assert.deepEqual(JSON.parse(fit), value);
      }),
      { numRuns: 2000 },
    );
  });
});

describe("a tensor as numbers", () => {
  test("has the shape that it says", () => {
    fc.assert(
      fc.property(tensors, (tensor) => {
        const shapeOf = (value: unknown): number[] =>
          Array.isArray(value) ? [value.length, ...(value.length === 0 ? [] : shapeOf(value[0]))] : [];
        const value: unknown = JSON.parse(numbersText(tensor));
        const first = tensor.shape.indexOf(0);
        assert.deepEqual(shapeOf(value), first < 0 ? tensor.shape : tensor.shape.slice(0, first + 1));
        assert.equal(
          flat(value).length,
          tensor.shape.reduce((product, each) => product * each, 1),
        );
      }),
    );
    for (const shape of [
      [1_000_000_000, 0],
      [1025, 0],
      [60_000, 60_000, 0],
      [...Array<number>(31).fill(2), 0],
    ]) {
      assert.equal(numbersText({ dtype: "uint8", shape, base64: "" }), "[]");
    }
    assert.equal(numbersText({ dtype: "uint8", shape: [2, 0, 1_000_000_000], base64: "" }), "[[],[]]");
    assert.equal(numbersText({ base64: "AP8=" }), "[0,255]");
  });

  test("of every type", () => {
    const cases: [(typeof DTYPES)[number], ArrayBufferView, string][] = [
      ["bool", Uint8Array.of(0, 1, 7), "[false,true,true]"],
      ["int8", Int8Array.of(-128, 127), "[-128,127]"],
      ["uint8", Uint8Array.of(0, 255), "[0,255]"],
      ["int16", Int16Array.of(-32_768, 5), "[-32768,5]"],
      ["uint16", Uint16Array.of(65_535), "[65535]"],
      ["int32", Int32Array.of(-2_147_483_648), "[-2147483648]"],
      ["uint32", Uint32Array.of(4_294_967_295), "[4294967295]"],
      ["int64", BigInt64Array.of(-9_223_372_036_854_775_808n), "[-9223372036854775808]"],
      ["uint64", BigUint64Array.of(18_446_744_073_709_551_615n), "[18446744073709551615]"],
      [
        "float16",
        Uint16Array.of(0x3c00, 0x8001, 0x7bff, 0xfc00, 0x7e00),
        "[1,-5.9604645e-8,65504,null,null]",
      ],
      ["float32", Float32Array.of(0.1, -0, NaN, 1e-45), "[0.1,-0,null,1e-45]"],
      ["float64", Float64Array.of(0.1, Infinity, 5e-324), "[0.1,null,5e-324]"],
    ];
    for (const [dtype, view, text] of cases) {
      const bytes = Buffer.from(view.buffer as ArrayBuffer);
      const shape = [bytes.length / elementBytes(dtype)];
      assert.equal(numbersText({ dtype, shape, base64: bytes.toString("base64") }), text);
    }
  });

  test("a float32 is as short as it can be and comes back as the same one", () => {
    const check = (value: number): void => {
      const text = singleText(value);
      assert.equal(singlesList(Buffer.from(Float32Array.of(value, value).buffer)), `[${text},${text}]`);
      if (!Number.isFinite(value)) return assert.equal(text, "null");
      assert.ok(Object.is(Math.fround(Number(text)), value), `${value} became ${text}`);
      const shorter = Number(value.toPrecision(Math.max(1, digitsOf(text) - 1)));
      assert.ok(digitsOf(text) <= 9);
      assert.ok(digitsOf(text) === 1 || Math.fround(shorter) !== value, `${text} could be ${shorter}`);
    };
    fc.assert(fc.property(fc.float(), check), { numRuns: 5000 });
    const near = fc.float({ min: -1, max: 1, noNaN: true });
    fc.assert(fc.property(near, check), { numRuns: 5000 });
    for (const value of [
      0.1, 1e-6, 1e5, 0.99999999, 1.5, -99_999.99, 1e10, 3.4028234663852886e38, 16_777_217, 1e-38, 1e-14,
      123456.7, 9.67117e-10,
    ].map(Math.fround)) {
      check(value);
    }
  });

  test("any type becomes float32 for those who know no other", () => {
    const half = Buffer.from(Uint16Array.of(0x3c00, 0xc000).buffer).toString("base64");
    const back = Buffer.from(asSingles({ dtype: "float16", shape: [2], base64: half }), "base64");
    assert.deepEqual([back.readFloatLE(0), back.readFloatLE(4)], [1, -2]);
    assert.equal(asSingles({ dtype: "float32", shape: [1], base64: "AACAPw==" }), "AACAPw==");
  });
});

/** Digits that count, of a number as JSON. */
function digitsOf(text: string): number {
  const digits = text.replace(/e.*$/, "").replace(/[-.]/g, "").replace(/^0+/, "");
  return Math.max(1, text.includes(".") ? digits.length : digits.replace(/0+$/, "").length);
}
