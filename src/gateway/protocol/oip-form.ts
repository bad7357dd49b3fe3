/**
 * A task of the Open Inference Protocol, whoever wrote it and whoever runs it: over HTTP (`oip-client.ts`, `oip-worker.ts`)
 * and over gRPC (`oip-grpc.ts`, `oip-grpc-worker.ts`) it has the same form, so that either worker understands either client.
 *
 * One row of dimension 0 is one task:
 *
 *   parameters  {"binary":true?,"contents":true?,"inputs":[{"datatype","name","parameters"?,"shape"}…],"outputs":[…]?,
 *               "parameters":{…}?,"version":"…"?,"whole":true?}
 *               canonical; shapes without dimension 0, but with it where a request is not cut (`whole`); `contents` where
 *               a client of gRPC sent typed contents
 *   input       one element per tensor: base64 of its bytes where `binary`, else a flat array of its values
 *   output      see `oip-outputs.ts`
 *
 * Only tasks whose parameters are equal share a call, so a batch is the rows one behind the other. Tasks also come by
 * Ferry's own API: nothing is taken for granted.
 */
import { splitArray, splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import type { Fields } from "./fields.ts";
import { objectField, objectPart, shapeField, textField } from "./oip-fields.ts";
import { elementBytes, elementsOf, rowsOfRaw, TensorFlaw } from "./oip-tensors.ts";

export interface FormTensor {
  readonly name: string;
  readonly datatype: string;
  /** With the number of rows where the form is `whole`, else without. */
  readonly shape: readonly number[];
  readonly parameters: Fields | undefined;
}

export interface Form {
  readonly binary: boolean;
  readonly typed: boolean;
  readonly whole: boolean;
  readonly version: string | undefined;
  readonly tensors: readonly FormTensor[];
  /** Canonical. */
  readonly outputs: Json | undefined;
  readonly parameters: Fields | undefined;
}

/** When a request should run, not what; Ferry's business. */
const NOT_THE_MODELS = new Set(["priority", "timeout"]);
const NOT_TENSORS =
  "this model's workers speak the Open Inference Protocol; ask for it by POST /v2/models/NAME/infer, or by ModelInfer of gRPC";

/** Keys in order, as canonical JSON has them. */
export function formText({ binary, typed, whole, version, tensors, outputs, parameters }: Form): Json {
  const inputs = tensors.map(
    ({ name, datatype, shape, parameters: own }) =>
      `{"datatype":${JSON.stringify(datatype)},"name":${JSON.stringify(name)}` +
      `${objectPart("parameters", own, (field) => field === "binary_data_size")},"shape":[${shape.join(",")}]}`,
  );
  return (
    `{${binary ? '"binary":true,' : ""}${typed ? '"contents":true,' : ""}"inputs":[${inputs.join(",")}]` +
    (outputs === undefined ? "" : `,"outputs":${outputs}`) +
    objectPart("parameters", parameters, (field) => NOT_THE_MODELS.has(field)) +
    (version === undefined ? "" : `,"version":${JSON.stringify(version)}`) +
    (whole ? ',"whole":true}' : "}")
  );
}

/** Of `tasks` that share a call. Throws a TensorFlaw. */
export function readForm(parameters: Json, tasks: number): Form {
  const form = parameters === "" ? undefined : formIn(parameters);
  if (form === undefined) throw new TensorFlaw(NOT_TENSORS);
  if (!form.whole || tasks === 1) return form;
  throw new TensorFlaw(
    `these are ${tasks} requests that were not cut into rows; they can only go one by one`,
  );
}

function formIn(parameters: Json): Form | undefined {
  const fields = splitFields(parameters);
  const elements = splitArray(fields?.get("inputs") ?? "").elements ?? [];
  if (fields === undefined || elements.length === 0) return undefined;
  try {
    return {
      binary: fields.get("binary") === "true",
      typed: fields.get("contents") === "true",
      whole: fields.get("whole") === "true",
      version: fields.get("version")?.startsWith('"') === true ? textField(fields, "version") : undefined,
      tensors: elements.map(readTensor),
      outputs: fields.get("outputs"),
      parameters: objectField(fields, "parameters"),
    };
  } catch (error) {
    if (error instanceof TensorFlaw) return undefined;
    throw error;
  }
}

function readTensor(text: Json): FormTensor {
  const fields = splitFields(text) ?? new Map<string, Json>();
  return {
    name: textField(fields, "name"),
    datatype: textField(fields, "datatype"),
    shape: shapeField(fields),
    parameters: withoutSize(objectField(fields, "parameters")),
  };
}

/** How many bytes a tensor has a call says itself. */
function withoutSize(parameters: Fields | undefined): Fields | undefined {
  return parameters && new Map([...parameters].filter(([name]) => name !== "binary_data_size"));
}

/** Of one task, each tensor's row: base64 without quotes, or a flat array. Throws a TensorFlaw. */
export function readInput(text: Json, { tensors, binary }: Form): readonly string[] {
  const { elements } = splitArray(text);
  const mark = binary ? '"' : "[";
  if (elements?.length !== tensors.length || !elements.every((element) => element.startsWith(mark))) {
    throw new TensorFlaw(NOT_TENSORS);
  }
  return binary ? elements.map((element) => element.slice(1, -1)) : elements;
}

/**
 * The elements of a task's BYTES tensors as texts, where its tensors travel as bytes; undefined where they do not, or
 * it is no task of tensors.
 */
export function bytesTexts(input: Json, parameters: Json): Iterable<string> | undefined {
  if (!parameters.includes('"binary"')) return undefined;
  try {
    const form = readForm(parameters, 1);
    if (!form.binary) return undefined;
    const rows = readInput(input, form);
    return textsIn(rows.filter((_, at) => form.tensors[at]!.datatype === "BYTES"));
  } catch (error) {
    if (error instanceof TensorFlaw) return undefined;
    throw error;
  }
}

/** One at a time: a row may hold a great many. What is cut off at its end is refused where a call is made of it. */
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

/** Of a call with so many rows. */
export function callShape({ shape }: FormTensor, { whole }: Form, rows: number): readonly number[] {
  return whole ? shape : [rows, ...shape];
}

/**
 * How many bytes a row has, if they are as many as its shape says. One that is too long would push its neighbours' values
 * into somebody else's answer. Throws a TensorFlaw.
 */
export function rowBytes(base64: string, { datatype, shape }: FormTensor): number {
  const bytes = Buffer.byteLength(base64, "base64");
  const wanted = elementsOf(shape) * elementBytes(datatype);
  if (datatype === "BYTES") rowsOfRaw(Buffer.from(base64, "base64"), datatype, [1, ...shape]);
  else if (bytes !== wanted)
    throw new TensorFlaw(`has a row of ${bytes} bytes, but its shape says ${wanted}`);
  return bytes;
}

/** Decodes a row of so many bytes to where it belongs; where the next one belongs. Throws a TensorFlaw. */
export function putRow(into: Buffer, at: number, base64: string, bytes: number): number {
  if (into.write(base64, at, bytes, "base64") !== bytes) throw new TensorFlaw("has a row that is not base64");
  return at + bytes;
}
