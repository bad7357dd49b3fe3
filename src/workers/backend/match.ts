/**
 * What a worker is told, and what it said, made fit to be passed on.
 *
 * `requestText` is the batch as one JSON text, joined from the tasks' own texts.
 *
 * `match` is the one place where outputs become an answer. A worker's API knows no ids, so the n-th
 * output belongs to the n-th task, and that holds only while the counts agree: one output too few and
 * a caller would get another caller's answer. A wrong count therefore discards the whole reply. So does an output that no
 * caller may get (`outputFlaw`), from whichever backend: the batch is then cut until that input is alone. An output that says it
 * is bytes (`core/tensor.ts`) and is not is held against its input, not the worker: a model that echoes what it is sent
 * must not be down because somebody sent it such a thing.
 *
 * `quote` makes a worker's own words fit for a reply's message: one line, printable, short.
 */
import { outputFlaw } from "../../core/json-split.ts";
import type { Json } from "../../core/task.ts";
import { fitted, mayBeBinary } from "../../core/tensor.ts";
import { batchText } from "../../gateway/protocol/batch.ts";
import type { Batch, ClientCode, Reply } from "./backend.ts";

/** `{"inputs":[…]}`, with `"parameters":{…}` beside it where there are any. */
export function requestText(batch: Batch): Json {
  return batchText(
    batch.tasks.map((task) => task.input),
    batch.parameters,
  );
}

export function match(batch: Batch, texts: readonly Json[]): Reply {
  if (texts.length !== batch.tasks.length) return matchMade(batch, texts);
  for (const [at, text] of texts.entries()) {
    const flaw = outputFlaw(text);
    if (flaw !== undefined) return unusable(`output ${at} ${flaw}`);
  }
  if (!texts.some(mayBeBinary)) return matchMade(batch, texts);
  const outputs: Json[] = [];
  for (const text of texts) {
    const output = fitted(text);
    if (output === undefined) {
      return rejected("the output for this input says that it is $tensor or $bytes, and is not");
    }
    outputs.push(output);
  }
  return { kind: "answered", outputs };
}

/** The same for outputs of which Ferry itself made the texts. Only those that agree in their number are looked at. */
export function matchMade({ tasks }: Batch, texts: readonly Json[] | { readonly length: number }): Reply {
  if (texts.length === tasks.length) return { kind: "answered", outputs: texts as readonly Json[] };
  return unusable(`worker returned ${count(texts.length, "output")} for ${count(tasks.length, "input")}`);
}

type Blame = Extract<Reply, { kind: "failed" }>["blame"];

export function unusable(message: string, brief?: string): Reply {
  return { kind: "unusable", message, ...(brief !== undefined && { brief }) };
}

export function rejected(message: string, code?: ClientCode, brief?: string): Reply {
  const more = { ...(brief !== undefined && { brief }), ...(code !== undefined && { code }) };
  return { kind: "rejected", message, ...more };
}

export function failed(message: string, blame: Blame, brief?: string): Reply {
  return { kind: "failed", message, blame, ...(brief !== undefined && { brief }) };
}

/** In our own words, for outputs that the function's own side could not write. */
export const BAD_OUTPUTS = "worker's outputs cannot be written as JSON";

export const MAX_QUOTE_CHARS = 200;

/** The start of `text` as one printable line. */
export function quote(text: string, maxChars = MAX_QUOTE_CHARS): string {
  // Only the start is looked at: the text may be an error page of a megabyte.
  const line = text
    .slice(0, 4 * maxChars)
    .replace(/[\p{Cc}\p{Zl}\p{Zp}\s]+/gu, " ")
    .replace(/[\p{Cf}\p{Cs}]/gu, "")
    .trim();
  return line.length <= maxChars ? line : `${line.slice(0, maxChars - 1).replace(/[\ud800-\udbff]$/, "")}…`;
}

function count(n: number, noun: string): string {
  return `${n} ${noun}${n === 1 ? "" : "s"}`;
}
