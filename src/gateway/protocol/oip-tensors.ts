/**
 * Tensors of the Open Inference Protocol: raw bytes, flat JSON arrays, and their rows.
 *
 * Raw is little-endian, row-major, without gaps; a BYTES element is its length (4 bytes) and its bytes. JSON is a flat
 * array in the same order. A row is one index of dimension 0: shape [3,2] has three rows of two elements.
 *
 *   datatype              bytes   in JSON
 *   BOOL                  1       true, false (0 and 1 are read too)
 *   INT8 … UINT32         1 … 4   an integer
 *   INT64, UINT64         8       an integer, all of its digits
 *   FP16, FP32, FP64      2, 4, 8 the shortest number that reads as the same value; never NaN or infinity
 *   BF16                  2       not possible
 *   BYTES                 4 + n   a string, if the bytes are UTF-8
 *
 * Raw rows are slices, never copies. Number texts are cut and joined, never reprinted. All JSON here has passed
 * `JSON.parse`. An expected failure is a `TensorFlaw` whose message follows the tensor's name: `input "x" holds 3
 * values, but its shape says 4`.
 */
import { isUtf8 } from "node:buffer";
import { endianness } from "node:os";
import { splitArray } from "../../core/json-split.ts";
import { type Dtype, flatTexts } from "../../core/tensor.ts";

export const USE_BINARY = "use the binary form";

/** The data does not match its description. */
export class TensorFlaw extends Error {}

/** Prefixes the message of a TensorFlaw: `input "x"`. */
export function about<T>(subject: string, read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (!(error instanceof TensorFlaw)) throw error;
    throw new TensorFlaw(`${subject} ${error.message}`);
  }
}

export function quoted(name: string): string {
  return JSON.stringify(name.slice(0, 64));
}

/** Per request or reply; more than any model has. */
export const MAX_TENSORS = 1024;
/** Rows × tensors per message; empty rows take no bytes, so its size bounds nothing. 65,536 take some 15 ms. */
const MAX_CELLS = 65_536;

/** Datatype → bytes per element; the bits are in the name. */
const SIZES: ReadonlyMap<string, number> = new Map(
  "INT8 UINT8 INT16 UINT16 FP16 BF16 INT32 UINT32 FP32 INT64 UINT64 FP64"
    .split(" ")
    .map((name): [string, number] => [name, Number(/\d+/.exec(name)) / 8])
    .concat([
      ["BOOL", 1],
      ["BYTES", 0],
    ]),
);
const ARRAYS = {
  INT8: Int8Array,
  UINT8: Uint8Array,
  INT16: Int16Array,
  UINT16: Uint16Array,
  INT32: Int32Array,
  UINT32: Uint32Array,
  FP16: Float16Array,
  FP32: Float32Array,
  FP64: Float64Array,
} as const;
const LENGTH_BYTES = 4;
const SWAPPED = endianness() === "BE";

/** 0 for BYTES, whose elements carry their length. */
export function datatypeBytes(datatype: string): number {
  const bytes = SIZES.get(datatype);
  if (bytes !== undefined) return bytes;
  throw new TensorFlaw(`has the datatype ${JSON.stringify(datatype.slice(0, 32))}, which is not known`);
}

export function rowsOf(shape: readonly number[]): number {
  const rows = shape[0];
  if (rows === undefined) throw new TensorFlaw("has an empty shape; dimension 0 must be that of the batch");
  elementCount(shape);
  return rows;
}

/** Call it before cutting: `rowsOfRaw` and `rowsOfFlat` allocate each row. */
export function checkCells(tensors: number, rows: number): void {
  if (tensors <= MAX_TENSORS && tensors * rows <= MAX_CELLS) return;
  const most = `at most ${MAX_TENSORS} tensors, and ${MAX_CELLS} rows of all tensors together, are taken`;
  throw new TensorFlaw(`has ${rows} rows of ${tensors} tensors; ${most}`);
}

