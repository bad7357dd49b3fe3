/**
 * The words of the product as types: task, outcome, batch.
 *
 * A task is one unit the model can batch. Its life:
 *
 *   queued ──► running ──► done
 *     ▲ ▲        │  │
 *     │ └────────┘  └────► failed ──┐      failed also straight from queued: expired, cancelled
 *     └─────────────────────────────┘      replay of a dead letter
 *
 * `done` never changes. `failed` changes only when a person replays a dead letter.
 * Inputs, parameters and outputs are JSON *text* from edge to edge: parsed once to be checked,
 * never printed again, so that a 64-bit integer or a float leaves as it came.
 */
import type { ErrorCode } from "./errors.ts";

export type TaskState = "queued" | "running" | "done" | "failed";

/** JSON text, already checked. */
export type Json = string;

export interface Task {
  readonly id: string;
  /** The party behind the credential; only this tenant may see the outcome. */
  readonly tenant: string;
  /** Position in the configured tiers; 0 is served first. */
  readonly tier: number;
  readonly model: string;
  readonly input: Json;
  /** Canonical JSON text, "" when there are none. Tasks share a batch only when this is equal. */
  readonly parameters: Json;
  /** Model, parameters (their SHA-256 where they are long), SHA-256 of the canonical input, and the tenant if only that one may share it; "": not shared. */
  readonly content: string;
  readonly createdAt: number;
  /** The caller waits no longer than this. Set once, in `gateway/intake.ts`. */
  readonly deadlineAt: number;
  /** The `traceparent` of the request's span; undefined: it is not traced. */
  readonly trace?: string | undefined;
}

export type Outcome =
  | { readonly ok: true; readonly output: Json }
  | { readonly ok: false; readonly code: ErrorCode; readonly message: string };

/** Why a batch left when it did. */
export const DISPATCH_REASONS = ["full", "wait", "idle", "deadline"] as const;
export type DispatchReason = (typeof DISPATCH_REASONS)[number];

/** What is remembered of the batch that produced an outcome. */
export interface BatchNote {
  readonly id: string;
  readonly size: number;
  readonly reason: DispatchReason;
  readonly worker: string;
  readonly startedAt: number;
  /** One sentence for people: why it left with this size at this moment. */
  readonly why: string;
}
