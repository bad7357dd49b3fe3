/**
 * The Open Inference Protocol over HTTP towards workers: a batch of tasks becomes one call, and its reply their
 * outputs. The form of a task stands in `oip-form.ts`.
 *
 * A batch is the rows one behind the other. Each row is measured against its shape before it joins others: one that is
 * too long would push its neighbours' values into somebody else's answer. Outputs are cut only where dimension 0 of
 * each is the number of rows that were sent; a batch of one is passed on in whatever shape. Parameters and inputs may
 * have been written by a client of Ferry's own API, so that nothing is taken for granted.
 *
 * A server without the binary extension is told everything in JSON (`plain`): bytes become values, and no output is asked for
 * as bytes. What JSON cannot say (BF16, NaN, BYTES that are not UTF-8) is a flaw of the row that holds it.
 */
import { isUtf8 } from "node:buffer";
import { outputFlaw, splitArray, splitField, splitFields } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import type { Fields } from "./fields.ts";
import { isWayOut } from "./kserve-v1.ts";
import { binarySize, BYTES_TYPE, HEADER_LENGTH, partsOf, RawReader } from "./oip-body.ts";
import { about, objectField, objectPart, ofKind, quoted, shapeField, textField } from "./oip-fields.ts";
import { callShape, type Form, type FormTensor, putRow, readForm, readInput, rowBytes } from "./oip-form.ts";
import { type Beside, cutReply, headText, type OutputTensor } from "./oip-outputs.ts";
import {
  countFlat,
  elementsOf,
  flatten,
  joinFlat,
  jsonFromRaw,
  TensorFlaw,
  USE_BINARY,
} from "./oip-tensors.ts";
import type { Call, Outputs, Replied } from "./protocol.ts";

export function inferCall(inputs: readonly Json[], parameters: Json, model: string, plain = false): Call {
  try {
    const form = readForm(parameters, inputs.length);
    const rows = inputs.map((input) => readInput(input, form));
    const path = form.version === undefined ? {} : { path: pathOf(model, form.version), named: true };
    if (plain) return { ...path, ...plainCall(form, rows) };
    return { ...path, ...(form.binary ? binaryCall(form, rows) : jsonCall(form, rows)) };
  } catch (error) {
    if (error instanceof TensorFlaw) return { body: "", flaw: error.message };
    throw error;
  }
}

function pathOf(model: string, version: string): string {
  // In a path these would not be a version but the way to somewhere else.
  if (isWayOut(version)) throw new TensorFlaw("the version must be a name or a number");
  return `/v2/models/${encodeURIComponent(model)}/versions/${encodeURIComponent(version)}/infer`;
}

type Rows = readonly (readonly string[])[];

function headOf(tensor: FormTensor, form: Form, rows: number): string {
  return headText(tensor.name, tensor.datatype, callShape(tensor, form, rows));
}

function restOf({ outputs, parameters }: Form): string {
  return (outputs === undefined ? "" : `,"outputs":${outputs}`) + objectPart("parameters", parameters);
}

function jsonCall(form: Form, rows: Rows): Call {
  const inputs = form.tensors.map((tensor, at) => {
    const wanted = elementsOf(tensor.shape);
    const texts = rows.map((row) => checked(row[at]!, tensor, wanted));
    const own = objectPart("parameters", tensor.parameters);
    return `${headOf(tensor, form, rows.length)}${own},"data":${joinFlat(texts)}}`;
  });
  const rest = restOf(form);
  const body = `{"inputs":[${inputs.join(",")}]${rest}}`;
  // Its outputs may come as bytes all the same.
  return rest.includes('"binary_data') ? { body, extended: true, headers: { accept: "*/*" } } : { body };
}

function plainCall(form: Form, rows: Rows): Call {
  const texts = form.binary
    ? rows.map((row) => row.map((base64, at) => plainRow(base64, form.tensors[at]!)))
    : rows;
  return jsonCall(
    { ...form, outputs: plainOutputs(form.outputs), parameters: plainOf(form.parameters) },
    texts,
  );
}

function plainRow(base64: string, tensor: FormTensor): Json {
  return about(`input ${quoted(tensor.name)}`, () => {
    const raw = Buffer.allocUnsafe(rowBytes(base64, tensor));
    putRow(raw, 0, base64, raw.length);
    try {
      return jsonFromRaw(raw, tensor.datatype);
    } catch (error) {
      if (!(error instanceof TensorFlaw)) throw error;
      throw new TensorFlaw(error.message.replace(USE_BINARY, "this model's workers take nothing else"));
    }
  });
}

