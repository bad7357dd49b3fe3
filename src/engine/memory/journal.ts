/**
 * The journal: the durable copy of the memory engine's records. A worker thread (`journal-writer.ts`) writes it to
 * SQLite, so that the main thread never waits for a disk:
 *
 *   save / update / forget ──► group ──► one postMessage ──► one transaction ──► flushed() resolves
 *
 * A group holds the net change per id of one event loop turn, or of the time the previous commit took: a slow disk
 * makes larger groups, not more. It is sealed at GROUP_BYTES, so that after a disk stall no single copy to the thread
 * blocks the main thread. `flushed()` resolves after COMMIT with `synchronous=FULL`: the log was fsynced. One change
 * costs the main thread 0.6 to 1.2 µs at 2 KB (`node bench/journal.ts`, idle to busy). Refusing work is up to the
 * engine, when `pendingBytes` grows too large.
 *
 * When a write fails the journal is in `trouble`: every waiting and later `flushed()` rejects, and `onTrouble` is
 * called.
 *  - Refused write (no space, quota, read-only, write error): its transaction is not on disk. The changes are kept, and
 *    every RETRY_MS the thread writes and fsyncs a probe file. Once that succeeds it reopens ferry.db, verifies all of
 *    it, and continues only if the file ends with the last confirmed commit; the kept changes are written, then
 *    `onTrouble(undefined)`. A record forgotten meanwhile never reaches the disk.
 *  - `lasting`: failed fsync, damage, deleted files, dead thread. The disk's state is unknown, and fsync is not
 *    retried: it could report success for pages that the kernel dropped. Later changes are ignored. Unconfirmed changes
 *    may or may not be there after a restart; confirmed ones are.
 *
 * Files in `dataDir` (directory 0700, files 0600):
 *   ferry.db         SQLite, WAL. `record`: one row per record with CRC32 of id+task and of id+state. `tally`: one row,
 *                    rewritten by every commit: number of commits and records, sum of all CRCs. It never shrinks.
 *   ferry.db-wal     SQLite's log, folded into ferry.db about every 2 MB and at `close`.
 *   ferry.db-mark    number of the last confirmed commit, written (not fsynced) after its fsync. It can lag behind the
 *                    disk, never run ahead; so a `tally` below it proves a loss.
 *   ferry.running    ids of the tasks that run inside the process, rewritten before each module backend batch, no fsync.
 *   ferry.lock       empty; one process at a time holds SQLite's lock on it, which the kernel drops when it dies.
 *   ferry.pid        names that process.
 *   ferry.db-new, ferry.db-recovered, ferry.db-mended, ferry.db.damaged-N: see `journal-recover.ts`.
 */
import * as fs from "node:fs";
import { dirname, extname, join, resolve } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { Worker } from "node:worker_threads";
import { crc32 } from "node:zlib";
import { type Alarm, type Clock, SystemClock } from "../../app/clock.ts";

/** Two texts owned by the engine: the immutable and the mutable part. */
export interface SavedRecord {
  readonly id: string;
  readonly task: string;
  readonly state: string;
}

export interface Journal {
  /** Saving an id again replaces the record and moves it to the end. */
  save(id: string, task: string, state: string): void;
  /** Ignored if the record is not there. */
  update(id: string, state: string): void;
  forget(id: string): void;
  /** All records that run here; once this returns (some µs, no fsync) they survive a crash, perhaps a power cut. */
  running(ids: readonly string[]): void;
  /** Resolves when every earlier change is on disk (fsynced); rejects when it cannot be. */
  flushed(): Promise<void>;
  /** Unconfirmed characters, plus a little per change. */
  readonly pendingBytes: number;
  /** Why nothing can be written now. */
  readonly trouble: JournalTrouble | undefined;
  /**
   * Flushes, folds the log, ends the thread; idempotent. Always resolves: `trouble` says whether all is on disk. A
   * later change is a programming error and throws.
   */
  close(): Promise<void>;
}

/** The message names files: for operators, never for clients. */
export class JournalTrouble extends Error {
  readonly lasting: boolean; // not temporary: the process must be restarted

