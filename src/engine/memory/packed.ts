/**
 * Finished records, as bytes outside of the heap until their time to live has passed.
 *
 * Tens of thousands of results a second are kept for minutes. As objects each would be copied by the garbage
 * collector twice and walked over for as long as it lives, which costs more than answering did. Here they are
 * bytes in slabs, in the order in which they ended, found through two indexes of numbers: by id, and by content
 * for the cache. A record costs the collector nothing from the moment at which it is packed.
 *
 * Each tenant has its own slabs, which are emptied from its oldest record on. One leaves when both its uses are over:
 * polling (`ttlMs`) and the cache (its model's time); or early, when its tenant holds too many bytes (`holdings.ts`). But
 * one that was promised and not fetched yet is handed back (`rescue`) instead, because nothing promised is thrown away
 * before its time.
 */
import { hashOf } from "../../core/table.ts";
import type { BatchNote } from "../../core/task.ts";
import type { Holding, Holdings } from "./holdings.ts";
import { PackedIndex } from "./packed-index.ts";
import {
  BYTES,
  bytesOf,
  CACHE_UNTIL,
  DELIVERED,
  FLAGS,
  GONE,
  hasId,
  hasKey,
  ID_HASH,
  idAt,
  JOINS,
  KEY_HASH,
  numbersAt,
  parcel,
  read,
  SETTLED_AT,
  Slab,
  write,
} from "./packed-form.ts";
import { ID_RANDOM_END, type TaskRecord } from "./record.ts";

/** A tenant's first slab is as large as its first record, each further one twice as large as the one before, up to this. */
const SLAB_BYTES = 1 << 20;
/** Records begin at multiples of 8 bytes: a place is a slab's slot times this, plus the eighths before it. */
const PLACES = SLAB_BYTES / 8;

export interface PackedOwner {
  /** Its result is no longer kept. Left out where nobody wants to know: ids are read from the bytes for it. */
  readonly forgotten?: ((id: string) => void) | undefined;
  /** There is no room, and nobody has fetched it yet. */
  rescue(record: TaskRecord): void;
}

export class Packed {
  readonly #ttlMs: () => number;
  /** Of the hashes of ids and cache keys. */
  readonly #seed: number;
  readonly #holdings: Holdings;
  readonly #owner: PackedOwner;
  /** By slot; slots of emptied ones are used again. */
  readonly #slabs: (Slab | undefined)[] = [];
  readonly #freeSlots: number[] = [];
  readonly #byId = new PackedIndex((place, id) => hasId(this.#slab(place), startOf(place), id));
  readonly #byKey = new PackedIndex((place, key) => hasKey(this.#slab(place), startOf(place), key));
  /** An emptied slab, for the next time that one is needed. */
  #spare: ArrayBuffer | undefined;
  /** The last batch that was noted, as text: each tenant that shared it stores it in its own slab. */
  #batch: BatchNote | undefined;
  #batchText = "";

  constructor(holdings: Holdings, ttlMs: () => number, seed: number, owner: PackedOwner) {
    this.#holdings = holdings;
    this.#ttlMs = ttlMs;
    this.#seed = seed;
    this.#owner = owner;
  }

  /** Results that are kept; what is left of others for the cache does not count. */
  get size(): number {
    return this.#byId.size;
  }

