/**
 * The answer of the Open Inference Protocol over HTTP, put together from the outputs of a request's rows.
 *
 * The rows of a tensor are joined along dimension 0 (`oip-outputs.ts`). What came as bytes leaves as bytes, decoded straight
 * into the one buffer that is sent.
 */
import { Refusal } from "../../core/errors.ts";
import type { Json } from "../../core/task.ts";
import { BYTES_TYPE, HEADER_LENGTH } from "./oip-body.ts";
import { about, objectPart, quoted } from "./oip-fields.ts";
import { headText, joinRows, type Part, rawBytes, readRow, type Row } from "./oip-outputs.ts";
import { joinFlat, jsonFromRaw, rawFromJson, TensorFlaw } from "./oip-tensors.ts";
import type { Answer } from "./protocol.ts";

/** How a request wants its answer. */
export interface Asking {
  /** Given back as it came. */
  readonly id: string | undefined;
  /** Outputs as bytes, unless `named` says otherwise. */
  readonly binary: boolean;
  readonly named: ReadonlyMap<string, boolean>;
  /** The name of the output that it asks for, if it is one. */
  readonly only?: string | undefined;
}

/** Throws a Refusal where the outputs are no tensors, or do not fit together. */
export function answerOf(outputs: readonly Json[], model: string, asking: Asking): Answer {
  try {
    const rows = outputs.map((output) => readRow(output, asking.only));
    return written(rows, model, asking);
  } catch (error) {
    if (!(error instanceof TensorFlaw)) throw error;
    throw new Refusal("INFERENCE_FAILED", `the model's answer ${error.message}`);
  }
}

/** An output of all rows, ready to be written. */
interface Joined {
  readonly head: string;
  /** Empty: its values stand in the head. */
  readonly raws: readonly (string | Buffer)[];
}

function written(rows: readonly Row[], model: string, { id, binary, named }: Asking): Answer {
  const tensors = joinRows(rows, (parts, shape) => {
    const { name } = parts[0]!;
    return about(`has an output ${quoted(name)} that`, () => join(parts, shape, named.get(name) ?? binary));
  });
  const { version, parameters } = rows[0]!;
  const head =
    `{"model_name":${JSON.stringify(model)}` +
    (version === undefined ? "" : `,"model_version":${JSON.stringify(version)}`) +
    `${id === undefined ? "" : `,"id":${JSON.stringify(id)}`}${objectPart("parameters", parameters)}` +
    `,"outputs":[${tensors.map((tensor) => tensor.head).join(",")}]}`;
  const raws = tensors.flatMap((tensor) => tensor.raws);
  if (tensors.every((tensor) => tensor.raws.length === 0)) return { body: head };
  const headBytes = Buffer.byteLength(head);
  const total = raws.reduce((sum, raw) => sum + bytesOf(raw), headBytes);
  const body = Buffer.allocUnsafe(total);
  let at = body.write(head, "utf8");
  for (const raw of raws) {
    const size = bytesOf(raw);
    const wrote = typeof raw === "string" ? body.write(raw, at, size, "base64") : raw.copy(body, at);
    if (wrote !== size) throw new TensorFlaw("holds bytes that are not base64");
    at += size;
  }
  return { type: BYTES_TYPE, headers: [HEADER_LENGTH, String(headBytes)], body };
}

function join(parts: readonly Part[], shape: readonly number[], binary: boolean): Joined {
  const { name, datatype, parameters } = parts[0]!;
  const head = headText(name, datatype, shape);
  const own = objectPart("parameters", parameters);
  if (!binary) return { head: `${head}${own},"data":${joinFlat(parts.map(valuesOf))}}`, raws: [] };
  const raws = parts.map(({ raw, data }) => (data === undefined ? raw : rawFromJson(data, datatype)));
  const size = raws.reduce((sum, raw) => sum + bytesOf(raw), 0);
  const more = own === "" ? "" : `,${own.slice(',"parameters":{'.length, -1)}`;
  return { head: `${head},"parameters":{"binary_data_size":${size}${more}}}`, raws };
}

function valuesOf(part: Part): Json {
  return part.data ?? jsonFromRaw(rawBytes(part), part.datatype);
}

function bytesOf(raw: string | Buffer): number {
  return typeof raw === "string" ? Buffer.byteLength(raw, "base64") : raw.length;
}
