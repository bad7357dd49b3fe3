/**
 * OpenAI's `POST /v1/completions`, as clients and servers of many makes speak it.
 *
 *   {"model","prompt": "text" | ["text",…] | [1,2,3] | [[1,2],…],"n"?,"max_tokens"?,"temperature"?,"stop"?,…}
 *   {"id","object":"text_completion","created","model","choices":[{"text","index","logprobs","finish_reason"}],"usage"}
 *
 * Each prompt is a task. Of a call with P prompts the choices p × n to p × n + n - 1 are those of prompt p: a reply that
 * has not exactly P × n of them, each place once, is nobody's. Each caller gets its own, numbered from 0.
 *
 * `user` is not passed on: it would keep apart what can go together. Any other field goes to the worker and keeps
 * requests that differ in it apart. What cannot share a call goes past the batches: a `stream`, a `seed` (the same
 * draw again needs the same call again), and `prompt_embeds` (prompts of which we do not know the number).
 * Unless `temperature` is 0 a completion is drawn by lot, and never reused for another request or another prompt.
 *
 * Usage is counted for the whole call: prompt tokens are shared out by the length of the prompts, completion tokens by
 * what was generated. The breakdowns in it (`…_details`) are left out.
 *
 * A task's output is `{"choices":[…],"prompt_tokens","completion_tokens","created","system_fingerprint"}`, a choice
 * without its index. Other backends answer with the text alone, with `{"text","finish_reason"?,"prompt_tokens"?,
 * "completion_tokens"?,…}`, or, for `n` of them, with an array of these.
 */
