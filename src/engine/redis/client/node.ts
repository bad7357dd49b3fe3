/**
 * One primary and its connections: plain commands and scripts, durable writes (often delayed by WAIT), and blocking
 * reads; each reconnects. (`subscriptions.ts` has the fourth.) A fresh connection first checks that the server is a
 * primary; a replica is never shown as up. Once a second `survey` checks again, counts the replicas and pings both
 * connections, so that a dead one is noticed without traffic.
 */
import type { Clock } from "../../../app/clock.ts";
import { addressOf, KeptLink, LinkDown, RedisError } from "./link.ts";
import type { Arg, LinkOptions, RedisLink, RedisReply } from "./link.ts";
import { askFacts } from "./topology.ts";
import type { RedisAddress, WriteDurability, ServerFacts } from "./topology.ts";

type Commands = readonly (readonly Arg[])[];
export type Replies = (RedisReply | RedisError)[];

/** Known to servers by the SHA1 of its source. */
export interface Script {
  readonly name: string;
  readonly source: string;
  readonly sha: string;
}

/** The store is unavailable. `unknown`: the command may have happened all the same. */
export class StoreAway extends Error {
  readonly unknown: boolean;

  constructor(message: string, unknown: boolean) {
    super(message);
    this.name = "StoreAway";
    this.unknown = unknown;
  }
}

export interface NodeSettings {
  readonly link: Omit<LinkOptions, "host" | "port">;
  readonly clock: Clock;
  readonly random: () => number;
  readonly durability: WriteDurability;
  readonly waitTimeoutMs: number;
}

export interface NodeListener {
  /** A connection came up, went down, or could not be made (`why`). */
  changed(node: RedisNode, why: Error | undefined): void;
  /** Replicas were counted; `primary` false: it was demoted. */
  surveyed(node: RedisNode, primary: boolean): void;
}

export interface Attempting {
  /** Its slot is migrating to this server: each command follows ASKING. */
  readonly asking: boolean;
  /** How long to wait for a connection that is down; 0: not at all. */
  readonly until: number;
}

export class RedisNode implements RedisAddress {
  readonly host: string;
  readonly port: number;
  readonly address: string;
  usedAt = 0; // when it last owned a shard or was the target of an ASK
  replicas = 0; // connected, and past their initial sync
  readonly #settings: NodeSettings;
  readonly #listener: NodeListener;
  readonly #plain: KeptLink;
  readonly #safe: KeptLink;
  readonly #commit: GroupCommit;
  #blocking: KeptLink | undefined; // for blocking commands; made on demand
  readonly #loading = new Map<string, Promise<void>>();
  #inSync = 0;
  #surveying = false;

