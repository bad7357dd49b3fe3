/**
 * The Open Inference Protocol over gRPC: a client's ModelInfer becomes tasks, and their outputs its answer. The
 * other way, from a batch of tasks to a worker's ModelInfer and back, is `oip-grpc-worker.ts`; the forms of a task and of its
 * output stand in `oip-form.ts` and `oip-outputs.ts`.
 *
 * Each row is a task; for a model that takes one task at a time the request is one as a whole. A client is answered as the
 * worker answered, with raw or with typed contents, but a client that sent raw contents always gets raw ones.
 *
 * `priority` and `timeout` are Ferry's business and stay here. Sequences and shared memory cannot be batched and
 * are refused.
 */
import type { Json } from "../../core/task.ts";
import { hasContents, rawOfContents } from "./oip-contents.ts";
import { about, objectPart, quoted } from "./oip-fields.ts";
import { formText } from "./oip-form.ts";
import { type Encoded, type Flawed, flawless } from "./oip-grpc-flaw.ts";
import { joinRows, type Part, rawBytes, readRow } from "./oip-outputs.ts";
import {
  type InferRecord,
  NO_PARAMETERS,
  readInferRequest,
  type TensorRecord,
  writeInferResponse,
} from "./oip-proto.ts";
import { checkCells, rawFromJson, rowsOf, rowsOfRaw, TensorFlaw } from "./oip-tensors.ts";

/** What must be known of a request to answer it. */
export interface InferCall {
  readonly model: string;
  /** Given back as it came. */
  readonly id: string;
  /** It sent typed contents. */
  readonly typed: boolean;
  /** The name of the output that it asks for, if it is one. */
  readonly only?: string | undefined;
}

export interface InferDrafts extends InferCall {
  /** Canonical, the same for all rows. */
  readonly parameters: Json;
  /** One per row. */
  readonly inputs: readonly Json[];
  readonly flaw?: never;
}

const SEQUENCES = new Set(["sequence_id", "sequence_start", "sequence_end"]);

/** `alone`: whether the model of that name takes one task at a time. `maxRows`: of one request. */
export function draftsOf(
  bytes: Buffer,
  alone: (model: string) => boolean = () => false,
  maxRows = Infinity,
): InferDrafts | Flawed {
  return flawless(() => {
    const record = readInferRequest(bytes);
    if (record.tensors.length === 0) throw new TensorFlaw("the request has no inputs");
    for (const name of record.parameters.keys()) {
      if (SEQUENCES.has(name))
        throw new TensorFlaw(`the parameter ${name} is of a sequence, which is not batched`);
    }
    const typed = record.raw.length === 0;
    const whole = alone(record.model);
    if (!whole) checkRows(record, maxRows);
    const rows = rowsOfTensors(record, typed, whole);
    const inputs = Array.from({ length: rows[0]!.length }, (_, row) => {
      const texts = rows.map((tensor) => `"${tensor[row]!.toString("base64")}"`);
      return `[${texts.join(",")}]`;
    });
    const parameters = parametersText(record, typed, whole);
    const only = record.outputs.length === 1 ? record.outputs[0]!.name : undefined;
    return { model: record.model, id: record.id, typed, parameters, inputs, only };
  });
}

/** The rows of each input; `whole`: it is one. */
function rowsOfTensors({ tensors, raw }: InferRecord, typed: boolean, whole: boolean): Buffer[][] {
  if (!typed && raw.length !== tensors.length) {
    throw new TensorFlaw(`there are ${raw.length} raw contents for ${tensors.length} inputs`);
  }
  return tensors.map((tensor, at) =>
    about(`input ${quoted(tensor.name)}`, () => {
      if (tensor.parameters.has("shared_memory_region"))
        throw new TensorFlaw("lies in shared memory, which Ferry cannot read; send its contents");
      if (!typed && tensor.contents.length > 0)
        throw new TensorFlaw("has typed contents beside the raw ones; send either");
      const bytes = typed ? rawOfContents(tensor.contents, tensor.datatype) : raw[at]!;
      return rowsOfRaw(bytes, tensor.datatype, whole ? [1, ...tensor.shape] : tensor.shape);
    }),
  );
}

/** Before a row is cut: a message of a few bytes can say that it has millions. */
function checkRows({ tensors }: InferRecord, maxRows: number): void {
  const [first] = tensors;
  const rows = rowsIn(first!);
  for (const other of tensors) {
    const size = rowsIn(other);
    if (size === rows) continue;
    const which = `${quoted(first!.name)} and ${quoted(other.name)}`;
    throw new TensorFlaw(
      `the inputs ${which} disagree in dimension 0, which is the batch's: ${rows} and ${size}`,
    );
  }
  if (rows === 0) throw new TensorFlaw("the inputs have no rows: their dimension 0 is 0");
  if (rows > maxRows) throw new TensorFlaw(`there are ${rows} rows; send at most ${maxRows} in one request`);
  about("the request", () => checkCells(tensors.length, rows));
}

function rowsIn({ name, shape }: TensorRecord): number {
  return about(`input ${quoted(name)}`, () => rowsOf(shape));
}

function parametersText(record: InferRecord, typed: boolean, whole: boolean): Json {
  const { tensors, outputs, parameters, version } = record;
  const asked = outputs.map(
    ({ name, parameters: own }) => `{"name":${JSON.stringify(name)}${objectPart("parameters", own)}}`,
  );
  return formText({
    binary: true,
    typed,
    whole,
    version: version === "" ? undefined : version,
    tensors: whole ? tensors : tensors.map((tensor) => ({ ...tensor, shape: tensor.shape.slice(1) })),
    outputs: asked.length === 0 ? undefined : `[${asked.join(",")}]`,
    parameters,
  });
}

/** `outputs` in the order of the rows. */
export function answerOf(call: InferCall, outputs: readonly Json[]): Encoded | Flawed {
  return flawless(() =>
    about("the model's answer", () => {
      const rows = outputs.map((output) => readRow(output, call.only));
      const tensors = joinRows(rows, (parts, shape) => {
        const { name, datatype, parameters = NO_PARAMETERS } = parts[0]!;
        const raws = about(`has an output ${quoted(name)} that`, () => parts.map(asBytes));
        return { name, datatype, shape, parameters, raw: raws.length === 1 ? raws[0]! : Buffer.concat(raws) };
      });
      // It may leave as typed contents where the worker used them, or JSON.
      const isTyped = rows.every((row) => row.typed || row.parts.some(({ data }) => data !== undefined));
      const typed = call.typed && isTyped && tensors.every(({ datatype }) => hasContents(datatype));
      const { version = "", parameters = NO_PARAMETERS } = rows[0]!;
      const { model, id } = call;
      return { parts: writeInferResponse({ model, id, version, parameters, tensors, typed }).parts() };
    }),
  );
}

function asBytes(part: Part): Buffer {
  return part.data === undefined ? rawBytes(part) : rawFromJson(part.data, part.datatype);
}
