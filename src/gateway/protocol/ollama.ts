/**
 * Ollama's `POST /api/embed`.
 *
 *   {"model","input": "text" | ["text",…],"truncate"?,"dimensions"?,"options"?,"keep_alive"?}
 *   {"model","embeddings":[[…],…],"total_duration":ns,"load_duration":ns,"prompt_eval_count":n}
 *   {"error":"…"}
 *
 * `keep_alive` does not affect the output, so it does not split batches: it travels with the input, and a call uses the
 * longest of its batch. Durations and `prompt_eval_count` are per call and apportioned by input length.
 *
 * Requests without text (they load or unload the model) and the older `POST /api/embeddings` (vectors not normalised)
 * bypass the batches.
 *
 * A task's input is the text, or `{"text","keep_alive"}`; its output is `{"embedding":…}` beside the three figures.
 * Other backends return the embedding alone.
 */
import { Refusal } from "../../core/errors.ts";
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { asNumbers, embeddingText, isEmbedding, outputFields } from "./embedding.ts";
import {
  callBody,
  cutFields,
  detached,
  type Fields,
  inPieces,
  inputsIn,
  invalid,
  isSet,
  isText,
  listed,
  objectText,
  parametersOf,
  plainError,
  readFields,
  stringField,
  wholeNumber,
  withoutEnding,
} from "./fields.ts";
import type { Asked, WorkerCall, Drafts, Outputs, Protocol, WorkerReply, Unbatched } from "./protocol.ts";
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
      {
        path: OLD_PATH,
        read: ({ body }) => ({ unbatched: true, model: stringField(readFields(body), "model") }),
      },
    ],
    about: [],
    fail: plainError,
  },
  worker: { basePath: (path) => withoutEnding(path, PATH, OLD_PATH), call, outputs },
};

function read({ body, limits }: Asked): Drafts | Unbatched {
  const fields = readFields(body);
  const model = stringField(fields, "model");
  const texts = textsOf(fields.get("input") ?? "null", limits.maxInputs);
  if (texts.length === 0) return { unbatched: true, model };
  const keepAlive = readKeepAlive(fields);
  return {
    model,
    inputs:
      keepAlive === undefined ? texts : texts.map((text) => `{"text":${text},"keep_alive":${keepAlive}}`),
    parameters: parametersOf(fields, OWN),
    ...inPieces((outputs, named) => ({ texts: written(outputs, model ?? named) })),
  };
}

function textsOf(input: Json, maxInputs: number): readonly Json[] {
  if (input === "null" || input === '""') return [];
  if (isText(input)) return [input];
  const elements = inputsIn(input, "input", maxInputs);
  if (elements?.every(isText) !== true) throw invalid('"input" must be a string or a list of strings');
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

function call(inputs: readonly Json[], parameters: Json, model: string): WorkerCall {
  const parts = inputs.map((input) => {
    const fields = input.startsWith("{") ? cutFields(input) : undefined;
    const text = fields?.get("text");
    // Anything else is passed unchanged.
    return text === undefined ? { text: input } : { text, keepAlive: fields!.get("keep_alive") };
  });
  const keepAlive = longest(parts.map((part) => part.keepAlive));
  const texts = parts.map(({ text }) => text).join(",");
  const kept = keepAlive === undefined ? "" : `,"keep_alive":${keepAlive}`;
  const start = `"model":${JSON.stringify(model)},"input":[${texts}]${kept}`;
  return { path: PATH, body: callBody(start, parameters, OWN) };
}

function outputs({ body }: WorkerReply, inputs: readonly Json[]): Outputs {
  const reply = body.toString("utf8");
  const { elements, flaw } = splitField(reply, "embeddings");
  if (flaw !== undefined) return { flaw };
  if (elements.length !== inputs.length)
    return { flaw: `has ${elements.length} embeddings for ${inputs.length} inputs` };
  const wrong = elements.findIndex((element) => !element.startsWith("[") || !isEmbedding(element));
  if (wrong >= 0) return { flaw: `has no embedding at ${wrong}` };
  const fields = cutFields(reply);
  const weights = inputs.map((input) => input.length);
  const shares = FIGURES.map((name) => apportion(wholeNumber(fields?.get(name)), weights));
  return {
    outputs: elements.map((element, at) => {
      const figures = FIGURES.map((name, index) => [name, shares[index]![at]] as const);
      return objectText({ ...Object.fromEntries(figures), embedding: detached(element) });
    }),
  };
}

/**
 * `keep_alive`: a duration ("5m", "1h30m", "1.5h", "250ms") or seconds (10, "10"); negative: for ever; 0: unload at
 * once. Servers default to 5 minutes unless configured; if that is a batch's longest, none is sent.
 */
const DEFAULT_SECONDS = 300;
const UNITS: Readonly<Record<string, number>> = {
  h: 3600,
  m: 60,
  s: 1,
  ms: 1e-3,
  us: 1e-6,
  µs: 1e-6,
  μs: 1e-6,
  ns: 1e-9,
};
const PART = /(\d+(?:\.\d*)?|\.\d+)(h|ms|m|s|us|µs|μs|ns)/g;
const DURATION = new RegExp(`^[-+]?(?:${PART.source})+$`);

function readKeepAlive(fields: Fields): Json | undefined {
  if (!isSet(fields, "keep_alive")) return undefined;
  const text = fields.get("keep_alive")!;
  if (secondsOf(text) === undefined)
    throw invalid('"keep_alive" must be a duration such as "5m", or seconds');
  return text;
}

/** Infinity: for ever. Undefined: not a duration. */
export function secondsOf(text: Json): number | undefined {
  const plain = isText(text) ? (JSON.parse(text) as string) : text;
  if (plain.length > 64) return undefined;
  let seconds: number;
  if (/^[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?$/.test(plain)) seconds = Number(plain);
  else if (DURATION.test(plain)) {
    seconds = 0;
    for (const [, count, unit] of plain.matchAll(PART)) seconds += Number(count) * UNITS[unit!]!;
    if (plain.startsWith("-")) seconds = -seconds;
  } else return undefined;
  return seconds < 0 ? Infinity : seconds;
}

/** The longest of a batch, where undefined is the server's default; undefined: send none. */
export function longest(texts: readonly (Json | undefined)[]): Json | undefined {
  let best: Json | undefined;
  let most = texts.includes(undefined) ? DEFAULT_SECONDS : -1;
  for (const text of texts) {
    const seconds = text === undefined ? undefined : secondsOf(text);
    if (seconds === undefined || seconds <= most) continue;
    most = seconds;
    best = text;
  }
  return best;
}
