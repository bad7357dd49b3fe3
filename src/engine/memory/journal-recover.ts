/**
 * Creates, verifies and recovers the journal's files.
 *
 * `readJournal` runs at every start, on a read-only connection. A start after kill -9 is always clean: unconfirmed work
 * at the end of the log is dropped. It rejects, with a sentence that says what to do:
 *  - a broken structure of ferry.db (PRAGMA quick_check), an altered record (its CRCs) and, because the tally holds
 *    count and sum of all CRCs, a missing, stale or resurrected record;
 *  - damage inside ferry.db-wal. SQLite reads up to the first bad frame and silently drops the rest, or all if the
 *    header is bad. So frames are checked here too: frames of the same log behind the bad one, with more than one
 *    commit among them, were confirmed. A crash cannot cause that: only one transaction at a time is unconfirmed, and
 *    the writer starts a new log at open;
 *  - a missing log, and an old ferry.db put back: ferry.db-mark knows of more commits.
 * It accepts a log whose end is cut or whose last transaction is bad: all before it is there; `torn` says how many
 * confirmed commits are missing by the mark. Undetectable: ferry.db, log and mark all replaced by an older set; damage
 * that keeps a CRC32 and the sum (1 in 2^32); after a power cut, when the mark may lag, that the last transaction of
 * the log was confirmed.
 *
 * `recoverJournal` copies what is readable into a new file: records from the front up to the damage, from the back down
 * to it, and one by one between, if their CRCs hold. A bad first page is replaced, in a copy, by a new one (it is equal
 * in every journal). Of a damaged log it takes what is before the damage, so a state may be stale and tasks may run
 * again. A crash loses nothing: once ferry.db-new is complete and renamed to ferry.db-recovered, the next start
 * finishes the move of ferry.db and its log to ferry.db.damaged-N, and of ferry.db-recovered to ferry.db.
 */
import { randomUUID } from "node:crypto";
import * as fs from "node:fs";
import { dirname, resolve } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { pathToFileURL } from "node:url";

import { DamagedJournal, explain, journalFile, lockDataDir, markText, syncPath } from "./journal.ts";
import { tallyCrc, textCrc, type JournalCounts } from "./journal.ts";

const FORMAT = 1; // PRAGMA user_version; raise it when the tables change
const APPLICATION_ID = 0x46657279; // PRAGMA application_id: "Fery"
/** Measured: 2 KB records, 1.5 times as fast as with 4 KB; 16 KB doubles what a lone commit writes. */
const PAGE_SIZE = 8192;
const TABLES = `
  CREATE TABLE record (seq INTEGER PRIMARY KEY, id TEXT NOT NULL, task TEXT NOT NULL, state TEXT NOT NULL,
    task_crc INTEGER NOT NULL, state_crc INTEGER NOT NULL) STRICT;
  CREATE TABLE tally (one INTEGER PRIMARY KEY, file TEXT NOT NULL, commits INTEGER NOT NULL,
    records INTEGER NOT NULL, sum INTEGER NOT NULL, top INTEGER NOT NULL, crc INTEGER NOT NULL) STRICT;`;
const PROBES = 1000; // how far to look for records behind damage when their end is unknown
const ROWS = "SELECT seq, id, task, state, task_crc, state_crc FROM record";

export interface JournalRow {
  readonly seq: number;
  readonly id: string;
  readonly task: string;
  readonly state: string;
  readonly task_crc: number;
  readonly state_crc: number;
}

function writeTally(db: DatabaseSync, tally: JournalCounts): void {
  const { file, commits, records, sum, top } = tally;
  const write = db.prepare("INSERT OR REPLACE INTO tally VALUES (1, ?, ?, ?, ?, ?, ?)");
  write.run(file, commits, records, sum, top, tallyCrc(tally));
}

/** Makes an empty journal under a temporary name; the caller closes and renames it. */
export function createFile(path: string): DatabaseSync {
  for (const ending of ["", "-wal", "-shm", "-journal"]) fs.rmSync(path + ending, { force: true });
  fs.closeSync(fs.openSync(path, "wx", 0o600)); // SQLite would make it readable for all
  const db = new DatabaseSync(path);
  db.exec(`PRAGMA page_size=${PAGE_SIZE}; PRAGMA journal_mode=WAL; PRAGMA synchronous=FULL;`);
  db.exec(`PRAGMA application_id=${APPLICATION_ID}; PRAGMA user_version=${FORMAT};${TABLES}`);
  writeTally(db, { file: randomUUID(), commits: 0, records: 0, sum: 0, top: 0 });
  return db;
}

