/**
 * Text Embeddings Inference (TEI).
 *
 *   /embed, /embed_all, /embed_sparse
 *     {"inputs": "text" | [1,2,3] | ["text" | [1,2],…],"truncate"?,"normalize"?,"prompt_name"?,"dimensions"?,…}
 *     a list with one value per input, also for a single input. A list of numbers is one input of tokens
 *   /predict
 *     {"inputs": "a" | ["a","b"] | [["a"],["b","c"]],"truncate"?,"truncation_direction"?,"raw_scores"?}
 *     [{"score","label"},…], or one such list per input. `["a","b"]` is ONE input, a pair; only lists of lists are several
 *   /rerank
 *     {"query","texts":[…],"truncate"?,"truncation_direction"?,"raw_scores"?,"return_text"?}
 *     [{"index","text"?,"score"},…], the best first
 *   /         used by Hugging Face's clients: `/rerank` with a `query`, else `/embed`
 *
 * A request names no model: it means the only one that speaks TEI, or the one whose base URL it was sent to.
 *
 * A call of `/rerank` has one query, so callers could not share it. To TEI a re-ranker is a classifier with one class:
 * `/predict` with the pair of query and text computes the same score. So each text is a task, texts of all queries
 * share calls of `/predict`, and the ranks are made here: by score, ties last text first, as in TEI.
 *
 *   $route         a task's input              its output, beside "prompt_tokens"
 *   embed          "text" or [1,2,3]           {"embedding":[…]}
 *   embed_all      "text" or [1,2,3]           {"embeddings":[[…],…]}, one per token
 *   embed_sparse   "text" or [1,2,3]           {"sparse":[{"index","value"},…]}
 *   predict        ["text"] or ["one","two"]   {"predictions":[{"score","label"},…]}
 *   rerank         ["query","text"]            {"predictions":[{"score","label"}]}
 *
 * Other backends return the value alone, also as a tensor; for `rerank` the score. `x-compute-tokens` is per call;
 * `/info` states the maximum batch size, and 413 or 422 for more make the dispatcher bisect the batch.
 */
import { type ErrorCode, Refusal } from "../../core/errors.ts";
import { splitArray } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { numbersText, readBinary } from "../../core/tensor.ts";
import { asNumbers, embeddingText, isEmbedding, outputFields } from "./embedding.ts";
import {
  askWorker,
  between,
  booleanField,
  callBody,
  cutFields,
  detached,
  arrayElements,
  type Fields,
  inPieces,
  inputsIn,
  invalid,
  isText,
  isTokens,
  listed,
  parametersOf,
  readFields,
  stringField,
  wholeNumber,
  withoutEnding,
} from "./fields.ts";
import type {
  ModelFacts,
  ProtocolAnswer,
  WorkerCall,
  Drafts,
  InferRoute,
  Outputs,
  Protocol,
  WorkerReply,
  RequestLimits,
} from "./protocol.ts";
import { apportion, weightOf } from "./usage.ts";

const OUTPUT_FIELDS = {
  embed: "embedding",
  embed_all: "embeddings",
  embed_sparse: "sparse",
  predict: "predictions",
  rerank: "predictions",
} as const;
type TeiRoute = keyof typeof OUTPUT_FIELDS;

/** TEI's defaults; dropped, so that equivalent requests share a batch. */
const DEFAULTS: Readonly<Record<string, Json>> = {
  normalize: "true",
  truncation_direction: '"Right"',
  raw_scores: "false",
};
/** TEI's default `--max-client-batch-size`. */
const USUAL_BATCH_SIZE = 32;
const OWN: ReadonlySet<string> = new Set(["inputs"]);