  constructor({ host, port }: RedisAddress, settings: NodeSettings, listener: NodeListener) {
    this.host = host;
    this.port = port;
    this.address = addressOf(host, port);
    this.#settings = settings;
    this.#listener = listener;
    this.#plain = this.keep((link) => this.#check(link));
    this.#safe = this.keep((link) => this.#check(link), settings.waitTimeoutMs);
    // All replicas in sync, not one: whichever is promoted must have what was accepted.
    const wanted = (): number => (this.waits ? Math.max(1, this.#inSync) : 0);
    this.#commit = new GroupCommit(this.#safe, wanted, settings.waitTimeoutMs);
  }

  /** A reconnecting link whose commands may take `extraMs` longer. */
  keep(prepare: (link: RedisLink) => Promise<void>, extraMs = 0): KeptLink {
    const { clock, random, link } = this.#settings;
    const commandTimeoutMs = link.commandTimeoutMs + extraMs;
    const changed = (why: Error | undefined): void => this.#listener.changed(this, why);
    const options = { ...link, commandTimeoutMs, host: this.host, port: this.port };
    return new KeptLink(options, { clock, random, prepare, changed });
  }

  get up(): boolean {
    return this.#plain.link !== undefined && this.#safe.link !== undefined;
  }

  get waits(): boolean {
    const { durability } = this.#settings;
    return durability === "replica" || (durability === "auto" && this.replicas > 0);
  }

  get link(): RedisLink | undefined {
    return this.#plain.link;
  }

  /** Both connections are up; rejects with LinkDown at `until`. */
  async ready(until: number): Promise<void> {
    await this.#plain.ready(until);
    await this.#safe.ready(until);
  }

  /** Rejects with RedisError or LinkDown. */
  async run(command: readonly Arg[], how: Attempting): Promise<RedisReply> {
    const link = this.#plain.link ?? (await linkOf(this.#plain, how));
    return how.asking ? only(await sent(link, [command], how)) : link.call(command);
  }

  /** One write; error replies are values. */
  async pipeline(commands: Commands, how: Attempting): Promise<Replies> {
    return sent(this.#plain.link ?? (await linkOf(this.#plain, how)), commands, how);
  }

  /** Resolves when as safe as `durability` asks; rejects with StoreAway when not all replicas in sync confirmed. */
  async pipelineDurably(commands: Commands, how: Attempting): Promise<Replies> {
    if (this.#safe.link === undefined) await linkOf(this.#safe, how);
    return sent({ callAll: (all) => this.#commit.run(all) }, commands, how);
  }

  /** May block at the server for up to `blockMs`, on a dedicated connection. */
  async block(command: readonly Arg[], blockMs: number, how: Attempting): Promise<RedisReply> {
    this.#blocking ??= this.keep((link) => this.#check(link), blockMs);
    return only(await sent(this.#blocking.link ?? (await linkOf(this.#blocking, how)), [command], how));
  }

  /** Loads the script; concurrent callers share one command. */
  load(script: Script): Promise<void> {
    const known = this.#loading.get(script.sha);
    if (known !== undefined) return known;
    const loading = this.#load(script).finally(() => this.#loading.delete(script.sha));
    this.#loading.set(script.sha, loading);
    return loading;
  }

  async #load({ name, source, sha }: Script): Promise<void> {
    // Scripts belong to the server, not the connection; the plain one is not delayed by WAIT.
    const link = this.#plain.link ?? this.#safe.link;
    if (link === undefined) throw new LinkDown(this.#plain.why.message, false);
    const found = String(await link.call(["SCRIPT", "LOAD", source]));
    if (found !== sha) throw new Error(`the script ${name} has SHA1 ${found}, not ${sha}`);
  }

  /** Checks the role and counts replicas. Never rejects. */
  async survey(): Promise<void> {
    if (this.#surveying) return;
    this.#surveying = true;
    // A failed call takes its link down, which is handled there.
    const touched = this.#safe.link?.call(["PING"]).catch(() => null);
    try {
      if (this.#plain.link !== undefined) this.#learn(await askFacts(this.#plain.link, "replication"));
    } catch {}
    await touched;
    this.#surveying = false;
  }

  /** Rejects everything that waits for a connection: its shard may have another owner now. */
  release(): void {
    for (const kept of this.#all()) kept.release();
  }

  close(): void {
    for (const kept of this.#all()) kept.close();
  }

  #all(): KeptLink[] {
    return [this.#plain, this.#safe, ...(this.#blocking === undefined ? [] : [this.#blocking])];
  }

  async #check(link: RedisLink): Promise<void> {
    const facts = await askFacts(link, "replication");
    if (!facts.primary) throw new Error(`redis ${this.address} is a replica, not a primary`);
    this.#learn(facts);
  }

  #learn({ primary, replicas, inSync }: ServerFacts): void {
    this.replicas = replicas;
    this.#inSync = inSync;
    if (!primary) for (const kept of this.#all()) kept.renew();
    this.#listener.surveyed(this, primary);
  }
}

function linkOf(kept: KeptLink, { until }: Attempting): Promise<RedisLink> {
  return until === 0 ? Promise.reject(new LinkDown(kept.why.message, false)) : kept.ready(until);
}

async function sent(
  link: Pick<RedisLink, "callAll">,
  commands: Commands,
  { asking }: Attempting,
): Promise<Replies> {
  if (!asking) return link.callAll(commands);
  const replies = await link.callAll(commands.flatMap((each) => [["ASKING"], each]));
  return replies.filter((_, at) => at % 2 === 1);
}

function only([reply]: Replies): RedisReply {
  if (reply instanceof RedisError) throw reply;
  return reply!;
}

const GROUP_CALLS = 512; // larger pipelines gain nothing, and the first would wait for the last

interface Member {
  readonly commands: Commands;
  readonly resolve: (replies: Replies) => void;
  readonly reject: (why: Error) => void;
}

/**
 * Group commit: many writes, one wait for the replicas.
 *
 *   run run run ──► [write, write, write, WAIT n ms] ──► all replies ──► each caller's promise
 *                    while it is in flight the next group gathers
 *
 * WAIT covers only writes of its own connection, and on a fresh connection it is satisfied at once. So commands and
 * their WAIT always travel together, and each group must write, also when it is resent.
 */
class GroupCommit {
  readonly #kept: KeptLink;
  readonly #wanted: () => number; // replicas that must confirm a write now; 0: no WAIT
  readonly #waitTimeoutMs: number;
  #gathering: Member[] = [];
  #busy = false;

  constructor(kept: KeptLink, wanted: () => number, waitTimeoutMs: number) {
    this.#kept = kept;
    this.#wanted = wanted;
    this.#waitTimeoutMs = waitTimeoutMs;
  }

  /** Resolves with the replies; rejects with LinkDown, or StoreAway when no replica confirmed. */
  run(commands: Commands): Promise<Replies> {
    // No replica to wait for, so no wait to share.
    if (this.#gathering.length === 0 && this.#wanted() === 0) return this.#send(commands);
    return new Promise((resolve, reject) => {
      const first = this.#gathering.push({ commands, resolve, reject }) === 1;
      if (first && !this.#busy) setImmediate(() => void this.#commit());
    });
  }

  async #send(commands: Commands): Promise<Replies> {
    const { link, why } = this.#kept;
    if (link === undefined) throw new LinkDown(why.message, false);
    return link.callAll(commands);
  }

  async #commit(): Promise<void> {
    while (this.#gathering.length > 0 && !this.#busy) {
      const group = this.#gathering.splice(0, GROUP_CALLS);
      const commands = group.flatMap((member) => member.commands);
      const wanted = this.#wanted();
      if (wanted > 0) commands.push(["WAIT", wanted, this.#waitTimeoutMs]);
      this.#busy = true;
      try {
        this.#settle(group, await this.#send(commands), wanted);
      } catch (error) {
        for (const { reject } of group) reject(error as Error);
      }
      this.#busy = false;
    }
  }

  #settle(group: readonly Member[], replies: Replies, wanted: number): void {
    const doubt = wanted > 0 ? this.#doubt(replies.at(-1), wanted) : undefined;
    let at = 0;
    for (const { commands, resolve, reject } of group) {
      const own = replies.slice(at, (at += commands.length));
      // An error reply is an answer; safety matters only where something was written.
      const refused = own.some((reply) => reply instanceof RedisError);
      if (doubt === undefined || refused) resolve(own);
      else reject(doubt);
    }
  }

  /** Why the group's writes are not safe, by WAIT's reply. */
  #doubt(confirmed: RedisReply | RedisError | undefined, wanted: number): Error | undefined {
    if (typeof confirmed === "number" && confirmed >= wanted) return undefined;
    if (!(confirmed instanceof RedisError)) {
      const who = wanted === 1 ? "no replica" : `only ${String(confirmed)} of ${wanted} replicas`;
      return new StoreAway(`${who} confirmed the write within ${this.#waitTimeoutMs} ms`, true);
    }
    if (confirmed.code === "NOPERM") return confirmed;
    // Demoted during WAIT (UNBLOCKED): equivalent to a lost connection.
    const { link } = this.#kept;
    return new LinkDown(`redis ${link?.address ?? ""} answered WAIT with: ${confirmed.message}`, true);
  }
}
