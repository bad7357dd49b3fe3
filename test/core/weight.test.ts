/** What a task weighs. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { Random } from "../../src/core/random.ts";
import { estimateTokens, inputBytes } from "../../src/core/weight.ts";

describe("estimateTokens", () => {
  const cases: readonly (readonly [input: string, tokens: number])[] = [
    ["[1,2,3]", 3],
    ["[ -15 , 20000 ]", 2],
    ["[\n\t7\r\n]", 1],
    ["[]", 1],
    ['""', 1],
    ['"abcd"', 1],
    ['"abcde"', 2],
    ['"Größe, déjà"', 3],
    ['"“quoted” — so…"', 4],
    ['"你好世界"', 4],
    ['"\\u4f60\\u597d"', 2],
    ['"\\u0061bcd"', 1],
    ['"a\\n\\"\\\\"', 1],
    ['"😀"', 1],
    ['"\\ud83d\\ude00"', 1],
    ['"привет"', 6],
    ["null", 1],
    ["12345678", 2],
    ["[1.5,2.5]", 3],
    ["[[1],[2]]", 3],
    ['["你好","hi"]', 5],
    ['{"text":"abcdefgh"}', 5],
    ['{"$length":12,"row":["AAAAAAAAAAAAAAAA"]}', 12],
    ['{"$length":2,"row":[[7,8],[1,1]]}', 2],
    ['{"$length":0,"row":[[]]}', 1],
    // Not what Ferry writes, or longer than it can be: counted as any other text.
    ['{"$length":99,"row":[[]]}', 7],
    ['{"$length":02,"row":[[]]}', 7],
    ['{"$length":,"row":[[]]}', 6],
    ['{"$length":1,"rows":[[]]}', 7],
  ];
  for (const [input, tokens] of cases) {
    test(`${JSON.stringify(input)} counts as ${tokens}`, () => assert.equal(estimateTokens(input), tokens));
  }

  test("a property: at least 1, never less for a longer text, and escapes change nothing", () => {
    const random = new Random(7);
    const alphabet = ["a", " ", "é", "\n", '"', "\\", "你", "ß", "…", "😀", "7", "Ж"];
    for (let round = 0; round < 2000; round++) {
      const letters = Array.from(
        { length: Math.floor(random.next() * 40) },
        () => alphabet[Math.floor(random.next() * alphabet.length)]!,
      );
      const text = letters.join("");
      const tokens = estimateTokens(JSON.stringify(text));
      assert.ok(tokens >= 1 && Number.isInteger(tokens));
      assert.ok(estimateTokens(JSON.stringify(`${text}a`)) >= tokens);
      const escaped = JSON.stringify(text).replaceAll(/[^\x20-\x7e]/g, escape);
      assert.equal(JSON.parse(escaped), text);
      assert.equal(estimateTokens(escaped), tokens, escaped);
    }
  });

  test("a property: an array of integers counts its elements, however it is written", () => {
    const random = new Random(3);
    for (let length = 1; length < 200; length++) {
      const numbers = Array.from({ length }, () => Math.floor((random.next() - 0.5) * 100_000));
      assert.equal(estimateTokens(JSON.stringify(numbers)), length);
      assert.equal(estimateTokens(JSON.stringify(numbers, undefined, 2)), length);
    }
    for (let length = 8180; length < 8200; length++)
      assert.equal(estimateTokens(`[${"7,".repeat(length)}7]`), length + 1);
    assert.equal(estimateTokens(`[${"123456, ".repeat(99_999)}-1]`), 100_000);
  });

  test("a property: ASCII with escapes counts as among other characters", () => {
    const random = new Random(11);
    const pieces = ["a", " ", "\\n", "\\\\", "\\u00e9", "\\u4f60", "\\ud83d\\ude00", '\\"', "word"];
    for (let round = 0; round < 2000; round++) {
      const text = Array.from(
        { length: Math.floor(random.next() * 30) },
        () => pieces[Math.floor(random.next() * pieces.length)],
      ).join("");
      // Four characters of a quarter each make one token.
      assert.equal(estimateTokens(`"${text}éééé"`), estimateTokens(`"${text}"`) + (text === "" ? 0 : 1));
    }
  });
});

/** One unit of UTF-16. */
function escape(unit: string): string {
  return `\\u${unit.charCodeAt(0).toString(16).padStart(4, "0")}`;
}

test("bytes are those of the JSON text in UTF-8", () => {
  for (const [input, bytes] of [
    ['"abc"', 5],
    ['"é"', 4],
    ['"你"', 5],
    ['"😀"', 6],
  ] as const)
    assert.equal(inputBytes(input), bytes);
});
