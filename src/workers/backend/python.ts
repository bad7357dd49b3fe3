/**
 * Workers that are a Python function: `model.py:batchstring`, one child process per worker.
 *
 * The child runs `ferry_worker.py`, which imports the user's file unchanged and calls
 * `batchstring(inputs)` (or `batchstring(inputs, parameters=…)`) once per batch; `async def` works too.
 * Batches and outputs go over two sockets of their own, fd 3 to the child and fd 4 from it, so that
 * whatever the user's code prints is only printed (`worker.printed`). A frame on either:
 *
 *   u32 LE   length of the payload
 *   u8       kind
 *   payload
 *
 *   to the child    1 call      u32 number, then JSON text {"inputs":[…]}, with "parameters" or without
 *                   10 arrays   the same where inputs are arrays: `python-inputs.ts`
 *   from the child  2 ready     empty: the file is imported, calls may come
 *                   3 cannot    UTF-8 text: why the file or the function cannot be used
 *                   4 outputs   u32 number, u32 count, count × u32 length, then the JSON texts
 *                   5 rejected  u32 number, UTF-8 text: the function raised this
 *                   6 unusable  u32 number, UTF-8 text: what it returned is no list of outputs
 *                   7 rows      u32 number, u32 count, u8 type, u8 dimensions, dimensions × u32 of one row, then
 *                               count rows of that type and shape, one block
 *                   8 mixed     u32 number, u32 count, count × (u8 type, u8 dimensions, u32 length,
 *                               dimensions × u32), then the outputs one behind the other
 *                   9 begun     u32 number: the function is about to be called with it
 *
 * All numbers are little-endian. A type is 0 for JSON text, 1 for bytes, and from 2 on a place in `DTYPES`.
 *
 * The number of a reply is the number of its call, and replies come in the order of their calls; anything else on fd 4
 * is foreign and ends the child. A second call may be on its way while the child runs one: it is read and parsed there
 * when the function returns. What a function may return, and which thread does what, stands in `ferry_worker.py`.
 *
 * The child leads a process group of its own: Ctrl-C at Ferry's terminal does not reach it while Ferry
 * drains, and ending the child also ends what it has started itself. `restart.ts` decides what follows.
 */
import { type ChildProcess, spawn } from "node:child_process";
import type { Readable, Writable } from "node:stream";
import { fileURLToPath } from "node:url";
import type { Batch } from "./backend.ts";
import { printLines } from "./lines.ts";
import { quote, rejected, requestText } from "./match.ts";
import { firstNumbers } from "./names.ts";
import { callFrame, FRAME, FrameReader, NUMBER_BYTES, readReply } from "./python-frames.ts";
import { arraysFrame, type InputKind } from "./python-inputs.ts";
import type { Child, Ear, Surroundings } from "./restart.ts";
import { RestartingWorkers } from "./restarting-workers.ts";

export interface PythonOptions {
  /** `/abs/model.py:function`. */
  readonly function: string;
  readonly workers: number;
  /** Of those at the start; left out: from 1 on. */
  readonly numbers?: readonly number[] | undefined;
  /** The interpreter to run. */
  readonly python: string;
  /** What its inputs become there; left out: whatever JSON they are. */
  readonly inputs?: InputKind;
  /** Comma-separated; worker i sees the i-th, counted round. Left out: every worker sees them all. */
  readonly gpus?: string;
  readonly startTimeoutMs: number;
  readonly maxReplyBytes: number;
}

const WORKER_FILE = fileURLToPath(new URL("ferry_worker.py", import.meta.url));
/** Beside the outputs' own bytes, which the child counts: their lengths, or a text. */
const FRAME_EXTRA_BYTES = 1 << 20;
/** How long the pipes of an ended child may stay open, should something it started still hold them. */
const LAST_WORDS_MS = 100;

export class PythonBackend extends RestartingWorkers {
  constructor(options: PythonOptions, around: Surroundings) {
    const { workers, startTimeoutMs, numbers = firstNumbers(workers) } = options;
    const bear = (name: string, number: number): Child =>
      new PythonChild(name, options, environment(options, number - 1), around);
    super({ kind: "python", numbers, startTimeoutMs, bear }, around);
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
  readonly #inputs: InputKind;
  readonly #process: ChildProcess;
  readonly #toChild: Writable;
  #number = 0;
  /** In the order of their calls. */
  readonly #running: { readonly number: number; readonly batch: Batch; readonly ear: Ear }[] = [];
  /** Why Ferry ended it, when it broke the rules. */
  #fault: string | undefined;
  /** What it last wrote on stderr before it was ready: often the reason why it never was. */
  #lastLine = "";

  constructor(name: string, options: PythonOptions, env: NodeJS.ProcessEnv, around: Surroundings) {
    this.#inputs = options.inputs ?? "json";
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

  run(batch: Batch, ear: Ear): void {
    const number = (this.#number + 1) >>> 0;
    const inputs = this.#inputs;
    const frame =
      inputs === "json" ? callFrame(number, requestText(batch)) : arraysFrame(number, batch, inputs);
    if (frame === undefined)
      return ear.answer(rejected(`the input must be a flat array of numbers (${inputs})`));
    this.#number = number;
    this.#running.push({ number, batch, ear });
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
    if (kind === FRAME.ready) return this.#loaded.resolve();
    if (kind === FRAME.cannot) return this.#loaded.reject(new Error(quote(payload.toString("utf8"), 400)));
    const number = payload.length < NUMBER_BYTES ? -1 : payload.readUInt32LE(0);
    if (kind === FRAME.begun) {
      const begun = this.#running.find((running) => running.number === number);
      return begun === undefined ? this.#expel("began with no call") : begun.ear.begun();
    }
    const [first] = this.#running;
    if (first?.number !== number) return this.#expel("sent a frame that answers no call");
    this.#running.shift();
    const reply = readReply(first.batch, kind, payload);
    if (reply === undefined) this.#expel("sent a frame that cannot be read");
    else first.ear.answer(reply);
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
