/**
 * Deny patterns: a regular expression dialect with linear-time search.
 *
 *   abc  .  [a-z0-9_]  [^"]  \d \w \s \D \W \S  \n \r \t \x41 \u0041 \u{1F600}  \. and other marks
 *   (…)  (?:…)  a|b  *  +  ?  {m}  {m,}  {m,n}   and their lazy forms, which match the same
 *   ^  $   start and end of a string;  \b  \B  word boundary or not
 *   (?i)   in front: case-insensitive
 *
 * Characters are code points. `.` includes line breaks, which must not be a way around a pattern. `\d` and `\w` are
 * ASCII, `\s` is JavaScript's. With (?i) two characters are equal when their upper cases have the same lower case (K, k
 * and the Kelvin sign); case changes of length (ß and SS) are not covered. No back references or lookaround: they
 * prevent linear search.
 *
 * Compiled to a Thompson NFA with counts written out (`a{50}` is 50 nodes). `MAX_NODES` bounds the time per character.
 */

/** Code point ranges, inclusive, sorted, disjoint. */
export type Ranges = readonly (readonly [from: number, to: number])[];
export type Edge = "start" | "end" | "word" | "inside";

export type Node =
  | { readonly kind: "set"; readonly set: Ranges; readonly next: number }
  | { readonly kind: "edge"; readonly edge: Edge; readonly next: number }
  | { readonly kind: "fork"; readonly next: readonly number[] }
  | { readonly kind: "found" };

export interface Program {
  readonly nodes: readonly Node[];
  readonly start: number;
  /** Text must be case-folded before it is compared. */
  readonly folded: boolean;
}

/** What is wrong with a pattern, as a continuation of it: "has a ( that is never closed". */
export class PatternMistake extends Error {}

export const MAX_PATTERN_LENGTH = 1000;
/** Per pattern, and for all patterns searched together. */
export const MAX_NODES = 2000;
const MAX_COUNT = 1000;
const LAST = 0x10ffff;
const LAST_CASED = 0x1e943; // no code point above this has two cases

export const DIGITS: Ranges = [[0x30, 0x39]];
export const WORD: Ranges = [...DIGITS, [0x41, 0x5a], [0x5f, 0x5f], [0x61, 0x7a]];
const SPACE: Ranges = [
  [0x09, 0x0d],
  [0x20, 0x20],
  [0xa0, 0xa0],
  [0x1680, 0x1680],
  [0x2000, 0x200a],
  [0x2028, 0x2029],
  [0x202f, 0x202f],
  [0x205f, 0x205f],
  [0x3000, 0x3000],
  [0xfeff, 0xfeff],
];
const CLASSES: ReadonlyMap<string, Ranges> = new Map([
  ["d", DIGITS],
  ["w", WORD],
  ["s", SPACE],
]);
const CONTROLS: ReadonlyMap<string, number> = new Map([
  ["n", 0x0a],
  ["r", 0x0d],
  ["t", 0x09],
  ["f", 0x0c],
  ["v", 0x0b],
  ["0", 0x00],
]);

type Tree =
  | { readonly kind: "set"; readonly set: Ranges }
  | { readonly kind: "edge"; readonly edge: Edge }
  | { readonly kind: "then" | "either"; readonly parts: readonly Tree[] }
  | { readonly kind: "repeat"; readonly part: Tree; readonly min: number; readonly max: number };

/** Throws `PatternMistake`. */
export function compilePattern(source: string): Program {
  if (source.length === 0) throw new PatternMistake("is empty");
  if (source.length > MAX_PATTERN_LENGTH) {
    throw new PatternMistake(`is longer than ${MAX_PATTERN_LENGTH} characters`);
  }
  const folded = source.startsWith("(?i)");
  const tree = new Parser(Array.from(folded ? source.slice(4) : source), folded).whole();
  const nodes: Node[] = [{ kind: "found" }];
  const start = emit(tree, 0, nodes);
  if (reaches(nodes, start)) throw new PatternMistake("fits every text, also an empty one");
  return { nodes, start, folded };
}

class Parser {
  readonly #source: readonly string[];
  readonly #folded: boolean;
  #at = 0;

  constructor(source: readonly string[], folded: boolean) {
    this.#source = source;
    this.#folded = folded;
  }

