/**
 * The binary frames that travel through Redis.
 *
 * A frame is a row of texts, each after its length in bytes (four bytes, big-endian); a script can cut and
 * join frames without knowing what they say, and nobody parses a body on the way. Instants are written on
 * the shared clock (the server's), which `RedisClock` translates from and to this process's own.
 */
import type { ErrorCode } from "../core/errors.ts";
import type { BatchNote, DispatchReason, Outcome, Task, TaskState } from "../core/task.ts";
import type { DeadLetter, RecordView, Sharing } from "./engine.ts";

const LENGTH_BYTES = 4;
const ZERO = 48;

/** Texts and frames within it; one allocation, each byte written once. */
export function frame(row: readonly (string | Buffer)[]): Buffer {
  const lengths = row.map(lengthOf);
  const bytes = Buffer.allocUnsafe(sizeOf(lengths));
  writeFrame(bytes, 0, row, lengths);
  return bytes;
}

function lengthOf(part: string | Buffer): number {
  return typeof part === "string" ? Buffer.byteLength(part) : part.length;
}

/** Of the frame whose parts are so long. */
function sizeOf(lengths: readonly number[]): number {
  let size = LENGTH_BYTES * lengths.length;
  for (const length of lengths) size += length;
  return size;
}

/** Returns where it ends. */
function writeFrame(
  bytes: Buffer,
  from: number,
  row: readonly (string | Buffer)[],
  lengths: readonly number[],
): number {
  let at = from;
  for (let which = 0; which < row.length; which++) {
    const part = row[which]!;
    const length = lengths[which]!;
    at = bytes.writeUInt32BE(length, at);
    if (typeof part === "string") writeText(bytes, at, part, length);
    else bytes.set(part, at);
    at += length;
  }
  return at;
}

function writeText(bytes: Buffer, at: number, text: string, length: number): void {
  // One byte a character: plain ASCII, which needs no encoder.
  if (length === text.length) bytes.write(text, at, length, "latin1");
  else bytes.write(text, at, length, "utf8");
}

/** The whole number that is written there. */
function digits(bytes: Buffer, from: number, to: number): number {
  let number = 0;
  for (let at = from; at < to; at++) number = number * 10 + (bytes[at]! - ZERO);
  return number;
}

/** Cuts a frame into its parts, without copying them. */
export function parts(bytes: Buffer): Buffer[] {
  const found: Buffer[] = [];
  for (let at = 0; at < bytes.length;) {
    const end = at + LENGTH_BYTES + bytes.readUInt32BE(at);
    found.push(bytes.subarray(at + LENGTH_BYTES, end));
    at = end;
  }
  return found;
}

export function texts(bytes: Buffer): string[] {
  const found: string[] = [];
  for (let at = 0; at < bytes.length;) {
    const start = at + LENGTH_BYTES;
    at = start + bytes.readUInt32BE(at);
    found.push(bytes.toString("utf8", start, at));
  }
  return found;
}

/** How far the shared clock is ahead of this process's. */
export class RedisClock {
  offsetMs = 0;

  /** An instant of this process as Redis is told: whole microseconds, which scripts print fastest. */
  shared(at: number): string {
    return String(this.instant(at));
  }

  instant(at: number): number {
    return Math.round(1000 * (at + this.offsetMs));
  }

  own(at: Buffer | string | number): number {
    return (typeof at === "object" ? digits(at, 0, at.length) : Number(at)) / 1000 - this.offsetMs;
  }
}

/** What a worker and a reader of the outcome must know of a task, beside its input. */
export interface Meta {
  readonly task: Omit<Task, "id" | "input">;
  readonly joinKey: string;
  readonly cacheKey: string;
  readonly cacheTtlMs: number;
}

export function metaFrame(task: Task, sharing: Sharing, clock: RedisClock): Buffer {
  return frame(metaTexts(task, sharing, clock));
}

/** What a reader of the outcome must know comes first: an outcome keeps no more. */
const OUTCOME_TEXTS = 6;
const PARAMETERS_TEXT = 3;
/** What `lua/common.lua` puts before the frame of a kept outcome. */
const HEAD_TEXTS = 4;

