/**
 * What can be seen of the process now, beside what events tell: read when somebody looks, never on a
 * request's path. In a fleet the numbers are about all of it, but for what is marked as our own.
 */
import type { CurveReading } from "../core/knee.ts";
import type { WorkerState } from "./events.ts";

export interface Sight {
  models(): readonly ModelSight[];
  process(): ProcessSight;
}

/** A number that only grows, kept by one who looks on and read when it is scraped. */
export interface Counter {
  /** `ferry_…_total` */
  readonly name: string;
  readonly help: string;
  read(): number;
}

export interface ModelSight {
  readonly name: string;
  readonly maxBatchSize: number;
  /** Tasks that wait, by tier. */
  readonly queuedByTier: readonly number[];
  /** Of the task that waits longest; 0 while none does. */
  readonly oldestWaitMs: number;
  readonly workers: readonly WorkerSight[];
  readonly healthy: number;
  /** Busy share of the workers over the last ten seconds, 0 to 1. */
  readonly utilization: number;
  /** Tasks a second that the healthy workers can do with full batches; 0 while that is not known. */
  readonly capacityPerSecond: number;
  /** Tasks a second that ask for a worker, those that are refused for lack of one included. */
  readonly arrivalsPerSecond: number;
  /** Arrivals over capacity; 0 while that is not known. */
  readonly load: number;
  /** Workers that would hold the load at `admission.targetUtilization`. */
  readonly desiredWorkers: number;
  /** What batches of each size take, as this process has learned it; undefined where it runs none. */
  readonly curve?: CurveReading | undefined;
}

export interface WorkerSight {
  readonly name: string;
  readonly state: WorkerState;
  /** Run by this process. */
  readonly own: boolean;
  readonly inFlight: number;
  readonly batches: number;
  readonly tasks: number;
  readonly failures: number;
  /** Share of the time since the start. */
  readonly utilization: number;
  /** Its pace against the fleet's: 2 needs twice as long. */
  readonly ratio: number;
  readonly down?: { readonly why: string; readonly retryInMs: number } | undefined;
  /** Who runs it and where; "" without a fleet. */
  readonly batcher: string;
  readonly zone: string;
}

export interface ProcessSight {
  /** Unique to this start; "" without a fleet. */
  readonly id: string;
  readonly role: string;
  /** Processes of the fleet, this one included. */
  readonly members: number;
  readonly engine: "memory" | "redis";
  readonly durability: "none" | "disk" | "local" | "replica";
  /** Whether the store answers. */
  readonly reachable: boolean;
  readonly draining: boolean;
  readonly queued: number;
  readonly running: number;
  readonly deadLetters: number;
  readonly startedAt: number;
}
