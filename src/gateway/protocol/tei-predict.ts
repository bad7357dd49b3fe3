/**
 * TEI's `POST /predict` and `POST /rerank`, the side of the clients.
 *
 *   {"inputs": "a" | ["a","b"] | [["a"],["b","c"]],"truncate"?,"truncation_direction"?,"raw_scores"?}
 *   [{"score","label"},…], or one such list per input
 *
 * `["a","b"]` is ONE input, a pair; only lists of lists are several, and only they are answered with several lists.
 *
 *   {"query","texts":[…],"truncate"?,"truncation_direction"?,"raw_scores"?,"return_text"?}
 *   [{"index","text"?,"score"},…], the best first
 *
 * A call of `/rerank` has one query, so callers could not share it. To TEI a re-ranker is a classifier with one class:
 * `/predict` takes it, with the pair of query and text as its input, and gives it the same score. So each text is a
 * task of its own, texts of all queries share calls of `/predict`, and the ranks are made here: by score, and of
 * equal scores the last text first, as TEI does.
 */
import { Refusal } from "../../core/errors.ts";
import type { Json } from "../../core/task.ts";
import { numbersText, readBinary } from "../../core/tensor.ts";
import {
  booleanField,
  cutFields,
  elementsOf,
  type Fields,
  invalid,
  readFields,
  stringField,
} from "./fields.ts";
import type { Answer, Asked, Drafts, RequestLimits } from "./protocol.ts";
import { computeHeaders, countIn, listOf, noOutput, readOutput, sharedBy } from "./tei-form.ts";

export function readPredict({ body, limits }: Asked): Drafts {
  const fields = readFields(body);
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
  if (text.startsWith('"')) return { inputs: [`[${text}]`], single: true };
  const elements = listOf(text, "inputs", limits);
  if (elements === undefined) throw wrongSequences();
  if (elements.every(isText)) {
    if (elements.length > 2) throw wrongSequences();
    return { inputs: [`[${elements.join(",")}]`], single: true };
  }
  const inputs = elements.map((element) => {
    const texts = elementsOf(element);
    if (texts === undefined || texts.length < 1 || texts.length > 2 || !texts.every(isText))
      throw wrongSequences();
    return `[${texts.join(",")}]`;
  });
  return { inputs, single: false };
}

function isText(text: Json): boolean {
  return text.startsWith('"');
}

function wrongSequences(): Refusal {
  return invalid(
    "`inputs` must be a string, a pair of strings [a, b], or a list of these as [[a], [b, c], …]",
  );
}

const RERANK_OWN = ["query", "texts", "return_text"];

export function readRerank({ body, limits }: Asked): Drafts {
  return draftRerank(readFields(body), limits);
}

export function draftRerank(fields: Fields, limits: RequestLimits): Drafts {
  const query = fields.get("query");
  if (stringField(fields, "query") === undefined) throw invalid("`query` is missing");
  const texts = listOf(fields.get("texts") ?? "", "texts", limits);
  if (texts === undefined || !texts.every(isText)) throw invalid("`texts` must be a list of strings");
  checkProduct(query!, texts, limits);
  const withTexts = booleanField(fields, "return_text") === true;
  return {
    inputs: texts.map((text) => `[${query},${text}]`),
    parameters: sharedBy(fields, "rerank", RERANK_OWN),
    render: (outputs) => ranked(outputs, withTexts ? texts : undefined),
  };
}

/** Before the query is copied into each task. */
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

function ranked(outputs: readonly Json[], texts: readonly Json[] | undefined): Answer {
  const ranks = outputs.map((output, index) => {
    const { score, tokens } = scoreIn(output);
    return { index, score, tokens, value: Number(score) };
  });
  const headers = computeHeaders(ranks);
  ranks.sort((a, b) => b.value - a.value || b.index - a.index);
  const parts = ranks.map(({ index, score }) => {
    const text = texts === undefined ? "" : `"text":${texts[index]},`;
    return `{"index":${index},${text}"score":${score}}`;
  });
  return { headers, body: `[${parts.join(",")}]` };
}

/** The very text of the score; also from a function that returns it alone, or as `{"score":…}`. */
function scoreIn(output: Json): { score: Json; tokens: number | undefined } {
  const tensor = readBinary(output);
  // Of one value, as a classifier with one class has it.
  if (tensor?.dtype !== undefined && tensor.shape.every((dimension) => dimension === 1)) {
    return { score: numbersText({ ...tensor, shape: [] }), tokens: undefined };
  }
  const fields = output.startsWith("{") ? cutFields(output) : undefined;
  const predictions = fields === undefined ? output : (fields.get("predictions") ?? "");
  const score = fields?.get("score") ?? onlyScore(predictions) ?? output;
  if (!/^-?\d/.test(score)) throw noOutput("rerank");
  return { score, tokens: countIn(fields?.get("prompt_tokens")) };
}

/** Of a list of one prediction; undefined where there are more, which is a classifier's answer. */
export function onlyScore(predictions: Json): Json | undefined {
  const elements = elementsOf(predictions);
  return elements?.length === 1 ? cutFields(elements[0]!)?.get("score") : undefined;
}