function plainOutputs(outputs: Json | undefined): Json | undefined {
  if (outputs?.includes('"binary_data') !== true) return outputs;
  const texts = (splitArray(outputs).elements ?? []).map((text) => {
    const fields = new Map(splitFields(text));
    const own = plainOf(about("an output", () => objectField(fields, "parameters")));
    fields.delete("parameters");
    const rest = [...fields].map(([name, value]) => `${JSON.stringify(name)}:${value}`);
    return `{${rest.join(",")}${objectPart("parameters", own)}}`;
  });
  return `[${texts.join(",")}]`;
}

function plainOf(parameters: Fields | undefined): Fields | undefined {
  return parameters && new Map([...parameters].filter(([name]) => !name.startsWith("binary_data")));
}

function checked(text: Json, { name, datatype }: FormTensor, wanted: number): Json {
  return about(`input ${quoted(name)}`, () => {
    const flat = ofKind(flatten(text), datatype);
    const count = countFlat(flat);
    if (count === wanted) return flat;
    throw new TensorFlaw(`has a row of ${count} values, but its shape says ${wanted}`);
  });
}

function binaryCall(form: Form, rows: Rows): Call {
  const sizes = form.tensors.map((tensor, at) =>
    about(`input ${quoted(tensor.name)}`, () => rows.map((row) => rowBytes(row[at]!, tensor))),
  );
  const inputs = form.tensors.map((tensor, at) => {
    const size = sizes[at]!.reduce((sum, bytes) => sum + bytes, 0);
    const own = objectPart("parameters", tensor.parameters);
    const more = own === "" ? "" : `,${own.slice(',"parameters":{'.length, -1)}`;
    return `${headOf(tensor, form, rows.length)},"parameters":{"binary_data_size":${size}${more}}}`;
  });
  const head = `{"inputs":[${inputs.join(",")}]${restOf(form)}}`;
  const headBytes = Buffer.byteLength(head);
  const total = sizes.flat().reduce((sum, bytes) => sum + bytes, headBytes);
  const body = Buffer.allocUnsafe(total);
  let at = body.write(head, "utf8");
  for (const [tensor, each] of sizes.entries()) {
    for (const [row, size] of each.entries()) at = putRow(body, at, rows[row]![tensor]!, size);
  }
  return { type: BYTES_TYPE, headers: { [HEADER_LENGTH]: String(headBytes) }, body, extended: true };
}

/** The output of each task, from a worker's reply. */
export function inferOutputs(reply: Replied, inputs: readonly Json[]): Outputs {
  try {
    const { json, raw } = partsOf(reply.body, reply.header(HEADER_LENGTH)?.trim());
    const text = parsed(json);
    // Also beside the outputs: parameters are written again, one call deeper for each nesting.
    const wrong = outputFlaw(text);
    if (wrong !== undefined) return { flaw: wrong };
    const { elements, flaw } = splitField(text, "outputs");
    if (flaw !== undefined) return { flaw };
    const reader = new RawReader(raw);
    const tensors = elements.map((element) => readOutput(element, reader));
    if (reader.left > 0) return { flaw: `has ${reader.left} bytes behind its last output` };
    return cutReply(tensors, inputs.length, besideOutputs(text));
  } catch (error) {
    if (error instanceof TensorFlaw) return { flaw: error.message };
    throw error;
  }
}

function parsed(json: Buffer): Json {
  if (!isUtf8(json)) throw new TensorFlaw("is not UTF-8");
  const text = json.toString("utf8");
  try {
    JSON.parse(text);
    return text;
  } catch {
    throw new TensorFlaw("is not JSON");
  }
}

function readOutput(text: Json, reader: RawReader): OutputTensor {
  const fields = splitFields(text);
  if (fields === undefined) throw new TensorFlaw("has an output that is no object");
  const name = about("has an output that", () => textField(fields, "name"));
  return about(`has an output ${quoted(name)}`, () => {
    const parameters = objectField(fields, "parameters");
    const size = binarySize(parameters);
    const data = fields.get("data");
    if (size === undefined && data === undefined) throw new TensorFlaw('has no "data"');
    return {
      name,
      datatype: textField(fields, "datatype"),
      shape: shapeField(fields),
      parameters,
      payload: size === undefined ? flatten(data!) : reader.take(size),
    };
  });
}

function besideOutputs(text: Json): Beside {
  const fields = splitFields(text) ?? new Map<string, Json>();
  const named = fields.get("model_version")?.startsWith('"') === true;
  return {
    version: named ? textField(fields, "model_version") : undefined,
    parameters: objectField(fields, "parameters"),
    typed: false,
  };
}
