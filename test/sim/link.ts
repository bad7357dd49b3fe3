/**
 * The engine as a process of a fleet has it: the verbs of the store behind a wire that fails.
 *
 * It does what `engine/redis.ts` does, over a store that is not Redis: who waits is written down before the task is
 * put; whoever ends a task sends notes to those who wait (the real `RedisNews`, with its numbers and its sweep); what
 * it claimed is renewed in thirds (the real `RedisLeases`); verdicts are offered until they are taken; a claim is
 * never made again. Instants are translated by the real `RedisClock`, whose offset is measured each ten seconds.
 */
import { Refusal } from "../../src/core/errors.ts";
import type { Task } from "../../src/core/task.ts";
import type {
  CancelReply,
  ClaimRequest,
  Engine,
  EngineLimits,
  EngineListener,
  EngineStats,
  Lease,
  PutReply,
  QueueView,
  RecordView,
  SettleReply,
  Sharing,
  Verdict,
} from "../../src/engine/engine.ts";
import { RedisClock } from "../../src/engine/redis-frames.ts";
import { RedisLeases } from "../../src/engine/redis-leases.ts";
import { RedisNews } from "../../src/engine/redis-news.ts";
import { overloaded } from "../../src/engine/redis-parts.ts";
import type { VirtualClock } from "../../src/plan/virtual-clock.ts";
import { StoreAway } from "../../src/redis/nodes.ts";
import type { Events } from "../../src/telemetry/events.ts";
import type { Host } from "./host.ts";
import type { Ledger } from "./ledger.ts";
import { Mirror } from "./mirror.ts";
import { frameOfRecord, newsParts } from "./news.ts";
import { MODEL, type Plan } from "./plan.ts";
import { type Done, type Listener, type Report, type Store, Wire } from "./store.ts";

const LEASE_MS = 2000;
const LOOK_EVERY_MS = 1000;
const CLOCK_EVERY_MS = 10_000;
const SETTLE_FOR_MS = 30_000;
const SETTLE_AGAIN_MS = 100;
const MAYBE = "the task may have been accepted; it is safe to send it again";
const NOTHING = "nothing was accepted; send it again";

export class Link implements Engine, Listener {
  readonly name: string;
  readonly host: Host;
  readonly wire: Wire;
  readonly #store: Store;
  readonly #plan: Plan;
  readonly #ledger: Ledger;
  readonly #shared = new RedisClock();
  readonly #news: RedisNews;
  readonly #leases: RedisLeases;
  readonly #mirror: Mirror;
  readonly #listeners = new Set<EngineListener>();
  #noted: (payload: Buffer) => void = () => {};
  #nextReap = Infinity;
  #closed = false;

  constructor(host: Host, store: Store, plan: Plan, time: VirtualClock, events: Events, ledger: Ledger) {
    this.name = host.name;
    this.host = host;
    this.#store = store;
    this.#plan = plan;
    this.#ledger = ledger;
    this.wire = new Wire(host, store, time, ledger);
    this.#mirror = new Mirror((at) => at - this.#offset);
    this.#mirror.arrived = (parameters, depth, count) => {
      for (const listener of this.#listeners) listener.queued?.(MODEL, parameters, depth, count);
    };
    this.#leases = new RedisLeases(LEASE_MS, host, (lease, ids, until) => this.#extend(lease, ids, until));
    const subscribe = (heard: (payload: Buffer) => void): void => void (this.#noted = heard);
    const parts = newsParts(host, store, this.wire, this.#shared, events, subscribe);
    this.#news = new RedisNews(parts, (record) => {
      for (const listener of this.#listeners) listener.settled?.(record);
    });
  }

  async open(): Promise<void> {
    this.#store.listeners.set(this.name, this);
    this.host.onDeath.add(() => this.#store.listeners.delete(this.name));
    this.#measure();
    await this.#news.open();
    this.#every(LOOK_EVERY_MS, () => this.#look());
    this.#every(CLOCK_EVERY_MS, () => this.#measure());
    this.#look();
  }

  together<Puts>(puts: () => Puts): Puts {
    return puts();
  }

  neverFits(): undefined {
    return undefined;
  }

  rung(report: Report): void {
    this.#mirror.told(report);
  }

  noted(payload: Buffer): void {
    this.#noted(payload);
  }

  get #offset(): number {
    return this.#shared.offsetMs;
  }

  #measure(): void {
    if (!this.#store.away) this.#shared.offsetMs = this.#store.now() - this.host.now();
  }

  #every(ms: number, work: () => void): void {
    this.host.at(this.host.now() + ms, () => {
      if (this.#closed) return;
      work();
      this.#every(ms, work);
    });
  }

  #look(): void {
    const looking = this.wire.call("look", () => this.#store.report(), true);
    looking.then(
      (report) => this.#mirror.told(report, true),
      () => this.#mirror.forget(),
    );
  }

  /** One atomic act in the store; what ended by it is told to those who wait. */
  async #act<Value>(
    name: string,
    verb: (engine: Engine) => Promise<Value>,
    resend = false,
    first: () => void = () => {},
  ): Promise<Value> {
    const now = this.host.now() + this.#offset;
    const act = (): Promise<Done<Value>> => {
      first();
      return this.#store.act(this.name, now, verb);
    };
    const { value, report, ended } = await this.wire.call(name, act, resend);
    this.#mirror.told(report);
    this.#announce(ended);
    return value;
  }

