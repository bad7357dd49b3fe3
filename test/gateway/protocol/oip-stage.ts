/** Ways to ask both sides of the Open Inference Protocol, for the tests. */
import assert from "node:assert/strict";
import { Refusal } from "../../../src/core/errors.ts";
import { oipV2 } from "../../../src/gateway/protocol/oip-v2.ts";
import type { Asked, WorkerCall, Drafts, Outputs } from "../../../src/gateway/protocol/protocol.ts";
import { infer, type Sent } from "./servers/oip.ts";
import { LIMITS } from "./spoken.ts";

export const { worker, client } = oipV2;
export const read = (given: Asked): ReturnType<(typeof client.infer)[0]["read"]> =>
  client.infer[0]!.read(given);

export function asked(
  body: Buffer | string,
  headers: Record<string, string> = {},
  more: Partial<Asked> = {},
): Asked {
  return {
    names: { model: "toy" },
    limits: LIMITS,
    body: Buffer.from(body as string),
    header: (name) => headers[name],
    ...more,
  };
}

export function drafts(...given: Parameters<typeof asked>): Drafts {
  const found = read(asked(...given));
  assert.ok(!("unbatched" in found), "why" in found ? found.why : "unbatched");
  return found;
}

export function bypass(...given: Parameters<typeof asked>): string {
  const found = read(asked(...given));
  assert.ok("unbatched" in found);
  assert.equal(found.model, "toy");
  return found.why ?? "";
}

export const refused = (words: RegExp) => (error: unknown) =>
  error instanceof Refusal && error.code === "INVALID_REQUEST" && words.test(error.message);

export function called(inputs: readonly string[], parameters: string): WorkerCall {
  const call = worker.call(inputs, parameters, "toy");
  assert.equal(call.flaw, undefined);
  return call;
}

export function replied({ headers, body }: Sent, rows: number): Outputs {
  const inputs = Array.from({ length: rows }, () => "[]");
  return worker.outputs({ header: (name) => headers[name], body }, inputs, "");
}

/** Through a worker that does what the protocol says. */
export function run(inputs: readonly string[], parameters: string): readonly string[] {
  const { body, headers = {} } = called(inputs, parameters);
  const sent = infer(Buffer.from(body as string), headers);
  assert.equal(sent.status, 200, sent.body.toString());
  const { outputs, flaw } = replied(sent, inputs.length);
  assert.equal(flaw, undefined);
  return outputs;
}
