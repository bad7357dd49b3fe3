/**
 * Core types: task, outcome, batch. A task is one unit that the model can batch.
 *
 *   queued ──► running ──► done
 *     ▲ ▲        │  │
 *     │ └────────┘  └────► failed ──┐      failed also straight from queued: expired, cancelled
 *     └─────────────────────────────┘      replay of a dead letter
 *
 * `done` never changes. `failed` changes only when an operator replays a dead letter. Inputs, parameters and outputs
 * are JSON *text* end to end: parsed once to be checked, never re-serialized, so that a 64-bit integer or a float
 * leaves as it came.
 */
import type { ErrorCode } from "./errors.ts";

export type TaskState = "queued" | "running" | "done" | "failed";

/** JSON text, already checked. */
export type Json = string;

export interface Task {
  readonly id: string;
  /** Owner of the credential; only this tenant may see the outcome. */
  readonly tenant: string;
  /** Index in the configured tiers; 0 is served first. */
  readonly tier: number;
  readonly model: string;
  readonly input: Json;
  /** Canonical JSON text, "" if none. Tasks share a batch only when this is equal. */
  readonly parameters: Json;
  /**
   * Model, parameters (SHA-256 if long), SHA-256 of the canonical input, tenant if sharing is per tenant; "": not
   * shared.
   */
  readonly content: string;
  readonly createdAt: number;
  /** Set once, in `gateway/intake.ts`. */
  readonly deadlineAt: number;
  /** `traceparent` of the request's span; undefined if not traced. */
  readonly trace?: string | undefined;
}

export type Outcome =
  | { readonly ok: true; readonly output: Json }
  | { readonly ok: false; readonly code: ErrorCode; readonly message: string };

export const DISPATCH_REASONS = ["full", "wait", "idle", "deadline"] as const;
export type DispatchReason = (typeof DISPATCH_REASONS)[number];

export interface BatchNote {
  readonly id: string;
  readonly size: number;
  readonly reason: DispatchReason;
  readonly worker: string;
  readonly startedAt: number;
  /** One sentence for people: why it left with this size at this time. */
  readonly why: string;
}
