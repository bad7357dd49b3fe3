/**
 * Finished records as bytes outside the heap until their time to live has passed.
 *
 * Tens of thousands of results a second are kept for minutes. As objects each would be copied by the garbage collector
 * twice and traversed as long as it lives, which costs more than answering did. Here they are bytes in slabs, in order
 * of settlement, found through two numeric indexes: by id, and by content for the cache. `node bench/kept.ts`: 1.5 µs
 * of CPU per record besides making it; objects cost 8.3.
 *
 * Each tenant has separate slabs, emptied from its oldest record on. A record leaves when polling (`ttlMs`) and the
 * cache (its model's time) are both over, or early when its tenant holds too many bytes (`records.ts`). One that was
 * promised and not fetched is handed back (`rescue`): nothing promised is dropped before its time.
 *
 * A record is 6 times of 8 bytes, 17 numbers of 4 bytes, then UTF-8 texts: id, tenant, model, trace and cache key in
 * one piece, its outcome, and the words of its batch unless an earlier record of the slab has them. Padded to 8 bytes. Input and
 * parameters are not kept.
 */
import { hashOf } from "../../core/table.ts";
import type { BatchNote, Outcome, Task } from "../../core/task.ts";
import { ID_RANDOM_END, TaskRecord } from "./record.ts";
import type { Holding, Holdings } from "./records.ts";

const SETTLED_AT = 0;
const QUEUED_AT = 1;
const CREATED_AT = 2;
const DEADLINE_AT = 3;
const CACHE_UNTIL = 4; // until when it may answer others with the same content; 0: never
const STARTED_AT = 5; // of its batch
const INSTANTS = 6;

const BYTES = 0;
const FLAGS = 1;
const ID_HASH = 2;
const KEY_HASH = 3;
const ATTEMPT = 4;
const TIER = 5;
const NOTE_AT = 6;
const NOTE_BYTES = 7;
const ID_LENGTH = 8;
const TENANT_LENGTH = 9;
const MODEL_LENGTH = 10;
const JOINS = 11; // callers besides the first
const TRACE_LENGTH = 12;
const KEY_LENGTH = 13;
const OWN_BYTES = 14;
const OUTCOME_BYTES = 15;
const BATCH_SIZE = 16;
const NUMBERS = 17;

const HEAD_BYTES = INSTANTS * 8 + NUMBERS * 4;

const GONE = 1; // the result is forgotten; the rest may still serve the cache
const DELIVERED = 2;
const CACHED = 4;
const FAILED = 8;

/** Memory filled from its start with records of one tenant. */
export class Slab {
  readonly slot: number; // index in `#slabs`
  readonly of: Holding;
  next: Slab | undefined;
  readonly bytes: Buffer;
  readonly instants: Float64Array;
  readonly numbers: Uint32Array;
  used = 0;
  note: BatchNote | undefined; // the last one written here
  noteAt = 0; // its position
  noteBytes = 0;

  constructor(slot: number, of: Holding, memory: ArrayBuffer) {
    this.slot = slot;
    this.of = of;
    this.bytes = Buffer.from(memory);
    this.instants = new Float64Array(memory);
    this.numbers = new Uint32Array(memory);
  }
}

/** A record's texts and their lengths, ready to be written. */
interface Parcel {
  readonly record: TaskRecord;
  readonly key: string; // "" if it may not answer others
  readonly idHash: number;
  readonly keyHash: number;
  readonly own: string;
  readonly ownBytes: number;
  readonly outcome: string;
  readonly outcomeBytes: number;
}

function parcel(record: TaskRecord, key: string, idHash: number, keyHash: number): Parcel {
  const { id, tenant, model, trace = "" } = record.task;
  const own = id + tenant + model + trace + key;
  const { outcome } = record;
  const text = outcome!.ok ? outcome!.output : `${outcome!.code} ${outcome!.message}`;
  const outcomeBytes = Buffer.byteLength(text);
  // The reply needs it, too.
  if (outcome!.ok) record.outputBytes = outcomeBytes;
  return {
    record,
    key,
    idHash,
    keyHash,
    own,
    ownBytes: Buffer.byteLength(own),
    outcome: text,
    outcomeBytes,
  };
}

/** Bytes of a parcel in a slab, with or without its batch note. */
function bytesOf({ ownBytes, outcomeBytes }: Parcel, noteBytes: number): number {
  return (HEAD_BYTES + ownBytes + outcomeBytes + noteBytes + 7) & ~7;
}

