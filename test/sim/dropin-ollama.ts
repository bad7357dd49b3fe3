/** Ollama's `/api/embed`, both ends. An embedding is [kind, serial, position, dimensions, truncated]. */
import assert from "node:assert/strict";
import type { WorkerCall } from "../../src/gateway/protocol/protocol.ts";
import { isBad, sameNumbers, textsFor, vectorOf } from "./dropin-dice.ts";
import type { SimRequest, Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";

interface Asked {
  readonly input: readonly string[];
  readonly dimensions?: number;
  readonly truncate?: boolean;
}

export const ollama: Speaker = { make, elements, reply, shuffles: false, bend };

function embeddingOf(text: string, dimensions = 0, truncate = true): number[] {
  return vectorOf(text, dimensions, truncate ? 1 : 0);
}

function make(dice: Dice, serial: number, model: string): SimRequest {
  const { texts, bad } = textsFor(dice, serial);
  const dimensions = dice.chance(0.3) ? dice.between(1, 3) : undefined;
  const truncate = dice.chance(0.2) ? dice.chance(0.5) : undefined;
  // Keeps nobody apart: it travels with each input.
  const keep = dice.pick([undefined, undefined, "5m", 0, -1, "1h30m"]);
  const single = texts.length === 1 && dice.chance(0.5);
  const asked = { model, input: single ? texts[0] : texts, dimensions, truncate, keep_alive: keep };
  return {
    path: "/api/embed",
    headers: { "content-type": "application/json" },
    body: Buffer.from(JSON.stringify(asked)),
    inputs: texts.length,
    bad,
    check: (body) => check(body, model, texts, dimensions, truncate),
  };
}

function check(
  body: Buffer,
  name: string,
  texts: readonly string[],
  dimensions: number | undefined,
  truncate: boolean | undefined,
): void {
  const { model, embeddings, ...figures } = JSON.parse(body.toString("utf8")) as {
    model: string;
    embeddings: unknown[];
    prompt_eval_count: number;
  };
  assert.equal(model, name);
  assert.equal(embeddings.length, texts.length, "outputs for another number of inputs");
  for (const [at, text] of texts.entries()) {
    if (!sameNumbers(embeddings[at], embeddingOf(text, dimensions, truncate)))
      assert.fail(`CROSSED: input ${at}, ${text}, got ${JSON.stringify(embeddings[at])}`);
  }
  assert.ok(Number.isInteger(figures.prompt_eval_count) && figures.prompt_eval_count >= 0);
}

function elements({ path, body }: WorkerCall): unknown[] | undefined {
  assert.equal(path, "/api/embed");
  const { input, dimensions, truncate } = JSON.parse(String(body)) as Asked;
  if (input.some(isBad)) return undefined;
  return input.map((text) => embeddingOf(text, dimensions, truncate));
}

function reply(embeddings: readonly unknown[]): { body: Buffer } {
  const figures = { total_duration: 70_001, load_duration: 11, prompt_eval_count: 2 * embeddings.length + 1 };
  return { body: Buffer.from(JSON.stringify({ model: "upstream", embeddings, ...figures })) };
}

/** What is no embedding. */
function bend(embeddings: unknown[], dice: Dice): unknown[] {
  const at = dice.upTo(embeddings.length);
  return embeddings.with(at, dice.pick([{}, "text", 7, ["1"], [null], [embeddings[at]]]));
}
