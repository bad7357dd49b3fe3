/**
 * Times batches of 1, 2, 4 … N on a real worker, one at a time. Warm-up calls are not counted (connections, kernel
 * compilation). Then all sizes in turn for several rounds, so that a slow minute affects all alike; the result is each
 * size's median. Every task has the same input. A worker that fails a batch ends the measurement with its message.
 */
import type { Reply, Worker } from "../../workers/backend/backend.ts";
import type { Clock } from "../../app/clock.ts";
import type { Json } from "../../core/task.ts";
import { median } from "../../core/median.ts";
import type { Timing } from "./fit.ts";

export interface MeasureOptions {
  readonly maxBatchSize: number;
  readonly rounds: number;
  readonly timeoutMs: number;
  readonly input: Json;
  tell(size: number, sent: number, all: number): void;
}

export interface Measured extends Timing {
  readonly minMs: number;
  readonly maxMs: number;
}

/** The worker cannot be measured; the message says why. */
export class NotMeasured extends Error {}

const WARM_CALLS = 2;

/** Powers of two, and `max` itself. */
export function sizesUpTo(max: number): number[] {
  const sizes: number[] = [];
  for (let size = 1; size < max; size *= 2) sizes.push(size);
  return [...sizes, max];
}

export async function measureSizes(
  worker: Worker,
  clock: Clock,
  options: MeasureOptions,
): Promise<Measured[]> {
  const sizes = sizesUpTo(options.maxBatchSize);
  const all = WARM_CALLS * 2 + sizes.length * options.rounds;
  let sent = 0;
  const call = (size: number): Promise<number> => {
    options.tell(size, sent++, all);
    return timeBatch(worker, clock, options, size, sent);
  };
  for (let warm = 0; warm < WARM_CALLS; warm++) {
    await call(1);
    await call(options.maxBatchSize);
  }
  const times = new Map(sizes.map((size) => [size, [] as number[]]));
  for (let round = 0; round < options.rounds; round++) {
    for (const size of sizes) times.get(size)!.push(await call(size));
  }
  return sizes.map((size) => {
    const taken = times.get(size)!;
    return { size, ms: median(taken), minMs: Math.min(...taken), maxMs: Math.max(...taken) };
  });
}

async function timeBatch(
  worker: Worker,
  clock: Clock,
  { input, timeoutMs }: MeasureOptions,
  size: number,
  call: number,
): Promise<number> {
  const tasks = Array.from({ length: size }, (_, index) => ({ id: `${call}-${index}`, input }));
  const patience = new AbortController();
  const startedAt = clock.now();
  const alarm = clock.at(startedAt + timeoutMs, () => patience.abort());
  const reply = await worker.run({ id: `measure-${call}`, tasks, parameters: "" }, patience.signal);
  alarm.cancel();
  if (reply.kind !== "answered") throw new NotMeasured(flaw(reply, size, patience.signal.aborted, timeoutMs));
  return clock.now() - startedAt;
}

function flaw(
  reply: Exclude<Reply, { kind: "answered" }>,
  size: number,
  late: boolean,
  timeoutMs: number,
): string {
  const what = late ? `no answer within ${timeoutMs} ms` : reply.message;
  return `a batch of ${size} was not answered: ${what}`;
}
