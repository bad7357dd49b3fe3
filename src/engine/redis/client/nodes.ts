/**
 * Redis as the engine sees it: commands and scripts run where their shard lives, on one server, a primary with
 * replicas, or a Cluster. `owners.ts` maps shards to primaries, `node.ts` keeps connections, `subscriptions.ts`
 * subscribes.
 *
 * WriteDurability: "replica": a durable write is accepted when every replica in sync has it, at least one; "local":
 * when the primary has it; "auto": "replica" at a primary with a replica in sync (checked each second), else "local".
 * Losing the last replica is a `notice`, as is losing a server.
 *
 * Each command is retried as its error reply asks:
 *
 *   NOSCRIPT                        load the script there, retry at once
 *   MOVED                           record the new owner, retry there
 *   ASK                             once at the target, after ASKING
 *   TRYAGAIN CLUSTERDOWN LOADING    temporary: retry in 20 to 50 ms, until the time is up
 *   MASTERDOWN UNBLOCKED BUSY
 *   READONLY                        a demoted primary: the same, and look up the primary
 *   anything else                   the command's failure (also OOM, NOREPLICAS, MISCONF, NOPERM): rejects with it
 *
 * An error reply means that nothing happened. After a connection breaks behind the write the effect is unknown: it is
 * resent only with `resend`, because only the caller knows that repeating is harmless. Every rejection is a
 * `RedisError`, or a `StoreAway` when no server could be reached in time.
 */
import type { Clock } from "../../../app/clock.ts";
import type { Events } from "../../../observe/events.ts";
import { LinkDown, RedisError } from "./link.ts";
import type { Arg, RedisReply } from "./link.ts";
import { type Attempting, type RedisNode, type Replies, type Script, StoreAway } from "./node.ts";
import { RedisOwners } from "./owners.ts";
import { Subscriptions } from "./subscriptions.ts";
import { type WriteDurability, type NodesOptions, targetOf } from "./topology.ts";

export { RedisError, StoreAway };
export type { Arg, WriteDurability, NodesOptions, RedisReply, Script };

type Command = readonly Arg[];

export interface ScriptCall {
  readonly script: Script;
  readonly keys: readonly Arg[];
  readonly args: readonly Arg[];
}

export interface Patience {
  /** Resend when the reply is lost. */
  readonly resend?: boolean | undefined;
  /** How long to try; default 1000. An attempt under way then is still awaited. */
  readonly withinMs?: number | undefined;
}

export interface PrimaryView {
  readonly address: string;
  readonly replicas: number;
  /** Whether a durable write waits for a replica now. */
  readonly waits: boolean;
  readonly up: boolean;
}

const WITHIN_MS = 1000;
const PAUSE_MS = 20;
const PAUSE_SPREAD_MS = 30;
const CLOCK_TRIES = 5;
const MOVING_MS = 10_000; // how long a shard gets no new bundles after its slot was found migrating
const BLOCK_READY_MS = 1000; // how long a blocking command may wait for its connection

const PASSING = new Set([
  "TRYAGAIN",
  "CLUSTERDOWN",
  "LOADING",
  "MASTERDOWN",
  "UNBLOCKED",
  "BUSY",
  "READONLY",
]);

/** Whether the same command may succeed later or elsewhere. */
function passes(reply: unknown): boolean {
  if (!(reply instanceof RedisError)) return false;
  return reply.code === "MOVED" || reply.code === "ASK" || PASSING.has(reply.code);
}

export class RedisNodes {
  readonly #clock: Clock;
  readonly #owners: RedisOwners;
  readonly #subscriptions: Subscriptions;
  readonly #shards: number;
  readonly #movingUntil = new Map<number, number>(); // shards with migrating slots, and until when they are avoided