/** Elements of a shape; of one row if dimension 0 is omitted. */
export function elementCount(shape: readonly number[]): number {
  let elements = 1;
  for (const dimension of shape) {
    if (!Number.isSafeInteger(dimension) || dimension < 0) {
      throw new TensorFlaw(`has a dimension of ${dimension}; dimensions are integers from 0`);
    }
    elements *= dimension;
  }
  if (!(elements <= Number.MAX_SAFE_INTEGER)) throw new TensorFlaw("has a shape that is too large");
  return elements;
}

export function rowsOfRaw(bytes: Buffer, datatype: string, shape: readonly number[]): Buffer[] {
  const rows = rowsOf(shape);
  const perRow = elementCount(shape.slice(1));
  const size = datatypeBytes(datatype);
  if (size === 0) return rowsOfBytes(bytes, rows, perRow);
  const rowBytes = perRow * size;
  if (bytes.length !== rows * rowBytes) {
    const needs = `${datatype} of shape [${shape.join(",")}] needs ${rows * rowBytes}`;
    throw new TensorFlaw(`has ${bytes.length} bytes, but ${needs}`);
  }
  return Array.from({ length: rows }, (_, at) => bytes.subarray(at * rowBytes, (at + 1) * rowBytes));
}

function rowsOfBytes(bytes: Buffer, rows: number, perRow: number): Buffer[] {
  const found: Buffer[] = [];
  let at = 0;
  for (let row = 0; row < rows; row++) {
    const start = at;
    for (let element = 0; element < perRow; element++) at = elementEnd(bytes, at);
    found.push(bytes.subarray(start, at));
  }
  if (at < bytes.length) {
    throw new TensorFlaw(`has ${bytes.length - at} bytes behind the ${rows * perRow} elements of its shape`);
  }
  return found;
}

function elementEnd(bytes: Buffer, at: number): number {
  const start = at + LENGTH_BYTES;
  const end = start > bytes.length ? Infinity : start + bytes.readUInt32LE(at);
  if (end > bytes.length) throw new TensorFlaw("ends in the middle of an element of BYTES");
  return end;
}

/** Elements of a raw BYTES tensor as slices. A generator: an empty element takes four bytes, its slice a hundred. */
export function* elementsOfBytes(bytes: Buffer): Generator<Buffer, void> {
  for (let at = 0; at < bytes.length;) {
    const end = elementEnd(bytes, at);
    yield bytes.subarray(at + LENGTH_BYTES, end);
    at = end;
  }
}

export function bytesOfElement(element: Uint8Array): Buffer {
  const bytes = Buffer.allocUnsafe(LENGTH_BYTES + element.length);
  bytes.writeUInt32LE(element.length, 0);
  bytes.set(element, LENGTH_BYTES);
  return bytes;
}

function bytesOfTexts(values: readonly unknown[]): Buffer {
  let total = 0;
  for (const value of values) total += LENGTH_BYTES + Buffer.byteLength(utf8Of(value));
  const bytes = Buffer.allocUnsafe(total);
  let at = 0;
  for (const value of values as readonly string[]) {
    const length = bytes.write(value, at + LENGTH_BYTES, "utf8");
    at = bytes.writeUInt32LE(length, at) + length;
  }
  return bytes;
}

export function rawFromJson(text: string, datatype: string): Buffer {
  refuseBrain(datatype);
  datatypeBytes(datatype);
  if (datatype === "INT64") return rawFromBig(text, datatype, BigInt64Array);
  if (datatype === "UINT64") return rawFromBig(text, datatype, BigUint64Array);
  const values = JSON.parse(text) as unknown[];
  if (datatype === "BYTES") return bytesOfTexts(values);
  if (datatype === "BOOL") return Buffer.from(values.map(bitOf));
  for (const value of values) if (typeof value !== "number") throw mismatch(value, datatype);
  const numbers = values as number[];
  const array = new ARRAYS[datatype as keyof typeof ARRAYS](numbers);
  if (datatype.startsWith("FP")) {
    if (!array.every(Number.isFinite)) throw new TensorFlaw(`holds a number beyond the range of ${datatype}`);
    return littleEndian(array);
  }
  // A number that does not fit, or is not an integer, has changed.
  const odd = numbers.findIndex((value, at) => value !== array[at]);
  if (odd >= 0) throw mismatch(numbers[odd], datatype);
  return littleEndian(array);
}

