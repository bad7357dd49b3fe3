/**
 * Screens inputs: does any string in a JSON text match one of the model's deny patterns?
 *
 * Every string at any depth is searched, keys too, after unescaping; numbers are not. Patterns of one kind share a
 * lazily built DFA that never backtracks. States are kept up to `MAX_KEPT`, then dropped and rebuilt, so a character
 * costs one table lookup and at worst one step per node. For `(a|b)*a(a|b){600}` and a crafted text that worst case
 * would still be seconds, so a text that needs more than `MAX_STEPS` (some 20 ms) is rejected as not clearable. That
 * bound is why this is not re2js: also linear, but such a text blocks it for a minute, and a common pattern
 * (`foo.{0,100}bar`) for seconds (`bench/patterns.ts`).
 */
import {
  compilePattern,
  type Edge,
  fold,
  MAX_NODES,
  type Node,
  PatternMistake,
  type Program,
  type Ranges,
  WORD,
} from "./pattern.ts";

const MAX_KEPT = 1000; // states
const MAX_ENTRIES = 1_000_000; // of their tables in total
/** Nodes visited per JSON text; a megabyte needs some hundreds with ordinary patterns. */
export const MAX_STEPS = 400_000;
const MAX_MARK = 0xffff_ffff;
const UNKNOWN = -1;
const FOUND = -2;

export class Screen {
  readonly #searches: readonly Search[];

  /** Throws `PatternMistake`. */
  constructor(patterns: readonly string[]) {
    const programs = patterns.map(compilePattern);
    const nodes = programs.reduce((sum, program) => sum + program.nodes.length, 0);
    if (nodes > MAX_NODES) {
      throw new PatternMistake(`need ${nodes} states together, more than ${MAX_NODES}; use fewer or simpler`);
    }
    const kinds = [programs.filter(({ folded }) => folded), programs.filter(({ folded }) => !folded)];
    this.#searches = kinds.filter(({ length }) => length > 0).map((kind) => new Search(kind));
  }

  /** `json` is checked JSON text, or "". */
  refuses(json: string): boolean {
    this.#begin();
    return someString(json, (text, start, end) => this.#finds(text, start, end));
  }

  refusesTexts(texts: Iterable<string>): boolean {
    this.#begin();
    for (const text of texts) if (this.#finds(text, 0, text.length)) return true;
    return false;
  }

  #begin(): void {
    for (const search of this.#searches) search.maxSteps = search.steps + MAX_STEPS;
  }

  #finds(text: string, start: number, end: number): boolean {
    return this.#searches.some((search) => search.finds(text, start, end));
  }

  get steps(): number {
    return this.#searches.reduce((sum, { steps }) => sum + steps, 0);
  }
}

/** Undefined without patterns, so that such a model pays nothing. */
export function screenFor(patterns: readonly string[]): Screen | undefined {
  return patterns.length === 0 ? undefined : new Screen(patterns);
}

/** Class of the previous character; edges depend on it. */
type Before = "nothing" | "word" | "other";

interface State {
  readonly nodes: readonly number[]; // nodes waiting for the next character, before its edges are resolved; sorted
  readonly before: Before;
  readonly table: Int32Array; // class of the next character → index of the next state, UNKNOWN or FOUND
}

/** All case-sensitive or all case-insensitive patterns. */
class Search {
  readonly #nodes: readonly Node[];
  readonly #starts: readonly number[];
  readonly #folded: boolean;
  readonly #alphabet: Alphabet;
  readonly #members: readonly (Uint8Array | undefined)[]; // per node: 1 where a character class is in its set
  readonly #maxKept: number;
  #states: State[] = [];
  #places = new Map<string, number>();
  readonly #marks: Uint32Array; // step number in which a node was last visited
  #mark = 0;
  steps = 0;
  maxSteps = 0;

