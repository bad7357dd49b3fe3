/**
 * The contract of a drop-in protocol: what clients speak to Ferry, and what Ferry speaks to workers.
 *
 * One file per protocol holds both directions, as pure functions. A request becomes drafts, one per input; tasks
 * cross the engine as JSON text; a batch becomes one call; its reply becomes one output per input; outputs become the
 * answer. Client and worker of a task may sit in different processes, so what the two sides have to tell each other
 * stands in the task: in `parameters`, which every task of a batch shares, and in the input and output themselves.
 *
 *   client ── read ──► inputs, parameters ──► engine ──► batch ── call ──► worker
 *   client ◄─ render ─ outputs            ◄── engine ◄──────── outputs ◄── worker
 *
 * Two requests share a batch only when their `parameters` are equal, so every field that could change an answer goes
 * there. Values are cut and joined as text: an int64 or a float leaves as it came. Bytes travel as base64.
 *
 * Names in `parameters` that begin with `$` are between the two sides; `sent` leaves them out of a call.
 *
 * A client's protocol also works in front of a worker that speaks `batch`, a Python or JavaScript function, and a
 * simulated GPU: they get the inputs and answer with what `render` understands.
 */
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

/** What one request may become. `read` keeps to it before it makes anything of an input. */
export interface RequestLimits {
  /** Each is a task. */
  readonly maxInputs: number;
  /** Of all inputs together, where they hold more than the body does: what they share counts once for each. */
  readonly maxBytes: number;
}

/** A request as a protocol reads it. */
export interface Asked {
  /** What stands in the path where the route has `{model}` or `{version}`, decoded. */
  readonly names: Readonly<Record<string, string>>;
  /** No longer than `limits.maxBodyBytes`. */
  readonly body: Buffer;
  readonly limits: RequestLimits;
  /** Of the model that the path names: it takes one task at a time (`maxBatchSize: 1`). */
  readonly alone?: boolean;
  /** By its name in lower case. */
  header(name: string): string | undefined;
}

/** A request that was read. */
export interface Drafts {
  /** As the client named it; left out: the one model that speaks this protocol. */
  readonly model?: string | undefined;
  /** At least one. */
  readonly inputs: readonly Json[];
  /** Canonical; "" when there are none. */
  readonly parameters: Json;
  /** Drawn by lot: equal inputs want answers of their own, so none is reused. */
  readonly drawn?: boolean;
  /** One output per input, in order. `model` is its name here. May throw a Refusal. */
  render(outputs: readonly Json[], model: string, request?: Rendered): Answer;
  /** The same a piece at a time, none of which takes long; left out: it is never large. */
  pieces?(outputs: readonly Json[], model: string, request?: Rendered): Pieces;
}

/** An answer as JSON, made while it is asked for. May throw a Refusal until its last text. */
export interface Pieces {
  /** Name, value, name, value… */
  readonly headers?: readonly string[];
  readonly texts: Iterable<Json>;
}

/** The request that an answer is for; always given, but by tests. */
export interface Rendered {
  readonly id: string;
  /** When it came, in milliseconds since 1970. */
  readonly at: number;
}

/** It cannot share a batch (a stream, a seed): it goes to a worker of this model as it came. */
export interface Unbatched {
  readonly unbatched: true;
  readonly model?: string | undefined;
  /** Why, and what to do about it, for those whose model has no worker to send it to. */
  readonly why?: string;
}

export interface Answer {
  /** Left out: 200. */
  readonly status?: number;
  /** Left out: JSON. */
  readonly type?: string;
  /** Name, value, name, value… */
  readonly headers?: readonly string[];
  readonly body: string | Buffer;
}

/** A model, for those who only ask what there is. */
export interface Known {
  readonly name: string;
  readonly protocols: readonly ProtocolName[];
  /** At least one of its workers is healthy. */
  readonly ready: boolean;
}

export interface About {
  readonly models: readonly Known[];
  /** The model that the path names; undefined where it names none, or one that is not there. */
  readonly model: Known | undefined;
  /** This process takes requests. */
  readonly ready: boolean;
  readonly version: string;
  /** Of one request. */
  readonly maxInputs: number;
}

export interface InferRoute {
  /** `{model}` and `{version}` stand for one segment each, or the part of it before a colon. */
  readonly path: string;
  /** The media types it takes, "" where a client need not say one; left out: JSON. */
  readonly types?: readonly string[];
  /** Throws a Refusal. */
  read(asked: Asked): Drafts | Unbatched;
}

export interface AboutRoute {
  readonly path: string;
  /** Needs no credentials: for probes. */
  readonly open?: boolean;
  /** "worker": a worker of that model knows; where none can be asked, undefined is not found. */
  tell(about: About): Answer | "worker" | undefined;
  /** Where no worker can be asked: what we know ourselves. */
  fallback?(about: About): Answer;
}

export interface ClientSide {
  /** POST. */
  readonly infer: readonly InferRoute[];
  /** GET. */
  readonly about: readonly AboutRoute[];
  /** An error in the protocol's own shape. */
  readonly fail: (refusal: Refusal) => Answer;
}

export interface Call {
  /** Behind the worker's base, as `/predict`; left out: the worker's URL as it stands. */
  readonly path?: string;
  /** Left out: JSON. */
  readonly type?: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body: string | Buffer;
  /** It uses an extension that not every server speaks (`WorkerSide.extension`); `call` can do without. */
  readonly extended?: boolean;
  /** The client chose the path: a version, or a route that not every server of this kind has. */
  readonly named?: boolean;
  /** These inputs cannot be sent, and why, in words for their client; the rest then means nothing. */
  readonly flaw?: string;
}

export interface Replied {
  header(name: string): string | undefined;
  readonly body: Buffer;
}

export type Outputs =
  | { readonly outputs: readonly Json[]; readonly flaw?: never }
  /** To be put after "worker's reply". `inseparable`: it may well be good, but only for one input at a time. */
  | { readonly outputs?: never; readonly flaw: string; readonly inseparable?: boolean };

export interface WorkerSide {
  /** What servers of this kind take in one call unless they say otherwise; left out: anything. */
  readonly maxBatchSize?: number;
  /** Where a server says how it is set up, behind its base; and the most inputs it takes, read from what it says. */
  readonly info?: {
    readonly path: string;
    readonly maxBatchSize: (text: string) => number | undefined;
  };
  /** Where a server says that it is well, behind its base; left out: it is not asked unless the config says where. */
  readonly healthPath?: string;
  /**
   * What a call may use that not every server of this kind speaks: where a server lists what it does, behind its base, and
   * whether what it says there lists this.
   */
  readonly extension?: { readonly path: string; readonly listed: (text: string) => boolean };
  /** Its replies are not all JSON: it checks them itself. */
  readonly readsBytes?: boolean;
  /** The path of a worker's URL without this protocol's own part. */
  basePath(path: string): string;
  /** The name of the model that the path of a worker's URL says; left out, or undefined: none. */
  modelOf?(path: string): string | undefined;
  /**
   * `model` is its name at the worker. Inputs and parameters may be anything that Ferry's own API takes. `plain`: without the
   * extension; what cannot be said without it is a flaw.
   */
  call(inputs: readonly Json[], parameters: Json, model: string, plain?: boolean): Call;
  outputs(reply: Replied, inputs: readonly Json[], parameters: Json): Outputs;
}

export interface Protocol {
  readonly name: ProtocolName;
  readonly client: ClientSide;
  readonly worker: WorkerSide;
}
