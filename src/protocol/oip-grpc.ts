/**
 * The Open Inference Protocol over gRPC: a client's ModelInfer becomes tasks, and their outputs its answer. The
 * other way, from a batch of tasks to a worker's ModelInfer and back, is `oip-grpc-worker.ts`.
 *
 * One row of dimension 0 is one task:
 *
 *   parameters  {"binary":true,"contents":true?,"inputs":[{"datatype","name","parameters"?,"shape"}…],
 *               "outputs":[{"name","parameters"?}…]?,"parameters":{…}?,"version":"…"?}
 *               shapes without dimension 0; `contents` where the client sent typed contents
 *   input       ["…","…"]: the row of each input tensor as base64
 *   output      {"outputs":[{"name","datatype","shape":[1,…],"raw":"…"}…],"contents":true?,"model_version"?,
 *               "parameters"?}; from workers of other protocols also "data":[…] instead of "raw"
 *
 * Only tasks whose parameters are equal share a call, so a batch is the rows one behind the other. A worker is
 * asked as its client asked, with raw or with typed contents, and a client is answered as the worker answered,
 * but a client that sent raw contents always gets raw ones.
 *
 * `priority` and `timeout` are Ferry's business and stay here. Sequences and shared memory cannot be batched and
 * are refused.
 */
import { splitField } from "../core/json-split.ts";
import type { Json } from "../core/task.ts";
import { hasContents, rawOfContents } from "./oip-contents.ts";
import {
  type Encoded,
  type Flawed,
  fieldText,
  flawless,
  isShape,
  named,
  parametersIn,
  parametersPart,
  quoted,
} from "./oip-grpc-form.ts";
import {
  type InferRecord,
  type Parameters,
  readInferRequest,
  writeInferResponse,
  type WrittenTensor,
} from "./oip-proto.ts";
import { flatten, rawFromJson, rowsOfRaw, TensorFlaw } from "./oip-tensors.ts";

/** What must be known of a request to answer it. */
export interface InferCall {
  readonly model: string;
  /** Given back as it came. */
  readonly id: string;
  /** It sent typed contents. */
  readonly typed: boolean;
}

export interface InferDrafts extends InferCall {
  /** Canonical, the same for all rows. */
  readonly parameters: Json;
  /** One per row. */
  readonly inputs: readonly Json[];
  readonly flaw?: never;
}

/** Of a request; they say when it should run, not what. */
const NOT_THE_MODELS = new Set(["priority", "timeout"]);
const SEQUENCES = new Set(["sequence_id", "sequence_start", "sequence_end"]);

export function draftsOf(bytes: Buffer): InferDrafts | Flawed {
  return flawless(() => {
    const record = readInferRequest(bytes);
    if (record.tensors.length === 0) throw new TensorFlaw("the request has no inputs");
    for (const name of record.parameters.keys()) {
      if (SEQUENCES.has(name))
        throw new TensorFlaw(`the parameter ${name} is of a sequence, which is not batched`);
    }
    const typed = record.raw.length === 0;
    const rows = rowsOfTensors(record, typed);
    const inputs = Array.from({ length: rows[0]!.length }, (_, row) => {
      const texts = rows.map((tensor) => `"${tensor[row]!.toString("base64")}"`);
      return `[${texts.join(",")}]`;
    });
    const parameters = parametersText(record, typed);
    return { model: record.model, id: record.id, typed, parameters, inputs };
  });
}

/** The rows of each input. */
function rowsOfTensors({ tensors, raw }: InferRecord, typed: boolean): Buffer[][] {
  if (!typed && raw.length !== tensors.length) {
    throw new TensorFlaw(`there are ${raw.length} raw contents for ${tensors.length} inputs`);
  }
  const found = tensors.map((tensor, at) =>
    named("input", tensor.name, () => {
      if (tensor.parameters.has("shared_memory_region"))
        throw new TensorFlaw("lies in shared memory, which Ferry cannot read; send its contents");
      if (!typed && tensor.contents.length > 0)
        throw new TensorFlaw("has typed contents beside the raw ones; send either");
      const bytes = typed ? rawOfContents(tensor.contents, tensor.datatype) : raw[at]!;
      return rowsOfRaw(bytes, tensor.datatype, tensor.shape);
    }),
  );
  const rows = found[0]!.length;
  if (rows === 0) throw new TensorFlaw("the inputs have no rows: their dimension 0 is 0");
  const other = found.findIndex(({ length }) => length !== rows);
  if (other < 0) return found;
  const [first, odd] = [tensors[0]!, tensors[other]!].map(({ name }) => quoted(name));
  const sizes = `${rows} and ${found[other]!.length}`;
  throw new TensorFlaw(
    `the inputs ${first} and ${odd} disagree in dimension 0, which is the batch's: ${sizes}`,
  );
}

