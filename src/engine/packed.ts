/**
 * Finished records, as bytes outside of the heap until their time to live has passed.
 *
 * Tens of thousands of results a second are kept for minutes. As objects each would be copied by the garbage
 * collector twice and walked over for as long as it lives, which costs more than answering did. Here they are
 * bytes in slabs, in the order in which they ended, found through two indexes of numbers: by id, and by content
 * for the cache. A record costs the collector nothing from the moment at which it is packed.
 *
 * Slabs are emptied from the oldest record on. One leaves when both its uses are over: polling (`ttlMs`) and the
 * cache (its model's time). When there are too many bytes the oldest leave early; but one that was promised and
 * not fetched yet is handed back (`rescue`) instead, because nothing promised is thrown away before its time.
 */
import { Fifo } from "../core/fifo.ts";
import { Hashes } from "../core/table.ts";
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
  JOINED,
  KEY_HASH,
  numbersAt,
  parcel,
  read,
  SETTLED_AT,
  Slab,
  write,
} from "./packed-form.ts";
import { ID_RANDOM_END, type TaskRecord } from "./record.ts";

const SLAB_BYTES = 1 << 20;
/** Records begin at multiples of 8 bytes: a place is a slab's number times this, plus the eighths before it. */
const PLACES = SLAB_BYTES / 8;

export interface PackedOwner {
  /** How many bytes may be packed now. */
  room(): number;
  /** Its result is no longer kept. Left out where nobody wants to know: ids are read from the bytes for it. */
  readonly forgotten?: ((id: string) => void) | undefined;
  /** There is no room, and nobody has fetched it yet. */
  rescue(record: TaskRecord): void;
}

export class Packed {
  ttlMs: number;
  /** Of task ids. */
  readonly ids: Hashes;
  /** Of cache keys. */
  readonly hashes: Hashes;
  readonly #owner: PackedOwner;
  readonly #slabs = new Fifo<Slab>();
  readonly #byId = new PackedIndex((place, id) => hasId(this.#slab(place), startOf(place), id));
  readonly #byKey = new PackedIndex((place, key) => hasKey(this.#slab(place), startOf(place), key));
  #newest: Slab | undefined;
  /** Of the next slab. */
  #seq = 0;
  /** Where the oldest record stands in the oldest slab. */
  #oldest = 0;
  /** An emptied slab, for the next time that one is needed. */
  #spare: ArrayBuffer | undefined;
  bytes = 0;
  /** Of those that nobody has fetched. */
  awaitedBytes = 0;

  constructor(ttlMs: number, seed: number, owner: PackedOwner) {
    this.ttlMs = ttlMs;
    this.ids = new Hashes(seed, ID_RANDOM_END);
    this.hashes = new Hashes(seed);
    this.#owner = owner;
  }

  /** Results that are kept; what is left of others for the cache does not count. */
  get size(): number {
    return this.#byId.size;
  }

  /** `elsewhere`: its result is kept by somebody else, and here only for whoever has the same content. */
  add(record: TaskRecord, elsewhere = false): void {
    const { joinKey, cacheKey = "", cacheTtlMs = 0 } = record.sharing;
    const key = record.outcome!.ok && cacheTtlMs > 0 && !record.cached ? cacheKey : "";
    if (elsewhere && key === "") return;
    const idHash = this.ids.of(record.task.id);
    const keyHash = key === "" ? 0 : key === joinKey ? record.joinHash : this.hashes.of(key);
    const one = parcel(record, key, idHash, keyHash);
    const { batch } = record;
    let slab = this.#newest;
    let note = batch === undefined || slab?.note === batch ? "" : JSON.stringify(batch);
    if (slab === undefined || slab.used + bytesOf(one, Buffer.byteLength(note)) > slab.bytes.length) {
      if (batch !== undefined) note = JSON.stringify(batch);
      slab = this.#newSlab(bytesOf(one, Buffer.byteLength(note)));
    }
    const start = slab.used;
    write(slab, one, note, key === "" ? 0 : record.settledAt! + cacheTtlMs);
    const place = slab.seq * PLACES + start / 8;
    if (elsewhere) slab.numbers[numbersAt(start) + FLAGS]! |= GONE | DELIVERED;
    else this.#byId.add(idHash, place);
    if (key !== "") {
      this.#leaveCache(key, keyHash);
      this.#byKey.add(keyHash, place);
    }
    this.bytes += slab.used - start;
    if (!record.delivered && !elsewhere) this.awaitedBytes += slab.used - start;
  }

