/**
 * Workers that are a Python function: `model.py:batchstring`, one child process per worker.
 *
 * The child runs `ferry_worker.py`, which imports the user's file unchanged and calls
 * `batchstring(inputs)` (or `batchstring(inputs, parameters=…)`) once per batch; `async def` works too.
 * Batches and outputs go over two pipes of their own, fd 3 to the child and fd 4 from it, so that
 * whatever the user's code prints is only printed (`worker.printed`). A frame on either pipe:
 *
 *   u32 LE   length of the payload
 *   u8       kind
 *   payload
 *
 *   to the child    1 call      u32 LE number, then JSON text {"inputs":[…]}, with "parameters" or without
 *   from the child  2 ready     empty: the file is imported, calls may come
 *                   3 cannot    UTF-8 text: why the file or the function cannot be used
 *                   4 outputs   u32 LE number, u32 LE count, count × u32 LE length, then the JSON texts
 *                   5 rejected  u32 LE number, UTF-8 text: the function raised this
 *                   6 unusable  u32 LE number, UTF-8 text: what it returned is no list of JSON values
 *
 * The number of a reply is the number of its call; anything else on fd 4 is foreign and ends the child.
 * The child leads a process group of its own: Ctrl-C at Ferry's terminal does not reach it while Ferry
 * drains, and ending the child also ends what it has started itself. `restart.ts` decides what follows.
 */
import { type ChildProcess, spawn } from "node:child_process";
import type { Readable, Writable } from "node:stream";
import { fileURLToPath } from "node:url";
import type { Batch, Reply } from "./backend.ts";
import { printLines } from "./lines.ts";
import { BAD_OUTPUTS, match, quote, rejected, requestText, unusable } from "./match.ts";
import type { Child, Surroundings } from "./restart.ts";
import { RestartingWorkers } from "./restarting-workers.ts";

export interface PythonOptions {
  /** `/abs/model.py:function`. */
  readonly function: string;
  readonly workers: number;
  /** The interpreter to run. */
  readonly python: string;
  /** Comma-separated; worker i sees the i-th, counted round. Left out: every worker sees them all. */
  readonly gpus?: string;
  readonly startTimeoutMs: number;
  readonly maxReplyBytes: number;
}

const WORKER_FILE = fileURLToPath(new URL("ferry_worker.py", import.meta.url));
const CALL = 1;
const READY = 2;
const CANNOT = 3;
const OUTPUTS = 4;
const REJECTED = 5;
const UNUSABLE = 6;
const HEADER_BYTES = 5;
const NUMBER_BYTES = 4;
/** Beside the outputs' own bytes, which the child counts: their lengths, or a text. */
const FRAME_EXTRA_BYTES = 1 << 20;
/** How long the pipes of an ended child may stay open, should something it started still hold them. */
const LAST_WORDS_MS = 100;

export class PythonBackend extends RestartingWorkers {
  constructor(options: PythonOptions, around: Surroundings) {
    const { workers, startTimeoutMs } = options;
    const bear = (name: string, number: number): Child =>
      new PythonChild(name, options, environment(options, number - 1), around);
    super({ kind: "python", count: workers, startTimeoutMs, bear }, around);
  }
}

