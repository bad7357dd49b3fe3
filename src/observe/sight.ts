/** State read on demand, never on the request path. Covers the whole fleet, except where marked as our own. */
import type { CostKind } from "../core/cost.ts";
import type { CurveReading } from "../core/knee.ts";
import type { WorkerState } from "./events.ts";

export interface Sight {
  models(): readonly ModelSight[];
  process(): ProcessSight;
}

/** A monotonic count, read when scraped. */
export interface Counter {
  /** `ferry_…_total` */
  readonly name: string;
  readonly help: string;
  read(): number;
}

export interface ModelSight {
  readonly name: string;
  readonly maxBatchSize: number;
  readonly queuedByTier: readonly number[];
  /** Of the longest waiting task; 0 for none. */
  readonly oldestWaitMs: number;
  readonly workers: readonly WorkerSight[];
  readonly healthy: number;
  /** Busy share of the workers, last ten seconds, 0 to 1. */
  readonly utilization: number;
  /** Tasks per second of the healthy workers with full batches; 0 while unknown. */
  readonly capacityPerSecond: number;
  /** Tasks per second that ask for a worker, including capacity refusals. */
  readonly arrivalsPerSecond: number;
  /** Arrivals over capacity; 0 while unknown. */
  readonly load: number;
  /** Workers that would hold the load at `admission.targetUtilization`. */
  readonly desiredWorkers: number;
  /** Learned time per batch size; undefined where this process runs no batches. */
  readonly curve?: CurveReading | undefined;
  /** What a batch's time follows; undefined where this process runs no batches. */
  readonly cost?: CostSight | undefined;
  /** Computed over useful cells of this process's measured batches, fading over a minute; undefined without any. */
  readonly paddingRatio?: number | undefined;
}

/** As learned from settled batches (`core/cost.ts`). */
export interface CostSight {
  readonly kind: CostKind;
  readonly baseMs: number;
  readonly perRowMs: number;
  /** Of a computed token; 0 where lengths do not matter. */
  readonly perTokenMs: number;
  /** Inputs of similar length share a batch. */
  readonly grouped: boolean;
}

export interface WorkerSight {
  readonly name: string;
  readonly state: WorkerState;
  readonly own: boolean;
  readonly inFlight: number;
  readonly batches: number;
  readonly tasks: number;
  readonly failures: number;
  /** Busy share since the start. */
  readonly utilization: number;
  /** Service time relative to the fleet: 2 takes twice as long. */
  readonly ratio: number;
  readonly down?: { readonly why: string; readonly retryInMs: number } | undefined;
  /** Process that runs it, and where; "" without a fleet. */
  readonly batcher: string;
  readonly zone: string;
}

export interface ProcessSight {
  /** Unique to this start; "" without a fleet. */
  readonly id: string;
  readonly role: string;
  readonly members: number;
  readonly engine: "memory" | "redis";
  readonly durability: "none" | "disk" | "local" | "replica";
  readonly reachable: boolean;
  readonly draining: boolean;
  readonly queued: number;
  readonly running: number;
  readonly deadLetters: number;
  readonly startedAt: number;
}
