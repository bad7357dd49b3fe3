/**
 * Workers that are a Python function: `model.py:batchstring`, one child process per worker.
 *
 * The child runs `ferry_worker.py`, which imports the user's file unchanged and calls `batchstring(inputs)` (or
 * `batchstring(inputs, parameters=…)`) once per batch; `async def` works too. Frames use two dedicated sockets, fd 3 to
 * the child and fd 4 from it, so the user's prints are only prints (`worker.printed`). `ferry_worker.py` describes the
 * frames, the return types and the threads.
 *
 * Replies carry their call's number and come in call order; anything else on fd 4 ends the child. A second call may be
 * sent while the child runs one: it is read and parsed meanwhile.
 *
 * The child leads its own process group: Ctrl-C at Ferry's terminal does not reach it while Ferry drains, and killing
 * it also kills what it has started.
 */
import { type ChildProcess, spawn } from "node:child_process";
import type { Readable, Writable } from "node:stream";
import { fileURLToPath } from "node:url";
import type { Json } from "../../core/task.ts";
import {
  bytesText,
  DTYPES,
  elementBytes,
  MAX_DIMENSIONS,
  tensorBytes,
  tensorHead,
  withHead,
} from "../../core/tensor.ts";
import { batchText } from "../../gateway/protocol/batch.ts";
import type { Batch, Reply } from "./backend.ts";
import {
  type BatchListener,
  type Child,
  type ChildAround,
  ChildBackend,
  firstNumbers,
  printLines,
} from "./child-workers.ts";
import { badOutputs, match, matchMade, quote, rejected } from "./replies.ts";

export type InputKind = "json" | "int32" | "int64" | "float32";

export interface PythonOptions {
  /** `/abs/model.py:function`. */
  readonly function: string;
  readonly workers: number;
  /** Worker numbers at the start; default: from 1. */
  readonly numbers?: readonly number[] | undefined;
  readonly python: string;
  /** Python type of the inputs; default: any JSON. */
  readonly inputs?: InputKind;
  /** Comma-separated; worker i sees the i-th, modulo their number. Default: every worker sees them all. */
  readonly gpus?: string;
  readonly startTimeoutMs: number;
  readonly maxReplyBytes: number;
}

const WORKER_FILE = fileURLToPath(new URL("ferry_worker.py", import.meta.url));
/** Room in a frame beside the output bytes, which the child counts: lengths, or a text. */
const FRAME_EXTRA_BYTES = 1 << 20;
/** How long an ended child's pipes may stay open, in case a grandchild holds them. */
const LAST_WORDS_MS = 100;

export class PythonBackend extends ChildBackend {
  constructor(options: PythonOptions, around: ChildAround) {
    const { workers, startTimeoutMs, numbers = firstNumbers(workers) } = options;
    const spawn = (name: string, number: number): Child =>
      new PythonChild(name, options, environment(options, number - 1), around);
    super({ kind: "python", numbers, startTimeoutMs, spawn }, around);
  }
}

/** An unchanged file uses the first GPU it sees, so each worker is shown only its own. */
function environment({ gpus, workers }: PythonOptions, index: number): NodeJS.ProcessEnv {
  const own = { ...process.env, FERRY_WORKER: String(index + 1), FERRY_WORKERS: String(workers) };
  if (gpus === undefined) return own;
  const list = gpus.split(",").map((gpu) => gpu.trim());
  const gpu = list[index % list.length]!;
  return { ...own, CUDA_VISIBLE_DEVICES: gpu, HIP_VISIBLE_DEVICES: gpu };
}

class PythonChild implements Child {
  readonly #loaded = Promise.withResolvers<void>();
  readonly ready = this.#loaded.promise;
  readonly gone: Promise<string>;
  readonly #inputs: InputKind;
  readonly #process: ChildProcess;
  readonly #toChild: Writable;
  #number = 0;
  /** In call order. */
  readonly #running: { readonly number: number; readonly batch: Batch; readonly listener: BatchListener }[] =
    [];
  /** Why Ferry killed it, when it broke the protocol. */
  #fault: string | undefined;
  /** Last stderr line before it was ready: often the reason for a failed start. */
  #lastLine = "";

