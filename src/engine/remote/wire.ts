/**
 * Messages between a gateway process and the core process. A message is its length (uint32), its kind (one byte) and
 * its fields, little-endian, one after another.
 *
 *   text    uint32: bytes × 2, + 1 if two bytes per character; then the characters, Latin-1 or UTF-16
 *           SAME: the text that both sides know already (the last one of its slot, or an earlier field)
 *   number  uint32, or a double for times and whatever may be fractional or missing (NaN)
 *
 * Latin-1 and UTF-16 are V8's own representations: any text survives, lone surrogates included, at the cost of a copy.
 * Tenant, model and parameters repeat from task to task, and a batch's note from outcome to outcome: a repeated one is
 * four bytes, and no new string for the receiver. What a message refers to is per connection and direction.
 */
import { type ErrorCode, errors, Refusal } from "../../core/errors.ts";
import type { CapacityRefusal } from "../../core/shed.ts";
import {
  type BatchNote,
  DISPATCH_REASONS,
  type Outcome,
  type Task,
  type TaskState,
} from "../../core/task.ts";
import type { CancelReply, Placed, RecordView, Sharing } from "../engine.ts";

export const LENGTH_BYTES = 4;
const HEAD_BYTES = LENGTH_BYTES + 1;
/** The longest text has 2^29 characters, so that any outcome fits, and any put that a config allows. */
export const MAX_MESSAGE_BYTES = 2 ** 31 - 1;
const CHUNK_BYTES = 256 << 10;
const SAME = 0xffff_ffff;
/** On a one-byte string this is answered without a look at its characters: 17 ns for 2 KB. */
const TWO_BYTES = /[^\u0000-\u00ff]/;

/** Kinds of messages. From a gateway: */
export const HELLO = 1; // version
export const PUT = 2; // number, flags, task, sharing
export const TOGETHER = 3; // the puts until APART are put together
export const APART = 4;
export const CANCEL = 5; // number, id, tenant, abandoned
export const OUTCOME = 6; // number, id, whether for one tenant, tenant
export const FOLLOW = 7; // number, id, tenant
export const DELIVERED = 8; // id
export const SPEND = 9; // number, key, units per minute
export const TELL = 10; // text
export const AWAIT = 11; // id; answered with SETTLED or LOST, or not at all while the task has not ended
/** From the core: */
export const WELCOME = 12; // version
export const STATUS = 13; // text
export const PLACED = 14; // number, reply
export const CANCELLED = 15; // number, reply
export const FOUND = 16; // number, whether there is one, record
export const SPENT = 17; // number, allowed, left, reset
export const REFUSED = 18; // number, refusal: the verb failed
export const SETTLED = 19; // record
export const LOST = 20; // id

/** Slots of texts that repeat. */
const TENANT = 0;
const MODEL = 1;
const PARAMETERS = 2;
const WORKER = 3;
const SLOTS = 4;

const NO_BATCH = 0;
const SAME_BATCH = 1;
const NEW_BATCH = 2;
const SPARE_CHUNKS = 2;

export class WireError extends Error {}

class Chunk {
  readonly bytes: Buffer;
  readonly view: DataView;

  constructor(size: number) {
    this.bytes = Buffer.allocUnsafeSlow(size);
    this.view = viewOf(this.bytes);
  }
}

function viewOf({ buffer, byteOffset, length }: Buffer): DataView {
  return new DataView(buffer, byteOffset, length);
}

/** Writes messages into chunks of memory, which are used again once they have left. */
export class WireWriter {
  /** Bytes of messages that were not taken yet. */
  size = 0;
  #chunk = new Chunk(CHUNK_BYTES);
  #at = 0;
  #start = 0; // of the message that is being written
  #full: Buffer[] = []; // before this chunk
  readonly #taken: Chunk[] = []; // in the order in which they will have left
  readonly #spare: Chunk[] = [];
  readonly #last: string[] = new Array<string>(SLOTS).fill("");
  #batch: BatchNote | undefined;

