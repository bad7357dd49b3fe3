/**
 * When a batcher reads bundles from the streams, and how it keeps and inherits leases.
 *
 * A batcher reads for workers that could start now, and a little ahead when no other batcher has an idle worker: what it
 * has read is its own, what it has not can still go to any other. Two ways of reading:
 *
 *   blocked   XREADGROUP BLOCK: Redis hands a new entry to one waiting batcher, at once. The batcher with the first id does
 *             it while it has a free worker, so that thin traffic fills one batcher's batches; the others do while they find work.
 *   polled    each POLL_MS, by a batcher that has room and is not blocked, and at once when a worker becomes free.
 *
 * How far it reads ahead is AHEAD_MS of its workers' pace at first. When what it reads has waited for long, the fleet is
 * overloaded: then it reads further ahead, so that tiers and tenants are served in turn out of all that waits.
 *
 * Its lease on what it has read is its `alive:` key, renewed each third of `leaseMs`. A batcher whose key is gone is dead:
 * any other takes its pending entries over (XPENDING, XCLAIM). What ran there is charged with the loss
 * (`core/retry.ts`), what only waited is not.
 */
import type { Alarm } from "../../clock.ts";
import { RedisError, type RedisReply } from "../../redis/nodes.ts";
import { texts } from "./frames.ts";
import { GROUP } from "./keys.ts";
import type { RedisParts } from "./parts.ts";
import type { StreamEntry, TaskPool } from "./pool.ts";

/** What the reader asks of the workers and the fleet. */
export interface Demand {
  /** Models that this batcher has a healthy worker for. */
  models(): readonly string[];
  /** Tasks of a model that its workers could start now. */
  room(model: string): number;
  /** Tasks per ms that its workers do. */
  pacePerMs(model: string): number;
  /** Tasks in one batch. */
  batchSize(model: string): number;
  /** Another batcher could start a batch of this model now. */
  othersIdle(model: string): boolean;
  /** Of the batchers that serve a model, this one is the first. */
  leads(model: string): boolean;
  /** Zones of gateways other than ours, and whether no healthy batcher is in them. */
  zones(): readonly { readonly zone: string; readonly deserted: boolean }[];
}

const POLL_MS = 5;
const BLOCK_MS = 400;
const ROUND_MS = 1000;
const AHEAD_MS = 50;
const MAX_AHEAD_MS = 60_000;
/** Entries that have waited longer than this were not read for want of workers. */
const OLD_MS = 200;
/** A batcher that found work so long ago blocks for more. */
const BUSY_MS = 1000;
const MOST_ENTRIES = 64;
const TAKE_OVER_TOGETHER = 100;
const RETRY_MS = 100;
/** What a dead batcher ran is known for so long after it was taken over. */
const NOTES_MS = 60_000;

export class BundleReader {
  readonly #parts: RedisParts;
  readonly #pool: TaskPool;
  #demand: Demand | undefined;
  /** It reads nothing more. */
  #stopped = false;
  /** Its lease has ended, or is about to. */
  #left = false;
  readonly #reading = new Set<Promise<unknown>>();
  readonly #alarms = new Map<string, Alarm>();
  #polling = false;
  #pollAgain = false;
  /** Streams in which a blocked read waits, by shard. */
  readonly #blocked = new Map<number, readonly string[]>();
  #looping = new Set<number>();
  /** Streams whose group is there. */
  readonly #grouped = new Set<string>();
  #aheadMs = AHEAD_MS;
  #foundAt = -Infinity;
  /** Tasks in an entry, on average. */
  #entrySize = 4;
  /** The entry that was next in each stream of another zone. */
  readonly #spills = new Map<string, { readonly last: string; readonly since: number }>();

  constructor(parts: RedisParts, pool: TaskPool) {
    this.#parts = parts;
    this.#pool = pool;
  }

  /** From here on it reads for these workers. */
  async open(demand: Demand): Promise<void> {
    this.#demand = demand;
    await this.#renew();
    const { leaseMs, zoneSpillMs } = this.#parts.options;
    this.#every("renew", leaseMs / 3, () => this.#renew());
    this.#every("takeOver", leaseMs / 2, () => this.takeOver());
    this.#every("poll", POLL_MS, () => this.#poll());
    this.#every("round", ROUND_MS, () => this.#round());
    this.#every("spill", Math.max(POLL_MS, zoneSpillMs / 2), () => this.#spill());
    this.#startLoops();
  }

