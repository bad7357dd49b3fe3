/**
 * The task format of the Open Inference Protocol, shared by HTTP (`oip-v2.ts`) and gRPC (`oip-grpc.ts`), so that any
 * client can be served by any worker. One row of dimension 0 is one task:
 *
 *   parameters  {"binary":true?,"contents":true?,"inputs":[{"datatype","name","parameters"?,"shape"}…],"outputs":[…]?,
 *               "pad":{…}?,"parameters":{…}?,"version":"…"?,"whole":true?}
 *               canonical; shapes without dimension 0, except for a request that is not cut (`whole`);
 *               `contents`: a gRPC client sent typed contents; `pad`: rows may differ where a shape says -1
 *               (`oip-pad.ts`)
 *   input       one element per tensor: base64 of its bytes if `binary`, else a flat array of its values; with `pad`
 *               {"$length":n,"row":[…]} (`core/tensor.ts`)
 *   output      {"outputs":[{"name","datatype","shape":[1,…],"parameters"?,"data":[…] or "raw":"base64"}…],
 *               "contents":true?,"model_version"?,"parameters"?}
 *               `contents`: a gRPC worker used typed contents
 *
 * Only tasks with equal parameters share a call, so a batch is its rows concatenated. A reply is cut only if dimension
 * 0 of every tensor equals the number of rows sent; a batch of one may have any shape. Every row is checked against its
 * shape before it is joined: one that is too long would shift values into another caller's answer. A model that answers
 * once per batch (a count, a list of boxes) needs `maxBatchSize: 1`.
 *
 * A function's tensor or bytes (`core/tensor.ts`) is one output of one row, named after the output if exactly one is
 * requested. Native API callers can write tasks too, so nothing in them is trusted.
 */
