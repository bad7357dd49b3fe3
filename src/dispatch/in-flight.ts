/**
 * State machine of one batch, from its binding to a worker until the worker is done with it.
 *
 *   bound      its tasks are being claimed
 *   sent       called; the worker is not known to work on it
 *   running    started: `batch.started` was emitted
 *   settling   a reply came that does not end it: its inputs are being isolated
 *   over       the worker is free of it
 *
 * Most batches go to a free worker and run at once. With `pipeline` a batch may be bound `early`, behind a running one.
 * Its `turn` comes when that one came back, before or after it is sent; a worker that overlaps batches may report
 * `begun` before the turn.
 *
 *                     early                                                     for a free worker
 *   startedAt         begun, or the turn where begun is not reported            bound
 *   timeout, alarms   the turn: before that the worker ran another batch        sent
 *   service, busy     the turn if it was sent by then, otherwise begun or sent  begun, or sent where that is not reported
 */
import { type BatchShape, unmeasured } from "../core/cost.ts";
import type { ClaimedTask, Lease } from "../engine/engine.ts";
import type { BatchRun } from "./batch-run.ts";
import type { PoolWorker } from "../workers/worker.ts";

export type BatchState = "bound" | "sent" | "running" | "settling" | "over";

/** `ran`: a reply shows that the worker ran it, reported or not. */
export type BatchEvent = "sent" | "turn" | "begun" | "ran" | "settling" | "over";

export interface BatchFacts {
  readonly id: string;
  readonly slot: PoolWorker;
  readonly size: number;
  /** Bound behind the batch that the worker runs. */
  readonly early: boolean;
  /** No batch may be bound behind it. */
  readonly exclusive: boolean;
  /** Arrival of the longest-waiting task in its queue. */
  readonly oldestAt: number;
  /** When its worker became free, if that is why this batch leaves. */
  readonly freedAt: number | undefined;
  readonly expectedMs: number;
  /** Usual time from here to the worker. */
  readonly handoverMs: number;
}

/** The dispatcher. Told once that the worker can start (`waitedMs` after it could have begun) and that it started. */
export interface BatchOwner {
  reached(batch: InFlightBatch, waitedMs: number, now: number): void;
  started(batch: InFlightBatch): void;
}

export class InFlightBatch {
  readonly id: string;
  readonly slot: PoolWorker;
  readonly size: number; // asked for
  shape: BatchShape; // written at the claim
  readonly early: boolean;
  readonly oldestAt: number;
  readonly freedAt: number | undefined;
  /** No batch is bound behind it: it holds a suspected input, or one bound behind it came back unstarted. */
  exclusive: boolean;
  overlapped: boolean; // another batch was with its worker at the same time, at least for a while
  startedAt: number;
  announcedAt: number | undefined; // when `batch.started` was emitted
  overAt: number | undefined;
  expectedFreeAt: number; // meaningless before its turn
  lease: Lease | undefined; // written at the claim, and again when an early batch starts: outcomes report `startedAt`
  tasks: readonly ClaimedTask[] = []; // the tasks of the lease that are sent
  run: BatchRun | undefined;
  readonly #owner: BatchOwner;
  readonly #handoverMs: number;
  #expectedMs: number;
  readonly #reportsBegun: boolean;
  #state: BatchState = "bound";
  #reached = false;
  #sentAt: number | undefined;
  #turnAt: number | undefined;
  #begunAt: number | undefined;
  #busySince: number | undefined;

  constructor(facts: BatchFacts, owner: BatchOwner, now: number) {
    this.id = facts.id;
    this.slot = facts.slot;
    this.size = facts.size;
    this.shape = unmeasured(facts.size);
    this.early = this.overlapped = facts.early;
    this.exclusive = facts.exclusive;
    this.oldestAt = facts.oldestAt;
    this.freedAt = facts.freedAt;
    this.startedAt = now;
    this.#owner = owner;
    this.#expectedMs = facts.expectedMs;
    this.#handoverMs = facts.handoverMs;
    this.#reportsBegun = facts.slot.worker.queues === true;
    this.expectedFreeAt = now + facts.handoverMs + facts.expectedMs;
    if (facts.early) return;
    this.#turnAt = now;
    if (!this.#reportsBegun) this.#busySince = now;
  }

  get state(): BatchState {
    return this.#state;
  }

  get started(): boolean {
    return this.announcedAt !== undefined;
  }

  /** It came back because of the batch before it; the worker had not begun it. */
  get neverBegun(): boolean {
    return this.early && this.#reportsBegun && this.#begunAt === undefined;
  }

  transition(event: BatchEvent, now: number): void {
    switch (event) {
      case "sent":
        this.#state = "sent";
        this.#sentAt = now;
        if (this.#turnAt !== undefined && !this.#reportsBegun) this.#work(now);
        break;
      case "turn":
        this.#turnAt = now;
        if (this.#sentAt === undefined) this.expectedFreeAt = this.freeIf(now);
        else this.#work(now);
        break;
      case "begun":
        if (this.#begunAt !== undefined) return;
        this.#begunAt = now;
        if (this.#turnAt !== undefined) this.#work(now);
        break;
      case "ran":
        break;
      case "settling":
      case "over":
        this.#state = event;
        if (event === "over") this.overAt = now;
        return;
    }
    const begins = !this.early || (this.#reportsBegun ? this.#begunAt : this.#turnAt) !== undefined;
    if (event === "ran" || (begins && this.#sentAt !== undefined)) this.#start(now);
    if (event === "turn") this.run?.turned();
  }

  /** Its tasks are known now: what it is made of, and how long that should take. */
  made(shape: BatchShape, expectedMs: number): void {
    this.shape = shape;
    this.#expectedMs = expectedMs;
    this.expectedFreeAt = this.startedAt + this.#handoverMs + expectedMs;
  }

  /** When it will be done if its worker is free at `at`. */
  freeIf(at: number): number {
    return at + this.#expectedMs;
  }

  /** Start of its first call's service time; undefined if unknown. */
  serviceFrom(now: number): number | undefined {
    if (!this.early) return this.#begunAt ?? this.#sentAt;
    // Answered together with the batch before it: the worker's pace is the time between the two answers.
    if (this.#turnAt === undefined) return this.#reportsBegun ? now : undefined;
    return this.#sentAt! <= this.#turnAt ? this.#turnAt : (this.#begunAt ?? this.#sentAt);
  }

  /** Working time since its worker last began it. */
  busyMs(now: number): number {
    return this.#busySince === undefined ? 0 : Math.max(0, now - this.#busySince);
  }

  /** Its worker stops working on it, for now or for good; returns the busy time. */
  rest(now: number): number {
    const ms = this.busyMs(now);
    this.#busySince = undefined;
    return ms;
  }

  #work(now: number): void {
    this.#busySince ??= now;
    this.expectedFreeAt = this.freeIf(now);
    if (this.#reached) return;
    this.#reached = true;
    this.#owner.reached(this, now - this.#turnAt!, now);
  }

  #start(now: number): void {
    if (this.started) return;
    this.announcedAt = now;
    if (this.#state === "sent") this.#state = "running";
    if (this.early) {
      this.startedAt = now;
      const { lease } = this;
      this.lease = lease && { ...lease, batch: { ...lease.batch, startedAt: now } };
    }
    this.#owner.started(this);
  }
}
