/**
 * What the files of the Redis engine share: the connection, the clocks, the names, the limits, what is known
 * of the queues, and who listens.
 */
import type { Clock } from "../clock.ts";
import { Refusal } from "../core/errors.ts";
import { homeIn } from "../core/home.ts";
import type { Events } from "../telemetry/events.ts";
import type { EngineLimits, EngineListener, RecordView } from "./engine.ts";
import { readOutcome, readPending, type RedisClock } from "./redis-frames.ts";
import { Crowds } from "./redis-crowds.ts";
import type { RedisKeys } from "./redis-keys.ts";
import { RedisNews } from "./redis-news.ts";
import { type Arg, RedisError, type RedisNodes, type Script, StoreAway } from "../redis/nodes.ts";
import { CallBuilder, scripts } from "./redis-scripts.ts";
import { QueueMirror } from "./redis-view.ts";

/** Bounds are the whole store's: each shard keeps its part. `results.maxBytes` is Redis's own maxmemory. */
export interface RedisOptions extends EngineLimits {
  readonly zone: string;
  readonly zoneSpillMs: number;
  /** A lease is lost when it was not renewed for so long; renewed each third. */
  readonly leaseMs: number;
  readonly sweepMs: number;
  /** Tasks that a tenant may hold before it can crowd others; left out: as `redis-crowds.ts` says. */
  readonly crowdFrom?: number;
  /** How long a task may take to get in before its caller is told to try again. */
  readonly putWithinMs: number;
}

/** What the engine is built on. */
export interface RedisBase {
  readonly nodes: RedisNodes;
  readonly keys: RedisKeys;
  readonly clock: Clock;
  readonly shared: RedisClock;
  readonly events: Events;
  /** Unique to this process: who waits, who claims, who speaks. */
  readonly name: string;
}

export class RedisParts implements RedisBase {
  readonly nodes: RedisNodes;
  readonly keys: RedisKeys;
  readonly clock: Clock;
  readonly shared: RedisClock;
  readonly events: Events;
  readonly name: string;
  options: RedisOptions;
  readonly shards: number;
  readonly mirror: QueueMirror;
  readonly crowds: Crowds;
  readonly news: RedisNews;
  readonly listeners = new Set<EngineListener>();
  /** The instant that `reap` last named, or a sooner one that was told since. */
  nextReap = Infinity;

  constructor({ nodes, keys, clock, shared, events, name }: RedisBase, options: RedisOptions) {
    this.nodes = nodes;
    this.keys = keys;
    this.clock = clock;
    this.shared = shared;
    this.events = events;
    this.name = name;
    this.options = options;
    this.shards = keys.tags.length;
    this.mirror = new QueueMirror({ ...options, models: options.models.keys() }, clock, shared);
    this.crowds = new Crowds(options.models.keys(), options.tiers, options.crowdFrom);
    this.mirror.arrived = (model, parameters, depth, count) => {
      for (const listener of this.listeners) listener.queued?.(model, parameters, depth, count);
    };
    this.news = new RedisNews(this, (record) => {
      for (const listener of this.listeners) listener.settled?.(record);
    });
  }

  retune(limits: EngineLimits): void {
    this.options = { ...this.options, ...limits };
    this.mirror.retune(limits.models);
    this.crowds.retune(limits.models.keys());
  }

  /** Now, on the shared clock. */
  now(): string {
    return this.shared.shared(this.clock.now());
  }

  /** What may travel together in one call: all on one server, each shard alone on a Cluster. */
  groupOf(shard: number): number {
    return this.nodes.cluster ? shard : 0;
  }

  shardOf(id: string): number {
    return homeIn(id) % this.shards;
  }

  /** A call that begins as all do: when it is, and who calls. */
  call(script: Script, ...head: readonly Arg[]): CallBuilder {
    return new CallBuilder(script, [this.now(), this.name, ...head], this.keys, this.nodes.cluster);
  }

  /** Does `work` for each group of shards that one script may span, with what belongs to them. */
  async spread<Value, Result>(
    values: Iterable<Value>,
    shardOf: (value: Value) => number,
    work: (values: readonly Value[], shards: readonly number[]) => Promise<Result>,
  ): Promise<Result[]> {
    const byShard = Map.groupBy(values, shardOf);
    const groups = this.nodes.groups([...byShard.keys()]);
    return Promise.all(
      groups.map((group) =>
        work(
          group.flatMap((shard) => byShard.get(shard)!),
          group,
        ),
      ),
    );
  }