export const tei: Protocol = {
  name: "tei",
  client: {
    infer: [
      route("/embed", (fields, limits) => draftEmbed(fields, "embed", limits)),
      route("/embed_all", (fields, limits) => draftEmbed(fields, "embed_all", limits)),
      route("/embed_sparse", (fields, limits) => draftEmbed(fields, "embed_sparse", limits)),
      route("/predict", draftPredict),
      route("/rerank", draftRerank),
      route("/", (fields, limits) =>
        fields.has("query") ? draftRerank(fields, limits) : draftEmbed(fields, "embed", limits),
      ),
    ],
    about: [
      { path: "/info", tell: askWorker, fallback: ownInfo },
      { path: "/health", open: true, tell: health },
    ],
    fail: teiError,
  },
  worker: {
    maxBatchSize: USUAL_BATCH_SIZE,
    info: { path: "/info", maxBatchSize: batchSizeIn },
    healthPath: "/health",
    basePath: (path) => withoutEnding(path, ...Object.keys(OUTPUT_FIELDS).map((name) => `/${name}`)),
    call,
    outputs,
  },
};

function route(path: string, draft: (fields: Fields, limits: RequestLimits) => Drafts): InferRoute {
  return { path, read: ({ body, limits }) => draft(readFields(body), limits) };
}

function draftEmbed(fields: Fields, name: TeiRoute, limits: RequestLimits): Drafts {
  return {
    inputs: embedInputs(fields.get("inputs"), limits),
    parameters: sharedBy(fields, name, ["inputs"]),
    ...inPieces((outputs) => {
      const read = outputs.map((output) => readOutput(output, name));
      return { headers: computeHeaders(read), texts: values(read, name) };
    }),
  };
}

function embedInputs(text: Json | undefined, limits: RequestLimits): readonly Json[] {
  if (text === undefined) throw invalid("`inputs` is missing");
  if (isText(text) || isTokens(text)) return [text];
  const elements = listOf(text, "inputs", limits);
  if (elements === undefined) throw invalid("`inputs` must be a string or a list");
  if (elements.every((each) => isText(each) || isTokens(each))) return elements;
  throw invalid("`inputs` must hold strings or lists of tokens");
}

function* values(read: readonly TeiOutput[], name: TeiRoute): Generator<Json, void> {
  yield "[";
  yield* listed(read, ({ value }) => (name === "embed" ? asNumbers(value) : value));
  yield "]";
}

function draftPredict(fields: Fields, limits: RequestLimits): Drafts {
  const { inputs, single } = sequencesOf(fields.get("inputs"), limits);
  return {
    inputs,
    parameters: sharedBy(fields, "predict", ["inputs"]),
    render: (outputs) => {
      const read = outputs.map((output) => readOutput(output, "predict"));
      const lists = read.map(({ value }) => value);
      return { headers: computeHeaders(read), body: single ? lists[0]! : `[${lists.join(",")}]` };
    },
  };
}

function sequencesOf(
  text: Json | undefined,
  limits: RequestLimits,
): { inputs: readonly Json[]; single: boolean } {
  if (text === undefined) throw invalid("`inputs` is missing");
  if (isText(text)) return { inputs: [`[${text}]`], single: true };
  const elements = listOf(text, "inputs", limits);
  const single = elements?.every(isText) === true;
  const inputs = (single ? [elements] : elements?.map(arrayElements))?.map((texts) =>
    texts !== undefined && texts.length >= 1 && texts.length <= 2 && texts.every(isText)
      ? `[${texts.join(",")}]`
      : undefined,
  );
  if (inputs?.every((input) => input !== undefined) === true) return { inputs, single };
  throw invalid(
    "`inputs` must be a string, a pair of strings [a, b], or a list of these as [[a], [b, c], …]",
  );
}

function draftRerank(fields: Fields, limits: RequestLimits): Drafts {
  const query = fields.get("query");
  if (stringField(fields, "query") === undefined) throw invalid("`query` is missing");
  const texts = listOf(fields.get("texts") ?? "", "texts", limits);
  if (texts === undefined || !texts.every(isText)) throw invalid("`texts` must be a list of strings");
  checkProduct(query!, texts, limits);
  const withTexts = booleanField(fields, "return_text") === true;
  return {
    inputs: texts.map((text) => `[${query},${text}]`),
    parameters: sharedBy(fields, "rerank", ["query", "texts", "return_text"]),
    render: (outputs) => ranked(outputs, withTexts ? texts : undefined),
  };
}