import { canonical } from "../../core/json.ts";
import { splitArray, splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { type Binary, readBinary, readTensorRow, tensorRowLength, tensorRowText } from "../../core/tensor.ts";
import { detached, type Fields, isText } from "./fields.ts";
import {
  carriesAxis,
  type Cut,
  cutRow,
  type Fill,
  isPadded,
  lengthOf,
  type Pad,
  padBatch,
  paddedLength,
  type PadMemory,
  padText,
  readPad,
  rowShape,
  type Spread,
  writeSpread,
} from "./oip-pad.ts";
import {
  bytesOfElement,
  checkCells,
  about,
  countFlat,
  datatypeBytes,
  elementCount,
  flatten,
  quoted,
  rowsOfFlat,
  rowsOfRaw,
  TensorFlaw,
} from "./oip-tensors.ts";

export interface FormTensor {
  readonly name: string;
  readonly datatype: string;
  /** Includes the number of rows if `whole`. */
  readonly shape: readonly number[];
  readonly parameters: Fields | undefined;
  /** Rows of a call that are shorter than the shape says. */
  readonly fill?: Fill;
}

export interface PayloadTensor extends FormTensor {
  readonly payload: Buffer | Json;
}

export interface Form {
  readonly binary: boolean;
  readonly typed: boolean;
  readonly whole: boolean;
  readonly version: string | undefined;
  readonly tensors: readonly FormTensor[];
  readonly outputs: Json | undefined;
  readonly parameters: Fields | undefined;
  readonly pad?: Pad | undefined;
}

/** Scheduling parameters, handled by Ferry. */
const NOT_THE_MODELS = new Set(["priority", "timeout"]);
const NOT_TENSORS =
  "this model's workers speak the Open Inference Protocol; ask for it by POST /v2/models/NAME/infer, or by ModelInfer of gRPC";

/** `tensors` include dimension 0. Throws a TensorFlaw. */
export function tasksOf(form: Omit<Form, "tensors"> & { readonly tensors: readonly PayloadTensor[] }): {
  readonly inputs: readonly Json[];
  readonly parameters: Json;
} {
  const { tensors, whole } = form;
  const cut = tensors.map(({ name, payload, datatype, shape }) =>
    about(`input ${quoted(name)}`, () =>
      rowsOfPayload(payload, datatype, whole ? [1, ...shape] : shape).map(cellText),
    ),
  );
  const inputs = cut[0]!.map((_, row) => `[${cut.map((each) => each[row]).join(",")}]`);
  if (whole) return { inputs, parameters: formText({ ...form, pad: undefined }) };
  const length = form.pad && lengthOf(tensors, form.pad);
  const pad = length === undefined ? undefined : form.pad;
  const rowTensors = tensors.map((tensor) => ({ ...tensor, shape: taskShape(tensor, pad) }));
  return {
    inputs: length === undefined ? inputs : inputs.map((row) => tensorRowText(length, row)),
    parameters: formText({ ...form, tensors: rowTensors, pad }),
  };
}

/** Without dimension 0, and -1 where rows may differ. */
function taskShape(tensor: FormTensor, pad: Pad | undefined): readonly number[] {
  const shape = tensor.shape.slice(1);
  return pad !== undefined && isPadded(tensor, pad) ? shape.with(pad.axis - 1, -1) : shape;
}

/** Checked before cutting: a few bytes can announce millions of rows. Throws a TensorFlaw. */
export function checkRows(tensors: number, rows: number, maxRows: number): void {
  if (rows > maxRows) throw new TensorFlaw(`there are ${rows} rows; send at most ${maxRows} in one request`);
  about("the request", () => checkCells(tensors, rows));
}

function rowsOfPayload(
  payload: Buffer | Json,
  datatype: string,
  shape: readonly number[],
): readonly (Buffer | Json)[] {
  if (typeof payload !== "string") return rowsOfRaw(payload, datatype, shape);
  const [count, wanted] = [countFlat(payload), elementCount(shape)];
  if (count !== wanted) throw new TensorFlaw(`holds ${count} values, but its shape says ${wanted}`);
  return shape[0] === 1 ? [payload] : rowsOfFlat(payload, shape[0]!);
}

function cellText(row: Buffer | Json): Json {
  return typeof row === "string" ? row : `"${row.toString("base64")}"`;
}

function formText({ binary, typed, whole, version, tensors, outputs, parameters, pad }: Form): Json {
  const inputs = tensors.map(
    ({ name, datatype, shape, parameters: own }) =>
      `{"datatype":${JSON.stringify(datatype)},"name":${JSON.stringify(name)}` +
      `${objectPart("parameters", own, isSize)},"shape":[${shape.join(",")}]}`,
  );
  return (
    `{${binary ? '"binary":true,' : ""}${typed ? '"contents":true,' : ""}"inputs":[${inputs.join(",")}]` +
    (outputs === undefined ? "" : `,"outputs":${outputs}`) +
    (pad === undefined ? "" : `,"pad":${padText(pad, tensors)}`) +
    objectPart("parameters", parameters, (field) => NOT_THE_MODELS.has(field)) +
    (version === undefined ? "" : `,"version":${JSON.stringify(version)}`) +
    (whole ? ',"whole":true}' : "}")
  );
}

/**
 * A batch's form and each task's rows by tensor: unquoted base64, or a flat array. Padded tensors have the shape that is
 * sent; their rows are still to be padded (`padRaws`, `padFlat`). Throws a TensorFlaw.
 */
export function readBatch(
  inputs: readonly Json[],
  parameters: Json,
): { readonly form: Form; readonly rows: readonly (readonly string[])[] } {
  const form = parameters === "" ? undefined : readForm(parameters);
  if (form === undefined) throw new TensorFlaw(NOT_TENSORS);
  if (form.whole && inputs.length !== 1) {
    throw new TensorFlaw(
      `these are ${inputs.length} requests that were not cut into rows; they can only go one by one`,
    );
  }
  const mark = form.binary ? '"' : "[";
  const { pad } = form;
  const rows = inputs.map((input) => {
    const { elements } = splitArray(pad === undefined ? input : (readTensorRow(input) ?? ""));
    if (elements?.length !== form.tensors.length || !elements.every((element) => element.startsWith(mark)))
      throw new TensorFlaw(NOT_TENSORS);
    return form.binary ? elements.map((element) => element.slice(1, -1)) : elements;
  });
  return pad === undefined ? { form, rows } : padBatch(form, pad, inputs.map(tensorRowLength), rows);
}

/** How a reply to this batch is cut; undefined if it was not padded. */
export function cutFor(inputs: readonly Json[], parameters: Json, memory?: PadMemory): Cut | undefined {
  const form = parameters.includes('"pad":') ? readForm(parameters) : undefined;
  if (form?.pad === undefined) return undefined;
  const { axis, outputs } = form.pad;
  const lengths = inputs.map(tensorRowLength);
  return { axis, outputs, lengths, padded: paddedLength(form.pad, lengths), version: form.version, memory };
}

function readForm(parameters: Json): Form | undefined {
  const fields = splitFields(parameters);
  const elements = splitArray(fields?.get("inputs") ?? "").elements ?? [];
  if (fields === undefined || elements.length === 0) return undefined;
  try {
    const how = fields.get("pad");
    const pad = how === undefined ? undefined : readPad(how);
    if (pad === undefined && how !== undefined) return undefined;
    return {
      pad,
      binary: fields.get("binary") === "true",
      typed: fields.get("contents") === "true",
      whole: fields.get("whole") === "true",
      version: optionalText(fields, "version"),
      tensors: elements.map((text) => {
        const tensor = readHead(splitFields(text) ?? new Map<string, Json>());
        // A call states its own tensor sizes.
        return { ...tensor, parameters: filtered(tensor.parameters, (name) => !isSize(name)) };
      }),
      outputs: fields.get("outputs"),
      parameters: objectField(fields, "parameters"),
    };
  } catch (error) {
    if (error instanceof TensorFlaw) return undefined;
    throw error;
  }
}

/** Texts of a binary task's BYTES elements; undefined for other tasks. A generator: a row may hold very many. */
export function bytesTexts(input: Json, parameters: Json): Iterable<string> | undefined {
  if (!parameters.includes('"binary"')) return undefined;
  try {
    const { form, rows } = readBatch([input], parameters);
    if (!form.binary) return undefined;
    return textsIn(rows[0]!.filter((_, at) => form.tensors[at]!.datatype === "BYTES"));
  } catch (error) {
    if (error instanceof TensorFlaw) return undefined;
    throw error;
  }
}

function* textsIn(rows: readonly string[]): Generator<string, void> {
  for (const row of rows) {
    const bytes = Buffer.from(row, "base64");
    for (let at = 4; at <= bytes.length;) {
      const end = at + bytes.readUInt32LE(at - 4);
      yield bytes.toString("utf8", at, Math.min(end, bytes.length));
      at = end + 4;
    }
  }
}

export function callShape({ shape }: FormTensor, { whole }: Form, rows: number): readonly number[] {
  return whole ? shape : [rows, ...shape];
}

/** Throws a TensorFlaw unless a row's length matches its shape. */
export function checkRow(base64: string, tensor: FormTensor, row: number): void {
  const { datatype } = tensor;
  const shape = rowShape(tensor, row);
  const bytes = byteCount(base64);
  const wanted = elementCount(shape) * datatypeBytes(datatype);
  if (datatype === "BYTES") rowsOfRaw(Buffer.from(base64, "base64"), datatype, [1, ...shape]);
  else if (bytes !== wanted)
    throw new TensorFlaw(`has a row of ${bytes} bytes, but its shape says ${wanted}`);
}

export function byteCount(raw: string | Buffer | Spread): number {
  if (typeof raw === "string") return Buffer.byteLength(raw, "base64");
  return "blocks" in raw ? raw.blocks * raw.to : raw.length;
}

/** `head`, then bytes and base64 decoded straight into one buffer, and padded there. Throws a TensorFlaw. */
export function joinBytes(head: string, raws: readonly (string | Buffer | Spread)[]): Buffer {
  const all = Buffer.allocUnsafe(raws.reduce((sum, raw) => sum + byteCount(raw), Buffer.byteLength(head)));
  let at = all.write(head, "utf8");
  for (const piece of raws) {
    const spread = typeof piece === "object" && "blocks" in piece ? piece : undefined;
    const raw = spread === undefined ? (piece as string | Buffer) : spread.raw;
    const size = byteCount(raw);
    const wrote = typeof raw === "string" ? all.write(raw, at, size, "base64") : raw.copy(all, at);
    if (wrote !== size) throw new TensorFlaw("holds bytes that are not base64");
    if (spread !== undefined) writeSpread(all, at, spread);
    at += byteCount(piece);
  }
  return all;
}

export interface Beside {
  readonly version: string | undefined;
  readonly parameters: Fields | undefined;
  readonly typed: boolean;
}

export type CutReply =
  | { readonly outputs: readonly Json[]; readonly flaw?: never }
  /** The message follows "worker's reply". `rows`: dimension 0 of the reply; undefined if it has none. */
  | {
      readonly outputs?: never;
      readonly flaw: string;
      readonly inseparable: true;
      readonly rows: number | undefined;
      readonly divide?: never;
    }
  | {
      readonly outputs?: never;
      readonly flaw: string;
      readonly divide: true;
      readonly inseparable?: never;
    };

/** `padded`: how the batch was padded, if it was. */
export function cutReply(
  tensors: readonly PayloadTensor[],
  rows: number,
  beside: Beside,
  padded?: Cut,
): CutReply {
  if (tensors.length === 0) throw new TensorFlaw("holds no outputs");
  const odd = tensors.find(({ shape }) => rows > 1 && shape[0] !== rows);
  if (odd !== undefined) {
    const of = `${quoted(odd.name)} of shape [${odd.shape.join(",")}]`;
    return { flaw: `has an output ${of} for ${rows} rows`, inseparable: true, rows: odd.shape[0] };
  }
  checkCells(tensors.length, rows);
  // All of them are looked at before any is refused: each teaches something.
  const carries = tensors.map((tensor) =>
    about(`has an output ${quoted(tensor.name)}`, () => padded !== undefined && carriesAxis(tensor, padded)),
  );
  const unknown = tensors[carries.indexOf("unknown")];
  if (unknown !== undefined) {
    const of = `${quoted(unknown.name)} of shape [${unknown.shape.join(",")}]`;
    const why = `whether its dimension ${padded!.axis} is the padded length is not known; name it in pad.outputs`;
    return { flaw: `has an output ${of}: ${why}`, divide: true };
  }
  const cut = tensors.map((tensor, at) =>
    about(`has an output ${quoted(tensor.name)}`, () =>
      cutOutput(tensor, rows, carries[at] === true ? padded : undefined),
    ),
  );
  const { version, parameters, typed } = beside;
  const tail =
    (typed ? ',"contents":true' : "") +
    (version === undefined ? "" : `,"model_version":${JSON.stringify(version)}`) +
    `${objectPart("parameters", parameters)}}`;
  // Base64 is a new string; a substring would keep the whole reply alive.
  const detach = tensors.some(({ payload }) => typeof payload === "string");
  return {
    outputs: cut[0]!.map((_, row) => {
      const output = `{"outputs":[${cut.map((each) => each[row]).join(",")}]${tail}`;
      return detach ? detached(output) : output;
    }),
  };
}

function cutOutput(tensor: PayloadTensor, rows: number, padded: Cut | undefined): readonly Json[] {
  const { name, datatype, shape, parameters, payload } = tensor;
  const own = rows === 1 ? shape : [1, ...shape.slice(1)];
  const more = objectPart("parameters", parameters, isSize);
  const field = typeof payload === "string" ? "data" : "raw";
  const cells = rowsOfPayload(payload, datatype, rows === 1 ? [1, ...shape] : shape);
  if (padded === undefined) {
    const head = headText(name, datatype, own) + more;
    return cells.map((row) => `${head},"${field}":${cellText(row)}}`);
  }
  const { axis, lengths } = padded;
  return cells.map((row, at) => {
    const length = lengths[at]!;
    const cell = cellText(cutRow(row, datatype, own, axis, length));
    return `${headText(name, datatype, own.with(axis, length))}${more},"${field}":${cell}}`;
  });
}

/** `{"name":…,"datatype":…,"shape":…`: the start of a tensor. */
export function headText(name: string, datatype: string, shape: readonly number[]): string {
  return `{"name":${JSON.stringify(name)},"datatype":${JSON.stringify(datatype)},"shape":[${shape.join(",")}]`;
}

export interface RowOutput extends FormTensor {
  /** A flat array; undefined: `raw` is set. */
  readonly data: Json | undefined;
  /** base64, unquoted. */
  readonly raw: string;
}

interface OutputRow extends Beside {
  readonly outputs: readonly RowOutput[];
}

const OUTPUT_NAME = "output-0";

/** A task's output. Throws a TensorFlaw whose message follows "the model's answer". */
export function readRow(text: Json, name = OUTPUT_NAME): OutputRow {
  const binary = readBinary(text);
  if (binary !== undefined)
    return { outputs: [outputOf(binary, name)], version: undefined, parameters: undefined, typed: false };
  const fields = text.startsWith("{") ? splitFields(text) : undefined;
  const { elements } = splitArray(fields?.get("outputs") ?? "");
  if (fields === undefined || elements === undefined) {
    throw new TensorFlaw("holds no tensors; ask this model by POST /v1/inference");
  }
  return { outputs: elements.map(readRowOutput), ...readBeside(fields) };
}

export function readBeside(fields: Fields): Beside {
  return {
    version: optionalText(fields, "model_version"),
    parameters: objectField(fields, "parameters"),
    typed: fields.get("contents") === "true",
  };
}

/** A function's tensor or bytes; float32 is FP32, uint8 UINT8. */
function outputOf({ dtype, shape, base64 }: Binary, name: string): RowOutput {
  const shared = { name, parameters: undefined, data: undefined };
  if (dtype !== undefined) {
    const datatype = dtype.replace("float", "FP").toUpperCase();
    return { ...shared, datatype, shape: [1, ...shape], raw: base64 };
  }
  const raw = bytesOfElement(Buffer.from(base64, "base64")).toString("base64");
  return { ...shared, datatype: "BYTES", shape: [1], raw };
}

function readRowOutput(text: Json): RowOutput {
  const fields: Fields = splitFields(text) ?? new Map<string, Json>();
  const name = about("has an output that", () => textField(fields, "name"));
  return about(`has an output ${quoted(name)} that`, () => {
    const [raw, data] = [fields.get("raw"), fields.get("data")];
    const binary = isText(raw);
    if (!binary && data === undefined) throw new TensorFlaw('has no "data"');
    const output = {
      ...readHead(fields),
      data: binary ? undefined : flatten(data!),
      raw: binary ? raw!.slice(1, -1) : "",
    };
    if (!fits(output)) throw new TensorFlaw("has another size than its shape says");
    return output;
  });
}

function fits({ datatype, shape, data, raw }: RowOutput): boolean {
  if (data !== undefined) return countFlat(data) === elementCount(shape);
  if (datatype !== "BYTES") return byteCount(raw) === elementCount(shape) * datatypeBytes(datatype);
  rowsOfRaw(joinBytes("", [raw]), datatype, [1, ...shape]);
  return true;
}

/** Groups the rows by output. Throws a TensorFlaw if they do not match. */
export function joinRows<T>(
  rows: readonly OutputRow[],
  join: (outputs: readonly RowOutput[], shape: readonly number[]) => T,
): readonly T[] {
  const [first] = rows;
  if (first === undefined || rows.some(({ outputs }) => outputs.length !== first.outputs.length))
    throw differing();
  return first.outputs.map(({ name }, at) => {
    const outputs = rows.map((row) => row.outputs[at]!);
    const shape = joinedShape(outputs);
    return about(`has an output ${quoted(name)} that`, () => join(outputs, shape));
  });
}

function joinedShape(outputs: readonly RowOutput[]): readonly number[] {
  const [first] = outputs as [RowOutput, ...RowOutput[]];
  if (outputs.length === 1) return first.shape;
  const row = first.shape.slice(1).join();
  for (const { name, datatype, shape } of outputs) {
    if (shape[0] !== 1) {
      const which = `has an output ${quoted(name)} that is not one for each row`;
      throw new TensorFlaw(`${which}; send one row in each request, or set maxBatchSize to 1`);
    }
    if (name !== first.name || datatype !== first.datatype || shape.slice(1).join() !== row)
      throw differing();
  }
  return [outputs.length, ...first.shape.slice(1)];
}

function differing(): TensorFlaw {
  return new TensorFlaw("has rows of different shapes; send one row in each request");
}

export function readHead(fields: Fields): FormTensor {
  return {
    name: textField(fields, "name"),
    datatype: textField(fields, "datatype"),
    shape: shapeField(fields),
    parameters: objectField(fields, "parameters"),
  };
}

/** Undefined if missing or null. Throws a TensorFlaw unless it is an object. */
export function objectField(fields: Fields, name: string): Fields | undefined {
  const text = fields.get(name) ?? "null";
  if (text === "null") return undefined;
  const found = splitFields(text);
  if (found === undefined) throw new TensorFlaw(`has "${name}" that is no object`);
  return found;
}

export function textField(fields: Fields, name: string): string {
  const text = optionalText(fields, name);
  if (text === undefined) throw new TensorFlaw(`has no "${name}" that is a string`);
  return text;
}

function optionalText(fields: Fields, name: string): string | undefined {
  const text = fields.get(name);
  return isText(text) ? (JSON.parse(text!) as string) : undefined;
}

const MAX_DIMENSIONS = 32;

function shapeField(fields: Fields): readonly number[] {
  const text = fields.get("shape");
  if (text?.startsWith("[") !== true) throw new TensorFlaw('has no "shape"');
  const shape = JSON.parse(text) as unknown[];
  const good = shape.every((each): each is number => Number.isSafeInteger(each));
  if (!good || shape.length > MAX_DIMENSIONS)
    throw new TensorFlaw("has a shape that is no list of a few integers");
  return shape;
}

function isSize(field: string): boolean {
  return field === "binary_data_size";
}

export function filtered(fields: Fields | undefined, keep: (name: string) => boolean): Fields | undefined {
  return fields && new Map([...fields].filter(([name]) => keep(name)));
}

/** `,"name":{…}` without the fields that `drop` names, canonical; "" if none is left. */
export function objectPart(
  name: string,
  fields: Fields | undefined,
  drop: (field: string) => boolean = () => false,
): string {
  if (fields === undefined) return "";
  const parts: string[] = [];
  for (const [field, text] of fields) if (!drop(field)) parts.push(`${JSON.stringify(field)}:${text}`);
  return parts.length === 0 ? "" : `,${JSON.stringify(name)}:${canonical(`{${parts.join(",")}}`)}`;
}

/**
 * Throws a TensorFlaw for values of the wrong kind: some servers answer a string among numbers with a 500, which would
 * count against the worker. Numbers are not range-checked.
 */
export function ofKind(flat: Json, datatype: string): Json {
  if (datatype === "BYTES") return flat;
  const text = flat.includes('"');
  // true, false and null contain u or a; numbers do not.
  const word = datatype === "BOOL" ? flat.includes("n") : flat.includes("u") || flat.includes("a");
  if (text || word)
    throw new TensorFlaw(`holds ${text ? "a string" : "true, false or null"}, but is ${datatype}`);
  return flat;
}
