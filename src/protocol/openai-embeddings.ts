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
import type { Json } from "../core/task.ts";
import { splitField } from "../core/json-split.ts";
import { asBase64, asNumbers, isEmbedding } from "./embedding.ts";
import {
  cutFields,
  detached,
  elementsOf,
  type Fields,
  invalid,
  objectText,
  parametersOf,
  readFields,
  sent,
  stringField,
  without,
} from "./fields.ts";
import { openaiError } from "./openai-errors.ts";
import { listModels, showModel } from "./openai-models.ts";
import type { Answer, Asked, Call, Drafts, Outputs, Protocol, Replied } from "./protocol.ts";
import { apportion, weightOf } from "./usage.ts";

const PATH = "/v1/embeddings";
const OWN: ReadonlySet<string> = new Set(["model", "input", "encoding_format", "user"]);
/** Set on token arrays, which no server takes beside texts. */
const TOKENS = "$tokens";
export const MAX_INPUTS = 2048;

export const openaiEmbeddings: Protocol = {
  name: "openai-embeddings",
  client: { infer: [{ path: PATH, read }], about: [listModels, showModel], fail: openaiError },
  worker: { maxBatchSize: MAX_INPUTS, basePath: (path) => without(path, PATH), call, outputs },
};

function read({ body }: Asked): Drafts {
  const fields = readFields(body);
  const format = stringField(fields, "encoding_format") ?? "float";
  if (format !== "float" && format !== "base64") throw invalid(`"encoding_format" must be float or base64`);
  const { inputs, tokens } = inputsOf(fields, "input");
  return {
    model: stringField(fields, "model"),
    inputs,
    parameters: parametersOf(fields, OWN, tokens ? { [TOKENS]: "true" } : {}),
    render: (outputs, model) => render(outputs, model, format),
  };
}

/** A text, texts, tokens, or several arrays of tokens; all of a kind. */
export function inputsOf(fields: Fields, name: string): { inputs: readonly Json[]; tokens: boolean } {
  const text = fields.get(name);
  if (text === undefined) throw invalid(`"${name}" is missing`);
  if (text.startsWith('"')) return { inputs: [text], tokens: false };
  const elements = elementsOf(text);
  if (elements === undefined) throw invalid(`"${name}" must be a string or an array`);
  if (elements.length === 0) throw invalid(`"${name}" is an empty array; send at least one`);
  if (elements.every(isToken)) return { inputs: [text], tokens: true };
  if (elements.length > MAX_INPUTS) throw invalid(`"${name}" has more than ${MAX_INPUTS} inputs; send fewer`);
  if (elements.every((each) => each.startsWith('"'))) return { inputs: elements, tokens: false };
  if (elements.every(isTokens)) return { inputs: elements, tokens: true };
  throw invalid(`"${name}" must hold strings, or tokens, or arrays of tokens, not a mixture`);
}

function isToken(text: Json): boolean {
  return /^\d+$/.test(text);
}

function isTokens(text: Json): boolean {
  const tokens = elementsOf(text);
  return tokens !== undefined && tokens.length > 0 && tokens.every(isToken);
}

function render(outputs: readonly Json[], model: string, format: "float" | "base64"): Answer {
  let tokens = 0;
  const data = outputs.map((output, index) => {
    const { embedding, promptTokens } = embeddingOf(output);
    tokens += promptTokens;
    const shown = format === "base64" ? asBase64(embedding) : asNumbers(embedding);
    return `{"object":"embedding","index":${index},"embedding":${shown}}`;
  });
  const usage = `{"prompt_tokens":${tokens},"total_tokens":${tokens}}`;
  return {
    body: `{"object":"list","data":[${data.join(",")}],"model":${JSON.stringify(model)},"usage":${usage}}`,
  };
}

/** Of a task's output, from whichever backend. */
export function embeddingOf(output: Json): { embedding: Json; promptTokens: number } {
  if (isEmbedding(output)) return { embedding: output, promptTokens: 0 };
  const fields = cutFields(output);
  return {
    embedding: fields?.get("embedding") ?? "[]",
    promptTokens: Number(fields?.get("prompt_tokens") ?? 0),
  };
}

function call(inputs: readonly Json[], parameters: Json, model: string): Call {
  const more = sent(parameters);
  const fields = more === "" ? "" : `,${more}`;
  return {
    body: `{"model":${JSON.stringify(model)},"input":[${inputs.join(",")}],"encoding_format":"base64"${fields}}`,
  };
}

function outputs({ body }: Replied, inputs: readonly Json[]): Outputs {
  const text = body.toString("utf8");
  const { elements, flaw } = splitField(text, "data");
  if (flaw !== undefined) return { flaw };
  const embeddings = inOrder(elements, inputs.length);
  if (typeof embeddings === "string") return { flaw: embeddings };
  const tokens = promptTokens(cutFields(text)?.get("usage"));
  const parts = tokens === undefined ? [] : apportion(tokens, inputs.map(weightOf));
  return {
    outputs: embeddings.map((embedding, at) =>
      objectText({
        embedding: detached(embedding),
        prompt_tokens: parts[at] === undefined ? undefined : String(parts[at]),
      }),
    ),
  };
}

/** By `index`, which must name each place once; by position where nobody says one. A text is what is wrong. */
function inOrder(elements: readonly Json[], count: number): readonly Json[] | string {
  if (elements.length !== count) return `has ${elements.length} embeddings for ${count} inputs`;
  const placed: (Json | undefined)[] = Array.from({ length: count });
  for (const [position, element] of elements.entries()) {
    const fields = cutFields(element);
    const embedding = fields?.get("embedding");
    if (embedding === undefined || !isEmbedding(embedding))
      return `has no embedding at ${position} of "data"`;
    const at = Number(fields!.get("index") ?? position);
    if (!Number.isInteger(at) || at < 0 || at >= count) return `has an index out of range in "data"`;
    if (placed[at] !== undefined) return `has the index ${at} twice in "data"`;
    placed[at] = embedding;
  }
  return placed as readonly Json[];
}

/** Undefined where the worker does not say. */
export function promptTokens(usage: Json | undefined): number | undefined {
  const text = usage === undefined ? undefined : cutFields(usage)?.get("prompt_tokens");
  return text !== undefined && /^\d{1,15}$/.test(text) ? Number(text) : undefined;
}
