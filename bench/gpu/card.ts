/** What the card does meanwhile: by nvidia-smi, and by the worker's own account (`GPU_BUSY_FILE`, common.py). */
import { type ChildProcess, spawn } from "node:child_process";
import { readFileSync } from "node:fs";

/** Not often: each question holds up those who start kernels. */
const SAMPLE_MS = 2000;

interface Totals {
  readonly seconds: number;
  readonly cells: number;
  readonly tokens: number;
}

const NONE: Totals = { seconds: NaN, cells: NaN, tokens: NaN };

export class Card implements Disposable {
  readonly #busyFile: string;
  readonly #samples: number[] = [];
  readonly #smi: ChildProcess;
  #atStart: Totals = NONE;
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
    this.#atStart = this.#totals();
    this.#startedAt = performance.now();
  }

  /**
   * Since the start, the shares of time in which kernels ran, as nvidia-smi sees it, and in which there was a batch; where
   * the worker counts them, computed over useful cells, and useful cells per second.
   */
  read(): {
    readonly kernels: number;
    readonly batches: number;
    readonly padding: number;
    readonly tokensPerSecond: number;
  } {
    const { seconds, cells, tokens } = this.#totals();
    const from = this.#atStart;
    const sum = this.#samples.reduce((all, each) => all + each, 0);
    const elapsed = (performance.now() - this.#startedAt) / 1000;
    return {
      kernels: sum / this.#samples.length / 100,
      batches: (seconds - from.seconds) / elapsed,
      padding: (cells - from.cells) / (tokens - from.tokens),
      tokensPerSecond: (tokens - from.tokens) / elapsed,
    };
  }

  #totals(): Totals {
    try {
      const bytes = readFileSync(this.#busyFile);
      const [seconds, cells, tokens] = [0, 8, 16].map((at) => bytes.readDoubleLE(at));
      return { seconds: seconds!, cells: cells!, tokens: tokens! };
    } catch {
      return NONE;
    }
  }

  [Symbol.dispose](): void {
    this.#smi.kill();
  }
}
