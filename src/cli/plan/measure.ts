/**
 * Times batches on a real worker, one at a time: sizes 1, 2, 4 … N, and where lengths matter each with inputs of
 * several lengths and with one long input among short ones. Warm-up calls are not counted (connections, kernel
 * compilation). Then all batches in turn for several rounds, so that a slow minute affects all alike; the result is
 * each batch's median. A worker that fails a batch ends the measurement with its message.
 */
import type { Reply, Worker } from "../../workers/backend/backend.ts";
import type { Clock } from "../../app/clock.ts";
import type { Json } from "../../core/task.ts";
import { median } from "../../core/median.ts";
import type { ShapeTiming } from "./fit.ts";

/** A batch to time. */
export interface ProbeBatch extends Omit<ShapeTiming, "ms"> {
  readonly inputs: readonly Json[];
}

export interface MeasureOptions {
  /** Smallest first. */
  readonly probes: readonly ProbeBatch[];
  readonly rounds: number;
  readonly timeoutMs: number;
  tell(size: number, sent: number, all: number): void;
}

export interface Measured extends ShapeTiming {
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

/** Batches of one input, repeated. */
export function equalProbes(max: number, input: Json): ProbeBatch[] {
  return sizesUpTo(max).map((size) => ({
    size,
    longest: 0,
    total: 0,
    inputs: Array.from({ length: size }, () => input),
  }));
}

/** Batches of each of these lengths (ascending), and of one of the longest among the shortest. */
export function lengthProbes(
  max: number,
  lengths: readonly number[],
  inputOf: (tokens: number) => Json,
): ProbeBatch[] {
  const [shortest, longest] = [lengths[0]!, lengths.at(-1)!];
  const probe = (tokens: readonly number[]): ProbeBatch => ({
    size: tokens.length,
    longest: Math.max(...tokens),
    total: tokens.reduce((sum, each) => sum + each, 0),
    inputs: tokens.map(inputOf),
  });
  return sizesUpTo(max).flatMap((size) => {
    const equal = lengths.map((length) => probe(Array.from({ length: size }, () => length)));
    if (size === 1 || shortest === longest) return equal;
    return [...equal, probe(Array.from({ length: size }, (_, at) => (at === 0 ? longest : shortest)))];
  });
}

export async function measureBatches(
  worker: Worker,
  clock: Clock,
  options: MeasureOptions,
): Promise<Measured[]> {
  const { probes, rounds } = options;
  const all = WARM_CALLS * 2 + probes.length * rounds;
  let sent = 0;
  const call = (probe: ProbeBatch): Promise<number> => {
    options.tell(probe.size, sent++, all);
    return timeBatch(worker, clock, options.timeoutMs, probe, sent);
  };
  for (let warm = 0; warm < WARM_CALLS; warm++) {
    await call(probes[0]!);
    await call(probes.at(-1)!);
  }
  const times = probes.map(() => [] as number[]);
  for (let round = 0; round < rounds; round++) {
    for (const [at, probe] of probes.entries()) times[at]!.push(await call(probe));
  }
  return probes.map(({ size, longest, total }, at) => {
    const taken = times[at]!;
    return { size, longest, total, ms: median(taken), minMs: Math.min(...taken), maxMs: Math.max(...taken) };
  });
}

async function timeBatch(
  worker: Worker,
  clock: Clock,
  timeoutMs: number,
  { inputs, size }: ProbeBatch,
  call: number,
): Promise<number> {
  const tasks = inputs.map((input, index) => ({ id: `${call}-${index}`, input }));
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