  /** The record under an id; for an operator when no tenant is named. With a gateway: it is told of the end. */
  async record(id: string, tenant?: string, gateway = ""): Promise<RecordView | undefined> {
    const shard = this.shardOf(id);
    const call = this.call(scripts.join, id, gateway, tenant === undefined ? 0 : 1, tenant ?? "");
    call.place(shard);
    call.names(shard, `r:${id}`);
    const reply = await this.asked(shard, () => this.nodes.run(shard, call.build(), { resend: true }));
    if (reply === null) return undefined;
    const [kind, ...fields] = reply as Buffer[];
    const final = kind!.toString("latin1") === "e";
    return final ? readOutcome(id, fields[0]!, this.shared) : readPending(id, fields, this.shared);
  }

  /** Asks for somebody who waits: a server that is known to be away is not waited for. */
  async asked<Value>(shard: number, ask: () => Promise<Value>): Promise<Value> {
    try {
      this.reach(shard);
      return await ask();
    } catch (error) {
      throw overloaded(error, ASK_AGAIN, ASK_AGAIN);
    }
  }

  reach(shard: number): void {
    if (!this.nodes.up(shard)) throw new StoreAway("the server of this shard is away", false);
  }

  fallsDue(at: number): void {
    if (at >= this.nextReap) return;
    this.nextReap = at;
    for (const listener of this.listeners) listener.due?.(at);
  }

  /** Tells everybody who waits of the ends that a script brought about. */
  announce(shard: number, ended: readonly Ended[]): void {
    const byGateway = new Map<string, (string | Buffer)[]>();
    for (const { id, gateways, record, bytes } of ended) {
      for (const gateway of gateways.includes(",") ? gateways.split(",") : [gateways]) {
        if (gateway !== this.name) pushTo(byGateway, gateway, id, bytes);
        else if (record !== undefined) this.news.ended(record);
        else this.news.endedFrame(id, bytes);
      }
    }
    for (const [gateway, news] of byGateway) this.news.send(shard, gateway, news);
  }

  /** The dead letters are full, and so many old ones made room. */
  lettersDropped(count: number): void {
    if (count === 0) return;
    const message = `${count} dead letters were dropped to make room (deadLetters.max ${this.options.deadLetters.max})`;
    this.events.emit("notice", { level: "warn", message });
  }
}

/** The end of a task, and the processes that wait for it, with commas between. */
export interface Ended {
  readonly id: string;
  readonly gateways: string;
  /** Where it is known here, beside its bytes. */
  readonly record?: RecordView | undefined;
  readonly bytes: Buffer;
}

/** As scripts return it: id, who waits, outcome in turn. */
export function readEnded(rows: readonly Buffer[]): Ended[] {
  const ended: Ended[] = [];
  for (let at = 0; at < rows.length; at += 3) {
    const [id, gateways] = [rows[at]!.toString("latin1"), rows[at + 1]!.toString("latin1")];
    ended.push({ id, gateways, bytes: rows[at + 2]! });
  }
  return ended;
}

function pushTo(map: Map<string, (string | Buffer)[]>, key: string, ...values: (string | Buffer)[]): void {
  const list = map.get(key);
  if (list === undefined) map.set(key, values);
  else list.push(...values);
}

const RETRY_AFTER_MS = 1000;
const ASK_AGAIN = "ask again";

/** What a caller is told when Redis does not do what it should. */
export function overloaded(error: unknown, ifUnknown: string, otherwise: string): Refusal {
  if (error instanceof Refusal) return error;
  // Where the servers are is no caller's business; the log says it.
  const why = (error instanceof Error ? error.message : String(error)).replaceAll(/\bredis \S+/g, "Redis");
  const known = error instanceof StoreAway || error instanceof RedisError;
  const message = known ? `the task store cannot be used now (${why})` : `the task store failed (${why})`;
  // A refusal of the server itself means that nothing happened.
  const unknown = !(error instanceof RedisError) && !(error instanceof StoreAway && !error.unknown);
  const advice = unknown ? ifUnknown : otherwise;
  return new Refusal("SERVICE_OVERLOADED", `${message}; ${advice}`, { retryAfterMs: RETRY_AFTER_MS });
}
