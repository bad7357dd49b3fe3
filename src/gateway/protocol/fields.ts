/**
 * Shared by the protocols: the fields of a JSON object as their exact source text, a request's parameters, and
 * responses in pieces. `readFields` is for client input and also refuses what `JSON.parse` accepts (`core/json.ts`);
 * `cutFields` is for worker replies and Ferry's own texts, which are known to be JSON.
 */
import { isUtf8 } from "node:buffer";
import { Refusal } from "../../core/errors.ts";
import { canonical, scan, type Scan } from "../../core/json.ts";
import { splitArray } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import type { ModelFacts, ProtocolAnswer, Drafts } from "./protocol.ts";

export type Fields = ReadonlyMap<string, Json>;

/** Throws a Refusal unless the body is an object of checked JSON. */
export function readFields(body: Buffer): Fields {
  const { text, fields } = checkedJson(body);
  if (fields === undefined) throw invalid("send a JSON object");
  return texts(text, fields);
}

/** A body's text and, for an object, the positions of its fields. Throws a Refusal unless it is checked JSON. */
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

/** Undefined unless `text` is an object without repeated fields. */
export function cutFields(text: Json | undefined): Fields | undefined {
  if (text === undefined) return undefined;
  const { fields, problem } = scan(text);
  return fields === undefined || problem !== undefined ? undefined : texts(text, fields);
}

function texts(text: string, ranges: ReadonlyMap<string, readonly [number, number]>): Fields {
  const fields = new Map<string, Json>();
  for (const [name, [start, end]] of ranges) fields.set(name, text.slice(start, end));
  return fields;
}

/** False for null, which means the same as a missing field. */
export function isSet(fields: Fields, name: string): boolean {
  return (fields.get(name) ?? "null") !== "null";
}

/** Undefined where the field is missing or null; throws a Refusal unless it is a string. */
export function stringField(fields: Fields, name: string): string | undefined {
  if (!isSet(fields, name)) return undefined;
  const text = fields.get(name)!;
  if (!isText(text)) throw invalid(`"${name}" must be a string`);
  return JSON.parse(text) as string;
}

/** Undefined where the field is missing or null; throws a Refusal unless it is true or false. */
export function booleanField(fields: Fields, name: string): boolean | undefined {
  if (!isSet(fields, name)) return undefined;
  const text = fields.get(name);
  if (text !== "true" && text !== "false") throw invalid(`"${name}" must be true or false`);
  return text === "true";
}

export function isText(text: Json | undefined): boolean {
  return text?.startsWith('"') === true;
}

export function wholeNumber(text: Json | undefined): number | undefined {
  return text !== undefined && /^\d{1,15}$/.test(text) ? Number(text) : undefined;
}

/** Replaces some values; `replaced` returns undefined to keep one. Throws a Refusal unless it is checked JSON. */
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

/**
 * All fields except `but`, plus `more`, as canonical JSON; "" if none is left. Null fields are dropped. `more` is
 * canonical and in order.
 */
export function parametersOf(
  fields: Fields,
  but: ReadonlySet<string>,
  more: Readonly<Record<string, Json>> = {},
): Json {
  const parts: string[] = [];
  for (const [name, text] of fields) {
    if (but.has(name) || text === "null") continue;
    if (name.startsWith("$")) throw invalid(`unknown field ${JSON.stringify(name.slice(0, 64))}`);
    // A worker in Go matches names case-insensitively and would read the field twice.
    if (but.has(name.toLowerCase())) throw invalid(`write ${JSON.stringify(name)} in lower case`);
    parts.push(`${JSON.stringify(name)}:${text}`);
  }
  const own = parts.length;
  for (const name in more) parts.push(`"${name}":${more[name]}`);
  if (parts.length === 0) return "";
  const text = `{${parts.join(",")}}`;
  return own === 0 ? text : canonical(text);
}

const NONE: ReadonlySet<string> = new Set();

/**
 * `"name":value,…` of the parameters for a worker, without `$` names and without `but`, the fields that a call sets
 * itself; native API callers may have written those.
 */
export function sent(parameters: Json, but: ReadonlySet<string> = NONE): string {
  if (parameters === "" || (but.size === 0 && !parameters.includes('"$'))) return parameters.slice(1, -1);
  const parts: string[] = [];
  for (const [name, text] of cutFields(parameters) ?? []) {
    if (!name.startsWith("$") && !but.has(name.toLowerCase())) parts.push(`${JSON.stringify(name)}:${text}`);
  }
  return parts.join(",");
}

export function callBody(start: string, parameters: Json, but: ReadonlySet<string>): Json {
  const more = sent(parameters, but);
  return `{${start}${more === "" ? "" : `,${more}`}}`;
}

