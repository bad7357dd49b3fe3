/**
 * KServe's v1 protocol, which is also TensorFlow Serving's REST API.
 *
 *   POST /v1/models/{model}[/versions/{version}]:predict
 *   {"instances":[…],"signature_name"?,…}
 *   {"predictions":[…]}                     one per instance, in order; other fields are ignored
 *
 * An instance is a task, a prediction its output; both travel as the text they came in. `signature_name` and any
 * other field beside the instances goes to the worker and keeps requests that differ in it apart, and so does the
 * version. Columns (`"inputs"`) say nowhere which of their dimensions is that of the batch, and a label may point to
 * another version at any time: such requests pass the batches by.
 *
 * `GET /v1/models/{model}` is shared with OpenAI's API (`openai-models.ts`).
 */
import type { Refusal } from "../../core/errors.ts";
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { numbersPieces } from "../../core/tensor-pieces.ts";
import { readBinary } from "../../core/tensor.ts";
import {
  between,
  detached,
  inputsIn,
  invalid,
  parametersOf,
  readFields,
  sent,
  stringField,
  without,
} from "./fields.ts";
import { listModels, showModel } from "./openai-models.ts";
import { inPieces } from "./pieces.ts";
import type {
  AboutRoute,
  Answer,
  Asked,
  Call,
  Drafts,
  InferRoute,
  Outputs,
  Protocol,
  Replied,
  Unbatched,
} from "./protocol.ts";

const OWN: ReadonlySet<string> = new Set(["instances", "inputs"]);
const VERSION = "$version";
/** TensorFlow Serving never asks, and its own examples say `curl -d`. */
const TYPES = ["application/json", "", "application/x-www-form-urlencoded"];
/** What stands behind a worker's base. */
const ENDPOINT = /\/v1\/models\/([^/:]+)(\/(versions|labels)\/[^/:]+)?:predict$/;

export const kserveV1: Protocol = {
  name: "kserve-v1",
  client: {
    infer: [
      predict("/v1/models/{model}:predict", read),
      predict("/v1/models/{model}/versions/{version}:predict", read),
      predict("/v1/models/{model}/labels/{label}:predict", ({ names }) =>
        unbatched(names["model"], "a label may point to another version at any time; name the version"),
      ),
    ],
    about: [
      listModels,
      showModel,
      atTheWorker("/v1/models/{model}/metadata"),
      atTheWorker("/v1/models/{model}/versions/{version}"),
      atTheWorker("/v1/models/{model}/versions/{version}/metadata"),
      atTheWorker("/v1/models/{model}/labels/{label}"),
      atTheWorker("/v1/models/{model}/labels/{label}/metadata"),
    ],
    fail: kserveError,
  },
  worker: {
    basePath: (path) => without(path.replace(ENDPOINT, "")),
    modelOf: (path) => nameIn(ENDPOINT.exec(path)?.[1]),
    call,
    outputs,
  },
};

function predict(path: string, how: InferRoute["read"]): InferRoute {
  return { path, types: TYPES, read: how };
}

function atTheWorker(path: string): AboutRoute {
  return { path, tell: ({ model }) => (model === undefined ? undefined : "worker") };
}

function unbatched(model: string | undefined, why: string): Unbatched {
  return { unbatched: true, model, why };
}

function read({ names, body, limits }: Asked): Drafts | Unbatched {
  const fields = readFields(body);
  const { model, version } = names;
  const text = fields.get("instances");
  const columns = fields.get("inputs");
  if (text === undefined && columns !== undefined) {
    return unbatched(model, 'columns ("inputs") cannot be batched; send rows ("instances")');
  }
  if (text === undefined) throw invalid('"instances" is missing');
  if (columns !== undefined) throw invalid('send "instances" or "inputs", not both');
  const instances = inputsIn(text, "instances", limits.maxInputs);
  if (instances === undefined) throw invalid('"instances" must be an array');
  if (instances.length === 0) throw invalid('"instances" is an empty array; send at least one');
  stringField(fields, "signature_name");
  return {
    model,
    inputs: instances,
    parameters: parametersOf(
      fields,
      OWN,
      version === undefined ? {} : { [VERSION]: JSON.stringify(version) },
    ),
    ...inPieces((predictions) => ({ texts: texts(predictions) })),
  };
}

function* texts(predictions: readonly Json[]): Generator<Json, void> {
  yield '{"predictions":[';
  for (const [index, output] of predictions.entries()) {
    if (index > 0) yield ",";
    yield* prediction(output);
  }
  yield "]}";
}

/** A tensor as numbers; bytes as TensorFlow Serving writes them. */
function prediction(output: Json): Iterable<Json> {
  const binary = readBinary(output);
  if (binary === undefined) return [output];
  return binary.dtype === undefined ? [`{"b64":"${binary.base64}"}`] : numbersPieces(binary);
}

/** `{"error":"…"}`, which is all that either server says. */
export function kserveError({ code, message, status }: Refusal): Answer {
  // Their word for an input that the model does not take.
  return { status: code === "INPUT_REJECTED" ? 400 : status, body: JSON.stringify({ error: message }) };
}

function call(inputs: readonly Json[], parameters: Json, model: string): Call {
  const more = sent(parameters, OWN);
  const body = `{${more === "" ? "" : `${more},`}"instances":[${inputs.join(",")}]}`;
  const version = textOf(between(parameters, VERSION));
  if (version === undefined) return { body };
  // To a worker that decodes its path before it reads it, these would be the way to another model.
  if (isWayOut(version)) return { body, flaw: "the version must be a name or a number" };
  const segment = encodeURIComponent(version);
  return { body, named: true, path: `/v1/models/${encodeURIComponent(model)}/versions/${segment}:predict` };
}

/** Undefined for what is no string: callers of Ferry's own API may write anything there. */
function textOf(text: Json | undefined): string | undefined {
  return text?.startsWith('"') === true ? (JSON.parse(text) as string) : undefined;
}

function outputs({ body }: Replied): Outputs {
  const { elements, flaw } = splitField(body.toString("utf8"), "predictions");
  return flaw === undefined ? { outputs: elements.map(detached) } : { flaw };
}

/** Whether some part of it is empty, `.` or `..`. */
export function isWayOut(name: string): boolean {
  return /(?:^|[/\\])\.{0,2}(?:[/\\]|$)/.test(name);
}

/** A name as it stands in a path; undefined where there is none. */
export function nameIn(segment: string | undefined): string | undefined {
  if (segment === undefined) return undefined;
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}
