/**
 * What a Python worker says, frame by frame; `python.ts` has the list of kinds.
 *
 * A frame that comes in pieces is put together once its length is known, each piece copied once, in memory that is kept
 * for the next: fresh memory for 200 KB costs more than the copy. One that comes whole is not copied.
 *
 * Outputs that are bytes become text here: base64 of the bytes where they lie, behind a head that all rows of a block
 * share.
 */
import { bytesText, DTYPES, MAX_DIMENSIONS, tensorBytes, tensorHead, withHead } from "../../core/tensor.ts";
import type { Json } from "../../core/task.ts";
import type { Batch, Reply } from "./backend.ts";
import { BAD_OUTPUTS, match, matchMade, quote, rejected, unusable } from "./match.ts";

export const FRAME = {
  call: 1,
  ready: 2,
  cannot: 3,
  outputs: 4,
  rejected: 5,
  unusable: 6,
  rows: 7,
  mixed: 8,
  begun: 9,
  arrays: 10,
} as const;
export const HEADER_BYTES = 5;
export const NUMBER_BYTES = 4;

/** For each worker; a larger frame has memory of its own. */
const MAX_KEPT_BYTES = 4 << 20;
const JSON_TEXT = 0;
const BYTES = 1;
export const FIRST_DTYPE = 2;

/** A call as a frame. */
export function callFrame(number: number, text: Json): Buffer {
  const payloadBytes = NUMBER_BYTES + Buffer.byteLength(text, "utf8");
  const frame = Buffer.allocUnsafe(HEADER_BYTES + payloadBytes);
  frame.writeUInt32LE(payloadBytes, 0);
  frame.writeUInt8(FRAME.call, 4);
  frame.writeUInt32LE(number, HEADER_BYTES);
  frame.write(text, HEADER_BYTES + NUMBER_BYTES, "utf8");
  return frame;
}

/** Cuts a stream of bytes into frames. */
export class FrameReader {
  readonly #maxBytes: number;
  readonly #hear: (kind: number, payload: Buffer) => void;
  readonly #header = Buffer.alloc(HEADER_BYTES);
  /** Bytes of the header that are here. */
  #headed = 0;
  /** The payload of a frame that has begun, and how much of it is here. */
  #payload: Buffer | undefined;
  #filled = 0;

  /** Kept from frame to frame. */
  #room = Buffer.alloc(0);

  /** `hear` must be done with the payload when it returns. */
  constructor(maxBytes: number, hear: (kind: number, payload: Buffer) => void) {
    this.#maxBytes = maxBytes;
    this.#hear = hear;
  }

