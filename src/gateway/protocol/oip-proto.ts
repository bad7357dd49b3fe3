/**
 * Messages of `inference.GRPCInferenceService` (Open Inference Protocol v2), with the field names and numbers of the
 * public `open_inference_grpc.proto`. Parameters are kept as JSON text so that 64-bit integers stay exact; a double is
 * written with a point or an exponent (`5.0`) to stay a double. Tensors are slices of the message.
 */
import type { Json } from "../../core/task.ts";
import { datatypeBytes, elementsOfBytes, MAX_TENSORS, TensorFlaw } from "./oip-tensors.ts";
import { ProtoFlaw, ProtoReader, ProtoWriter } from "./protobuf.ts";

export const OIP_SERVICE = "inference.GRPCInferenceService";

/** Name → JSON text of its value. */
export type Parameters = ReadonlyMap<string, Json>;

interface TensorDescription {
  readonly name: string;
  readonly datatype: string;
  /** As the message states it, unchecked. */
  readonly shape: readonly number[];
}

interface TensorRecord extends TensorDescription {
  readonly parameters: Parameters;
  /** Every `contents` of the message; usually one or none. */
  readonly contents: readonly Buffer[];
}

export interface RequestedOutput {
  readonly name: string;
  readonly parameters: Parameters;
}

interface InferHead {
  readonly model: string;
  readonly version: string;
  readonly id: string;
  readonly parameters: Parameters;
}

/** A ModelInferRequest, or a ModelInferResponse, which has no `outputs`: its tensors are the outputs. */
export interface InferRecord extends InferHead {
  readonly tensors: readonly TensorRecord[];
  readonly outputs: readonly RequestedOutput[];
  readonly raw: readonly Buffer[];
}

/** Writers send one per tensor; more are merged, and each costs memory beyond its bytes. */
const MAX_CONTENTS = 16;
const MAX_PARAMETERS = 1024;
const MAX_DIMENSIONS = 32;

export const NO_PARAMETERS: Parameters = new Map();

export function readInferRequest(bytes: Buffer): InferRecord {
  return readInfer(bytes, true);
}

export function readInferResponse(bytes: Buffer): InferRecord {
  return readInfer(bytes, false);
}

/** Fields 6 and 7 of a request are its `outputs` and raw contents; field 6 of a response is its raw contents. */
function readInfer(bytes: Buffer, request: boolean): InferRecord {
  const record = { model: "", version: "", id: "" };
  const parameters = new Map<string, Json>();
  const tensors: TensorRecord[] = [];
  const outputs: RequestedOutput[] = [];
  const raw: Buffer[] = [];
  const reader = new ProtoReader(bytes);
  while (reader.next()) {
    if (reader.field === 1) record.model = reader.string();
    else if (reader.field === 2) record.version = reader.string();
    else if (reader.field === 3) record.id = reader.string();
    else if (reader.field === 4) readParameter(reader.message(), parameters);
    else if (reader.field === 5) add(tensors, readTensor(reader.message()));
    else if (reader.field === 6 && request) add(outputs, readRequested(reader.message()));
    else if (reader.field === (request ? 7 : 6)) add(raw, reader.bytes());
    else reader.skip();
  }
  return { ...record, parameters, tensors, outputs, raw };
}

function add<T>(to: T[], one: T): void {
  if (to.length === MAX_TENSORS) throw new ProtoFlaw(`there are more than ${MAX_TENSORS} tensors`);
  to.push(one);
}

