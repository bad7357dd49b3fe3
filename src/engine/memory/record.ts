/**
 * The record of one task, and its intrusive list. A record is in at most one list (a queue, or a tenant's kept
 * results), so that removal is O(1) anywhere.
 */
import type { Due } from "../../core/heap.ts";
import type { BatchNote, Outcome, Task, TaskState } from "../../core/task.ts";
import type { EventFields } from "../../observe/events.ts";
import type { RecordView, Sharing, Verdict } from "../engine.ts";
import type { Group, TenantRow } from "./queues.ts";

const RECORD_BYTES = 1500; // heap cost of a record besides its texts; measured on V8, rounded up

/** Hashed characters of a task id, which only we make: its random end. */
export const ID_RANDOM_END = 12;

const NO_KEYS: readonly never[] = [];
/** Larger than any batch; a small integer, which V8 stores in the record itself. */
export const ANY_BATCH = 1 << 30;

export class TaskRecord implements RecordView, Due {
  task: Task;
  readonly sharing: Sharing;
  state: TaskState = "queued";
  attempt = 0;
  queuedAt: number;
  arrival = 0; // arrival number within its model
  tier: number; // best tier of its callers
  deadlineAt: number; // latest deadline of its callers: none is failed by another's shorter deadline
  settledAt?: number;
  outcome?: Outcome;
  outputBytes?: number; // UTF-8 bytes of the output, once counted
  cached = false;
  batch?: BatchNote;
  lease = ""; // the lease that may report a failure; "" if none
  leaseUntil = 0;
  retryAt = 0; // when a retry is due; 0 if not waiting for one
  expiresAt: number; // when it expires in the queue
  joins = 0; // callers that share this record through their content, besides the first
  keys: readonly NonNullable<Sharing["idempotency"]>[] = NO_KEYS; // Idempotency-Keys that point here
  maxBatchSize = ANY_BATCH;
  length = 0; // in tokens; 0: not measured
  overtakenUntil = 0; // later tasks overtook it, and may do so until then; 0: none did
  lost = 0; // expired leases
  deaths = 0; // how often the process died while it ran there; survives restarts. From the first on it runs alone.
  overdue = false; // it was put back once because its batch was overdue
  dead: string | undefined; // dead letter detail for operators; undefined if it is none
  replayed = false; // it was a dead letter, and becomes one again unless it succeeds
  delivered = false; // its caller has the outcome; before it is settled: no caller waits for it any more
  group: Group | undefined; // while it waits. Written by `queues.ts`.
  dueAt = Infinity; // when `reap` must look at it; until it is final
  place = -1;
  list: RecordList | undefined;
  before: TaskRecord | undefined;
  after: TaskRecord | undefined;
  row: TenantRow | undefined; // its tenant's row, in a queue that several tenants share
  rowBefore: TaskRecord | undefined;
  rowAfter: TaskRecord | undefined;

  constructor(task: Task, sharing: Sharing, expiresAt: number) {
    this.task = task;
    this.sharing = sharing;
    this.tier = task.tier;
    this.queuedAt = task.createdAt;
    this.deadlineAt = task.deadlineAt;
    this.expiresAt = expiresAt;
  }

  get final(): boolean {
    return this.state === "done" || this.state === "failed";
  }

  get bytes(): number {
    const output = this.outcome?.ok === true ? this.outcome.output.length : 0;
    return RECORD_BYTES + this.task.input.length + this.task.parameters.length + output;
  }
}

export function retriedFields(
  { task, attempt, batch }: TaskRecord,
  { at, message }: Verdict & { readonly kind: "retry" },
): EventFields["task.retried"] {
  const { id, model, trace } = task;
  return { id, model, attempt, at, message, batchId: batch?.id ?? "", worker: batch?.worker ?? "", trace };
}

export class RecordList {
  first: TaskRecord | undefined;
  #last: TaskRecord | undefined;
  size = 0;

  pushBack(record: TaskRecord): void {
    this.#claim(record);
    record.before = this.#last;
    if (this.#last === undefined) this.first = record;
    else this.#last.after = record;
    this.#last = record;
  }

  /** By arrival: ahead of everything that came later, however late it comes back. */
  insert(record: TaskRecord): void {
    this.#claim(record);
    const next = this.#laterThan(record.arrival);
    record.after = next;
    record.before = next === undefined ? this.#last : next.before;
    if (record.before === undefined) this.first = record;
    else record.before.after = record;
    if (next === undefined) this.#last = record;
    else next.before = record;
  }

  /** The first that came later. Searches from both ends: a flooding tenant is between it and only one of them. */
  #laterThan(arrival: number): TaskRecord | undefined {
    let front = this.first;
    let back = this.#last;
    while (front !== undefined && front.arrival < arrival) {
      if (back!.arrival < arrival) return back!.after;
      front = front.after;
      back = back!.before;
    }
    return front;
  }

  remove(record: TaskRecord): void {
    if (record.before === undefined) this.first = record.after;
    else record.before.after = record.after;
    if (record.after === undefined) this.#last = record.before;
    else record.after.before = record.before;
    record.before = record.after = record.list = undefined;
    this.size--;
  }

  #claim(record: TaskRecord): void {
    if (record.list !== undefined) throw new Error("a record stands in two lists; this is a bug");
    record.list = this;
    this.size++;
  }
}

export const tooLate = (message: string): Outcome => ({ ok: false, code: "DEADLINE_EXCEEDED", message });
