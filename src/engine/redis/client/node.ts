/**
 * One primary, and our connections to it: one for plain commands and scripts, one for writes that must be
 * safe (it is often held up by WAIT), one for reads that wait for new entries, each kept up for ever.
 * (`subscriptions.ts` has the fourth.)
 *
 * Each fresh connection asks first whether this server is a primary; a replica is never shown as up. Once a
 * second `survey` asks again, counts the replicas and touches both connections, so that a dead one is
 * noticed without traffic.
 */
import type { Clock } from "../../../app/clock.ts";
import { answers, asked, GroupCommit } from "./group.ts";
import { KeptLink } from "./kept.ts";
import { addressOf, LinkDown } from "./link.ts";
import { RedisError } from "./link.ts";
import type { Arg, LinkOptions, RedisLink, RedisReply } from "./link.ts";
import { askFacts } from "./topology.ts";
import type { Address, Durability, ServerFacts } from "./topology.ts";

/** A Lua script, known to servers by the SHA1 of its source. */
export interface Script {
  readonly name: string;
  readonly source: string;
  readonly sha: string;
}

export interface NodeSettings {
  readonly link: Omit<LinkOptions, "host" | "port">;
  readonly clock: Clock;
  readonly random: () => number;
  readonly durability: Durability;
  readonly waitTimeoutMs: number;
}

export interface NodeListener {
  /** A connection came up, went down, or could not be made (`why`). */
  changed(node: RedisNode, why: Error | undefined): void;
  /** It was asked how many replicas it has; `primary` false: it has been demoted. */
  surveyed(node: RedisNode, primary: boolean): void;
}

export class RedisNode implements Address {
  readonly host: string;
  readonly port: number;
  readonly address: string;
  /** When it was last known to own a shard, or was the target of an ASK. */
  usedAt = 0;
  readonly #settings: NodeSettings;
  readonly #listener: NodeListener;
  readonly #plain: KeptLink;
  readonly #safe: KeptLink;
  readonly #commit: GroupCommit;
  /** For commands that wait at the server; made when there is one. */
  #blocking: KeptLink | undefined;
  readonly #loading = new Map<string, Promise<void>>();
  /** Undefined until the first connection has asked. */
  #replicas: number | undefined;
  #inSync = 0;
  #surveying = false;

  constructor({ host, port }: Address, settings: NodeSettings, listener: NodeListener) {
    this.host = host;
    this.port = port;
    this.address = addressOf(host, port);
    this.#settings = settings;
    this.#listener = listener;
    this.#plain = this.keep((link) => this.#check(link));
    this.#safe = this.keep((link) => this.#check(link), settings.waitTimeoutMs);
    // All that are in sync, not one of them: whichever is promoted must have what was accepted.
    const wanted = (): number => (this.waits ? Math.max(1, this.#inSync) : 0);
    this.#commit = new GroupCommit(this.#safe, wanted, settings.waitTimeoutMs);
  }

  /** A kept connection to this server, whose commands may take `extraMs` longer than others. */
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

  /** Why it is not up. */
  get why(): Error {
    return this.#plain.link === undefined ? this.#plain.why : this.#safe.why;
  }

  get replicas(): number {
    return this.#replicas ?? 0;
  }

  /** Does a durable write wait for a replica now? */
  get waits(): boolean {
    const { durability } = this.#settings;
    return durability === "replica" || (durability === "auto" && this.replicas > 0);
  }

  /** The link for plain commands, if it is up. */
  get link(): RedisLink | undefined {
    return this.#plain.link;
  }

  /** Both connections are there; rejects with LinkDown at `until`. */
  async ready(until: number): Promise<void> {
    await this.#plain.ready(until);
    await this.#safe.ready(until);
  }

  /** `until` 0: fails at once when the connection is down. Rejects with RedisError or LinkDown. */
  async run(command: readonly Arg[], asking: boolean, until: number): Promise<RedisReply> {
    const link = this.#plain.link ?? (await linkOf(this.#plain, until));
    if (!asking) return link.call(command);
    const [reply] = answers(await link.callAll(asked([command], true)), true);
    if (reply instanceof RedisError) throw reply;
    return reply!;
  }

  /**
   * Several commands in one write; refusals are values. `durable`: as safe as `durability` asks when it resolves, and rejects
   * with StoreAway when not all replicas in sync confirmed.
   */
  async pipeline(
    commands: readonly (readonly Arg[])[],
    asking: boolean,
    until: number,
    durable = false,
  ): Promise<(RedisReply | RedisError)[]> {
    const kept = durable ? this.#safe : this.#plain;
    const link = kept.link ?? (await linkOf(kept, until));
    const all = asked(commands, asking);
    return answers(await (durable ? this.#commit.run(all) : link.callAll(all)), asking);
  }

  /** A command that may wait at the server for up to `blockMs`, on a dedicated connection. */
  async block(command: readonly Arg[], blockMs: number, asking: boolean, until: number): Promise<RedisReply> {
    this.#blocking ??= this.keep((link) => this.#check(link), blockMs);
    const link = this.#blocking.link ?? (await linkOf(this.#blocking, until));
    const [reply] = answers(await link.callAll(asked([command], asking)), asking);
    if (reply instanceof RedisError) throw reply;
    return reply!;
  }

  /** Makes the script known to this server; any number of callers, one command. */
  load(script: Script): Promise<void> {
    const known = this.#loading.get(script.sha);
    if (known !== undefined) return known;
    const loading = this.#load(script).finally(() => this.#loading.delete(script.sha));
    this.#loading.set(script.sha, loading);
    return loading;
  }

  /** Asks whether it is still a primary and how many replicas it has. Never rejects. */
  async survey(): Promise<void> {
    if (this.#surveying) return;
    this.#surveying = true;
    // One that fails takes its link down, which is heard elsewhere.
    const touched = this.#safe.link?.call(["PING"]).catch(() => null);
    try {
      if (this.#plain.link !== undefined) this.#learn(await askFacts(this.#plain.link, "replication"));
    } catch {
      // The same.
    }
    await touched;
    this.#surveying = false;
  }

  /** Sends away those who wait for a connection: their shard may have another owner now. */
  release(): void {
    this.#plain.release();
    this.#safe.release();
    this.#blocking?.release();
  }

  close(): void {
    this.#plain.close();
    this.#safe.close();
    this.#blocking?.close();
  }

  async #check(link: RedisLink): Promise<void> {
    const facts = await askFacts(link, "replication");
    if (!facts.primary) throw new Error(`redis ${this.address} is a replica, not a primary`);
    this.#learn(facts);
  }

  #learn({ primary, replicas, inSync }: ServerFacts): void {
    this.#replicas = replicas;
    this.#inSync = inSync;
    if (!primary) {
      this.#plain.renew();
      this.#safe.renew();
      this.#blocking?.renew();
    }
    this.#listener.surveyed(this, primary);
  }

  async #load(script: Script): Promise<void> {
    // Scripts belong to the server, not to the connection; the plain one is not held up by WAIT.
    const link = this.#plain.link ?? this.#safe.link;
    if (link === undefined) throw new LinkDown(this.why.message, false);
    const sha = String(await link.call(["SCRIPT", "LOAD", script.source]));
    if (sha !== script.sha) throw new Error(`the script ${script.name} has SHA1 ${sha}, not ${script.sha}`);
  }
}

function linkOf(kept: KeptLink, until: number): Promise<RedisLink> {
  return until === 0 ? Promise.reject(new LinkDown(kept.why.message, false)) : kept.ready(until);
}
