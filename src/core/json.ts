/**
 * Scans a JSON text once without building values, so that inputs and outputs keep their exact characters: a 64-bit
 * integer or a float leaves as it came.
 *
 * `scan` is for requests: it records where each top-level field's value is and finds what `JSON.parse` lets through:
 * deep nesting, objects with so many keys that they block the process (100,000 take 100 ms), `__proto__` keys,
 * duplicate keys (readers disagree about which one counts), numbers beyond a double and lone surrogates. `outputFlaw`
 * checks an output for the ones that can harm a caller. Neither checks the grammar: callers run `JSON.parse` after the
 * scan, which is safe on any text, so that the parser never sees 10,000 nested arrays.
 *
 * `canonical` rewrites a checked text so that equal values are equal texts: sorted keys, no white space, one escape
 * form. Numbers keep their text: 1 and 1.0 are different inputs.
 *
 * Strings and flat arrays (an embedding) are crossed with `indexOf`, ten times faster than character by character.
 */

export const MAX_DEPTH = 64;
/** Per object. */
export const MAX_KEYS = 10_000;
const SAFE_DIGITS = 308; // the largest double has 309 digits, so a shorter number without an exponent is in range

export const [OPEN_BRACE, CLOSE_BRACE, OPEN_BRACKET, CLOSE_BRACKET] = [0x7b, 0x7d, 0x5b, 0x5d];
export const [QUOTE, COMMA] = [0x22, 0x2c];
const [COLON, BACKSLASH, SPACE, SMALL_U] = [0x3a, 0x5c, 0x20, 0x75];
const [PLUS, MINUS, DOT, ZERO, NINE, UPPER_E, LOWER_E] = [0x2b, 0x2d, 0x2e, 0x30, 0x39, 0x45, 0x65];

export interface Scan {
  /** Source range of each top-level field; undefined if the text is not an object. */
  readonly fields: Map<string, readonly [start: number, end: number]> | undefined;
  /** What a parser accepts and Ferry does not; undefined if nothing. */
  readonly problem: string | undefined;
  /** The scan stopped early: the text must not be parsed. */
  readonly tooMuch: boolean;
}

export function scan(text: string): Scan {
  const { fields, flaw, key } = new Scanner(text).check(true);
  const problem = flaw && requestProblem(flaw, key);
  const tooMuch = flaw === "deep" || flaw === "keys";
  return { fields: tooMuch ? undefined : fields, problem, tooMuch };
}

function requestProblem(flaw: Flaw, key: string): string {
  switch (flaw) {
    case "deep":
      return `the body is nested deeper than ${MAX_DEPTH}`;
    case "keys":
      return `an object has more than ${MAX_KEYS} keys; send a list`;
    case "proto":
      return 'the key "__proto__" is not allowed';
    case "twice":
      return `the key ${JSON.stringify(key.slice(0, 64))} stands twice`;
    case "number":
      return "a number is beyond the range of a double";
    case "surrogate":
      return "a string holds half of a surrogate pair";
  }
}

/** A flaw no caller may receive, as a continuation of "output 3"; undefined if none. */
export function outputFlaw(text: string): string | undefined {
  // A string has none of these flaws.
  if (text.charCodeAt(0) === QUOTE) return undefined;
  const { flaw } = new Scanner(text).check(false);
  if (flaw === "deep") return `is nested deeper than ${MAX_DEPTH}`;
  // A Python function's `{1: …, "1": …}` becomes that.
  if (flaw === "twice") return "has a key twice";
  return flaw && "holds a number beyond the range of a double";
}

type Flaw = "deep" | "keys" | "proto" | "twice" | "number" | "surrogate";

interface Checked {
  readonly fields: Map<string, readonly [start: number, end: number]> | undefined;
  readonly flaw: Flaw | undefined; // the first found, except that one that ended the check takes precedence
  readonly key: string; // the duplicate key
}

/** Next position of a mark, cached so that all calls together read the text once. */
class Finder {
  readonly #text: string;
  readonly #mark: string;
  #next = -1;

  constructor(text: string, mark: string) {
    this.#text = text;
    this.#mark = mark;
  }

  /** First position at or after `at`; Infinity if none. `at` never decreases. */
  from(at: number): number {
    if (this.#next < at) {
      const found = this.#text.indexOf(this.#mark, at);
      this.#next = found < 0 ? Infinity : found;
    }
    return this.#next;
  }
}

/** What decides about a flat array; most texts have none. */
class ArrayFinders {
  readonly quotes: Finder;
  readonly brackets: Finder;
  readonly braces: Finder;
  readonly ends: Finder;
  readonly exponents: readonly Finder[];

  constructor(text: string) {
    this.quotes = new Finder(text, '"');
    this.brackets = new Finder(text, "[");
    this.braces = new Finder(text, "{");
    this.ends = new Finder(text, "]");
    this.exponents = [new Finder(text, "e"), new Finder(text, "E")];
  }
}

