/**
 * Binary frames stored in Redis. A frame is a list of texts, each after its byte length (four bytes, big-endian). Times
 * are on the shared clock (the server's), converted by `RedisClock`.
 *
 *   entry     gateway, mark, then per task: id, body               what a stream holds for one bundle
 *   body      length, meta, input
 *   meta      tenant, tier, model, parameters, createdAt, deadlineAt, content, joinKey, cacheKey, cacheTtlMs, trace
 *   bundle    per task: field, the first six texts of meta         field `m` of a bundle's hash
 *   outcome   code, output or message, attempt, queuedAt, settledAt, cached, batch, six texts of meta, cacheTtlMs
 */
import type { ErrorCode } from "../../core/errors.ts";
import type { BatchNote, DispatchReason, Outcome, Task } from "../../core/task.ts";
import type { DeadLetter, RecordView, Sharing } from "../engine.ts";
import { fieldOf } from "./keys.ts";

const LENGTH_BYTES = 4;
const ZERO = 48;

/** Texts and nested frames; one allocation, each byte written once. */
export function frame(row: readonly (string | Buffer)[]): Buffer {
  const lengths = row.map(lengthOf);
  const bytes = Buffer.allocUnsafe(sizeOf(lengths));
  writeFrame(bytes, 0, row, lengths);
  return bytes;
}

function lengthOf(part: string | Buffer): number {
  return typeof part === "string" ? Buffer.byteLength(part) : part.length;
}

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
  // One byte per character: plain ASCII, which needs no encoder.
  if (length === text.length) bytes.write(text, at, length, "latin1");
  else bytes.write(text, at, length, "utf8");
}

function digits(bytes: Buffer, from: number, to: number): number {
  let number = 0;
  for (let at = from; at < to; at++) number = number * 10 + (bytes[at]! - ZERO);
  return number;
}

/** Cuts a frame into its parts without copying. */
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

/** Offset of the shared clock from this process's. */
export class RedisClock {
  offsetMs = 0;

  /** In whole microseconds of the shared clock. */
  shared(at: number): string {
    return String(Math.round(1000 * (at + this.offsetMs)));
  }

  own(at: Buffer | string | number): number {
    return (typeof at === "object" ? digits(at, 0, at.length) : Number(at)) / 1000 - this.offsetMs;
  }
}

/**
 * `check`: compare its tasks with their bundle's hash before taking them. `copy`: the same, and this entry did not
 * count them as waiting. `part`: other tasks of the bundle are in other entries, so another batcher may hold them.
 */
export type EntryMark = "" | "check" | "copy" | "part";

export function entryFrame(gateway: string, mark: EntryMark, tasks: readonly TaskBody[]): Buffer {
  const row: (string | Buffer)[] = [gateway, mark];
  for (const { id, body } of tasks) row.push(id, body);
  return frame(row);
}

export interface TaskBody {
  readonly id: string;
  readonly body: Buffer;
}

export interface Entry {
  readonly gateway: string;
  readonly mark: EntryMark;
  readonly tasks: readonly TaskBody[];
}

export function readEntry(bytes: Buffer): Entry {
  const [gateway, mark, ...rest] = parts(bytes);
  const tasks: TaskBody[] = [];
  for (let at = 0; at + 1 < rest.length; at += 2) {
    tasks.push({ id: rest[at]!.toString("latin1"), body: rest[at + 1]! });
  }
  return { gateway: gateway!.toString(), mark: mark!.toString() as EntryMark, tasks };
}

/** What a worker and a reader of the outcome need of a task, besides its input. */
export interface Meta {
  readonly task: Omit<Task, "id" | "input">;
  readonly sharing: Sharing;
}

const OUTCOME_TEXTS = 6; // texts that a reader of the outcome needs come first: an outcome keeps only these
const PARAMETERS_TEXT = 3;

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
    sharing: {
      ...(joinKey !== "" && { joinKey: joinKey! }),
      ...(cacheKey !== "" && { cacheKey: cacheKey!, cacheTtlMs: Number(cacheTtlMs) }),
    },
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

/** Kept until the task ends: length of meta, meta, input. */
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

export function bundleFrame(tasks: readonly TaskBody[]): Buffer {
  return frame(tasks.flatMap(({ id, body }) => [fieldOf(id), outcomeMeta(readMetaBytes(body))]));
}

function readMetaBytes(body: Buffer): Buffer {
  return body.subarray(LENGTH_BYTES, LENGTH_BYTES + body.readUInt32BE(0));
}

/** From its bundle's hash; without input and parameters. */
export function readBundle(bytes: Buffer, field: string, id: string, clock: RedisClock): Task | undefined {
  const row = parts(bytes);
  for (let at = 0; at < row.length; at += 2) {
    if (row[at]!.toString("latin1") !== field) continue;
    return { id, input: "", content: "", ...about(texts(row[at + 1]!), clock) };
  }
  return undefined;
}

