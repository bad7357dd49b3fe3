/**
 * The engine contract: where tasks and their outcomes live. `test/contract/engine.ts` checks every engine against it.
 *
 * One record per task, under its id, from `put` until a time to live after its end. Result store, idempotency, joining
 * of identical tasks and response routing all use that record. Rules across verbs:
 *  - `done` and `failed` are final; only `deadLetters.replay` reopens a dead letter. If that ends in anything but
 *    `done`, cancellation by its owner included, it is a dead letter again with the latest reason.
 *  - The first success wins, from any lease, even an expired one. `retry`, `failed` and `dead` are accepted only from
 *    the lease that holds the task now.
 *  - A record that is not final is in exactly one place: a queue, the retry set, or a lease.
 *  - Only the owning tenant can see or end a record; for any other tenant it does not exist.
 *  - Inside a tier tenants take turns (`core/fair.ts`). A shared engine may estimate; its files say how far it is off.
 *  - Tenants share bounded resources by the rule in `core/share.ts`, so that none can take all:
 *     - Groups of one model (`MAX_GROUPS`). A `put` with parameters that no waiting task of the model has opens one,
 *       and is `full` with `own` at its tenant's share. Joins, cache answers, retries and replays are never refused for
 *       that. A shared engine may count per shard or estimate.
 *     - Bytes of unfetched outcomes (`results.maxBytes`), where the engine keeps them itself. Replays are not refused
 *       for that either. The tenant that holds the most loses its oldest kept outcome first, never one that holds less
 *       than `maxBytes` divided by the tenants that hold any.
 *  - `maxQueuedBytes` counts inputs and parameters: parameters once where tasks share their text, per task where each
 *    is stored with a copy (on disk, in Redis).
 *  - An outcome whose only caller hung up (`cancel` with `abandoned`), without an Idempotency-Key that could bring that
 *    caller back, is not promised: it is kept like a delivered one.
 *  - An expired lease counts against its tasks as `core/retry.ts` says: alone, then dead letter.
 *  - A shared engine may be unreachable: `put`, `cancel` and `outcome` then reject with a `Refusal` that tells the
 *    client to resend, and what was accepted stays accepted.
 */
import type { ErrorCode } from "../core/errors.ts";
import type { LengthRange } from "../core/policy.ts";
import type { CapacityRefusal } from "../core/shed.ts";
import type { BatchNote, Json, Outcome, Task, TaskState } from "../core/task.ts";

/** How a new task may share the work or outcome of another. The intake makes the keys. */
export interface Sharing {
  /** Joins a task in flight with the same key. */
  readonly joinKey?: string;
  /** Reuses a success settled under the same key; this task's success is kept for `cacheTtlMs`. */
  readonly cacheKey?: string;
  readonly cacheTtlMs?: number;
  /** The caller's Idempotency-Key, scoped to its tenant, and a fingerprint of the body. */
  readonly idempotency?: { readonly key: string; readonly fingerprint: string };
  /**
   * No room: answer or join an existing task, else `full`, with nothing written and the Idempotency-Key still unused.
   */
  readonly only?: boolean;
}

export type PutReply =
  | { readonly kind: "queued"; readonly id: string }
  /** Task `id` of the same tenant is in flight and will answer for this one; wait for it instead. */
  | { readonly kind: "joined"; readonly id: string }
  /** The outcome is known: `record` holds it, under an id that belongs to this tenant. */
  | {
      readonly kind: "done";
      readonly id: string;
      readonly record: RecordView;
      readonly cached: boolean;
      /** It ran and could not be stored: answer with the outcome, as it may not be there to be polled later. */
      readonly unstored?: true;
    }
  /** The Idempotency-Key was used with another body. */
  | { readonly kind: "conflict"; readonly id: string }
  /**
   * Nothing was written. `message` names the bound; `own`: it is the tenant's share that is exhausted. `never`: it does
   * not fit an empty queue either. `retryInMs`: the earliest time with room, where known.
   */
  | {
      readonly kind: "full";
      readonly message: string;
      readonly own?: boolean;
      readonly never?: boolean;
      readonly retryInMs?: number;
    };