  /** Reads nothing more; resolves when no read is on its way. The lease is renewed until `leave`. */
  async stop(): Promise<void> {
    this.#stopped = true;
    for (const [name, alarm] of this.#alarms) if (name !== "renew") alarm.cancel();
    await Promise.allSettled(this.#reading);
  }

  /** Its lease ends: what it still holds can be taken over at once. */
  async leave(): Promise<void> {
    this.#left = true;
    this.#alarms.get("renew")?.cancel();
    if (this.#demand === undefined) return;
    const { nodes, name } = this.#parts;
    const left = this.#shards().map((shard) => ({
      shard,
      command: ["DEL", this.#parts.key(shard, `alive:${name}`)],
    }));
    await nodes.scatter(left).catch(() => {});
  }

  #every(name: string, ms: number, work: () => Promise<void>): void {
    const over = name === "renew" ? this.#left : this.#stopped;
    if (over || ms === Infinity) return;
    const { clock } = this.#parts;
    const again = (): void => this.#every(name, ms, work);
    this.#alarms.set(
      name,
      clock.at(clock.now() + ms, () => void work().then(again, again)),
    );
  }

  /** A worker is free and nothing waits here. */
  poke(): void {
    if (this.#demand !== undefined && !this.#stopped) void this.#poll().catch(() => {});
  }

  /** Everything that is there, for as many workers as may come; for tests. */
  async readAll(): Promise<void> {
    const { keys, options } = this.#parts;
    for (let shard = 0; shard < keys.shards; shard++) {
      const streams = [...options.models.keys()].map((model) => keys.stream(shard, model, options.zone));
      while ((await this.#read(shard, streams, 1000)) > 0);
    }
  }

  #startLoops(): void {
    for (const shard of this.#parts.nodes.activeShards()) {
      if (this.#looping.has(shard)) continue;
      this.#looping.add(shard);
      void this.#loop(shard).finally(() => this.#looping.delete(shard));
    }
  }

  /** Waits for new entries of one shard, for as long as new bundles go there. */
  async #loop(shard: number): Promise<void> {
    const { nodes, clock } = this.#parts;
    const pause = (ms: number): Promise<void> =>
      new Promise((resolve) => clock.at(clock.now() + ms, () => resolve()));
    while (!this.#stopped && nodes.activeShards().includes(shard)) {
      const models = this.#demand!.models().filter((model) => this.#blocks(model));
      if (models.length === 0) {
        await pause(POLL_MS);
        continue;
      }
      const streams = models.map((model) => this.#parts.keys.stream(shard, model, this.#parts.options.zone));
      this.#blocked.set(shard, streams);
      try {
        const count = Math.min(...models.map((model) => this.#entries(this.#wanted(model))));
        await this.#read(shard, streams, Math.max(1, count), BLOCK_MS);
      } catch {
        await pause(RETRY_MS);
      }
      this.#blocked.delete(shard);
    }
  }

  #blocks(model: string): boolean {
    const demand = this.#demand!;
    if (this.#wanted(model) <= 0 || demand.room(model) === 0) return false;
    return demand.leads(model) || this.#parts.clock.now() < this.#foundAt + BUSY_MS;
  }

  /** How many more tasks of a model it should have. */
  #wanted(model: string): number {
    const demand = this.#demand!;
    const room = demand.room(model);
    const ahead = demand.othersIdle(model)
      ? 0
      : Math.max(demand.batchSize(model), demand.pacePerMs(model) * this.#aheadMs);
    return room + ahead - this.#pool.waiting(model);
  }

  #entries(tasks: number): number {
    return Math.min(MOST_ENTRIES, Math.ceil(tasks / Math.max(1, this.#entrySize)));
  }

  /** Reads for models that have room and are not read already. */
  async #poll(): Promise<void> {
    if (this.#stopped) return;
    if (this.#polling) {
      this.#pollAgain = true;
      return;
    }
    this.#polling = true;
    try {
      await Promise.all(this.#parts.nodes.activeShards().map((shard) => this.#pollShard(shard)));
    } finally {
      this.#polling = false;
    }
    if (!this.#pollAgain) return;
    this.#pollAgain = false;
    await this.#poll();
  }

  async #pollShard(shard: number): Promise<void> {
    const { keys, options } = this.#parts;
    const blocked = this.#blocked.get(shard) ?? [];
    const streams: string[] = [];
    let tasks = Infinity;
    for (const model of this.#demand!.models()) {
      const wanted = this.#wanted(model);
      const stream = keys.stream(shard, model, options.zone);
      if (wanted <= 0 || blocked.includes(stream)) continue;
      streams.push(stream);
      tasks = Math.min(tasks, wanted);
    }
    if (streams.length > 0) await this.#read(shard, streams, this.#entries(tasks));
  }

  /** Resolves with how many entries there were. */
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
    await this.#makeGroups(shard, streams);
    const wait = blockMs > 0 ? ["BLOCK", blockMs] : [];
    const command = [
      "XREADGROUP",
      "GROUP",
      GROUP,
      name,
      "COUNT",
      count,
      ...wait,
      "STREAMS",
      ...streams,
      ...streams.map(() => ">"),
    ];
    let reply: RedisReply;
    try {
      reply = await (blockMs > 0 ? nodes.block(shard, command, blockMs) : nodes.command(shard, command));
    } catch (error) {
      // A server that lost its data, or another one after a failover.
      if (error instanceof RedisError && error.code === "NOGROUP") this.#grouped.clear();
      throw error;
    }
    let found = 0;
    for (const [stream, entries] of (reply ?? []) as [Buffer, StreamEntry[]][]) {
      found += entries.length;
      this.#learn(entries);
      const tasks = await this.#pool.take(shard, stream.toString(), entries);
      this.#entrySize += 0.1 * (tasks / entries.length - this.#entrySize);
    }
    return found;
  }

  #learn(entries: readonly StreamEntry[]): void {
    const { clock, shared } = this.#parts;
    const now = clock.now();
    this.#foundAt = now;
    const oldest = Number(entries[0]![0].toString("latin1").split("-", 1)[0]) - shared.offsetMs;
    const waited = now - oldest;
    if (waited > OLD_MS) this.#aheadMs = Math.min(MAX_AHEAD_MS, 1.5 * this.#aheadMs);
    else if (waited < OLD_MS / 4) this.#aheadMs = Math.max(AHEAD_MS, 0.7 * this.#aheadMs);
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

  /** Shards in which this batcher reads or holds something. */
  #shards(): number[] {
    const shards = new Set(this.#parts.nodes.activeShards());
    for (const { entry } of this.#pool.all()) shards.add(entry.shard);
    return [...shards];
  }

  async #renew(): Promise<void> {
    const { nodes, name, options } = this.#parts;
    await Promise.allSettled(
      this.#shards().map(async (shard) => {
        const key = this.#parts.key(shard, `alive:${name}`);
        const lease = ["PX", Math.ceil(options.leaseMs)];
        const held = this.#pool.entries(shard).length > 0;
        const kept =
          held && (await nodes.command(shard, ["SET", key, "1", "XX", ...lease], { resend: true }));
        if (kept !== false && kept !== null) return;
        await nodes.command(shard, ["SET", key, "1", ...lease], { resend: true });
        // It was away for longer than its lease: another batcher may have taken over.
        if (held) await this.#pool.verify(shard);
      }),
    );
  }

  /** Each second: what lies in shards that new bundles no longer go to, and shards that they go to now. */
  async #round(): Promise<void> {
    const { nodes, keys, options } = this.#parts;
    this.#startLoops();
    const active = nodes.activeShards();
    await Promise.allSettled(
      keys.tags.map(async (_, shard) => {
        if (active.includes(shard)) return;
        const models = this.#demand!.models().filter((model) => this.#wanted(model) > 0);
        const lengths = await nodes.pipeline(
          shard,
          models.map((model) => ["XLEN", keys.stream(shard, model, options.zone)]),
        );
        const streams = models
          .filter((_model, at) => Number(lengths[at]) > 0)
          .map((model) => keys.stream(shard, model, options.zone));
        if (streams.length > 0) await this.#read(shard, streams, MOST_ENTRIES);
      }),
    );
  }

  /** Entries of other zones that waited for longer than `zoneSpillMs`, or that no batcher is there for. */
  async #spill(): Promise<void> {
    const { nodes, keys, options, clock } = this.#parts;
    const demand = this.#demand!;
    for (const { zone, deserted } of demand.zones()) {
      for (const model of demand.models()) {
        if (demand.room(model) === 0 || this.#wanted(model) <= 0) continue;
        for (const shard of nodes.activeShards()) {
          const stream = keys.stream(shard, model, zone);
          await this.#makeGroups(shard, [stream]);
          const groups = (await nodes.command(shard, ["XINFO", "GROUPS", stream])) as RedisReply[][];
          const group = new Map<string, RedisReply>();
          const fields = groups[0] ?? [];
          for (let at = 0; at + 1 < fields.length; at += 2) group.set(String(fields[at]), fields[at + 1]!);
          const last = String(group.get("last-delivered-id"));
          const unread = group.get("lag") === null || Number(group.get("lag")) > 0;
          const before = this.#spills.get(stream);
          if (!unread) this.#spills.delete(stream);
          else if (before?.last !== last) this.#spills.set(stream, { last, since: clock.now() });
          const waitedMs = clock.now() - (this.#spills.get(stream)?.since ?? Infinity);
          if (unread && (deserted || waitedMs >= options.zoneSpillMs / 2)) {
            await this.#read(shard, [stream], this.#entries(demand.room(model)));
          }
        }
      }
    }
  }

  /** Looks for batchers that died, and takes over what they held. */
  async takeOver(): Promise<void> {
    const { nodes, keys, options, name } = this.#parts;
    const zones = [options.zone, ...(this.#demand?.zones() ?? []).map(({ zone }) => zone)];
    const models = this.#demand?.models() ?? [...options.models.keys()];
    const active = nodes.activeShards();
    await Promise.allSettled(
      active.map(async (shard) => {
        const streams = zones.flatMap((zone) => models.map((model) => keys.stream(shard, model, zone)));
        const asked = streams.map((stream) => ["XINFO", "CONSUMERS", stream, GROUP]);
        const found = await nodes.pipeline(shard, asked, { resend: true });
        for (const [at, reply] of found.entries()) {
          if (!Array.isArray(reply)) continue;
          for (const consumer of reply as RedisReply[][]) {
            const other = String(consumer[1]);
            if (other === name || this.#stopped) continue;
            await this.#tracked(this.#inherit(shard, streams[at]!, other, Number(consumer[3])));
          }
        }
      }),
    );
  }

  async #inherit(shard: number, stream: string, dead: string, pending: number): Promise<void> {
    const { nodes, name, options } = this.#parts;
    const alive = await nodes.command(shard, ["EXISTS", this.#parts.key(shard, `alive:${dead}`)], {
      resend: true,
    });
    if (alive !== 0) return;
    const notes = this.#parts.key(shard, `run:${dead}`);
    if (pending === 0) {
      await nodes.pipeline(shard, [["XGROUP", "DELCONSUMER", stream, GROUP, dead]], { resend: true });
      return;
    }
    const running = (await nodes.command(shard, ["HVALS", notes], { resend: true })) as Buffer[];
    const ran = new Map<string, number>();
    for (const note of running) {
      const fields = texts(note);
      for (let at = 0; at + 1 < fields.length; at += 2) ran.set(fields[at]!, Number(fields[at + 1]));
    }
    const rows = (await nodes.command(
      shard,
      ["XPENDING", stream, GROUP, "-", "+", TAKE_OVER_TOGETHER, dead],
      {
        resend: true,
      },
    )) as RedisReply[][];
    const ids = rows.map(([id]) => String(id));
    if (ids.length === 0) return;
    const idleMs = options.leaseMs === Infinity ? 0 : Math.floor(options.leaseMs / 2);
    const entries = (await nodes.command(shard, ["XCLAIM", stream, GROUP, name, idleMs, ...ids], {
      resend: true,
    })) as StreamEntry[];
    await this.#pool.take(shard, stream, entries.filter(Boolean), ran);
    await nodes.command(shard, ["PEXPIRE", notes, NOTES_MS]);
  }
}
