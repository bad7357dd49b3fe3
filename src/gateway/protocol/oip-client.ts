/**
 * The Open Inference Protocol over HTTP towards clients: a request becomes tasks, and their outputs its answer. The
 * form of a task stands in `oip-form.ts`.
 *
 * A request that cannot be cut into rows passes the batches by: sequences, shared memory, what only one make of server
 * understands (`triton_…`), a raw body without JSON, inputs that disagree in dimension 0, fields that nobody knows.
 *
 * Tensors that come as bytes stay bytes: they are sliced, never read. Each output leaves as its client asked, binary or
 * as numbers; workers are asked the same, so that there is nothing to convert unless they do it differently.
 */
import { canonical } from "../../core/json.ts";
import { splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { type Fields, inputsIn, invalid, readFields, stringField } from "./fields.ts";
import { type Asking, answerOf } from "./oip-answer.ts";
import { binarySize, HEADER_LENGTH, partsOf, RawReader } from "./oip-body.ts";
import { about, objectField, ofKind, quoted, shapeField, textField } from "./oip-fields.ts";
import { formText } from "./oip-form.ts";
import {
  checkCells,
  countFlat,
  elementBytes,
  elementsOf as elementsOfShape,
  flatten,
  MAX_TENSORS,
  rawFromJson,
  rowsOf,
  rowsOfFlat,
  rowsOfRaw,
  TensorFlaw,
} from "./oip-tensors.ts";
import type { Asked, Drafts, RequestLimits, Unbatched } from "./protocol.ts";

const KNOWN = new Set(["id", "parameters", "inputs", "outputs"]);
const KNOWN_OF_INPUT = new Set(["name", "shape", "datatype", "parameters", "data"]);

/** A request that has to pass the batches by. */
class Bypass extends Error {}

/** Throws a Refusal. */
export function readInfer(asked: Asked): Drafts | Unbatched {
  const { names, body, alone, limits } = asked;
  const { model, version } = names;
  try {
    const length = asked.header(HEADER_LENGTH);
    if (length?.trim() === "0")
      throw new Bypass("a raw body without JSON is not batched; describe it in JSON");
    const { json, raw } = partsOf(body, length?.trim());
    const request = readRequest(readFields(json), raw);
    const whole = alone === true;
    const { tensors, binary, outputs, parameters } = request;
    const { inputs, shapes } = whole ? wholeOf(request) : rowsOfRequest(request, limits);
    const described = tensors.map((tensor, at) => ({ ...tensor, shape: shapes[at]! }));
    return {
      model,
      inputs,
      parameters: formText({ binary, typed: false, whole, version, tensors: described, outputs, parameters }),
      render: (outputs, name) => answerOf(outputs, name, request.asking),
    };
  } catch (error) {
    if (error instanceof Bypass) return { unbatched: true, model, why: error.message };
    if (error instanceof TensorFlaw) throw invalid(error.message);
    throw error;
  }
}

interface Tensor {
  readonly name: string;
  readonly datatype: string;
  readonly shape: readonly number[];
  readonly parameters: Fields | undefined;
  /** Bytes, or a flat array. */
  readonly payload: Buffer | Json;
}

interface Request {
  readonly tensors: readonly Tensor[];
  readonly binary: boolean;
  readonly parameters: Fields | undefined;
  /** Canonical. */
  readonly outputs: Json | undefined;
  readonly asking: Asking;
}

function readRequest(fields: Fields, raw: Buffer | undefined): Request {
  for (const name of fields.keys()) {
    if (!KNOWN.has(name))
      throw new Bypass(`leave out ${JSON.stringify(name.slice(0, 64))}, which is not batched`);
  }
  const parameters = about("the request", () => objectField(fields, "parameters"));
  refuseSpecial(parameters);
  const texts = inputsIn(fields.get("inputs") ?? "", "inputs", MAX_TENSORS);
  if (texts === undefined || texts.length === 0)
    throw invalid('"inputs" must be an array of at least one tensor');
  const reader = new RawReader(raw);
  const tensors = texts.map((text) => readTensor(text, reader));
  if (reader.left > 0) throw invalid(`${reader.left} bytes stand behind the last tensor`);
  const binary = tensors.some(({ payload }) => typeof payload !== "string");
  const { outputs, binaryNames, only } = readOutputs(fields.get("outputs"));
  return {
    tensors: binary ? tensors.map(asRaw) : tensors,
    binary,
    parameters,
    outputs,
    asking: {
      id: stringField(fields, "id"),
      binary: parameters?.get("binary_data_output") === "true",
      named: binaryNames,
      only,
    },
  };
}

function readTensor(text: Json, reader: RawReader): Tensor {
  const fields = splitFields(text);
  if (fields === undefined) throw invalid('"inputs" must hold objects');
  const name = about("an input", () => textField(fields, "name"));
  return about(`input ${quoted(name)}`, () => {
    for (const field of fields.keys()) {
      if (!KNOWN_OF_INPUT.has(field))
        throw new Bypass(`leave out ${JSON.stringify(field.slice(0, 64))} of the inputs`);
    }
    const datatype = textField(fields, "datatype");
    elementBytes(datatype);
    const shape = shapeField(fields);
    const parameters = objectField(fields, "parameters");
    refuseSpecial(parameters);
    const size = binarySize(parameters);
    const data = fields.get("data");
    if (size === undefined && data === undefined)
      throw new TensorFlaw('has neither "data" nor a binary_data_size');
    if (size !== undefined && data !== undefined) throw new TensorFlaw('has "data" and a binary_data_size');
    const payload = size === undefined ? ofKind(flatten(data!), datatype) : reader.take(size);
    return { name, datatype, shape, parameters, payload };
  });
}

/** Beside a tensor of bytes all are. */
function asRaw(tensor: Tensor): Tensor {
  const { payload, datatype } = tensor;
  if (typeof payload !== "string") return tensor;
  return { ...tensor, payload: about(`input ${quoted(tensor.name)}`, () => rawFromJson(payload, datatype)) };
}

function refuseSpecial(parameters: Fields | undefined): void {
  for (const name of parameters?.keys() ?? []) {
    if (/^(sequence_|shared_memory_|triton_)/.test(name)) {
      throw new Bypass(`leave out the parameter ${name.slice(0, 64)}, which concerns one request alone`);
    }
  }
}

interface AskedOutputs {
  readonly outputs: Json | undefined;
  readonly binaryNames: Asking["named"];
  readonly only?: string | undefined;
}

function readOutputs(text: Json | undefined): AskedOutputs {
  const binaryNames = new Map<string, boolean>();
  let only: string | undefined;
  if (text === undefined || text === "null") return { outputs: undefined, binaryNames };
  const texts = inputsIn(text, "outputs", MAX_TENSORS);
  if (texts === undefined) throw invalid('"outputs" must be an array');
  for (const each of texts) {
    const fields = splitFields(each);
    if (fields === undefined) throw invalid('"outputs" must hold objects');
    const name = about("an output", () => textField(fields, "name"));
    only = texts.length === 1 ? name : undefined;
    const parameters = about(`output ${quoted(name)}`, () => objectField(fields, "parameters"));
    refuseSpecial(parameters);
    const binary = parameters?.get("binary_data");
    if (binary !== undefined) binaryNames.set(name, binary === "true");
  }
  return { outputs: texts.length === 0 ? undefined : canonical(text), binaryNames, only };
}

interface Cut {
  readonly inputs: readonly Json[];
  /** As they stand in the parameters. */
  readonly shapes: readonly (readonly number[])[];
}

function rowsOfRequest({ tensors }: Request, { maxInputs }: RequestLimits): Cut {
  const sizes = tensors.map(({ shape }) => shape[0]);
  const [rows] = sizes;
  if (rows === undefined || rows === 0 || sizes.some((size) => size !== rows)) {
    throw new Bypass("dimension 0 of every input must be that of the batch, and the same");
  }
  if (rows > maxInputs)
    throw new TensorFlaw(`there are ${rows} rows; send at most ${maxInputs} in one request`);
  about("the request", () => checkCells(tensors.length, rows));
  const cut = tensors.map((tensor) => about(`input ${quoted(tensor.name)}`, () => cutTensor(tensor)));
  const inputs = Array.from({ length: rows }, (_, row) => `[${cut.map((each) => each[row]).join(",")}]`);
  return { inputs, shapes: tensors.map(({ shape }) => shape.slice(1)) };
}

function cutTensor({ payload, datatype, shape }: Tensor): readonly Json[] {
  const rows = rowsOf(shape);
  if (typeof payload !== "string") return rowsOfRaw(payload, datatype, shape).map(base64Text);
  checkCount(payload, shape);
  return rows === 1 ? [payload] : rowsOfFlat(payload, rows);
}

function wholeOf({ tensors }: Request): Cut {
  const texts = tensors.map(({ name, payload, datatype, shape }) =>
    about(`input ${quoted(name)}`, () => {
      if (typeof payload === "string") return checkCount(payload, shape);
      return base64Text(rowsOfRaw(payload, datatype, [1, ...shape])[0]!);
    }),
  );
  return { inputs: [`[${texts.join(",")}]`], shapes: tensors.map(({ shape }) => shape) };
}

function checkCount(flat: Json, shape: readonly number[]): Json {
  const [count, wanted] = [countFlat(flat), elementsOfShape(shape)];
  if (count === wanted) return flat;
  throw new TensorFlaw(`holds ${count} values, but its shape says ${wanted}`);
}

function base64Text(bytes: Buffer): Json {
  return `"${bytes.toString("base64")}"`;
}