/** Appends a parcel to a slab that has room. `note`: its batch; "" if already in the slab. */
function write(slab: Slab, parcel: Parcel, note: string, cacheUntil: number): void {
  const { record, own, ownBytes, outcome, outcomeBytes } = parcel;
  const { task, batch } = record;
  const start = slab.used;
  const noteBytes = note === "" ? 0 : Buffer.byteLength(note);
  const bytes = bytesOf(parcel, noteBytes);
  const ownAt = start + HEAD_BYTES;
  const outcomeAt = ownAt + ownBytes;
  slab.bytes.write(own, ownAt, ownBytes);
  slab.bytes.write(outcome, outcomeAt, outcomeBytes);
  if (note !== "") {
    slab.note = batch;
    slab.noteAt = outcomeAt + outcomeBytes;
    slab.noteBytes = noteBytes;
    slab.bytes.write(note, slab.noteAt, noteBytes);
  }
  const { instants, numbers } = slab;
  const instant = start / 8;
  instants[instant + SETTLED_AT] = record.settledAt!;
  instants[instant + QUEUED_AT] = record.queuedAt;
  instants[instant + CREATED_AT] = task.createdAt;
  instants[instant + DEADLINE_AT] = task.deadlineAt;
  instants[instant + CACHE_UNTIL] = cacheUntil;
  const number = numbersAt(start);
  numbers[number + BYTES] = bytes;
  numbers[number + FLAGS] =
    (record.cached ? CACHED : 0) | (record.delivered ? DELIVERED : 0) | (record.outcome!.ok ? 0 : FAILED);
  numbers[number + ID_HASH] = parcel.idHash;
  numbers[number + KEY_HASH] = parcel.keyHash;
  numbers[number + ATTEMPT] = record.attempt;
  numbers[number + TIER] = task.tier;
  numbers[number + NOTE_AT] = slab.noteAt;
  numbers[number + NOTE_BYTES] = batch === undefined ? 0 : slab.noteBytes;
  numbers[number + ID_LENGTH] = task.id.length;
  numbers[number + TENANT_LENGTH] = task.tenant.length;
  numbers[number + MODEL_LENGTH] = task.model.length;
  numbers[number + JOINS] = record.joins;
  numbers[number + TRACE_LENGTH] = task.trace?.length ?? 0;
  numbers[number + KEY_LENGTH] = parcel.key.length;
  numbers[number + OWN_BYTES] = ownBytes;
  numbers[number + OUTCOME_BYTES] = outcomeBytes;
  if (batch !== undefined) {
    instants[instant + STARTED_AT] = batch.startedAt;
    numbers[number + BATCH_SIZE] = batch.size;
  }
  slab.used = start + bytes;
}

/** A copy: nothing is shared with the record that was put in. */
function read(slab: Slab, start: number): TaskRecord {
  const { instants, numbers } = slab;
  const instant = start / 8;
  const number = numbersAt(start);
  const flags = numbers[number + FLAGS]!;
  const own = ownText(slab, start);
  let at = 0;
  const next = (length: number): string => own.slice(at, (at += numbers[number + length]!));
  const [id, tenant, model] = [next(ID_LENGTH), next(TENANT_LENGTH), next(MODEL_LENGTH)];
  const trace = next(TRACE_LENGTH);
  const task: Task = {
    id,
    tenant,
    tier: numbers[number + TIER]!,
    model,
    input: "",
    parameters: "",
    content: "",
    createdAt: instants[instant + CREATED_AT]!,
    deadlineAt: instants[instant + DEADLINE_AT]!,
    trace: trace === "" ? undefined : trace,
  };
  const outcomeAt = start + HEAD_BYTES + numbers[number + OWN_BYTES]!;
  const outcomeBytes = numbers[number + OUTCOME_BYTES]!;
  const text = slab.bytes.toString("utf8", outcomeAt, outcomeAt + outcomeBytes);
  const record = new TaskRecord(task, {}, 0);
  record.state = (flags & FAILED) === 0 ? "done" : "failed";
  record.outcome = (flags & FAILED) === 0 ? { ok: true, output: text } : failure(text);
  if (record.outcome.ok) record.outputBytes = outcomeBytes;
  record.attempt = numbers[number + ATTEMPT]!;
  record.queuedAt = instants[instant + QUEUED_AT]!;
  record.settledAt = instants[instant + SETTLED_AT]!;
  record.cached = (flags & CACHED) !== 0;
  record.joins = numbers[number + JOINS]!;
  record.delivered = (flags & DELIVERED) !== 0;
  const noteAt = numbers[number + NOTE_AT]!;
  const noteBytes = numbers[number + NOTE_BYTES]!;
  if (noteBytes > 0) {
    const [id, worker, reason, why] = slab.bytes.toString("utf8", noteAt, noteAt + noteBytes).split("\0");
    record.batch = {
      id: id!,
      size: numbers[number + BATCH_SIZE]!,
      reason: reason as BatchNote["reason"],
      worker: worker!,
      startedAt: instants[instant + STARTED_AT]!,
      why: why!,
    };
  }
  return record;
}

