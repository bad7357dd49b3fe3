/** A stream of the fake Redis, with its consumer groups. Replies are as in `redis.ts`. */
import { RedisError } from "../../../src/engine/redis/client/resp.ts";

export interface StreamId {
  readonly ms: number;
  readonly seq: number;
}

export interface Entry {
  readonly id: StreamId;
  readonly fields: readonly string[];
}

interface Pending {
  readonly id: StreamId;
  consumer: string;
  deliveredAt: number;
  count: number;
}

interface Group {
  lastDelivered: StreamId;
  /** How many entries were ever delivered, where that is known. */
  entriesRead: number | undefined;
  /** Sorted by id. */
  readonly pending: Pending[];
  /** Name to when it was last heard of. */
  readonly consumers: Map<string, number>;
}

export const ZERO: StreamId = { ms: 0, seq: 0 };
const LAST: StreamId = { ms: Number.MAX_SAFE_INTEGER, seq: Number.MAX_SAFE_INTEGER };

export function compareIds(one: StreamId, other: StreamId): number {
  return one.ms - other.ms || one.seq - other.seq;
}

export function idText({ ms, seq }: StreamId): string {
  return `${ms}-${seq}`;
}

export function parseId(text: string, missingSeq = 0): StreamId {
  const found = /^(\d+)(?:-(\d+))?$/.exec(text);
  if (found === null) throw new RedisError("ERR Invalid stream ID specified as stream command argument");
  return { ms: Number(found[1]), seq: found[2] === undefined ? missingSeq : Number(found[2]) };
}

export function notZero(id: StreamId): void {
  if (compareIds(id, ZERO) === 0)
    throw new RedisError("ERR The ID specified in XADD must be greater than 0-0");
}

/** The first place at which `items` is not before `id`. */
function placeOf(items: readonly { readonly id: StreamId }[], id: StreamId): number {
  let [low, high] = [0, items.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (compareIds(items[middle]!.id, id) < 0) low = middle + 1;
    else high = middle;
  }
  return low;
}

function found<Item extends { readonly id: StreamId }>(
  items: readonly Item[],
  id: StreamId,
): Item | undefined {
  const item = items[placeOf(items, id)];
  return item !== undefined && compareIds(item.id, id) === 0 ? item : undefined;
}

function remove(items: { readonly id: StreamId }[], id: StreamId): boolean {
  const at = placeOf(items, id);
  if (items[at] === undefined || compareIds(items[at].id, id) !== 0) return false;
  items.splice(at, 1);
  return true;
}

export class Stream {
  readonly entries: Entry[] = [];
  lastId: StreamId = ZERO;
  added = 0;
  /** The highest id that was deleted by XDEL: a hole, unless all before it are gone too. */
  maxDeleted: StreamId = ZERO;
  readonly groups = new Map<string, Group>();

  add(said: string, fields: readonly string[], now: number): StreamId {
    const id = this.#newId(said, now);
    if (compareIds(id, this.lastId) <= 0) {
      const message = "The ID specified in XADD is equal or smaller than the target stream top item";
      throw new RedisError(`ERR ${message}`);
    }
    this.entries.push({ id, fields });
    this.lastId = id;
    this.added++;
    return id;
  }

