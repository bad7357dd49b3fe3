/**
 * Rows of different length in one batch of the Open Inference Protocol (`models[].pad`).
 *
 *   client   [1,5] and [1,8]                tasks {"$length":5,"row":[…]} and {"$length":8,"row":[…]}, both of shape [-1]
 *   call     [2,8]                          5 values and 3 times `value`; 8 values
 *   reply    [2,8,768] becomes [1,5,768] and [1,8,768]; [2,768] is not cut
 *
 * The parameters of a task say how it is padded, so that both sides agree also while a config changes, and only rows
 * padded alike share a batch.
 *
 * Which outputs are cut: the ones named in the config; without names, outputs seen to follow the padded length
 * (`PadMemory`). What is not known yet is not guessed: such a reply is discarded and the batch divided until its rows
 * need no cutting, which also shows more. A row that was not padded is never cut.
 */
import type { Json } from "../../core/task.ts";
import type { FormTensor } from "./oip-task.ts";
import {
  cutFlat,
  datatypeBytes,
  elementCount,
  elementsOfBytes,
  innerOfFlat,
  joinFlat,
  quoted,
  rawFromJson,
  rowsOfFlat,
  TensorFlaw,
} from "./oip-tensors.ts";

export interface Pad {
  /** The dimension in which rows may differ, from 1: dimension 0 is the batch's. */
  readonly axis: number;
  readonly value: number;
  /** Inputs to pad; undefined: all that have the dimension. Never BYTES. Not part of a task. */
  readonly inputs?: readonly string[] | undefined;
  /** Outputs to cut; undefined: learned. */
  readonly outputs?: readonly string[] | undefined;
  /** An input that Ferry adds: INT32 or INT64 of shape [rows, 1], each row's length. */
  readonly lengthsInput?: string | undefined;
  /** Ascending; lengths are rounded up to these. */
  readonly classes?: readonly number[] | undefined;
}

/** How the rows of one tensor are padded; the tensor's shape is the padded one. */
export interface Fill {
  /** In the shape of a row, which has no dimension 0 of the batch. */
  readonly axis: number;
  readonly value: number;
  readonly lengths: readonly number[];
}

/** A row to be written with gaps: `blocks` of `from` bytes, `to` bytes apart, the gaps filled with `fill`. */
export interface Spread {
  readonly raw: string | Buffer;
  readonly blocks: number;
  readonly from: number;
  readonly to: number;
  readonly fill: Buffer;
}

/** A batch may always take this much, and more only if most of it is not padding: memory follows what clients sent. */
const MAX_PADDED_BYTES = 64 * 1024 * 1024;
const MAX_PADDED_RATIO = 4;
const MAX_INT32 = 2 ** 31 - 1;

/** The rows' length; undefined if none of these inputs is padded. `tensors` include dimension 0. Throws a TensorFlaw. */
export function lengthOf(tensors: readonly FormTensor[], pad: Pad): number | undefined {
  const { axis, value } = pad;
  const padded = tensors.filter((tensor) => isPadded(tensor, pad));
  const [first] = padded;
  if (first === undefined) return undefined;
  const length = first.shape[axis]!;
  const other = padded.find(({ shape }) => shape[axis] !== length);
  if (other !== undefined) {
    const which = `the inputs ${quoted(first.name)} and ${quoted(other.name)}`;
    const hint = pad.inputs === undefined ? "; pad.inputs of the model can name those to pad" : "";
    throw new TensorFlaw(
      `${which} disagree in dimension ${axis}, along which this model's rows are padded: ` +
        `${length} and ${other.shape[axis]}${hint}`,
    );
  }
  for (const tensor of padded) {
    if (length > 0 && elementCount(tensor.shape) === 0)
      throw new TensorFlaw(
        `input ${quoted(tensor.name)} has a dimension ${axis} of ${length}, but no elements`,
      );
    if (value !== 0) fillBytes(tensor, value);
  }
  return length;
}

export function isPadded({ name, datatype, shape }: FormTensor, pad: Pad): boolean {
  const { axis, inputs, lengthsInput } = pad;
  if (shape.length <= axis || datatype === "BYTES" || name === lengthsInput) return false;
  return inputs === undefined || inputs.includes(name);
}