  constructor(name: string, options: PythonOptions, env: NodeJS.ProcessEnv, around: ChildAround) {
    this.#inputs = options.inputs ?? "json";
    const colon = options.function.lastIndexOf(":");
    const [file, called] = [options.function.slice(0, colon), options.function.slice(colon + 1)];
    this.#process = spawn(options.python, ["-u", WORKER_FILE, file, called, String(options.maxReplyBytes)], {
      // Two for frames; the end of the last one tells the child that Ferry is gone.
      stdio: ["ignore", "pipe", "pipe", "pipe", "pipe", "pipe"],
      detached: true,
      env,
    });
    // Not awaited when this constructor throws.
    this.ready.catch(() => {});
    this.gone = this.#end(name, options.python, around);
    const { stdout, stderr, stdio } = this.#process;
    // Node creates no pipes when out of file descriptors.
    if (!stdout || !stderr) throw new Error(`cannot start ${name}: out of file descriptors; raise ulimit -n`);
    this.#toChild = stdio[3] as Writable;
    const frames = new FrameReader(options.maxReplyBytes + FRAME_EXTRA_BYTES, (kind, payload) =>
      this.#hear(kind, payload),
    );
    (stdio[4] as Readable).on("data", (chunk: Buffer) => {
      if (!frames.read(chunk)) this.#expel("sent too large a frame");
    });
    printLines(stdout, "stdout", name, around);
    printLines(stderr, "stderr", name, around);
    const note = (chunk: Buffer): void => void (this.#lastLine = lastLineOf(chunk) || this.#lastLine);
    stderr.on("data", note);
    void this.ready.then(
      () => stderr.off("data", note),
      () => {},
    );
    // A pipe breaks when the child ends, which #end handles.
    for (const stream of stdio.slice(3)) stream?.on("error", () => {});
  }

  run(batch: Batch, listener: BatchListener): void {
    const number = (this.#number + 1) >>> 0;
    const inputs = this.#inputs;
    const alone = this.#running.length === 0;
    const frame =
      inputs === "json"
        ? callFrame(number, callText(batch), alone)
        : arraysFrame(number, batch, inputs, alone);
    if (frame === undefined)
      return listener.answer(rejected(`the input must be a flat array of numbers (${inputs})`));
    this.#number = number;
    this.#running.push({ number, batch, listener });
    this.#toChild.write(frame);
  }

  close(): void {
    this.#toChild.end();
  }

  kill(): void {
    const { pid } = this.#process;
    if (pid === undefined) return;
    try {
      process.kill(-pid, "SIGKILL");
    } catch {
      // The whole group is already gone.
    }
  }

  #expel(fault: string): void {
    this.#fault ??= fault;
    this.kill();
  }

  #hear(kind: number, payload: Buffer): void {
    if (this.#fault !== undefined) return;
    if (kind === FRAME.ready) return this.#loaded.resolve();
    if (kind === FRAME.cannot) return this.#loaded.reject(new Error(quote(payload.toString("utf8"), 400)));
    const number = payload.length < NUMBER_BYTES ? -1 : payload.readUInt32LE(0);
    if (kind === FRAME.begun) {
      const begun = this.#running.find((running) => running.number === number);
      if (begun === undefined || payload.length < 2 * NUMBER_BYTES) return this.#expel("began with no call");
      return begun.listener.begun(payload.readUInt32LE(NUMBER_BYTES) / 1000);
    }
    const [first] = this.#running;
    if (first?.number !== number) return this.#expel("sent a frame that answers no call");
    this.#running.shift();
    const reply = readReply(first.batch, kind, payload);
    if (reply === undefined) this.#expel("sent a frame that cannot be read");
    else first.listener.answer(reply);
  }

  /** Resolves when the process has ended and its pipes are drained. */
  #end(name: string, python: string, { clock }: ChildAround): Promise<string> {
    return new Promise((resolve) => {
      this.#process.on("error", (error: NodeJS.ErrnoException) => {
        // Also emitted when a signal cannot be sent; only a child that never started has no pid.
        if (this.#process.pid !== undefined) return;
        this.#loaded.reject(new Error(cannotRun(python, error)));
        resolve("could not be started");
      });
      this.#process.on("exit", (code, signal) => {
        const how = this.#fault ?? (signal === null ? `ended with exit code ${code}` : killedBy(signal));
        // Grandchildren may hold its pipes and the GPU.
        this.kill();
        const alarm = clock.at(clock.now() + LAST_WORDS_MS, () => {
          for (const stream of this.#process.stdio) stream?.destroy();
        });
        this.#process.on("close", () => {
          alarm.cancel();
          const words = this.#lastLine === "" ? "" : `: ${quote(this.#lastLine)}`;
          this.#loaded.reject(new Error(`${name} ${how} before it was ready${words}`));
          resolve(how);
        });
      });
    });
  }
}

function cannotRun(python: string, { code, message }: NodeJS.ErrnoException): string {
  const why = code === "ENOENT" ? "not found" : code === "EACCES" ? "permission denied" : quote(message);
  return `cannot run "${python}": ${why}; install Python 3 or set backend.python`;
}

function killedBy(signal: string): string {
  return signal === "SIGKILL" ? "was killed by SIGKILL (out of memory?)" : `was killed by ${signal}`;
}

function lastLineOf(chunk: Buffer): string {
  return chunk.toString("utf8").trimEnd().split("\n").at(-1) ?? "";
}

