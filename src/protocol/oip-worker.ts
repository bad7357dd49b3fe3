/**
 * The Open Inference Protocol over HTTP towards workers: a batch of tasks becomes one call, and its reply their
 * outputs. The form of a task stands in `oip-form.ts`.
 *
 * A batch is the rows one behind the other. Each row is measured against its shape before it joins others: one that is
 * too long would push its neighbours' values into somebody else's answer. Outputs are cut only where dimension 0 of
 * each is the number of rows that were sent; a batch of one is passed on in whatever shape. Parameters and inputs may
 * have been written by a client of Ferry's own API, so that nothing is taken for granted.
 */
import { isUtf8 } from "node:buffer";
import { splitArray, splitField, splitFields } from "../core/json-split.ts";
import type { Json } from "../core/task.ts";
import { detached, type Fields } from "./fields.ts";
import {
  about,
  binarySize,
  BYTES_TYPE,
  HEADER_LENGTH,
  objectField,
  objectPart,
  ofKind,
  partsOf,
  quoted,
  RawReader,
  shapeField,
  textField,
} from "./oip-form.ts";
import {
  countFlat,
  elementBytes,
  elementsOf,
  flatten,
  joinFlat,
  rowsOfFlat,
  rowsOfRaw,
  TensorFlaw,
} from "./oip-tensors.ts";
import type { Call, Outputs, Replied } from "./protocol.ts";

const NOT_TENSORS =
  "this model's workers speak the Open Inference Protocol; ask for it by POST /v2/models/NAME/infer";

interface FormTensor {
  readonly name: string;
  readonly datatype: string;
  /** With the number of rows where the form is `whole`, else without. */
  readonly shape: readonly number[];
  readonly parameters: Fields | undefined;
}

interface Form {
  readonly binary: boolean;
  readonly whole: boolean;
  readonly version: string | undefined;
  readonly tensors: readonly FormTensor[];
  /** `,"outputs":…` and `,"parameters":…`; "" where there are none. */
  readonly rest: string;
}

export function inferCall(inputs: readonly Json[], parameters: Json, model: string): Call {
  try {
    const form = readForm(parameters);
    if (form.whole && inputs.length > 1) throw new TensorFlaw(NOT_TENSORS);
    const rows = inputs.map((input) => readInput(input, form));
    const path = form.version === undefined ? {} : { path: pathOf(model, form.version) };
    return { ...path, ...(form.binary ? binaryCall(form, rows) : jsonCall(form, rows)) };
  } catch (error) {
    if (error instanceof TensorFlaw) return { body: "", flaw: error.message };
    throw error;
  }
}

function pathOf(model: string, version: string): string {
  // In a path these would not be a version but the way to somewhere else.
  if (/^\.{0,2}$/.test(version)) throw new TensorFlaw("the version must be a name or a number");
  return `/v2/models/${encodeURIComponent(model)}/versions/${encodeURIComponent(version)}/infer`;
}

function readForm(parameters: Json): Form {
  const fields = parameters === "" ? undefined : splitFields(parameters);
  const { elements } = fields?.has("inputs") === true ? splitField(parameters, "inputs") : {};
  if (fields === undefined || elements === undefined || elements.length === 0)
    throw new TensorFlaw(NOT_TENSORS);
  const version = fields.get("version");
  const part = (name: string): string => (fields.has(name) ? `,"${name}":${fields.get(name)}` : "");
  return {
    binary: fields.get("binary") === "true",
    whole: fields.get("whole") === "true",
    version: version?.startsWith('"') === true ? (JSON.parse(version) as string) : undefined,
    tensors: elements.map((text) => {
      const own = splitFields(text);
      if (own === undefined) throw new TensorFlaw(NOT_TENSORS);
      return {
        name: textField(own, "name"),
        datatype: textField(own, "datatype"),
        shape: shapeField(own),
        parameters: withoutSize(objectField(own, "parameters")),
      };
    }),
    rest: part("outputs") + part("parameters"),
  };
}