function readTensor(reader: ProtoReader): TensorRecord {
  const tensor = { name: "", datatype: "" };
  const shape: number[] = [];
  const parameters = new Map<string, Json>();
  const contents: Buffer[] = [];
  const dimension = (one: ProtoReader): void => {
    if (shape.push(one.integer()) > MAX_DIMENSIONS)
      throw new ProtoFlaw(`a shape has more than ${MAX_DIMENSIONS} dimensions`);
  };
  while (reader.next()) {
    if (reader.field === 1) tensor.name = reader.string();
    else if (reader.field === 2) tensor.datatype = reader.string();
    else if (reader.field === 3) reader.each(dimension);
    else if (reader.field === 4) readParameter(reader.message(), parameters);
    else if (reader.field === 5) {
      if (contents.push(reader.bytes()) > MAX_CONTENTS)
        throw new ProtoFlaw(`a tensor has its contents more than ${MAX_CONTENTS} times`);
    } else reader.skip();
  }
  return { ...tensor, shape, parameters, contents };
}

function readRequested(reader: ProtoReader): RequestedOutput {
  let name = "";
  const parameters = new Map<string, Json>();
  while (reader.next()) {
    if (reader.field === 1) name = reader.string();
    else if (reader.field === 2) readParameter(reader.message(), parameters);
    else reader.skip();
  }
  return { name, parameters };
}

function readParameter(reader: ProtoReader, into: Map<string, Json>): void {
  let key = "";
  let value: Json = "null";
  while (reader.next()) {
    if (reader.field === 1) key = reader.string();
    else if (reader.field === 2) value = readChoice(reader.message());
    else reader.skip();
  }
  // Readers disagree about which one counts. Also bounds the number read.
  if (into.has(key)) throw new ProtoFlaw(`the parameter ${JSON.stringify(key.slice(0, 64))} stands twice`);
  into.set(key, value);
  if (into.size > MAX_PARAMETERS) throw new ProtoFlaw(`there are more than ${MAX_PARAMETERS} parameters`);
}

function readChoice(reader: ProtoReader): Json {
  let value: Json = "null";
  while (reader.next()) {
    if (reader.field === 1) value = String(reader.bool());
    else if (reader.field === 2) value = String(BigInt.asIntN(64, reader.uint64()));
    else if (reader.field === 3) value = JSON.stringify(reader.string());
    else if (reader.field === 4) value = doubleText(reader.double());
    else if (reader.field === 5) value = String(reader.uint64());
    else reader.skip();
  }
  return value;
}

function doubleText(value: number): Json {
  if (!Number.isFinite(value)) throw new ProtoFlaw("a parameter is NaN or infinite");
  const text = Object.is(value, -0) ? "-0" : String(value);
  return /^-?\d+$/.test(text) ? `${text}.0` : text;
}

interface WrittenInfer extends InferHead {
  readonly tensors: readonly (TensorDescription & {
    readonly parameters: Parameters;
    readonly raw: Buffer;
  })[];
  readonly outputs?: readonly RequestedOutput[];
  readonly typed: boolean;
}

export function writeInferRequest(infer: WrittenInfer): ProtoWriter {
  return writeInfer(infer, 7);
}

export function writeInferResponse(infer: WrittenInfer): ProtoWriter {
  return writeInfer(infer, 6);
}

function writeInfer(infer: WrittenInfer, rawField: number): ProtoWriter {
  const { model, version, id, parameters, tensors, outputs = [], typed } = infer;
  const writer = writeModelName(model, version);
  writeText(writer, 3, id);
  writeParameters(writer, 4, parameters);
  for (const tensor of tensors) {
    const inner = writeDescription(tensor);
    writeParameters(inner, 4, tensor.parameters);
    if (typed) inner.message(5, contentsOfRaw(tensor.raw, tensor.datatype));
    writer.message(5, inner);
  }
  for (const { name, parameters } of outputs) {
    const inner = new ProtoWriter();
    writeText(inner, 1, name);
    writeParameters(inner, 2, parameters);
    writer.message(6, inner);
  }
  if (!typed) for (const { raw } of tensors) writer.bytes(rawField, raw);
  return writer;
}

function writeText(writer: ProtoWriter, field: number, text: string): void {
  if (text !== "") writer.string(field, text);
}