  /** `elsewhere`: its result is kept by somebody else, and here only for whoever has the same content. */
  add(record: TaskRecord, elsewhere = false): void {
    const { cacheKey = "", cacheTtlMs = 0 } = record.sharing;
    const key = record.outcome!.ok && cacheTtlMs > 0 && !record.cached ? cacheKey : "";
    if (elsewhere && key === "") return;
    const idHash = this.#hashOfId(record.task.id);
    const keyHash = key === "" ? 0 : hashOf(key, this.#seed);
    const one = parcel(record, key, idHash, keyHash);
    const holding = this.#holdings.of(record.task.tenant);
    let slab = holding.newest;
    let note = slab?.note === record.batch ? "" : this.#noteOf(record.batch);
    if (slab === undefined || slab.used + bytesOf(one, Buffer.byteLength(note)) > slab.bytes.length) {
      note = this.#noteOf(record.batch);
      slab = this.#newSlab(holding, bytesOf(one, Buffer.byteLength(note)));
    }
    const start = slab.used;
    write(slab, one, note, key === "" ? 0 : record.settledAt! + cacheTtlMs);
    const place = slab.slot * PLACES + start / 8;
    if (elsewhere) slab.numbers[numbersAt(start) + FLAGS]! |= GONE | DELIVERED;
    else this.#byId.add(idHash, place);
    if (key !== "") {
      this.#leaveCache(key, keyHash);
      this.#byKey.add(keyHash, place);
    }
    const bytes = slab.used - start;
    this.#holdings.charge(holding, bytes, record.delivered || elsewhere ? 0 : bytes);
    if (slab === holding.oldest && start === holding.start) {
      this.#holdings.dueAt(holding, this.#until(slab, start));
    }
  }

  #noteOf(batch: BatchNote | undefined): string {
    if (batch === undefined) return "";
    if (batch !== this.#batch) {
      this.#batch = batch;
      this.#batchText = JSON.stringify(batch);
    }
    return this.#batchText;
  }

  get(id: string): TaskRecord | undefined {
    const place = this.#byId.find(this.#hashOfId(id), id);
    return place < 0 ? undefined : read(this.#slab(place), startOf(place));
  }

  /** A success with that content, while it may answer for others. */
  cached(key: string, now: number): TaskRecord | undefined {
    const place = this.#byKey.find(hashOf(key, this.#seed), key);
    if (place < 0) return undefined;
    const slab = this.#slab(place);
    const start = startOf(place);
    return slab.instants[start / 8 + CACHE_UNTIL]! > now ? read(slab, start) : undefined;
  }

  /** Somebody has received it. `forget`: and nobody else will ask for it. False: it is not here. */
  deliver(id: string, forget: boolean): boolean {
    const place = this.#byId.find(this.#hashOfId(id), id);
    if (place < 0) return false;
    const slab = this.#slab(place);
    const number = numbersAt(startOf(place));
    this.#delivered(slab, number);
    if (forget && slab.numbers[number + JOINS] === 0) {
      this.forget(id);
      this.#owner.forgotten?.(id);
    }
    return true;
  }

  /** A caller left without it; after the last one it counts as delivered. False: it is not here. */
  abandon(id: string): boolean {
    const place = this.#byId.find(this.#hashOfId(id), id);
    if (place < 0) return false;
    const slab = this.#slab(place);
    const number = numbersAt(startOf(place));
    if (slab.numbers[number + JOINS] === 0) this.#delivered(slab, number);
    else slab.numbers[number + JOINS]!--;
    return true;
  }

  /** Nobody may poll for it any more. False: it is not here. */
  forget(id: string): boolean {
    const idHash = this.#hashOfId(id);
    const place = this.#byId.find(idHash, id);
    if (place < 0) return false;
    this.#byId.remove(idHash, place);
    this.#give(this.#slab(place), startOf(place));
    return true;
  }

  /** Lets the tenant's oldest go whose time is over, and returns when the next one's will be. */
  sweep(holding: Holding, now: number): number {
    for (;;) {
      const slab = holding.oldest;
      if (slab === undefined) return Infinity;
      const until = this.#until(slab, holding.start);
      if (until > now) return until;
      this.#dropOldest(slab);
    }
  }

  /** Lets the tenant's oldest go, or returns it if it is unfetched. False: it has none here. */
  dropOldest(holding: Holding): boolean {
    const slab = holding.oldest;
    if (slab === undefined) return false;
    const rescued = isAwaited(slab, holding.start) ? read(slab, holding.start) : undefined;
    this.#dropOldest(slab, rescued !== undefined);
    if (rescued !== undefined) this.#owner.rescue(rescued);
    return true;
  }

  /** When the tenant's oldest unfetched result was settled; Infinity: there is none. */
  oldestAwaitedAt(holding: Holding): number {
    let { slab, start } = holding.awaitedFrom ?? { slab: holding.oldest, start: holding.start };
    while (slab !== undefined) {
      holding.awaitedFrom = { slab, start };
      if (start >= slab.used) {
        slab = slab.next;
        start = 0;
      } else if (isAwaited(slab, start)) {
        return slab.instants[start / 8 + SETTLED_AT]!;
      } else {
        start += slab.numbers[numbersAt(start) + BYTES]!;
      }
    }
    return Infinity;
  }

  #until({ instants, numbers }: Slab, start: number): number {
    const gone = (numbers[numbersAt(start) + FLAGS]! & GONE) !== 0;
    const polled = gone ? 0 : instants[start / 8 + SETTLED_AT]! + this.#ttlMs();
    return Math.max(polled, instants[start / 8 + CACHE_UNTIL]!);
  }