/** Checked before the query is copied into each task. */
function checkProduct(query: Json, texts: readonly Json[], { maxBytes }: RequestLimits): void {
  let bytes = query.length * texts.length;
  for (const { length } of texts) bytes += length;
  if (bytes <= maxBytes) return;
  const what = `a query of ${query.length} characters with ${texts.length} texts makes inputs of ${bytes} bytes`;
  throw new Refusal(
    "PAYLOAD_TOO_LARGE",
    `${what}; at most ${maxBytes} are taken: send fewer texts at a time`,
  );
}

function ranked(outputs: readonly Json[], texts: readonly Json[] | undefined): ProtocolAnswer {
  const ranks = outputs.map((output, index) => ({ index, ...scoreIn(output) }));
  const headers = computeHeaders(ranks);
  ranks.sort((a, b) => Number(b.score) - Number(a.score) || b.index - a.index);
  const parts = ranks.map(({ index, score }) => {
    const text = texts === undefined ? "" : `"text":${texts[index]},`;
    return `{"index":${index},${text}"score":${score}}`;
  });
  return { headers, body: `[${parts.join(",")}]` };
}

/** The exact text of the score; also from a function that returns it alone, or as `{"score":…}`. */
function scoreIn(output: Json): { score: Json; tokens: number | undefined } {
  const tensor = readBinary(output);
  // One value, as a classifier with one class returns it.
  if (tensor?.dtype !== undefined && tensor.shape.every((dimension) => dimension === 1)) {
    return { score: numbersText({ ...tensor, shape: [] }), tokens: undefined };
  }
  const fields = output.startsWith("{") ? cutFields(output) : undefined;
  const predictions = fields === undefined ? output : (fields.get("predictions") ?? "");
  const score = fields?.get("score") ?? onlyScore(predictions) ?? output;
  if (!/^-?\d/.test(score)) throw noOutput("rerank");
  return { score, tokens: wholeNumber(fields?.get("prompt_tokens")) };
}

/** Undefined for a classifier with several classes. */
function onlyScore(predictions: Json): Json | undefined {
  const elements = arrayElements(predictions);
  return elements?.length === 1 ? cutFields(elements[0])?.get("score") : undefined;
}

function sharedBy(fields: Fields, name: TeiRoute, own: readonly string[]): Json {
  for (const flag of ["truncate", "normalize", "raw_scores"]) booleanField(fields, flag);
  const but = new Set(own);
  for (const field in DEFAULTS) if (fields.get(field) === DEFAULTS[field]) but.add(field);
  return parametersOf(fields, but, { $route: `"${name}"` });
}

/** `embed` for anything unknown: native API callers may send anything, and must not choose a path. */
function routeOf(parameters: Json): TeiRoute {
  const named = between(parameters, "$route")?.slice(1, -1) ?? "";
  return Object.hasOwn(OUTPUT_FIELDS, named) ? (named as TeiRoute) : "embed";
}

/** Undefined unless it is a list. Throws a Refusal if it is empty or too long. */
function listOf(text: Json, name: string, { maxInputs }: RequestLimits): readonly Json[] | undefined {
  const inputs = inputsIn(text, name, maxInputs);
  if (inputs?.length === 0) throw invalid(`\`${name}\` cannot be empty`);
  return inputs;
}

interface TeiOutput {
  readonly value: Json;
  readonly tokens: number | undefined;
}

function readOutput(output: Json, name: TeiRoute): TeiOutput {
  if (!output.startsWith("{")) return { value: output, tokens: undefined };
  const tensor = readBinary(output);
  if (tensor?.dtype !== undefined) {
    return { value: name === "embed" ? embeddingText(output) : numbersText(tensor), tokens: undefined };
  }
  const fields = outputFields(output);
  const value = fields?.get(OUTPUT_FIELDS[name]);
  if (value === undefined) throw noOutput(name);
  return { value, tokens: wholeNumber(fields!.get("prompt_tokens")) };
}