export function batchFrame(batch: BatchNote, clock: RedisClock): Buffer {
  const { id, reason, worker, startedAt, why, size } = batch;
  return frame([id, reason, worker, clock.shared(startedAt), why, String(size)]);
}

function readBatch(bytes: Buffer, clock: RedisClock): BatchNote | undefined {
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

export interface OutcomeFields {
  readonly meta: Buffer;
  readonly attempt: number;
  readonly queuedAt: number;
  readonly settledAt: number;
  readonly batch?: Buffer | undefined;
  readonly cached?: boolean;
  /** 0: not reused. */
  readonly cacheTtlMs?: number;
}

export function outcomeFrame(fields: OutcomeFields, outcome: Outcome, clock: RedisClock): Buffer {
  const { meta, attempt, queuedAt, settledAt, batch = "", cached = false, cacheTtlMs = 0 } = fields;
  const [code, text] = outcome.ok ? ["", outcome.output] : [outcome.code, outcome.message];
  return frame([
    code,
    text,
    String(attempt),
    clock.shared(queuedAt),
    clock.shared(settledAt),
    cached ? "1" : "",
    batch,
    outcomeMeta(meta),
    String(cacheTtlMs),
  ]);
}

/** The meta part of `bodyFrame`. */
export function metaFrame(task: Task, sharing: Sharing, clock: RedisClock): Buffer {
  return frame(metaTexts(task, sharing, clock));
}

const NO_TEXT = Buffer.alloc(LENGTH_BYTES);

/** Without parameters: they may be large, and are no longer needed. */
function outcomeMeta(meta: Buffer): Buffer {
  const about = firstTexts(meta, OUTCOME_TEXTS);
  const start = firstTexts(meta, PARAMETERS_TEXT).length;
  const end = start + LENGTH_BYTES + meta.readUInt32BE(start);
  if (end === start + LENGTH_BYTES) return about;
  return Buffer.concat([about.subarray(0, start), NO_TEXT, about.subarray(end)]);
}

function firstTexts(bytes: Buffer, count: number): Buffer {
  let end = 0;
  for (let which = 0; which < count; which++) end += LENGTH_BYTES + bytes.readUInt32BE(end);
  return bytes.subarray(0, end);
}

/** `reusableUntil`: 0 if its success may not be reused. */
export type FinalRecord = RecordView & { readonly settledAt: number; readonly reusableUntil: number };

/** Outcomes come by batch: its note is decoded once. */
export class OutcomeReader {
  readonly #clock: RedisClock;
  #batchBytes: Buffer = Buffer.alloc(0);
  #batch: BatchNote | undefined;

  constructor(clock: RedisClock) {
    this.#clock = clock;
  }

  read(id: string, bytes: Buffer): FinalRecord {
    const clock = this.#clock;
    const [code, text, attempt, queuedAt, settled, cached, batchBytes, meta, cacheTtlMs] = parts(bytes);
    if (!this.#batchBytes.equals(batchBytes!)) {
      this.#batchBytes = Buffer.from(batchBytes!);
      this.#batch = readBatch(batchBytes!, clock);
    }
    const failure = code!.toString() as ErrorCode | "";
    const message = text!.toString();
    const settledAt = clock.own(settled!);
    const ttlMs = digits(cacheTtlMs!, 0, cacheTtlMs!.length);
    return {
      task: { id, input: "", content: "", ...about(texts(meta!), clock) },
      state: failure === "" ? "done" : "failed",
      attempt: digits(attempt!, 0, attempt!.length),
      queuedAt: clock.own(queuedAt!),
      settledAt,
      outcome: failure === "" ? { ok: true, output: message } : { ok: false, code: failure, message },
      cached: cached!.length > 0,
      ...(this.#batch && { batch: this.#batch }),
      reusableUntil: failure === "" && ttlMs > 0 ? settledAt + ttlMs : 0,
    };
  }
}

/** A dead letter: time of death, attempts, code, detail for operators, body. */
export function letterFrame(letter: Omit<DeadLetter, "task">, body: Buffer, clock: RedisClock): Buffer {
  const { diedAt, attempts, code, message } = letter;
  return frame([clock.shared(diedAt), String(attempts), code, message, body]);
}

export function readLetter(
  id: string,
  bytes: Buffer,
  clock: RedisClock,
): { letter: DeadLetter; sharing: Sharing } {
  const [diedAt, attempts, code, detail, body] = parts(bytes);
  const { meta, input } = readBody(body!);
  const { task, sharing } = readMeta(meta, clock);
  const letter = {
    task: { id, input, ...task },
    attempts: Number(attempts),
    code: code!.toString() as ErrorCode,
    message: detail!.toString(),
    diedAt: clock.own(diedAt!),
  };
  return { letter, sharing };
}
