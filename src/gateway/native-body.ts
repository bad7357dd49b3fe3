/** The body of a request to Ferry's own API: `{"input", "model"?, "parameters"?, "client_id"?, "encoding"?}`. */
import { Refusal } from "../core/errors.ts";
import { canonical, scan } from "../core/json.ts";
import { type Encoding, encodingNamed } from "./encoding.ts";
import { checkName } from "./headers.ts";
import type { Draft } from "./intake.ts";

const FIELDS = new Set(["input", "model", "parameters", "client_id", "encoding"]);
/** Of the minimal contract. */
export const PLAIN_FIELDS = new Set(["input", "encoding"]);

/** A draft, and how its output shall look where that is bytes. */
export interface NativeDraft extends Draft {
  readonly encoding: Encoding;
}

/** Reads `{"input", "model"?, "parameters"?, "client_id"?, "encoding"?}`. */
export function parseBody(
  text: string,
  key: string | undefined,
  fields: ReadonlySet<string> = FIELDS,
): NativeDraft {
  const found = readObject(text);
  for (const name of found.keys()) {
    if (!fields.has(name)) {
      const known = [...fields].map((field) => `"${field}"`).join(", ");
      throw new Refusal(
        "INVALID_REQUEST",
        `unknown field ${JSON.stringify(name.slice(0, 64))}; known: ${known}`,
      );
    }
  }
  const field = (name: string): string | undefined => {
    const range = found.get(name);
    return range === undefined ? undefined : text.slice(range[0], range[1]);
  };
  const input = field("input");
  if (input === undefined) throw new Refusal("INVALID_REQUEST", `"input" is missing`);
  name("client_id", field("client_id"));
  const encoding = field("encoding");
  return {
    model: name("model", field("model")),
    input,
    parameters: parametersOf(field("parameters")),
    idempotencyKey: key,
    encoding: encoding === undefined ? "base64" : encodingNamed(JSON.parse(encoding), '"encoding"'),
  };
}

function readObject(text: string): NonNullable<ReturnType<typeof scan>["fields"]> {
  const { fields, problem, tooMuch } = scan(text);
  if (tooMuch) throw new Refusal("INVALID_REQUEST", problem!);
  try {
    JSON.parse(text);
  } catch (error) {
    const at = /position \d+/.exec((error as Error).message)?.[0];
    throw new Refusal("INVALID_REQUEST", `the body is not valid JSON${at === undefined ? "" : ` (${at})`}`);
  }
  if (problem !== undefined) throw new Refusal("INVALID_REQUEST", problem);
  if (fields === undefined) throw new Refusal("INVALID_REQUEST", `send an object: {"input": …}`);
  return fields;
}

/** Canonical; "" where there are none. */
function parametersOf(json: string | undefined): string {
  if (json === undefined) return "";
  if (!json.startsWith("{")) throw new Refusal("INVALID_REQUEST", `"parameters" must be an object`);
  const parameters = canonical(json);
  return parameters === "{}" ? "" : parameters;
}

/** A short string without control characters. */
function name(field: string, json: string | undefined): string | undefined {
  if (json === undefined) return undefined;
  const value: unknown = JSON.parse(json);
  if (typeof value !== "string") throw new Refusal("INVALID_REQUEST", `"${field}" must be a string`);
  checkName(`"${field}"`, value);
  return value;
}