/** Compares byte by byte, so that no string is made. */
function hasId({ bytes, numbers }: Slab, start: number, id: string): boolean {
  if (numbers[numbersAt(start) + ID_LENGTH] !== id.length) return false;
  for (let at = 0, from = start + HEAD_BYTES; at < id.length; at++) {
    if (bytes[from + at] !== id.charCodeAt(at)) return false;
  }
  return true;
}

function hasKey(slab: Slab, start: number, key: string): boolean {
  const length = slab.numbers[numbersAt(start) + KEY_LENGTH]!;
  return length === key.length && length > 0 && ownText(slab, start).endsWith(key);
}

function idAt(slab: Slab, start: number): string {
  return ownText(slab, start).slice(0, slab.numbers[numbersAt(start) + ID_LENGTH]);
}

function numbersAt(start: number): number {
  return start / 4 + INSTANTS * 2;
}

function ownText({ bytes, numbers }: Slab, start: number): string {
  const from = start + HEAD_BYTES;
  return bytes.toString("utf8", from, from + numbers[numbersAt(start) + OWN_BYTES]!);
}

function failure(text: string): Outcome {
  const space = text.indexOf(" ");
  const code = text.slice(0, space) as (Outcome & { ok: false })["code"];
  return { ok: false, code, message: text.slice(space + 1) };
}

const SMALLEST = 1024;
const NOWHERE = -1;

/**
 * Positions by hash of the key: numbers only, so that the garbage collector has nothing to traverse. Open addressing
 * with linear probing, as in `core/table.ts`; keys are compared at the positions themselves.
 */
class PackedIndex {
  readonly #isAt: (place: number, key: string) => boolean;
  #hashes = new Int32Array(SMALLEST);
  #places = new Float64Array(SMALLEST).fill(NOWHERE);
  #mask = SMALLEST - 1;
  size = 0;

  /** `isAt`: whether the record at a place has that key. */
  constructor(isAt: (place: number, key: string) => boolean) {
    this.#isAt = isAt;
  }

