/**
 * The typed list of events. Metrics, logs, the dashboard and tests only listen. Publishing calls each listener
 * synchronously, so listeners must be quick and must not throw. Without listeners an event costs one property read; on
 * hot paths build its fields only behind `heard(name)`.
 */
import type { BatchShape } from "../core/cost.ts";
import type { ErrorCode } from "../core/errors.ts";
import type { BatchNote, DispatchReason, Task } from "../core/task.ts";
import type { RequestTrace } from "../core/trace.ts";

export type WorkerState = "idle" | "busy" | "draining" | "down";
export const SHED_REASONS = ["rate", "capacity", "deadline", "full", "draining", "no_worker"] as const;
export type ShedReason = (typeof SHED_REASONS)[number];

/** Whether the refused request would have needed a worker. */
export function askedForWorker(reason: ShedReason): boolean {
  return reason !== "rate" && reason !== "draining";
}

/** Status of a request whose client disconnected before the reply (nginx's 499). */
export const CLIENT_LEFT = 499;

/** A client request at its end. Read it in the listener; it may change afterwards. */
export interface AnsweredRequest {
  /** The task's id; without a task the client's `request_id`, or "". */
  readonly id: string;
  readonly method: string;
  /** Route pattern with its `{id}`; "" for an unknown path. */
  readonly route: string;
  /** As requested; untrusted text where `route` is "". */
  readonly path?: string | undefined;
  /** "" when unknown: refused earlier, or a read-only request. */
  readonly model: string;
  readonly tier: string;
  readonly tenant: string;
  /** HTTP status, or `CLIENT_LEFT`. */
  readonly status: number;
  /** Error code of the reply; "" for none. */
  readonly code: ErrorCode | "";
  readonly startedAt: number;
  readonly latencyMs: number;
  /** What answered it: its own task, a task in flight, an earlier outcome. */
  readonly work: "own" | "joined" | "cached";
  /** The record it was answered with; undefined for 202, polls and refusals. */
  readonly ending: TaskEnding | undefined;
  readonly trace: RequestTrace | undefined;
}

export interface TaskEnding {
  readonly queuedAt: number;
  readonly attempt: number;
  readonly settledAt?: number | undefined;
  readonly batch?: BatchNote | undefined;
}

export interface BatchedTask {
  readonly task: Task;
  readonly attempt: number;
  readonly queuedAt: number;
}

export interface EventFields {
  /** A request on the public listener has ended, whatever its status; health checks are not counted. */
  "request.answered": AnsweredRequest;
  "request.shed": {
    model: string;
    tier: string;
    tenant: string;
    reason: ShedReason;
    retryAfterMs: number;
  };
  "task.queued": { id: string; model: string; tier: number; at: number };
  /** Another task in flight does the same work. */
  "task.joined": { id: string; model: string };
  /** Answered from an earlier outcome. */
  "task.cached": { id: string; model: string };
  /** Discarded: no caller waits for it any more. */
  "task.dropped": { id: string; model: string };
  /** Will be retried at `at`. `batchId` and `worker` are "" when unknown. */
  "task.retried": {
    id: string;
    model: string;
    attempt: number;
    at: number;
    message: string;
    batchId: string;
    worker: string;
    /** Its `traceparent`, where it is traced and known here. */
    trace?: string | undefined;
  };
  "task.dead": {
    id: string;
    model: string;
    code: ErrorCode;
    message: string;
    trace?: string | undefined;
  };
  /** Claimed, and on its way to its worker. */
  "batch.started": {
    model: string;
    batch: BatchNote;
    maxBatchSize: number;
    oldestWaitMs: number;
    tasks: readonly BatchedTask[];
  };
  /** A call for a batch returned; `kind` is the backend's reply kind. */
  "batch.answered": {
    model: string;
    batchId: string;
    worker: string;
    size: number;
    kind: string;
    /** Call number within the batch, from 1. */
    call: number;
    startedAt: number;
    serviceMs: number;
  };
  /** The batch has ended and its slot is free: every task was given back to the engine, unless that is unreachable. */
  "batch.settled": {
    model: string;
    batchId: string;
    worker: string;
    size: number;
    reason: DispatchReason;
    calls: number;
    busyMs: number;
    /** Only of measured batches. */
    shape?: BatchShape | undefined;
    /**
     * Expected time of a batch of as many rows in order of arrival, minus the expected time of this one; may be
     * negative. Only of measured batches of a padded model.
     */
    savedMs?: number | undefined;
  };
  /** Overdue: its tasks went to the front of the queue; the first answer wins. */
  "batch.overdue": { model: string; batchId: string; worker: string; afterMs: number };
  "worker.changed": { model: string; worker: string; state: WorkerState; why: string };
  /** It runs nothing any more, and will be given back to the fleet or is gone. */
  "worker.released": { model: string; worker: string };
  "scaling.changed": { model: string; from: number; desired: number; reason: string };
  "worker.printed": { model: string; worker: string; stream: "stdout" | "stderr"; line: string };
  /** An accepted task can no longer be answered. Must never happen; counted and logged if it does. */
  "task.lost": { id: string; model: string; why: string };
  reloaded: object;
  /** `logged`: in the log already, by another process. */
  notice: { level: "info" | "warn" | "error"; message: string; logged?: boolean };
}

export type EventName = keyof EventFields;
type Listener<Name extends EventName> = (fields: EventFields[Name]) => void;

export class Events {
  readonly #listeners: { [Name in EventName]?: Listener<Name>[] } = {};

  on<Name extends EventName>(name: Name, listener: Listener<Name>): () => void {
    const listeners: Listener<Name>[] = (this.#listeners[name] ??= [] as never);
    listeners.push(listener);
    return () => {
      const at = listeners.indexOf(listener);
      if (at >= 0) listeners.splice(at, 1);
    };
  }

  heard(name: EventName): boolean {
    const listeners = this.#listeners[name];
    return listeners !== undefined && listeners.length > 0;
  }

  emit<Name extends EventName>(name: Name, fields: EventFields[Name]): void {
    const listeners = this.#listeners[name];
    if (listeners === undefined) return;
    for (const listener of listeners) listener(fields);
  }

  /** The next event of that name that passes `test`; tests await this instead of sleeping. */
  next<Name extends EventName>(
    name: Name,
    test: (fields: EventFields[Name]) => boolean = () => true,
  ): Promise<EventFields[Name]> {
    return new Promise((resolve) => {
      const off = this.on(name, (fields) => {
        if (!test(fields)) return;
        off();
        resolve(fields);
      });
    });
  }
}

/** `end` removes every listener added through `events.on`. */
export function listening(bus: Events): { readonly events: Pick<Events, "on">; readonly end: () => void } {
  const ends: (() => void)[] = [];
  const events: Pick<Events, "on"> = {
    on: (name, listener) => {
      const end = bus.on(name, listener);
      ends.push(end);
      return end;
    },
  };
  return { events, end: () => ends.forEach((each) => each()) };
}