/** One pass over a text: as a whole (`check`) or value by value (`json-split.ts`). */
export class Scanner {
  readonly #text: string;
  readonly #backslashes: Finder;
  #arrays: ArrayFinders | undefined;
  #at = 0;
  finite = true; // false once a number that reads as Infinity was met

  constructor(text: string) {
    this.#text = text;
    this.#backslashes = new Finder(text, "\\");
  }

  /** Scans the whole text; records fields and counts keys only for a request. */
  check(request: boolean): Checked {
    const text = this.#text;
    const fields = new Map<string, readonly [number, number]>();
    const open: (Set<string> | undefined)[] = []; // keys so far of each open object; undefined for an array
    let keys: Set<string> | undefined;
    let expectKey = false;
    let field: string | undefined;
    let fieldStart = 0;
    let outer = false;
    let flaw: Flaw | undefined;
    let twice = "";
    let at = 0;
    while (at < text.length) {
      const code = text.charCodeAt(at);
      if (code === QUOTE) {
        const end = stringEnd(text, at);
        if (request && this.#hasHalfPair(at, end)) flaw ??= "surrogate";
        if (expectKey) {
          const key = keyOf(text.slice(at, end));
          if (request && key === "__proto__") flaw ??= "proto";
          if (request && keys!.size === MAX_KEYS) return { fields, flaw: "keys", key };
          if (keys!.has(key)) {
            flaw ??= "twice";
            twice ||= key;
          } else keys!.add(key);
          expectKey = false;
          if (open.length === 1) field = key;
        }
        at = end;
        continue;
      }
      if ((code >= ZERO && code <= NINE) || code === MINUS) {
        at = this.#number(at);
        if (!this.finite) flaw ??= "number";
        continue;
      }
      if (code === OPEN_BRACE || code === OPEN_BRACKET) {
        if (open.length === MAX_DEPTH) return { fields, flaw: "deep", key: "" };
        if (code === OPEN_BRACKET && this.#isFlat(at + 1)) {
          at = this.#flatArray(at + 1);
          if (!this.finite) flaw ??= "number";
          continue;
        }
        if (open.length === 0) outer = code === OPEN_BRACE;
        expectKey = code === OPEN_BRACE;
        keys = expectKey ? new Set() : undefined;
        open.push(keys);
      } else if (code === COLON) {
        if (open.length === 1) fieldStart = at + 1;
      } else if (code === COMMA || code === CLOSE_BRACE || code === CLOSE_BRACKET) {
        if (request && open.length === 1 && field !== undefined) {
          fields.set(field, trimmed(text, fieldStart, at));
          field = undefined;
        }
        if (code !== COMMA) {
          open.pop();
          keys = open.at(-1);
        }
        expectKey = code === COMMA && keys !== undefined;
      }
      at++;
    }
    return { fields: outer ? fields : undefined, flaw, key: twice };
  }

  /** Steps into the container that `open` opens; false, without a step, if it is something else. */
  enter(open: number): boolean {
    this.#space();
    if (this.#text.charCodeAt(this.#at) !== open) return false;
    this.#at++;
    return true;
  }

  /** True: stopped before the next member. False: stepped out of the container. */
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

  key(): string {
    const start = this.#at;
    this.#at = stringEnd(this.#text, start);
    const source = this.#text.slice(start, this.#at);
    this.#space();
    this.#at++;
    this.#space();
    return keyOf(source);
  }

  flatArray(): string | undefined {
    this.#space();
    const flat = this.#text.charCodeAt(this.#at) === OPEN_BRACKET && this.#isFlat(this.#at + 1);
    return flat ? this.value() : undefined;
  }

  value(): string {
    const start = this.#at;
    this.skip();
    return this.#text.slice(start, this.#at);
  }

  skip(): void {
    const text = this.#text;
    let at = this.#at;
    let depth = 0;
    do {
      const code = text.charCodeAt(at);
      if (code === QUOTE) at = stringEnd(text, at);
      else if ((code >= ZERO && code <= NINE) || code === MINUS) at = this.#number(at);
      else if (code === OPEN_BRACKET && this.#isFlat(at + 1)) at = this.#flatArray(at + 1);
      else if (code > NINE && code !== OPEN_BRACKET && code !== CLOSE_BRACKET && code < OPEN_BRACE) {
        // true, false or null; the colon is the one mark above the digits and is crossed the same way.
        at++;
        while (isLetter(text.charCodeAt(at))) at++;
      } else {
        if (code === OPEN_BRACE || code === OPEN_BRACKET) depth++;
        else if (code === CLOSE_BRACE || code === CLOSE_BRACKET) depth--;
        at++;
      }
    } while (depth > 0 && at < text.length);
    this.#at = at;
  }

  /** Whether the array that has just begun holds only numbers and literals. */
  #isFlat(start: number): boolean {
    const first = this.#text.charCodeAt(start);
    if (first === QUOTE || first === OPEN_BRACKET || first === OPEN_BRACE) return false;
    const { quotes, brackets, braces, ends } = (this.#arrays ??= new ArrayFinders(this.#text));
    const end = ends.from(start);
    return end < quotes.from(start) && end < brackets.from(start) && end < braces.from(start);
  }

  #flatArray(start: number): number {
    const text = this.#text;
    const { ends, exponents: all } = this.#arrays!;
    const end = ends.from(start);
    for (const exponents of all) {
      for (let at = exponents.from(start); at < end; at = exponents.from(at + 1)) {
        // Small numbers like 1.2e-05 are common in embeddings and cannot overflow; `true` has an e, too.
        if (text.charCodeAt(at + 1) !== MINUS && inNumber(text.charCodeAt(at - 1))) this.#numberAround(at);
      }
    }
    // A number too long for a double cannot fit between two probes.
    for (let at = start + SAFE_DIGITS; at < end; at += SAFE_DIGITS) {
      if (inNumber(text.charCodeAt(at))) at = this.#numberAround(at);
    }
    return end + 1;
  }

  #numberAround(at: number): number {
    let start = at;
    while (inNumber(this.#text.charCodeAt(start - 1))) start--;
    return this.#number(start);
  }

  /** Checks the number that starts here; returns its end. */
  #number(start: number): number {
    const text = this.#text;
    let at = start + 1;
    let suspect = false;
    for (; inNumber(text.charCodeAt(at)); at++) {
      const code = text.charCodeAt(at);
      if ((code === LOWER_E || code === UPPER_E) && text.charCodeAt(at + 1) !== MINUS) suspect = true;
    }
    if ((suspect || at - start > SAFE_DIGITS) && Math.abs(Number(text.slice(start, at))) === Infinity) {
      this.finite = false;
    }
    return at;
  }

  #hasHalfPair(start: number, end: number): boolean {
    const text = this.#text;
    let at = this.#backslashes.from(start);
    while (at < end) {
      const unit = text.charCodeAt(at + 1) === SMALL_U ? hex(text, at + 2) : NaN;
      at += Number.isNaN(unit) ? 2 : 6;
      if (unit >= 0xd800 && unit <= 0xdfff) {
        const low = unit < 0xdc00 && text.startsWith("\\u", at) ? hex(text, at + 2) : NaN;
        if (!(low >= 0xdc00 && low <= 0xdfff)) return true;
        at += 6;
      }
      at = this.#backslashes.from(at);
    }
    return false;
  }

  #space(): void {
    while (this.#text.charCodeAt(this.#at) <= SPACE) this.#at++;
  }
}

export function canonical(text: string): string {
  const plain = text.charCodeAt(0) === QUOTE && !text.includes("\\");
  return plain ? text : rewritten(new Scanner(text));
}

/** Only for a text that passed `scan` and `JSON.parse`: it cannot fail. */
function rewritten(scanner: Scanner): string {
  const flat = scanner.flatArray();
  if (flat !== undefined) return flat.replaceAll(/\s+/g, "");
  if (scanner.enter(OPEN_BRACKET)) {
    const parts: string[] = [];
    while (scanner.more(CLOSE_BRACKET)) parts.push(rewritten(scanner));
    return `[${parts.join(",")}]`;
  }
  if (scanner.enter(OPEN_BRACE)) {
    const parts: [key: string, value: string][] = [];
    while (scanner.more(CLOSE_BRACE)) parts.push([JSON.stringify(scanner.key()), rewritten(scanner)]);
    parts.sort(([a], [b]) => (a < b ? -1 : 1));
    return `{${parts.map(([key, value]) => `${key}:${value}`).join(",")}}`;
  }
  const token = scanner.value();
  return token.includes("\\") ? JSON.stringify(JSON.parse(token)) : token;
}

/** Unescapes: "\u006futputs" is a duplicate of "outputs". */
function keyOf(source: string): string {
  if (!source.includes("\\")) return source.slice(1, -1);
  try {
    return JSON.parse(source) as string;
  } catch {
    return source; // Not JSON; the parser will say so.
  }
}

/** A digit or one of - + . e E */
function inNumber(code: number): boolean {
  if (code >= ZERO && code <= NINE) return true;
  return code === DOT || code === MINUS || code === PLUS || code === LOWER_E || code === UPPER_E;
}

function isLetter(code: number): boolean {
  return code >= 0x61 && code <= 0x7a;
}

function hex(text: string, at: number): number {
  return Number.parseInt(text.slice(at, at + 4), 16);
}

function trimmed(text: string, start: number, end: number): readonly [number, number] {
  while (start < end && text.charCodeAt(start) <= SPACE) start++;
  while (end > start && text.charCodeAt(end - 1) <= SPACE) end--;
  return [start, end];
}

/** End of the string whose opening quote is at `start`, closing quote included. */
function stringEnd(text: string, start: number): number {
  let end = start;
  for (;;) {
    end = text.indexOf('"', end + 1);
    if (end < 0) return text.length;
    // A quote after an odd number of backslashes is part of the string.
    let before = end;
    while (text.charCodeAt(before - 1) === BACKSLASH) before--;
    if ((end - before) % 2 === 0) return end + 1;
  }
}
