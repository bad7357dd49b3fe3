/**
 * What this process knows of the queues in Redis, and the plan of a claim.
 *
 * Every script that moves tasks says how deep the streams are that it touched: in its reply to the caller,
 * and on the bell to everybody else. Notes are numbered per shard: whoever takes tasks out tells how many are
 * left, whoever brings some tells how many more, so notes may come in any order, and one that is lost is
 * mended by the next (or by a look every second). Of when
 * tasks came only what the notes said is remembered: the age of a queue is an estimate, its depth is not.
 *
 * A claim is planned here, from this view, and names the streams to read: tiers by `core/fair.ts`, then what
 * came back before what is new, then tenants in turn (`redis-turns.ts`), then this batcher's own shards
 * before others', the oldest first. Tasks that a claim is on its way for are reserved, so that the next plan
 * does not count on them.
 */
import type { Clock } from "../clock.ts";
import { seatTiers } from "../core/fair.ts";
import type { Json } from "../core/task.ts";
import type { QueueView } from "./engine.ts";
import { inOrder } from "./queues.ts";
import type { RedisClock } from "./redis-frames.ts";
import { digest, readStreamName, type StreamName } from "./redis-keys.ts";
import { type Arrival, before, GroupView, inOrderOfWait, StreamView } from "./redis-stream.ts";
import { RecentTenants } from "./redis-turns.ts";
import { Waiting } from "./redis-waiting.ts";

/** How much longer a task of another batcher's shard waits than one of our own. */
const OWN_SHARD_HEAD_START_MS = 20;

export interface Wanted {
  readonly group: GroupView;
  readonly stream: StreamView;
  readonly count: number;
}

export interface Rank {
  /** Shards that this batcher reads before others do. */
  prefers(shard: number): boolean;
  /** Whether nobody in that zone can take its tasks. */
  deserted(zone: string): boolean;
}

export class QueueMirror {
  readonly #tiers: number;
  readonly #zone: string;
  readonly #zoneSpillMs: number;
  readonly #clock: Clock;
  readonly #shared: RedisClock;
  readonly #models = new Map<string, Map<string, GroupView>>();
  readonly #waiting = new Map<string, Waiting>();
  /** Who was served of late, by model and tier. */
  readonly #recent = new Map<string, readonly RecentTenants[]>();
  /** By shard: the highest version that a report carried. */
  readonly #versions: number[] = [];
  /** Every stream by shard and name. */
  readonly #streams = new Map<string, [GroupView, StreamView]>();
  rank: Rank = { prefers: () => true, deserted: () => false };
  /** Tasks came to a queue that now holds `depth`. */
  arrived: (model: string, parameters: Json, depth: number, count: number) => void = () => {};

  constructor(
    options: { tiers: number; models: Iterable<string>; zone: string; zoneSpillMs: number },
    clock: Clock,
    shared: RedisClock,
  ) {
    this.#tiers = options.tiers;
    this.#zone = options.zone;
    this.#zoneSpillMs = options.zoneSpillMs;
    this.#clock = clock;
    this.#shared = shared;
    for (const model of options.models) this.#add(model);
  }

  #add(model: string): void {
    this.#models.set(model, new Map());
    this.#waiting.set(model, new Waiting(this.#tiers));
    this.#recent.set(
      model,
      Array.from({ length: this.#tiers }, () => new RecentTenants(this.#clock)),
    );
  }

