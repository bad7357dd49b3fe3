/**
 * The embedded engine: in memory, and on disk with a journal. Each verb changes memory in one synchronous step, which
 * makes it atomic, and then waits for the journal. `records.ts` keeps records by id, `places.ts` the ones that are not
 * final.
 *
 * Bounds: `maxQueued` and `maxQueuedBytes` for waiting tasks, `results.maxBytes` for finished ones and the cache
 * together, `deadLetters.max`, and `MAX_SPENDERS` rate windows.
 */
import type { Clock } from "../../app/clock.ts";
import { ALONE_FROM_LOST, DEAD_FROM_ATTEMPT } from "../../core/retry.ts";
import { type ErrorCode, Refusal } from "../../core/errors.ts";
import type { Outcome, Task } from "../../core/task.ts";
import { type Spent, Windows } from "../../core/window.ts";
import type { Events } from "../../observe/events.ts";
import { DeadLetters, noRoomToReplay } from "./dead-letters.ts";
import type { CancelReply, ClaimRequest, Composed, Engine, EngineLimits, EngineListener } from "../engine.ts";
import { neverFits } from "../engine.ts";
import type { EngineStats, Lease, PutReply, QueueView, RecordView } from "../engine.ts";
import type { SettleReply, Sharing, Verdict } from "../engine.ts";
import type { JournalTrouble, SavedRecord } from "./journal.ts";
import { Places } from "./places.ts";
import { retriedFields, TaskRecord, tooLate } from "./record.ts";
import { keyOnly, Records, UNWRITABLE } from "./records.ts";
import { type RecordKeeper, restored } from "./saved.ts";

const MAX_SPENDERS = 100_000;
const NOTHING: readonly never[] = [];
const RETRY_AFTER_MS = 1000;
const NOT_STORED: Outcome = { ok: false, code: "SERVICE_OVERLOADED", message: UNWRITABLE };

function unknownIfStored(): Refusal {
  return new Refusal(
    "SERVICE_OVERLOADED",
    `${UNWRITABLE}, and it is not known whether this request was; send it again with the same Idempotency-Key`,
    { retryAfterMs: RETRY_AFTER_MS },
  );
}

/** State of a task that another process accepted, and perhaps tried. */
export interface AdoptedState {
  readonly attempt: number;
  readonly lost: number;
  readonly overdue: boolean;
  readonly replayed: boolean;
  readonly maxBatchSize: number;
  /** Includes later deadlines of joined callers. */
  readonly deadlineAt: number;
  readonly tier: number;
  /** Start of its time in the queue. */
  readonly queueFrom: number;
  /** Not retried before; 0: at once. */
  readonly retryAt: number;
}

export interface MemoryEngineOptions {
  /** Without it tasks do not outlive the process. */
  readonly keeper?: RecordKeeper | undefined;
  /** False: ended tasks are reported and forgotten; a shared engine keeps outcomes elsewhere. */
  readonly keepsOutcomes?: boolean;
  /** Unpredictable integer, for hash tables whose keys clients choose. */
  readonly seed?: number;
  /** Runs a function once all ready sockets are read: tasks that arrive until then are announced together. */
  readonly afterTurn?: (run: () => void) => void;
}

export class MemoryEngine implements Engine {
  readonly #limits: () => EngineLimits;
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #keeper: RecordKeeper | undefined;
  readonly #keepsOutcomes: boolean;
  readonly #records: Records;
  readonly #places: Places;
  readonly #windows = new Windows(MAX_SPENDERS);
  readonly #listeners = new Set<EngineListener>();
  readonly together: Engine["together"] = (puts) => this.#places.together(puts);
  readonly deadLetters: DeadLetters;
  readonly #inside = new Set<TaskRecord>(); // tasks that run inside this process; kept only with a journal
  /** Tasks that ran when the process died, fewest deaths first; `#suspect` is the one that may run. */
  readonly #suspects: TaskRecord[] = [];
  #suspect: TaskRecord | undefined;
  /** Until the deaths of the last start are on disk, no task runs that could cause the next. */
  #deathsStored: Promise<void> | undefined;
  #leases = 0;
  #nextReap = Infinity;