/** Reply of a put behind the capacity gate. `refused`: no capacity, and nothing was written. */
export type Placed = PutReply | ({ readonly kind: "refused" } & CapacityRefusal);

/** What the owner or an operator may read of a record. */
export interface RecordView {
  readonly task: Task;
  readonly state: TaskState;
  /** First is 1; 0 if never claimed. */
  readonly attempt: number;
  /** When it entered its queue. A retry or put-back keeps it; a replay resets it. */
  readonly queuedAt: number;
  readonly settledAt?: number;
  readonly outcome?: Outcome;
  /** UTF-8 bytes of the output, where known already. */
  readonly outputBytes?: number;
  readonly cached?: boolean;
  /** The batch that it is in, or that decided it. */
  readonly batch?: BatchNote;
}

/** Makes a batch of tasks of similar length (`compose` in `core/policy.ts`). */
export interface Composition {
  /** Tasks that are examined, in service order; of each tier in proportion to its seats in the batch. */
  readonly window: number;
  /**
   * How long later tasks of the tier may overtake one, from the first time. After that none does: until it has left,
   * batches are taken in service order, or from the tasks before it. A lower tier under backlog has a share of the
   * seats only, so its time is longer: divided by that share, at least its floor (`core/fair.ts`).
   */
  readonly overtakeMs: number;
  readonly lengthOf: (input: Json) => number;
  /** The lengths that share a batch with the first of `lengths`. */
  readonly choose: (lengths: readonly number[]) => LengthRange;
}

/** What a composed batch left behind, of the tasks examined. */
export interface Composed {
  readonly longer: number;
  readonly shorter: number;
  /** The longest of the batch of as many rows that service order would have made. */
  readonly inOrder: number;
}

export interface ClaimRequest {
  readonly model: string;
  /** Only tasks with exactly these parameters. */
  readonly parameters: Json;
  readonly max: number;
  readonly leaseMs: number;
  /**
   * The worker runs in this process, so an input that crashes it ends the process: an engine on disk records the
   * running tasks before it returns, and counts the death against them at the next start (`core/retry.ts`).
   */
  readonly inProcess?: boolean;
  /** Absent: in service order. The first in service order is claimed, or the first of a lower tier that is due. */
  readonly composition?: Composition | undefined;
  readonly batch: Omit<BatchNote, "size">;
}

export interface ClaimedTask {
  readonly task: Task;
  readonly attempt: number;
  readonly queuedAt: number;
  /** In tokens; 0: not measured. */
  readonly length: number;
}

export interface Lease {
  /** Unique to this claim and to the process that made it. */
  readonly token: string;
  readonly batch: BatchNote;
  readonly tasks: readonly ClaimedTask[];
  /** Only of a batch that was composed. */
  readonly composed?: Composed | undefined;
}

export type Verdict = { readonly id: string } & (
  | { readonly kind: "done"; readonly output: Json }
  /** Final, not kept for operators. */
  | { readonly kind: "failed"; readonly code: ErrorCode; readonly message: string }
  /** Final, kept as a dead letter with its input. Callers see `message`, operators `detail`. */
  | { readonly kind: "dead"; readonly code: ErrorCode; readonly message: string; readonly detail: string }
  /** Not final: back to the front of its queue at `at`. */
  | {
      readonly kind: "retry";
      readonly at: number;
      readonly message: string;
      /** Does not count as an attempt. */
      readonly spared?: boolean;
      /** It was never sent to its worker, so no retry event is emitted. */
      readonly unsent?: boolean;
      /** Its batch is overdue and still running. Accepted once per task, then `late`. */
      readonly overdue?: boolean;
      /** Never again in a larger batch: one of the tasks in its batch may have caused the failure. */
      readonly maxBatchSize?: number;
    }
);

/** Taken, too late (already decided, or held by another lease), or no such record. */
export type SettleReply = "taken" | "late" | "gone";

export type CancelReply =
  /** Was queued, now failed with CANCELLED (or dropped, if abandoned). */
  | "cancelled"
  | "forgotten"
  /** It is running, another caller joined it, or it has a key that a caller may come back with. */
  | "kept"
  | "unknown";

