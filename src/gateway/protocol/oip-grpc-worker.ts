/**
 * The Open Inference Protocol over gRPC, towards workers: a batch of tasks becomes one ModelInfer, and its reply
 * their outputs. The form of a task stands in `oip-form.ts`, that of an output in `oip-outputs.ts`.
 *
 * A worker is asked as its client asked, with raw or with typed contents; what came as JSON becomes raw. What the binary
 * extension of HTTP says (`binary_data`, `binary_data_output`) means nothing here and stays behind.
 */
import { splitArray, splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import type { Fields } from "./fields.ts";
import { about, objectField, quoted, textField } from "./oip-fields.ts";
import { callShape, type Form, type FormTensor, putRow, readForm, readInput, rowBytes } from "./oip-form.ts";
import { type Encoded, type Flawed, flawless } from "./oip-grpc-flaw.ts";
import { rawOfContents } from "./oip-contents.ts";
import { type CutReply, cutReply } from "./oip-outputs.ts";
import {
  NO_PARAMETERS,
  type Parameters,
  readInferResponse,
  type RequestedOutput,
  writeInferRequest,
} from "./oip-proto.ts";
import { rawFromJson, rowsOf, rowsOfRaw, TensorFlaw } from "./oip-tensors.ts";

export interface WorkerBatch {
  readonly id: string;
  readonly parameters: Json;
  readonly inputs: readonly Json[];
}

export interface WorkerCall extends Encoded {
  /** The client asked for a version. */
  readonly named: boolean;
}

/** A ModelInferRequest for all rows; `version` where the client asked for none. */
export function callOf(batch: WorkerBatch, model: string, version: string): WorkerCall | Flawed {
  return flawless(() => {
    const { inputs, id } = batch;
    const form = readForm(batch.parameters, inputs.length);
    const rows = inputs.map((input) => readInput(input, form));
    const tensors = form.tensors.map((tensor, at) => {
      const { name, datatype, parameters = NO_PARAMETERS } = tensor;
      const shape = callShape(tensor, form, rows.length);
      const texts = rows.map((row) => row[at]!);
      const raw = about(`input ${quoted(name)}`, () => gather(tensor, texts, form));
      return { name, datatype, shape, parameters, raw };
    });
    const writer = writeInferRequest({
      model,
      version: form.version ?? version,
      id,
      parameters: spoken(form.parameters),
      tensors,
      outputs: requested(form.outputs),
      typed: form.typed,
    });
    return { parts: writer.parts(), named: form.version !== undefined };
  });
}

function gather(tensor: FormTensor, texts: readonly string[], { binary, whole }: Form): Buffer {
  const { datatype, shape } = tensor;
  if (!whole) rowsOf([texts.length, ...shape]);
  if (!binary) {
    const one = [1, ...shape];
    return Buffer.concat(texts.map((text) => rowsOfRaw(rawFromJson(text, datatype), datatype, one)[0]!));
  }
  const sizes = texts.map((text) => rowBytes(text, tensor));
  const all = Buffer.allocUnsafe(sizes.reduce((sum, size) => sum + size, 0));
  let at = 0;
  for (const [row, text] of texts.entries()) at = putRow(all, at, text, sizes[row]!);
  return all;
}

function requested(outputs: Json | undefined): readonly RequestedOutput[] {
  const texts = outputs === undefined ? [] : (splitArray(outputs).elements ?? []);
  return about("an output", () =>
    texts.map((text) => {
      const fields = splitFields(text) ?? new Map<string, Json>();
      return { name: textField(fields, "name"), parameters: spoken(objectField(fields, "parameters")) };
    }),
  );
}

/** Without what is about bodies of HTTP. */
function spoken(parameters: Fields | undefined): Parameters {
  if (parameters === undefined) return NO_PARAMETERS;
  return new Map([...parameters].filter(([name]) => name !== "binary_data" && name !== "binary_data_output"));
}

export type WorkerOutputs = CutReply | (Flawed & { readonly outputs?: never; readonly inseparable?: never });

/** The output of each of `rows` tasks, from a ModelInferResponse. */
export function outputsOf(bytes: Buffer, rows: number): WorkerOutputs {
  return flawless(() => {
    const { tensors, raw, version, parameters } = readInferResponse(bytes);
    const typed = raw.length === 0;
    if (!typed && raw.length !== tensors.length) {
      throw new TensorFlaw(`holds ${raw.length} raw contents for ${tensors.length} outputs`);
    }
    const read = tensors.map((tensor, at) => ({
      ...tensor,
      payload:
        raw[at] ??
        about(`has an output ${quoted(tensor.name)}`, () => rawOfContents(tensor.contents, tensor.datatype)),
    }));
    return cutReply(read, rows, { version: version === "" ? undefined : version, parameters, typed });
  });
}
