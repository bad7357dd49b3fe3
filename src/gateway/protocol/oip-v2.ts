/**
 * The Open Inference Protocol (KServe v2) over HTTP, as spoken by Triton, MLServer and OpenVINO. The task format is in
 * `oip-task.ts`.
 *
 *   POST /v2/models/{model}[/versions/{version}]/infer
 *   {"id"?,"parameters"?,"inputs":[{"name","shape":[B,…],"datatype","data":[…]}…],"outputs"?:[{"name"}…]}
 *   {"model_name","model_version"?,"id"?,"outputs":[{"name","datatype","shape":[B,…],"data":[…]}…]}
 *
 * Each of the B rows is a task. With the binary extension tensors follow the JSON as bytes:
 * `Inference-Header-Content-Length` is the length of the JSON, `binary_data_size` that of each tensor. Bytes are
 * sliced, never parsed. Each output has the form its client asked for; workers are asked for the same, so conversion is
 * rare.
 *
 * Requests that cannot be cut into rows bypass the batches: sequences, shared memory, server-specific parameters
 * (`triton_…`), a raw body without JSON, inputs that disagree in dimension 0, unknown fields.
 *
 * A worker without the binary extension gets JSON only (`plain`). What JSON cannot express (BF16, NaN, BYTES that are
 * not UTF-8) is a flaw of its row.
 */