  /** What waits for a model that is new here is seen with the next look; what waits for one that is gone, no more. */
  retune(models: ReadonlyMap<string, unknown>): void {
    for (const [model, groups] of this.#models) {
      if (models.has(model)) continue;
      for (const { streams } of groups.values()) for (const key of streams.keys()) this.#streams.delete(key);
      this.#models.delete(model);
      this.#waiting.delete(model);
      this.#recent.delete(model);
    }
    for (const model of models.keys()) if (!this.#models.has(model)) this.#add(model);
  }

  /** The best tier first, and there the one that waits longest; at most `perTier` of each tier. */
  queues(model: string, perTier = Infinity): QueueView[] {
    const byTier = Array.from({ length: this.#tiers }, (): Row[] => []);
    for (const group of this.#models.get(model)?.values() ?? []) {
      if (group.depth === 0) continue;
      const tier = this.#tier(group);
      keepFirst(byTier[tier]!, { group, tier: group.tier, oldestAt: group.oldestAt }, perTier);
    }
    return byTier.flatMap((rows) =>
      rows
        .sort(inOrder)
        .slice(0, perTier)
        .map(({ group }) => group),
    );
  }

  /** Queued tasks by model, then tier. */
  depths(): Map<string, readonly number[]> {
    const depths = new Map<string, number[]>();
    for (const [model, groups] of this.#models) {
      const byTier = Array.from({ length: this.#tiers }, () => 0);
      for (const { streams } of groups.values()) {
        for (const { about, depth } of streams.values()) byTier[this.#tier(about)]! += depth;
      }
      depths.set(model, byTier);
    }
    return depths;
  }

  /** How many wait in each tier, those on their way in included. */
  waiting(model: string): readonly number[] {
    return this.#waiting.get(model)?.byTier ?? [];
  }

  /** As `Engine.turn`, for a tenant whose new tasks go to this kind of stream. */
  turn(model: string, tier: number, kind: string, tenants: number): number {
    return this.#waiting.get(model)?.turn(tier, kind, tenants) ?? 0;
  }

  /** Tasks set out for this kind of stream; or, with less than zero, they arrived or will not. */
  expect(model: string, tier: number, kind: string, count: number): void {
    this.#waiting.get(model)?.add(this.#tier({ tier }), kind, count);
  }

  /** A claim took a task of this tenant. */
  served(model: string, tier: number, tenant: string): void {
    this.#recent.get(model)?.[this.#tier({ tier })]!.served(tenant);
  }

  #counted({ model, tier, kind }: StreamName, change: number): void {
    this.#waiting.get(model)?.add(this.#tier({ tier }), kind, change);
  }

  /** Reads a report: a line per stream, as `close_shard` in `lua/common.lua` writes it. */
  told(report: string, mayBeOld = false): void {
    if (report === "") return;
    const came = new Map<GroupView, [model: string, count: number]>();
    const now = this.#clock.now();
    for (const line of report.split("\n")) {
      const [shard, version, name, depth, count, queuedAt, deadlineAt, parameters] = line.split("\t");
      this.#versions[Number(shard)] = Math.max(this.version(Number(shard)), Number(version));
      const found = this.#stream(Number(shard), name!, parameters!);
      if (found === undefined) continue;
      const [group, view] = found;
      if (mayBeOld && Number(version) <= view.version) continue;
      const arrival = count === "0" ? undefined : this.#arrival(count!, queuedAt!, deadlineAt!);
      const had = view.depth;
      view.told(Number(version), depth === "+" ? undefined : Number(depth), arrival, now);
      group.changed();
      this.#counted(view.about, view.depth - had);
      if (arrival === undefined) continue;
      const sum = came.get(group);
      if (sum === undefined) came.set(group, [view.about.model, arrival.count]);
      else sum[1] += arrival.count;
    }
    for (const [group, [model, count]] of came) this.arrived(model, group.parameters, group.depth, count);
  }

  #arrival(count: string, queuedAt: string, deadlineAt: string): Arrival {
    const shared = this.#shared;
    return { count: Number(count), queuedAt: shared.own(queuedAt), deadlineAt: shared.own(deadlineAt) };
  }

  /** The highest version of a shard that was heard of; 0 for none. */
  version(shard: number): number {
    return this.#versions[shard] ?? 0;
  }

  /** Nothing is known of these shards any more; what is reserved is still on its way. */
  forget(shards: readonly number[]): void {
    for (const shard of shards) this.#versions[shard] = 0;
    for (const groups of this.#models.values()) {
      for (const group of groups.values()) {
        for (const [key, stream] of group.streams) if (shards.includes(stream.shard)) this.#drop(group, key);
      }
    }
  }

  /** Drops streams that are empty and groups that have none left; called now and then. */
  tidy(): void {
    for (const groups of this.#models.values()) {
      for (const [key, group] of groups) {
        for (const [name, { depth, reserved }] of group.streams)
          if (depth === 0 && reserved === 0) this.#drop(group, name);
        if (group.streams.size === 0) groups.delete(key);
      }
    }
  }

  #drop(group: GroupView, key: string): void {
    const { about, depth } = group.streams.get(key)!;
    this.#counted(about, -depth);
    group.streams.delete(key);
    group.changed();
    this.#streams.delete(key);
  }

  /** When the first task of another zone may be taken; Infinity when none waits for that. */
  nextSpillAt(): number {
    let next = Infinity;
    for (const groups of this.#models.values()) {
      for (const { streams } of groups.values()) {
        for (const stream of streams.values()) {
          if (stream.free > 0 && !this.#mayTake(stream)) next = Math.min(next, stream.oldestAt);
        }
      }
    }
    return next + this.#zoneSpillMs;
  }

  /** Says again that tasks are there: a zone's wait is over. */
  spilled(): void {
    for (const [model, groups] of this.#models) {
      for (const group of groups.values()) {
        if (group.depth > 0) this.arrived(model, group.parameters, group.depth, 0);
      }
    }
  }

  /**
   * Which streams to read for at most `max` tasks, of a batch that holds `taken` already. Reserves what it
   * names: `release` it afterwards.
   */
  plan(model: string, parameters: Json, max: number, taken = 0): Wanted[] {
    const group = this.#models.get(model)?.get(groupKey(parameters));
    if (group === undefined) return [];
    const byTier = Array.from({ length: this.#tiers }, (): StreamView[] => []);
    for (const stream of group.open()) byTier[this.#tier(stream.about)]!.push(stream);
    const depths = byTier.map((streams) => streams.reduce((sum, { free }) => sum + free, 0));
    const seats = seatTiers(max, depths, group.credits);
    for (const streams of byTier) this.#inOrder(streams);
    const turns = [...seats.keys()];
    // A tier with a suspicious task at its head gets in first, or the tiers above would outgrow it every time.
    const small = turns.find((tier) => seats[tier]! > 0 && byTier[tier]![0]!.limit < taken + max);
    if (small !== undefined) {
      turns.unshift(...turns.splice(small, 1));
      // The batch is small for its sake: it gets every seat that it can use, or many more would be small.
      seats[small] = Math.min(depths[small]!, max);
    }
    const wanted = new Map<StreamView, number>();
    let limit = taken + max;
    for (const tier of turns) {
      let left = seats[tier]!;
      let shares: Map<string, number> | undefined;
      let shared = false;
      for (const [stream, ready] of this.#pieces(byTier[tier]!, max)) {
        if (stream.limit <= taken) continue;
        const { kind } = stream.about;
        const room = Math.min(left, Math.min(limit, stream.limit) - taken);
        // What came back has its seats: the rest is shared between those that are new, once.
        if (stream.isNew && !shared) {
          shared = true;
          shares = group.rounds[tier]!.share(byTier[tier]!, room, this.#recent.get(model)![tier]!);
        }
        const count = Math.min(room, ready, shares?.get(kind) ?? room);
        if (count <= 0) continue;
        shares?.set(kind, (shares.get(kind) ?? 0) - count);
        limit = Math.min(limit, stream.limit);
        taken += count;
        left -= count;
        stream.reserved += count;
        wanted.set(stream, (wanted.get(stream) ?? 0) + count);
      }
    }
    group.changed();
    return Array.from(wanted, ([stream, count]) => ({ group, stream, count }));
  }

  /** What came back, stream by stream; then what is new, of each kind by how long it has waited. */
  *#pieces(streams: readonly StreamView[], max: number): Generator<readonly [StreamView, number]> {
    const kinds = new Map<string, StreamView[]>();
    for (const stream of streams) {
      const { kind } = stream.about;
      if (!stream.isNew) yield [stream, stream.free];
      else if (kinds.has(kind)) kinds.get(kind)!.push(stream);
      else kinds.set(kind, [stream]);
    }
    for (const alike of kinds.values()) {
      if (alike.length === 1) yield [alike[0]!, alike[0]!.free];
      else yield* inOrderOfWait(alike, (stream) => this.#headStartMs(stream), max);
    }
  }

  #headStartMs({ shard }: StreamView): number {
    return this.rank.prefers(shard) ? OWN_SHARD_HEAD_START_MS : 0;
  }

  release(wanted: readonly Wanted[]): void {
    for (const { group, stream, count } of wanted) {
      stream.reserved -= count;
      group.changed();
    }
  }

  #inOrder(streams: StreamView[]): void {
    if (streams.length < 2) return;
    const waitingSince = (stream: StreamView): number => stream.oldestAt - this.#headStartMs(stream);
    streams.sort((one, other) => {
      if (before(one, other)) return -1;
      if (before(other, one)) return 1;
      return waitingSince(one) - waitingSince(other);
    });
  }

  #mayTake(stream: StreamView): boolean {
    const { zone } = stream.about;
    if (zone === "" || zone === this.#zone || this.rank.deserted(zone)) return true;
    return this.#clock.now() >= stream.oldestAt + this.#zoneSpillMs;
  }

  /** A task may carry a tier that is no longer configured. */
  #tier({ tier }: Pick<StreamName, "tier">): number {
    return Math.min(tier, this.#tiers - 1);
  }

  #stream(shard: number, name: string, parameters: string): [GroupView, StreamView] | undefined {
    const key = `${shard} ${name}`;
    const known = this.#streams.get(key);
    if (known !== undefined) return known;
    const about = readStreamName(name);
    const groups = this.#models.get(about.model);
    if (groups === undefined) return undefined;
    let group = groups.get(about.parameters);
    if (group === undefined) {
      // Without its parameters nothing can be claimed from it; the next look brings them.
      if (about.parameters !== "" && parameters === "") return undefined;
      group = new GroupView(parameters, this.#tiers, (stream) => this.#mayTake(stream));
      groups.set(about.parameters, group);
    }
    const stream = new StreamView(shard, name);
    group.streams.set(key, stream);
    group.changed();
    const found: [GroupView, StreamView] = [group, stream];
    this.#streams.set(key, found);
    return found;
  }
}

interface Row extends Pick<QueueView, "tier" | "oldestAt"> {
  readonly group: GroupView;
}

/** Adds a row where it is among the first `most`. Sorts each time that twice as many have gathered: a sort per `most` rows. */
function keepFirst(rows: Row[], row: Row, most: number): void {
  rows.push(row);
  if (rows.length < 2 * most) return;
  rows.sort(inOrder);
  rows.length = most;
}

function groupKey(parameters: Json): string {
  return parameters === "" ? "" : digest(parameters);
}