function metaTexts(task: Task, sharing: Sharing, clock: RedisClock): string[] {
  const { tenant, tier, model, parameters, content, createdAt, deadlineAt } = task;
  return [
    tenant,
    String(tier),
    model,
    parameters,
    clock.shared(createdAt),
    clock.shared(deadlineAt),
    content,
    sharing.joinKey ?? "",
    sharing.cacheTtlMs === undefined ? "" : (sharing.cacheKey ?? ""),
    String(sharing.cacheTtlMs ?? 0),
    task.trace ?? "",
  ];
}

export function readMeta(bytes: Buffer, clock: RedisClock): Meta {
  const found = texts(bytes);
  const [content, joinKey, cacheKey, cacheTtlMs, trace] = found.slice(OUTCOME_TEXTS);
  return {
    task: { ...about(found, clock), content: content!, ...(trace && { trace }) },
    joinKey: joinKey!,
    cacheKey: cacheKey!,
    cacheTtlMs: Number(cacheTtlMs),
  };
}

function about(found: readonly string[], clock: RedisClock): Omit<Task, "id" | "input" | "content"> {
  const [tenant, tier, model, parameters, createdAt, deadlineAt] = found;
  return {
    tenant: tenant!,
    tier: Number(tier),
    model: model!,
    parameters: parameters!,
    createdAt: clock.own(createdAt!),
    deadlineAt: clock.own(deadlineAt!),
  };
}

/** What is kept of a task until its end: its meta after its length, then its input. */
export function bodyFrame(task: Task, sharing: Sharing, clock: RedisClock): Buffer {
  const row = metaTexts(task, sharing, clock);
  const lengths = row.map(lengthOf);
  const size = sizeOf(lengths);
  const inputBytes = Buffer.byteLength(task.input);
  const bytes = Buffer.allocUnsafe(LENGTH_BYTES + size + inputBytes);
  bytes.writeUInt32BE(size, 0);
  const at = writeFrame(bytes, LENGTH_BYTES, row, lengths);
  writeText(bytes, at, task.input, inputBytes);
  return bytes;
}

export function readBody(bytes: Buffer): { meta: Buffer; input: string } {
  const end = LENGTH_BYTES + bytes.readUInt32BE(0);
  return { meta: bytes.subarray(LENGTH_BYTES, end), input: bytes.toString("utf8", end) };
}

/** Without the size, which the script that claims it knows. */
export function batchFrame(batch: Omit<BatchNote, "size">, clock: RedisClock): Buffer {
  return frame([batch.id, batch.reason, batch.worker, clock.shared(batch.startedAt), batch.why]);
}

/** `bytes` is what `batchFrame` made, and one more text: the size. */
export function readBatch(bytes: Buffer, clock: RedisClock): BatchNote | undefined {
  if (bytes.length === 0) return undefined;
  const [id, reason, worker, startedAt, why, size] = texts(bytes);
  return {
    id: id!,
    size: Number(size),
    reason: reason as DispatchReason,
    worker: worker!,
    startedAt: clock.own(startedAt!),
    why: why!,
  };
}

/** The batch of a lease, with its size. */
export function wholeBatchFrame(batch: BatchNote, clock: RedisClock): Buffer {
  const { id, reason, worker, startedAt, why, size } = batch;
  return frame([id, reason, worker, clock.shared(startedAt), why, String(size)]);
}

export interface OutcomeFields {
  readonly meta: Buffer;
  readonly attempt: number;
  readonly queuedAt: number;
  readonly settledAt: number;
  readonly batch: Buffer;
}

/** The outcome of a task: `lua/common.lua` makes the same frame for those that time ends. */
export function outcomeFrame(fields: OutcomeFields, outcome: Outcome, clock: RedisClock): Buffer {
  return frame(outcomeParts(fields, outcome, clock));
}

/** The same after what scripts must know of it (`lua/common.lua`): all that is kept of a success. */
export function resultValue(
  head: { readonly tenant: string; readonly expiresAt: number; readonly reusableAt: number },
  fields: OutcomeFields,
  outcome: Outcome,
  clock: RedisClock,
): { value: Buffer; bytes: Buffer } {
  const { tenant, expiresAt, reusableAt } = head;
  const reusable = reusableAt === 0 ? "0" : clock.shared(reusableAt);
  const expires = clock.shared(expiresAt);
  const value = frame([tenant, "0", expires, reusable, ...outcomeParts(fields, outcome, clock)]);
  return { value, bytes: frameOf(value) };
}

