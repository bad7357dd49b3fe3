/**
 * What the two sides of TEI agree on: which route a task came by, and the form of its output.
 *
 *   $route         a task's input              its output, beside "prompt_tokens"
 *   embed          "text" or [1,2,3]           {"embedding":[…]}
 *   embed_all      "text" or [1,2,3]           {"embeddings":[[…],…]}, one per token
 *   embed_sparse   "text" or [1,2,3]           {"sparse":[{"index","value"},…]}
 *   predict        ["text"] or ["one","two"]   {"predictions":[{"score","label"},…]}
 *   rerank         ["query","text"]            {"predictions":[{"score","label"}]}
 *
 * A function behind it returns the value alone, also as a tensor; for `rerank` the score will do.
 */
import { Refusal } from "../../core/errors.ts";
import type { Json } from "../../core/task.ts";
import { numbersText, readBinary } from "../../core/tensor.ts";
import { embeddingText, outputFields } from "./embedding.ts";
import { between, booleanField, type Fields, inputsIn, invalid, parametersOf } from "./fields.ts";
import type { RequestLimits } from "./protocol.ts";

export const OUTPUT_FIELDS = {
  embed: "embedding",
  embed_all: "embeddings",
  embed_sparse: "sparse",
  predict: "predictions",
  rerank: "predictions",
} as const;
export type TeiRoute = keyof typeof OUTPUT_FIELDS;

/** Leaving these out says the same, and what says the same shares a batch. */
const DEFAULTS: Readonly<Record<string, Json>> = {
  normalize: "true",
  truncation_direction: '"Right"',
  raw_scores: "false",
};

/** What every task of the request shares: its fields but for `own`, and the route. */
export function sharedBy(fields: Fields, route: TeiRoute, own: readonly string[]): Json {
  for (const name of ["truncate", "normalize", "raw_scores"]) booleanField(fields, name);
  const but = new Set(own);
  for (const name in DEFAULTS) if (fields.get(name) === DEFAULTS[name]) but.add(name);
  return parametersOf(fields, but, { $route: `"${route}"` });
}

/** Anything unknown is `embed`: tasks also come by Ferry's own API, and no caller is to choose a path. */
export function routeOf(parameters: Json): TeiRoute {
  const named = between(parameters, "$route")?.slice(1, -1) ?? "";
  return Object.hasOwn(OUTPUT_FIELDS, named) ? (named as TeiRoute) : "embed";
}

/** The inputs in a list of the field `name`; undefined when it is none. Throws a Refusal where there are none, or too many. */
export function listOf(text: Json, name: string, { maxInputs }: RequestLimits): readonly Json[] | undefined {
  const inputs = inputsIn(text, name, maxInputs);
  if (inputs?.length === 0) throw invalid(`\`${name}\` cannot be empty`);
  return inputs;
}

export interface TeiOutput {
  readonly value: Json;
  /** Undefined where the worker does not count. */
  readonly tokens: number | undefined;
}

/** A task's output as a worker's side writes it. */
export function outputText(route: TeiRoute, value: Json, tokens: number | undefined): Json {
  const counted = tokens === undefined ? "" : `"prompt_tokens":${tokens},`;
  return `{${counted}"${OUTPUT_FIELDS[route]}":${value}}`;
}

/** A task's output, from whichever backend. Throws a Refusal when there is no value in it. */
export function readOutput(output: Json, route: TeiRoute): TeiOutput {
  if (!output.startsWith("{")) return { value: output, tokens: undefined };
  const tensor = readBinary(output);
  if (tensor?.dtype !== undefined) {
    return { value: route === "embed" ? embeddingText(output) : numbersText(tensor), tokens: undefined };
  }
  const fields = outputFields(output);
  const value = fields?.get(OUTPUT_FIELDS[route]);
  if (value === undefined) throw noOutput(route);
  return { value, tokens: countIn(fields!.get("prompt_tokens")) };
}

export function countIn(text: string | undefined): number | undefined {
  return text !== undefined && /^\d{1,15}$/.test(text) ? Number(text) : undefined;
}

export function noOutput(route: TeiRoute): Refusal {
  return new Refusal("INFERENCE_FAILED", `the model's output has no ${OUTPUT_FIELDS[route]}`);
}

/** `x-compute-tokens`, where the workers counted all of them. */
export function computeHeaders(outputs: readonly Pick<TeiOutput, "tokens">[]): readonly string[] {
  let sum = 0;
  for (const { tokens } of outputs) {
    if (tokens === undefined) return [];
    sum += tokens;
  }
  return ["x-compute-tokens", String(sum)];
}