/** Of a task whose inputs are `tensors`: canonical. */
export function padText(
  { axis, classes, lengthsInput, outputs, value }: Pad,
  tensors: readonly FormTensor[],
): Json {
  const adds = lengthsInput !== undefined && tensors.every(({ name }) => name !== lengthsInput);
  return (
    `{"axis":${axis}` +
    (classes === undefined ? "" : `,"classes":[${classes.join(",")}]`) +
    (adds ? `,"lengthsInput":${JSON.stringify(lengthsInput)}` : "") +
    (outputs === undefined ? "" : `,"outputs":${JSON.stringify(outputs)}`) +
    `,"value":${value}}`
  );
}

/** Undefined unless it is what `padText` writes: native API callers can send anything. */
export function readPad(text: Json): Pad | undefined {
  const { axis, value, outputs, lengthsInput, classes } = (JSON.parse(text) ?? {}) as Record<
    keyof Pad,
    unknown
  >;
  const isLength = (each: unknown): boolean => Number.isSafeInteger(each) && (each as number) >= 0;
  const isName = (each: unknown): boolean => typeof each === "string";
  const isListOf = (list: unknown, is: (each: unknown) => boolean): boolean =>
    list === undefined || (Array.isArray(list) && list.every(is));
  const good =
    isLength(axis) &&
    (axis as number) >= 1 &&
    typeof value === "number" &&
    isListOf(outputs, isName) &&
    isListOf(classes, isLength) &&
    (lengthsInput === undefined || isName(lengthsInput));
  return good ? ({ axis, value, outputs, lengthsInput, classes } as Pad) : undefined;
}

/** The longest, rounded up to a class; what is longer than all of them stays. */
export function paddedLength({ classes = [] }: Pad, lengths: readonly number[]): number {
  const longest = lengths.reduce((most, length) => Math.max(most, length), 0);
  return classes.find((length) => length >= longest) ?? longest;
}

interface Batched {
  readonly binary: boolean;
  readonly tensors: readonly FormTensor[];
}

/** The batch as it is sent: padded shapes, and the input with the lengths. Throws a TensorFlaw if it is too large. */
export function padBatch<F extends Batched>(
  form: F,
  pad: Pad,
  lengths: readonly number[],
  rows: readonly (readonly string[])[],
): { readonly form: F; readonly rows: readonly (readonly string[])[] } {
  const { value, lengthsInput } = pad;
  const axis = pad.axis - 1;
  const padded = paddedLength(pad, lengths);
  const tensors = form.tensors.map((tensor): FormTensor => {
    if (tensor.shape[axis] !== -1) return tensor;
    return { ...tensor, shape: tensor.shape.with(axis, padded), fill: { axis, value, lengths } };
  });
  checkPadded(tensors, padded, lengths);
  if (lengthsInput === undefined) return { form: { ...form, tensors }, rows };
  const datatype = tensors.find(({ fill }) => fill !== undefined)?.datatype === "INT32" ? "INT32" : "INT64";
  const added = { name: lengthsInput, datatype, shape: [1], parameters: undefined };
  return {
    form: { ...form, tensors: [...tensors, added] },
    rows: rows.map((row, at) => [...row, lengthCell(lengths[at]!, datatype, form.binary)]),
  };
}

function lengthCell(length: number, datatype: "INT32" | "INT64", binary: boolean): string {
  if (datatype === "INT32" && length > MAX_INT32)
    throw new TensorFlaw(`a row has the length ${length}, which is no value of INT32`);
  const text = `[${length}]`;
  return binary ? rawFromJson(text, datatype).toString("base64") : text;
}

function checkPadded(tensors: readonly FormTensor[], padded: number, lengths: readonly number[]): void {
  let [own, all] = [0, 0];
  for (const { shape, fill, datatype } of tensors) {
    if (fill === undefined) continue;
    // As bytes, or as JSON with a comma.
    const size = Math.max(datatypeBytes(datatype), String(fill.value).length + 1);
    const unit = elementCount(shape.with(fill.axis, 1)) * size;
    for (const length of lengths) own += unit * length;
    all += unit * padded * lengths.length;
  }
  if (all <= MAX_PADDED_BYTES || all <= MAX_PADDED_RATIO * own) return;
  throw new TensorFlaw(
    `${lengths.length} rows padded to a length of ${padded} take ${all} bytes, of which ${own} are theirs; ` +
      `at most ${MAX_PADDED_BYTES}, or ${MAX_PADDED_RATIO} times their own, are sent`,
  );
}