  whole(): Tree {
    const tree = this.#either();
    if (this.#at < this.#source.length) throw new PatternMistake("has a ) that was never opened");
    return tree;
  }

  #either(): Tree {
    const parts = [this.#then()];
    while (this.#take("|")) parts.push(this.#then());
    return parts.length === 1 ? parts[0]! : { kind: "either", parts };
  }

  #then(): Tree {
    const parts: Tree[] = [];
    for (let next = this.#peek(); next !== undefined && next !== "|" && next !== ")"; next = this.#peek()) {
      parts.push(this.#repeated(this.#atom()));
    }
    return parts.length === 1 ? parts[0]! : { kind: "then", parts };
  }

  #repeated(part: Tree): Tree {
    const count = this.#count();
    if (count === undefined) return part;
    if (part.kind === "edge") throw new PatternMistake("repeats an edge, such as ^* or \\b+");
    this.#take("?"); // Lazy: the same texts are found.
    if ("*+?{".includes(this.#peek() ?? " ")) throw new PatternMistake("has a count after a count");
    return { kind: "repeat", part, ...count };
  }

  #count(): { min: number; max: number } | undefined {
    if (this.#take("*")) return { min: 0, max: Infinity };
    if (this.#take("+")) return { min: 1, max: Infinity };
    if (this.#take("?")) return { min: 0, max: 1 };
    if (!this.#take("{")) return undefined;
    const inside = this.#until("}");
    const counts = /^(\d{1,4})(,(\d{1,4})?)?$/.exec(inside);
    if (counts === null) throw new PatternMistake("has a { that begins no count; write \\{ for the mark");
    const min = Number(counts[1]);
    const max = counts[2] === undefined ? min : counts[3] === undefined ? Infinity : Number(counts[3]);
    if (min > max) throw new PatternMistake(`has a count {${inside}} that goes down`);
    if (Math.max(min, max === Infinity ? 0 : max) > MAX_COUNT) {
      throw new PatternMistake(`counts further than ${MAX_COUNT}`);
    }
    return { min, max };
  }

  #atom(): Tree {
    const next = this.#next();
    if (next === "(") return this.#group();
    if (next === "[") return { kind: "set", set: this.#class() };
    if (next === ".") return { kind: "set", set: [[0, LAST]] };
    if (next === "^") return { kind: "edge", edge: "start" };
    if (next === "$") return { kind: "edge", edge: "end" };
    if (next === "\\" && this.#take("b")) return { kind: "edge", edge: "word" };
    if (next === "\\" && this.#take("B")) return { kind: "edge", edge: "inside" };
    if (next === "\\") return { kind: "set", set: this.#escape() };
    if ("*+?{".includes(next)) throw new PatternMistake(`has a ${next} with nothing to repeat before it`);
    if (next === "]" || next === "}") throw new PatternMistake(`has a ${next} of its own; write \\${next}`);
    return { kind: "set", set: this.#fold(single(next.codePointAt(0)!)) };
  }

  #group(): Tree {
    if (this.#take("?") && !this.#take(":")) {
      throw new PatternMistake("has a (? that is not (?:…); (?i) goes in front, the others are not known");
    }
    const tree = this.#either();
    if (!this.#take(")")) throw new PatternMistake("has a ( that is never closed");
    return tree.kind === "edge" ? { kind: "then", parts: [tree] } : tree;
  }

  /** After "[". */
  #class(): Ranges {
    const inverted = this.#take("^");
    const parts: Ranges[] = [];
    while (!this.#take("]")) {
      const from = this.#member();
      if (this.#peek() !== "-" || this.#source[this.#at + 1] === "]") {
        parts.push(from);
        continue;
      }
      this.#next();
      const to = this.#member();
      const [first, last] = [only(from), only(to)];
      if (first > last) throw new PatternMistake("has a range in […] that goes down");
      parts.push([[first, last]]);
    }
    if (parts.length === 0) throw new PatternMistake("has an empty […]");
    const set = union(parts.map((part) => (part.length === 1 ? this.#fold(part) : part)));
    return inverted ? complement(set) : set;
  }

  #member(): Ranges {
    const next = this.#next();
    if (next === "[") throw new PatternMistake("has a [ inside […]; write \\[");
    return next === "\\" ? this.#escape(true) : single(next.codePointAt(0)!);
  }

  /** After "\". `raw`: the caller folds a single character once its range is known. */
  #escape(raw = false): Ranges {
    const next = this.#next();
    const set = CLASSES.get(next.toLowerCase());
    if (set !== undefined) {
      const known = this.#fold(set);
      return CLASSES.has(next) ? known : complement(known);
    }
    const code = CONTROLS.get(next) ?? this.#numbered(next) ?? marked(next);
    return raw ? single(code) : this.#fold(single(code));
  }

  #numbered(next: string): number | undefined {
    if (next !== "x" && next !== "u") return undefined;
    const braced = next === "u" && this.#take("{");
    const digits = braced ? this.#until("}") : this.#many(next === "x" ? 2 : 4);
    const code = /^[\da-f]{1,6}$/i.test(digits) ? Number.parseInt(digits, 16) : Infinity;
    if (code > LAST) throw new PatternMistake(`has a \\${next} without its hexadecimal digits`);
    return code;
  }

  #fold(set: Ranges): Ranges {
    return this.#folded ? foldRanges(set) : set;
  }

  #peek(): string | undefined {
    return this.#source[this.#at];
  }

  #take(mark: string): boolean {
    if (this.#source[this.#at] !== mark) return false;
    this.#at++;
    return true;
  }

  #next(): string {
    const next = this.#source[this.#at++];
    if (next === undefined) throw new PatternMistake("ends too early: in […], or after \\");
    return next;
  }

  #many(count: number): string {
    return Array.from({ length: count }, () => this.#next()).join("");
  }

  #until(mark: string): string {
    const end = this.#source.indexOf(mark, this.#at);
    if (end < 0) throw new PatternMistake(`lacks a ${mark}`);
    const inside = this.#source.slice(this.#at, end).join("");
    this.#at = end + 1;
    return inside;
  }
}

/** A mark that stands for itself. Letters and digits are reserved. */
function marked(mark: string): number {
  if (/^[A-Za-z\d]$/.test(mark)) throw new PatternMistake(`has \\${mark}, which is not known here`);
  return mark.codePointAt(0)!;
}

function only(set: Ranges): number {
  const [first] = set;
  if (set.length === 1 && first![0] === first![1]) return first![0];
  throw new PatternMistake("has a range in […] that begins or ends with a class such as \\d");
}

/** Adds the nodes of `tree`, followed by `next`; returns the first. */
function emit(tree: Tree, next: number, nodes: Node[]): number {
  switch (tree.kind) {
    case "set":
      return add(nodes, { kind: "set", set: tree.set, next });
    case "edge":
      return add(nodes, { kind: "edge", edge: tree.edge, next });
    case "then":
      return tree.parts.reduceRight((after, part) => emit(part, after, nodes), next);
    case "either":
      return add(nodes, { kind: "fork", next: tree.parts.map((part) => emit(part, next, nodes)) });
    case "repeat":
      return emitRepeat(tree, next, nodes);
  }
}

function emitRepeat(
  { part, min, max }: Extract<Tree, { kind: "repeat" }>,
  next: number,
  nodes: Node[],
): number {
  let entry = next;
  if (max === Infinity) {
    const ways = [next];
    entry = add(nodes, { kind: "fork", next: ways });
    ways.push(emit(part, entry, nodes));
  } else {
    for (let extra = min; extra < max; extra++) {
      entry = add(nodes, { kind: "fork", next: [emit(part, entry, nodes), next] });
    }
  }
  for (let must = 0; must < min; must++) entry = emit(part, entry, nodes);
  return entry;
}

function add(nodes: Node[], node: Node): number {
  if (nodes.length >= MAX_NODES) {
    throw new PatternMistake(`needs more than ${MAX_NODES} states; use smaller counts`);
  }
  return nodes.push(node) - 1;
}

/** Whether the end is reachable without consuming a character or an edge. */
function reaches(nodes: readonly Node[], start: number): boolean {
  const seen = new Set([start]);
  for (const at of seen) {
    const node = nodes[at]!;
    if (node.kind === "found") return true;
    if (node.kind === "fork") for (const next of node.next) seen.add(next);
  }
  return false;
}

function single(code: number): Ranges {
  return [[code, code]];
}

function union(sets: readonly Ranges[]): Ranges {
  const merged: [number, number][] = [];
  for (const [from, to] of sets.flat().toSorted((a, b) => a[0] - b[0])) {
    const last = merged.at(-1);
    if (last !== undefined && from <= last[1] + 1) last[1] = Math.max(last[1], to);
    else merged.push([from, to]);
  }
  return merged;
}

function complement(set: Ranges): Ranges {
  const rest: [number, number][] = [];
  let from = 0;
  for (const [start, end] of set) {
    if (start > from) rest.push([from, start - 1]);
    from = end + 1;
  }
  if (from <= LAST) rest.push([from, LAST]);
  return rest;
}

function foldRanges(set: Ranges): Ranges {
  const folded: [number, number][] = [];
  for (const [from, to] of set) {
    for (let code = from; code <= Math.min(to, LAST_CASED); code++) {
      const same = fold(code);
      const last = folded.at(-1);
      if (last !== undefined && same === last[1] + 1) last[1] = same;
      else if (last === undefined || same < last[0] || same > last[1]) folded.push([same, same]);
    }
    if (to > LAST_CASED) folded.push([Math.max(from, LAST_CASED + 1), to]);
  }
  return union([folded]);
}

let foldings: Uint32Array | undefined; // lazily filled; 0 means unknown, which is only wasted on NUL

/** The representative of all cases of a character. */
export function fold(code: number): number {
  if (code < 128) return code >= 0x41 && code <= 0x5a ? code + 32 : code;
  if (code > LAST_CASED) return code;
  foldings ??= new Uint32Array(LAST_CASED + 1);
  return (foldings[code] ||= lowerOfUpper(code));
}

function lowerOfUpper(code: number): number {
  const upper = oneOr(String.fromCodePoint(code).toUpperCase(), code);
  return oneOr(String.fromCodePoint(upper).toLowerCase(), upper);
}

function oneOr(text: string, otherwise: number): number {
  const code = text.codePointAt(0)!;
  return text.length === (code > 0xffff ? 2 : 1) ? code : otherwise;
}
