/**
 * The engine contract: where tasks and their outcomes live. `test/contract/engine.ts` holds every engine to this page.
 *
 * One record per task, under its id, from `put` until a time to live after its end. Result store, idempotency, joining
 * identical tasks and response routing are all that record. Rules that hold across verbs:
 *  - `done` and `failed` are final; only `deadLetters.replay` reopens a dead letter. Any end of that but `done`, a cancel by
 *    its owner included, puts it back among the dead letters with the latest reason.
 *  - The first good outcome wins, from whichever lease it comes, also an expired one. Bad news (`retry`, `failed`, `dead`)
 *    is taken only from the lease that holds the task now.
 *  - A record that is not final is in exactly one place: a queue, the waiting room for retries, or a lease.
 *  - Only the tenant that owns a record can see or end it; to anybody else it does not exist.
 *  - Inside a tier tenants take turns (`core/fair.ts`): one that floods it delays no other. An engine that many processes
 *    share may go by estimates there; its files say how far they are off.
 *  - Tenants share what is bounded by the rule in `core/share.ts`, so that none can take all of it:
 *     - Groups of one model (`MAX_GROUPS`). A `put` whose parameters no waiting task of the model has opens one, and is
 *       `full` with `own` when its tenant has opened as many as it may. Joins, answers from the cache, retries and
 *       replays are never refused for that. An engine that many processes share may count per shard or by estimates.
 *     - Bytes of unfetched outcomes (`results.maxBytes`), where the engine keeps them itself. Replays are not refused for
 *       that either. Of kept outcomes the tenant that holds the most loses its oldest first, never one that holds less
 *       than `maxBytes` divided by the tenants that hold any.
 *  - `maxQueuedBytes` counts inputs and parameters: parameters once where tasks share their text, and with each task
 *    where each is stored with its own copy (on disk, in Redis).
 *  - An outcome whose only caller hung up (`cancel` with `abandoned`), and for which no Idempotency-Key can bring that caller
 *    back, is not promised: it is kept like a delivered one.
 *  - A lease that runs out is held against its tasks as `core/retry.ts` says: alone, then dead letter.
 *  - A shared engine may be out of reach: `put`, `cancel` and `outcome` then reject with a `Refusal` that tells the client to
 *    send the request again, and whatever was accepted stays accepted.
 */
import type { ErrorCode } from "../core/errors.ts";
import type { BatchNote, Json, Outcome, Task, TaskState } from "../core/task.ts";

/** How a new task may share the work or the outcome of another. Keys are made by the intake. */
export interface Sharing {
  /** Join a task in flight that carries the same key. */
  readonly joinKey?: string;
  /** Reuse a success settled under the same key; this one's success is kept for `cacheTtlMs`. */
  readonly cacheKey?: string;
  readonly cacheTtlMs?: number;
  /** The caller's Idempotency-Key, scoped to its tenant, and a fingerprint of the body it came with. */
  readonly idempotency?: { readonly key: string; readonly fingerprint: string };
  /**
   * There is no room: answer or join what is there, and otherwise say `full`. Then nothing was written, and
   * an Idempotency-Key that stood for nothing still does.
   */
  readonly only?: boolean;
}

export type PutReply =
  /** The task is in its queue. */
  | { readonly kind: "queued"; readonly id: string }
  /** Task `id` of the same tenant is in flight and will answer for this one; wait for it instead. */
  | { readonly kind: "joined"; readonly id: string }
  /** The outcome is known: `record` holds it, under an id that belongs to this tenant. */
  | {
      readonly kind: "done";
      readonly id: string;
      readonly record: RecordView;
      readonly cached: boolean;
      /** It ran, and could not be stored: answer with the outcome, as it may not be there to be asked for later. */
      readonly unstored?: true;
    }
  /** The Idempotency-Key was used with another body. */
  | { readonly kind: "conflict"; readonly id: string }
  /**
   * Nothing was written. `message` says which bound is reached; `own`: the tenant's own share of it, which others
   * still have. `never`: an empty queue has no room for it either. `retryInMs`: when there will be room at the
   * earliest, where the engine knows.
   */
  | {
      readonly kind: "full";
      readonly message: string;
      readonly own?: boolean;
      readonly never?: boolean;
      readonly retryInMs?: number;
    };

/** What the owner, or an operator, may read of a record. */
export interface RecordView {
  readonly task: Task;
  readonly state: TaskState;
  /** First is 1; 0 while it was never claimed. */
  readonly attempt: number;
  /** When it came to its queue. A retry or a put-back keeps it, and so its age; a replay starts anew. */
  readonly queuedAt: number;
  readonly settledAt?: number;
  readonly outcome?: Outcome;
  /** How many bytes the output has in UTF-8, where that is known already. */
  readonly outputBytes?: number;
  /** Answered from an earlier outcome. */
  readonly cached?: boolean;
  /** The batch that it is in, or that decided it. */
  readonly batch?: BatchNote;
}

