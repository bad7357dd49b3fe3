/**
 * Request log in PostgreSQL: a bounded buffer off the request path; the thread of `sender.ts` writes. Rows are written
 * every `requestLog.flushMs`, or once `CHUNK` wait. While PostgreSQL is down rows wait; a full buffer drops and counts
 * the oldest; retries after 0.25 s, 0.5 s … 30 s. Writing a row twice is idempotent, so a dead thread loses none. The
 * end of a task answered 202 updates its row in the buffer or in the table. Once an hour one gateway per table deletes
 * rows older than `requestLog.retentionDays`, `DELETED_AT_ONCE` at a time.
 */
import type { Alarm, Clock } from "../app/clock.ts";
import { Fifo } from "../core/fifo.ts";
import type { Events } from "./events.ts";
import { bundleOf } from "./request-log-schema.ts";
import type { LoggedRequest, RequestRow, RowSink } from "./request-log.ts";
import { type Sender, SenderTrouble } from "./sender.ts";
import type { Counter } from "./sight.ts";

export interface PostgresLogOptions {
  /** Contains credentials: never shown. */
  readonly url: string;
  /** FLUSH_MS, MAX_BUFFERED_ROWS and WRITE_TIMEOUT_MS by default. */
  readonly flushMs?: number;
  readonly maxBufferedRows?: number;
  readonly writeTimeoutMs?: number;
  readonly retentionDays: number;
  /** UUID of this process start. */
  readonly instance: string;
}

export interface PostgresLogParts {
  readonly clock: Clock;
  readonly events: Events;
  /** Its thread owns the connection. */
  readonly sender: Pick<Sender, "ask">;
  /** Uniform in [0, 1). */
  random(): number;
}

const FLUSH_MS = 1000;
/** Some 40 to 60 MB. */
const MAX_BUFFERED_ROWS = 100_000;
const WRITE_TIMEOUT_MS = 10_000;
const CHUNK = 1000;
const DELETED_AT_ONCE = 2000;
const RETENTION_EVERY_MS = 3_600_000;
const FIRST_BACKOFF_MS = 250;
const MAX_BACKOFF_MS = 30_000;
const LAST_FLUSH_MS = 2000;

export class PostgresLog implements RowSink {
  readonly counters: readonly Counter[] = [
    {
      name: "ferry_request_log_rows_total",
      help: "Rows of the request log that were written to PostgreSQL.",
      read: () => this.#written,
    },
    {
      name: "ferry_request_log_dropped_total",
      help: "Rows of the request log that were dropped because PostgreSQL did not take them in time.",
      read: () => this.#dropped,
    },
  ];
  readonly #options: Required<PostgresLogOptions>;
  readonly #parts: PostgresLogParts;
  /** The URL without credentials. */
  readonly #place: string;
  readonly #rows = new Fifo<RequestRow>();
  readonly #ends = new Fifo<RequestRow>();
  /** Taken from the buffer, not yet confirmed. */
  #chunk: RequestRow[] = [];
  #store: RowStore | undefined;
  /** The table exists in the right version. */
  #usable = false;
  #turn: Promise<void> | undefined;
  #alarm: Alarm | undefined;
  #soon = false;
  #awaySince = 0;
  /** The last rows were rejected for their content. */
  #refusing = false;
  #backoffMs = FIRST_BACKOFF_MS;
  #retainAt = 0;
  #moreToDelete = false;
  #closed = false;
  /** Shutdown time is over. */
  #over = false;
  #written = 0;
  #dropped = 0;
  #droppedBefore = 0;

  constructor(options: PostgresLogOptions, parts: PostgresLogParts) {
    const defaults = {
      flushMs: FLUSH_MS,
      maxBufferedRows: MAX_BUFFERED_ROWS,
      writeTimeoutMs: WRITE_TIMEOUT_MS,
    };
    this.#options = { ...defaults, ...options };
    this.#parts = parts;
    const { host, pathname } = new URL(options.url);
    this.#place = host + pathname;
    // At once: creates the table and reports wrong settings before the first request.
    this.#arm(0);
  }

  get buffered(): number {
    return this.#rows.size + this.#chunk.length;
  }