import { isUtf8 } from "node:buffer";
import { Refusal } from "../../core/errors.ts";
import { canonical } from "../../core/json.ts";
import { outputFlaw, splitArray, splitField, splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import {
  askWorker,
  cutFields,
  type Fields,
  inputsIn,
  invalid,
  plainError,
  readFields,
  stringField,
  withoutEnding,
} from "./fields.ts";
import { isWayOut, nameIn } from "./kserve-v1.ts";
import { type PadMemory, padFlat, padRaws, rowShape, type Spread } from "./oip-pad.ts";
import {
  byteCount,
  callShape,
  checkRow,
  checkRows,
  cutFor,
  cutReply,
  filtered,
  type Form,
  type FormTensor,
  headText,
  joinBytes,
  joinRows,
  objectField,
  objectPart,
  ofKind,
  type PayloadTensor,
  readBatch,
  readBeside,
  readHead,
  readRow,
  type RowOutput,
  tasksOf,
  textField,
} from "./oip-task.ts";
import {
  about,
  countFlat,
  datatypeBytes,
  elementCount,
  flatten,
  joinFlat,
  jsonFromRaw,
  MAX_TENSORS,
  quoted,
  rawFromJson,
  TensorFlaw,
  USE_BINARY,
} from "./oip-tensors.ts";
import type {
  ModelFacts,
  AboutRoute,
  ProtocolAnswer,
  Asked,
  WorkerCall,
  Drafts,
  Outputs,
  Protocol,
  WorkerReply,
  Unbatched,
} from "./protocol.ts";

export const HEADER_LENGTH = "inference-header-content-length";
const BYTES_TYPE = "application/octet-stream";
const BINARY_EXTENSION = "binary_tensor_data";
/** Not every client states a type. */
const TYPES = ["application/json", BYTES_TYPE, "", "application/x-www-form-urlencoded"];
const ENDPOINT = /\/v2\/models\/([^/]+)(\/versions\/[^/]+)?\/infer$/;
const MODEL = ["/v2/models/{model}", "/v2/models/{model}/versions/{version}"];
const KNOWN = new Set(["id", "parameters", "inputs", "outputs"]);
const KNOWN_OF_INPUT = new Set(["name", "shape", "datatype", "parameters", "data"]);

export const oipV2: Protocol = {
  name: "oip-v2",
  client: {
    infer: MODEL.map((path) => ({ path: `${path}/infer`, types: TYPES, read })),
    about: [
      { path: "/v2", tell: serverMetadata },
      { path: "/v2/health/live", open: true, tell: () => truth("live", true) },
      { path: "/v2/health/ready", open: true, tell: (about) => truth("ready", allReady(about)) },
      ...MODEL.flatMap((path): AboutRoute[] => [
        {
          path: `${path}/ready`,
          open: true,
          tell: ({ model, ready }) => model && truth("ready", ready && model.ready),
        },
        { path, tell: askWorker, fallback: modelMetadata },
        // Triton's; for clients that pad or cut by themselves.
        { path: `${path}/config`, tell: askWorker },
        { path: `${path}/stats`, tell: askWorker },
      ]),
    ],
    fail: plainError,
  },
  worker: {
    readsBytes: true,
    extension: { path: "/v2", listed: listsBinary },
    basePath: (path) => withoutEnding(path.replace(ENDPOINT, "")),
    modelOf: (path) => nameIn(ENDPOINT.exec(path)?.[1]),
    call,
    outputs: outputsIn,
  },
};

function listsBinary(metadata: string): boolean {
  const listed = splitArray(cutFields(metadata)?.get("extensions") ?? "").elements ?? [];
  return listed.includes(`"${BINARY_EXTENSION}"`);
}

function serverMetadata({ version }: ModelFacts): ProtocolAnswer {
  return { body: JSON.stringify({ name: "ferry", version, extensions: [BINARY_EXTENSION] }) };
}

/** The protocol answers "no" with a 4xx. */
function truth(name: "live" | "ready", yes: boolean): ProtocolAnswer {
  return { status: yes ? 200 : 400, body: JSON.stringify({ [name]: yes }) };
}

function allReady({ models, ready }: ModelFacts): boolean {
  return ready && models.every((model) => !model.protocols.includes("oip-v2") || model.ready);
}

/** Only a worker knows the tensors. */
function modelMetadata({ model }: ModelFacts): ProtocolAnswer {
  const { name } = model!;
  return { body: JSON.stringify({ name, versions: [], platform: "ferry", inputs: [], outputs: [] }) };
}

class Bypass extends Error {}

function read(asked: Asked): Drafts | Unbatched {
  const { names, body, limits } = asked;
  const { model, version } = names;
  try {
    const length = asked.header(HEADER_LENGTH);
    if (length?.trim() === "0")
      throw new Bypass("a raw body without JSON is not batched; describe it in JSON");
    const { json, raw } = partsOf(body, length?.trim());
    const { asking, ...request } = readRequest(readFields(json), raw);
    const whole = asked.alone === true;
    if (!whole) checkRows(request.tensors.length, rowsIn(request.tensors), limits.maxInputs);
    return {
      model,
      ...tasksOf({ ...request, typed: false, whole, version, pad: asked.pad }),
      render: (outputs, name) => answerOf(outputs, name, asking),
    };
  } catch (error) {
    if (error instanceof Bypass) return { unbatched: true, model, why: error.message };
    if (error instanceof TensorFlaw) throw invalid(error.message);
    throw error;
  }
}

function rowsIn(tensors: readonly PayloadTensor[]): number {
  const rows = tensors[0]!.shape[0];
  if (rows !== undefined && rows !== 0 && tensors.every(({ shape }) => shape[0] === rows)) return rows;
  throw new Bypass("dimension 0 of every input must be that of the batch, and the same");
}

interface Asking {
  /** Echoed. */
  readonly id: string | undefined;
  /** Outputs as bytes, unless `named` says otherwise. */
  readonly binary: boolean;
  readonly named: ReadonlyMap<string, boolean>;
  /** The name of the output, if exactly one is requested. */
  readonly only: string | undefined;
}

interface InferRequest extends Pick<Form, "binary" | "parameters" | "outputs"> {
  readonly tensors: readonly PayloadTensor[];
  readonly asking: Asking;
}

function readRequest(fields: Fields, raw: Buffer | undefined): InferRequest {
  for (const name of fields.keys()) {
    if (!KNOWN.has(name)) throw new Bypass(`leave out ${quoted(name)}, which is not batched`);
  }
  const parameters = about("the request", () => objectField(fields, "parameters"));
  refuseSpecial(parameters);
  const texts = inputsIn(fields.get("inputs") ?? "", "inputs", MAX_TENSORS);
  if (texts === undefined || texts.length === 0)
    throw invalid('"inputs" must be an array of at least one tensor');
  const reader = new RawReader(raw);
  const tensors = texts.map((text) => readInput(text, reader));
  if (reader.left > 0) throw invalid(`${reader.left} bytes stand behind the last tensor`);
  const binary = tensors.some(({ payload }) => typeof payload !== "string");
  const { outputs, ...asked } = readOutputs(fields.get("outputs"));
  return {
    tensors: binary ? tensors.map(asRaw) : tensors,
    binary,
    parameters,
    outputs,
    asking: {
      id: stringField(fields, "id"),
      binary: parameters?.get("binary_data_output") === "true",
      ...asked,
    },
  };
}

function readInput(text: Json, reader: RawReader): PayloadTensor {
  const fields = splitFields(text);
  if (fields === undefined) throw invalid('"inputs" must hold objects');
  const name = about("an input", () => textField(fields, "name"));
  return about(`input ${quoted(name)}`, () => {
    for (const field of fields.keys()) {
      if (!KNOWN_OF_INPUT.has(field)) throw new Bypass(`leave out ${quoted(field)} of the inputs`);
    }
    const head = readHead(fields);
    datatypeBytes(head.datatype);
    refuseSpecial(head.parameters);
    const size = binarySize(head.parameters);
    const data = fields.get("data");
    if (size === undefined && data === undefined)
      throw new TensorFlaw('has neither "data" nor a binary_data_size');
    if (size !== undefined && data !== undefined) throw new TensorFlaw('has "data" and a binary_data_size');
    return {
      ...head,
      payload: size === undefined ? ofKind(flatten(data!), head.datatype) : reader.take(size),
    };
  });
}

/** If one tensor is bytes, all are. */
function asRaw(tensor: PayloadTensor): PayloadTensor {
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

function readOutputs(text: Json = "null"): Pick<Asking, "named" | "only"> & Pick<Form, "outputs"> {
  const named = new Map<string, boolean>();
  let only: string | undefined;
  if (text === "null") return { outputs: undefined, named, only };
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
    if (binary !== undefined) named.set(name, binary === "true");
  }
  return { outputs: texts.length === 0 ? undefined : canonical(text), named, only };
}

/** Splits a body at `length`, from the header, into JSON and bytes. Throws a TensorFlaw. */
function partsOf(
  body: Buffer,
  length: string | undefined,
): { readonly json: Buffer; readonly raw: Buffer | undefined } {
  if (length === undefined) return { json: body, raw: undefined };
  const bytes = /^\d{1,15}$/.test(length) ? Number(length) : NaN;
  if (!(bytes <= body.length)) {
    throw new TensorFlaw(
      `Inference-Header-Content-Length must be a number up to ${body.length}, the body's size`,
    );
  }
  return { json: body.subarray(0, bytes), raw: body.subarray(bytes) };
}

class RawReader {
  #rest: Buffer;

  constructor(bytes: Buffer | undefined) {
    this.#rest = bytes ?? Buffer.alloc(0);
  }

  get left(): number {
    return this.#rest.length;
  }

  take(size: number): Buffer {
    if (size > this.left)
      throw new TensorFlaw(`says binary_data_size ${size}, but only ${this.left} bytes are left`);
    const taken = this.#rest.subarray(0, size);
    this.#rest = this.#rest.subarray(size);
    return taken;
  }
}

function binarySize(parameters: Fields | undefined): number | undefined {
  const text = parameters?.get("binary_data_size");
  if (text === undefined) return undefined;
  if (/^\d{1,15}$/.test(text)) return Number(text);
  throw new TensorFlaw("has a binary_data_size that is no number of bytes");
}

/** Throws a Refusal if the outputs are not tensors, or do not match. */
function answerOf(outputs: readonly Json[], model: string, asking: Asking): ProtocolAnswer {
  const { id, binary, named, only } = asking;
  try {
    const rows = outputs.map((output) => readRow(output, only));
    const raws: (string | Buffer)[] = [];
    let bytes = false;
    const heads = joinRows(rows, (parts, shape) => {
      const { name, datatype, parameters } = parts[0]!;
      const head = headText(name, datatype, shape);
      if (!(named.get(name) ?? binary))
        return `${head}${objectPart("parameters", parameters)},"data":${joinFlat(parts.map(valuesOf))}}`;
      bytes = true;
      const own = parts.map(({ raw, data }) => (data === undefined ? raw : rawFromJson(data, datatype)));
      for (const raw of own) raws.push(raw);
      return head + sizedPart(own, parameters);
    });
    const { version, parameters } = rows[0]!;
    const head =
      `{"model_name":${JSON.stringify(model)}` +
      (version === undefined ? "" : `,"model_version":${JSON.stringify(version)}`) +
      `${id === undefined ? "" : `,"id":${JSON.stringify(id)}`}${objectPart("parameters", parameters)}` +
      `,"outputs":[${heads.join(",")}]}`;
    if (!bytes) return { body: head };
    const headers = [HEADER_LENGTH, String(Buffer.byteLength(head))];
    return { type: BYTES_TYPE, headers, body: joinBytes(head, raws) };
  } catch (error) {
    if (!(error instanceof TensorFlaw)) throw error;
    throw new Refusal("INFERENCE_FAILED", `the model's answer ${error.message}`);
  }
}

function valuesOf({ data, raw, datatype }: RowOutput): Json {
  return data ?? jsonFromRaw(joinBytes("", [raw]), datatype);
}

function sizedPart(raws: readonly (string | Buffer | Spread)[], parameters: Fields | undefined): string {
  const size = raws.reduce((sum, raw) => sum + byteCount(raw), 0);
  const own = objectPart("parameters", parameters);
  const more = own === "" ? "" : `,${own.slice(',"parameters":{'.length, -1)}`;
  return `,"parameters":{"binary_data_size":${size}${more}}}`;
}

type Rows = readonly (readonly string[])[];

function call(inputs: readonly Json[], parameters: Json, model: string, plain = false): WorkerCall {
  try {
    const { form, rows } = readBatch(inputs, parameters);
    const path = form.version === undefined ? {} : { path: pathOf(model, form.version), named: true };
    if (plain) return { ...path, ...plainCall(form, rows) };
    return { ...path, ...(form.binary ? binaryCall(form, rows) : jsonCall(form, rows)) };
  } catch (error) {
    if (error instanceof TensorFlaw) return { body: "", flaw: error.message };
    throw error;
  }
}

function pathOf(model: string, version: string): string {
  if (isWayOut(version)) throw new TensorFlaw("the version must be a name or a number");
  return `/v2/models/${encodeURIComponent(model)}/versions/${encodeURIComponent(version)}/infer`;
}

function inputsText(form: Form, rows: Rows, rest: (tensor: FormTensor, at: number) => string): Json {
  const inputs = form.tensors.map((tensor, at) => {
    const head = headText(tensor.name, tensor.datatype, callShape(tensor, form, rows.length));
    return head + about(`input ${quoted(tensor.name)}`, () => rest(tensor, at));
  });
  return `{"inputs":[${inputs.join(",")}]`;
}

function restText({ outputs, parameters }: Form): Json {
  return `${outputs === undefined ? "" : `,"outputs":${outputs}`}${objectPart("parameters", parameters)}}`;
}

function jsonCall(form: Form, rows: Rows): WorkerCall {
  const inputs = inputsText(form, rows, (tensor, at) => {
    const texts = rows.map((row, index) => checked(row[at]!, tensor, index));
    return `${objectPart("parameters", tensor.parameters)},"data":${padFlat(tensor, texts)}}`;
  });
  const rest = restText(form);
  const body = inputs + rest;
  // Outputs may still be requested as bytes.
  return rest.includes('"binary_data') ? { body, extended: true, headers: { accept: "*/*" } } : { body };
}

function checked(text: Json, tensor: FormTensor, row: number): Json {
  const flat = ofKind(flatten(text), tensor.datatype);
  const [count, wanted] = [countFlat(flat), elementCount(rowShape(tensor, row))];
  if (count === wanted) return flat;
  throw new TensorFlaw(`has a row of ${count} values, but its shape says ${wanted}`);
}

function plainCall(form: Form, rows: Rows): WorkerCall {
  const texts = form.binary
    ? rows.map((row, index) => row.map((base64, at) => plainRow(base64, form.tensors[at]!, index)))
    : rows;
  const outputs = plainOutputs(form.outputs);
  return jsonCall({ ...form, outputs, parameters: filtered(form.parameters, isPlain) }, texts);
}

function plainRow(base64: string, tensor: FormTensor, row: number): Json {
  return about(`input ${quoted(tensor.name)}`, () => {
    checkRow(base64, tensor, row);
    const raw = joinBytes("", [base64]);
    try {
      return jsonFromRaw(raw, tensor.datatype);
    } catch (error) {
      if (!(error instanceof TensorFlaw)) throw error;
      throw new TensorFlaw(error.message.replace(USE_BINARY, "this model's workers take nothing else"));
    }
  });
}

function plainOutputs(outputs: Json | undefined): Json | undefined {
  if (outputs?.includes('"binary_data') !== true) return outputs;
  const texts = (splitArray(outputs).elements ?? []).map((text) => {
    const fields = new Map(splitFields(text));
    const own = filtered(
      about("an output", () => objectField(fields, "parameters")),
      isPlain,
    );
    fields.delete("parameters");
    const rest = [...fields].map(([name, value]) => `${JSON.stringify(name)}:${value}`);
    return `{${rest.join(",")}${objectPart("parameters", own)}}`;
  });
  return `[${texts.join(",")}]`;
}

function isPlain(name: string): boolean {
  return !name.startsWith("binary_data");
}

function binaryCall(form: Form, rows: Rows): WorkerCall {
  const raws: (string | Buffer | Spread)[] = [];
  const inputs = inputsText(form, rows, (tensor, at) => {
    const own = rows.map((row) => row[at]!);
    own.forEach((row, index) => checkRow(row, tensor, index));
    const padded = padRaws(tensor, own);
    for (const raw of padded) raws.push(raw);
    return sizedPart(padded, tensor.parameters);
  });
  const head = inputs + restText(form);
  const headers = { [HEADER_LENGTH]: String(Buffer.byteLength(head)) };
  return { type: BYTES_TYPE, headers, body: joinBytes(head, raws), extended: true };
}

function outputsIn(
  reply: WorkerReply,
  inputs: readonly Json[],
  parameters: Json,
  memory?: PadMemory,
): Outputs {
  try {
    const { json, raw } = partsOf(reply.body, reply.header(HEADER_LENGTH)?.trim());
    const text = parsed(json);
    // Checked outside the outputs too: parameters are rewritten recursively.
    const wrong = outputFlaw(text);
    if (wrong !== undefined) return { flaw: wrong };
    const { elements, flaw } = splitField(text, "outputs");
    if (flaw !== undefined) return { flaw };
    const reader = new RawReader(raw);
    const tensors = elements.map((element) => readOutput(element, reader));
    if (reader.left > 0) return { flaw: `has ${reader.left} bytes behind its last output` };
    const beside = { ...readBeside(splitFields(text) ?? new Map<string, Json>()), typed: false };
    return cutReply(tensors, inputs.length, beside, cutFor(inputs, parameters, memory));
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

function readOutput(text: Json, reader: RawReader): PayloadTensor {
  const fields = splitFields(text);
  if (fields === undefined) throw new TensorFlaw("has an output that is no object");
  const name = about("has an output that", () => textField(fields, "name"));
  return about(`has an output ${quoted(name)}`, () => {
    const head = readHead(fields);
    const size = binarySize(head.parameters);
    const data = fields.get("data");
    if (size === undefined && data === undefined) throw new TensorFlaw('has no "data"');
    return { ...head, payload: size === undefined ? flatten(data!) : reader.take(size) };
  });
}
