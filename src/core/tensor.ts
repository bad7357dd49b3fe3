/**
 * Binary outputs as JSON text, the only form that the engine, its journal, its cache and Redis know.
 *
 *   {"$tensor":"float32","shape":[768],"base64":"…"}     little-endian, row-major, without gaps
 *   {"$bytes":"…"}                                       bytes without type and shape
 *
 * Exactly this form (no blanks, field order, padded base64), so that the base64 can be sliced out by position. `fitted`
 * checks worker outputs once; after that `readBinary` reads the head only.
 *
 * As numbers, a float32 has the fewest digits that read back as the same float32 (0.1, not 0.10000000149011612); a
 * float16 prints as its float32, an int64 with all digits. NaN and infinities have no JSON and become null.
 *
 * An input may be a row of tensors that is padded with others in its batch. Its length comes first, so that a batch can
 * be composed by it:
 *
 *   {"$length":128,"row":["…",…]}                        `gateway/protocol/oip-task.ts`
 */
import { endianness } from "node:os";
import type { Json } from "./task.ts";

/** Order: type numbers in the Python worker protocol. */
const ARRAYS = {
  bool: Uint8Array,
  int8: Int8Array,
  uint8: Uint8Array,
  int16: Int16Array,
  uint16: Uint16Array,
  int32: Int32Array,
  uint32: Uint32Array,
  int64: BigInt64Array,
  uint64: BigUint64Array,
  float16: Float16Array,
  float32: Float32Array,
  float64: Float64Array,
};
export type Dtype = keyof typeof ARRAYS;
export const DTYPES = Object.keys(ARRAYS) as readonly Dtype[];

/** At least as many as the array libraries allow. */
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

/** Bytes have neither type nor shape. */
export type Binary = Tensor | { readonly dtype?: never; readonly shape?: never; readonly base64: string };

export function elementBytes(dtype: Dtype): number {
  return ARRAYS[dtype].BYTES_PER_ELEMENT;
}

/** NaN if too large to count. */
export function tensorBytes(dtype: Dtype, shape: readonly number[]): number {
  const bytes = shape.reduce((product, dimension) => product * dimension, elementBytes(dtype));
  return Number.isSafeInteger(bytes) ? bytes : NaN;
}

/** The text before the base64; equal for every row of a block. */
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

const LENGTH = '{"$length":';
const ROW = ',"row":';
const [ZERO, NINE] = [0x30, 0x39];

/** `row`: a JSON array. */
export function tensorRowText(length: number, row: Json): Json {
  return `${LENGTH}${length}${ROW}${row}}`;
}

/** The array; undefined for any other JSON. */
export function readTensorRow(text: Json): Json | undefined {
  const length = tensorRowLength(text);
  return length < 0 ? undefined : text.slice(LENGTH.length + String(length).length + ROW.length, -1);
}

/** -1 for any other JSON. Each unit of length takes a character at least: no short text can claim to be long. */
export function tensorRowLength(text: Json): number {
  if (!text.startsWith(LENGTH)) return -1;
  let length = 0;
  let at = LENGTH.length;
  for (let code = text.charCodeAt(at); code >= ZERO && code <= NINE; code = text.charCodeAt(++at)) {
    length = 10 * length + code - ZERO;
  }
  // Exactly as `tensorRowText` writes it: a zero in front would shift the row.
  if (length === 0 ? at !== LENGTH.length + 1 : text.charCodeAt(LENGTH.length) === ZERO) return -1;
  return length <= text.length && text.startsWith(ROW, at) ? length : -1;
}

/** Undefined for any other JSON. Reads the head and the length only. */
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
  return Object.hasOwn(ARRAYS, name);
}

function readShape(text: string): readonly number[] | undefined {
  if (text === "") return [];
  if (!/^(?:0|[1-9]\d{0,9})(?:,(?:0|[1-9]\d{0,9})){0,31}$/.test(text)) return undefined;
  return text.split(",").map(Number);
}

/** Decoded length; -1 if it cannot be base64. */
function base64Bytes(base64: string): number {
  const { length } = base64;
  if (length % 4 !== 0) return -1;
  const padding = base64.endsWith("==") ? 2 : base64.endsWith("=") ? 1 : 0;
  return (length / 4) * 3 - padding;
}

