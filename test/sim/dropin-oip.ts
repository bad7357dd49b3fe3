/**
 * The Open Inference Protocol over HTTP, both ends, as JSON and with the binary extension.
 *
 * A row has two or more numbers in `x`, beyond what a double can hold, and a text in `t`. Its outputs are `y`, the first
 * two of those numbers and the parameter `k`; `label`, the text with the parameter and the version; and `z`, all of `x`.
 * Where a model takes one task at a time its requests are not cut; the others are, row by row, and with `pad` rows of
 * different length share a batch.
 */
import assert from "node:assert/strict";
import type { WorkerCall } from "../../src/gateway/protocol/protocol.ts";
import {
  dataOf,
  exactly,
  HEADER,
  type Infer,
  rawOf,
  readMessage,
  type Tensor,
  writeMessage,
} from "../gateway/protocol/servers/oip.ts";
import { isBad, textsFor, vectorOf } from "./dropin-dice.ts";
import type { SimRequest, Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";

/** One row of what comes out. */
interface Row {
  readonly y: readonly string[];
  readonly label: readonly string[];
  readonly z: readonly string[];
}

type Wanted = NonNullable<Infer["outputs"]>;

const BEYOND_DOUBLES = 2n ** 53n + 1n;
const NAMES = ["y", "label", "z"] as const;

export const tensors: Speaker = { make, elements, reply, shuffles: false, bend };

/** Odd, so that no double is the same. */
function big(number: number): string {
  return String(BEYOND_DOUBLES + 2n * BigInt(number));
}

function rowOf(text: string, x: readonly string[], k: unknown, version = "newest"): Row {
  const given = String(Number(k ?? 0));
  return { y: [...x.slice(0, 2), given], label: [`${text}|${given}|${version}`], z: x };
}

function make(dice: Dice, serial: number, model: string): SimRequest {
  const { texts, bad } = textsFor(dice, serial);
  const length = dice.pick([2, 2, 2, 3, 5, 9]);
  const numbers = texts.map((text) => {
    const first = vectorOf(text).slice(1);
    const more = Array.from({ length: length - first.length }, (_, at) => first[0]! + 7919 * (at + 1));
    return [...first, ...more].map(big);
  });
  const form = dice.pick(["json", "json", "nested", "binary", "binary", "mixed"] as const);
  const k = dice.chance(0.2) ? dice.between(1, 2) : undefined;
  const binary = dice.chance(form === "json" ? 0.1 : 0.5);
  const version = dice.chance(0.2) ? "3" : undefined;
  const id = dice.chance(0.3) ? `mine ${serial}` : undefined;
  const outputs = drawOutputs(dice);
  const parameters = {
    k,
    binary_data_output: binary || undefined,
    priority: dice.chance(0.1) ? 1 : undefined,
  };
  const x = {
    name: "x",
    datatype: "INT64",
    shape: [texts.length, length],
    data: numbers.flat().map(exactly),
  };
  const t = { name: "t", datatype: "BYTES", shape: [texts.length], data: texts };
  const { headers, body } = writeMessage(
    { id, parameters, outputs },
    form === "nested" ? [{ ...x, data: nested(x.data, length) }, t] : inForm([x, t], form),
    "inputs",
  );
  const rows = texts.map((text, at) => rowOf(text, numbers[at]!, k, version));
  return {
    path: `/v2/models/${model}${version === undefined ? "" : `/versions/${version}`}/infer`,
    headers,
    body,
    inputs: texts.length,
    bad,
    check: (answer, header) => {
      const got = readMessage(answer, header(HEADER), "outputs");
      assert.equal(got.id, id, "another's id");
      check(got, rows, outputs ?? NAMES.map((name) => ({ name })), binary);
    },
  };
}

function nested(data: NonNullable<Tensor["data"]>, length: number): NonNullable<Tensor["data"]> {
  const rows = Array.from({ length: data.length / length }, (_, at) =>
    data.slice(length * at, length * (at + 1)),
  );
  return rows as unknown as NonNullable<Tensor["data"]>;
}

function inForm(all: readonly Tensor[], form: "json" | "binary" | "mixed"): readonly Tensor[] {
  return all.map((tensor, at) => {
    if (form === "json" || (form === "mixed" && at === 0)) return tensor;
    const { data: _, ...rest } = tensor;
    return { ...rest, raw: rawOf(tensor) };
  });
}

function drawOutputs(dice: Dice): Wanted | undefined {
  if (dice.chance(0.6)) return undefined;
  const names = dice.pick([["y", "label", "z"], ["label", "y"], ["z", "label"], ["label"]]);
  return names.map((name) =>
    dice.chance(0.3) ? { name, parameters: { binary_data: dice.chance(0.5) } } : { name },
  );
}

function isBinary({ parameters }: Wanted[number], otherwise: boolean): boolean {
  return (parameters?.["binary_data"] ?? otherwise) === true;
}

function check({ tensors: got }: Infer, rows: readonly Row[], wanted: Wanted, binary: boolean): void {
  assert.deepEqual(
    got.map(({ name }) => name),
    wanted.map(({ name }) => name),
  );
  for (const [at, tensor] of got.entries()) {
    assert.equal(tensor.raw !== undefined, isBinary(wanted[at]!, binary), "in another form than asked");
    assert.equal(tensor.shape[0], rows.length, "outputs for another number of inputs");
    const values = dataOf(tensor).map((value) => (typeof value === "object" ? value.rawJSON : String(value)));
    const own = rows.flatMap((row) => row[tensor.name as (typeof NAMES)[number]]);
    assert.equal(values.length, own.length, `${tensor.name} of another length`);
    const odd = own.findIndex((value, place) => values[place] !== value);
    if (odd >= 0) assert.fail(`CROSSED: ${tensor.name} has ${values[odd]}, not ${own[odd]}, at ${odd}`);
  }
}

/** A call is asked for twice. */
const read = new WeakMap<WorkerCall, Infer>();

function messageOf(call: WorkerCall): Infer {
  const known = read.get(call);
  if (known !== undefined) return known;
  const { body, headers } = call;
  const found = readMessage(Buffer.from(body as string), headers?.[HEADER], "inputs");
  read.set(call, found);
  return found;
}

function textsOf(call: WorkerCall): readonly string[] {
  return dataOf(messageOf(call).tensors[1]!) as readonly string[];
}

function elements(call: WorkerCall): Row[] | undefined {
  const { tensors: given, parameters } = messageOf(call);
  const [count, length] = given[0]!.shape as [number, number];
  assert.deepEqual(
    given.map(({ name, shape }) => [name, shape]),
    [["x", [count, length]], ["t", [count]], ...(given.length > 2 ? [["n", [count, 1]]] : [])],
  );
  const numbers = numbersOf(given[0]);
  for (const [row, own] of numbersOf(given[2]).entries()) {
    const padding = numbers.slice(row * length + Number(own), (row + 1) * length);
    assert.ok(padding.every((value) => value === "0") && Number(own) <= length, "padded with something else");
  }
  const version = call.path && /^\/v2\/models\/upstream\/versions\/(\d)\/infer$/.exec(call.path)![1];
  const texts = textsOf(call);
  if (texts.some(isBad)) return undefined;
  return texts.map((text, at) =>
    rowOf(text, numbers.slice(length * at, length * (at + 1)), parameters?.["k"], version),
  );
}

function numbersOf(tensor: Tensor | undefined): readonly string[] {
  return tensor === undefined ? [] : dataOf(tensor).map((value) => (value as { rawJSON: string }).rawJSON);
}

function reply(
  rows: readonly unknown[],
  call: WorkerCall,
): { body: Buffer; headers: Readonly<Record<string, string>> } {
  const { outputs, parameters, tensors: given } = messageOf(call);
  const count = saidRows(rows, textsOf(call));
  const present = rows.filter((row): row is Row => row !== null);
  const wanted = outputs ?? NAMES.map((name) => ({ name }));
  const answered = wanted.map((output): Tensor => {
    const { name } = output;
    const data = present.flatMap((row) => row[name as (typeof NAMES)[number]]);
    const width = name === "y" ? 3 : given[0]!.shape[1]!;
    const tensor =
      name === "label"
        ? { name, datatype: "BYTES", shape: [count], data }
        : { name, datatype: "INT64", shape: [count, width], data: data.map(exactly) };
    const binary = isBinary(output, parameters?.["binary_data_output"] === true);
    // Some servers send numbers whatever they are asked for.
    if (!binary || count % 7 === 0) return tensor;
    const { data: _, ...rest } = tensor;
    return { ...rest, raw: rawOf(tensor) };
  });
  return writeMessage({ model_name: "upstream", model_version: "7" }, answered, "outputs");
}

/**
 * How many rows a reply says it has. One that says the wrong number is noticed only in a batch: to a task by itself a
 * model may answer with any number. Texts of two requests are a batch for certain; elsewhere the shape is right and the
 * values are too many or too few.
 */
function saidRows(rows: readonly unknown[], texts: readonly string[]): number {
  const owners = new Set(texts.filter((text) => text.startsWith("t")).map((text) => vectorOf(text)[1]));
  return owners.size > 1 && rows.length % 2 === 0 ? rows.length : texts.length;
}

/** Rows that are too long or too short. */
function bend(rows: unknown[], dice: Dice): unknown[] {
  const at = dice.upTo(rows.length);
  const { y, label, z } = rows[at] as Row;
  const long = { y: [...y, "1"], label: [...label, "more"], z: [...z, "1"] };
  return rows.with(at, dice.pick([long, { y: y.slice(1), label: [], z: z.slice(1) }]));
}
