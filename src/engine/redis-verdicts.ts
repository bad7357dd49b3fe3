/** Verdicts as the `settle` script takes them, and the outcomes that they stand for. */
import { errors } from "../core/errors.ts";
import type { Outcome } from "../core/task.ts";
import type { ClaimedTask, Lease, RecordView, Verdict } from "./engine.ts";
import { metaFrame, outcomeFrame, type RedisClock, resultValue } from "./redis-frames.ts";
import type { Arg } from "../redis/nodes.ts";
import { indexName } from "./redis-keys.ts";

/** What a claim learned of a task and a settle needs: not for anybody else. */
export interface Claimed {
  readonly claimed: ClaimedTask;
  readonly meta: Buffer;
  readonly joinKey: string;
  readonly cacheKey: string;
  readonly cacheTtlMs: number;
}

export interface Output {
  readonly name: string;
  readonly value: Buffer;
  readonly ttlMs: number;
}

export interface Told {
  /** As the script calls it. */
  readonly kind: "d" | "f" | "x" | "r";
  readonly attempt: number;
  readonly args: readonly Arg[];
  /** Keys beside the record's own. */
  readonly names: readonly string[];
  /** The record as it is when the verdict is taken; undefined for a retry. */
  readonly record: RecordView | undefined;
  /** The outcome's frame; empty for a retry. */
  readonly bytes: Buffer;
  /** What is kept of a success, where it is written before the script runs, and for how long. */
  readonly output?: Output;
}

const NO_BYTES = Buffer.alloc(0);
const NO_ARGS: readonly Arg[] = [];

/** What all verdicts of one settle have in common. */
export interface Verdicts {
  readonly lease: Lease;
  readonly batch: Buffer;
  readonly ttlMs: number;
  readonly now: number;
  readonly clock: RedisClock;
}

export function tell(verdict: Verdict, known: Claimed | undefined, all: Verdicts): Told {
  const { lease, ttlMs, now, clock } = all;
  if (verdict.kind === "retry") {
    const { at, spared, overdue, maxBatchSize } = verdict;
    const limit = maxBatchSize === undefined || maxBatchSize === Infinity ? 0 : maxBatchSize;
    const args = [clock.shared(at), spared === true ? 1 : 0, overdue === true ? 1 : 0, limit];
    return { kind: "r", attempt: 0, args, names: [], record: undefined, bytes: NO_BYTES };
  }
  const { id } = verdict;
  const outcome = outcomeOf(verdict);
  const { claimed, meta, joinKey, cacheKey, cacheTtlMs } = known ?? nobody(id, now, clock);
  const { attempt, queuedAt } = claimed;
  const task = { ...claimed.task, input: "", content: "" };
  const state = outcome.ok ? "done" : "failed";
  const record = { task, state, attempt, queuedAt, settledAt: now, outcome, batch: lease.batch } as const;
  const fields = { meta, attempt, queuedAt, settledAt: now, batch: all.batch };
  const names = [`r:${id}`, `b:${id}`];
  if (verdict.kind === "done") {
    const reusableMs = cacheKey === "" ? 0 : cacheTtlMs;
    const until = { expiresAt: now + ttlMs, reusableAt: reusableMs === 0 ? 0 : now + reusableMs };
    const { value, bytes } = resultValue({ tenant: task.tenant, ...until }, fields, outcome, clock);
    // Whoever comes with this content, from whichever tenant, is to find it; "" where the index of `put` leads there.
    const index = cacheKey === joinKey ? "" : indexName(cacheKey);
    const output = { name: `o:${id}.${lease.token}`, value, ttlMs: Math.max(ttlMs, reusableMs) };
    names.push(output.name);
    // By the script, and only when it counts: a late success must not hide one that others can have.
    if (index !== "") names.push(`x:${index}`);
    const args = index === "" ? NO_ARGS : ["", index, output.ttlMs];
    return { kind: "d", attempt, args, names, record, bytes, output };
  }
  const bytes = outcomeFrame(fields, outcome, clock);
  const retryable = errors[verdict.code].retryable ? 1 : 0;
  if (verdict.kind === "failed")
    return { kind: "f", attempt, args: [bytes, retryable], names, record, bytes };
  const args = [bytes, retryable, verdict.code, verdict.detail];
  return { kind: "x", attempt, args, names, record, bytes };
}

function outcomeOf(verdict: Exclude<Verdict, { kind: "retry" }>): Outcome {
  if (verdict.kind === "done") return { ok: true, output: verdict.output };
  const { code, message } = verdict;
  return { ok: false, code, message };
}

/** A verdict on a task that its lease never held; the script will not take it. */
function nobody(id: string, now: number, clock: RedisClock): Claimed {
  const task = { id, tenant: "", tier: 0, model: "", input: "", parameters: "", content: "", createdAt: now };
  const claimed = { task: { ...task, deadlineAt: now }, attempt: 0, queuedAt: now };
  return { claimed, meta: metaFrame(claimed.task, {}, clock), joinKey: "", cacheKey: "", cacheTtlMs: 0 };
}