  begin(kind: number): this {
    this.#start = this.#at;
    this.#room(HEAD_BYTES);
    this.#chunk.bytes[this.#at + LENGTH_BYTES] = kind;
    this.#at += HEAD_BYTES;
    return this;
  }

  end(): void {
    const bytes = this.#at - this.#start;
    this.#chunk.view.setUint32(this.#start, bytes - LENGTH_BYTES, true);
    this.size += bytes;
  }

  byte(value: number): this {
    this.#room(1);
    this.#chunk.bytes[this.#at++] = value;
    return this;
  }

  uint(value: number): this {
    this.#room(4);
    this.#chunk.view.setUint32(this.#at, value, true);
    this.#at += 4;
    return this;
  }

  double(value: number): this {
    this.#room(8);
    this.#chunk.view.setFloat64(this.#at, value, true);
    this.#at += 8;
    return this;
  }

  text(text: string): this {
    const two = TWO_BYTES.test(text);
    const bytes = two ? 2 * text.length : text.length;
    this.#room(4 + bytes);
    this.uint(two ? 2 * bytes + 1 : 2 * bytes);
    this.#at += this.#chunk.bytes.write(text, this.#at, bytes, two ? "utf16le" : "latin1");
    return this;
  }

  /** `known`: a text that the receiver has at this point. */
  textOr(text: string, known: string): this {
    return text === known ? this.uint(SAME) : this.text(text);
  }

  repeated(slot: number, text: string): this {
    const last = this.#last[slot]!;
    this.#last[slot] = text;
    return this.textOr(text, last);
  }