/** Name, datatype and shape: the first three fields of every tensor message. */
function writeDescription({ name, datatype, shape }: TensorDescription): ProtoWriter {
  const writer = writeModelName(name, datatype);
  writer.packed(3, (into) => {
    for (const dimension of shape) into.rawBig(BigInt(dimension));
  });
  return writer;
}

function writeParameters(writer: ProtoWriter, field: number, parameters: Parameters): void {
  for (const [key, value] of parameters) {
    const pair = new ProtoWriter();
    pair.string(1, key);
    pair.message(2, writeChoice(value));
    writer.message(field, pair);
  }
}

function writeChoice(text: Json): ProtoWriter {
  const writer = new ProtoWriter();
  if (/^-?\d{1,20}$/.test(text)) {
    const value = BigInt(text);
    if (BigInt.asIntN(64, value) === value) writer.int64(2, value);
    else if (BigInt.asUintN(64, value) === value) writer.int64(5, value);
    else writer.double(4, Number(text));
    return writer;
  }
  const value: unknown = JSON.parse(text);
  if (typeof value === "boolean") writer.bool(1, value);
  else if (typeof value === "number") writer.double(4, value);
  else if (typeof value === "string") writer.string(3, value);
  // A gRPC parameter cannot hold lists and objects; servers accept their text.
  else if (value !== null) writer.string(3, text);
  return writer;
}

export function readModelName(bytes: Buffer): { readonly name: string; readonly version: string } {
  const asked = { name: "", version: "" };
  const reader = new ProtoReader(bytes);
  while (reader.next()) {
    if (reader.field === 1) asked.name = reader.string();
    else if (reader.field === 2) asked.version = reader.string();
    else reader.skip();
  }
  return asked;
}

export function writeModelName(name: string, version: string): ProtoWriter {
  const writer = new ProtoWriter();
  writeText(writer, 1, name);
  writeText(writer, 2, version);
  return writer;
}

export function readYes(bytes: Buffer): boolean {
  let yes = false;
  const reader = new ProtoReader(bytes);
  while (reader.next()) {
    if (reader.field === 1) yes = reader.bool();
    else reader.skip();
  }
  return yes;
}

export function writeYes(yes: boolean): ProtoWriter {
  const writer = new ProtoWriter();
  if (yes) writer.bool(1, true);
  return writer;
}

export function writeServerMetadata(
  name: string,
  version: string,
  extensions: readonly string[],
): ProtoWriter {
  const writer = writeModelName(name, version);
  for (const extension of extensions) writer.string(3, extension);
  return writer;
}

interface ModelDescription {
  readonly name: string;
  readonly versions: readonly string[];
  readonly platform: string;
  readonly inputs: readonly TensorDescription[];
  readonly outputs: readonly TensorDescription[];
}

export function writeModelMetadata(model: ModelDescription): ProtoWriter {
  const writer = new ProtoWriter();
  writeText(writer, 1, model.name);
  for (const version of model.versions) writer.string(2, version);
  writeText(writer, 3, model.platform);
  for (const input of model.inputs) writer.message(4, writeDescription(input));
  for (const output of model.outputs) writer.message(5, writeDescription(output));
  return writer;
}

/** `InferTensorContents` lists by field number; floats are packed as in memory. FP16 and BF16 are sent raw only. */
const LISTS: readonly (readonly string[])[] = [
  [],
  ["BOOL"],
  ["INT8", "INT16", "INT32"],
  ["INT64"],
  ["UINT8", "UINT16", "UINT32"],
  ["UINT64"],
  ["FP32"],
  ["FP64"],
  ["BYTES"],
];
const FLOATS = 6;
const BYTES = 8;

export function hasContents(datatype: string): boolean {
  return LISTS.some((datatypes) => datatypes.includes(datatype));
}

function listOf(datatype: string): number {
  datatypeBytes(datatype);
  const list = LISTS.findIndex((datatypes) => datatypes.includes(datatype));
  if (list >= 0) return list;
  throw new TensorFlaw(`is ${datatype}, which typed contents cannot hold; send raw contents`);
}

