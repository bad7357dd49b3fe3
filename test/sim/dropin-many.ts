/**
 * `npm run simulate -- --dropin`: so many requests of the drop-in protocols, dealt to threads seed by seed
 * (`dropin-world.ts` says what a seed is).
 */
import { deal } from "./deal.ts";
import { uncovered } from "./dropin-table.ts";
import { dropInReplay, type DropInSums, DropInTotals } from "./dropin-totals.ts";
import { playDropIn, REQUESTS_A_SEED } from "./dropin-world.ts";

export interface DropInWish {
  readonly requests: number;
  readonly from: number;
  readonly seed: number | undefined;
  readonly threads: number;
  readonly json: boolean;
}

/** The exit code. */
export async function simulateDropIns({ requests, from, seed, threads, json }: DropInWish): Promise<number> {
  const startedAt = performance.now();
  const totals = new DropInTotals();
  if (seed !== undefined) {
    const run = await playDropIn(seed);
    totals.add(run);
    if (run.failure !== undefined) process.stderr.write(`${run.failure.stack}\n`);
  } else {
    const seeds = Array.from({ length: Math.ceil(requests / REQUESTS_A_SEED) }, (_, at) => from + at);
    const add = (sums: DropInSums): number => {
      totals.merge(sums);
      return totals.failed.length;
    };
    await deal({ thread: "dropin-thread.ts", seeds, threads, add });
  }
  const seconds = Math.round(performance.now() - startedAt) / 1000;
  const { failed, seeds, inputs, counts } = totals;
  if (json) {
    const object = {
      seeds,
      from: seed ?? from,
      requests: totals.requests,
      inputs,
      seconds,
      failed,
      uncovered,
    };
    process.stdout.write(`${JSON.stringify({ ...object, counts: Object.fromEntries(counts) })}\n`);
    return failed.length === 0 ? 0 : 1;
  }
  process.stdout.write(totals.toString());
  if (uncovered.length > 0) process.stdout.write(`not played: ${uncovered.join(", ")}\n`);
  process.stdout.write(`${seeds} seeds, ${totals.requests} requests, ${inputs} inputs, ${seconds} s: `);
  process.stdout.write(failed.length === 0 ? "0 crossed, all well\n" : `${failed.length} seeds failed\n`);
  for (const each of failed) {
    process.stdout.write(`✖ seed ${each.seed}: ${each.message}\n  ${dropInReplay(each.seed)}\n`);
  }
  return failed.length === 0 ? 0 : 1;
}