  constructor(message: string, lasting: boolean) {
    super(message);
    this.lasting = lasting;
  }
}

export interface OpenedJournal {
  readonly journal: Journal;
  /** In the order of their `save`. */
  readonly records: SavedRecord[];
  /**
   * Confirmed commits lost at the end of the log; 0 unless the disk lied about an fsync. Report it: those tasks are
   * lost.
   */
  readonly torn: number;
  /** The last set passed to `running`. */
  readonly running: readonly string[];
}

export interface JournalOptions {
  /** Page limit of ferry.db, beyond which it is "disk full"; for tests. Default: none. */
  readonly maxPages?: number;
}

/** Messages to and from the thread. A group is sent as a bare array. */
export interface WriterStart extends JournalOptions {
  readonly dataDir: string;
}
export type WriterNote =
  | { readonly kind: "records"; readonly texts: readonly string[] }
  | { readonly kind: "opened"; readonly torn: number }
  | { readonly kind: "committed" }
  /** The last group is not on disk, nor any since; nothing is written until a `Reopen` succeeds. */
  | { readonly kind: "stalled"; readonly why: string }
  | { readonly kind: "reopened" }
  | { readonly kind: "failed"; readonly why: string };
/** Asks a stalled thread to test whether this many bytes can be written, and then to reopen the file. */
export interface Reopen {
  readonly bytes: number;
}
/** id, task, state; task null = update, both null = forget, all null = nothing. Three per change. */
export type Changes = readonly (string | null)[];

const GROUP_BYTES = 1024 * 1024;
const RETRY_MS = 1000; // how often a stalled journal probes the disk
const CHANGE_BYTES = 64; // rough cost of a change besides its texts

/** The net change of each id, in order of first mention. */
class Group {
  readonly changes: (string | null)[] = [];
  bytes = 0;
  readonly #places = new Map<string, number>();
  #settled: PromiseWithResolvers<void> | undefined;

  save(id: string, task: string, state: string): void {
    const at = this.#places.get(id);
    if (at !== undefined) this.changes.fill(null, at, at + 3);
    this.#push(id, task, state);
  }

  update(id: string, state: string): void {
    const at = this.#places.get(id);
    if (at === undefined) return this.#push(id, null, state);
    const before = this.changes[at + 2];
    if (typeof before !== "string") return; // already forgotten
    this.changes[at + 2] = state;
    this.bytes += state.length - before.length;
  }

  forget(id: string): void {
    const at = this.#places.get(id);
    if (at === undefined) return this.#push(id, null, null);
    // Drop this group's save, but still forget: the id may be on disk from an earlier group.
    this.bytes -= (this.changes[at + 1]?.length ?? 0) + (this.changes[at + 2]?.length ?? 0);
    this.changes.fill(null, at + 1, at + 3);
  }

  #push(id: string, task: string | null, state: string | null): void {
    this.#places.set(id, this.changes.length);
    this.changes.push(id, task, state);
    this.bytes += id.length + (task?.length ?? 0) + (state?.length ?? 0) + CHANGE_BYTES;
  }

  has(id: string): boolean {
    return this.#places.has(id);
  }

  /** Shared by all waiters; created on demand. */
  get settled(): PromiseWithResolvers<void> {
    return (this.#settled ??= Promise.withResolvers<void>());
  }

  end(why?: Error): void {
    if (why === undefined) this.#settled?.resolve();
    else this.#settled?.reject(why);
  }
}

class ThreadJournal implements Journal {
  readonly records: SavedRecord[] = [];
  readonly opened = Promise.withResolvers<number>();
  readonly #thread: Worker;
  readonly #exited: Promise<void>;
  readonly #clock: Clock;
  readonly #noteRunning: (ids: readonly string[]) => void;
  readonly #onTrouble: (why: JournalTrouble | undefined) => void;
  #open = new Group();
  #sealed: Group[] = [];
  #sealedBytes = 0;
  #committing: Group | undefined;
  #scheduled = false;
  #trouble: JournalTrouble | undefined;
  #retry: Alarm | undefined;
  #closed: Promise<void> | undefined;

