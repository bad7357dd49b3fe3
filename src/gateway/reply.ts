/**
 * Outcomes as HTTP responses.
 *
 * The output already is JSON text, so bodies are concatenated; only messages and reasons are escaped here. A binary
 * output (`core/tensor.ts`) is rendered as its caller asks; callers with different encodings share a batch, a task and
 * a cached outcome.
 *
 *   "encoding" missing, or "base64"     "output":"AACA…","encoding":"base64","dtype":"float32","shape":[768]
 *   "encoding": "json"                  "output":[0.1,…]
 *   Accept: application/octet-stream    the bytes, with x-ferry-dtype and x-ferry-shape
 *
 * Untyped bytes (`$bytes`) have neither dtype nor shape, and stay base64 in JSON. A JSON output for a caller that
 * accepts only bytes is a 406.
 */
import { type Quota, Refusal } from "../core/errors.ts";
import type { Json } from "../core/task.ts";
import { type Binary, numbersPieces, numbersText, readBinary } from "../core/tensor.ts";
import type { RecordView } from "../engine/engine.ts";
import type { AnsweredRequest } from "../observe/events.ts";
import type { Exchange } from "./exchange.ts";

export const JSON_TYPE = "application/json; charset=utf-8";
const BYTES_TYPE = "application/octet-stream";

/** When to come again, where an outcome is a 503: its task was lost with the process that held it. */
const RETRY_AFTER_MS = 1000;

export function refusalOf({ outcome }: RecordView): Refusal | undefined {
  if (outcome === undefined || outcome.ok) return undefined;
  const { code, message } = outcome;
  return new Refusal(code, message, code === "SERVICE_OVERLOADED" ? { retryAfterMs: RETRY_AFTER_MS } : {});
}

export function batchHeaders(record: RecordView | undefined): string[] {
  const batch = record?.batch;
  if (batch === undefined) return [];
  return [
    "x-ferry-batch-id",
    batch.id,
    "x-ferry-batch-size",
    String(batch.size),
    "x-ferry-queue-ms",
    String(tenths(queueMs(record!))),
  ];
}

export function quotaHeaders(quota: Quota | undefined): string[] {
  if (quota === undefined) return [];
  const reset = String(Math.ceil(quota.resetMs / 1000));
  return [
    "ratelimit-limit",
    String(quota.limit),
    "ratelimit-remaining",
    String(quota.left),
    "ratelimit-reset",
    reset,
    "ratelimit-policy",
    `"minute";q=${quota.limit};w=60`,
    "ratelimit",
    `"minute";r=${quota.left};t=${reset}`,
  ];
}

/** `,"metadata":{…}}`. `explain`: adds why the batch was dispatched when it was. */
export function metadata(
  record: RecordView,
  told: { readonly work: AnsweredRequest["work"]; readonly explain: boolean; readonly latencyMs: number },
): string {
  const { batch, task, attempt } = record;
  const { work, explain, latencyMs } = told;
  const again = attempt > 1 ? `attempt ${attempt}: ` : "";
  const why = explain && batch && `,"why":${JSON.stringify(`${HOW[work]}${again}${batch.why}`)}`;
  return (
    `,"metadata":{"model":${quoted(task.model)},"latency_ms":${tenths(latencyMs)},` +
    `"queue_ms":${tenths(queueMs(record))},"batch_size":${batch?.size ?? 0},"cached":${work === "cached"}${why || ""}}}`
  );
}

const HOW: Readonly<Record<AnsweredRequest["work"], string>> = {
  own: "",
  joined: "the same input was on its way or done already; ",
  cached: "answered from the cache; ",
};

/** For callers that accept bytes: true: sent; false: there are none, answered 406. Undefined: the caller wants JSON. */
export function sendBytes(
  exchange: Exchange,
  { outcome }: RecordView,
  id: string,
  headers: readonly string[],
): boolean | undefined {
  const wanted = accepted(exchange.header("accept"));
  if (wanted === "json" || outcome?.ok !== true) return undefined;
  const binary = readBinary(outcome.output);
  if (binary !== undefined) {
    const all = ["x-request-id", id, ...bytesHeaders(binary), ...headers];
    exchange.sendBytes(BYTES_TYPE, Buffer.from(binary.base64, "base64"), all);
    return true;
  }
  if (wanted === "either") return undefined;
  const message = `the output is JSON, not bytes; take application/json too. It is kept at /v1/result/${id}`;
  exchange.fail(new Refusal("NOT_ACCEPTABLE", message), headers);
  return false;
}

/** Sends `head`, `"output":…`, `tail` (ASCII); a large tensor as numbers goes in pieces. False: the client left. */
export function sendOutput(
  exchange: Exchange,
  { outcome, outputBytes }: RecordView,
  encoding: Encoding,
  around: { readonly head: string; readonly tail: string; readonly headers: readonly string[] },
): boolean | Promise<boolean> {
  const { head, tail, headers } = around;
  const output = outcome?.ok === true ? outcome.output : "null";
  const binary = readBinary(output);
  if (binary?.dtype !== undefined && encoding === "json" && output.length >= LARGE_CHARS) {
    const texts = chained([`${head}"output":`], numbersPieces(binary), [tail]);
    return pieceLine.send(exchange, texts, headers);
  }
  const pieces =
    binary === undefined ? [head, '"output":', output, tail] : [head, outputText(binary, encoding), tail];
  // All but a JSON output is ASCII.
  const wide = binary === undefined ? (outputBytes ?? Buffer.byteLength(output)) - output.length : 0;
  const characters = pieces.reduce((sum, { length }) => sum + length, 0);
  exchange.sendPieces(200, pieces, headers, characters + wide);
  return true;
}

