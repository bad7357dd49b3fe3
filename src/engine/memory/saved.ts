/**
 * How a record is serialized, and restored after a restart. Two texts: `task`, immutable (the task and its sharing),
 * and `state`, rewritten when the record ends. A record that had not ended starts anew with its timeouts counted from
 * the restart: Ferry's downtime is not the caller's fault.
 */
import type { BatchNote, Outcome, Task } from "../../core/task.ts";
import type { DeadLetter, Sharing } from "../engine.ts";
import type { Journal, SavedRecord } from "./journal.ts";
import type { TaskRecord } from "./record.ts";

interface SavedState {
  readonly attempt: number;
  readonly outcome?: Outcome;
  readonly settledAt?: number;
  readonly batch?: BatchNote;
  readonly dead?: string; // dead letter detail for operators
  readonly forgotten?: true; // only the dead letter is left of it
  readonly replayed?: true; // it was a dead letter before
  readonly deaths?: number; // how often the process died while it ran
  readonly keys?: TaskRecord["keys"]; // Idempotency-Keys of joined callers
}

interface SavedTask {
  readonly task: Task;
  readonly sharing: Sharing;
}

/** The engine's side of the journal. */
export class RecordKeeper {
  readonly journal: Journal;
  readonly found: readonly SavedRecord[];
  readonly wereRunning: ReadonlySet<string>; // ids that ran in the process when it ended, where recorded

  constructor(journal: Journal, found: readonly SavedRecord[], wereRunning: readonly string[] = []) {
    this.journal = journal;
    this.found = found;
    this.wereRunning = new Set(wereRunning);
  }

  /** Tasks that run in this process; once this returns they are known after a crash. */
  running(records: ReadonlySet<TaskRecord>): void {
    this.journal.running(Array.from(records, ({ task }) => task.id));
  }

  save(record: TaskRecord): void {
    const { task, sharing } = record;
    this.journal.save(task.id, JSON.stringify({ task, sharing } satisfies SavedTask), stateText(record));
  }

  update(record: TaskRecord): void {
    this.journal.update(record.task.id, stateText(record));
  }

  forget(id: string): void {
    this.journal.forget(id);
  }

  /** Forgets it for its owner; the dead letter stays. */
  keepLetter(record: TaskRecord): void {
    this.journal.update(record.task.id, stateText(record, true));
  }
}

function stateText(record: TaskRecord, forgotten?: true): string {
  const { attempt, outcome, settledAt, batch, dead, keys, sharing, replayed, deaths } = record;
  const joined = keys.filter(({ key }) => key !== sharing.idempotency?.key);
  const state = {
    attempt,
    outcome,
    settledAt,
    batch: outcome && batch,
    dead,
    forgotten,
    ...(replayed && { replayed }),
    ...(deaths > 0 && { deaths }),
  };
  return JSON.stringify(joined.length === 0 ? state : { ...state, keys: joined });
}

export interface Restored extends SavedTask {
  readonly state: SavedState;
  readonly letter?: DeadLetter | undefined;
  /** Its model was removed: it ended now, and that must be stored. */
  readonly orphan?: boolean;
}

/** `totalMs`: its model's current limit; undefined if the model was removed. */
export function restored(
  saved: SavedRecord,
  now: number,
  totalMs: (model: string) => number | undefined,
): Restored {
  const { task, sharing } = JSON.parse(saved.task) as SavedTask;
  const state = JSON.parse(saved.state) as SavedState;
  const { outcome, attempt, dead, settledAt = now } = state;
  const allowed = totalMs(task.model);
  if (outcome === undefined && allowed !== undefined) {
    const anew = { ...task, createdAt: now, deadlineAt: now + allowed };
    return { task: anew, sharing, state: { ...state, attempt: 0 } };
  }
  if (outcome === undefined) {
    const [code, message] = ["INFERENCE_FAILED", `model ${task.model} is no longer configured`] as const;
    const ended = { ...state, outcome: { ok: false, code, message } as const, settledAt: now, dead: message };
    const letter = { task, attempts: attempt, code, message, diedAt: now };
    return { task, sharing, state: ended, letter, orphan: true };
  }
  if (dead === undefined || outcome.ok) return { task, sharing, state };
  const letter = { task, attempts: attempt, code: outcome.code, message: dead, diedAt: settledAt };
  return { task, sharing, state, letter };
}
