/**
 * Reading a JSON text once, without turning it into values.
 *
 * `scan` walks a text and notes where each top-level field's value stands, so that an input travels on
 * as the very characters it came in. On the way it finds what `JSON.parse` would let through: nesting
 * that is too deep, objects with so many keys that they would hold up everybody else (100,000 take 100 ms),
 * `__proto__` keys, duplicate keys, numbers beyond the range of a double, and halves of
 * surrogate pairs. It does not check the grammar; callers run `JSON.parse` for that (in this order: the
 * scan is safe on any text, and the parser need not see a text that is 10,000 arrays deep).
 *
 * `canonical` rewrites a checked text so that equal values are equal texts: keys in order, no white
 * space, one way to write each string. Numbers keep their text: 1 and 1.0 are different inputs.
 */

export const MAX_DEPTH = 64;
/** Of one object. */
export const MAX_KEYS = 10_000;

export interface Scan {
  /** Source range of each field of the outermost object; undefined when it is not an object. */
  readonly fields: Map<string, readonly [start: number, end: number]> | undefined;
  /** What a parser would let through and Ferry does not; undefined when there is nothing. */
  readonly problem: string | undefined;
  /** Stopped early: the text must not be parsed. */
  readonly tooMuch: boolean;
}

const QUOTE = 0x22;
const BACKSLASH = 0x5c;
const OPEN_BRACE = 0x7b;
const CLOSE_BRACE = 0x7d;
const OPEN_BRACKET = 0x5b;
const CLOSE_BRACKET = 0x5d;
const COMMA = 0x2c;
const COLON = 0x3a;
/** A thousand at a time: V8 remembers each for a way back, and runs out of stack at some millions. */
const SMALL_NUMBERS = /(?:-?\d{1,20}(?:\.\d{1,20})?,){1,1000}/y;
/** Lists of numbers, however deep: written in one way only, where there is no white space. */
const ONLY_NUMBERS = /^\[[\d.,eE+\-[\]]*\]$/;

export function scan(text: string): Scan {
  return new Scanner(text).run();
}

class Scanner {
  readonly #text: string;
  #at = 0;
  #problem: string | undefined;
  #tooMuch: string | undefined;
  /** Where the next backslash stands, so that strings without one are skipped in one leap. */
  #nextBackslash: number;
  /** Per open container: an object's keys so far (undefined until the first, and outermost), false for an array. */
  readonly #open: (Set<string> | undefined | false)[] = [];
  readonly #fields = new Map<string, readonly [number, number]>();

  constructor(text: string) {
    this.#text = text;
    this.#nextBackslash = findOr(text, "\\", 0);
  }

