/**
 * KServe's v1 protocol, also TensorFlow Serving's REST API.
 *
 *   POST /v1/models/{model}[/versions/{version}]:predict
 *   {"instances":[…],"signature_name"?,…}
 *   {"predictions":[…]}                     one per instance, in order; other fields are ignored
 *
 * An instance is a task, a prediction its output; both are kept as source text. Tasks batch only with equal version and
 * fields. Columns (`"inputs"`) do not say which dimension is the batch, and a label may move to another version at any
 * time: such requests bypass the batches. `GET /v1/models/{model}` is shared with OpenAI's API.
 */
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { numbersPieces, readBinary } from "../../core/tensor.ts";
import {
  askWorker,
  between,
  detached,
  inPieces,
  inputsIn,
  invalid,
  isText,
  parametersOf,
  plainError,
  readFields,
  sent,
  stringField,
  withoutEnding,
} from "./fields.ts";
import { listModels, showModel } from "./openai.ts";
import type {
  Asked,
  WorkerCall,
  Drafts,
  InferRoute,
  Outputs,
  Protocol,
  WorkerReply,
  Unbatched,
} from "./protocol.ts";

const OWN: ReadonlySet<string> = new Set(["instances", "inputs"]);
/** TensorFlow Serving never checks the type, and its examples use `curl -d`. */
const TYPES = ["application/json", "", "application/x-www-form-urlencoded"];
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
      ...["metadata", "versions/{version}", "versions/{version}/metadata"].map(askedOfWorker),
      ...["labels/{label}", "labels/{label}/metadata"].map(askedOfWorker),
    ],
    fail: plainError,
  },
  worker: {
    basePath: (path) => withoutEnding(path.replace(ENDPOINT, "")),
    modelOf: (path) => nameIn(ENDPOINT.exec(path)?.[1]),
    call,
    outputs,
  },
};

function predict(path: string, how: InferRoute["read"]): InferRoute {
  return { path, types: TYPES, read: how };
}

function askedOfWorker(path: string): { path: string; tell: typeof askWorker } {
  return { path: `/v1/models/{model}/${path}`, tell: askWorker };
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
  const inputs = inputsIn(text, "instances", limits.maxInputs);
  if (inputs === undefined) throw invalid('"instances" must be an array');
  if (inputs.length === 0) throw invalid('"instances" is an empty array; send at least one');
  stringField(fields, "signature_name");
  const own = version === undefined ? {} : { $version: JSON.stringify(version) };
  return {
    model,
    inputs,
    parameters: parametersOf(fields, OWN, own),
    ...inPieces((predictions) => ({ texts: written(predictions) })),
  };
}

function* written(predictions: readonly Json[]): Generator<Json, void> {
  yield '{"predictions":[';
  for (const [index, output] of predictions.entries()) {
    if (index > 0) yield ",";
    const binary = readBinary(output);
    if (binary === undefined) yield output;
    // TensorFlow Serving's encoding of bytes.
    else if (binary.dtype === undefined) yield `{"b64":"${binary.base64}"}`;
    else yield* numbersPieces(binary);
  }
  yield "]}";
}

function call(inputs: readonly Json[], parameters: Json, model: string): WorkerCall {
  const more = sent(parameters, OWN);
  const body = `{${more === "" ? "" : `${more},`}"instances":[${inputs.join(",")}]}`;
  const text = between(parameters, "$version");
  // Native API callers may send anything.
  if (!isText(text)) return { body };
  const version = JSON.parse(text!) as string;
  if (isWayOut(version)) return { body, flaw: "the version must be a name or a number" };
  const segment = encodeURIComponent(version);
  return { body, named: true, path: `/v1/models/${encodeURIComponent(model)}/versions/${segment}:predict` };
}

function outputs({ body }: WorkerReply): Outputs {
  const { elements, flaw } = splitField(body.toString("utf8"), "predictions");
  return flaw === undefined ? { outputs: elements.map(detached) } : { flaw };
}

/** Whether a segment is empty, `.` or `..`: in a worker that decodes its path first, that leads to another model. */
export function isWayOut(name: string): boolean {
  return /(?:^|[/\\])\.{0,2}(?:[/\\]|$)/.test(name);
}

export function nameIn(segment: string | undefined): string | undefined {
  if (segment === undefined) return undefined;
  try {
    return decodeURIComponent(segment);
  } catch {
    return segment;
  }
}
