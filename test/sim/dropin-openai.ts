/** OpenAI's embeddings, both ends. An embedding is [kind, serial, position, dimensions]. */
import assert from "node:assert/strict";
import type { WorkerCall } from "../../src/gateway/protocol/protocol.ts";
import type { SimRequest, Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";
import { howMany, type Input, isBad, sameNumbers, textFor, vectorOf } from "./dropin-dice.ts";

interface Asked {
  readonly input: readonly Input[];
  readonly encoding_format: "base64";
  readonly dimensions?: number;
}

interface Element {
  readonly object: "embedding";
  readonly index: number;
  readonly embedding: unknown;
}

export const embeddings: Speaker = { make, elements, reply, shuffles: true, bend };

function make(dice: Dice, serial: number, model: string): SimRequest {
  const tokens = dice.chance(0.2);
  const bad = !tokens && dice.chance(0.01);
  const count = howMany(dice);
  const inputs: Input[] = Array.from({ length: count }, (_, at) =>
    tokens ? [serial, at] : textFor(dice, serial, at),
  );
  if (bad) inputs[dice.upTo(count)] = `bad${serial}.0`;
  const format = dice.pick(["float", "base64", undefined]);
  const dimensions = dice.chance(0.3) ? dice.between(1, 3) : undefined;
  const single = count === 1 && dice.chance(0.5);
  const asked = {
    model,
    input: single ? inputs[0] : inputs,
    ...(format && { encoding_format: format }),
    ...(dimensions && { dimensions }),
    ...(dice.chance(0.1) && { user: `u${serial}` }),
  };
  return {
    path: "/v1/embeddings",
    headers: { "content-type": "application/json" },
    body: Buffer.from(JSON.stringify(asked)),
    inputs: count,
    bad,
    check: (body) => check(body, inputs, dimensions, format === "base64"),
  };
}

function check(
  body: Buffer,
  inputs: readonly Input[],
  dimensions: number | undefined,
  base64: boolean,
): void {
  const { object, data, usage } = JSON.parse(body.toString("utf8")) as {
    object: string;
    data: Element[];
    usage: { prompt_tokens: number; total_tokens: number };
  };
  assert.equal(object, "list");
  assert.equal(data.length, inputs.length, "outputs for another number of inputs");
  for (const [at, input] of inputs.entries()) {
    const { index, embedding } = data[at]!;
    const got = base64 ? numbersOf(embedding as string) : (embedding as number[]);
    const own = vectorOf(input, dimensions ?? 0);
    if (index !== at || !sameNumbers(got, own))
      assert.fail(`CROSSED: input ${at}, ${JSON.stringify(input)}, got ${JSON.stringify(got)} at ${index}`);
  }
  assert.ok(Number.isInteger(usage.prompt_tokens) && usage.prompt_tokens >= 0);
  assert.equal(usage.total_tokens, usage.prompt_tokens);
}

function numbersOf(text: string): number[] {
  const bytes = Buffer.from(text, "base64");
  return Array.from({ length: bytes.length / 4 }, (_, at) => bytes.readFloatLE(4 * at));
}

function elements({ body }: WorkerCall): Element[] | undefined {
  const { input, encoding_format, dimensions } = JSON.parse(String(body)) as Asked;
  assert.equal(encoding_format, "base64");
  assert.ok(input.length > 0 && input.length <= 2048);
  const kinds = new Set(input.map((each) => typeof each));
  assert.equal(kinds.size, 1, "texts and tokens in one call");
  if (input.some(isBad)) return undefined;
  return input.map((each, index) => {
    const numbers = vectorOf(each, dimensions ?? 0);
    const bytes = Buffer.alloc(4 * numbers.length);
    numbers.forEach((number, at) => bytes.writeFloatLE(number, 4 * at));
    // Some servers send numbers whatever they are asked for.
    const embedding = numbers[1]! % 5 === 0 ? numbers : bytes.toString("base64");
    return { object: "embedding", index, embedding };
  });
}

function reply(data: readonly unknown[]): { body: Buffer } {
  const usage = { prompt_tokens: 3 * data.length + 1, total_tokens: 3 * data.length + 1 };
  return { body: Buffer.from(JSON.stringify({ object: "list", data, model: "m", usage })) };
}

/** Two of the same place, a place that is none, or what is no embedding. */
function bend(data: unknown[], dice: Dice): unknown[] {
  const at = dice.upTo(data.length);
  const element = data[at] as Element;
  const bent = dice.pick([
    { ...element, index: element.index + 1 },
    { ...element, index: -1 },
    { ...element, index: 0.5 },
    { ...element, embedding: null },
    { object: "embedding", index: element.index },
  ]);
  return data.with(at, bent);
}
