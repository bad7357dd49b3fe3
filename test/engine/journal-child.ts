/**
 * What the journal's tests work with: a process to be killed, and files to be damaged.
 *
 * `node journal-child.ts hold DIR` opens the journal, prints "open" and stays. `save` in its place saves,
 * updates and forgets until it is killed, and prints one line for each thing:
 *   +ID     the save of ID is confirmed
 *   ?ID     ID is about to be forgotten
 *   -ID     the forgetting of ID is confirmed
 *   broken  a write failed; it then ends
 * `full` fills the disk of DIR until a save is refused, makes room, and ends when that save's successor is confirmed.
 *
 * Damage is done to copies, made by `cp`: opening ferry.db in a process that holds the journal, and closing
 * it again, would drop the lock. `readJournal` is what runs at every start, without the thread, so that
 * thousands of damaged files can be tried in seconds.
 */
import assert from "node:assert/strict";
import { execFileSync, spawn } from "node:child_process";
import * as fs from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";
import { DatabaseSync } from "node:sqlite";

import { DamagedJournal, openJournal } from "../../src/engine/memory/journal.ts";
import type { Journal, OpenedJournal, SavedRecord } from "../../src/engine/memory/journal.ts";
import { readJournal } from "../../src/engine/memory/journal-recover.ts";

async function live(mode: string, dataDir: string): Promise<void> {
  const say = (line: string): void => void process.stdout.write(`${line}\n`); // synchronous on a pipe

  const well = Promise.withResolvers<void>();
  const { journal, records } = await openJournal(dataDir, (why) => {
    if (why === undefined) well.resolve();
  });
  say("open");

  let n = records.length + 1;
  const prefix = `${process.pid}-`;
  if (mode === "hold") return;
  if (mode === "full") return full(journal, dataDir, say, well.promise);
  while (journal.trouble === undefined) {
    const ids = Array.from({ length: 1 + (n % 7) }, () => `${prefix}${n++}`);
    for (const id of ids) journal.save(id, `task of ${id} ${"x".repeat(1 + ((n * 97) % 3000))}`, "new");
    // The first commit runs while the second group gathers: the kill falls into both.
    const saved = journal.flushed();
    try {
      await saved;
      for (const id of ids) say(`+${id}`);
      const gone = ids[0] ?? "";
      if (n % 3 === 0) {
        say(`?${gone}`);
        journal.forget(gone);
      }
      for (const id of ids.slice(1)) journal.update(id, `state of ${id}`);
      await journal.flushed();
      if (n % 3 === 0) say(`-${gone}`);
    } catch {
      say("broken");
    }
  }
  await journal.close();
}

async function full(
  journal: Journal,
  dataDir: string,
  say: (line: string) => void,
  well: Promise<void>,
): Promise<void> {
  const filler = fs.openSync(join(dataDir, "filler"), "w");
  const save = async (id: string): Promise<boolean> => {
    journal.save(id, `task of ${id} ${"x".repeat(3000)}`, "new");
    return journal.flushed().then(
      () => true,
      () => false,
    );
  };
  let n = 0;
  for (; await save(`${n}`); n++) {
    say(`+${n}`);
    try {
      fs.writeSync(filler, Buffer.alloc(4096));
    } catch {
      // Full: the journal will find out too.
    }
  }
  say("broken");
  journal.forget(`${n}`);
  fs.rmSync(join(dataDir, "filler"));
  fs.closeSync(filler);
  await well;
  if (await save("after")) say("+after");
  await journal.close();
}

if (import.meta.main) await live(process.argv[2] ?? "", process.argv[3] ?? "");

// ── Processes ─────────────────────────────────────────────────────────────────────────────────────────

export const child = import.meta.filename;

/** Starts the child and resolves with its lines when it has ended; kills it after `killAfter` of them. */
export async function runChild(mode: string, dir: string, killAfter: number): Promise<string[]> {
  const running = spawn(process.execPath, [child, mode, dir], { stdio: ["ignore", "pipe", "inherit"] });
  const lines: string[] = [];
  for await (const line of createInterface({ input: running.stdout })) {
    if (lines.push(line) === killAfter) running.kill("SIGKILL");
  }
  return lines;
}

/**
 * From here on this process can write no file, or again: RLIMIT_FSIZE, which needs no rights and no mount. Node ignores
 * SIGXFSZ, so a write() fails with EFBIG.
 */
export function setWritable(pid: number, writable: boolean): void {
  execFileSync("prlimit", ["--pid", String(pid), `--fsize=${writable ? "unlimited" : "1"}:unlimited`]);
}

// ── Files ────────────────────────────────────────────────────────────────────────────────────────────

const homes = new Map<string, string>();
let dirs = 0;

/** The name of a directory that is not there yet, in one that `cleanUp` removes. */
export function newDir(parent = tmpdir()): string {
  const home = homes.get(parent) ?? fs.mkdtempSync(join(parent, "ferry-journal-"));
  homes.set(parent, home);
  fs.chmodSync(home, 0o755); // another user must get as far as the directory that is closed to him
  return join(home, String(dirs++));
}

