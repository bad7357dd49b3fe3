/**
 * What the workers of this process can do from now on, for whoever decides what to let in.
 *
 * It is asked for every request and changes with every batch, so it is kept: drawn anew when a batch started
 * or ended, and otherwise after a millisecond for every 32 workers.
 *
 * Workers differ: with S what a batch takes at the fleet's pace and r what each of n workers needs of that, a
 * batch takes S·n / Σ(1/r) on the average of batches, of which a fast worker runs more.
 */
import type { FillEstimate, HandoverEstimate } from "../core/estimate.ts";
import { type Horizon, runMsOf } from "../core/shed.ts";
import type { Workers } from "./workers.ts";

const WORKERS_PER_MS = 32;
/** Before a batch has come back it is taken to need this share of what it may need. */
const FIRST_GUESS = 1 / 32;

export class Outlook {
  readonly #workers: Workers;
  readonly #fill: FillEstimate;
  readonly #handover: HandoverEstimate;
  readonly #maxLoad: number;
  readonly #firstGuessMs: number;
  #last: Horizon | undefined;
  #lastAt = -Infinity;

  constructor(
    workers: Workers,
    { fill, handover }: { fill: FillEstimate; handover: HandoverEstimate },
    maxLoad: number,
    workerMs: number,
  ) {
    this.#workers = workers;
    this.#fill = fill;
    this.#handover = handover;
    this.#maxLoad = maxLoad;
    this.#firstGuessMs = workerMs * FIRST_GUESS;
  }

  /** A batch started or ended, or a worker was gained. */
  changed(): void {
    this.#last = undefined;
  }

  at(now: number): Horizon {
    const holdsMs = Math.max(1, this.#workers.slots.length / WORKERS_PER_MS);
    if (this.#last === undefined || now - this.#lastAt >= holdsMs) {
      this.#last = this.#draw(now);
      this.#lastAt = now;
    }
    return this.#last;
  }

  #draw(now: number): Horizon {
    const { service, surprise, slots } = this.#workers;
    const batchSize = Math.max(1, this.#fill.size);
    const usualMs = service.samples === 0 ? this.#firstGuessMs : service.msFor(batchSize);
    const serviceMs = usualMs * surprise.factor;
    const paceMs = serviceMs + this.#handover.ms;
    const freeAt: number[] = [];
    const running: { ms: number; perMs: number }[] = [];
    let [healthy, idle, overdue, pace, nominalPace] = [0, 0, 0, 0, 0];
    for (const slot of slots) {
      if (!slot.held(now)) continue;
      nominalPace += 1 / slot.ratio;
      if (slot.suspect) overdue++;
      if (slot.healthy(now)) healthy++;
      if (slot.free(now)) idle++;
      if (!slot.counts(now, this.#maxLoad)) continue;
      pace += 1 / slot.ratio;
      running.push({ ms: paceMs * slot.ratio, perMs: 1 / slot.ratio });
      freeAt.push(slot.batch?.expectedFreeAt ?? Math.max(now, slot.circuit.usableAt));
    }
    const perMs = batchSize / paceMs;
    // Ratios that scatter around 1 are no faster workers: their harmonic mean lies below it by chance.
    const share = pace === 0 ? 1 : Math.max(1, freeAt.length / pace);
    return {
      healthy,
      idle,
      overdue,
      perMs: pace * perMs,
      nominalPerMs: nominalPace * perMs,
      batchSize,
      batchMs: paceMs * share,
      runMs: pace === 0 ? paceMs : runMsOf(running),
      deviationMs: Math.max(service.deviationMs, surprise.share * usualMs) * share,
      freeAt: freeAt.sort((one, other) => one - other),
      nextUsableAt: this.#workers.nextUsableAt(now),
    };
  }
}
