/**
 * The engine on Redis, shared by any number of processes.
 *
 *   gateway   put      one stream entry for the tasks of a tick (`puts.ts`)           ──► streams, bundles' hashes
 *   batcher   read     entries into a pool in memory, for workers that are free (`reader.ts`, `pool.ts`)
 *             claim    from the pool, at once
 *             settle   outcomes of a batch in one pipeline (`settlements.ts`)          ──► bundles' hashes, messages
 *   gateway   hears of the end by message, or looks it up (`outcomes.ts`)
 *
 * A process may be both. `keys.ts` lists the keys. No process hears of others' work, and nothing here grows with the
 * fleet. Where a reply may be lost the call is repeated: every operation is idempotent, and what was put twice is
 * compared with its records before it runs.
 */
import { hashOf } from "../../core/table.ts";
import type { Outcome, Task } from "../../core/task.ts";
import type { Spent } from "../../core/window.ts";
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
} from "../engine.ts";
import { neverFits } from "../engine.ts";
import { Depths } from "./depths.ts";
import { checkFormat } from "./format.ts";
import { metaFrame, outcomeFrame } from "./frames.ts";
import { InFlight } from "./in-flight.ts";
import { fieldOf } from "./keys.ts";
import { RedisLetters } from "./letters.ts";
import { Messages } from "./messages.ts";
import { Outcomes } from "./outcomes.ts";
import { overloaded, type RedisBase, type RedisOptions, RedisParts } from "./parts.ts";
import { TaskPool, triedCommand } from "./pool.ts";
import { RedisPuts } from "./puts.ts";
import { BundleReader, type Demand } from "./reader.ts";
import { type FoundRecord, pendingView, RedisRecords } from "./records.ts";
import { scripts } from "./scripts.ts";
import { Settlements } from "./settlements.ts";
import { RedisSpends } from "./spends.ts";

const REFRESH_EVERY_MS = 1000;
const CLOCK_EVERY_MS = 10_000;
const HEAL_EVERY_MS = 10_000;
const UNCERTAIN = "it is not certain whether the task was cancelled; ask again";
const CANCELLED = { ok: false, code: "CANCELLED", message: "cancelled before it ran" } as const;
const EXPIRED: Outcome = {
  ok: false,
  code: "DEADLINE_EXCEEDED",
  message: "it waited in the queue for too long",
};

export class RedisEngine implements Engine {
  readonly #parts: RedisParts;
  readonly #records: RedisRecords;
  readonly #outcomes: Outcomes;
  readonly #messages: Messages;
  readonly #depths: Depths;
  readonly #inFlight: InFlight;
  readonly #puts: RedisPuts;
  readonly #pool: TaskPool;
  readonly #reader: BundleReader;
  readonly #settlements: Settlements;
  readonly #spends: RedisSpends;
  readonly deadLetters: RedisLetters;
  readonly #ends: (() => void)[] = []; // stops the periodic work
  readonly #leases = new Map<string, number>(); // unsettled tasks per lease token
  #evicting: Promise<unknown> = Promise.resolve(); // evictions under way
  #closed: Promise<void> | undefined;

