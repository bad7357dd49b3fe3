/**
 * OpenAI's completions, both ends. A prompt is a text or tokens with the request's serial number and its position; choice
 * k of it says `<prompt>|<max_tokens>|<k>`.
 */
import assert from "node:assert/strict";
import type { WorkerCall } from "../../src/gateway/protocol/protocol.ts";
import { howMany } from "./dropin-dice.ts";
import type { SimRequest, Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";

type Prompt = string | readonly number[];

interface Asked {
  readonly prompt: Prompt | readonly Prompt[];
  readonly max_tokens?: number;
  readonly n?: number;
}

interface Choice {
  readonly text: string;
  readonly index: number;
  readonly logprobs: null;
  readonly finish_reason: string;
}

function textOf(prompt: Prompt, most: number | undefined, k: number): string {
  return `${JSON.stringify(prompt)}|${most ?? "-"}|${k}`;
}

export const completions: Speaker = { make, elements, reply, shuffles: true, bend };

function make(dice: Dice, serial: number, model: string): SimRequest {
  const tokens = dice.chance(0.2);
  const bad = !tokens && dice.chance(0.01);
  const prompts: Prompt[] = Array.from({ length: howMany(dice) }, (_, at) =>
    tokens ? [serial, at] : dice.chance(0.15) ? `s${dice.upTo(20)}` : `t${serial}.${at}`,
  );
  if (bad) prompts[dice.upTo(prompts.length)] = `bad${serial}`;
  const n = dice.chance(0.3) ? dice.between(1, 3) : undefined;
  const most = dice.chance(0.3) ? dice.between(1, 3) : undefined;
  const temperature = dice.chance(0.5) ? 0 : undefined;
  const single = prompts.length === 1 && dice.chance(0.5);
  const asked = { model, prompt: single ? prompts[0] : prompts, n, max_tokens: most, temperature };
  return {
    path: "/v1/completions",
    headers: { "content-type": "application/json" },
    body: Buffer.from(JSON.stringify(asked)),
    inputs: prompts.length,
    bad,
    check: (body) => check(body, prompts, most, n ?? 1),
  };
}

function check(body: Buffer, prompts: readonly Prompt[], most: number | undefined, n: number): void {
  const { choices, usage } = JSON.parse(body.toString("utf8")) as {
    choices: Choice[];
    usage: { prompt_tokens: number; completion_tokens: number; total_tokens: number };
  };
  assert.equal(choices.length, prompts.length * n, "choices for another number of prompts");
  for (const [at, { text, index }] of choices.entries()) {
    const own = textOf(prompts[Math.floor(at / n)]!, most, at % n);
    if (index !== at || text !== own) assert.fail(`CROSSED: choice ${at} of ${own} is ${text} at ${index}`);
  }
  assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
}

/** One prompt comes as it is, which for tokens is an array of numbers. */
function promptsOf({ prompt }: Asked): readonly Prompt[] {
  if (typeof prompt === "string") return [prompt];
  return typeof prompt[0] === "number" ? [prompt as readonly number[]] : (prompt as readonly Prompt[]);
}

function elements({ body }: WorkerCall): Choice[] | undefined {
  const asked = JSON.parse(String(body)) as Asked;
  const prompts = promptsOf(asked);
  const kinds = new Set(prompts.map((each) => typeof each));
  assert.equal(kinds.size, 1, "texts and tokens in one call");
  if (prompts.some((each) => typeof each === "string" && each.startsWith("bad"))) return undefined;
  const n = asked.n ?? 1;
  return prompts.flatMap((prompt, p) =>
    Array.from({ length: n }, (_, k) => {
      const text = textOf(prompt, asked.max_tokens, k);
      return { text, index: p * n + k, logprobs: null, finish_reason: "stop" };
    }),
  );
}

function reply(choices: readonly unknown[]): { body: Buffer } {
  const usage = { prompt_tokens: 7, completion_tokens: choices.length, total_tokens: 7 + choices.length };
  const whole = { id: "c", object: "text_completion", created: 1, model: "m", choices, usage };
  return { body: Buffer.from(JSON.stringify(whole)) };
}

function bend(choices: unknown[], dice: Dice): unknown[] {
  const at = dice.upTo(choices.length);
  const choice = choices[at] as Choice;
  const bent = dice.pick([
    { ...choice, index: choice.index + 1 },
    { ...choice, index: -1 },
    { ...choice, text: null },
    { index: choice.index },
  ]);
  return choices.with(at, bent);
}
