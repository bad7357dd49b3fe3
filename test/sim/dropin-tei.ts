/**
 * TEI, both ends: all of its routes in turn, which share a model and its queue, but no call.
 *
 * An embedding is [kind, serial, position, dimensions, parameters]; a sparse one has the same numbers behind indices, one
 * per token has them twice. A text has two classes, a pair one; the scores follow from the codes of the texts. The server
 * cannot tell the pairs of `/rerank` from others.
 */
import assert from "node:assert/strict";
import { isDeepStrictEqual } from "node:util";
import type { WorkerCall } from "../../src/gateway/protocol/protocol.ts";
import { codeOf, howMany, type Input, isBad, textFor, textsFor, vectorOf } from "./dropin-dice.ts";
import type { SimRequest, Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";

interface Shared {
  readonly truncate?: boolean | undefined;
  readonly normalize?: boolean | undefined;
  readonly dimensions?: number | undefined;
  readonly raw_scores?: boolean | undefined;
}

type Sequence = readonly string[];
interface Prediction {
  readonly score: number;
  readonly label: string;
}

const EMBEDS = ["embed", "embed_all", "embed_sparse"] as const;
type Embed = (typeof EMBEDS)[number];

export const tei: Speaker = { make, elements, reply, shuffles: false, bend };

function make(dice: Dice, serial: number): SimRequest {
  const route = dice.pick([...EMBEDS, "embed", "predict", "rerank", "rerank"] as const);
  if (route === "predict") return predict(dice, serial);
  return route === "rerank" ? rerank(dice, serial) : embed(dice, serial, route);
}

function request(path: string, asked: object, inputs: number, bad: boolean, own: () => unknown): SimRequest {
  const check: SimRequest["check"] = (body, header) => {
    const [got, wanted] = [JSON.parse(body.toString("utf8")) as unknown[], own() as unknown[]];
    assert.equal(got.length, wanted.length, "outputs for another number of inputs");
    for (const at of wanted.keys()) {
      if (!isDeepStrictEqual(got[at], wanted[at]))
        assert.fail(
          `CROSSED: ${path}: ${JSON.stringify(wanted[at])} at ${at}, got ${JSON.stringify(got[at])}`,
        );
    }
    assert.match(header("x-compute-tokens") ?? "0", /^\d+$/);
  };
  const headers = { "content-type": "application/json" };
  return { path, headers, body: Buffer.from(JSON.stringify(asked)), inputs, bad, check };
}

function embed(dice: Dice, serial: number, route: Embed): SimRequest {
  const bad = dice.chance(0.01);
  const inputs: Input[] = Array.from({ length: howMany(dice) }, (_, at) =>
    dice.chance(0.2) ? [serial, at] : textFor(dice, serial, at),
  );
  if (bad) inputs[dice.upTo(inputs.length)] = `bad${serial}.0`;
  const shared: Shared = {
    truncate: dice.chance(0.2) || undefined,
    normalize: dice.pick([undefined, undefined, true, false]),
    dimensions: dice.chance(0.2) ? dice.between(1, 3) : undefined,
  };
  const single = inputs.length === 1 && dice.chance(0.5);
  const path = route === "embed" && dice.chance(0.2) ? "/" : `/${route}`;
  return request(path, { inputs: single ? inputs[0] : inputs, ...shared }, inputs.length, bad, () =>
    inputs.map((input) => embeddingOf(input, route, shared)),
  );
}

function predict(dice: Dice, serial: number): SimRequest {
  const { texts, bad } = textsFor(dice, serial);
  const sequences = texts.map((text, at): Sequence =>
    dice.chance(0.5) ? [text] : [textFor(dice, serial, at), text],
  );
  const shared = scoring(dice);
  const single = sequences.length === 1 && dice.chance(0.5);
  const [first] = sequences as [Sequence];
  const alone = first.length === 1 && dice.chance(0.5) ? first[0] : first;
  return request("/predict", { inputs: single ? alone : sequences, ...shared }, texts.length, bad, () => {
    const lists = sequences.map((sequence) => predictionsOf(sequence, shared));
    return single ? lists[0] : lists;
  });
}

function rerank(dice: Dice, serial: number): SimRequest {
  const { texts, bad } = textsFor(dice, serial);
  const query = dice.chance(0.2) ? "s0.0" : `t${serial}.99`;
  const shared = scoring(dice);
  const withTexts = dice.chance(0.5);
  const asked = { query, texts, return_text: withTexts || undefined, ...shared };
  return request(dice.chance(0.2) ? "/" : "/rerank", asked, texts.length, bad, () => {
    const ranks = texts.map((text, index) => {
      const { score } = predictionsOf([query, text], shared)[0]!;
      return withTexts ? { index, text, score } : { index, score };
    });
    return ranks.sort((one, other) => other.score - one.score || other.index - one.index);
  });
}

function scoring(dice: Dice): Shared {
  return {
    truncate: dice.chance(0.2) || undefined,
    raw_scores: dice.pick([undefined, undefined, true, false]),
  };
}

function embeddingOf(input: Input, route: Embed, { dimensions = 0, truncate, normalize }: Shared): unknown {
  const parameters = (truncate === true ? 1 : 0) + (normalize === false ? 2 : 0);
  const numbers = vectorOf(input, dimensions, parameters);
  if (route === "embed") return numbers;
  return route === "embed_all" ? [numbers, numbers] : numbers.map((value, index) => ({ index, value }));
}

function predictionsOf(sequence: Sequence, { truncate, raw_scores }: Shared): readonly Prediction[] {
  const [one, other] = sequence.map(codeOf) as [number, number?];
  const score = (one * 1e6 + (other ?? 0) + (truncate === true ? 0.5 : 0)) * (raw_scores === true ? -1 : 1);
  const all = [{ score, label: "A" }];
  return other === undefined ? [...all, { score: score + 0.25, label: "B" }] : all;
}

function elements({ path, body }: WorkerCall): unknown[] | undefined {
  const { inputs, ...shared } = JSON.parse(String(body)) as Shared & {
    inputs: readonly (Input | Sequence)[];
  };
  if (inputs.flat().some(isBad)) return undefined;
  if (path === "/predict") {
    assert.ok(
      inputs.every((each) => Array.isArray(each)),
      "texts side by side are one pair",
    );
    return inputs.map((each) => predictionsOf(each as Sequence, shared));
  }
  const route = EMBEDS.find((each) => `/${each}` === path);
  assert.ok(route !== undefined, `nobody knows ${path}`);
  return inputs.map((each) => embeddingOf(each as Input, route, shared));
}

function reply(values: readonly unknown[]): { body: Buffer; headers: Readonly<Record<string, string>> } {
  // Older servers do not count.
  const headers: Record<string, string> =
    values.length % 3 === 0 ? {} : { "x-compute-tokens": `${5 * values.length}` };
  return { body: Buffer.from(JSON.stringify(values)), headers };
}

/** What is no list, or in the place of an embedding one of something else. */
function bend(values: unknown[], dice: Dice): unknown[] {
  const at = dice.upTo(values.length);
  const odd = [{}, "text", 7, true];
  const isPlain = typeof (values[at] as readonly unknown[])[0] === "number";
  return values.with(at, dice.pick(isPlain ? [...odd, ["1"], [null], [[1]]] : odd));
}
