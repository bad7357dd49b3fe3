/**
 * TEI, the side of the workers: tasks of one route become one call of it, `rerank` a call of `/predict`.
 *
 *   200  a list with one value per input, in order; x-compute-tokens for the call as a whole
 *   413, 422  more inputs than `max_client_batch_size`, among other things: the batch is cut in halves
 *
 * What a server takes stands in its `/info`; 32 until it has said so.
 */
import { splitArray } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { isEmbedding } from "./embedding.ts";
import { cutFields, detached, sent, without } from "./fields.ts";
import type { Call, Outputs, Replied, WorkerSide } from "./protocol.ts";
import { countIn, OUTPUT_FIELDS, outputText, routeOf, type TeiRoute } from "./tei-form.ts";
import { onlyScore } from "./tei-predict.ts";
import { apportion, weightOf } from "./usage.ts";

/** Of a server that was started without `--max-client-batch-size`. */
const USUAL_BATCH_SIZE = 32;

const OWN: ReadonlySet<string> = new Set(["inputs"]);

export const teiWorker: WorkerSide = {
  maxBatchSize: USUAL_BATCH_SIZE,
  info: { path: "/info", maxBatchSize: batchSizeIn },
  healthPath: "/health",
  basePath: (path) => without(path, ...Object.keys(OUTPUT_FIELDS).map((route) => `/${route}`)),
  call,
  outputs,
};

/** Undefined when it does not say, or not in words that make sense. */
function batchSizeIn(info: string): number | undefined {
  const said = cutFields(info)?.get("max_client_batch_size") ?? "";
  return /^[1-9]\d{0,8}$/.test(said) ? Number(said) : undefined;
}

function call(inputs: readonly Json[], parameters: Json): Call {
  const route = routeOf(parameters);
  const pairs = takesSequences(route);
  const texts = pairs ? inputs.map(sequence) : inputs;
  const more = sent(parameters, OWN);
  return {
    path: pairs ? "/predict" : `/${route}`,
    named: route !== "embed",
    body: `{"inputs":[${texts.join(",")}]${more === "" ? "" : `,${more}`}}`,
  };
}

/** Two texts side by side would be taken for one pair. */
function sequence(input: Json): Json {
  return input.startsWith("[") ? input : `[${input}]`;
}

function outputs(reply: Replied, inputs: readonly Json[], parameters: Json): Outputs {
  const route = routeOf(parameters);
  const { elements, flaw } = splitArray(reply.body.toString("utf8"));
  if (flaw !== undefined) return { flaw };
  if (elements.length !== inputs.length)
    return { flaw: `has ${elements.length} values for ${inputs.length} inputs` };
  const wrong = elements.findIndex((element) => !fits(element, route));
  if (wrong >= 0) return { flaw: `has no ${OUTPUT_FIELDS[route]} at ${wrong}${hint(route)}` };
  const parts = shares(countIn(reply.header("x-compute-tokens")), inputs, route);
  return {
    outputs: elements.map((element, at) => outputText(route, detached(element), parts[at])),
  };
}

function fits(element: Json, route: TeiRoute): boolean {
  if (route === "embed") return element.startsWith("[") && isEmbedding(element);
  if (!element.startsWith("[")) return false;
  return route !== "rerank" || onlyScore(element) !== undefined;
}

function hint(route: TeiRoute): string {
  return route === "rerank" ? " with one score; is it a re-ranker?" : "";
}

function shares(tokens: number | undefined, inputs: readonly Json[], route: TeiRoute): readonly number[] {
  if (tokens === undefined) return [];
  return apportion(tokens, inputs.map(takesSequences(route) ? (input) => input.length : weightOf));
}

function takesSequences(route: TeiRoute): boolean {
  return route === "predict" || route === "rerank";
}
