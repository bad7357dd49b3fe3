/**
 * What both ways of the Open Inference Protocol over HTTP share: the body in two parts, and the form of a task.
 *
 * A body is JSON, or JSON with raw tensors behind it (the binary extension): `Inference-Header-Content-Length` says
 * where the JSON ends, and `binary_data_size` of each tensor how many of the bytes are its own.
 *
 * One row of dimension 0 is one task, in the same form as over gRPC (`oip-grpc.ts`):
 *
 *   parameters  {"binary":true?,"inputs":[{"datatype","name","parameters"?,"shape"}…],"outputs":[…]?,
 *               "parameters":{…}?,"version":"…"?,"whole":true?}
 *               canonical; shapes without dimension 0, but with it where a request is not cut (`whole`)
 *   input       one element per tensor: base64 of its bytes where `binary`, else a flat array of its values
 *   output      {"outputs":[{"name","datatype","shape":[1,…],"parameters"?,"data":[…] or "raw":"base64"}…],
 *               "model_version"?,"parameters"?}
 */
import { canonical } from "../core/json.ts";
import { splitFields } from "../core/json-split.ts";
import type { Json } from "../core/task.ts";
import type { Fields } from "./fields.ts";
import { TensorFlaw } from "./oip-tensors.ts";

export const HEADER_LENGTH = "inference-header-content-length";
export const BYTES_TYPE = "application/octet-stream";

/** A body in its two parts. */
export interface Parts {
  readonly json: Buffer;
  /** Undefined: it has only one. */
  readonly raw: Buffer | undefined;
}

/** Throws a TensorFlaw. `length` is what the header says. */
export function partsOf(body: Buffer, length: string | undefined): Parts {
  if (length === undefined) return { json: body, raw: undefined };
  const bytes = /^\d{1,15}$/.test(length) ? Number(length) : NaN;
  if (!(bytes <= body.length)) {
    throw new TensorFlaw(
      `Inference-Header-Content-Length must be a number up to ${body.length}, the body's size`,
    );
  }
  return { json: body.subarray(0, bytes), raw: body.subarray(bytes) };
}

/** Takes raw tensors one behind the other. */
export class RawReader {
  readonly #bytes: Buffer;
  #at = 0;

  constructor(bytes: Buffer | undefined) {
    this.#bytes = bytes ?? Buffer.alloc(0);
  }

  take(size: number): Buffer {
    if (size > this.#bytes.length - this.#at) {
      throw new TensorFlaw(
        `says binary_data_size ${size}, but only ${this.#bytes.length - this.#at} bytes are left`,
      );
    }
    this.#at += size;
    return this.#bytes.subarray(this.#at - size, this.#at);
  }

  /** How many nobody has taken. */
  get left(): number {
    return this.#bytes.length - this.#at;
  }
}

/** `binary_data_size` of a tensor's parameters; undefined where it is not binary. */
export function binarySize(parameters: Fields | undefined): number | undefined {
  const text = parameters?.get("binary_data_size");
  if (text === undefined) return undefined;
  if (/^\d{1,15}$/.test(text)) return Number(text);
  throw new TensorFlaw("has a binary_data_size that is no number of bytes");
}

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
