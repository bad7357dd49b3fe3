/**
 * The engine on Redis: tasks live there, in sixteen shards, and any number of processes share them.
 *
 * Each verb is one script per server (per shard on a Cluster), so each is atomic where its task lives. What
 * this process knows of the queues is in `redis-view.ts`, how tasks get in is in `redis-puts.ts`, how their
 * ends come back in `redis-news.ts`, how leases are kept in `redis-leases.ts`; `redis-keys.ts` lists what
 * is in Redis, and `lua/common.lua` is where a task's state is changed.
 *
 * Wherever a reply may be lost the same call is made again: every script says the same twice. A claim is
 * the exception: what it took comes back when its lease runs out.
 */
import type { Task } from "../core/task.ts";
import type { Spent } from "../core/window.ts";
import type {
  CancelReply,
  ClaimRequest,
  Engine,
  EngineListener,
  EngineLimits,
  EngineStats,
} from "./engine.ts";
import { neverFits } from "./engine.ts";
import type { Lease, PutReply, QueueView, RecordView, SettleReply, Sharing, Verdict } from "./engine.ts";
import { checkFormat } from "./redis-format.ts";
import { RedisLetters } from "./redis-letters.ts";
import { overloaded, readEnded, type RedisBase, type RedisOptions, RedisParts } from "./redis-parts.ts";
import { RedisPuts } from "./redis-puts.ts";
import { scripts } from "./redis-scripts.ts";
import { RedisSpends } from "./redis-spends.ts";
import { RedisTime } from "./redis-time.ts";
import type { Rank } from "./redis-view.ts";
import { RedisWork } from "./redis-work.ts";

export class RedisEngine implements Engine {
  readonly #parts: RedisParts;
  readonly #puts: RedisPuts;
  readonly #work: RedisWork;
  readonly #time: RedisTime;
  readonly #spends: RedisSpends;
  readonly deadLetters: RedisLetters;
  #cancels = 0;
  #closed: Promise<void> | undefined;

  constructor(base: RedisBase, options: RedisOptions) {
    const parts = (this.#parts = new RedisParts(base, options));
    this.#puts = new RedisPuts(parts);
    this.#spends = new RedisSpends(parts);
    this.#time = new RedisTime(parts);
    this.#work = new RedisWork(parts, (ids) => this.#time.expire(ids));
    this.deadLetters = new RedisLetters(parts);
  }

  /** From here on it hears of other processes' doings, and does its rounds. */
  async open(): Promise<void> {
    await checkFormat(this.#parts.nodes, this.#parts.keys);
    await this.#time.setClock();
    await this.#parts.news.open();
    await this.#time.open();
    await this.#time.look();
  }

  set rank(rank: Rank) {
    this.#parts.mirror.rank = rank;
  }

  /** Reads what other processes changed, now. */
  refresh(): Promise<void> {
    return this.#time.look();
  }

  /** Looks for what only a script that broke off could have left behind; each half minute by itself. */
  tend(): Promise<void> {
    return this.#time.tend();
  }

  /** Puts of one tick go to Redis in one script anyway. */
  together<Puts>(puts: () => Puts): Puts {
    return puts();
  }

  async put(task: Task, sharing: Sharing = {}): Promise<PutReply> {
    const { news, events } = this.#parts;
    // Listening first: its end may be told before the reply to this is read.
    news.expect(task.id, task.deadlineAt);
    const reply = await this.#puts.put(task, sharing).catch((error: unknown) => {
      news.unexpect(task.id);
      throw error;
    });
    const { id, model, tier } = task;
    if (reply.kind === "queued") {
      news.accepted(id);
      const now = this.#parts.clock.now();
      this.#parts.fallsDue(Math.min(task.deadlineAt, now + this.#queueMs(model)));
      if (events.heard("task.queued")) events.emit("task.queued", { id, model, tier, at: now });
      return reply;
    }
    if (reply.kind === "done" && reply.cached) this.#cached(reply.record);
    if (reply.kind !== "joined" || reply.id !== id) news.unexpect(id);
    if (reply.kind === "joined") {
      news.expect(reply.id, task.deadlineAt);
      news.accepted(reply.id);
      events.emit("task.joined", { id: reply.id, model });
    }
    return reply;
  }

  neverFits(tasks: number, inputBytes: number, parameterBytes: number): string | undefined {
    return neverFits(this.#parts.options, { tasks, inputBytes, parameterBytes }, true);
  }

  /** An answer from the cache is an end of its own. */
  #cached(record: RecordView): void {
    const { events, clock, options, news } = this.#parts;
    events.emit("task.cached", { id: record.task.id, model: record.task.model });
    this.#parts.fallsDue(clock.now() + options.results.ttlMs);
    news.ended(record);
  }

