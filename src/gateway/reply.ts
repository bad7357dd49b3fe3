/**
 * Outcomes as HTTP answers: what a record looks like to its caller.
 *
 * The output is JSON text already, so the body is put together from text; only what people wrote
 * (messages, reasons) is escaped here. How an output that is bytes is shown stands in `encoding.ts`.
 */
import { type Quota, Refusal } from "../core/errors.ts";
import type { Json } from "../core/task.ts";
import { numbersPieces, readBinary } from "../core/tensor.ts";
import type { RecordView } from "../engine/engine.ts";
import { type Encoding, outputText } from "./encoding.ts";
import { LARGE_CHARS } from "./pieces.ts";

export interface Rendering {
  readonly cached: boolean;
  /** Another request's task did the work. */
  readonly joined?: boolean;
  /** Say in words why the batch left when it did. */
  readonly explain: boolean;
  readonly latencyMs: number;
  /** Of outputs that are bytes; left out: base64. */
  readonly encoding?: Encoding | undefined;
}

/** A body and how many bytes it has; counted here, where all but the output is known to be ASCII. */
export interface Body {
  readonly text: string;
  readonly bytes: number;
}

/** `head`, then `"output":…,"metadata":{…}` of a success. */
export function successBody(head: string, record: RecordView, rendering: Rendering): Body {
  const { output, bytes } = outputPart(record, rendering.encoding);
  const text = `${head}${output}${metadata(record, rendering)}}`;
  return { text, bytes: text.length - output.length + bytes };
}

/** `,"metadata":{…}` */
function metadata(record: RecordView, rendering: Rendering): string {
  const { batch, task } = record;
  const { cached, explain, latencyMs } = rendering;
  const why = explain && batch !== undefined ? `,"why":${JSON.stringify(whyOf(record, rendering))}` : "";
  return (
    `,"metadata":{"model":${quoted(task.model)},"latency_ms":${tenths(latencyMs)},` +
    `"queue_ms":${tenths(queueMs(record))},"batch_size":${batch?.size ?? 0},"cached":${cached}${why}}`
  );
}

/** As `successBody`, where the output is so large that it is written in pieces; undefined: it is not. */
export function successPieces(
  head: string,
  record: RecordView,
  rendering: Rendering,
): Iterable<Json> | undefined {
  const output = outputPieces(record, rendering.encoding);
  return output && chained([head], output, [`${metadata(record, rendering)}}`]);
}

/** As `outputPart`, where the output is so large that it is written in pieces; undefined: it is not. */
export function outputPieces({ outcome }: RecordView, encoding?: Encoding): Iterable<Json> | undefined {
  if (encoding !== "json" || outcome?.ok !== true || outcome.output.length < LARGE_CHARS) return undefined;
  const binary = readBinary(outcome.output);
  return binary?.dtype === undefined ? undefined : chained(['"output":'], numbersPieces(binary));
}

export function* chained(...texts: readonly Iterable<Json>[]): Generator<Json, void> {
  for (const each of texts) yield* each;
}

/** `"output":…`, with what belongs to it, and how many bytes that has. */
export function outputPart(
  { outcome, outputBytes }: RecordView,
  encoding: Encoding = "base64",
): { readonly output: string; readonly bytes: number } {
  const output = outcome?.ok === true ? outcome.output : "null";
  const binary = readBinary(output);
  if (binary === undefined) {
    return { output: `"output":${output}`, bytes: NAME_BYTES + (outputBytes ?? Buffer.byteLength(output)) };
  }
  const text = outputText(binary, encoding);
  return { output: text, bytes: text.length };
}

const NAME_BYTES = '"output":'.length;

/** How this caller came to the batch, and why that left when it did. */
function whyOf({ batch, attempt }: RecordView, { cached, joined = false }: Rendering): string {
  const how = cached
    ? "answered from the cache; "
    : joined
      ? "the same input was on its way or done already; "
      : "";
  return `${how}${attempt > 1 ? `attempt ${attempt}: ` : ""}${batch?.why ?? ""}`;
}

export function batchHeaders(record: RecordView): string[] {
  const { batch } = record;
  if (batch === undefined) return [];
  return [
    "x-ferry-batch-id",
    batch.id,
    "x-ferry-batch-size",
    String(batch.size),
    "x-ferry-queue-ms",
    String(tenths(queueMs(record))),
  ];
}

/** The failure of a task, as an error of the request that waited for it. */
export function refusalOf(record: RecordView): Refusal | undefined {
  const { outcome } = record;
  return outcome === undefined || outcome.ok ? undefined : new Refusal(outcome.code, outcome.message);
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

/** A finished or unfinished record, as polling shows it; in pieces where it is large. */
export function resultBody(record: RecordView, explain: boolean, encoding?: Encoding): Body | Iterable<Json> {
  const { task, outcome, settledAt } = record;
  const head = `{"task_id":"${task.id}","status":`;
  if (outcome === undefined) return counted(`${head}"PENDING"}`);
  if (!outcome.ok) {
    return counted(`${head}"FAILED","error":"${outcome.code}","message":${JSON.stringify(outcome.message)}}`);
  }
  const latencyMs = (settledAt ?? task.createdAt) - task.createdAt;
  const rendering = { cached: record.cached === true, explain, latencyMs, encoding };
  const success = `${head}"SUCCESS",`;
  return successPieces(success, record, rendering) ?? successBody(success, record, rendering);
}

function counted(text: string): Body {
  return { text, bytes: Buffer.byteLength(text) };
}

export function tenths(ms: number): number {
  return Math.round(ms * 10) / 10;
}

function queueMs({ batch, queuedAt }: RecordView): number {
  return batch === undefined ? 0 : Math.max(0, batch.startedAt - queuedAt);
}

const quotes = new Map<string, string>();

/** Model names come from the config, so this stays as small as the config. */
function quoted(name: string): string {
  let text = quotes.get(name);
  if (text === undefined) quotes.set(name, (text = JSON.stringify(name)));
  return text;
}
