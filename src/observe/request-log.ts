/**
 * The request log: a row for every inference request. Never an input, an output or a credential. The latest
 * `requestLog.recent` rows are in memory; a sink (`request-log-postgres.ts`) gets every row too. A request answered 202
 * has its row at once; `outcome` and `settledAt` follow when the engine reports the task's end. An end reported before
 * the reply was sent, or never, is looked up once after `lookAfterMs`, when every task has ended. `queueMs` is the
 * request's own wait for its batch, `workerMs` from there to the outcome; a joined request waited less than its task.
 * Instants are ms since 1970. Cost: less than 0.1 µs per "request.answered" (`node bench/listeners.ts`).
 */
import type { Alarm, Clock } from "../app/clock.ts";
import type { ErrorCode } from "../core/errors.ts";
import type { BatchNote, Outcome } from "../core/task.ts";
import type { AnsweredRequest, Events, TaskEnding } from "./events.ts";

/** How a task ended; "": not yet, or unknown. */
export type Ending = "SUCCESS" | ErrorCode | "";

/** Empty texts and zeros mean unknown, or never happened. */
export interface LoggedRequest {
  readonly id: string;
  readonly tenant: string;
  readonly tier: string;
  readonly model: string;
  readonly status: number;
  readonly code: string;
  readonly work: string;
  readonly startedAt: number;
  readonly latencyMs: number;
  readonly queuedAt: number;
  readonly queueMs: number;
  readonly workerMs: number;
  readonly attempts: number;
  readonly settledAt: number;
  readonly outcome: string;
  readonly traceId: string;
  /** For rows from a database `why` is "" and `startedAt` 0. */
  readonly batch: (Omit<BatchNote, "reason"> & { readonly reason: string }) | undefined;
}

export interface LoggedOutcome extends TaskEnding {
  readonly task: { readonly id: string };
  readonly outcome?: Outcome;
}

const NOT_ENDED: TaskEnding = { queuedAt: 0, attempt: 0 };

/** A row in memory; the fields of its end may come later. */
export class RequestRow implements LoggedRequest {
  /** Number in this process, from 1. */
  seq = 0;
  id = "";
  tenant = "";
  tier = "";
  model = "";
  status = 0;
  code: ErrorCode | "" = "";
  work: AnsweredRequest["work"] = "own";
  startedAt = 0;
  latencyMs = 0;
  traceId = "";
  queuedAt = 0;
  queueMs = 0;
  workerMs = 0;
  attempts = 0;
  settledAt = 0;
  outcome: Ending = "";
  batch: BatchNote | undefined = undefined;
  /** The sink has or is writing it: later changes must be reported. */
  written = false;
  /** Next request waiting for the same task. */
  beside: RequestRow | undefined = undefined;

  constructor(seq: number, request: AnsweredRequest) {
    this.begin(seq, request);
  }

  /** Makes it the row of this request, whatever it was before. */
  begin(seq: number, request: AnsweredRequest): void {
    this.seq = seq;
    this.id = request.id;
    this.tenant = request.tenant;
    this.tier = request.tier;
    this.model = request.model;
    this.status = request.status;
    this.code = request.code;
    this.work = request.work;
    this.startedAt = request.startedAt;
    this.latencyMs = request.latencyMs;
    this.traceId = request.trace === undefined ? "" : request.trace.traceId;
    this.end(request.ending, request.code === "" ? "SUCCESS" : request.code);
  }

  end(ending: TaskEnding = NOT_ENDED, outcome: Ending): void {
    const { queuedAt, settledAt = 0, batch } = ending;
    this.outcome = ending === NOT_ENDED ? "" : outcome;
    this.queuedAt = queuedAt;
    this.settledAt = settledAt;
    this.attempts = ending.attempt;
    this.batch = batch;
    this.queueMs = 0;
    this.workerMs = 0;
    // A cached outcome was computed before this request.
    if (batch === undefined || this.work === "cached") return;
    const from = Math.max(queuedAt, this.startedAt);
    this.queueMs = Math.max(0, batch.startedAt - from);
    this.workerMs = Math.max(0, settledAt - Math.max(batch.startedAt, this.startedAt));
  }
}

/** Called on the request path: must take the row and return. */
export interface RowSink {
  add(row: RequestRow): void;
  ended(row: RequestRow): void;
}

export interface RequestLogOptions {
  readonly recent: number;
  /** From the request's start; every task has ended by then. */
  readonly lookAfterMs: number;
  lookUp(id: string): Promise<LoggedOutcome | undefined>;
  readonly sink?: RowSink | undefined;
  /** Requests are reported by other processes: a task may end before its request is known here. */
  readonly reportedLate?: boolean;
}

/** Accepted requests waiting for their end; beyond this, ends are not recorded. */
const MAX_UNSETTLED = 100_000;
const SWEEP_MS = 5000;
const LOOK_UP_AT_ONCE = 100;
const ACCEPTED = 202;