function* chained(...texts: readonly Iterable<Json>[]): Generator<Json, void> {
  for (const each of texts) yield* each;
}

export function tenths(ms: number): number {
  return Math.round(ms * 10) / 10;
}

function queueMs({ batch, queuedAt }: RecordView): number {
  return batch === undefined ? 0 : Math.max(0, batch.startedAt - queuedAt);
}

const quotes = new Map<string, string>();

/** Names come from the config, which bounds this cache. */
function quoted(name: string): string {
  let text = quotes.get(name);
  if (text === undefined) quotes.set(name, (text = JSON.stringify(name)));
  return text;
}

export type Encoding = "base64" | "json";

export function encodingNamed(name: unknown, where: string): Encoding {
  if (name === undefined || name === "base64") return "base64";
  if (name === "json") return "json";
  throw new Refusal("INVALID_REQUEST", `${where} must be "base64" or "json"`);
}

export function outputText(binary: Binary, encoding: Encoding): Json {
  const { dtype, shape, base64 } = binary;
  if (dtype === undefined) return `"output":"${base64}","encoding":"base64"`;
  if (encoding === "json") return `"output":${numbersText(binary)}`;
  return `"output":"${base64}","encoding":"base64","dtype":"${dtype}","shape":[${shape.join(",")}]`;
}

export function bytesHeaders({ dtype, shape }: Binary): readonly string[] {
  return dtype === undefined ? [] : ["x-ferry-dtype", dtype, "x-ferry-shape", shape.join(",")];
}

/** From the Accept header. "either": bytes if there are any. No wildcard means bytes; at equal weight bytes win. */
export function accepted(accept: string | undefined): "json" | "bytes" | "either" {
  if (accept === undefined || !accept.toLowerCase().includes(BYTES_TYPE)) return "json";
  let bytes = 0;
  const json = { share: 0, named: -1 };
  for (const part of accept.toLowerCase().split(",")) {
    const [type = "", ...parameters] = part.split(";").map((each) => each.trim());
    const share = shareOf(parameters);
    if (type === BYTES_TYPE) bytes = Math.max(bytes, share);
    // The most specific range counts: application/json;q=0 beside */*.
    const named = ["*/*", "application/*", "application/json"].indexOf(type);
    if (named > json.named) Object.assign(json, { share, named });
  }
  if (bytes === 0 || bytes < json.share) return "json";
  return json.share > 0 ? "either" : "bytes";
}

function shareOf(parameters: readonly string[]): number {
  const text = parameters.find((each) => /^q\s*=/.test(each))?.replace(/^q\s*=\s*/, "");
  return text !== undefined && /^(?:0(?:\.\d{0,3})?|1(?:\.0{0,3})?)$/.test(text) ? Number(text) : 1;
}

/** Characters as stored (base64: a third more than the bytes); smaller responses take some 5 ms at most. */
export const LARGE_CHARS = 131_072;
/** Smaller pieces are gathered to be worth a turn and a write. */
const TURN_CHARS = 65_536;

interface Waiting {
  readonly texts: Iterator<Json>;
  readonly parts: Buffer[];
  readonly unwanted: () => boolean;
  readonly done: (parts: readonly Buffer[] | undefined) => void;
  readonly failed: (error: unknown) => void;
}

/**
 * Writes slow responses (a large tensor as numbers, a thousand embeddings) in pieces. They share one queue per process
 * and each event loop turn writes one piece of one response, so a hundred delay other requests no longer than one.
 */
export class PieceLine {
  readonly #line: Waiting[] = [];

  /** The bytes of all texts; undefined if `unwanted` by then. Rejects with what a text throws. */
  gather(texts: Iterable<Json>, unwanted: () => boolean): Promise<readonly Buffer[] | undefined> {
    return new Promise((done, failed) => {
      this.#line.push({ texts: texts[Symbol.iterator](), parts: [], unwanted, done, failed });
      if (this.#line.length === 1) this.#later();
    });
  }

  async send(exchange: Exchange, texts: Iterable<Json>, headers: readonly string[]): Promise<boolean> {
    const parts = await this.gather(texts, () => exchange.answered);
    if (parts === undefined || exchange.answered) return false;
    exchange.sendBytes(JSON_TYPE, parts, headers);
    return true;
  }

  #later(): void {
    setImmediate(() => {
      const first = this.#line.shift()!;
      if (goOn(first)) this.#line.push(first);
      if (this.#line.length > 0) this.#later();
    });
  }
}

export const pieceLine = new PieceLine();

function goOn({ texts, parts, unwanted, done, failed }: Waiting): boolean {
  if (unwanted()) {
    done(undefined);
    return false;
  }
  try {
    let piece = "";
    while (piece.length < TURN_CHARS) {
      const next = texts.next();
      if (next.done === true) {
        if (piece !== "") parts.push(Buffer.from(piece));
        done(parts);
        return false;
      }
      piece += next.value;
    }
    parts.push(Buffer.from(piece));
    return true;
  } catch (error) {
    failed(error);
    return false;
  }
}
