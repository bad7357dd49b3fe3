/** The deny patterns, against JavaScript's own regular expressions on small texts. */
import assert from "node:assert/strict";
import { describe, test } from "node:test";
import fc from "fast-check";
import { compilePattern, PatternMistake } from "../../src/core/pattern.ts";
import { listsNumbers, MAX_STEPS, Screen, screenFor } from "../../src/core/screen.ts";

const refuses = (pattern: string, text: string): boolean =>
  new Screen([pattern]).refuses(JSON.stringify(text));

/** The same words for JavaScript: `u` for code points, `s` because our dot is any character. */
function oracle(pattern: string): RegExp {
  const folded = pattern.startsWith("(?i)");
  return new RegExp(folded ? pattern.slice(4) : pattern, folded ? "sui" : "su");
}

const LETTERS = ["a", "b", "A", "B", "_", "1", " ", "-", "\n", "é", "É", "😀", "\u017f", "s", "\u212a", "k"];
const text = fc.string({ unit: fc.constantFrom(...LETTERS), maxLength: 12 });
const ATOMS =
  "a b A 1 _ . é 😀 s k [ab] [^a] [a-bé] [^a-b\\d] " +
  "\\d \\w \\s \\D \\S \\u0061 \\x42 \\u{1F600} \\. [\\w-] [^\\s😀]";
const atom = fc.constantFrom(" ", ...ATOMS.split(" "));
const edge = fc.constantFrom("^", "$", "\\b", "\\B");
const count = fc.constantFrom("", "", "", "*", "+", "?", "{2}", "{1,2}", "{0,3}", "{2,}", "*?", "+?");
const { pattern } = fc.letrec<{ pattern: string; part: string }>((tie) => ({
  part: fc.oneof(
    { maxDepth: 3 },
    fc.tuple(atom, count).map(([each, times]) => each + times),
    edge,
    fc.tuple(tie("pattern"), count).map(([each, times]) => `(${each})${times}`),
    fc.tuple(tie("pattern"), tie("pattern")).map(([a, b]) => `(?:${a}|${b})`),
  ),
  pattern: fc.array(tie("part"), { minLength: 1, maxLength: 4 }).map((parts) => parts.join("")),
}));

/**
 * Node 26.10 is no judge here: it sees a \B between the halves of one character, /[^a]$/u does not find the
 * end of "😀", though /^[^a]$/u does, and with a ^ behind something else it may miss another alternative:
 * /(?:(?:.+? |(?: | ))^ |[^\s😀])/su does not find "a".
 */
