/**
 * Workers that are a JavaScript or TypeScript function, each in its own worker thread.
 *
 *   export default async function (inputs, { parameters }) { return outputs; }
 *
 * `function: model.ts` is the default export, `model.ts:name` a named one. It returns one output per input, in order. A
 * throw is `rejected`; what JSON cannot hold (undefined, a function, NaN, a BigInt, a cycle) is `unusable`, because
 * JSON.stringify would turn half of that into null. An abort terminates the thread, which also ends an endless loop.
 */
import { Worker as Thread } from "node:worker_threads";
import type { Batch } from "./backend.ts";
import {
  type BatchListener,
  type Child,
  type ChildAround,
  ChildBackend,
  firstNumbers,
  printLines,
} from "./child-workers.ts";
import type { ThreadCall, ThreadFunction, ThreadReport } from "./module-worker.ts";
import { badOutputs, match, quote, rejected } from "./replies.ts";

export interface ModuleOptions {
  /** `/abs/model.ts` (default export) or `/abs/model.ts:name`. */
  readonly function: string;
  readonly workers: number;
  /** Worker numbers at the start; default: from 1. */
  readonly numbers?: readonly number[] | undefined;
  readonly startTimeoutMs: number;
}

/** .ts in a checkout, .js in a build, like this file. */
const THREAD_FILE = new URL(`module-worker${import.meta.url.slice(-3)}`, import.meta.url);

export class ModuleBackend extends ChildBackend {
  constructor(options: ModuleOptions, around: ChildAround) {
    const { workers, startTimeoutMs, numbers = firstNumbers(workers) } = options;
    const what = exportOf(options.function);
    const spawn = (name: string): Child => new ModuleChild(name, what, around);
    super({ kind: "module", numbers, startTimeoutMs, spawn }, around);
  }
}

class ModuleChild implements Child {
  readonly #loaded = Promise.withResolvers<void>();
  readonly ready = this.#loaded.promise;
  readonly gone: Promise<string>;
  lastWords: string | undefined;
  readonly #thread: Thread;
  #number = 0;
  /** By call number. */
  readonly #running = new Map<number, { readonly batch: Batch; readonly listener: BatchListener }>();

  constructor(name: string, what: ThreadFunction, around: ChildAround) {
    this.#thread = new Thread(THREAD_FILE, { workerData: what, stdout: true, stderr: true });
    printLines(this.#thread.stdout, "stdout", name, around);
    printLines(this.#thread.stderr, "stderr", name, around);
    this.#thread.on("message", (said: unknown) => {
      if (isReport(said)) this.#hear(said);
    });
    this.gone = new Promise((resolve) => {
      let died: string | undefined;
      this.#thread.on("error", (error: unknown) => {
        const named = error instanceof Error;
        died = `died of ${named ? quote(error.name, 60) : "something that is no Error"}`;
        this.lastWords = quote(named ? error.message : String(error));
      });
      this.#thread.on("exit", (code) => {
        const how = died ?? `ended with exit code ${code}`;
        this.#loaded.reject(new Error(`${name} ${how} before it was ready`));
        resolve(how);
      });
    });
  }

  run(batch: Batch, listener: BatchListener): void {
    const number = ++this.#number;
    this.#running.set(number, { batch, listener });
    const call: ThreadCall = {
      number,
      inputs: `[${batch.tasks.map((task) => task.input).join(",")}]`,
      parameters: batch.parameters,
    };
    this.#thread.postMessage(call);
  }

  close(): void {
    this.kill();
  }

  kill(): void {
    void this.#thread.terminate();
  }

  #hear(report: ThreadReport): void {
    if (report.kind === "ready") return this.#loaded.resolve();
    if (report.kind === "cannot") return this.#loaded.reject(new Error(quote(report.message, 400)));
    const running = this.#running.get(report.number);
    if (running === undefined) return;
    const { batch, listener } = running;
    if (report.kind === "begun") return listener.begun();
    this.#running.delete(report.number);
    if (report.kind === "outputs") listener.answer(match(batch, report.outputs));
    else if (report.kind === "rejected") listener.answer(rejected(quote(report.message)));
    else listener.answer(badOutputs(report.message));
  }
}

/** User code may post its own messages. */
function isReport(said: unknown): said is ThreadReport {
  if (typeof said !== "object" || said === null || !("kind" in said)) return false;
  const { kind, outputs, message } = said as Record<string, unknown>;
  if (kind === "outputs")
    return Array.isArray(outputs) && outputs.every((output) => typeof output === "string");
  if (kind === "cannot" || kind === "rejected" || kind === "unusable") return typeof message === "string";
  return kind === "ready" || kind === "begun";
}

function exportOf(text: string): ThreadFunction {
  // A colon after the file's extension names an export; any other is part of the path.
  const named = /^(?<file>.*\.[cm]?[jt]s):(?<name>[^/:]+)$/.exec(text)?.groups;
  return named === undefined
    ? { file: text, name: "default" }
    : { file: named["file"]!, name: named["name"]! };
}
