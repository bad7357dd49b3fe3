/**
 * When a batcher reads bundles from the streams, and how leases are kept and taken over.
 *
 * A batcher reads for workers that could start now, and a little ahead when no other batcher has an idle worker: what
 * it has read is its own, the rest can still go to any other.
 *
 *   blocked   XREADGROUP BLOCK: Redis hands a new entry to one waiting batcher, at once
 *   polled    each POLL_MS, and at once when a worker becomes free
 *
 * The batcher with the first id leads: it reads whatever its workers have room for, so that thin traffic fills one
 * batcher's batches. The others stand by and read what stayed unread for as long as a dispatcher lets a batch fill, or
 * more than fills a batch. One that finds a full batch reads as the leader does for a while.
 *
 * While workers keep up it reads AHEAD_MS of their pace ahead. When more waits and no worker of the fleet is idle, each
 * batcher takes its share of all that waits, by pace: tiers and tenants are served in turn, and batches of similar
 * length made, from a pool, not from a stream. One that holds more than its share leaves new entries to the others, for
 * AHEAD_MS.
 *
 * Its lease is its `alive:` key, renewed each third of `leaseMs`. A batcher whose key is gone is dead: any other takes
 * its pending entries over (XPENDING, XCLAIM). Tasks that ran there are charged with the loss (`core/retry.ts`),
 * waiting ones are not.
 */
import { RedisError, type RedisReply } from "./client/nodes.ts";
import { readBody, readEntry, readMeta, texts } from "./frames.ts";
import { GROUP, modelOf } from "./keys.ts";
import type { RedisParts } from "./parts.ts";
import type { StreamEntry, TaskPool } from "./pool.ts";
import { scripts } from "./scripts.ts";

/** What the reader needs to know of the workers and the fleet. */
export interface Demand {
  /** Models with a healthy worker here. */
  models(): readonly string[];
  /** Tasks of a model that its workers could start now. */
  room(model: string): number;
  pacePerMs(model: string): number;
  batchSize(model: string): number;
  /** How long a dispatcher with an idle worker lets a batch fill. */
  patienceMs(model: string): number;
  /** This batcher's part of the fleet's pace, 0 to 1. */
  share(model: string): number;
  /** Another batcher could start a batch of this model now. */
  othersIdle(model: string): boolean;
  /** Whether this batcher is the first that serves the model. */
  leads(model: string): boolean;
  /** Zones of gateways other than ours, and whether they have no healthy batcher. */
  zones(): readonly { readonly zone: string; readonly deserted: boolean }[];
}

const POLL_MS = 5;
const BLOCK_MS = 400;
const ROUND_MS = 1000;
const AHEAD_MS = 50;
const PLENTY = 2; // batches
const BUSY_MS = 1000; // how long a batcher that found a full batch reads as the leader does
const MOST_ENTRIES = 64;
const STRAY_MS = 10_000; // how long an inactive shard in which something was found is polled
const TAKE_OVER_TOGETHER = 100;
const ALL_SHARDS_EACH = 10; // one in this many searches for dead batchers covers all shards
const RETRY_MS = 100;
const NOTES_MS = 60_000; // how long it is known what a dead batcher ran, after the take-over
const NOTHING: ReadonlyMap<string, number> = new Map();

export class BundleReader {
  readonly #parts: RedisParts;
  readonly #pool: TaskPool;
  #demand: Demand | undefined;
  #stopped = false;
  readonly #reading = new Set<Promise<unknown>>();
  #ends: (() => void)[] = []; // stop the periodic work
  #endRenewal = (): void => {};
  #polling = false;
  #pollAgain = false;
  readonly #blocked = new Map<number, readonly string[]>(); // streams with a blocked read, by shard
  readonly #looping = new Set<number>();
  readonly #grouped = new Set<string>(); // streams whose consumer group exists
  readonly #busyAt = new Map<string, number>(); // when it last found a full batch, by model
  #renewals = 0;
  #entrySize = 4; // mean tasks per entry
  /** Streams left to others: the last entry read, and since when. */
  readonly #unread = new Map<string, { last: string; since: number; lookedAt: number }>();
  readonly #strays = new Map<number, number>(); // inactive shards that had entries, and until when they are polled
  #takeOvers = 0;

