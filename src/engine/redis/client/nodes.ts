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
import type { Clock } from "../../../app/clock.ts";
import type { Events } from "../../../observe/events.ts";
import { StoreAway } from "./group.ts";
import { RedisError } from "./link.ts";
import type { Arg, RedisReply } from "./link.ts";
import type { RedisNode, Script } from "./node.ts";
import { RedisOwners } from "./owners.ts";
import { passes, persist } from "./persist.ts";
import type { Patience } from "./persist.ts";
import { Subscriptions } from "./subscriptions.ts";
import type { Durability, NodesOptions } from "./topology.ts";

export { RedisError, StoreAway };
export type { Arg, Durability, NodesOptions, Patience, RedisReply, Script };

export interface ScriptCall {
  readonly script: Script;
  readonly keys: readonly Arg[];
  readonly args: readonly Arg[];
}

export interface PrimaryView {
  readonly address: string;
  readonly replicas: number;
  /** Does a durable write wait for a replica now? */
  readonly waits: boolean;
  readonly up: boolean;
}

const CLOCK_TRIES = 5;
/** How long no new bundles go to a shard after its slot was found on its way to another server. */
const MOVING_MS = 10_000;
/** How long a blocking command may wait for its connection. */
const BLOCK_READY_MS = 1000;

export class RedisNodes {
  /** These shards became unreachable, or reachable again. */
  onShards: ((shards: readonly number[], up: boolean) => void) | undefined;
  readonly #clock: Clock;
  readonly #owners: RedisOwners;
  readonly #subscriptions: Subscriptions;
  readonly #shards: number;
  /** Shards whose slots were found on their way to another server: until when they are avoided. */
  readonly #movingUntil = new Map<number, number>();