  add(row: RequestRow): void {
    if (this.buffered >= this.#options.maxBufferedRows && this.#rows.shift() !== undefined) this.#dropped++;
    this.#rows.push(row);
    if (this.#rows.size >= CHUNK) this.#hurry();
  }

  ended(row: RequestRow): void {
    if (this.#ends.size < this.#options.maxBufferedRows) this.#ends.push(row);
  }

  /** Requests by id, newest first; undefined when PostgreSQL is unavailable. */
  async find(id: string, max: number): Promise<readonly LoggedRequest[] | undefined> {
    if (this.#store === undefined || !this.#usable) return undefined;
    return this.#store.find(id, max).catch(() => undefined);
  }

  /** Resolves when the buffer is written or time is up. */
  async close(): Promise<void> {
    if (this.#closed) return;
    this.#closed = true;
    this.#alarm?.cancel();
    const { clock } = this.#parts;
    const { promise: late, resolve } = Promise.withResolvers<void>();
    const alarm = clock.at(clock.now() + LAST_FLUSH_MS, resolve);
    await Promise.race([this.#lastFlush(), late]);
    alarm.cancel();
    this.#over = true;
    this.#store?.destroy();
    const left = this.buffered;
    if (left === 0) return;
    this.#dropped += left;
    this.#notice(
      "warn",
      `${left} rows may be lost: PostgreSQL at ${this.#place} did not take them before the end`,
    );
  }

  async #lastFlush(): Promise<void> {
    await this.#turn;
    if (this.buffered + this.#ends.size > 0) await this.#run();
  }

  /** Enough rows to write at once, unless a write is running or waiting to retry. */
  #hurry(): void {
    if (this.#soon || this.#turn !== undefined || this.#awaySince > 0 || this.#closed) return;
    this.#soon = true;
    this.#alarm?.cancel();
    this.#arm(0);
  }

  #arm(inMs: number): void {
    const { clock } = this.#parts;
    this.#alarm = clock.at(clock.now() + inMs, () => {
      this.#turn = this.#run().finally(() => {
        this.#turn = undefined;
        this.#soon = false;
        if (!this.#closed) this.#arm(this.#nextMs());
      });
    });
  }

  #nextMs(): number {
    if (this.#awaySince > 0) return this.#backoffMs * (0.5 + this.#parts.random() / 2);
    return this.#rows.size >= CHUNK || this.#moreToDelete ? 0 : this.#options.flushMs;
  }

  /** Writes what is due; never rejects. */
  async #run(): Promise<void> {
    try {
      const store = await this.#open();
      do await this.#writeRows(store);
      while (this.#rows.size >= (this.#closed ? 1 : CHUNK));
      while (this.#ends.size > 0) await this.#writeEnds(store);
      if (!this.#closed) await this.#retain(store);
    } catch (error) {
      if (!(error instanceof SenderTrouble)) throw error;
      this.#away(error);
    }
  }

  async #open(): Promise<RowStore> {
    if (this.#store !== undefined && !this.#store.dead) return this.#store;
    if (this.#over) throw new SenderTrouble("this is the end");
    this.#usable = false;
    const { url, writeTimeoutMs: timeoutMs, instance } = this.#options;
    const store = new RowStore(this.#parts.sender, { url, timeoutMs, instance });
    this.#store = store;
    await store.open();
    this.#usable = true;
    return store;
  }

  async #writeRows(store: RowStore): Promise<void> {
    while (this.#chunk.length < CHUNK) {
      const row = this.#rows.shift();
      if (row === undefined) break;
      row.written = true;
      this.#chunk.push(row);
    }
    if (this.#chunk.length > 0) {
      if (await this.#accepts(store.insert(this.#chunk), this.#chunk.length))
        this.#written += this.#chunk.length;
      else this.#dropped += this.#chunk.length;
      this.#chunk = [];
    }
    if (this.#awaySince > 0) this.#back();
  }

  /** False: the content was rejected. Retrying would fail again and block all other rows. */
  async #accepts(taken: Promise<void>, rows: number): Promise<boolean> {
    try {
      await taken;
      this.#refusing = false;
      return true;
    } catch (error) {
      if (!(error instanceof SenderTrouble) || !error.ofTheData) throw error;
      const what = `PostgreSQL at ${this.#place} refuses ${rows} rows, which are dropped`;
      // Reported once, until rows are accepted again.
      if (!this.#refusing)
        this.#notice("error", `${what}: ${error.message}; compare ferry_requests with docs/request-log.md`);
      this.#refusing = true;
      return false;
    }
  }

  async #writeEnds(store: RowStore): Promise<void> {
    const some: RequestRow[] = [];
    for (let at = 0; at < Math.min(CHUNK, this.#ends.size); at++) some.push(this.#ends.at(at)!);
    await this.#accepts(store.update(some), some.length);
    // Removed only now: after a failure they are written again.
    for (let count = some.length; count > 0; count--) this.#ends.shift();
  }

  async #retain(store: RowStore): Promise<void> {
    const { retentionDays } = this.#options;
    const now = this.#parts.clock.now();
    if (retentionDays === 0 || now < this.#retainAt) return;
    const deleted = await store.deleteOld(retentionDays, DELETED_AT_ONCE);
    // The rest in later turns, so that rows do not wait for a long clean-up.
    this.#moreToDelete = deleted === DELETED_AT_ONCE;
    if (!this.#moreToDelete) this.#retainAt = now + RETENTION_EVERY_MS;
  }

  #away(trouble: SenderTrouble): void {
    this.#store?.destroy();
    if (this.#awaySince > 0) {
      this.#backoffMs = Math.min(MAX_BACKOFF_MS, 2 * this.#backoffMs);
      return;
    }
    this.#awaySince = this.#parts.clock.now();
    this.#droppedBefore = this.#dropped;
    if (this.#closed) return;
    const { maxBufferedRows } = this.#options;
    this.#notice(
      "warn",
      `PostgreSQL at ${this.#place} is away: ${trouble.message}; requests go on, and up to ${maxBufferedRows} rows ` +
        "wait in memory before the oldest are dropped",
    );
  }

  #back(): void {
    const seconds = Math.round((this.#parts.clock.now() - this.#awaySince) / 1000);
    const dropped = this.#dropped - this.#droppedBefore;
    this.#awaySince = 0;
    this.#backoffMs = FIRST_BACKOFF_MS;
    this.#notice(
      "info",
      `PostgreSQL at ${this.#place} is back after ${seconds} s; ${dropped} rows were dropped`,
    );
  }

  #notice(level: "info" | "warn" | "error", message: string): void {
    this.#parts.events.emit("notice", { level, message: `request log: ${message}` });
  }
}

export interface RowStoreRules {
  /** Contains credentials: never shown. */
  readonly url: string;
  readonly timeoutMs: number;
  readonly instance: string;
}

let stores = 0;

/** A PostgreSQL connection in the thread of `sender.ts`, until its first error. Rejects with `SenderTrouble`. */
export class RowStore {
  readonly #sender: Pick<Sender, "ask">;
  readonly #rules: RowStoreRules;
  readonly #store = ++stores;
  #dead = false;

  constructor(sender: Pick<Sender, "ask">, rules: RowStoreRules) {
    this.#sender = sender;
    this.#rules = rules;
  }

  get dead(): boolean {
    return this.#dead;
  }

  /** Call first: migrates the table. */
  async open(): Promise<void> {
    const { url, timeoutMs } = this.#rules;
    const store = this.#store;
    const opened = this.#told(this.#sender.ask("openRows", { store, url, timeoutMs }));
    const end = (): void => void (this.#dead = true);
    this.#sender.ask("rowsEnd", { store }).then(end, end);
    await opened;
  }

  insert(rows: readonly RequestRow[]): Promise<void> {
    return this.#write("insertRows", rows);
  }

  /** Ends of tasks whose rows are already in the table. */
  update(rows: readonly RequestRow[]): Promise<void> {
    return this.#write("updateRows", rows);
  }

  deleteOld(days: number, max: number): Promise<number> {
    return this.#told(this.#sender.ask("deleteOldRows", { store: this.#store, days, max }));
  }

  find(id: string, max: number): Promise<readonly LoggedRequest[]> {
    return this.#told(this.#sender.ask("findRows", { store: this.#store, id, max }));
  }

  destroy(): void {
    if (this.#dead) return;
    this.#dead = true;
    // Not awaited: without the thread the connection is gone too.
    this.#sender.ask("closeRows", { store: this.#store }).catch(() => {});
  }

  #write(verb: "insertRows" | "updateRows", rows: readonly RequestRow[]): Promise<void> {
    const { instance } = this.#rules;
    return this.#told(
      this.#sender.ask(verb, { store: this.#store, instance, columns: bundleOf(verb, rows) }),
    );
  }

  async #told<Told>(asked: Promise<Told>): Promise<Told> {
    try {
      return await asked;
    } catch (error) {
      if (error instanceof SenderTrouble && !error.ofTheData) this.#dead = true;
      throw error;
    }
  }
}
