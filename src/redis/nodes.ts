/**
 * Running scripts where their shard lives: on one server, a primary with replicas, or a Cluster.
 *
 * `owners.ts` knows which primary owns each shard, `node.ts` keeps the connections to one,
 * `persist.ts` sees each command through redirects and outages, `group.ts` makes durable writes
 * cheap, `subscriptions.ts` listens. This file is what the engine sees of them.
 *
 * Durability: "replica": a durable write is accepted when every replica in sync has it, at least one; "local": when the primary has
 * it; "auto": as "replica" at a primary that has a replica in step (asked each second), else as "local".
 * Losing the last replica is a `notice`, as is losing a server.
 *
 * Every rejection is a `StoreAway`, or the `RedisError` of a script or command that is itself at fault
 * (also OOM, NOREPLICAS, MISCONF, NOPERM: the server is there and refuses).
 */
import type { Clock } from "../clock.ts";
import type { Events } from "../telemetry/events.ts";
import { StoreAway } from "./group.ts";
import { RedisError } from "./link.ts";
import type { Arg, RedisReply } from "./link.ts";
import type { Script } from "./node.ts";
import { RedisOwners } from "./owners.ts";
import { persist } from "./persist.ts";
import type { Patience } from "./persist.ts";
import { Subscriptions } from "./subscriptions.ts";
import type { Durability, NodesOptions } from "./topology.ts";

export { RedisError, StoreAway };
export type { Arg, Durability, NodesOptions, Patience, RedisReply, Script };

export interface ScriptCall {
  readonly script: Script;
  readonly keys: readonly Arg[];
  readonly args: readonly Arg[];
  /** Plain commands that go right before the script, on the same connection, in the same write. */
  readonly before?: readonly (readonly Arg[])[] | undefined;
}

export interface PrimaryView {
  readonly address: string;
  readonly replicas: number;
  /** Does a durable write wait for a replica now? */
  readonly waits: boolean;
  readonly up: boolean;
}

const CLOCK_TRIES = 5;

export class RedisNodes {
  /** These shards became unreachable, or reachable again. */
  onShards: ((shards: readonly number[], up: boolean) => void) | undefined;
  readonly #clock: Clock;
  readonly #owners: RedisOwners;
  readonly #subscriptions: Subscriptions;

  private constructor(options: NodesOptions, clock: Clock, events: Events) {
    this.#clock = clock;
    this.#owners = new RedisOwners(options, clock, events, {
      shards: (shards, up) => this.onShards?.(shards, up),
      moved: () => this.#subscriptions.reconcile(),
      surveyed: () => this.#subscriptions.survey(),
    });
    this.#subscriptions = new Subscriptions(options.tags.length, this.#owners);
  }

  /** Connected to every primary; rejects with one line that says what to do. */
  static async open(options: NodesOptions, clock: Clock, events: Events): Promise<RedisNodes> {
    const nodes = new RedisNodes(options, clock, events);
    try {
      await nodes.#owners.start();
      return nodes;
    } catch (error) {
      await nodes.close();
      throw error;
    }
  }

  get cluster(): boolean {
    return this.#owners.cluster;
  }

  /** Shards that one script may touch together: all on one server; on a Cluster each by itself. */
  groups(shards: readonly number[]): number[][] {
    if (shards.length === 0) return [];
    return this.cluster ? shards.map((shard) => [shard]) : [[...shards]];
  }

  /**
   * Runs a script at the shard's primary. A lost reply rejects (`unknown`) unless it may be sent again. While
   * the primary is away it rejects at once, unless `resend` or `withinMs` was given: then it waits that long.
   */
  run(shard: number, call: ScriptCall, options?: Patience): Promise<RedisReply> {
    const command = evalsha(call);
    return persist(
      this.#owners,
      shard,
      (node, asking, until) => node.run(command, asking, until, call.before),
      options,
      call.script,
    );
  }

  /**
   * Resolves when it is as safe as `durability` asks; only then may somebody be told "accepted". Goes with
   * others to the same server in one pipeline, and is sent again when the reply is lost: the script must
   * know what it has done before, and write something also then.
   */
  runDurably(shard: number, call: ScriptCall, withinMs: number): Promise<RedisReply> {
    const command = evalsha(call);
    return persist(
      this.#owners,
      shard,
      (node, asking, until) => node.durably(command, asking, until, call.before),
      { resend: true, withinMs },
      call.script,
    );
  }

  /** A plain command at the shard's primary; as `run`. */
  command(shard: number, command: readonly Arg[], options?: Patience): Promise<RedisReply> {
    return persist(this.#owners, shard, (node, asking, until) => node.run(command, asking, until), options);
  }

  /**
   * Listens to `channel(shard)` of every shard, for ever; resolves when all are confirmed, with what ends it.
   * `resubscribed` names shards whose messages may have been missed, also the first time. Calling this again
   * adds channels; their names must differ.
   */
  subscribe(
    channel: (shard: number) => string,
    heard: (shard: number, payload: Buffer) => void,
    resubscribed: (shards: readonly number[]) => void,
  ): Promise<() => void> {
    return this.#subscriptions.add(channel, heard, resubscribed);
  }

  up(shard: number): boolean {
    return this.#owners.up(shard);
  }

  /** The server's clock minus ours, in ms: TIME against the middle of the quickest of a few round trips. */
  async clockOffset(shard = 0): Promise<number> {
    let best = { tookMs: Infinity, offset: 0 };
    for (let tries = 0; tries < CLOCK_TRIES; tries++) {
      const before = this.#clock.now();
      const reply = (await this.command(shard, ["TIME"], { resend: true })) as RedisReply[];
      const after = this.#clock.now();
      const server = Number(reply[0]) * 1000 + Number(reply[1]) / 1000;
      if (after - before < best.tookMs)
        best = { tookMs: after - before, offset: server - (before + after) / 2 };
    }
    return best.offset;
  }

  /** Those that own a shard. */
  primaries(): readonly PrimaryView[] {
    return this.#owners.primaries.map(({ address, replicas, waits, up }) => ({
      address,
      replicas,
      waits,
      up,
    }));
  }

  /** Ends every connection; what is in flight rejects. Idempotent. */
  close(): Promise<void> {
    this.#subscriptions.close();
    this.#owners.close();
    return Promise.resolve();
  }
}

function evalsha({ script, keys, args }: ScriptCall): Arg[] {
  return ["EVALSHA", script.sha, keys.length, ...keys, ...args];
}