import { Refusal } from "../../core/errors.ts";
import { splitField } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import {
  booleanField,
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
import { inputsOf } from "./openai-embeddings.ts";
import { openaiError } from "./openai-errors.ts";
import { byIndex } from "./openai-list.ts";
import { listModels, showModel } from "./openai-models.ts";
import type {
  Answer,
  Asked,
  Call,
  Drafts,
  Outputs,
  Protocol,
  Rendered,
  Replied,
  Unbatched,
} from "./protocol.ts";
import { apportion, tokenCount, weightOf } from "./usage.ts";

const PATH = "/v1/completions";
const OWN: ReadonlySet<string> = new Set(["model", "prompt", "user", "stream"]);
const ALONE = ["seed", "prompt_embeds"];
/** Set on token arrays, which servers do not take beside texts. */
const TOKENS = "$tokens";
/** Of a choice: what stands elsewhere in the answer. */
const NOT_OF_A_CHOICE: ReadonlySet<string> = new Set(["index", "prompt_tokens", "completion_tokens"]);

export const openaiCompletions: Protocol = {
  name: "openai-completions",
  client: { infer: [{ path: PATH, read }], about: [listModels, showModel], fail: openaiError },
  worker: { basePath: (path) => without(path, PATH), call, outputs },
};

function read({ body, limits }: Asked): Drafts | Unbatched {
  const fields = readFields(body);
  const model = stringField(fields, "model");
  const streams = booleanField(fields, "stream") === true;
  if (streams || ALONE.some((name) => isSet(fields, name))) return { unbatched: true, model };
  const n = choicesPerPrompt(fields);
  const { inputs, tokens } = inputsOf(fields, "prompt", limits);
  return {
    model,
    inputs,
    parameters: parametersOf(fields, OWN, tokens ? { [TOKENS]: "true" } : {}),
    drawn: Number(fields.get("temperature")) !== 0,
    render: (outputs, name, request) => render(outputs, name, n, request),
  };
}

function isSet(fields: Fields, name: string): boolean {
  return (fields.get(name) ?? "null") !== "null";
}

/** Left out: one. */
function choicesPerPrompt(fields: Fields): number {
  const n = numberOfChoices(fields.get("n"));
  if (n === undefined) throw invalid(`"n" must be a whole number from 1 to 9999`);
  return n;
}

/** Undefined for what it cannot be: callers of Ferry's own API may write anything there. */
function numberOfChoices(text: Json = "null"): number | undefined {
  if (text === "null") return 1;
  return /^[1-9]\d{0,3}$/.test(text) ? Number(text) : undefined;
}

/** One prompt goes as it is: a server that takes only one then understands it. */
function call(inputs: readonly Json[], parameters: Json, model: string): Call {
  const prompt = inputs.length === 1 ? inputs[0]! : `[${inputs.join(",")}]`;
  const more = sent(parameters, OWN);
  return { body: `{"model":${JSON.stringify(model)},"prompt":${prompt}${more === "" ? "" : `,${more}`}}` };
}

function outputs({ body }: Replied, inputs: readonly Json[], parameters: Json): Outputs {
  const text = body.toString("utf8");
  const { elements, flaw } = splitField(text, "choices");
  if (flaw !== undefined) return { flaw };
  const told = parameters === "" ? undefined : cutFields(parameters);
  const n = numberOfChoices(told?.get("n")) ?? 1;
  if (elements.length !== inputs.length * n) {
    return { flaw: `has ${elements.length} choices for ${inputs.length} prompts with n = ${n}` };
  }
  const choices = byIndex(elements, "choice", (fields) => (hasText(fields) ? fields : undefined));
  if (choices.flaw !== undefined) return choices;
  const echoes = told?.get("echo") === "true";
  const generated = inputs.map((input, p) => {
    const own = choices.parts.slice(p * n, p * n + n);
    return own.reduce((sum, choice) => sum + generatedBy(choice, echoes ? input : '""'), 0);
  });
  const fields = cutFields(text);
  const shares = sharesOf(fields?.get("usage"), inputs, generated);
  return {
    outputs: inputs.map((_, p) =>
      detached(
        objectText({
          choices: `[${choices.parts
            .slice(p * n, p * n + n)
            .map(choiceText)
            .join(",")}]`,
          prompt_tokens: shares.prompt[p]?.toString(),
          completion_tokens: shares.completion[p]?.toString(),
          created: wholeNumber(fields?.get("created")),
          system_fingerprint: stringText(fields?.get("system_fingerprint")),
        }),
      ),
    ),
  };
}

/** The tokens of each input; none where the worker does not say. */
function sharesOf(
  usage: Json | undefined,
  inputs: readonly Json[],
  generated: readonly number[],
): { readonly prompt: readonly number[]; readonly completion: readonly number[] } {
  const prompt = tokenCount(usage, "prompt_tokens");
  const completion = tokenCount(usage, "completion_tokens");
  return {
    prompt: prompt === undefined ? [] : apportion(prompt, inputs.map(weightOf)),
    completion: completion === undefined ? [] : apportion(completion, generated),
  };
}

/** Characters of it that are not an echo of the prompt, of a token array none can be told apart. */
function generatedBy(choice: Fields, prompt: Json): number {
  const echoed = prompt.startsWith('"') ? prompt.length : 2;
  return Math.max(0, choice.get("text")!.length - echoed);
}

function render(outputs: readonly Json[], model: string, n: number, request?: Rendered): Answer {
  const completions = outputs.map(completionsOf);
  const sum = (name: "promptTokens" | "completionTokens"): number =>
    completions.reduce((all, each) => all + each[name], 0);
  const choices = completions.flatMap((each) => {
    if (each.choices.length === n) return each.choices;
    const words = `the model gave ${each.choices.length} completions for a prompt, not n = ${n}`;
    throw new Refusal("INFERENCE_FAILED", words);
  });
  const [prompt, completion] = [sum("promptTokens"), sum("completionTokens")];
  const first = completions[0];
  return {
    body: objectText({
      id: JSON.stringify(`cmpl-${request?.id ?? ""}`),
      object: '"text_completion"',
      created: first?.created ?? String(Math.floor((request?.at ?? 0) / 1000)),
      model: JSON.stringify(model),
      system_fingerprint: first?.fingerprint,
      choices: `[${choices.map((choice, index) => `{"index":${index},${choice.slice(1)}`).join(",")}]`,
      usage:
        `{"prompt_tokens":${prompt},"completion_tokens":${completion},` +
        `"total_tokens":${prompt + completion}}`,
    }),
  };
}

/** What became of one prompt. */
interface Completions {
  readonly choices: readonly Json[];
  readonly promptTokens: number;
  readonly completionTokens: number;
  readonly created?: Json | undefined;
  readonly fingerprint?: Json | undefined;
}

/** Of a task's output, from whichever backend. Throws a Refusal. */
export function completionsOf(output: Json): Completions {
  const whole = output.startsWith("{") ? cutFields(output) : undefined;
  const listed = whole?.get("choices");
  const parts = elementsOf(listed ?? output) ?? [output];
  const choices = parts.map((part) => {
    const fields = part.startsWith('"') ? new Map([["text", part]]) : cutFields(part);
    if (fields !== undefined && hasText(fields)) return choiceText(fields);
    const words = `the model's output is neither a text nor an object with a "text"`;
    throw new Refusal("INFERENCE_FAILED", words);
  });
  const counted = listed === undefined ? parts : [output];
  const count = (name: string, of: (all: number, next: number) => number): number =>
    counted.map((part) => tokenCount(part, name) ?? 0).reduce(of, 0);
  return {
    choices,
    // Each of n choices may say it, of the one prompt that they share.
    promptTokens: count("prompt_tokens", (all, next) => Math.max(all, next)),
    completionTokens: count("completion_tokens", (all, next) => all + next),
    created: wholeNumber(whole?.get("created")),
    fingerprint: stringText(whole?.get("system_fingerprint")),
  };
}

function hasText(fields: Fields): boolean {
  return fields.get("text")?.startsWith('"') === true;
}

/** One choice without its index. */
function choiceText(fields: Fields): Json {
  const choice: Record<string, Json> = { logprobs: "null", finish_reason: '"stop"' };
  for (const [name, text] of fields) if (!NOT_OF_A_CHOICE.has(name)) choice[name] = text;
  return objectText(choice);
}

function wholeNumber(text: Json | undefined): Json | undefined {
  return text !== undefined && /^\d{1,15}$/.test(text) ? text : undefined;
}

function stringText(text: Json | undefined): Json | undefined {
  return text?.startsWith('"') === true ? text : undefined;
}