  #newId(said: string, now: number): StreamId {
    const { ms, seq } = this.lastId;
    if (said === "*") return now > ms ? { ms: now, seq: 0 } : { ms, seq: seq + 1 };
    const wild = /^(\d+)-\*$/.exec(said);
    if (wild === null) return parseId(said);
    return Number(wild[1]) === ms ? { ms, seq: seq + 1 } : { ms: Number(wild[1]), seq: 0 };
  }

  delete(id: StreamId): boolean {
    if (!remove(this.entries, id)) return false;
    if (compareIds(id, this.maxDeleted) > 0) this.maxDeleted = id;
    return true;
  }

  /** Whether an entry from `from` on was deleted, as far as Redis knows. */
  #hasHole(from: StreamId): boolean {
    const { maxDeleted } = this;
    return this.entries.length > 0 && compareIds(maxDeleted, ZERO) > 0 && compareIds(from, maxDeleted) <= 0;
  }

  /** How many entries there ever were up to `id`, where Redis can tell. */
  #countTo(id: StreamId): number | undefined {
    if (this.added === 0) return 0;
    const last = compareIds(id, this.lastId);
    if (this.entries.length === 0 && last <= 0) return this.added;
    if (last === 0) return this.added;
    if (last > 0) return undefined;
    const first = this.entries[0]?.id ?? ZERO;
    if (compareIds(this.maxDeleted, ZERO) > 0 && compareIds(this.maxDeleted, first) >= 0) return undefined;
    const before = this.added - this.entries.length;
    const place = compareIds(id, first);
    return place < 0 ? before : place === 0 ? before + 1 : undefined;
  }

  /** How many entries a group has not been given; null where Redis cannot tell. */
  lag({ entriesRead, lastDelivered }: Group): number | null {
    if (this.added === 0) return 0;
    const read =
      entriesRead !== undefined && !this.#hasHole(lastDelivered) ? entriesRead : this.#countTo(lastDelivered);
    return read === undefined ? null : this.added - read;
  }

  trimToLength(length: number): number {
    return this.entries.splice(0, Math.max(0, this.entries.length - length)).length;
  }

  trimBefore(id: StreamId): number {
    return this.entries.splice(0, placeOf(this.entries, id)).length;
  }

  range(from: StreamId, to: StreamId, count = Infinity): Entry[] {
    const list: Entry[] = [];
    for (let at = placeOf(this.entries, from); at < this.entries.length && list.length < count; at++) {
      if (compareIds(this.entries[at]!.id, to) > 0) break;
      list.push(this.entries[at]!);
    }
    return list;
  }

  entry(id: StreamId): Entry | undefined {
    return found(this.entries, id);
  }

  // ── groups ────────────────────────────────────────────────────────────────────────────────────────

  createGroup(name: string, from: StreamId): void {
    if (this.groups.has(name)) throw new RedisError("BUSYGROUP Consumer Group name already exists");
    this.groups.set(name, { lastDelivered: from, entriesRead: undefined, pending: [], consumers: new Map() });
  }

  /** New entries for a consumer; they are pending until it acknowledges them. */
  readNew(group: Group, consumer: string, count: number, noAck: boolean, now: number): Entry[] {
    const { ms, seq } = group.lastDelivered;
    const entries = this.range({ ms, seq: seq + 1 }, LAST, count);
    for (const { id } of entries) {
      if (group.entriesRead !== undefined && !this.#hasHole(id)) group.entriesRead++;
      else group.entriesRead = this.#countTo(id);
      group.lastDelivered = id;
      if (noAck) continue;
      // A group that was set back delivers again what is pending elsewhere.
      remove(group.pending, id);
      group.pending.splice(placeOf(group.pending, id), 0, { id, consumer, deliveredAt: now, count: 1 });
    }
    return entries;
  }

  /** What is pending with a consumer, after `from`; of a deleted entry the fields are null. */
  readPending(group: Group, consumer: string, from: StreamId, count: number, now: number) {
    const list: { readonly id: StreamId; readonly fields: readonly string[] | null }[] = [];
    for (const pending of group.pending) {
      if (list.length >= count) break;
      if (pending.consumer !== consumer || compareIds(pending.id, from) <= 0) continue;
      const entry = this.entry(pending.id);
      list.push(entry ?? { id: pending.id, fields: null });
      if (entry === undefined) continue;
      pending.deliveredAt = now;
      pending.count++;
    }
    return list;
  }
}

export type { Group };

export function acknowledge(group: Group, id: StreamId): boolean {
  return remove(group.pending, id);
}

export interface Claim {
  readonly consumer: string;
  readonly minIdleMs: number;
  /** When the entry counts as delivered; now unless IDLE or TIME says otherwise. */
  readonly deliveredAt: number;
  readonly retryCount: number | undefined;
  readonly force: boolean;
  readonly justId: boolean;
}

/** The entry where it was claimed, or why not; one that is no longer in the stream is dropped from the pending list. */
export function claim(
  stream: Stream,
  group: Group,
  id: StreamId,
  how: Claim,
  now: number,
): Entry | "gone" | "kept" {
  let pending = found(group.pending, id);
  const entry = stream.entry(id);
  if (entry === undefined) {
    if (pending === undefined) return "kept";
    remove(group.pending, id);
    return "gone";
  }
  if (pending === undefined) {
    if (!how.force) return "kept";
    pending = { id, consumer: how.consumer, deliveredAt: now, count: 0 };
    group.pending.splice(placeOf(group.pending, id), 0, pending);
  } else if (how.minIdleMs > 0 && now - pending.deliveredAt < how.minIdleMs) return "kept";
  group.consumers.set(how.consumer, now);
  pending.consumer = how.consumer;
  pending.deliveredAt = how.deliveredAt;
  if (how.retryCount !== undefined) pending.count = how.retryCount;
  else if (!how.justId) pending.count++;
  return entry;
}

/** Of a group's pending entries those between two ids, in order. */
export function pendingBetween(group: Group, from: StreamId, to: StreamId): Pending[] {
  const start = placeOf(group.pending, from);
  const end = group.pending.findIndex(({ id }, at) => at >= start && compareIds(id, to) > 0);
  return group.pending.slice(start, end < 0 ? undefined : end);
}
