/**
 * The contract of a drop-in protocol, between clients and Ferry and between Ferry and workers.
 *
 * One file per protocol holds both directions as pure functions. Client and worker side may run in different processes,
 * so they communicate through the task: `parameters`, which all tasks of a batch share, and the input and output.
 *
 *   client ── read ──► inputs, parameters ──► engine ──► batch ── call ──► worker
 *   client ◄─ render ─ outputs            ◄── engine ◄──────── outputs ◄── worker
 *
 * Tasks share a batch only if their `parameters` are equal, so every field that could change an answer goes there.
 * Values are cut and joined as text, so an int64 or a float is unchanged; bytes are base64. Parameters named `$…` are
 * internal and not sent to workers (`sent`).
 *
 * Any client protocol also works with `batch` workers, Python or JavaScript functions, and simulated GPUs: they get the
 * inputs and return what `render` understands.
 */
import type { Readable } from "node:stream";
import type { Refusal } from "../../core/errors.ts";
import type { Json } from "../../core/task.ts";
import type { Pad, PadMemory } from "./oip-pad.ts";

export const PROTOCOL_NAMES = [
  "openai-embeddings",
  "openai-completions",
  "tei",
  "kserve-v1",
  "oip-v2",
  "ollama",
  "cohere",
] as const;
export type ProtocolName = (typeof PROTOCOL_NAMES)[number];

/** `read` checks these before it allocates anything for an input. */
export interface RequestLimits {
  readonly maxInputs: number;
  /** For all inputs together; shared parts count once per input. */
  readonly maxBytes: number;
}

export interface Asked {
  readonly names: Readonly<Record<string, string>>;
  /** At most `limits.maxBodyBytes`. */
  readonly body: Buffer;
  readonly limits: RequestLimits;
  /** The model named by the path takes one task at a time (`maxBatchSize: 1`). */
  readonly alone?: boolean;
  /** How the rows of that model are padded, if they are. */
  readonly pad?: Pad | undefined;
  header(name: string): string | undefined;
}

export interface Drafts {
  /** As the client named it; undefined: the one model that speaks this protocol. */
  readonly model?: string | undefined;
  readonly inputs: readonly Json[];
  /** Canonical; "" if there are none. */
  readonly parameters: Json;
  /** Sampled: equal inputs must not share an answer. */
  readonly drawn?: boolean;
  /** One output per input, in order. `model` is its name here. May throw a Refusal. */
  readonly render: (outputs: readonly Json[], model: string, request?: Rendered) => ProtocolAnswer;
  /** The same in short steps; undefined for responses that are never large. */
  readonly pieces?: ((outputs: readonly Json[], model: string, request?: Rendered) => Pieces) | undefined;
}

/** A JSON response generated while it is sent. May throw a Refusal until its last text. */
export interface Pieces {
  /** Name, value, name, value… */
  readonly headers?: readonly string[];
  readonly texts: Iterable<Json>;
}

/** Only tests omit it. */
export interface Rendered {
  readonly id: string;
  /** Arrival, in Unix milliseconds. */
  readonly at: number;
}

/** A request that cannot share a batch (a stream, a seed) and is proxied to a worker unchanged. */
export interface Unbatched {
  readonly unbatched: true;
  readonly model?: string | undefined;
  /** Why, and what to do: the error if the model has no worker to proxy to. */
  readonly why?: string;
}

export interface ProtocolAnswer {
  readonly status?: number;
  readonly type?: string;
  readonly headers?: readonly string[];
  readonly body: string | Buffer;
}

export interface Known {
  readonly name: string;
  readonly protocols: readonly ProtocolName[];
  readonly ready: boolean;
}

export interface ModelFacts {
  readonly models: readonly Known[];
  readonly model: Known | undefined;
  readonly ready: boolean;
  readonly version: string;
  readonly maxInputs: number;
}

