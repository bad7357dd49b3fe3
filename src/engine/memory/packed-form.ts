/**
 * A finished record as bytes, and back.
 *
 *   5 instants of 8 bytes, 16 numbers of 4 bytes, then texts: its own (id, tenant, model, trace, cache key, in
 *   one piece), its outcome, and what is known of its batch, if no record before it in the same slab has noted
 *   that already. The whole is a multiple of 8 bytes long. Its input and its parameters are not kept.
 *
 * Texts are UTF-8; those of ASCII alone, which most are, are marked, because they are read and written faster.
 */
import type { BatchNote, Outcome, Task } from "../../core/task.ts";
import type { Holding } from "./holdings.ts";
import { TaskRecord } from "./record.ts";

export const SETTLED_AT = 0;
const QUEUED_AT = 1;
const CREATED_AT = 2;
const DEADLINE_AT = 3;
/** Until when it may answer for others with the same content; 0: it may not. */
export const CACHE_UNTIL = 4;
const INSTANTS = 5;

export const BYTES = 0;
export const FLAGS = 1;
export const ID_HASH = 2;
export const KEY_HASH = 3;
const ATTEMPT = 4;
const TIER = 5;
const NOTE_AT = 6;
const NOTE_BYTES = 7;
const ID_LENGTH = 8;
const TENANT_LENGTH = 9;
const MODEL_LENGTH = 10;
/** How many callers share it beside its first one. */
export const JOINS = 11;
const TRACE_LENGTH = 12;
const KEY_LENGTH = 13;
const OWN_BYTES = 14;
const OUTCOME_BYTES = 15;
const NUMBERS = 16;

const HEAD_BYTES = INSTANTS * 8 + NUMBERS * 4;

/** The result is forgotten; what is left of it answers for others, or nobody. */
export const GONE = 1;
export const DELIVERED = 2;
const CACHED = 4;
const FAILED = 8;
const OWN_ASCII = 16;
const OUTCOME_ASCII = 32;

/** A piece of memory that is filled from its start, with records of one tenant. */
export class Slab {
  /** Where it is found by its number. */
  readonly slot: number;
  readonly of: Holding;
  /** The tenant's next one. */
  next: Slab | undefined;
  readonly bytes: Buffer;
  readonly instants: Float64Array;
  readonly numbers: Uint32Array;
  used = 0;
  /** The batch that was noted here last, and where. */
  note: BatchNote | undefined;
  noteAt = 0;
  noteBytes = 0;

  constructor(slot: number, of: Holding, memory: ArrayBuffer) {
    this.slot = slot;
    this.of = of;
    this.bytes = Buffer.from(memory);
    this.instants = new Float64Array(memory);
    this.numbers = new Uint32Array(memory);
  }
}

/** A record on its way into a slab: its texts, and how long they are. */
export interface Parcel {
  readonly record: TaskRecord;
  /** "" where it may not answer for others. */
  readonly key: string;
  readonly idHash: number;
  readonly keyHash: number;
  readonly own: string;
  readonly ownBytes: number;
  readonly outcome: string;
  readonly outcomeBytes: number;
}

export function parcel(record: TaskRecord, key: string, idHash: number, keyHash: number): Parcel {
  const { id, tenant, model, trace = "" } = record.task;
  const own = id + tenant + model + trace + key;
  const { outcome } = record;
  const text = outcome!.ok ? outcome!.output : `${outcome!.code} ${outcome!.message}`;
  const outcomeBytes = Buffer.byteLength(text);
  // Whoever answers with it needs to know, too.
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

/** How many bytes a parcel takes in a slab where its batch is (or is not) noted already. */
export function bytesOf({ ownBytes, outcomeBytes }: Parcel, noteBytes: number): number {
  return (HEAD_BYTES + ownBytes + outcomeBytes + noteBytes + 7) & ~7;
}

/** Writes a parcel at the end of a slab that has room for it. `note`: of its batch; "" where it needs none. */
export function write(slab: Slab, parcel: Parcel, note: string, cacheUntil: number): void {
  const { record, own, ownBytes, outcome, outcomeBytes } = parcel;
  const { task, batch } = record;
  const start = slab.used;
  const noteBytes = note === "" ? 0 : Buffer.byteLength(note);
  const bytes = bytesOf(parcel, noteBytes);
  const ownAt = start + HEAD_BYTES;
  const outcomeAt = ownAt + ownBytes;
  writeText(slab.bytes, own, ownAt, ownBytes);
  writeText(slab.bytes, outcome, outcomeAt, outcomeBytes);
  if (note !== "") {
    slab.note = batch;
    slab.noteAt = outcomeAt + outcomeBytes;
    slab.noteBytes = noteBytes;
    writeText(slab.bytes, note, slab.noteAt, noteBytes);
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
    (record.cached ? CACHED : 0) |
    (record.delivered ? DELIVERED : 0) |
    (record.outcome!.ok ? 0 : FAILED) |
    (ownBytes === own.length ? OWN_ASCII : 0) |
    (outcomeBytes === outcome.length ? OUTCOME_ASCII : 0);
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
  slab.used = start + bytes;
}

/** The record that was written at `start`. Nothing of it is shared with the one that was put in. */
export function read(slab: Slab, start: number): TaskRecord {
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
  const text = readText(slab.bytes, outcomeAt, outcomeBytes, (flags & OUTCOME_ASCII) !== 0);
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
    record.batch = JSON.parse(readText(slab.bytes, noteAt, noteBytes, false)) as BatchNote;
  }
  return record;
}

/** Whether the record at `start` has this id. */
export function hasId(slab: Slab, start: number, id: string): boolean {
  const { bytes, numbers } = slab;
  const number = numbersAt(start);
  if (numbers[number + ID_LENGTH] !== id.length) return false;
  if ((numbers[number + FLAGS]! & OWN_ASCII) === 0) return idAt(slab, start) === id;
  // Byte by byte: no text need be made of them to see that they are the same.
  for (let at = 0, from = start + HEAD_BYTES; at < id.length; at++) {
    if (bytes[from + at] !== id.charCodeAt(at)) return false;
  }
  return true;
}

/** Whether it answers for others under this key. */
export function hasKey(slab: Slab, start: number, key: string): boolean {
  const length = slab.numbers[numbersAt(start) + KEY_LENGTH]!;
  return length === key.length && length > 0 && ownText(slab, start).endsWith(key);
}

export function idAt(slab: Slab, start: number): string {
  return ownText(slab, start).slice(0, slab.numbers[numbersAt(start) + ID_LENGTH]);
}

export function numbersAt(start: number): number {
  return start / 4 + INSTANTS * 2;
}

function ownText({ bytes, numbers }: Slab, start: number): string {
  const number = numbersAt(start);
  const ascii = (numbers[number + FLAGS]! & OWN_ASCII) !== 0;
  return readText(bytes, start + HEAD_BYTES, numbers[number + OWN_BYTES]!, ascii);
}

function failure(text: string): Outcome {
  const space = text.indexOf(" ");
  const code = text.slice(0, space) as (Outcome & { ok: false })["code"];
  return { ok: false, code, message: text.slice(space + 1) };
}

function writeText(bytes: Buffer, text: string, at: number, length: number): void {
  bytes.write(text, at, length, length === text.length ? "latin1" : "utf8");
}

function readText(bytes: Buffer, at: number, length: number, ascii: boolean): string {
  return bytes.toString(ascii ? "latin1" : "utf8", at, at + length);
}
