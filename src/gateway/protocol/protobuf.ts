/**
 * Protocol buffers wire format: reader and writer. A message is a sequence of fields, each a tag (number · 8 + wire
 * type) and a value:
 *
 *   0 varint    seven bits a byte, lowest first, at most ten bytes; negative numbers take all ten
 *   1 fixed64   eight bytes, little-endian
 *   2 length    a varint and as many bytes: text, bytes, a nested message, or packed numbers
 *   3, 4 group  start and end; obsolete, and only skipped
 *   5 fixed32   four bytes, little-endian
 *
 * Hand-written because input is untrusted: no length exceeds the data, nesting is at most `MAX_DEPTH`, nothing is
 * allocated for announced lengths, bytes are slices, and every error is a `ProtoFlaw`
 * (test/gateway/protocol/request-limits.test.ts, protobuf.test.ts).
 */
import { isUtf8 } from "node:buffer";

export class ProtoFlaw extends Error {}

const VARINT = 0;
const FIXED64 = 1;
const LENGTH = 2;
const START_GROUP = 3;
const END_GROUP = 4;
const FIXED32 = 5;

const MAX_DEPTH = 32;
const MAX_FIELD = 2 ** 29 - 1;
const TWO_TO_32 = 2 ** 32;

export class ProtoReader {
  readonly #bytes: Buffer;
  readonly #depth: number;
  #at = 0;
  #type = 0;
  #low = 0;
  #high = 0;
  /** Number of the current field; the methods below read or skip its value. */
  field = 0;

  constructor(bytes: Buffer, depth = 0) {
    if (depth > MAX_DEPTH) throw new ProtoFlaw(`messages are nested more than ${MAX_DEPTH} deep`);
    this.#bytes = bytes;
    this.#depth = depth;
  }

