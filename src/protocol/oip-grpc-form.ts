/** What both ways of the Open Inference Protocol over gRPC share: flaws as values, and parameters as text. */
import { scan } from "../core/json.ts";
import type { Json } from "../core/task.ts";
import { NO_PARAMETERS, type Parameters } from "./oip-proto.ts";
import { TensorFlaw } from "./oip-tensors.ts";
import { ProtoFlaw } from "./protobuf.ts";

/** What was wrong, in words for whoever sent it. */
export interface Flawed {
  readonly flaw: string;
}

/** A message of protobuf. */
export interface Encoded {
  /** To be sent one behind the other. */
  readonly parts: readonly Buffer[];
  readonly flaw?: never;
}

/** Turns flaws, which are expected, into values; anything else is a bug and goes on. */
export function flawless<T>(read: () => T): T | Flawed {
  try {
    return read();
  } catch (error) {
    if (error instanceof TensorFlaw || error instanceof ProtoFlaw) return { flaw: error.message };
    throw error;
  }
}

/** Puts a tensor's name before what is wrong with it. */
export function named<T>(kind: string, name: string, read: () => T): T {
  try {
    return read();
  } catch (error) {
    if (error instanceof TensorFlaw) throw new TensorFlaw(`${kind} ${quoted(name)} ${error.message}`);
    throw error;
  }
}

export function quoted(name: string): string {
  return JSON.stringify(name.slice(0, 64));
}

export function isShape(value: unknown): value is number[] {
  return Array.isArray(value) && value.every((each) => Number.isSafeInteger(each));
}

export function fieldText(text: Json, name: string): Json | undefined {
  const range = scan(text).fields?.get(name);
  return range && text.slice(...range);
}

/** What stands under "parameters" in the object that `text` is. */
export function parametersIn(object: Json): Parameters {
  const text = fieldText(object, "parameters");
  const fields = text === undefined ? undefined : scan(text).fields;
  if (text === undefined || fields === undefined) return NO_PARAMETERS;
  return new Map([...fields].map(([name, range]) => [name, text.slice(...range)]));
}

/** `,"parameters":{…}` with its keys in order; "" where there are none. */
export function parametersPart(parameters: Parameters): string {
  if (parameters.size === 0) return "";
  const pairs = [...parameters].map(([name, value]) => [JSON.stringify(name), value] as const);
  pairs.sort(([a], [b]) => (a < b ? -1 : 1));
  return `,"parameters":{${pairs.map(([name, value]) => `${name}:${value}`).join(",")}}`;
}
