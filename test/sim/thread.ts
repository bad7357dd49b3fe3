/** Plays the seeds that it is sent, one after another, and sends back what happened. */
import { parentPort } from "node:worker_threads";
import { Totals } from "./totals.ts";
import { play } from "./world.ts";

async function playAll(seeds: readonly number[]): Promise<void> {
  const totals = new Totals();
  for (const seed of seeds) totals.add(await play(seed));
  parentPort!.postMessage(totals.sums());
}

// A world that failed may leave promises behind that reject after its end; while it is played `play` hears of them.
process.on("unhandledRejection", () => {});
parentPort!.on("message", (seeds: readonly number[]) => void playAll(seeds));
