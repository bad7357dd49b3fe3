/**
 * Whether a worker gets its next batch while it still runs one, and when that one is bound. Between a reply and the
 * next batch the worker idles while a batch is chosen, claimed and sent: with batches of 5 ms and a busy process a
 * quarter of its time.
 *
 *   1      never
 *   2      always, for any worker: also an HTTP or gRPC server, which queues
 *   auto   workers that queue by contract: on when gap > 5 % of S(n), n the usual batch; off when gap < 2.5 % of it
 *
 *   gap    from a reply to the begin of the worker's next batch (as reported, else the call), learned only where work
 *          was waiting at the reply. Exponential mean (weight 0.1; the first weigh 1/count), samples clipped to four
 *          times the mean; eight are needed. An early batch has no gap, so under `auto` every 128th batch of a worker
 *          leaves at the reply: less than 1 %, so that p99 does not show it.
 *   lead   gap + 2 mean deviations: how long before the worker is expected to be free an early batch must leave.
 *
 * An early batch can no longer be joined, cancelled or overtaken. So a batch is bound early
 *   - at once when full: waiting would only change which tasks are in it;
 *   - otherwise at (expected end − lead), and only if the policy would send it at that end, with this worker idle;
 *   - never while another worker is free: it goes there;
 *   - never behind a batch that is late (1.5 times the expectation) or bisected, nor on a trial, unwell or leaving worker;
 *   - never where it, or the one before it, may hold an input that killed a worker: that is tried alone;
 *   - on a shared worker only if it will be done while our lease surely holds.
 */
import type { PoolWorker } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";
import type { ModelRules } from "./model-rules.ts";

export type PipelineMode = "auto" | 1 | 2;

const ON_ABOVE = 0.05;
const OFF_BELOW = 0.025;
const WEIGHT = 0.1;
const ENOUGH_SAMPLES = 8;
const CLIP = 4;
const LEAD_DEVIATIONS = 2;
const MEASURE_EVERY = 128;
const LATE = 1.5;

/** Mean and mean deviation, in milliseconds. */
export class GapEstimate {
  #samples = 0;
  ms = 0;
  deviationMs = 0;

  get settled(): boolean {
    return this.#samples >= ENOUGH_SAMPLES;
  }

  learn(ms: number): void {
    const sample = this.settled && this.ms > 0 ? Math.min(ms, CLIP * this.ms) : ms;
    this.#samples++;
    const weight = Math.max(WEIGHT, 1 / this.#samples);
    if (this.#samples > 1) this.deviationMs += weight * (Math.abs(sample - this.ms) - this.deviationMs);
    this.ms += weight * (sample - this.ms);
  }
}

export class Pipeline {
  readonly #rules: () => Pick<ModelRules, "pipeline">;
  readonly gap = new GapEstimate();
  readonly #workers: Workers;
  #pays = false;

  constructor(rules: () => Pick<ModelRules, "pipeline">, workers: Workers) {
    this.#rules = rules;
    this.#workers = workers;
  }

  get #mode(): PipelineMode {
    return this.#rules().pipeline ?? "auto";
  }

  depth({ worker }: PoolWorker): 1 | 2 {
    const mode = this.#mode;
    if (mode !== "auto") return mode;
    return this.#pays && worker.queues === true ? 2 : 1;
  }

  get leadMs(): number {
    return this.gap.ms + LEAD_DEVIATIONS * this.gap.deviationMs;
  }

  /** `gapMs` from a reply to the next batch, with work waiting; the usual batch takes `serviceMs`. */
  learn(gapMs: number, serviceMs: number): void {
    this.gap.learn(gapMs);
    if (!this.gap.settled || !this.#workers.service.settled) return;
    this.#pays = this.gap.ms > (this.#pays ? OFF_BELOW : ON_ABOVE) * serviceMs;
  }

  /** The worker that will be free first of all that may get an early batch. */
  next(now: number): PoolWorker | undefined {
    const mode = this.#mode;
    if (mode === 1 || (mode === "auto" && !this.#pays)) return undefined;
    let next: PoolWorker | undefined;
    for (const slot of this.#workers.slots) {
      if (!this.#takesOneMore(slot, now)) continue;
      if (next === undefined || slot.batch!.expectedFreeAt < next.batch!.expectedFreeAt) next = slot;
    }
    return next;
  }

  /** From when a batch that is not full may be bound. */
  bindAt({ batch }: PoolWorker): number {
    return this.#workers.service.settled ? batch!.expectedFreeAt - this.leadMs : Infinity;
  }

  #takesOneMore(slot: PoolWorker, now: number): boolean {
    const { batch, circuit } = slot;
    if (batch === undefined || slot.ahead !== undefined || batch.exclusive) return false;
    if (batch.state !== "sent" && batch.state !== "running") return false;
    if (this.depth(slot) < 2 || circuit.probing || circuit.usableAt > now) return false;
    if (!slot.takesBatches(now) || !slot.healthy(now)) return false;
    if (this.#mode === "auto" && slot.earlyInRow >= MEASURE_EVERY - 1) return false;
    const tookMs = batch.expectedFreeAt - batch.startedAt;
    if (now > batch.startedAt + LATE * tookMs) return false;
    return slot.lease.until === Infinity || slot.held(batch.freeIf(Math.max(now, batch.expectedFreeAt)));
  }
}
