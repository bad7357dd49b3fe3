/**
 * One worker in the pool of a model: room for one batch, and one behind it (`dispatch/pipeline.ts`).
 *
 *   starting ── machine-free ──► active ── retire ──► draining ── idle ──► gone
 *       └──────────────── retire (it has run nothing) ───────────────────────┘
 *
 *   starting   a predecessor on the same machine may still run a batch there; counts as capacity
 *   active     may be given batches
 *   draining   runs its last batch; no capacity
 *   gone       removed from the pool; final
 *
 * Independent of the phase: its lease (where several processes list the worker, only the holder may start batches),
 * whether an operator drained it, and whether its batch is long overdue. All of this is one state, written only by
 * `transition()`. The circuit (`Circuit`) and the worker's own health reports come on top.
 *
 * `ratio` is its service time over the model's, so that predictions fit a mixed fleet. `usualRatio` caps one batch at
 * twice the expectation: an outlier of five times says little about the next. `ratio` decides which workers teach the
 * estimates and which is chosen first, `usualRatio` what is promised.
 */
import assert from "node:assert/strict";
import type { WorkerState } from "../observe/events.ts";
import type { InFlightBatch } from "../dispatch/in-flight.ts";
import type { Worker } from "./backend/backend.ts";
import { Circuit, type HealthLimits } from "./health.ts";

/** A worker's load report is ignored after this long. */
const LOAD_HOLDS_MS = 3000;

export interface WorkerLease {
  /** No batch starts at or after this instant; Infinity for a worker of this process alone. */
  readonly until: number;
  /** The registry wants it back: no further batch starts. */
  readonly release: boolean;
}

export interface Lifecycle {
  readonly phase: "starting" | "active" | "draining" | "gone";
  readonly lease: WorkerLease;
  /** By an operator: no further batch, and no capacity, until resumed. */
  readonly drained: boolean;
  /** Its batch is long overdue: it may be dead, and is no capacity until it answers. */
  readonly silent: boolean;
}

export type WorkerEvent =
  | { readonly type: "machine-free" | "retire" | "idle" | "silent" | "heard" }
  | { readonly type: "lease"; readonly lease: WorkerLease }
  | { readonly type: "drain"; readonly drained: boolean };

/** `busy`: it has a batch. Pure. */
export function nextState(state: Lifecycle, event: WorkerEvent, busy: boolean): Lifecycle {
  if (state.phase === "gone") return state;
  switch (event.type) {
    case "machine-free":
      return state.phase === "starting" ? { ...state, phase: "active" } : state;
    case "retire":
      return { ...state, phase: busy ? "draining" : "gone" };
    case "idle":
      return state.phase === "draining" ? { ...state, phase: "gone" } : state;
    case "silent":
      return { ...state, silent: true };
    case "heard":
      return state.silent ? { ...state, silent: false } : state;
    case "lease":
      return { ...state, lease: event.lease };
    case "drain":
      return state.drained === event.drained ? state : { ...state, drained: event.drained };
  }
}

export interface PoolWorkerOptions {
  readonly limits: () => HealthLimits;
  /** Listed by several processes, and leased to one at a time. */
  readonly shared?: boolean;
  /** Appended to its name, where other processes have workers of the same name. */
  readonly suffix?: string;
  /** On the same machine: it starts no batch until all of them are gone. */
  readonly predecessors?: readonly PoolWorker[];
  /** Omitted: none if it is shared. */
  readonly lease?: WorkerLease | undefined;
  readonly drained?: boolean;
  /** Called on every event that changed the state, and on every `idle`. */
  readonly onEvent?: (worker: PoolWorker, event: WorkerEvent["type"], before: Lifecycle) => void;
}

const UNSHARED: WorkerLease = { until: Infinity, release: false };
export const UNHELD: WorkerLease = { until: -Infinity, release: false };

export class PoolWorker {
  readonly worker: Worker;
  /** For display; the backend's name may be shorter. */
  readonly name: string;
  readonly shared: boolean;
  readonly circuit: Circuit;
  #state: Lifecycle;
  readonly #predecessors: Set<PoolWorker>;
  readonly #successors: PoolWorker[] = [];
  readonly #gone = Promise.withResolvers<void>();
  readonly #onEvent: PoolWorkerOptions["onEvent"];
  /** The running batch; undefined when free. */
  batch: InFlightBatch | undefined;
  /** The one behind it; undefined whenever `batch` is. */
  ahead: InFlightBatch | undefined;
  /** Batches since the last that was sent to a free worker. */
  earlyInRow = 0;
  ratio = 1;
  usualRatio = 1;
  batches = 0;
  tasks = 0;
  calls = 0;
  failures = 0;
  busyMs = 0;

