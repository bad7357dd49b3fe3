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

export function frame(texts: readonly string[]): Buffer {
  let size = LENGTH_BYTES * texts.length;
  const lengths = texts.map((text) => {
    const length = Buffer.byteLength(text);
    size += length;
    return length;
  });
  const bytes = Buffer.allocUnsafe(size);
  let at = 0;
  texts.forEach((text, which) => {
    const length = lengths[which]!;
    at = bytes.writeUInt32BE(length, at);
    // One byte a character: plain ASCII, which needs no encoder.
    if (length === text.length) bytes.write(text, at, "latin1");
    else bytes.write(text, at);
    at += length;
  });
  return bytes;
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
    return String(Math.round(1000 * (at + this.offsetMs)));
  }

  own(at: Buffer | string | number): number {
    return Number(at) / 1000 - this.offsetMs;
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
  const { tenant, tier, model, parameters, content, createdAt, deadlineAt } = task;
  return frame([
    tenant,
    String(tier),
    model,
    parameters,
    content,
    clock.shared(createdAt),
    clock.shared(deadlineAt),
    sharing.joinKey ?? "",
    sharing.cacheTtlMs === undefined ? "" : (sharing.cacheKey ?? ""),
    String(sharing.cacheTtlMs ?? 0),
  ]);
}

export function readMeta(bytes: Buffer, clock: RedisClock): Meta {
  const [tenant, tier, model, parameters, content, createdAt, deadlineAt, joinKey, cacheKey, cacheTtlMs] =
    texts(bytes);
  return {
    task: {
      tenant: tenant!,
      tier: Number(tier),
      model: model!,
      parameters: parameters!,
      content: content!,
      createdAt: clock.own(createdAt!),
      deadlineAt: clock.own(deadlineAt!),
    },
    joinKey: joinKey!,
    cacheKey: cacheKey!,
    cacheTtlMs: Number(cacheTtlMs),
  };
}

/** What is kept of a task until its end: its meta after its length, then its input. */
export function bodyFrame(meta: Buffer, input: string): Buffer {
  const inputBytes = Buffer.byteLength(input);
  const bytes = Buffer.allocUnsafe(LENGTH_BYTES + meta.length + inputBytes);
  bytes.writeUInt32BE(meta.length, 0);
  meta.copy(bytes, LENGTH_BYTES);
  bytes.write(input, LENGTH_BYTES + meta.length);
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

/** The outcome of a task as it is kept: `lua/common.lua` makes the same frame for those that time ends. */
export function outcomeFrame(
  fields: { meta: Buffer; attempt: number; queuedAt: number; settledAt: number; batch: Buffer },
  outcome: Outcome,
  clock: RedisClock,
): Buffer {
  const [code, text] = outcome.ok ? ["", outcome.output] : [outcome.code, outcome.message];
  const head = frame([
    code,
    text,
    String(fields.attempt),
    clock.shared(fields.queuedAt),
    clock.shared(fields.settledAt),
    "",
  ]);
  return Buffer.concat([head, asPart(fields.batch), asPart(fields.meta)]);
}

/** An outcome as it is kept: what scripts must know of it (`lua/common.lua`), then its frame. */
export function resultValue(
  tenant: string,
  until: { readonly expiresAt: number; readonly reusableAt: number },
  bytes: Buffer,
  clock: RedisClock,
): Buffer {
  const reusable = until.reusableAt === 0 ? "0" : clock.shared(until.reusableAt);
  return Buffer.concat([frame([tenant, "0", clock.shared(until.expiresAt), reusable]), bytes]);
}

export function asPart(bytes: Buffer): Buffer {
  const part = Buffer.allocUnsafe(LENGTH_BYTES + bytes.length);
  part.writeUInt32BE(bytes.length, 0);
  bytes.copy(part, LENGTH_BYTES);
  return part;
}

export function readOutcome(id: string, bytes: Buffer, clock: RedisClock): RecordView {
  const [code, text, attempt, queuedAt, settledAt, cached, batchBytes, metaBytes] = parts(bytes);
  const batch = readBatch(batchBytes!, clock);
  const failure = code!.toString() as ErrorCode | "";
  const message = text!.toString();
  return {
    task: { id, input: "", ...readMeta(metaBytes!, clock).task, content: "" },
    state: failure === "" ? "done" : "failed",
    attempt: Number(attempt),
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
