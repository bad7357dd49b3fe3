/**
 * The contract of a drop-in protocol: what clients speak to Ferry, and what Ferry speaks to workers.
 *
 * One file per protocol holds both directions, as pure functions. The client and the worker of a task may be in different
 * processes, so what the two sides have to tell each other is in the task: in `parameters`, which every task of a batch
 * shares, and in the input and output themselves.
 *
 *   client ── read ──► inputs, parameters ──► engine ──► batch ── call ──► worker
 *   client ◄─ render ─ outputs            ◄── engine ◄──────── outputs ◄── worker
 *
 * Two requests share a batch only when their `parameters` are equal, so every field that could change an answer goes there.
 * Values are cut and joined as text: an int64 or a float leaves as it came. Bytes travel as base64. Parameters whose name
 * begins with `$` are between the two sides and not sent to workers (`sent`).
 *
 * A client's protocol also works in front of a worker that speaks `batch`, a Python or JavaScript function, and a simulated
 * GPU: they get the inputs and answer with what `render` understands.
 */
import type { Readable } from "node:stream";
import type { Refusal } from "../../core/errors.ts";
import type { Json } from "../../core/task.ts";

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
  /** Of all inputs together; what they share counts once for each. */
  readonly maxBytes: number;
}

export interface Asked {
  /** The path's values for `{model}`, `{version}` and the like, decoded. */
  readonly names: Readonly<Record<string, string>>;
  /** No longer than `limits.maxBodyBytes`. */
  readonly body: Buffer;
  readonly limits: RequestLimits;
  /** The model that the path names takes one task at a time (`maxBatchSize: 1`). */
  readonly alone?: boolean;
  /** `name` in lower case. */
  header(name: string): string | undefined;
}

export interface Drafts {
  /** As the client named it; undefined: the one model that speaks this protocol. */
  readonly model?: string | undefined;
  /** At least one. */
  readonly inputs: readonly Json[];
  /** Canonical; "" when there are none. */
  readonly parameters: Json;
  /** Sampled: equal inputs must not share an answer. */
  readonly drawn?: boolean;
  /** One output per input, in order. `model` is its name here. May throw a Refusal. */
  render(outputs: readonly Json[], model: string, request?: Rendered): ProtocolAnswer;
  /** The same a piece at a time, none of which takes long; undefined for answers that are never large. */
  pieces?(outputs: readonly Json[], model: string, request?: Rendered): Pieces;
}

/** An answer as JSON, made while it is sent. May throw a Refusal until its last text. */
export interface Pieces {
  /** Name, value, name, value… */
  readonly headers?: readonly string[];
  readonly texts: Iterable<Json>;
}

/** The request that an answer is for; only tests leave it out. */
export interface Rendered {
  readonly id: string;
  /** When it arrived, in milliseconds since 1970. */
  readonly at: number;
}

/** A request that cannot share a batch (a stream, a seed): it goes to a worker of this model as it came. */
export interface Unbatched {
  readonly unbatched: true;
  readonly model?: string | undefined;
  /** Why, and what to do about it: the error where the model has no worker to send it to. */
  readonly why?: string;
}

export interface ProtocolAnswer {
  /** Default: 200. */
  readonly status?: number;
  /** Default: JSON. */
  readonly type?: string;
  /** Name, value, name, value… */
  readonly headers?: readonly string[];
  readonly body: string | Buffer;
}

export interface Known {
  readonly name: string;
  readonly protocols: readonly ProtocolName[];
  /** At least one of its workers is healthy. */
  readonly ready: boolean;
}

export interface ModelFacts {
  readonly models: readonly Known[];
  /** The model that the path names; undefined where it names none, or an unknown one. */
  readonly model: Known | undefined;
  /** This process takes requests. */
  readonly ready: boolean;
  readonly version: string;
  /** Of one request. */
  readonly maxInputs: number;
}

export interface InferRoute {
  /** `{model}` and `{version}` stand for a segment, or the part of it before a colon. */
  readonly path: string;
  /** The media types it takes, "" where a client need not state one; default: JSON. */
  readonly types?: readonly string[];
  /** Throws a Refusal. */
  read(asked: Asked): Drafts | Unbatched;
}

