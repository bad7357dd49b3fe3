/**
 * The drop-in protocols as the simulation speaks them: one row each, with both ends.
 *
 * `make` is a client: a request with so many inputs, and what a right answer to it is. `elements` and `reply` are a
 * server made from the protocol's documents: an element for each input of a call, and elements as a reply. What goes
 * wrong in between is the same for all (`dropin-worker.ts`): elements go missing, come twice or are hollow.
 * `shuffles`: elements say whose they are, so that their order means nothing; `bend` spoils just that.
 *
 * Where they do not, nobody could notice that two of them changed places.
 *
 * Every element must follow from its own input and the request's parameters alone, and differ from all others.
 * A protocol without a row is not played; `uncovered` lists those, and a test wants none.
 */
import type { WorkerCall, ProtocolName } from "../../src/gateway/protocol/protocol.ts";
import { protocols } from "../../src/gateway/protocol/protocols.ts";
import { cohere } from "./dropin-cohere.ts";
import { completions } from "./dropin-completions.ts";
import { predictions } from "./dropin-kserve.ts";
import { tensors } from "./dropin-oip.ts";
import { ollama } from "./dropin-ollama.ts";
import { embeddings } from "./dropin-openai.ts";
import { tei } from "./dropin-tei.ts";
import type { Dice } from "./plan.ts";

export interface SimRequest {
  readonly path: string;
  /** Lower case. */
  readonly headers: Readonly<Record<string, string>>;
  readonly body: Buffer;
  readonly inputs: number;
  /** Holds an input that the server refuses. */
  readonly bad: boolean;
  /** Throws unless this body of a 200 has for each input its own output, in order. */
  check(body: Buffer, header: (name: string) => string | undefined): void;
}

export interface Speaker {
  make(dice: Dice, serial: number, model: string): SimRequest;
  /** One for each input of the call, in order; undefined: the server refuses the call. */
  elements(call: WorkerCall): unknown[] | undefined;
  reply(
    elements: readonly unknown[],
    call: WorkerCall,
  ): { body: Buffer; headers?: Readonly<Record<string, string>> };
  readonly shuffles: boolean;
  /** Makes elements that no reader may accept of good ones; left out: nothing but what all have. */
  bend?(elements: unknown[], dice: Dice): unknown[];
}

export const speakers: Readonly<Partial<Record<ProtocolName, Speaker>>> = {
  "openai-embeddings": embeddings,
  "openai-completions": completions,
  tei,
  ollama,
  cohere,
  "kserve-v1": predictions,
  "oip-v2": tensors,
};

export const played = Object.keys(speakers).filter((name) => name in protocols) as ProtocolName[];
export const uncovered = Object.keys(protocols).filter((name) => !(name in speakers));