  constructor(base: RedisBase, limits: () => EngineLimits, options: RedisOptions, cluster: boolean) {
    const parts = (this.#parts = new RedisParts(base, limits, options));
    this.#records = new RedisRecords(parts);
    this.#messages = new Messages(parts);
    this.#outcomes = new Outcomes(parts, this.#records, this.#messages);
    this.#depths = new Depths(parts);
    this.#inFlight = new InFlight(hashOf(parts.name, 3));
    this.#pool = new TaskPool(parts, this.#depths);
    this.#settlements = new Settlements(parts, {
      pool: this.#pool,
      depths: this.#depths,
      messages: this.#messages,
      outcomes: this.#outcomes,
      records: this.#records,
    });
    this.#reader = new BundleReader(parts, this.#pool);
    this.#puts = new RedisPuts(parts, {
      records: this.#records,
      outcomes: this.#outcomes,
      depths: this.#depths,
      inFlight: this.#inFlight,
      cluster,
      accommodate: (id, owner, caller) => this.#accommodate(id, owner, caller),
    });
    this.#spends = new RedisSpends(parts, cluster);
    this.deadLetters = new RedisLetters(parts, this.#depths, this.#outcomes);
    this.#outcomes.onLeft = (task) => this.#inFlight.left(task);
    this.#outcomes.onExpired = (task) => void this.#drop(task.id, task, EXPIRED).catch(() => {});
    this.#messages.on("request", (fields, sender) => void this.#requested(fields, sender));
    this.#messages.on("join", ([id, deadline, tier]) =>
      this.#pool.engine.accommodate(String(id), parts.shared.own(deadline!), Number(tier)),
    );
    this.#pool.engine.watch({
      queued: (...arrival) => {
        for (const listener of parts.listeners) listener.queued?.(...arrival);
      },
      due: (at) => {
        for (const listener of parts.listeners) listener.due?.(at);
      },
    });
  }

  /** From here on it hears of outcomes. */
  async open(): Promise<void> {
    await checkFormat(this.#parts.nodes, this.#parts.keys);
    await this.#setClock();
    await this.#messages.open();
    this.#outcomes.open();
    await this.#refresh();
    this.#ends.push(
      this.#parts.repeat(REFRESH_EVERY_MS, () => this.#refresh()),
      this.#parts.repeat(CLOCK_EVERY_MS, () => this.#setClock()),
    );
  }

  /** From here on it reads tasks for these workers. */
  async serve(demand: Demand): Promise<void> {
    await this.#reader.open(demand);
    this.#ends.push(this.#parts.repeat(HEAL_EVERY_MS, () => this.#heal()));
  }

  async #setClock(): Promise<void> {
    this.#parts.shared.offsetMs = await this.#parts.nodes.clockOffset();
  }

  async #refresh(): Promise<void> {
    // Tasks that left the pool without a settlement: cancelled before they were read, or another batcher's now.
    void this.#settlements.report();
    await Promise.all([this.#depths.refresh(), this.deadLetters.sweep()]);
  }

  /** Reads everything, and what other processes changed; for tests. */
  async refresh(): Promise<void> {
    await this.#reader.readAll();
    await this.#settlements.settled();
    await this.#settlements.cached;
    await this.#refresh();
  }

  /** Takes over what dead batchers held; for tests (the reader does so periodically). */
  takeOver(): Promise<void> {
    return this.#reader.takeOver();
  }

  async #heal(): Promise<void> {
    const { nodes, keys, options } = this.#parts;
    const places = [options.zone, ...this.#reader.zones].flatMap((zone) =>
      [...this.#parts.limits.models.keys()].map((model) => ({ zone, model })),
    );
    const streams = keys.tags.flatMap((_, shard) =>
      places.map(({ zone, model }) => ({
        shard,
        command: ["XLEN", keys.stream(shard, model, zone)],
      })),
    );
    const lengths = await nodes.scatter(streams);
    if (this.#pool.size === 0 && lengths.every((length) => length === 0)) await this.#depths.heal();
    else this.#depths.unsuspicious();
  }

  /** Puts of one tick go to Redis in one bundle anyway. */
  together<Puts>(puts: () => Puts): Puts {
    return puts();
  }

  bundle(model: string): string {
    return this.#puts.bundle(model);
  }

  async put(task: Task, sharing: Sharing = {}): Promise<PutReply> {
    const { id, model, tier } = task;
    const { events, clock } = this.#parts;
    const known = this.#outcomes.get(id) !== undefined;
    // Listen first: its end may be announced before this reply is read.
    const awaited = this.#outcomes.expect(id, task.deadlineAt);
    let reply: PutReply;
    try {
      if (known) await awaited.putting;
      const putting = this.#puts.put(task, sharing);
      awaited.putting = putting;
      reply = await putting;
    } catch (error) {
      if (!known) this.#outcomes.unexpect(id);
      throw error;
    }
    if (reply.kind === "queued") {
      // Its end may have been heard already.
      if (this.#outcomes.get(id) === awaited) this.#outcomes.accepted(awaited, task, sharing.joinKey);
      else this.#inFlight.left(task);
      if (events.heard("task.queued")) events.emit("task.queued", { id, model, tier, at: clock.now() });
      return reply;
    }
    if (!known && (reply.kind !== "joined" || reply.id !== id)) {
      if (reply.kind !== "done" || !reply.cached) this.#outcomes.unexpect(id);
    }
    if (reply.kind === "joined") events.emit("task.joined", { id: reply.id, model });
    if (reply.kind === "done" && reply.cached) {
      events.emit("task.cached", { id, model });
      this.#outcomes.ended(reply.record);
    }
    return reply;
  }

  neverFits(tasks: number, inputBytes: number, parameterBytes: number): string | undefined {
    return neverFits(this.#parts.limits, { tasks, inputBytes, parameterBytes }, true);
  }

  /** A caller joined a task: tells the batcher that holds it the deadline and tier. */
  #accommodate(id: string, owner: string, { deadlineAt, tier }: Task): boolean {
    const { shared, keys, name } = this.#parts;
    if (this.#pool.get(id) !== undefined) {
      this.#pool.engine.accommodate(id, deadlineAt, tier);
      void this.#settlements.report();
    } else if (owner !== "") {
      // It has ended here, and that is on its way to Redis.
      if (owner === name) return false;
      this.#messages.send(keys.shardOf(id), owner, "join", [id, shared.shared(deadlineAt), String(tier)]);
    }
    return true;
  }

  async claim(request: ClaimRequest): Promise<Lease> {
    const lease = await this.#pool.engine.claim(request);
    if (lease.tasks.length === 0) {
      // Expired tasks were settled instead.
      void this.#settlements.flush().catch(() => {});
      this.#reader.poke();
      return lease;
    }
    this.#leases.set(lease.token, lease.tasks.length);
    const noted = this.#note(lease);
    // A worker in this process may crash it before anything else is sent.
    if (request.inProcess === true) await noted;
    void this.#settlements.flush().catch(() => {});
    return lease;
  }

  /** Records which tasks run, for the batcher that takes over if this process dies. */
  async #note(lease: Lease): Promise<void> {
    const { nodes, keys } = this.#parts;
    const shards = new Set(lease.tasks.map(({ task }) => keys.shardOf(task.id)));
    await Promise.all(
      Array.from(shards, (shard) =>
        nodes.pipeline(shard, [this.#settlements.running(shard, lease)]).catch(() => {}),
      ),
    );
  }

  extend(lease: Lease, leaseMs: number): Promise<readonly string[]> {
    return this.#pool.engine.extend(lease, leaseMs);
  }

  async settle(lease: Lease, verdicts: readonly Verdict[]): Promise<readonly SettleReply[]> {
    const { keys } = this.#parts;
    const found = await this.#pool.engine.settle(lease, verdicts);
    const more = new Map<number, (string | number | Buffer)[][]>();
    const note = (shard: number, command: (string | number | Buffer)[]): void => {
      if (!more.has(shard)) more.set(shard, []);
      more.get(shard)!.push(command);
    };
    verdicts.forEach((verdict, at) => {
      const held = found[at] === "taken" && verdict.kind === "retry" ? this.#pool.get(verdict.id) : undefined;
      if (held !== undefined) note(held.entry.shard, triedCommand(held.record, this.#parts));
    });
    const left = (this.#leases.get(lease.token) ?? 0) - verdicts.length;
    this.#leases.set(lease.token, left);
    if (left <= 0) {
      this.#leases.delete(lease.token);
      for (const shard of new Set(lease.tasks.map(({ task }) => keys.shardOf(task.id)))) {
        note(shard, ["HDEL", this.#parts.key(shard, `run:${this.#parts.name}`), lease.token]);
      }
    }
    const written = await this.#settlements.flush(more);
    return Promise.all(
      verdicts.map(async (verdict, at) => {
        if (found[at] !== "gone") return written.get(verdict.id) ?? found[at]!;
        return this.#settlements.late(
          lease,
          verdict.id,
          verdict.kind === "done" ? verdict.output : undefined,
        );
      }),
    );
  }

  async cancel(id: string, tenant: string, abandoned = false): Promise<CancelReply> {
    try {
      this.#parts.reach(this.#parts.keys.shardOf(id));
      return await this.#cancel(id, tenant, abandoned);
    } catch (error) {
      if (abandoned) return "kept";
      throw overloaded(error, UNCERTAIN, "the task was not cancelled; ask again");
    }
  }

  async #cancel(id: string, tenant: string, abandoned: boolean): Promise<CancelReply> {
    const { name, keys, nodes } = this.#parts;
    const found = await this.#records.look(id);
    if (found === undefined || found.task.tenant !== tenant || found.deleted) return "unknown";
    const shard = keys.shardOf(id);
    if (found.final !== undefined) {
      if (!this.#records.lives(found.final)) return "unknown";
      if (abandoned) return "kept";
      const deletion = this.#records.deletion(found.final);
      await nodes.transact(shard, () => [deletion], this.#parts.options.putWithinMs);
      return "forgotten";
    }
    const awaited = this.#outcomes.get(id);
    const others = found.waiting.filter((gateway) => gateway !== name);
    if (awaited !== undefined && awaited.joins > 0) {
      if (abandoned) awaited.joins--;
      return "kept";
    }
    if (others.length > 0 || (found.waiting.length > 0 && awaited?.task === undefined)) {
      if (abandoned) await this.#parts.run(shard, scripts.leave, [keys.bundle(id)], [fieldOf(id), name]);
      return "kept";
    }
    if (abandoned && found.keyed) return "kept";
    return this.#end(found, abandoned);
  }

  /** Cancels a task without other waiters: at the batcher that holds it, or here if none does. */
  async #end({ task, owner }: FoundRecord, abandoned: boolean): Promise<CancelReply> {
    const { name, keys, events } = this.#parts;
    const { id } = task;
    let holder = owner;
    if (this.#pool.get(id) === undefined && (holder === "" || holder === name)) {
      const dropped = await this.#drop(id, task, CANCELLED);
      if (dropped === "ended") {
        if (abandoned) events.emit("task.dropped", { id, model: task.model });
        return "cancelled";
      }
      if (dropped === "late") return "kept";
      holder = dropped;
    }
    if (this.#pool.get(id) !== undefined) return this.#cancelHere(id, task.tenant, abandoned);
    const request = ["cancel", id, task.tenant, abandoned ? "1" : ""];
    const answer = await this.#messages.ask(keys.shardOf(id), holder, request);
    if (answer === undefined) throw new Error("the batcher that holds the task did not answer");
    return answer as CancelReply;
  }

  async #cancelHere(id: string, tenant: string, abandoned: boolean): Promise<CancelReply> {
    const reply = await this.#pool.engine.cancel(id, tenant, abandoned);
    if (reply !== "cancelled") return reply;
    await this.#settlements.flush();
    await this.#settlements.settled();
    // It may have ended otherwise, by a batcher that took it over while this one was stalled.
    const outcome = (await this.#records.look(id))?.final?.outcome;
    return outcome?.ok === false && outcome.code === CANCELLED.code ? "cancelled" : "kept";
  }

  /** Ends a task that no batcher holds. Otherwise "late" (it ended), or the batcher that holds it. */
  async #drop(id: string, task: Task, outcome: Outcome): Promise<string> {
    const { keys, shared, clock, nodes, options, name } = this.#parts;
    const meta = metaFrame(task, {}, shared);
    const fields = { meta, attempt: 0, queuedAt: task.createdAt, settledAt: clock.now() };
    const bytes = outcomeFrame(fields, outcome, shared);
    const shard = keys.shardOf(id);
    const call = this.#parts.call(shard, scripts.drop, [keys.bundle(id)], [fieldOf(id), bytes]);
    const reply = await nodes.runDurably(shard, call, options.putWithinMs);
    if (reply === 1) this.#outcomes.heard(id, bytes);
    if (reply === 1) return "ended";
    return reply === 0 ? "late" : String(reply) === name ? "late" : String(reply);
  }

  /** A request from another process that only the holder of a task can serve. */
  async #requested([number, verb, id, ...args]: readonly Buffer[], sender: string): Promise<void> {
    const task = String(id);
    let answer = "";
    if (String(verb) === "cancel") {
      const held = this.#pool.get(task) !== undefined;
      const [tenant, abandoned] = args.map(String);
      answer = held ? await this.#cancelHere(task, tenant!, abandoned === "1").catch(() => "") : "kept";
    } else if (String(verb) === "state") {
      const record = this.#pool.get(task)?.record;
      answer = record === undefined ? "" : `${record.state} ${record.attempt}`;
    }
    if (answer !== "")
      this.#messages.send(this.#parts.keys.shardOf(task), sender, "answer", [number!, answer]);
  }

  async outcome(id: string, tenant?: string): Promise<RecordView | undefined> {
    return this.#find(id, tenant, false);
  }

  async follow(id: string, tenant: string): Promise<RecordView | undefined> {
    const { clock } = this.#parts;
    const known = this.#outcomes.get(id) !== undefined;
    // Listen first: its end may be announced before this reply is read.
    const awaited = this.#outcomes.expect(id, clock.now());
    const record = await this.#find(id, tenant, true).catch((error: unknown) => {
      if (!known) this.#outcomes.unexpect(id);
      throw error;
    });
    const pending = record !== undefined && record.outcome === undefined;
    if (pending) this.#outcomes.expect(id, record.task.deadlineAt);
    else if (!known && this.#outcomes.get(id) === awaited) this.#outcomes.unexpect(id);
    return record;
  }

  async #find(id: string, tenant: string | undefined, waits: boolean): Promise<RecordView | undefined> {
    const { keys, name, clock } = this.#parts;
    const shard = keys.shardOf(id);
    await this.#evicting;
    const found = await this.#parts.asked(shard, () => this.#records.look(id, { waits }));
    if (found === undefined || found.deleted) return undefined;
    if (tenant !== undefined && found.task.tenant !== tenant) return undefined;
    if (found.final !== undefined) return this.#records.lives(found.final) ? found.final : undefined;
    const held = this.#pool.get(id)?.record;
    if (held !== undefined) return held;
    // No batcher has read it, and its time is over.
    if (found.owner === "" && clock.now() > found.task.deadlineAt + OVERDUE_MS) {
      await this.#parts.asked(shard, () => this.#drop(id, found.task, EXPIRED));
      return this.#find(id, tenant, false);
    }
    const view = pendingView(found);
    if (found.owner === "" || found.owner === name) return view;
    const answer = await this.#messages.ask(shard, found.owner, ["state", id]);
    const [state, attempt] = answer?.split(" ") ?? [];
    return state === "running" ? { ...view, state, attempt: Number(attempt) } : view;
  }

  delivered(id: string): void {
    const { keys, nodes } = this.#parts;
    if (!this.#parts.limits.results.evictAfterRead) return;
    // What fails here expires with its time to live.
    this.#evicting = this.#records
      .look(id)
      .then((found) => {
        if (found?.final === undefined || found.keyed || found.joined) return;
        return nodes.command(keys.shardOf(id), this.#records.deletion(found.final), { resend: true });
      })
      .catch(() => {});
  }

  async reap(now: number): Promise<number> {
    const next = await this.#pool.engine.reap(now);
    await this.#settlements.flush().catch(() => {});
    return next;
  }

  spend(key: string, perMinute: number): Promise<Spent> {
    return this.#spends.spend(key, perMinute);
  }

  queues(model: string, perTier?: number): Iterable<QueueView> {
    if (this.#pool.waiting(model) === 0) this.#reader.poke();
    return this.#pool.engine.queues(model, perTier);
  }

  waiting(model: string): readonly number[] {
    return this.#parts.limits.models.has(model) ? this.#depths.waiting(model) : [];
  }

  turn(model: string, tier: number, tenant: string): number {
    const waiting = this.#depths.waiting(model)[tier] ?? 0;
    return this.#inFlight.turn(model, tier, tenant, waiting);
  }

  stats(): EngineStats {
    const { models } = this.#parts.limits;
    const depth = new Map(Array.from(models.keys(), (model) => [model, this.#depths.waiting(model)]));
    return {
      queued: this.#depths.queued,
      running: this.#depths.running,
      kept: 0,
      deadLetters: this.deadLetters.count,
      depth,
    };
  }

  watch(listener: EngineListener): () => void {
    this.#parts.listeners.add(listener);
    return () => this.#parts.listeners.delete(listener);
  }

  /** Stops reading and returns waiting tasks to other batchers. What runs goes on. */
  async drain(): Promise<void> {
    const handBack = (): Promise<void> =>
      this.#pool.handBack(this.#pool.all().filter(({ record }) => record.state === "queued"));
    const stopped = this.#reader.stop();
    await handBack();
    await stopped;
    await handBack();
  }

  close(): Promise<void> {
    this.#closed ??= this.#close();
    return this.#closed;
  }

  async #close(): Promise<void> {
    for (const end of this.#ends) end();
    this.#outcomes.close();
    await this.#reader.stop();
    await this.#settlements.settled();
    await this.#pool.handBack(this.#pool.all());
    await this.#settlements.report();
    await this.#reader.leave();
    this.#messages.close();
  }
}

const OVERDUE_MS = 1000; // grace for a batcher's own verdict on a deadline to arrive
