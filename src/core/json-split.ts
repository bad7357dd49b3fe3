/**
 * Cutting a JSON text into the texts of its parts, without parsing a value.
 *
 * A worker's outputs travel on as the very characters that it wrote, so that a 64-bit integer or a
 * float leaves as it came. `JSON.parse` has accepted the text before these functions see it; they only
 * find where each value starts and ends. On the way they notice what `JSON.parse` lets through and a
 * caller must not get: a number that reads as Infinity (1e400) and a field that stands twice, where
 * readers disagree about which one counts. `outputFlaw` looks for these in one output.
 *
 * One pass. Strings, and arrays that hold neither strings nor containers (an embedding), are crossed with
 * `indexOf`, which is ten times faster than looking at each character.
 */

import { MAX_DEPTH } from "./json.ts";

export type Split =
  /** The exact source text of each element, without the white space around it. */
  | { readonly elements: readonly string[]; readonly flaw?: never }
  /** What is wrong, to be put after "the reply". */
  | { readonly elements?: never; readonly flaw: string };

/** The elements of the array that `text` is; where it has more than `max`, the first `max` and one more. */
export function splitArray(text: string, max = Infinity): Split {
  return new Scanner(text).array(max);
}

/** The elements of the array that stands under `name` in the object that `text` is. */
export function splitField(text: string, name: string): Split {
  const scanner = new Scanner(text);
  if (!scanner.enter(OPEN_BRACE)) return { flaw: "is not an object" };
  let found: Split | undefined;
  while (scanner.more(CLOSE_BRACE)) {
    if (scanner.key() !== name) {
      scanner.skip();
      continue;
    }
    if (found !== undefined) return { flaw: `has "${name}" twice` };
    found = scanner.array();
    if (found.flaw !== undefined) return { flaw: `has "${name}" that ${found.flaw}` };
  }
  return found ?? { flaw: `has no "${name}"` };
}

/** By name, the text of each field's value in the object that `text` is; undefined where it is none, or has one twice. */
export function splitFields(text: string): ReadonlyMap<string, string> | undefined {
  const scanner = new Scanner(text);
  if (!scanner.enter(OPEN_BRACE)) return undefined;
  const fields = new Map<string, string>();
  while (scanner.more(CLOSE_BRACE)) {
    const name = scanner.key();
    if (fields.has(name)) return undefined;
    fields.set(name, scanner.value());
  }
  return fields;
}

/**
 * What no caller may get in an output, to be put after "output 3"; undefined: nothing. Safe on any text, but the grammar
 * is not checked: a number that reads as Infinity, a key twice in one object (a function's `{1: …, "1": …}` becomes that),
 * and nesting that no request may have either.
 */
export function outputFlaw(text: string): string | undefined {
  // A string has none of these.
  return text.charCodeAt(0) === QUOTE ? undefined : new Scanner(text).flaw();
}

const QUOTE = 0x22;
const PLUS = 0x2b;
const COMMA = 0x2c;
const MINUS = 0x2d;
const DOT = 0x2e;
const ZERO = 0x30;
const NINE = 0x39;
const UPPER_E = 0x45;
const OPEN_BRACKET = 0x5b;
const BACKSLASH = 0x5c;
const CLOSE_BRACKET = 0x5d;
const LOWER_E = 0x65;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;
const SPACE = 0x20;

/** The largest double has 309 digits, so a shorter number without an exponent is in range. */
const SAFE_DIGITS = 308;

/** Where a mark next stands; remembered, so that all calls together read the text once. */
class Finder {
  readonly #text: string;
  readonly #mark: string;
  #next = -1;

  constructor(text: string, mark: string) {
    this.#text = text;
    this.#mark = mark;
  }

  /** The first place of the mark at or after `at`, which never goes back; Infinity when there is none. */
  from(at: number): number {
    if (this.#next < at) {
      const found = this.#text.indexOf(this.#mark, at);
      this.#next = found < 0 ? Infinity : found;
    }
    return this.#next;
  }
}

