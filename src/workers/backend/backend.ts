/**
 * The backend contract: how Ferry talks to one kind of worker.
 *
 * A backend owns its workers, each able to run one batch at a time; the dispatcher hands a worker that still runs
 * one at most one more, and only where that is wanted (`pipeline`). `run` never throws and never hangs past
 * `signal`: whatever the worker does becomes one of five replies. `test/contract/backend.ts` holds every backend to
 * this.
 *
 *   answered   one output per task, in the order of the batch's tasks. The backend has checked that the worker
 *              sent exactly as many usable outputs as it got inputs; if not, the reply is `unusable`.
 *   rejected   the worker lives and refused this batch (a 4xx, an exception in the user's function): one of its inputs; with
 *              a `code`, what its client asked for beside the inputs, which all of its tasks have in common.
 *   unusable   the worker lives and its reply cannot be used: wrong count, not JSON, NaN, too large, or one of the
 *              outputs is what no caller may get (`match`, for every backend).
 *   busy       the worker asks to come back later (429, 503); the attempt does not count.
 *   failed     the worker is broken or gone. `blame` says what that means for the tasks:
 *                worker    it answered with an error of its own; the attempt counts.
 *                batch     it died, or hung, with the batch in its hands: one of the inputs may be what
 *                          killed it.
 *                nobody    the batch never reached it (refused connection, still restarting); the
 *                          attempt does not count.
 *
 * A reply's `message` is for the dead letter and for the error a client sees: one line, no stack, no secret.
 * It may quote the worker, and a worker may quote an input; so what is logged is `brief`, the same in our words
 * alone, which is left out where the message quotes nobody.
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
  /** How long the call may take until its signal aborts, for a worker that takes a deadline; left out: not known. */
  readonly timeoutMs?: number | undefined;
  /** The `traceparent` of this call, for a worker that takes one; left out: it is not traced. */
  readonly traceparent?: string | undefined;
}

/** A version, an adapter or a route that is not there; the client's own credential, refused by the worker, or its quota there. */
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

/** What a worker says about itself when it is asked. */
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
  /** Where it is, the same in every process that lists it; left out for those that are this process's own. */
  readonly address?: string;
  /** `name:port` that it is asked by, where its address was looked up: the Host header, the name in its certificate. */
  readonly host?: string | undefined;
  /**
   * Runs one batch. When `signal` aborts, the reply is `failed` at once and whatever was in flight is
   * destroyed: the next `run` must never see the tail of this one. A worker that `queues` calls `begun` once, when
   * it has begun with this batch and not merely holds it; what it held and never began fails with `blame: nobody`.
   */
  run(batch: Batch, signal: AbortSignal, begun?: () => void): Promise<Reply>;
  /** It takes the next batch while it runs one, and runs them in the order in which they came. */
  readonly queues?: boolean;
  /**
   * The most tasks that it takes in one call, a whole number from 1 on: what its protocol allows, or what it said of
   * itself. Undefined where it takes as many as the model may have. It may change at any time; no call that starts
   * after that holds more.
   */
  readonly maxBatchSize?: number | undefined;
  /** How full the worker last said it is, 0 to 1, and when; undefined where it never says. */
  readonly load?: { readonly share: number; readonly at: number } | undefined;
  /**
   * How it answers when it is asked in between; undefined where it is not asked, and until it has answered.
   * While it is not well it should get no new batch. That it is well does not make up for failed batches.
   */
  readonly health?: WorkerHealth | undefined;
  /** Called when `health.well` changed. One listener: whoever gives it batches. */
  onHealth?: (() => void) | undefined;
  /**
   * Asks whether the worker is well, where its protocol has a way to ask. Never throws. Undefined also while
   * the answer would prove nothing: a worker that answers questions but failed its last batch.
   */
  readonly probe?: ((signal: AbortSignal) => Promise<boolean>) | undefined;
}

export interface Backend {
  /** Those that are there now. */
  readonly workers: readonly Worker[];
  /** Resolves when every worker can take a batch; rejects with a one-line Error that says what to do. */
  start(): Promise<void>;
  /** Ends every worker and resolves when they are gone. Idempotent. */
  stop(): Promise<void>;
  /**
   * One worker more; resolves when it can take a batch, rejects with a one-line Error that says what to do. `address`
   * is where it is, for workers that live by themselves; a backend that starts its own workers is given none. `host`: as
   * in `Worker`.
   */
  grow(address?: string, host?: string): Promise<Worker>;
  /** Ends this worker, which runs nothing; it is not among `workers` any more. */
  retire(worker: Worker): Promise<void>;
}