/** The shape of one row before it is padded. */
export function rowShape({ shape, fill }: FormTensor, row: number): readonly number[] {
  return fill === undefined ? shape : shape.with(fill.axis, fill.lengths[row]!);
}

/** The rows of one tensor as they are to be written; those of full length are unchanged. */
export function padRaws(
  tensor: FormTensor,
  raws: readonly (string | Buffer)[],
): readonly (string | Buffer | Spread)[] {
  const { fill, shape, datatype } = tensor;
  if (fill === undefined) return raws;
  const { blocks, inner } = aroundAxis(shape, fill.axis);
  const unit = inner * datatypeBytes(datatype);
  const to = shape[fill.axis]! * unit;
  const bytes = fillBytes(tensor, fill.value);
  return raws.map((raw, row) => {
    const from = fill.lengths[row]! * unit;
    return from === to ? raw : { raw, blocks, from, to, fill: bytes };
  });
}

/** Writes the row itself, then moves its blocks apart, the last one first. */
export function writeSpread(all: Buffer, at: number, { blocks, from, to, fill }: Spread): void {
  for (let block = blocks - 1; block >= 0; block--) {
    const start = at + block * to;
    if (block > 0) all.copyWithin(start, at + block * from, at + (block + 1) * from);
    all.fill(fill, start + from, start + to);
  }
}

/** The rows of one tensor as one flat array. */
export function padFlat(tensor: FormTensor, texts: readonly Json[]): Json {
  const { fill, shape } = tensor;
  if (fill === undefined) return joinFlat(texts);
  const { blocks, inner } = aroundAxis(shape, fill.axis);
  const padded = shape[fill.axis]!;
  const value = fillText(tensor, fill.value);
  const parts: string[] = [];
  texts.forEach((text, row) => {
    const missing = (padded - fill.lengths[row]!) * inner;
    for (const block of missing === 0 || blocks === 1 ? [text] : rowsOfFlat(text, blocks)) {
      const values = innerOfFlat(block);
      if (values !== "") parts.push(values);
      if (missing > 0) parts.push(`${value},`.repeat(missing - 1) + value);
    }
  });
  return `[${parts.join(",")}]`;
}

/** How many blocks the dimensions before `axis` make, and how many elements the dimensions behind it. */
function aroundAxis(shape: readonly number[], axis: number): { blocks: number; inner: number } {
  return { blocks: elementCount(shape.slice(0, axis)), inner: elementCount(shape.slice(axis + 1)) };
}

/** A mask is 0 where there is nothing, also where padding has another token id. */
function valueFor(name: string, value: number): number {
  return /mask/i.test(name) ? 0 : value;
}

function fillText({ name, datatype }: FormTensor, value: number): Json {
  const own = valueFor(name, value);
  return datatype === "BOOL" ? String(own === 1) : String(own);
}

/** One element. Throws a TensorFlaw if the value is none of that datatype. */
function fillBytes({ name, datatype }: FormTensor, value: number): Buffer {
  const own = valueFor(name, value);
  if (own === 0) return Buffer.alloc(datatypeBytes(datatype));
  // BF16: the upper half of a float32.
  if (datatype === "BF16") return rawFromJson(`[${own}]`, "FP32").subarray(2);
  try {
    return rawFromJson(`[${own}]`, datatype);
  } catch (error) {
    if (!(error instanceof TensorFlaw)) throw error;
    throw new TensorFlaw(`input ${quoted(name)} is ${datatype}, which has no ${own}, this model's pad.value`);
  }
}

/** How the outputs of a batch are cut. */
export interface Cut {
  readonly axis: number;
  readonly padded: number;
  readonly lengths: readonly number[];
  readonly outputs: readonly string[] | undefined;
  readonly version: string | undefined;
  readonly memory: PadMemory | undefined;
}

