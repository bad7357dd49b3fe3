/**
 * What is known of one stream of tasks in Redis, and of all those whose tasks may share a batch.
 *
 * Depths come from numbered notes (`redis-view.ts`), which may overtake each other; when tasks came is
 * remembered as far as notes said it.
 */
import { Fifo } from "../core/fifo.ts";
import type { Json } from "../core/task.ts";
import type { QueueView } from "./engine.ts";
import { batchLimit, isNew, readStreamName, type StreamName } from "./redis-keys.ts";
import { Rounds } from "./redis-turns.ts";

/** Tasks that came together. */
export interface Arrival {
  count: number;
  readonly queuedAt: number;
  readonly deadlineAt: number;
}

/** Notes that may be apart from their order. */
const MAX_APART = 32;
/** How far tasks of several streams may be apart from their order. */
const ORDER_MS = 20;

export class StreamView {
  readonly shard: number;
  readonly name: string;
  readonly about: StreamName;
  readonly limit: number;
  readonly isNew: boolean;
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
    this.isNew = isNew(this.about);
  }

  get version(): number {
    return this.#came.at(-1)?.[0] ?? this.#version;
  }

  get free(): number {
    return Math.max(0, this.depth - this.reserved);
  }

  /** The first came first; what came back stands in the order in which it came back, near enough. */
  get oldestAt(): number {
    return this.#arrivals.first?.queuedAt ?? Infinity;
  }

  /** What is not reserved: when, and how many that came together, the first first. */
  *waits(): Generator<readonly [queuedAt: number, count: number]> {
    let reserved = this.reserved;
    for (let place = 0; place < this.#arrivals.size; place++) {
      const { queuedAt, count } = this.#arrivals.at(place)!;
      const skipped = Math.min(reserved, count);
      reserved -= skipped;
      if (count > skipped) yield [queuedAt, count - skipped];
    }
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

interface Row {
  readonly stream: StreamView;
  readonly waits: Iterator<readonly [number, number]>;
  readonly headStartMs: number;
  /** Of the next; Infinity when there is none. */
  since: number;
  count: number;
}

/**
 * The order in which tasks of equal streams are taken, as far as `max` of them: the longest-waiting first,
 * wherever it is. Each stream is read as far as it lies less than `ORDER_MS` behind the others, so that a
 * batch reads few: taken to its end, a stream of one shard in sixteen would jump the queue by the time in
 * which sixteen batches come.
 */
export function* inOrderOfWait(
  streams: readonly StreamView[],
  headStartMs: (stream: StreamView) => number,
  max: number,
): Generator<readonly [StreamView, number]> {
  const rows = streams.map((stream): Row => {
    const row = { stream, waits: stream.waits(), headStartMs: headStartMs(stream), since: 0, count: 0 };
    advance(row);
    return row;
  });
  for (let left = max; left > 0;) {
    let first: Row | undefined;
    let second = Infinity;
    for (const row of rows) {
      if (first === undefined || row.since < first.since) {
        second = first?.since ?? Infinity;
        first = row;
      } else second = Math.min(second, row.since);
    }
    if (first === undefined || first.since === Infinity) return;
    let count = 0;
    while (first.since !== Infinity && first.since <= second + ORDER_MS && count < left) {
      count += first.count;
      advance(first);
    }
    left -= count;
    yield [first.stream, count];
  }
}

function advance(row: Row): void {
  const { done, value } = row.waits.next();
  row.since = done === true ? Infinity : value[0] - row.headStartMs;
  row.count = done === true ? 0 : value[1];
}

/** What a queue looks like now. */
type Summary = Omit<QueueView, "parameters">;

/** The streams of one model and one set of parameters. */
export class GroupView implements QueueView {
  readonly parameters: Json;
  readonly streams = new Map<string, StreamView>();
  readonly credits: number[];
  /** By tier: the turns of those that share its seats. */
  readonly rounds: readonly Rounds[];
  readonly #may: (stream: StreamView) => boolean;
  /** Kept until a stream changes; never where it depends on the time which streams may be read. */
  #summary: Summary | undefined;

  constructor(parameters: Json, tiers: number, may: (stream: StreamView) => boolean) {
    this.parameters = parameters;
    this.credits = Array.from({ length: tiers }, () => 0);
    this.rounds = Array.from({ length: tiers }, () => new Rounds());
    this.#may = may;
  }

  /** A stream came, went, or has another depth or reservation. */
  changed(): void {
    this.#summary = undefined;
  }

  /** Those that this process may take from now. */
  *open(): Generator<StreamView> {
    for (const stream of this.streams.values()) if (stream.free > 0 && this.#may(stream)) yield stream;
  }

  get depth(): number {
    return this.#now().depth;
  }

  get tier(): number {
    return this.#now().tier;
  }

  get fresh(): number {
    return this.#now().fresh;
  }

  get oldestAt(): number {
    return this.#now().oldestAt;
  }

  get earliestDeadlineAt(): number {
    return this.#now().earliestDeadlineAt;
  }

  get headMaxBatchSize(): number {
    return this.#now().headMaxBatchSize;
  }

  #now(): Summary {
    if (this.#summary !== undefined) return this.#summary;
    let [depth, fresh] = [0, 0];
    let [tier, oldestAt, earliestDeadlineAt] = [Infinity, Infinity, Infinity];
    let head: StreamView | undefined;
    let lasts = true;
    for (const stream of this.streams.values()) {
      if (stream.free === 0) continue;
      lasts &&= stream.about.zone === "";
      if (!this.#may(stream)) continue;
      depth += stream.free;
      if (stream.isNew) fresh += stream.free;
      tier = Math.min(tier, stream.about.tier);
      oldestAt = Math.min(oldestAt, stream.oldestAt);
      earliestDeadlineAt = Math.min(earliestDeadlineAt, stream.earliestDeadlineAt);
      if (head === undefined || before(stream, head)) head = stream;
    }
    const headMaxBatchSize = head?.limit ?? Infinity;
    const summary = { depth, fresh, tier, oldestAt, earliestDeadlineAt, headMaxBatchSize };
    if (lasts) this.#summary = summary;
    return summary;
  }
}

/** Who is served first within a queue: the better tier, then the more suspicious, then what came back. */
export function before(one: StreamView, other: StreamView): boolean {
  if (one.about.tier !== other.about.tier) return one.about.tier < other.about.tier;
  if (one.limit !== other.limit) return one.limit < other.limit;
  return !one.isNew && other.isNew;
}
