/**
 * Embeddings as text: a JSON array of numbers, or base64 of little-endian float32, a third of the size and decoded only
 * for clients that want numbers. A function's tensor becomes base64 first (`embeddingText`).
 */
import { endianness } from "node:os";
import type { Json } from "../../core/task.ts";
import { asSingles, readBinary, singlesList } from "../../core/tensor.ts";
import { cutFields, type Fields, isText } from "./fields.ts";

const LITTLE = endianness() === "LE";

/** A one-row tensor as base64 of float32; anything else unchanged. */
export function embeddingText(output: Json): Json {
  const tensor = readBinary(output);
  if (tensor?.dtype === undefined || !isRow(tensor.shape)) return output;
  return `"${asSingles(tensor)}"`;
}

export function isRow(shape: readonly number[]): boolean {
  return shape.length > 0 && shape.slice(0, -1).every((dimension) => dimension === 1);
}

/** Whether it is an array of numbers, or base64 of whole float32s. */
export function isEmbedding(text: Json): boolean {
  if (text.startsWith("[")) return /^\[[-+\d.eE,\s]*\]$/.test(text);
  if (!isText(text)) return false;
  const base64 = contentOf(text);
  if (!/^[A-Za-z0-9+/]*={0,2}$/.test(base64)) return false;
  // Some servers omit the padding; 4n + 1 characters are never base64.
  const whole = base64.endsWith("=") ? base64.length % 4 === 0 : base64.length % 4 !== 1;
  return whole && Buffer.byteLength(base64, "base64") % 4 === 0;
}

/** Some servers write a slash as `\/`. */
function contentOf(text: Json): string {
  return text.includes("\\") ? (JSON.parse(text) as string) : text.slice(1, -1);
}

/** `[0.1,…]` from either form. */
export function asNumbers(text: Json): Json {
  if (!isText(text)) return text;
  return singlesList(Buffer.from(contentOf(text), "base64"));
}

/** `"AACA…"` from either form. */
export function asBase64(text: Json): Json {
  if (isText(text)) return text;
  const bytes = Buffer.from(Float32Array.from(JSON.parse(text) as number[]).buffer);
  return `"${(LITTLE ? bytes : bytes.swap32()).toString("base64")}"`;
}

/** A task's output fields. A trailing embedding, where Ferry's worker sides write it, is cut without scanning. */
export function outputFields(output: Json): Fields | undefined {
  const at = output.indexOf('"embedding":[');
  if (at < 0 || output.indexOf("]", at) !== output.length - 2) return cutFields(output);
  const start = at + '"embedding":'.length;
  const fields = cutFields(`${output.slice(0, start)}null}`);
  return fields && new Map(fields).set("embedding", output.slice(start, -1));
}