  private constructor(options: NodesOptions, clock: Clock, events: Events) {
    this.#clock = clock;
    this.#shards = options.tags.length;
    this.#owners = new RedisOwners(options, clock, events, {
      moved: () => this.#subscriptions.reconcile(),
      surveyed: () => this.#subscriptions.survey(),
    });
    this.#subscriptions = new Subscriptions(options.tags.length, this.#owners);
  }

  /** Connects to every primary; rejects with one line that says what to do. */
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
   * One shard of each primary that is up: where new bundles go. Few shards, so that one read fills a batch under thin
   * traffic; all primaries share the load. A migrating shard takes no transactions: another of the same primary
   * replaces it.
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
   * Runs a script at the shard's primary. A lost reply rejects (`unknown`) unless it may be resent. While the primary
   * is away it rejects at once, unless `resend` or `withinMs` was given: then it waits that long.
   */
  run(shard: number, { script, keys, args }: ScriptCall, patience?: Patience): Promise<RedisReply> {
    const command = ["EVALSHA", script.sha, keys.length, ...keys, ...args];
    return this.#persist(shard, (node, how) => node.run(command, how), patience, script);
  }

  /** As `run`, and durable. Resent when the reply is lost: the script must detect that it ran, and write even then. */
  runDurably(shard: number, { script, keys, args }: ScriptCall, withinMs: number): Promise<RedisReply> {
    const command = ["EVALSHA", script.sha, keys.length, ...keys, ...args];
    const attempt = async (node: RedisNode, how: Attempting): Promise<RedisReply> => {
      const [reply] = await node.pipelineDurably([command], how);
      if (reply instanceof RedisError) throw reply;
      return reply!;
    };
    return this.#persist(shard, attempt, { resend: true, withinMs }, script);
  }

  /** A plain command at the shard's primary; as `run`. */
  command(shard: number, command: Command, patience?: Patience): Promise<RedisReply> {
    return this.#persist(shard, (node, how) => node.run(command, how), patience);
  }

  /**
   * Commands of one shard in one write, executed in order. Error replies are values; a temporarily refused command
   * (slot migrating, server loading) is resent separately, so it may run after later ones. Rejects as `run` does.
   */
  pipeline(shard: number, commands: readonly Command[], patience?: Patience): Promise<Replies> {
    return this.#pipeline(
      commands,
      commands.map(() => shard),
      patience,
    );
  }

  /** Single commands at many shards, one write per primary. Never rejects: errors are values, in command order. */
  async scatter(
    commands: readonly { readonly shard: number; readonly command: Command }[],
    patience?: Patience,
  ): Promise<(RedisReply | RedisError | StoreAway)[]> {
    const replies: (RedisReply | RedisError | StoreAway)[] = [];
    const byOwner = Map.groupBy(commands.keys(), (at) => this.#owners.owner(commands[at]!.shard));
    await Promise.all(
      Array.from(byOwner, async ([, places]) => {
        const own = places.map((at) => commands[at]!.command);
        const shards = places.map((at) => commands[at]!.shard);
        const found = await this.#pipeline(own, shards, patience).catch((error: StoreAway) => error);
        places.forEach((at, which) => (replies[at] = Array.isArray(found) ? found[which]! : found));
      }),
    );
    return replies;
  }

  /** Commands for shards of one owner. Those owned by another primary by now are refused and redirected separately. */
  async #pipeline(
    commands: readonly Command[],
    shards: readonly number[],
    patience?: Patience,
  ): Promise<Replies> {
    if (commands.length === 0) return [];
    const replies = await this.#persist(shards[0]!, (node, how) => node.pipeline(commands, how), patience);
    if (!replies.some(passes)) return replies;
    const again = { ...patience, resend: true };
    return Promise.all(
      replies.map(async (reply, at) => {
        if (!passes(reply)) return reply;
        return this.command(shards[at]!, commands[at]!, again).catch((error: unknown) => {
          if (error instanceof RedisError) return error;
          throw error;
        });
      }),
    );
  }

  /**
   * A transaction at one shard, as safe as `durability` asks when it resolves. Resent when the reply is lost, so it may
   * happen twice: `again` then gives the commands. It waits while its slot migrates: a key created at the target would
   * block the source's.
   */
  async transact(
    shard: number,
    commands: (again: boolean) => readonly Command[],
    withinMs: number,
  ): Promise<RedisReply[]> {
    let again = false;
    const attempt = async (node: RedisNode, how: Attempting): Promise<RedisReply[]> => {
      const all = [["MULTI"], ...commands(again), ["EXEC"]];
      again = true;
      const replies = await node.pipelineDurably(all, how);
      const done = replies.at(-1)!;
      if (Array.isArray(done)) return done;
      const refused =
        replies.find((reply) => reply instanceof RedisError) ?? new RedisError("ERR no reply to EXEC");
      if (refused.code === "ASK" || refused.code === "TRYAGAIN")
        this.#movingUntil.set(shard, this.#clock.now() + MOVING_MS);
      throw refused.code === "ASK" ? new RedisError(`TRYAGAIN the slot moves: ${refused.message}`) : refused;
    };
    return this.#persist(shard, attempt, { resend: true, withinMs });
  }

  /** May block at the server for up to `blockMs`. Rejects when its connection is down or breaks. */
  block(shard: number, command: Command, blockMs: number): Promise<RedisReply> {
    const attempt = (node: RedisNode, how: Attempting): Promise<RedisReply> =>
      node.block(command, blockMs, how);
    return this.#persist(shard, attempt, { withinMs: BLOCK_READY_MS });
  }

  async #persist<Reply>(
    shard: number,
    attempt: (node: RedisNode, how: Attempting) => Promise<Reply>,
    patience: Patience = {},
    script?: Script,
  ): Promise<Reply> {
    const course = new Course(this.#owners, this.#clock, shard, patience, script);
    for (;;) {
      const node = course.target ?? this.#owners.owner(shard);
      try {
        if (node === undefined) throw new RedisError(`CLUSTERDOWN no server serves shard ${shard}`);
        if (course.unloaded) await course.load(node);
        return await attempt(node, course);
      } catch (error) {
        // Prepares the next attempt, or throws.
        if (course.failed(error, node)) await course.pause();
      }
    }
  }

  /**
   * Subscribes to `channel(shard)` of every shard; resolves when all are confirmed, with a function that ends it.
   * `resubscribed` names shards whose messages may have been missed, also the first time. Further calls add channels;
   * their names must differ.
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

  /** Server clock minus ours, in ms: TIME against the middle of the quickest of a few round trips. */
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

  primaries(): readonly PrimaryView[] {
    const { primaries } = this.#owners;
    return primaries.map(({ address, replicas, waits, up }) => ({ address, replicas, waits, up }));
  }

  /** Closes every connection; what is in flight rejects. Idempotent. */
  close(): Promise<void> {
    this.#subscriptions.close();
    this.#owners.close();
    return Promise.resolve();
  }
}

