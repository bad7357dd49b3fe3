/**
 * The Open Inference Protocol over gRPC: ModelInfer from and to tasks, for clients and workers; the task format is in
 * `oip-task.ts`.
 *
 * Each row is a task; for a model with one task per batch the whole request is one. Clients get raw or typed contents
 * as the worker answered, but always raw if they sent raw. Workers are asked as the client asked; JSON becomes raw. The
 * parameters of HTTP's binary extension are dropped, as are `priority` and `timeout`, which Ferry handles. Sequences
 * and shared memory cannot be batched and are refused.
 */
import { splitArray, splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import type { Fields } from "./fields.ts";
import { type Cut, type Pad, padRaws, rowShape } from "./oip-pad.ts";
import {
  callShape,
  checkRow,
  checkRows,
  type CutReply,
  cutReply,
  filtered,
  type Form,
  type FormTensor,
  joinBytes,
  joinRows,
  objectField,
  objectPart,
  readBatch,
  readRow,
  tasksOf,
  textField,
} from "./oip-task.ts";
import {
  hasContents,
  type InferRecord,
  NO_PARAMETERS,
  type Parameters,
  rawOfContents,
  readInferRequest,
  readInferResponse,
  type RequestedOutput,
  writeInferRequest,
  writeInferResponse,
} from "./oip-proto.ts";
import { about, quoted, rawFromJson, rowsOf, rowsOfRaw, TensorFlaw } from "./oip-tensors.ts";
import { ProtoFlaw } from "./protobuf.ts";

interface Flawed {
  readonly flaw: string;
}

interface Encoded {
  readonly parts: readonly Buffer[];
  readonly flaw?: never;
}

/** What the response needs from its request. */
interface InferCall {
  readonly model: string;
  /** Echoed. */
  readonly id: string;
  readonly typed: boolean;
  /** The name of the output, if exactly one is requested. */
  readonly only?: string | undefined;
}

export interface InferDrafts extends InferCall {
  readonly parameters: Json;
  readonly inputs: readonly Json[];
  readonly flaw?: never;
}

const SEQUENCES = new Set(["sequence_id", "sequence_start", "sequence_end"]);

/** `alone`: that model takes one task at a time; `pad`: how its rows are padded. `maxRows`: per request. */
export function draftsOf(
  bytes: Buffer,
  rulesOf: (model: string) => { readonly alone?: boolean; readonly pad?: Pad | undefined } = () => ({}),
  maxRows = Infinity,
): InferDrafts | Flawed {
  return flawless(() => {
    const { model, id, version, tensors, outputs, parameters, raw } = readInferRequest(bytes);
    if (tensors.length === 0) throw new TensorFlaw("the request has no inputs");
    for (const name of parameters.keys()) {
      if (SEQUENCES.has(name))
        throw new TensorFlaw(`the parameter ${name} is of a sequence, which is not batched`);
    }
    const typed = raw.length === 0;
    const { alone: whole = false, pad } = rulesOf(model);
    if (!whole) checkRows(tensors.length, rowsIn(tensors), maxRows);
    if (!typed && raw.length !== tensors.length)
      throw new TensorFlaw(`there are ${raw.length} raw contents for ${tensors.length} inputs`);
    const asked = outputs.map(
      ({ name, parameters: own }) => `{"name":${JSON.stringify(name)}${objectPart("parameters", own)}}`,
    );
    const tasks = tasksOf({
      binary: true,
      typed,
      whole,
      version: version === "" ? undefined : version,
      tensors: tensors.map((tensor, at) => ({ ...tensor, payload: payloadOf(tensor, raw[at]) })),
      outputs: asked.length === 0 ? undefined : `[${asked.join(",")}]`,
      parameters,
      pad,
    });
    return { model, id, typed, ...tasks, only: outputs.length === 1 ? outputs[0]!.name : undefined };
  });
}

function payloadOf(
  { name, datatype, parameters, contents }: InferRecord["tensors"][0],
  raw?: Buffer,
): Buffer {
  return about(`input ${quoted(name)}`, () => {
    if (parameters.has("shared_memory_region"))
      throw new TensorFlaw("lies in shared memory, which Ferry cannot read; send its contents");
    if (raw !== undefined && contents.length > 0)
      throw new TensorFlaw("has typed contents beside the raw ones; send either");
    return raw ?? rawOfContents(contents, datatype);
  });
}

function rowsIn(tensors: InferRecord["tensors"]): number {
  const sizes = tensors.map(({ name, shape }) => about(`input ${quoted(name)}`, () => rowsOf(shape)));
  const [rows] = sizes as [number];
  const other = sizes.findIndex((size) => size !== rows);
  if (other >= 0) {
    const which = `${quoted(tensors[0]!.name)} and ${quoted(tensors[other]!.name)}`;
    throw new TensorFlaw(
      `the inputs ${which} disagree in dimension 0, which is the batch's: ${rows} and ${sizes[other]}`,
    );
  }
  if (rows === 0) throw new TensorFlaw("the inputs have no rows: their dimension 0 is 0");
  return rows;
}

export function answerOf(call: InferCall, outputs: readonly Json[]): Encoded | Flawed {
  return flawless(() =>
    about("the model's answer", () => {
      const rows = outputs.map((output) => readRow(output, call.only));
      const tensors = joinRows(rows, (parts, shape) => {
        const { name, datatype, parameters = NO_PARAMETERS } = parts[0]!;
        const raws = parts.map(({ data, raw }) => (data === undefined ? raw : rawFromJson(data, datatype)));
        return { name, datatype, shape, parameters, raw: joinBytes("", raws) };
      });
      // Typed contents are possible if the worker used them, or JSON.
      const isTyped = rows.every((row) => row.typed || row.outputs.some(({ data }) => data !== undefined));
      const typed = call.typed && isTyped && tensors.every(({ datatype }) => hasContents(datatype));
      const { version = "", parameters = NO_PARAMETERS } = rows[0]!;
      const { model, id } = call;
      return { parts: writeInferResponse({ model, id, version, parameters, tensors, typed }).parts() };
    }),
  );
}

interface WorkerBatch {
  readonly id: string;
  readonly parameters: Json;
  readonly inputs: readonly Json[];
}

interface WorkerCall extends Encoded {
  readonly named: boolean;
}

/** A ModelInferRequest for all rows; `version` is the default if the client asked for none. */
export function callOf(
  { id, inputs, parameters }: WorkerBatch,
  model: string,
  version: string,
): WorkerCall | Flawed {
  return flawless(() => {
    const { form, rows } = readBatch(inputs, parameters);
    const tensors = form.tensors.map((tensor, at) => {
      const { name, datatype, parameters = NO_PARAMETERS } = tensor;
      const texts = rows.map((row) => row[at]!);
      const raw = about(`input ${quoted(name)}`, () => gather(tensor, texts, form));
      return { name, datatype, shape: callShape(tensor, form, rows.length), parameters, raw };
    });
    const writer = writeInferRequest({
      model,
      version: form.version ?? version,
      id,
      parameters: withoutHttp(form.parameters),
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
  if (binary) {
    texts.forEach((text, row) => checkRow(text, tensor, row));
    return joinBytes("", padRaws(tensor, texts));
  }
  const raws = texts.map((text, row) => {
    const one = [1, ...rowShape(tensor, row)];
    return rowsOfRaw(rawFromJson(text, datatype), datatype, one)[0]!;
  });
  return joinBytes("", padRaws(tensor, raws));
}

function requested(outputs: Json | undefined): readonly RequestedOutput[] {
  const texts = outputs === undefined ? [] : (splitArray(outputs).elements ?? []);
  return about("an output", () =>
    texts.map((text) => {
      const fields = splitFields(text) ?? new Map<string, Json>();
      return { name: textField(fields, "name"), parameters: withoutHttp(objectField(fields, "parameters")) };
    }),
  );
}

function withoutHttp(parameters: Fields | undefined): Parameters {
  const isOurs = (name: string): boolean => name !== "binary_data" && name !== "binary_data_output";
  return filtered(parameters, isOurs) ?? NO_PARAMETERS;
}

type WorkerOutputs =
  | CutReply
  | (Flawed & { readonly outputs?: never; readonly inseparable?: never; readonly divide?: never });

export function outputsOf(bytes: Buffer, rows: number, padded?: Cut): WorkerOutputs {
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
    const beside = { version: version === "" ? undefined : version, parameters, typed };
    return cutReply(read, rows, beside, padded);
  });
}

/** Turns expected flaws into values; other errors are bugs and propagate. */
function flawless<T>(read: () => T): T | Flawed {
  try {
    return read();
  } catch (error) {
    if (error instanceof TensorFlaw || error instanceof ProtoFlaw) return { flaw: error.message };
    throw error;
  }
}
