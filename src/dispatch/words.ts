/** Why a batch left when it did, in one sentence for people. ASCII: it stands in answers whose bytes are counted. */
import type { DispatchReason } from "../core/task.ts";
import type { Lease } from "../engine/engine.ts";
import type { Bound, Fitted } from "./seats.ts";

export interface Departure {
  readonly size: number;
  /** The model's `maxBatchSize`. */
  readonly most: number;
  /** Its oldest task had waited so long. */
  readonly waitedMs: number;
  readonly reason: DispatchReason;
  /** Its worker has to prove itself first. */
  readonly probing: boolean;
  /** Its worker still ran another one. */
  readonly early?: boolean;
  /** What kept it below `most`: what was weighed, or what tasks of the usual weight would fill. */
  readonly bound?: { readonly by: Bound; readonly weighed: boolean } | undefined;
}

const WORDS: Record<DispatchReason, string> = {
  full: "no more of its tasks may ride together",
  wait: "it had waited for maxWaitMs",
  idle: "a worker was free and waiting longer would not have paid",
  deadline: "waiting longer would have missed a deadline",
};

export function whyItLeft({ size, most, waitedMs, reason, probing, early, bound }: Departure): string {
  const after = `${early === true ? "handed over early" : "left"} after ${Math.round(waitedMs)} ms`;
  if (size === most) return `a full batch of ${most} ${after}`;
  if (bound !== undefined) return `a full batch of ${size} ${after}: ${boundWords(size, bound)}`;
  const words = probing ? "its worker failed before and is tried with few" : WORDS[reason];
  return `batch of ${size} of ${most} ${after}: ${words}`;
}

/** The lease of a batch that is not what was asked for: others were faster, some had expired, or not all fitted. */
export function told(claimed: Lease, { ride, bound }: Fitted, asked: Omit<Departure, "size">): Lease {
  const size = ride.length;
  if (bound === undefined) {
    // Fewer than there was room for: what made room scarce is not why it left.
    const why = whyItLeft({ ...asked, bound: undefined, size });
    return { ...claimed, batch: { ...claimed.batch, why } };
  }
  const why = whyItLeft({ ...asked, bound: { by: bound, weighed: true }, size });
  return { ...claimed, batch: { ...claimed.batch, size, reason: "full", why } };
}

function boundWords(size: number, { by, weighed }: NonNullable<Departure["bound"]>): string {
  if (by === "worker") return "its worker takes no more at once";
  return `${weighed ? "" : "about "}${size} ${size === 1 ? "task fills" : "tasks fill"} ${by}`;
}