/** Frame kinds; see `ferry_worker.py`. */
export const FRAME = {
  call: 1,
  ready: 2,
  cannot: 3,
  outputs: 4,
  rejected: 5,
  unusable: 6,
  rows: 7,
  begun: 9,
  arrays: 10,
} as const;
/** Added to the kind of a call that is sent while the child has no other. */
const ALONE = 128;
const HEADER_BYTES = 5;
const NUMBER_BYTES = 4;
/** Buffer kept per worker; larger frames are allocated. */
const MAX_KEPT_BYTES = 4 << 20;
const JSON_TEXT = 0;
const BYTES = 1;
const FIRST_DTYPE = 2;

function callText({ tasks, parameters }: Batch): Json {
  return batchText(
    tasks.map(({ input }) => input),
    parameters,
  );
}

export function callFrame(number: number, text: Json, alone: boolean): Buffer {
  const payloadBytes = NUMBER_BYTES + Buffer.byteLength(text, "utf8");
  const frame = Buffer.allocUnsafe(HEADER_BYTES + payloadBytes);
  frame.writeUInt32LE(payloadBytes, 0);
  frame.writeUInt8(alone ? FRAME.call | ALONE : FRAME.call, 4);
  frame.writeUInt32LE(number, HEADER_BYTES);
  frame.write(text, HEADER_BYTES + NUMBER_BYTES, "utf8");
  return frame;
}

/** Splits a stream into frames. Pieces are copied into a reused buffer: allocating 200 KB costs more than that. */
export class FrameReader {
  readonly #maxBytes: number;
  readonly #hear: (kind: number, payload: Buffer) => void;
  readonly #header = Buffer.alloc(HEADER_BYTES);
  #headed = 0;
  /** The payload in progress, and how much of it was received. */
  #payload: Buffer | undefined;
  #filled = 0;
  #room = Buffer.alloc(0);

  /** `hear` must not keep the payload. */
  constructor(maxBytes: number, hear: (kind: number, payload: Buffer) => void) {
    this.#maxBytes = maxBytes;
    this.#hear = hear;
  }