  next(): boolean {
    if (this.#at >= this.#bytes.length) return false;
    this.#tag();
    return true;
  }

  skip(): void {
    this.#skip(0);
  }

  bool(): boolean {
    return this.uint32() !== 0 || this.#high !== 0;
  }

  /** The low half of any varint; `| 0` makes it an int32. */
  uint32(): number {
    this.#expect(VARINT);
    this.#varint();
    return this.#low;
  }

  uint64(): bigint {
    const low = this.uint32();
    return (BigInt(this.#high) << 32n) | BigInt(low);
  }

  /** An int64 that must be a safe integer: a dimension. */
  integer(): number {
    this.uint32();
    const value = (this.#high | 0) * TWO_TO_32 + this.#low;
    if (!Number.isSafeInteger(value)) throw new ProtoFlaw("an integer is too large");
    return value;
  }

  double(): number {
    this.#expect(FIXED64);
    return this.#take(8).readDoubleLE();
  }

  bytes(): Buffer {
    this.#expect(LENGTH);
    return this.#sized();
  }

  string(): string {
    const bytes = this.bytes();
    if (!isUtf8(bytes)) throw new ProtoFlaw("a text is not UTF-8");
    return bytes.toString("utf8");
  }

  message(): ProtoReader {
    return new ProtoReader(this.bytes(), this.#depth + 1);
  }

  /** Calls `read` for each number of a repeated field, packed or not. */
  each(read: (reader: ProtoReader) => void): void {
    if (this.#type !== LENGTH) return read(this);
    const packed = new ProtoReader(this.#sized(), this.#depth + 1);
    while (packed.#at < packed.#bytes.length) {
      packed.#type = -1;
      read(packed);
    }
  }

  /** Fixed-size numbers, packed or not, as a slice. */
  fixed(size: 4 | 8): Buffer {
    if (this.#type === LENGTH) {
      const bytes = this.#sized();
      if (bytes.length % size === 0) return bytes;
      throw new ProtoFlaw("packed numbers end in the middle of one");
    }
    this.#expect(size === 4 ? FIXED32 : FIXED64);
    return this.#take(size);
  }

  #tag(): void {
    this.#varint();
    const tag = this.#high * TWO_TO_32 + this.#low;
    this.#type = tag % 8;
    this.field = Math.floor(tag / 8);
    if (this.field === 0 || this.field > MAX_FIELD) throw new ProtoFlaw("a field has a number out of range");
  }

  /** -1: inside packed numbers, whose type is known. */
  #expect(type: number): void {
    if (this.#type !== type && this.#type !== -1) {
      throw new ProtoFlaw(`field ${this.field} has the wire type ${this.#type} instead of ${type}`);
    }
  }

  #skip(groups: number): void {
    switch (this.#type) {
      case VARINT:
        return this.#varint();
      case FIXED64:
        return void this.#take(8);
      case LENGTH:
        return void this.#sized();
      case FIXED32:
        return void this.#take(4);
      case START_GROUP:
        return this.#skipGroup(this.field, groups + 1);
      default:
        throw new ProtoFlaw(`field ${this.field} has the wire type ${this.#type}, which is none`);
    }
  }

  #skipGroup(field: number, groups: number): void {
    if (groups > MAX_DEPTH) throw new ProtoFlaw(`groups are nested more than ${MAX_DEPTH} deep`);
    for (;;) {
      if (!this.next()) throw new ProtoFlaw("it ends in the middle of a group");
      if (this.#type !== END_GROUP) this.#skip(groups);
      else if (this.field === field) return;
      else throw new ProtoFlaw("a group ends that did not begin");
    }
  }

  #sized(): Buffer {
    this.#varint();
    return this.#take(this.#high * TWO_TO_32 + this.#low);
  }

  #take(length: number): Buffer {
    const end = this.#at + length;
    if (end > this.#bytes.length) throw new ProtoFlaw("it ends in the middle of a field");
    const taken = this.#bytes.subarray(this.#at, end);
    this.#at = end;
    return taken;
  }

  /** Four bytes and four bits go to the low half, the rest to the high one. */
  #varint(): void {
    let low = 0;
    let high = 0;
    for (let shift = 0; shift < 70; shift += 7) {
      const byte = this.#bytes[this.#at++];
      if (byte === undefined) throw new ProtoFlaw("it ends in the middle of a field");
      const bits = byte & 0x7f;
      if (shift < 28) low |= bits << shift;
      else if (shift === 28) {
        low |= bits << 28;
        high = bits >>> 4;
      } else if (shift < 63) high |= bits << (shift - 32);
      else if (bits > 1) break;
      else high |= bits << 31;
      if (byte < 0x80) {
        this.#low = low >>> 0;
        this.#high = high >>> 0;
        return;
      }
    }
    throw new ProtoFlaw("a number is longer than 64 bits");
  }
}

/** Smaller ones are copied to their neighbours: a separate part costs more. */
const OWN_PART_BYTES = 512;
const FIRST_BYTES = 128;
const MAX_VARINT_BYTES = 10;

/** Writes fields in call order. The caller omits default values. */
export class ProtoWriter {
  readonly #parts: Buffer[] = [];
  #open = Buffer.allocUnsafe(FIRST_BYTES);
  #start = 0;
  #at = 0;
  #closed = 0;

  get length(): number {
    return this.#closed + this.#at - this.#start;
  }

  parts(): readonly Buffer[] {
    this.#close();
    return this.#parts;
  }

  bool(field: number, value: boolean): void {
    this.#tag(field, VARINT);
    this.rawVarint(value ? 1 : 0);
  }

  int64(field: number, value: bigint): void {
    this.#tag(field, VARINT);
    this.rawBig(value);
  }

  double(field: number, value: number): void {
    this.#tag(field, FIXED64);
    this.#room(8);
    this.#at = this.#open.writeDoubleLE(value, this.#at);
  }

  string(field: number, text: string): void {
    this.#tag(field, LENGTH);
    const length = Buffer.byteLength(text);
    this.rawVarint(length);
    this.#room(length);
    this.#at += this.#open.write(text, this.#at, length, "utf8");
  }

  /** Large buffers are not copied: they must not change until sent. */
  bytes(field: number, bytes: Buffer): void {
    this.#tag(field, LENGTH);
    this.rawVarint(bytes.length);
    this.#append(bytes);
  }

  message(field: number, inner: ProtoWriter): void {
    this.#tag(field, LENGTH);
    this.rawVarint(inner.length);
    for (const part of inner.parts()) this.#append(part);
  }

  packed(field: number, write: (into: ProtoWriter) => void): void {
    const inner = new ProtoWriter();
    write(inner);
    if (inner.length > 0) this.message(field, inner);
  }

  /** A varint without a tag: a non-negative safe integer. */
  rawVarint(value: number): void {
    this.#room(MAX_VARINT_BYTES);
    let rest = value;
    while (rest >= 0x80) {
      this.#open[this.#at++] = (rest % 128) + 128;
      rest = Math.floor(rest / 128);
    }
    this.#open[this.#at++] = rest;
  }

  /** The same for any signed or unsigned 64-bit number. */
  rawBig(value: bigint): void {
    if (value >= 0n && value <= Number.MAX_SAFE_INTEGER) return this.rawVarint(Number(value));
    this.#room(MAX_VARINT_BYTES);
    let rest = BigInt.asUintN(64, value);
    while (rest >= 0x80n) {
      this.#open[this.#at++] = Number(rest & 0x7fn) | 0x80;
      rest >>= 7n;
    }
    this.#open[this.#at++] = Number(rest);
  }

  #tag(field: number, type: number): void {
    this.rawVarint(field * 8 + type);
  }

  #append(bytes: Buffer): void {
    if (bytes.length < OWN_PART_BYTES) {
      this.#room(bytes.length);
      bytes.copy(this.#open, this.#at);
      this.#at += bytes.length;
    } else {
      this.#close();
      this.#parts.push(bytes);
      this.#closed += bytes.length;
    }
  }

  #close(): void {
    if (this.#at === this.#start) return;
    this.#parts.push(this.#open.subarray(this.#start, this.#at));
    this.#closed += this.#at - this.#start;
    this.#start = this.#at;
  }

  #room(bytes: number): void {
    if (this.#at + bytes <= this.#open.length) return;
    const kept = this.#at - this.#start;
    const larger = Buffer.allocUnsafe(Math.max(2 * this.#open.length, kept + bytes));
    this.#open.copy(larger, 0, this.#start, this.#at);
    this.#open = larger;
    this.#start = 0;
    this.#at = kept;
  }
}
