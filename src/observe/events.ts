/**
 * The one typed list of things that happen. Metrics, logs, the dashboard and tests only listen.
 *
 * Publishing is a synchronous call to each listener, so a listener must be quick and must not throw.
 * With nobody listening an event costs one property read; build its fields only behind `heard(name)`
 * where that matters.
 */
import type { ErrorCode } from "../core/errors.ts";
import type { BatchNote, DispatchReason, Task } from "../core/task.ts";
import type { RequestTrace } from "../core/trace.ts";

export type WorkerState = "idle" | "busy" | "draining" | "down";
export const SHED_REASONS = ["rate", "capacity", "deadline", "full", "draining", "no_worker"] as const;
export type ShedReason = (typeof SHED_REASONS)[number];

/** Whether it was refused although it asked for a worker; the others were never meant to reach one. */
export function askedForWorker(reason: ShedReason): boolean {
  return reason !== "rate" && reason !== "draining";
}

/** The status of a request whose client left before it was answered, as others write it in their logs. */
export const CLIENT_LEFT = 499;

/** A request of a client at its end: what is known of it then. Read it at once; it may change afterwards. */
export interface AnsweredRequest {
  /** Its task's; where it never came to one, what the client was told as `request_id`, or "". */
  readonly id: string;
  readonly method: string;
  /** The route with its `{id}`; "" where nothing is at the path. */
  readonly route: string;
  /** As it was asked for; a stranger's text where `route` is "". */
  readonly path?: string;
  /** "" when it was never known: refused before, or the request only looks. */
  readonly model: string;
  readonly tier: string;
  readonly tenant: string;
  /** Of HTTP, or `CLIENT_LEFT`. */
  readonly status: number;
  /** Of the error that was answered; "" for none. */
  readonly code: ErrorCode | "";
  readonly startedAt: number;
  readonly latencyMs: number;
  /** Whose work answered it: its own task's, a task's in flight, an earlier outcome. */
  readonly work: "own" | "joined" | "cached";
  /** The record whose outcome it was answered with; undefined for 202, polls, and what was refused. */
  readonly ending: TaskEnding | undefined;
  readonly trace: RequestTrace | undefined;
}

/** What a record says of a task's way. */
export interface TaskEnding {
  readonly queuedAt: number;
  readonly attempt: number;
  readonly settledAt?: number;
  readonly batch?: BatchNote;
}

/** A task in a batch. */
export interface BatchedTask {
  readonly task: Task;
  readonly attempt: number;
  readonly queuedAt: number;
}

export interface EventFields {
  /** A request on the public listener is over, whatever its status; questions about our health do not count. */
  "request.answered": AnsweredRequest;
  /** Refused at the door. */
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
  /** Discarded: nobody waits for it any more. */
  "task.dropped": { id: string; model: string };
  /** Will be tried again at `at`. `batchId` and `worker` are "" where it is not known who failed it. */
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
  /** One call for a batch came back; `kind` is the backend's word for how. */
  "batch.answered": {
    model: string;
    batchId: string;
    worker: string;
    size: number;
    kind: string;
    /** Which call for this batch; first is 1. */
    call: number;
    startedAt: number;
    serviceMs: number;
  };
  /** The batch is over and its slot free: every task was given back to the engine, unless that is out of reach. */
  "batch.settled": {
    model: string;
    batchId: string;
    worker: string;
    size: number;
    reason: DispatchReason;
    calls: number;
    busyMs: number;
  };
  /** Overdue: its tasks went to the queue's front, the first answer wins. */
  "batch.overdue": { model: string; batchId: string; worker: string; afterMs: number };
  "worker.changed": { model: string; worker: string; state: WorkerState; why: string };
  /** It runs nothing any more, and is to be given back to the fleet or is gone. */
  "worker.released": { model: string; worker: string };
  /** How many workers a model should have is another number now. */
  "scaling.changed": { model: string; from: number; desired: number; reason: string };
  /** A line that a worker's own code printed. */
  "worker.printed": { model: string; worker: string; stream: "stdout" | "stderr"; line: string };
  /** An accepted task can no longer be answered. Must never happen; counted and logged if it does. */
  "task.lost": { id: string; model: string; why: string };
  /** A reload switched to another config. */
  reloaded: object;
  /** Something an operator should know. */
  notice: { level: "info" | "warn" | "error"; message: string };
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

  /** The next event of that name that passes `test`; what tests await instead of sleeping. */
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

/** For one who listens to many and goes some day: `end` takes back every `on`. */
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
