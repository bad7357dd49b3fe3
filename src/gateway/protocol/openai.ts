/**
 * OpenAI's `POST /v1/embeddings`, `POST /v1/completions` and `GET /v1/models`.
 *
 *   {"model","input": "text" | ["text",…] | [1,2,3] | [[1,2],…],"encoding_format"?,"dimensions"?,…}
 *   {"object":"list","data":[{"object":"embedding","index":0,"embedding":[…] | "base64"}],"model","usage"}
 *
 *   {"model","prompt": as "input" above,"n"?,"max_tokens"?,"temperature"?,"stop"?,…}
 *   {"id","object":"text_completion","created","model","choices":[{"text","index","logprobs","finish_reason"}],"usage"}
 *
 * Each input or prompt is a task; an array of numbers is one input of tokens. Texts and tokens never share a call.
 * `user` is dropped, as it would only split batches; tasks batch only if all other fields are equal. Usage is per call:
 * prompt tokens are apportioned by input length, completion tokens by output length; `…_details` are dropped.
 *
 * Embeddings: workers are asked for base64, decoded only for clients that want numbers; numbers are accepted too. A
 * task's output is `{"embedding":…,"prompt_tokens":n}`; from other backends the embedding alone.
 *
 * Completions: of a call with P prompts, choices p × n to p × n + n - 1 belong to prompt p; a reply without exactly P ×
 * n choices, each index once, is unusable. Each caller's are renumbered from 0. `stream`, `seed` (needs the same call
 * again) and `prompt_embeds` (an unknown number of prompts) bypass the batches. Unless `temperature` is 0 a completion
 * is sampled and never reused. A task's output is
 * `{"choices":[…],"prompt_tokens","completion_tokens","created","system_fingerprint"}`, choices without index. Other
 * backends return the text, `{"text","finish_reason"?,"prompt_tokens"?,"completion_tokens"?,…}`, or an array of n of
 * these.
 */
import { type ErrorCode, Refusal } from "../../core/errors.ts";
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { asBase64, asNumbers, embeddingText, isEmbedding } from "./embedding.ts";
import {
  booleanField,
  callBody,
  cutFields,
  detached,
  arrayElements,
  type Fields,
  inPieces,
  inputsIn,
  invalid,
  isSet,
  isText,
  isTokens,
  listed,
  objectText,
  parametersOf,
  readFields,
  stringField,
  wholeNumber,
  withoutEnding,
} from "./fields.ts";
import type {
  ModelFacts,
  AboutRoute,
  ProtocolAnswer,
  Asked,
  WorkerCall,
  Drafts,
  Known,
  Outputs,
  Protocol,
  Rendered,
  WorkerReply,
  Unbatched,
} from "./protocol.ts";
import { apportion, tokenCount, weightOf } from "./usage.ts";

const EMBEDDINGS = "/v1/embeddings";
const COMPLETIONS = "/v1/completions";
const EMBEDDINGS_OWN: ReadonlySet<string> = new Set(["model", "input", "encoding_format", "user"]);
const COMPLETIONS_OWN: ReadonlySet<string> = new Set(["model", "prompt", "user", "stream"]);
const MAX_EMBEDDINGS = 2048;

export const listModels: AboutRoute = { path: "/v1/models", tell: modelList };
export const showModel: AboutRoute = {
  path: "/v1/models/{model}",
  tell: ({ model }) => (model === undefined ? undefined : { body: JSON.stringify(described(model)) }),
};

export const openaiEmbeddings: Protocol = {
  name: "openai-embeddings",
  client: {
    infer: [{ path: EMBEDDINGS, read: readEmbeddings }],
    about: [listModels, showModel],
    fail: openaiError,
  },
  worker: {
    maxBatchSize: MAX_EMBEDDINGS,
    basePath: (path) => withoutEnding(path, EMBEDDINGS),
    call: callEmbeddings,
    outputs: embeddingOutputs,
  },
};

export const openaiCompletions: Protocol = {
  name: "openai-completions",
  client: {
    infer: [{ path: COMPLETIONS, read: readCompletions }],
    about: [listModels, showModel],
    fail: openaiError,
  },
  worker: {
    basePath: (path) => withoutEnding(path, COMPLETIONS),
    call: callCompletions,
    outputs: completionOutputs,
  },
};

