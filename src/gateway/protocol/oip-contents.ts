/**
 * Typed tensor contents of gRPC (`InferTensorContents`) as raw bytes, and back.
 *
 * Floats are packed as they lie in memory, so a tensor of floats is a slice of what came. Integers are varints
 * and cost a pass; BYTES get their lengths before them. There is one list for each family of datatypes:
 *
 *   1 bool   2 int32: INT8, INT16, INT32   3 int64   4 uint32: UINT8, UINT16, UINT32   5 uint64
 *   6 float  7 double                      8 bytes   FP16 and BF16 have none: they travel as raw bytes only
 */
import { elementBytes, elementsOfBytes, TensorFlaw } from "./oip-tensors.ts";
import { ProtoReader, ProtoWriter } from "./protobuf.ts";

/** Datatype → number of the list. */
const LISTS: ReadonlyMap<string, number> = new Map([
  ["BOOL", 1],
  ["INT8", 2],
  ["INT16", 2],
  ["INT32", 2],
  ["INT64", 3],
  ["UINT8", 4],
  ["UINT16", 4],
  ["UINT32", 4],
  ["UINT64", 5],
  ["FP32", 6],
  ["FP64", 7],
  ["BYTES", 8],
]);
const FLOATS = 6;
const BYTES = 8;

/** Whether typed contents can hold it. */
export function hasContents(datatype: string): boolean {
  return LISTS.has(datatype);
}

function listOf(datatype: string): number {
  elementBytes(datatype);
  const list = LISTS.get(datatype);
  if (list !== undefined) return list;
  throw new TensorFlaw(`is ${datatype}, which typed contents cannot hold; send raw contents`);
}

/** The values as raw bytes; several `contents` of one tensor are read one behind the other. */
export function rawOfContents(contents: readonly Buffer[], datatype: string): Buffer {
  const list = listOf(datatype);
  const size = elementBytes(datatype);
  const values = new Gathered();
  for (const each of contents) {
    const reader = new ProtoReader(each);
    while (reader.next()) {
      if (reader.field > BYTES) reader.skip();
      else if (reader.field !== list) {
        throw new TensorFlaw(`is ${datatype}, but has contents of another type`);
      } else if (list === BYTES) values.element(reader.bytes());
      else if (list >= FLOATS) values.slice(reader.fixed(size === 4 ? 4 : 8));
      else reader.each((one) => values.integer(one, datatype, size));
    }
  }
  return values.bytes();
}

/** One buffer that grows: a list of slices would cost many times what a stranger sent. */
class Gathered {
  #only: Buffer | undefined;
  #raw = Buffer.alloc(0);
  #at = 0;

  bytes(): Buffer {
    return this.#only ?? this.#raw.subarray(0, this.#at);
  }

  /** Not copied if it is the only one. */
  slice(bytes: Buffer): void {
    if (this.#at === 0 && this.#only === undefined) {
      this.#only = bytes;
      return;
    }
    const before = this.#only;
    this.#only = undefined;
    if (before !== undefined) this.#append(before);
    this.#append(bytes);
  }

  element(bytes: Buffer): void {
    this.#room(4);
    this.#at = this.#raw.writeUInt32LE(bytes.length, this.#at);
    this.#append(bytes);
  }

  integer(reader: ProtoReader, datatype: string, size: number): void {
    this.#room(size);
    if (size === 8) this.#at = this.#raw.writeBigUInt64LE(reader.uint64(), this.#at);
    else if (datatype === "BOOL") this.#raw[this.#at++] = reader.bool() ? 1 : 0;
    else if (datatype.startsWith("U")) {
      const value = fitting(reader.uint32(), 0, 2 ** (8 * size), datatype);
      this.#at = this.#raw.writeUIntLE(value, this.#at, size);
    } else {
      const limit = 2 ** (8 * size - 1);
      this.#at = this.#raw.writeIntLE(fitting(reader.int32(), -limit, limit, datatype), this.#at, size);
    }
  }

  #append(bytes: Buffer): void {
    this.#room(bytes.length);
    bytes.copy(this.#raw, this.#at);
    this.#at += bytes.length;
  }

  #room(bytes: number): void {
    const wanted = this.#at + bytes;
    if (wanted > this.#raw.length) {
      this.#raw = Buffer.concat([this.#raw.subarray(0, this.#at)], Math.max(64, 2 * wanted));
    }
  }
}

function fitting(value: number, from: number, below: number, datatype: string): number {
  if (value >= from && value < below) return value;
  throw new TensorFlaw(`holds ${value}, which is no value of ${datatype}`);
}

/** Raw bytes as an InferTensorContents. */
export function contentsOfRaw(raw: Buffer, datatype: string): ProtoWriter {
  const list = listOf(datatype);
  const size = elementBytes(datatype);
  const writer = new ProtoWriter();
  if (list === BYTES) for (const element of elementsOfBytes(raw)) writer.bytes(BYTES, element);
  else if (raw.length % size > 0) throw new TensorFlaw(`has bytes that are no whole number of ${datatype}`);
  else if (list < FLOATS) writer.packed(list, (into) => packIntegers(into, raw, datatype, size));
  else if (raw.length > 0) writer.bytes(list, raw);
  return writer;
}

function packIntegers(into: ProtoWriter, raw: Buffer, datatype: string, size: number): void {
  const signed = datatype.startsWith("INT");
  for (let at = 0; at < raw.length; at += size) {
    if (size === 8) into.rawBig(signed ? raw.readBigInt64LE(at) : raw.readBigUInt64LE(at));
    else if (datatype === "BOOL") into.rawVarint(raw[at] === 0 ? 0 : 1);
    else if (!signed) into.rawVarint(raw.readUIntLE(at, size));
    else {
      const value = raw.readIntLE(at, size);
      if (value >= 0) into.rawVarint(value);
      else into.rawBig(BigInt(value));
    }
  }
}