export interface ClaimRequest {
  readonly model: string;
  /** Which tasks: those with exactly these parameters. */
  readonly parameters: Json;
  readonly max: number;
  readonly leaseMs: number;
  /**
   * Their worker runs inside this process, so an input that crashes it ends the process: an engine on a disk notes who
   * runs before it returns, and holds the death against them at the next start (`core/retry.ts`).
   */
  readonly inProcess?: boolean;
  readonly batch: Omit<BatchNote, "size">;
}

export interface ClaimedTask {
  readonly task: Task;
  readonly attempt: number;
  readonly queuedAt: number;
}

export interface Lease {
  /** Unique to this claim and to the process that made it. */
  readonly token: string;
  readonly batch: BatchNote;
  readonly tasks: readonly ClaimedTask[];
}

export type Verdict = { readonly id: string } & (
  | { readonly kind: "done"; readonly output: Json }
  /** Final, and not worth keeping for a person. */
  | { readonly kind: "failed"; readonly code: ErrorCode; readonly message: string }
  /** Final, and kept as a dead letter with its input. Callers see `message`, operators `detail`. */
  | { readonly kind: "dead"; readonly code: ErrorCode; readonly message: string; readonly detail: string }
  /** Not final: back to the front of its queue at `at`. */
  | {
      readonly kind: "retry";
      readonly at: number;
      readonly message: string;
      /** Does not count as an attempt. */
      readonly spared?: boolean;
      /** It never left for its worker, so nobody is told that it is tried again. */
      readonly unsent?: boolean;
      /** Its batch is overdue and still running. Taken once in a task's life; after that it is late. */
      readonly overdue?: boolean;
      /** Never again in a batch larger than this: one of its mates may be poison. */
      readonly maxBatchSize?: number;
    }
);

/** What became of a verdict: taken, too late (somebody else decided or holds it), or no such record. */
export type SettleReply = "taken" | "late" | "gone";

export type CancelReply =
  /** It was queued and is now failed with CANCELLED (or dropped, when it was abandoned). */
  | "cancelled"
  /** It was final and is forgotten. */
  | "forgotten"
  /** It is running, another caller joined it, or it carries a key that somebody may come back for. */
  | "kept"
  | "unknown";

/**
 * Groups that may wait for one model at once. Each is looked at before a batch is chosen and leaves in batches of
 * its own, so more of them than a fleet could serve within `queueMs` are only a cost.
 */
export const MAX_GROUPS = 2048;

/** A group: the tasks of one model that may share a batch, which are those with the same parameters. */
export interface QueueView {
  readonly parameters: Json;
  /** The best tier that has a task in it. */
  readonly tier: number;
  readonly depth: number;
  /** When the task that waits longest was queued. */
  readonly oldestAt: number;
  readonly earliestDeadlineAt: number;
  /** How many of them were never tried; a batch without one is an extra call. */
  readonly fresh: number;
  /** The first task may not ride in a larger batch than this. */
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
  /**
   * A task reached its end. Called once per settled record; an engine that is shared tells each process of
   * the tasks that it put, joined or follows.
   */
  settled?(record: RecordView): void;
  /** `count` tasks entered a queue (new, retried, replayed or put back), which now holds `depth`. */
  queued?(model: string, parameters: Json, depth: number, count: number): void;
  /** Something falls due at `at`, sooner than `reap` last said. */
  due?(at: number): void;
}

/**
 * The bounds that an engine keeps. An engine gets them as a function, which returns the same object until a reload
 * switches to the next one: new models have a queue at once, what waits for a model that is gone should have left
 * before, and tasks keep the deadlines that they came with. The number of tiers never changes.
 */
export interface EngineLimits {
  /** Each model's own. */
  readonly models: ReadonlyMap<string, { readonly queueMs: number; readonly totalMs: number }>;
  readonly tiers: number;
  /** Queued, or waiting for a retry. */
  readonly maxQueued: number;
  readonly maxQueuedBytes: number;
  readonly results: { readonly ttlMs: number; readonly evictAfterRead: boolean; readonly maxBytes: number };
  readonly deadLetters: { readonly max: number; readonly ttlMs: number };
}

