/**
 * KServe's v1 protocol, both ends. An instance is a text, or a number, a list or an object made of it; its prediction says
 * the instance again, with the signature and the version that were asked for.
 */
import assert from "node:assert/strict";
import { isDeepStrictEqual } from "node:util";
import type { WorkerCall } from "../../src/gateway/protocol/protocol.ts";
import { codeOf, isBad, textsFor, vectorOf } from "./dropin-dice.ts";
import type { SimRequest, Speaker } from "./dropin-table.ts";
import type { Dice } from "./plan.ts";

interface Asked {
  readonly instances: readonly unknown[];
  readonly signature_name?: string;
}

const FORMS: readonly ((text: string) => unknown)[] = [
  (text) => text,
  (text) => codeOf(text) + 0.5,
  (text) => [vectorOf(text), [text]],
  (text) => ({ text, more: { at: vectorOf(text) } }),
];

export const predictions: Speaker = { make, elements, reply, shuffles: false };

function make(dice: Dice, serial: number, model: string): SimRequest {
  const { texts, bad } = textsFor(dice, serial);
  const instances = texts.map((text) => (isBad(text) ? text : dice.pick(FORMS)(text)));
  const signature = dice.chance(0.3) ? dice.pick(["a", "b"]) : undefined;
  const version = dice.chance(0.2) ? String(dice.between(1, 2)) : undefined;
  const at = version === undefined ? "" : `/versions/${version}`;
  return {
    path: `/v1/models/${model}${at}:predict`,
    headers: {},
    body: Buffer.from(JSON.stringify({ signature_name: signature, instances })),
    inputs: instances.length,
    bad,
    check: (body) => {
      const answer = JSON.parse(body.toString("utf8")) as { predictions: unknown[] };
      assert.equal(answer.predictions.length, instances.length, "outputs for another number of inputs");
      for (const [place, instance] of instances.entries()) {
        const [got, own] = [answer.predictions[place], predictionOf(instance, signature, version)];
        if (!isDeepStrictEqual(got, own))
          assert.fail(`CROSSED: input ${place}, ${JSON.stringify(instance)}, got ${JSON.stringify(got)}`);
      }
    },
  };
}

function predictionOf(instance: unknown, signature = "serving_default", version = "newest"): unknown {
  return { of: instance, by: `${signature} of ${version}` };
}

function elements({ path, body }: WorkerCall): unknown[] | undefined {
  const { instances, signature_name } = JSON.parse(String(body)) as Asked;
  const version =
    path === undefined ? undefined : /^\/v1\/models\/upstream\/versions\/(\d):predict$/.exec(path)![1];
  if (instances.some(isBad)) return undefined;
  return instances.map((instance) => predictionOf(instance, signature_name, version));
}

/** A prediction may be null, so that a hollow one would be taken for good: then there is no list at all. */
function reply(all: readonly unknown[]): { body: Buffer } {
  return { body: Buffer.from(JSON.stringify({ predictions: all.includes(null) ? null : all })) };
}