  #queueMs(model: string): number {
    return this.#parts.options.models.get(model)?.queueMs ?? 0;
  }

  retune(limits: EngineLimits): void {
    this.#parts.retune(limits);
    void this.refresh().catch(() => {});
  }

  claim(request: ClaimRequest): Promise<Lease> {
    return this.#work.claim(request);
  }

  extend(lease: Lease, leaseMs: number): Promise<readonly string[]> {
    return this.#work.extend(lease, leaseMs);
  }

  settle(lease: Lease, verdicts: readonly Verdict[]): Promise<readonly SettleReply[]> {
    return this.#work.settle(lease, verdicts);
  }

  async cancel(id: string, tenant: string, abandoned = false): Promise<CancelReply> {
    const { options } = this.#parts;
    if (abandoned) return this.#cancel(id, tenant, "abandoned").catch(() => "kept");
    try {
      this.#parts.reach(this.#parts.shardOf(id));
      return await this.#cancel(id, tenant, "owner", options.putWithinMs);
    } catch (error) {
      const unknown = "it is not certain whether the task was cancelled; ask again";
      throw overloaded(error, unknown, "the task was not cancelled; ask again");
    }
  }

  async #cancel(
    id: string,
    tenant: string,
    mode: "owner" | "abandoned" | "read",
    durablyWithinMs?: number,
  ): Promise<CancelReply> {
    const { nodes, events, options, clock } = this.#parts;
    const shard = this.#parts.shardOf(id);
    const number = ++this.#cancels;
    const repeatableMs = 2 * options.putWithinMs;
    const call = this.#parts.call(
      scripts.cancel,
      options.results.ttlMs,
      id,
      tenant,
      mode,
      number,
      repeatableMs,
    );
    call.place(shard);
    call.names(shard, `r:${id}`);
    const run =
      durablyWithinMs === undefined
        ? nodes.run(shard, call.build())
        : nodes.runDurably(shard, call.build(), durablyWithinMs);
    const [reply, report, ended] = (await run) as [Buffer, Buffer, Buffer[]];
    this.#parts.mirror.told(report.toString());
    const said = reply.toString("latin1") as CancelReply;
    if (said === "cancelled") {
      this.#parts.fallsDue(clock.now() + options.results.ttlMs);
      if (mode === "abandoned") events.emit("task.dropped", { id, model: "" });
    }
    this.#parts.announce(shard, readEnded(ended));
    return said;
  }

  outcome(id: string, tenant?: string): Promise<RecordView | undefined> {
    return this.#parts.record(id, tenant);
  }

  async follow(id: string, tenant: string): Promise<RecordView | undefined> {
    const { news, clock, name } = this.#parts;
    // Listening first: its end may be told before the reply to this is read.
    const first = news.expect(id, clock.now());
    const record = await this.#parts.record(id, tenant, name).catch((error: unknown) => {
      if (first) news.unexpect(id);
      throw error;
    });
    const pending = record !== undefined && record.outcome === undefined;
    if (pending) news.expect(id, record.task.deadlineAt);
    else if (first) news.unexpect(id);
    return record;
  }

  delivered(id: string): void {
    // What fails here is forgotten later, with its time to live.
    if (this.#parts.options.results.evictAfterRead) this.#cancel(id, "", "read").catch(() => {});
  }

  reap(now: number): Promise<number> {
    return this.#time.reap(now);
  }

  spend(key: string, perMinute: number): Promise<Spent> {
    return this.#spends.spend(key, perMinute);
  }

  queues(model: string, perTier?: number): Iterable<QueueView> {
    return this.#parts.mirror.queues(model, perTier);
  }

  waiting(model: string): readonly number[] {
    return this.#parts.mirror.waiting(model);
  }

  turn(model: string, tier: number, tenant: string): number {
    const { crowds, mirror } = this.#parts;
    const kind = crowds.kindOf(model, tier, tenant);
    return mirror.turn(model, tier, kind, crowds.tenants(model, tier));
  }

  /** Depths as the bell tells them; the other numbers are at most a second old. */
  stats(): EngineStats {
    const { queued, running, deadLetters } = this.#time.counts;
    const depth = this.#parts.mirror.depths();
    const there = [...depth.values()].flat().reduce((sum, each) => sum + each, 0);
    return { queued: queued + there, running, kept: 0, deadLetters, depth };
  }

  watch(listener: EngineListener): () => void {
    this.#parts.listeners.add(listener);
    return () => this.#parts.listeners.delete(listener);
  }

  close(): Promise<void> {
    this.#closed ??= this.#close();
    return this.#closed;
  }

  async #close(): Promise<void> {
    await this.#work.close();
    this.#time.close();
    this.#parts.news.close();
  }
}
