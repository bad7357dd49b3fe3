/**
 * How a record is written down, and read back after a restart.
 *
 * Two texts: `task`, which never changes (the task and how it may be shared), and `state`, which is
 * rewritten when the record ends. A record that had not ended starts anew: its clocks run from the
 * restart, because the time that Ferry was down is not the caller's fault.
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
  /** What the dead letter tells operators. */
  readonly dead?: string;
  /** Only the dead letter is left of it. */
  readonly forgotten?: true;
  /** It was a dead letter before. */
  readonly replayed?: true;
  /** How often the process died while it ran. */
  readonly deaths?: number;
  /** Idempotency-Keys of those who joined. */
  readonly keys?: TaskRecord["keys"];
}

interface SavedTask {
  readonly task: Task;
  readonly sharing: Sharing;
}

/** The engine's side of the journal. */
export class RecordKeeper {
  readonly journal: Journal;
  /** What was on disk at the start. */
  readonly found: readonly SavedRecord[];
  /** Which of them ran in the process when it ended, where that was noted. */
  readonly wereRunning: ReadonlySet<string>;

  constructor(journal: Journal, found: readonly SavedRecord[], wereRunning: readonly string[] = []) {
    this.journal = journal;
    this.found = found;
    this.wereRunning = new Set(wereRunning);
  }

  /** The tasks that run in this process now; on return they are known after a crash. */
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
  /** Its model has gone: it ended now, and that must be written down. */
  readonly orphan?: boolean;
}

/** Reads a record back; `totalMs` is what its model allows a task now, undefined when it has gone. */
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