function readEmbeddings({ body, limits }: Asked): Drafts {
  const fields = readFields(body);
  const format = stringField(fields, "encoding_format") ?? "float";
  if (format !== "float" && format !== "base64") throw invalid(`"encoding_format" must be float or base64`);
  const { inputs, own } = inputsOf(fields, "input", limits.maxInputs);
  return {
    model: stringField(fields, "model"),
    inputs,
    parameters: parametersOf(fields, EMBEDDINGS_OWN, own),
    ...inPieces((outputs, model) => ({ texts: embeddingPieces(outputs, model, format) })),
  };
}

/** A text, texts, tokens, or arrays of tokens; `$tokens` keeps the last two apart from texts. */
function inputsOf(
  fields: Fields,
  name: string,
  maxInputs: number,
): { inputs: readonly Json[]; own: Record<string, Json> } {
  const text = fields.get(name);
  const own = { $tokens: "true" };
  if (text === undefined) throw invalid(`"${name}" is missing`);
  if (isText(text)) return { inputs: [text], own: {} };
  if (isTokens(text)) return { inputs: [text], own };
  const elements = inputsIn(text, name, maxInputs);
  if (elements === undefined) throw invalid(`"${name}" must be a string or an array`);
  if (elements.length === 0) throw invalid(`"${name}" is an empty array; send at least one`);
  if (elements.every(isText)) return { inputs: elements, own: {} };
  if (elements.every(isTokens)) return { inputs: elements, own };
  throw invalid(`"${name}" must hold strings, or tokens, or arrays of tokens, not a mixture`);
}