/** Keys in order, as canonical JSON has them. */
function parametersText({ tensors, outputs, parameters, version }: InferRecord, typed: boolean): Json {
  const inputs = tensors.map(
    ({ name, datatype, shape, parameters }) =>
      `{"datatype":${JSON.stringify(datatype)},"name":${JSON.stringify(name)}${parametersPart(parameters)},` +
      `"shape":[${shape.slice(1).join(",")}]}`,
  );
  const asked = outputs.map(
    ({ name, parameters }) => `{"name":${JSON.stringify(name)}${parametersPart(parameters)}}`,
  );
  const kept = new Map([...parameters].filter(([name]) => !NOT_THE_MODELS.has(name)));
  return (
    `{"binary":true,${typed ? '"contents":true,' : ""}"inputs":[${inputs.join(",")}]` +
    (asked.length === 0 ? "" : `,"outputs":[${asked.join(",")}]`) +
    parametersPart(kept) +
    (version === "" ? "}" : `,"version":${JSON.stringify(version)}}`)
  );
}

/** `outputs` in the order of the rows. */
export function answerOf(call: InferCall, outputs: readonly Json[]): Encoded | Flawed {
  return flawless(() => {
    const rows = outputs.map(readOutput);
    const [first] = rows;
    if (first === undefined) throw new TensorFlaw("there is no output");
    const tensors = first.tensors.map((tensor, at) =>
      rows.length === 1
        ? tensor
        : joined(
            rows.map(({ tensors }) => tensors[at]),
            tensor,
          ),
    );
    if (rows.some(({ tensors: each }) => each.length !== tensors.length)) throw differing();
    const typed =
      call.typed && rows.every((row) => row.typed) && tensors.every(({ datatype }) => hasContents(datatype));
    const { version, parameters } = first;
    const { model, id } = call;
    return { parts: writeInferResponse({ model, id, version, parameters, tensors, typed }).parts() };
  });
}

interface ReadOutput {
  readonly tensors: readonly WrittenTensor[];
  readonly version: string;
  readonly parameters: Parameters;
  /** It may leave as typed contents: the worker used them, or JSON. */
  readonly typed: boolean;
}

const NOT_TENSORS = "this model does not answer with tensors; ask it by POST /v1/inference";

function readOutput(text: Json): ReadOutput {
  const { elements } = text.startsWith("{") ? splitField(text, "outputs") : {};
  if (elements === undefined) throw new TensorFlaw(NOT_TENSORS);
  const { model_version: version, contents } = JSON.parse(text) as Record<string, unknown>;
  let json = false;
  const tensors = elements.map((element) => {
    const { tensor, data } = readRow(element);
    json ||= data;
    return tensor;
  });
  return {
    tensors,
    version: typeof version === "string" ? version : "",
    parameters: parametersIn(text),
    typed: contents === true || json,
  };
}

function readRow(text: Json): { tensor: WrittenTensor; data: boolean } {
  if (!text.startsWith("{")) throw new TensorFlaw(NOT_TENSORS);
  const { name, datatype, shape, raw } = JSON.parse(text) as Record<string, unknown>;
  if (typeof name !== "string" || typeof datatype !== "string" || !isShape(shape))
    throw new TensorFlaw(NOT_TENSORS);
  const data = typeof raw === "string" ? undefined : fieldText(text, "data");
  if (typeof raw !== "string" && data === undefined) throw new TensorFlaw(NOT_TENSORS);
  const bytes = named("output", name, () =>
    typeof raw === "string" ? Buffer.from(raw, "base64") : rawFromJson(flatten(data!), datatype),
  );
  const tensor = { name, datatype, shape, parameters: parametersIn(text), raw: bytes };
  return { tensor, data: data !== undefined };
}

/** The same output of several rows as one tensor. */
function joined(parts: readonly (WrittenTensor | undefined)[], like: WrittenTensor): WrittenTensor {
  const row = like.shape.slice(1).join();
  let rows = 0;
  const raws = parts.map((part) => {
    const same = part?.name === like.name && part.datatype === like.datatype && part.shape.length > 0;
    if (!same || part.shape.slice(1).join() !== row) throw differing();
    rows += part.shape[0]!;
    return part.raw;
  });
  return { ...like, shape: [rows, ...like.shape.slice(1)], raw: Buffer.concat(raws) };
}

function differing(): TensorFlaw {
  return new TensorFlaw("the outputs of the rows differ in shape; send one row in each request");
}
