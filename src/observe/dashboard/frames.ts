/**
 * Wire format of /internal/live: server-sent events, each one line of JSON, read by the page and `ferry top`.
 *
 *   event: hello   once per viewer: static facts, and the last 15 minutes
 *   event: frame   twice a second: changes since the frame before, the same bytes for every viewer
 *
 * Instants are milliseconds and seconds whole seconds on the server's clock; durations are milliseconds; shares 0 to 1.
 * Lists over models are in the order of `Hello.models`, lists over tiers in the order of `Hello.tiers`, best first.
 */
import type { DispatchReason } from "../../core/task.ts";
import type { ShedReason, WorkerState } from "../events.ts";
import type { CostKind } from "../../core/cost.ts";

export const HISTORY_SECONDS = 900;
/** Batch sizes are shown in this many steps: the n-th holds those up to n/8 of `maxBatchSize`. */
export const FILL_STEPS = 8;

/** One number per second each. */
export const COLUMNS = [
  /** Answered requests that named a model, whatever the status. */
  "requests",
  /** 429 or 503: quota, capacity, draining, or the store unreachable. */
  "refused",
  /** Answered 500, 502 or 504. */
  "failed",
  /** Of requests that waited for their outcome; null in a second without any. */
  "p50",
  "p95",
  "p99",
  /** Mean times of the slowest 5 %; null in a second without any. */
  "slowQueueMs",
  "slowWorkerMs",
  "slowGatewayMs",
  /** Tasks that asked for a worker. */
  "arrivals",
  "batches",
  /** Tasks in those batches. */
  "tasks",
  /** Batches by dispatch reason. */
  "full",
  "wait",
  "idle",
  "deadline",
  /** Worker time: occupied places, empty places (of a padded model useful cells and padding), no batch. */
  "filledMs",
  "emptyMs",
  "idleMs",
  /** Cells of measured batches as a padded model computes them (rows × longest), as order of arrival would have, and
   * those that hold input. */
  "paddedCells",
  "inOrderCells",
  "usefulCells",
  /** Worker time of measured batches of a padded model, and what grouping saved there; may be negative. */
  "groupedMs",
  "savedMs",
  "oldestWaitMs",
  "load",
  "cached",
  "joined",
  "retried",
  "dead",
  "lost",
  /** Worst event-loop delay. */
  "loopLateMs",
] as const;
export type Column = (typeof COLUMNS)[number];

/** Consecutive seconds, oldest first. */
export interface Slots {
  /** First second, since 1970; meaningless when `length` is 0. */
  readonly from: number;
  readonly length: number;
  readonly columns: Readonly<Record<Column, readonly (number | null)[]>>;
  /** By tier: tasks waiting at the end of each second. */
  readonly depth: readonly (readonly number[])[];
  /** Batches by fill, `FILL_STEPS` lists. */
  readonly fill: readonly (readonly number[])[];
  /** "tier reason" → refusals per second; only non-zero ones. */
  readonly shed: Readonly<Record<string, readonly number[]>>;
}

export type BatchRow = readonly [
  id: string,
  /** Name, because the position in `ModelFrame.workers` is not stable. */
  worker: string,
  startedAt: number,
  /** 0 while running. */
  endedAt: number,
  size: number,
  /** Index in `Hello.reasons`. */
  reason: number,
  oldestWaitMs: number,
  /** Worker calls; above 1 when it was bisected. 0 while running. */
  calls: number,
  /** Highest attempt among its tasks; above 1: contains retries. */
  attempt: number,
  /** Tasks by tier, as "3/0/12"; "" when unknown (the batch ran in another process). */
  tiers: string,
  /** Longest input, sum, and longest in order of arrival, in tokens: "96/4100/412"; "" while running or unmeasured. */
  lengths: string,
  /** Why it left and was made of these, in one sentence; "" where the frame has no room for it. */
  why: string,
];

export interface WorkerRow {
  readonly name: string;
  readonly state: WorkerState;
  /** Last ten seconds: share of time with a batch, and the same weighted by fill. */
  readonly busy: number;
  readonly filled: number;
  readonly inFlight: number;
  /** Service time relative to the fleet: 2 takes twice as long. */
  readonly ratio: number;
  /** Typical batch time; 0 before the first. */
  readonly batchMs: number;
  readonly down?: { readonly why: string; readonly sinceMs: number; readonly retryInMs: number };
  readonly zone: string;
}