function* embeddingPieces(outputs: readonly Json[], model: string, format: string): Generator<Json, void> {
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

function embeddingOf(output: Json): { embedding: Json; promptTokens: number } {
  const tensor = embeddingText(output);
  if (tensor !== output) return { embedding: tensor, promptTokens: 0 };
  const fields = output.startsWith("{") ? cutFields(output) : undefined;
  const embedding = embeddingText(fields === undefined ? output : (fields.get("embedding") ?? ""));
  if (!isEmbedding(embedding))
    throw new Refusal("INFERENCE_FAILED", "the model's output is not an embedding");
  return { embedding, promptTokens: tokenCount(output, "prompt_tokens") ?? 0 };
}

function callEmbeddings(inputs: readonly Json[], parameters: Json, model: string): WorkerCall {
  const start = `"model":${JSON.stringify(model)},"input":[${inputs.join(",")}],"encoding_format":"base64"`;
  return { body: callBody(start, parameters, EMBEDDINGS_OWN) };
}

function embeddingOutputs({ body }: WorkerReply, inputs: readonly Json[]): Outputs {
  const text = body.toString("utf8");
  const { elements, flaw } = splitField(text, "data");
  if (flaw !== undefined) return { flaw };
  if (elements.length !== inputs.length)
    return { flaw: `has ${elements.length} embeddings for ${inputs.length} inputs` };
  const embeddings = byIndex(elements, "embedding", (fields) => {
    const embedding = fields.get("embedding");
    return embedding !== undefined && isEmbedding(embedding) ? embedding : undefined;
  });
  if (embeddings.flaw !== undefined) return embeddings;
  const tokens = tokenCount(cutFields(text)?.get("usage"), "prompt_tokens");
  const shares = apportion(tokens, inputs.map(weightOf));
  return {
    outputs: embeddings.parts.map((embedding, at) =>
      objectText({ embedding: detached(embedding), prompt_tokens: shares[at] }),
    ),
  };
}

function readCompletions({ body, limits }: Asked): Drafts | Unbatched {
  const fields = readFields(body);
  const model = stringField(fields, "model");
  const streams = booleanField(fields, "stream") === true;
  if (streams || isSet(fields, "seed") || isSet(fields, "prompt_embeds")) return { unbatched: true, model };
  const n = choicesPerPrompt(fields.get("n"));
  if (n === undefined) throw invalid(`"n" must be a whole number from 1 to 9999`);
  const { inputs, own } = inputsOf(fields, "prompt", limits.maxInputs);
  return {
    model,
    inputs,
    parameters: parametersOf(fields, COMPLETIONS_OWN, own),
    drawn: Number(fields.get("temperature")) !== 0,
    render: (outputs, name, request) => renderCompletions(outputs, name, n, request),
  };
}

/** Default 1; undefined if invalid: native API callers may send anything. */
function choicesPerPrompt(text: Json = "null"): number | undefined {
  if (text === "null") return 1;
  return /^[1-9]\d{0,3}$/.test(text) ? Number(text) : undefined;
}

/** A single prompt is not put into an array: some servers accept only a string. */
function callCompletions(inputs: readonly Json[], parameters: Json, model: string): WorkerCall {
  const prompt = inputs.length === 1 ? inputs[0]! : `[${inputs.join(",")}]`;
  const start = `"model":${JSON.stringify(model)},"prompt":${prompt}`;
  return { body: callBody(start, parameters, COMPLETIONS_OWN) };
}

function completionOutputs({ body }: WorkerReply, inputs: readonly Json[], parameters: Json): Outputs {
  const text = body.toString("utf8");
  const { elements, flaw } = splitField(text, "choices");
  if (flaw !== undefined) return { flaw };
  const told = cutFields(parameters);
  const n = choicesPerPrompt(told?.get("n")) ?? 1;
  if (elements.length !== inputs.length * n) {
    return { flaw: `has ${elements.length} choices for ${inputs.length} prompts with n = ${n}` };
  }
  const placed = byIndex(elements, "choice", (fields) => (isText(fields.get("text")) ? fields : undefined));
  if (placed.flaw !== undefined) return placed;
  const choices = inputs.map((_, p) => placed.parts.slice(p * n, p * n + n));
  const echoes = told?.get("echo") === "true";
  const generated = choices.map((own, p) => {
    // The echo of a token prompt cannot be recognized.
    const echoed = echoes && isText(inputs[p]) ? inputs[p]!.length : 2;
    return own.reduce((sum, choice) => sum + Math.max(0, choice.get("text")!.length - echoed), 0);
  });
  const fields = cutFields(text);
  const usage = fields?.get("usage");
  const prompts = apportion(tokenCount(usage, "prompt_tokens"), inputs.map(weightOf));
  const completions = apportion(tokenCount(usage, "completion_tokens"), generated);
  return {
    outputs: choices.map((own, p) => {
      const output = {
        choices: `[${own.map(choiceText).join(",")}]`,
        prompt_tokens: prompts[p],
        completion_tokens: completions[p],
        ...originOf(fields),
      };
      return detached(objectText(output));
    }),
  };
}

function originOf(fields: Fields | undefined): Record<"created" | "system_fingerprint", Json | undefined> {
  const [created, fingerprint] = [fields?.get("created"), fields?.get("system_fingerprint")];
  return {
    created: wholeNumber(created) === undefined ? undefined : created,
    system_fingerprint: isText(fingerprint) ? fingerprint : undefined,
  };
}

function renderCompletions(
  outputs: readonly Json[],
  model: string,
  n: number,
  request?: Rendered,
): ProtocolAnswer {
  const completions = outputs.map(completionsOf);
  let [prompt, completion] = [0, 0];
  const choices = completions.flatMap((each) => {
    prompt += each.promptTokens;
    completion += each.completionTokens;
    if (each.choices.length === n) return each.choices;
    const words = `the model gave ${each.choices.length} completions for a prompt, not n = ${n}`;
    throw new Refusal("INFERENCE_FAILED", words);
  });
  const { created, system_fingerprint } = completions[0]!;
  return {
    body: objectText({
      id: JSON.stringify(`cmpl-${request?.id ?? ""}`),
      object: '"text_completion"',
      created: created ?? Math.floor((request?.at ?? 0) / 1000),
      model: JSON.stringify(model),
      system_fingerprint,
      choices: `[${choices.map((choice, index) => `{"index":${index},${choice.slice(1)}`).join(",")}]`,
      usage: objectText({
        prompt_tokens: prompt,
        completion_tokens: completion,
        total_tokens: prompt + completion,
      }),
    }),
  };
}

interface Completions extends ReturnType<typeof originOf> {
  readonly choices: readonly Json[];
  readonly promptTokens: number;
  readonly completionTokens: number;
}

function completionsOf(output: Json): Completions {
  const whole = output.startsWith("{") ? cutFields(output) : undefined;
  const list = whole?.get("choices");
  const parts = arrayElements(list ?? output) ?? [output];
  const choices = parts.map((part) => {
    const fields = isText(part) ? new Map([["text", part]]) : cutFields(part);
    if (fields !== undefined && isText(fields.get("text"))) return choiceText(fields);
    const words = `the model's output is neither a text nor an object with a "text"`;
    throw new Refusal("INFERENCE_FAILED", words);
  });
  const counted = list === undefined ? parts : [output];
  const counts = (name: string): number[] => counted.map((part) => tokenCount(part, name) ?? 0);
  return {
    choices,
    // Each of n choices may repeat the count of their shared prompt.
    promptTokens: Math.max(0, ...counts("prompt_tokens")),
    completionTokens: counts("completion_tokens").reduce((all, next) => all + next, 0),
    ...originOf(whole),
  };
}

function choiceText(fields: Fields): Json {
  const choice = { logprobs: "null", finish_reason: '"stop"', ...Object.fromEntries(fields) };
  return objectText({ ...choice, index: undefined, prompt_tokens: undefined, completion_tokens: undefined });
}

type Placed<Part> =
  | { readonly parts: readonly Part[]; readonly flaw?: never }
  | { readonly parts?: never; readonly flaw: string };

/**
 * Applies `take` to a reply's list in input order; `take` returns undefined for what is no `noun`. Servers may send
 * elements in any order with an `index`: each must occur exactly once, else a caller would get another's answer.
 * Without indexes the list order counts.
 */
function byIndex<Part>(
  elements: readonly Json[],
  noun: string,
  take: (fields: Fields) => Part | undefined,
): Placed<Part> {
  const found: { readonly part: Part; readonly index: Json | undefined }[] = [];
  for (const [position, element] of elements.entries()) {
    const fields = cutFields(element);
    const part = fields && take(fields);
    if (part === undefined) return { flaw: `has no ${noun} at ${position} of its list` };
    found.push({ part, index: isSet(fields!, "index") ? fields!.get("index") : undefined });
  }
  const told = found.filter(({ index }) => index !== undefined).length;
  if (told !== 0 && told !== found.length) return { flaw: `has an index at some of its ${noun}s only` };
  const parts = new Map<number, Part>();
  for (const [position, { part, index = String(position) }] of found.entries()) {
    const at = Number(index);
    if (!Number.isInteger(at) || at < 0 || at >= found.length) {
      return { flaw: `has an index out of range at one of its ${noun}s` };
    }
    if (parts.has(at)) return { flaw: `has the index ${at} twice` };
    parts.set(at, part);
  }
  return { parts: found.map((_, at) => parts.get(at)!) };
}

/** In OpenAI's shape, with KServe's fields for models that speak it. */
function modelList({ models }: ModelFacts): ProtocolAnswer {
  const kserve = models.some(({ protocols }) => protocols.includes("kserve-v1"));
  const names = models.map(({ name }) => name);
  return {
    body: JSON.stringify({ object: "list", data: models.map(described), ...(kserve && { models: names }) }),
  };
}

/** `name` and `ready` are KServe's fields. `created` is unknown; clients require a number. */
function described({ name, ready, protocols }: Known): object {
  const kserve = protocols.includes("kserve-v1") ? { name, ready } : {};
  return { id: name, object: "model", created: 0, owned_by: "ferry", ...kserve };
}

/** SDKs choose their exception by status; people read type and code. */
const ERROR_KINDS: Partial<Record<ErrorCode, readonly [type: string, code: string]>> = {
  UNAUTHENTICATED: ["invalid_request_error", "invalid_api_key"],
  FORBIDDEN: ["invalid_request_error", "permission_denied"],
  NOT_FOUND: ["invalid_request_error", "model_not_found"],
  RATE_LIMITED: ["rate_limit_error", "rate_limit_exceeded"],
  INTERNAL: ["server_error", "internal_error"],
  INFERENCE_FAILED: ["server_error", "inference_failed"],
  SERVICE_OVERLOADED: ["server_error", "service_overloaded"],
  DEADLINE_EXCEEDED: ["server_error", "deadline_exceeded"],
};

function openaiError({ code, message, status }: Refusal): ProtocolAnswer {
  const [type, named] = ERROR_KINDS[code] ?? ["invalid_request_error", code.toLowerCase()];
  return {
    // OpenAI's status for an unacceptable input.
    status: code === "INPUT_REJECTED" ? 400 : status,
    body: JSON.stringify({ error: { message, type, param: null, code: named } }),
  };
}
