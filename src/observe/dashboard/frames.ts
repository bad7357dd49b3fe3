/**
 * What /internal/live sends: server-sent events, each one line of JSON. The page and `ferry top` read them.
 *
 *   event: hello   once, when a viewer comes: what stands still, and what was seen in the last 15 minutes
 *   event: frame   twice a second: what changed since the frame before, the same bytes for every viewer
 *
 * The server folds what happens into seconds; no request is ever sent. Instants are milliseconds on the
 * server's clock, seconds are whole ones of the same; lengths are milliseconds; shares are 0 to 1. Lists over
 * models stand in the order of `Hello.models`, lists over tiers in the order of `Hello.tiers`, best first.
 */
import type { DispatchReason } from "../../core/task.ts";
import type { ShedReason, WorkerState } from "../events.ts";

/** How many seconds are kept. */
export const HISTORY_SECONDS = 900;
/** Batch sizes are shown in this many steps: the n-th holds those up to n/8 of `maxBatchSize`. */
export const FILL_STEPS = 8;

/** One number a second. */
export const COLUMNS = [
  /** Requests that named a model and were answered, whatever the status. */
  "requests",
  /** Told to come again, 429 or 503: quota, capacity, draining; or the store did not answer. */
  "refused",
  /** Answered 500, 502 or 504. */
  "failed",
  /** Of requests that waited for their outcome; null in a second without one. */
  "p50",
  "p95",
  "p99",
  /** Where the slowest 5 % spent their time, on average; null in a second without one. */
  "slowQueueMs",
  "slowWorkerMs",
  "slowGatewayMs",
  /** Tasks that asked for a worker. */
  "arrivals",
  "batches",
  /** Tasks in those batches. */
  "tasks",
  /** Batches by the reason why they left. */
  "full",
  "wait",
  "idle",
  "deadline",
  /** The workers' time: on seats that were taken, on seats that were empty, without a batch. */
  "filledMs",
  "emptyMs",
  "idleMs",
  "oldestWaitMs",
  "load",
  "cached",
  "joined",
  "retried",
  "dead",
  "lost",
  /** The longest that this process kept everybody waiting. */
  "loopLateMs",
] as const;
export type Column = (typeof COLUMNS)[number];

/** Whole seconds in a row, oldest first. */
export interface Slots {
  /** The first second, since 1970; meaningless when `length` is 0. */
  readonly from: number;
  readonly length: number;
  readonly columns: Readonly<Record<Column, readonly (number | null)[]>>;
  /** By tier: tasks that waited at the end of each second. */
  readonly depth: readonly (readonly number[])[];
  /** Batches by how full they were, `FILL_STEPS` lists. */
  readonly fill: readonly (readonly number[])[];
  /** "tier reason" → refused in each second; only those that happened. */
  readonly shed: Readonly<Record<string, readonly number[]>>;
}

/** A batch on a worker, as its row on the wire. */
export type BatchRow = readonly [
  id: string,
  /** Position in `ModelFrame.workers` is not stable; the name is. */
  worker: string,
  startedAt: number,
  /** 0 while it runs. */
  endedAt: number,
  size: number,
  /** Position in `Hello.reasons`. */
  reason: number,
  /** How long its oldest task had waited. */
  oldestWaitMs: number,
  /** Calls to the worker; more than 1 when it was cut to find a bad input. 0 while it runs. */
  calls: number,
  /** The highest attempt among its tasks; more than 1: it holds tasks that were tried before. */
  attempt: number,
  /** Tasks by tier, as "3/0/12"; "" where it is not known (the batch ran in another process). */
  tiers: string,
];

export interface WorkerRow {
  readonly name: string;
  readonly state: WorkerState;
  /** Of the last ten seconds: share of time with a batch, and share of time times share of seats taken. */
  readonly busy: number;
  readonly filled: number;
  readonly inFlight: number;
  /** Its pace against the fleet's: 2 needs twice as long. */
  readonly ratio: number;
  /** The usual time of a batch; 0 while none was seen. */
  readonly batchMs: number;
  readonly down?: { readonly why: string; readonly sinceMs: number; readonly retryInMs: number };
  readonly zone: string;
}

/** The last ten seconds as one. */
export interface RecentFigures {
  readonly requestsPerSecond: number;
  readonly p50: number | null;
  readonly p95: number | null;
  readonly p99: number | null;
  /** Where the slowest 5 % spent their time; null without one. */
  readonly slow: { readonly queueMs: number; readonly workerMs: number; readonly gatewayMs: number } | null;
  /** The mean of all that waited. */
  readonly meanMs: number | null;
  readonly refusedShare: number;
  readonly load: number;
  readonly capacityPerSecond: number;
  readonly utilization: number;
  /** Share of the seats that were taken. */
  readonly fill: number | null;
  readonly desiredWorkers: number;
}

/** The sentence above the charts: what is going on, and what would help. */
export interface VerdictFrame {
  readonly level: "ok" | "busy" | "bad" | "quiet";
  /** Begins with the verdict: "Healthy." */
  readonly sentence: string;
  /** Changes only when the verdict does, not with its numbers; what a screen reader hears. */
  readonly key: string;
  /** What would help; "" when nothing needs to. */
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
  /** Seconds that ended since the frame before; most often one or none. */
  readonly slots: Slots;
  /** Batches that began or ended since the frame before; a batch comes twice, its last row holds. */
  readonly batches: readonly BatchRow[];
  /** Batches that are left out because there were too many. */
  readonly batchesLeftOut: number;
  /** Who was refused most in the last minute: tenant, times, last Retry-After in ms; at most ten. */
  readonly refusedTenants: readonly (readonly [tenant: string, times: number, retryAfterMs: number])[];
}

/** What batches of each size take, and where larger ones stop to pay. */
export interface CurveFrame {
  /** In the order of their sizes: tasks, milliseconds, batches that were seen. */
  readonly points: readonly (readonly [size: number, ms: number, batches: number])[];
  /** Null while it is not known, and where throughput grows with every size that was seen. */
  readonly knee: { readonly size: number; readonly ms: number; readonly perSecond: number } | null;
  /** What follows for `maxBatchSize`; "" where nothing does. */
  readonly hint: string;
}

/** Something that happened, for people to read. */
export interface Note {
  readonly at: number;
  readonly level: "info" | "warn" | "error";
  readonly text: string;
}

/** What this process is and how it does. */
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
  /** Since the start. */
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

/**
 * Its `models` hold what was seen before: up to `HISTORY_SECONDS` of slots (less where there are more than 16 models,
 * and a minute at least), and the batches of the last minute.
 */
export interface Hello {
  readonly version: string;
  readonly startedAt: number;
  readonly role: string;
  readonly engine: string;
  /** Workers are simulated: nobody should take the numbers for a GPU's. */
  readonly demo: boolean;
  /** For the command that the empty page shows; "" in a batcher. */
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