  /** Out of both indexes, and its bytes are free. */
  #dropOldest(slab: Slab, quietly = false): void {
    const holding = slab.of;
    const { start } = holding;
    const { numbers } = slab;
    const number = numbersAt(start);
    const place = slab.slot * PLACES + start / 8;
    const bytes = numbers[number + BYTES]!;
    if ((numbers[number + FLAGS]! & GONE) === 0) {
      this.#byId.remove(numbers[number + ID_HASH]! | 0, place);
      this.#give(slab, start);
      if (!quietly) this.#owner.forgotten?.(idAt(slab, start));
    }
    if (slab.instants[start / 8 + CACHE_UNTIL]! > 0) {
      this.#byKey.remove(numbers[number + KEY_HASH]! | 0, place);
    }
    holding.start += bytes;
    const from = holding.awaitedFrom;
    if (from?.slab === slab && from.start < holding.start) holding.awaitedFrom = undefined;
    if (holding.start === slab.used) this.#emptied(slab);
    this.#holdings.charge(holding, -bytes, 0);
  }

  #emptied(slab: Slab): void {
    const holding = slab.of;
    holding.oldest = slab.next;
    holding.start = 0;
    if (holding.newest === slab) holding.newest = undefined;
    if (holding.awaitedFrom?.slab === slab) holding.awaitedFrom = undefined;
    this.#slabs[slab.slot] = undefined;
    this.#freeSlots.push(slab.slot);
    if (slab.bytes.length === SLAB_BYTES) this.#spare = slab.bytes.buffer as ArrayBuffer;
  }

  #delivered({ numbers, of }: Slab, number: number): void {
    const flags = numbers[number + FLAGS]!;
    if ((flags & DELIVERED) !== 0) return;
    numbers[number + FLAGS] = flags | DELIVERED;
    this.#holdings.charge(of, 0, -numbers[number + BYTES]!);
  }

  /** The result at `start` is no longer anybody's. */
  #give(slab: Slab, start: number): void {
    const number = numbersAt(start);
    this.#delivered(slab, number);
    slab.numbers[number + FLAGS]! |= GONE;
  }

  /** A newer success takes its place. */
  #leaveCache(key: string, keyHash: number): void {
    const place = this.#byKey.find(keyHash, key);
    if (place < 0) return;
    this.#byKey.remove(keyHash, place);
    this.#slab(place).instants[startOf(place) / 8 + CACHE_UNTIL] = 0;
  }

  #newSlab(holding: Holding, atLeast: number): Slab {
    const last = holding.newest;
    const size = Math.min(SLAB_BYTES, 2 * (last?.bytes.length ?? 0));
    const spare = size === SLAB_BYTES && atLeast <= SLAB_BYTES ? this.#spare : undefined;
    if (spare !== undefined) this.#spare = undefined;
    const slot = this.#freeSlots.pop() ?? this.#slabs.length;
    const slab = new Slab(slot, holding, spare ?? new ArrayBuffer(Math.max(size, atLeast)));
    this.#slabs[slot] = slab;
    if (last === undefined) holding.oldest = slab;
    else last.next = slab;
    holding.newest = slab;
    return slab;
  }

  #hashOfId(id: string): number {
    return hashOf(id, this.#seed, ID_RANDOM_END);
  }

  #slab(place: number): Slab {
    return this.#slabs[Math.floor(place / PLACES)]!;
  }
}

function isAwaited({ numbers }: Slab, start: number): boolean {
  return (numbers[numbersAt(start) + FLAGS]! & (GONE | DELIVERED)) === 0;
}

function startOf(place: number): number {
  return (place % PLACES) * 8;
}
