/**
 * Rows of the request log, packed for the way to the thread that writes them (`sender.ts`).
 *
 * Numbers go into one Float64Array, `NUMBERS` for each row, which is handed over and not copied. Of its texts a row
 * has only those that differ from the row before (neighbours are often alike), one bit in `changed` for each; so a
 * row is three texts or four instead of eleven. Turning numbers into text, and all the rest of what PostgreSQL wants,
 * is the thread's work.
 */
import type { RequestRow } from "./request-log.ts";

/** What is written of a row. */
export interface WrittenRow {
  readonly seq: number;
  readonly id: string;
  readonly tenant: string;
  readonly tier: string;
  readonly model: string;
  readonly status: number;
  readonly code: string;
  readonly work: string;
  readonly startedAt: number;
  readonly latencyMs: number;
  readonly traceId: string;
  readonly queueMs: number;
  readonly workerMs: number;
  readonly attempts: number;
  readonly settledAt: number;
  readonly outcome: string;
  readonly batch: WrittenBatch | undefined;
}

export interface WrittenBatch {
  readonly id: string;
  readonly size: number;
  readonly worker: string;
  readonly reason: string;
}

export interface RowBundle {
  readonly numbers: Float64Array<ArrayBuffer>;
  readonly changed: Uint16Array<ArrayBuffer>;
  readonly texts: readonly string[];
}

const NUMBERS = 9;
const TEXTS = 11;
/** In the place of a batch's size. */
const NO_BATCH = -1;

export function packRows(rows: readonly RequestRow[]): RowBundle {
  const numbers = new Float64Array(rows.length * NUMBERS);
  const changed = new Uint16Array(rows.length);
  const texts: string[] = [];
  let last: readonly string[] = new Array<string>(TEXTS).fill("");
  let at = 0;
  for (let place = 0; place < rows.length; place++) {
    const row = rows[place]!;
    const { batch } = row;
    numbers[at++] = row.seq;
    numbers[at++] = row.status;
    numbers[at++] = row.startedAt;
    numbers[at++] = row.latencyMs;
    numbers[at++] = row.queueMs;
    numbers[at++] = row.workerMs;
    numbers[at++] = row.attempts;
    numbers[at++] = row.settledAt;
    numbers[at++] = batch === undefined ? NO_BATCH : batch.size;
    const now = textsOf(row);
    let mask = 0;
    for (let column = 0; column < TEXTS; column++) {
      const text = now[column]!;
      if (text === last[column]) continue;
      mask |= 1 << column;
      texts.push(text);
    }
    changed[place] = mask;
    last = now;
  }
  return { numbers, changed, texts };
}

/** In the order of their bits. */
function textsOf({ id, tenant, tier, model, code, work, traceId, outcome, batch }: RequestRow): string[] {
  if (batch === undefined) return [id, tenant, tier, model, code, work, traceId, outcome, "", "", ""];
  const { id: batchId, worker, reason } = batch;
  return [id, tenant, tier, model, code, work, traceId, outcome, batchId, worker, reason];
}

export function unpackRows({ numbers, changed, texts }: RowBundle): WrittenRow[] {
  const rows: WrittenRow[] = [];
  const now = new Array<string>(TEXTS).fill("");
  let at = 0;
  let text = 0;
  for (const mask of changed) {
    for (let column = 0; column < TEXTS; column++)
      if ((mask & (1 << column)) !== 0) now[column] = texts[text++]!;
    rows.push(rowOf(numbers, at, now));
    at += NUMBERS;
  }
  return rows;
}

function rowOf(numbers: Float64Array, at: number, texts: readonly string[]): WrittenRow {
  const size = numbers[at + 8]!;
  return {
    seq: numbers[at]!,
    status: numbers[at + 1]!,
    startedAt: numbers[at + 2]!,
    latencyMs: numbers[at + 3]!,
    queueMs: numbers[at + 4]!,
    workerMs: numbers[at + 5]!,
    attempts: numbers[at + 6]!,
    settledAt: numbers[at + 7]!,
    id: texts[0]!,
    tenant: texts[1]!,
    tier: texts[2]!,
    model: texts[3]!,
    code: texts[4]!,
    work: texts[5]!,
    traceId: texts[6]!,
    outcome: texts[7]!,
    batch: size === NO_BATCH ? undefined : { id: texts[8]!, size, worker: texts[9]!, reason: texts[10]! },
  };
}