function rawFromBig(
  text: string,
  datatype: string,
  kind: typeof BigInt64Array | typeof BigUint64Array,
): Buffer {
  const { elements, flaw } = splitArray(text);
  if (flaw !== undefined) throw new TensorFlaw(flaw);
  const array = new kind(elements.length);
  for (const [at, element] of elements.entries()) {
    const value = bigOf(element, datatype);
    array[at] = value;
    if (array[at] !== value) throw new TensorFlaw(`holds ${element}, which is no value of ${datatype}`);
  }
  return littleEndian(array);
}

function bigOf(element: string, datatype: string): bigint {
  if (/^-?\d{1,20}$/.test(element)) return BigInt(element);
  const value: unknown = JSON.parse(element); // 1.0 and 1e3 are integers, too.
  if (typeof value === "number" && Number.isSafeInteger(value)) return BigInt(value);
  throw mismatch(value, datatype);
}

function utf8Of(value: unknown): string {
  if (typeof value !== "string") throw mismatch(value, "BYTES");
  if (!value.isWellFormed()) throw new TensorFlaw("holds a string with half a surrogate pair");
  return value;
}

function bitOf(value: unknown): number {
  if (value === true || value === 1) return 1;
  if (value === false || value === 0) return 0;
  throw mismatch(value, "BOOL");
}

export function jsonFromRaw(bytes: Buffer, datatype: string): string {
  refuseBrain(datatype);
  const size = datatypeBytes(datatype);
  if (datatype === "BYTES") return `[${Array.from(elementsOfBytes(bytes), utf8Text).join(",")}]`;
  if (bytes.length % size > 0) {
    throw new TensorFlaw(`has ${bytes.length} bytes, which are no whole number of ${datatype}`);
  }
  const texts = flatTexts(datatype.toLowerCase().replace("fp", "float") as Dtype, bytes);
  if (datatype.startsWith("FP") && texts.includes("null"))
    throw new TensorFlaw(`holds NaN or infinity, which JSON cannot say; ${USE_BINARY}`);
  return `[${texts.join(",")}]`;
}

function utf8Text(element: Buffer): string {
  if (isUtf8(element)) return JSON.stringify(element.toString("utf8"));
  throw new TensorFlaw(`holds bytes that are not UTF-8, which JSON cannot say; ${USE_BINARY}`);
}

/** Nested arrays as one flat array; number texts are unchanged. */
export function flatten(text: string): string {
  const array = text.trim();
  if (!array.startsWith("[")) throw new TensorFlaw("has data that is no array");
  if (isFlat(array)) return array;
  const values: string[] = [];
  collect(array, values);
  return `[${values.join(",")}]`;
}

