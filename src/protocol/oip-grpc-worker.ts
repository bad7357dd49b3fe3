/**
 * The Open Inference Protocol over gRPC, towards workers: a batch of tasks becomes one ModelInfer, and its reply
 * their outputs. The form of a task stands in `oip-grpc.ts`.
 *
 * Outputs are cut into rows only where dimension 0 of each is the number of rows that were sent; a batch of one is
 * passed on in whatever shape. Each row is measured against its shape before it joins others: one that is too long
 * would push its neighbours' values into somebody else's answer. Parameters and inputs may have been written by a
 * client of another protocol, so nothing is taken for granted.
 */
import { splitArray, splitField } from "../core/json-split.ts";
import type { Json } from "../core/task.ts";
import { rawOfContents } from "./oip-contents.ts";
import {
  type Encoded,
  type Flawed,
  flawless,
  isShape,
  named,
  parametersIn,
  parametersPart,
  quoted,
} from "./oip-grpc-form.ts";
import {
  type Parameters,
  readInferResponse,
  type RequestedOutput,
  type TensorRecord,
  writeInferRequest,
  type WrittenTensor,
} from "./oip-proto.ts";
import { elementBytes, elementsOf, rawFromJson, rowsOf, rowsOfRaw, TensorFlaw } from "./oip-tensors.ts";

export interface WorkerBatch {
  readonly id: string;
  readonly parameters: Json;
  readonly inputs: readonly Json[];
}

const NOT_ASKED_FOR_TENSORS =
  "this model's workers speak the Open Inference Protocol; ask for it by ModelInfer of gRPC, or under /v2/models";

/** A ModelInferRequest for all rows; `version` where the client asked for none. */
export function callOf(batch: WorkerBatch, model: string, version: string): Encoded | Flawed {
  return flawless(() => {
    const { parameters: text, inputs, id } = batch;
    const form = readForm(text);
    const rows = inputs.map((input) => readInput(input, form));
    const tensors = form.inputs.map((tensor, at) => {
      const raw = named("input", tensor.name, () => gather(tensor, rows, at, form.binary));
      return { ...tensor, shape: [rows.length, ...tensor.shape], raw };
    });
    const { parameters, outputs, typed } = form;
    const writer = writeInferRequest({
      model,
      version: form.version || version,
      id,
      parameters,
      tensors,
      outputs,
      typed,
    });
    return { parts: writer.parts() };
  });
}

interface Form {
  readonly binary: boolean;
  readonly typed: boolean;
  readonly version: string;
  readonly parameters: Parameters;
  readonly inputs: readonly Omit<WrittenTensor, "raw">[];
  readonly outputs: readonly RequestedOutput[];
}

/** Of the parameters, which a client of another protocol may have written. */
function readForm(text: Json): Form {
  const inputs = text === "" ? undefined : splitField(text, "inputs").elements;
  if (inputs === undefined || inputs.length === 0) throw new TensorFlaw(NOT_ASKED_FOR_TENSORS);
  const { binary, contents, version, outputs } = JSON.parse(text) as Record<string, unknown>;
  const asked = outputs === undefined ? [] : (splitField(text, "outputs").elements ?? []);
  return {
    binary: binary === true,
    typed: contents === true,
    version: typeof version === "string" ? version : "",
    parameters: parametersIn(text),
    inputs: inputs.map(readFormInput),
    outputs: asked.map((each) => ({ name: readName(each), parameters: parametersIn(each) })),
  };
}

function readFormInput(text: Json): Form["inputs"][number] {
  const name = readName(text);
  const { datatype, shape } = JSON.parse(text) as Record<string, unknown>;
  if (typeof datatype !== "string" || !isShape(shape)) throw new TensorFlaw(NOT_ASKED_FOR_TENSORS);
  return { name, datatype, shape, parameters: parametersIn(text) };
}

function readName(text: Json): string {
  const value = JSON.parse(text) as { name?: unknown } | null;
  if (typeof value?.name !== "string") throw new TensorFlaw(NOT_ASKED_FOR_TENSORS);
  return value.name;
}