const opened = new Set<Journal>();

/** Also closes what a failed test left open: its thread would keep the process alive. */
export async function cleanUp(): Promise<void> {
  for (const journal of opened) await journal.close();
  for (const home of homes.values()) fs.rmSync(home, { recursive: true, force: true });
}

export async function open(dir: string): Promise<OpenedJournal> {
  const it = await openJournal(dir, (why) => assert.fail(why?.message));
  opened.add(it.journal);
  return it;
}

/** In memory where that is possible: thousands of looks at damaged files need no disk. */
export function copyOf(dir: string): string {
  const copy = newDir(fs.existsSync("/dev/shm") ? "/dev/shm" : tmpdir());
  execFileSync("cp", ["-r", dir, copy]);
  return copy;
}

export const read = (dir: string): { records: SavedRecord[]; torn: number } => {
  const records: SavedRecord[] = [];
  const { torn } = readJournal(dir, ({ id, task, state }) => records.push({ id, task, state }));
  return { records, torn };
};

export function overwrite(path: string, bytes: Buffer, at: number): void {
  const fd = fs.openSync(path, "r+");
  fs.writeSync(fd, bytes, 0, bytes.length, at);
  fs.closeSync(fd);
}

/** Flips a bit, looks, flips it back. */
export function withFlip<T>(path: string, at: number, bit: number, look: () => T): T {
  const fd = fs.openSync(path, "r+");
  const byte = Buffer.alloc(1);
  fs.readSync(fd, byte, 0, 1, at);
  const flip = (): void => {
    byte[0] = (byte[0] ?? 0) ^ (1 << bit);
    fs.writeSync(fd, byte, 0, 1, at);
  };
  flip();
  try {
    return look();
  } finally {
    flip();
    fs.closeSync(fd);
  }
}

export const bytesOf = (dir: string): Buffer[] =>
  ["ferry.db", "ferry.db-wal", "ferry.db-mark"].map((name) =>
    fs.existsSync(join(dir, name)) ? fs.readFileSync(join(dir, name)) : Buffer.alloc(0),
  );

/** What is read, or the refusal, which must say all it has to and have changed nothing. */
export function judge(dir: string): { records: SavedRecord[]; torn: number } | DamagedJournal {
  try {
    return read(dir);
  } catch (error) {
    assert.ok(error instanceof DamagedJournal, String(error));
    const said =
      /ferry\.db is damaged: .+\. Nothing was changed\. At least (\d+) of (\d+|an unk.+ of) records/s;
    const [, readable, all] = said.exec(error.message) ?? assert.fail(error.message);
    assert.ok(!(Number(readable) > Number(all)), error.message);
    assert.match(error.message, /"ferry recover -c ferry\.yaml" .* or move .*ferry\.db\* away/);
    return error;
  }
}

/** Ten commits in a log of small pages, as a crash leaves it: sizes[n] and states[n] after commit n. */
export async function tenCommits(): Promise<{ dir: string; sizes: number[]; states: SavedRecord[][] }> {
  const dir = newDir();
  await (await open(dir)).journal.close();
  const db = new DatabaseSync(join(dir, "ferry.db"));
  db.exec("PRAGMA journal_mode=DELETE; PRAGMA page_size=512; VACUUM; PRAGMA journal_mode=WAL");
  db.close();
  const { journal } = await open(dir);
  const log = join(dir, "ferry.db-wal");
  const model = new Map<string, SavedRecord>();
  const sizes = [32];
  const states: SavedRecord[][] = [[]];
  for (let n = 1; n <= 10; n++) {
    const [id, old] = [`id ${n}`, `id ${n - 1}`];
    journal.save(id, `task ${n} ${"x".repeat(n * 12)}`, "new");
    model.set(id, { id, task: `task ${n} ${"x".repeat(n * 12)}`, state: "new" });
    journal.update(old, `${n}`);
    const known = model.get(old);
    if (known !== undefined) model.set(old, { ...known, state: `${n}` });
    if (n % 4 === 0) journal.forget(`id ${n - 2}`);
    if (n % 4 === 0) model.delete(`id ${n - 2}`);
    await journal.flushed();
    sizes.push(fs.statSync(log).size);
    states.push([...model.values()]);
  }
  const copy = copyOf(dir);
  await journal.close();
  return { dir: copy, sizes, states };
}

/** Forty records, some with their outcome, in a file that was closed well. */
export async function closedJournal(): Promise<{ dir: string; records: SavedRecord[] }> {
  const dir = newDir();
  const { journal } = await open(dir);
  for (let n = 0; n < 60; n++) journal.save(`id ${n}`, `task ${n} ${"x".repeat(700 + n * 20)}`, "new");
  for (let n = 0; n < 60; n += 3) journal.forget(`id ${n}`);
  await journal.flushed();
  for (let n = 0; n < 60; n += 2) journal.update(`id ${n}`, `state ${n} ${"y".repeat(n * 200)}`);
  await journal.close();
  return { dir: copyOf(dir), records: read(dir).records };
}
