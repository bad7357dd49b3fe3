/**
 * The backend contract: how Ferry talks to one kind of worker. `test/contract/backend.ts` tests every backend against
 * it.
 *
 * A backend owns its workers, each running one batch at a time; the dispatcher may hand a busy worker at most one more
 * (`pipeline`). `run` never throws and never outlives `signal`. It resolves with one of five replies:
 *
 *   answered   one output per task, in order. The backend has checked the count and every output; otherwise `unusable`.
 *   rejected   the worker is alive and refused this batch (a 4xx, an exception in the user's function): because of an
 *              input, or, with a `code`, because of the parameters that all of its tasks share.
 *   unusable   the worker is alive and its reply cannot be used: wrong count, not JSON, NaN, too large, or an output
 *              that no caller may get (`match`).
 *   busy       the worker asks to come back later (429, 503); the attempt does not count.
 *   failed     the worker is broken or gone. `blame` says what that means for the tasks:
 *                worker    it answered with its own error; the attempt counts.
 *                batch     it died or hung while it had the batch: an input may have caused it.
 *                nobody    the batch never reached it (connection refused, restarting); the attempt does not count.
 *
 * `message` goes to the dead letter and the client's error: one line, no stack, no secret. It may quote the worker,
 * which may quote an input; `brief` is the same without quotes, for the log.
 */
import type { ErrorCode } from "../../core/errors.ts";
import type { Json } from "../../core/task.ts";

export interface BatchTask {
  readonly id: string;
  readonly input: Json;
}

export interface Batch {
  readonly id: string;
  readonly tasks: readonly BatchTask[];
  /** Shared by all tasks of the batch; "" for none. */
  readonly parameters: Json;
  /** Time until the signal aborts, for workers that accept a deadline. */
  readonly timeoutMs?: number | undefined;
  readonly traceparent?: string | undefined;
}

/** Client errors: unknown version, adapter or route; the client's own credential, or its quota at the worker. */
export type ClientCode = Extract<ErrorCode, "NOT_FOUND" | "UNAUTHENTICATED" | "FORBIDDEN" | "RATE_LIMITED">;

export type Reply =
  | { readonly kind: "answered"; readonly outputs: readonly Json[] }
  | {
      readonly kind: "rejected";
      readonly message: string;
      readonly brief?: string;
      readonly code?: ClientCode;
    }
  | { readonly kind: "unusable"; readonly message: string; readonly brief?: string }
  | {
      readonly kind: "busy";
      readonly message: string;
      readonly brief?: string;
      readonly retryAfterMs: number;
      /** The refusal is about something the client named, such as a version that is not ready. */
      readonly named?: boolean;
    }
  | {
      readonly kind: "failed";
      readonly message: string;
      readonly brief?: string;
      readonly blame: "worker" | "batch" | "nobody";
    };

export interface WorkerHealth {
  readonly well: boolean;
  /** What is wrong, for operators; "" while it is well. */
  readonly why: string;
  /** When `well` last changed. */
  readonly since: number;
}

export interface Worker {
  /** Unique in its model, stable over restarts, shown to operators. */
  readonly name: string;
  /** The same in every process that lists it; undefined for workers started by this process. */
  readonly address?: string;
  /** `name:port` for the Host header and certificate, where its address came from DNS. */
  readonly host?: string | undefined;
  /**
   * When `signal` aborts, the reply is `failed` at once and everything in flight is destroyed: the next `run` must
   * never read the tail of this one. A worker with `queues` calls `begun` once, when it starts this batch or soon after;
   * batches held but never begun fail with `blame: nobody`.
   */
  run(batch: Batch, signal: AbortSignal, begun?: (agoMs?: number) => void): Promise<Reply>;
  /** Accepts the next batch while running one, and runs them in order. */
  readonly queues?: boolean;
  /** Most tasks per call, at least 1; undefined: the model's limit. A change applies to calls started after it. */
  readonly maxBatchSize?: number | undefined;
  /** Load last reported by the worker, 0 to 1, and when. */
  readonly load?: { readonly share: number; readonly at: number } | undefined;
  /** Result of health checks; undefined without any. While not well it gets no new batch. */
  readonly health?: WorkerHealth | undefined;
  /** Called when `health.well` changed; set by the dispatcher. */
  onHealth?: (() => void) | undefined;
  /** Never throws. Undefined while an answer would prove nothing: probes succeed but the last batch failed. */
  readonly probe?: ((signal: AbortSignal) => Promise<boolean>) | undefined;
}

export interface Backend {
  readonly workers: readonly Worker[];
  /** Resolves when every worker can take a batch; rejects with a one-line Error that says what to do. */
  start(): Promise<void>;
  /** Stops every worker and resolves when they are gone. Idempotent. */
  stop(): Promise<void>;
  /** Resolves when the new worker can take a batch; rejects as `start`. `address`, `host`: for network workers. */
  grow(address?: string, host?: string): Promise<Worker>;
  /** Removes and stops this idle worker. */
  retire(worker: Worker): Promise<void>;
}
