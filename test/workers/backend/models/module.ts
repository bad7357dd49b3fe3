/** Batch functions for the tests of the module backend. */
type Context = { parameters: Record<string, unknown> };
import assert from "node:assert/strict";
import { parentPort } from "node:worker_threads";

export default async function echo(inputs: unknown[]): Promise<unknown[]> {
  if (inputs.includes("please reject")) throw new RangeError("refused:\n an input");
  if (inputs.includes("please crash")) process.exit(3);
  return inputs;
}

export function short(inputs: unknown[]): unknown[] {
  return inputs.slice(1);
}

export function hang(): Promise<never> {
  return new Promise(() => {});
}

export function endlessLoop(): never {
  for (;;);
}

export function withParameters(inputs: unknown[], { parameters }: Context): unknown[] {
  return inputs.map(() => parameters);
}

export function printing(inputs: unknown[]): unknown[] {
  console.log("from log");
  console.error("from error");
  return inputs;
}

/** Node has it, TypeScript does not know it yet. */
const { rawJSON } = JSON as unknown as { rawJSON: (text: string) => unknown };

function nested(depth: number): unknown {
  let value: unknown[] = [];
  for (let at = 1; at < depth; at++) value = [value];
  return value;
}

const circular: unknown[] = [];
circular.push(circular);

const returns: Record<string, (inputs: unknown[]) => unknown> = {
  nothing: () => undefined,
  null: () => null,
  string: () => "ab",
  object: () => ({ 0: 1, 1: 2, length: 2 }),
  long: () => [1, 2, 3],
  undefined: () => [1, undefined],
  hole: () => new Array(2),
  "undefined inside": () => [1, { label: undefined }],
  "undefined in an array": () => [[undefined], 1],
  NaN: () => [NaN, 1],
  "NaN inside": () => [1, { scores: [0.5, NaN] }],
  Infinity: () => [1, [[-Infinity]]],
  "NaN in an array": () => [[1, NaN], 1],
  BigInt: () => [1, 1n],
  function: () => [{ run: () => {} }, 1],
  symbol: () => [Symbol("s"), 1],
  circular: () => [1, circular],
  promises: (inputs) => inputs.map((input) => Promise.resolve(input)),
  map: () => [new Map([[1, 2]]), 1],
  date: () => [new Date(NaN), 1],
  tensors: () => [new Float32Array([7, 0.5, NaN]).subarray(1), new Uint8Array([1, 2])],
  bytes: () => [Buffer.from([1, 2]), new Uint8Array([3]).buffer],
  deep: () => [{ deep: new Float32Array([0.5, 1]) }, new BigInt64Array([-1n])],
  scores: () => new Float64Array([0.25, 0.5]),
  "a BigInt inside": () => [{ list: [1n] }, 1],
  "a toJSON that throws": () => [1, { toJSON: (): never => assert.fail("no") }],
  "a getter that throws": () => [
    1,
    Object.defineProperty({}, "x", { enumerable: true, get: () => assert.fail("no") }),
  ],
  "a toJSON": () => [{ toJSON: () => NaN }, 1],
  "raw JSON": () => [1, rawJSON("1e400")],
  "raw keys": () => [{ a: rawJSON('"x"'), "\u0061b": 1 }, rawJSON("12345678901234567890")],
  deeper: () => [1, nested(65)],
  "much deeper": () => [1, nested(100_000)],
  fine: () => [{ at: new Date(0), none: null, list: [] }, "é\ud800"],
};

export function returning(inputs: unknown[]): unknown {
  return returns[String(inputs[0])]!(inputs);
}

export async function dying(inputs: unknown[]): Promise<unknown[]> {
  if (inputs[0] === "exit") process.exit(4);
  if (inputs[0] === "uncaught") {
    queueMicrotask(() => {
      throw new TypeError("nobody\ncatches this");
    });
    await new Promise(() => {});
  }
  if (inputs[0] === "unhandled") {
    void Promise.reject(new Error("nobody waits for this"));
    await new Promise(() => {});
  }
  if (inputs[0] === "string") throw "only a string";
  return inputs;
}

export const notAFunction = 5;

/** Posts what each input is, as a library might that finds itself in a thread. */
export function posting(inputs: unknown[]): unknown[] {
  for (const input of inputs) parentPort!.postMessage(input);
  return inputs;
}
