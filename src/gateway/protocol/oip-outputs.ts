/**
 * What comes out of a task of the Open Inference Protocol, over HTTP and over gRPC alike:
 *
 *   {"outputs":[{"name","datatype","shape":[1,…],"parameters"?,"data":[…] or "raw":"base64"}…],
 *    "contents":true?,"model_version"?,"parameters"?}
 *
 * `contents`: a worker of gRPC used typed contents. A reply is cut only where dimension 0 of each of its tensors is the
 * number of rows that were sent; a batch of one may have any shape, also none. The rows of an answer are joined only where
 * each brought one of its own, and every row is measured: a model that answers for a whole batch at once (a count, a list
 * of boxes) must be asked with one row at a time, or as a whole (`maxBatchSize: 1`).
 *
 * A tensor or bytes, as functions return them (`core/tensor.ts`), is one output of one row; it has the name of the output
 * that its client asks for, if that is one.
 */
import { splitArray, splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { type Binary, readBinary } from "../../core/tensor.ts";
import { detached, type Fields } from "./fields.ts";
import { about, objectField, objectPart, quoted, shapeField, textField } from "./oip-fields.ts";
import {
  bytesOfElement,
  checkCells,
  countFlat,
  elementBytes,
  elementsOf,
  flatten,
  rowsOfFlat,
  rowsOfRaw,
  TensorFlaw,
} from "./oip-tensors.ts";

/** A tensor of a worker's reply. */
export interface OutputTensor {
  readonly name: string;
  readonly datatype: string;
  readonly shape: readonly number[];
  readonly parameters: Fields | undefined;
  /** Bytes, or a flat array. */
  readonly payload: Buffer | Json;
}

/** What a reply says beside its tensors. */
export interface Beside {
  readonly version: string | undefined;
  readonly parameters: Fields | undefined;
  readonly typed: boolean;
}

export type CutReply =
  | { readonly outputs: readonly Json[]; readonly flaw?: never }
  /** To be put after "worker's reply". `rows`: what dimension 0 says instead; undefined where there is none. */
  | {
      readonly outputs?: never;
      readonly flaw: string;
      readonly inseparable: true;
      readonly rows: number | undefined;
    };

/** The output of each row. Throws a TensorFlaw. */
export function cutReply(tensors: readonly OutputTensor[], rows: number, beside: Beside): CutReply {
  if (tensors.length === 0) throw new TensorFlaw("holds no outputs");
  const odd = tensors.find(({ shape }) => rows > 1 && shape[0] !== rows);
  if (odd !== undefined) {
    const of = `${quoted(odd.name)} of shape [${odd.shape.join(",")}]`;
    return { flaw: `has an output ${of} for ${rows} rows`, inseparable: true, rows: odd.shape[0] };
  }
  checkCells(tensors.length, rows);
  const cut = tensors.map((tensor) =>
    about(`has an output ${quoted(tensor.name)}`, () => cutOutput(tensor, rows)),
  );
  const { version, parameters, typed } = beside;
  const tail =
    (typed ? ',"contents":true' : "") +
    (version === undefined ? "" : `,"model_version":${JSON.stringify(version)}`) +
    `${objectPart("parameters", parameters)}}`;
  // Bytes have become texts of their own; what was cut from a text still holds all of it.
  const kept = tensors.some(({ payload }) => typeof payload === "string") ? detached : asItIs;
  return {
    outputs: Array.from({ length: rows }, (_, row) =>
      kept(`{"outputs":[${cut.map((each) => each[row]).join(",")}]${tail}`),
    ),
  };
}

function asItIs(text: string): string {
  return text;
}

/** The rows of an output as JSON objects. */
function cutOutput(tensor: OutputTensor, rows: number): readonly Json[] {
  const { name, datatype, shape, parameters, payload } = tensor;
  const all = rows === 1 ? [1, ...shape] : shape;
  const own = rows === 1 ? shape : [1, ...shape.slice(1)];
  const said = objectPart("parameters", parameters, (field) => field === "binary_data_size");
  const head = `${headText(name, datatype, own)}${said}`;
  if (typeof payload !== "string") {
    return rowsOfRaw(payload, datatype, all).map((row) => `${head},"raw":"${row.toString("base64")}"}`);
  }
  const [count, wanted] = [countFlat(payload), elementsOf(shape)];
  if (count !== wanted) throw new TensorFlaw(`holds ${count} values, but its shape says ${wanted}`);
  const cut = rows === 1 ? [payload] : rowsOfFlat(payload, rows);
  return cut.map((row) => `${head},"data":${row}}`);
}

/** `{"name":…,"datatype":…,"shape":…`: how a tensor begins. */
export function headText(name: string, datatype: string, shape: readonly number[]): string {
  return `{"name":${JSON.stringify(name)},"datatype":${JSON.stringify(datatype)},"shape":[${shape.join(",")}]`;
}

/** One output of one row. */
export interface Part {
  readonly name: string;
  readonly datatype: string;
  readonly shape: readonly number[];
  readonly parameters: Fields | undefined;
  /** A flat array; undefined: `raw` is there. */
  readonly data: Json | undefined;
  /** base64, without quotes. */
  readonly raw: string;
}

export interface Row extends Beside {
  readonly parts: readonly Part[];
}

/** A task's output. Throws a TensorFlaw, to be put after "the model's answer". */
export function readRow(text: Json, name = OUTPUT_NAME): Row {
  const binary = readBinary(text);
  if (binary !== undefined) return { parts: [partOf(binary, name)], ...NOTHING_BESIDE };
  const fields = text.startsWith("{") ? splitFields(text) : undefined;
  const { elements } = splitArray(fields?.get("outputs") ?? "");
  if (fields === undefined || elements === undefined) {
    throw new TensorFlaw("holds no tensors; ask this model by POST /v1/inference");
  }
  return {
    parts: elements.map(readPart),
    version:
      fields.get("model_version")?.startsWith('"') === true ? textField(fields, "model_version") : undefined,
    parameters: objectField(fields, "parameters"),
    typed: fields.get("contents") === "true",
  };
}

/** What a tensor is called that a function returned without a name, where its client asks for none by name. */
const OUTPUT_NAME = "output-0";
const NOTHING_BESIDE: Beside = { version: undefined, parameters: undefined, typed: false };

/** Of a row that a function returned as a tensor, or as bytes. */
function partOf({ dtype, shape, base64 }: Binary, name: string): Part {
  const shared = { name, parameters: undefined, data: undefined };
  if (dtype !== undefined)
    return { ...shared, datatype: datatypeOf(dtype), shape: [1, ...shape], raw: base64 };
  const raw = bytesOfElement(Buffer.from(base64, "base64")).toString("base64");
  return { ...shared, datatype: "BYTES", shape: [1], raw };
}

/** float32 is FP32, uint8 UINT8. */
function datatypeOf(dtype: string): string {
  return dtype.replace("float", "FP").toUpperCase();
}

function readPart(text: Json): Part {
  const fields: Fields = splitFields(text) ?? new Map<string, Json>();
  const name = about("has an output that", () => textField(fields, "name"));
  return about(`has an output ${quoted(name)} that`, () => {
    const [raw, data] = [fields.get("raw"), fields.get("data")];
    const binary = raw?.startsWith('"') === true;
    if (!binary && data === undefined) throw new TensorFlaw('has no "data"');
    const part = {
      name,
      datatype: textField(fields, "datatype"),
      shape: shapeField(fields),
      parameters: objectField(fields, "parameters"),
      data: binary ? undefined : flatten(data!),
      raw: binary ? raw.slice(1, -1) : "",
    };
    measure(part);
    return part;
  });
}

/** One row that is too long beside one that is too short would go unnoticed. */
function measure(part: Part): void {
  const { datatype, shape, data, raw } = part;
  const elements = elementsOf(shape);
  if (data === undefined && datatype === "BYTES") {
    rowsOfRaw(rawBytes(part), datatype, [1, ...shape]);
    return;
  }
  const fits =
    data === undefined
      ? Buffer.byteLength(raw, "base64") === elements * elementBytes(datatype)
      : countFlat(data) === elements;
  if (!fits) throw new TensorFlaw("has another size than its shape says");
}

/** The bytes of a part that came as such. Throws a TensorFlaw. */
export function rawBytes({ raw }: Part): Buffer {
  const bytes = Buffer.from(raw, "base64");
  if (bytes.length !== Buffer.byteLength(raw, "base64"))
    throw new TensorFlaw("holds bytes that are not base64");
  return bytes;
}

/** Output by output, those of all rows. Throws a TensorFlaw where they do not fit together. */
export function joinRows<T>(
  rows: readonly Row[],
  join: (parts: readonly Part[], shape: readonly number[]) => T,
): readonly T[] {
  const [first] = rows;
  if (first === undefined || rows.some(({ parts }) => parts.length !== first.parts.length)) throw differing();
  return first.parts.map((_, at) => {
    const parts = rows.map((row) => row.parts[at]!);
    return join(parts, joinedShape(parts));
  });
}

function joinedShape(parts: readonly Part[]): readonly number[] {
  const [first] = parts as [Part, ...Part[]];
  if (parts.length === 1) return first.shape;
  const row = first.shape.slice(1).join();
  for (const { name, datatype, shape } of parts) {
    if (shape[0] !== 1) {
      const which = `has an output ${quoted(name)} that is not one for each row`;
      throw new TensorFlaw(`${which}; send one row in each request, or set maxBatchSize to 1`);
    }
    if (name !== first.name || datatype !== first.datatype || shape.slice(1).join() !== row)
      throw differing();
  }
  return [parts.length, ...first.shape.slice(1)];
}

function differing(): TensorFlaw {
  return new TensorFlaw("has rows of different shapes; send one row in each request");
}
