/**
 * The thread's side of `module.ts`: imports the user's file, then runs one call after another. Outputs return as JSON
 * texts. `JSON.stringify` drops or nulls what JSON cannot hold, so a replacer refuses such values first. An output that
 * is a typed array becomes a one-dimensional tensor, a Buffer, ArrayBuffer or DataView bytes; base64 is made here, off
 * the main thread. Typed arrays inside other outputs become arrays.
 */
import { existsSync } from "node:fs";
import { endianness } from "node:os";
import { pathToFileURL } from "node:url";
import { inspect, types } from "node:util";
import { parentPort, workerData } from "node:worker_threads";
import { bytesText, type Dtype, tensorText } from "../../core/tensor.ts";

export interface ThreadFunction {
  readonly file: string;
  readonly name: string;
}

export interface ThreadCall {
  readonly number: number;
  /** JSON text of an array. */
  readonly inputs: string;
  /** JSON text of an object, or "". */
  readonly parameters: string;
}

export type ThreadReport =
  | { readonly kind: "ready" }
  | { readonly kind: "cannot"; readonly message: string }
  | { readonly kind: "begun"; readonly number: number }
  | { readonly kind: "outputs"; readonly number: number; readonly outputs: readonly string[] }
  | { readonly kind: "rejected" | "unusable"; readonly number: number; readonly message: string };

type BatchFunction = (inputs: unknown[], context: { parameters: Record<string, unknown> }) => unknown;

class Unusable extends Error {}

async function load({ file, name }: ThreadFunction): Promise<BatchFunction> {
  if (!existsSync(file)) throw new Error(`cannot find ${file}; check backend.function`);
  let exported: Record<string, unknown>;
  try {
    exported = (await import(pathToFileURL(file).href)) as Record<string, unknown>;
  } catch (error) {
    process.stderr.write(`${inspect(error)}\n`);
    throw new Error(`cannot import ${file}: ${inWords(error)}`, { cause: error });
  }
  // A CommonJS file may have its exports only under `default`.
  const inner = exported["default"] as Record<string, unknown> | null | undefined;
  const value = exported[name] ?? inner?.[name];
  if (typeof value === "function") return value as BatchFunction;
  const there = Object.keys(exported).filter((key) => typeof exported[key] === "function");
  const hint = there.length === 0 ? "it exports no function" : `it has ${there.join(", ")}`;
  const wanted =
    name === "default" ? "no default export that is a function" : `no exported function "${name}"`;
  throw new Error(`${file} has ${wanted} (${hint}); check backend.function`);
}

async function answer(run: BatchFunction, call: ThreadCall): Promise<ThreadReport> {
  const { number } = call;
  let result: unknown;
  try {
    const parameters = call.parameters === "" ? {} : (JSON.parse(call.parameters) as Record<string, unknown>);
    result = await run(JSON.parse(call.inputs) as unknown[], { parameters });
  } catch (error) {
    printPlace(error);
    return { kind: "rejected", number, message: inWords(error) };
  }
  try {
    return { kind: "outputs", number, outputs: toTexts(result) };
  } catch (error) {
    return { kind: "unusable", number, message: error instanceof Unusable ? error.message : inWords(error) };
  }
}

function toTexts(result: unknown): string[] {
  const outputs = types.isTypedArray(result) ? Array.from<unknown>(result) : result;
  if (!Array.isArray(outputs)) throw new Unusable(`the function returned ${named(outputs)}, not an array`);
  // By index: `map` would skip the holes of a sparse array.
  return Array.from({ length: outputs.length }, (_, index) => {
    try {
      return binaryText(outputs[index]) ?? JSON.stringify(outputs[index], checked);
    } catch (error) {
      const why = error instanceof Unusable ? error.message : inWords(error);
      throw new Unusable(`output ${index} cannot be written as JSON: ${why}`, { cause: error });
    }
  });
}

