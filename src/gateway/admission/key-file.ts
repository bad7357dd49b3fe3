/**
 * API keys in a file, for one process (or a few on one machine).
 *
 *   keys.json          {"version":1,"keys":[…]}, mode 0600, written whole and renamed into place
 *   keys.json.secret   HMAC key of the digests, unless auth.secret is set; mode 0600
 *   keys.json.lock     held while `ferry keys` writes, so that concurrent writers lose no key
 *
 * A running Ferry only reads, and checks for changes every `reloadMs`. An unreadable file keeps the last good keys in
 * force, with a notice (at the start: an error); a missing file means no keys.
 */
import { randomBytes } from "node:crypto";
import type { Stats } from "node:fs";
import { link, open, realpath, rename, rm, stat } from "node:fs/promises";
import { dirname } from "node:path";
import type { Alarm, Clock } from "../../app/clock.ts";
import type { Events } from "../../observe/events.ts";
import { byAge, type KeyRecord, type KeyStore, readRecord, writeRecord } from "./api-keys.ts";

export interface KeyFileOptions {
  readonly path: string;
  readonly reloadMs: number;
}

const VERSION = 1;
const MODE = 0o600;
const SECRET_BYTES = 32;
/** How long `ferry keys` waits for the lock; each run holds it for less than a second. */
const LOCK_WITHIN_MS = 5000;
const LOCK_PAUSE_MS = 20;

export class KeyFile implements KeyStore {
  readonly #path: string;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #watched: WatchedFile;
  #keys: ReadonlyMap<string, KeyRecord> = new Map();
  #seen = false;
  #trouble = "";

