/**
 * The answer of the Open Inference Protocol over HTTP, put together from the outputs of a request's rows.
 *
 * The rows of a tensor are joined along dimension 0. That is only right where each row brought one of its own: a model
 * that answers for a whole batch at once (a count, a list of boxes) must be asked with one row at a time, or as a whole
 * (`maxBatchSize: 1`). What came as bytes leaves as bytes, decoded straight into the one buffer that is sent.
 */
import { Refusal } from "../core/errors.ts";
import type { Json } from "../core/task.ts";
import { splitField, splitFields } from "../core/json-split.ts";
import type { Fields } from "./fields.ts";
import {
  about,
  BYTES_TYPE,
  HEADER_LENGTH,
  objectField,
  objectPart,
  quoted,
  shapeField,
  textField,
} from "./oip-form.ts";
import {
  countFlat,
  elementBytes,
  elementsOf,
  flatten,
  joinFlat,
  jsonFromRaw,
  rawFromJson,
  TensorFlaw,
} from "./oip-tensors.ts";
import type { Answer } from "./protocol.ts";

/** How a request wants its answer. */
export interface Asking {
  /** Given back as it came. */
  readonly id: string | undefined;
  /** Outputs as bytes, unless `named` says otherwise. */
  readonly binary: boolean;
  readonly named: ReadonlyMap<string, boolean>;
}

/** One output of one row. */
interface Part {
  readonly name: string;
  readonly datatype: string;
  readonly shape: readonly number[];
  readonly parameters: string;
  /** A flat array. */
  readonly data: Json | undefined;
  /** base64, without quotes. */
  readonly raw: string | undefined;
}

interface Row {
  readonly parts: readonly Part[];
  /** `,"model_version":"…"` and the like; "" where there is none. */
  readonly version: string;
  readonly parameters: string;
}

/** Throws a Refusal where the outputs are no tensors, or do not fit together. */
export function answerOf(outputs: readonly Json[], model: string, asking: Asking): Answer {
  try {
    return written(outputs.map(readRow), model, asking);
  } catch (error) {
    if (!(error instanceof TensorFlaw)) throw error;
    throw new Refusal("INFERENCE_FAILED", `the model's answer ${error.message}`);
  }
}

function readRow(text: Json): Row {
  const fields = text.startsWith("{") ? splitFields(text) : undefined;
  const { elements } = fields === undefined ? {} : splitField(text, "outputs");
  if (fields === undefined || elements === undefined) {
    throw new TensorFlaw("holds no tensors; ask this model by POST /v1/inference");
  }
  const version = fields.get("model_version");
  return {
    parts: elements.map(readPart),
    version: version?.startsWith('"') === true ? `,"model_version":${version}` : "",
    parameters: objectPart("parameters", objectField(fields, "parameters")),
  };
}

function readPart(text: Json): Part {
  const fields: Fields = splitFields(text) ?? new Map<string, Json>();
  const [raw, data] = [fields.get("raw"), fields.get("data")];
  if (raw?.startsWith('"') !== true && data === undefined)
    throw new TensorFlaw('has an output without "data"');
  return {
    ...about("has an output that", () => ({
      name: textField(fields, "name"),
      datatype: textField(fields, "datatype"),
      shape: shapeField(fields),
      parameters: objectPart("parameters", objectField(fields, "parameters")),
    })),
    data: raw === undefined ? flatten(data!) : undefined,
    raw: raw?.slice(1, -1),
  };
}

/** An output of all rows, ready to be written. */
interface Joined {
  readonly head: string;
  /** Empty: its values stand in the head. */
  readonly raws: readonly (string | Buffer)[];
}

function written(rows: readonly Row[], model: string, { id, binary, named }: Asking): Answer {
  const [first] = rows;
  if (first === undefined || rows.some(({ parts }) => parts.length !== first.parts.length)) throw differing();
  const tensors = first.parts.map((part, at) => {
    const parts = rows.map((row) => row.parts[at]!);
    return join(parts, shapeOf(parts), named.get(part.name) ?? binary);
  });
  const head =
    `{"model_name":${JSON.stringify(model)}${first.version}` +
    `${id === undefined ? "" : `,"id":${JSON.stringify(id)}`}${first.parameters}` +
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

/** Of all rows together. */
function shapeOf(parts: readonly Part[]): readonly number[] {
  const [first] = parts as [Part, ...Part[]];
  if (parts.length === 1) return first.shape;
  const row = first.shape.slice(1).join();
  for (const { name, datatype, shape } of parts) {
    if (shape[0] !== 1) {
      const which = `has an output ${quoted(name)} that is not one for each row`;
      throw new TensorFlaw(`${which}; send one row in each request, or set maxBatchSize to 1`);
    }
    if (name !== first.name || datatype !== first.datatype || shape.slice(1).join() !== row)
      throw differing();
  }
  return [parts.length, ...first.shape.slice(1)];
}

function join(parts: readonly Part[], shape: readonly number[], binary: boolean): Joined {
  const { name, datatype, parameters } = parts[0]!;
  const head = `{"name":${JSON.stringify(name)},"datatype":${JSON.stringify(datatype)},"shape":[${shape.join(",")}]`;
  const elements = elementsOf(shape);
  if (!binary) {
    const data = joinFlat(parts.map(valuesOf));
    if (countFlat(data) !== elements) throw misfit(name);
    return { head: `${head}${parameters},"data":${data}}`, raws: [] };
  }
  const raws = parts.map(({ raw, data }) => raw ?? rawFromJson(data!, datatype));
  const size = raws.reduce((sum, raw) => sum + bytesOf(raw), 0);
  if (datatype !== "BYTES" && size !== elements * elementBytes(datatype)) throw misfit(name);
  const more = parameters === "" ? "" : `,${parameters.slice(',"parameters":{'.length, -1)}`;
  return { head: `${head},"parameters":{"binary_data_size":${size}${more}}}`, raws };
}

function valuesOf({ raw, data, datatype }: Part): Json {
  return raw === undefined ? data! : jsonFromRaw(Buffer.from(raw, "base64"), datatype);
}

function bytesOf(raw: string | Buffer): number {
  return typeof raw === "string" ? Buffer.byteLength(raw, "base64") : raw.length;
}

function misfit(name: string): TensorFlaw {
  return new TensorFlaw(`has an output ${quoted(name)} with another size than its shape says`);
}

function differing(): TensorFlaw {
  return new TensorFlaw("has rows of different shapes; send one row in each request");
}
