/**
 * The journal's thread: the only writer of ferry.db. At start it takes the lock, verifies the file, hands over the
 * records and starts a new log. Then each group becomes one transaction:
 *
 *   BEGIN, the changes, the tally, COMMIT (fsync) ──► ferry.db-mark ──► "committed" ──► fold, when due
 *
 * The mark is written after the fsync and before the confirmation, so it never claims too much. The log is folded in
 * after the answer, in place: overwriting an old log commits 1.4 times as fast as growing a new one.
 *
 * No index on id: the thread keeps the row of every record in memory (about 130 bytes each). Measured: 2.2 times the
 * changes per second, and no index that could be damaged.
 *
 * After a failed write nothing is written until the file was reopened and verified (`reopen`); if it is unknown what is
 * on disk (`isPassing` is false), never again. The lock is kept until it is told to close.
 */
import * as fs from "node:fs";
import { DatabaseSync, type StatementSync } from "node:sqlite";
import { parentPort, workerData } from "node:worker_threads";

import { explain, isPassing, journalFile, lockDataDir, markText, tallyCrc, textCrc } from "./journal.ts";
import type { Changes, Reopen, JournalCounts, WriterNote, WriterStart } from "./journal.ts";
import { createFile, finishRecovery, readJournal, renameSafely, sizeOf } from "./journal-recover.ts";

const FOLD_BYTES = 2 * 1024 * 1024; // text written between two folds of the log into the file
const COMMIT_BYTES = 16 * 1024; // rough cost of a commit besides its texts: the tally's page and one half-filled page
const CHUNK = 500; // records handed over at once
const PROBE_BYTES = 2 * FOLD_BYTES; // probe size, plus twice the waiting changes: room for a fold of the log

interface RowPlace {
  readonly seq: number;
  readonly taskCrc: number;
  stateCrc: number;
}

/** Finishes an interrupted recovery or creates the first file, so that a complete ferry.db exists. */
function prepareFile(file: string): void {
  finishRecovery(file);
  if (fs.existsSync(file)) return;
  if (sizeOf(`${file}-wal`) > 0) {
    throw new Error(
      `${file} is missing but its log ${file}-wal is there: put ferry.db back, or move the log away too`,
    );
  }
  createFile(`${file}-new`).close();
  renameSafely(`${file}-new`, file);
}

class Writer {
  readonly torn: number;
  readonly #db: DatabaseSync;
  readonly #mark: number;
  readonly #places = new Map<string, RowPlace>();
  readonly #file: string;
  readonly #path: string;
  readonly #inode: number; // of ferry.db: writing to a deleted or replaced file succeeds, and keeps nothing
  readonly #save: StatementSync;
  readonly #update: StatementSync;
  readonly #forget: StatementSync;
  readonly #tally: StatementSync;
  #commits: number;
  #sum: number;
  #top: number;
  #unfolded = 0;

  /** `after`: the writer that failed; the file must end with its last confirmed commit. */
  constructor({ dataDir, maxPages }: WriterStart, handOver: (texts: string[]) => void, after?: Writer) {
    const path = (this.#path = journalFile(dataDir));
    if (after === undefined) prepareFile(path);
    else after.#checkInode();
    const { tally, torn } = this.#read(dataDir, handOver);
    if (after !== undefined && (tally.file !== after.#file || tally.commits !== after.#commits)) {
      throw new Error(
        `${path} ends with commit ${tally.commits}, though ${after.#commits} was the last one confirmed`,
      );
    }
    this.#inode = fs.statSync(path).ino;
    this.torn = torn;
    this.#file = tally.file;
    this.#commits = tally.commits;
    this.#sum = tally.sum;
    this.#top = tally.top;
    this.#mark = fs.openSync(`${path}-mark`, fs.constants.O_RDWR | fs.constants.O_CREAT, 0o600);
    this.#db = new DatabaseSync(path);
    try {
      this.#writeMark();
      this.#db.exec("PRAGMA locking_mode=EXCLUSIVE; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL");
      this.#db.exec("PRAGMA wal_autocheckpoint=0; PRAGMA cache_size=-16384");
      // What a crash left at the end of the log must not lie behind new frames: it would look like damage.
      this.#db.exec("PRAGMA wal_checkpoint(TRUNCATE)");
      if (maxPages !== undefined) this.#db.exec(`PRAGMA max_page_count=${maxPages}`);
    } catch (error) {
      this.close(); // or the next attempt would find the file locked
      throw error;
    }
    this.#save = this.#db.prepare("INSERT INTO record VALUES (?, ?, ?, ?, ?, ?)");
    this.#update = this.#db.prepare("UPDATE record SET state = ?, state_crc = ? WHERE seq = ?");
    this.#forget = this.#db.prepare("DELETE FROM record WHERE seq = ?");
    this.#tally = this.#db.prepare(
      "UPDATE tally SET commits = ?, records = ?, sum = ?, top = ?, crc = ? WHERE one = 1",
    );
  }

  #read(dataDir: string, handOver: (texts: string[]) => void): { tally: JournalCounts; torn: number } {
    let texts: string[] = [];
    const read = readJournal(dataDir, (row) => {
      this.#places.set(row.id, { seq: row.seq, taskCrc: row.task_crc, stateCrc: row.state_crc });
      texts.push(row.id, row.task, row.state);
      if (texts.length < 3 * CHUNK) return;
      handOver(texts);
      texts = [];
    });
    handOver(texts);
    return read;
  }

