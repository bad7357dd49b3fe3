/**
 * Whether a worker is given its next batch while it still runs one, and when that one is bound.
 *
 * Between a worker's reply and the begin of its next batch the worker idles: the reply is read, a batch is chosen, claimed and
 * sent. With batches of 5 ms and a busy process that is a quarter of the worker's time.
 *
 *   1      never
 *   2      always, whatever the worker is: also a server behind HTTP or gRPC, which queues
 *   auto   workers that queue by contract, and while it pays:
 *            on   when  gap > 5 % of S(n),  n the usual batch
 *            off  when  gap < 2.5 % of it
 *
 *   gap    from a worker's reply to the begin of its next batch (as it reports, or else the call), learned only where that
 *          batch left at the reply because work was waiting. An exponentially weighted mean (weight 0.1; the first weigh
 *          1/count), each sample clipped to four times the mean; eight are needed. A batch that was bound early has
 *          no gap, so while `auto` is on every 128th batch of a worker leaves at the reply: less than 1 % of
 *          them, so that p99 does not show it.
 *   lead   gap + 2 mean deviations of it: so long before its worker is expected to be free an early batch has to leave.
 *
 * A batch that is bound early can no longer be joined, cancelled or overtaken. So a batch is bound early
 *   - at once when it is full: waiting would change who is in it, and nothing else;
 *   - otherwise at (expected end − lead), and only if the policy would send it at that end, with this worker idle;
 *   - never while another worker is free: it goes there;
 *   - never behind a batch that is late (1.5 times what was expected) or being bisected, nor on a worker that is on trial,
 *     unwell or leaving;
 *   - never where it, or the one before it, may hold the input that ended a worker: that is tried alone;
 *   - on a worker that others list too only if it will be done while our lease surely holds.
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

/** A mean and how far samples are from it, in milliseconds. */
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

  /** How many batches a worker may have at once. */
  depth({ worker }: PoolWorker): 1 | 2 {
    const mode = this.#mode;
    if (mode !== "auto") return mode;
    return this.#pays && worker.queues === true ? 2 : 1;
  }

  get leadMs(): number {
    return this.gap.ms + LEAD_DEVIATIONS * this.gap.deviationMs;
  }

  /** A batch began so long after its worker's reply, with work waiting; the usual one takes `serviceMs`. */
  learn(gapMs: number, serviceMs: number): void {
    this.gap.learn(gapMs);
    if (!this.gap.settled || !this.#workers.service.settled) return;
    this.#pays = this.gap.ms > (this.#pays ? OFF_BELOW : ON_ABOVE) * serviceMs;
  }

  /** The worker that will be free first of those that may be given a batch behind the one they run. */
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

  /** From when on one that is not full may be bound to it. */
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
