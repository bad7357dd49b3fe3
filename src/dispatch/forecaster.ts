/**
 * What the workers of this process can do from now on, for admission.
 *
 * It is asked for every request and changes with every batch, so it is kept: made anew when a batch started
 * or ended, and otherwise after a millisecond for every 32 workers.
 *
 * Workers differ: with S what a batch takes at the fleet's pace and r what each of n workers usually needs of that, a
 * batch takes S·n / Σ(1/r) on the average of batches, of which a fast worker runs more. They also differ in how many
 * tasks they take at once: with B tasks and S(B) for each, the fleet runs Σ 1/(S·r) batches per ms, of
 * Σ B/(S·r) tasks, and a batch holds the latter over the former.
 */
import { type Horizon, runMsOf } from "../core/shed.ts";
import type { BatchCapacity } from "./capacity.ts";
import type { ModelRules } from "./model-rules.ts";
import type { PoolWorker } from "../workers/worker.ts";
import type { Workers } from "../workers/workers.ts";

const WORKERS_PER_MS = 32;
/** Of what a batch takes, a wait may last so much longer: with batches of 50 ms and more a plain timer will do. */
const LATE_SHARE = 0.02;
/** Where batches start more often than this, the next arrival or reply is nearer than any timer. */
const OFTEN_MS = 0.5;
const SPARE_BELOW_LOAD = 0.9;
/** Before a batch has come back it is taken to need this share of `workerMs`. */
const FIRST_GUESS = 1 / 32;
const HANDOVER_WEIGHT = 0.1;

export class Forecaster {
  readonly #rules: () => ModelRules;
  readonly #workers: Workers;
  readonly #capacity: BatchCapacity;
  /** What usually passes between the choice of a batch and its call: with an engine that is far away, its answer. */
  handoverMs = 0;
  #last: Horizon | undefined;
  #lastAt = -Infinity;

  constructor(rules: () => ModelRules, workers: Workers, capacity: BatchCapacity) {
    this.#rules = rules;
    this.#workers = workers;
    this.#capacity = capacity;
  }

  learnHandover(ms: number): void {
    this.handoverMs += HANDOVER_WEIGHT * (ms - this.handoverMs);
  }

  /** A batch started or ended, or the workers or rules changed. */
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
    const capacity = this.#capacity;
    if (waiting >= capacity.usual()) return false;
    return this.#workers.slots.some((slot) => slot.free(now) && waiting < capacity.usual(slot));
  }

  at(now: number): Horizon {
    const holdsMs = Math.max(1, this.#workers.slots.length / WORKERS_PER_MS);
    if (this.#last === undefined || now - this.#lastAt >= holdsMs) {
      this.#last = this.#make(now);
      this.#lastAt = now;
    }
    return this.#last;
  }

  /** A second try costs nothing only while there is room: below 0.9 load, short queue, another worker. */
  hasSpare(waiting: number, arrivalsPerMs: number, now: number): boolean {
    const [workers, capacity] = [this.#workers, this.#capacity];
    if (workers.healthy(now) < 2) return false;
    let places = 0;
    for (const slot of workers.slots) if (slot.healthy(now)) places += capacity.most(slot);
    const perMs = workers.capacityPerMs((slot) => capacity.most(slot), now);
    return arrivalsPerMs / perMs < SPARE_BELOW_LOAD && waiting < places / 2;
  }

  #make(now: number): Horizon {
    const { service, surprise, slots } = this.#workers;
    const { maxWorkerLoad = 1 } = this.#rules();
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
      if (!slot.counts(now, maxWorkerLoad)) continue;
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
  #batchOn(slot?: PoolWorker): { size: number; ms: number; paceMs: number } {
    const { service, surprise } = this.#workers;
    const size = this.#capacity.usual(slot);
    const ms = service.samples === 0 ? this.#rules().workerMs * FIRST_GUESS : service.msFor(size);
    return { size, ms, paceMs: ms * surprise.factor + this.handoverMs };
  }
}