export interface InferRoute {
  /** `{model}` and `{version}` match a segment, or its part before a colon. */
  readonly path: string;
  /** Accepted media types, "" if Content-Type is optional; default: JSON. */
  readonly types?: readonly string[];
  read(asked: Asked): Drafts | Unbatched;
}

export interface AboutRoute {
  readonly path: string;
  readonly open?: boolean;
  /** "worker": ask a worker of that model; undefined: not found. */
  tell(about: ModelFacts): ProtocolAnswer | "worker" | undefined;
  fallback?(about: ModelFacts): ProtocolAnswer;
}

export interface ClientSide {
  readonly infer: readonly InferRoute[];
  readonly about: readonly AboutRoute[];
  readonly fail: (refusal: Refusal) => ProtocolAnswer;
}

export interface WorkerCall {
  /** Relative to the worker's base, as `/predict`; default: the worker's URL unchanged. */
  readonly path?: string;
  readonly type?: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body: string | Buffer;
  /** Uses `WorkerSide.extension`, which `call` can do without. */
  readonly extended?: boolean;
  /** The client chose the path: a version, or a route that not every such server has. */
  readonly named?: boolean;
  /** Why these inputs cannot be sent, for their client; the other fields are ignored then. */
  readonly flaw?: string;
}

export interface WorkerReply {
  header(name: string): string | undefined;
  readonly body: Buffer;
}

export type Outputs =
  | { readonly outputs: readonly Json[]; readonly flaw?: never; readonly divide?: never }
  /**
   * The message follows "worker's reply". `inseparable`: the worker must get one input at a time. `divide`: smaller
   * batches of the same inputs may be answered, and the worker is not to blame.
   */
  | {
      readonly outputs?: never;
      readonly flaw: string;
      readonly inseparable?: boolean;
      readonly divide?: boolean;
    };

export interface WorkerSide {
  readonly maxBatchSize?: number;
  /** Where a server describes itself, relative to its base, and how to read its maximum batch size. */
  readonly info?: {
    readonly path: string;
    readonly maxBatchSize: (text: string) => number | undefined;
  };
  /** Default health path, relative to a server's base. */
  readonly healthPath?: string;
  /** An optional extension: where a server lists its extensions, and whether it lists this one. */
  readonly extension?: { readonly path: string; readonly listed: (text: string) => boolean };
  /** Replies are not all JSON; it checks them itself. */
  readonly readsBytes?: boolean;
  basePath(path: string): string;
  modelOf?(path: string): string | undefined;
  /** `model`: name at the worker. Inputs may be anything the native API accepts. `plain`: without the extension. */
  call(inputs: readonly Json[], parameters: Json, model: string, plain?: boolean): WorkerCall;
  /** `memory`: of this model. */
  outputs(reply: WorkerReply, inputs: readonly Json[], parameters: Json, memory?: PadMemory): Outputs;
}

export interface Protocol {
  readonly name: ProtocolName;
  readonly client: ClientSide;
  readonly worker: WorkerSide;
}

/** A proxied request on its way to a worker (`workers/backend/passthrough.ts`). */
export interface PassedRequest {
  readonly method: string;
  /** Relative to the worker's base, with its query. Headers: name, value, name, value… */
  readonly path: string;
  readonly headers: readonly string[];
  /** The client's `Authorization`; null: send none; undefined: send the configured one. */
  readonly authorization?: string | null | undefined;
  /** Called once per worker tried; an earlier worker has not touched the body. */
  body(): Readable | Buffer | null;
}

/** Receives the response. Exactly one of `ended` and `failed` comes last, unless it was recalled. */
export interface PassReceiver {
  started(status: number, headers: readonly string[]): void;
  /** False: no more until `resume`. */
  data(chunk: Buffer): boolean;
  ended(): void;
  /** `unseen`: no worker could be reached; `unfit`: not expressible as a request; `broken`: a worker had it. */
  failed(message: string, how: "unseen" | "unfit" | "broken"): void;
}

export interface PassUnderway {
  resume(): void;
  recall(): void;
}