  run(): Scan {
    const text = this.#text;
    const open = this.#open;
    let expectKey = false;
    let field: string | undefined;
    let fieldStart = 0;
    let outer = false;
    while (this.#at < text.length && this.#tooMuch === undefined) {
      const code = text.charCodeAt(this.#at);
      if (code === QUOTE) {
        const key = expectKey && open.length > 0 && open[open.length - 1] !== false;
        const content = this.#string(key);
        if (key && content !== undefined) {
          this.#noteKey(content);
          expectKey = false;
          if (open.length === 1) field = content;
        }
        continue;
      }
      if (code === OPEN_BRACE || code === OPEN_BRACKET) {
        if (open.length === MAX_DEPTH) this.#tooMuch = `the body is nested deeper than ${MAX_DEPTH}`;
        if (open.length === 0) outer = code === OPEN_BRACE;
        open.push(code === OPEN_BRACE ? undefined : false);
        expectKey = code === OPEN_BRACE;
      } else if (code === COLON && open.length === 1) {
        fieldStart = this.#at + 1;
      } else if (code === COMMA || code === CLOSE_BRACE || code === CLOSE_BRACKET) {
        if (open.length === 1 && field !== undefined) {
          this.#fields.set(field, trimmed(text, fieldStart, this.#at));
          field = undefined;
        }
        if (code === COMMA) expectKey = open[open.length - 1] !== false;
        else open.pop();
      } else if (code === 0x2d || (code >= 0x30 && code <= 0x39)) {
        if (open[open.length - 1] !== false || !this.#numbers()) this.#number();
        continue;
      }
      this.#at++;
    }
    if (this.#tooMuch !== undefined) return { fields: undefined, problem: this.#tooMuch, tooMuch: true };
    return { fields: outer ? this.#fields : undefined, problem: this.#problem, tooMuch: false };
  }

  /** Leaves `#at` after the closing quote; returns the string's value when it is wanted. */
  #string(wanted: boolean): string | undefined {
    const text = this.#text;
    const start = this.#at;
    let end = findOr(text, '"', start + 1);
    if (this.#nextBackslash < start) this.#nextBackslash = findOr(text, "\\", start);
    if (end < this.#nextBackslash) {
      this.#at = end + 1;
      return wanted ? text.slice(start + 1, end) : undefined;
    }
    while (this.#nextBackslash < end) {
      const next = this.#escape(this.#nextBackslash);
      if (next > end) end = findOr(text, '"', next);
      this.#nextBackslash = findOr(text, "\\", next);
    }
    this.#at = end + 1;
    return wanted ? unescaped(text.slice(start, end + 1)) : undefined;
  }

  /** Checks the escape at `at` and returns where it ends. */
  #escape(at: number): number {
    if (this.#text.charCodeAt(at + 1) !== 0x75) return at + 2;
    const unit = hex(this.#text, at + 2);
    if (unit >= 0xd800 && unit <= 0xdbff) {
      const follows = this.#text.startsWith("\\u", at + 6) ? hex(this.#text, at + 8) : 0;
      if (follows >= 0xdc00 && follows <= 0xdfff) return at + 12;
      this.#problem ??= "a string holds half of a surrogate pair";
    } else if (unit >= 0xdc00 && unit <= 0xdfff) {
      this.#problem ??= "a string holds half of a surrogate pair";
    }
    return at + 6;
  }

  /** Skips up to a thousand numbers of a list, each followed by another and surely within range; false: not one. */
  #numbers(): boolean {
    SMALL_NUMBERS.lastIndex = this.#at;
    if (!SMALL_NUMBERS.test(this.#text)) return false;
    this.#at = SMALL_NUMBERS.lastIndex;
    return true;
  }

  #number(): void {
    const text = this.#text;
    const start = this.#at;
    let exponent = false;
    let at = start + 1;
    for (; at < text.length; at++) {
      const code = text.charCodeAt(at);
      if ((code >= 0x30 && code <= 0x39) || code === 0x2e || code === 0x2b || code === 0x2d) continue;
      if (code !== 0x65 && code !== 0x45) break;
      exponent = true;
    }
    this.#at = at;
    if ((exponent || at - start > 300) && Math.abs(Number(text.slice(start, at))) === Infinity) {
      this.#problem ??= "a number is beyond the range of a double";
    }
  }

  #noteKey(key: string): void {
    if (key === "__proto__") this.#problem ??= 'the key "__proto__" is not allowed';
    const top = this.#open.length - 1;
    // Fields of the outermost object are noted anyway, each before the next one's key comes.
    const keys = top === 0 ? this.#fields : this.#open[top];
    if (keys === false) return;
    if (keys === undefined) this.#open[top] = new Set([key]);
    else if (keys.has(key)) this.#problem ??= `the key ${JSON.stringify(key.slice(0, 64))} stands twice`;
    else if (keys.size === MAX_KEYS) this.#tooMuch = `an object has more than ${MAX_KEYS} keys; send a list`;
    else if (keys instanceof Set) keys.add(key);
  }
}

export function canonical(text: string): string {
  const first = text.charCodeAt(0);
  const simple = first === QUOTE ? text.indexOf("\\") < 0 : first === OPEN_BRACKET && ONLY_NUMBERS.test(text);
  return simple ? text : new Writer(text).value();
}

/** Recursive descent over a text that `scan` and `JSON.parse` have passed, so no error can occur. */
class Writer {
  readonly #text: string;
  #at = 0;

  constructor(text: string) {
    this.#text = text;
  }

  value(): string {
    this.#skipSpace();
    const code = this.#text.charCodeAt(this.#at);
    if (code === QUOTE) return this.#string();
    if (code === OPEN_BRACE) return this.#object();
    if (code === OPEN_BRACKET) return this.#array();
    const start = this.#at;
    while (!endsToken(this.#text.charCodeAt(this.#at))) this.#at++;
    return this.#text.slice(start, this.#at);
  }

  #string(): string {
    const text = this.#text;
    const start = this.#at;
    let end = start;
    let before: number;
    do {
      // In leaps: it may be a megabyte of base64. A quote behind an odd number of backslashes is not the last.
      end = before = text.indexOf('"', end + 1);
      while (text.charCodeAt(before - 1) === BACKSLASH) before--;
    } while ((end - before) % 2 === 1);
    this.#at = end + 1;
    const token = text.slice(start, this.#at);
    return token.includes("\\") ? JSON.stringify(JSON.parse(token)) : token;
  }

  #array(): string {
    const parts: string[] = [];
    while (this.#more(CLOSE_BRACKET)) parts.push(this.value());
    return `[${parts.join(",")}]`;
  }

  #object(): string {
    const parts: [key: string, value: string][] = [];
    while (this.#more(CLOSE_BRACE)) {
      this.#skipSpace();
      const key = this.#string();
      this.#skipSpace();
      this.#at++; // the colon
      parts.push([key, this.value()]);
    }
    parts.sort(([a], [b]) => (a < b ? -1 : 1));
    return `{${parts.map(([key, value]) => `${key}:${value}`).join(",")}}`;
  }

  /** Steps over the opening bracket or a comma; false at the closing one. */
  #more(close: number): boolean {
    this.#skipSpace();
    if (this.#text.charCodeAt(this.#at++) === close) return false;
    this.#skipSpace();
    if (this.#text.charCodeAt(this.#at) !== close) return true;
    this.#at++;
    return false;
  }

  #skipSpace(): void {
    while (this.#text.charCodeAt(this.#at) <= 0x20) this.#at++;
  }
}

/** White space, a comma, a closing bracket, or the end of the text (NaN). */
function endsToken(code: number): boolean {
  return !(code > 0x20) || code === COMMA || code === CLOSE_BRACE || code === CLOSE_BRACKET;
}

function findOr(text: string, what: string, from: number): number {
  const at = text.indexOf(what, from);
  return at < 0 ? text.length : at;
}

function hex(text: string, at: number): number {
  return Number.parseInt(text.slice(at, at + 4), 16);
}

function unescaped(token: string): string | undefined {
  try {
    return JSON.parse(token) as string;
  } catch {
    return undefined; // Not JSON; the parser will say so.
  }
}

function trimmed(text: string, start: number, end: number): readonly [number, number] {
  while (start < end && text.charCodeAt(start) <= 0x20) start++;
  while (end > start && text.charCodeAt(end - 1) <= 0x20) end--;
  return [start, end];
}
