/**
 * Cohere's `POST /v2/embed`.
 *
 *   {"model","input_type","texts":[…] | "inputs":[{"content":[…]},…],"embedding_types"?,"truncate"?,…}
 *   {"id","embeddings":{"float":[[…],…],…},"texts"?,"meta":{"api_version","billed_units"},"response_type"}
 *   {"message":"…"}
 *
 * Each text, or each of `inputs`, is a task. `embedding_types` keeps requests apart, whatever its order; left out it is
 * `["float"]`. `priority` is for Cohere's own queue, and who comes first here is Ferry's affair: it is not passed on.
 * Any other field goes to the worker and keeps requests that differ in it apart. `billed_units` and `tokens` are the
 * call's as a whole: each input gets its part by its length, in whole units, so that the parts sum to what the worker
 * said. `id` is that of the request, as in x-request-id. Warnings stay out: they may speak of somebody else's text.
 *
 * A call may hold one of `images` only, so those requests go to a worker as they came; an image among `inputs` is batched.
 *
 * A task's output is `{"embeddings":{"float":…},"billed_units"?,"tokens"?}`; from other backends the embedding alone,
 * numbers or base64 of little-endian float32, serves as `float` and `base64`, and so does a tensor; one of int8 or uint8
 * serves as these, and as `binary` or `ubinary`, too.
 */
import { Refusal } from "../../core/errors.ts";
import { splitArray } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { numbersText, readBinary, type Tensor } from "../../core/tensor.ts";
import { asBase64, asNumbers, embeddingText, isEmbedding, isRow } from "./embedding.ts";
import {
  between,
  cutFields,
  detached,
  elementsOf,
  type Fields,
  inputsIn,
  invalid,
  objectText,
  parametersOf,
  readFields,
  sent,
  stringField,
  without,
} from "./fields.ts";
import { inPieces, listed } from "./pieces.ts";
import type { Answer, Asked, Call, Drafts, Outputs, Protocol, Replied, Unbatched } from "./protocol.ts";
import { apportion } from "./usage.ts";

const PATH = "/v2/embed";
/** Of one call. */
const MAX_BATCH_SIZE = 96;
const OWN: ReadonlySet<string> = new Set([
  "model",
  "texts",
  "inputs",
  "images",
  "embedding_types",
  "priority",
]);
const TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"];
/** What a call says itself. */
const SAID: ReadonlySet<string> = new Set(["model", "texts", "inputs", "images"]);
/** What is counted for the call as a whole. */
const COUNTED = ["billed_units", "tokens"] as const;
/** "texts" or "inputs": which field a task's input came in, and goes out in. */
const KIND = "$kind";

export const cohere: Protocol = {
  name: "cohere",
  client: { infer: [{ path: PATH, read }], about: [], fail },
  worker: { maxBatchSize: MAX_BATCH_SIZE, basePath: (path) => without(path, PATH), call, outputs },
};

function read({ body, limits }: Asked): Drafts | Unbatched {
  const fields = readFields(body);
  const model = stringField(fields, "model");
  const given = ["texts", "inputs", "images"].filter((name) => (fields.get(name) ?? "null") !== "null");
  if (given.length !== 1) throw invalid('send one of "texts", "inputs" and "images"');
  const kind = given[0]!;
  if (kind === "images") return { unbatched: true, model };
  const inputs = inputsOf(fields, kind, limits.maxInputs);
  const types = typesOf(fields.get("embedding_types"));
  return {
    model,
    inputs,
    parameters: parametersOf(fields, OWN, { [KIND]: `"${kind}"`, embedding_types: JSON.stringify(types) }),
    ...inPieces((outputs, _, request) => ({
      texts: written(outputs, types, kind === "texts" ? inputs : undefined, request?.id),
    })),
  };
}

function inputsOf(fields: Fields, kind: string, maxInputs: number): readonly Json[] {
  const elements = inputsIn(fields.get(kind)!, kind, maxInputs);
  const first = kind === "texts" ? '"' : "{";
  if (elements === undefined || !elements.every((each) => each.startsWith(first)))
    throw invalid(`"${kind}" must be a list of ${kind === "texts" ? "strings" : "objects"}`);
  if (elements.length === 0) throw invalid(`"${kind}" is empty; send at least one`);
  return elements;
}

/** Each once, in the order of `TYPES`: whatever is the same shares a batch. */
function typesOf(text: Json | undefined): readonly string[] {
  if (text === undefined || text === "null") return ["float"];
  const named = elementsOf(text)?.map((each) => JSON.parse(each) as unknown);
  if (named === undefined || named.some((each) => !TYPES.includes(each as string)))
    throw invalid(`"embedding_types" must be a list of ${TYPES.join(", ")}`);
  const types = TYPES.filter((type) => named.includes(type));
  return types.length === 0 ? ["float"] : types;
}

function* written(
  outputs: readonly Json[],
  types: readonly string[],
  texts: readonly Json[] | undefined,
  id = "",
): Generator<Json, void> {
  const read = outputs.map(readOutput);
  yield `{"id":${JSON.stringify(id)},"embeddings":{`;
  for (const [at, type] of types.entries()) {
    yield `${at === 0 ? "" : ","}"${type}":[`;
    yield* listed(read, ({ of }) => of(type));
    yield "]";
  }
  const counts = COUNTED.map((name) => [name, summed(read.map(({ fields }) => fields?.get(name)))] as const);
  const rest = objectText({
    texts: texts && `[${texts.join(",")}]`,
    meta: objectText({ api_version: '{"version":"2"}', ...Object.fromEntries(counts) }),
    response_type: '"embeddings_by_type"',
  });
  yield `},${rest.slice(1)}`;
}

