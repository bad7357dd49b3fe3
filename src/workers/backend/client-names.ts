/**
 * Whether a worker's refusal (401, 403, 404, 405 and their gRPC codes) is about something that the client named.
 *
 * Such a status may mean that the worker is set up wrongly (its URL, its credential, a model that is not loaded), which is the
 * worker's failure; or that a client asked for what is not there (a version, an adapter, a signature, an output, a URL in an
 * input), which is the client's. The client's it is where it chose the path of the call (`Call.named`), or where the worker's
 * words contain a string that stands in the task's parameters or in an input. The name of the model itself says nothing.
 *
 * Only refusals are looked at, and only so much of them that it takes microseconds.
 */
import type { Json } from "../../core/task.ts";

const MAX_WORDS_CHARS = 2048;
const MAX_TEXT_CHARS = 65_536;
const MAX_STRINGS = 256;
/** A single letter stands in any sentence. */
const MIN_NAME_CHARS = 2;
const MAX_NAME_CHARS = 256;
/** A JSON string with the colon behind it, if it is a key. */
const STRING = /"((?:[^"\\]|\\.)*)"(\s*:)?/g;

export interface Refused {
  /** What the worker said. */
  readonly words: string;
  readonly parameters: Json;
  readonly inputs: readonly Json[];
  /** At the worker. */
  readonly model: string;
}

/** Where the worker's words name it: `parameters` is what all tasks of the batch have in common. */
export function clientNamed({
  words,
  parameters,
  inputs,
  model,
}: Refused): "parameters" | "input" | undefined {
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
    if (standsIn(said, name)) return true;
  }
  return false;
}

/** As a whole word. */
function standsIn(said: string, name: string): boolean {
  for (let at = said.indexOf(name); at >= 0; at = said.indexOf(name, at + 1)) {
    if (!isWordChar(said[at - 1]) && !isWordChar(said[at + name.length])) return true;
  }
  return false;
}

function isWordChar(char: string | undefined): boolean {
  return char !== undefined && /[\p{L}\p{N}_]/u.test(char);
}
