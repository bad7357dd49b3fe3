/**
 * Sharded pub/sub: every channel is subscribed at the server that owns its shard, over one connection per primary.
 * `reconcile` compares the wanted subscriptions, which follow from the owners, with what each connection has; called
 * whenever either may have changed. Messages are hints, lost while a channel is not subscribed; so after each
 * confirmation `resubscribed` names the shards that may have missed some. An unwanted channel is received and dropped
 * until the last subscription ends.
 */
import { type KeptLink, RedisError, type RedisLink } from "./link.ts";
import type { RedisNode } from "./node.ts";
import type { RedisOwners } from "./owners.ts";

interface Subscription {
  readonly heard: (shard: number, payload: Buffer) => void;
  readonly resubscribed: (shards: readonly number[]) => void;
  readonly waiting: Set<number>; // shards never confirmed
  readonly confirmed: PromiseWithResolvers<void>;
}

interface Channel {
  readonly shard: number;
  readonly subscription: Subscription;
}

interface SubscriberConnection {
  readonly kept: KeptLink;
  have: Set<string>; // subscriptions of its current link
  subscribing: boolean;
}

export class Subscriptions {
  readonly #shards: number;
  readonly #owners: RedisOwners;
  readonly #channels = new Map<string, Channel>();
  readonly #subscriptions = new Set<Subscription>();
  readonly #connections = new Map<RedisNode, SubscriberConnection>();
  #closed = false;

  constructor(shards: number, owners: RedisOwners) {
    this.#shards = shards;
    this.#owners = owners;
  }

  /** Resolves, when every shard's channel is confirmed, with a function that ends it. */
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

  /** Connects each owner and subscribes to what it owns. */
  reconcile(): void {
    if (this.#closed) return;
    const owners = new Set(this.#channels.size > 0 ? this.#owners.primaries : []);
    for (const [node, connection] of this.#connections) {
      if (owners.has(node)) continue;
      this.#connections.delete(node);
      connection.kept.close();
    }
    for (const node of owners) {
      const connection = this.#connections.get(node);
      if (connection === undefined) this.#listen(node);
      else if (connection.kept.link !== undefined)
        void this.#subscribe(node, connection, connection.kept.link);
    }
  }

  /** Once a second: a connection that only listens would not notice that its server is gone. */
  survey(): void {
    // Without a reply the link destroys itself, and `prepare` of the next one handles that.
    for (const { kept } of this.#connections.values()) void kept.link?.call(["PING"]).catch(() => null);
    this.reconcile();
  }

  close(): void {
    this.#closed = true;
    for (const { kept } of this.#connections.values()) kept.close();
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
      const connection = this.#connections.get(node);
      if (connection === undefined) return;
      connection.have = new Set();
      connection.subscribing = false;
      const { have } = connection;
      link.onMessage = (name, payload) => {
        const channel = this.#channels.get(name);
        if (channel === undefined) return;
        this.#owners.guarded(() => channel.subscription.heard(channel.shard, payload));
      };
      link.onUnsubscribed = (name) => {
        have.delete(name);
        this.#owners.refresh();
      };
      await this.#subscribe(node, connection, link);
    });
    this.#connections.set(node, { kept, have: new Set(), subscribing: false });
  }

  /** Never rejects: a broken link is replaced, and its successor starts from nothing. */
  async #subscribe(node: RedisNode, connection: SubscriberConnection, link: RedisLink): Promise<void> {
    if (connection.subscribing) return;
    connection.subscribing = true;
    const { have } = connection;
    try {
      for (let lacking = this.#lacking(node, have); lacking.length > 0; lacking = this.#lacking(node, have)) {
        // Before the reply: the server may end a subscription right behind its confirmation.
        for (const name of lacking) have.add(name);
        const replies = await link.callAll(lacking.map((name) => ["SSUBSCRIBE", name]));
        const refused = lacking.filter((_, at) => replies[at] instanceof RedisError);
        for (const name of refused) have.delete(name);
        this.#confirm(lacking.filter((name) => !refused.includes(name)));
        if (refused.length === 0) continue;
        // Refused, so another server owns it: reconciled once that is known.
        this.#owners.refresh();
        break;
      }
    } catch {
      // LinkDown.
    }
    if (connection.have === have) connection.subscribing = false;
  }

  #lacking(node: RedisNode, have: ReadonlySet<string>): string[] {
    const names: string[] = [];
    for (const [name, { shard }] of this.#channels)
      if (!have.has(name) && this.#owners.owner(shard) === node) names.push(name);
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
      this.#owners.guarded(() => resubscribed(list));
      if (waiting.size === 0) confirmed.resolve();
    }
  }
}
