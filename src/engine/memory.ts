/**
 * The embedded engine: everything in this process, and on disk too when it is given a journal.
 *
 * Each verb changes memory in one synchronous step, which is what makes it atomic; only then does it
 * wait for the journal. A record that is not final is in exactly one place:
 *
 *   in a queue            state queued, `list` set
 *   waiting for a retry   state queued, `retryAt` set
 *   under a lease         state running, `lease` and `leaseUntil` set
 *
 * and stands in `#reviews` with the instant at which `reap` must look at it.
 *
 * Bounds: `maxQueued` and `maxQueuedBytes` for what waits, `results.maxBytes` for what is finished and
 * again for the cache, `deadLetters.max`, and `MAX_SPENDERS` rate windows.
 */
import type { Clock } from "../clock.ts";
import { Heap } from "../core/heap.ts";
import type { Outcome, Task } from "../core/task.ts";
import { type Spent, Windows } from "../core/window.ts";
import type { Events } from "../telemetry/events.ts";
import { DeadLetters } from "./dead-letters.ts";
import type {
  CancelReply,
  ClaimRequest,
  Engine,
  EngineListener,
  EngineStats,
  Lease,
  PutReply,
  QueueView,
  RecordView,
  SettleReply,
  Sharing,
  Verdict,
} from "./engine.ts";
import type { SavedRecord } from "./journal.ts";
import { ModelQueues } from "./queues.ts";
import { TaskRecord } from "./record.ts";
import { type RecordKeeper, restored } from "./saved.ts";
import { SharedWork } from "./sharing.ts";
import { Shelf } from "./shelf.ts";

export interface MemoryOptions {
  /** Each model's own limits. */
  readonly models: ReadonlyMap<string, { readonly queueMs: number; readonly totalMs: number }>;
  readonly tiers: number;
  readonly maxQueued: number;
  readonly maxQueuedBytes: number;
  readonly results: { readonly ttlMs: number; readonly evictAfterRead: boolean; readonly maxBytes: number };
  readonly deadLetters: { readonly max: number; readonly ttlMs: number };
}

const MAX_SPENDERS = 100_000;
const NOTHING: readonly never[] = [];

export class MemoryEngine implements Engine {
  readonly #options: MemoryOptions;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #keeper: RecordKeeper | undefined;
  /** Every record by id. Bounded by the queue and the shelf. */
  readonly #records = new Map<string, TaskRecord>();
  readonly #queues = new Map<string, ModelQueues>();
  readonly #reviews = new Heap<TaskRecord>();
  readonly #shelf: Shelf;
  readonly #shared: SharedWork;
  readonly #windows = new Windows(MAX_SPENDERS);
  readonly #listeners = new Set<EngineListener>();
  readonly deadLetters: DeadLetters;
  #waiting = 0;
  #waitingBytes = 0;
  #running = 0;
  #leases = 0;
  #nextReap = Infinity;