  constructor(
    limits: () => EngineLimits,
    clock: Clock,
    events: Events,
    { keeper, keepsOutcomes = true, seed = 0, afterTurn }: MemoryEngineOptions = {},
  ) {
    this.#limits = limits;
    this.#keepsOutcomes = keepsOutcomes;
    this.#clock = clock;
    this.#events = events;
    this.#keeper = keeper;
    const copied = keeper !== undefined || !keepsOutcomes;
    const fallsDue = (at: number): void => this.#fallsDue(at);
    this.#places = new Places(limits, seed, copied, this.#listeners, fallsDue, afterTurn);
    this.#records = new Records(limits, clock, keeper, seed);
    this.deadLetters = new DeadLetters(limits, events, {
      replay: (task) => this.#replay(task),
      replaySafe: (id) => this.#replaySafe(id),
      forgotten: (id) => this.#records.letterGone(id),
    });
    for (const saved of keeper?.found ?? NOTHING) this.#restore(saved, clock.now());
    if (keeper !== undefined) this.#countDeaths(keeper, clock.now());
  }

  put(task: Task, sharing: Sharing = {}): PutReply | Promise<PutReply> {
    // One that is in already was sent again by a gateway process without an answer.
    const unwritable = this.#keeper?.journal.trouble !== undefined;
    if (unwritable && this.#records.find(task.id) === undefined) return { kind: "full", message: UNWRITABLE };
    const reply = this.#putNow(task, sharing);
    if (this.#keeper === undefined || reply.kind === "full" || reply.kind === "conflict") return reply;
    return this.#whenSafe(reply, this.#keeper);
  }

  async #whenSafe(reply: PutReply & { readonly id: string }, keeper: RecordKeeper): Promise<PutReply> {
    try {
      await keeper.journal.flushed();
      return reply;
    } catch (error) {
      return this.#unsaved(reply, (error as JournalTrouble).lasting);
    }
  }

  /**
   * The journal write failed while this task came in. If never claimed it is withdrawn and never runs. If it runs or
   * was joined it cannot be refused any more, and "accepted" would promise what the disk does not hold: its caller is
   * answered with its outcome. `lasting`: it may be on disk all the same.
   */
  async #unsaved(reply: PutReply & { readonly id: string }, lasting: boolean): Promise<PutReply> {
    if (reply.kind === "done") return { ...reply, unstored: true };
    const record = this.#records.find(reply.id);
    if (record === undefined) return { kind: "full", message: UNWRITABLE };
    if (
      reply.kind === "queued" &&
      record.state === "queued" &&
      record.batch === undefined &&
      record.joins === 0
    ) {
      this.#events.emit("task.dropped", { id: reply.id, model: record.task.model });
      this.#end(record, NOT_STORED, this.#clock.now());
      const ended = this.#records.get(reply.id);
      if (ended !== undefined) this.#records.forget(ended);
      if (lasting) throw unknownIfStored();
      return { kind: "full", message: UNWRITABLE };
    }
    return { kind: "done", id: reply.id, record: await this.#endOf(record), cached: false, unstored: true };
  }

  #endOf(record: TaskRecord): Promise<RecordView> | RecordView {
    if (record.final) return record;
    const { promise, resolve } = Promise.withResolvers<RecordView>();
    const stop = this.watch({
      settled: (ended) => {
        if (ended !== record) return;
        stop();
        resolve(ended);
      },
    });
    return promise;
  }

