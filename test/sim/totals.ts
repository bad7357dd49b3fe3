/**
 * Many runs in one table: which faults there were, and which rare turns they led to.
 *
 * `FAULTS` and `RARE` must all have happened in any few thousand seeds: a simulation in which nothing ever goes wrong
 * proves nothing, and a path that is never walked is not tested.
 */
import type { Run } from "./world.ts";

export const FAULTS = [
  "fault: gateway crash",
  "fault: gateway deploy",
  "fault: gateway pause",
  "fault: batcher crash",
  "fault: batcher deploy",
  "fault: batcher pause",
  "fault: process crash",
  "fault: process deploy",
  "fault: process pause",
  "fault: core crash",
  "fault: core deploy",
  "fault: core pause",
  "fault: link cut",
  "fault: worker killed",
  "fault: store away",
  "fault: clock set",
  "fault aimed at: claim",
  "fault aimed at: settle",
  "fault aimed at: put",
  "fault aimed at: extend",
  "fault aimed at: beat",
  "call lost",
  "call reply lost",
  "call late",
  "pipeline cut",
  "message lost",
  "message late",
  "message repeated",
  "link slow",
  "worker error",
  "worker hang",
  "worker short",
  "worker long",
  "worker busy",
  "worker slow",
  "worker killed by an input",
] as const;

export const RARE = [
  "joined",
  "answered from the cache",
  "key came again, answered once",
  "put: conflict",
  "put: full",
  "lease ran out",
  "task retried",
  "batch overdue, tried again elsewhere",
  "batch put back by a process that woke up late",
  "worker taken for down",
  "call of a bisection",
  "bundle of several tasks",
  "bundle taken over",
  "half-settled bundle taken over",
  "bundle written again or handed back",
  "joined a task of another gateway",
  "put sent again",
  "gateway told that a task was lost",
  "dead letter",
  "first end lost in a crash",
  "verdict too late: done",
  "verdict too late: retry",
  "verdict too late: dead",
  "abandoned: cancelled",
  "cancel: cancelled",
  "cancel: kept",
  "cancel: forgotten",
  "caller: connection lost",
  "task ended: DEADLINE_EXCEEDED",
  "task ended: INPUT_REJECTED",
  "refused: capacity",
  "refused: deadline",
  "refused: no_worker",
  "refused: rate",
  "refused: full",
  "waits checked",
  "batch of similar lengths",
  "overtaken because of its length",
  "lengths changed by a reload",
] as const;

export interface Failed {
  readonly seed: number;
  readonly message: string;
}

export class Totals {
  seeds = 0;
  tasks = 0;
  readonly counts = new Map<string, number>();
  readonly failed: Failed[] = [];
  longestOvertaking = 0;

  add({ seed, tasks, counts, longestOvertaking, failure }: Run): void {
    this.seeds++;
    this.longestOvertaking = Math.max(this.longestOvertaking, longestOvertaking);
    this.tasks += tasks;
    for (const [what, count] of counts) this.#count(what, count);
    if (failure !== undefined) this.failed.push({ seed, message: failure.message });
  }

  /** What another thread has added up. */
  merge(other: Sums): void {
    this.seeds += other.seeds;
    this.longestOvertaking = Math.max(this.longestOvertaking, other.longestOvertaking);
    this.tasks += other.tasks;
    for (const [what, count] of other.counts) this.#count(what, count);
    this.failed.push(...other.failed);
  }

  sums(): Sums {
    const { seeds, tasks, longestOvertaking, failed } = this;
    return { seeds, tasks, longestOvertaking, counts: [...this.counts], failed };
  }

  /** Faults and rare turns that never happened. */
  missing(): string[] {
    return [...FAULTS, ...RARE].filter((what) => !this.counts.has(what));
  }

  #count(what: string, by: number): void {
    this.counts.set(what, (this.counts.get(what) ?? 0) + by);
  }

  toString(): string {
    const known = new Set<string>([...FAULTS, ...RARE]);
    const others = [...this.counts.keys()].filter((what) => !known.has(what)).sort();
    const rows = (title: string, names: readonly string[]): string[] => [
      `\n${title}`,
      ...names.map((name) => `  ${name.padEnd(48)} ${String(this.counts.get(name) ?? 0).padStart(10)}`),
    ];
    return [
      ...rows("faults", FAULTS),
      ...rows("rare turns", RARE),
      ...rows("everything else", others),
      `\nlongest overtaking: ${(100 * this.longestOvertaking).toFixed(0)} % of its bound`,
      "",
    ].join("\n");
  }
}

/** As it travels between threads. */
export interface Sums {
  readonly seeds: number;
  readonly tasks: number;
  readonly longestOvertaking: number;
  readonly counts: readonly (readonly [string, number])[];
  readonly failed: readonly Failed[];
}

export function replayCommand(seed: number): string {
  return `npm run simulate -- --seed ${seed} --trace`;
}
