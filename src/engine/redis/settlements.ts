/**
 * How the end of a task gets into Redis: what ended in one step of the pool goes together, in one pipeline per shard.
 *
 *   success      HSETNX of the outcome: the first one wins, from any batcher
 *   failure      `settle.lua`: counts only from the batcher that holds the task
 *   dead letter  `bury.lua`: the same, and the task is kept
 *   and          HDEL of the batch's running note; one message to each waiting gateway
 *   afterwards   XDEL, XACK of entries whose tasks' outcomes are all in Redis
 *
 * Outcomes of an entry that another batcher may hold too are reported only when Redis has taken them. Unanswered writes
 * are retried for half a minute; by then another batcher has taken over.
 */
import { type Arg, RedisError, type RedisReply } from "./client/nodes.ts";
import type { Lease, SettleReply } from "../engine.ts";
import type { TaskRecord } from "../memory/record.ts";
import { DEPTH_SHARD, type Depths } from "./depths.ts";
import { batchFrame, frame, letterFrame, metaFrame, outcomeFrame, readBody } from "./frames.ts";
import { fieldOf, GRACE_MS, indexName } from "./keys.ts";
import { homeOf } from "../../core/home.ts";
import type { Messages } from "./messages.ts";
import type { Outcomes } from "./outcomes.ts";
import type { RedisParts } from "./parts.ts";
import { acknowledged, type HeldEntry, type HeldTask, type TaskPool } from "./pool.ts";
import { hearersIn, type RedisRecords } from "./records.ts";
import { scripts } from "./scripts.ts";

const OFFER_FOR_MS = 30_000;
const OFFER_AGAIN_MS = 100;
const HELD_ELSEWHERE = -2; // script reply to a failure of a task that another batcher holds

interface Ended {
  readonly record: TaskRecord;
  readonly entry: HeldEntry;
  readonly bundle: string;
  readonly field: string;
  readonly outcome: Buffer;
  readonly letter?: Buffer;
  readonly cacheKey?: string; // key of its reusable success, if that is not the join key
  readonly cacheTtlMs: number;
}

export class Settlements {
  readonly #parts: RedisParts;
  readonly #pool: TaskPool;
  readonly #depths: Depths;
  readonly #messages: Messages;
  readonly #outcomes: Outcomes;
  readonly #records: RedisRecords;
  #ended: Ended[] = []; // ended in this step of the pool, not yet sent
  #finished: HeldEntry[] = []; // entries to acknowledge
  cached: Promise<unknown> = Promise.resolve(); // resolves when what was settled can be reused
  readonly #flushing = new Set<Promise<unknown>>();

  constructor(
    parts: RedisParts,
    own: {
      readonly pool: TaskPool;
      readonly depths: Depths;
      readonly messages: Messages;
      readonly outcomes: Outcomes;
      readonly records: RedisRecords;
    },
  ) {
    const { pool, depths, messages, outcomes, records } = own;
    this.#parts = parts;
    this.#pool = pool;
    this.#depths = depths;
    this.#messages = messages;
    this.#outcomes = outcomes;
    this.#records = records;
    pool.engine.watch({ settled: (record) => this.#settled(record as TaskRecord) });
  }

  #settled(record: TaskRecord): void {
    const held = this.#pool.get(record.task.id);
    if (held === undefined) return;
    // Also stores what ends outside a verb, e.g. a task lost too often when its entry is taken over.
    if (this.#ended.push(this.#end(held)) === 1) setImmediate(() => this.#flushRest());
    held.entry.unconfirmed++;
    this.#pool.drop(record.task.id);
  }

  #flushRest(): void {
    if (this.#ended.length > 0) void this.flush().catch(() => {});
  }

  #end({ record, entry, sharing, body }: HeldTask): Ended {
    const { shared, keys } = this.#parts;
    const { task, batch, attempt, queuedAt, settledAt, dead } = record;
    const { cacheKey, joinKey, cacheTtlMs = 0 } = sharing;
    const { meta } = readBody(body);
    const fields = {
      meta,
      attempt,
      queuedAt,
      settledAt: settledAt!,
      batch: batch && this.#batchBytes(batch),
      cacheTtlMs,
    };
    const outcome = record.outcome!;
    return {
      record,
      entry,
      bundle: keys.bundle(task.id),
      field: fieldOf(task.id),
      outcome: outcomeFrame(fields, outcome, shared),
      cacheTtlMs,
      ...(dead !== undefined &&
        !outcome.ok && {
          letter: letterFrame(
            { attempts: attempt, code: outcome.code, message: dead, diedAt: settledAt! },
            body,
            shared,
          ),
        }),
      ...(outcome.ok && cacheTtlMs > 0 && cacheKey !== undefined && cacheKey !== joinKey && { cacheKey }),
    };
  }

  #lastBatch: { readonly batch: object; readonly bytes: Buffer } | undefined; // shared by the tasks of a batch

  #batchBytes(batch: NonNullable<TaskRecord["batch"]>): Buffer {
    if (this.#lastBatch?.batch !== batch) {
      this.#lastBatch = { batch, bytes: batchFrame(batch, this.#parts.shared) };
    }
    return this.#lastBatch.bytes;
  }