/** How many bytes a tensor has a call says itself. */
function withoutSize(parameters: Fields | undefined): Fields | undefined {
  return parameters && new Map([...parameters].filter(([name]) => name !== "binary_data_size"));
}

/** Of one task, each tensor's row: base64 without quotes, or a flat array. */
function readInput(text: Json, { tensors, binary }: Form): readonly string[] {
  const { elements } = splitArray(text);
  const mark = binary ? '"' : "[";
  if (elements?.length !== tensors.length || !elements.every((element) => element.startsWith(mark))) {
    throw new TensorFlaw(NOT_TENSORS);
  }
  return binary ? elements.map((element) => element.slice(1, -1)) : elements;
}

type Rows = readonly (readonly string[])[];

function headOf({ name, datatype, shape }: FormTensor, { whole }: Form, rows: number): string {
  const dimensions = whole ? shape : [rows, ...shape];
  return `{"name":${JSON.stringify(name)},"shape":[${dimensions.join(",")}],"datatype":${JSON.stringify(datatype)}`;
}

function jsonCall(form: Form, rows: Rows): Call {
  const inputs = form.tensors.map((tensor, at) => {
    const wanted = elementsOf(tensor.shape);
    const texts = rows.map((row) => checked(row[at]!, tensor, wanted));
    const own = objectPart("parameters", tensor.parameters);
    return `${headOf(tensor, form, rows.length)}${own},"data":${joinFlat(texts)}}`;
  });
  const body = `{"inputs":[${inputs.join(",")}]${form.rest}}`;
  // Its outputs may come as bytes all the same.
  return form.rest.includes('"binary_data') ? { body, headers: { accept: "*/*" } } : { body };
}

function checked(text: Json, { name, datatype }: FormTensor, wanted: number): Json {
  return about(`input ${quoted(name)}`, () => {
    const flat = ofKind(flatten(text), datatype);
    const count = countFlat(flat);
    if (count === wanted) return flat;
    throw new TensorFlaw(`has a row of ${count} values, but its shape says ${wanted}`);
  });
}

function binaryCall(form: Form, rows: Rows): Call {
  const sizes = form.tensors.map((tensor, at) =>
    about(`input ${quoted(tensor.name)}`, () => rows.map((row) => checkedBytes(row[at]!, tensor))),
  );
  const inputs = form.tensors.map((tensor, at) => {
    const size = sizes[at]!.reduce((sum, bytes) => sum + bytes, 0);
    const own = objectPart("parameters", tensor.parameters);
    const more = own === "" ? "" : `,${own.slice(',"parameters":{'.length, -1)}`;
    return `${headOf(tensor, form, rows.length)},"parameters":{"binary_data_size":${size}${more}}}`;
  });
  const head = `{"inputs":[${inputs.join(",")}]${form.rest}}`;
  const headBytes = Buffer.byteLength(head);
  const total = sizes.flat().reduce((sum, bytes) => sum + bytes, headBytes);
  const body = Buffer.allocUnsafe(total);
  let at = body.write(head, "utf8");
  for (const [tensor, each] of sizes.entries()) {
    for (const [row, size] of each.entries()) {
      if (body.write(rows[row]![tensor]!, at, size, "base64") !== size) throw new TensorFlaw(NOT_TENSORS);
      at += size;
    }
  }
  return { type: BYTES_TYPE, headers: { [HEADER_LENGTH]: String(headBytes) }, body };
}

/** How many bytes a row has, if they are as many as its shape says. */
function checkedBytes(base64: string, { datatype, shape }: FormTensor): number {
  const bytes = Buffer.byteLength(base64, "base64");
  const wanted = elementsOf(shape) * elementBytes(datatype);
  if (datatype === "BYTES") rowsOfRaw(Buffer.from(base64, "base64"), datatype, [1, ...shape]);
  else if (bytes !== wanted)
    throw new TensorFlaw(`has a row of ${bytes} bytes, but its shape says ${wanted}`);
  return bytes;
}

