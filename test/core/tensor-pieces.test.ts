import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { DTYPES, elementBytes, flatTexts, numbersPieces, numbersText } from "../../src/core/tensor.ts";

function nested(numbers: readonly string[], [rows, ...inner]: readonly number[]): string {
  if (rows === undefined) return numbers[0]!;
  const step = rows === 0 ? 0 : numbers.length / rows;
  const parts = Array.from({ length: rows }, (_, row) =>
    nested(numbers.slice(row * step, (row + 1) * step), inner),
  );
  return `[${parts.join(",")}]`;
}

describe("the numbers of a tensor, a piece at a time", () => {
  const shapes = fc.oneof(
    fc.constantFrom([], [0], [1], [8190], [8191], [16_380], [3, 8190], [8190, 3], [2, 0, 3], [1, 1, 20_000]),
    fc.array(fc.integer({ min: 1, max: 40 }), { minLength: 1, maxLength: 3 }),
    fc.array(fc.integer({ min: 20, max: 30 }), { minLength: 3, maxLength: 3 }),
  );

  test("are those that are written in one go", () => {
    fc.assert(
      fc.property(fc.constantFrom(...DTYPES), shapes, fc.integer(), (dtype, shape, seed) => {
        const count = shape.reduce((product, dimension) => product * dimension, 1);
        const bytes = Buffer.from({ length: count * elementBytes(dtype) }).map(
          (_, at) => (at * 31 + seed) & 0xff,
        );
        const binary = { dtype, shape, base64: Buffer.from(bytes).toString("base64") };
        const whole = nested(flatTexts(dtype, Buffer.from(bytes)), shape);
        assert.equal([...numbersPieces(binary)].join(""), whole);
        assert.equal(numbersText(binary), whole);
      }),
      { numRuns: 60 },
    );
  });

  test("are no more than 8,190 in a piece", () => {
    const base64 = Buffer.alloc(4 * 50_000, 1).toString("base64");
    const pieces = [...numbersPieces({ dtype: "float32", shape: [50, 1000], base64 })];
    assert.equal(pieces.length, 7);
    for (const piece of pieces) assert.ok(piece.split(",").filter((each) => each !== "").length <= 8190);
  });

  test("of bytes without a shape, too", () => {
    const base64 = Buffer.alloc(20_000, 7).toString("base64");
    assert.equal([...numbersPieces({ base64 })].join(""), numbersText({ base64 }));
  });
});