export class RequestLog {
  readonly #options: RequestLogOptions;
  readonly #clock: Clock;
  readonly #ring: (RequestRow | undefined)[];
  readonly #unsettled = new Map<string, RequestRow>();
  readonly #off: () => void;
  #seq = 0;
  #sweep: Alarm | undefined;
  #closed = false;

  constructor(events: Events, clock: Clock, options: RequestLogOptions) {
    this.#options = options;
    this.#clock = clock;
    this.#ring = new Array<RequestRow | undefined>(options.recent).fill(undefined);
    const wanted = options.recent > 0 || options.sink !== undefined;
    this.#off = wanted ? events.on("request.answered", (request) => this.#answered(request)) : () => {};
  }

  /** Rows since the start, including evicted ones. */
  get count(): number {
    return this.#seq;
  }

  /** Copies, newest first. */
  *rows(): Generator<LoggedRequest> {
    for (const row of this.#newestFirst()) yield Object.assign({}, row);
  }

  /** Copies, newest first; several when they joined one task. */
  find(id: string, max: number): LoggedRequest[] {
    const found: LoggedRequest[] = [];
    for (const row of this.#newestFirst()) {
      if (row.id !== id) continue;
      found.push(Object.assign({}, row));
      if (found.length === max) break;
    }
    return found;
  }

  settled(record: LoggedOutcome): void {
    if (this.#unsettled.size === 0) return;
    const row = this.#unsettled.get(record.task.id);
    if (row === undefined) return;
    this.#unsettled.delete(record.task.id);
    this.#end(row, record);
  }

  close(): void {
    this.#closed = true;
    this.#off();
    this.#sweep?.cancel();
  }

  *#newestFirst(): Generator<RequestRow> {
    const { length } = this.#ring;
    for (let seq = this.#seq; seq > Math.max(0, this.#seq - length); seq--) yield this.#ring[seq % length]!;
  }

  #answered(request: AnsweredRequest): void {
    // Every POST route here is inference; the others were refused with 405.
    if (request.method !== "POST" || request.route === "" || request.code === "METHOD_NOT_ALLOWED") return;
    const row = this.#row(++this.#seq, request);
    if (row.status === ACCEPTED) this.#expect(row);
    this.#options.sink?.add(row);
  }

  /**
   * Overwrites the oldest row in place: a new one would survive two collections, only to die in the old generation. Not
   * where something else may hold it: the sink, or `#unsettled`.
   */
  #row(seq: number, request: AnsweredRequest): RequestRow {
    const { length } = this.#ring;
    if (length === 0) return new RequestRow(seq, request);
    const at = seq % length;
    const oldest = this.#ring[at];
    if (oldest === undefined || oldest.status === ACCEPTED || this.#options.sink !== undefined) {
      return (this.#ring[at] = new RequestRow(seq, request));
    }
    oldest.begin(seq, request);
    return oldest;
  }

  #expect(row: RequestRow): void {
    const first = this.#unsettled.get(row.id);
    if (first !== undefined) {
      row.beside = first.beside;
      first.beside = row;
    } else if (this.#unsettled.size < MAX_UNSETTLED) {
      this.#unsettled.set(row.id, row);
      this.#sweep ??= this.#clock.at(this.#clock.now() + SWEEP_MS, () => void this.#lookUp());
      if (this.#options.reportedLate === true) void this.#lookNow(row.id);
    }
  }

  async #lookNow(id: string): Promise<void> {
    const record = await this.#options.lookUp(id).catch(() => undefined);
    if (record?.outcome !== undefined) this.settled(record);
  }

  #end(first: RequestRow, record: LoggedOutcome): void {
    if (record.outcome === undefined) return;
    const outcome = record.outcome.ok ? "SUCCESS" : record.outcome.code;
    for (let row: RequestRow | undefined = first; row !== undefined; row = row.beside) {
      row.end(record, outcome);
      if (row.written) this.#options.sink?.ended(row);
    }
  }

  /** Looks up overdue ends, oldest first, in batches so that the store is not flooded. */
  async #lookUp(): Promise<void> {
    const before = this.#clock.now() - this.#options.lookAfterMs;
    for (let late = this.#late(before); late.length > 0 && !this.#closed; late = this.#late(before)) {
      for (const row of late) this.#unsettled.delete(row.id);
      // Not retried: if the store fails now, the row says that its end is unknown.
      await Promise.all(
        late.map(async (row) => {
          const record = await this.#options.lookUp(row.id).catch(() => undefined);
          if (record !== undefined) this.#end(row, record);
        }),
      );
    }
    this.#sweep = undefined;
    if (this.#unsettled.size === 0 || this.#closed) return;
    this.#sweep = this.#clock.at(this.#clock.now() + SWEEP_MS, () => void this.#lookUp());
  }

  #late(before: number): RequestRow[] {
    const late: RequestRow[] = [];
    for (const row of this.#unsettled.values()) {
      if (row.startedAt > before || late.length === LOOK_UP_AT_ONCE) break;
      late.push(row);
    }
    return late;
  }
}