/** What scripts must know comes first; the rest is the outcome's frame. */
export function frameOf(value: Buffer): Buffer {
  return value.subarray(firstTexts(value, HEAD_TEXTS).length);
}

function outcomeParts(
  { meta, attempt, queuedAt, settledAt, batch }: OutcomeFields,
  outcome: Outcome,
  clock: RedisClock,
): (string | Buffer)[] {
  const [code, text] = outcome.ok ? ["", outcome.output] : [outcome.code, outcome.message];
  const times = [clock.shared(queuedAt), clock.shared(settledAt)];
  return [code, text, String(attempt), ...times, "", batch, outcomeMeta(meta)];
}

const NO_TEXT = Buffer.alloc(LENGTH_BYTES);

/** Of a finished task, without its parameters: they may be large, and are needed no more. */
function outcomeMeta(meta: Buffer): Buffer {
  const about = firstTexts(meta, OUTCOME_TEXTS);
  const start = firstTexts(meta, PARAMETERS_TEXT).length;
  const end = start + LENGTH_BYTES + meta.readUInt32BE(start);
  if (end === start + LENGTH_BYTES) return about;
  return Buffer.concat([about.subarray(0, start), NO_TEXT, about.subarray(end)]);
}

/** The first so many texts of a frame, as a frame. */
function firstTexts(bytes: Buffer, count: number): Buffer {
  let end = 0;
  for (let which = 0; which < count; which++) end += LENGTH_BYTES + bytes.readUInt32BE(end);
  return bytes.subarray(0, end);
}

/** Outcomes come a batch at a time: what is said of it is read once. */
export class OutcomeReader {
  readonly #clock: RedisClock;
  #batchBytes: Buffer = Buffer.alloc(0);
  #batch: BatchNote | undefined;

  constructor(clock: RedisClock) {
    this.#clock = clock;
  }

  read(id: string, bytes: Buffer): RecordView {
    const row = parts(bytes);
    const batchBytes = row[6]!;
    if (!this.#batchBytes.equals(batchBytes)) {
      this.#batchBytes = Buffer.from(batchBytes);
      this.#batch = readBatch(batchBytes, this.#clock);
    }
    return outcomeOf(id, row, this.#batch, this.#clock);
  }
}

export function readOutcome(id: string, bytes: Buffer, clock: RedisClock): RecordView {
  const row = parts(bytes);
  return outcomeOf(id, row, readBatch(row[6]!, clock), clock);
}

function outcomeOf(
  id: string,
  [code, text, attempt, queuedAt, settledAt, cached, , metaBytes]: readonly Buffer[],
  batch: BatchNote | undefined,
  clock: RedisClock,
): RecordView {
  const failure = code!.toString() as ErrorCode | "";
  const message = text!.toString();
  return {
    task: { id, input: "", content: "", ...about(texts(metaBytes!), clock) },
    state: failure === "" ? "done" : "failed",
    attempt: digits(attempt!, 0, attempt!.length),
    queuedAt: clock.own(queuedAt!),
    settledAt: clock.own(settledAt!),
    outcome: failure === "" ? { ok: true, output: message } : { ok: false, code: failure, message },
    cached: cached!.length > 0,
    ...(batch && { batch }),
  };
}

/** A record that is not final, as the `join` script answers it. */
export function readPending(
  id: string,
  [state, attempt, queuedAt, batchBytes, metaBytes, body]: readonly Buffer[],
  clock: RedisClock,
): RecordView {
  const batch = readBatch(batchBytes!, clock);
  return {
    task: { id, input: body!.toString(), ...readMeta(metaBytes!, clock).task },
    state: (state!.toString() === "r" ? "running" : "queued") satisfies TaskState,
    attempt: Number(attempt),
    queuedAt: clock.own(queuedAt!),
    ...(batch && { batch }),
  };
}

/** A dead letter as it is kept: time of death, attempts, code, what operators are told, meta, input. */
export function readLetter(id: string, bytes: Buffer, clock: RedisClock): { letter: DeadLetter; meta: Meta } {
  const [diedAt, attempts, code, detail, metaBytes, body] = parts(bytes);
  const meta = readMeta(metaBytes!, clock);
  const letter = {
    task: { id, input: body!.toString(), ...meta.task },
    attempts: Number(attempts),
    code: code!.toString() as ErrorCode,
    message: detail!.toString(),
    diedAt: clock.own(diedAt!),
  };
  return { letter, meta };
}
