/** Fields of the Open Inference Protocol, read from texts that are JSON; what is wrong is a `TensorFlaw`. */
import { canonical } from "../../core/json.ts";
import { splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import type { Fields } from "./fields.ts";
import { TensorFlaw } from "./oip-tensors.ts";

/** Of an object's field that is an object itself; undefined where it is left out or null. Throws a TensorFlaw. */
export function objectField(fields: Fields, name: string): Fields | undefined {
  const text = fields.get(name);
  if (text === undefined || text === "null") return undefined;
  const found = splitFields(text);
  if (found === undefined) throw new TensorFlaw(`has "${name}" that is no object`);
  return found;
}

/** Throws a TensorFlaw where it is no string. */
export function textField(fields: Fields, name: string): string {
  const text = fields.get(name);
  if (text?.startsWith('"') !== true) throw new TensorFlaw(`has no "${name}" that is a string`);
  return JSON.parse(text) as string;
}

/** Throws a TensorFlaw where it is no array of integers. */
export function shapeField(fields: Fields): readonly number[] {
  const text = fields.get("shape");
  if (text?.startsWith("[") !== true) throw new TensorFlaw('has no "shape"');
  const shape = JSON.parse(text) as unknown[];
  const good = shape.every((each): each is number => Number.isSafeInteger(each));
  if (!good || shape.length > MAX_DIMENSIONS)
    throw new TensorFlaw("has a shape that is no list of a few integers");
  return shape;
}

const MAX_DIMENSIONS = 32;

/** `,"name":{…}` of the fields but for some, canonical; "" where none is left. */
export function objectPart(
  name: string,
  fields: Fields | undefined,
  drop: (field: string) => boolean = () => false,
): string {
  if (fields === undefined) return "";
  const parts: string[] = [];
  for (const [field, text] of fields) if (!drop(field)) parts.push(`${JSON.stringify(field)}:${text}`);
  return parts.length === 0 ? "" : `,${JSON.stringify(name)}:${canonical(`{${parts.join(",")}}`)}`;
}

/**
 * A flat array whose values are of the kind that the datatype has. Of numbers no more is looked at than that they are
 * some: there are servers that answer a text among them with a 500, which would be held against the server.
 */
export function ofKind(flat: Json, datatype: string): Json {
  if (datatype === "BYTES") return flat;
  const text = flat.includes('"');
  // There is no u in a number, nor an a, but in true, false and null.
  const word = datatype === "BOOL" ? flat.includes("n") : flat.includes("u") || flat.includes("a");
  if (text || word)
    throw new TensorFlaw(`holds ${text ? "a string" : "true, false or null"}, but is ${datatype}`);
  return flat;
}

/** Puts before what is wrong whose fault it is: `input "x"`. */
export function about<T>(subject: string, read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (!(error instanceof TensorFlaw)) throw error;
    throw new TensorFlaw(`${subject} ${error.message}`);
  }
}

/** A name for such words. */
export function quoted(name: string): string {
  return JSON.stringify(name.slice(0, 64));
}