  /** Hands on each frame that `chunk` completes; false when one is too large, and all is lost. */
  read(chunk: Buffer): boolean {
    let at = 0;
    for (;;) {
      if (this.#payload !== undefined) {
        const copied = chunk.copy(this.#payload, this.#filled, at);
        this.#filled += copied;
        at += copied;
        if (this.#filled < this.#payload.length) return true;
        this.#end(this.#payload);
      }
      const copied = chunk.copy(this.#header, this.#headed, at, at + HEADER_BYTES - this.#headed);
      this.#headed += copied;
      at += copied;
      if (this.#headed < HEADER_BYTES) return true;
      const length = this.#header.readUInt32LE(0);
      if (length > this.#maxBytes) return false;
      if (at + length <= chunk.length) {
        const payload = chunk.subarray(at, at + length);
        at += length;
        this.#end(payload);
      } else {
        this.#payload = this.#roomFor(length);
        this.#filled = chunk.copy(this.#payload, 0, at);
        return true;
      }
    }
  }

  #roomFor(length: number): Buffer {
    if (length > MAX_KEPT_BYTES) return Buffer.allocUnsafeSlow(length);
    if (length > this.#room.length) this.#room = Buffer.allocUnsafeSlow(Math.min(2 * length, MAX_KEPT_BYTES));
    return this.#room.subarray(0, length);
  }

  #end(payload: Buffer): void {
    this.#payload = undefined;
    this.#headed = 0;
    this.#hear(this.#header.readUInt8(4), payload);
  }
}

/** The reply in a frame's payload, after its number; undefined when it cannot be read. */
export function readReply(batch: Batch, kind: number, payload: Buffer): Reply | undefined {
  if (kind === FRAME.rejected) return rejected(quote(payload.toString("utf8", NUMBER_BYTES)));
  if (kind === FRAME.unusable) return unusable(quote(payload.toString("utf8", NUMBER_BYTES)), BAD_OUTPUTS);
  if (payload.length < 2 * NUMBER_BYTES) return undefined;
  if (kind === FRAME.outputs) return readTexts(batch, payload);
  if (kind === FRAME.rows) return readRows(batch, payload);
  return kind === FRAME.mixed ? readMixed(batch, payload) : undefined;
}

function readTexts(batch: Batch, payload: Buffer): Reply | undefined {
  const count = payload.readUInt32LE(4);
  let at = 8 + 4 * count;
  if (at > payload.length) return undefined;
  const outputs: string[] = [];
  for (let index = 0; index < count; index++) {
    const end = at + payload.readUInt32LE(8 + 4 * index);
    if (end > payload.length) return undefined;
    outputs.push(payload.toString("utf8", at, end));
    at = end;
  }
  return at === payload.length ? match(batch, outputs) : undefined;
}

function readRows(batch: Batch, payload: Buffer): Reply | undefined {
  if (payload.length < 10) return undefined;
  const count = payload.readUInt32LE(4);
  const dtype = DTYPES[payload.readUInt8(8) - FIRST_DTYPE];
  const shape = readShape(payload, 10, payload.readUInt8(9));
  if (dtype === undefined || shape === undefined) return undefined;
  const first = 10 + 4 * shape.length;
  const rowBytes = tensorBytes(dtype, shape);
  if (first + count * rowBytes !== payload.length) return undefined;
  // Rows of no bytes cost the worker nothing, however many it says.
  if (count !== batch.tasks.length) return matchMade(batch, { length: count });
  const head = tensorHead(dtype, shape);
  const outputs: Json[] = [];
  for (let at = first; outputs.length < count; at += rowBytes) {
    outputs.push(withHead(head, payload.toString("base64", at, at + rowBytes)));
  }
  return matchMade(batch, outputs);
}

function readMixed(batch: Batch, payload: Buffer): Reply | undefined {
  const count = payload.readUInt32LE(4);
  if (count > payload.length / 6) return undefined;
  const parts: { readonly type: number; readonly shape: readonly number[]; readonly bytes: number }[] = [];
  let at = 8;
  for (let index = 0; index < count; index++) {
    if (at + 6 > payload.length) return undefined;
    const shape = readShape(payload, at + 6, payload.readUInt8(at + 1));
    if (shape === undefined) return undefined;
    parts.push({ type: payload.readUInt8(at), shape, bytes: payload.readUInt32LE(at + 2) });
    at += 6 + 4 * shape.length;
  }
  const outputs: Json[] = [];
  for (const { type, shape, bytes } of parts) {
    const end = at + bytes;
    const dtype = DTYPES[type - FIRST_DTYPE];
    if (end > payload.length) return undefined;
    if (type === JSON_TEXT) outputs.push(payload.toString("utf8", at, end));
    else if (type === BYTES) outputs.push(bytesText(payload.toString("base64", at, end)));
    else if (dtype === undefined || tensorBytes(dtype, shape) !== bytes) return undefined;
    else outputs.push(withHead(tensorHead(dtype, shape), payload.toString("base64", at, end)));
    at = end;
  }
  return at === payload.length ? match(batch, outputs) : undefined;
}

function readShape(payload: Buffer, at: number, dimensions: number): number[] | undefined {
  if (dimensions > MAX_DIMENSIONS || at + 4 * dimensions > payload.length) return undefined;
  return Array.from({ length: dimensions }, (_, index) => payload.readUInt32LE(at + 4 * index));
}
