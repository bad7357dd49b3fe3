/**
 * Which primary owns each shard. The kind of Redis comes from INFO:
 *
 *   one server   it owns all; a failover behind its address is found by the next connection
 *   several      the one with role primary owns all; searched again when it is lost or demoted
 *   a Cluster    the owner of slot CRC16(tag), from CLUSTER SLOTS of every server that is up; newest majority view
 *
 * Refreshed on MOVED (its owner is believed at once), CLUSTERDOWN, READONLY and a lost connection, every 5 s, and every
 * 250 ms while a shard is away; one refresh at a time, at least 100 ms apart. Servers that own nothing are closed. A
 * server that goes away or returns, and a primary that loses its last replica or gets one, is a `notice`.
 */
import assert from "node:assert/strict";
import type { Alarm, Clock } from "../../../app/clock.ts";
import { Random } from "../../../core/random.ts";
import type { Events } from "../../../observe/events.ts";
import { addressOf, RedisLink } from "./link.ts";
import { RedisNode } from "./node.ts";
import type { NodeListener, NodeSettings } from "./node.ts";
import * as topology from "./topology.ts";
import type { RedisAddress, ClusterView, NodesOptions, ServerFacts } from "./topology.ts";

/** Callbacks must not throw. */
export interface OwnersListener {
  moved(): void;
  surveyed(): void;
}

const REFRESH_GAP_MS = 100;
const REFRESH_AWAY_MS = 250;
const REFRESH_WELL_MS = 5000;
const SURVEY_MS = 1000;
/** How long to keep a server that owns nothing: replies may be outstanding, or it is getting its first slot. */
const UNUSED_MS = 10_000;
const MAX_VISITS = 16; // servers named by the Cluster that are asked when no known one answers

export class RedisOwners implements NodeListener {
  readonly #clock: Clock;
  readonly #events: Events;
  readonly #listener: OwnersListener;
  readonly #slots: readonly number[];
  readonly #endpoints: topology.Endpoints;
  readonly #settings: NodeSettings;
  readonly #nodes = new Map<string, RedisNode>();
  readonly #owners: (RedisNode | undefined)[]; // by shard
  readonly #waited: (boolean | undefined)[]; // by shard: whether durable writes waited for a replica
  readonly #away = new Set<RedisNode>(); // servers whose absence was reported
  readonly #closing = new AbortController();
  #cluster = false;
  #members: readonly RedisAddress[] = []; // every server that the Cluster named, for when its primaries are gone
  #epoch = 0;
  #started = false;
  #refreshing = false;
  #again = false; // a refresh was due while one was running
  #refreshedAt = 0;
  #next: { readonly at: number; readonly alarm: Alarm } | undefined;
  #surveyAlarm: Alarm | undefined;

  constructor(options: NodesOptions, clock: Clock, events: Events, listener: OwnersListener) {
    assert.ok(options.tags.length > 0, "there must be a shard");
    this.#clock = clock;
    this.#events = events;
    this.#listener = listener;
    this.#slots = options.tags.map((tag) => topology.slotOf(tag));
    this.#owners = options.tags.map(() => undefined);
    this.#waited = options.tags.map(() => undefined);
    this.#endpoints = topology.endpointsOf(options);
    const { commandTimeoutMs, connectTimeoutMs = commandTimeoutMs } = options;
    const { name, durability, waitTimeoutMs, connect } = options;
    const { tls, username, password, db } = this.#endpoints;
    const link = { tls, username, password, db, connectTimeoutMs, commandTimeoutMs, name, connect };
    const seeded = new Random(clock.now());
    const random = options.random ?? (() => seeded.next());
    this.#settings = { link, clock, random, durability, waitTimeoutMs };
  }

  get cluster(): boolean {
    return this.#cluster;
  }

  get closed(): boolean {
    return this.#closing.signal.aborted;
  }

