import assert from "node:assert/strict";
import { test } from "node:test";
import fc from "fast-check";
import { canonical, MAX_DEPTH, MAX_KEYS, scan } from "../../src/core/json.ts";

/** Any JSON value, without the keys that are refused. */
const json = fc.jsonValue({ maxDepth: 5 }).filter((value) => !JSON.stringify(value).includes("__proto__"));
const space = fc.constantFrom("", " ", "\n", "\t  ");

test("fields are found where they stand, whatever is in them", () => {
  fc.assert(
    fc.property(fc.dictionary(fc.string(), json), space, (object, gap) => {
      const entries = Object.entries(object).filter(([key]) => key !== "__proto__");
      const text = `${gap}{${entries.map(([key, value]) => `${gap}${JSON.stringify(key)}${gap}:${gap}${JSON.stringify(value)}${gap}`).join(",")}}${gap}`;
      const { fields, problem } = scan(text);
      assert.equal(problem, undefined);
      const found = [...fields!].map(([key, [start, end]]) => [
        key,
        JSON.stringify(JSON.parse(text.slice(start, end))),
      ]);
      assert.deepEqual(
        found,
        entries.map(([key, value]) => [key, JSON.stringify(value)]),
      );
    }),
    { numRuns: 1000 },
  );
});

test("a scan of any text at all ends and does not throw", () => {
  fc.assert(
    fc.property(
      fc.string({ unit: fc.constantFrom(...'{ } [ ] " , : \\ u 0 1 d D e f F - + . \n'.split(" "), " ") }),
      (text) => {
        scan(text);
      },
    ),
    { numRuns: 5000 },
  );
});

const refused: [string, string][] = [
  ['{"__proto__":1}', "__proto__"],
  ['{"a":[{"\\u005f_proto__":1}]}', "__proto__"],
  ['{"a":1,"a":2}', "stands twice"],
  ['{"x":{"a":1,"\\u0061":2}}', "stands twice"],
  ['{"a":1e400}', "beyond the range"],
  ['{"a":-1E999}', "beyond the range"],
  [`{"a":1${"0".repeat(400)}}`, "beyond the range"],
  ['{"a":"\\ud800"}', "surrogate"],
  ['{"a":"\\udc00"}', "surrogate"],
  ['{"a":"\\ud800\\ud800"}', "surrogate"],
  ['{"a":"x\\\\\\ud800"}', "surrogate"],
];
for (const [text, why] of refused) {
  test(`refused: ${text.slice(0, 40)} (${why})`, () =>
    assert.match(scan(text).problem ?? "", new RegExp(why)));
}

const passed = [
  '{"a":"\\ud83d\\ude00"}',
  '{"a":"\\\\ud800"}',
  '{"a":9007199254740993}',
  '{"a":1e308,"b":1e-400}',
  '{"a":{"a":1}}',
  '{"a":"__proto__"}',
  '{"a":"\\u0000\\u001f"}',
  '{"a":"\\"","b":"\\\\"}',
];
for (const text of passed) {
  test(`passed: ${text}`, () => assert.equal(scan(text).problem, undefined));
}

test("nesting is allowed to its limit and not one deeper", () => {
  const nested = (depth: number): string => `${"[".repeat(depth)}${"]".repeat(depth)}`;
  assert.equal(scan(nested(MAX_DEPTH)).tooMuch, false);
  assert.equal(scan(nested(MAX_DEPTH + 1)).tooMuch, true);
  assert.equal(scan(nested(1_000_000)).tooMuch, true);
});

test("an object has keys to its limit and not one more; objects do not add up", () => {
  const keyed = (count: number): string =>
    `{${Array.from({ length: count }, (_, at) => `"k${at}":1`).join()}}`;
  assert.equal(scan(keyed(MAX_KEYS)).problem, undefined);
  assert.deepEqual(scan(`[${keyed(MAX_KEYS + 1)}]`), {
    fields: undefined,
    problem: `an object has more than ${MAX_KEYS} keys; send a list`,
    tooMuch: true,
  });
  assert.equal(scan(`[${keyed(MAX_KEYS)},${keyed(MAX_KEYS)}]`).problem, undefined);
});

test("equal values have equal canonical texts, whatever their spacing, key order and escapes", () => {
  fc.assert(
    fc.property(json, (value) => {
      const text = JSON.stringify(value);
      const rewritten = escapeAll(JSON.stringify(reversed(value), undefined, 2));
      assert.equal(canonical(rewritten), canonical(text));
      assert.deepEqual(JSON.parse(canonical(text)), JSON.parse(text));
    }),
    { numRuns: 1000 },
  );
});

test("numbers keep their text", () => {
  assert.equal(
    canonical(' { "b" : [ 1.0 , 1 , 1e0 ] , "a" : 9007199254740993 } '),
    '{"a":9007199254740993,"b":[1.0,1,1e0]}',
  );
});

function reversed(value: unknown): unknown {
  if (Array.isArray(value)) return value.map(reversed);
  if (typeof value !== "object" || value === null) return value;
  return Object.fromEntries(
    Object.entries(value)
      .toReversed()
      .map(([key, inner]) => [key, reversed(inner)]),
  );
}

/** Writes every letter as an escape. */
function escapeAll(text: string): string {
  return text.replaceAll(/"((?:[^"\\]|\\.)*)"/g, (_, content: string) => {
    return `"${content.replaceAll(/\\.|[a-z]/g, (part) => (part.length > 1 ? part : `\\u${part.charCodeAt(0).toString(16).padStart(4, "0")}`))}"`;
  });
}

test("lists of numbers, however written: one canonical text, and what is beyond a double is seen anywhere", () => {
  const number = fc.oneof(
    fc.integer().map(String),
    fc.double({ noNaN: true, noDefaultInfinity: true }).map((value) => JSON.stringify(value)),
    fc.constantFrom("0", "-0", "1.0", "1E5", "-2e-3", "9".repeat(25), `0.${"3".repeat(40)}`),
  );
  const list = fc.letrec<{ list: unknown[] }>((tie) => ({
    list: fc.array(fc.oneof({ depthSize: "small" }, number, tie("list")), { maxLength: 8 }),
  })).list;
  const written = (value: unknown, space: string): string =>
    Array.isArray(value)
      ? `[${space}${value.map((each) => written(each, space)).join(`${space},${space}`)}${space}]`
      : String(value);
  fc.assert(
    fc.property(list, fc.constantFrom("", " ", "\n "), fc.boolean(), (value, space, tooLarge) => {
      const text = written(value, space);
      assert.equal(canonical(text), written(value, ""));
      const body = `{"input":[1,${tooLarge ? "1e999" : "2"},${text},3],"model":"m"}`;
      const { problem, fields } = scan(body);
      assert.equal(problem, tooLarge ? "a number is beyond the range of a double" : undefined);
      const [from, to] = fields!.get("input")!;
      assert.equal(body.slice(from, to), body.slice(9, -13));
    }),
  );
});