/** The output of each task, from a worker's reply. */
export function inferOutputs(reply: Replied, inputs: readonly Json[]): Outputs {
  try {
    const { json, raw } = partsOf(reply.body, reply.header(HEADER_LENGTH)?.trim());
    const text = parsed(json);
    const { elements, flaw } = splitField(text, "outputs");
    if (flaw !== undefined) return { flaw };
    if (elements.length === 0) return { flaw: "holds no outputs" };
    const reader = new RawReader(raw);
    const tensors = elements.map((element) => readOutput(element, reader));
    if (reader.left > 0) return { flaw: `has ${reader.left} bytes behind its last output` };
    const odd = tensors.find(({ shape }) => inputs.length > 1 && shape[0] !== inputs.length);
    if (odd !== undefined) {
      const of = `${quoted(odd.name)} of shape [${odd.shape.join(",")}]`;
      return { flaw: `has an output ${of} for ${inputs.length} rows`, inseparable: true };
    }
    const cut = tensors.map((tensor) =>
      about(`has an output ${quoted(tensor.name)}`, () => cutOutput(tensor, inputs.length)),
    );
    const tail = tailOf(text);
    return {
      outputs: inputs.map((_, row) =>
        detached(`{"outputs":[${cut.map((each) => each[row]).join(",")}]${tail}`),
      ),
    };
  } catch (error) {
    if (error instanceof TensorFlaw) return { flaw: error.message };
    throw error;
  }
}

function parsed(json: Buffer): Json {
  if (!isUtf8(json)) throw new TensorFlaw("is not UTF-8");
  const text = json.toString("utf8");
  try {
    JSON.parse(text);
    return text;
  } catch {
    throw new TensorFlaw("is not JSON");
  }
}

interface OutputTensor {
  readonly name: string;
  readonly datatype: string;
  readonly shape: readonly number[];
  readonly parameters: string;
  /** Bytes, or a flat array. */
  readonly payload: Buffer | Json;
}

function readOutput(text: Json, reader: RawReader): OutputTensor {
  const fields = splitFields(text);
  if (fields === undefined) throw new TensorFlaw("has an output that is no object");
  const name = about("has an output that", () => textField(fields, "name"));
  return about(`has an output ${quoted(name)}`, () => {
    const parameters = objectField(fields, "parameters");
    const size = binarySize(parameters);
    const data = fields.get("data");
    if (size === undefined && data === undefined) throw new TensorFlaw('has no "data"');
    return {
      name,
      datatype: textField(fields, "datatype"),
      shape: shapeField(fields),
      parameters: objectPart("parameters", parameters, (field) => field === "binary_data_size"),
      payload: size === undefined ? flatten(data!) : reader.take(size),
    };
  });
}

/** The rows of an output as JSON objects; a batch of one may have any shape, also none. */
function cutOutput(
  { name, datatype, shape, parameters, payload }: OutputTensor,
  rows: number,
): readonly Json[] {
  const all = rows === 1 ? [1, ...shape] : shape;
  const own = rows === 1 ? shape : [1, ...shape.slice(1)];
  const head = `{"name":${JSON.stringify(name)},"datatype":${JSON.stringify(datatype)},"shape":[${own.join(",")}]${parameters}`;
  if (typeof payload !== "string") {
    return rowsOfRaw(payload, datatype, all).map((row) => `${head},"raw":"${row.toString("base64")}"}`);
  }
  const [count, wanted] = [countFlat(payload), elementsOf(shape)];
  if (count !== wanted) throw new TensorFlaw(`holds ${count} values, but its shape says ${wanted}`);
  const cut = rows === 1 ? [payload] : rowsOfFlat(payload, rows);
  return cut.map((row) => `${head},"data":${row}}`);
}

/** What is said beside the outputs, up to the end of the object. */
function tailOf(text: Json): string {
  const fields = splitFields(text);
  const version = fields?.get("model_version");
  const parameters = fields === undefined ? undefined : objectField(fields, "parameters");
  const named = version?.startsWith('"') === true ? `,"model_version":${version}` : "";
  return `${named}${objectPart("parameters", parameters)}}`;
}