function binaryText(output: unknown): string | undefined {
  if (types.isAnyArrayBuffer(output)) return bytesText(Buffer.from(output).toString("base64"));
  if (!ArrayBuffer.isView(output)) return undefined;
  const bytes = Buffer.from(output.buffer, output.byteOffset, output.byteLength);
  if (Buffer.isBuffer(output) || types.isDataView(output)) return bytesText(bytes.toString("base64"));
  const numbers = output as NodeJS.TypedArray;
  // "Float32Array"; a subclass has its parent's tag.
  const dtype = DTYPE_OF[numbers[Symbol.toStringTag]];
  if (dtype === undefined) return undefined;
  const base64 = bytesInOrder(bytes, numbers.BYTES_PER_ELEMENT).toString("base64");
  return tensorText({ dtype, shape: [numbers.length], base64 });
}

const DTYPE_OF: Readonly<Record<string, Dtype>> = {
  Int8Array: "int8",
  Uint8Array: "uint8",
  Uint8ClampedArray: "uint8",
  Int16Array: "int16",
  Uint16Array: "uint16",
  Int32Array: "int32",
  Uint32Array: "uint32",
  BigInt64Array: "int64",
  BigUint64Array: "uint64",
  Float16Array: "float16",
  Float32Array: "float32",
  Float64Array: "float64",
};

/** To little-endian. */
function bytesInOrder(bytes: Buffer, size: number): Buffer {
  if (size === 1 || endianness() === "LE") return bytes;
  const copy = Buffer.from(bytes);
  return size === 2 ? copy.swap16() : size === 4 ? copy.swap32() : copy.swap64();
}

/** A `JSON.stringify` replacer that refuses values that would be lost. */
function checked(this: unknown, key: string, value: unknown): unknown {
  if (typeof value === "string" || typeof value === "boolean") return value;
  if (typeof value === "number") {
    if (Number.isFinite(value)) return value;
  } else if (value === null) {
    // The JSON of an invalid date is null; look at the original value.
    value = (this as Record<string, unknown>)[key];
    if (!types.isDate(value)) return null;
  } else if (typeof value === "object") {
    if (types.isTypedArray(value)) return Array.from<unknown>(value);
    if (!types.isPromise(value) && !types.isMap(value) && !types.isSet(value)) return value;
  }
  throw new Unusable(`it holds ${named(value)}${key === "" ? "" : ` at ${JSON.stringify(key)}`}`);
}

function named(value: unknown): string {
  if (types.isPromise(value)) return "a promise (await it, or use Promise.all)";
  if (types.isDate(value)) return "an invalid Date";
  if (value === null) return "null";
  if (typeof value === "object") {
    const name = value.constructor?.name ?? "Object";
    return /^[AEIOU]/.test(name) ? `an ${name}` : `a ${name}`;
  }
  if (typeof value === "number" || value === undefined) return String(value);
  return `a ${typeof value}`;
}

/** Without the message, which may quote an input and goes to the caller. */
function printPlace(error: unknown): void {
  const [name, stack] = error instanceof Error ? [error.name, error.stack ?? ""] : ["something", ""];
  const frames = stack.split("\n").filter((line) => /^ {4}at /.test(line));
  process.stderr.write(`${name} was thrown; its message is in the answer\n${frames.join("\n")}\n`);
}

function inWords(error: unknown): string {
  return error instanceof Error ? `${error.name}: ${error.message}` : `thrown: ${String(error)}`;
}

async function main(): Promise<void> {
  const port = parentPort!;
  const say = (report: ThreadReport): void => port.postMessage(report);
  let run: BatchFunction;
  try {
    run = await load(workerData as ThreadFunction);
  } catch (error) {
    say({ kind: "cannot", message: (error as Error).message });
    return;
  }
  // Serialized, though the next call may already be here.
  let last = Promise.resolve();
  port.on("message", (call: ThreadCall) => {
    last = last.then(async () => {
      say({ kind: "begun", number: call.number });
      say(await answer(run, call));
    });
  });
  say({ kind: "ready" });
}

// Importing this file's types must not start the thread's work.
if (parentPort !== null) await main();
