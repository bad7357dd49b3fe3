/** Turns worker output into a `Reply`: matches outputs to tasks, sanitizes messages, attributes refusals. */
import { outputFlaw } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { fitted, mayBeBinary } from "../../core/tensor.ts";
import type { Batch, ClientCode, Reply } from "./backend.ts";

/**
 * The one place where outputs become an answer. Worker APIs have no ids, so the n-th output belongs to the n-th task; a
 * wrong count discards the whole reply. So does an output that no caller may get (`outputFlaw`): the batch is bisected
 * until its input is isolated. An output that falsely claims to be bytes (`core/tensor.ts`) counts against its input,
 * not the worker: a model may echo its input.
 */
export function match(batch: Batch, texts: readonly Json[]): Reply {
  if (texts.length !== batch.tasks.length) return matchMade(batch, texts);
  for (const [at, text] of texts.entries()) {
    const flaw = outputFlaw(text);
    if (flaw !== undefined) return unusable(`output ${at} ${flaw}`);
  }
  if (!texts.some(mayBeBinary)) return matchMade(batch, texts);
  const outputs: Json[] = [];
  for (const text of texts) {
    const output = fitted(text);
    if (output === undefined) {
      return rejected("the output for this input says that it is $tensor or $bytes, and is not");
    }
    outputs.push(output);
  }
  return { kind: "answered", outputs };
}

/** The same for texts made by Ferry; read only if their number is right. */
export function matchMade({ tasks }: Batch, texts: readonly Json[] | { readonly length: number }): Reply {
  if (texts.length === tasks.length) return { kind: "answered", outputs: texts as readonly Json[] };
  return unusable(`worker returned ${counted(texts.length, "output")} for ${counted(tasks.length, "input")}`);
}

function counted(n: number, noun: string): string {
  return `${n} ${noun}${n === 1 ? "" : "s"}`;
}

export function unusable(message: string, brief?: string): Reply {
  return { kind: "unusable", message, ...(brief !== undefined && { brief }) };
}

export function rejected(message: string, code?: ClientCode, brief?: string): Reply {
  const more = { ...(brief !== undefined && { brief }), ...(code !== undefined && { code }) };
  return { kind: "rejected", message, ...more };
}

export type FailureBlame = Extract<Reply, { kind: "failed" }>["blame"];

export function failed(message: string, blame: FailureBlame, brief?: string): Reply {
  return { kind: "failed", message, blame, ...(brief !== undefined && { brief }) };
}

/** `message`: the worker's text about outputs it could not write. */
export function badOutputs(message: string): Reply {
  return unusable(quote(message), "worker's outputs cannot be written as JSON");
}

export const MAX_QUOTE_CHARS = 200;

/** The start of `text` as one printable line. */
export function quote(text: string, maxChars = MAX_QUOTE_CHARS): string {
  // Only the start is examined: the text may be an error page of a megabyte.
  const line = text
    .slice(0, 4 * maxChars)
    .replace(/[\p{Cc}\p{Zl}\p{Zp}\s]+/gu, " ")
    .replace(/[\p{Cf}\p{Cs}]/gu, "")
    .trim();
  return line.length <= maxChars ? line : `${line.slice(0, maxChars - 1).replace(/[\ud800-\udbff]$/, "")}…`;
}

/** The pause a busy worker asks for, clamped; NaN: not given. */
export function boundedWaitMs(wantedMs: number): number {
  return Number.isNaN(wantedMs) ? 1_000 : Math.min(30_000, Math.max(10, wantedMs));
}

const MAX_WORDS_CHARS = 2048;
const MAX_TEXT_CHARS = 65_536;
const MAX_STRINGS = 256;
/** A single letter occurs in any sentence. */
const MIN_NAME_CHARS = 2;
const MAX_NAME_CHARS = 256;
/** A JSON string, with the colon after it if it is a key. */
const STRING = /"((?:[^"\\]|\\.)*)"(\s*:)?/g;

interface RefusedBatch {
  readonly words: string;
  readonly parameters: Json;
  readonly inputs: readonly Json[];
  readonly model: string;
}

/**
 * Whether a worker's refusal (401, 403, 404, 405 and their gRPC codes) is about something that the client named. Such a
 * status means either a misconfigured worker (URL, credential, model not loaded), its own failure, or that the client
 * asked for something missing (a version, an adapter, a URL in an input). It is the client's where the worker's message
 * contains a string of the batch's shared parameters or of an input. The model's own name proves nothing. The bounds
 * keep this to microseconds.
 */
export function clientNamed({
  words,
  parameters,
  inputs,
  model,
}: RefusedBatch): "parameters" | "input" | undefined {
  const said = words.slice(0, MAX_WORDS_CHARS);
  if (said === "") return undefined;
  if (holdsName(said, parameters, model)) return "parameters";
  return inputs.slice(0, MAX_STRINGS).some((input) => holdsName(said, input, model)) ? "input" : undefined;
}

function holdsName(said: string, text: Json, model: string): boolean {
  if (text.length > MAX_TEXT_CHARS) return false;
  let strings = 0;
  for (const [, inner, colon] of text.matchAll(STRING)) {
    if (colon !== undefined) continue;
    if (++strings > MAX_STRINGS) return false;
    const name = inner!.includes("\\") ? (JSON.parse(`"${inner}"`) as string) : inner!;
    if (name.length < MIN_NAME_CHARS || name.length > MAX_NAME_CHARS || name === model) continue;
    if (hasWord(said, name)) return true;
  }
  return false;
}

function hasWord(said: string, name: string): boolean {
  for (let at = said.indexOf(name); at >= 0; at = said.indexOf(name, at + 1)) {
    if (!isWordChar(said[at - 1]) && !isWordChar(said[at + name.length])) return true;
  }
  return false;
}

function isWordChar(char: string | undefined): boolean {
  return char !== undefined && /[\p{L}\p{N}_]/u.test(char);
}