/**
 * Bound on waiting groups per model. Each is examined before a batch is chosen and needs separate batches, so more than
 * a fleet could serve within `queueMs` are only a cost.
 */
export const MAX_GROUPS = 2048;

/** A group: tasks of one model with equal parameters, which may share a batch. */
export interface QueueView {
  readonly parameters: Json;
  /** Best tier with a task in it. */
  readonly tier: number;
  readonly depth: number;
  /** When the longest-waiting task was queued. */
  readonly oldestAt: number;
  readonly earliestDeadlineAt: number;
  /** Tasks never tried; a batch without one is an extra call. */
  readonly fresh: number;
  /** Largest batch that the first task may be in. */
  readonly headMaxBatchSize: number;
}

export interface DeadLetter {
  readonly task: Task;
  readonly attempts: number;
  readonly code: ErrorCode;
  readonly message: string;
  readonly diedAt: number;
}

export interface EngineListener {
  /** Called once per settled record; a shared engine tells each process of the tasks that it put, joined or follows. */
  settled?(record: RecordView): void;
  /** `count` tasks entered a queue (new, retried, replayed or put back), which now holds `depth`. */
  queued?(model: string, parameters: Json, depth: number, count: number): void;
  /** Something is due at `at`, sooner than `reap` last returned. */
  due?(at: number): void;
}

/**
 * The engine's bounds, passed as a function that returns the same object until a reload: new models have a queue at
 * once, tasks of a removed model should have left before, and tasks keep their deadlines. The number of tiers never
 * changes.
 */
export interface EngineLimits {
  readonly models: ReadonlyMap<string, { readonly queueMs: number; readonly totalMs: number }>;
  readonly tiers: number;
  /** Queued, or waiting for a retry. */
  readonly maxQueued: number;
  readonly maxQueuedBytes: number;
  readonly results: { readonly ttlMs: number; readonly evictAfterRead: boolean; readonly maxBytes: number };
  readonly deadLetters: { readonly max: number; readonly ttlMs: number };
}

/** The half of an engine that a gateway needs. */
export interface TaskStore {
  /**
   * Joins, answers or queues a task, atomically. Resolves when the task is as safe as this engine makes it (on disk,
   * where it has one); only then may a client be told "accepted". Returns without a promise where there is nothing to
   * wait for (this runs once per request). Putting the same task id twice queues it once. Only an engine in another
   * process has a capacity gate before it, and may answer `refused`.
   */
  put(task: Task, sharing?: Sharing): Placed | Promise<Placed>;
  /** Id prefix for a model's next task (`ids.ts`), where tasks are stored in bundles. If absent, any id will do. */
  bundle?(model: string): string;
  /** Why `tasks` with shared parameters do not fit even an empty queue; undefined if they do. Asked before the puts. */
  neverFits(tasks: number, inputBytes: number, parameterBytes: number): string | undefined;
  /** Runs several puts; listeners hear of them after the last, so that one request's inputs can leave in one batch. */
  together<Puts>(puts: () => Puts): Puts;

  /**
   * Ends a task for its owner; resolves when that is as safe as `put` makes a task. With `abandoned`, the caller hung
   * up: it is dropped only if it is queued, no caller joined it, and no Idempotency-Key could bring the caller back.
   */
  cancel(id: string, tenant: string, abandoned?: boolean): Promise<CancelReply>;

  /**
   * The record, if it exists and belongs to `tenant`; without `tenant`: for an operator. A finished task's input and
   * parameters are "": only dead letters keep theirs.
   */
  outcome(id: string, tenant?: string): Promise<RecordView | undefined>;

  /** As `outcome`; if the record is not final, this process will be told of its end (`watch`). */
  follow(id: string, tenant: string): Promise<RecordView | undefined>;

  /** Its owner received the outcome; with `results.evictAfterRead` it is forgotten. */
  delivered(id: string): void;