/** "unknown": cutting may be right or wrong. Throws a TensorFlaw if the output should have the padded length. */
export function carriesAxis(
  { name, shape }: Pick<FormTensor, "name" | "shape">,
  { axis, padded, lengths, outputs, version, memory }: Cut,
): boolean | "unknown" {
  const dimension = shape[axis];
  const anyPadded = lengths.some((length) => length !== padded);
  if (outputs !== undefined) {
    if (!anyPadded || !outputs.includes(name)) return false;
    if (dimension !== padded) throw wrongLength(shape, axis, padded);
    return true;
  }
  if (dimension === undefined) return false;
  const follows = memory?.note(`${version ?? ""}/${name}`, padded, dimension);
  if (!anyPadded) return false;
  if (dimension === padded) return follows ?? "unknown";
  if (follows === true) throw wrongLength(shape, axis, padded);
  return false;
}

function wrongLength(shape: readonly number[], axis: number, padded: number): TensorFlaw {
  return new TensorFlaw(
    `of shape [${shape.join(",")}]; its dimension ${axis} should be ${padded}, the padded length`,
  );
}

/** One row cut to `length` in dimension `axis` of `shape`, its own. */
export function cutRow(
  row: Buffer | Json,
  datatype: string,
  shape: readonly number[],
  axis: number,
  length: number,
): Buffer | Json {
  const { blocks, inner } = aroundAxis(shape, axis);
  const [all, kept] = [shape[axis]! * inner, length * inner];
  if (typeof row === "string") return cutFlat(row, blocks, kept);
  if (datatype === "BYTES") return cutBytes(row, all, kept);
  const size = datatypeBytes(datatype);
  if (blocks === 1) return row.subarray(0, kept * size);
  const from = (block: number): number => block * all * size;
  return Buffer.concat(
    Array.from({ length: blocks }, (_, block) => row.subarray(from(block), from(block) + kept * size)),
  );
}

function cutBytes(row: Buffer, all: number, kept: number): Buffer {
  const parts: Buffer[] = [];
  let [at, element] = [0, 0];
  for (const { length } of elementsOfBytes(row)) {
    const end = at + 4 + length;
    if (element++ % all < kept) parts.push(row.subarray(at, end));
    at = end;
  }
  return Buffer.concat(parts);
}

interface Seen {
  /** A padded length that its dimension was equal to. */
  equal?: number;
  /** Its dimension was shorter than the padded length: perhaps the model truncates. */
  shorter?: boolean;
  /** Undefined: not known yet. */
  follows?: boolean;
  warned?: boolean;
}

const MAX_SEEN = 1024;

/**
 * What the dimension of each output did in batches of different padded length:
 *
 *   longer than it, once                    does not follow it: a fixed dimension
 *   equal to two of them, shorter in none   follows it
 *   else                                    not known. One equality proves nothing: [rows, 768] has a dimension of 768
 *                                           also when that is the padded length
 *
 * A verdict stays. Shared by the workers of a model, so that one batch teaches all.
 */
export class PadMemory {
  readonly #seen = new Map<string, Seen>();
  readonly #warn: (message: string) => void;

  constructor(warn: (message: string) => void) {
    this.#warn = warn;
  }

  /** Whether it follows the padded length, this reply included; undefined: not known. */
  note(output: string, padded: number, dimension: number): boolean | undefined {
    const seen = this.#seen.get(output) ?? {};
    if (this.#seen.size < MAX_SEEN) this.#seen.set(output, seen);
    if (seen.follows !== undefined) return seen.follows;
    if (dimension > padded) seen.follows = false;
    else if (dimension < padded) seen.shorter = true;
    else if (seen.equal === undefined || seen.equal === padded) seen.equal = padded;
    else if (seen.shorter !== true) seen.follows = true;
    else if (seen.warned !== true) {
      seen.warned = true;
      this.#warn(
        `the output ${quoted(output.slice(output.indexOf("/") + 1))} has the padded length in some batches and less ` +
          "in others, so rows of different length are sent apart; name it in pad.outputs if it is to be cut, or write none",
      );
    }
    return seen.follows;
  }
}
