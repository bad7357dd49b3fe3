/**
 * Outputs that are bytes, as JSON text: the engine, its journal, its cache and Redis know nothing but text.
 *
 *   {"$tensor":"float32","shape":[768],"base64":"…"}     little-endian, row-major, without gaps
 *   {"$bytes":"…"}                                       bytes that say nothing of themselves
 *
 * In exactly this form: no blanks, fields in this order, base64 with its padding. So the base64 can be cut out by its
 * place, without a look at the thousands of characters in it. Whoever takes outputs from a worker asks `fitted`, which
 * looks at all of it once; after that `readBinary` looks at the head alone.
 *
 * As numbers, a float32 has as few digits as bring the same float32 back (0.1, not 0.10000000149011612), and so has a
 * float16, as the float32 that it is; an int64 has all of its digits. NaN and the infinities have no JSON: null says at
 * least where they stood.
 */
import { endianness } from "node:os";
import type { Json } from "./task.ts";

export const DTYPES = [
  "bool",
  "int8",
  "uint8",
  "int16",
  "uint16",
  "int32",
  "uint32",
  "int64",
  "uint64",
  "float16",
  "float32",
  "float64",
] as const;
export type Dtype = (typeof DTYPES)[number];

const SIZES: Readonly<Record<Dtype, number>> = {
  bool: 1,
  int8: 1,
  uint8: 1,
  int16: 2,
  uint16: 2,
  int32: 4,
  uint32: 4,
  int64: 8,
  uint64: 8,
  float16: 2,
  float32: 4,
  float64: 8,
};

/** As many as the libraries behind the arrays have at most, or more. */
export const MAX_DIMENSIONS = 32;

const TENSOR = '{"$tensor":"';
const SHAPE = '","shape":[';
const BASE64 = '],"base64":"';
const BYTES = '{"$bytes":"';
const END = '"}';
const SWAPPED = endianness() === "BE";

export interface Tensor {
  readonly dtype: Dtype;
  readonly shape: readonly number[];
  readonly base64: string;
}

/** A tensor, or bytes, which have neither type nor shape. */
export type Binary = Tensor | { readonly dtype?: never; readonly shape?: never; readonly base64: string };

export function elementBytes(dtype: Dtype): number {
  return SIZES[dtype];
}

/** Bytes that a tensor has; NaN where they are too many to be counted. */
export function tensorBytes(dtype: Dtype, shape: readonly number[]): number {
  const bytes = shape.reduce((product, dimension) => product * dimension, SIZES[dtype]);
  return Number.isSafeInteger(bytes) ? bytes : NaN;
}

/** What stands before the base64; the same for every row of a block. */
export function tensorHead(dtype: Dtype, shape: readonly number[]): string {
  return `${TENSOR}${dtype}${SHAPE}${shape.join(",")}${BASE64}`;
}

export function withHead(head: string, base64: string): Json {
  return `${head}${base64}${END}`;
}

export function tensorText({ dtype, shape, base64 }: Tensor): Json {
  return withHead(tensorHead(dtype, shape), base64);
}

export function bytesText(base64: string): Json {
  return `${BYTES}${base64}${END}`;
}

/** Undefined for any other JSON; looks at the head and the length only. */
export function readBinary(text: Json): Binary | undefined {
  if (!text.startsWith('{"$')) return undefined;
  if (text.startsWith(TENSOR)) return readTensor(text);
  if (!text.startsWith(BYTES) || !text.endsWith(END)) return undefined;
  const base64 = text.slice(BYTES.length, -END.length);
  return base64Bytes(base64) < 0 ? undefined : { base64 };
}

function readTensor(text: Json): Tensor | undefined {
  const typeEnd = text.indexOf(SHAPE, TENSOR.length);
  if (typeEnd < 0 || typeEnd > TENSOR.length + 8) return undefined;
  const dtype = text.slice(TENSOR.length, typeEnd);
  const shapeEnd = text.indexOf(BASE64, typeEnd);
  if (shapeEnd < 0 || !isDtype(dtype) || !text.endsWith(END)) return undefined;
  const shape = readShape(text.slice(typeEnd + SHAPE.length, shapeEnd));
  if (shape === undefined) return undefined;
  const base64 = text.slice(shapeEnd + BASE64.length, -END.length);
  return base64Bytes(base64) === tensorBytes(dtype, shape) ? { dtype, shape, base64 } : undefined;
}

