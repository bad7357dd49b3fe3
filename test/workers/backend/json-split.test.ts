import assert from "node:assert/strict";
import { describe, test } from "./suite.ts";
import fc from "fast-check";
import { outputFlaw, type Split, splitArray, splitField } from "../../../src/core/json-split.ts";

/** JSON text of a value with white space strewn between its tokens. */
const spaced = fc
  .tuple(fc.jsonValue({ stringUnit: "binary", maxDepth: 5 }), fc.constantFrom(0, 1, "\t", "\r\n"))
  .map(([value, indent]) => JSON.stringify(value, null, indent));

const gap = fc.constantFrom("", " ", "\n", "\t \r\n");

function elementsOf(split: Split): readonly string[] {
  if (split.flaw !== undefined) assert.fail(split.flaw);
  return split.elements;
}

describe("json-split:", () => {
  test("cuts any array into the exact texts of its elements", () => {
    fc.assert(
      fc.property(fc.array(fc.tuple(gap, spaced, gap)), gap, (parts, inner) => {
        const text = `${inner}[${parts.map((part) => part.join("")).join(",") || inner}]${inner}`;
        JSON.parse(text);
        assert.deepEqual(
          elementsOf(splitArray(text)),
          parts.map(([, element]) => element.trim()),
        );
      }),
      { numRuns: 500 },
    );
  });

  test("finds the array under a name among any other fields", () => {
    const key = fc.string({ unit: "binary" }).filter((key) => key !== "outputs");
    fc.assert(
      fc.property(
        fc.array(fc.tuple(key, spaced)),
        fc.array(spaced),
        fc.array(fc.tuple(key, spaced)),
        gap,
        (before, elements, after, space) => {
          const field = ([name, value]: [string, string]): string =>
            `${JSON.stringify(name)}${space}:${value}`;
          const outputs = `"outputs"${space}:${space}[${elements.join(`${space},`)}${space}]`;
          const fields = [...before.map(field), outputs, ...after.map(field)];
          const text = `${space}{${space}${fields.join(`${space},${space}`)}${space}}${space}`;
          const parsed = JSON.parse(text) as { outputs: unknown[] };
          const found = elementsOf(splitField(text, "outputs"));
          assert.deepEqual(found, elements);
          assert.deepEqual(
            found.map((element) => JSON.parse(element) as unknown),
            parsed.outputs,
          );
        },
      ),
      { numRuns: 500 },
    );
  });

  test("numbers keep their text", () => {
    const numbers = ["9223372036854775807", "-0", "1.50", "1E5", "0.1e-400", "12345678901234567890.10"];
    assert.deepEqual(elementsOf(splitArray(`[${numbers.join(" , ")}]`)), numbers);
  });

  test("a name is the same name when it is written with escapes", () => {
    assert.deepEqual(elementsOf(splitField('{"\\u006futputs":[1]}', "outputs")), ["1"]);
    assert.equal(splitField('{"outputs":[1],"\\u006futputs":[2]}', "outputs").flaw, 'has "outputs" twice');
  });

  test("says what is wrong", () => {
    const flaws: [text: string, flaw: string][] = [
      ["{}", 'has no "outputs"'],
      ['{"output":[]}', 'has no "outputs"'],
      ['{"data":{"outputs":[1]}}', 'has no "outputs"'],
      ['{"outputs":{}}', 'has "outputs" that is not an array'],
      ['{"outputs":null}', 'has "outputs" that is not an array'],
      ['{"outputs":"[1]"}', 'has "outputs" that is not an array'],
      ['{"outputs":[1],"outputs":[1]}', 'has "outputs" twice'],
      ["[1]", "is not an object"],
      ["null", "is not an object"],
      ['"{}"', "is not an object"],
    ];
    for (const [text, flaw] of flaws) assert.equal(splitField(text, "outputs").flaw, flaw, text);
    assert.equal(splitArray("{}").flaw, "is not an array");
  });

  test("a number that reads as Infinity is found wherever it stands among the elements", () => {
    const huge = [
      "1e400",
      "-1E+999",
      "9".repeat(310),
      `${"9".repeat(300)}e10`,
      "1.5e309",
      `-${"9".repeat(310)}.5`,
    ];
    for (const number of huge) {
      assert(!Number.isFinite(JSON.parse(number)), number);
      for (const text of [`[1,${number}]`, `[{"a":[[${number}]]}]`, `[ ${number} ]`]) {
        assert.equal(splitArray(text).flaw, "holds a number beyond the range of a double", text);
      }
    }
    assert.deepEqual(elementsOf(splitField('{"n":1e400,"outputs":[1],"m":1e400}', "outputs")), ["1"]);
  });

  test("agrees with JSON.parse on which numbers are finite", () => {
    const digits = (max: number): fc.Arbitrary<string> =>
      fc.array(fc.integer({ min: 0, max: 9 }), { minLength: 1, maxLength: max }).map((all) => all.join(""));
    const number = fc
      .tuple(digits(320), digits(20), fc.integer({ min: -330, max: 330 }), fc.boolean())
      .map(([whole, part, exponent, negative]) =>
        [
          negative ? "-" : "",
          whole.replace(/^0+(?=.)/, ""),
          `.${part}`,
          exponent === 0 ? "" : `e${exponent}`,
        ].join(""),
      );
    fc.assert(
      fc.property(number, (number) => {
        assert.equal(splitArray(`[${number}]`).flaw === undefined, Number.isFinite(JSON.parse(number)));
      }),
      { numRuns: 500 },
    );
  });

  test("vectors of numbers, as embeddings are, keep every digit and hide no Infinity", () => {
    const number = fc.oneof(
      {
        weight: 20,
        arbitrary: fc.double({ noNaN: true, noDefaultInfinity: true }).map((n) => JSON.stringify(n)),
      },
      { weight: 3, arbitrary: fc.constantFrom("true", "false", "null", "1e-7", "2.5E-05") },
      {
        weight: 1,
        arbitrary: fc.constantFrom("1e400", "9".repeat(309), `${"9".repeat(305)}e5`, "8".repeat(308)),
      },
    );
    fc.assert(
      fc.property(fc.array(fc.array(number, { maxLength: 40 }), { maxLength: 8 }), gap, (vectors, space) => {
        const texts = vectors.map((vector) => `[${space}${vector.join(`${space},`)}${space}]`);
        const split = splitArray(`[${texts.join(",")}]`);
        if (vectors.flat().some((one) => Math.abs(Number(JSON.parse(one))) === Infinity)) {
          assert.equal(split.flaw, "holds a number beyond the range of a double");
        } else assert.deepEqual(elementsOf(split), texts);
      }),
      { numRuns: 500 },
    );
  });

  test("quotes, brackets, numbers and backslashes inside strings are only text", () => {
    const texts = ['"\\\\"', '"\\""', '"a\\\\\\"],[1e400"', '"{[\\u005d"', '""', '"1e400"', '"\u2028]"'];
    assert.deepEqual(elementsOf(splitArray(`[${texts.join(",")}]`)), texts);
  });

  test("nesting of any depth is no recursion", () => {
    const deep = "[".repeat(200_000) + "]".repeat(200_000);
    assert.deepEqual(elementsOf(splitArray(`[${deep},1]`)), [deep, "1"]);
  });
});

