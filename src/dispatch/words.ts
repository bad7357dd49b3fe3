/** Why a batch left when it did, in one sentence for people. ASCII: it stands in answers whose bytes are counted. */
import type { DispatchReason } from "../core/task.ts";

export interface Departure {
  readonly size: number;
  /** The model's `maxBatchSize`. */
  readonly most: number;
  /** Its oldest task had waited so long. */
  readonly waitedMs: number;
  readonly reason: DispatchReason;
  /** Its worker has to prove itself first. */
  readonly probing: boolean;
}

const WORDS: Record<DispatchReason, string> = {
  full: "no more of its tasks may ride together",
  wait: "it had waited for maxWaitMs",
  idle: "a worker was free and waiting longer would not have paid",
  deadline: "waiting longer would have missed a deadline",
};

export function whyItLeft({ size, most, waitedMs, reason, probing }: Departure): string {
  const after = `left after ${Math.round(waitedMs)} ms`;
  if (size === most) return `a full batch of ${most} ${after}`;
  const words = probing ? "its worker failed before and is tried with few" : WORDS[reason];
  return `batch of ${size} of ${most} ${after}: ${words}`;
}