interface CohereOutput {
  readonly fields: Fields | undefined;
  /** The embedding of a type. Throws a Refusal for one that the backend did not return. */
  readonly of: (type: string) => Json;
}

/** What a tensor can serve as beside `float` and `base64`: the bits of eight packed in each value, or the values. */
const SERVES: Readonly<Record<string, readonly string[]>> = {
  int8: ["int8", "binary"],
  uint8: ["uint8", "ubinary"],
};

function ofTensor(tensor: Tensor, output: Json): CohereOutput {
  const of = (type: string): Json => {
    if (type === "base64") return embeddingText(output);
    if (type === "float" || SERVES[tensor.dtype]?.includes(type) === true) {
      return numbersText({ ...tensor, shape: [tensor.shape.at(-1)!] });
    }
    throw new Refusal(
      "INFERENCE_FAILED",
      `the model's output is ${tensor.dtype} and has no ${type} embedding`,
    );
  };
  return { fields: undefined, of };
}

function readOutput(output: Json): CohereOutput {
  const tensor = readBinary(output);
  if (tensor?.dtype !== undefined && isRow(tensor.shape)) return ofTensor(tensor, output);
  const fields = isEmbedding(output) ? undefined : cutFields(output);
  const byType = cutFields(fields?.get("embeddings") ?? "");
  const alone = isEmbedding(output) ? output : (fields?.get("embedding") ?? byType?.get("float"));
  const of = (type: string): Json => {
    const found = byType?.get(type);
    if (found !== undefined) return found;
    if (alone !== undefined && type === "float") return asNumbers(alone);
    if (alone !== undefined && type === "base64") return asBase64(alone);
    throw new Refusal("INFERENCE_FAILED", `the model's output has no ${type} embedding`);
  };
  return { fields, of };
}

/** Objects of whole numbers, added up by name; undefined where there is none. */
function summed(texts: readonly (Json | undefined)[]): Json | undefined {
  const sums = new Map<string, number>();
  for (const text of texts) {
    for (const [name, count] of cutFields(text ?? "") ?? []) {
      if (isCount(count)) sums.set(name, (sums.get(name) ?? 0) + Number(count));
    }
  }
  return sums.size === 0 ? undefined : JSON.stringify(Object.fromEntries(sums));
}

function call(inputs: readonly Json[], parameters: Json, model: string): Call {
  const kind = kindOf(parameters);
  const more = sent(parameters, SAID);
  const fields = more === "" ? "" : `,${more}`;
  return { path: PATH, body: `{"model":${JSON.stringify(model)},"${kind}":[${inputs.join(",")}]${fields}}` };
}

function kindOf(parameters: Json): "texts" | "inputs" {
  return between(parameters, KIND) === '"inputs"' ? "inputs" : "texts";
}

function outputs({ body }: Replied, inputs: readonly Json[]): Outputs {
  const fields = cutFields(body.toString("utf8"));
  const byType = cutFields(fields?.get("embeddings") ?? "");
  if (byType === undefined) return { flaw: 'has no object "embeddings"' };
  const lists: (readonly [type: string, embeddings: readonly Json[]])[] = [];
  for (const [type, text] of byType) {
    if (text === "null") continue;
    const { elements, flaw } = splitArray(text);
    if (flaw !== undefined) return { flaw: `has "${type}" that ${flaw}` };
    if (elements.length !== inputs.length)
      return { flaw: `has ${elements.length} embeddings for ${inputs.length} inputs` };
    if (!elements.every(isEmbedding)) return { flaw: `has something else than embeddings in "${type}"` };
    lists.push([type, elements]);
  }
  if (lists.length === 0) return { flaw: "has no embeddings" };
  const meta = cutFields(fields!.get("meta") ?? "");
  const shares = COUNTED.map((name) => [name, sharesOf(meta?.get(name), inputs)] as const);
  return {
    outputs: inputs.map((_, at) => {
      const embeddings = lists.map(([type, elements]) => [type, detached(elements[at]!)] as const);
      const counts = shares.map(([name, parts]) => [name, parts[at]] as const);
      return objectText({
        embeddings: objectText(Object.fromEntries(embeddings)),
        ...Object.fromEntries(counts),
      });
    }),
  };
}

/** Each input's part of every count, as an object; empty where nothing was counted. */
function sharesOf(counts: Json | undefined, inputs: readonly Json[]): readonly Json[] {
  const counted = [...(cutFields(counts ?? "") ?? [])].filter(([, count]) => isCount(count));
  if (counted.length === 0) return [];
  const weights = inputs.map((input) => input.length);
  const parts = counted.map(([name, count]) => [name, apportion(Number(count), weights)] as const);
  return inputs.map((_, at) => JSON.stringify(Object.fromEntries(parts.map(([name, of]) => [name, of[at]]))));
}

/** Cohere's counts are doubles, most often written without a fraction. */
function isCount(text: Json): boolean {
  return /^\d{1,15}(?:\.0+)?$/.test(text);
}

function fail({ code, message, status }: Refusal): Answer {
  // The SDKs know 500, not 502.
  return { status: code === "INFERENCE_FAILED" ? 500 : status, body: JSON.stringify({ message }) };
}