  constructor(parts: RedisParts, pool: TaskPool) {
    this.#parts = parts;
    this.#pool = pool;
  }

  /** From here on it reads for these workers. */
  async open(demand: Demand): Promise<void> {
    this.#demand = demand;
    await this.#renew();
    const { options } = this.#parts;
    const { leaseMs, zoneSpillMs } = options;
    this.#endRenewal = this.#parts.repeat(leaseMs / 3, () => this.#renew());
    this.#ends = [
      this.#parts.repeat(leaseMs / 4, () => this.takeOver()),
      this.#parts.repeat(POLL_MS, () => this.#poll()),
      this.#parts.repeat(ROUND_MS, () => this.#round()),
      this.#parts.repeat(Math.max(POLL_MS, zoneSpillMs / 2), () => this.#spill()),
    ];
    this.#startLoops();
  }

  /** Stops reading; resolves when no read is in flight. The lease is renewed until `leave`. */
  async stop(): Promise<void> {
    this.#stopped = true;
    for (const end of this.#ends) end();
    await Promise.allSettled(this.#reading);
  }

  /** Ends its lease: what it still holds can be taken over at once. */
  async leave(): Promise<void> {
    this.#endRenewal();
    if (this.#demand === undefined) return;
    const { nodes, keys, name } = this.#parts;
    const left = keys.bases.map((base, shard) => ({
      shard,
      command: ["DEL", `${base}alive:${name}`, `${base}run:${name}`],
    }));
    await nodes.scatter(left);
  }

  get zones(): readonly string[] {
    return (this.#demand?.zones() ?? []).map(({ zone }) => zone);
  }

  /** A worker is free and nothing waits here. */
  poke(): void {
    if (this.#demand !== undefined && !this.#stopped) void this.#poll().catch(() => {});
  }

  /** Reads everything, for any number of workers; for tests. */
  async readAll(): Promise<void> {
    const { keys, limits } = this.#parts;
    for (let shard = 0; shard < keys.shards; shard++) {
      const streams = [...limits.models.keys()].map((model) => this.#stream(shard, model));
      while ((await this.#read(shard, streams, 1000)) > 0);
    }
  }

  #stream(shard: number, model: string, zone = this.#parts.options.zone): string {
    return this.#parts.keys.stream(shard, model, zone);
  }

  #startLoops(): void {
    for (const shard of this.#parts.nodes.activeShards()) {
      if (this.#looping.has(shard)) continue;
      this.#looping.add(shard);
      void this.#loop(shard).finally(() => this.#looping.delete(shard));
    }
  }

  /** Waits for new entries of one shard while it is active. */
  async #loop(shard: number): Promise<void> {
    while (!this.#stopped && this.#parts.nodes.activeShards().includes(shard)) {
      const models = this.#demand!
        .models()
        .filter((model) => this.#wanted(model) > 0 && this.#demand!.room(model) > 0 && this.#active(model));
      if (models.length === 0) {
        await this.#parts.pause(POLL_MS);
        continue;
      }
      const streams = models.map((model) => this.#stream(shard, model));
      this.#blocked.set(shard, streams);
      try {
        const count = Math.min(...models.map((model) => this.#entries(this.#wanted(model))));
        await this.#read(shard, streams, Math.max(1, count), BLOCK_MS);
      } catch {
        await this.#parts.pause(RETRY_MS);
      }
      this.#blocked.delete(shard);
    }
  }

  #active(model: string): boolean {
    if (this.#demand!.leads(model)) return true;
    return this.#parts.clock.now() < (this.#busyAt.get(model) ?? -Infinity) + BUSY_MS;
  }

  #wanted(model: string): number {
    const demand = this.#demand!;
    const ahead = demand.othersIdle(model)
      ? 0
      : Math.max(demand.batchSize(model), demand.pacePerMs(model) * AHEAD_MS);
    return demand.room(model) + ahead - this.#pool.waiting(model);
  }

  #entries(tasks: number): number {
    return Math.min(MOST_ENTRIES, Math.ceil(tasks / Math.max(1, this.#entrySize)));
  }

  /** Reads for models that have room and are not being read. */
  async #poll(): Promise<void> {
    if (this.#stopped) return;
    this.#pollAgain = this.#polling;
    if (this.#polling) return;
    this.#polling = true;
    try {
      await Promise.all(this.#polled().map((shard) => this.#pollShard(shard)));
    } finally {
      this.#polling = false;
    }
    if (this.#pollAgain) await this.#poll();
  }

  #polled(): readonly number[] {
    const active = this.#parts.nodes.activeShards();
    if (this.#strays.size === 0) return active;
    const now = this.#parts.clock.now();
    for (const [shard, until] of this.#strays) if (until <= now) this.#strays.delete(shard);
    return [...new Set([...active, ...this.#strays.keys()])];
  }

  async #pollShard(shard: number): Promise<void> {
    const demand = this.#demand!;
    const blocked = this.#blocked.get(shard) ?? [];
    const streams: string[] = [];
    let tasks = Infinity;
    for (const model of demand.models()) {
      const wanted = this.#wanted(model);
      const stream = this.#stream(shard, model);
      if (blocked.includes(stream)) continue;
      if (wanted <= 0) {
        if (!demand.othersIdle(model)) await this.#readShare(shard, model, stream);
      } else if (!this.#active(model)) {
        await this.#standBy(shard, model, stream, demand.patienceMs(model));
      } else {
        streams.push(stream);
        tasks = Math.min(tasks, wanted);
      }
    }
    if (streams.length > 0) await this.#read(shard, streams, this.#entries(tasks));
  }

  /** Reads entries that stayed unread for `afterMs`, or enough of them to fill a batch. */
  async #standBy(shard: number, model: string, stream: string, afterMs: number): Promise<void> {
    const found = await this.#unreadIn(shard, stream, afterMs);
    if (found === undefined) return;
    const full = found.lag * this.#entrySize >= this.#demand!.batchSize(model);
    if (!full && found.forMs < afterMs) return;
    if (full) this.#busyAt.set(model, this.#parts.clock.now());
    await this.#read(shard, [stream], this.#entries(this.#wanted(model)));
  }

  /** How many entries are unread, and for how long; undefined: none, or it was just asked. */
  async #unreadIn(
    shard: number,
    stream: string,
    afterMs: number,
  ): Promise<{ lag: number; forMs: number } | undefined> {
    const { clock } = this.#parts;
    const before = this.#unread.get(stream);
    // A check costs a call: four within the wait are enough.
    if (clock.now() < (before?.lookedAt ?? -Infinity) + afterMs / 4) return undefined;
    const { lag, last } = await this.#lag(shard, stream);
    const now = clock.now();
    const since = lag > 0 && before?.last === last ? before.since : now;
    this.#unread.set(stream, { last, since, lookedAt: now });
    return lag === 0 ? undefined : { lag, forMs: now - since };
  }

  /** Reads another zone's entries once the first has waited for `afterMs`. */
  async #readOld(shard: number, model: string, stream: string, afterMs: number): Promise<void> {
    const { clock, shared, nodes } = this.#parts;
    const { lag, last } = await this.#lag(shard, stream);
    if (lag === 0) return;
    const asked = ["XRANGE", stream, `(${last}`, "+", "COUNT", 1];
    const [first] = (await nodes.command(shard, asked)) as StreamEntry[];
    const body = first?.[1] && readEntry(first[1][1]!).tasks[0]?.body;
    if (!body) return;
    const cameAt = readMeta(readBody(body).meta, shared).task.createdAt;
    if (clock.now() - cameAt >= afterMs)
      await this.#read(shard, [stream], this.#entries(this.#wanted(model)));
  }

  /** Under backlog, takes its workers' share of the fleet of what waits; beyond that, what no other batcher takes. */
  async #readShare(shard: number, model: string, stream: string): Promise<void> {
    const share = this.#demand!.share(model);
    const held = this.#pool.waiting(model);
    // With little to do one batcher is to have it all.
    const plenty = held >= PLENTY * this.#demand!.batchSize(model);
    const enough = share < 1 && plenty && held >= share * this.#pool.waitingInFleet(model);
    const found = await this.#unreadIn(shard, stream, enough ? AHEAD_MS : 0);
    if (found === undefined || (enough && found.forMs < AHEAD_MS)) return;
    await this.#read(shard, [stream], Math.ceil(found.lag * share));
  }

  /** Number of unread entries, and the id of the last delivered one. */
  async #lag(shard: number, stream: string): Promise<{ lag: number; last: string }> {
    await this.#makeGroups(shard, [stream]);
    const asked = this.#parts.nodes.command(shard, ["XINFO", "GROUPS", stream]);
    const groups = (await asked.catch((error: unknown) => {
      // The server lost its data: the group is created again with the next check.
      if (error instanceof RedisError) this.#grouped.delete(stream);
      throw error;
    })) as RedisReply[][];
    const fields = groups[0] ?? [];
    const field = (name: string): RedisReply | undefined =>
      fields[fields.findIndex((each, at) => at % 2 === 0 && String(each) === name) + 1];
    // Redis does not know the lag after unread entries were deleted.
    const lag = field("lag");
    return { lag: lag === null ? 1 : Number(lag), last: String(field("last-delivered-id")) };
  }

  /** Resolves with the number of entries. */
  #read(shard: number, streams: readonly string[], count: number, blockMs = 0): Promise<number> {
    if (this.#stopped) return Promise.resolve(0);
    return this.#tracked(this.#readNow(shard, streams, count, blockMs));
  }

  /** `stop` waits for it. */
  async #tracked<Value>(reading: Promise<Value>): Promise<Value> {
    this.#reading.add(reading);
    try {
      return await reading;
    } finally {
      this.#reading.delete(reading);
    }
  }

  async #readNow(shard: number, streams: readonly string[], count: number, blockMs: number): Promise<number> {
    const { nodes, name } = this.#parts;
    const wait = blockMs > 0 ? ["BLOCK", blockMs] : [];
    const where = ["STREAMS", ...streams, ...streams.map(() => ">")];
    const command = ["XREADGROUP", "GROUP", GROUP, name, "COUNT", count, ...wait, ...where];
    const read = async (): Promise<RedisReply> => {
      await this.#makeGroups(shard, streams);
      return blockMs > 0 ? nodes.block(shard, command, blockMs) : nodes.command(shard, command);
    };
    const reply = await read().catch((error: unknown) => {
      if (!(error instanceof RedisError) || error.code !== "NOGROUP") throw error;
      // A server that lost its data, or another one after a failover.
      this.#grouped.clear();
      return read();
    });
    let found = 0;
    for (const [stream, entries] of (reply ?? []) as [Buffer, StreamEntry[]][]) {
      found += entries.length;
      const model = modelOf(stream.toString());
      const tasks = await this.#pool.take(shard, stream.toString(), entries);
      if (tasks >= (this.#demand?.batchSize(model) ?? Infinity))
        this.#busyAt.set(model, this.#parts.clock.now());
      this.#entrySize += 0.1 * (tasks / entries.length - this.#entrySize);
    }
    return found;
  }

  async #makeGroups(shard: number, streams: readonly string[]): Promise<void> {
    const missing = streams.filter((stream) => !this.#grouped.has(stream));
    if (missing.length === 0) return;
    const commands = missing.map((stream) => ["XGROUP", "CREATE", stream, GROUP, "0", "MKSTREAM"]);
    const replies = await this.#parts.nodes.pipeline(shard, commands, { resend: true });
    replies.forEach((reply, at) => {
      if (!(reply instanceof RedisError) || reply.code === "BUSYGROUP") this.#grouped.add(missing[at]!);
    });
  }

  /** In each shard in which this batcher reads or holds something. */
  async #renew(): Promise<void> {
    const { nodes, name, options, clock } = this.#parts;
    const held = new Set(this.#pool.all().map(({ entry }) => entry.shard));
    await Promise.allSettled(
      Array.from(new Set([...nodes.activeShards(), ...held]), async (shard) => {
        const number = String(++this.#renewals);
        const keys = [this.#parts.key(shard, `alive:${name}`)];
        const args = [Math.ceil(options.leaseMs), number];
        const holds = this.#pool.entries(shard).length > 0;
        const until = clock.now() + options.leaseMs;
        const began = await nodes.run(shard, { script: scripts.renew, keys, args }, { resend: true });
        // It was away for longer than its lease: another batcher may have taken over.
        if (holds && String(began) === number) await this.#pool.verify(shard);
        this.#pool.leased(shard, until);
      }),
    );
  }

  /** Each second: reads leftovers in inactive shards, also in shards that replace a migrating one; starts on new ones. */
  async #round(): Promise<void> {
    const { nodes, keys, clock } = this.#parts;
    this.#startLoops();
    await this.#rebalance();
    const active = nodes.activeShards();
    await Promise.allSettled(
      keys.tags.map(async (_, shard) => {
        if (active.includes(shard)) return;
        const models = this.#demand!.models().filter((model) => this.#wanted(model) > 0);
        const streams = models.map((model) => this.#stream(shard, model));
        const lengths = await nodes.pipeline(
          shard,
          streams.map((stream) => ["XLEN", stream]),
        );
        const filled = streams.filter((_stream, at) => Number(lengths[at]) > 0);
        if (filled.length > 0 && (await this.#read(shard, filled, MOST_ENTRIES)) > 0)
          this.#strays.set(shard, clock.now() + STRAY_MS);
      }),
    );
  }

  /**
   * Returns what other batchers can start sooner: all that waits for a model whose workers moved to them, and what was
   * read ahead while one of them has an idle worker. The last in the queue goes first.
   */
  async #rebalance(): Promise<void> {
    const demand = this.#demand!;
    const served = demand.models();
    const byModel = Map.groupBy(
      this.#pool.all().filter(({ record }) => record.state === "queued"),
      ({ record }) => record.task.model,
    );
    for (const [model, waiting] of byModel) {
      const serves = served.includes(model);
      if (serves ? !demand.othersIdle(model) : demand.share(model) === 1) continue;
      const ahead = Math.max(demand.batchSize(model), Math.ceil(demand.pacePerMs(model) * AHEAD_MS));
      const keep = serves ? demand.room(model) + ahead : 0;
      if (waiting.length <= keep) continue;
      const inLine = waiting.toSorted(
        ({ record: one }, { record: other }) => one.tier - other.tier || one.queuedAt - other.queuedAt,
      );
      await this.#pool.handBack(inLine.slice(keep));
    }
  }

  /** Entries of other zones that waited longer than `zoneSpillMs`, or that have no batcher. */
  async #spill(): Promise<void> {
    const { nodes, options } = this.#parts;
    const demand = this.#demand!;
    for (const { zone, deserted } of demand.zones()) {
      for (const model of demand.models()) {
        if (demand.room(model) === 0 || this.#wanted(model) <= 0) continue;
        for (const shard of nodes.activeShards()) {
          const afterMs = deserted ? 0 : options.zoneSpillMs;
          await this.#readOld(shard, model, this.#stream(shard, model, zone), afterMs);
        }
      }
    }
  }

  async takeOver(): Promise<void> {
    const { nodes, keys, options, name, limits } = this.#parts;
    const zones = [options.zone, ...this.zones];
    const served = new Set(this.#demand?.models() ?? limits.models.keys());
    const places = zones.flatMap((zone) => Array.from(limits.models.keys(), (model) => ({ zone, model })));
    // A batcher may have died with entries of a shard that is no longer active.
    const shards = this.#takeOvers++ % ALL_SHARDS_EACH === 0 ? [...keys.tags.keys()] : nodes.activeShards();
    await Promise.allSettled(
      shards.map(async (shard) => {
        const streams = places.map(({ zone, model }) => this.#stream(shard, model, zone));
        const asked = streams.map((stream) => ["XINFO", "CONSUMERS", stream, GROUP]);
        const found = await nodes.pipeline(shard, asked, { resend: true });
        for (const [at, reply] of found.entries()) {
          if (!Array.isArray(reply)) continue;
          for (const consumer of reply as RedisReply[][]) {
            const other = String(consumer[1]);
            if (this.#stopped) return;
            // Its own also without a worker: no other batcher can.
            if (other === name) await this.#recover(shard, streams[at]!);
            else if (served.has(places[at]!.model))
              await this.#tracked(this.#inherit(shard, streams[at]!, other, Number(consumer[3])));
          }
        }
      }),
    );
  }

  /** Entries pending under this batcher's name that did not arrive: the reply to a read or claim was lost. */
  async #recover(shard: number, stream: string): Promise<void> {
    const { nodes, name } = this.#parts;
    const pending = ["XPENDING", stream, GROUP, "IDLE", this.#idleMs()];
    for (let from = "-"; ;) {
      const asked = [...pending, from, "+", TAKE_OVER_TOGETHER, name];
      const rows = (await nodes.command(shard, asked, { resend: true })) as RedisReply[][];
      const ids = rows.map(([id]) => String(id));
      const lost = ids.filter((id) => !this.#pool.holds(stream, id));
      if (lost.length > 0) await this.#claim(shard, stream, lost, NOTHING);
      if (ids.length < TAKE_OVER_TOGETHER) return;
      from = `(${ids.at(-1)!}`;
    }
  }

  /** Entries touched more recently are on their way to a batcher. */
  #idleMs(): number {
    const { leaseMs } = this.#parts.options;
    return leaseMs === Infinity ? 0 : Math.floor(leaseMs / 2);
  }

  async #claim(
    shard: number,
    stream: string,
    ids: readonly string[],
    ran: ReadonlyMap<string, number>,
  ): Promise<number> {
    const { nodes, name } = this.#parts;
    // Not resent: the second time the entries' idle time would be too short. `#recover` finds a lost reply.
    const command = ["XCLAIM", stream, GROUP, name, this.#idleMs(), ...ids];
    const entries = ((await nodes.command(shard, command)) as StreamEntry[]).filter(Boolean);
    await this.#pool.take(shard, stream, entries, ran);
    return entries.length;
  }

  async #inherit(shard: number, stream: string, dead: string, pending: number): Promise<void> {
    const { nodes } = this.#parts;
    const alive = ["EXISTS", this.#parts.key(shard, `alive:${dead}`)];
    if ((await nodes.command(shard, alive, { resend: true })) !== 0) return;
    const notes = this.#parts.key(shard, `run:${dead}`);
    if (pending === 0) await this.#parts.run(shard, scripts.retire, [stream], [GROUP, dead]);
    else {
      const running = (await nodes.command(shard, ["HVALS", notes], { resend: true })) as Buffer[];
      const ran = new Map<string, number>();
      for (const note of running) {
        const fields = texts(note);
        for (let at = 0; at + 1 < fields.length; at += 2) ran.set(fields[at]!, Number(fields[at + 1]));
      }
      const asked = ["XPENDING", stream, GROUP, "-", "+", TAKE_OVER_TOGETHER, dead];
      for (let more = true; more && !this.#stopped;) {
        const rows = (await nodes.command(shard, asked, { resend: true })) as RedisReply[][];
        const ids = rows.map(([id]) => String(id));
        const claimed = ids.length > 0 ? await this.#claim(shard, stream, ids, ran) : 0;
        more = claimed > 0 && ids.length === TAKE_OVER_TOGETHER;
      }
    }
    await nodes.command(shard, ["PEXPIRE", notes, NOTES_MS], { resend: true });
  }
}