  constructor(options: MemoryOptions, clock: Clock, events: Events, keeper?: RecordKeeper) {
    this.#options = options;
    this.#clock = clock;
    this.#events = events;
    this.#keeper = keeper;
    for (const model of options.models.keys()) this.#queues.set(model, new ModelQueues(options.tiers));
    this.#shelf = new Shelf(options.results.ttlMs, options.results.maxBytes, (record) =>
      this.#forget(record),
    );
    this.#shared = new SharedWork(options.results.maxBytes);
    this.deadLetters = new DeadLetters(options.deadLetters, events, {
      replay: (task) => this.#replay(task),
      forgotten: (id) => this.#letterGone(id),
    });
    for (const saved of keeper?.found ?? NOTHING) this.#restore(saved, clock.now());
  }

  async put(task: Task, sharing: Sharing = {}): Promise<PutReply> {
    const reply = this.#putNow(task, sharing);
    if (this.#keeper === undefined || reply.kind === "full" || reply.kind === "conflict") return reply;
    try {
      await this.#keeper.flushed();
      return reply;
    } catch (error) {
      await this.cancel(task.id, task.tenant, true);
      return { kind: "full", message: `the journal cannot be written (${(error as Error).message})` };
    }
  }

  #putNow(task: Task, sharing: Sharing): PutReply {
    const now = this.#clock.now();
    const known = this.#find(task.id);
    if (known !== undefined) return this.#join(known);
    const keyed = this.#shared.keyed(sharing);
    if (keyed !== undefined && !this.#outlived(keyed.record, now)) {
      if (keyed.conflict) return { kind: "conflict", id: keyed.record.task.id };
      if (!keyed.record.final) this.#accommodate(keyed.record, task, now);
      return this.#join(keyed.record);
    }
    const cached = this.#shared.cached(sharing, now);
    if (cached !== undefined) {
      const record = this.#open(task, keyOnly(sharing), now);
      if (cached.batch !== undefined) record.batch = cached.batch;
      this.#events.emit("task.cached", { id: task.id, model: task.model });
      this.#finish(record, cached.outcome!, now);
      return { kind: "done", id: task.id, record, cached: true };
    }
    const leader = this.#shared.inFlight(sharing);
    if (leader !== undefined) {
      leader.joins++;
      this.#accommodate(leader, task, now);
      if (sharing.idempotency !== undefined) {
        this.#shared.bindKey(leader, sharing);
        this.#keeper?.update(leader);
      }
      return this.#join(leader);
    }
    const bound = this.#boundReached(task);
    if (bound !== undefined) return { kind: "full", message: bound };
    this.#enqueue(this.#open(task, sharing, now), "back");
    if (this.#events.heard("task.queued")) {
      this.#events.emit("task.queued", { id: task.id, model: task.model, tier: task.tier });
    }
    return { kind: "queued", id: task.id };
  }

  #open(task: Task, sharing: Sharing, now: number): TaskRecord {
    const record = new TaskRecord(task, sharing, this.#expiry(task.model, now, task.deadlineAt));
    this.#records.set(task.id, record);
    this.#shared.started(record);
    this.#keeper?.save(record);
    return record;
  }

  /** Somebody came for work that `record` does, or has done. */
  #join(record: TaskRecord): PutReply {
    const { id, model } = record.task;
    if (record.final) return { kind: "done", id, record, cached: false };
    this.#events.emit("task.joined", { id, model });
    return { kind: "joined", id };
  }

  /** Whoever joins brings the longer patience and the better tier. */
  #accommodate(record: TaskRecord, newcomer: Task, now: number): void {
    record.deadlineAt = Math.max(record.deadlineAt, newcomer.deadlineAt);
    const expiresAt = this.#expiry(newcomer.model, now, record.deadlineAt);
    record.expiresAt = Math.max(record.expiresAt, expiresAt);
    if (newcomer.tier >= record.tier) return;
    const queued = record.list !== undefined;
    if (queued) this.#dequeue(record);
    record.tier = newcomer.tier;
    if (queued) this.#enqueue(record, "arrival");
  }

  #boundReached(task: Task): string | undefined {
    const { maxQueued, maxQueuedBytes } = this.#options;
    if (this.#waiting >= maxQueued) return `the queue is full (limits.maxQueued ${maxQueued})`;
    if (this.#waitingBytes + task.input.length > maxQueuedBytes) {
      return `the queue is full (limits.maxQueuedBytes ${maxQueuedBytes})`;
    }
    return this.#shelf.full ? "too many results wait to be fetched (results.maxBytes)" : undefined;
  }

  async claim(request: ClaimRequest): Promise<Lease> {
    const now = this.#clock.now();
    const token = `${request.batch.id}.${++this.#leases}`;
    const records: TaskRecord[] = [];
    // Once more when all were expired: an empty lease says that nothing was there.
    for (let found = 1; found > 0 && records.length === 0;) {
      const taken = this.#queues.get(request.model)?.take(request.parameters, request.max) ?? NOTHING;
      found = taken.length;
      for (const record of taken) {
        this.#stopWaiting(record);
        if (now < record.expiresAt) records.push(record);
        else this.#expire(record, now);
      }
    }
    const batch = { ...request.batch, size: records.length };
    const tasks = records.map((record) => {
      record.state = "running";
      record.attempt++;
      record.lease = token;
      record.leaseUntil = now + request.leaseMs;
      record.batch = batch;
      this.#review(record, Math.min(record.leaseUntil, record.deadlineAt));
      return { task: record.task, attempt: record.attempt, queuedAt: record.queuedAt };
    });
    this.#running += tasks.length;
    return { token, batch, tasks };
  }

  async extend(lease: Lease, leaseMs: number): Promise<readonly string[]> {
    const until = this.#clock.now() + leaseMs;
    const lost: string[] = [];
    for (const { task } of lease.tasks) {
      const record = this.#records.get(task.id);
      if (record?.state === "running" && record.lease === lease.token) {
        record.leaseUntil = until;
        this.#review(record, Math.min(until, record.deadlineAt));
      } else {
        lost.push(task.id);
      }
    }
    return lost.length === 0 ? NOTHING : lost;
  }

  async settle(lease: Lease, verdicts: readonly Verdict[]): Promise<readonly SettleReply[]> {
    const now = this.#clock.now();
    return verdicts.map((verdict) => this.#settleOne(lease, verdict, now));
  }

  #settleOne(lease: Lease, verdict: Verdict, now: number): SettleReply {
    const record = this.#find(verdict.id);
    if (record === undefined) return "gone";
    if (record.final) return "late";
    if (verdict.kind === "done") {
      this.#leavePlace(record);
      record.batch = lease.batch; // a later claim may have noted its own
      this.#finish(record, { ok: true, output: verdict.output }, now);
      return "taken";
    }
    if (record.state !== "running" || record.lease !== lease.token) return "late";
    if (verdict.kind === "retry") {
      if (verdict.overdue === true && record.overdue) return "late";
      this.#leavePlace(record);
      this.#retry(record, verdict, now);
      return "taken";
    }
    this.#leavePlace(record);
    const { code, message } = verdict;
    if (verdict.kind === "dead") {
      record.dead = verdict.detail;
      const { task, attempt, dead } = record;
      this.deadLetters.add({ task, attempts: attempt, code, message: dead, diedAt: now });
      this.#fallsDue(now + this.#options.deadLetters.ttlMs);
    }
    this.#finish(record, { ok: false, code, message }, now);
    return "taken";
  }

  #retry(record: TaskRecord, verdict: Verdict & { kind: "retry" }, now: number): void {
    if (verdict.spared === true) record.attempt--;
    if (verdict.overdue === true) record.overdue = true;
    if (verdict.maxBatchSize !== undefined) {
      record.maxBatchSize = Math.min(record.maxBatchSize, verdict.maxBatchSize);
    }
    record.expiresAt = this.#expiry(record.task.model, Math.max(now, verdict.at), record.deadlineAt);
    if (this.#events.heard("task.retried")) {
      const { id, model } = record.task;
      this.#events.emit("task.retried", {
        id,
        model,
        attempt: record.attempt,
        at: verdict.at,
        message: verdict.message,
      });
    }
    if (verdict.at <= now) {
      this.#enqueue(record, "arrival");
      return;
    }
    record.state = "queued";
    record.retryAt = verdict.at;
    this.#startWaiting(record);
    this.#review(record, Math.min(verdict.at, record.deadlineAt));
  }

  async cancel(id: string, tenant: string, abandoned = false): Promise<CancelReply> {
    const record = this.#find(id);
    if (record === undefined || record.task.tenant !== tenant) return "unknown";
    if (record.final) {
      if (abandoned) return "kept";
      this.#shelf.remove(record);
      this.#forget(record);
      return "forgotten";
    }
    const joined = record.joins > 0;
    if (joined && abandoned) record.joins--;
    if (joined || record.state === "running" || (abandoned && record.keys.length > 0)) return "kept";
    this.#leavePlace(record);
    if (abandoned) this.#events.emit("task.dropped", { id, model: record.task.model });
    this.#finish(
      record,
      { ok: false, code: "CANCELLED", message: "cancelled before it ran" },
      this.#clock.now(),
    );
    return "cancelled";
  }

  async outcome(id: string, tenant?: string): Promise<RecordView | undefined> {
    const record = this.#find(id);
    return tenant === undefined || record?.task.tenant === tenant ? record : undefined;
  }

  delivered(id: string): void {
    const record = this.#records.get(id);
    if (record === undefined || !record.final || record.delivered) return;
    if (this.#options.results.evictAfterRead && record.joins === 0 && record.keys.length === 0) {
      this.#shelf.remove(record);
      this.#forget(record);
    } else {
      this.#shelf.deliver(record);
    }
  }

  async reap(now: number): Promise<number> {
    while (this.#reviews.firstAt <= now) this.#look(this.#reviews.first!, now);
    const swept = Math.min(this.#shelf.sweep(now), this.#shared.sweep(now), this.deadLetters.sweep(now));
    this.#nextReap = Math.min(this.#reviews.firstAt, swept);
    return this.#nextReap;
  }

  /** A record's time has come: something is due, or somebody gave it more time. */
  #look(record: TaskRecord, now: number): void {
    if (record.state === "running") {
      if (now >= record.deadlineAt) {
        this.#leavePlace(record);
        this.#finish(record, tooLate("no answer before the total timeout"), now);
      } else if (now >= record.leaseUntil) {
        this.#leavePlace(record);
        this.#retry(
          record,
          { id: record.task.id, kind: "retry", at: now, message: "its lease ran out" },
          now,
        );
      } else {
        this.#review(record, Math.min(record.leaseUntil, record.deadlineAt));
      }
    } else if (now >= record.deadlineAt || (record.list !== undefined && now >= record.expiresAt)) {
      this.#leavePlace(record);
      this.#expire(record, now);
    } else if (record.list === undefined && now >= record.retryAt) {
      this.#leavePlace(record);
      this.#enqueue(record, "arrival");
    } else {
      const { list, retryAt, deadlineAt, expiresAt } = record;
      this.#review(record, list === undefined ? Math.min(retryAt, deadlineAt) : expiresAt);
    }
  }

  #expire(record: TaskRecord, now: number): void {
    this.#finish(record, tooLate("it waited in the queue for too long"), now);
  }

  async spend(key: string, perMinute: number): Promise<Spent> {
    return this.#windows.spend(key, perMinute, this.#clock.now());
  }

  queues(model: string): Iterable<QueueView> {
    return this.#queues.get(model)?.groups() ?? NOTHING;
  }

  stats(): EngineStats {
    return {
      queued: this.#waiting,
      running: this.#running,
      kept: this.#shelf.size,
      deadLetters: this.deadLetters.size,
      depth: new Map([...this.#queues].map(([model, queues]) => [model, queues.depthByTier()])),
    };
  }

  watch(listener: EngineListener): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  async close(): Promise<void> {
    await this.#keeper?.close();
  }

  // ── the moves that verbs share ──────────────────────────────────────────────────────────────────

  /** `reap` finds a record at the end of its time to live, or after it where later ones stand before it. */
  #find(id: string): TaskRecord | undefined {
    const record = this.#records.get(id);
    return record?.final === true && this.#outlived(record, this.#clock.now()) ? undefined : record;
  }

  #outlived({ settledAt }: TaskRecord, now: number): boolean {
    return settledAt !== undefined && settledAt + this.#options.results.ttlMs <= now;
  }

  #expiry(model: string, from: number, deadlineAt: number): number {
    return Math.min(deadlineAt, from + (this.#options.models.get(model)?.queueMs ?? 0));
  }

  #enqueue(record: TaskRecord, place: "back" | "arrival"): void {
    record.state = "queued";
    record.retryAt = 0;
    if (place === "back") record.queuedAt = this.#clock.now();
    const { model, parameters } = record.task;
    const depth = this.#queues.get(model)!.push(record, place);
    this.#startWaiting(record);
    this.#review(record, record.expiresAt);
    for (const listener of this.#listeners) listener.queued?.(model, parameters, depth);
  }

  #dequeue(record: TaskRecord): void {
    this.#queues.get(record.task.model)!.remove(record);
    this.#stopWaiting(record);
  }

  #startWaiting(record: TaskRecord): void {
    this.#waiting++;
    this.#waitingBytes += record.task.input.length;
  }

  #stopWaiting(record: TaskRecord): void {
    this.#waiting--;
    this.#waitingBytes -= record.task.input.length;
  }

  /** Takes a record out of wherever it is; the caller puts it into its next place at once. */
  #leavePlace(record: TaskRecord): void {
    if (record.state === "running") this.#running--;
    else if (record.list !== undefined) this.#dequeue(record);
    else this.#stopWaiting(record);
    record.lease = "";
  }

  #finish(record: TaskRecord, outcome: Outcome, now: number): void {
    this.#shelve(record, outcome, now);
    this.#keeper?.update(record);
    if (this.#events.heard("task.settled")) {
      const { id, model, tier, createdAt } = record.task;
      const queueMs = Math.max(0, (record.batch?.startedAt ?? now) - record.queuedAt);
      const code = outcome.ok ? "" : outcome.code;
      this.#events.emit("task.settled", { id, model, tier, code, queueMs, totalMs: now - createdAt });
    }
    for (const listener of this.#listeners) listener.settled?.(record);
  }

  #shelve(record: TaskRecord, outcome: Outcome, settledAt: number): void {
    this.#reviews.remove(record);
    record.state = outcome.ok ? "done" : "failed";
    record.outcome = outcome;
    record.settledAt = settledAt;
    record.task = { ...record.task, input: "", content: "" };
    this.#shared.finished(record);
    this.#shelf.add(record);
    this.#fallsDue(settledAt + this.#options.results.ttlMs);
  }

  #forget(record: TaskRecord): void {
    const { id } = record.task;
    if (this.#records.get(id) === record) this.#records.delete(id);
    this.#shared.forgotten(record);
    if (record.dead !== undefined) this.#keeper?.keepLetter(record);
    else this.#keeper?.forget(id);
  }

  #review(record: TaskRecord, at: number): void {
    this.#reviews.set(record, at);
    this.#fallsDue(at);
  }

  #fallsDue(at: number): void {
    if (at >= this.#nextReap) return;
    this.#nextReap = at;
    for (const listener of this.#listeners) listener.due?.(at);
  }

  /** A dead letter starts anew under its own id. */
  #replay(dead: Task): boolean {
    const model = this.#options.models.get(dead.model);
    if (model === undefined) return false;
    const old = this.#records.get(dead.id);
    if (old?.final === false) return false;
    if (old !== undefined) {
      this.#shelf.remove(old);
      this.#forget(old);
    }
    const now = this.#clock.now();
    const task = { ...dead, createdAt: now, deadlineAt: now + model.totalMs };
    const { idempotency, ...sharing } = old?.sharing ?? {};
    // The key may stand for a task that ran meanwhile.
    const free = idempotency !== undefined && this.#shared.keyed({ idempotency }) === undefined;
    this.#enqueue(this.#open(task, free ? { ...sharing, idempotency } : sharing, now), "back");
    return true;
  }

  #letterGone(id: string): void {
    const record = this.#records.get(id);
    if (record === undefined) this.#keeper?.forget(id);
    else {
      record.dead = undefined;
      this.#keeper?.update(record);
    }
  }

  /** A record found on disk: finished ones can be polled again, the others start anew. */
  #restore(saved: SavedRecord, now: number): void {
    const { task, sharing, state, letter, orphan } = restored(
      saved,
      now,
      (model) => this.#options.models.get(model)?.totalMs,
    );
    if (state.forgotten === true) return this.deadLetters.add(letter!);
    const record = new TaskRecord(task, sharing, this.#expiry(task.model, now, task.deadlineAt));
    record.attempt = state.attempt;
    if (state.batch !== undefined) record.batch = state.batch;
    this.#records.set(task.id, record);
    this.#shared.started(record);
    for (const idempotency of state.keys ?? NOTHING) this.#shared.bindKey(record, { idempotency });
    record.dead = letter?.message;
    if (state.outcome === undefined) this.#enqueue(record, "back");
    else this.#shelve(record, state.outcome, Math.min(now, state.settledAt ?? now));
    if (letter !== undefined) this.deadLetters.add(letter);
    if (orphan) this.#keeper?.update(record);
  }
}

/** An answer from the cache is neither work in flight nor a reason to keep the cached one for longer. */
function keyOnly({ idempotency }: Sharing): Sharing {
  return idempotency === undefined ? {} : { idempotency };
}

function tooLate(message: string): { ok: false; code: "DEADLINE_EXCEEDED"; message: string } {
  return { ok: false, code: "DEADLINE_EXCEEDED", message };
}
