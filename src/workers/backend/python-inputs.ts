/**
 * Inputs as arrays (`inputs: int32`): what comes as a JSON array of numbers crosses to Python as it will lie in memory
 * there. The frame, in this machine's own byte order behind its head:
 *
 *   u32 number   u32 type   u32 count   u32 bytes of the parameters
 *   count × u32: how many numbers each input has
 *   the parameters, JSON text; zeros, so that what follows begins at a multiple of 8 bytes of the payload
 *   the numbers of all inputs, one behind the other
 *
 * An input that is no flat array of numbers, or has one that the type does not hold, makes its batch `rejected`: cut in
 * halves, it soon stands alone.
 */
import { DTYPES, elementBytes } from "../../core/tensor.ts";
import type { Batch } from "./backend.ts";
import { FIRST_DTYPE, FRAME, HEADER_BYTES } from "./python-frames.ts";

export const INPUT_KINDS = ["json", "int32", "int64", "float32"] as const;
export type InputKind = (typeof INPUT_KINDS)[number];

const HEAD_BYTES = 16;
const ALIGNED = 8;
const LARGEST_SINGLE = 3.4028234663852886e38;

/** Undefined: one of the inputs is no such array. */
export function arraysFrame(
  number: number,
  batch: Batch,
  kind: Exclude<InputKind, "json">,
): Buffer | undefined {
  const lists: (readonly number[])[] = [];
  let numbers = 0;
  for (const { input } of batch.tasks) {
    const list: unknown = input.startsWith("[") ? JSON.parse(input) : undefined;
    if (!isListOf(kind, list)) return undefined;
    lists.push(list);
    numbers += list.length;
  }
  const parameterBytes = Buffer.byteLength(batch.parameters);
  const tableBytes = HEAD_BYTES + 4 * lists.length + parameterBytes;
  const from = Math.ceil(tableBytes / ALIGNED) * ALIGNED;
  const payloadBytes = from + numbers * elementBytes(kind);
  const frame = Buffer.alloc(HEADER_BYTES + payloadBytes);
  frame.writeUInt32LE(payloadBytes, 0);
  frame.writeUInt8(FRAME.arrays, 4);
  const head = [number, FIRST_DTYPE + DTYPES.indexOf(kind), lists.length, parameterBytes];
  let at = HEADER_BYTES;
  for (const each of [...head, ...lists.map(({ length }) => length)]) at = frame.writeUInt32LE(each, at);
  frame.write(batch.parameters, at, "utf8");
  Buffer.from(packed(kind, lists, numbers)).copy(frame, HEADER_BYTES + from);
  return frame;
}

function isListOf(kind: InputKind, list: unknown): list is readonly number[] {
  if (!Array.isArray(list)) return false;
  for (const each of list as readonly unknown[]) {
    if (typeof each !== "number") return false;
    if (kind === "int32" && (each | 0) !== each) return false;
    // Above that the text is no longer the number that was read.
    if (kind === "int64" && !Number.isSafeInteger(each)) return false;
    if (kind === "float32" && Math.abs(each) > LARGEST_SINGLE) return false;
  }
  return true;
}

function packed(kind: InputKind, lists: readonly (readonly number[])[], numbers: number): ArrayBuffer {
  if (kind === "int64") {
    const all = new BigInt64Array(numbers);
    let at = 0;
    for (const list of lists) for (const each of list) all[at++] = BigInt(each);
    return all.buffer;
  }
  const all = kind === "int32" ? new Int32Array(numbers) : new Float32Array(numbers);
  let at = 0;
  for (const list of lists) {
    all.set(list, at);
    at += list.length;
  }
  return all.buffer;
}
