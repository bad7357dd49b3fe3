/**
 * Sharded pub/sub, for ever: every channel is subscribed at the server that owns its shard.
 *
 * Each primary gets one connection for it. What should be subscribed follows from who owns which shard;
 * `reconcile` compares that with what each connection has, and is called whenever either may have changed:
 * a connection came up, the servers changed, or the server took a subscription back because its slot moved
 * (in 7.0 it says so). Messages are hints, lost while nobody is subscribed; so after each confirmation
 * `resubscribed` names the shards for which some may have been missed.
 *
 * A channel that nobody wants any more is heard and dropped until the last subscription ends.
 */
import type { KeptLink } from "./kept.ts";
import { RedisError } from "./link.ts";
import type { RedisLink } from "./link.ts";
import type { RedisNode } from "./node.ts";

interface Subscription {
  readonly heard: (shard: number, payload: Buffer) => void;
  readonly resubscribed: (shards: readonly number[]) => void;
  /** Shards that were never confirmed. */
  readonly waiting: Set<number>;
  readonly confirmed: PromiseWithResolvers<void>;
}

interface Channel {
  readonly shard: number;
  readonly subscription: Subscription;
}

/** The connection for messages from one primary. */
interface Ear {
  readonly kept: KeptLink;
  /** What its link, the present one, is subscribed to. */
  have: Set<string>;
  subscribing: boolean;
}

export interface Ground {
  owner(shard: number): RedisNode | undefined;
  refresh(): void;
  /** Runs a callback that is not ours; what it throws is reported, not thrown. */
  guarded(callback: () => void): void;
}

export class Subscriptions {
  readonly #shards: number;
  readonly #ground: Ground;
  readonly #channels = new Map<string, Channel>();
  readonly #subscriptions = new Set<Subscription>();
  readonly #ears = new Map<RedisNode, Ear>();
  #closed = false;

  constructor(shards: number, ground: Ground) {
    this.#shards = shards;
    this.#ground = ground;
  }

  /** Resolves, when every shard's channel is confirmed, with what ends it. */
  async add(
    channel: (shard: number) => string,
    heard: (shard: number, payload: Buffer) => void,
    resubscribed: (shards: readonly number[]) => void,
  ): Promise<() => void> {
    const confirmed = Promise.withResolvers<void>();
    const subscription = { heard, resubscribed, waiting: new Set<number>(), confirmed };
    for (let shard = 0; shard < this.#shards; shard++) {
      this.#channels.set(channel(shard), { shard, subscription });
      subscription.waiting.add(shard);
    }
    this.#subscriptions.add(subscription);
    this.reconcile();
    await confirmed.promise;
    return () => this.#remove(subscription);
  }

  /** Makes it so: each owner's connection is there and subscribed to what it owns. */
  reconcile(): void {
    if (this.#closed) return;
    const owners = new Set<RedisNode>();
    if (this.#channels.size > 0) {
      for (let shard = 0; shard < this.#shards; shard++) {
        const owner = this.#ground.owner(shard);
        if (owner !== undefined) owners.add(owner);
      }
    }
    for (const [node, ear] of this.#ears) {
      if (owners.has(node)) continue;
      this.#ears.delete(node);
      ear.kept.close();
    }
    for (const node of owners) {
      const ear = this.#ears.get(node);
      if (ear === undefined) this.#listen(node);
      else if (ear.kept.link !== undefined) void this.#subscribe(node, ear, ear.kept.link);
    }
  }

  /** Once a second: a connection that only listens would not notice that its server is gone. */
  survey(): void {
    // One that gets no answer is destroyed by its link, which is heard in `prepare` of the next.
    for (const { kept } of this.#ears.values()) void kept.link?.call(["PING"]).catch(() => null);
    this.reconcile();
  }

  close(): void {
    this.#closed = true;
    for (const { kept } of this.#ears.values()) kept.close();
    for (const { confirmed } of this.#subscriptions)
      confirmed.reject(new Error("the store was closed before every channel was subscribed"));
  }

  #remove(subscription: Subscription): void {
    this.#subscriptions.delete(subscription);
    for (const [name, channel] of this.#channels)
      if (channel.subscription === subscription) this.#channels.delete(name);
    this.reconcile();
  }

  #listen(node: RedisNode): void {
    const kept = node.keep(async (link) => {
      const ear = this.#ears.get(node);
      if (ear === undefined) return;
      ear.have = new Set();
      ear.subscribing = false;
      const { have } = ear;
      link.onMessage = (name, payload) => {
        const channel = this.#channels.get(name);
        if (channel === undefined) return;
        this.#ground.guarded(() => channel.subscription.heard(channel.shard, payload));
      };
      link.onUnsubscribed = (name) => {
        have.delete(name);
        this.#ground.refresh();
      };
      await this.#subscribe(node, ear, link);
    });
    this.#ears.set(node, { kept, have: new Set(), subscribing: false });
  }

  /** Never rejects: a link that breaks in the middle is replaced, and its successor starts from nothing. */
  async #subscribe(node: RedisNode, ear: Ear, link: RedisLink): Promise<void> {
    if (ear.subscribing) return;
    ear.subscribing = true;
    const { have } = ear;
    try {
      for (let lacking = this.#lacking(node, have); lacking.length > 0; lacking = this.#lacking(node, have)) {
        // Before the reply: the server may take one back right behind its confirmation.
        for (const name of lacking) have.add(name);
        const replies = await link.callAll(lacking.map((name) => ["SSUBSCRIBE", name]));
        const refused = lacking.filter((_, at) => replies[at] instanceof RedisError);
        for (const name of refused) have.delete(name);
        this.#confirm(lacking.filter((name) => !refused.includes(name)));
        if (refused.length === 0) continue;
        // Refused, so somebody else owns it: reconciled again when that is known.
        this.#ground.refresh();
        break;
      }
    } catch {
      // LinkDown.
    }
    if (ear.have === have) ear.subscribing = false;
  }

  #lacking(node: RedisNode, have: ReadonlySet<string>): string[] {
    const names: string[] = [];
    for (const [name, { shard }] of this.#channels)
      if (!have.has(name) && this.#ground.owner(shard) === node) names.push(name);
    return names;
  }

  #confirm(names: readonly string[]): void {
    const shards = new Map<Subscription, number[]>();
    for (const name of names) {
      const channel = this.#channels.get(name);
      if (channel === undefined) continue;
      const list = shards.get(channel.subscription) ?? [];
      list.push(channel.shard);
      shards.set(channel.subscription, list);
    }
    for (const [{ resubscribed, waiting, confirmed }, list] of shards) {
      for (const shard of list) waiting.delete(shard);
      this.#ground.guarded(() => resubscribed(list));
      if (waiting.size === 0) confirmed.resolve();
    }
  }
}
