/**
 * The record of one task, and the list it stands in.
 *
 * A record stands in at most one list (a queue, or a row of the shelf), linked through itself, so that
 * leaving from the middle costs as little as leaving from the end.
 */
import type { Due } from "../../core/heap.ts";
import type { BatchNote, Outcome, Task, TaskState } from "../../core/task.ts";
import type { EventFields } from "../../observe/events.ts";
import type { RecordView, Sharing, Verdict } from "../engine.ts";
import type { Group, TenantRow } from "./queues.ts";

/** What a record costs beside its texts; measured on V8 with room to spare. */
const RECORD_BYTES = 1500;

/** Of a task id, which nobody but us makes: its last characters, which are chance. */
export const ID_RANDOM_END = 12;

const NO_KEYS: readonly never[] = [];
/** Larger than any batch; an integer, which V8 keeps in the record itself. */
export const ANY_BATCH = 1 << 30;

export class TaskRecord implements RecordView, Due {
  task: Task;
  readonly sharing: Sharing;
  state: TaskState = "queued";
  attempt = 0;
  queuedAt: number;
  /** Its number in the order in which tasks of its model came. */
  arrival = 0;
  /** The best tier of those who joined. */
  tier: number;
  /** The latest deadline of those who joined: nobody is failed by somebody else's hurry. */
  deadlineAt: number;
  settledAt?: number;
  outcome?: Outcome;
  /** How many bytes the output has in UTF-8, once somebody has counted. */
  outputBytes?: number;
  cached = false;
  batch?: BatchNote;
  /** The lease that may bring bad news; "" when none does. */
  lease = "";
  leaseUntil = 0;
  /** When a retry falls due; 0 when it is not waiting for one. */
  retryAt = 0;
  /** When it gives up its place in the queue. */
  expiresAt: number;
  /** Callers that share this record through their content beside the first. */
  joins = 0;
  /** The Idempotency-Keys that point here. */
  keys: readonly NonNullable<Sharing["idempotency"]>[] = NO_KEYS;
  /** Never in a larger batch than this. */
  maxBatchSize = ANY_BATCH;
  /** Leases of it that ran out. */
  lost = 0;
  /** How often the process died while it ran in it; outlives restarts. From the first on it runs alone. */
  deaths = 0;
  /** It was put back once because its batch was overdue. */
  overdue = false;
  /** What its dead letter tells operators; undefined when it is none. */
  dead: string | undefined;
  /** It was a dead letter, and becomes one again unless it succeeds. */
  replayed = false;
  /** Its caller has the outcome; before it is settled: no caller waits for it any more. */
  delivered = false;
  /** Of the tasks with the same parameters; while it waits. Written by `queues.ts`. */
  group: Group | undefined;
  /** The instant at which `reap` must look at it; until it is final. */
  dueAt = Infinity;
  place = -1;
  list: RecordList | undefined;
  before: TaskRecord | undefined;
  after: TaskRecord | undefined;
  /** In a queue that several tenants share: its tenant's own row there. */
  row: TenantRow | undefined;
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

/** The event of its return to the queue. */
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

  /** Where its arrival puts it: ahead of all that came later, however late it comes back itself. */
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

  /** The first that came later. From both ends: whoever floods a queue stands between it and one of them. */
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
