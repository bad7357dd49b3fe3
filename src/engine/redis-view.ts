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
 * came back before what is new, then this batcher's own shards before others', the oldest first. Tasks that a
 * claim is on its way for are reserved, so that the next plan does not count on them.
 */
import type { Clock } from "../clock.ts";
import { seatTiers } from "../core/fair.ts";
import { Fifo } from "../core/fifo.ts";
import type { Json } from "../core/task.ts";
import type { QueueView } from "./engine.ts";
import type { RedisClock } from "./redis-frames.ts";
import { batchLimit, digest, readStreamName, type StreamName } from "./redis-keys.ts";

/** Tasks that came together. */
interface Arrival {
  count: number;
  readonly queuedAt: number;
  readonly deadlineAt: number;
}

/** Notes that may be apart from their order. */
const MAX_APART = 32;
/** How much longer a task of another batcher's shard waits than one of our own. */
const OWN_SHARD_HEAD_START_MS = 20;

export class StreamView {
  readonly shard: number;
  readonly name: string;
  readonly about: StreamName;
  readonly limit: number;
  /** How many there were at `#version`, and how many came since, by their versions: notes may overtake. */
  #version = -1;
  #depth = 0;
  #came: [version: number, count: number][] = [];
  reserved = 0;
  readonly #arrivals = new Fifo<Arrival>();
  /** Tasks in `#arrivals`. */
  #known = 0;
  depth = 0;

  constructor(shard: number, name: string) {
    this.shard = shard;
    this.name = name;
    this.about = readStreamName(name);
    this.limit = batchLimit(this.about);
  }

  get version(): number {
    return this.#came.at(-1)?.[0] ?? this.#version;
  }

  get free(): number {
    return Math.max(0, this.depth - this.reserved);
  }

  get isNew(): boolean {
    return this.about.kind === "n";
  }

  /** The first came first; what came back stands in the order in which it came back, near enough. */
  get oldestAt(): number {
    return this.#arrivals.first?.queuedAt ?? Infinity;
  }

  get earliestDeadlineAt(): number {
    return this.#arrivals.first?.deadlineAt ?? Infinity;
  }

