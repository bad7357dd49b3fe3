/** Plays the drop-in seeds that it is sent, one after another, and sends back what happened. */
import { parentPort } from "node:worker_threads";
import { DropInTotals } from "./dropin-totals.ts";
import { playDropIn } from "./dropin-world.ts";

async function playAll(seeds: readonly number[]): Promise<void> {
  const totals = new DropInTotals();
  for (const seed of seeds) totals.add(await playDropIn(seed));
  parentPort!.postMessage(totals.sums());
}

parentPort!.on("message", (seeds: readonly number[]) => void playAll(seeds));