  constructor(worker: Worker, options: PoolWorkerOptions) {
    const { shared = false, suffix = "", predecessors = [], drained = false } = options;
    this.worker = worker;
    this.name = worker.name + suffix;
    this.shared = shared;
    this.circuit = new Circuit(options.limits);
    this.#onEvent = options.onEvent;
    this.#predecessors = new Set(predecessors.filter(({ phase }) => phase !== "gone"));
    for (const predecessor of this.#predecessors) predecessor.#successors.push(this);
    const phase = this.#predecessors.size > 0 ? "starting" : "active";
    this.#state = { phase, lease: options.lease ?? (shared ? UNHELD : UNSHARED), drained, silent: false };
  }

  /** The only writer of `#state`. */
  transition(event: WorkerEvent): void {
    const before = this.#state;
    this.#state = nextState(before, event, this.batch !== undefined);
    if (this.#state === before && event.type !== "idle") return;
    this.#onEvent?.(this, event.type, before);
    if (this.#state.phase !== "gone" || before.phase === "gone") return;
    this.#gone.resolve();
    for (const successor of this.#successors) successor.#goneBefore(this);
  }

  /** Inherits what the predecessor still waited for. */
  #goneBefore(predecessor: PoolWorker): void {
    this.#predecessors.delete(predecessor);
    for (const each of predecessor.#predecessors) {
      this.#predecessors.add(each);
      each.#successors.push(this);
    }
    if (this.#predecessors.size === 0) this.transition({ type: "machine-free" });
  }

  get phase(): Lifecycle["phase"] {
    return this.#state.phase;
  }

  get lease(): WorkerLease {
    return this.#state.lease;
  }

  get drained(): boolean {
    return this.#state.drained;
  }

  get silent(): boolean {
    return this.#state.silent;
  }

  /** Draining or gone. */
  get retiring(): boolean {
    return this.phase === "draining" || this.phase === "gone";
  }

  /** Resolves when it is. */
  get gone(): Promise<void> {
    return this.#gone.promise;
  }

  held(now: number): boolean {
    return now < this.#state.lease.until;
  }

  /** Whether it may be given further batches, now or when it is free. */
  takesBatches(now: number): boolean {
    const { phase, lease, drained } = this.#state;
    return phase === "active" && !drained && !lease.release && now < lease.until;
  }

  healthy(now: number): boolean {
    const { lease, drained, silent } = this.#state;
    if (this.retiring || drained || silent || now >= lease.until) return false;
    return !this.circuit.down(now) && this.well;
  }

  /** Most tasks per call, as currently reported. */
  get takes(): number {
    const most = this.worker.maxBatchSize;
    if (most === undefined) return Infinity;
    return most >= 1 ? Math.floor(most) : 1;
  }

  get well(): boolean {
    return this.worker.health?.well !== false;
  }

  /** Healthy, proven by a batch or a probe, and its reported load at most `maxLoad`. */
  counts(now: number, maxLoad: number): boolean {
    // One to be given back still counts: another process will hold it in a moment.
    if (!this.healthy(now) || this.circuit.probing) return false;
    const { load } = this.worker;
    return load === undefined || load.share <= maxLoad || now - load.at > LOAD_HOLDS_MS;
  }

  free(now: number): boolean {
    return this.batch === undefined && this.takesBatches(now) && now >= this.circuit.usableAt && this.well;
  }

  /** Assigns a batch: to run now, or behind the running one. */
  bind(batch: InFlightBatch): void {
    assert(this.phase === "active", `a batch for a worker that is ${this.phase}`);
    if (batch.early) {
      this.batch!.overlapped = true;
      this.ahead = batch;
      this.earlyInRow++;
    } else {
      assert(this.batch === undefined, "a second batch on one worker");
      this.batch = batch;
      this.earlyInRow = 0;
    }
  }

  /** Done with this batch; the one behind it is next. */
  leave(batch: InFlightBatch, now: number): void {
    this.busyMs += batch.rest(now);
    const next = this.ahead;
    this.ahead = undefined;
    if (next === batch) return;
    this.batch = next;
    if (next === undefined) this.transition({ type: "idle" });
    else next.transition("turn", now);
  }

  /** Its batch came back and is not settled; the worker is at the next one, if any. */
  passTurn(now: number): void {
    const { batch, ahead } = this;
    if (batch === undefined || ahead === undefined || ahead.state === "bound") return;
    this.busyMs += batch.rest(now);
    this.batch = ahead;
    this.ahead = batch;
    ahead.transition("turn", now);
  }

  /** When it will have finished all its batches; undefined while free. */
  get freeAt(): number | undefined {
    const { batch, ahead } = this;
    return batch && ahead ? ahead.freeIf(batch.expectedFreeAt) : batch?.expectedFreeAt;
  }

  state(now: number): WorkerState {
    const { drained, silent, lease } = this.#state;
    // The operator may be working on it: silence is expected.
    if (drained) return "draining";
    if (this.circuit.down(now) || silent || !this.well) return "down";
    if (lease.release || this.retiring) return "draining";
    return this.batch === undefined ? "idle" : "busy";
  }

  busyMsUntil(now: number): number {
    return this.busyMs + (this.batch?.busyMs(now) ?? 0);
  }
}
