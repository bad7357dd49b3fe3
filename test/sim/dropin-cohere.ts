/**
 * Cohere's `/v2/embed`, both ends. An embedding is [kind, serial, position, number of its type, parameters]; as base64 it is
 * that of the floats.
 */
import assert from "node:assert/strict";
import type { WorkerCall } from "../../src/gateway/protocol/protocol.ts";
import { isBad, sameNumbers, textsFor, vectorOf } from "./dropin-dice.ts";
import type { SimRequest, Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";

interface Content {
  readonly content: readonly { readonly type: "text"; readonly text: string }[];
}

interface Asked {
  readonly texts?: readonly string[];
  readonly inputs?: readonly Content[];
  readonly input_type: string;
  readonly embedding_types: readonly string[];
  readonly truncate?: string | undefined;
}

/** By type. */
type Element = Readonly<Record<string, unknown>>;

const TYPES = ["float", "int8", "uint8", "binary", "ubinary", "base64"];
const PURPOSES = ["search_query", "search_document"];

export const cohere: Speaker = { make, elements, reply, shuffles: false, bend };

function embeddingOf(text: string, type: string, { input_type, truncate }: Omit<Asked, "embedding_types">) {
  const parameters = 2 * PURPOSES.indexOf(input_type) + (truncate === "NONE" ? 1 : 0);
  const numbers = vectorOf(text, TYPES.indexOf(type), parameters);
  return type === "base64" ? Buffer.from(new Float32Array(numbers).buffer).toString("base64") : numbers;
}

function make(dice: Dice, serial: number, model: string): SimRequest {
  const { texts, bad } = textsFor(dice, serial);
  const asContents = dice.chance(0.3);
  const types = dice.chance(0.5) ? undefined : TYPES.filter(() => dice.chance(0.3)).reverse();
  const wanted = types === undefined || types.length === 0 ? ["float"] : types;
  const shared = { input_type: dice.pick(PURPOSES), truncate: dice.chance(0.2) ? "NONE" : undefined };
  const contents = texts.map((text): Content => ({ content: [{ type: "text", text }] }));
  const asked = {
    model,
    ...(asContents ? { inputs: contents } : { texts }),
    embedding_types: types,
    ...shared,
  };
  return {
    path: "/v2/embed",
    headers: { "content-type": "application/json" },
    body: Buffer.from(JSON.stringify(asked)),
    inputs: texts.length,
    bad,
    check: (body) => {
      const {
        embeddings,
        texts: said,
        meta,
      } = JSON.parse(body.toString("utf8")) as {
        embeddings: Record<string, unknown[]>;
        texts?: string[];
        meta: { billed_units: { input_tokens: number } };
      };
      assert.deepEqual(Object.keys(embeddings).sort(), [...wanted].sort());
      assert.deepEqual(said, asContents ? undefined : texts);
      for (const type of wanted)
        checkType(embeddings[type]!, texts, (text) => embeddingOf(text, type, shared));
      assert.ok(Number.isInteger(meta.billed_units.input_tokens));
    },
  };
}

function checkType(
  got: readonly unknown[],
  texts: readonly string[],
  ownOf: (text: string) => string | number[],
): void {
  assert.equal(got.length, texts.length, "outputs for another number of inputs");
  for (const [at, text] of texts.entries()) {
    const own = ownOf(text);
    if (typeof own === "string" ? got[at] !== own : !sameNumbers(got[at], own))
      assert.fail(`CROSSED: input ${at}, ${text}, got ${JSON.stringify(got[at])}`);
  }
}

function elements({ path, body }: WorkerCall): Element[] | undefined {
  assert.equal(path, "/v2/embed");
  const asked = JSON.parse(String(body)) as Asked;
  assert.ok((asked.texts === undefined) !== (asked.inputs === undefined), "both, or neither");
  const texts = asked.texts ?? asked.inputs!.map(({ content }) => content[0]!.text);
  assert.ok(texts.length > 0 && texts.length <= 96);
  if (texts.some(isBad)) return undefined;
  return texts.map((text) =>
    Object.fromEntries(asked.embedding_types.map((type) => [type, embeddingOf(text, type, asked)])),
  );
}

/** A list for each type that was asked for, null for the others. */
function reply(elements: readonly unknown[], { body }: WorkerCall): { body: Buffer } {
  const { embedding_types } = JSON.parse(String(body)) as Asked;
  const listOf = (type: string): unknown[] | null =>
    embedding_types.includes(type)
      ? elements.flatMap((each) =>
          each === null ? [null] : type in (each as Element) ? [(each as Element)[type]] : [],
        )
      : null;
  const embeddings = Object.fromEntries(TYPES.map((type) => [type, listOf(type)]));
  const meta = { api_version: { version: "2" }, billed_units: { input_tokens: 3 * elements.length + 1 } };
  return { body: Buffer.from(JSON.stringify({ id: "theirs", embeddings, meta })) };
}

/** One list too short, or with something in it that is no embedding. */
function bend(elements: unknown[], dice: Dice): unknown[] {
  const at = dice.upTo(elements.length);
  const element = elements[at] as Element;
  const type = dice.pick(Object.keys(element));
  const { [type]: _, ...others } = element;
  return elements.with(
    at,
    dice.pick([others, ...[{}, "#", 7, ["1"], null].map((odd) => ({ ...element, [type]: odd }))]),
  );
}
