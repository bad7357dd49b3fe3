/**
 * A file that is read again when it changed.
 *
 * It is looked at every `everyMs`: its inode, size and times to the nanosecond. So a file that is replaced by
 * a rename is seen, and one that is not touched costs one `stat`. What cannot be read is told once per reason.
 */
import { open, stat } from "node:fs/promises";
import type { Alarm, Clock } from "../../app/clock.ts";

export interface FileNews {
  /** Its text, first and whenever it changed; undefined: there is no such file. */
  changed(text: string | undefined): void;
  /** It is there and cannot be read. */
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

  /** Resolves when it was looked at once; from then on it is looked at until `stop`. */
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
      // A write between the two looks like a change at the next look, and is read again then.
      this.#seen = now;
      this.#trouble = "";
      this.#news.changed(text);
    } catch (error) {
      const why = reasonOf(error);
      if (why === this.#trouble || this.#stopped) return;
      this.#trouble = why;
      // Whatever it is when it can be read again, it is news.
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

/** Never more than a bound: a path may lead to a device. */
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