export interface Engine {
  /**
   * Takes a task in: joins it, answers it or queues it, atomically. Resolves when the task is as safe
   * as this engine makes it (on disk, where it has one); only then may a client be told "accepted". Answers
   * without a promise where there is nothing to wait for: that is once for every request.
   * Putting the same task id twice queues it once.
   */
  put(task: Task, sharing?: Sharing): PutReply | Promise<PutReply>;
  /**
   * What the id of the next task of a model shall begin with (`ids.ts`), where tasks are stored in bundles. Left out: any id
   * will do.
   */
  bundle?(model: string): string;
  /**
   * Why a request of so many tasks, which share their parameters, could never be queued however empty the queue is;
   * undefined: it can be. Asked before they are put.
   */
  neverFits(tasks: number, inputBytes: number, parameterBytes: number): string | undefined;
  /**
   * Runs `puts`, which puts several tasks at once: those who watch the queues hear of them when the last one is in,
   * so that the inputs of one request can leave in one batch.
   */
  together<Puts>(puts: () => Puts): Puts;

  /**
   * Moves up to `max` queued tasks under one lease, tiers and tenants in fair turn. Tasks past their
   * deadline are settled, not claimed. An empty lease means that nothing was there. If nobody settles or
   * extends the lease in time, `reap` puts its tasks back.
   */
  claim(request: ClaimRequest): Promise<Lease>;

  /** Holds the lease for another `leaseMs`. Resolves with the ids that it no longer holds. */
  extend(lease: Lease, leaseMs: number): Promise<readonly string[]>;

  /**
   * Decides tasks of a lease; each verdict is one atomic act: state, outcome, queue and wake-up.
   * Repeating it changes nothing. A lease may be settled in parts.
   */
  settle(lease: Lease, verdicts: readonly Verdict[]): Promise<readonly SettleReply[]>;

  /**
   * Ends a task for its owner, and resolves when that is as safe as `put` makes a task. With `abandoned`, the caller hung up: it is dropped only if it is
   * queued, nobody joined it, and no Idempotency-Key could bring the caller back.
   */
  cancel(id: string, tenant: string, abandoned?: boolean): Promise<CancelReply>;

  /**
   * The record, if it exists and belongs to `tenant`; without `tenant`: for an operator. The input and the
   * parameters of a finished task are no longer there (""): only dead letters keep theirs.
   */
  outcome(id: string, tenant?: string): Promise<RecordView | undefined>;

  /** As `outcome`; and if the record is not final, this process will be told of its end (`watch`). */
  follow(id: string, tenant: string): Promise<RecordView | undefined>;

  /** Its owner has received the outcome; with `results.evictAfterRead` it is forgotten. */
  delivered(id: string): void;

  /**
   * Does what time demands: fails what waited too long, returns expired leases and due retries to
   * their queues, forgets old records. Resolves with the instant of the next thing to do.
   */
  reap(now: number): Promise<number>;

  /** Spends one unit of `perMinute` under `key`. Resolves with what is left, and when one is free again. */
  spend(
    key: string,
    perMinute: number,
  ): Promise<{ readonly allowed: boolean; readonly left: number; readonly resetMs: number }>;

  /**
   * What this process knows of a model's queues now, those with tasks of the best tier first, and among these the
   * longest-waiting first; where the engine knows whose they are, tenants in turn, each with its longest-waiting
   * first. At most `perTier` of each tier need be told. No round trip.
   */
  queues(model: string, perTier?: number): Iterable<QueueView>;

  /** How many tasks of a model wait in each tier, those on their way in included; no round trip. */
  waiting(model: string): readonly number[];

  /**
   * How many tasks of its tier would be served before a new one of this tenant, which is fewer than wait
   * there when others flood it: tenants take turns. An estimate; no round trip.
   */
  turn(model: string, tier: number, tenant: string): number;

  stats(): EngineStats;

  watch(listener: EngineListener): () => void;

  readonly deadLetters: {
    list(): Promise<readonly DeadLetter[]>;
    get(id: string): Promise<DeadLetter | undefined>;
    /**
     * Queues it again under its own id with fresh attempts; false when it is not (or no longer) dead. Rejects with a
     * `Refusal` that says when to try again, and the letter stays, while the bounds of `put` leave no room for it.
     */
    replay(id: string): Promise<boolean>;
    /** Forgets it; false when there is none. */
    purge(id: string): Promise<boolean>;
  };

  /** Stops, with everything accepted safe on disk where there is one. Idempotent. */
  close(): Promise<void>;
}

export interface EngineStats {
  readonly queued: number;
  readonly running: number;
  readonly kept: number;
  readonly deadLetters: number;
  /** Queued tasks by model, then tier. */
  readonly depth: ReadonlyMap<string, readonly number[]>;
}

/** What the copies of one request's parameters may take where each task is stored with its own. */
const MAX_COPIED_BYTES = 64 << 20;

/** `Engine.neverFits` by these limits; `copied`: each task is stored with its own copy of the parameters. */
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