function noOutput(name: TeiRoute): Refusal {
  return new Refusal("INFERENCE_FAILED", `the model's output has no ${OUTPUT_FIELDS[name]}`);
}

/** `x-compute-tokens`, if every output was counted. */
function computeHeaders(outputs: readonly Pick<TeiOutput, "tokens">[]): readonly string[] {
  let sum = 0;
  for (const { tokens } of outputs) {
    if (tokens === undefined) return [];
    sum += tokens;
  }
  return ["x-compute-tokens", String(sum)];
}

function batchSizeIn(info: string): number | undefined {
  const said = cutFields(info)?.get("max_client_batch_size") ?? "";
  return /^[1-9]\d{0,8}$/.test(said) ? Number(said) : undefined;
}

function call(inputs: readonly Json[], parameters: Json): WorkerCall {
  const name = routeOf(parameters);
  const pairs = takesSequences(name);
  // Two adjacent texts would be taken for one pair.
  const texts = pairs ? inputs.map((input) => (input.startsWith("[") ? input : `[${input}]`)) : inputs;
  return {
    path: pairs ? "/predict" : `/${name}`,
    named: name !== "embed",
    body: callBody(`"inputs":[${texts.join(",")}]`, parameters, OWN),
  };
}

function outputs(reply: WorkerReply, inputs: readonly Json[], parameters: Json): Outputs {
  const name = routeOf(parameters);
  const { elements, flaw } = splitArray(reply.body.toString("utf8"));
  if (flaw !== undefined) return { flaw };
  if (elements.length !== inputs.length)
    return { flaw: `has ${elements.length} values for ${inputs.length} inputs` };
  const wrong = elements.findIndex((element) => !fits(element, name));
  const hint = name === "rerank" ? " with one score; is it a re-ranker?" : "";
  if (wrong >= 0) return { flaw: `has no ${OUTPUT_FIELDS[name]} at ${wrong}${hint}` };
  const weights = inputs.map(takesSequences(name) ? ({ length }) => length : weightOf);
  const shares = apportion(wholeNumber(reply.header("x-compute-tokens")), weights);
  return {
    outputs: elements.map((element, at) => {
      const tokens = shares[at] === undefined ? "" : `"prompt_tokens":${shares[at]},`;
      return `{${tokens}"${OUTPUT_FIELDS[name]}":${detached(element)}}`;
    }),
  };
}

function fits(element: Json, name: TeiRoute): boolean {
  if (!element.startsWith("[")) return false;
  if (name === "embed") return isEmbedding(element);
  return name !== "rerank" || onlyScore(element) !== undefined;
}

function takesSequences(name: TeiRoute): boolean {
  return name === "predict" || name === "rerank";
}

function ownInfo({ model, version, maxInputs }: ModelFacts): ProtocolAnswer {
  const info = { model_id: model!.name, max_client_batch_size: maxInputs, version: `ferry ${version}` };
  return { body: JSON.stringify(info) };
}

function health({ models, model, ready }: ModelFacts): ProtocolAnswer {
  const asked = model === undefined ? models.filter(({ protocols }) => protocols.includes("tei")) : [model];
  if (ready && asked.some((each) => each.ready)) return { type: "text/plain", body: Buffer.alloc(0) };
  return { status: 503, body: JSON.stringify({ error: "unhealthy", error_type: "Unhealthy" }) };
}

/** TEI's `error_type`, and the status its clients expect; undefined: Ferry's. */
const ERROR_KINDS: Partial<Record<ErrorCode, readonly [type: string, status?: number]>> = {
  INVALID_REQUEST: ["Validation", 422],
  RATE_LIMITED: ["Overloaded"],
  SERVICE_OVERLOADED: ["Overloaded", 429],
  INFERENCE_FAILED: ["Backend", 424],
  INTERNAL: ["Backend"],
  DEADLINE_EXCEEDED: ["Backend"],
};

function teiError({ code, message, status }: Refusal): ProtocolAnswer {
  const [type, theirs = status] = ERROR_KINDS[code] ?? ["Validation"];
  return { status: theirs, body: JSON.stringify({ error: message, error_type: type }) };
}