const comparable = (source: string, each: string): boolean =>
  !(/\\B|\$/.test(source) && each.includes("😀")) && !/(?<!^|\[)\^/.test(source);

/** Undefined where we refuse the pattern, which is only ever for one of these reasons. */
function known(source: string): Screen | undefined {
  try {
    return new Screen([source]);
  } catch (error) {
    assert.ok(error instanceof PatternMistake, String(error));
    assert.match(error.message, /fits every text/, source);
    return undefined;
  }
}

describe("what is found", () => {
  test("is what JavaScript finds, for any pattern and text", () => {
    fc.assert(
      fc.property(pattern, fc.array(text, { minLength: 1, maxLength: 5 }), (source, texts) => {
        const screen = known(source);
        for (const each of texts.filter((one) => comparable(source, one))) {
          const expected = oracle(source).test(each);
          if (screen === undefined) assert.ok(expected, `${source} should fit every text: ${each}`);
          else assert.equal(screen.refuses(JSON.stringify(each)), expected, JSON.stringify([source, each]));
        }
      }),
      { numRuns: 4000 },
    );
  });

  test("is the same without regard to case", () => {
    fc.assert(
      fc.property(pattern, fc.array(text, { minLength: 1, maxLength: 5 }), (source, texts) => {
        const screen = known(`(?i)${source}`);
        if (screen === undefined) return;
        for (const each of texts.filter((one) => comparable(source, one))) {
          const expected = oracle(`(?i)${source}`).test(each);
          assert.equal(screen.refuses(JSON.stringify(each)), expected, JSON.stringify([source, each]));
        }
      }),
      { numRuns: 4000 },
    );
  });

  test("several patterns together find what each finds alone", () => {
    const some = fc.array(fc.tuple(fc.boolean(), pattern), { minLength: 1, maxLength: 4 });
    fc.assert(
      fc.property(some, text, (list, each) => {
        const sources = list.map(([folded, source]) => (folded ? `(?i)${source}` : source));
        const usable = sources.filter((source) => known(source) !== undefined);
        const alone = usable.some((source) => refuses(source, each));
        assert.equal(new Screen(usable).refuses(JSON.stringify(each)), alone);
      }),
      { numRuns: 1000 },
    );
  });

  test("characters of more than one unit, and cases of more than ASCII", () => {
    assert.ok(refuses("[^a]$", "😀") && refuses("^.$", "😀") && !refuses("^..$", "😀"));
    assert.ok(refuses("(?i)straße", "STRAßE") && !refuses("(?i)straße", "STRASSE"));
    assert.ok(refuses("(?i)ΣΊΣΥΦΟΣ", "σίσυφος") && refuses("(?i)k", "\u212a"));
    assert.ok(refuses("(?i)[а-я]+!", "ДА!") && !refuses("[а-я]+!", "ДА!"));
    assert.ok(refuses("(?i)[^x]", "a") && !refuses("(?i)[^x]", "X"));
  });
});

describe("where it is looked for", () => {
  const screen = new Screen(["(?i)\\bsecret\\b"]);
  const found = ['"a Secret b"', '{"a":[1,{"b":"secret"}]}', '{"x":{"secret":0}}', '["s\\u0065cret"]'];
  const missed = ['"secrets"', '["sec","ret"]', "12", "null", '"\\"s\\\\ecret"', '{"a":"b\\\\","c":"d"}', ""];
  for (const json of found) test(`found in ${json}`, () => assert.ok(screen.refuses(json)));
  for (const json of missed) test(`not found in ${json}`, () => assert.ok(!screen.refuses(json)));

  test("every string of any JSON is looked at, as it reads after its escapes, and nothing else", () => {
    const json = fc.jsonValue({ maxDepth: 4, stringUnit: fc.constantFrom(...'ab"\\{}[],: \n'.split("")) });
    fc.assert(
      fc.property(json, (value) => {
        const strings: string[] = [];
        JSON.parse(JSON.stringify(value), (key, inner: unknown) => {
          strings.push(key);
          if (typeof inner === "string") strings.push(inner);
          return inner;
        });
        // Array indexes are keys to the reviver; none of them holds what is looked for.
        const expected = strings.some((each) => each.includes('b"') || each.includes("\\,"));
        assert.equal(new Screen(['b"|\\\\,']).refuses(JSON.stringify(value)), expected);
      }),
      { numRuns: 2000 },
    );
  });

  test("no pattern: no screen, so nothing to pay", () => assert.equal(screenFor([]), undefined));
});

describe("the work grows with the text and never faster", () => {
  const long = 100_000;
  const corpus: [pattern: string, text: string][] = [
    ["(a+)+$", `${"a".repeat(long)}!`],
    ["^(a|a)*$", `${"a".repeat(long)}!`],
    ["(a|aa)+$", `${"a".repeat(long)}!`],
    ["(.*)*x", "a".repeat(long)],
    ["(.*a){12}x", "a".repeat(long)],
    ["^(([a-z])+.)+[A-Z]([a-z])+$", "a".repeat(long)],
    ["\\s+$", `${" ".repeat(long)}!`],
    ["(?i)(\\w+\\s?)+!\\?", "Word ".repeat(long / 5)],
    ["foo.{0,100}bar", "foo".repeat(long / 3)],
    ["(a|b)*a(a|b){40}c", "abbab".repeat(long / 5)],
  ];
  for (const [source, text] of corpus) {
    test(`${source} on ${long} characters`, () => {
      const nodes = compilePattern(source).nodes.length;
      const half = new Screen([source]);
      assert.ok(!half.refuses(JSON.stringify(text.slice(long / 2))));
      const whole = new Screen([source]);
      assert.ok(!whole.refuses(JSON.stringify(text)));
      assert.ok(whole.steps <= (text.length + 1) * nodes, `${whole.steps} steps`);
      assert.ok(whole.steps <= 2.1 * half.steps + 10 * nodes, `${half.steps} → ${whole.steps} steps`);
    });
  }

  test("a text that would keep the search busy for seconds is refused instead", () => {
    const screen = new Screen(["(a|b)*a(a|b){600}c"]);
    let seed = 1;
    const bit = (): number => (seed = (seed * 48271) % 2147483647) % 2;
    const text = Array.from({ length: 50_000 }, () => "ab"[bit()]).join("");
    assert.ok(screen.refuses(JSON.stringify(text)));
    assert.ok(screen.steps < 1.01 * MAX_STEPS, `${screen.steps} steps`);
    assert.ok(!screen.refuses('"abc"'), "and the next text is screened as ever");
  });

  test("on ordinary patterns a character costs a look into a table and nothing more", () => {
    const screen = new Screen(["(?i)ignore (all )?previous instructions", "\\b\\d{16}\\b", "(a+)+$"]);
    assert.ok(
      !screen.refuses(JSON.stringify("Please ignore all previews: instructions 1234. ".repeat(2000))),
    );
    assert.ok(screen.steps < 20_000, `${screen.steps} steps for 94,000 characters`);
  });
});

describe("mistakes in a pattern", () => {
  const mistakes: [pattern: string, what: RegExp][] = [
    ["", /is empty/],
    ["a*", /fits every text/],
    ["(", /never closed/],
    ["a)", /never opened/],
    ["[a", /ends too early/],
    ["a\\", /ends too early/],
    ["[]", /empty/],
    ["*a", /nothing to repeat/],
    ["a**", /count after a count/],
    ["^*", /repeats an edge/],
    ["a{", /lacks a }/],
    ["a{x}", /begins no count/],
    ["a{3,2}", /goes down/],
    ["a{1,1001}", /further than 1000/],
    ["(a{1000}){1000}", /more than 2000 states/],
    ["((((a{9}){9}){9}){9}){9}", /more than 2000 states/],
    ["[z-a]", /goes down/],
    ["[\\d-z]", /class/],
    ["(?=a)", /\(\?:/],
    ["(?<name>a)", /\(\?:/],
    ["(a)\\1", /\\1, which is not known/],
    ["\\p{L}", /\\p, which is not known/],
    ["\\u{110000}", /hexadecimal/],
    ["\\x4", /ends too early/],
    ["a]", /of its own/],
    ["a".repeat(1001), /longer than 1000/],
  ];
  for (const [source, what] of mistakes) {
    test(JSON.stringify(source.slice(0, 30)), () => {
      assert.throws(
        () => new Screen([source]),
        (error) => {
          assert.ok(error instanceof PatternMistake, String(error));
          assert.match(error.message, what);
          return true;
        },
      );
    });
  }

  test("any text at all is a pattern or a mistake, never a crash", () => {
    const anything = fc.string({ unit: fc.constantFrom(..."ab\\()[]{}^$.|*+?-,01dwsbux:i".split("")) });
    fc.assert(
      fc.property(anything, (source) => {
        try {
          new Screen([source]).refuses('"ab01-,:"');
        } catch (error) {
          assert.ok(error instanceof PatternMistake, String(error));
        }
      }),
      { numRuns: 5000 },
    );
  });

  test("patterns that are too many together", () => {
    const patterns = Array.from({ length: 30 }, () => "a{90}");
    assert.throws(() => new Screen(patterns), /more than 2000; use fewer/);
  });
});

test("lists that hold a number, wherever they stand; numbers of objects and in strings are none", () => {
  for (const json of ["[1]", "[ -1.5]", '["a",[ 2]]', '{"a":"\\"","b":[["x"],3]}', '["a" , 1]', "[[[0]]]"])
    assert.equal(listsNumbers(json), true, json);
  for (const json of ["", "1", '"[1]"', '{"a":1,"b":2}', '["1, 2",{"a":1}]', '[true,null,"\\\\",{}]', "[]"])
    assert.equal(listsNumbers(json), false, json);
  fc.assert(
    fc.property(fc.jsonValue(), (value) => {
      const holds = (each: unknown): boolean =>
        typeof each === "object" &&
        each !== null &&
        ((Array.isArray(each) && each.some((one) => typeof one === "number")) ||
          Object.values(each).some(holds));
      assert.equal(listsNumbers(JSON.stringify(value, null, 1)), holds(value));
    }),
  );
});

test("texts that are not JSON are searched as they are, with one bound for all of them", () => {
  const screen = new Screen(["^bad$"]);
  assert.equal(screen.refusesTexts(["good", "not bad", '"bad"']), false);
  assert.equal(screen.refusesTexts(["good", "bad"]), true);
});
