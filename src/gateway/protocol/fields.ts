/**
 * What the protocols share: the fields of a JSON object as the exact characters they were written in, a request's
 * parameters, and answers in pieces.
 *
 * `readFields` is for client input: it also refuses what `JSON.parse` lets through (`core/json.ts`). `cutFields` is for
 * worker replies and Ferry's own texts, which are known to be JSON.
 */
import { isUtf8 } from "node:buffer";
import { Refusal } from "../../core/errors.ts";
import { canonical, scan, type Scan } from "../../core/json.ts";
import { splitArray } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import type { ModelFacts, ProtocolAnswer, Drafts } from "./protocol.ts";

/** Field name → the text of its value. */
export type Fields = ReadonlyMap<string, Json>;

/** Throws a Refusal unless the body is an object of checked JSON. */
export function readFields(body: Buffer): Fields {
  const { text, fields } = checkedJson(body);
  if (fields === undefined) throw invalid("send a JSON object");
  return texts(text, fields);
}

/** The text of a body and the positions of its fields, if it is an object. Throws a Refusal unless it is checked JSON. */
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

/** Undefined unless `text` is an object that all readers understand alike (no field twice). */
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

/** False for null, which means the same as leaving the field out. */
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

/** The body with some values replaced; `replaced` returns undefined for a field that stays. Throws a Refusal unless it is checked JSON. */
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

/** All fields except `but`, plus `more`, as canonical JSON; "" when none is left. A field that is null is dropped. */
export function parametersOf(
  fields: Fields,
  but: ReadonlySet<string>,
  more: Readonly<Record<string, Json>> = {},
): Json {
  const parts: string[] = [];
  for (const [name, text] of fields) {
    if (but.has(name) || text === "null") continue;
    if (name.startsWith("$")) throw invalid(`unknown field ${JSON.stringify(name.slice(0, 64))}`);
    // A worker in Go compares names without regard to case and would read the field twice.
    if (but.has(name.toLowerCase())) throw invalid(`write ${JSON.stringify(name)} in lower case`);
    parts.push(`${JSON.stringify(name)}:${text}`);
  }
  for (const name in more) parts.push(`${JSON.stringify(name)}:${more[name]}`);
  return parts.length === 0 ? "" : canonical(`{${parts.join(",")}}`);
}

const NONE: ReadonlySet<string> = new Set();

/**
 * `"name":value,…` of the parameters to send to a worker: without names that begin with `$`, and without `but`, the
 * fields that a call sets itself; a caller of Ferry's native API may have written those into its parameters.
 */
export function sent(parameters: Json, but: ReadonlySet<string> = NONE): string {
  if (parameters === "" || (but.size === 0 && !parameters.includes('"$'))) return parameters.slice(1, -1);
  const parts: string[] = [];
  for (const [name, text] of cutFields(parameters) ?? []) {
    if (!name.startsWith("$") && !but.has(name.toLowerCase())) parts.push(`${JSON.stringify(name)}:${text}`);
  }
  return parts.join(",");
}

/** A JSON body: `start`, then the parameters as in `sent`. */
export function callBody(start: string, parameters: Json, but: ReadonlySet<string>): Json {
  const more = sent(parameters, but);
  return `{${start}${more === "" ? "" : `,${more}`}}`;
}

/** A parameter that the client side of a protocol set for its worker side. */
export function between(parameters: Json, name: `$${string}`): Json | undefined {
  return parameters.includes(`"${name}"`) ? cutFields(parameters)?.get(name) : undefined;
}

/**
 * The parameter that names the client's own credential (`workers/backend/vault.ts`). It is a parameter, so only tasks
 * with the same credential share a batch.
 */
const CREDENTIAL = "$auth";

/** Throws a Refusal if the client wrote the field itself. */
export function checkUncredited(parameters: Json): void {
  if (between(parameters, CREDENTIAL) !== undefined) throw invalid(`unknown parameter "${CREDENTIAL}"`);
}

export function credited(parameters: Json, name: string): Json {
  const more = parameters === "" || parameters === "{}" ? "" : `,${parameters.slice(1, -1)}`;
  return canonical(`{"${CREDENTIAL}":${JSON.stringify(name)}${more}}`);
}

/** The reverse of `credited`. */
export function uncredited(parameters: Json): { parameters: Json; name: string | undefined } {
  const name = between(parameters, CREDENTIAL);
  if (name === undefined) return { parameters, name };
  const parts: string[] = [];
  for (const [field, text] of cutFields(parameters)!)
    if (field !== CREDENTIAL) parts.push(`${JSON.stringify(field)}:${text}`);
  const bare = parts.length === 0 ? "" : `{${parts.join(",")}}`;
  return { parameters: bare, name: JSON.parse(name) as string };
}

/** The elements of an array that a client sent; undefined when it is none. */
export function arrayElements(text: Json): readonly Json[] | undefined {
  return text.startsWith("[") ? splitArray(text).elements : undefined;
}

/** The same for the field `name`, where each element is an input. Throws a Refusal after cutting `max` + 1 of them. */
export function inputsIn(text: Json, name: string, max: number): readonly Json[] | undefined {
  const elements = text.startsWith("[") ? splitArray(text, max).elements : undefined;
  if (elements === undefined || elements.length <= max) return elements;
  throw invalid(`"${name}" has more than ${max} inputs; send fewer in one request`);
}

/** Whether it is an array of tokens: whole numbers, at least one. Does not cut it: there may be a million. */
export function isTokens(text: Json): boolean {
  return text.startsWith("[") && /\d/.test(text) && !/[^\d\s,]/.test(text.slice(1, -1));
}

/** An object from the texts of its values; undefined ones are dropped. */
export function objectText(fields: Readonly<Record<string, Json | number | undefined>>): Json {
  const parts: string[] = [];
  for (const name in fields) {
    if (fields[name] !== undefined) parts.push(`${JSON.stringify(name)}:${fields[name]}`);
  }
  return `{${parts.join(",")}}`;
}

/**
 * A copy with memory of its own. V8 cuts a string by pointing into the whole, so one output kept for ten minutes would
 * keep the megabytes of its whole batch.
 */
export function detached(text: string): string {
  return Buffer.from(text, "utf8").toString("utf8");
}

/** The path without a slash at its end, and without the first of `endings` that it ends with. */
export function withoutEnding(path: string, ...endings: readonly string[]): string {
  const bare = path.endsWith("/") ? path.slice(0, -1) : path;
  const ending = endings.find((each) => bare.endsWith(each));
  return ending === undefined ? bare : bare.slice(0, -ending.length);
}

export function invalid(message: string): Refusal {
  return new Refusal("INVALID_REQUEST", message);
}

/** `{"error":"…"}`: the errors of KServe, TensorFlow Serving, Triton and Ollama, which answer a bad input with 400. */
export function plainError({ code, message, status }: Refusal): ProtocolAnswer {
  return { status: code === "INPUT_REJECTED" ? 400 : status, body: JSON.stringify({ error: message }) };
}

/** A question about a model that only one of its workers can answer. */
export function askWorker({ model }: ModelFacts): "worker" | undefined {
  return model === undefined ? undefined : "worker";
}

/** `render` and `pieces` of an answer that may be large, from the second. */
export function inPieces(pieces: NonNullable<Drafts["pieces"]>): Pick<Drafts, "render" | "pieces"> {
  const render = (...asked: Parameters<typeof pieces>): ProtocolAnswer => {
    const { headers, texts } = pieces(...asked);
    return { ...(headers && { headers }), body: [...texts].join("") };
  };
  return { render, pieces };
}

/** The elements of a list, each text but the first with a comma before it. */
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