const BASE64_TEXT = /^[A-Za-z0-9+/]*={0,2}$/;
const LOOKS_BINARY = /^\s*\{\s*"\$(?:tensor|bytes)"/;

export function mayBeBinary(text: Json): boolean {
  // Almost all are decided by their first character.
  const first = text.charCodeAt(0);
  return (first === OPEN_BRACE || first <= BLANK) && LOOKS_BINARY.test(text.slice(0, 64));
}

const OPEN_BRACE = 0x7b;
const BLANK = 0x20;

/** Normalizes a worker's output: bytes to exactly the form above. Undefined if it claims to be bytes and is not. */
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

/** Nested by shape, a single value for an empty shape; plain bytes as [0,255,…]. */
export function numbersText(binary: Binary): Json {
  return [...numbersPieces(binary)].join("");
}

const NUMBERS_A_PIECE = 8190; // divisible by three, so that the base64 of a piece, of any type, ends on a group of four

/** In pieces that take 2 to 4 ms: 16 MiB of float32 are four million numbers, a second to print. */
export function* numbersPieces({ dtype = "uint8", shape, base64 }: Binary): Generator<Json, void> {
  const size = elementBytes(dtype);
  const dimensions = shape ?? [Math.floor(Buffer.byteLength(base64, "base64") / size)];
  const count = productOf(dimensions);
  if (count === 0) return yield emptyLists(dimensions);
  /** Numbers within each dimension's brackets, innermost first. */
  const sizes = dimensions.map((_, at) => productOf(dimensions.slice(at))).reverse();
  const group = (place: number): number => (place * size * 4) / 3;
  for (let from = 0; from < count; from += NUMBERS_A_PIECE) {
    const to = Math.min(count, from + NUMBERS_A_PIECE);
    const bytes = Buffer.from(base64.slice(group(from), Math.ceil(group(to) / 4) * 4), "base64");
    yield pieceOf(listOf(dtype, bytes), to - from, sizes, from);
  }
}

function productOf(shape: readonly number[]): number {
  return shape.reduce((product, dimension) => product * dimension, 1);
}

const MAX_EMPTY_LISTS = 1024; // a client can make 2,048 such outputs of a model that echoes: 6 MB of brackets

/** A shape of [60000,60000,0] holds no numbers and must not cost gigabytes of brackets. */
function emptyLists(shape: readonly number[]): Json {
  const lists = shape.slice(0, shape.indexOf(0));
  if (productOf(lists) > MAX_EMPTY_LISTS) return "[]";
  return lists.reduceRight((inner, length) => `[${Array(length).fill(inner).join(",")}]`, "[]");
}

/** The numbers from `at` to `end`, separated by commas. */
type List = (at: number, end: number) => Json;

function listOf(dtype: Dtype, bytes: Buffer): List {
  if (dtype === "float32" || dtype === "float16") {
    const values = valuesOf(dtype, bytes) as Float32Array;
    return (at, end) => singlesText(values, at, end);
  }
  const texts = flatTexts(dtype, bytes);
  return (at, end) => texts.slice(at, end).join(",");
}

function pieceOf(list: List, count: number, sizes: readonly number[], from: number): Json {
  const row = sizes[0] ?? 1;
  const parts: string[] = [];
  for (let at = 0; at < count;) {
    const place = from + at;
    const end = Math.min(count, at + row - (place % row));
    const open = "[".repeat(bracketsAt(sizes, place));
    const close = "]".repeat(bracketsAt(sizes, from + end));
    parts.push(`${place === 0 ? "" : ","}${open}${list(at, end)}${close}`);
    at = end;
  }
  return parts.join("");
}

function bracketsAt(sizes: readonly number[], place: number): number {
  const inner = sizes.findIndex((size) => place % size !== 0);
  return inner < 0 ? sizes.length : inner;
}

export function flatTexts(dtype: Dtype, bytes: Buffer): string[] {
  const values = valuesOf(dtype, bytes);
  if (dtype === "bool") return Array.from(values, (value) => (value === 0 ? "false" : "true"));
  if (dtype === "float64") return Array.from(values as Iterable<number>, doubleText);
  const single = dtype === "float32" || dtype === "float16";
  return single ? Array.from(values as Iterable<number>, singleText) : Array.from(values, String);
}

/** An aligned view in this machine's byte order. */
function valuesOf(dtype: Dtype, bytes: Buffer): Iterable<number | bigint> {
  const { buffer } = new Uint8Array(bytes);
  const size = elementBytes(dtype);
  if (SWAPPED && size > 1) {
    const swapped = Buffer.from(buffer);
    if (size === 2) swapped.swap16();
    else if (size === 4) swapped.swap32();
    else swapped.swap64();
  }
  return new ARRAYS[dtype](buffer);
}

export function asSingles({ dtype, base64 }: Tensor): string {
  if (dtype === "float32") return base64;
  const singles = Float32Array.from(valuesOf(dtype, Buffer.from(base64, "base64")), Number);
  const bytes = Buffer.from(singles.buffer);
  return (SWAPPED ? bytes.swap32() : bytes).toString("base64");
}

function doubleText(value: number): string {
  if (!Number.isFinite(value)) return "null";
  return Object.is(value, -0) ? "-0" : String(value);
}

const TENS = Array.from({ length: 23 }, (_, power) => Number(`1e${power}`)); // exact as doubles
const SMALLEST_NORMAL_SINGLE = 2 ** -126; // below it a float32 has fewer than six significant digits
const EXACT_SINGLES = 2 ** 24; // every integer up to here is a float32

/**
 * Shortest text that reads as the same float32; "null" for NaN and infinities. Tries six to nine digits: m / 10^k of
 * two exact integers is the double nearest to that decimal, so its own shortest text is that decimal.
 */
export function singleText(value: number): string {
  if (!Number.isFinite(value) || (Number.isInteger(value) && Math.abs(value) <= EXACT_SINGLES)) {
    return doubleText(value);
  }
  const size = Math.abs(value);
  const digits = -Math.floor(Math.log10(size)) - 1;
  for (let scale = digits + 6; scale <= digits + 9 && scale > 0 && scale < TENS.length; scale++) {
    const ten = TENS[scale]!;
    const near = Math.floor(value * ten + 0.5) / ten;
    if (Math.fround(near) === value) return String(near);
  }
  for (let count = size < SMALLEST_NORMAL_SINGLE ? 1 : 6; count < 9; count++) {
    const short = Number(value.toPrecision(count));
    if (Math.fround(short) === value) return String(short);
  }
  return String(Number(value.toPrecision(9)));
}

/** `[0.1,…]` from the bytes of little-endian float32. */
export function singlesList(bytes: Buffer): Json {
  const values = valuesOf("float32", bytes) as Float32Array;
  const parts: string[] = [];
  for (let at = 0; at < values.length; at += NUMBERS_A_PIECE) {
    parts.push(singlesText(values, at, Math.min(values.length, at + NUMBERS_A_PIECE)));
  }
  return `[${parts.join(",")}]`;
}

const MAX_SINGLE_CHARS = 24; // "-123456780000000000000" and a comma are 23
const written = Buffer.alloc(NUMBERS_A_PIECE * MAX_SINGLE_CHARS);
const [POINT, MINUS, COMMA] = [0x2e, 0x2d, 0x2c];

/**
 * As `singleText`, with commas; at most NUMBERS_A_PIECE. The digits are written as bytes, since a string for each number
 * costs four times as much as the number: 768 take 35 µs instead of 130.
 */
function singlesText(values: Float32Array, from: number, to: number): Json {
  let at = 0;
  for (let place = from; place < to; place++) {
    if (place > from) written[at++] = COMMA;
    const value = values[place]!;
    const size = Math.abs(value);
    const end = size >= 1e-6 && size < 1e5 ? writeSingle(value, size, at) : at;
    at = end > at ? end : at + written.write(singleText(value), at, "latin1");
  }
  return written.toString("latin1", 0, at);
}

/** Writes six to nine digits as `singleText` chooses them and returns the end; `at` if that takes exponents or more. */
function writeSingle(value: number, size: number, at: number): number {
  let scale = 5;
  if (size < 1) for (let bound = 1; size < bound; bound = TENTHS[scale - 5]!) scale++;
  else for (let bound = 10; size >= bound; bound *= 10) scale--;
  for (const last = scale + 3; scale <= last; scale++) {
    const ten = TENS[scale]!;
    const rounded = Math.floor(value * ten + 0.5); // a third of the time of Math.round
    if (Math.fround(rounded / ten) === value) return writeDecimal(rounded, scale, at);
  }
  return at;
}

/** 0.1, 0.01, …: the doubles nearest to them, which no float32 equals. */
const TENTHS = Array.from({ length: 8 }, (_, power) => Number(`1e-${power}`));

/** Writes `rounded` / 10^`scale` without trailing zeros; below 2^31. */
function writeDecimal(rounded: number, scale: number, at: number): number {
  let rest = Math.abs(rounded) | 0;
  let places = scale;
  while (places > 0 && rest % 10 === 0) {
    rest = (rest / 10) | 0;
    places--;
  }
  let digits = places + 1; // one before the point at least
  while (digits < TENS.length && rest >= TENS[digits]!) digits++;
  const start = rounded < 0 ? at + 1 : at;
  if (rounded < 0) written[at] = MINUS;
  const end = start + digits + (places > 0 ? 1 : 0);
  let next = end - 1;
  for (let left = places; left > 0; left--) {
    const shorter = (rest / 10) | 0;
    written[next--] = ZERO + rest - shorter * 10;
    rest = shorter;
  }
  if (places > 0) written[next--] = POINT;
  while (next >= start) {
    const shorter = (rest / 10) | 0;
    written[next--] = ZERO + rest - shorter * 10;
    rest = shorter;
  }
  return end;
}
