/**
 * One batch in a worker's hands, from the moment it is bound to the worker until the worker is done with it.
 *
 * Most often the worker is free, and the batch leaves at once. With `pipeline` (`pipeline.ts`) it may also be handed over
 * early, behind one that the worker still runs; then three instants differ, in this order but for the first two:
 *
 *   sent     it was given to the worker
 *   turn     nothing is before it any more: the batch before it came back
 *   begun    the worker says that it has begun with it; may come before the turn where a worker overlaps its batches
 *
 * What counts from when, for one that was handed over early:
 *
 *   startedAt         begun, or where nobody says so the turn, once it is sent. Its tasks wait until then (`queue_ms`).
 *   timeout, alarms   turn: what the worker did before that was another's
 *   service time      turn, if it was in the worker's hands by then; otherwise begun, or sent where nobody says so.
 *                     A worker that overlaps answers in the time between two answers: that is its pace.
 *   busy time         the same
 *
 * One that leaves for a free worker starts when it leaves, as it always has; its service and busy time count from begun where
 * the worker says when that is, so that the way there is not taken for the worker's work.
 */
import type { BatchNote, DispatchReason } from "../core/task.ts";

export interface HoldFacts extends Omit<BatchNote, "size" | "startedAt"> {
  readonly size: number;
  /** What the worker is expected to need for it. */
  readonly expectedMs: number;
  /** The worker runs another one. */
  readonly early: boolean;
  /** The worker says when it begins. */
  readonly says: boolean;
  /** Nothing is to be handed over behind it. */
  readonly alone?: boolean;
}

export class Hold implements BatchNote {
  readonly id: string;
  readonly size: number;
  readonly reason: DispatchReason;
  readonly worker: string;
  readonly why: string;
  readonly early: boolean;
  readonly #says: boolean;
  readonly #expectedMs: number;
  startedAt: number;
  #started = false;
  /** When it will be done, going by what is known by now; meaningless before its turn. */
  expectedFreeAt: number;
  #sentAt: number | undefined;
  #turnAt: number | undefined;
  #begunAt: number | undefined;
  #busySince: number | undefined;
  /** None is handed over behind it: it is suspected, is being cut, or one that was came back. */
  alone: boolean;
  /** Another one was in its worker's hands beside it, for a while at least. */
  company: boolean;
  /** Called when its turn has come. */
  onTurn: (() => void) | undefined;
  /** Called once, when its worker can be at it: so long the worker waited for it. */
  onArrival: ((wayMs: number) => void) | undefined;
  #arrived = false;
  /** Called once, when it has started. */
  onStart: (() => void) | undefined;
  /** Called when the one before it is overdue. */
  onStalled: ((afterMs: number) => void) | undefined;

  /** `wayMs`: what passes on its way to the worker. */
  constructor(facts: HoldFacts, now: number, wayMs: number) {
    this.id = facts.id;
    this.size = facts.size;
    this.reason = facts.reason;
    this.worker = facts.worker;
    this.why = facts.why;
    this.early = this.company = facts.early;
    this.alone = facts.alone === true;
    this.#says = facts.says;
    this.#expectedMs = facts.expectedMs;
    this.startedAt = now;
    this.expectedFreeAt = now + wayMs + facts.expectedMs;
    if (facts.early) return;
    this.#turnAt = now;
    if (!facts.says) this.#busySince = now;
  }

  /** It was given to its worker. */
  get sent(): boolean {
    return this.#sentAt !== undefined;
  }

  get started(): boolean {
    return this.#started;
  }

  get begun(): boolean {
    return this.#begunAt !== undefined;
  }

  /** When it will be done if its worker is free at `at`. */
  freeIf(at: number): number {
    return at + this.#expectedMs;
  }

  send(now: number): void {
    this.#sentAt = now;
    if (this.#turnAt !== undefined && !this.#says) this.#busy(now);
    this.#startIfSo(now);
  }

  /** Its worker says that it has begun with it. */
  begin(now: number): void {
    if (this.begun) return;
    this.#begunAt = now;
    if (this.#turnAt !== undefined) this.#busy(now);
    this.#startIfSo(now);
  }

  /** Nothing is before it any more. */
  turn(now: number): void {
    this.#turnAt = now;
    if (this.sent) this.#busy(now);
    else this.expectedFreeAt = this.freeIf(now);
    this.#startIfSo(now);
    const { onTurn } = this;
    this.onTurn = undefined;
    onTurn?.();
  }

  /** It came back, and its worker had begun with it whether it said so or not. */
  ran(now: number): void {
    if (this.#started) return;
    this.#started = true;
    this.startedAt = now;
    this.onStart?.();
  }

  /** From when on its first call counts as its worker's work; undefined where nobody can say. */
  paceFrom(now: number): number | undefined {
    if (!this.early) return this.#begunAt ?? this.#sentAt;
    // Two answers in one breath: the worker's time is that between them.
    if (this.#turnAt === undefined) return this.#says ? now : undefined;
    return this.#sentAt! <= this.#turnAt ? this.#turnAt : (this.#begunAt ?? this.#sentAt);
  }

  /** What its worker has worked on it and was not counted yet. */
  busyMs(now: number): number {
    return this.#busySince === undefined ? 0 : Math.max(0, now - this.#busySince);
  }

  /** Its worker is not at it any more: what it worked. */
  rest(now: number): number {
    const ms = this.busyMs(now);
    this.#busySince = undefined;
    return ms;
  }

  #busy(now: number): void {
    this.#busySince ??= now;
    this.expectedFreeAt = this.freeIf(now);
    if (this.#arrived) return;
    this.#arrived = true;
    this.onArrival?.(now - this.#turnAt!);
  }

  #startIfSo(now: number): void {
    if (this.#started) return;
    const starts = !this.early || (this.#says ? this.begun : this.#turnAt !== undefined);
    if (!starts || !this.sent) return;
    this.#started = true;
    if (this.early) this.startedAt = now;
    this.onStart?.();
  }
}