export function isDtype(name: string): name is Dtype {
  return Object.hasOwn(SIZES, name);
}

function readShape(text: string): readonly number[] | undefined {
  if (text === "") return [];
  if (!/^(?:0|[1-9]\d{0,9})(?:,(?:0|[1-9]\d{0,9})){0,31}$/.test(text)) return undefined;
  return text.split(",").map(Number);
}

/** How many bytes base64 of this length stands for; -1 for what cannot be base64. */
function base64Bytes(base64: string): number {
  const { length } = base64;
  if (length % 4 !== 0) return -1;
  const padding = base64.endsWith("==") ? 2 : base64.endsWith("=") ? 1 : 0;
  return (length / 4) * 3 - padding;
}

const BASE64_TEXT = /^[A-Za-z0-9+/]*={0,2}$/;
const LOOKS_BINARY = /^\s*\{\s*"\$(?:tensor|bytes)"/;

/** Whether `fitted` has anything to look at. */
export function mayBeBinary(text: Json): boolean {
  // Almost all are told apart by their first character.
  const first = text.charCodeAt(0);
  return (first === OPEN_BRACE || first <= BLANK) && LOOKS_BINARY.test(text.slice(0, 64));
}

const OPEN_BRACE = 0x7b;
const BLANK = 0x20;

/**
 * An output of a worker that has a hand in its text: in exactly the form above where it is bytes, however it was
 * written; any other JSON as it is. Undefined: it says that it is bytes, and is not.
 */
export function fitted(text: Json): Json | undefined {
  if (!mayBeBinary(text)) return text;
  const found = readBinary(text);
  if (found !== undefined && BASE64_TEXT.test(found.base64)) return text;
  const fields = JSON.parse(text) as Record<string, unknown>;
  const wanted = "$tensor" in fields ? 3 : 1;
  const base64 = fields[wanted === 3 ? "base64" : "$bytes"];
  if (Object.keys(fields).length !== wanted || typeof base64 !== "string" || !BASE64_TEXT.test(base64)) {
    return undefined;
  }
  const { $tensor: dtype, shape } = fields;
  if (wanted === 1) return base64Bytes(base64) < 0 ? undefined : bytesText(base64);
  if (typeof dtype !== "string" || !isDtype(dtype) || !isNumbers(shape)) return undefined;
  const again = tensorText({ dtype, shape, base64 });
  return readBinary(again) === undefined ? undefined : again;
}

/** As text, [null] and [[3]] would look like [] and [3]. */
function isNumbers(shape: unknown): shape is number[] {
  return Array.isArray(shape) && shape.every((each) => typeof each === "number");
}

/** Of bytes: [0,255,…]. Nested as the shape says, and a single value where that is empty. */
export function numbersText({ dtype = "uint8", shape, base64 }: Binary): Json {
  const numbers = flatTexts(dtype, Buffer.from(base64, "base64"));
  if (shape === undefined) return `[${numbers.join(",")}]`;
  // A shape of [60000,60000,0] holds no bytes, and must not cost gigabytes of brackets.
  return emptyLists(shape) > MAX_EMPTY_LISTS ? "[]" : nested(numbers, shape, 0, 0, numbers.length);
}

/** As many pairs of brackets would be written for a shape that holds nothing. */
function emptyLists(shape: readonly number[]): number {
  const nothing = shape.indexOf(0);
  return nothing < 0 ? 0 : shape.slice(0, nothing).reduce((product, dimension) => product * dimension, 1);
}

/** A client can make 2,048 such outputs of a model that echoes: 6 MB of brackets. */
const MAX_EMPTY_LISTS = 1024;

function nested(
  numbers: readonly string[],
  shape: readonly number[],
  depth: number,
  from: number,
  to: number,
): Json {
  const left = shape.length - depth;
  if (left === 0) return numbers[from]!;
  if (left === 1) return `[${(depth === 0 ? numbers : numbers.slice(from, to)).join(",")}]`;
  const rows = shape[depth]!;
  const step = rows === 0 ? 0 : (to - from) / rows;
  const texts: string[] = [];
  for (let row = 0; row < rows; row++) {
    texts.push(nested(numbers, shape, depth + 1, from + row * step, from + (row + 1) * step));
  }
  return `[${texts.join(",")}]`;
}

/** Each value of a tensor as JSON, in the order in which they lie. */
export function flatTexts(dtype: Dtype, bytes: Buffer): string[] {
  switch (dtype) {
    case "bool":
      return Array.from(bytes, (byte) => (byte === 0 ? "false" : "true"));
    case "int64":
      return Array.from(new BigInt64Array(native(bytes, 8)), String);
    case "uint64":
      return Array.from(new BigUint64Array(native(bytes, 8)), String);
    case "float64":
      return Array.from(new Float64Array(native(bytes, 8)), doubleText);
    case "float32":
    case "float16":
      return Array.from(valuesOf(dtype, bytes), singleText);
    case "int8":
    case "uint8":
    case "int16":
    case "uint16":
    case "int32":
    case "uint32":
      return Array.from(valuesOf(dtype, bytes), String);
  }
}

/** Its values as numbers; those of 64 bits as near as a number comes. */
export function valuesOf(dtype: Dtype, bytes: Buffer): ArrayLike<number> & Iterable<number> {
  switch (dtype) {
    case "bool":
    case "uint8":
      return bytes;
    case "int8":
      return new Int8Array(native(bytes, 1));
    case "int16":
      return new Int16Array(native(bytes, 2));
    case "uint16":
      return new Uint16Array(native(bytes, 2));
    case "int32":
      return new Int32Array(native(bytes, 4));
    case "uint32":
      return new Uint32Array(native(bytes, 4));
    case "int64":
      return Array.from(new BigInt64Array(native(bytes, 8)), Number);
    case "uint64":
      return Array.from(new BigUint64Array(native(bytes, 8)), Number);
    case "float16":
      return Float32Array.from(new Uint16Array(native(bytes, 2)), halfValue);
    case "float32":
      return new Float32Array(native(bytes, 4));
    case "float64":
      return new Float64Array(native(bytes, 8));
  }
}

/** The base64 of the same values as float32, little-endian. */
export function asSingles({ dtype, base64 }: Tensor): string {
  if (dtype === "float32") return base64;
  const singles = Float32Array.from(valuesOf(dtype, Buffer.from(base64, "base64")));
  const bytes = Buffer.from(singles.buffer);
  return (SWAPPED ? bytes.swap32() : bytes).toString("base64");
}

/** Aligned, as views of numbers must be, and in this machine's order. */
function native(bytes: Buffer, size: number): ArrayBuffer {
  const copy = new Uint8Array(bytes).buffer;
  if (SWAPPED && size > 1) {
    const swapped = Buffer.from(copy);
    if (size === 2) swapped.swap16();
    else if (size === 4) swapped.swap32();
    else swapped.swap64();
  }
  return copy;
}

/** IEEE 754 binary16: one bit of sign, five of exponent, ten of fraction. */
function halfValue(bits: number): number {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 0x1f;
  const fraction = bits & 0x3ff;
  if (exponent === 0) return sign * fraction * 2 ** -24;
  if (exponent === 0x1f) return fraction === 0 ? sign * Infinity : NaN;
  return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
}

function doubleText(value: number): string {
  if (!Number.isFinite(value)) return "null";
  return Object.is(value, -0) ? "-0" : String(value);
}

/** Powers of ten that a double holds exactly. */
const TENS = Array.from({ length: 23 }, (_, power) => Number(`1e${power}`));
/** Below it a float has fewer than six digits that count. */
const SMALLEST_NORMAL_SINGLE = 2 ** -126;
/** Up to here every integer is a float. */
const EXACT_SINGLES = 2 ** 24;

/**
 * The shortest number that reads as the same float32; "null" for what is none.
 *
 * Six to nine digits are tried: m / 10^k of two integers that a double holds exactly is the double nearest to that
 * decimal, so that its own shortest text is that decimal.
 */
export function singleText(value: number): string {
  if (!Number.isFinite(value) || (Number.isInteger(value) && Math.abs(value) <= EXACT_SINGLES)) {
    return doubleText(value);
  }
  const size = Math.abs(value);
  const digits = -Math.floor(Math.log10(size)) - 1;
  for (let scale = digits + 6; scale <= digits + 9 && scale > 0 && scale < TENS.length; scale++) {
    const ten = TENS[scale]!;
    const near = Math.round(value * ten) / ten;
    if (Math.fround(near) === value) return String(near);
  }
  for (let count = size < SMALLEST_NORMAL_SINGLE ? 1 : 6; count < 9; count++) {
    const short = Number(value.toPrecision(count));
    if (Math.fround(short) === value) return String(short);
  }
  return String(Number(value.toPrecision(9)));
}