export function renameSafely(from: string, to: string): void {
  syncPath(from);
  fs.renameSync(from, to);
  syncPath(dirname(to));
}

export const sizeOf = (path: string): number => fs.statSync(path, { throwIfNoEntry: false })?.size ?? 0;

/** Reads every record, in order, and the tally; throws DamagedJournal if anything confirmed is wrong. */
export function readJournal(
  dataDir: string,
  visit: (row: JournalRow) => void,
): { tally: JournalCounts; torn: number } {
  const file = journalFile(dataDir);
  const log = readLog(`${file}-wal`);
  const { tally, found } = withView(file, (db) => {
    refuseNewer(db, file);
    return examine(db, visit);
  });
  const missing = tally === undefined ? 0 : Math.max(0, readMark(file, tally.file) - tally.commits);
  const suspect = found.length + missing > 0 || log === "no header" || (log !== "none" && log.behind > 0);
  const alone = suspect && isBetterAlone(file, tally);
  const ofLog = judgeLog(log, missing, alone);
  if (tally !== undefined && found.length === 0 && ofLog === undefined) return { tally, torn: missing };
  const readable = withView(file, (db) => salvage(db, () => {}), alone);
  const expected = alone ? readable : ofLog === undefined ? tally?.records : undefined; // a bad log: unknown
  const why = new DamagedJournal(
    `${file} is damaged: ${[...found, ofLog ?? []].flat().join("; ")}. Nothing was changed. ` +
      `At least ${readable} of ${expected ?? "an unknown number of"} records are readable. ` +
      `Run "ferry recover -c ferry.yaml" to copy them into a new file and keep the damaged one beside it, ` +
      `or move ${file}* away to start empty.`,
  );
  throw Object.assign(why, { expected, isBetterAlone: alone });
}

function judgeLog(log: Log, missing: number, alone: boolean): string | undefined {
  if (log === "no header") return "the header of its log is bad";
  if (log === "none") return missing > 0 ? `its log is gone, with ${missing} confirmed commits` : undefined;
  const behind = Math.max(log.commits, missing);
  if (log.behind > 0 && behind > 1) return `its log is bad in the middle, with ${behind} commits behind that`;
  return missing > 0 && alone ? "its log is bad, though the file alone is whole" : undefined;
}

/** Opens the file for reading, with its log unless `alone`, and leaves nothing behind. */
function withView<T>(file: string, use: (db: DatabaseSync) => T, alone = false): T {
  const url = pathToFileURL(file);
  if (alone) url.searchParams.set("immutable", "1");
  const db = new DatabaseSync(url, { readOnly: true });
  try {
    return use(db);
  } finally {
    db.close(); // a read-only connection does not fold the log in
    fs.rmSync(`${file}-shm`, { force: true });
  }
}

function refuseNewer(db: DatabaseSync, file: string): void {
  let version = 0;
  try {
    version = Number(db.prepare("PRAGMA user_version").get()?.["user_version"]);
  } catch {
    return; // `examine` gives the details
  }
  if (version > FORMAT) {
    throw new Error(
      `${file} has format ${version}, from a newer Ferry; this one reads ${FORMAT}: ` +
        `start the newer one, or move ${file}* away to start empty`,
    );
  }
}

function examine(
  db: DatabaseSync,
  visit: (row: JournalRow) => void,
): { tally: JournalCounts | undefined; found: string[] } {
  const found: string[] = [];
  const attempt = (look: () => void): void => {
    try {
      look();
    } catch (error) {
      found.push((error as Error).message);
    }
  };
  const tally = readTally(db);
  if (tally === undefined) found.push("its tally cannot be read");
  attempt(() => {
    const id = db.prepare("PRAGMA application_id").get()?.["application_id"];
    if (id !== APPLICATION_ID) found.push("its first page is bad, or it is no journal of Ferry's");
  });
  attempt(() => {
    for (const row of db.prepare("PRAGMA quick_check(3)").all()) {
      if (row["quick_check"] !== "ok") found.push(String(row["quick_check"]).replaceAll("\n", " "));
    }
  });
  attempt(() => found.push(...examineRows(db, tally, visit)));
  return { tally, found: [...new Set(found)] };
}

function examineRows(
  db: DatabaseSync,
  tally: JournalCounts | undefined,
  visit: (row: JournalRow) => void,
): string[] {
  let bad = 0;
  let records = 0;
  let sum = 0;
  for (const raw of db.prepare(`${ROWS} ORDER BY seq`).iterate()) {
    const row = goodRow(raw);
    records++;
    if (row === undefined) {
      bad++;
      continue;
    }
    sum = (sum + row.task_crc + row.state_crc) >>> 0;
    visit(row);
  }
  if (bad > 0) return [`${bad} records fail their checksum`];
  if (tally === undefined || (records === tally.records && sum === tally.sum)) return [];
  return [`its ${records} records are not the ${tally.records} last confirmed`];
}

