/**
 * The contract as a second, slow engine: it says what an engine must answer, and then follows the answer.
 *
 * Each method takes what the engine was asked and what it replied, fails when the reply breaks a promise,
 * and moves the record. Where the contract leaves a choice the model takes what the engine chose.
 */
import assert from "node:assert/strict";
import { type ErrorCode, errors } from "../../src/core/errors.ts";
import { ALONE_FROM_LOST, DEAD_FROM_ATTEMPT } from "../../src/core/retry.ts";
import type { Task } from "../../src/core/task.ts";
import type {
  CancelReply,
  ClaimRequest,
  Lease,
  PutReply,
  SettleReply,
  Sharing,
  Verdict,
} from "../../src/engine/engine.ts";
import { type EngineOptions, idsOf, MODEL, type Seen } from "./engine-stage.ts";

interface ModelRecord {
  task: Task;
  readonly sharing: Sharing;
  state: "queued" | "running" | "done" | "failed";
  attempt: number;
  tier: number;
  queuedAt: number;
  deadlineAt: number;
  /** When it gives up its place in the queue. */
  expiresAt: number;
  /** Waiting for its retry until then; 0 while it is in its queue. */
  retryAt: number;
  /** The lease that holds it; "" while none does. */
  token: string;
  leaseUntil: number;
  joins: number;
  keyed: boolean;
  overdue: boolean;
  /** It was a dead letter, and is one again unless it succeeds. */
  replayed: boolean;
  lost: number;
  maxBatchSize: number;
  settledAt: number;
  code: ErrorCode | "";
}

interface Cached {
  readonly output: string;
  readonly expiresAt: number;
  /** A restart may have lost it. */
  sure: boolean;
}

export class EngineModel {
  readonly #options: EngineOptions;
  readonly records = new Map<string, ModelRecord>();
  /** When each dead letter died. */
  readonly letters = new Map<string, { task: Task; diedAt: number }>();
  readonly #keys = new Map<string, { id: string; fingerprint: string }>();
  /** All that ever were, in order. */
  readonly #bindings: { key: string; bound: { id: string; fingerprint: string } }[] = [];
  readonly #cache = new Map<string, Cached>();
  /** Every task that was ever accepted, and how many ends it must have had: one, and one more per replay. */
  readonly lives = new Map<string, number>();

  constructor(options: EngineOptions) {
    this.#options = options;
  }

  // ── put ─────────────────────────────────────────────────────────────────────────────────────────

  put(task: Task, sharing: Sharing, reply: PutReply, now: number): void {
    if (this.#putKnown(task, sharing, reply, now)) return;
    if (this.#putCached(task, sharing, reply, now)) return;
    const leader = this.inFlight(sharing.joinKey);
    if (leader !== undefined) {
      assert.deepEqual(reply, { kind: "joined", id: leader.task.id });
      assert.equal(leader.task.tenant, task.tenant);
      leader.joins++;
      this.#accommodate(leader, task, now);
      this.#bind(leader, sharing);
      return;
    }
    if (sharing.only === true || this.#count("queued") >= this.#options.maxQueued) {
      assert.equal(reply.kind, "full");
      return;
    }
    assert.deepEqual(reply, { kind: "queued", id: task.id });
    this.#bind(this.#open(task, sharing, now), sharing);
    this.lives.set(task.id, 1);
  }

  /** The same id, or the same Idempotency-Key. */
  #putKnown(task: Task, sharing: Sharing, reply: PutReply, now: number): boolean {
    const { idempotency } = sharing;
    const bound = idempotency && this.#keys.get(idempotency.key);
    const record = this.records.get(task.id) ?? this.records.get(bound?.id ?? "");
    if (record === undefined) return false;
    const { id } = record.task;
    if (id !== task.id) {
      if (bound!.fingerprint !== idempotency!.fingerprint) {
        assert.deepEqual(reply, { kind: "conflict", id });
        return true;
      }
      if (record.code !== "" && errors[record.code].retryable) return false;
      if (!isFinal(record)) this.#accommodate(record, task, now);
    }
    assert.equal(reply.kind, isFinal(record) ? "done" : "joined");
    assert(reply.kind === "done" || reply.kind === "joined");
    assert.equal(reply.id, id);
    assert.equal(record.task.tenant, task.tenant);
    if (reply.kind === "done") assert.equal(reply.cached, false);
    return true;
  }

  #putCached(task: Task, sharing: Sharing, reply: PutReply, now: number): boolean {
    const cached = this.#cache.get(sharing.cacheKey ?? "");
    if (cached === undefined || cached.expiresAt <= now) return false;
    if (!cached.sure && reply.kind !== "done") return false;
    assert(reply.kind === "done", reply.kind);
    assert.deepEqual([reply.id, reply.cached], [task.id, true]);
    assert.deepEqual(reply.record.outcome, { ok: true, output: cached.output });
    assert.equal(reply.record.task.tenant, task.tenant);
    const record = this.#open(task, {}, now);
    this.#bind(record, sharing);
    this.lives.set(task.id, 1);
    this.#end(record, "", now);
    return true;
  }

