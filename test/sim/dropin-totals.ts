/** Many seeds of the drop-in simulation in one table. */
import { MISHAPS } from "./dropin-worker.ts";
import type { DropInRun } from "./dropin-world.ts";

export interface DropInSums {
  readonly seeds: number;
  readonly requests: number;
  readonly inputs: number;
  readonly counts: readonly (readonly [string, number])[];
  readonly failed: readonly { readonly seed: number; readonly message: string }[];
}

/** Must all have happened in any forty seeds of a protocol: what never goes wrong proves nothing. */
const NEEDED = [
  "left",
  "answer 200",
  "answer 503",
  "answer 504",
  ...MISHAPS.map((each) => `worker: ${each}`),
];

export class DropInTotals {
  seeds = 0;
  requests = 0;
  inputs = 0;
  readonly counts = new Map<string, number>();
  readonly failed: { seed: number; message: string }[] = [];

  add({ seed, protocol, requests, inputs, counts, failure }: DropInRun): void {
    const failed = failure === undefined ? [] : [{ seed, message: failure.message }];
    this.merge({ seeds: 1, requests, inputs, counts: [...counts, [`seeds of ${protocol}`, 1]], failed });
  }

  merge({ seeds, requests, inputs, counts, failed }: DropInSums): void {
    this.seeds += seeds;
    this.requests += requests;
    this.inputs += inputs;
    for (const [what, count] of counts) this.counts.set(what, (this.counts.get(what) ?? 0) + count);
    this.failed.push(...failed);
  }

  sums(): DropInSums {
    const { seeds, requests, inputs, counts, failed } = this;
    return { seeds, requests, inputs, counts: [...counts], failed };
  }

  missing(): string[] {
    return NEEDED.filter((what) => !this.counts.has(what));
  }

  toString(): string {
    const rows = [...this.counts].sort(([one], [other]) => (one < other ? -1 : 1));
    return rows.map(([what, count]) => `${what.padEnd(32)} ${count}\n`).join("");
  }
}

export function dropInReplay(seed: number): string {
  return `npm run simulate -- --dropin --seed ${seed}`;
}