function goodRow(raw: Record<string, unknown>): JournalRow | undefined {
  const row = raw as unknown as JournalRow;
  if (typeof row.id !== "string" || typeof row.task !== "string" || typeof row.state !== "string") return;
  if (textCrc(row.id, row.task) !== row.task_crc || textCrc(row.id, row.state) !== row.state_crc) return;
  return row;
}

function readTally(db: DatabaseSync): JournalCounts | undefined {
  try {
    const row = db.prepare("SELECT file, commits, records, sum, top, crc FROM tally WHERE one = 1").get();
    const tally = row as unknown as (JournalCounts & { readonly crc: number }) | undefined;
    return tally !== undefined && tallyCrc(tally) === tally.crc ? tally : undefined;
  } catch {
    return undefined;
  }
}

/** Whether the file is intact and newer without its log: the log was folded in, and its damage would revert that. */
function isBetterAlone(file: string, logged: JournalCounts | undefined): boolean {
  const { tally, found } = withView(file, (db) => examine(db, () => {}), true);
  return found.length === 0 && tally !== undefined && tally.commits > (logged?.commits ?? -1);
}

/** Last confirmed commit by the mark; 0 if it is missing, bad or of another file. */
function readMark(file: string, identity: string): number {
  const path = `${file}-mark`;
  const text = fs.existsSync(path) ? fs.readFileSync(path, "utf8") : "";
  const commits = Number(text.split(" ")[1]);
  return text === markText(identity, commits) ? commits : 0;
}

/** Frames of this log behind the first bad one, and commits among those and the bad one. */
type Log = "none" | "no header" | { readonly behind: number; readonly commits: number };

/** Reads the log as SQLite does (https://sqlite.org/fileformat2.html#walformat), and then further. */
function readLog(path: string): Log {
  if (sizeOf(path) < 32) return "none";
  const bytes = fs.readFileSync(path);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const little = view.getUint32(0) === 0x377f0682;
  let [s0, s1] = [0, 0];
  const add = (from: number, to: number): void => {
    for (let at = from; at < to; at += 8) {
      s0 = (s0 + view.getUint32(at, little) + s1) >>> 0;
      s1 = (s1 + view.getUint32(at + 4, little) + s0) >>> 0;
    }
  };
  const sumIsAt = (at: number): boolean => s0 === view.getUint32(at) && s1 === view.getUint32(at + 4);
  add(0, 24);
  if ((view.getUint32(0) | 1) !== 0x377f0683 || !sumIsAt(24)) return "no header";
  const frame = 24 + view.getUint32(8);
  const ours = (at: number): boolean => view.getBigUint64(at + 8) === view.getBigUint64(16);
  let at = 32;
  for (; at + frame <= bytes.length && ours(at); at += frame) {
    add(at, at + 8);
    add(at + 24, at + frame);
    if (!sumIsAt(at + 16)) break;
  }
  let [behind, commits] = [0, 0];
  for (const bad = at; at + frame <= bytes.length; at += frame) {
    if (!ours(at)) continue;
    if (at > bad) behind++;
    if (view.getUint32(at + 4) !== 0) commits++;
  }
  return { behind, commits };
}

export interface Recovery {
  readonly file: string;
  /** In ferry.db now. */
  readonly records: number;
  /** Expected but unreadable; undefined if the expected number is unknown. */
  readonly lost: number | undefined;
  /** New path of the damaged file; undefined if nothing was wrong and nothing was done. */
  readonly keptAs: string | undefined;
}

/** Replaces a damaged journal by its readable records. Ferry must not be running. */
export function recoverJournal(dataDir: string): Recovery {
  const file = journalFile(resolve(dataDir));
  let lock: DatabaseSync | undefined;
  try {
    lock = lockDataDir(dirname(file));
    finishRecovery(file);
    if (!fs.existsSync(file)) throw new Error(`there is no ${file}: nothing to recover`);
    try {
      const { tally } = readJournal(dirname(file), () => {});
      return { file, records: tally.records, lost: 0, keptAs: undefined };
    } catch (error) {
      if (!(error instanceof DamagedJournal)) throw error;
      const { records, lost } = copyReadable(file, error);
      renameSafely(`${file}-new`, `${file}-recovered`);
      return { file, records, lost, keptAs: finishRecovery(file) };
    }
  } catch (error) {
    throw explain(error, dirname(file));
  } finally {
    lock?.close();
  }
}

