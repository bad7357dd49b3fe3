/** What the card does meanwhile: by nvidia-smi, and by the worker's own account (`GPU_BUSY_FILE` of models.py). */
import { type ChildProcess, spawn } from "node:child_process";
import { readFileSync } from "node:fs";

/** Not often: each question holds up those who start kernels. */
const SAMPLE_MS = 2000;

export class Card implements Disposable {
  readonly #busyFile: string;
  readonly #samples: number[] = [];
  readonly #smi: ChildProcess;
  #secondsAtStart = NaN;
  #startedAt = 0;

  constructor(busyFile: string) {
    this.#busyFile = busyFile;
    const query = ["--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", String(SAMPLE_MS)];
    this.#smi = spawn("nvidia-smi", query, { stdio: ["ignore", "pipe", "ignore"] });
    this.#smi.on("error", () => {}); // there is none: what is not measured is NaN
    this.#smi.stdout?.setEncoding("utf8").on("data", (text: string) => {
      for (const line of text.split("\n")) if (/^\d+$/.test(line.trim())) this.#samples.push(Number(line));
    });
  }

  start(): void {
    this.#samples.length = 0;
    this.#secondsAtStart = this.#seconds();
    this.#startedAt = performance.now();
  }

  /** Shares since the start: of the time in which kernels ran, as nvidia-smi sees it, and in which there was a batch. */
  read(): { readonly kernels: number; readonly batches: number } {
    const sum = this.#samples.reduce((all, each) => all + each, 0);
    const elapsed = (performance.now() - this.#startedAt) / 1000;
    return {
      kernels: sum / this.#samples.length / 100,
      batches: (this.#seconds() - this.#secondsAtStart) / elapsed,
    };
  }

  #seconds(): number {
    try {
      return readFileSync(this.#busyFile).readDoubleLE(0);
    } catch {
      return NaN;
    }
  }

  [Symbol.dispose](): void {
    this.#smi.kill();
  }
}