  /** Stores what ended since, and `more`; resolves with the replies by id. */
  async flush(
    more: ReadonlyMap<number, readonly Arg[][]> = NOTHING,
  ): Promise<ReadonlyMap<string, SettleReply>> {
    const ended = this.#ended;
    this.#ended = [];
    const replies = new Map<string, SettleReply>();
    const byShard = Map.groupBy(ended, ({ entry }) => entry.shard);
    const shards = new Set([...byShard.keys(), ...more.keys()]);
    const flushing = Promise.all(
      Array.from(shards, (shard) =>
        this.#offer(shard, byShard.get(shard) ?? [], more.get(shard) ?? [], replies),
      ),
    );
    this.#flushing.add(flushing);
    void this.report();
    await flushing.finally(() => this.#flushing.delete(flushing));
    return replies;
  }

  async settled(): Promise<void> {
    while (this.#flushing.size > 0) await Promise.allSettled(this.#flushing);
  }

  /** Reports changes in how many tasks wait and run here. */
  async report(): Promise<void> {
    const counts = this.#depths.report(this.#pool.engine);
    if (counts.size === 0) return;
    try {
      const replies = await this.#parts.nodes.pipeline(DEPTH_SHARD, this.#depths.commands(counts));
      if (replies.some((reply) => reply instanceof RedisError)) this.#depths.untold(counts);
      else this.#depths.heard(counts, replies);
    } catch {
      this.#depths.untold(counts);
    }
  }

  async #offer(
    shard: number,
    ended: readonly Ended[],
    more: readonly Arg[][],
    replies: Map<string, SettleReply>,
  ): Promise<void> {
    const { clock } = this.#parts;
    const until = clock.now() + OFFER_FOR_MS;
    for (;;) {
      try {
        return await this.#write(shard, ended, more, replies);
      } catch (error) {
        if (clock.now() >= until) {
          for (const { entry } of ended) this.#pool.lose(entry);
          throw error;
        }
      }
      // Another batcher may have taken over by the time it arrives.
      for (const { entry } of ended) entry.contested = true;
      await this.#parts.pause(OFFER_AGAIN_MS);
    }
  }

  async #write(
    shard: number,
    ended: readonly Ended[],
    more: readonly Arg[][],
    replies: Map<string, SettleReply>,
  ): Promise<void> {
    const { nodes, name } = this.#parts;
    const good = ended.filter(({ record }) => record.outcome!.ok);
    // Callers of this process are told when it is certain, which costs no message.
    const told = good.filter(({ entry }) => entry.gateway !== name && !this.#pool.contested(entry));
    const commands: Arg[][] = good.map(({ bundle, field, outcome }) => ["HSETNX", bundle, field, outcome]);
    const bundles = [...new Set(good.map(({ bundle }) => bundle))];
    const keepMs = Math.ceil(this.#parts.limits.results.ttlMs + GRACE_MS);
    for (const bundle of bundles) commands.push(["HGET", bundle, "x"], ["PEXPIRE", bundle, keepMs, "NX"]);
    commands.push(...more, ...this.#acknowledgements(shard), ...this.#tell(shard, told));
    const bad = this.#fail(
      shard,
      ended.filter(({ record }) => !record.outcome!.ok),
      replies,
    );
    // Awaited below, unless the pipeline rejects first.
    bad.catch(() => {});
    const found = await nodes.pipeline(shard, commands, { resend: true });
    const marked = new Set(bundles.filter((_, at) => found[good.length + 2 * at] !== null));
    const taken = good.filter((_, at) => found[at] === 1);
    await bad;
    // Not new: our earlier attempt may have been taken. Refused for lack of memory: the script may write all the same.
    for (const each of good.filter((_, at) => found[at] !== 1)) {
      const reply = await this.#settle(shard, each);
      if (reply === "taken") taken.push(each);
      else replies.set(each.record.task.id, reply);
    }
    for (const { record } of taken) replies.set(record.task.id, "taken");
    await this.#announce(
      shard,
      taken.filter((each) => !told.includes(each)),
      taken.filter(({ bundle }) => marked.has(bundle)),
    );
    this.#cache(taken);
    for (const { entry } of ended) {
      entry.unconfirmed--;
      if (this.#pool.finish(entry)) this.#acknowledge(entry);
    }
  }

  /** All its tasks' outcomes are in Redis. Sent with the next outcomes, or in a moment. */
  #acknowledge(entry: HeldEntry): void {
    this.#finished.push(entry);
    if (this.#finished.length > 1) return;
    setImmediate(() => {
      for (const shard of new Set(this.#finished.map((each) => each.shard))) {
        this.#parts.nodes.pipeline(shard, this.#acknowledgements(shard), { resend: true }).catch(() => {});
      }
    });
  }

  #acknowledgements(shard: number): Arg[][] {
    const mine = this.#finished.filter((entry) => entry.shard === shard);
    if (mine.length === 0) return [];
    this.#finished = this.#finished.filter((entry) => entry.shard !== shard);
    return acknowledged(mine);
  }

  /** One success by script, which detects its own earlier write. */
  async #settle(
    shard: number,
    { bundle, field, outcome }: Pick<Ended, "bundle" | "field" | "outcome">,
  ): Promise<SettleReply> {
    const args = ["", field, outcome];
    const [reply] = (await this.#parts.run(shard, scripts.settle, [bundle], args)) as number[];
    return reply === 1 ? "taken" : reply === 0 ? "late" : "gone";
  }

  /** Failures, by bundle. */
  async #fail(shard: number, ended: readonly Ended[], replies: Map<string, SettleReply>): Promise<void> {
    const { name, events, nodes, keys, shared } = this.#parts;
    const taken: Ended[] = [];
    const take = (each: Ended, reply: number): void => {
      if (reply === 1) taken.push(each);
      if (reply === HELD_ELSEWHERE) this.#pool.lose(each.entry);
      replies.set(each.record.task.id, reply === 1 ? "taken" : reply === -1 ? "gone" : "late");
    };
    const plain = ended.filter(({ letter }) => letter === undefined);
    await Promise.all(
      Array.from(
        Map.groupBy(plain, ({ bundle }) => bundle),
        async ([bundle, some]) => {
          const args = [name, ...some.flatMap(({ field, outcome }) => [field, outcome])];
          const found = (await this.#parts.run(shard, scripts.settle, [bundle], args)) as number[];
          some.forEach((each, at) => take(each, found[at]!));
        },
      ),
    );
    for (const each of ended.filter(({ letter }) => letter !== undefined)) {
      const { record, bundle, field, outcome, letter } = each;
      const { max } = this.#parts.limits.deadLetters;
      const most = Math.ceil(max / Math.max(1, Math.min(keys.shards, nodes.activeShards().length)));
      const places = [bundle, this.#parts.key(shard, "d"), this.#parts.key(shard, "dz")];
      const args = [name, field, outcome, record.task.id, letter!, shared.shared(record.settledAt!), most];
      const [reply, dropped] = (await this.#parts.run(shard, scripts.bury, places, args)) as [number, number];
      take(each, reply);
      if (dropped === 0) continue;
      const message = `${dropped} dead letters were dropped to make room (deadLetters.max ${max})`;
      events.emit("notice", { level: "warn", message });
    }
    await this.#announce(shard, taken, taken);
  }

  /** One message per gateway that put them. */
  #tell(shard: number, ended: readonly Ended[]): Arg[][] {
    const commands: Arg[][] = [];
    for (const [gateway, some] of Map.groupBy(ended, ({ entry }) => entry.gateway)) {
      if (gateway === this.#parts.name) {
        for (const { record, outcome } of some) this.#outcomes.heard(record.task.id, outcome);
      } else {
        const fields = some.flatMap(({ record, outcome }) => [record.task.id, outcome]);
        commands.push(this.#messages.command(shard, gateway, "outcomes", fields));
      }
    }
    return commands;
  }

  /** `untold`: to the gateways that put them; `marked`: other gateways may wait for them, too. */
  async #announce(shard: number, untold: readonly Ended[], marked: readonly Ended[]): Promise<void> {
    const { nodes, name } = this.#parts;
    const commands = this.#tell(shard, untold);
    if (marked.length > 0) {
      const asked = marked.map(({ bundle, field }) => ["HGET", bundle, `w${field}`]);
      const found = await nodes.pipeline(shard, asked, { resend: true });
      const byGateway = new Map<string, (string | Buffer)[]>();
      marked.forEach(({ record, outcome }, at) => {
        if (!Buffer.isBuffer(found[at])) return;
        for (const gateway of hearersIn(found[at])) {
          if (gateway === name) this.#outcomes.heard(record.task.id, outcome);
          else if (byGateway.has(gateway)) byGateway.get(gateway)!.push(record.task.id, outcome);
          else byGateway.set(gateway, [record.task.id, outcome]);
        }
      });
      for (const [gateway, fields] of byGateway)
        commands.push(this.#messages.command(shard, gateway, "outcomes", fields));
    }
    if (commands.length > 0) nodes.pipeline(shard, commands).catch(() => {});
  }

  /** Successes that are reused under a separate key. */
  #cache(taken: readonly Ended[]): void {
    const { nodes, keys } = this.#parts;
    const commands = taken.flatMap(({ record, cacheKey, cacheTtlMs }) => {
      if (cacheKey === undefined) return [];
      const name = indexName(cacheKey);
      const shard = homeOf(name) % keys.shards;
      return [
        { shard, command: ["SET", this.#parts.key(shard, `c:${name}`), record.task.id, "PX", cacheTtlMs] },
      ];
    });
    if (commands.length > 0) this.cached = nodes.scatter(commands);
  }

  /** A success of a task that this pool no longer holds: another batcher took it over, or it has ended. */
  async late(lease: Lease, id: string, output: string | undefined): Promise<SettleReply> {
    const { keys, shared, clock } = this.#parts;
    const claimed = lease.tasks.find(({ task }) => task.id === id);
    const [shard, bundle, field] = [keys.shardOf(id), keys.bundle(id), fieldOf(id)];
    const asked = ["HMGET", bundle, field, `g${field}`, "m", `m${field}`];
    const found = (await this.#parts.nodes.command(shard, asked, { resend: true })) as RedisReply[];
    const [final, deleted, bundled, late] = found;
    if (deleted !== null || (final === null && bundled === null && late === null)) return "gone";
    if (Buffer.isBuffer(final)) return this.#records.lives(this.#records.read(id, final)) ? "late" : "gone";
    if (claimed === undefined || output === undefined) return "late";
    const { task, attempt, queuedAt } = claimed;
    const [meta, batch] = [metaFrame(task, {}, shared), batchFrame(lease.batch, shared)];
    const fields = { meta, attempt, queuedAt, settledAt: clock.now(), batch };
    const outcome = outcomeFrame(fields, { ok: true, output }, shared);
    const reply = await this.#settle(shard, { bundle, field, outcome });
    if (reply === "taken") this.#outcomes.heard(id, outcome);
    return reply;
  }

  running(shard: number, lease: Lease): Arg[] {
    const { keys } = this.#parts;
    const some = lease.tasks.filter(({ task }) => keys.shardOf(task.id) === shard);
    const fields = some.flatMap(({ task, attempt }) => [task.id, String(attempt)]);
    return ["HSET", this.#parts.key(shard, `run:${this.#parts.name}`), lease.token, frame(fields)];
  }
}

const NOTHING: ReadonlyMap<number, readonly Arg[][]> = new Map();
