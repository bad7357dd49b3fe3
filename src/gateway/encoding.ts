/**
 * How a caller wants an output that is bytes (`core/tensor.ts`): base64, the default; JSON numbers; or nothing but the
 * bytes. It is a matter of the answer alone: callers who want it differently share a batch, a task and a cached outcome.
 *
 *   "encoding" left out, or "base64"    "output":"AACA…","encoding":"base64","dtype":"float32","shape":[768]
 *   "encoding": "json"                  "output":[0.1,…]
 *   Accept: application/octet-stream    the bytes, with x-ferry-dtype and x-ferry-shape
 *
 * Bytes without a type (`$bytes`) have neither dtype nor shape, and stay base64 where JSON is asked for. An output that
 * is JSON is not touched; whoever takes the bytes alone is told that there are none (406).
 */
import { Refusal } from "../core/errors.ts";
import type { Json } from "../core/task.ts";
import { type Binary, numbersText } from "../core/tensor.ts";

export type Encoding = "base64" | "json";

/** Throws a Refusal. `where`: what to call it. */
export function encodingNamed(name: unknown, where: string): Encoding {
  if (name === undefined || name === "base64") return "base64";
  if (name === "json") return "json";
  throw new Refusal("INVALID_REQUEST", `${where} must be "base64" or "json"`);
}

/** `"output":…` and what belongs to it; ASCII. */
export function outputText(binary: Binary, encoding: Encoding): Json {
  const { dtype, shape, base64 } = binary;
  if (dtype === undefined) return `"output":"${base64}","encoding":"base64"`;
  if (encoding === "json") return `"output":${numbersText(binary)}`;
  return `"output":"${base64}","encoding":"base64","dtype":"${dtype}","shape":[${shape.join(",")}]`;
}

export function bytesHeaders({ dtype, shape }: Binary): readonly string[] {
  return dtype === undefined ? [] : ["x-ferry-dtype", dtype, "x-ferry-shape", shape.join(",")];
}

export const BYTES_TYPE = "application/octet-stream";

/**
 * What the Accept header says: "json" (also where it says nothing of bytes), "bytes" alone, or "either": bytes where
 * there are any. Bytes must be named: no wildcard means them. Where both are named alike, bytes cost less.
 */
export function accepted(accept: string | undefined): "json" | "bytes" | "either" {
  if (accept === undefined || !accept.toLowerCase().includes(BYTES_TYPE)) return "json";
  let bytes = 0;
  const json = { share: 0, named: -1 };
  for (const part of accept.toLowerCase().split(",")) {
    const [type = "", ...parameters] = part.split(";").map((each) => each.trim());
    const share = shareOf(parameters);
    if (type === BYTES_TYPE) bytes = Math.max(bytes, share);
    // What names it best holds, as application/json;q=0 beside */*.
    const named = ["*/*", "application/*", "application/json"].indexOf(type);
    if (named > json.named) Object.assign(json, { share, named });
  }
  if (bytes === 0 || bytes < json.share) return "json";
  return json.share > 0 ? "either" : "bytes";
}

/** Of q=0.5; 1 where nothing, or nothing that can be read, is said. */
function shareOf(parameters: readonly string[]): number {
  const text = parameters.find((each) => /^q\s*=/.test(each))?.replace(/^q\s*=\s*/, "");
  return text !== undefined && /^(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)$/.test(text) ? Number(text) : 1;
}

/** Of an output that is JSON, for one who takes nothing but bytes. */
export function noBytes(id: string): Refusal {
  return new Refusal(
    "NOT_ACCEPTABLE",
    `the output is JSON, not bytes; take application/json too. It is kept at /v1/result/${id}`,
  );
}