  private constructor(options: NodesOptions, clock: Clock, events: Events) {
    this.#clock = clock;
    this.#shards = options.tags.length;
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

  /**
   * One shard of each primary that is up: where new bundles go. Few shards under thin traffic, so that one read
   * fills a batch; all primaries share the load. A shard whose slot is on its way takes no transactions: another of the
   * same primary stands in for it.
   */
  activeShards(): readonly number[] {
    const active = new Map<RedisNode, number>();
    for (let shard = 0; shard < this.#shards; shard++) {
      const owner = this.#owners.owner(shard);
      if (owner === undefined) continue;
      const found = active.get(owner);
      if (found === undefined || (this.#moves(found) && !this.#moves(shard))) active.set(owner, shard);
    }
    return Array.from(active.values()).filter((shard) => this.up(shard));
  }

  #moves(shard: number): boolean {
    const until = this.#movingUntil.get(shard);
    if (until === undefined) return false;
    if (this.#clock.now() < until) return true;
    this.#movingUntil.delete(shard);
    return false;
  }

  /**
   * Runs a script at the shard's primary. A lost reply rejects (`unknown`) unless it may be sent again. While
   * the primary is away it rejects at once, unless `resend` or `withinMs` was given: then it waits that long.
   */
  run(shard: number, { script, keys, args }: ScriptCall, options?: Patience): Promise<RedisReply> {
    const command = ["EVALSHA", script.sha, keys.length, ...keys, ...args];
    const attempt = (node: RedisNode, asking: boolean, until: number): Promise<RedisReply> =>
      node.run(command, asking, until);
    return persist(this.#owners, shard, attempt, options, script);
  }

  /**
   * As `run`, and as safe as `durability` asks when it resolves. Sent again when the reply is lost: the script must know what
   * it has done before, and write something also then.
   */
  runDurably(shard: number, { script, keys, args }: ScriptCall, withinMs: number): Promise<RedisReply> {
    const command = ["EVALSHA", script.sha, keys.length, ...keys, ...args];
    const attempt = async (node: RedisNode, asking: boolean, until: number): Promise<RedisReply> => {
      const [reply] = await node.pipeline([command], asking, until, true);
      if (reply instanceof RedisError) throw reply;
      return reply!;
    };
    return persist(this.#owners, shard, attempt, { resend: true, withinMs }, script);
  }

  /**
   * Commands of one shard in one write, done in this order. A refusal is a value; a command that was refused for now
   * (its slot moves, its server loads) is sent again by itself, so it may come after those behind it. Rejects as `run` does.
   */
  async pipeline(
    shard: number,
    commands: readonly (readonly Arg[])[],
    options?: Patience,
  ): Promise<(RedisReply | RedisError)[]> {
    const attempt = (node: RedisNode, asking: boolean, until: number): Promise<(RedisReply | RedisError)[]> =>
      node.pipeline(commands, asking, until);
    const replies = await persist(this.#owners, shard, attempt, options);
    await Promise.all(
      replies.map(async (reply, at) => {
        if (!(reply instanceof RedisError) || !passes(reply)) return;
        replies[at] = await this.command(shard, commands[at]!, { ...options, resend: true }).catch(
          (error: unknown) => {
            if (error instanceof RedisError) return error;
            throw error;
          },
        );
      }),
    );
    return replies;
  }

  /**
   * A transaction at one shard: all commands or none, and as safe as `durability` asks when it resolves. Sent again when the
   * reply is lost, so that it may happen twice: `again` then gives the commands. While its slot moves to another server
   * it waits: a key made at the new place would be in the way of the old one's.
   */
  async transact(
    shard: number,
    commands: (again: boolean) => readonly (readonly Arg[])[],
    withinMs: number,
  ): Promise<RedisReply[]> {
    let again = false;
    const attempt = async (node: RedisNode, asking: boolean, until: number): Promise<RedisReply[]> => {
      const all = [["MULTI"], ...commands(again), ["EXEC"]];
      again = true;
      const replies = await node.pipeline(all, asking, until, true);
      const done = replies.at(-1)!;
      if (Array.isArray(done)) return done;
      const refused =
        replies.find((reply) => reply instanceof RedisError) ?? new RedisError("ERR no reply to EXEC");
      if (refused.code === "ASK" || refused.code === "TRYAGAIN")
        this.#movingUntil.set(shard, this.#clock.now() + MOVING_MS);
      throw refused.code === "ASK" ? new RedisError(`TRYAGAIN the slot moves: ${refused.message}`) : refused;
    };
    return persist(this.#owners, shard, attempt, { resend: true, withinMs });
  }

  /**
   * Single commands at many shards: one write for each primary. Never rejects: refusals are values, in the order of the
   * commands, and so is a primary that is away.
   */
  async scatter(
    commands: readonly { readonly shard: number; readonly command: readonly Arg[] }[],
    options?: Patience,
  ): Promise<(RedisReply | RedisError | StoreAway)[]> {
    const replies: (RedisReply | RedisError | StoreAway)[] = [];
    const byOwner = Map.groupBy(commands.keys(), (at) => this.#owners.owner(commands[at]!.shard));
    await Promise.all(
      Array.from(byOwner, async ([, places]) => {
        // What another primary owns by now is refused, and finds its way by itself.
        const found = await this.#scattered(commands, places, options).catch((error: StoreAway) => error);
        places.forEach((at, which) => (replies[at] = Array.isArray(found) ? found[which]! : found));
      }),
    );
    return replies;
  }

  async #scattered(
    commands: readonly { readonly shard: number; readonly command: readonly Arg[] }[],
    places: readonly number[],
    options?: Patience,
  ): Promise<(RedisReply | RedisError)[]> {
    const { shard } = commands[places[0]!]!;
    const attempt = (node: RedisNode, asking: boolean, until: number): Promise<(RedisReply | RedisError)[]> =>
      node.pipeline(
        places.map((at) => commands[at]!.command),
        asking,
        until,
      );
    const replies = await persist(this.#owners, shard, attempt, options);
    await Promise.all(
      replies.map(async (reply, which) => {
        if (!(reply instanceof RedisError) || !passes(reply)) return;
        const { shard: own, command } = commands[places[which]!]!;
        replies[which] = await this.command(own, command, { ...options, resend: true });
      }),
    );
    return replies;
  }

  /** A command that may wait at the server for up to `blockMs`. Rejects when its connection is away, or breaks. */
  block(shard: number, command: readonly Arg[], blockMs: number): Promise<RedisReply> {
    const attempt = (node: RedisNode, asking: boolean, until: number): Promise<RedisReply> =>
      node.block(command, blockMs, asking, until);
    return persist(this.#owners, shard, attempt, { withinMs: BLOCK_READY_MS });
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