/** State of a command between attempts. */
class Course implements Attempting {
  target: RedisNode | undefined; // the server that an ASK named, for the next attempt
  unloaded = false; // load the script first
  readonly #owners: RedisOwners;
  readonly #clock: Clock;
  readonly #shard: number;
  readonly #script: Script | undefined;
  readonly #resend: boolean;
  readonly #withinMs: number;
  readonly #endsAt: number;
  #patient: boolean; // may wait for a connection that is down: requested, or it was redirected
  #moves = 0;
  #loaded = false;
  #unknown = false; // an attempt was lost after its write

  constructor(
    owners: RedisOwners,
    clock: Clock,
    shard: number,
    { resend = false, withinMs }: Patience,
    script: Script | undefined,
  ) {
    this.#owners = owners;
    this.#clock = clock;
    this.#shard = shard;
    this.#script = script;
    this.#resend = resend;
    this.#withinMs = withinMs ?? WITHIN_MS;
    this.#endsAt = clock.now() + this.#withinMs;
    this.#patient = resend || withinMs !== undefined;
  }

  get asking(): boolean {
    return this.target !== undefined;
  }

  get until(): number {
    return this.#patient ? this.#endsAt : 0;
  }

  async load(node: RedisNode): Promise<void> {
    try {
      await node.load(this.#script!);
      this.unloaded = false;
    } catch (error) {
      // Whatever became of the loading, the command itself was not sent.
      throw error instanceof LinkDown ? new LinkDown(error.message, false) : error;
    }
  }

  /** True: retry after a pause; false: retry at once. Throws when there is nothing left to do. */
  failed(error: unknown, node: RedisNode | undefined): boolean {
    if (error instanceof RedisError && error.code === "NOSCRIPT" && this.#script !== undefined) {
      // A server without the script is told once, however late it is.
      if (this.#loaded) this.#checkTime(error, node);
      this.#loaded = this.unloaded = true;
      return false; // to the same server, also when it was the target of an ASK
    }
    this.target = undefined;
    this.unloaded = false;
    if (error instanceof LinkDown) this.#lost(error);
    else if (!(error instanceof RedisError)) throw error;
    else if (!passes(error)) {
      // An error reply says that nothing happened now; an earlier attempt may have.
      if (!this.#unknown) throw error;
      throw new StoreAway(`redis refused a second attempt: ${error.message}`, true);
    } else {
      this.#checkTime(error, node);
      if (node !== undefined && !PASSING.has(error.code)) return this.#redirected(error, node);
      if (error.code === "READONLY") void node?.survey();
    }
    this.#owners.refresh();
    return true;
  }

  pause(): Promise<void> {
    const at = this.#clock.now() + PAUSE_MS + PAUSE_SPREAD_MS * this.#owners.random();
    return new Promise((resolve) => this.#clock.at(at, resolve));
  }

  #redirected(error: RedisError, node: RedisNode): boolean {
    this.#patient = true;
    const target = targetOf(error, node.host);
    if (error.code === "ASK") {
      this.target = this.#owners.at(target);
      return false;
    }
    this.#owners.moved(this.#shard, target);
    // Two servers that redirect to each other are about to agree; once is normal.
    return ++this.#moves > 1;
  }

  #lost(error: LinkDown): void {
    this.#unknown ||= error.written;
    const again = error.written ? this.#resend : this.#patient;
    if (!again || this.#late()) throw new StoreAway(error.message, this.#unknown);
  }

  #checkTime(error: RedisError, node: RedisNode | undefined): void {
    if (!this.#late()) return;
    const who = node === undefined ? "redis" : `redis ${node.address}`;
    throw new StoreAway(`${who} answered for ${this.#withinMs} ms: ${error.message}`, this.#unknown);
  }

  #late(): boolean {
    return this.#owners.closed || this.#clock.now() >= this.#endsAt;
  }
}