  #putNow(task: Task, sharing: Sharing): PutReply {
    const now = this.#clock.now();
    const known = this.#records.find(task.id);
    if (known !== undefined) return this.#join(known);
    const keyed = this.#records.keyed(sharing);
    if (keyed !== undefined) {
      if (keyed.conflict) return { kind: "conflict", id: keyed.record.task.id };
      if (!keyed.record.final) this.#places.accommodate(keyed.record, task, now);
      return this.#join(keyed.record);
    }
    const cached = this.#records.cached(sharing, now);
    if (cached !== undefined) {
      const record = this.#open(task, keyOnly(sharing), now);
      record.cached = true;
      if (cached.batch !== undefined) record.batch = cached.batch;
      this.#events.emit("task.cached", { id: task.id, model: task.model });
      this.#finish(record, cached.outcome!, now);
      return { kind: "done", id: task.id, record, cached: true };
    }
    const leader = this.#records.inFlight(sharing);
    if (leader !== undefined) {
      // Takes the place of a caller that has left, if one has.
      if (!leader.delivered) leader.joins++;
      this.#places.accommodate(leader, task, now);
      if (sharing.idempotency !== undefined) {
        this.#records.bindKey(leader, sharing);
        this.#keeper?.update(leader);
      }
      return this.#join(leader);
    }
    if (sharing.only === true) return { kind: "full", message: "nothing to share, and no room for more" };
    const full = this.#places.full(task) ?? this.#records.full(task.tenant);
    if (full !== undefined) return full;
    this.#places.enqueue(this.#open(task, sharing, now), now);
    if (this.#events.heard("task.queued")) {
      const { id, model, tier } = task;
      this.#events.emit("task.queued", { id, model, tier, at: now });
    }
    return { kind: "queued", id: task.id };
  }

  neverFits(tasks: number, inputBytes: number, parameterBytes: number): string | undefined {
    return neverFits(this.#limits(), { tasks, inputBytes, parameterBytes }, this.#keeper !== undefined);
  }

  #open(task: Task, sharing: Sharing, now: number, replayed = false): TaskRecord {
    const record = new TaskRecord(task, sharing, this.#places.expiry(task.model, now, task.deadlineAt));
    record.replayed = replayed;
    this.#records.open(record);
    return record;
  }

  /** Another caller for work that `record` does, or has done. */
  #join(record: TaskRecord): PutReply {
    const { id, model } = record.task;
    if (record.final) return { kind: "done", id, record, cached: false };
    record.delivered = false;
    this.#events.emit("task.joined", { id, model });
    return { kind: "joined", id };
  }

  /** Takes in a task that was accepted elsewhere; undefined if it is here already. */
  adopt(task: Task, state: AdoptedState): TaskRecord | undefined {
    if (this.#records.find(task.id) !== undefined) return undefined;
    const record = this.#open(task, {}, task.createdAt, state.replayed);
    record.attempt = state.attempt;
    record.lost = state.lost;
    record.overdue = state.overdue;
    record.tier = state.tier;
    if (state.maxBatchSize !== Infinity) record.maxBatchSize = state.maxBatchSize;
    record.deadlineAt = state.deadlineAt;
    if (state.queueFrom !== task.createdAt)
      record.expiresAt = this.#places.expiry(task.model, state.queueFrom, state.deadlineAt);
    if (state.retryAt > this.#clock.now()) this.#places.sitOut(record, state.retryAt);
    // Tried tasks go ahead of new ones.
    else this.#places.enqueue(record, state.attempt === 0 ? task.createdAt : undefined);
    return record;
  }

  /** A record that has not ended. */
  find(id: string): TaskRecord | undefined {
    return this.#records.find(id);
  }

  /** A caller in another process joined a task of this engine. */
  accommodate(id: string, deadlineAt: number, tier: number): void {
    const record = this.#records.find(id);
    if (record === undefined || record.final) return;
    const newcomer = { ...record.task, deadlineAt, tier };
    this.#places.accommodate(record, newcomer, this.#clock.now());
    if (record.list !== undefined) this.#places.snooze(record);
  }

  /** The process that ran it died: counts against it as `core/retry.ts` says. */
  chargeLoss(record: TaskRecord): void {
    this.#lost(record, this.#clock.now());
  }

  /** Gives up a task that has not ended: another process owns it now. */
  withdraw(record: TaskRecord): void {
    this.#places.leave(record);
    this.#places.retire(record);
    this.#records.release(record);
  }

  /** Waiting for a worker or for a retry, in tasks and bytes. */
  get load(): { readonly waiting: number; readonly bytes: number; readonly running: number } {
    const { waiting, waitingBytes, running } = this.#places;
    return { waiting, bytes: waitingBytes, running };
  }

  async claim(request: ClaimRequest): Promise<Lease> {
    const inside = request.inProcess === true && this.#keeper !== undefined;
    if (inside && this.#deathsStored !== undefined) await this.#deathsStored;
    const now = this.#clock.now();
    const token = `${request.batch.id}.${++this.#leases}`;
    const { live, composed } = this.#takeLive(request, now);
    const batch = { ...request.batch, size: live.length };
    const tasks = live.map((record) => {
      this.#places.lease(record, token, now + request.leaseMs, batch);
      if (inside) this.#inside.add(record);
      return { task: record.task, attempt: record.attempt, queuedAt: record.queuedAt, length: record.length };
    });
    if (inside && live.length > 0) this.#keeper.running(this.#inside);
    return { token, batch, tasks, composed };
  }

  /** Retries when all were expired: an empty lease must mean that nothing was there. */
  #takeLive(
    { model, parameters, max, composition }: ClaimRequest,
    now: number,
  ): { live: readonly TaskRecord[]; composed?: Composed } {
    for (;;) {
      const taken = this.#places.take(model, parameters, max, now, composition);
      if (taken === undefined || taken.records.length === 0) return { live: NOTHING };
      const { records, composed } = taken;
      const live = records.filter(({ expiresAt }) => now < expiresAt);
      for (const record of records) if (now >= record.expiresAt) this.#expire(record, now);
      if (live.length > 0) return { live, ...(composed && { composed }) };
    }
  }

  async extend(lease: Lease, leaseMs: number): Promise<readonly string[]> {
    const until = this.#clock.now() + leaseMs;
    const lost: string[] = [];
    for (const { task } of lease.tasks) {
      const record = this.#records.get(task.id);
      if (record?.state === "running" && record.lease === lease.token) {
        this.#places.extend(record, until);
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
    const record = this.#records.find(verdict.id);
    if (record === undefined) return "gone";
    if (record.final) return "late";
    if (verdict.kind === "done") {
      record.batch = lease.batch; // a later claim may have noted its own
      this.#end(record, { ok: true, output: verdict.output }, now);
      return "taken";
    }
    if (record.state !== "running" || record.lease !== lease.token) return "late";
    if (verdict.kind === "retry") {
      if (verdict.overdue === true && record.overdue) return "late";
      this.#places.leave(record);
      this.#retry(record, verdict, now);
      return "taken";
    }
    const { code, message } = verdict;
    if (verdict.kind === "dead") this.#bury(record, code, verdict.detail, now);
    this.#end(record, { ok: false, code, message }, now);
    return "taken";
  }

  #bury(record: TaskRecord, code: ErrorCode, detail: string, now: number): void {
    record.dead = detail;
    if (!this.#keepsOutcomes) return;
    this.deadLetters.add({ task: record.task, attempts: record.attempt, code, message: detail, diedAt: now });
    this.#fallsDue(now + this.#limits().deadLetters.ttlMs);
  }

  #retry(record: TaskRecord, verdict: Verdict & { kind: "retry" }, now: number): void {
    if (this.#inside.delete(record)) this.#keeper!.running(this.#inside);
    if (verdict.spared === true) record.attempt--;
    if (verdict.overdue === true) record.overdue = true;
    if (verdict.maxBatchSize !== undefined) {
      record.maxBatchSize = Math.min(record.maxBatchSize, verdict.maxBatchSize);
    }
    record.expiresAt = this.#places.expiry(record.task.model, Math.max(now, verdict.at), record.deadlineAt);
    if (verdict.unsent !== true) this.#events.emit("task.retried", retriedFields(record, verdict));
    if (verdict.at <= now) this.#places.enqueue(record);
    else this.#places.sitOut(record, verdict.at);
  }

  async cancel(id: string, tenant: string, abandoned = false): Promise<CancelReply> {
    const reply = this.#cancelNow(id, tenant, abandoned);
    if (abandoned || reply === "kept") return reply;
    await this.#keeper?.journal.flushed().catch(() => {
      throw unknownIfStored();
    });
    return reply;
  }

  #cancelNow(id: string, tenant: string, abandoned: boolean): CancelReply {
    const record = this.#records.find(id);
    if (record === undefined || record.task.tenant !== tenant) return "unknown";
    if (record.final) {
      if (abandoned) {
        this.#records.abandoned(id);
        return "kept";
      }
      this.#records.forget(record);
      return "forgotten";
    }
    const joined = record.joins > 0;
    if (joined && abandoned) record.joins--;
    if (joined || record.state === "running" || (abandoned && record.keys.length > 0)) {
      // No caller can come back for it, so its outcome is not promised.
      if (abandoned && !joined && record.keys.length === 0) record.delivered = true;
      return "kept";
    }
    if (abandoned) this.#events.emit("task.dropped", { id, model: record.task.model });
    // Its owner knows, or has left.
    record.delivered = true;
    this.#end(
      record,
      { ok: false, code: "CANCELLED", message: "cancelled before it ran" },
      this.#clock.now(),
    );
    return "cancelled";
  }

  async outcome(id: string, tenant?: string): Promise<RecordView | undefined> {
    const record = this.#records.find(id);
    if (tenant === undefined) return record;
    if (record?.task.tenant !== tenant) return undefined;
    if (!record.final) record.delivered = false;
    return record;
  }

  follow(id: string, tenant: string): Promise<RecordView | undefined> {
    return this.outcome(id, tenant);
  }

  delivered(id: string): void {
    this.#records.delivered(id);
  }

  async reap(now: number): Promise<number> {
    for (let record = this.#places.rung(now); record !== undefined; record = this.#places.rung(now)) {
      this.#look(record, now);
    }
    this.#places.dropGone();
    const swept = Math.min(this.#records.sweep(now), this.deadLetters.sweep(now));
    this.#nextReap = Math.min(this.#places.nextAlarmAt, swept);
    return this.#nextReap;
  }

  /** A record's alarm fired: something is due, or its time was extended. */
  #look(record: TaskRecord, now: number): void {
    if (record.state === "running") {
      if (now >= record.deadlineAt) {
        this.#end(record, tooLate("no answer before the total timeout"), now);
      } else if (now >= record.leaseUntil) {
        this.#lost(record, now);
      } else {
        this.#places.snooze(record);
      }
    } else if (now >= record.deadlineAt || (record.list !== undefined && now >= record.expiresAt)) {
      this.#places.leave(record);
      this.#expire(record, now);
    } else if (record.list === undefined && now >= record.retryAt) {
      this.#places.leave(record);
      this.#places.enqueue(record);
    } else {
      this.#places.snooze(record);
    }
  }

  #lost(record: TaskRecord, now: number): void {
    record.lost++;
    this.#places.leave(record);
    this.#takeBack(record, { id: record.task.id, kind: "retry", at: now, message: "its lease ran out" }, now);
  }

  /** Already out of its place: back to its queue, or a dead letter when lost too often. */
  #takeBack(record: TaskRecord, retry: Verdict & { kind: "retry" }, now: number): void {
    if (record.attempt < DEAD_FROM_ATTEMPT) {
      return this.#retry(record, record.lost < ALONE_FROM_LOST ? retry : { ...retry, maxBatchSize: 1 }, now);
    }
    this.#kill(
      record,
      `its lease ran out ${record.lost} times: the process that ran it died or was cut off`,
      now,
    );
  }

  /** Already out of its place: no attempts left. `detail` is for operators. */
  #kill(record: TaskRecord, detail: string, now: number): void {
    const { id, model, trace } = record.task;
    const code = "INFERENCE_FAILED";
    const message = `all ${record.attempt} attempts failed; it is kept as a dead letter`;
    this.#events.emit("task.dead", { id, model, code, message: detail, trace });
    this.#bury(record, code, detail, now);
    this.#finish(record, { ok: false, code, message }, now);
  }

  #expire(record: TaskRecord, now: number): void {
    this.#finish(record, tooLate("it waited in the queue for too long"), now);
  }

  async spend(key: string, perMinute: number): Promise<Spent> {
    return this.#windows.spend(key, perMinute, this.#clock.now());
  }

  queues(model: string, perTier?: number): Iterable<QueueView> {
    return this.#places.queues(model, perTier);
  }

  waiting(model: string): readonly number[] {
    return this.#places.depths(model);
  }

  turn(model: string, tier: number, tenant: string): number {
    return this.#places.turn(model, tier, tenant);
  }

  stats(): EngineStats {
    return {
      ...this.#places.stats(),
      kept: this.#records.kept,
      deadLetters: this.deadLetters.size,
    };
  }

  watch(listener: EngineListener): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  async close(): Promise<void> {
    await this.#keeper?.journal.close();
  }

  /** From any place to its outcome. */
  #end(record: TaskRecord, outcome: Outcome, now: number): void {
    this.#places.leave(record);
    this.#finish(record, outcome, now);
  }

  #finish(record: TaskRecord, outcome: Outcome, now: number): void {
    this.#inside.delete(record); // stored with the next claim; until then the outcome shows that it ended
    // However it failed (too late, rejected, cancelled), a replayed letter returns to the list with its input.
    if (record.replayed && record.dead === undefined && !outcome.ok) {
      const { code, message } = outcome;
      const { id, model, trace } = record.task;
      this.#bury(record, code, message, now);
      this.#events.emit("task.dead", { id, model, code, message, trace });
    }
    this.#shelve(record, outcome, now);
    this.#keeper?.update(record);
    for (const listener of this.#listeners) listener.settled?.(record);
    if (record === this.#suspect) this.#nextSuspect(now);
  }

  #shelve(record: TaskRecord, outcome: Outcome, settledAt: number): void {
    this.#places.retire(record);
    if (!this.#keepsOutcomes) return this.#records.release(record, outcome, settledAt);
    this.#records.finish(record, outcome, settledAt);
    this.#fallsDue(settledAt + this.#limits().results.ttlMs);
  }

  #fallsDue(at: number): void {
    if (at >= this.#nextReap) return;
    this.#nextReap = at;
    for (const listener of this.#listeners) listener.due?.(at);
  }

  #replay(dead: Task): boolean {
    const model = this.#limits().models.get(dead.model);
    if (model === undefined) return false;
    const old = this.#records.get(dead.id);
    if (old?.final === false) return false;
    const bounds = [this.#places.full(dead), this.#records.full(dead.tenant)];
    // An operator asks, not the tenant: the tenant's shares do not apply.
    const full = bounds.find((bound) => bound !== undefined && bound.own !== true);
    if (full !== undefined) throw noRoomToReplay(full.message);
    if (old !== undefined) this.#records.forget(old);
    const now = this.#clock.now();
    const task = { ...dead, createdAt: now, deadlineAt: now + model.totalMs };
    const { idempotency, ...sharing } = old?.sharing ?? {};
    // The key may stand for a task that ran meanwhile.
    const free = idempotency !== undefined && this.#records.keyed({ idempotency }) === undefined;
    const record = this.#open(task, free ? { ...sharing, idempotency } : sharing, now, true);
    this.#places.enqueue(record, now);
    return true;
  }

  async #replaySafe(id: string): Promise<void> {
    await this.#keeper?.journal.flushed().catch(() => {
      const record = this.#records.find(id);
      // Back to the list, unless it runs already.
      if (record?.state === "queued" && record.batch === undefined)
        this.#end(record, NOT_STORED, this.#clock.now());
      throw noRoomToReplay(UNWRITABLE);
    });
  }

  /** From disk: finished ones can be polled again, the others start anew. */
  #restore(saved: SavedRecord, now: number): void {
    const totalMs = (model: string): number | undefined => this.#limits().models.get(model)?.totalMs;
    const { task, sharing, state, letter, orphan } = restored(saved, now, totalMs);
    if (state.forgotten === true) return this.deadLetters.add(letter!);
    const record = new TaskRecord(task, sharing, this.#places.expiry(task.model, now, task.deadlineAt));
    record.attempt = state.attempt;
    if (state.batch !== undefined) record.batch = state.batch;
    this.#records.adopt(record);
    for (const idempotency of state.keys ?? NOTHING) this.#records.bindKey(record, { idempotency });
    record.dead = letter?.message;
    record.replayed = state.replayed === true;
    record.deaths = state.deaths ?? 0;
    if (state.outcome !== undefined) this.#records.countFound(record);
    if (state.outcome === undefined) this.#restoreUnfinished(record, now);
    else this.#shelve(record, state.outcome, Math.min(now, state.settledAt ?? now));
    if (letter !== undefined) this.deadLetters.add(letter);
    if (orphan) this.#keeper?.update(record);
  }

  #restoreUnfinished(record: TaskRecord, now: number): void {
    if (record.deaths === 0 && !this.#keeper!.wereRunning.has(record.task.id)) {
      return this.#places.enqueue(record, now);
    }
    record.deadlineAt = Infinity; // until it is its turn
    this.#suspects.push(record);
    this.#places.sitOut(record, Infinity);
  }

  /** After a restart: charges the tasks that ran in the process with its death, as `core/retry.ts` says. */
  #countDeaths(keeper: RecordKeeper, now: number): void {
    const ran = this.#suspects.filter(({ task }) => keeper.wereRunning.has(task.id));
    const most = Math.max(...ran.map(({ deaths }) => deaths));
    for (const record of ran.filter(({ deaths }) => deaths === most)) {
      record.attempt = ++record.deaths;
      keeper.update(record);
      if (record.deaths < DEAD_FROM_ATTEMPT) continue;
      const { deaths } = record;
      const times = `the process died ${deaths} times while it ran, the last ${deaths - 1} times alone`;
      this.#places.leave(record);
      this.#kill(record, `${times}: its input crashes the model`, now);
    }
    if (keeper.wereRunning.size > 0) {
      const stored = (): void => keeper.running(this.#inside);
      this.#deathsStored = keeper.journal
        .flushed()
        .then(stored, () => {})
        .then(() => void (this.#deathsStored = undefined));
    }
    this.#suspects.sort((one, other) => one.deaths - other.deaths);
    while (this.#suspects[0]?.deaths === 0) this.#release(this.#suspects.shift()!, now);
    this.#nextSuspect(now);
  }

  #nextSuspect(now: number): void {
    do this.#suspect = this.#suspects.shift();
    while (this.#suspect?.final === true);
    if (this.#suspect === undefined) return;
    this.#suspect.maxBatchSize = 1;
    this.#release(this.#suspect, now);
  }

  #release(record: TaskRecord, now: number): void {
    const totalMs = this.#limits().models.get(record.task.model)?.totalMs ?? 0;
    this.#places.leave(record);
    record.attempt = record.deaths;
    record.deadlineAt = now + totalMs;
    record.task = { ...record.task, createdAt: now, deadlineAt: record.deadlineAt };
    record.expiresAt = this.#places.expiry(record.task.model, now, record.deadlineAt);
    this.#places.enqueue(record, now);
  }
}