  /** Passes on each completed frame; false when one is too large, and reading must stop. */
  read(chunk: Buffer): boolean {
    let at = 0;
    for (;;) {
      if (this.#payload !== undefined) {
        const copied = chunk.copy(this.#payload, this.#filled, at);
        this.#filled += copied;
        at += copied;
        if (this.#filled < this.#payload.length) return true;
        this.#end(this.#payload);
      }
      const copied = chunk.copy(this.#header, this.#headed, at, at + HEADER_BYTES - this.#headed);
      this.#headed += copied;
      at += copied;
      if (this.#headed < HEADER_BYTES) return true;
      const length = this.#header.readUInt32LE(0);
      if (length > this.#maxBytes) return false;
      if (at + length <= chunk.length) {
        const payload = chunk.subarray(at, at + length);
        at += length;
        this.#end(payload);
      } else {
        this.#payload = this.#roomFor(length);
        this.#filled = chunk.copy(this.#payload, 0, at);
        return true;
      }
    }
  }

  #roomFor(length: number): Buffer {
    if (length > MAX_KEPT_BYTES) return Buffer.allocUnsafeSlow(length);
    if (length > this.#room.length) this.#room = Buffer.allocUnsafeSlow(Math.min(2 * length, MAX_KEPT_BYTES));
    return this.#room.subarray(0, length);
  }

  #end(payload: Buffer): void {
    this.#payload = undefined;
    this.#headed = 0;
    this.#hear(this.#header.readUInt8(4), payload);
  }
}

/** The reply in a payload, after its number; undefined when malformed. */
export function readReply(batch: Batch, kind: number, payload: Buffer): Reply | undefined {
  if (kind === FRAME.rejected) return rejected(quote(payload.toString("utf8", NUMBER_BYTES)));
  if (kind === FRAME.unusable) return badOutputs(payload.toString("utf8", NUMBER_BYTES));
  if (payload.length < 2 * NUMBER_BYTES) return undefined;
  if (kind === FRAME.rows) return readRows(batch, payload);
  return kind === FRAME.outputs ? readOutputs(batch, payload) : undefined;
}

/** Encodes rows as base64 in place, after a shared head. */
function readRows(batch: Batch, payload: Buffer): Reply | undefined {
  if (payload.length < 10) return undefined;
  const count = payload.readUInt32LE(4);
  const dtype = DTYPES[payload.readUInt8(8) - FIRST_DTYPE];
  const shape = readShape(payload, 10, payload.readUInt8(9));
  if (dtype === undefined || shape === undefined) return undefined;
  const first = 10 + 4 * shape.length;
  const rowBytes = tensorBytes(dtype, shape);
  if (first + count * rowBytes !== payload.length) return undefined;
  // Empty rows cost the worker nothing, however many it announces.
  if (count !== batch.tasks.length) return matchMade(batch, { length: count });
  const head = tensorHead(dtype, shape);
  const outputs: Json[] = [];
  for (let at = first; outputs.length < count; at += rowBytes) {
    outputs.push(withHead(head, payload.toString("base64", at, at + rowBytes)));
  }
  return matchMade(batch, outputs);
}

/** A table of types, shapes and lengths, then the outputs. */
function readOutputs(batch: Batch, payload: Buffer): Reply | undefined {
  const count = payload.readUInt32LE(4);
  let at = 8;
  for (let index = 0; index < count; index++) {
    if (at + 6 > payload.length) return undefined;
    at += 6 + 4 * payload.readUInt8(at + 1);
  }
  const outputs: Json[] = [];
  for (let entry = 8; outputs.length < count; entry += 6 + 4 * payload.readUInt8(entry + 1)) {
    const type = payload.readUInt8(entry);
    const end = at + payload.readUInt32LE(entry + 2);
    if (end > payload.length) return undefined;
    if (type === JSON_TEXT) outputs.push(payload.toString("utf8", at, end));
    else if (type === BYTES) outputs.push(bytesText(payload.toString("base64", at, end)));
    else {
      const dtype = DTYPES[type - FIRST_DTYPE];
      const shape = readShape(payload, entry + 6, payload.readUInt8(entry + 1));
      if (dtype === undefined || shape === undefined || tensorBytes(dtype, shape) !== end - at)
        return undefined;
      outputs.push(withHead(tensorHead(dtype, shape), payload.toString("base64", at, end)));
    }
    at = end;
  }
  return at === payload.length ? match(batch, outputs) : undefined;
}

function readShape(payload: Buffer, at: number, dimensions: number): number[] | undefined {
  if (dimensions > MAX_DIMENSIONS || at + 4 * dimensions > payload.length) return undefined;
  return Array.from({ length: dimensions }, (_, index) => payload.readUInt32LE(at + 4 * index));
}

const ARRAYS_HEAD_BYTES = 16;
const ALIGNED = 8;
const LARGEST_SINGLE = 3.4028234663852886e38;

/** Inputs in Python's memory layout. Undefined where one does not fit: the batch is `rejected` and bisected. */
function arraysFrame(
  number: number,
  batch: Batch,
  kind: Exclude<InputKind, "json">,
  alone: boolean,
): Buffer | undefined {
  const lists: (readonly number[])[] = [];
  let numbers = 0;
  for (const { input } of batch.tasks) {
    const list: unknown = input.startsWith("[") ? JSON.parse(input) : undefined;
    if (!isListOf(kind, list)) return undefined;
    lists.push(list);
    numbers += list.length;
  }
  const parameterBytes = Buffer.byteLength(batch.parameters);
  const tableBytes = ARRAYS_HEAD_BYTES + 4 * lists.length + parameterBytes;
  const from = Math.ceil(tableBytes / ALIGNED) * ALIGNED;
  const payloadBytes = from + numbers * elementBytes(kind);
  const frame = Buffer.alloc(HEADER_BYTES + payloadBytes);
  frame.writeUInt32LE(payloadBytes, 0);
  frame.writeUInt8(alone ? FRAME.arrays | ALONE : FRAME.arrays, 4);
  const head = [number, FIRST_DTYPE + DTYPES.indexOf(kind), lists.length, parameterBytes];
  let at = HEADER_BYTES;
  for (const each of [...head, ...lists.map(({ length }) => length)]) at = frame.writeUInt32LE(each, at);
  frame.write(batch.parameters, at, "utf8");
  Buffer.from(packed(kind, lists, numbers)).copy(frame, HEADER_BYTES + from);
  return frame;
}

function isListOf(kind: InputKind, list: unknown): list is readonly number[] {
  if (!Array.isArray(list)) return false;
  for (const each of list as readonly unknown[]) {
    if (typeof each !== "number") return false;
    if (kind === "int32" && (each | 0) !== each) return false;
    // Beyond the safe range the text is no longer the number that was read.
    if (kind === "int64" && !Number.isSafeInteger(each)) return false;
    if (kind === "float32" && Math.abs(each) > LARGEST_SINGLE) return false;
  }
  return true;
}

function packed(kind: InputKind, lists: readonly (readonly number[])[], numbers: number): ArrayBuffer {
  if (kind === "int64") {
    const all = new BigInt64Array(numbers);
    let at = 0;
    for (const list of lists) for (const each of list) all[at++] = BigInt(each);
    return all.buffer;
  }
  const all = kind === "int32" ? new Int32Array(numbers) : new Float32Array(numbers);
  let at = 0;
  for (const list of lists) {
    all.set(list, at);
    at += list.length;
  }
  return all.buffer;
}