describe("what no caller may get in an output", () => {
  test("is found in no value that JSON.stringify wrote", () => {
    fc.assert(
      fc.property(spaced, (text) => assert.equal(outputFlaw(text), undefined)),
      { numRuns: 500 },
    );
  });

  test("a key twice, at any depth, however it is escaped, and nowhere else", () => {
    interface Written {
      readonly text: string;
      readonly twice: boolean;
    }
    const key = fc.constantFrom(
      '"a"',
      '"b"',
      String.raw`"\u0061"`,
      '""',
      String.raw`"\""`,
      '"é"',
      '"{"',
      '","',
    );
    const { value } = fc.letrec<{ value: Written }>((tie) => ({
      value: fc.oneof(
        { maxDepth: 4 },
        fc
          .constantFrom("1", '"a"', String.raw`"a\",\"a"`, "[]", "[1,2]", "null", '{"a":[]}')
          .map((text) => ({ text, twice: false })),
        fc.array(tie("value"), { maxLength: 3 }).map((all) => ({
          text: `[${all.map(({ text }) => text).join(" , ")}]`,
          twice: all.some(({ twice }) => twice),
        })),
        fc.array(fc.tuple(key, tie("value")), { maxLength: 4 }).map((all) => ({
          text: `{${all.map(([name, { text }]) => `${name} : ${text}`).join(",")}}`,
          twice:
            all.some(([, { twice }]) => twice) ||
            new Set(all.map(([name]) => JSON.parse(name) as string)).size < all.length,
        })),
      ),
    }));
    fc.assert(
      fc.property(value, ({ text, twice }) => {
        JSON.parse(text);
        assert.equal(outputFlaw(text), twice ? "has a key twice" : undefined, text);
      }),
      { numRuns: 1000 },
    );
  });

  test("a key twice among many", () => {
    const keys = Array.from({ length: 1000 }, (_, at) => `"k${at}":${at}`);
    assert.equal(outputFlaw(`{${keys.join(",")}}`), undefined);
    for (const again of [0, 14, 15, 16, 999]) {
      assert.equal(outputFlaw(`{${keys.join(",")},"k${again}":0}`), "has a key twice");
    }
  });

  test("nesting, in whatever brackets", () => {
    const nested = (depth: number, open: string, close: string): string =>
      open.repeat(depth) + (open === "[" ? "" : "1") + close.repeat(depth);
    for (const [open, close] of [
      ["[", "]"],
      ['{"a":', "}"],
    ] as const) {
      assert.equal(outputFlaw(nested(64, open, close)), undefined);
      assert.equal(outputFlaw(nested(65, open, close)), "is nested deeper than 64");
      assert.equal(outputFlaw(nested(200_000, open, close)), "is nested deeper than 64");
    }
  });

  test("any text can be looked at", () => {
    fc.assert(
      fc.property(
        fc.string({ unit: fc.constantFrom("{", "}", "[", "]", '"', ":", ",", "1", "e", "u", "\\") }),
        (text) => {
          outputFlaw(text);
        },
      ),
      { numRuns: 2000 },
    );
  });
});