  constructor({ path, reloadMs }: KeyFileOptions, clock: Clock, events: Events) {
    this.#path = path;
    this.#clock = clock;
    this.#events = events;
    this.#watched = new WatchedFile(path, reloadMs, clock, {
      changed: (text) => this.#read(text),
      failed: (why) => this.#failed(why),
    });
  }

  /** Reads the keys and watches them until `close`. Rejects if the file exists and cannot be read. */
  async watch(): Promise<void> {
    await this.#watched.start();
    if (this.#seen) return;
    this.close();
    throw new Error(`auth.keysFile ${this.#path}: ${this.#trouble}`);
  }

  get(id: string): KeyRecord | undefined {
    return this.#keys.get(id);
  }

  async list(): Promise<KeyRecord[]> {
    return byAge((await this.#load()).values());
  }

  add(record: KeyRecord): Promise<void> {
    return this.#change((keys) => void keys.set(record.id, record));
  }

  async revoke(id: string): Promise<boolean> {
    // Looked up first: an unknown id needs no write permission.
    if (!(await this.#load()).has(id)) return false;
    let revoked = false;
    await this.#change((keys) => void (revoked = keys.delete(id)));
    return revoked;
  }

  async secret(): Promise<string> {
    const path = secretOf(this.#path);
    const known = await readSecret(path);
    if (known !== undefined) return known;
    const made = `${randomBytes(SECRET_BYTES).toString("base64url")}\n`;
    const draft = draftOf(path);
    try {
      await writeWhole(draft, made, undefined);
      // Unlike a rename, a link fails if another process was first; then its secret counts.
      await link(draft, path);
    } catch (error) {
      if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw cannot("write", path, error);
    } finally {
      await rm(draft, { force: true });
    }
    return (await readSecret(path)) ?? made.trim();
  }

  close(): void {
    this.#watched.stop();
  }

  #read(text: string | undefined): void {
    const first = !this.#seen;
    if (text === undefined) {
      this.#seen = true;
      this.#keys = new Map();
      const how = "ferry keys create --user U --tier T makes the first";
      return this.#warn(
        `${this.#path}: ${first ? "there is no such file yet" : "it is gone"}: no key works; ${how}`,
      );
    }
    try {
      this.#keys = parse(text);
      this.#seen = true;
    } catch (error) {
      this.#failed((error as Error).message);
    }
  }

  #failed(why: string): void {
    this.#trouble = why;
    if (this.#seen) this.#warn(`${this.#path}: ${why}; the last good keys stay in force`);
  }

  #warn(message: string): void {
    this.#events.emit("notice", { level: "warn", message });
  }

  async #load(): Promise<Map<string, KeyRecord>> {
    return (await readKeys(this.#path)) ?? new Map<string, KeyRecord>();
  }

  async #change(change: (keys: Map<string, KeyRecord>) => void): Promise<void> {
    const path = await realpath(this.#path).catch(() => this.#path);
    await using _lock = await this.#lock(`${path}.lock`);
    const keys = await this.#load();
    change(keys);
    const text = JSON.stringify({ version: VERSION, keys: byAge(keys.values()).map(writeRecord) }, null, 1);
    const draft = draftOf(path);
    try {
      // Keeps the owner and mode: `ferry keys` may run as root, Ferry as another user.
      await writeWhole(draft, `${text}\n`, await stat(path).catch(() => undefined));
      await rename(draft, path);
      await syncFolder(dirname(path));
    } catch (error) {
      await rm(draft, { force: true });
      throw cannot("write", path, error);
    }
  }

  async #lock(path: string): Promise<AsyncDisposable> {
    let holder = "";
    let until = this.#clock.now() + LOCK_WITHIN_MS;
    for (;;) {
      try {
        await using file = await open(path, "wx", MODE);
        await file.write(`${process.pid}\n`);
        return { [Symbol.asyncDispose]: () => rm(path, { force: true }) };
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code !== "EEXIST") throw cannot("write", path, error);
        const seen = (await readText(path).catch(() => "")).trim();
        const now = this.#clock.now();
        // The holder changed, so the queue moves.
        if (seen !== holder) until = now + LOCK_WITHIN_MS;
        holder = seen;
        if (now >= until) {
          const who = holder === "" ? "another process" : `process ${holder}`;
          throw new Error(`${path} is held by ${who}; if no ferry keys runs, remove the file`, {
            cause: error,
          });
        }
        await new Promise<void>((resolve) => this.#clock.at(this.#clock.now() + LOCK_PAUSE_MS, resolve));
      }
    }
  }
}

/** Undefined if the file is missing; rejects with an Error that says why it cannot be read. */
export async function readKeys(path: string): Promise<Map<string, KeyRecord> | undefined> {
  try {
    return parse(await readText(path));
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return undefined;
    throw cannot("read", path, error);
  }
}

function parse(text: string): Map<string, KeyRecord> {
  let found: unknown;
  try {
    found = JSON.parse(text);
  } catch (error) {
    // Not JSON.parse's message: it quotes the file.
    throw new Error("it is not a keys file (no JSON: cut off, or edited)", { cause: error });
  }
  const { version, keys } = (found ?? {}) as { version?: unknown; keys?: unknown };
  if (version !== VERSION || !Array.isArray(keys)) {
    throw new Error(`it is not a keys file ({"version":${VERSION},"keys":[…]} is one)`);
  }
  const records = new Map<string, KeyRecord>();
  keys.forEach((each: unknown, at) => {
    const record = readRecord(each);
    if (record === undefined) throw new Error(`it is not a keys file (keys[${at}] is no record of a key)`);
    // The two might belong to different users.
    if (records.has(record.id)) {
      throw new Error(`it is not a keys file (keys[${at}] has the id of another, ${record.id})`);
    }
    records.set(record.id, record);
  });
  return records;
}

export function secretOf(keysFile: string): string {
  return `${keysFile}.secret`;
}

export async function readSecret(path: string): Promise<string | undefined> {
  try {
    const text = (await readText(path)).trim();
    if (text.length < SECRET_BYTES) throw new Error("it is not a secret that Ferry made");
    return text;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return undefined;
    throw cannot("read", path, error);
  }
}

function draftOf(path: string): string {
  return `${path}.${randomBytes(6).toString("hex")}.new`;
}

/** Durable when it resolves; `like`: the replaced file. */
async function writeWhole(path: string, text: string, like: Stats | undefined): Promise<void> {
  await using file = await open(path, "wx", MODE);
  await file.writeFile(text);
  if (like !== undefined) {
    await file.chown(like.uid, like.gid).catch(() => undefined);
    await file.chmod(like.mode & 0o660);
  }
  await file.sync();
}

/** Without this a rename may be lost on power failure. */
async function syncFolder(path: string): Promise<void> {
  await using folder = await open(path, "r");
  await folder.sync();
}

function cannot(what: string, path: string, error: unknown): Error {
  const { code } = error as NodeJS.ErrnoException;
  const noFolder = what === "write" && code === "ENOENT";
  const why = noFolder ? "there is no such folder; make it first" : reasonOf(error);
  return new Error(`cannot ${what} ${path}: ${why}`, { cause: error });
}

export interface FileNews {
  /** The initial text and every change; undefined: no such file. */
  changed(text: string | undefined): void;
  failed(why: string): void;
}

const MAX_BYTES = 64 * 2 ** 20;
const ABSENT = "absent";

export class WatchedFile {
  readonly #path: string;
  readonly #everyMs: number;
  readonly #clock: Clock;
  readonly #news: FileNews;
  #seen = "";
  #trouble = "";
  #alarm: Alarm | undefined;
  #stopped = false;

  constructor(path: string, everyMs: number, clock: Clock, news: FileNews) {
    this.#path = path;
    this.#everyMs = everyMs;
    this.#clock = clock;
    this.#news = news;
  }

  /** Resolves after the first check; then polls until `stop`. */
  async start(): Promise<void> {
    await this.#look();
    if (this.#stopped) return;
    this.#alarm = this.#clock.at(this.#clock.now() + this.#everyMs, () => void this.start());
  }

  stop(): void {
    this.#stopped = true;
    this.#alarm?.cancel();
  }

  async #look(): Promise<void> {
    try {
      const now = await signature(this.#path);
      if (now === this.#seen) return;
      const text = now === ABSENT ? undefined : await readText(this.#path);
      if (this.#stopped) return;
      // A write between the two is seen as a change at the next check.
      this.#seen = now;
      this.#trouble = "";
      this.#news.changed(text);
    } catch (error) {
      const why = reasonOf(error);
      if (why === this.#trouble || this.#stopped) return;
      this.#trouble = why;
      // Once readable again, it counts as changed.
      this.#seen = "";
      this.#news.failed(why);
    }
  }
}

async function signature(path: string): Promise<string> {
  try {
    const { ino, size, mtimeNs, ctimeNs } = await stat(path, { bigint: true });
    return `${ino} ${size} ${mtimeNs} ${ctimeNs}`;
  } catch (error) {
    if ((error as NodeJS.ErrnoException).code === "ENOENT") return ABSENT;
    throw error;
  }
}

/** Bounded: the path may lead to a device. */
export async function readText(path: string): Promise<string> {
  await using file = await open(path, "r");
  const about = await file.stat();
  if (!about.isFile()) throw new Error("it is not a file");
  if (about.size > MAX_BYTES) throw new Error(`it is larger than ${MAX_BYTES} bytes`);
  return file.readFile("utf8");
}

export function reasonOf(error: unknown): string {
  const { code, message } = error as NodeJS.ErrnoException;
  if (code === "EACCES" || code === "EPERM") return "not allowed; check its owner and permissions";
  if (code === "ENOENT" || code === "ENOTDIR") return "there is no such file";
  return code ?? message;
}