  constructor(start: WriterStart, onTrouble: (why: JournalTrouble | undefined) => void, clock: Clock) {
    this.#onTrouble = onTrouble;
    this.#clock = clock;
    this.#noteRunning = runningNote(start.dataDir);
    // The same extension as this file's: .ts in a checkout, .js in dist/.
    const program = new URL(`./journal-writer${extname(import.meta.filename)}`, import.meta.url);
    this.#thread = new Worker(program, { workerData: start, name: "journal" });
    const exited = Promise.withResolvers<void>();
    this.#exited = exited.promise;
    this.#thread.on("message", (note: WriterNote) => this.#hear(note));
    this.#thread.on("error", (error) => this.#break(`the journal's thread failed: ${String(error)}`));
    this.#thread.on("exit", () => {
      exited.resolve();
      if (this.#closed === undefined) this.#break("the journal's thread ended");
    });
  }

  save(id: string, task: string, state: string): void {
    if (this.#accepts()) this.#open.save(id, task, state);
  }

  update(id: string, state: string): void {
    if (this.#accepts()) this.#open.update(id, state);
  }

  forget(id: string): void {
    if (!this.#accepts()) return;
    // What was refused while the disk was full must not be written once there is room.
    if (this.#trouble !== undefined) {
      for (const group of this.#unwritten()) if (group.has(id)) group.forget(id);
      this.#sealedBytes = this.#sealed.reduce((sum, { bytes }) => sum + bytes, 0);
    }
    this.#open.forget(id);
  }

  running(ids: readonly string[]): void {
    this.#noteRunning(ids);
  }

  flushed(): Promise<void> {
    if (this.#trouble !== undefined) return Promise.reject(this.#trouble);
    const last = this.#open.changes.length > 0 ? this.#open : (this.#sealed.at(-1) ?? this.#committing);
    return last === undefined ? Promise.resolve() : last.settled.promise;
  }

  get pendingBytes(): number {
    return this.#open.bytes + this.#sealedBytes + (this.#committing?.bytes ?? 0);
  }

  get trouble(): JournalTrouble | undefined {
    return this.#trouble;
  }

  close(): Promise<void> {
    return (this.#closed ??= this.#end());
  }

  async #end(): Promise<void> {
    await this.flushed().catch(() => {}); // see `trouble`
    this.#retry?.cancel();
    this.#noteRunning([]); // a regular stop is no crash
    this.#thread.postMessage("close");
    await this.#exited;
  }

  /** Makes room in the open group and schedules its sending. */
  #accepts(): boolean {
    if (this.#closed !== undefined) throw new Error("the journal is closed");
    if (this.#trouble?.lasting === true) return false;
    if (this.#open.bytes > GROUP_BYTES) {
      this.#sealed.push(this.#open);
      this.#sealedBytes += this.#open.bytes;
      this.#open = new Group();
    }
    if (!this.#scheduled && this.#committing === undefined) {
      this.#scheduled = true;
      setImmediate(() => {
        this.#scheduled = false;
        if (this.#committing === undefined && this.#trouble === undefined) this.#send();
      });
    }
    return true;
  }

  #send(): void {
    let group = this.#sealed.shift();
    if (group !== undefined) {
      this.#sealedBytes -= group.bytes;
    } else if (this.#open.changes.length > 0) {
      group = this.#open;
      this.#open = new Group();
    }
    this.#committing = group;
    if (group !== undefined) this.#thread.postMessage(group.changes);
  }

  #hear(note: WriterNote): void {
    if (note.kind === "committed") {
      const group = this.#committing;
      this.#send();
      group?.end();
      if (this.#committing === undefined) this.#mended();
    } else if (note.kind === "stalled") {
      this.#stall(note.why);
    } else if (note.kind === "reopened") {
      if (this.#committing === undefined) this.#send();
      else this.#thread.postMessage(this.#committing.changes);
      if (this.#committing === undefined) this.#mended();
    } else if (note.kind === "failed") {
      this.#break(note.why);
    } else if (note.kind === "opened") {
      this.opened.resolve(note.torn);
    } else {
      for (let at = 0; at < note.texts.length; at += 3) {
        const [id = "", task = "", state = ""] = note.texts.slice(at, at + 3);
        this.records.push({ id, task, state });
      }
    }
  }

  #unwritten(): Group[] {
    return [...(this.#committing === undefined ? [] : [this.#committing]), ...this.#sealed, this.#open];
  }

  #stall(message: string): void {
    if (this.#closed === undefined) {
      this.#retry = this.#clock.at(this.#clock.now() + RETRY_MS, () => {
        this.#thread.postMessage({ bytes: this.pendingBytes } satisfies Reopen);
      });
    }
    if (this.#trouble !== undefined) return;
    const why = (this.#trouble = new JournalTrouble(message, false));
    for (const group of this.#unwritten()) group.end(why);
    this.#onTrouble(why);
  }

  #mended(): void {
    if (this.#trouble === undefined || this.#trouble.lasting) return;
    this.#trouble = undefined;
    this.#onTrouble(undefined);
  }

  #break(message: string): void {
    if (this.#trouble?.lasting === true) return;
    const why = (this.#trouble = new JournalTrouble(message, true));
    this.opened.reject(why); // does nothing once it is open
    const waiting = this.#unwritten();
    this.#committing = undefined;
    this.#sealed = [];
    this.#sealedBytes = 0;
    this.#open = new Group();
    for (const group of waiting) group.end(why);
    this.#onTrouble(why);
  }
}

/** Creates `dataDir` if missing. Rejects with one sentence that names the file and says what to do. */
export async function openJournal(
  dataDir: string,
  onTrouble: (why: JournalTrouble | undefined) => void,
  clock: Clock = new SystemClock(),
  options: JournalOptions = {},
): Promise<OpenedJournal> {
  let isOpen = false;
  const told = (why: JournalTrouble | undefined): void => {
    if (isOpen) onTrouble(why);
  };
  const journal = new ThreadJournal({ dataDir: resolve(dataDir), ...options }, told, clock);
  try {
    const torn = await journal.opened.promise;
    isOpen = true;
    return { journal, records: journal.records, torn, running: readRunning(resolve(dataDir)) };
  } catch (why) {
    await journal.close(); // when this rejects, the lock is free again
    throw why;
  }
}

// ── What is on disk; shared with the writer and with recovery ────────────────────────────────────────

export interface JournalCounts {
  /** Random per ferry.db: a mark is valid only for the file that it was made for. */
  readonly file: string;
  readonly commits: number;
  readonly records: number;
  /** Sum of `task_crc` and `state_crc` over all records, modulo 2^32. */
  readonly sum: number;
  readonly top: number;
}

export const journalFile = (dataDir: string): string => join(dataDir, "ferry.db");

export const textCrc = (id: string, text: string): number => crc32(text, crc32(id));

export const tallyCrc = (tally: JournalCounts): number =>
  crc32(`${tally.file} ${tally.commits} ${tally.records} ${tally.sum} ${tally.top}`);

/** Contents of ferry.db-mark; of constant length, so that overwriting it is one write. */
export function markText(file: string, commits: number): string {
  const text = `${file} ${String(commits).padStart(16, "0")}`;
  return `${text} ${crc32(text).toString(16).padStart(8, "0")}\n`;
}

const runningFile = (dataDir: string): string => join(dataDir, "ferry.running");

/** One line, CRC first; the rest of an earlier, longer one is ignored. */
function runningNote(dataDir: string): (ids: readonly string[]) => void {
  let fd: number | undefined;
  return (ids) => {
    if (fd === undefined && ids.length === 0) return;
    const text = ids.join(" ");
    try {
      fd ??= fs.openSync(runningFile(dataDir), fs.constants.O_RDWR | fs.constants.O_CREAT, 0o600);
      fs.writeSync(fd, `${crc32(text).toString(16).padStart(8, "0")} ${text}\n`, 0);
    } catch {
      // A disk that takes no writes is detected by the journal itself.
    }
  };
}

function readRunning(dataDir: string): readonly string[] {
  const path = runningFile(dataDir);
  const [line = ""] = fs.existsSync(path) ? fs.readFileSync(path, "utf8").split("\n", 1) : [];
  const text = line.slice(9);
  return Number.parseInt(line.slice(0, 8), 16) === crc32(text) && text !== "" ? text.split(" ") : [];
}

/** The one failure that `ferry recover` is for. */
export class DamagedJournal extends Error {
  expected: number | undefined; // expected number of records; undefined if unknown
  isBetterAlone = false; // the file is intact and newer without its log
}

const BUSY = 5; // SQLite primary result code
const FULL = 13; // likewise
const CANNOT = new Set<unknown>([3, 8, 14, "EACCES", "EPERM", "EROFS"]); // permission, read-only, cannot open

const WRITE_FAILED = 778; // SQLite extended result code: write() failed
const TRUNCATE_FAILED = 1546; // ftruncate() failed
/** From probe files, and from SQLite's first access to a file. */
const REFUSED = new Set<unknown>("ENOSPC EDQUOT EROFS EFBIG EIO EACCES EPERM EMFILE ENFILE".split(" "));

/** Whether the failure is temporary and certainly nothing of its transaction counts. */
export function isPassing(error: unknown): boolean {
  const { errcode, code } = error as { errcode?: number; code?: string };
  if (errcode === undefined) return REFUSED.has(code);
  return (
    errcode === WRITE_FAILED || errcode === TRUNCATE_FAILED || [FULL, ...CANNOT].includes(errcode & 0xff)
  );
}

/** Says what is wrong with the files, for operators. */
export function explain(error: unknown, dataDir: string): Error {
  if (error instanceof DamagedJournal || !(error instanceof Error)) return error as Error;
  const { errcode, code } = error as { errcode?: number; code?: string };
  const cause = errcode === undefined ? code : errcode & 0xff;
  const said = (text: string): Error => new Error(`${text} (${error.message})`, { cause: error });
  if (cause === "EEXIST" || cause === "ENOTDIR") {
    return said(`engine.dataDir ${dataDir} is not a directory: remove the file, or set another path`);
  }
  if (cause === FULL || cause === "ENOSPC") {
    return said(`no space left to write ${journalFile(dataDir)}: free some, or move engine.dataDir`);
  }
  if (CANNOT.has(cause)) {
    return said(`cannot write in engine.dataDir ${dataDir}: give this user access, or set another path`);
  }
  return cause === undefined ? error : said(`cannot use ${journalFile(dataDir)}`);
}

/**
 * Creates `dataDir` if needed and locks it until the returned connection is closed or the process ends, however it
 * ends. Never open ferry.lock in another way: closing it would drop the kernel's lock.
 */
export function lockDataDir(dataDir: string): DatabaseSync {
  const made = fs.mkdirSync(dataDir, { recursive: true, mode: 0o700 });
  const first = made?.length ?? Infinity; // of the directories made here, the topmost
  for (let dir = dataDir; dir.length >= first; dir = dirname(dir)) syncPath(dirname(dir));
  const path = join(dataDir, "ferry.lock");
  const pidFile = join(dataDir, "ferry.pid");
  const lock = new DatabaseSync(path);
  try {
    lock.exec("PRAGMA journal_mode=MEMORY; BEGIN EXCLUSIVE"); // writes nothing, so nothing can be left behind
    fs.chmodSync(path, 0o600);
    fs.writeFileSync(pidFile, `${process.pid}\n`, { mode: 0o600 });
  } catch (error) {
    lock.close();
    if ((error as { errcode?: number }).errcode !== BUSY) throw error;
    const pid = fs.existsSync(pidFile) ? fs.readFileSync(pidFile, "utf8").trim() : "unknown";
    const why = `engine.dataDir ${dataDir} is in use by pid ${pid}: stop that Ferry, or set another path`;
    throw new Error(why, { cause: error });
  }
  return lock;
}

/** fsync of a file, or of a directory and so of the names in it. */
export function syncPath(path: string): void {
  const fd = fs.openSync(path, "r");
  try {
    fs.fsyncSync(fd);
  } finally {
    fs.closeSync(fd);
  }
}