/** Once ferry.db-recovered exists it is the journal, and the file in its place is the damaged one. */
export function finishRecovery(file: string): string | undefined {
  if (!fs.existsSync(`${file}-recovered`)) return undefined;
  let n = 1;
  while (fs.existsSync(`${file}.damaged-${n}`)) n++;
  const kept = `${file}.damaged-${n}`;
  // The log first: it is named after the file and must never meet the new one.
  if (fs.existsSync(`${file}-wal`)) fs.renameSync(`${file}-wal`, `${kept}-wal`);
  if (fs.existsSync(file)) fs.renameSync(file, kept);
  renameSafely(`${file}-recovered`, file);
  return kept;
}

function copyReadable(file: string, damage: DamagedJournal): Pick<Recovery, "records" | "lost"> {
  const copy = (from: DatabaseSync): number => copyRows(from, `${file}-new`);
  let records = withView(file, copy, damage.isBetterAlone);
  const { expected } = damage;
  if (expected === undefined || records < expected) {
    const mended = mendFirstPage(file);
    try {
      const better = withView(mended, (db) => salvage(db, () => {})) > records;
      if (better) records = withView(mended, copy);
    } finally {
      for (const ending of ["", "-wal"]) fs.rmSync(mended + ending, { force: true });
    }
  }
  return { records, lost: expected === undefined ? undefined : Math.max(0, expected - records) };
}

/** A copy of file and log with a new first page: header and tables, which never change. */
function mendFirstPage(file: string): string {
  const mended = `${file}-mended`;
  const fresh = `${mended}-page`;
  createFile(fresh).close();
  const page = fs.readFileSync(fresh).subarray(0, PAGE_SIZE);
  fs.rmSync(fresh);
  page.writeUInt32BE(Math.floor(sizeOf(file) / PAGE_SIZE), 28);
  fs.copyFileSync(file, mended, fs.constants.COPYFILE_FICLONE);
  fs.rmSync(`${mended}-wal`, { force: true });
  if (sizeOf(`${file}-wal`) > 0) fs.copyFileSync(`${file}-wal`, `${mended}-wal`);
  const fd = fs.openSync(mended, "r+");
  fs.writeSync(fd, page, 0, page.length, 0);
  fs.closeSync(fd);
  return mended;
}

function copyRows(from: DatabaseSync, path: string): number {
  const to = createFile(path);
  to.exec("BEGIN");
  const insert = to.prepare("INSERT OR REPLACE INTO record VALUES (?, ?, ?, ?, ?, ?)");
  salvage(from, (row) => {
    insert.run(row.seq, row.id, row.task, row.state, row.task_crc, row.state_crc);
  });
  to.exec("DELETE FROM record WHERE seq NOT IN (SELECT max(seq) FROM record GROUP BY id)");
  const counted = to
    .prepare(
      `SELECT count(*) AS records, ifnull(max(seq), 0) AS top,
         ifnull(sum(task_crc + state_crc), 0) % 4294967296 AS sum FROM record`,
    )
    .get() as unknown as Pick<JournalCounts, "records" | "top" | "sum">;
  writeTally(to, { file: randomUUID(), commits: 1, ...counted });
  to.exec("COMMIT");
  to.close();
  return counted.records;
}

/** Visits each record whose CRCs hold, around damage, unordered; returns their number. */
function salvage(db: DatabaseSync, visit: (row: JournalRow) => void): number {
  const top = readTally(db)?.top;
  let [readable, next, end] = [0, 1, Infinity];
  /** True if the end was reached; false if `meet` stopped it or at damage. */
  const walk = (order: "ASC" | "DESC", meet: (seq: number) => boolean): boolean => {
    try {
      for (const raw of db.prepare(`${ROWS} WHERE seq >= ? ORDER BY seq ${order}`).iterate(next)) {
        const seq = raw["seq"] as number;
        if (seq > (top ?? Infinity)) continue; // never assigned: the number is damaged
        if (!meet(seq)) return false;
        const row = goodRow(raw);
        if (row === undefined) continue;
        visit(row);
        readable++;
      }
      return true;
    } catch {
      return false;
    }
  };
  // A damaged tree can contain cycles: only rows further on count.
  const up = (seq: number): boolean => {
    if (seq < next) return false;
    next = Math.min(seq + 1, end);
    return seq < end;
  };
  if (walk("ASC", up)) return readable;
  walk("DESC", (seq) => {
    if (seq < next || seq >= end) return false;
    end = seq;
    return true;
  });
  if (end === Infinity) end = (top ?? next + PROBES) + 1;
  for (; next < end; next++) if (walk("ASC", up)) break;
  return readable;
}