  get primaries(): RedisNode[] {
    return [...new Set(this.#owners)].filter((node) => node !== undefined);
  }

  random(): number {
    return this.#settings.random();
  }

  owner(shard: number): RedisNode | undefined {
    return this.#owners[shard];
  }

  up(shard: number): boolean {
    return this.#started && (this.#owners[shard]?.up ?? false);
  }

  /** The node at that address, connected now or soon. */
  at(address: RedisAddress): RedisNode {
    const node = this.#nodeAt(address);
    node.usedAt = this.#clock.now();
    return node;
  }

  moved(shard: number, to: RedisAddress): void {
    this.#own(shard, this.#nodeAt(to));
    this.#listener.moved();
    this.refresh();
  }

  /** Runs a foreign callback; reports what it throws. */
  guarded(callback: () => void): void {
    try {
      callback();
    } catch (error) {
      this.#notice("error", `a listener of the Redis store threw: ${(error as Error).stack}`);
    }
  }

  /** Discovers the servers and connects to every owner. */
  async start(): Promise<void> {
    const { servers, failure } = await this.#askSeeds();
    if (servers.length === 0) throw new Error(explain(failure?.message ?? "", this.#endpoints.db));
    for (const { address, version } of servers)
      if (!(Number.parseInt(version, 10) >= 7))
        throw new Error(`redis ${address} is version ${version}; Ferry needs Redis 7.0 or newer`);
    this.#cluster = servers.some(({ cluster }) => cluster);
    if (this.#cluster) await this.#readCluster();
    else this.#choose(servers);
    this.#checkCovered(servers.map(({ address }) => address).join(", "));
    const { connectTimeoutMs, commandTimeoutMs } = this.#settings.link;
    const until = this.#clock.now() + connectTimeoutMs + commandTimeoutMs;
    await Promise.all(this.primaries.map((node) => node.ready(until))).catch((error: Error) => {
      throw new Error(`${error.message}; every primary must be reachable to start`);
    });
    this.#started = true;
    this.#surveyLater();
    this.#due(this.#clock.now() + REFRESH_WELL_MS);
  }

  refresh(): void {
    // With one server its connections are all there is to know.
    if (!this.#cluster && this.#endpoints.seeds.length === 1) return;
    this.#due(Math.max(this.#clock.now(), this.#refreshedAt + REFRESH_GAP_MS));
  }

  close(): void {
    this.#closing.abort();
    this.#next?.alarm.cancel();
    this.#surveyAlarm?.cancel();
    for (const node of this.#nodes.values()) node.close();
  }

  changed(node: RedisNode, why: Error | undefined): void {
    if (!this.#started || this.closed) return;
    if (why !== undefined) this.refresh();
    if (node.up && this.#away.delete(node)) this.#notice("info", `redis ${node.address} is back`);
    else if (!node.up && why !== undefined && !this.#away.has(node) && this.#owners.includes(node)) {
      this.#away.add(node);
      this.#notice("warn", `${why.message}; it is away until it can be reached again`);
    }
  }

  surveyed(node: RedisNode, primary: boolean): void {
    if (!primary) return this.refresh();
    const before = new Set<boolean | undefined>();
    this.#owners.forEach((owner, shard) => {
      if (owner !== node) return;
      before.add(this.#waited[shard]);
      this.#waited[shard] = node.waits;
    });
    if (this.#settings.durability !== "auto") return;
    if (!node.waits && before.has(true))
      this.#notice(
        "warn",
        `no replica is connected to redis ${node.address}: accepted tasks are kept by one server only`,
      );
    else if (node.waits && before.has(false))
      this.#notice("info", `a replica is connected to redis ${node.address}: accepted tasks are kept by two`);
  }

  #due(at: number): void {
    if (this.closed || !this.#started || (this.#next !== undefined && this.#next.at <= at)) return;
    this.#next?.alarm.cancel();
    this.#next = { at, alarm: this.#clock.at(at, () => void this.#look()) };
  }

  async #look(): Promise<void> {
    this.#next = undefined;
    this.#again = this.#refreshing;
    if (this.#refreshing) return;
    this.#refreshing = true;
    try {
      if (this.#cluster) await this.#readCluster();
      else await this.#readServers();
    } catch {
      // No answer; shards are away, so the next refresh is soon.
    }
    this.#refreshing = false;
    if (this.closed) return;
    this.#refreshedAt = this.#clock.now();
    this.#listener.moved();
    const waitMs = this.#owners.some((owner) => !owner?.up) ? REFRESH_AWAY_MS : REFRESH_WELL_MS;
    this.#due(this.#refreshedAt + (this.#again ? REFRESH_GAP_MS : waitMs));
  }

  /** Asks connected servers, then every other one named; down ones last, as they may take the full timeout. */
  async #readCluster(): Promise<void> {
    const known = [...this.#nodes.values()];
    const near = known.filter(({ link }) => link !== undefined);
    let view = await this.#bestOf(near.map((node) => topology.askCluster(node.link!, node.host)));
    if (view === undefined || !this.#current(view)) {
      const named = [...this.#members, ...this.#endpoints.seeds, ...known];
      const others = new Map(named.map((address) => [addressOf(address.host, address.port), address]));
      for (const { address } of view === undefined ? near : known) others.delete(address);
      const far = [...others.values()]
        .slice(0, MAX_VISITS)
        .map((address) => this.#visit(address, (link) => topology.askCluster(link, address.host)));
      const other = await this.#bestOf(far);
      if (other !== undefined && topology.better(other, view)) view = other;
    }
    if (view === undefined || this.closed) return;
    this.#epoch = view.epoch;
    this.#members = view.members;
    this.#assign(this.#slots.map((slot) => topology.primaryOf(view, slot)));
  }

  #current(view: ClusterView): boolean {
    return view.ok && view.epoch >= this.#epoch;
  }

  /** The first good view, else the best; undefined if no server answers. */
  #bestOf(views: readonly Promise<ClusterView>[]): Promise<ClusterView | undefined> {
    return new Promise((resolve) => {
      let best: ClusterView | undefined;
      let left = views.length;
      if (left === 0) return resolve(undefined);
      const heard = (view?: ClusterView): void => {
        if (view !== undefined && topology.better(view, best)) best = view;
        if (--left === 0 || (view !== undefined && this.#current(view))) resolve(best);
      };
      for (const view of views) void view.then(heard, () => heard());
    });
  }

  /** Several servers without a Cluster: nothing to search while the one in use is up. */
  async #readServers(): Promise<void> {
    if (this.#owners[0]?.up) return;
    const { servers } = await this.#askSeeds();
    if (!this.#owners[0]?.up) this.#choose(servers);
  }

  async #askSeeds(): Promise<{ servers: ServerFacts[]; failure: Error | undefined }> {
    const { seeds } = this.#endpoints;
    const asked = await Promise.allSettled(seeds.map((seed) => this.#visit(seed, topology.askFacts)));
    const servers = asked.flatMap((one) => (one.status === "fulfilled" ? [one.value] : []));
    return { servers, failure: asked.find((one) => one.status === "rejected")?.reason as Error | undefined };
  }

  #choose(servers: readonly ServerFacts[]): void {
    const chosen = topology.choosePrimary(servers, this.#owners[0]?.address);
    if (chosen === undefined || this.closed) return;
    const others = servers.filter((server) => server.primary && server !== chosen);
    if (others.length > 0)
      this.#notice(
        "warn",
        `redis ${others.map(({ address }) => address).join(", ")} also calls itself primary; ` +
          `${chosen.address} is used. Make the others its replicas (REPLICAOF)`,
      );
    const seed = this.#endpoints.seeds.find(({ host, port }) => addressOf(host, port) === chosen.address);
    this.#assign(this.#slots.map(() => seed));
  }

  /** One question over a dedicated connection. */
  async #visit<Answer>(address: RedisAddress, ask: (link: RedisLink) => Promise<Answer>): Promise<Answer> {
    const options = { ...this.#settings.link, host: address.host, port: address.port };
    const link = await RedisLink.connect(options, this.#clock, this.#closing.signal);
    try {
      return await ask(link);
    } finally {
      link.close();
    }
  }

  #assign(owners: readonly (RedisAddress | undefined)[]): void {
    owners.forEach((address, shard) => {
      // A slot without an owner for a moment stays where it was: its server still answers best.
      if (address !== undefined) this.#own(shard, this.#nodeAt(address));
    });
    const now = this.#clock.now();
    for (const [address, node] of this.#nodes) {
      if (this.#owners.includes(node)) node.usedAt = now;
      if (now - node.usedAt < UNUSED_MS) continue;
      this.#nodes.delete(address);
      this.#away.delete(node);
      node.close();
    }
  }

  #own(shard: number, node: RedisNode): void {
    const before = this.#owners[shard];
    this.#owners[shard] = node;
    if (before !== node) before?.release();
  }

  #nodeAt(address: RedisAddress): RedisNode {
    const name = addressOf(address.host, address.port);
    const known = this.#nodes.get(name);
    if (known !== undefined) return known;
    const node = new RedisNode(address, this.#settings, this);
    this.#nodes.set(name, node);
    return node;
  }

  #surveyLater(): void {
    this.#surveyAlarm = this.#clock.at(this.#clock.now() + SURVEY_MS, () => {
      for (const node of this.#nodes.values()) void node.survey();
      this.#listener.surveyed();
      this.#surveyLater();
    });
  }

  #checkCovered(where: string): void {
    const shard = this.#owners.indexOf(undefined);
    if (shard < 0) return;
    if (!this.#cluster)
      throw new Error(`redis ${where} is a replica; name its primary, or all of them as nodes`);
    throw new Error(
      `nobody in the Redis Cluster at ${where} serves slot ${this.#slots[shard]}; ` +
        "see what redis-cli --cluster check says",
    );
  }

  #notice(level: "info" | "warn" | "error", message: string): void {
    this.#events.emit("notice", { level, message });
  }
}

/** Why no server could be asked, and what to do about it. */
function explain(why: string, db: number): string {
  if (why.includes("SELECT is not allowed in cluster mode"))
    return `${why}: a Cluster has only database 0, so leave /${db} out of the url`;
  return why.includes("refuses us") ? why : `${why}; check its address and that it is running`;
}