/** The row of each tensor, as base64 or as a flat array. */
function readInput(text: Json, { inputs, binary }: Form): readonly string[] {
  const { elements } = splitArray(text);
  if (elements?.length !== inputs.length) throw new TensorFlaw(NOT_ASKED_FOR_TENSORS);
  const mark = binary ? '"' : "[";
  if (!elements.every((element) => element.startsWith(mark))) throw new TensorFlaw(NOT_ASKED_FOR_TENSORS);
  return binary ? elements.map((element) => element.slice(1, -1)) : elements;
}

function gather(
  { datatype, shape }: Form["inputs"][number],
  rows: readonly (readonly string[])[],
  at: number,
  binary: boolean,
): Buffer {
  rowsOf([rows.length, ...shape]);
  const one = [1, ...shape];
  const rowBytes = elementsOf(shape) * elementBytes(datatype);
  if (!binary || datatype === "BYTES") {
    const raws = rows.map((row) => {
      const raw = binary ? Buffer.from(row[at]!, "base64") : rawFromJson(row[at]!, datatype);
      return rowsOfRaw(raw, datatype, one)[0]!;
    });
    return Buffer.concat(raws);
  }
  for (const row of rows) {
    const bytes = Buffer.byteLength(row[at]!, "base64");
    if (bytes !== rowBytes)
      throw new TensorFlaw(`has a row of ${bytes} bytes, but its shape says ${rowBytes}`);
  }
  const all = Buffer.allocUnsafe(rows.length * rowBytes);
  rows.forEach((row, index) => {
    const written = all.write(row[at]!, index * rowBytes, rowBytes, "base64");
    if (written !== rowBytes) throw new TensorFlaw("has a row that is not base64");
  });
  return all;
}

export type WorkerOutputs =
  | { readonly outputs: readonly Json[]; readonly flaw?: never }
  /** Dimension 0 of an output is not the number of rows: `count` where it says another. */
  | { readonly flaw: string; readonly count?: number };

/** The output of each of `rows` tasks, from a ModelInferResponse. */
export function outputsOf(bytes: Buffer, rows: number): WorkerOutputs {
  let count: number | undefined;
  const read = flawless(() => {
    const record = readInferResponse(bytes);
    const { tensors, raw, version, parameters } = record;
    if (tensors.length === 0) throw new TensorFlaw("holds no outputs");
    const typed = raw.length === 0;
    if (!typed && raw.length !== tensors.length) {
      throw new TensorFlaw(`holds ${raw.length} raw contents for ${tensors.length} outputs`);
    }
    const odd = tensors.find(({ shape }) => rows > 1 && shape[0] !== rows);
    if (odd !== undefined) {
      count = odd.shape[0];
      throw new TensorFlaw(`holds an output ${quoted(odd.name)} whose dimension 0 is not ${rows}`);
    }
    const cut = tensors.map((tensor, at) => cutOutput(tensor, raw[at], rows));
    const tail =
      (typed ? ',"contents":true' : "") +
      (version === "" ? "" : `,"model_version":${JSON.stringify(version)}`) +
      `${parametersPart(parameters)}}`;
    const texts = Array.from(
      { length: rows },
      (_, row) => `{"outputs":[${cut.map((each) => each[row]).join(",")}]${tail}`,
    );
    return { outputs: texts };
  });
  return "flaw" in read && count !== undefined ? { ...read, count } : read;
}

/** The rows of an output as JSON objects. */
function cutOutput(tensor: TensorRecord, raw: Buffer | undefined, rows: number): string[] {
  const { name, datatype, shape, parameters } = tensor;
  return named("holds an output", name, () => {
    const bytes = raw ?? rawOfContents(tensor.contents, datatype);
    const own = rows === 1 ? shape : [1, ...shape.slice(1)];
    // A batch of one may have any shape, also none; it is measured all the same.
    const cut = rows === 1 ? rowsOfRaw(bytes, datatype, [1, ...shape]) : rowsOfRaw(bytes, datatype, shape);
    const head =
      `{"name":${JSON.stringify(name)},"datatype":${JSON.stringify(datatype)},"shape":[${own.join(",")}]` +
      `${parametersPart(parameters)},"raw":"`;
    return cut.map((row) => `${head}${row.toString("base64")}"}`);
  });
}
