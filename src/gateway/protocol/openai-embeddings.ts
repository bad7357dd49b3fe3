/**
 * OpenAI's `POST /v1/embeddings`, as clients and servers of many makes speak it.
 *
 *   {"model","input": "text" | ["text",…] | [1,2,3] | [[1,2],…],"encoding_format"?,"dimensions"?,…}
 *   {"object":"list","data":[{"object":"embedding","index":0,"embedding":[…] | "base64"}],"model","usage"}
 *
 * An array of numbers is one input of tokens. Texts and tokens never share a call. `encoding_format` is Ferry's own
 * affair: workers are asked for base64, which is passed on as it is and decoded only for those who want numbers; a
 * worker that sends numbers nevertheless is understood. `user` is not passed on: it would keep apart what can go
 * together. Any other field goes to the worker and keeps requests that differ in it apart.
 *
 * A task's output is `{"embedding":…,"prompt_tokens":n}`; from other backends the embedding alone will do.
 */
import { Refusal } from "../../core/errors.ts";
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { asBase64, asNumbers, embeddingText, isEmbedding } from "./embedding.ts";
import {
  cutFields,
  detached,
  type Fields,
  inputsIn,
  invalid,
  isTokens,
  objectText,
  parametersOf,
  readFields,
  sent,
  stringField,
  without,
} from "./fields.ts";
import { openaiError } from "./openai-errors.ts";
import { byIndex } from "./openai-list.ts";
import { listModels, showModel } from "./openai-models.ts";
import { inPieces, listed } from "./pieces.ts";
import type { Asked, Call, Drafts, Outputs, Protocol, Replied, RequestLimits } from "./protocol.ts";
import { apportion, tokenCount, weightOf } from "./usage.ts";

const PATH = "/v1/embeddings";
const OWN: ReadonlySet<string> = new Set(["model", "input", "encoding_format", "user"]);
/** Set on token arrays, which no server takes beside texts. */
const TOKENS = "$tokens";
/** Of one call. */
const MAX_BATCH_SIZE = 2048;

export const openaiEmbeddings: Protocol = {
  name: "openai-embeddings",
  client: { infer: [{ path: PATH, read }], about: [listModels, showModel], fail: openaiError },
  worker: { maxBatchSize: MAX_BATCH_SIZE, basePath: (path) => without(path, PATH), call, outputs },
};

function read({ body, limits }: Asked): Drafts {
  const fields = readFields(body);
  const format = stringField(fields, "encoding_format") ?? "float";
  if (format !== "float" && format !== "base64") throw invalid(`"encoding_format" must be float or base64`);
  const { inputs, tokens } = inputsOf(fields, "input", limits);
  return {
    model: stringField(fields, "model"),
    inputs,
    parameters: parametersOf(fields, OWN, tokens ? { [TOKENS]: "true" } : {}),
    ...inPieces((outputs, model) => ({ texts: texts(outputs, model, format) })),
  };
}

/** A text, texts, tokens, or several arrays of tokens; all of a kind. */
export function inputsOf(
  fields: Fields,
  name: string,
  { maxInputs }: RequestLimits,
): { inputs: readonly Json[]; tokens: boolean } {
  const text = fields.get(name);
  if (text === undefined) throw invalid(`"${name}" is missing`);
  if (text.startsWith('"')) return { inputs: [text], tokens: false };
  if (isTokens(text)) return { inputs: [text], tokens: true };
  const elements = inputsIn(text, name, maxInputs);
  if (elements === undefined) throw invalid(`"${name}" must be a string or an array`);
  if (elements.length === 0) throw invalid(`"${name}" is an empty array; send at least one`);
  if (elements.every((each) => each.startsWith('"'))) return { inputs: elements, tokens: false };
  if (elements.every(isTokens)) return { inputs: elements, tokens: true };
  throw invalid(`"${name}" must hold strings, or tokens, or arrays of tokens, not a mixture`);
}

function* texts(outputs: readonly Json[], model: string, format: "float" | "base64"): Generator<Json, void> {
  let tokens = 0;
  yield '{"object":"list","data":[';
  yield* listed(outputs, (output, index) => {
    const { embedding, promptTokens } = embeddingOf(output);
    tokens += promptTokens;
    const shown = format === "base64" ? asBase64(embedding) : asNumbers(embedding);
    return `{"object":"embedding","index":${index},"embedding":${shown}}`;
  });
  const usage = `{"prompt_tokens":${tokens},"total_tokens":${tokens}}`;
  yield `],"model":${JSON.stringify(model)},"usage":${usage}}`;
}

/** Of a task's output, from whichever backend. Throws a Refusal. */
export function embeddingOf(output: Json): { embedding: Json; promptTokens: number } {
  const tensor = embeddingText(output);
  if (tensor !== output) return { embedding: tensor, promptTokens: 0 };
  const fields = output.startsWith("{") ? cutFields(output) : undefined;
  const embedding = embeddingText(fields === undefined ? output : (fields.get("embedding") ?? ""));
  if (!isEmbedding(embedding))
    throw new Refusal("INFERENCE_FAILED", "the model's output is not an embedding");
  return { embedding, promptTokens: tokenCount(output, "prompt_tokens") ?? 0 };
}

function call(inputs: readonly Json[], parameters: Json, model: string): Call {
  const more = sent(parameters, OWN);
  const fields = more === "" ? "" : `,${more}`;
  return {
    body: `{"model":${JSON.stringify(model)},"input":[${inputs.join(",")}],"encoding_format":"base64"${fields}}`,
  };
}

function outputs({ body }: Replied, inputs: readonly Json[]): Outputs {
  const text = body.toString("utf8");
  const { elements, flaw } = splitField(text, "data");
  if (flaw !== undefined) return { flaw };
  if (elements.length !== inputs.length) {
    return { flaw: `has ${elements.length} embeddings for ${inputs.length} inputs` };
  }
  const embeddings = byIndex(elements, "embedding", embeddingIn);
  if (embeddings.flaw !== undefined) return embeddings;
  const tokens = tokenCount(cutFields(text)?.get("usage"), "prompt_tokens");
  const parts = tokens === undefined ? [] : apportion(tokens, inputs.map(weightOf));
  return {
    outputs: embeddings.parts.map((embedding, at) =>
      objectText({
        embedding: detached(embedding),
        prompt_tokens: parts[at] === undefined ? undefined : String(parts[at]),
      }),
    ),
  };
}

function embeddingIn(fields: Fields): Json | undefined {
  const embedding = fields.get("embedding");
  return embedding !== undefined && isEmbedding(embedding) ? embedding : undefined;
}