  get(id: string): TaskRecord | undefined {
    const place = this.#byId.find(this.ids.of(id), id);
    return place < 0 ? undefined : read(this.#slab(place), startOf(place));
  }

  /** A success with that content, while it may answer for others. */
  cached(key: string, now: number): TaskRecord | undefined {
    const place = this.#byKey.find(this.hashes.of(key), key);
    if (place < 0) return undefined;
    const slab = this.#slab(place);
    const start = startOf(place);
    return slab.instants[start / 8 + CACHE_UNTIL]! > now ? read(slab, start) : undefined;
  }

  /** Somebody has received it. `forget`: and nobody else will ask for it. False: it is not here. */
  deliver(id: string, forget: boolean): boolean {
    const place = this.#byId.find(this.ids.of(id), id);
    if (place < 0) return false;
    const { numbers } = this.#slab(place);
    const number = numbersAt(startOf(place));
    const flags = numbers[number + FLAGS]!;
    if ((flags & DELIVERED) === 0) {
      numbers[number + FLAGS] = flags | DELIVERED;
      this.awaitedBytes -= numbers[number + BYTES]!;
    }
    if (forget && (flags & JOINED) === 0) this.forget(id);
    return true;
  }

  /** Nobody may poll for it any more. False: it is not here. */
  forget(id: string): boolean {
    const idHash = this.ids.of(id);
    const place = this.#byId.find(idHash, id);
    if (place < 0) return false;
    this.#byId.remove(idHash, place);
    this.#give(this.#slab(place), startOf(place));
    return true;
  }

  /** Lets the oldest go whose time is over, and returns when the next one's will be. */
  sweep(now: number): number {
    for (;;) {
      const slab = this.#slabs.first;
      if (slab === undefined) return Infinity;
      const until = this.#until(slab, this.#oldest);
      if (until > now) return until;
      this.#dropOldest(slab);
    }
  }

  /** Lets the oldest go until there are at most so many bytes as its owner has room for. */
  trim(): void {
    while (this.bytes > 0 && this.bytes > this.#owner.room()) {
      const slab = this.#slabs.first!;
      const start = this.#oldest;
      const flags = slab.numbers[numbersAt(start) + FLAGS]!;
      const rescued = (flags & (GONE | DELIVERED)) === 0 ? read(slab, start) : undefined;
      this.#dropOldest(slab, rescued !== undefined);
      if (rescued !== undefined) this.#owner.rescue(rescued);
    }
  }

  #until({ instants, numbers }: Slab, start: number): number {
    const gone = (numbers[numbersAt(start) + FLAGS]! & GONE) !== 0;
    const polled = gone ? 0 : instants[start / 8 + SETTLED_AT]! + this.ttlMs;
    return Math.max(polled, instants[start / 8 + CACHE_UNTIL]!);
  }

  /** Out of both indexes, and its bytes are free. */
  #dropOldest(slab: Slab, quietly = false): void {
    const start = this.#oldest;
    const { numbers } = slab;
    const number = numbersAt(start);
    const place = slab.seq * PLACES + start / 8;
    const bytes = numbers[number + BYTES]!;
    if ((numbers[number + FLAGS]! & GONE) === 0) {
      this.#byId.remove(numbers[number + ID_HASH]! | 0, place);
      this.#give(slab, start);
      if (!quietly) this.#owner.forgotten?.(idAt(slab, start));
    }
    if (slab.instants[start / 8 + CACHE_UNTIL]! > 0) {
      this.#byKey.remove(numbers[number + KEY_HASH]! | 0, place);
    }
    this.bytes -= bytes;
    this.#oldest += bytes;
    if (this.#oldest === slab.used) this.#emptied(slab);
  }

  #emptied(slab: Slab): void {
    this.#slabs.shift();
    this.#oldest = 0;
    if (this.#newest === slab) this.#newest = undefined;
    if (slab.bytes.length === SLAB_BYTES) this.#spare = slab.bytes.buffer as ArrayBuffer;
  }

  /** The result at `start` is no longer anybody's. */
  #give({ numbers }: Slab, start: number): void {
    const number = numbersAt(start);
    const flags = numbers[number + FLAGS]!;
    if ((flags & DELIVERED) === 0) this.awaitedBytes -= numbers[number + BYTES]!;
    numbers[number + FLAGS] = flags | GONE;
  }

  /** A newer success takes its place. */
  #leaveCache(key: string, keyHash: number): void {
    const place = this.#byKey.find(keyHash, key);
    if (place < 0) return;
    this.#byKey.remove(keyHash, place);
    this.#slab(place).instants[startOf(place) / 8 + CACHE_UNTIL] = 0;
  }

  #newSlab(atLeast: number): Slab {
    const spare = atLeast <= SLAB_BYTES ? this.#spare : undefined;
    if (spare !== undefined) this.#spare = undefined;
    const slab = new Slab(this.#seq++, spare ?? new ArrayBuffer(Math.max(SLAB_BYTES, atLeast)));
    this.#slabs.push(slab);
    this.#newest = slab;
    return slab;
  }

  #slab(place: number): Slab {
    return this.#slabs.at(Math.floor(place / PLACES) - this.#slabs.first!.seq)!;
  }
}

function startOf(place: number): number {
  return (place % PLACES) * 8;
}