  /** Spends one unit of `perMinute` under `key`. Resolves with what is left, and when one is free again. */
  spend(
    key: string,
    perMinute: number,
  ): Promise<{ readonly allowed: boolean; readonly left: number; readonly resetMs: number }>;

  watch(listener: EngineListener): () => void;

  /** Stops, with everything accepted safe on disk where there is one. Idempotent. */
  close(): Promise<void>;
}

export interface Engine extends TaskStore {
  put(task: Task, sharing?: Sharing): PutReply | Promise<PutReply>;

  /**
   * Moves up to `max` queued tasks under one lease, tiers and tenants in fair turn. Tasks past their deadline are
   * settled, not claimed. An empty lease means that nothing was there. If the lease is neither settled nor extended in
   * time, `reap` puts its tasks back.
   */
  claim(request: ClaimRequest): Promise<Lease>;

  /** Extends the lease by `leaseMs` from now. Resolves with the ids that it no longer holds. */
  extend(lease: Lease, leaseMs: number): Promise<readonly string[]>;

  /**
   * Decides tasks of a lease; each verdict is atomic (state, outcome, queue, wake-up). Idempotent; may be done in
   * parts.
   */
  settle(lease: Lease, verdicts: readonly Verdict[]): Promise<readonly SettleReply[]>;

  /**
   * Does what is due: fails what waited too long, returns expired leases and due retries to their queues, forgets old
   * records. Resolves with the time of the next thing to do.
   */
  reap(now: number): Promise<number>;

  /**
   * This process's current view of a model's queues: best tier first, then longest-waiting first; where tenants are
   * known, tenants in turn, each with its longest-waiting first. At most `perTier` per tier are required. No round
   * trip.
   */
  queues(model: string, perTier?: number): Iterable<QueueView>;

  /** Waiting tasks of a model by tier, including those on their way in. No round trip. */
  waiting(model: string): readonly number[];

  /** Estimated tasks of its tier served before a new one of this tenant, as tenants take turns. No round trip. */
  turn(model: string, tier: number, tenant: string): number;

  stats(): EngineStats;

  readonly deadLetters: {
    list(): Promise<readonly DeadLetter[]>;
    get(id: string): Promise<DeadLetter | undefined>;
    /**
     * Requeues it under its id with fresh attempts; false if it is not (or no longer) dead. While the bounds of `put`
     * leave no room it stays, and this rejects with a `Refusal` that says when to retry.
     */
    replay(id: string): Promise<boolean>;
    /** Forgets it; false if there is none. */
    purge(id: string): Promise<boolean>;
  };
}

export interface EngineStats {
  readonly queued: number;
  readonly running: number;
  readonly kept: number;
  readonly deadLetters: number;
  /** Queued tasks by model, then tier. */
  readonly depth: ReadonlyMap<string, readonly number[]>;
}

/** Bound on the copies of one request's parameters where each task is stored with a copy. */
const MAX_COPIED_BYTES = 64 << 20;

/** `Engine.neverFits` by these limits; `copied`: each task is stored with a copy of the parameters. */
export function neverFits(
  { maxQueued, maxQueuedBytes }: EngineLimits,
  request: { readonly tasks: number; readonly inputBytes: number; readonly parameterBytes: number },
  copied: boolean,
): string | undefined {
  const { tasks, inputBytes, parameterBytes } = request;
  const fewer = "send fewer inputs in one request";
  if (tasks > maxQueued) {
    return `${tasks} inputs are more than may be queued at once (limits.maxQueued ${maxQueued}); ${fewer}`;
  }
  const shared = copied ? tasks * parameterBytes : parameterBytes;
  if (inputBytes + shared > maxQueuedBytes) {
    const bytes = `${tasks} inputs with their shared fields take ${inputBytes + shared} bytes`;
    return `${bytes}, more than may be queued at once (limits.maxQueuedBytes ${maxQueuedBytes}); ${fewer}`;
  }
  if (!copied || shared <= MAX_COPIED_BYTES) return undefined;
  const bytes = `the fields that ${tasks} inputs share are stored with each, in ${shared} bytes`;
  return `${bytes}, more than ${MAX_COPIED_BYTES}; ${fewer}`;
}
