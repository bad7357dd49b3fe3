/** The two sides of a protocol, as tests talk to them. */
import assert from "node:assert/strict";
import { Refusal } from "../../../src/core/errors.ts";
import type {
  ProtocolAnswer,
  Drafts,
  Protocol,
  WorkerReply,
  RequestLimits,
  Unbatched,
} from "../../../src/gateway/protocol/protocol.ts";

/** What one request may become, at the defaults. */
export const LIMITS: RequestLimits = { maxInputs: 2048, maxBytes: 8 * 2 ** 20 };

export class Spoken {
  readonly #protocol: Protocol;

  constructor(protocol: Protocol) {
    this.#protocol = protocol;
  }

  /** What `path` makes of a body: a value, or, from a string, exactly this text. */
  any(path: string, body: unknown): Drafts | Unbatched {
    const route = this.#protocol.client.infer.find((each) => each.path === path);
    assert(route, `no route ${path}`);
    const text = typeof body === "string" ? body : JSON.stringify(body);
    return route.read({ names: {}, body: Buffer.from(text), limits: LIMITS, header: () => undefined });
  }

  read(path: string, body: unknown): Drafts {
    const drafts = this.any(path, body);
    assert(!("unbatched" in drafts), "it is not to be batched");
    return drafts;
  }

  refuses(path: string, body: unknown, why: RegExp): void {
    assert.throws(
      () => this.any(path, body),
      (error) => error instanceof Refusal && error.code === "INVALID_REQUEST" && why.test(error.message),
    );
  }

  /** The path and the body of the one call that a batch becomes. */
  call(
    inputs: readonly string[],
    parameters: string,
    model = "m",
  ): { path: string | undefined; body: string } {
    const { path, body } = this.#protocol.worker.call(inputs, parameters, model);
    JSON.parse(String(body));
    return { path, body: String(body) };
  }

  /** One output per input, each of them JSON. */
  outputs(
    reply: string,
    inputs: readonly string[],
    parameters: string,
    headers: Headers = {},
  ): readonly string[] {
    const { outputs, flaw } = this.#protocol.worker.outputs(replied(reply, headers), inputs, parameters);
    assert(outputs !== undefined, String(flaw));
    assert.equal(outputs.length, inputs.length);
    for (const output of outputs) JSON.parse(output);
    return outputs;
  }

  /** What is wrong with a reply. */
  flaw(reply: unknown, inputs: readonly string[], parameters: string): string {
    const text = typeof reply === "string" ? reply : JSON.stringify(reply);
    const { outputs, flaw } = this.#protocol.worker.outputs(replied(text, {}), inputs, parameters);
    assert.equal(outputs, undefined, `taken: ${text}`);
    return flaw;
  }
}

type Headers = Readonly<Record<string, string>>;

function replied(text: string, headers: Headers): WorkerReply {
  return { body: Buffer.from(text), header: (name) => headers[name] };
}

export function bodyOf(answer: ProtocolAnswer): string {
  return String(answer.body);
}

/** Name, value, name, value… as an object. */
export function headersOf({ headers = [] }: ProtocolAnswer): Record<string, string> {
  const pairs: Record<string, string> = {};
  for (let at = 0; at < headers.length; at += 2) pairs[headers[at]!] = headers[at + 1]!;
  return pairs;
}
