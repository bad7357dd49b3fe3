/** The journal on real files: killed, cut, flipped, full and locked. */
import assert from "node:assert/strict";
import { spawn, spawnSync } from "node:child_process";
import { EventEmitter, once } from "node:events";
import * as fs from "node:fs";
import { join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import { after, test } from "node:test";
import fc from "fast-check";

import { DamagedJournal, isPassing, JournalTrouble, openJournal } from "../../src/engine/memory/journal.ts";
import type { Journal, SavedRecord } from "../../src/engine/memory/journal.ts";
import { recoverJournal } from "../../src/engine/memory/journal-recover.ts";
import { child, cleanUp, closedJournal, overwrite, runChild, setWritable } from "./journal-child.ts";
import { usually } from "../fixtures/long.ts";
import { bytesOf, copyOf, judge, newDir, open, read, tenCommits, withFlip } from "./journal-child.ts";

after(cleanUp);
/** Opens, compares, closes. */
async function expectRecords(dir: string, expected: readonly SavedRecord[]): Promise<void> {
  const { journal, records } = await open(dir);
  await journal.close();
  assert.deepEqual(records, expected);
}

function commitsOf(dir: string): unknown {
  const db = new DatabaseSync(join(dir, "ferry.db"), { readOnly: true });
  const row = db.prepare("SELECT commits FROM tally").get();
  db.close();
  return row?.["commits"];
}

void test("keeps records, in order, over a restart", async () => {
  const dir = join(newDir(), "deep", "er");
  const { journal, records, torn } = await open(dir);
  assert.deepEqual([records, torn], [[], 0]);
  journal.save("a", "task a \u0000 é 漢 🚢", "1");
  journal.save("b", "task b", "1");
  await journal.flushed();
  journal.save("c", "task c", "1");
  journal.update("a", "2");
  journal.update("nobody", "2");
  journal.forget("b");
  journal.forget("nobody");
  journal.save("d", "task d", "1");
  journal.forget("d");
  journal.update("d", "2");
  await journal.close();
  await journal.close();
  assert.throws(() => journal.save("e", "", ""), /closed/);
  assert.equal(fs.statSync(dir).mode & 0o777, 0o700);
  for (const name of fs.readdirSync(dir))
    assert.equal(fs.statSync(join(dir, name)).mode & 0o777, 0o600, name);
  await expectRecords(dir, [
    { id: "a", task: "task a \u0000 é 漢 🚢", state: "2" },
    { id: "c", task: "task c", state: "1" },
  ]);
});

void test("gathers one turn of the loop into one commit, what comes meanwhile into the next", async () => {
  const dir = newDir();
  const { journal } = await open(dir);
  for (let n = 0; n < 1000; n++) journal.save(`first ${n}`, "x".repeat(100), "");
  assert.ok(journal.pendingBytes > 100_000);
  const first = journal.flushed();
  await new Promise((resolve) => setImmediate(resolve)); // the first group is on its way
  for (let n = 0; n < 500; n++) journal.save(`second ${n}`, "", "");
  await new Promise((resolve) => setImmediate(resolve));
  for (let n = 0; n < 500; n++) journal.forget(`second ${n}`);
  await Promise.all([first, journal.flushed()]);
  assert.equal(journal.pendingBytes, 0);
  const large = "y".repeat(1024 * 1024);
  for (let n = 0; n < 12; n++) journal.save(`large ${n}`, large, ""); // sealed at 1 MB: twelve groups
  await journal.close();
  assert.ok([14, 15].includes(Number(commitsOf(dir))), `commits: ${String(commitsOf(dir))}`);
  const { journal: again, records } = await open(dir);
  await again.close();
  assert.equal(records.length, 1012);
});

void test("who runs in the process is known after a crash, and nobody after a stop", async () => {
  const dir = newDir();
  const { journal, running } = await open(dir);
  assert.deepEqual(running, []);
  const afterCrash = async (harm: (file: string) => void = () => {}): Promise<readonly string[]> => {
    const copy = copyOf(dir);
    harm(join(copy, "ferry.running"));
    const next = await open(copy);
    await next.journal.close();
    return next.running;
  };
  journal.running([]);
  assert.ok(!fs.existsSync(join(dir, "ferry.running")), "only where something runs in the process");
  for (const ids of [["a"], ["a", "b", "c"], ["b"], []]) {
    journal.running(ids);
    assert.deepEqual(await afterCrash(), ids);
  }
  journal.running(["a", "b"]);
  assert.deepEqual(await afterCrash((file) => overwrite(file, Buffer.from("x"), 9)), []);
  assert.deepEqual(await afterCrash((file) => fs.truncateSync(file, 5)), []);
  await journal.close();
  assert.deepEqual(await afterCrash(), []);
});

/** The bits of a byte that are flipped. */
const BITS = usually([0, 3, 7], [0, 1, 2, 3, 4, 5, 6, 7]);

type Step = readonly ["save" | "update" | "forget" | "flush" | "reopen", string, string];

void test("is a Map that survives", async () => {
  const kinds = fc.constantFrom<Step[0][]>("save", "save", "update", "update", "forget", "flush", "reopen");
  const step: fc.Arbitrary<Step> = fc.tuple(kinds, fc.constantFrom("a", "b", "c", "d"), fc.string());
  const property = fc.asyncProperty(fc.array(step, { maxLength: 60 }), async (steps) => {
    const dir = newDir();
    const model = new Map<string, SavedRecord>();
    let { journal } = await open(dir);
    const act: Record<Step[0], (id: string, text: string) => Promise<void> | void> = {
      save: (id, text) => {
        journal.save(id, text, "new");
        model.delete(id);
        model.set(id, { id, task: text, state: "new" });
      },
      update: (id, text) => {
        journal.update(id, text);
        const known = model.get(id);
        if (known !== undefined) model.set(id, { ...known, state: text });
      },
      forget: (id) => {
        journal.forget(id);
        model.delete(id);
      },
      flush: () => journal.flushed(),
      reopen: async () => {
        await journal.close();
        const opened = await open(dir);
        assert.deepEqual(opened.records, [...model.values()]);
        ({ journal } = opened);
      },
    };
    for (const [kind, id, text] of [...steps, ["reopen", "", ""] as const]) await act[kind](id, text);
    await journal.close();
  });
  await fc.assert(property, { numRuns: 20 });
});

void test("kill -9 loses nothing that was confirmed, and is never taken for damage", async () => {
  const dir = newDir();
  const saved = new Set<string>();
  const gone = new Set<string>();
  for (const killAfter of [1, 2, 60, 333, 1000, 2500]) {
    const maybeGone = new Set<string>();
    for (const line of await runChild("save", dir, killAfter)) {
      const id = line.slice(1);
      if (line.startsWith("+")) saved.add(id);
      if (line.startsWith("?")) maybeGone.add(id);
      if (line.startsWith("-")) gone.add(id);
    }
    const { journal, records, torn } = await open(dir);
    await journal.close();
    assert.equal(torn, 0);
    const there = new Map(records.map((record) => [record.id, record]));
    for (const id of saved) {
      if (gone.has(id)) assert.ok(!there.has(id), `${id} came back`);
      else if (maybeGone.has(id) && !there.has(id)) gone.add(id);
      else assert.ok(there.get(id)?.task.startsWith(`task of ${id} x`) ?? false, `${id} is lost`);
    }
    for (const { id, state } of records) assert.ok(state === "new" || state === `state of ${id}`);
  }
  assert.ok(saved.size > 1000);
});

void test("one process at a time; a killed one leaves no lock behind", async () => {
  const dir = newDir();
  const holder = spawn(process.execPath, [child, "hold", dir], { stdio: ["ignore", "pipe", "inherit"] });
  const ended = new Promise((resolve) => holder.once("close", resolve));
  await new Promise((resolve) => holder.stdout.once("data", resolve));
  const inUse = new RegExp(`dataDir ${dir} is in use by pid ${holder.pid}:`);
  await assert.rejects(open(dir), inUse);
  assert.throws(() => recoverJournal(dir), inUse);
  holder.kill("SIGKILL");
  await ended;
  const { journal } = await open(dir);
  await assert.rejects(open(dir), new RegExp(`in use by pid ${process.pid}:`));
  journal.save("a", "", "");
  await journal.close();
});

void test("says what is wrong with the directory", async () => {
  const dir = newDir();
  fs.writeFileSync(dir, "");
  await assert.rejects(open(dir), /dataDir .* is not a directory: remove/);
  await assert.rejects(open(join(dir, "below")), /is not a directory: remove/);
  // Root may write anywhere, so another user tries; whoever is not root tries himself.
  const closed = newDir();
  fs.mkdirSync(closed, { mode: 0o555 });
  const nobody = process.getuid?.() === 0 ? { uid: 65534, gid: 65534 } : {};
  const { stderr } = spawnSync(process.execPath, [child, "save", closed], { ...nobody, encoding: "utf8" });
  assert.match(stderr, /cannot write in engine\.dataDir .*: give this user access/);
  const lone = newDir();
  fs.mkdirSync(lone);
  fs.writeFileSync(join(lone, "ferry.db-wal"), "x");
  await assert.rejects(open(lone), /ferry\.db is missing but its log .*-wal is there: put/);
});

void test("refuses the file of a newer Ferry", async () => {
  const dir = newDir();
  await (await open(dir)).journal.close();
  const db = new DatabaseSync(join(dir, "ferry.db"));
  db.exec("PRAGMA user_version=2");
  db.close();
  const newer = /ferry\.db has format 2, from a newer Ferry; this one reads 1: start the newer one, or move/;
  await assert.rejects(open(dir), newer);
  assert.throws(() => recoverJournal(dir), newer);
});

/** Saves until it breaks; returns what was confirmed. */
async function fill(journal: Journal, broken: unknown[]): Promise<string[]> {
  const confirmed: string[] = [];
  for (let n = 0; n < 5000 && broken.length === 0; n++) {
    journal.save(`id ${n}`, "x".repeat(2000), "");
    await journal.flushed().then(
      () => confirmed.push(`id ${n}`),
      (why: unknown) => assert.equal(why, journal.trouble),
    );
  }
  journal.save("late", "", "");
  await assert.rejects(journal.flushed(), journal.trouble);
  await journal.close();
  assert.deepEqual([broken.length, broken[0]], [1, journal.trouble]);
  return confirmed;
}

async function expectFull(dir: string, options: { maxPages?: number }): Promise<void> {
  const broken: (Error | undefined)[] = [];
  const { journal } = await openJournal(dir, (why) => broken.push(why), undefined, options);
  const confirmed = await fill(journal, broken);
  assert.match(String(broken[0]?.message), /no space left to write .*ferry\.db: free some/);
  assert.ok(confirmed.length > 10);
  const ids = read(dir).records.map(({ id }) => id);
  assert.deepEqual(ids.slice(0, confirmed.length), confirmed); // the one that failed may be there
}

void test("a full disk is trouble, and what was confirmed is there", async () => {
  await expectFull(newDir(), { maxPages: 20 });
});

/** Runs the child until it breaks, and looks for everything that it called confirmed in `dir`. */
function expectConfirmed(script: string, mount: string, dir: string, last = ""): void {
  const { stdout, status } = spawnSync("bash", ["-c", script, process.execPath, child, mount, dir], {
    encoding: "utf8",
  });
  if (status === 9) return; // no mounts here: the limits above and below must do
  assert.match(stdout, /\nbroken\n/);
  const lines = stdout.split("\n");
  const there = new Set(read(dir).records.map(({ id }) => id));
  const forgotten = new Set(lines.filter((line) => /^[?-]/.test(line)).map((line) => line.slice(1)));
  const saved = lines.filter((line) => line.startsWith("+")).map((line) => line.slice(1));
  assert.ok(saved.length > 10);
  if (last !== "") assert.deepEqual([saved.at(-1), there.size], [last, saved.length]);
  for (const id of saved) assert.ok(there.has(id) || forgotten.has(id), `${id} is lost`);
}

void test("a really full disk, and a failing write", () => {
  // A limit on the size of files is an I/O error to SQLite.
  const limited = newDir();
  expectConfirmed(`trap '' XFSZ; ulimit -f 200; "$0" "$1" save "$2"`, limited, limited);
  // In a mount namespace of its own, so that no mount can be left behind.
  const [mount, dir] = [newDir(), newDir()];
  fs.mkdirSync(mount);
  const tiny = `mount -t tmpfs -o size=1m none "$1" || exit 9; "$2" "$3" save "$1"; cp -r "$1" "$4"`;
  expectConfirmed(`unshare -rm bash -c '${tiny}' - "$2" "$0" "$1" "$3" || exit 9`, mount, dir);
  // The same disk with room again: the journal goes on, and what was refused is not there.
  const after = newDir();
  const roomy = tiny.replace("size=1m", "size=16m").replace("save", "full");
  expectConfirmed(`unshare -rm bash -c '${roomy}' - "$2" "$0" "$1" "$3" || exit 9`, mount, after, "after");
});

void test("goes on when the disk takes writes again: kept changes are written, refused ones never", async () => {
  const dir = newDir();
  const told = new EventEmitter();
  const { journal } = await openJournal(dir, (why) => told.emit(why === undefined ? "well" : "trouble", why));
  for (const id of ["kept", "gone"]) journal.save(id, "task", "new");
  await journal.flushed();
  const expected: SavedRecord[] = [];
  try {
    // Three times, each with a log that was cut off in the middle of a group.
    for (const round of ["1", "2", "3"]) {
      const trouble = once(told, "trouble");
      setWritable(process.pid, false);
      journal.save(`refused ${round}`, "x".repeat(100_000), "new");
      await assert.rejects(journal.flushed(), { lasting: false, message: /ferry\.db/ });
      await trouble;
      journal.forget(`refused ${round}`); // its caller was told 503
      journal.update("kept", `ended in ${round}`);
      journal.forget("gone");
      await assert.rejects(journal.flushed(), JournalTrouble);
      assert.ok(journal.pendingBytes > 0);
      const well = once(told, "well");
      setWritable(process.pid, true);
      await well;
      assert.equal(journal.pendingBytes, 0);
      journal.save(`after ${round}`, "task", "new");
      await journal.flushed();
      expected.push({ id: `after ${round}`, task: "task", state: "new" });
      // As kill -9 would leave it: no damage, and no refused record behind the last commit.
      const records = [{ id: "kept", task: "task", state: `ended in ${round}` }, ...expected];
      assert.deepEqual(judge(copyOf(dir)), { records, torn: 0 });
    }
  } finally {
    setWritable(process.pid, true);
    await journal.close();
  }
});

void test("owes the disk nothing when changes of several groups were taken back while it was full", async () => {
  const told = new EventEmitter();
  const { journal } = await openJournal(newDir(), (why) => told.emit(why === undefined ? "well" : "trouble"));
  const ids = Array.from({ length: 40 }, (_, n) => `refused ${n}`);
  try {
    const trouble = once(told, "trouble");
    setWritable(process.pid, false);
    // More than one group, all said while the first is on its way.
    for (const id of ids) journal.save(id, "x".repeat(100_000), "new");
    await trouble;
    for (const id of ids) journal.forget(id);
    const well = once(told, "well");
    setWritable(process.pid, true);
    await well;
    assert.equal(journal.pendingBytes, 0);
  } finally {
    setWritable(process.pid, true);
    await journal.close();
  }
});

void test("does not go on when its files are gone or are not what it wrote", async () => {
  for (const harm of [
    (dir: string) => fs.rmSync(dir, { recursive: true }),
    (dir: string) => fs.renameSync(join(dir, "ferry.db"), join(dir, "away")),
  ]) {
    const dir = newDir();
    const told: (JournalTrouble | undefined)[] = [];
    const { journal } = await openJournal(dir, (why) => told.push(why));
    journal.save("a", "task", "new");
    await journal.flushed();
    harm(dir);
    journal.save("b", "task", "new");
    await assert.rejects(journal.flushed(), { lasting: true, message: /deleted, moved or replaced/ });
    await assert.rejects(journal.flushed(), JournalTrouble);
    await journal.close();
    assert.equal(told.length, 1);
  }
});

void test("which failures can pass: a write that was refused, never an fsync", () => {
  const sqlite = (errcode: number) => Object.assign(new Error("disk I/O error"), { errcode });
  const system = (code: string) => Object.assign(new Error(code), { code });
  for (const error of [sqlite(13), sqlite(778), sqlite(8), system("ENOSPC"), system("EROFS"), system("EIO")])
    assert.ok(isPassing(error), String(error));
  // IOERR_FSYNC, IOERR_DIR_FSYNC, CORRUPT, NOTADB; a folder that is gone; a bug.
  for (const error of [
    sqlite(1034),
    sqlite(1290),
    sqlite(11),
    sqlite(26),
    system("ENOENT"),
    new TypeError("x"),
  ])
    assert.ok(!isPassing(error), String(error));
});

// ── Damage ───────────────────────────────────────────────────────────────────────────────────────────

void test("a log cut anywhere in its last three commits keeps all before the cut", async () => {
  const { dir, sizes, states } = await tenCommits();
  const log = join(dir, "ferry.db-wal");
  let whole = 10;
  for (let size = sizes[10] ?? 0; size >= (sizes[7] ?? 0); size -= size === sizes[10] ? 1 : usually(3, 1)) {
    fs.truncateSync(log, size);
    while ((sizes[whole] ?? 0) > size) whole--;
    assert.deepEqual(judge(dir), { records: states[whole], torn: 10 - whole }, `cut at ${size}`);
  }
  assert.equal(whole, 7);
  const { journal, records, torn } = await open(dir);
  assert.deepEqual({ records, torn }, { records: states[7], torn: 3 });
  assert.equal(fs.statSync(log).size, 0, "what is left of the old log must not lie behind the new one");
  await journal.close();
  assert.deepEqual(read(dir), { records: states[7], torn: 0 });
});

void test("a flipped bit in the log drops the last commit or is reported, no more in silence", async () => {
  const { dir, sizes, states } = await tenCommits();
  const log = join(dir, "ferry.db-wal");
  const before = bytesOf(dir);
  const last = sizes[9] ?? 0;
  const end = sizes[10] ?? 0;
  for (let at = 0; at < end; at += at < 32 || (at > (sizes[7] ?? 0) && (at - 32) % 536 < 24) ? 1 : 101) {
    for (const bit of BITS) {
      const found = withFlip(log, at, bit, () => judge(dir));
      // A flip in bytes 4 to 7 of a frame can make it look like one more commit: then it is better to ask.
      const isAsked = at < last || (found instanceof DamagedJournal && ((at - 32) % 536) >> 2 === 1);
      if (isAsked) assert.ok(found instanceof DamagedJournal, `byte ${at} bit ${bit}`);
      else assert.deepEqual(found, { records: states[9], torn: 1 }, `byte ${at} bit ${bit}`);
    }
  }
  assert.deepEqual(bytesOf(dir), before);
  const copy = copyOf(dir);
  const recovery = withFlip(join(copy, "ferry.db-wal"), (sizes[6] ?? 0) - 9, 3, () => recoverJournal(copy));
  assert.deepEqual(recovery.lost, undefined, "nobody knows what the log held");
  assert.deepEqual(read(copy), { records: states[5], torn: 0 });
  // Without the mark (or with one that lags, after a power cut) the frames alone must tell.
  fs.rmSync(join(dir, "ferry.db-mark"));
  for (let at = 0; at < (sizes[9] ?? 0); at += 97) {
    const found = withFlip(log, at, at % 8, () => judge(dir));
    assert.ok(found instanceof DamagedJournal, `byte ${at} without the mark`);
  }
});

void test("damage in a log that was folded in already does not turn the file back", async () => {
  const { dir, sizes, states } = await tenCommits();
  const db = new DatabaseSync(join(dir, "ferry.db"));
  db.exec("PRAGMA wal_checkpoint(PASSIVE)");
  const folded = copyOf(dir);
  db.close();
  assert.deepEqual(judge(folded), { records: states[10], torn: 0 });
  for (let at = 0; at < (sizes[10] ?? 0); at += usually(71, 23)) {
    const found = withFlip(join(folded, "ferry.db-wal"), at, at % 8, () => judge(folded));
    assert.ok(found instanceof DamagedJournal, `byte ${at}`);
    if (at % 10 !== 0) continue;
    const copy = copyOf(folded);
    withFlip(join(copy, "ferry.db-wal"), at, at % 8, () => recoverJournal(copy));
    assert.deepEqual(read(copy), { records: states[10], torn: 0 });
  }
});

void test("a flipped bit in the file is harmless or reported", async () => {
  const { dir, records } = await closedJournal();
  assert.equal(records.length, 40);
  const file = join(dir, "ferry.db");
  const before = bytesOf(dir);
  let refused = 0;
  for (let at = 0; at < fs.statSync(file).size; at += at < 100 ? 3 : 1499) {
    for (const bit of BITS) {
      try {
        const found = withFlip(file, at, bit, () => judge(dir));
        if (found instanceof DamagedJournal) refused++;
        else assert.deepEqual(found, { records, torn: 0 }, `byte ${at} bit ${bit}`);
      } catch (error) {
        assert.match(String(error), /ferry\.db has format \d+, from a newer Ferry/);
      }
    }
  }
  assert.ok(refused > 37 * BITS.length, `${refused}`);
  assert.deepEqual(bytesOf(dir), before);
});

void test("a page that the disk did not write is reported", async () => {
  const { dir, records } = await closedJournal();
  const old = copyOf(dir);
  const { journal } = await open(dir);
  for (const { id, state } of records) journal.update(id, state.replaceAll("y", "z").replace("new", "old"));
  await journal.close();
  const [stale = Buffer.alloc(0), fresh = Buffer.alloc(0)] = [old, dir].map((from) => bytesOf(from)[0]);
  const updated = read(dir);
  let reported = 0;
  for (let at = 8192; at < fresh.length; at += 8192) {
    const page = stale.subarray(at, at + 8192);
    if (page.equals(fresh.subarray(at, at + 8192))) continue;
    const copy = copyOf(dir);
    overwrite(join(copy, "ferry.db"), page, at);
    const found = judge(copy);
    if (found instanceof DamagedJournal) reported++;
    else assert.deepEqual(found, updated, `page at ${at}`); // it was a free one
  }
  assert.ok(reported > 5);
});

void test("recovery keeps every record outside the damage, as it was, and the damaged file", async () => {
  const { dir, records } = await closedJournal();
  const known = new Map(records.map((record) => [record.id, record]));
  const size = fs.statSync(join(dir, "ferry.db")).size;
  assert.deepEqual(recoverJournal(dir), {
    file: join(dir, "ferry.db"),
    records: 40,
    lost: 0,
    keptAs: undefined,
  });
  let saved = 0;
  for (let at = 0; at < size; at += 4096) {
    const copy = copyOf(dir);
    overwrite(join(copy, "ferry.db"), Buffer.alloc(4096, at === 0 ? 0 : 0xa5), at);
    if (!(judge(copy) instanceof DamagedJournal)) continue; // nobody lives there
    const damaged = bytesOf(copy)[0];
    const recovery = recoverJournal(copy);
    assert.equal(recovery.keptAs, join(copy, "ferry.db.damaged-1"));
    assert.deepEqual(fs.readFileSync(recovery.keptAs), damaged);
    const { records: left, torn } = read(copy);
    assert.deepEqual([left.length, torn], [recovery.records, 0]);
    for (const record of left) assert.deepEqual(record, known.get(record.id));
    if (recovery.lost !== undefined) assert.equal(recovery.records + recovery.lost, 40);
    if (at < 8192) assert.equal(left.length, 40, "the first page can be made anew");
    else if (at >= 3 * 8192) assert.ok(left.length >= 20, `${left.length} left with damage at ${at}`);
    saved += left.length;
  }
  assert.ok(saved > 400);
});

void test("an interrupted recovery is finished by the next start", async () => {
  const { dir, records } = await closedJournal();
  for (const left of [["ferry.db", "ferry.db-wal"], ["ferry.db"], []]) {
    const copy = copyOf(dir);
    fs.renameSync(join(copy, "ferry.db"), join(copy, "ferry.db-recovered"));
    for (const name of left) fs.writeFileSync(join(copy, name), "damaged");
    await expectRecords(copy, records);
    const kept = left.map((name) => join(copy, name.replace("ferry.db", "ferry.db.damaged-1")));
    for (const path of kept) assert.equal(fs.readFileSync(path, "utf8"), "damaged");
  }
});