  commit(changes: Changes): void {
    this.#db.exec("BEGIN");
    for (let at = 0; at < changes.length; at += 3) {
      const id = changes[at];
      if (typeof id !== "string") continue;
      this.#apply(id, changes[at + 1] ?? undefined, changes[at + 2] ?? undefined);
    }
    const file = this.#file;
    const tally = {
      file,
      commits: this.#commits + 1,
      records: this.#places.size,
      sum: this.#sum,
      top: this.#top,
    };
    this.#tally.run(tally.commits, tally.records, tally.sum, tally.top, tallyCrc(tally));
    this.#db.exec("COMMIT");
    this.#checkInode();
    this.#commits++;
    this.#writeMark();
    this.#unfolded += COMMIT_BYTES;
  }

  #apply(id: string, task: string | undefined, state: string | undefined): void {
    const place = this.#places.get(id);
    if (task === undefined && state !== undefined) {
      if (place === undefined) return;
      const crc = textCrc(id, state);
      this.#update.run(state, crc, place.seq);
      this.#sum = (this.#sum + crc - place.stateCrc) >>> 0;
      place.stateCrc = crc;
      this.#unfolded += state.length;
      return;
    }
    if (place !== undefined) {
      this.#forget.run(place.seq);
      this.#places.delete(id);
      this.#sum = (this.#sum - place.taskCrc - place.stateCrc) >>> 0;
    }
    if (task === undefined || state === undefined) return;
    const [taskCrc, stateCrc] = [textCrc(id, task), textCrc(id, state)];
    const seq = ++this.#top;
    this.#save.run(seq, id, task, state, taskCrc, stateCrc);
    this.#places.set(id, { seq, taskCrc, stateCrc });
    this.#sum = (this.#sum + taskCrc + stateCrc) >>> 0;
    this.#unfolded += task.length + state.length;
  }

  /** Folds the log into the file when due; the next commit then overwrites the log. */
  foldWhenDue(): void {
    if (this.#unfolded < FOLD_BYTES) return;
    this.#unfolded = 0;
    this.#db.exec("PRAGMA wal_checkpoint(PASSIVE)");
  }

  /** May lag: a disk too full for the mark does not undo a commit. */
  #writeMark(): void {
    try {
      fs.writeSync(this.#mark, markText(this.#file, this.#commits), 0);
    } catch (error) {
      if (!isPassing(error)) throw error;
    }
  }

  #checkInode(): void {
    if (fs.statSync(this.#path, { throwIfNoEntry: false })?.ino === this.#inode) return;
    throw new Error(`${this.#path} was deleted, moved or replaced while Ferry used it`);
  }

  close(): void {
    this.#db.close(); // folds the log in and removes it
    fs.closeSync(this.#mark);
  }
}

/** Writes and fsyncs a separate file of this size; throws if that fails. */
function probe(dataDir: string, bytes: number): void {
  const path = `${journalFile(dataDir)}-probe`;
  try {
    const fd = fs.openSync(path, "w", 0o600);
    try {
      fs.writeFileSync(fd, Buffer.alloc(bytes));
      fs.fsyncSync(fd);
    } finally {
      fs.closeSync(fd);
    }
  } finally {
    fs.rmSync(path, { force: true });
  }
}

function run(port: NonNullable<typeof parentPort>, start: WriterStart): void {
  const say = (note: WriterNote): void => port.postMessage(note);
  let lock: DatabaseSync | undefined;
  let writer: Writer | undefined;
  let closed = false; // the writer's files, before they are opened anew
  let state: "well" | "stalled" | "failed" = "well";
  const attempt = (act: () => void): void => {
    try {
      act();
    } catch (error) {
      state = writer !== undefined && isPassing(error) ? "stalled" : "failed";
      say({ kind: state, why: explain(error, start.dataDir).message });
    }
  };
  const closeWriter = (): void => {
    if (closed) return;
    closed = true;
    writer?.close();
  };
  const reopen = (bytes: number): void => {
    probe(start.dataDir, PROBE_BYTES + 2 * bytes);
    closeWriter();
    writer = new Writer(start, () => {}, writer);
    closed = false;
    state = "well";
    say({ kind: "reopened" });
  };
  port.on("message", (said: Changes | Reopen | "close") => {
    if (said === "close") {
      attempt(closeWriter);
      lock?.close();
      port.close();
    } else if ("bytes" in said) {
      if (state === "stalled") attempt(() => reopen(said.bytes));
    } else if (state === "well") {
      attempt(() => {
        writer?.commit(said);
        say({ kind: "committed" });
        writer?.foldWhenDue();
      });
    }
  });
  attempt(() => {
    lock = lockDataDir(start.dataDir);
    writer = new Writer(start, (texts) => say({ kind: "records", texts }));
    say({ kind: "opened", torn: writer.torn });
  });
}

if (parentPort !== null) run(parentPort, workerData as WriterStart);