function isFlat(array: string): boolean {
  return array.lastIndexOf("[") === 0 && !/["{]/.test(array);
}

function collect(array: string, into: string[]): void {
  const { elements, flaw } = splitArray(array);
  if (flaw !== undefined) throw new TensorFlaw(`has data that ${flaw}`);
  for (const element of elements) {
    if (element.startsWith("[") && isFlat(element)) {
      const inner = element.slice(1, -1).replace(/\s+/g, "");
      if (inner !== "") into.push(inner);
    } else if (element.startsWith("[")) collect(element, into);
    else if (element.startsWith("{")) {
      throw new TensorFlaw("has data with an object in it; tensors hold numbers, booleans or strings");
    } else into.push(element);
  }
}

export function rowsOfFlat(text: string, rows: number): string[] {
  const start = text.indexOf("[") + 1;
  const end = text.lastIndexOf("]");
  const commas = commasOf(text, start, end);
  const count = text.slice(start, end).trim() === "" ? 0 : commas.length + 1;
  if (rows === 0 && count === 0) return [];
  if (rows === 0 || count % rows > 0) {
    throw new TensorFlaw(`holds ${count} values, which cannot be cut into ${rows} rows`);
  }
  if (count === 0) return Array.from({ length: rows }, () => "[]");
  const perRow = count / rows;
  return Array.from({ length: rows }, (_, row) => {
    const from = row === 0 ? start : commas[row * perRow - 1]! + 1;
    const to = row === rows - 1 ? end : commas[(row + 1) * perRow - 1];
    return `[${text.slice(from, to).trim()}]`;
  });
}

export function joinFlat(texts: readonly string[]): string {
  return `[${texts
    .map(innerOfFlat)
    .filter((values) => values !== "")
    .join(",")}]`;
}

/** The values without the brackets. */
export function innerOfFlat(text: string): string {
  return text.slice(text.indexOf("[") + 1, text.lastIndexOf("]")).trim();
}

/** The first `kept` values of each of `blocks` equal parts. */
export function cutFlat(text: string, blocks: number, kept: number): string {
  if (blocks === 0 || kept === 0) return "[]";
  const start = text.indexOf("[") + 1;
  const end = text.lastIndexOf("]");
  const commas = commasOf(text, start, end);
  const perBlock = (commas.length + 1) / blocks;
  const parts = Array.from({ length: blocks }, (_, block) => {
    const from = block * perBlock;
    return text.slice(from === 0 ? start : commas[from - 1]! + 1, commas[from + kept - 1] ?? end).trim();
  });
  return `[${parts.join(",")}]`;
}

export function countFlat(text: string): number {
  const start = text.indexOf("[") + 1;
  const end = text.lastIndexOf("]");
  return text.slice(start, end).trim() === "" ? 0 : commasOf(text, start, end).length + 1;
}

const COMMA = 0x2c;
const BACKSLASH = 0x5c;

function commasOf(text: string, start: number, end: number): number[] {
  const commas: number[] = [];
  let quote = text.indexOf('"', start);
  for (let at = text.indexOf(",", start); at >= 0 && at < end; at = text.indexOf(",", at)) {
    while (quote >= 0 && quote < at) {
      const after = stringEnd(text, quote);
      at = Math.max(at, after);
      quote = text.indexOf('"', after);
    }
    if (text.charCodeAt(at) === COMMA) commas.push(at++);
  }
  return commas;
}

function stringEnd(text: string, start: number): number {
  for (let end = text.indexOf('"', start + 1); end >= 0; end = text.indexOf('"', end + 1)) {
    let before = end;
    while (text.charCodeAt(before - 1) === BACKSLASH) before--;
    if ((end - before) % 2 === 0) return end + 1;
  }
  return text.length;
}

function littleEndian(array: ArrayBufferView & { readonly BYTES_PER_ELEMENT: number }): Buffer {
  const bytes = Buffer.from(array.buffer as ArrayBuffer, array.byteOffset, array.byteLength);
  if (!SWAPPED || array.BYTES_PER_ELEMENT === 1) return bytes;
  if (array.BYTES_PER_ELEMENT === 2) return bytes.swap16();
  return array.BYTES_PER_ELEMENT === 4 ? bytes.swap32() : bytes.swap64();
}

function refuseBrain(datatype: string): void {
  if (datatype === "BF16") throw new TensorFlaw(`is BF16, which JSON cannot say; ${USE_BINARY}`);
}

function mismatch(value: unknown, datatype: string): TensorFlaw {
  const shown = (JSON.stringify(value) ?? String(value)).slice(0, 32);
  return new TensorFlaw(`holds ${shown}, which is no value of ${datatype}`);
}