export interface AboutRoute {
  readonly path: string;
  /** Needs no credentials: for probes. */
  readonly open?: boolean;
  /** "worker": ask a worker of that model; undefined: not found. */
  tell(about: ModelFacts): ProtocolAnswer | "worker" | undefined;
  /** Where no worker can be asked. */
  fallback?(about: ModelFacts): ProtocolAnswer;
}

export interface ClientSide {
  /** POST. */
  readonly infer: readonly InferRoute[];
  /** GET. */
  readonly about: readonly AboutRoute[];
  /** An error in the protocol's own shape. */
  readonly fail: (refusal: Refusal) => ProtocolAnswer;
}

export interface WorkerCall {
  /** Behind the worker's base, as `/predict`; default: the worker's URL as it stands. */
  readonly path?: string;
  /** Default: JSON. */
  readonly type?: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body: string | Buffer;
  /** It uses `WorkerSide.extension`; `call` can do without. */
  readonly extended?: boolean;
  /** The client chose the path: a version, or a route that not every server of this kind has. */
  readonly named?: boolean;
  /** Why these inputs cannot be sent, in words for their client; nothing else counts then. */
  readonly flaw?: string;
}

export interface WorkerReply {
  header(name: string): string | undefined;
  readonly body: Buffer;
}

export type Outputs =
  | { readonly outputs: readonly Json[]; readonly flaw?: never }
  /** To be put after "worker's reply". `inseparable`: the worker must get one input at a time. */
  | { readonly outputs?: never; readonly flaw: string; readonly inseparable?: boolean };

export interface WorkerSide {
  /** The most inputs of one call, unless a server says otherwise. */
  readonly maxBatchSize?: number;
  /** Where a server describes itself, behind its base, and how to read the most inputs it takes from that. */
  readonly info?: {
    readonly path: string;
    readonly maxBatchSize: (text: string) => number | undefined;
  };
  /** The default health path, behind a server's base. */
  readonly healthPath?: string;
  /** What not every server of this kind speaks: where a server lists its extensions, and whether it lists this one. */
  readonly extension?: { readonly path: string; readonly listed: (text: string) => boolean };
  /** Its replies are not all JSON: it checks them itself. */
  readonly readsBytes?: boolean;
  /** The path of a worker's URL without this protocol's own part. */
  basePath(path: string): string;
  /** The name of the model in the path of a worker's URL, if there is one. */
  modelOf?(path: string): string | undefined;
  /** `model` is its name at the worker. Inputs and parameters may be anything that the native API takes. `plain`: without the extension. */
  call(inputs: readonly Json[], parameters: Json, model: string, plain?: boolean): WorkerCall;
  outputs(reply: WorkerReply, inputs: readonly Json[], parameters: Json): Outputs;
}

export interface Protocol {
  readonly name: ProtocolName;
  readonly client: ClientSide;
  readonly worker: WorkerSide;
}

/** A request that bypasses the batches, on its way to a worker (`workers/backend/passthrough.ts`). */
export interface PassedRequest {
  readonly method: string;
  /** Behind the worker's base, with its query. */
  readonly path: string;
  /** Name, value, name, value… */
  readonly headers: readonly string[];
  /** The client's own `Authorization`; null: send none; undefined: send the configured one. */
  readonly authorization?: string | null | undefined;
  /** Called once for each worker that is tried; the body before was not touched. */
  body(): Readable | Buffer | null;
}

/** Takes the answer. Exactly one of `ended` and `failed` comes last, unless the request was recalled. */
export interface PassReceiver {
  /** `headers`: name, value, name, value… */
  started(status: number, headers: readonly string[]): void;
  /** False: no more until `resume`. */
  data(chunk: Buffer): boolean;
  ended(): void;
  /** `unseen`: no worker could be reached; `unfit`: it cannot be written as a request; `broken`: a worker had it. */
  failed(message: string, how: "unseen" | "unfit" | "broken"): void;
}

export interface PassUnderway {
  resume(): void;
  /** The caller no longer wants it. */
  recall(): void;
}
