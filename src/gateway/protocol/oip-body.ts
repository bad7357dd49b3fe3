/**
 * A body of the Open Inference Protocol over HTTP: JSON, or JSON with raw tensors behind it (the binary extension).
 *
 * `Inference-Header-Content-Length` says where the JSON ends, and `binary_data_size` of each tensor how many of the bytes
 * are its own.
 */
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
