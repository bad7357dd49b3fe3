/**
 * Cohere's `POST /v2/embed`.
 *
 *   {"model","input_type","texts":[…] | "inputs":[{"content":[…]},…],"embedding_types"?,"truncate"?,…}
 *   {"id","embeddings":{"float":[[…],…],…},"texts"?,"meta":{"api_version","billed_units"},"response_type"}
 *   {"message":"…"}
 *
 * Each text, or each of `inputs`, is a task. Tasks batch only with equal fields, including `embedding_types` (default
 * ["float"], in any order); `priority` is for Cohere's queue and dropped. `billed_units` and `tokens` are per call and
 * apportioned by input length. `id` is the request's x-request-id. Warnings are dropped: they may quote another
 * caller's text. A call may hold only one of `images`, so such requests bypass the batches.
 *
 * A task's output is `{"embeddings":{"float":…},"billed_units"?,"tokens"?}`. From other backends a bare embedding
 * (numbers, base64 of little-endian float32, or a tensor) serves as `float` and `base64`; an int8 or uint8 tensor also
 * as that type, and as `binary` or `ubinary`.
 */
import { Refusal } from "../../core/errors.ts";
import { splitArray } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { numbersText, readBinary, type Tensor } from "../../core/tensor.ts";
import { asBase64, asNumbers, embeddingText, isEmbedding, isRow } from "./embedding.ts";
import {
  between,
  callBody,
  cutFields,
  detached,
  arrayElements,
  type Fields,
  inPieces,
  inputsIn,
  invalid,
  isSet,
  listed,
  objectText,
  parametersOf,
  readFields,
  stringField,
  withoutEnding,
} from "./fields.ts";
import type {
  ProtocolAnswer,
  Asked,
  WorkerCall,
  Drafts,
  Outputs,
  Protocol,
  WorkerReply,
  Unbatched,
} from "./protocol.ts";
import { apportion } from "./usage.ts";

const PATH = "/v2/embed";
const MAX_BATCH_SIZE = 96;
const KINDS = ["texts", "inputs", "images"];
const SET: ReadonlySet<string> = new Set(["model", ...KINDS]);
const OWN: ReadonlySet<string> = new Set([...SET, "embedding_types", "priority"]);
const TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"];
const COUNTED = ["billed_units", "tokens"] as const;

export const cohere: Protocol = {
  name: "cohere",
  client: { infer: [{ path: PATH, read }], about: [], fail },
  worker: { maxBatchSize: MAX_BATCH_SIZE, basePath: (path) => withoutEnding(path, PATH), call, outputs },
};

function read({ body, limits }: Asked): Drafts | Unbatched {
  const fields = readFields(body);
  const model = stringField(fields, "model");
  const given = KINDS.filter((name) => isSet(fields, name));
  if (given.length !== 1) throw invalid('send one of "texts", "inputs" and "images"');
  const kind = given[0]!;
  if (kind === "images") return { unbatched: true, model };
  const inputs = inputsOf(fields, kind, limits.maxInputs);
  const types = typesOf(fields.get("embedding_types"));
  return {
    model,
    inputs,
    // `$kind`: the field that the inputs came in and are sent in.
    parameters: parametersOf(fields, OWN, { $kind: `"${kind}"`, embedding_types: JSON.stringify(types) }),
    ...inPieces((outputs, _, request) => ({
      texts: written(outputs, types, kind === "texts" ? inputs : undefined, request?.id),
    })),
  };
}

function inputsOf(fields: Fields, kind: string, maxInputs: number): readonly Json[] {
  const elements = inputsIn(fields.get(kind)!, kind, maxInputs);
  const first = kind === "texts" ? '"' : "{";
  if (elements?.every((each) => each.startsWith(first)) !== true)
    throw invalid(`"${kind}" must be a list of ${kind === "texts" ? "strings" : "objects"}`);
  if (elements.length === 0) throw invalid(`"${kind}" is empty; send at least one`);
  return elements;
}

/** Deduplicated in the order of `TYPES`, so that equivalent requests share a batch. */
function typesOf(text: Json = "null"): readonly string[] {
  if (text === "null") return ["float"];
  const named = arrayElements(text)?.map((each) => JSON.parse(each) as unknown);
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
  readonly fields?: Fields | undefined;
  /** Throws a Refusal for a type that the backend did not return. */
  readonly of: (type: string) => Json;
}

/** What a tensor can serve as beside `float` and `base64`: its values, or eight bits packed in each. */
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
  return { of };
}

function readOutput(output: Json): CohereOutput {
  const tensor = readBinary(output);
  if (tensor?.dtype !== undefined && isRow(tensor.shape)) return ofTensor(tensor, output);
  const fields = isEmbedding(output) ? undefined : cutFields(output);
  const byType = cutFields(fields?.get("embeddings"));
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

/** Counts by name. Cohere's are doubles, usually without a fraction. */
function countsIn(text: Json | undefined): [name: string, count: number][] {
  return [...(cutFields(text) ?? [])]
    .filter(([, count]) => /^\d{1,15}(?:\.0+)?$/.test(count))
    .map(([name, count]) => [name, Number(count)]);
}

function summed(texts: readonly (Json | undefined)[]): Json | undefined {
  const sums = new Map<string, number>();
  for (const [name, count] of texts.flatMap(countsIn)) sums.set(name, (sums.get(name) ?? 0) + count);
  return sums.size === 0 ? undefined : JSON.stringify(Object.fromEntries(sums));
}

function call(inputs: readonly Json[], parameters: Json, model: string): WorkerCall {
  const kind = between(parameters, "$kind") === '"inputs"' ? "inputs" : "texts";
  const start = `"model":${JSON.stringify(model)},"${kind}":[${inputs.join(",")}]`;
  return { path: PATH, body: callBody(start, parameters, SET) };
}

function outputs({ body }: WorkerReply, inputs: readonly Json[]): Outputs {
  const fields = cutFields(body.toString("utf8"));
  const byType = cutFields(fields?.get("embeddings"));
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
  const meta = cutFields(fields!.get("meta"));
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

/** Each input's share of every count, as an object; empty if nothing was counted. */
function sharesOf(text: Json | undefined, inputs: readonly Json[]): readonly Json[] {
  const counts = countsIn(text);
  if (counts.length === 0) return [];
  const weights = inputs.map((input) => input.length);
  const shares = counts.map(([name, count]) => [name, apportion(count, weights)] as const);
  return inputs.map((_, at) =>
    JSON.stringify(Object.fromEntries(shares.map(([name, of]) => [name, of[at]]))),
  );
}

function fail({ code, message, status }: Refusal): ProtocolAnswer {
  // The SDKs know 500, not 502.
  return { status: code === "INFERENCE_FAILED" ? 500 : status, body: JSON.stringify({ message }) };
}