  /** `depth` undefined: as many more as came. */
  told(version: number, depth: number | undefined, came: Arrival | undefined, now: number): void {
    if (came !== undefined) this.#add(came);
    if (depth === undefined) this.#more(version, came?.count ?? 0);
    else if (version >= this.#version) {
      this.#version = version;
      this.#depth = depth;
      if (this.#came.length > 0) this.#came = this.#came.filter((each) => each[0] > version);
    }
    this.depth = this.#came.reduce((sum, [, count]) => sum + count, this.#depth);
    this.#fit(now);
  }

  #more(version: number, count: number): void {
    if (version <= this.#version) return;
    this.#came.push([version, count]);
    if (this.#came.length <= MAX_APART) return;
    // Nothing that old will overtake any more.
    for (const [at, each] of this.#came.splice(0, MAX_APART / 2)) {
      this.#version = Math.max(this.#version, at);
      this.#depth += each;
    }
  }

  #add({ count, queuedAt, deadlineAt }: Arrival): void {
    // An older one that came back goes first: its age counts.
    const before = this.#arrivals.first;
    const older = before !== undefined && queuedAt < before.queuedAt;
    if (older) this.#arrivals.unshift({ count, queuedAt, deadlineAt });
    else this.#arrivals.push({ count, queuedAt, deadlineAt });
    this.#known += count;
  }

  /** Readers take from the front: what is known beyond the depth is gone from there. */
  #fit(now: number): void {
    while (this.#known > this.depth) {
      const first = this.#arrivals.first!;
      const surplus = Math.min(first.count, this.#known - this.depth);
      first.count -= surplus;
      this.#known -= surplus;
      if (first.count === 0) this.#arrivals.shift();
    }
    if (this.#known === this.depth) return;
    const { queuedAt, deadlineAt } = this.#arrivals.first ?? { queuedAt: now, deadlineAt: Infinity };
    this.#arrivals.unshift({ count: this.depth - this.#known, queuedAt, deadlineAt });
    this.#known = this.depth;
  }
}

/** The streams of one model and one set of parameters. */
class GroupView implements QueueView {
  readonly parameters: Json;
  readonly streams = new Map<string, StreamView>();
  readonly credits: number[];
  readonly #may: (stream: StreamView) => boolean;

  constructor(parameters: Json, tiers: number, may: (stream: StreamView) => boolean) {
    this.parameters = parameters;
    this.credits = Array.from({ length: tiers }, () => 0);
    this.#may = may;
  }

  /** Those that this process may take from now. */
  *open(): Generator<StreamView> {
    for (const stream of this.streams.values()) if (stream.free > 0 && this.#may(stream)) yield stream;
  }

  get depth(): number {
    let depth = 0;
    for (const stream of this.open()) depth += stream.free;
    return depth;
  }

  get fresh(): number {
    let fresh = 0;
    for (const stream of this.open()) if (stream.isNew) fresh += stream.free;
    return fresh;
  }

  get oldestAt(): number {
    let oldest = Infinity;
    for (const { oldestAt } of this.open()) oldest = Math.min(oldest, oldestAt);
    return oldest;
  }

  get earliestDeadlineAt(): number {
    let earliest = Infinity;
    for (const { earliestDeadlineAt } of this.open()) earliest = Math.min(earliest, earliestDeadlineAt);
    return earliest;
  }

  get headMaxBatchSize(): number {
    let head: StreamView | undefined;
    for (const stream of this.open()) if (head === undefined || before(stream, head)) head = stream;
    return head?.limit ?? Infinity;
  }
}

/** Who is served first within a queue: the better tier, then the more suspicious, then what came back. */
function before(one: StreamView, other: StreamView): boolean {
  if (one.about.tier !== other.about.tier) return one.about.tier < other.about.tier;
  if (one.limit !== other.limit) return one.limit < other.limit;
  return !one.isNew && other.isNew;
}

export interface Wanted {
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
    for (const model of options.models) this.#models.set(model, new Map());
  }

  /** The one that waits longest first. */
  queues(model: string): QueueView[] {
    const groups = [...(this.#models.get(model)?.values() ?? [])].filter(({ depth }) => depth > 0);
    return groups.length < 2 ? groups : groups.sort((one, other) => one.oldestAt - other.oldestAt);
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

  /** Reads a report: a line per stream, as `close_shard` in `lua/common.lua` writes it. */
  told(report: string, mayBeOld = false): void {
    if (report === "") return;
    const came = new Map<GroupView, [model: string, count: number]>();
    const now = this.#clock.now();
    for (const line of report.split("\n")) {
      const [shard, version, name, depth, count, queuedAt, deadlineAt, parameters] = line.split("\t");
      const found = this.#stream(Number(shard), name!, parameters!);
      if (found === undefined) continue;
      const [group, view] = found;
      if (mayBeOld && Number(version) <= view.version) continue;
      const arrival = count === "0" ? undefined : this.#arrival(count!, queuedAt!, deadlineAt!);
      view.told(Number(version), depth === "+" ? undefined : Number(depth), arrival, now);
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

  /** Nothing is known of these shards any more; what is reserved is still on its way. */
  forget(shards: readonly number[]): void {
    for (const groups of this.#models.values()) {
      for (const { streams } of groups.values()) {
        for (const [key, stream] of streams) if (shards.includes(stream.shard)) this.#drop(streams, key);
      }
    }
  }

  /** Drops streams that are empty and groups that have none left; called now and then. */
  tidy(): void {
    for (const groups of this.#models.values()) {
      for (const [key, { streams }] of groups) {
        for (const [name, { depth, reserved }] of streams)
          if (depth === 0 && reserved === 0) this.#drop(streams, name);
        if (streams.size === 0) groups.delete(key);
      }
    }
  }

  #drop(streams: Map<string, StreamView>, key: string): void {
    streams.delete(key);
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
    if (small !== undefined) turns.unshift(...turns.splice(small, 1));
    const wanted: Wanted[] = [];
    let limit = taken + max;
    for (const tier of turns) {
      let left = seats[tier]!;
      for (const stream of byTier[tier]!) {
        if (stream.limit <= taken) continue;
        const count = Math.min(left, stream.free, Math.min(limit, stream.limit) - taken);
        if (count <= 0) continue;
        limit = Math.min(limit, stream.limit);
        taken += count;
        left -= count;
        stream.reserved += count;
        wanted.push({ stream, count });
      }
    }
    return wanted;
  }

  release(wanted: readonly Wanted[]): void {
    for (const { stream, count } of wanted) stream.reserved -= count;
  }

  #inOrder(streams: StreamView[]): void {
    if (streams.length < 2) return;
    const waitingSince = (stream: StreamView): number =>
      stream.oldestAt - (this.rank.prefers(stream.shard) ? OWN_SHARD_HEAD_START_MS : 0);
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
  #tier({ tier }: StreamName): number {
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
    const found: [GroupView, StreamView] = [group, stream];
    this.#streams.set(key, found);
    return found;
  }
}

function groupKey(parameters: Json): string {
  return parameters === "" ? "" : digest(parameters);
}