/** An unchanged file takes the first GPU it sees, so each worker is shown one of its own. */
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
  readonly #process: ChildProcess;
  readonly #toChild: Writable;
  #number = 0;
  #running: { readonly batch: Batch; readonly answer: (reply: Reply) => void } | undefined;
  /** Why Ferry ended it, when it broke the rules. */
  #fault: string | undefined;
  /** What it last wrote on stderr before it was ready: often the reason why it never was. */
  #lastLine = "";

  constructor(name: string, options: PythonOptions, env: NodeJS.ProcessEnv, around: Surroundings) {
    const colon = options.function.lastIndexOf(":");
    const [file, called] = [options.function.slice(0, colon), options.function.slice(colon + 1)];
    this.#process = spawn(options.python, ["-u", WORKER_FILE, file, called, String(options.maxReplyBytes)], {
      // Two for frames; the last one only tells the child, by its end, that Ferry is gone.
      stdio: ["ignore", "pipe", "pipe", "pipe", "pipe", "pipe"],
      detached: true,
      env,
    });
    // Heard by whoever awaits it, and by nobody when this constructor throws.
    this.ready.catch(() => {});
    this.gone = this.#end(name, options.python, around);
    const { stdout, stderr, stdio } = this.#process;
    // Node makes no pipes when it is out of file descriptors.
    if (!stdout || !stderr) throw new Error(`cannot start ${name}: out of file descriptors; raise ulimit -n`);
    this.#toChild = stdio[3] as Writable;
    this.#listen(stdio[4] as Readable, options.maxReplyBytes + FRAME_EXTRA_BYTES);
    printLines(stdout, "stdout", name, around);
    printLines(stderr, "stderr", name, around);
    const note = (chunk: Buffer): void => void (this.#lastLine = lastLineOf(chunk) || this.#lastLine);
    stderr.on("data", note);
    void this.ready.then(
      () => stderr.off("data", note),
      () => {},
    );
    // A pipe breaks when the child ends, and that is heard in #end.
    for (const stream of stdio.slice(3)) stream?.on("error", () => {});
  }

  run(batch: Batch, answer: (reply: Reply) => void): void {
    this.#running = { batch, answer };
    this.#number = (this.#number + 1) >>> 0;
    const text = requestText(batch);
    const payloadBytes = NUMBER_BYTES + Buffer.byteLength(text, "utf8");
    const frame = Buffer.allocUnsafe(HEADER_BYTES + payloadBytes);
    frame.writeUInt32LE(payloadBytes, 0);
    frame.writeUInt8(CALL, 4);
    frame.writeUInt32LE(this.#number, HEADER_BYTES);
    frame.write(text, HEADER_BYTES + NUMBER_BYTES, "utf8");
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
      // The whole group is gone already.
    }
  }

  #expel(fault: string): void {
    this.#fault ??= fault;
    this.kill();
  }

  #listen(fromChild: Readable, maxFrameBytes: number): void {
    const frames = new FrameReader(maxFrameBytes, (kind, payload) => this.#hear(kind, payload));
    fromChild.on("data", (chunk: Buffer) => {
      if (!frames.read(chunk)) this.#expel("sent too large a frame");
    });
    fromChild.on("error", () => {});
  }

  #hear(kind: number, payload: Buffer): void {
    if (this.#fault !== undefined) return;
    if (kind === READY) return this.#loaded.resolve();
    if (kind === CANNOT) return this.#loaded.reject(new Error(quote(payload.toString("utf8"), 400)));
    const running = this.#running;
    if (running === undefined || payload.length < NUMBER_BYTES || payload.readUInt32LE(0) !== this.#number) {
      return this.#expel("sent a frame that answers no call");
    }
    this.#running = undefined;
    const reply = readReply(running.batch, kind, payload);
    if (reply === undefined) this.#expel("sent a frame that cannot be read");
    else running.answer(reply);
  }

  /** Resolves when the process has ended and its pipes are read to their end. */
  #end(name: string, python: string, { clock }: Surroundings): Promise<string> {
    return new Promise((resolve) => {
      this.#process.on("error", (error: NodeJS.ErrnoException) => {
        // Also raised when a signal cannot be sent; only a child that never was has no pid.
        if (this.#process.pid !== undefined) return;
        this.#loaded.reject(new Error(cannotRun(python, error)));
        resolve("could not be started");
      });
      this.#process.on("exit", (code, signal) => {
        const how = this.#fault ?? (signal === null ? `ended with exit code ${code}` : killedBy(signal));
        // What the child has started may hold its pipes and the GPU; it goes too.
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

/** Cuts a stream of bytes into frames. */
class FrameReader {
  readonly #maxBytes: number;
  readonly #hear: (kind: number, payload: Buffer) => void;
  #chunks: Buffer[] = [];
  #bytes = 0;
  /** Payload bytes of the frame that has begun; -1 between frames. */
  #length = -1;
  #kind = 0;

  constructor(maxBytes: number, hear: (kind: number, payload: Buffer) => void) {
    this.#maxBytes = maxBytes;
    this.#hear = hear;
  }

  /** Hands on each frame that `chunk` completes; false when one is too large, and all is lost. */
  read(chunk: Buffer): boolean {
    this.#chunks.push(chunk);
    this.#bytes += chunk.length;
    for (;;) {
      if (this.#length < 0) {
        if (this.#bytes < HEADER_BYTES) return true;
        const header = this.#take(HEADER_BYTES);
        this.#length = header.readUInt32LE(0);
        this.#kind = header.readUInt8(4);
        if (this.#length > this.#maxBytes) return false;
      }
      if (this.#bytes < this.#length) return true;
      const payload = this.#take(this.#length);
      this.#length = -1;
      this.#hear(this.#kind, payload);
    }
  }

  #take(bytes: number): Buffer {
    const all = this.#chunks.length === 1 ? this.#chunks[0]! : Buffer.concat(this.#chunks);
    this.#chunks = [all.subarray(bytes)];
    this.#bytes -= bytes;
    return all.subarray(0, bytes);
  }
}

/** The reply in a frame's payload, after its number; undefined when it cannot be read. */
function readReply(batch: Batch, kind: number, payload: Buffer): Reply | undefined {
  if (kind === REJECTED) return rejected(quote(payload.toString("utf8", NUMBER_BYTES)));
  if (kind === UNUSABLE) return unusable(quote(payload.toString("utf8", NUMBER_BYTES)), BAD_OUTPUTS);
  if (kind !== OUTPUTS || payload.length < 8) return undefined;
  const count = payload.readUInt32LE(4);
  let at = 8 + 4 * count;
  if (at > payload.length) return undefined;
  const outputs: string[] = [];
  for (let index = 0; index < count; index++) {
    const end = at + payload.readUInt32LE(8 + 4 * index);
    if (end > payload.length) return undefined;
    outputs.push(payload.toString("utf8", at, end));
    at = end;
  }
  return at === payload.length ? match(batch, outputs) : undefined;
}

function cannotRun(python: string, error: NodeJS.ErrnoException): string {
  const why =
    error.code === "ENOENT"
      ? "not found"
      : error.code === "EACCES"
        ? "permission denied"
        : quote(error.message);
  return `cannot run "${python}": ${why}; install Python 3 or set backend.python`;
}

function killedBy(signal: string): string {
  return signal === "SIGKILL" ? "was killed by SIGKILL (out of memory?)" : `was killed by ${signal}`;
}

function lastLineOf(chunk: Buffer): string {
  return chunk.toString("utf8").trimEnd().split("\n").at(-1) ?? "";
}