/**
 * The values as raw bytes; several `contents` of one tensor are concatenated into one buffer, since slices would cost
 * many times what the client sent. A list byte makes at most `size` bytes, a BYTES byte at most two (an element has two
 * bytes of overhead and becomes four more).
 */
export function rawOfContents(contents: readonly Buffer[], datatype: string): Buffer {
  const list = listOf(datatype);
  const size = datatypeBytes(datatype);
  let only: Buffer | undefined;
  let raw: Buffer | undefined;
  let at = 0;
  const room = (): Buffer => {
    const bytes = contents.reduce((sum, { length }) => sum + length, 0);
    return (raw ??= Buffer.allocUnsafe(bytes * (list === BYTES ? 2 : list < FLOATS ? size : 1)));
  };
  for (const each of contents) {
    const reader = new ProtoReader(each);
    while (reader.next()) {
      if (reader.field > BYTES) reader.skip();
      else if (reader.field !== list) {
        throw new TensorFlaw(`is ${datatype}, but has contents of another type`);
      } else if (list === BYTES) {
        const element = reader.bytes();
        at = room().writeUInt32LE(element.length, at);
        at += element.copy(room(), at);
      } else if (list < FLOATS) {
        const into = room();
        reader.each((one) => (at = writeInteger(into, at, one, datatype, size)));
      } else {
        const slice = reader.fixed(size === 4 ? 4 : 8);
        // No copy if it is the only one.
        if (only === undefined && at === 0) only = slice;
        else {
          if (at === 0) at += only!.copy(room(), at);
          at += slice.copy(room(), at);
        }
      }
    }
  }
  return raw?.subarray(0, at) ?? only ?? Buffer.alloc(0);
}

function writeInteger(into: Buffer, at: number, reader: ProtoReader, datatype: string, size: number): number {
  if (size === 8) return into.writeBigUInt64LE(reader.uint64(), at);
  if (datatype === "BOOL") return into.writeUInt8(reader.bool() ? 1 : 0, at);
  if (datatype.startsWith("U"))
    return into.writeUIntLE(fitting(reader.uint32(), 0, 2 ** (8 * size), datatype), at, size);
  const limit = 2 ** (8 * size - 1);
  return into.writeIntLE(fitting(reader.uint32() | 0, -limit, limit, datatype), at, size);
}

function fitting(value: number, from: number, below: number, datatype: string): number {
  if (value >= from && value < below) return value;
  throw new TensorFlaw(`holds ${value}, which is no value of ${datatype}`);
}

export function contentsOfRaw(raw: Buffer, datatype: string): ProtoWriter {
  const list = listOf(datatype);
  const size = datatypeBytes(datatype);
  const writer = new ProtoWriter();
  if (list === BYTES) for (const element of elementsOfBytes(raw)) writer.bytes(BYTES, element);
  else if (raw.length % size > 0) throw new TensorFlaw(`has bytes that are no whole number of ${datatype}`);
  else if (list < FLOATS) writer.packed(list, (into) => packIntegers(into, raw, datatype, size));
  else if (raw.length > 0) writer.bytes(list, raw);
  return writer;
}

function packIntegers(into: ProtoWriter, raw: Buffer, datatype: string, size: number): void {
  const signed = datatype.startsWith("INT");
  for (let at = 0; at < raw.length; at += size) {
    if (size === 8) into.rawBig(signed ? raw.readBigInt64LE(at) : raw.readBigUInt64LE(at));
    else if (datatype === "BOOL") into.rawVarint(raw[at] === 0 ? 0 : 1);
    else if (!signed) into.rawVarint(raw.readUIntLE(at, size));
    else {
      const value = raw.readIntLE(at, size);
      if (value >= 0) into.rawVarint(value);
      else into.rawBig(BigInt(value));
    }
  }
}