  #open(task: Task, sharing: Sharing, now: number): ModelRecord {
    const record: ModelRecord = {
      task,
      sharing,
      state: "queued",
      attempt: 0,
      tier: task.tier,
      queuedAt: now,
      deadlineAt: task.deadlineAt,
      expiresAt: this.#expiry(now, task.deadlineAt),
      retryAt: 0,
      token: "",
      leaseUntil: 0,
      joins: 0,
      keyed: false,
      overdue: false,
      replayed: false,
      lost: 0,
      maxBatchSize: Infinity,
      settledAt: 0,
      code: "",
    };
    this.records.set(task.id, record);
    return record;
  }

  #bind(record: ModelRecord, { idempotency }: Sharing): void {
    if (idempotency === undefined) return;
    record.keyed = true;
    const { key, fingerprint } = idempotency;
    const bound = { id: record.task.id, fingerprint };
    this.#keys.set(key, bound);
    this.#bindings.push({ key, bound });
  }

  #accommodate(record: ModelRecord, newcomer: Task, now: number): void {
    record.deadlineAt = Math.max(record.deadlineAt, newcomer.deadlineAt);
    record.expiresAt = Math.max(record.expiresAt, this.#expiry(now, record.deadlineAt));
    record.tier = Math.min(record.tier, newcomer.tier);
  }

  inFlight(joinKey: string | undefined): ModelRecord | undefined {
    if (joinKey === undefined) return undefined;
    return [...this.records.values()].find((each) => each.sharing.joinKey === joinKey && !isFinal(each));
  }

  // ── claim, extend, settle ───────────────────────────────────────────────────────────────────────

  claim(request: ClaimRequest, lease: Lease, ends: readonly Seen[], now: number): void {
    assert.ok(lease.tasks.length <= request.max, "a lease larger than asked for");
    assert.deepEqual(lease.batch, { ...request.batch, size: lease.tasks.length });
    assert.equal(new Set(idsOf(lease)).size, lease.tasks.length);
    const there = this.queue(request.parameters);
    const expired = new Set(there.filter((each) => each.expiresAt <= now).map(({ task }) => task.id));
    for (const { id } of ends) assert.ok(expired.has(id), `${id} was ended before its time`);
    this.ended(ends, now);
    if (there.length > expired.size) assert.ok(lease.tasks.length > 0, "an empty lease, but tasks are there");
    for (const { task, attempt, queuedAt } of lease.tasks) {
      const record = this.records.get(task.id);
      assert.ok(record !== undefined && there.includes(record), `${task.id} is not in this queue`);
      assert.ok(!expired.has(task.id), `${task.id} waited too long`);
      assert.ok(lease.tasks.length <= record.maxBatchSize, `${task.id} in too large a batch`);
      assert.deepEqual([attempt, queuedAt], [record.attempt + 1, record.queuedAt]);
      assert.equal(task.input, record.task.input);
      Object.assign(record, {
        state: "running",
        attempt,
        token: lease.token,
        leaseUntil: now + request.leaseMs,
      });
    }
  }

  extend(lease: Lease, leaseMs: number, lost: readonly string[], now: number): void {
    const held = idsOf(lease).filter((id) => this.#holds(lease, this.records.get(id)));
    assert.deepEqual(new Set(lost), new Set(idsOf(lease).filter((id) => !held.includes(id))));
    for (const id of held) this.records.get(id)!.leaseUntil = now + leaseMs;
  }

  settle(lease: Lease, verdicts: readonly Verdict[], replies: readonly SettleReply[], now: number): void {
    assert.deepEqual(
      replies,
      verdicts.map((verdict) => this.#settleOne(lease, verdict, now)),
    );
  }

  #settleOne(lease: Lease, verdict: Verdict, now: number): SettleReply {
    const record = this.records.get(verdict.id);
    if (record === undefined) return "gone";
    if (isFinal(record)) return "late";
    if (verdict.kind === "done") {
      const { cacheKey, cacheTtlMs } = record.sharing;
      if (cacheKey !== undefined && cacheTtlMs !== undefined)
        this.#cache.set(cacheKey, { output: verdict.output, expiresAt: now + cacheTtlMs, sure: true });
      this.#end(record, "", now);
      return "taken";
    }
    if (!this.#holds(lease, record)) return "late";
    if (verdict.kind !== "retry") {
      if (verdict.kind === "dead") this.letters.set(verdict.id, { task: record.task, diedAt: now });
      this.#end(record, verdict.code, now);
      return "taken";
    }
    if (verdict.overdue === true && record.overdue) return "late";
    if (verdict.overdue === true) record.overdue = true;
    if (verdict.spared === true) record.attempt--;
    record.maxBatchSize = Math.min(record.maxBatchSize, verdict.maxBatchSize ?? Infinity);
    this.#putBack(record, verdict.at, now);
    return "taken";
  }

  #holds(lease: Lease, record: ModelRecord | undefined): boolean {
    return record?.state === "running" && record.token === lease.token;
  }

  #putBack(record: ModelRecord, at: number, now: number): void {
    const retryAt = at > now ? at : 0;
    const expiresAt = this.#expiry(Math.max(at, now), record.deadlineAt);
    Object.assign(record, { state: "queued", token: "", retryAt, expiresAt });
  }

  // ── cancel, dead letters ────────────────────────────────────────────────────────────────────────

  cancel(id: string, tenant: string, abandoned: boolean, reply: CancelReply, now: number): void {
    const record = this.records.get(id);
    if (record === undefined || record.task.tenant !== tenant) {
      assert.equal(reply, "unknown");
    } else if (isFinal(record)) {
      assert.equal(reply, abandoned ? "kept" : "forgotten");
      if (!abandoned) this.records.delete(id);
    } else if (record.joins > 0 || record.state === "running" || (abandoned && record.keyed)) {
      assert.equal(reply, "kept");
      if (abandoned && record.joins > 0) record.joins--;
    } else {
      assert.equal(reply, "cancelled");
      this.#end(record, "CANCELLED", now);
    }
  }

  replay(id: string, reply: boolean | "full", now: number): void {
    const letter = this.letters.get(id);
    if (letter !== undefined && this.#count("queued") >= this.#options.maxQueued) {
      assert.equal(reply, "full");
      return;
    }
    assert.equal(reply, letter !== undefined);
    if (letter === undefined) return;
    this.letters.delete(id);
    this.lives.set(id, this.lives.get(id)! + 1);
    const task = { ...letter.task, createdAt: now, deadlineAt: now + this.#limits.totalMs };
    this.#open(task, {}, now).replayed = true;
  }

  purge(id: string, reply: boolean): void {
    assert.equal(reply, this.letters.delete(id));
  }

  // ── time ────────────────────────────────────────────────────────────────────────────────────────

  /** After a `reap` at `now`, with the ends that it announced. */
  reaped(ends: readonly Seen[], now: number): void {
    const open = [...this.records.values()].filter((each) => !isFinal(each));
    for (const record of open) if (record.retryAt <= now) record.retryAt = 0;
    const late = open.filter(
      (each) =>
        each.deadlineAt <= now || (each.state === "queued" && each.retryAt === 0 && each.expiresAt <= now),
    );
    const lost = open.filter((each) => !late.includes(each) && each.token !== "" && each.leaseUntil <= now);
    const dead = lost.filter(({ attempt }) => attempt >= DEAD_FROM_ATTEMPT);
    const idsOf = (records: readonly ModelRecord[]): string[] => records.map(({ task }) => task.id);
    assert.deepEqual(new Set(ends.map(({ id }) => id)), new Set(idsOf([...late, ...dead])));
    const dying = new Set(idsOf(dead));
    this.ended(
      ends.filter(({ id }) => !dying.has(id)),
      now,
    );
    for (const record of dead) {
      this.letters.set(record.task.id, { task: record.task, diedAt: now });
      this.#end(record, "INFERENCE_FAILED", now);
    }
    for (const record of lost) {
      if (dying.has(record.task.id)) continue;
      if (++record.lost >= ALONE_FROM_LOST) record.maxBatchSize = 1;
      this.#putBack(record, now, now);
    }
    for (const [id, record] of this.records) if (this.#isOld(record, now)) this.records.delete(id);
    for (const [id, { diedAt }] of this.letters)
      if (diedAt + this.#options.deadLetters.ttlMs <= now) this.letters.delete(id);
  }

  /** Is anything past its time to live? */
  outlived(now: number): boolean {
    return (
      [...this.records.values()].some((record) => this.#isOld(record, now)) ||
      [...this.letters.values()].some(({ diedAt }) => diedAt + this.#options.deadLetters.ttlMs <= now)
    );
  }

  #isOld(record: ModelRecord, now: number): boolean {
    return isFinal(record) && record.settledAt + this.#options.results.ttlMs <= now;
  }

  /** What a process that starts on the same store finds: nothing is lost, and clocks start anew. */
  restarted(now: number): void {
    for (const cached of this.#cache.values()) cached.sure = false;
    // Where the last task of a key was forgotten, an earlier one that is still kept stands for it again.
    for (const { key, bound } of this.#bindings.toReversed()) {
      const holder = this.#keys.get(key);
      const gone = holder === undefined || !this.records.has(holder.id);
      if (gone && this.records.has(bound.id)) this.#keys.set(key, bound);
    }
    for (const record of this.records.values()) {
      if (isFinal(record)) continue;
      const deadlineAt = now + this.#limits.totalMs;
      record.task = { ...record.task, createdAt: now, deadlineAt };
      const [tier, expiresAt] = [record.task.tier, this.#expiry(now, deadlineAt)];
      Object.assign(record, { state: "queued", attempt: 0, tier, queuedAt: now, deadlineAt, expiresAt });
      Object.assign(record, {
        retryAt: 0,
        token: "",
        joins: 0,
        overdue: false,
        lost: 0,
        maxBatchSize: Infinity,
      });
    }
  }

  /** Ends by the clock. */
  ended(ends: readonly Seen[], now: number): void {
    for (const { id, outcome } of ends) {
      assert.equal(outcome?.ok === false && outcome.code, "DEADLINE_EXCEEDED");
      this.#end(this.records.get(id)!, "DEADLINE_EXCEEDED", now);
    }
  }

  // ── what must be seen ───────────────────────────────────────────────────────────────────────────

  queue(parameters: string): ModelRecord[] {
    return [...this.records.values()].filter(
      (each) => each.state === "queued" && each.retryAt === 0 && each.task.parameters === parameters,
    );
  }

  /** Queued, running, kept, dead letters. */
  counts(): [number, number, number, number] {
    const kept = this.#count("done") + this.#count("failed");
    return [this.#count("queued"), this.#count("running"), kept, this.letters.size];
  }

  #count(state: ModelRecord["state"]): number {
    return [...this.records.values()].filter((each) => each.state === state).length;
  }

  #end(record: ModelRecord, code: ErrorCode | "", now: number): void {
    assert.ok(!isFinal(record), `${record.task.id} ended twice`);
    Object.assign(record, { state: code === "" ? "done" : "failed", code, settledAt: now, token: "" });
    if (record.replayed && code !== "") this.letters.set(record.task.id, { task: record.task, diedAt: now });
  }

  #expiry(from: number, deadlineAt: number): number {
    return Math.min(deadlineAt, from + this.#limits.queueMs);
  }

  get #limits(): { readonly queueMs: number; readonly totalMs: number } {
    return this.#options.models.get(MODEL)!;
  }
}

export function isFinal({ state }: Pick<ModelRecord, "state">): boolean {
  return state === "done" || state === "failed";
}
