/** Verdicts as the `settle` script takes them, and the outcomes that they stand for. */
import { errors } from "../core/errors.ts";
import type { Outcome } from "../core/task.ts";
import type { ClaimedTask, Lease, RecordView, Verdict } from "./engine.ts";
import { frame, metaFrame, outcomeFrame, resultValue, type RedisClock } from "./redis-frames.ts";
import type { Arg } from "../redis/nodes.ts";

/** What a claim learned of a task and a settle needs: not for anybody else. */
export interface Claimed {
  readonly claimed: ClaimedTask;
  readonly meta: Buffer;
  readonly cacheKey: string;
  readonly cacheTtlMs: number;
}

export interface Told {
  readonly args: readonly Arg[];
  /** Keys beside the record's own. */
  readonly names: readonly string[];
  /** The record as it is when the verdict is taken; undefined for a retry. */
  readonly record: RecordView | undefined;
  /** The outcome's frame; empty for a retry. */
  readonly bytes: Buffer;
  /** What is kept of a success, where it is written before the script runs, and for how long. */
  readonly output?: { readonly name: string; readonly value: Buffer; readonly ttlMs: number };
}

const NO_BYTES = Buffer.alloc(0);

export function tell(
  verdict: Verdict,
  lease: Lease,
  known: Claimed | undefined,
  ttlMs: number,
  now: number,
  clock: RedisClock,
): Told {
  if (verdict.kind === "retry") {
    const { at, spared, overdue, maxBatchSize } = verdict;
    const limit = maxBatchSize === undefined || maxBatchSize === Infinity ? 0 : maxBatchSize;
    const args = ["r", clock.shared(at), spared === true ? 1 : 0, overdue === true ? 1 : 0, limit];
    return { args, names: [], record: undefined, bytes: NO_BYTES };
  }
  const { record, bytes } = finished(verdict.id, outcomeOf(verdict), lease, known, now, clock);
  const names = [`r:${verdict.id}`, `b:${verdict.id}`];
  if (verdict.kind === "done") {
    const cacheTtlMs = known === undefined || known.cacheKey === "" ? 0 : known.cacheTtlMs;
    const until = { expiresAt: now + ttlMs, reusableAt: cacheTtlMs === 0 ? 0 : now + cacheTtlMs };
    const value = resultValue(record.task.tenant, until, bytes, clock);
    const output = { name: `o:${verdict.id}.${lease.token}`, value, ttlMs: Math.max(ttlMs, cacheTtlMs) };
    names.push(output.name);
    return { args: ["d", known?.claimed.attempt ?? 0, "", "", ""], names, record, bytes, output };
  }
  const retryable = errors[verdict.code].retryable ? 1 : 0;
  if (verdict.kind === "failed") return { args: ["f", bytes, retryable, "", ""], names, record, bytes };
  return { args: ["x", bytes, retryable, verdict.code, verdict.detail], names, record, bytes };
}

function outcomeOf(verdict: Exclude<Verdict, { kind: "retry" }>): Outcome {
  if (verdict.kind === "done") return { ok: true, output: verdict.output };
  const { code, message } = verdict;
  return { ok: false, code, message };
}

function finished(
  id: string,
  outcome: Outcome,
  { batch }: Lease,
  known: Claimed | undefined,
  now: number,
  clock: RedisClock,
): { record: RecordView; bytes: Buffer } {
  const { id: batchId, reason, worker, startedAt, why, size } = batch;
  const batchBytes = frame([batchId, reason, worker, clock.shared(startedAt), why, String(size)]);
  const claimed = known?.claimed;
  const task = { ...(claimed?.task ?? NOBODY), id, input: "", content: "" };
  const { attempt = 0, queuedAt = now } = claimed ?? {};
  const meta = known?.meta ?? metaFrame(task, {}, clock);
  const bytes = outcomeFrame({ meta, attempt, queuedAt, settledAt: now, batch: batchBytes }, outcome, clock);
  const state = outcome.ok ? "done" : "failed";
  return { bytes, record: { task, state, attempt, queuedAt, settledAt: now, outcome, batch } };
}

/** A verdict on a task that its lease never held; the script will not take it. */
const NOBODY = {
  tenant: "",
  tier: 0,
  model: "",
  parameters: "",
  content: "",
  createdAt: 0,
  deadlineAt: 0,
} as const;