export interface RecentFigures {
  readonly requestsPerSecond: number;
  readonly p50: number | null;
  readonly p95: number | null;
  readonly p99: number | null;
  /** Mean times of the slowest 5 %; null without any. */
  readonly slow: { readonly queueMs: number; readonly workerMs: number; readonly gatewayMs: number } | null;
  /** Mean over all that waited for their outcome. */
  readonly meanMs: number | null;
  readonly refusedShare: number;
  readonly load: number;
  readonly capacityPerSecond: number;
  readonly utilization: number;
  /** Share of places occupied. */
  readonly fill: number | null;
  readonly desiredWorkers: number;
}

export interface VerdictFrame {
  readonly level: "ok" | "busy" | "bad" | "quiet";
  /** Begins with the verdict: "Healthy." */
  readonly sentence: string;
  /** Changes only with the verdict, not its numbers; announced by screen readers. */
  readonly key: string;
  /** "" when nothing needs to be done. */
  readonly advice: string;
}

export interface ModelFrame {
  readonly verdict: VerdictFrame;
  readonly recent: RecentFigures;
  readonly queues: readonly { readonly depth: number; readonly admittedPerSecond: number }[];
  readonly oldestWaitMs: number;
  readonly workers: readonly WorkerRow[];
  /** Null where this process runs no batches. */
  readonly curve: CurveFrame | null;
  /** Null also where a batch's time does not follow its inputs' lengths. */
  readonly cost: CostFrame | null;
  /** Seconds that ended since the frame before; usually one or none. */
  readonly slots: Slots;
  /** Batches that began or ended since the frame before; the last row per batch counts. */
  readonly batches: readonly BatchRow[];
  /** Batches dropped for lack of space. */
  readonly batchesLeftOut: number;
  /** Most refused tenants of the last minute: tenant, count, last Retry-After in ms; at most ten. */
  readonly refusedTenants: readonly (readonly [tenant: string, times: number, retryAfterMs: number])[];
}

export interface CurveFrame {
  /** By size: tasks, milliseconds, batches observed. */
  readonly points: readonly (readonly [size: number, ms: number, batches: number])[];
  /** Null while unknown, and where throughput grows with every size seen. */
  readonly knee: { readonly size: number; readonly ms: number; readonly perSecond: number } | null;
  /** Advice for `maxBatchSize`; "" for none. */
  readonly hint: string;
}

export interface CostFrame {
  readonly kind: CostKind;
  /** "0.5 ms + 5 µs a row + 0.46 µs a token of the padded batch" */
  readonly words: string;
  /** Computed over useful cells of the last minute or so; null without a measured batch. */
  readonly paddingRatio: number | null;
  /** Inputs of similar length share a batch. */
  readonly grouped: boolean;
}

export interface Note {
  readonly at: number;
  readonly level: "info" | "warn" | "error";
  readonly text: string;
}

export interface ProcessFrame {
  /** "this process", or "gateway f12ab, one of 3 processes". */
  readonly scope: string;
  readonly members: number;
  readonly durability: string;
  readonly reachable: boolean;
  readonly draining: boolean;
  readonly queued: number;
  readonly running: number;
  readonly deadLetters: number;
  readonly totals: {
    readonly requests: number;
    readonly tasks: number;
    readonly calls: number;
    readonly cached: number;
    readonly joined: number;
    readonly retried: number;
    readonly dead: number;
    readonly lost: number;
    readonly shed: number;
  };
}

export interface Frame {
  readonly now: number;
  readonly process: ProcessFrame;
  readonly models: readonly ModelFrame[];
  readonly notes: readonly Note[];
}

/** `models`: up to `HISTORY_SECONDS` (less beyond 16 models, at least 60), and the last minute's batches. */
export interface Hello {
  readonly version: string;
  readonly startedAt: number;
  readonly role: string;
  readonly engine: string;
  /** Workers are simulated: the numbers are not a GPU's. */
  readonly demo: boolean;
  /** For the example command on the empty page; "" in a batcher. */
  readonly apiUrl: string;
  readonly tiers: readonly string[];
  readonly reasons: readonly DispatchReason[];
  readonly shedReasons: readonly ShedReason[];
  readonly models: readonly {
    readonly name: string;
    readonly maxBatchSize: number;
    readonly maxWaitMs: number;
    readonly policy: string;
  }[];
  readonly frame: Frame;
}