/** The keys of an object. Most have a few, of which a list is searched faster than a set is made. */
class Keys {
  readonly #few: string[] = [];
  #many: Set<string> | undefined;

  /** False: it is there already. */
  add(key: string): boolean {
    if (this.#many === undefined) {
      if (this.#few.includes(key)) return false;
      if (this.#few.push(key) === FEW_KEYS) this.#many = new Set(this.#few);
      return true;
    }
    const before = this.#many.size;
    return this.#many.add(key).size > before;
  }
}

const FEW_KEYS = 16;

class Scanner {
  readonly #text: string;
  readonly #quotes: Finder;
  readonly #brackets: Finder;
  readonly #braces: Finder;
  readonly #ends: Finder;
  readonly #exponents: readonly Finder[];
  #at = 0;
  /** False once a number was met that reads as Infinity. */
  #finite = true;

  constructor(text: string) {
    this.#text = text;
    this.#quotes = new Finder(text, '"');
    this.#brackets = new Finder(text, "[");
    this.#braces = new Finder(text, "{");
    this.#ends = new Finder(text, "]");
    this.#exponents = [new Finder(text, "e"), new Finder(text, "E")];
  }

  /** Steps into the container that `open` opens; false, without a step, where something else stands. */
  enter(open: number): boolean {
    this.#space();
    if (this.#text.charCodeAt(this.#at) !== open) return false;
    this.#at++;
    return true;
  }

  /** Stands before the next member and says true, or steps out of the container and says false. */
  more(close: number): boolean {
    this.#space();
    const code = this.#text.charCodeAt(this.#at);
    if (code === COMMA) {
      this.#at++;
      this.#space();
      return true;
    }
    if (code !== close && this.#at < this.#text.length) return true;
    this.#at++;
    return false;
  }

  /** Reads a key and the colon after it. */
  key(): string {
    const start = this.#at;
    this.#at = stringEnd(this.#text, start);
    const source = this.#text.slice(start, this.#at);
    this.#space();
    this.#at++;
    this.#space();
    return keyOf(source);
  }

  /** The text of one value. */
  value(): string {
    const start = this.#at;
    this.skip();
    return this.#text.slice(start, this.#at);
  }

  array(max = Infinity): Split {
    if (!this.enter(OPEN_BRACKET)) return { flaw: "is not an array" };
    // Starts afresh: a number out of range beside the array harms nobody.
    this.#finite = true;
    const elements: string[] = [];
    while (elements.length <= max && this.more(CLOSE_BRACKET)) {
      elements.push(this.value());
    }
    return this.#finite ? { elements } : { flaw: "holds a number beyond the range of a double" };
  }

  /** Moves past one value. */
  skip(): void {
    const text = this.#text;
    let at = this.#at;
    let depth = 0;
    do {
      const code = text.charCodeAt(at);
      if (code === QUOTE) at = stringEnd(text, at);
      else if ((code >= ZERO && code <= NINE) || code === MINUS) at = this.#number(at);
      else if (code === OPEN_BRACKET && this.#isFlat(at + 1)) at = this.#flatArray(at + 1);
      else if (code === OPEN_BRACE || code === OPEN_BRACKET) {
        depth++;
        at++;
      } else if (code === CLOSE_BRACE || code === CLOSE_BRACKET) {
        depth--;
        at++;
      } else if (code > NINE) {
        // true, false or null; the colon is the one mark above the digits, and it is crossed the same way.
        at++;
        while (isLetter(text.charCodeAt(at))) at++;
      } else at++;
    } while (depth > 0 && at < text.length);
    this.#at = at;
  }

  /** See `outputFlaw`. */
  flaw(): string | undefined {
    const text = this.#text;
    /** The keys so far of each open object; undefined for an array. */
    const open: (Keys | undefined)[] = [];
    let keys: Keys | undefined;
    let expectKey = false;
    let at = 0;
    while (at < text.length) {
      const code = text.charCodeAt(at);
      if (code === QUOTE) {
        const end = stringEnd(text, at);
        if (expectKey) {
          if (!keys!.add(keyOf(text.slice(at, end)))) return "has a key twice";
          expectKey = false;
        }
        at = end;
      } else if ((code >= ZERO && code <= NINE) || code === MINUS) at = this.#number(at);
      else if (code === OPEN_BRACE || code === OPEN_BRACKET) {
        if (open.length === MAX_DEPTH) return `is nested deeper than ${MAX_DEPTH}`;
        if (code === OPEN_BRACKET && this.#isFlat(at + 1)) {
          at = this.#flatArray(at + 1);
          continue;
        }
        expectKey = code === OPEN_BRACE;
        keys = expectKey ? new Keys() : undefined;
        open.push(keys);
        at++;
      } else {
        if (code === CLOSE_BRACE || code === CLOSE_BRACKET) {
          open.pop();
          keys = open[open.length - 1];
          expectKey = false;
        } else if (code === COMMA) expectKey = keys !== undefined;
        at++;
      }
    }
    return this.#finite ? undefined : "holds a number beyond the range of a double";
  }

  /** Whether the array that has just begun holds only numbers and literals. */
  #isFlat(start: number): boolean {
    const end = this.#ends.from(start);
    return (
      end < this.#quotes.from(start) && end < this.#brackets.from(start) && end < this.#braces.from(start)
    );
  }

  /** Checks the numbers of a flat array and returns where it ends. */
  #flatArray(start: number): number {
    const text = this.#text;
    const end = this.#ends.from(start);
    for (const exponents of this.#exponents) {
      for (let at = exponents.from(start); at < end; at = exponents.from(at + 1)) {
        // Small numbers like 1.2e-05 are common in embeddings and cannot overflow; `true` has an e, too.
        if (text.charCodeAt(at + 1) !== MINUS && inNumber(text.charCodeAt(at - 1))) this.#numberAround(at);
      }
    }
    // A number that is too long for a double cannot hide between two looks.
    for (let at = start + SAFE_DIGITS; at < end; at += SAFE_DIGITS) {
      if (inNumber(text.charCodeAt(at))) at = this.#numberAround(at);
    }
    return end + 1;
  }

  /** Checks the number that `at` lies in and returns where it ends. */
  #numberAround(at: number): number {
    let start = at;
    while (inNumber(this.#text.charCodeAt(start - 1))) start--;
    return this.#number(start);
  }

  /** Checks the number that starts here and returns where it ends. */
  #number(start: number): number {
    const text = this.#text;
    let at = start + 1;
    let suspect = false;
    for (; inNumber(text.charCodeAt(at)); at++) {
      const code = text.charCodeAt(at);
      if ((code === LOWER_E || code === UPPER_E) && text.charCodeAt(at + 1) !== MINUS) suspect = true;
    }
    if ((suspect || at - start > SAFE_DIGITS) && !Number.isFinite(Number(text.slice(start, at)))) {
      this.#finite = false;
    }
    return at;
  }

  #space(): void {
    while (this.#text.charCodeAt(this.#at) <= SPACE) this.#at++;
  }
}

/** An escaped letter is still the same key, so "\u006futputs" must not slip by as a second one. */
function keyOf(source: string): string {
  if (!source.includes("\\")) return source.slice(1, -1);
  try {
    return JSON.parse(source) as string;
  } catch {
    return source; // Not JSON.
  }
}

/** A digit or one of - + . e E */
function inNumber(code: number): boolean {
  return (
    (code >= ZERO && code <= NINE) ||
    code === DOT ||
    code === MINUS ||
    code === PLUS ||
    code === LOWER_E ||
    code === UPPER_E
  );
}

function isLetter(code: number): boolean {
  return code >= 0x61 && code <= 0x7a;
}

/** Where the string that starts with the quote at `start` ends, closing quote included. */
function stringEnd(text: string, start: number): number {
  let end = start;
  for (;;) {
    end = text.indexOf('"', end + 1);
    if (end < 0) return text.length;
    // A quote is part of the string when an odd number of backslashes stands before it.
    let before = end;
    while (text.charCodeAt(before - 1) === BACKSLASH) before--;
    if ((end - before) % 2 === 0) return end + 1;
  }
}
