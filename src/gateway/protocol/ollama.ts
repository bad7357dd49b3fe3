/**
 * Ollama's `POST /api/embed`.
 *
 *   {"model","input": "text" | ["text",…],"truncate"?,"dimensions"?,"options"?,"keep_alive"?}
 *   {"model","embeddings":[[…],…],"total_duration":ns,"load_duration":ns,"prompt_eval_count":n}
 *   {"error":"…"}
 *
 * `keep_alive` says for how long the model stays loaded, not what comes out, so it keeps nobody apart: it travels with
 * the input, and the call has the longest of its batch. `total_duration`, `load_duration` and `prompt_eval_count` are
 * the call's as a whole; each input gets its part by its length, so that the parts sum to what the worker said.
 *
 * A request without any text loads or unloads the model, and `POST /api/embeddings`, the older API, answers with
 * vectors that are not normalised: both go to a worker as they came.
 *
 * A task's input is the text, or `{"text","keep_alive"}`; its output is `{"embedding":…}` beside the three figures. From
 * other backends the embedding alone will do.
 */
import { Refusal } from "../../core/errors.ts";
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { asNumbers, embeddingText, isEmbedding, outputFields } from "./embedding.ts";
import {
  cutFields,
  detached,
  inputsIn,
  invalid,
  objectText,
  parametersOf,
  readFields,
  sent,
  stringField,
  without,
} from "./fields.ts";
import { longest, readKeepAlive } from "./ollama-keep-alive.ts";
import { inPieces, listed } from "./pieces.ts";
import type { Answer, Asked, Call, Drafts, Outputs, Protocol, Replied, Unbatched } from "./protocol.ts";
import { apportion } from "./usage.ts";

const PATH = "/api/embed";
const OLD_PATH = "/api/embeddings";
const OWN: ReadonlySet<string> = new Set(["model", "input", "keep_alive"]);
const FIGURES = ["total_duration", "load_duration", "prompt_eval_count"] as const;

export const ollama: Protocol = {
  name: "ollama",
  client: {
    infer: [
      { path: PATH, read },
      { path: OLD_PATH, read: ({ body }) => unbatched(stringField(readFields(body), "model")) },
    ],
    about: [],
    fail,
  },
  worker: { basePath: (path) => without(path, PATH, OLD_PATH), call, outputs },
};

function unbatched(model: string | undefined): Unbatched {
  return { unbatched: true, model };
}

function read({ body, limits }: Asked): Drafts | Unbatched {
  const fields = readFields(body);
  const model = stringField(fields, "model");
  const texts = textsOf(fields.get("input"), limits.maxInputs);
  if (texts.length === 0) return unbatched(model);
  const keepAlive = readKeepAlive(fields.get("keep_alive"));
  return {
    model,
    inputs:
      keepAlive === undefined ? texts : texts.map((text) => `{"text":${text},"keep_alive":${keepAlive}}`),
    parameters: parametersOf(fields, OWN),
    ...inPieces((outputs, named) => ({ texts: written(outputs, model ?? named) })),
  };
}

function textsOf(input: Json | undefined, maxInputs: number): readonly Json[] {
  if (input === undefined || input === "null" || input === '""') return [];
  if (input.startsWith('"')) return [input];
  const elements = inputsIn(input, "input", maxInputs);
  if (elements === undefined || !elements.every((each) => each.startsWith('"')))
    throw invalid('"input" must be a string or a list of strings');
  return elements;
}

function* written(outputs: readonly Json[], model: string): Generator<Json, void> {
  const sums = FIGURES.map(() => 0);
  yield `{"model":${JSON.stringify(model)},"embeddings":[`;
  yield* listed(outputs, (output) => {
    const alone = embeddingText(output);
    if (isEmbedding(alone)) return asNumbers(alone);
    const fields = outputFields(output);
    FIGURES.forEach((name, at) => (sums[at]! += wholeNumber(fields?.get(name)) ?? 0));
    const embedding = fields?.get("embedding");
    if (embedding === undefined) throw new Refusal("INFERENCE_FAILED", "the model's output has no embedding");
    return asNumbers(embedding);
  });
  yield `],${FIGURES.map((name, at) => `"${name}":${sums[at]}`).join(",")}}`;
}

function call(inputs: readonly Json[], parameters: Json, model: string): Call {
  const parts = inputs.map(cutInput);
  const keepAlive = longest(parts.map((part) => part.keepAlive));
  const texts = parts.map(({ text }) => text).join(",");
  const more = sent(parameters, OWN);
  const kept = keepAlive === undefined ? "" : `,"keep_alive":${keepAlive}`;
  const fields = more === "" ? "" : `,${more}`;
  return { path: PATH, body: `{"model":${JSON.stringify(model)},"input":[${texts}]${kept}${fields}}` };
}

/** Text and keep_alive; what is neither of our forms goes on as it is. */
function cutInput(input: Json): { text: Json; keepAlive: Json | undefined } {
  const fields = input.startsWith("{") ? cutFields(input) : undefined;
  const text = fields?.get("text");
  return text === undefined
    ? { text: input, keepAlive: undefined }
    : { text, keepAlive: fields!.get("keep_alive") };
}

function outputs({ body }: Replied, inputs: readonly Json[]): Outputs {
  const reply = body.toString("utf8");
  const { elements, flaw } = splitField(reply, "embeddings");
  if (flaw !== undefined) return { flaw };
  if (elements.length !== inputs.length)
    return { flaw: `has ${elements.length} embeddings for ${inputs.length} inputs` };
  const wrong = elements.findIndex((element) => !element.startsWith("[") || !isEmbedding(element));
  if (wrong >= 0) return { flaw: `has no embedding at ${wrong}` };
  const fields = cutFields(reply);
  const weights = inputs.map((input) => input.length);
  const parts = FIGURES.map((name) => {
    const total = wholeNumber(fields?.get(name));
    return total === undefined ? [] : apportion(total, weights);
  });
  return {
    outputs: elements.map((element, at) => {
      const figures = FIGURES.map((name, index) => [name, parts[index]![at]?.toString()] as const);
      return objectText({ ...Object.fromEntries(figures), embedding: detached(element) });
    }),
  };
}

/** Undefined where nobody says, or it is none. */
function wholeNumber(text: Json | undefined): number | undefined {
  return text !== undefined && /^\d{1,15}$/.test(text) ? Number(text) : undefined;
}

function fail({ code, message, status }: Refusal): Answer {
  // What an input is refused for is a bad request to Ollama.
  return { status: code === "INPUT_REJECTED" ? 400 : status, body: JSON.stringify({ error: message }) };
}
