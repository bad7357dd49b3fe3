/** Deals seeds to threads, a hand at a time, until all are played or enough have failed. */
import { Worker } from "node:worker_threads";

const HAND = 10;
const ENOUGH_FAILURES = 3;

export interface Deal<Sums> {
  /** What a thread runs: it plays the seeds that it is sent and sends back sums. */
  readonly thread: string;
  readonly seeds: readonly number[];
  readonly threads: number;
  /** Adds up what a hand came to, and says how many seeds have failed in all. */
  add(sums: Sums): number;
}

export async function deal<Sums>({ thread: file, seeds, threads, ...table }: Deal<Sums>): Promise<void> {
  let next = 0;
  let failed = 0;
  const take = (): readonly number[] => (failed >= ENOUGH_FAILURES ? [] : seeds.slice(next, (next += HAND)));
  const one = async (): Promise<void> => {
    const thread = new Worker(new URL(file, import.meta.url));
    try {
      await new Promise<void>((resolve, reject) => {
        const go = (): void => {
          const hand = take();
          if (hand.length === 0) resolve();
          else thread.postMessage(hand);
        };
        thread.on("error", reject);
        thread.on("message", (sums: Sums) => {
          failed = table.add(sums);
          go();
        });
        go();
      });
    } finally {
      await thread.terminate();
    }
  };
  await Promise.all(Array.from({ length: Math.min(threads, Math.ceil(seeds.length / HAND)) }, one));
}