  /** -1 if absent. */
  find(hash: number, key: string): number {
    const mask = this.#mask;
    for (let at = hash & mask; this.#places[at] !== NOWHERE; at = (at + 1) & mask) {
      if (this.#hashes[at] === hash && this.#isAt(this.#places[at]!, key)) return this.#places[at]!;
    }
    return NOWHERE;
  }

  /** An entry with the same key must be removed first. */
  add(hash: number, place: number): void {
    this.#put(hash, place);
    this.size++;
    if (this.size * 2 > this.#mask) this.#grow();
  }

  /** As `add`, in place of an entry with the same key; returns where that was, or -1. */
  replace(hash: number, key: string, place: number): number {
    const mask = this.#mask;
    let at = hash & mask;
    for (; this.#places[at] !== NOWHERE; at = (at + 1) & mask) {
      const old = this.#places[at]!;
      if (this.#hashes[at] !== hash || !this.#isAt(old, key)) continue;
      this.#places[at] = place;
      return old;
    }
    this.#hashes[at] = hash;
    this.#places[at] = place;
    this.size++;
    if (this.size * 2 > mask) this.#grow();
    return NOWHERE;
  }

  remove(hash: number, place: number): boolean {
    const mask = this.#mask;
    const hashes = this.#hashes;
    const places = this.#places;
    let hole = hash & mask;
    while (places[hole] !== place) {
      if (places[hole] === NOWHERE) return false;
      hole = (hole + 1) & mask;
    }
    for (let at = (hole + 1) & mask; places[at] !== NOWHERE; at = (at + 1) & mask) {
      // It may move to the hole unless that is before its home position.
      if (((at - hashes[at]!) & mask) < ((at - hole) & mask)) continue;
      hashes[hole] = hashes[at]!;
      places[hole] = places[at]!;
      hole = at;
    }
    places[hole] = NOWHERE;
    this.size--;
    return true;
  }

  #put(hash: number, place: number): void {
    let at = hash & this.#mask;
    while (this.#places[at] !== NOWHERE) at = (at + 1) & this.#mask;
    this.#hashes[at] = hash;
    this.#places[at] = place;
  }

  #grow(): void {
    const hashes = this.#hashes;
    const places = this.#places;
    const size = places.length * 2;
    this.#hashes = new Int32Array(size);
    this.#places = new Float64Array(size).fill(NOWHERE);
    this.#mask = size - 1;
    for (let at = 0; at < places.length; at++) {
      if (places[at] !== NOWHERE) this.#put(hashes[at]!, places[at]!);
    }
  }
}

/** Largest slab. A tenant's first slab is as large as its first record; each further one doubles. */
const SLAB_BYTES = 1 << 20;
const PLACES = SLAB_BYTES / 8; // records are 8-byte aligned: place = slab slot · PLACES + offset / 8

export interface PackedOwner {
  /** Its result is no longer kept. Undefined if no listener needs it: ids are decoded for it. */
  readonly forgotten?: ((id: string) => void) | undefined;
  /** Evicted for lack of room before it was fetched. */
  rescue(record: TaskRecord): void;
}

export class Packed {
  readonly #ttlMs: () => number;
  readonly #seed: number; // for the hashes of ids and cache keys
  readonly #holdings: Holdings;
  readonly #owner: PackedOwner;
  readonly #slabs: (Slab | undefined)[] = []; // by slot; slots of emptied slabs are reused
  readonly #freeSlots: number[] = [];
  readonly #byId = new PackedIndex((place, id) => hasId(this.#slab(place), startOf(place), id));
  readonly #byKey = new PackedIndex((place, key) => hasKey(this.#slab(place), startOf(place), key));
  #spare: ArrayBuffer | undefined; // an emptied slab, for reuse
  #batch: BatchNote | undefined; // the last one written
  #batchText = ""; // words of `#batch`, encoded once: each tenant that shared it stores them in its slab

  constructor(holdings: Holdings, ttlMs: () => number, seed: number, owner: PackedOwner) {
    this.#holdings = holdings;
    this.#ttlMs = ttlMs;
    this.#seed = seed;
    this.#owner = owner;
  }

  /** Kept results; cache-only remains do not count. */
  get size(): number {
    return this.#byId.size;
  }

  /** `elsewhere`: its result is kept elsewhere, and here only for the cache. */
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
      const older = this.#byKey.replace(keyHash, key, place);
      if (older >= 0) this.#slab(older).instants[startOf(older) / 8 + CACHE_UNTIL] = 0;
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
      const { id, worker, reason, why } = batch;
      this.#batch = batch;
      // No name or sentence contains a zero.
      this.#batchText = [id, worker, reason, why].join("\0");
    }
    return this.#batchText;
  }

  get(id: string): TaskRecord | undefined {
    const place = this.#byId.find(this.#hashOfId(id), id);
    return place < 0 ? undefined : read(this.#slab(place), startOf(place));
  }

  /** A success with that content that may still answer others. */
  cached(key: string, now: number): TaskRecord | undefined {
    const place = this.#byKey.find(hashOf(key, this.#seed), key);
    if (place < 0) return undefined;
    const slab = this.#slab(place);
    const start = startOf(place);
    return slab.instants[start / 8 + CACHE_UNTIL]! > now ? read(slab, start) : undefined;
  }

  /** The result was received. `forget`: and will not be asked for again. False: it is not here. */
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

  /** It may not be polled any more. False: it is not here. */
  forget(id: string): boolean {
    const idHash = this.#hashOfId(id);
    const place = this.#byId.find(idHash, id);
    if (place < 0) return false;
    this.#byId.remove(idHash, place);
    this.#give(this.#slab(place), startOf(place));
    return true;
  }

  /** Drops the tenant's expired records; returns when the next one expires. */
  sweep(holding: Holding, now: number): number {
    for (;;) {
      const slab = holding.oldest;
      if (slab === undefined) return Infinity;
      const until = this.#until(slab, holding.start);
      if (until > now) return until;
      this.#dropOldest(slab);
    }
  }

  /** Drops the tenant's oldest, or rescues it if unfetched. False: it has none here. */
  dropOldest(holding: Holding): boolean {
    const slab = holding.oldest;
    if (slab === undefined) return false;
    const rescued = isAwaited(slab, holding.start) ? read(slab, holding.start) : undefined;
    this.#dropOldest(slab, rescued !== undefined);
    if (rescued !== undefined) this.#owner.rescue(rescued);
    return true;
  }

  /** When the tenant's oldest unfetched result was settled; Infinity if none. */
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

  /** Removes it from both indexes and frees its bytes. */
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

  /** The result at `start` is no longer owned by a caller. */
  #give(slab: Slab, start: number): void {
    const number = numbersAt(start);
    this.#delivered(slab, number);
    slab.numbers[number + FLAGS]! |= GONE;
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