  constructor(programs: readonly Program[]) {
    const nodes: Node[] = [];
    this.#starts = programs.map((program) => {
      const base = nodes.length;
      nodes.push(...program.nodes.map((node) => moved(node, base)));
      return base + program.start;
    });
    this.#nodes = nodes;
    this.#folded = programs[0]!.folded;
    this.#alphabet = new Alphabet(nodes);
    const tables = new Map<string, Uint8Array>();
    this.#members = nodes.map((node) => {
      if (node.kind !== "set") return undefined;
      const key = node.set.join(";");
      if (!tables.has(key)) tables.set(key, this.#alphabet.members(node.set));
      return tables.get(key);
    });
    this.#maxKept = Math.max(16, Math.min(MAX_KEPT, Math.floor(MAX_ENTRIES / this.#alphabet.size)));
    this.#marks = new Uint32Array(nodes.length);
    this.#place([], "nothing");
  }

  finds(text: string, start: number, end: number): boolean {
    const { ascii } = this.#alphabet;
    const folded = this.#folded;
    let place = this.#place([], "nothing");
    let { table } = this.#states[place]!;
    for (let at = start; at < end; at++) {
      let code = text.charCodeAt(at);
      if (code >= 0xd800 && code <= 0xdbff && at + 1 < end) code = text.codePointAt(at++)!;
      if (folded) code = fold(code);
      const kind = code < 128 ? ascii[code]! : this.#alphabet.classOf(code);
      const next = table[kind]!;
      place = next === UNKNOWN ? this.#step(place, kind) : next;
      if (place === FOUND) return true;
      ({ table } = this.#states[place]!);
    }
    const last = table[this.#alphabet.end]!;
    return (last === UNKNOWN ? this.#step(place, this.#alphabet.end) : last) === FOUND;
  }

  /** The next state; cached unless the state itself was dropped. */
  #step(place: number, kind: number): number {
    if (this.steps >= this.maxSteps) return FOUND;
    const { nodes, before, table } = this.#states[place]!;
    const after = this.#reach([...nodes, ...this.#starts], before, kind);
    const isWord = this.#alphabet.isWord(kind);
    const next = after === undefined ? FOUND : this.#place(after, isWord ? "word" : "other");
    table[kind] = next;
    return next;
  }

  /** Nodes after the character `kind`; undefined if a pattern matched before it. */
  #reach(open: number[], before: Before, kind: number): number[] | undefined {
    const alphabet = this.#alphabet;
    const after = new Set<number>();
    const mark = this.#nextMark();
    for (let at = open.pop(); at !== undefined; at = open.pop()) {
      if (this.#marks[at] === mark) continue;
      this.#marks[at] = mark;
      this.steps++;
      const node = this.#nodes[at]!;
      if (node.kind === "found") return undefined;
      if (node.kind === "fork") open.push(...node.next);
      else if (node.kind === "set") {
        if (this.#members[at]![kind] === 1) after.add(node.next);
      } else if (stands(node.edge, before, kind === alphabet.end, alphabet.isWord(kind)))
        open.push(node.next);
    }
    return [...after].sort((a, b) => a - b);
  }

  #nextMark(): number {
    if (this.#mark === MAX_MARK) {
      this.#marks.fill(0);
      this.#mark = 0;
    }
    return ++this.#mark;
  }

  #place(nodes: readonly number[], before: Before): number {
    const key = `${before} ${nodes.join(" ")}`;
    const known = this.#places.get(key);
    if (known !== undefined) return known;
    if (this.#states.length >= this.#maxKept) {
      this.#states = [];
      this.#places.clear();
    }
    const table = new Int32Array(this.#alphabet.size).fill(UNKNOWN);
    const place = this.#states.push({ nodes, before, table }) - 1;
    this.#places.set(key, place);
    return place;
  }
}

function stands(edge: Edge, before: Before, atEnd: boolean, wordNext: boolean): boolean {
  if (edge === "start") return before === "nothing";
  if (edge === "end") return atEnd;
  const atWordEdge = (before === "word") !== wordNext;
  return edge === "word" ? atWordEdge : !atWordEdge;
}

function moved(node: Node, base: number): Node {
  if (node.kind === "found") return node;
  if (node.kind === "fork") return { kind: "fork", next: node.next.map((next) => next + base) };
  return { ...node, next: node.next + base };
}

/** Characters that no node distinguishes are one class; `end` is the class of "no more characters". */
class Alphabet {
  readonly ascii: Uint16Array;
  readonly end: number;
  readonly size: number;
  /** First code point of each class's range, sorted. One range per class: few classes are equal. */
  readonly #starts: readonly number[];
  readonly #words: Uint8Array;

  constructor(nodes: readonly Node[]) {
    const starts = new Set([0]);
    const sets = nodes.flatMap((node) => (node.kind === "set" ? [node.set] : []));
    for (const [from, to] of [...sets, WORD].flat()) starts.add(from).add(to + 1);
    this.#starts = [...starts].filter((start) => start <= 0x10ffff).sort((a, b) => a - b);
    this.end = this.#starts.length;
    this.size = this.end + 1;
    this.#words = this.members(WORD);
    this.ascii = Uint16Array.from({ length: 128 }, (_, code) => this.classOf(code));
  }

  classOf(code: number): number {
    let low = 0;
    let high = this.#starts.length;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (this.#starts[middle]! <= code) low = middle;
      else high = middle;
    }
    return low;
  }

  members(set: Ranges): Uint8Array {
    const members = new Uint8Array(this.size);
    for (const [from, to] of set) members.fill(1, this.classOf(from), this.classOf(to) + 1);
    return members;
  }

  isWord(kind: number): boolean {
    return this.#words[kind] === 1;
  }
}

const NUMBER_IN_LIST = /[[,]\s*-?\d/;

export function listsNumbers(json: string): boolean {
  let behind = 0;
  // Outside strings, a number after a comma is an array element: an object would have a key.
  const found = eachString(json, (at, end) => {
    const between = json.slice(behind, at);
    behind = end + 1;
    return NUMBER_IN_LIST.test(between);
  });
  return found || NUMBER_IN_LIST.test(json.slice(behind));
}

function someString(json: string, test: (text: string, start: number, end: number) => boolean): boolean {
  return eachString(json, (at, end, plain) => {
    if (plain) return test(json, at + 1, end);
    const text = JSON.parse(json.slice(at, end + 1)) as string;
    return test(text, 0, text.length);
  });
}

/** Visits the quote positions of each string, and whether it is free of escapes, until `visit` returns true. */
function eachString(json: string, visit: (at: number, end: number, plain: boolean) => boolean): boolean {
  // Cached, so that all searches together read the text once.
  let backslash = json.indexOf("\\");
  for (let at = json.indexOf('"'); at >= 0;) {
    let end = json.indexOf('"', at + 1);
    if (backslash >= 0 && backslash < at) backslash = json.indexOf("\\", at);
    const plain = backslash < 0 || backslash > end;
    while (backslash >= 0 && backslash < end) {
      if (backslash + 1 === end) end = json.indexOf('"', end + 1);
      backslash = json.indexOf("\\", backslash + 2);
    }
    if (visit(at, end, plain)) return true;
    at = json.indexOf('"', end + 1);
  }
  return false;
}