  batch(batch: BatchNote | undefined): this {
    if (batch === undefined) return this.byte(NO_BATCH);
    if (batch === this.#batch) return this.byte(SAME_BATCH);
    this.#batch = batch;
    this.byte(NEW_BATCH).text(batch.id).uint(batch.size).byte(DISPATCH_REASONS.indexOf(batch.reason));
    return this.repeated(WORKER, batch.worker).double(batch.startedAt).text(batch.why);
  }

  /** Everything written since; `left` must be called for each, in order, when it has been sent. */
  take(): Buffer[] {
    const full = this.#full;
    full.push(this.#chunk.bytes.subarray(0, this.#at));
    this.#taken.push(this.#chunk);
    this.#chunk = this.#spare.pop() ?? new Chunk(CHUNK_BYTES);
    this.#full = [];
    this.#at = 0;
    this.size = 0;
    return full;
  }

  left(): void {
    const chunk = this.#taken.shift()!;
    if (chunk.bytes.length === CHUNK_BYTES && this.#spare.length < SPARE_CHUNKS) this.#spare.push(chunk);
  }

  #room(bytes: number): void {
    if (this.#at + bytes > this.#chunk.bytes.length) this.#grow(bytes);
  }

  /** Goes on in a new chunk, with what there is of the message. */
  #grow(bytes: number): void {
    const { bytes: old } = this.#chunk;
    const begun = old.subarray(this.#start, this.#at);
    if (this.#start > 0) {
      this.#full.push(old.subarray(0, this.#start));
      this.#taken.push(this.#chunk);
    }
    this.#chunk = new Chunk(Math.max(CHUNK_BYTES, 2 * begun.length, begun.length + bytes));
    this.#chunk.bytes.set(begun);
    this.#at = begun.length;
    this.#start = 0;
  }
}

/** Reads the fields of one message. Throws a WireError where they do not fit, and never reads beyond its end. */
export class WireReader {
  kind = 0;
  #bytes: Buffer = Buffer.alloc(0);
  #view = viewOf(this.#bytes);
  #at = 0;
  #end = 0;
  readonly #last: string[] = new Array<string>(SLOTS).fill("");
  #batch: BatchNote | undefined;

  over(bytes: Buffer): void {
    this.#bytes = bytes;
    this.#view = viewOf(bytes);
  }

  /** A message without its length. */
  message(from: number, to: number): void {
    this.#at = from;
    this.#end = to;
    this.kind = this.byte();
  }

  done(): void {
    if (this.#at !== this.#end) throw new WireError(`a message of kind ${this.kind} is too long`);
  }

  byte(): number {
    return this.#bytes[this.#take(1)]!;
  }

  uint(): number {
    return this.#view.getUint32(this.#take(4), true);
  }

  double(): number {
    return this.#view.getFloat64(this.#take(8), true);
  }

  text(): string {
    return this.#textOf(this.uint());
  }

  textOr(known: string): string {
    const head = this.uint();
    return head === SAME ? known : this.#textOf(head);
  }

  repeated(slot: number): string {
    return (this.#last[slot] = this.textOr(this.#last[slot]!));
  }

  /** One of a list of words. */
  one<Word>(words: readonly Word[]): Word {
    const word = words[this.byte()];
    if (word === undefined) throw new WireError(`a message of kind ${this.kind} holds an unknown word`);
    return word;
  }

  batch(): BatchNote | undefined {
    const mark = this.byte();
    if (mark === NO_BATCH) return undefined;
    if (mark === SAME_BATCH && this.#batch !== undefined) return this.#batch;
    if (mark !== NEW_BATCH) throw new WireError("a message names a batch that was not sent");
    const [id, size, reason] = [this.text(), this.uint(), this.one(DISPATCH_REASONS)];
    const [worker, startedAt, why] = [this.repeated(WORKER), this.double(), this.text()];
    return (this.#batch = { id, size, reason, worker, startedAt, why });
  }

  #textOf(head: number): string {
    const bytes = head >>> 1;
    const from = this.#take(bytes);
    return this.#bytes.toString((head & 1) === 1 ? "utf16le" : "latin1", from, from + bytes);
  }

  #take(bytes: number): number {
    const from = this.#at;
    if (bytes > this.#end - from) throw new WireError(`a message of kind ${this.kind} ends early`);
    this.#at = from + bytes;
    return from;
  }
}

const OF_MANY = 1;
const ONLY = 2;
const JOINS = 4;
const CACHES = 8;
const CACHE_TTL = 16;
const KEYED = 32;
const TRACED = 64;

export function writePut(out: WireWriter, task: Task, sharing: Sharing, ofMany: boolean): void {
  const { content, trace } = task;
  const { joinKey, cacheKey, cacheTtlMs, idempotency, only } = sharing;
  out.byte(
    (ofMany ? OF_MANY : 0) |
      (only === true ? ONLY : 0) |
      (joinKey === undefined ? 0 : JOINS) |
      (cacheKey === undefined ? 0 : CACHES) |
      (cacheTtlMs === undefined ? 0 : CACHE_TTL) |
      (idempotency === undefined ? 0 : KEYED) |
      (trace === undefined ? 0 : TRACED),
  );
  out.text(task.id).repeated(TENANT, task.tenant).uint(task.tier).repeated(MODEL, task.model);
  out.text(task.input).repeated(PARAMETERS, task.parameters).text(content);
  out.double(task.createdAt).double(task.deadlineAt);
  if (trace !== undefined) out.text(trace);
  if (joinKey !== undefined) out.textOr(joinKey, content);
  if (cacheKey !== undefined) out.textOr(cacheKey, content);
  if (cacheTtlMs !== undefined) out.double(cacheTtlMs);
  if (idempotency !== undefined) out.text(idempotency.key).textOr(idempotency.fingerprint, content);
}

/** Upper bound of the bytes of a put. */
export function putBytes({ input, parameters, content }: Task): number {
  return 2 * (input.length + parameters.length + 4 * content.length) + 65_536;
}

export interface PutMessage {
  readonly task: Task;
  readonly sharing: Sharing;
  readonly ofMany: boolean;
}

type Mutable<Type> = { -readonly [Key in keyof Type]: Type[Key] };

const NOTHING_SHARED: Sharing = {};

export function readPut(from: WireReader): PutMessage {
  const flags = from.byte();
  const id = from.text();
  const tenant = from.repeated(TENANT);
  const tier = from.uint();
  const model = from.repeated(MODEL);
  const input = from.text();
  const parameters = from.repeated(PARAMETERS);
  const content = from.text();
  const createdAt = from.double();
  const deadlineAt = from.double();
  const task: Mutable<Task> = {
    id,
    tenant,
    tier,
    model,
    input,
    parameters,
    content,
    createdAt,
    deadlineAt,
  };
  if ((flags & TRACED) !== 0) task.trace = from.text();
  const ofMany = (flags & OF_MANY) !== 0;
  if ((flags & (ONLY | JOINS | CACHES | CACHE_TTL | KEYED)) === 0) {
    return { task, sharing: NOTHING_SHARED, ofMany };
  }
  const sharing: Mutable<Sharing> = {};
  if ((flags & JOINS) !== 0) sharing.joinKey = from.textOr(content);
  if ((flags & CACHES) !== 0) sharing.cacheKey = from.textOr(content);
  if ((flags & CACHE_TTL) !== 0) sharing.cacheTtlMs = from.double();
  if ((flags & KEYED) !== 0) sharing.idempotency = { key: from.text(), fingerprint: from.textOr(content) };
  if ((flags & ONLY) !== 0) sharing.only = true;
  return { task, sharing, ofMany };
}

const STATES: readonly TaskState[] = ["queued", "running", "done", "failed"];
const CODES = Object.keys(errors) as ErrorCode[];

const ENDED = 1;
const SUCCESS = 2;
const CACHED = 4;
const RECORD_TRACED = 8;
const SETTLED_AT = 16;

/** Input, parameters and content only while it has not ended: a finished task's are "". */
export function writeRecordView(out: WireWriter, record: RecordView): void {
  const { task, outcome, settledAt } = record;
  const { trace } = task;
  out.byte(STATES.indexOf(record.state));
  out.byte(
    (outcome === undefined ? 0 : ENDED) |
      (outcome?.ok === true ? SUCCESS : 0) |
      (record.cached === true ? CACHED : 0) |
      (trace === undefined ? 0 : RECORD_TRACED) |
      (settledAt === undefined ? 0 : SETTLED_AT),
  );
  out.text(task.id).repeated(TENANT, task.tenant).uint(task.tier).repeated(MODEL, task.model);
  out.double(task.createdAt).double(task.deadlineAt);
  if (trace !== undefined) out.text(trace);
  out.uint(record.attempt).double(record.queuedAt).batch(record.batch);
  if (settledAt !== undefined) out.double(settledAt);
  if (outcome === undefined) out.text(task.input).repeated(PARAMETERS, task.parameters).text(task.content);
  else if (outcome.ok) out.double(record.outputBytes ?? NaN).text(outcome.output);
  else out.byte(CODES.indexOf(outcome.code)).text(outcome.message);
}

export function readRecordView(from: WireReader): RecordView {
  const state = from.one(STATES);
  const flags = from.byte();
  const task: Mutable<Task> = {
    id: from.text(),
    tenant: from.repeated(TENANT),
    tier: from.uint(),
    model: from.repeated(MODEL),
    input: "",
    parameters: "",
    content: "",
    createdAt: from.double(),
    deadlineAt: from.double(),
  };
  if ((flags & RECORD_TRACED) !== 0) task.trace = from.text();
  const attempt = from.uint();
  const queuedAt = from.double();
  const batch = from.batch();
  const cached = (flags & CACHED) !== 0;
  const record: Mutable<RecordView> = { task, state, attempt, queuedAt, cached };
  if (batch !== undefined) record.batch = batch;
  if ((flags & SETTLED_AT) !== 0) record.settledAt = from.double();
  if ((flags & ENDED) === 0) {
    task.input = from.text();
    task.parameters = from.repeated(PARAMETERS);
    task.content = from.text();
    return record;
  }
  const outcome: Outcome =
    (flags & SUCCESS) !== 0
      ? readSuccess(from, record)
      : { ok: false, code: from.one(CODES), message: from.text() };
  record.outcome = outcome;
  return record;
}

function readSuccess(from: WireReader, record: Mutable<RecordView>): Outcome {
  const outputBytes = from.double();
  if (!Number.isNaN(outputBytes)) record.outputBytes = outputBytes;
  return { ok: true, output: from.text() };
}

const PLACES: readonly Placed["kind"][] = ["queued", "joined", "done", "conflict", "full", "refused"];
const REASONS: readonly CapacityRefusal["reason"][] = ["no_worker", "capacity", "deadline"];
const CAPACITY_CODES: readonly CapacityRefusal["code"][] = ["RATE_LIMITED", "SERVICE_OVERLOADED"];
const YES_OR_NO: readonly (boolean | undefined)[] = [undefined, false, true];

/** `id`: of the task that was put. */
export function writePlaced(out: WireWriter, placed: Placed, id: string): void {
  out.byte(PLACES.indexOf(placed.kind));
  if (placed.kind === "queued" || placed.kind === "joined" || placed.kind === "conflict") {
    out.textOr(placed.id, id);
  } else if (placed.kind === "done") {
    out.byte((placed.cached ? 1 : 0) | (placed.unstored === true ? 2 : 0));
    writeRecordView(out, placed.record);
  } else if (placed.kind === "full") {
    out.byte(YES_OR_NO.indexOf(placed.own)).byte(YES_OR_NO.indexOf(placed.never));
    out.double(placed.retryInMs ?? NaN).text(placed.message);
  } else {
    out.byte(REASONS.indexOf(placed.reason)).byte(CAPACITY_CODES.indexOf(placed.code));
    out.double(placed.waitMs).text(placed.message);
  }
}

export function readPlaced(from: WireReader, id: string): Placed {
  const kind = from.one(PLACES);
  if (kind === "queued" || kind === "joined" || kind === "conflict") return { kind, id: from.textOr(id) };
  if (kind === "done") {
    const flags = from.byte();
    const record = readRecordView(from);
    const done = { kind, id: record.task.id, record, cached: (flags & 1) !== 0 };
    return (flags & 2) === 0 ? done : { ...done, unstored: true };
  }
  if (kind === "full") {
    const own = YES_OR_NO[from.byte()];
    const never = YES_OR_NO[from.byte()];
    const retryInMs = from.double();
    return {
      kind,
      message: from.text(),
      ...(own !== undefined && { own }),
      ...(never !== undefined && { never }),
      ...(!Number.isNaN(retryInMs) && { retryInMs }),
    };
  }
  const reason = from.one(REASONS);
  const code = from.one(CAPACITY_CODES);
  return { kind, reason, code, waitMs: from.double(), message: from.text() };
}

export const CANCEL_REPLIES: readonly CancelReply[] = ["cancelled", "forgotten", "kept", "unknown"];

/** Anything but a Refusal is a bug in the core, whose text is not for clients. */
export function writeRefusal(out: WireWriter, error: unknown): void {
  const refusal = error instanceof Refusal ? error : new Refusal("INTERNAL", "the core process failed");
  out.byte(CODES.indexOf(refusal.code)).uint(refusal.status);
  out.double(refusal.retryAfterMs ?? NaN).text(refusal.message);
}

export function readRefusal(from: WireReader): Refusal {
  const code = from.one(CODES);
  const status = from.uint();
  const retryAfterMs = from.double();
  return new Refusal(code, from.text(), { status, ...(!Number.isNaN(retryAfterMs) && { retryAfterMs }) });
}
