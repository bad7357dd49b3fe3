/**
 * The fields of a JSON object, as the very characters they were written in.
 *
 * `readFields` is for what clients send: everything is checked that `JSON.parse` would let through (`core/json.ts`).
 * `cutFields` is for what workers answer and for texts of our own, which are known to be JSON.
 */
import { isUtf8 } from "node:buffer";
import { Refusal } from "../../core/errors.ts";
import { canonical, scan, type Scan } from "../../core/json.ts";
import { splitArray } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";

/** By name: the text of each value. */
export type Fields = ReadonlyMap<string, Json>;

/** Throws a Refusal when it is no object of checked JSON. */
export function readFields(body: Buffer): Fields {
  const { text, fields } = checkedJson(body);
  if (fields === undefined) throw invalid("send a JSON object");
  return texts(text, fields);
}

/** The text of a body and where its fields stand, if it is an object. Throws a Refusal when it is no checked JSON. */
export function checkedJson(body: Buffer): { readonly text: Json; readonly fields: Scan["fields"] } {
  if (!isUtf8(body)) throw invalid("the body is not UTF-8");
  const text = body.toString("utf8");
  const { fields, problem, tooMuch } = scan(text);
  if (tooMuch) throw invalid(problem!);
  try {
    JSON.parse(text);
  } catch (error) {
    const at = /position \d+/.exec((error as Error).message)?.[0];
    throw invalid(`the body is not valid JSON${at === undefined ? "" : ` (${at})`}`);
  }
  if (problem !== undefined) throw invalid(problem);
  return { text, fields };
}

/** Of a text that is JSON; undefined when it is no object, or one that readers disagree about. */
export function cutFields(text: Json): Fields | undefined {
  const { fields, problem } = scan(text);
  return fields === undefined || problem !== undefined ? undefined : texts(text, fields);
}

function texts(text: string, ranges: ReadonlyMap<string, readonly [number, number]>): Fields {
  const fields = new Map<string, Json>();
  for (const [name, [start, end]] of ranges) fields.set(name, text.slice(start, end));
  return fields;
}

/** A string, or undefined where the field is left out or null; throws a Refusal for anything else. */
export function stringField(fields: Fields, name: string): string | undefined {
  const text = fields.get(name);
  if (text === undefined || text === "null") return undefined;
  if (!text.startsWith('"')) throw invalid(`"${name}" must be a string`);
  return JSON.parse(text) as string;
}

/**
 * The body with other values in some of its fields: `replaced` says which, undefined where a field stays as it is.
 * Throws a Refusal when it is no checked JSON.
 */
export function withFields(body: Buffer, replaced: (name: string, text: Json) => Json | undefined): Buffer {
  const { text, fields } = checkedJson(body);
  let made = "";
  let at = 0;
  for (const [name, [start, end]] of fields ?? []) {
    const value = replaced(name, text.slice(start, end));
    if (value === undefined) continue;
    made += text.slice(at, start) + value;
    at = end;
  }
  return at === 0 ? body : Buffer.from(made + text.slice(at));
}

/** True or false, or undefined where the field is left out or null; throws a Refusal for anything else. */
export function booleanField(fields: Fields, name: string): boolean | undefined {
  const text = fields.get(name);
  if (text === undefined || text === "null") return undefined;
  if (text !== "true" && text !== "false") throw invalid(`"${name}" must be true or false`);
  return text === "true";
}

/** The fields but for some, and `more`, as canonical JSON; "" when none is left. A null is no field. */
export function parametersOf(
  fields: Fields,
  but: ReadonlySet<string>,
  more: Readonly<Record<string, Json>> = {},
): Json {
  const parts: string[] = [];
  for (const [name, text] of fields) {
    if (but.has(name) || text === "null") continue;
    if (name.startsWith("$")) throw invalid(`unknown field ${JSON.stringify(name.slice(0, 64))}`);
    // To a worker in Go, which compares without regard to case, it would be that field a second time.
    if (but.has(name.toLowerCase())) throw invalid(`write ${JSON.stringify(name)} in lower case`);
    parts.push(`${JSON.stringify(name)}:${text}`);
  }
  for (const name in more) parts.push(`${JSON.stringify(name)}:${more[name]}`);
  return parts.length === 0 ? "" : canonical(`{${parts.join(",")}}`);
}

const NONE: ReadonlySet<string> = new Set();

/**
 * `"name":value,…` of the parameters that a worker is told: all but those that begin with `$`, and those that a call
 * sets itself (`but`), which a caller of Ferry's own API can write there too.
 */
export function sent(parameters: Json, but: ReadonlySet<string> = NONE): string {
  if (parameters === "" || (but.size === 0 && !parameters.includes('"$'))) return parameters.slice(1, -1);
  const parts: string[] = [];
  for (const [name, text] of cutFields(parameters) ?? []) {
    if (!name.startsWith("$") && !but.has(name.toLowerCase())) parts.push(`${JSON.stringify(name)}:${text}`);
  }
  return parts.join(",");
}

/** A parameter between the two sides of a protocol; undefined where it was not set. */
export function between(parameters: Json, name: `$${string}`): Json | undefined {
  return parameters.includes(`"${name}"`) ? cutFields(parameters)?.get(name) : undefined;
}

/** The elements of an array that a client sent; undefined when it is none. */
export function elementsOf(text: Json): readonly Json[] | undefined {
  return text.startsWith("[") ? splitArray(text).elements : undefined;
}

/**
 * The same where each element is an input, of a field that the client calls `name`. Throws a Refusal where there are
 * more than `max`, and cuts no further then.
 */
export function inputsIn(text: Json, name: string, max: number): readonly Json[] | undefined {
  const elements = text.startsWith("[") ? splitArray(text, max).elements : undefined;
  if (elements === undefined || elements.length <= max) return elements;
  throw invalid(`"${name}" has more than ${max} inputs; send fewer in one request`);
}

/** Whether it is an array of tokens: whole numbers, at least one. Cuts nothing: there may be a million. */
export function isTokens(text: Json): boolean {
  return text.startsWith("[") && /\d/.test(text) && !/[^\d\s,]/.test(text.slice(1, -1));
}

/** An object from texts; those that are undefined are left out. */
export function objectText(fields: Readonly<Record<string, Json | undefined>>): Json {
  const parts: string[] = [];
  for (const name in fields) {
    if (fields[name] !== undefined) parts.push(`${JSON.stringify(name)}:${fields[name]}`);
  }
  return `{${parts.join(",")}}`;
}

/**
 * A copy that stands alone. V8 cuts a string by pointing into the whole, so one output kept for ten minutes would
 * keep its batch-mates' megabytes too.
 */
export function detached(text: string): string {
  return Buffer.from(text, "utf8").toString("utf8");
}

/** The path of a URL without `ending`; the path as it is, less a slash at its end, where it does not end so. */
export function without(path: string, ...endings: readonly string[]): string {
  const bare = path.endsWith("/") ? path.slice(0, -1) : path;
  const ending = endings.find((each) => bare.endsWith(each));
  return ending === undefined ? bare : bare.slice(0, -ending.length);
}

export function invalid(message: string): Refusal {
  return new Refusal("INVALID_REQUEST", message);
}
