/**
 * Requests and answers of the Open Inference Protocol for the load generator and its worker: one row of 1,536 FP32,
 * an embedding's length, as numbers or as bytes. A request's marker, which is decimal digits here, is part of its first
 * number, or is its first four, so that no two inputs are equal and an echo brings it back.
 */
import type { LoadSpec } from "./load.ts";
import { markerLength, type Target, template, type Template } from "../src/cli/bench/connection.ts";

export type TensorForm = "json" | "binary";

export const WIDTH = 1536;
const ROW_BYTES = 4 * WIDTH;
export const HEADER = "inference-header-content-length";

/** What a run of the load generator sends. */
export function requestOf(spec: LoadSpec, headers?: Readonly<Record<string, string>>): Template {
  const { target, bodyBytes, fields = {}, tensor } = spec;
  return tensor === undefined ? template(target, bodyBytes, fields, headers) : tensorTemplate(target, tensor);
}

function tensorTemplate({ host, port, path }: Target, form: TensorForm): Template {
  const floats = Float32Array.from({ length: WIDTH }, (_, at) => Math.sin(at + 1));
  const tensor = (more: string): string =>
    `"inputs":[{"name":"x","shape":[1,${WIDTH}],"datatype":"FP32",${more}}]}`;
  const front = `POST ${path} HTTP/1.1\r\nhost: ${host}:${port}\r\n`;
  if (form === "json") {
    // As common clients write them: a float as the double that it is, with all of its digits.
    const numbers = Array.from(floats.subarray(1), String).join(",");
    const open = `{${tensor('"data":[0.')}`.slice(0, -"}]}".length);
    const back = `,${numbers}]}]}`;
    const length = open.length + markerLength + back.length;
    const head = `${front}content-type: application/json\r\ncontent-length: ${length}\r\n\r\n`;
    return { front: head + open, back };
  }
  const json = `{"parameters":{"binary_data_output":true},${tensor(`"parameters":{"binary_data_size":${ROW_BYTES}}`)}`;
  const head =
    `${front}content-type: application/octet-stream\r\n${HEADER}: ${json.length}\r\n` +
    `content-length: ${json.length + ROW_BYTES}\r\n\r\n${json}`;
  return { front: head, back: Buffer.from(floats.buffer).toString("latin1").slice(markerLength) };
}

/** The same values under the name of an output, without reading one of them. */
export function echoed(
  body: Buffer,
  length: string | undefined,
): { head: Record<string, string>; body: Buffer } {
  if (length === undefined) {
    const text = body.toString("latin1");
    const shape = /"shape":\[[\d,]*\]/.exec(text)![0];
    const data = text.slice(text.indexOf('"data":['), text.indexOf("]", text.indexOf('"data":[')) + 1);
    const json = `{"model_name":"x","outputs":[{"name":"y","datatype":"FP32",${shape},${data}}]}`;
    return { head: { "content-type": "application/json" }, body: Buffer.from(json, "latin1") };
  }
  const raw = body.subarray(Number(length));
  const json =
    `{"model_name":"x","outputs":[{"name":"y","datatype":"FP32","shape":[${raw.length / ROW_BYTES},${WIDTH}],` +
    `"parameters":{"binary_data_size":${raw.length}}}]}`;
  const head = { "content-type": "application/octet-stream", [HEADER]: String(json.length) };
  return { head, body: Buffer.concat([Buffer.from(json), raw]) };
}
