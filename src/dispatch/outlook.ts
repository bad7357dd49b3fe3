/**
 * What the workers of this process can do from now on, for whoever decides what to let in.
 *
 * It is asked for every request and changes with every batch, so it is kept: drawn anew when a batch started
 * or ended, and otherwise after a millisecond for every 32 workers.
 *
 * Workers differ: with S what a batch takes at the fleet's pace and r what each of n workers usually needs of that, a
 * batch takes S·n / Σ(1/r) on the average of batches, of which a fast worker runs more. They also differ in how many
 * tasks they take at once: with B seats and S(B) for each, the fleet runs Σ 1/(S·r) batches per ms, of
 * Σ B/(S·r) tasks, and a batch holds the latter over the former.
 */
import type { HandoverEstimate } from "../core/estimate.ts";
import { type Horizon, runMsOf } from "../core/shed.ts";
import type { Seats } from "./seats.ts";
import type { PoolWorker as Slot } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";

const WORKERS_PER_MS = 32;
/** Of what a batch takes, a wait may last so much longer: with batches of 50 ms and more a plain timer will do. */
const LATE_SHARE = 0.02;
/** Where batches start more often than this, the next arrival or reply is nearer than any timer. */
const OFTEN_MS = 0.5;
const SPARE_BELOW_LOAD = 0.9;
/** Before a batch has come back it is taken to need this share of what it may need. */
const FIRST_GUESS = 1 / 32;

export class Outlook {
  readonly #workers: Workers;
  readonly #seats: Seats;
  readonly #handover: HandoverEstimate;
  #maxLoad: number;
  #firstGuessMs: number;
  #last: Horizon | undefined;
  #lastAt = -Infinity;

  constructor(
    workers: Workers,
    { seats, handover }: { seats: Seats; handover: HandoverEstimate },
    maxLoad: number,
    workerMs: number,
  ) {
    this.#workers = workers;
    this.#seats = seats;
    this.#handover = handover;
    this.#maxLoad = maxLoad;
    this.#firstGuessMs = workerMs * FIRST_GUESS;
  }

  retune(maxLoad: number, workerMs: number): void {
    this.#maxLoad = maxLoad;
    this.#firstGuessMs = workerMs * FIRST_GUESS;
    this.changed();
  }

  /** A batch started or ended, or a worker was gained. */
  changed(): void {
    this.#last = undefined;
  }

  /** By how much a wait for the next batch may be too long; undefined: a plain timer will do. */
  get mayBeLateMs(): number | undefined {
    const { service, slots } = this.#workers;
    const batchMs = service.msFor(1);
    return batchMs < OFTEN_MS * slots.length ? undefined : LATE_SHARE * batchMs;
  }

  /** Whether a worker idles and takes one more beside those that wait. */
  hasRoom(waiting: number, now: number): boolean {
    if (waiting >= this.#seats.usual()) return false;
    return this.#workers.slots.some((slot) => slot.free(now) && waiting < this.#seats.usual(slot));
  }

  at(now: number): Horizon {
    const holdsMs = Math.max(1, this.#workers.slots.length / WORKERS_PER_MS);
    if (this.#last === undefined || now - this.#lastAt >= holdsMs) {
      this.#last = this.#draw(now);
      this.#lastAt = now;
    }
    return this.#last;
  }

  /** A second try costs nothing only while there is room: below 0.9 load, short queue, another worker. */
  hasSpare(waiting: number, arrivalsPerMs: number, now: number): boolean {
    const workers = this.#workers;
    if (workers.healthy(now) < 2) return false;
    let seats = 0;
    for (const slot of workers.slots) if (slot.healthy(now)) seats += this.#seats.most(slot);
    const capacity = workers.capacityPerMs((slot) => this.#seats.most(slot), now);
    return arrivalsPerMs / capacity < SPARE_BELOW_LOAD && waiting < seats / 2;
  }

  #draw(now: number): Horizon {
    const { service, surprise, slots } = this.#workers;
    const freeAt: number[] = [];
    const running: { ms: number; perMs: number }[] = [];
    /** Batches and tasks per ms; `even` is the batches if every worker had the fleet's pace. */
    let [batches, even, tasks, nominalTasks, usualMs] = [0, 0, 0, 0, 0];
    let [healthy, idle, overdue, silentMs] = [0, 0, 0, Infinity];
    for (const slot of slots) {
      if (!slot.held(now)) continue;
      const { size, ms, paceMs } = this.#batchOn(slot);
      const perMs = 1 / (paceMs * slot.usualRatio);
      nominalTasks += size * perMs;
      if (slot.silent) {
        overdue++;
        silentMs = Math.min(silentMs, now - (slot.batch?.expectedFreeAt ?? now));
      }
      if (slot.healthy(now)) healthy++;
      if (slot.free(now)) idle++;
      if (!slot.counts(now, this.#maxLoad)) continue;
      batches += perMs;
      even += 1 / paceMs;
      tasks += size * perMs;
      usualMs += ms;
      running.push({ ms: paceMs * slot.usualRatio, perMs });
      freeAt.push(slot.freeAt ?? Math.max(now, slot.circuit.usableAt));
    }
    const count = freeAt.length;
    const one = count === 0 ? this.#batchOn(slots[0]) : undefined;
    // Ratios that scatter around 1 are no faster workers: their harmonic mean lies below it by chance.
    const share = count === 0 ? 1 : Math.max(1, even / batches);
    const meanMs = one?.ms ?? usualMs / count;
    return {
      healthy,
      idle,
      overdue,
      ...(overdue > 0 && { silentMs }),
      perMs: tasks,
      guessed: service.samples === 0,
      nominalPerMs: nominalTasks,
      batchSize: one?.size ?? tasks / batches,
      batchMs: (one?.paceMs ?? count / even) * share,
      runMs: one?.paceMs ?? runMsOf(running),
      deviationMs: Math.max(service.deviationMs, surprise.share * meanMs) * share,
      freeAt: freeAt.sort((early, late) => early - late),
      nextUsableAt: this.#workers.nextUsableAt(now),
    };
  }

  /** A batch of the usual size on a worker of the fleet's pace; what lies between two of them is part of the pace. */
  #batchOn(slot?: Slot): { size: number; ms: number; paceMs: number } {
    const { service, surprise } = this.#workers;
    const size = this.#seats.usual(slot);
    const ms = service.samples === 0 ? this.#firstGuessMs : service.msFor(size);
    return { size, ms, paceMs: ms * surprise.factor + this.#handover.ms };
  }
}
