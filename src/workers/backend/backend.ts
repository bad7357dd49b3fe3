/**
 * The backend contract: how Ferry talks to one kind of worker. `test/contract/backend.ts` holds every backend to it.
 *
 * A backend owns its workers, each able to run one batch at a time; the dispatcher hands a worker that still runs one at
 * most one more (`pipeline`). `run` never throws and never hangs past `signal`: it ends in one of five replies.
 *
 *   answered   one output per task, in order. The backend has checked that the worker sent exactly as many usable outputs
 *              as it got inputs; if not, the reply is `unusable`.
 *   rejected   the worker lives and refused this batch (a 4xx, an exception in the user's function): one of its inputs, or,
 *              with a `code`, what its client asked for beside the inputs, which all of its tasks share.
 *   unusable   the worker lives and its reply cannot be used: wrong count, not JSON, NaN, too large, or an output that no
 *              caller may get (`match`).
 *   busy       the worker asks to come back later (429, 503); the attempt does not count.
 *   failed     the worker is broken or gone. `blame` says what that means for the tasks:
 *                worker    it answered with an error of its own; the attempt counts.
 *                batch     it died, or hung, while it had the batch: one of the inputs may have killed it.
 *                nobody    the batch never reached it (refused connection, still restarting); the attempt does not count.
 *
 * A reply's `message` is for the dead letter and for the client's error: one line, no stack, no secret. It may quote the
 * worker, and a worker may quote an input; `brief` is the same without quotes, for the log, where the message has any.
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
  /** Shared by all tasks of the batch; "" when there are none. */
  readonly parameters: Json;
  /** How long the call may take until its signal aborts, for a worker that takes a deadline. */
  readonly timeoutMs?: number | undefined;
  /** The `traceparent` of this call, if it is traced. */
  readonly traceparent?: string | undefined;
}

/** The client's mistake: an unknown version, adapter or route; its own credential, or its quota at the worker. */
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
      /** The client named what it is about: a version that is not ready, say. */
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
  /** When `well` became so. */
  readonly since: number;
}

export interface Worker {
  /** Unique in its model, stable over restarts; what people see. */
  readonly name: string;
  /** The same in every process that lists it; undefined for workers of this process's own. */
  readonly address?: string;
  /** `name:port` for the Host header and certificate, where its address was looked up. */
  readonly host?: string | undefined;
  /**
   * When `signal` aborts, the reply is `failed` at once and whatever was in flight is destroyed: the next `run` must never
   * see the tail of this one. A worker that `queues` calls `begun` once, when it begins with this batch; what it held and
   * never began fails with `blame: nobody`.
   */
  run(batch: Batch, signal: AbortSignal, begun?: () => void): Promise<Reply>;
  /** It takes the next batch while it runs one, and runs them in order. */
  readonly queues?: boolean;
  /**
   * The most tasks that it takes in one call, from 1 on: what its protocol allows, or what it said. Undefined: as many as
   * the model may have. It may change at any time; no call that starts after that holds more.
   */
  readonly maxBatchSize?: number | undefined;
  /** How full the worker last said it is, 0 to 1, and when. */
  readonly load?: { readonly share: number; readonly at: number } | undefined;
  /** What health checks say; undefined without any. While it is not well it gets no new batch. */
  readonly health?: WorkerHealth | undefined;
  /** Called when `health.well` changed; set by the dispatcher. */
  onHealth?: (() => void) | undefined;
  /**
   * Asks whether the worker is well, where there is a way to ask. Never throws. Undefined while the answer would prove
   * nothing: a worker that answers questions but failed its last batch.
   */
  readonly probe?: ((signal: AbortSignal) => Promise<boolean>) | undefined;
}

export interface Backend {
  readonly workers: readonly Worker[];
  /** Resolves when every worker can take a batch; rejects with a one-line Error that says what to do. */
  start(): Promise<void>;
  /** Ends every worker and resolves when they are gone. Idempotent. */
  stop(): Promise<void>;
  /**
   * One worker more; resolves when it can take a batch, rejects with a one-line Error that says what to do. `address` and
   * `host` as in `Worker`, for workers that this process does not start itself.
   */
  grow(address?: string, host?: string): Promise<Worker>;
  /** Removes and ends this worker, which runs nothing. */
  retire(worker: Worker): Promise<void>;
}