/** A parameter that a protocol's client side set for its worker side. */
export function between(parameters: Json, name: `$${string}`): Json | undefined {
  return parameters.includes(`"${name}"`) ? cutFields(parameters)?.get(name) : undefined;
}

/** Names the client's credential (`workers/backend/vault.ts`). A parameter, so that only its tasks share a batch. */
const CREDENTIAL = "$auth";

export function checkUncredited(parameters: Json): void {
  if (between(parameters, CREDENTIAL) !== undefined) throw invalid(`unknown parameter "${CREDENTIAL}"`);
}

export function credited(parameters: Json, name: string): Json {
  const more = parameters === "" || parameters === "{}" ? "" : `,${parameters.slice(1, -1)}`;
  return canonical(`{"${CREDENTIAL}":${JSON.stringify(name)}${more}}`);
}

export function uncredited(parameters: Json): { parameters: Json; name: string | undefined } {
  const name = between(parameters, CREDENTIAL);
  if (name === undefined) return { parameters, name };
  const parts: string[] = [];
  for (const [field, text] of cutFields(parameters)!)
    if (field !== CREDENTIAL) parts.push(`${JSON.stringify(field)}:${text}`);
  const bare = parts.length === 0 ? "" : `{${parts.join(",")}}`;
  return { parameters: bare, name: JSON.parse(name) as string };
}

export function arrayElements(text: Json): readonly Json[] | undefined {
  return text.startsWith("[") ? splitArray(text).elements : undefined;
}

/** As `arrayElements`, for inputs in the field `name`. Throws a Refusal after cutting `max` + 1 of them. */
export function inputsIn(text: Json, name: string, max: number): readonly Json[] | undefined {
  const elements = text.startsWith("[") ? splitArray(text, max).elements : undefined;
  if (elements === undefined || elements.length <= max) return elements;
  throw invalid(`"${name}" has more than ${max} inputs; send fewer in one request`);
}

/** What occurs in JSON arrays other than whole numbers, commas and white space: null, true, false, 1.5, -1, 1e5, … */
const NOT_TOKENS = ['"', "{", "-", ".", "e", "E", "n"];

/** Whether checked JSON is a non-empty array of whole numbers. Does not cut it: there may be a million. */
export function isTokens(text: Json): boolean {
  if (!text.startsWith("[") || text.indexOf("[", 1) >= 0) return false;
  for (const mark of NOT_TOKENS) if (text.includes(mark)) return false;
  return /\d/.test(text);
}

export function objectText(fields: Readonly<Record<string, Json | number | undefined>>): Json {
  const parts: string[] = [];
  for (const name in fields) {
    if (fields[name] !== undefined) parts.push(`${JSON.stringify(name)}:${fields[name]}`);
  }
  return `{${parts.join(",")}}`;
}

/** A copy: V8 substrings keep their parent alive, so one stored output would keep its whole batch's megabytes. */
export function detached(text: string): string {
  return Buffer.from(text, "utf8").toString("utf8");
}

/** The path without a trailing slash, and without the first of `endings` that matches. */
export function withoutEnding(path: string, ...endings: readonly string[]): string {
  const bare = path.endsWith("/") ? path.slice(0, -1) : path;
  const ending = endings.find((each) => bare.endsWith(each));
  return ending === undefined ? bare : bare.slice(0, -ending.length);
}

export function invalid(message: string): Refusal {
  return new Refusal("INVALID_REQUEST", message);
}

/** `{"error":"…"}`: the error shape of KServe, TensorFlow Serving, Triton and Ollama, with 400 for a bad input. */
export function plainError({ code, message, status }: Refusal): ProtocolAnswer {
  return { status: code === "INPUT_REJECTED" ? 400 : status, body: JSON.stringify({ error: message }) };
}

/** Forwards a question about a model to one of its workers. */
export function askWorker({ model }: ModelFacts): "worker" | undefined {
  return model === undefined ? undefined : "worker";
}

export function inPieces(pieces: NonNullable<Drafts["pieces"]>): Pick<Drafts, "render" | "pieces"> {
  const render = (...asked: Parameters<typeof pieces>): ProtocolAnswer => {
    const { headers, texts } = pieces(...asked);
    let body = "";
    for (const text of texts) body += text;
    return headers === undefined ? { body } : { headers, body };
  };
  return { render, pieces };
}

/** List elements, with a comma before each text but the first. */
export function* listed<T>(
  elements: Iterable<T>,
  text: (element: T, index: number) => Json,
): Generator<Json, void> {
  let index = 0;
  for (const element of elements) {
    yield (index === 0 ? "" : ",") + text(element, index);
    index++;
  }
}