  #announce(ended: Done<unknown>["ended"]): void {
    const byProcess = new Map<string, Buffer[]>();
    for (const { record, waiters } of ended) {
      const { id } = record.task;
      const bytes = frameOfRecord(record);
      for (const waiter of waiters) {
        if (waiter === this.name) this.#news.endedFrame(id, bytes);
        else if (byProcess.has(waiter)) byProcess.get(waiter)!.push(Buffer.from(id), bytes);
        else byProcess.set(waiter, [Buffer.from(id), bytes]);
      }
    }
    for (const [waiter, news] of byProcess) this.#news.send(0, waiter, news);
  }

  #waits(id: string): void {
    const { waiters } = this.#store;
    if (waiters.has(id)) waiters.get(id)!.add(this.name);
    else waiters.set(id, new Set([this.name]));
  }

  async put(task: Task, sharing: Sharing = {}): Promise<PutReply> {
    const { id, deadlineAt } = task;
    this.#news.expect(id, deadlineAt);
    const shifted = this.#toStore(task);
    const verb = async (engine: Engine): Promise<PutReply> => {
      const putting = engine.put(shifted, sharing);
      const reply = await putting;
      this.#ledger.put(task, reply);
      if (reply.kind === "queued" || reply.kind === "joined") this.#waits(reply.id);
      return reply.kind === "done" ? { ...reply, record: this.#own(reply.record) } : reply;
    };
    let reply: PutReply;
    try {
      reply = await this.#act("put", verb, false, () => this.#waits(id));
    } catch (error) {
      this.#news.unexpect(id);
      throw overloaded(error, MAYBE, NOTHING);
    }
    if (reply.kind === "queued") {
      this.#news.accepted(id);
      this.#fallsDue(Math.min(deadlineAt, this.host.now() + this.#plan.queueMs));
      return reply;
    }
    if (reply.kind === "done" && reply.cached) this.#news.ended(reply.record);
    if (reply.kind !== "joined" || reply.id !== id) this.#news.unexpect(id);
    if (reply.kind === "joined") {
      this.#news.expect(reply.id, deadlineAt);
      this.#news.accepted(reply.id);
    }
    return reply;
  }

  async claim(request: ClaimRequest): Promise<Lease> {
    const until = this.host.now() + request.leaseMs;
    const leaseUntil = this.#leases.first(until);
    this.#fallsDue(leaseUntil);
    const release = this.#mirror.reserve(request.parameters, request.max);
    const leaseMs = leaseUntil - this.host.now();
    try {
      const verb = async (engine: Engine): Promise<Lease> => {
        const lease = await engine.claim({ ...request, leaseMs });
        return { ...lease, tasks: lease.tasks.map((each) => ({ ...each, task: this.#toOwn(each.task) })) };
      };
      const claimed = await this.#act("claim", verb);
      const tasks = claimed.tasks.map((each) => ({ ...each, queuedAt: each.queuedAt - this.#offset }));
      const lease = { ...claimed, tasks };
      this.#leases.hold(lease, until);
      return lease;
    } catch (error) {
      this.#mirror.forget();
      throw error;
    } finally {
      release();
    }
  }

  async extend(lease: Lease, leaseMs: number): Promise<readonly string[]> {
    const until = this.host.now() + leaseMs;
    this.#leases.extended(lease, until);
    const ids = lease.tasks.map(({ task }) => task.id);
    return this.#extend(lease, ids, this.#leases.first(until));
  }

  #extend(lease: Lease, ids: readonly string[], until: number): Promise<readonly string[]> {
    this.#fallsDue(until);
    const tasks = lease.tasks.filter(({ task }) => ids.includes(task.id));
    const atStore = { ...lease, tasks };
    return this.#act("extend", (engine) => engine.extend(atStore, until - this.host.now()), true);
  }

  async settle(lease: Lease, verdicts: readonly Verdict[]): Promise<readonly SettleReply[]> {
    const said = verdicts.map((verdict) =>
      verdict.kind === "retry" ? { ...verdict, at: verdict.at + this.#offset } : verdict,
    );
    const until = this.host.now() + SETTLE_FOR_MS;
    for (;;) {
      try {
        const replies = await this.#act("settle", (engine) => engine.settle(lease, said), true);
        this.#ledger.verdicts(verdicts, replies);
        const ids = verdicts.map(({ id }) => id);
        this.#leases.settled(lease, ids);
        for (const verdict of verdicts) if (verdict.kind === "retry") this.#fallsDue(verdict.at);
        return replies;
      } catch (error) {
        if (!(error instanceof StoreAway) || this.host.now() >= until || this.#closed) throw error;
        await new Promise<void>((resolve) => void this.host.at(this.host.now() + SETTLE_AGAIN_MS, resolve));
      }
    }
  }

  async cancel(id: string, tenant: string, abandoned = false): Promise<CancelReply> {
    try {
      return await this.#act("cancel", async (engine) => {
        const reply = await engine.cancel(id, tenant, abandoned);
        this.#ledger.cancelled(id, reply, abandoned);
        return reply;
      });
    } catch (error) {
      if (abandoned) return "kept";
      throw overloaded(error, "it is not certain whether the task was cancelled; ask again", NOTHING);
    }
  }

  async outcome(id: string, tenant?: string): Promise<RecordView | undefined> {
    return this.#ask("outcome", id, tenant, () => {});
  }

  async #ask(name: string, id: string, tenant: string | undefined, first: () => void) {
    const verb = async (engine: Engine): Promise<RecordView | undefined> => {
      const record = await engine.outcome(id, tenant);
      if (record !== undefined && record.outcome === undefined) first();
      return record && this.#own(record);
    };
    try {
      return await this.#act(name, verb, true);
    } catch (error) {
      if (error instanceof Refusal) throw error;
      throw overloaded(error, "ask again", "ask again");
    }
  }

  async follow(id: string, tenant: string): Promise<RecordView | undefined> {
    const first = this.#news.expect(id, this.host.now());
    const record = await this.#ask("follow", id, tenant, () => this.#waits(id)).catch((error: unknown) => {
      if (first) this.#news.unexpect(id);
      throw error;
    });
    if (record !== undefined && record.outcome === undefined) this.#news.expect(id, record.task.deadlineAt);
    else if (first) this.#news.unexpect(id);
    return record;
  }

  delivered(id: string): void {
    if (!this.#plan.evictAfterRead) return;
    this.#act("delivered", async (engine) => engine.delivered(id)).catch(() => {});
  }

  async reap(now: number): Promise<number> {
    this.#nextReap = Infinity;
    const next = await this.#act("reap", (engine) => engine.reap(now + this.#offset), true);
    this.#nextReap = Math.min(this.#nextReap, Math.max(next - this.#offset, this.host.now()));
    return this.#nextReap;
  }

  spend(key: string, perMinute: number): ReturnType<Engine["spend"]> {
    return this.#act("spend", (engine) => engine.spend(key, perMinute)).catch((error: unknown) => {
      throw overloaded(error, "ask again", "ask again");
    });
  }

  queues(): Iterable<QueueView> {
    return this.#mirror.queues();
  }

  waiting(): readonly number[] {
    return this.#mirror.waiting();
  }

  turn(_: string, tier: number): number {
    return this.#mirror.waiting()[tier] ?? 0;
  }

  retune(limits: EngineLimits): void {
    this.#store.engine.retune(limits);
  }

  stats(): EngineStats {
    return this.#store.engine.stats();
  }

  watch(listener: EngineListener): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  get deadLetters(): Engine["deadLetters"] {
    return this.#store.engine.deadLetters;
  }

  /** What it still holds goes back at once. */
  async close(): Promise<void> {
    const now = this.host.now();
    const message = "its batcher was stopped";
    const returns = this.#leases.close().map(({ lease, ids }) =>
      this.settle(
        lease,
        ids.map((id) => ({ id, kind: "retry", at: now, message, spared: true })),
      ),
    );
    this.#closed = true;
    await Promise.allSettled(returns);
    this.#news.close();
  }

  #fallsDue(at: number): void {
    if (at >= this.#nextReap) return;
    this.#nextReap = at;
    for (const listener of this.#listeners) listener.due?.(at);
  }

  #toStore(task: Task): Task {
    const { createdAt, deadlineAt } = task;
    return { ...task, createdAt: createdAt + this.#offset, deadlineAt: deadlineAt + this.#offset };
  }

  #toOwn(task: Task): Task {
    const { createdAt, deadlineAt } = task;
    return { ...task, createdAt: createdAt - this.#offset, deadlineAt: deadlineAt - this.#offset };
  }

  /** As it is at this instant: the store's own goes on changing. */
  #own({ task, state, attempt, queuedAt, settledAt, outcome, cached, batch }: RecordView): RecordView {
    return {
      task: this.#toOwn(task),
      state,
      attempt,
      queuedAt: queuedAt - this.#offset,
      ...(settledAt !== undefined && { settledAt: settledAt - this.#offset }),
      ...(outcome && { outcome }),
      ...(cached && { cached }),
      ...(batch && { batch }),
    };
  }
}
