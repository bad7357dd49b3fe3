/**
 * The numbers of a tensor as JSON, a piece at a time: 16 MiB of float32 are four million numbers, and whoever prints them
 * in one go keeps everybody else waiting for a second. Put together the pieces are what `numbersText` says.
 *
 * A piece has at most 8,190 numbers, some 2 to 4 ms of work. The base64 is decoded as far as a piece needs it.
 */
import type { Json } from "./task.ts";
import { type Binary, type Dtype, elementBytes, flatTexts, numbersText } from "./tensor.ts";

/** Divisible by three, so that the base64 of so many numbers, of whatever type, ends with one of its groups of four. */
const NUMBERS_A_PIECE = 8190;

export function* numbersPieces(binary: Binary): Generator<Json, void> {
  const { dtype = "uint8", shape } = binary;
  const count = countOf(shape, binary.base64, dtype);
  // Also those that hold nothing, of which only the brackets would be written.
  if (count <= NUMBERS_A_PIECE) return yield numbersText(binary);
  const sizes = innerSizes(shape ?? [count], count);
  for (let from = 0; from < count; from += NUMBERS_A_PIECE) {
    const to = Math.min(count, from + NUMBERS_A_PIECE);
    yield pieceOf(texts(binary.base64, dtype, from, to), sizes, from, count);
  }
}

/** Of each dimension, how many numbers stand between its brackets; the innermost comes first. */
function innerSizes(shape: readonly number[], count: number): number[] {
  const sizes: number[] = [];
  let left = count;
  for (const dimension of shape) {
    sizes.unshift(left);
    left /= dimension;
  }
  return sizes;
}

function pieceOf(numbers: readonly string[], sizes: readonly number[], from: number, count: number): Json {
  const [row = count] = sizes;
  const parts: string[] = [];
  for (let at = 0; at < numbers.length;) {
    const place = from + at;
    const end = Math.min(numbers.length, at + row - (place % row));
    const open = depth(sizes, place);
    const close = depth(sizes, from + end);
    parts.push(
      `${place === 0 ? "" : ","}${"[".repeat(open)}${numbers.slice(at, end).join(",")}${"]".repeat(close)}`,
    );
    at = end;
  }
  return parts.join("");
}

/** How many brackets open, or close, at this place. */
function depth(sizes: readonly number[], place: number): number {
  const inner = sizes.findIndex((size) => place % size !== 0);
  return inner < 0 ? sizes.length : inner;
}

function countOf(shape: readonly number[] | undefined, base64: string, dtype: Dtype): number {
  if (shape !== undefined) return shape.reduce((product, dimension) => product * dimension, 1);
  return Math.floor(Buffer.byteLength(base64, "base64") / elementBytes(dtype));
}

function texts(base64: string, dtype: Dtype, from: number, to: number): string[] {
  const group = (place: number): number => (place * elementBytes(dtype) * 4) / 3;
  return flatTexts(dtype, Buffer.from(base64.slice(group(from), Math.ceil(group(to) / 4) * 4), "base64"));
}
