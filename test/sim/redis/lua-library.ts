/** What a Lua script finds under global names in Redis: the standard library, cjson, cmsgpack, struct and bit. */

export type LuaFunction = (...values: LuaValue[]) => LuaValue[];
export type LuaValue = undefined | boolean | number | string | Table | LuaFunction;

export class LuaError extends Error {
  readonly value: LuaValue;

  constructor(value: LuaValue) {
    super(value instanceof Table ? String(value.get("err")) : String(value));
    this.name = "LuaError";
    this.value = value;
  }
}

export class Table {
  /** The values of 1, 2, …, without a nil at the end. */
  readonly #items: LuaValue[];
  readonly #fields = new Map<LuaValue, LuaValue>();

  constructor(items: readonly LuaValue[] = [], fields: readonly (readonly [LuaValue, LuaValue])[] = []) {
    this.#items = [...items];
    this.#trim();
    for (const [key, value] of fields) this.set(key, value);
  }

  get length(): number {
    return this.#items.length;
  }

  get(key: LuaValue): LuaValue {
    if (typeof key === "number" && key >= 1 && key <= this.#items.length && Number.isInteger(key))
      return this.#items[key - 1];
    return this.#fields.get(key);
  }

  set(key: LuaValue, value: LuaValue): void {
    if (key === undefined || Number.isNaN(key)) throw new LuaError("table index is nil or NaN");
    const items = this.#items;
    if (typeof key === "number" && key >= 1 && key <= items.length && Number.isInteger(key)) {
      items[key - 1] = value;
      if (value === undefined) this.#trim();
    } else if (key === items.length + 1 && value !== undefined) {
      this.#fields.delete(key);
      items.push(value);
      for (let next = items.length + 1; this.#fields.has(next); next++) {
        items.push(this.#fields.get(next));
        this.#fields.delete(next);
      }
    } else if (value === undefined) this.#fields.delete(key);
    else this.#fields.set(key, value);
  }

  keys(): LuaValue[] {
    const keys: LuaValue[] = [];
    this.#items.forEach((value, at) => {
      if (value !== undefined) keys.push(at + 1);
    });
    return [...keys, ...this.#fields.keys()];
  }

  /** The values from 1 to the first that is nil. */
  list(): Exclude<LuaValue, undefined>[] {
    const end = this.#items.indexOf(undefined);
    return (end < 0 ? [...this.#items] : this.#items.slice(0, end)) as Exclude<LuaValue, undefined>[];
  }

  splice(from: number, remove: number, ...values: LuaValue[]): LuaValue[] {
    return this.#items.splice(from, remove, ...values);
  }

  sort(compare: (one: LuaValue, other: LuaValue) => number): void {
    this.#items.sort(compare);
  }

  /** Lua writes an address; nothing may depend on it. */
  toString(): string {
    return "table";
  }

  #trim(): void {
    while (this.#items.length > 0 && this.#items.at(-1) === undefined) this.#items.pop();
  }
}

/** C's %lld; what does not fit is the smallest number there is, as x86 has it. */
function integerText(value: number): string {
  const fits = Math.abs(value) < 2 ** 63;
  return fits ? BigInt(Math.trunc(value)).toString() : (-(2n ** 63n)).toString();
}

/** C's %.<digits>g. */
export function formatNumber(value: number, digits: number): string {
  if (Number.isInteger(value) && Math.abs(value) < 10 ** Math.min(digits, 15)) {
    return Object.is(value, -0) ? "-0" : String(value);
  }
  if (Number.isNaN(value)) return "nan";
  if (!Number.isFinite(value)) return value > 0 ? "inf" : "-inf";
  const [mantissa, exponent] = value.toExponential(digits - 1).split("e") as [string, string];
  const power = Number(exponent);
  if (power >= -4 && power < digits) {
    const fixed = value.toFixed(Math.max(0, digits - 1 - power));
    return fixed.includes(".") ? fixed.replace(/\.?0+$/, "") : fixed;
  }
  const sign = power < 0 ? "-" : "+";
  return `${mantissa.replace(/\.?0+$/, "")}e${sign}${String(Math.abs(power)).padStart(2, "0")}`;
}

function textOf(value: LuaValue): string {
  if (typeof value === "string") return value;
  if (typeof value === "number") return formatNumber(value, 14);
  if (value === undefined) return "nil";
  return typeof value === "boolean" ? String(value) : typeOf(value);
}

function typeOf(value: LuaValue): string {
  if (value === undefined) return "nil";
  return value instanceof Table ? "table" : typeof value;
}

function numberOf(value: LuaValue, base = 10): number | undefined {
  if (typeof value === "number") return value;
  if (typeof value !== "string") return undefined;
  const text = value.trim();
  if (base !== 10) return /^[0-9a-z]+$/i.test(text) ? Number.parseInt(text, base) : undefined;
  if (/^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(text) || /^0x[0-9a-f]+$/i.test(text)) return Number(text);
  const infinite = /^([+-]?)inf(inity)?$/i.exec(text);
  return infinite === null ? undefined : infinite[1] === "-" ? -Infinity : Infinity;
}

function needNumber(value: LuaValue): number {
  const number = numberOf(value);
  if (number === undefined) throw new LuaError(`bad argument (number expected, got ${typeOf(value)})`);
  return number;
}

function needText(value: LuaValue): string {
  if (typeof value !== "string" && typeof value !== "number")
    throw new LuaError(`bad argument (string expected, got ${typeOf(value)})`);
  return textOf(value);
}

function needTable(value: LuaValue): Table {
  if (!(value instanceof Table)) throw new LuaError(`bad argument (table expected, got ${typeOf(value)})`);
  return value;
}

function tableOf(fields: Record<string, LuaValue>): Table {
  return new Table([], Object.entries(fields));
}

// ── string ───────────────────────────────────────────────────────────────────────────────────────────

const CLASSES: Readonly<Record<string, string>> = {
  a: "A-Za-z",
  d: "0-9",
  l: "a-z",
  s: "\\s",
  u: "A-Z",
  w: "A-Za-z0-9",
  x: "A-Fa-f0-9",
  p: "!-\\/:-@[-`{-~",
  c: "\\x00-\\x1f\\x7f",
};
const patterns = new Map<string, RegExp>();

/** A Lua pattern as a regular expression that starts where `lastIndex` says. */
function patternOf(pattern: string): RegExp {
  let compiled = patterns.get(pattern);
  if (compiled === undefined) {
    compiled = new RegExp(translated(pattern), pattern.startsWith("^") ? "ys" : "gs");
    patterns.set(pattern, compiled);
  }
  return compiled;
}

function translated(pattern: string): string {
  let code = "";
  let inSet = false;
  for (let at = pattern.startsWith("^") ? 1 : 0; at < pattern.length; at++) {
    const char = pattern[at]!;
    if (char === "%") {
      const said = pattern[++at]!;
      const lower = CLASSES[said.toLowerCase()];
      if (lower === undefined) {
        if (/[a-z0-9]/i.test(said)) throw new LuaError(`the pattern %${said} is not supported here`);
        code += `\\${said}`;
      } else if (said === said.toLowerCase()) code += inSet ? lower : `[${lower}]`;
      else if (inSet) throw new LuaError("a negated class in a set is not supported here");
      else code += `[^${lower}]`;
    } else if (inSet) {
      if (char === "]") inSet = false;
      code += char === "\\" || char === "[" ? `\\${char}` : char;
    } else if (char === "[") {
      inSet = true;
      code += "[";
    } else if (char === "-") code += "*?";
    else if (char === "$" && at < pattern.length - 1) code += "\\$";
    else if (/[{}|\\^/]/.test(char)) code += `\\${char}`;
    else code += char;
  }
  return code;
}

function matchFrom(text: string, pattern: string, from: number): RegExpExecArray | null {
  const expression = patternOf(pattern);
  expression.lastIndex = from;
  return expression.exec(text);
}

function capturesOf(found: RegExpExecArray): LuaValue[] {
  return found.length > 1 ? found.slice(1) : [found[0]];
}

/** Where in the text a Lua position is, from 0. */
function startOf(at: LuaValue, length: number): number {
  const said = at === undefined ? 1 : needNumber(at);
  return said < 0 ? Math.max(0, length + said) : Math.max(0, said - 1);
}

const strings: Record<string, LuaFunction> = {
  len: (text) => [needText(text).length],
  sub: (said, from, to) => {
    const text = needText(said);
    const end = to === undefined ? -1 : needNumber(to);
    return [text.slice(startOf(from, text.length), end < 0 ? Math.max(0, text.length + end + 1) : end)];
  },
  lower: (text) => [needText(text).replaceAll(/[A-Z]/g, (char) => char.toLowerCase())],
  upper: (text) => [needText(text).replaceAll(/[a-z]/g, (char) => char.toUpperCase())],
  rep: (text, count) => [needText(text).repeat(Math.max(0, needNumber(count)))],
  byte: (said, from, to) => {
    const text = needText(said);
    const start = startOf(from, text.length);
    const end =
      to === undefined ? start + 1 : needNumber(to) < 0 ? text.length + needNumber(to) + 1 : needNumber(to);
    return Array.from(text.slice(start, end), (char) => char.charCodeAt(0));
  },
  char: (...codes) => [String.fromCharCode(...codes.map(needNumber))],
  find: (said, pattern, from, plain) => {
    const text = needText(said);
    const start = startOf(from, text.length);
    if (plain !== undefined && plain !== false) {
      const at = text.indexOf(needText(pattern), start);
      return at < 0 ? [undefined] : [at + 1, at + needText(pattern).length];
    }
    const found = matchFrom(text, needText(pattern), start);
    return found === null ? [undefined] : [found.index + 1, found.index + found[0].length, ...found.slice(1)];
  },
  match: (text, pattern, from) => {
    const found = matchFrom(needText(text), needText(pattern), startOf(from, needText(text).length));
    return found === null ? [undefined] : capturesOf(found);
  },
  gmatch: (text, pattern) => {
    let at = 0;
    return [
      () => {
        const found = at > needText(text).length ? null : matchFrom(needText(text), needText(pattern), at);
        if (found === null) return [undefined];
        at = found.index + Math.max(1, found[0].length);
        return capturesOf(found);
      },
    ];
  },
  gsub: (said, pattern, replacement) => {
    const text = needText(said);
    let [result, at, count] = ["", 0, 0];
    while (at <= text.length) {
      const found = matchFrom(text, needText(pattern), at);
      if (found === null) break;
      count++;
      const captures = capturesOf(found);
      let by: LuaValue;
      if (typeof replacement === "function") [by] = replacement(...captures);
      else if (replacement instanceof Table) by = replacement.get(captures[0]);
      else {
        by = needText(replacement).replaceAll(/%(.)/g, (_, char: string) =>
          char === "0" ? found[0] : /\d/.test(char) ? textOf(captures[Number(char) - 1]) : char,
        );
      }
      result += text.slice(at, found.index) + (by === undefined || by === false ? found[0] : textOf(by));
      at = found.index + found[0].length;
      if (found[0].length > 0) continue;
      result += text.slice(at, at + 1);
      at++;
    }
    return [result + text.slice(at), count];
  },
  format: (form, ...values) => {
    let at = 0;
    const text = needText(form).replaceAll(/%(%|([-0 +#]*)(\d*)(?:\.(\d+))?([a-zA-Z]))/g, (all, ...parts) => {
      const [said, flags, width, precision, kind] = parts as string[];
      if (said === "%") return "%";
      const value = values[at++];
      let done: string;
      if (kind === "s") done = textOf(value);
      else if (kind === "d" || kind === "i") done = integerText(needNumber(value));
      else if (kind === "x") done = Math.trunc(needNumber(value)).toString(16);
      else if (kind === "X") done = Math.trunc(needNumber(value)).toString(16).toUpperCase();
      else if (kind === "g") done = formatNumber(needNumber(value), Number(precision ?? 6));
      else if (kind === "f") done = needNumber(value).toFixed(Number(precision ?? 6));
      else if (kind === "c") done = String.fromCharCode(needNumber(value));
      else throw new LuaError(`the format ${all} is not supported here`);
      if (flags!.includes("-")) return done.padEnd(Number(width));
      return flags!.includes("0") ? done.padStart(Number(width), "0") : done.padStart(Number(width));
    });
    return [text];
  },
};

// ── table and math ───────────────────────────────────────────────────────────────────────────────────

const tables: Record<string, LuaFunction> = {
  insert: (said, ...rest) => {
    const table = needTable(said);
    if (rest.length === 1) table.set(table.length + 1, rest[0]);
    else table.splice(needNumber(rest[0]) - 1, 0, rest[1]);
    return [];
  },
  remove: (said, at) => {
    const table = needTable(said);
    if (table.length === 0) return [undefined];
    return table.splice(at === undefined ? table.length - 1 : needNumber(at) - 1, 1);
  },
  concat: (table, separator, from, to) => {
    const items: string[] = [];
    const last = to === undefined ? needTable(table).length : needNumber(to);
    for (let at = from === undefined ? 1 : needNumber(from); at <= last; at++) {
      const item = needTable(table).get(at);
      if (typeof item !== "string" && typeof item !== "number")
        throw new LuaError(`invalid value (${typeOf(item)}) at index ${at} in table for 'concat'`);
      items.push(textOf(item));
    }
    return [items.join(separator === undefined ? "" : needText(separator))];
  },
  sort: (table, before) => {
    needTable(table).sort((one, other) => {
      if (typeof before === "function") {
        const less = (a: LuaValue, b: LuaValue): boolean =>
          ![undefined, false].includes(before(a, b)[0] as never);
        return less(one, other) ? -1 : less(other, one) ? 1 : 0;
      }
      if (typeof one !== typeof other) throw new LuaError("attempt to compare two values");
      return one! < other! ? -1 : one! > other! ? 1 : 0;
    });
    return [];
  },
  getn: (table) => [needTable(table).length],
};

const math: Record<string, LuaValue> = {
  huge: Infinity,
  pi: Math.PI,
  floor: (value) => [Math.floor(needNumber(value))],
  ceil: (value) => [Math.ceil(needNumber(value))],
  abs: (value) => [Math.abs(needNumber(value))],
  max: (...values) => [Math.max(...values.map(needNumber))],
  min: (...values) => [Math.min(...values.map(needNumber))],
  fmod: (one, other) => [needNumber(one) % needNumber(other)],
  pow: (one, other) => [needNumber(one) ** needNumber(other)],
  sqrt: (value) => [Math.sqrt(needNumber(value))],
  log: (value) => [Math.log(needNumber(value))],
};

// ── cjson ────────────────────────────────────────────────────────────────────────────────────────────

function fromJson(value: unknown): LuaValue {
  if (typeof value === "string") return Buffer.from(value).toString("latin1");
  if (Array.isArray(value)) return new Table(value.map(fromJson));
  if (value === null) return jsonNull;
  if (typeof value !== "object") return value as number | boolean;
  return new Table(
    [],
    Object.entries(value).map(([key, each]) => [fromJson(key), fromJson(each)] as const),
  );
}

/** Stands for null where Lua has no value for it. */
const jsonNull: LuaFunction = () => [];

function toJson(value: LuaValue): unknown {
  if (typeof value === "string") return Buffer.from(value, "latin1").toString();
  if (value === jsonNull || value === undefined) return null;
  if (!(value instanceof Table)) return value;
  const keys = value.keys();
  if (keys.length > 0 && keys.length === value.length) return value.list().map(toJson);
  return Object.fromEntries(keys.map((key) => [textOf(key), toJson(value.get(key))]));
}

// ── struct ───────────────────────────────────────────────────────────────────────────────────────────

interface Piece {
  readonly kind: string;
  readonly size: number;
  readonly little: boolean;
}

const SIZES: Readonly<Record<string, number>> = {
  b: 1,
  B: 1,
  h: 2,
  H: 2,
  i: 4,
  I: 4,
  l: 8,
  L: 8,
  T: 8,
  d: 8,
  f: 4,
};

function piecesOf(form: string): Piece[] {
  let little = true;
  const pieces: Piece[] = [];
  for (const [, kind, digits] of form.matchAll(/([<>=!a-zA-Z])(\d*)/g)) {
    if (kind === ">") little = false;
    else if (kind === "<" || kind === "=") little = true;
    else if (kind !== "!") {
      const size =
        kind === "c" ? Number(digits === "" ? 1 : digits) : digits === "" ? SIZES[kind!] : Number(digits);
      pieces.push({ kind: kind!, size: size ?? 0, little });
    }
  }
  return pieces;
}

function bytesOfInteger(value: number, size: number, little: boolean): string {
  const bytes = Array.from({ length: size }, (_, at) =>
    Number((BigInt(Math.trunc(value)) >> BigInt(8 * at)) & 255n),
  );
  return String.fromCharCode(...(little ? bytes : bytes.reverse()));
}

function integerOf(bytes: string, little: boolean, signed: boolean): number {
  let value = 0n;
  for (let at = 0; at < bytes.length; at++) {
    value = (value << 8n) | BigInt(bytes.charCodeAt(little ? bytes.length - 1 - at : at));
  }
  return Number(signed ? BigInt.asIntN(8 * bytes.length, value) : value);
}

const struct: Record<string, LuaFunction> = {
  pack: (form, ...values) => {
    let at = 0;
    let packed = "";
    for (const { kind, size, little } of piecesOf(needText(form))) {
      const value = kind === "x" ? undefined : values[at++];
      if (kind === "x") packed += "\0";
      else if (kind === "s") packed += `${needText(value)}\0`;
      else if (kind === "c") packed += size === 0 ? needText(value) : needText(value).slice(0, size);
      else if (kind === "d" || kind === "f") {
        const bytes = Buffer.alloc(size);
        if (kind === "d") bytes[little ? "writeDoubleLE" : "writeDoubleBE"](needNumber(value));
        else bytes[little ? "writeFloatLE" : "writeFloatBE"](needNumber(value));
        packed += bytes.toString("latin1");
      } else packed += bytesOfInteger(needNumber(value), size, little);
    }
    return [packed];
  },
  unpack: (form, said, from) => {
    const text = needText(said);
    let at = from === undefined ? 0 : needNumber(from) - 1;
    const values: LuaValue[] = [];
    for (const { kind, size, little } of piecesOf(needText(form))) {
      let length = size;
      if (kind === "s") length = text.indexOf("\0", at) - at;
      // c0 takes its length from the number before it.
      if (kind === "c" && size === 0) length = needNumber(values.pop());
      if (length < 0 || at + length > text.length) throw new LuaError("data string too short");
      const bytes = text.slice(at, at + length);
      at += length + (kind === "s" ? 1 : 0);
      if (kind === "x") continue;
      if (kind === "s" || kind === "c") values.push(bytes);
      else if (kind === "d" || kind === "f") {
        const buffer = Buffer.from(bytes, "latin1");
        if (kind === "d") values.push(buffer[little ? "readDoubleLE" : "readDoubleBE"]());
        else values.push(buffer[little ? "readFloatLE" : "readFloatBE"]());
      } else values.push(integerOf(bytes, little, kind === kind.toLowerCase()));
    }
    return [...values, at + 1];
  },
  size: (form) => [piecesOf(needText(form)).reduce((sum, { size }) => sum + size, 0)],
};

// ── cmsgpack ─────────────────────────────────────────────────────────────────────────────────────────

function packed(value: LuaValue): string {
  const integer = (mark: number, of: number, size: number): string =>
    String.fromCharCode(mark) + bytesOfInteger(of, size, false);
  /** The head of something with a length: the marks of its forms of 8, 16 and 32 bits. */
  const head = (
    length: number,
    small: number,
    limit: number,
    marks: readonly [number, number, number],
  ): string => {
    if (length < limit) return String.fromCharCode(small | length);
    if (length < 0x100 && marks[0] !== 0) return integer(marks[0], length, 1);
    return length < 0x10000 ? integer(marks[1], length, 2) : integer(marks[2], length, 4);
  };
  if (value === undefined || typeof value === "function") return "\xc0";
  if (typeof value === "boolean") return value ? "\xc3" : "\xc2";
  if (typeof value === "string") return head(value.length, 0xa0, 32, [0xd9, 0xda, 0xdb]) + value;
  if (typeof value === "number") {
    if (!Number.isInteger(value)) {
      const single = Math.fround(value) === value;
      const bytes = Buffer.alloc(single ? 4 : 8);
      if (single) bytes.writeFloatBE(value);
      else bytes.writeDoubleBE(value);
      return `${single ? "\xca" : "\xcb"}${bytes.toString("latin1")}`;
    }
    if (value >= 0) {
      if (value < 0x80) return String.fromCharCode(value);
      if (value < 0x100) return integer(0xcc, value, 1);
      if (value < 0x10000) return integer(0xcd, value, 2);
      return value < 0x100000000 ? integer(0xce, value, 4) : integer(0xcf, value, 8);
    }
    if (value >= -32) return bytesOfInteger(value, 1, false);
    if (value >= -0x80) return integer(0xd0, value, 1);
    if (value >= -0x8000) return integer(0xd1, value, 2);
    return value >= -0x80000000 ? integer(0xd2, value, 4) : integer(0xd3, value, 8);
  }
  const keys = value.keys();
  if (keys.length === value.length) {
    return head(value.length, 0x90, 16, [0, 0xdc, 0xdd]) + value.list().map(packed).join("");
  }
  return (
    head(keys.length, 0x80, 16, [0, 0xde, 0xdf]) +
    keys.map((key) => packed(key) + packed(value.get(key))).join("")
  );
}

class Unpacker {
  readonly #text: string;
  at = 0;

  constructor(text: string) {
    this.#text = text;
  }

  #take(length: number): string {
    if (this.at + length > this.#text.length) throw new LuaError("Missing bytes in input.");
    const bytes = this.#text.slice(this.at, this.at + length);
    this.at += length;
    return bytes;
  }

  #integer(size: number, signed = false): number {
    return integerOf(this.#take(size), false, signed);
  }

  #list(length: number): Table {
    return new Table(Array.from({ length }, () => this.value()));
  }

  #map(length: number): Table {
    return new Table(
      [],
      Array.from({ length }, () => [this.value(), this.value()] as const),
    );
  }

  value(): LuaValue {
    const mark = this.#integer(1);
    if (mark < 0x80) return mark;
    if (mark < 0x90) return this.#map(mark & 15);
    if (mark < 0xa0) return this.#list(mark & 15);
    if (mark < 0xc0) return this.#take(mark & 31);
    if (mark >= 0xe0) return mark - 0x100;
    switch (mark) {
      case 0xc0:
        return undefined;
      case 0xc2:
        return false;
      case 0xc3:
        return true;
      case 0xca:
        return Buffer.from(this.#take(4), "latin1").readFloatBE();
      case 0xcb:
        return Buffer.from(this.#take(8), "latin1").readDoubleBE();
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return this.#integer(1 << (mark - 0xcc));
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3:
        return this.#integer(1 << (mark - 0xd0), true);
      case 0xc4:
      case 0xd9:
        return this.#take(this.#integer(1));
      case 0xc5:
      case 0xda:
        return this.#take(this.#integer(2));
      case 0xc6:
      case 0xdb:
        return this.#take(this.#integer(4));
      case 0xdc:
      case 0xdd:
        return this.#list(this.#integer(mark === 0xdc ? 2 : 4));
      case 0xde:
      case 0xdf:
        return this.#map(this.#integer(mark === 0xde ? 2 : 4));
      default:
        throw new LuaError("Bad data format in input.");
    }
  }
}

// ── what is global ───────────────────────────────────────────────────────────────────────────────────

const ipairsStep: LuaFunction = (table, at) => {
  const next = needNumber(at) + 1;
  const value = needTable(table).get(next);
  return value === undefined ? [undefined] : [next, value];
};

export const library: Record<string, LuaValue> = {
  string: tableOf(strings),
  table: tableOf(tables),
  math: tableOf(math),
  struct: tableOf(struct),
  cjson: tableOf({
    null: jsonNull,
    decode: (text) => {
      try {
        return [fromJson(JSON.parse(Buffer.from(needText(text), "latin1").toString()))];
      } catch (error) {
        throw new LuaError((error as Error).message);
      }
    },
    encode: (value) => [Buffer.from(JSON.stringify(toJson(value))).toString("latin1")],
  }),
  cmsgpack: tableOf({
    pack: (...values) => [values.map(packed).join("")],
    unpack: (text) => {
      const unpacker = new Unpacker(needText(text));
      const values: LuaValue[] = [];
      do values.push(unpacker.value());
      while (unpacker.at < needText(text).length);
      return values;
    },
  }),
  bit: tableOf({
    band: (...values) => [values.map(needNumber).reduce((one, other) => one & other)],
    bor: (...values) => [values.map(needNumber).reduce((one, other) => one | other)],
    bxor: (...values) => [values.map(needNumber).reduce((one, other) => one ^ other)],
    lshift: (value, by) => [needNumber(value) << needNumber(by)],
    rshift: (value, by) => [(needNumber(value) >>> needNumber(by)) | 0],
  }),
  type: (value) => [typeOf(value)],
  tostring: (value) => [textOf(value)],
  tonumber: (value, base) => [numberOf(value, base === undefined ? 10 : needNumber(base))],
  unpack: (table, from, to) => {
    const values: LuaValue[] = [];
    const last = to === undefined ? needTable(table).length : needNumber(to);
    for (let at = from === undefined ? 1 : needNumber(from); at <= last; at++)
      values.push(needTable(table).get(at));
    if (values.length > 7999) throw new LuaError("too many results to unpack");
    return values;
  },
  select: (which, ...values) => {
    if (which === "#") return [values.length];
    return needNumber(which) < 0 ? values.slice(needNumber(which)) : values.slice(needNumber(which) - 1);
  },
  ipairs: (table) => [ipairsStep, needTable(table), 0],
  pairs: (table) => {
    const keys = needTable(table).keys();
    let at = 0;
    return [
      () => {
        for (; at < keys.length; at++) {
          const value = needTable(table).get(keys[at]);
          if (value !== undefined) return [keys[at++], value];
        }
        return [undefined];
      },
      table,
    ];
  },
  next: (table, key) => {
    const keys = needTable(table).keys();
    const next = key === undefined ? keys[0] : keys[keys.indexOf(key) + 1];
    return next === undefined ? [undefined] : [next, needTable(table).get(next)];
  },
  error: (value) => {
    throw new LuaError(value);
  },
  assert: (...values) => {
    if (values[0] === undefined || values[0] === false) throw new LuaError(values[1] ?? "assertion failed!");
    return values;
  },
  pcall: (work, ...values) => {
    try {
      return [true, ...(work as LuaFunction)(...values)];
    } catch (error) {
      if (error instanceof LuaError) return [false, error.value];
      throw error;
    }
  },
};
